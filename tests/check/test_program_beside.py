"""`onegraph check --run`: a replay beside the captured statements, which are run again."""

import errno
import os
import pickle
from pathlib import Path
from textwrap import dedent

import pytest
from programs import HEAD, line_of, lines, ran

from onegraph.check import Verdict
from onegraph.check.program import comparison
from onegraph.check.simulate import copies


def test_a_name_bound_anew_instead_of_copied_into(tmp_path: Path) -> None:
    text = HEAD + dedent("""
    k = 2.0
    (x + w) * k
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        y = (x + w) * k
    for i in range(2):
        x = torch.full((4,), i + 5.0, device="cuda")
        k = float(i)
        g.replay()
    """)
    report = ran(tmp_path, text)
    at = line_of(text, "y = (x + w) * k")
    assert lines(report) == {("CG205", at), ("CG202", at)}


def test_a_name_used_for_the_fresh_input_too_is_fine(tmp_path: Path) -> None:
    text = HEAD + dedent("""
    x + w
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        y = x + w
    static = x
    for i in range(3):
        x = torch.full((4,), float(i), device="cuda")
        static.copy_(x)
        g.replay()
        assert y.tolist() == [i + 2.0] * 4
    """)
    assert ran(tmp_path, text).findings == ()


@pytest.mark.parametrize(
    "again", ["x = torch.full((4,), 9.0, device='cuda')", "k = 3.0", "f = torch.nn.Linear(4, 4).cuda()"]
)
def test_a_name_used_again_for_a_second_graph_is_fine(tmp_path: Path, again: str) -> None:
    text = HEAD + dedent(f"""
    k, f = 2.0, torch.nn.Linear(4, 4).cuda()
    held = x, f
    one, two = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.no_grad():
        f(x) * k
        with torch.cuda.graph(one):
            y = f(x) * k
        {again}
        with torch.cuda.graph(two):
            z = f(x) * k + 1
        one.replay()
        two.replay()
    """)
    report = ran(tmp_path, text)
    assert report.findings == ()
    assert [c["compared"] for c in report.facts["captures"]] == [1, 1]


def test_a_loop_over_sizes_binds_its_names_anew_and_is_fine(tmp_path: Path) -> None:
    text = HEAD + dedent("""
    graphs, outs = {}, {}
    for n in (4, 2, 1):
        part = x[:n]
        part * n
        graphs[n] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[n]):
            outs[n] = part * n
    for n in (1, 2, 4):
        graphs[n].replay()
        assert outs[n].tolist() == [float(n)] * n
    """)
    report = ran(tmp_path, text)
    assert report.findings == ()
    assert [c["compared"] for c in report.facts["captures"]] == [1, 1, 1]


@pytest.mark.parametrize("items", ["torch.cuda.graph(g), torch.no_grad()", "torch.no_grad(), torch.cuda.graph(g)"])
def test_other_contexts_of_the_with_statement(tmp_path: Path, items: str) -> None:
    text = HEAD + dedent(f"""
    model = torch.nn.Linear(4, 4).cuda()
    model(x)
    g = torch.cuda.CUDAGraph()
    with {items}:
        y = model(x)
        assert not y.requires_grad
    g.replay()
    """)
    report = ran(tmp_path, text)
    assert report.findings == ()
    assert report.facts["captures"][0]["compared"] == 1


def test_freed_before_the_replay(tmp_path: Path) -> None:
    text = HEAD + dedent("""
    def capture():
        bias = torch.ones(4, device="cuda")
        g = torch.cuda.CUDAGraph()
        x + bias
        with torch.cuda.graph(g):
            y = x + bias
        return g, y

    g, y = capture()
    g.replay()
    assert y.isnan().all()  # its memory holds something else by now
    """)
    assert lines(ran(tmp_path, text)) == {("CG206", line_of(text, "y = x + bias"))}


def test_numbers_of_a_graphed_module_are_compared(tmp_path: Path) -> None:
    text = dedent("""
    import torch

    class Scaled(torch.nn.Module):
        factor = 1.0

        def forward(self, x):
            return x * self.factor

    model = Scaled()
    graphed = torch.cuda.make_graphed_callables(model, (torch.zeros(4, device="cuda"),))
    for i in range(3):
        model.factor = i + 2.0
        graphed(torch.ones(4, device="cuda"))
    """)
    report = ran(tmp_path, text)
    assert lines(report) == {("CG202", line_of(text, "x * self.factor"))}


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("@contextmanager\ndef capturing():\n    with torch.cuda.graph(g):\n        yield\n"
         "with capturing():\n    y = x + w\n", "its statements cannot be run by themselves"),
        ("def capture():\n    with torch.cuda.graph(g):\n        return x + w\ny = capture()\n",
         "its statements cannot be run by themselves"),
        ("left = [1]\nwith torch.cuda.graph(g):\n    left.pop()\n    y = x + w\n",
         "run by themselves, its statements raise IndexError at program.py:9: pop from empty list"),
    ],
    ids=["yield", "return", "raises"],
)  # fmt: skip
def test_what_cannot_be_run_again_is_said_and_still_replayed(tmp_path: Path, body: str, why: str) -> None:
    text = f"from contextlib import contextmanager\n{HEAD}x + w\ng = torch.cuda.CUDAGraph()\n{body}"
    report = ran(tmp_path, text + "x.fill_(5.0)\ng.replay()\nassert y.tolist() == [7.0] * 4\n")
    (capture,) = report.facts["captures"]
    assert (capture["replays"], capture["compared"], capture["not compared"]) == (1, 0, why)
    (finding,) = report.findings
    assert (finding.code, finding.line) == ("CG401", line_of(text, "with torch.cuda.graph(g)"))
    assert finding.message.endswith(why)
    assert (report.verdict, report.exit_code(), report.exit_code(strict=True)) == (Verdict.UNVERIFIED, 0, 1)


def test_a_copy_that_cannot_be_made_or_dies_is_a_reason_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> int:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    opened = len(os.listdir("/proc/self/fd"))
    assert copies.in_a_copy(lambda: [1]) == [1]
    with monkeypatch.context() as patch:
        patch.setattr(copies.pickle, "dumps", lambda answer, dumps=pickle.dumps: dumps(answer)[:-3])
        assert copies.in_a_copy(lambda: [1]) == "its copy did not end"
    monkeypatch.setattr(copies.os, "fork", refused)
    assert "Resource temporarily unavailable" in copies.in_a_copy(lambda: [1])
    assert len(os.listdir("/proc/self/fd")) == opened


SLOTTED = """
class State:
    __slots__ = ("bias", "__scale")

    def __init__(self, bias):
        self.bias, self.__scale = bias, 2.0

    def step(self, x):
        return (x + self.bias) * self.__scale

    def grow(self):
        self.__scale += 1
"""

NAMED = """
from typing import NamedTuple
class State(NamedTuple):
    bias: torch.Tensor
    scale: float = 2.0

    def step(self, x):
        return (x + self.bias) * self.scale
"""

HOLDS = """
def capture(state):
    state.step(x)
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        y = state.step(x)
    return g, y
"""


@pytest.mark.parametrize("kind", [SLOTTED, NAMED], ids=["slots", "named tuple"])
@pytest.mark.parametrize("nested", ["{}", "State({})"], ids=["itself", "in another one"])
def test_what_cannot_be_referred_to_weakly_is_freed_all_the_same(tmp_path: Path, kind: str, nested: str) -> None:
    """At the first replay somebody holds it, at the second nobody but the comparison does."""
    made = nested.format('State(torch.ones(4, device="cuda"))')
    inner = "state.bias" if "State" in nested else "state"
    text = (
        HEAD
        + kind
        + HOLDS.replace("state.step", f"{inner}.step")
        + dedent(f"""
    state = {made}
    g, y = capture(state)
    g.replay()
    assert y.tolist() == [4.0] * 4
    del state
    g.replay()
    assert y.isnan().all()
    """)
    )
    report = ran(tmp_path, text)
    (finding,) = report.errors
    assert (finding.code, finding.line) == ("CG206", line_of(text, "return (x + self.bias)"))
    assert finding.message.startswith(f"{inner}.bias is freed")
    (capture,) = report.facts["captures"]
    assert (capture["replays"], capture["compared"]) == (2, 1)


def test_a_number_in_a_slot_is_compared(tmp_path: Path) -> None:
    text = HEAD + SLOTTED + HOLDS + "state = State(w)\ng, y = capture(state)\nstate.grow()\ng.replay()\n"
    assert lines(ran(tmp_path, text)) == {("CG202", line_of(text, "return (x + self.bias)"))}


def test_what_is_left_of_an_object_with_slots_is_enough(tmp_path: Path) -> None:
    """The object is gone and its tensor is not: nothing is freed, and the statements can be run again."""
    text = HEAD + SLOTTED + HOLDS + "g, y = capture(State(w))\ng.replay()\n"
    report = ran(tmp_path, text)
    assert report.findings == ()
    assert report.facts["captures"][0]["compared"] == 1


PRIVATE = """
class Base:
    def step(self, x):
        return x * 2

class _Model(Base):
    def __init__(self):
        self.__bias, self.__graph, self.scale = torch.ones(4, device="cuda"), torch.cuda.CUDAGraph(), 1.0

    def step(self, x):
        return -x

    def capture(self, x):
        __shift = 3.0
        super().step(x) * __shift
        with torch.cuda.graph(self.__graph):
            self.__out = super().step(x + self.__bias) * self.scale  # captured
            def later():
                return self.__out + __shift
            out, kept = later(), dict(__kept=self.__out)
        return out

    def replay(self):
        self.__graph.replay()

model = _Model()
out = model.capture(x)
model.scale = {scale}
model.replay()
assert out.tolist() == [7.0] * 4
"""


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_private_names_and_super_can_be_run_again(tmp_path: Path, scale: float) -> None:
    text = HEAD + PRIVATE.format(scale=scale)
    report = ran(tmp_path, text)
    assert report.facts["captures"][0]["compared"] == 1
    assert lines(report) == ({("CG202", line_of(text, "# captured"))} if scale == 2.0 else set())


@pytest.mark.parametrize("warm", ["y = run()", "def y(): return run()\ny()", "y = run; y()"])
def test_a_warm_up_that_has_the_name_of_the_output(tmp_path: Path, warm: str) -> None:
    text = (
        HEAD
        + f"k = 1.0\ndef run():\n    return (x + w) * k\n{warm}\n"
        + dedent("""
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        y = run()
    k = 2.0
    g.replay()
    """)
    )
    report = ran(tmp_path, text)
    assert report.facts["captures"][0]["compared"] == 1
    assert lines(report) == {("CG202", line_of(text, "return (x + w) * k"))}


def test_a_name_that_is_read_before_it_is_bound_is_gone(tmp_path: Path) -> None:
    text = HEAD + dedent("""
    y = x + w
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        y = y + w
    g.replay()
    """)
    report = ran(tmp_path, text)
    assert lines(report) == {("CG206", line_of(text, "y = y + w"))}
    assert report.facts["captures"][0]["not compared"] == comparison.GONE
