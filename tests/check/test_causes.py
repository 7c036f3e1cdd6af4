"""Consequences stand under their cause, and only they do."""

import json
from pathlib import Path
from textwrap import dedent, indent

import pytest

from onegraph.check import check_step
from onegraph.check.output import html, sarif, text
from onegraph.check.reconcile import reconcile
from onegraph.check.report import Finding, Origin, Report, Severity
from onegraph.check.targets import load

HEAD = """\
import torch


class Host:
    n = 0


def read(t):
    return t.item()


def keep(t):
    HOST.n = t.item()


def scaled(x, by, unused=0):
    y = x + 1
    return y * by


HOST = Host()
COUNT = [0]
"""
TAIL = """
    def inputs(i):
        return torch.ones(4, device="cuda"), torch.full((), i * i + i + 2, device="cuda")

    return step, inputs
"""


def checked(body: str, folder: Path) -> Report:
    path = folder / "steps.py"
    step = "def factory():\n    def step(x, at):\n" + indent(dedent(body), " " * 8)
    path.write_text(f"{HEAD}\n\n{step}\n{TAIL}")
    return check_step(load(f"{path}:factory").factory)


def codes(findings) -> list[str]:
    return sorted(f.code for f in findings)


@pytest.mark.parametrize(
    "body",
    [
        "n = at.item()\nreturn x * n",
        "n = at.item()\nm = 3 * n + 1\nreturn x * m",
        "n = read(at)\nreturn scaled(x, n)",
        "n = read(at)\nreturn scaled(x, by=n % 7)",
        "keep(at)\nreturn x * HOST.n",
        "n, m = 1, at.item()\nreturn x * m",
        "if (n := at.item()) == 0:\n    x = x + 1\nreturn x * n",
        "return scaled(x, at.item())",
    ],
)
def test_what_a_read_number_does_follows_from_the_read(body, tmp_path):
    report = checked(body, tmp_path)
    assert codes(report.counted) == ["CG101"]
    (cause,) = report.counted
    assert "CG202" in codes(report.following(cause)) or "baked into" in cause.message
    assert json.loads(report.to_json())["counts"]["error"] == 1


@pytest.mark.parametrize(
    "body",
    [
        "COUNT[0] += 1\nn = at.item()\ny = x + n\nreturn x * COUNT[0], y",
        "COUNT[0] += 1\nn = at.item()\ny = x + n\nn = COUNT[0]\nreturn y * n",
        "COUNT[0] += 1\nn = read(at)\ny = x + n\nreturn scaled(y, COUNT[0], n)",
    ],
)
def test_another_number_stands_on_its_own(body, tmp_path):
    errors = codes(checked(body, tmp_path).errors)
    assert errors == ["CG101", "CG202"]


def test_a_branch_on_a_read_number_follows_from_it(tmp_path):
    report = checked("n = read(at)\nif n > 5:\n    x = x + 1\nreturn x * 2", tmp_path)
    assert codes(report.counted) == ["CG101"]
    assert codes(report.findings) == ["CG101", "CG201"]


def test_an_op_that_nothing_looks_into_counts_once(tmp_path):
    path = tmp_path / "ops.py"
    path.write_text(
        dedent(
            """
            import torch

            lib = torch.library.Library("onegraph_causes", "FRAGMENT")
            lib.define("twice(Tensor x) -> Tensor")
            lib.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")


            def factory():
                def step(x):
                    y = torch.ops.onegraph_causes.twice(x)
                    return torch.ops.onegraph_causes.twice(y)

                return step, lambda i: (torch.full((4,), float(i), device="cuda"),)
            """
        )
    )
    report = check_step(load(f"{path}:factory").factory)
    assert codes(report.findings) == ["CG401", "CG401"]
    (first,) = report.counted
    assert [f.line for f in report.following(first)] == [first.line + 1]


def test_a_consequence_counts_where_its_cause_is_gone(tmp_path):
    report = checked("n = at.item()\nm = n + 1\nreturn x * m", tmp_path)
    assert report.select(ignore=["CG101"]).exit_code() == 1
    assert codes(report.select(ignore=["CG101"]).errors) == ["CG202"]


def test_every_form_shows_consequences_under_the_cause(tmp_path):
    report = checked("n = at.item()\nm = n + 1\nreturn x * m", tmp_path)
    (cause,) = report.counted
    (other,) = report.following(cause)
    shown = text.render(report)
    assert f"follows from it: line {other.line}: CG202" in " ".join(shown.split())
    assert "(1 error, 1 more that follows)" in shown
    (result,) = json.loads(sarif.render(report))["runs"][0]["results"]
    assert result["relatedLocations"][0]["physicalLocation"]["region"]["startLine"] == other.line
    assert f'"follows":"CG101 at {cause.path}:{cause.line}"' in html.render(report)
    assert Report.from_json(report.to_json()).findings == report.findings


def finding(code: str, origin: Origin, line: int) -> Finding:
    return Finding(
        code=code,
        severity=Severity.ERROR,
        origin=origin,
        path="/a.py",
        line=line,
        message="m",
        happens="silently stale",
    )


def test_what_reading_proves_to_change_explains_a_replay_that_differs():
    found = finding("CG202", Origin.SOURCE, 3), finding("CG212", Origin.SIMULATE, 1)
    report = Report(target="t", findings=found, origins=(Origin.SOURCE, Origin.SIMULATE), steps=4)
    told = reconcile(report)
    assert [(f.code, f.severity) for f in told.counted] == [("CG202", Severity.ERROR)]
    alone = reconcile(Report(target="t", findings=found[1:], origins=report.origins, steps=4))
    assert codes(alone.errors) == ["CG212"]


BEFORE = "state = torch.ones(9, device='cuda')\nkept = {'n': 0, 'h': torch.zeros(4, device='cuda')}\n"


def built(body: str, folder: Path, before: str = BEFORE) -> Report:
    """As `checked`, with state that the factory makes: `kept`, and a module `net`."""
    path = folder / "steps.py"
    made = before + "net = torch.nn.Linear(4, 4).to('cuda')\n\n\ndef step(x, at):\n" + indent(dedent(body), " " * 4)
    path.write_text(f"{HEAD}\n\ndef factory():\n{indent(made, ' ' * 4)}\n{TAIL}")
    return check_step(load(f"{path}:factory").factory)


@pytest.mark.parametrize(
    ("body", "code", "line", "other"),
    [
        pytest.param(
            "kept['n'] += 1\nt = state[: kept['n']]\nn = len(t)\nreturn torch.arange(n, device='cuda').sum() + t.sum()",
            "CG202", "t = state[: kept['n']]", "return torch.arange", id="size-of-what-changed",
        ),
        pytest.param(
            "kept['n'] += 1\nloss = (net(x) * (kept['n'] * 0.3)).sum()\nloss.backward()\nreturn loss.detach()",
            "CG202", "loss = (net", "loss.backward()", id="backward",
        ),
        pytest.param(
            "y = x * 2\nfor i in range(2):\n    if at > 5 * i:\n        y = y + 1\n    y = y * 2\nreturn y",
            "CG108", "if at >", "for i in", id="loop-around-a-branch",
        ),
    ],
)  # fmt: skip
def test_what_ops_and_branches_explain_is_no_error_of_its_own(body, code, line, other, tmp_path):
    report = built(body, tmp_path)
    assert [(f.code, f.source.strip().startswith(line)) for f in report.errors] == [(code, True)]
    assert all(f.follows is None or f.follows.code == code for f in report.findings)
    if other != "for i in":
        assert other in {f.source.strip()[: len(other)] for f in report.findings if f.follows is not None}


def test_a_number_of_the_host_beside_a_changed_shape_stands_on_its_own(tmp_path):
    report = built("kept['n'] += 1\nt = state[: kept['n']]\nreturn t.sum() * (kept['n'] + 0.5)", tmp_path)
    assert codes(report.errors) == ["CG202", "CG202"]


def test_one_storage_bound_anew_is_one_error_at_the_first_line_that_uses_it(tmp_path):
    report = built(
        "y = x + HOST.h\nHOST.h = HOST.h * 2 + x\nreturn y", tmp_path, before="HOST.h = torch.zeros(4, device='cuda')\n"
    )
    (error,) = report.errors
    assert error.code in ("CG205", "CG206", "CG209")
    assert error.source.strip() == "y = x + HOST.h"
    assert {f.source.strip() for f in report.following(error)} <= {"HOST.h = HOST.h * 2 + x"}


GUARDS = """\
import torch


class Suppress:
    def __init__(self, rounds):
        self.rounds, self.seen = rounds, 0

    def apply(self, x):
        if self.seen < self.rounds:
            x = x.clone()
            x[:2] = 0
        return x

    def update(self):
        self.seen += 1


class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4, device="cuda") for _ in range(4))
        self.calls = 0

    def chosen(self):
        self.calls += 1
        for i, layer in enumerate(self.layers):
            if (self.calls + i) % 3:
                yield layer

    def forward(self, x):
        for layer in self.chosen():
            x = layer(x)
        return x


def through_a_list():
    guards = [Suppress(2), Suppress(100)]

    def step(x):
        for guard in guards:
            x = guard.apply(x)
        for guard in guards:
            guard.update()
        return x * 2

    return step, lambda i: (torch.full((4,), 1.0 + i, device="cuda"),)


def layers():
    net = Layers()
    return net, lambda i: (torch.full((4,), 1.0 + i, device="cuda"),)


def one_number_twice():
    count = [0]

    def step(x, y):
        count[0] += 1
        n = count[0]
        z = x * n
        w = y / n
        return z + w * (n + 1)

    return step, lambda i: (torch.full((4,), 1.0 + i, device="cuda"), torch.ones(4, device="cuda"))
"""


@pytest.fixture
def guards(tmp_path):
    path = tmp_path / "guards.py"
    path.write_text(GUARDS)
    return lambda name: check_step(load(f"{path}:{name}").factory)


@pytest.mark.usefixtures("whole_scan")
def test_where_a_path_parts_is_the_condition_that_changes_not_the_loop_around_its_call(guards):
    report = guards("through_a_list")
    (error,) = report.errors
    assert (error.code, error.source.strip()) == ("CG201", "if self.seen < self.rounds:")
    assert not [f for f in report.findings if "in none of the" in f.message]


def test_tensors_of_a_loop_that_goes_through_others_follow_from_it(guards):
    report = guards("layers")
    (error,) = report.errors
    assert (error.code, error.source.strip()) == ("CG201", "for layer in self.chosen():")
    assert "CG205" in {f.code for f in report.following(error)}


def test_one_number_in_two_ops_is_told_once_and_another_made_of_it_apart(guards):
    report = guards("one_number_twice")
    assert [f.source.strip() for f in report.errors] == ["z = x * n", "return z + w * (n + 1)"]
    assert [f.source.strip() for f in report.following(report.errors[0])] == ["w = y / n"]


ONE_CAUSE = """\
import torch


def ones(*shape):
    return torch.ones(*shape, device="cuda")


def fewer_rows():
    '''A number cuts a tensor: the same number, and sizes that it gave, are no errors of their own.'''
    count, state = [4], ones(4, 2)

    def step(x):
        count[0] -= 1
        rows = x[: count[0]]
        state[: count[0]] += rows
        return torch.arange(rows.shape[0], device=x.device).sum() + state[: count[0]].sum()

    return step, lambda i: (ones(4, 2) * i,)


def pieces():
    '''A loop goes over the pieces that a number cut.'''
    count = [0]

    def step(x):
        count[0] += 1
        parts = x.split([count[0], 8 - count[0]] if count[0] < 3 else [8])
        return torch.cat([part.cumsum(0) for part in parts])

    return step, lambda i: (ones(8) * i,)


class Cache:
    def __init__(self):
        self.keys, self.used = ones(2, 4), 0

    def push(self, key):
        if self.used == 3:
            self.keys = torch.cat((self.keys, self.keys))
        self.used += 1
        self.keys[0] = key


def attend(query, keys):
    return (keys @ query).sum()


def doubles():
    '''What a branch binds is read in another function.'''
    cache = Cache()

    def step(x):
        cache.push(x)
        return attend(x, cache.keys)

    return step, lambda i: (ones(4) * i,)


def two_causes():
    '''A number that shapes nothing explains no other one.'''
    count = [1]

    def step(x):
        count[0] += 1
        y = x * count[0]
        return y[: count[0] * 2].sum()

    return step, lambda i: (ones(64) * i,)


def picks():
    turn, both = [0], (ones(4), ones(4) * 2)

    def add(x, one):
        return x + one

    def step(x):
        turn[0] += 1
        chosen = both[turn[0] % 2]
        return add(x, chosen)

    return step, lambda i: (ones(4) * i,)
"""


@pytest.fixture
def one_cause(tmp_path):
    path = tmp_path / "one_cause.py"
    path.write_text(ONE_CAUSE)
    return lambda name: check_step(load(f"{path}:{name}").factory)


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("fewer_rows", ["rows = x[: count[0]]"]),
        ("pieces", ["parts = x.split([count[0], 8 - count[0]] if count[0] < 3 else [8])"]),
        ("doubles", ["if self.used == 3:"]),
        ("two_causes", ["y = x * count[0]", "return y[: count[0] * 2].sum()"]),
    ],
)
@pytest.mark.usefixtures("whole_scan")
def test_one_cause_is_one_error(name, lines, one_cause):
    report = one_cause(name)
    assert [f.source.strip() for f in report.errors] == lines
    assert name == "two_causes" or report.following(report.errors[0])


def test_a_tensor_that_is_picked_names_the_line_that_picks_it(one_cause):
    (error,) = one_cause("picks").errors
    assert (error.code, error.source.strip()) == ("CG205", "return x + one")
    line = 1 + ONE_CAUSE.splitlines().index("        chosen = both[turn[0] % 2]")
    assert error.message.endswith(f"; line {line} picks it")
