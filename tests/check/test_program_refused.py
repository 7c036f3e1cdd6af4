"""`onegraph check --run`: what eager would refuse by now and a replay does, and graphs that nothing was compared of."""

from pathlib import Path
from textwrap import dedent

import pytest
from programs import HEAD, Command, line_of, lines, ran

from onegraph.check import Report, Severity, Verdict
from onegraph.check.program import comparison
from onegraph.check.rules import RULES

CACHE = """\
import torch
k = torch.zeros(4, 2, device="cuda")
pos = torch.zeros(1, dtype=torch.long, device="cuda")
row = torch.ones(1, 2, device="cuda")

def step():
    {op}  # the op
    return k.sum(0)

step()
g = torch.cuda.CUDAGraph()
with torch.cuda.graph(g):
    out = step()
pos.fill_({first})
for i in range(6):
    {before}
    g.replay()
    pos.add_(1)
"""

OPS = [
    "k.index_copy_(0, pos, row)",
    "k[pos] = row",
    "k.index_select(0, pos)",
    "k.gather(0, pos[None].expand(1, 2))",
    "torch.nn.functional.embedding(pos, k)",
    "torch._assert_async(pos < 4)",
]


def not_compared(report: Report) -> str:
    (capture,) = report.facts["captures"]
    return str(capture.get("not compared", ""))


@pytest.mark.parametrize(("op", "first"), [*((op, 0) for op in OPS), (OPS[0], 4)])
def test_a_position_past_the_cache_is_an_error_at_the_op(tmp_path: Path, op: str, first: int) -> None:
    text = CACHE.format(op=op, first=first, before="pass")
    report = ran(tmp_path, text)
    (finding,) = report.findings
    line = line_of(text, "# the op")
    assert (finding.code, finding.severity, finding.line) == ("CG212", Severity.ERROR, line)
    assert finding.values[0].startswith(f"replay {5 - first}: ")
    assert finding.fix == RULES["CG212"].fixes["refused values"]
    (capture,) = report.facts["captures"]
    assert (capture["replays"], capture["compared"]) == (6, 4 - first)
    assert f"program.py:{line}" in not_compared(report)


@pytest.mark.parametrize(("op", "before"), [*((op, "if i == 4: break") for op in OPS), (OPS[0], "pos.clamp_(max=3)")])
def test_a_position_that_is_kept_in_the_cache_is_right(tmp_path: Path, op: str, before: str) -> None:
    report = ran(tmp_path, CACHE.format(op=op, first=0, before=before))
    assert report.findings == ()
    assert not_compared(report) == ""


def test_a_position_past_the_cache_where_the_statements_cannot_be_run_again(tmp_path: Path) -> None:
    text = HEAD + dedent("""
    pos = torch.zeros(1, dtype=torch.long, device="cuda")
    x[pos]
    g = torch.cuda.CUDAGraph()
    def capture():
        with torch.cuda.graph(g):
            return x[pos]
    y = capture()
    pos.fill_(4)
    g.replay()
    """)
    assert lines(ran(tmp_path, text)) == {("CG212", line_of(text, "return x[pos]"))}


def test_a_new_position_past_the_cache_that_the_replay_does_not_read(tmp_path: Path) -> None:
    """The replay goes on with the old one, which is in the cache."""
    text = HEAD + dedent("""
    class Cache:
        pos = torch.zeros(1, dtype=torch.long, device="cuda")
    x[Cache.pos]
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        y = x[Cache.pos]
    old, Cache.pos = Cache.pos, torch.full((1,), 4, device="cuda")
    g.replay()
    assert y.tolist() == [1.0]
    """)
    report = ran(tmp_path, text)
    (finding,) = report.findings
    assert (finding.code, finding.line) == ("CG212", line_of(text, "y = x[Cache.pos]"))
    assert finding.message == comparison.OP


def test_an_index_of_memory_that_was_freed_is_told_as_freed(tmp_path: Path) -> None:
    text = HEAD + dedent("""
    def capture():
        pos = torch.zeros(1, dtype=torch.long, device="cuda")
        g = torch.cuda.CUDAGraph()
        x[pos]
        with torch.cuda.graph(g):
            y = x.index_select(0, pos)
        return g, y

    g, y = capture()
    g.replay()
    """)
    report = ran(tmp_path, text)
    assert lines(report) == {("CG206", line_of(text, "index_select"))}


GUARDED = (
    HEAD
    + """
state = {{"limit": 3, "n": 0}}

def step():
    {guard}
    return x * 2

step()
g = torch.cuda.CUDAGraph()
with torch.cuda.graph(g):
    out = step()
for i in range(8):
    state["n"] += 1
    {before}
    g.replay()
"""
)

GUARDS = [
    'if state["n"] > state["limit"]: raise RuntimeError("cache is full")',
    'assert state["n"] <= state["limit"], "cache is full"',
]


@pytest.mark.parametrize("guard", GUARDS, ids=["raise", "assert"])
def test_a_guard_that_replays_skip_is_an_error_at_its_line(tmp_path: Path, guard: str) -> None:
    text = GUARDED.format(guard=guard, before="pass")
    report = ran(tmp_path, text)
    (finding,) = report.findings
    assert (finding.code, finding.severity, finding.line) == ("CG201", Severity.ERROR, line_of(text, "cache is full"))
    assert finding.values[0].startswith("replay 4: ")
    assert finding.values[0].endswith("cache is full")
    assert finding.calls[-1].function == "step"
    assert finding.fix == RULES["CG201"].fixes["raise"]
    (capture,) = report.facts["captures"]
    assert (capture["replays"], capture["compared"]) == (8, 3)
    assert "cache is full" in not_compared(report)


@pytest.mark.parametrize("guard", GUARDS, ids=["raise", "assert"])
def test_a_guard_that_the_caller_heeds_is_right(tmp_path: Path, guard: str) -> None:
    report = ran(tmp_path, GUARDED.format(guard=guard, before='if state["n"] > state["limit"]: break'))
    assert report.findings == ()
    assert not_compared(report) == ""


@pytest.mark.parametrize(
    "once",
    [
        'assert "y" not in kept; kept["y"] = x + w',
        'if kept: raise ValueError("captured twice")\n    kept["y"] = x + w',
        'kept["y"] = x + w; kept.pop("fresh")',
        'assert torch.cuda.is_current_stream_capturing(); kept["y"] = x + w',
        'kept["y"] = x + next(weights)',
    ],
    ids=["assert", "raise", "lookup", "capturing", "iterator"],
)
def test_statements_that_are_made_to_run_once_are_no_error(tmp_path: Path, once: str) -> None:
    """They raise because the check runs them again: a replay is as right as the capture."""
    setup = "kept, weights = {}, iter([w])\n" + "kept['fresh'] = 1\n" * ("fresh" in once)
    text = HEAD + setup + f"x + w\ng = torch.cuda.CUDAGraph()\nwith torch.cuda.graph(g):\n    {once}\n"
    report = ran(tmp_path, text + "for i in range(3):\n    g.replay()\n")
    assert report.errors == ()
    assert report.verdict is Verdict.UNVERIFIED
    assert comparison.RAISE in not_compared(report)


def test_of_several_replays_that_raise_at_one_place_the_first_is_told(tmp_path: Path) -> None:
    report = ran(tmp_path, CACHE.format(op=OPS[0], first=0, before="pass"))
    assert not_compared(report).count(comparison.RAISE) == 1
    assert "index 4 is out of bounds" in not_compared(report)
    assert f"4 compared with eager (others not: {not_compared(report)})" in str(report)


def test_time_that_is_over_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "LONGEST", 0.0)
    report = ran(tmp_path, CACHE.format(op=OPS[0], first=0, before="if i == 4: break"))
    (capture,) = report.facts["captures"]
    assert (capture["replays"], capture["compared"], not_compared(report)) == (4, 2, comparison.OVER)
    assert report.verdict is Verdict.CAPTURABLE


def test_a_capture_that_is_never_replayed_is_unverified(tmp_path: Path, here: Command) -> None:
    text = HEAD + "x + w\ng = torch.cuda.CUDAGraph()\nwith torch.cuda.graph(g):\n    y = x + w\n"
    (tmp_path / "program.py").write_text(text)
    done = here("--run", "program.py")
    assert done.returncode == 0, done.stderr
    assert "program.py: unverified (1 unverified)" in done.stdout
    assert "the program never replays it" in done.stdout
    assert here("--strict", "--run", "program.py").returncode == 1


def test_what_cannot_be_compared_can_be_after_the_advice(tmp_path: Path) -> None:
    wrong = "def capture():\n    with torch.cuda.graph(g):\n        return x + w\n"
    right = "def step():\n    return x + w\n" + wrong.replace("return x + w", "y = step()\n    return y")
    program = HEAD + "x + w\ng = torch.cuda.CUDAGraph()\n{}y = capture()\ng.replay()\n"
    for folder in ("wrong", "right"):
        (tmp_path / folder).mkdir()
    (finding,) = ran(tmp_path / "wrong", program.format(wrong)).findings
    assert (finding.code, finding.fix) == ("CG401", RULES["CG401"].fixes["replay"])
    assert ran(tmp_path / "right", program.format(right)).findings == ()


def test_one_of_several_sizes_that_is_not_replayed_is_no_matter(tmp_path: Path) -> None:
    text = HEAD + dedent("""
    graphs = {}
    def capture(n):
        x[:n] + w[:n]
        graphs[n] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[n]):
            y = x[:n] + w[:n]
        return y
    kept = [capture(n) for n in (4, 2, 1)]
    graphs[2].replay()
    """)
    assert ran(tmp_path, text).findings == ()
