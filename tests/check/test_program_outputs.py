"""`onegraph check --run`: what a program does with the outputs and the memory of its graphs."""

from pathlib import Path
from textwrap import dedent

import pytest
from programs import HEAD, line_of, lines, ran

from onegraph.check.program import comparison, run, world
from onegraph.check.program.world import ProgramWorld


@pytest.mark.parametrize(
    ("keep", "use", "found"),
    [
        ("kept.append(y)", "torch.stack(kept)", True),
        ("kept.append(y[:2])", "torch.stack(kept)", True),
        ("kept.append(y.clone())", "torch.stack(kept)", False),
        ("kept.append(y[:2].clone())", "torch.stack(kept)", False),
        ("kept.append(y.cpu())", "torch.stack(kept)", False),
        ("kept = [y]", "kept[0] + 1", False),
        ("kept = [y[:2]]", "kept[0] + 1", False),
    ],
)
def test_outputs_kept_over_replays(tmp_path: Path, keep: str, use: str, found: bool) -> None:
    text = HEAD + dedent(f"""
    x + w
    kept = []
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        y = x + w
    for i in range(3):
        x.fill_(i)
        g.replay()
        {keep}
    {use}
    """)
    assert lines(ran(tmp_path, text)) == ({("CG209", line_of(text, use))} if found else set())


def test_a_graphed_callable_overwrites_what_it_returned(tmp_path: Path) -> None:
    text = HEAD + dedent("""
    model = torch.nn.Linear(4, 4).cuda().requires_grad_(False)
    model = torch.cuda.make_graphed_callables(model, (torch.zeros(1, 4, device="cuda"),))
    first = model(x[None])
    second = model(w[None])
    print(second - first)
    """)
    assert lines(ran(tmp_path, text)) == {("CG209", line_of(text, "second - first"))}


POOL = """
import torch
x = torch.ones(1024, 1024, device="cuda")
def twice(x):
    a = x * 3
    b = a + 1
    del a
    return b - 2
def once(x):
    return x * 2
twice(x); once(x)
one, two = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
with torch.cuda.graph(one):
    first = twice(x)
with torch.cuda.graph(two, pool={pool}):
    second = once(x)
one.replay(); first.sum()
two.replay(); second.sum()
one.replay()
second.sum()  # late
"""


@pytest.mark.parametrize(("pool", "found"), [("one.pool()", True), ("None", False)])
def test_an_output_in_memory_that_another_graph_uses(tmp_path: Path, pool: str, found: bool) -> None:
    text = POOL.format(pool=pool)
    assert lines(ran(tmp_path, text)) == ({("CG312", line_of(text, "# late"))} if found else set())


@pytest.mark.parametrize(("wait", "found"), [("", True), ("b.wait_stream(a)", False), ("a.synchronize()", False)])
def test_graphs_of_one_pool_at_once(tmp_path: Path, wait: str, found: bool) -> None:
    text = HEAD + dedent(f"""
    def work():
        t = x * 4
        return t + 1
    work()
    one, two = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(one):
        first = work()
    with torch.cuda.graph(two, pool=one.pool()):
        second = work()
    a, b = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(a):
        one.replay()
    {wait}
    with torch.cuda.stream(b):
        two.replay()
    """)
    assert lines(ran(tmp_path, text)) == ({("CG312", line_of(text, "two.replay"))} if found else set())


def test_memory_of_several_graphs_of_a_pool(tmp_path: Path) -> None:
    report = ran(tmp_path, POOL.format(pool="one.pool()"))
    mib = 1 << 20
    assert [c["adds to its pool"] for c in report.facts["captures"]] == [20 * mib, 0]
    told = report.facts["memory"]
    assert (told["pool"], told["peak"], told["graphs"], told["pools"]) == (20 * mib, 8 * mib, 2, 1)
    assert {s.bytes for s in report.storages} == {4 * mib}


def test_what_is_kept_of_a_long_program_does_not_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays, outputs that are read and read late, graphs that come and go, results of compiled functions."""
    worlds: list[ProgramWorld] = []
    monkeypatch.setattr(run, "ProgramWorld", lambda *given: worlds.append(ProgramWorld(*given)) or worlds[0])
    monkeypatch.setattr(world, "MOST_SIZES", 50)
    monkeypatch.setattr(comparison, "ALWAYS", 0)
    monkeypatch.setattr(comparison, "LONGEST", 0.0)
    text = HEAD + dedent("""
    @torch.compile(mode="reduce-overhead")
    def double(x):
        return x * 2

    def capture(x):
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):
            y = x + w
        return g, y

    x + w
    g, y = capture(x)
    first, results = None, [double(x), double(x)]
    results[0].sum()
    for i in range(200):
        g.replay()
        view = y[:2]
        first = view if i == 1 else first
        if first is not None:
            first + 1  # late
        double(x)
        results[0] + 1
        torch.zeros(4, pin_memory=True)
        torch.Generator("cuda")
        if i % 20 == 0:
            big = torch.ones(256, 4, device="cuda")
            capture(big)[0].replay()
    del results, first, view, big
    """)
    report = ran(tmp_path, text)
    (late,) = [f for f in report.errors if f.line == line_of(text, "# late")]
    assert (late.code, late.count) == ("CG209", 198)
    (known,) = worlds
    assert len(known.captures) == 11
    assert len(known.raw_findings) + len(known.compiled_outputs.late) <= 11 + 4
    assert len(known.taken) == 1
    assert len(known.compiled_outputs.storages) == 0
    assert len(known.randomness.generators) <= 1
    assert len(known.sizes) + len(known.storages.pinned) < 250
    gone = known.captures[1:]
    assert not any(op.tensors or op.outs or op.args for c in gone for op in c.step.ops)
