"""What the simulation has to invent: it flows, it is never equal, and the verdict names it once."""

import json

import pytest
import torch

from onegraph.check import Verdict, check_step, declared
from onegraph.check.output import html, sarif, text
from onegraph.check.simulate.unknown import overwrites, told

LIBRARY = torch.library.Library("unknowntests", "FRAGMENT")
LIBRARY.define("scale(Tensor x, float by) -> Tensor")
LIBRARY.define("fill(Tensor(a!) out, Tensor x) -> ()")
LIBRARY.define("fill_(Tensor(a!) out, Tensor x) -> Tensor(a!)")
torch.library.register_fake("unknowntests::scale", lambda x, by: torch.empty_like(x), lib=LIBRARY)
ops = torch.ops.unknowntests


def given(i):
    return (torch.full((4,), float(i), device="cuda"),)


class Counter:
    def __init__(self):
        self.n = 0
        self.held = torch.zeros(4, device="cuda")

    def __call__(self, x):
        self.n += 1
        return self.run(x)


class Factor(Counter):
    def run(self, x):
        return ops.scale(x, 2.0) * self.n


class FactorBefore(Counter):
    def run(self, x):
        return ops.scale(x * self.n, 2.0)


class Argument(Counter):
    def run(self, x):
        return ops.scale(x, float(self.n))


class Branch(Counter):
    def run(self, x):
        y = ops.scale(x, 2.0)
        return y + 1 if self.n % 2 else y


class Written(Counter):
    def run(self, x):
        ops.fill(self.held, x)
        return self.held * self.n


class Through(Counter):
    """Unknown three ops and one step before the number meets it."""

    def run(self, x):
        out = self.held.relu() + self.n
        self.held.copy_(ops.scale(x, 2.0).softmax(0))
        return out


class State(Counter):
    def run(self, x):
        ops.fill(self.held, x)
        self.held.add_(self.n)


class Row(Counter):
    def run(self, x):
        return ops.scale(x, 2.0)[self.n % 4]


class Pointer(Counter):
    def run(self, x):
        y = torch.empty_like(x)
        y.data_ptr()
        y.zero_()  # whoever has the address may write later
        return y * self.n


class Partly(Counter):
    """A number that changes in the known half of a buffer whose other half is unknown."""

    def run(self, x):
        both = torch.zeros(8, device="cuda")
        both[:4] = self.n
        both[4:] = ops.scale(x, 2.0)
        return both


STALE = {
    Factor: "CG202", FactorBefore: "CG202", Argument: "CG202", Branch: "CG201", Written: "CG202", Through: "CG202",
    State: "CG202", Row: "CG202", Pointer: "CG202", Partly: "CG203",
}  # fmt: skip


@pytest.mark.parametrize("step", STALE)
def test_a_host_value_that_meets_what_is_unknown_is_an_error(step):
    report = check_step(lambda: (step(), given))
    first = step.run.__code__.co_firstlineno
    lines = {f.line - first for f in report.errors if f.code == STALE[step]}
    assert lines, text.render(report)
    assert lines <= set(range(1, 6))
    assert "unknown" in report.facts


class Chosen(Counter):
    """One of two unknown results of the same shape: no op shows a difference."""

    def run(self, x):
        pair = ops.scale(x, 2.0), ops.scale(x, 3.0)
        return pair[self.n % 2] * 2


def test_another_unknown_tensor_is_another_result():
    report = check_step(lambda: (Chosen(), given))
    assert [f.code for f in report.errors] == ["CG212"]


class Plain(Counter):
    def run(self, x):
        return ops.scale(x, 2.0) + 1, x.sin()


class Filled(Counter):
    def run(self, x):
        ops.fill(self.held, x)
        y = ops.fill_(torch.empty_like(x), self.held)
        self.held.copy_(x)
        return self.held + 1, y.softmax(0)


class Cleared(Counter):
    """The number changes what is unknown, of which nothing is left."""

    def run(self, x):
        ops.fill(self.held, x)
        self.held.mul_(self.n)
        self.held.copy_(x)
        return self.held + 1


class Harmless(Counter):
    """Before the kernel the number is multiplied away: the kernel is given the same."""

    def run(self, x):
        return ops.scale(x * 0 * self.n, 2.0)


class ShapeOnly(Counter):
    def run(self, x):
        return torch.zeros_like(ops.scale(x, 2.0)) * self.n


class Kept(Counter):
    """A cache: what is unknown is kept over the steps."""

    def run(self, x):
        out = (self.held @ x).sum()
        self.held[1:3] = ops.scale(x, 2.0)[1:3]
        return out


class Address(Counter):
    def run(self, x):
        assert x.data_ptr() % 2 == 0
        return x * 2


@pytest.mark.parametrize("step", [Plain, Filled, Cleared, Harmless, ShapeOnly, Kept, Address])
def test_what_is_unknown_alone_is_no_error(step):
    report = check_step(lambda: (step(), given))
    assert report.verdict is Verdict.UNVERIFIED, text.render(report)


def test_it_is_said_once_in_every_format():
    report = check_step(lambda: (Filled(), given))
    line = Filled.run.__code__.co_firstlineno + 1
    said = report.facts["unknown"]
    assert f"test_unknown.py:{line})" in said
    assert text.render(report).count("unknown to the simulation") == 1
    assert json.loads(report.to_json())["facts"]["unknown"] == said
    assert json.loads(sarif.render(report))["runs"][0]["properties"]["unknown"] == said
    assert "unknown to the simulation" in html.render(report)


def test_what_is_declared_capturable_is_unknown_all_the_same():
    with declared("unknowntests::*"):
        report = check_step(lambda: (Factor(), given))
        assert [f.code for f in report.errors] == ["CG202"]
        report = check_step(lambda: ((lambda x: ops.scale(x, 2.0) + 1), given))
    assert report.verdict is Verdict.CAPTURABLE
    assert "unknown" in report.facts


def test_a_step_of_known_ops_says_nothing_of_it():
    report = check_step(lambda: ((lambda x: x.sin()), given))
    assert "unknown" not in report.facts
    assert "unknown to the" not in text.render(report)


def test_many_sources_are_counted():
    assert told({}) == ""
    assert told({"a": "f.py:1", "b": "", "c": "", "d": "", "e": ""}).count(",") == 2
    assert " and 2 more" in told({"a": "f.py:1", "b": "", "c": "", "d": "", "e": ""})


@pytest.mark.parametrize(
    ("call", "whole"),
    [
        (("copy_.default", torch.ones(3)), True),
        (("zero_.default",), True),
        (("fill_.Scalar", 2.0), True),
        (("normal_.default",), True),
        (("mul_.Scalar", 0.0), False),  # NaN stays
        (("relu_.default",), False),
        (("masked_fill_.Scalar", torch.tensor([True, False, True]), 1.0), False),
        (("masked_fill_.Scalar", torch.tensor([True, True, True]), 1.0), True),
    ],
)
def test_what_an_op_leaves_of_its_target_is_tried(call, whole):
    packet, overload = call[0].split(".")
    func = getattr(getattr(torch.ops.aten, packet), overload)
    target = torch.ones(3)
    state = torch.get_rng_state()
    assert overwrites(func, (target, *call[1:]), {}, target) is whole
    assert torch.equal(target, torch.ones(3))
    assert torch.equal(torch.get_rng_state(), state)
    half = torch.ones(6)[:3]
    assert overwrites(func, (half, *call[1:]), {}, half) is False
