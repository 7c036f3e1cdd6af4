"""`onegraph check --run`: programs as people write them, run as they are; the docs of torch give the clean ones."""

import errno
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from onegraph.check import CheckError, Report, Severity
from onegraph.check.program import beside, run_program

WHOLE_NETWORK = """
import torch

N, D_in, H, D_out = 64, 128, 64, 16
model = torch.nn.Sequential(torch.nn.Linear(D_in, H), torch.nn.Dropout(p=0.2),
                            torch.nn.Linear(H, D_out), torch.nn.Dropout(p=0.1)).cuda()
loss_fn = torch.nn.MSELoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
static_input = torch.randn(N, D_in, device='cuda')
static_target = torch.randn(N, D_out, device='cuda')
s = torch.cuda.Stream()
s.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(s):
    for i in range(3):
        optimizer.zero_grad(set_to_none=True)
        y_pred = model(static_input)
        loss = loss_fn(y_pred, static_target)
        loss.backward()
        optimizer.step()
torch.cuda.current_stream().wait_stream(s)
g = torch.cuda.CUDAGraph()
optimizer.zero_grad(set_to_none=True)
with torch.cuda.graph(g):
    static_y_pred = model(static_input)
    static_loss = loss_fn(static_y_pred, static_target)
    static_loss.backward()
    optimizer.step()
real_inputs = [torch.rand_like(static_input) for _ in range(4)]
real_targets = [torch.randn(N, D_out, device="cuda") for _ in range(4)]
losses = []
for data, target in zip(real_inputs, real_targets):
    static_input.copy_(data)
    static_target.copy_(target)
    g.replay()
    losses.append(static_loss.item())
assert len(set(losses)) == 4, losses
"""

PARTIAL_NETWORK = """
import torch
from itertools import chain

N, D_in, H, D_out = 64, 128, 64, 16
module1 = torch.nn.Linear(D_in, H).cuda()
module2 = torch.nn.Linear(H, D_out).cuda()
module3 = torch.nn.Linear(H, D_out).cuda()
loss_fn = torch.nn.MSELoss()
optimizer = torch.optim.SGD(chain(module1.parameters(), module2.parameters(), module3.parameters()), lr=0.1)
x = torch.randn(N, D_in, device='cuda')
h = torch.randn(N, H, device='cuda', requires_grad=True)
module1 = torch.cuda.make_graphed_callables(module1, (x,))
module2 = torch.cuda.make_graphed_callables(module2, (h,))
module3 = torch.cuda.make_graphed_callables(module3, (h,))
real_inputs = [torch.rand_like(x) for _ in range(4)]
real_targets = [torch.randn(N, D_out, device="cuda") for _ in range(4)]
before = module1.weight.detach().clone()
for data, target in zip(real_inputs, real_targets):
    optimizer.zero_grad(set_to_none=True)
    tmp = module1(data)
    if tmp.sum().item() > 0:
        tmp = module2(tmp)
    else:
        tmp = module3(tmp)
    loss = loss_fn(tmp, target)
    loss.backward()
    optimizer.step()
assert not torch.equal(before, module1.weight)
"""

BEGIN_END = """
import torch

g = torch.cuda.CUDAGraph()
static_input = torch.empty((5,), device="cuda")
s = torch.cuda.Stream()
s.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(s):
    for _ in range(3):
        static_output = static_input * 2
torch.cuda.current_stream().wait_stream(s)
with torch.cuda.stream(s):
    g.capture_begin()
    static_output = static_input * 2
    g.capture_end()
for value in (3.0, 4.0):
    static_input.copy_(torch.full((5,), value, device="cuda"))
    g.replay()
    assert static_output.tolist() == [2 * value] * 5
"""

SERVING = """
import torch

class Runner:
    def __init__(self, model, sizes):
        self.model, self.pool, self.graphs, self.outs = model, None, {}, {}
        self.ids = torch.zeros(max(sizes), dtype=torch.long, device="cuda")
        self.stream = torch.cuda.Stream()
        for size in sorted(sizes, reverse=True):
            self.capture_one(size)

    def capture_one(self, size):
        ids = self.ids[:size]

        def run_once():
            return self.model(ids)

        for _ in range(2):
            run_once()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            out = run_once()
        self.pool = self.pool or graph.pool()
        self.graphs[size], self.outs[size] = graph, out

    def __call__(self, ids):
        size = next(s for s in sorted(self.graphs) if s >= len(ids))
        self.ids[: len(ids)].copy_(ids)
        self.graphs[size].replay()
        return self.outs[size][: len(ids)]

with torch.inference_mode():
    model = torch.nn.Sequential(torch.nn.Embedding(100, 32), torch.nn.Linear(32, 100)).cuda()
    runner = Runner(model, [1, 2, 4])
    for n in (1, 3, 2, 4, 1):
        ids = torch.randint(0, 100, (n,), device="cuda")
        assert torch.allclose(runner(ids), model(ids), atol=1e-5)
"""

HEAD = """\
import torch
x = torch.ones(4, device="cuda")
w = torch.full((4,), 2.0, device="cuda")
"""


def ran(path: Path, text: str, *words: str) -> Report:
    script = path / "program.py"
    script.write_text(dedent(text))
    report = run_program([str(script), *words])
    assert "ended" not in report.facts, report.facts["ended"]
    return report


def lines(report: Report, severity: Severity = Severity.ERROR) -> set[tuple[str, int]]:
    return {(f.code, f.line) for f in report.of(severity)}


def line_of(text: str, part: str) -> int:
    return next(i for i, line in enumerate(dedent(text).splitlines(), 1) if part in line)


@pytest.mark.parametrize("text", [WHOLE_NETWORK, PARTIAL_NETWORK, BEGIN_END, SERVING],
                         ids=["whole network", "partial network", "begin and end", "serving"])  # fmt: skip
def test_what_is_right_is_clean_and_was_compared(tmp_path: Path, text: str) -> None:
    report = ran(tmp_path, text)
    assert report.findings == ()
    captures = report.facts["captures"]
    forward = [c for c in captures if c.get("not compared") != "the backward of a graphed callable"]
    assert forward
    assert all(c["compared"] == c["replays"] for c in forward)


def test_what_it_finds_is_at_the_programs_own_line(tmp_path: Path) -> None:
    text = (
        HEAD
        + """
    class Model(torch.nn.Module):
        scale, calls = 1.0, 0

        def forward(self, x):
            self.calls += 1
            return x * self.scale

    model = Model()
    model(x)
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        y = model(x)
    for i in range(3):
        model.scale = i + 2.0
        g.replay()
        assert y.tolist() == [1.0] * 4  # as a real replay would have it
    assert model.calls == 2, model.calls  # comparing left no trace
    """.replace("\n    ", "\n")
    )
    report = ran(tmp_path, text)
    assert lines(report) == {("CG202", line_of(text, "x * self.scale"))}
    assert ("CG210", line_of(text, "self.calls += 1")) in lines(report, Severity.WARNING)
    (finding,) = report.errors
    assert finding.values[:3] == ("capture: 1.0", "replay 1: 2.0", "replay 2: 3.0")
    assert finding.calls[0].function == "<module>"


@pytest.mark.parametrize(
    ("body", "code", "part"),
    [
        ("y = x * x.sum().item()\n", "CG101", "item()"),
        ("y = x + torch.tensor([1.0, 2, 3, 4], device='cuda')\n", "CG102", "torch.tensor"),
        ("y = x[x > 0]\n", "CG104", "x[x > 0]"),
        ("torch.cuda.synchronize(); y = x + w\n", "CG106", "synchronize"),
        ("y = torch.rand(4, device='cuda', generator=torch.Generator('cuda'))\n", "CG301", "generator="),
        ("with torch.cuda.stream(torch.cuda.Stream()):\n        y = x + w\n", "CG303", "x + w"),
    ],
)  # fmt: skip
def test_hazards_inside_of_the_capture(tmp_path: Path, body: str, code: str, part: str) -> None:
    text = f"{HEAD}x + w; x * 2.0\ng = torch.cuda.CUDAGraph()\nwith torch.cuda.graph(g):\n    {body}"
    found = lines(ran(tmp_path, text))
    assert (code, max(i for i, line in enumerate(text.splitlines(), 1) if part in line)) in found


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


def test_a_program_saves_and_loads_its_weights(tmp_path: Path) -> None:
    text = HEAD + dedent(f"""
    model = torch.nn.Linear(4, 4).cuda()
    torch.save(model.state_dict(), {str(tmp_path / "weights.pt")!r})
    other = torch.nn.Linear(4, 4).cuda()
    other.load_state_dict(torch.load({str(tmp_path / "weights.pt")!r}, map_location="cuda"))
    assert torch.equal(other.weight, model.weight)
    model(x)
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        y = other(x)
    """)
    assert ran(tmp_path, text).findings == ()


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


def test_an_allowance_in_the_program_counts(tmp_path: Path) -> None:
    text = HEAD + "x + w\ng = torch.cuda.CUDAGraph()\nwith torch.cuda.graph(g):\n"
    (tmp_path / "program.py").write_text(f"{text}    y = x * w.sum().item()  # onegraph: allow[CG101] known\n")
    done = cli("--run", "program.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "1 allowed in the source" in done.stdout


def test_a_program_asks_for_times_and_memory(tmp_path: Path) -> None:
    text = HEAD + dedent("""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    x + w
    end.record()
    torch.cuda.synchronize()
    assert 1 / start.elapsed_time(end) > 0
    assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] == torch.cuda.max_memory_reserved() == 0
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        y = x + w
    """)
    assert ran(tmp_path, text).findings == ()


def test_a_stream_entered_twice_is_left_twice(tmp_path: Path) -> None:
    text = HEAD + dedent("""
    x + w
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g, stream=side):
            y = x + w
        assert torch.cuda.current_stream() == side
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    """)
    assert ran(tmp_path, text).findings == ()


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("@contextmanager\ndef capturing():\n    with torch.cuda.graph(g):\n        yield\n"
         "with capturing():\n    y = x + w\n", "its statements cannot be run by themselves"),
        ("def capture():\n    with torch.cuda.graph(g):\n        return x + w\ny = capture()\n",
         "its statements cannot be run by themselves"),
        ("left = [1]\nwith torch.cuda.graph(g):\n    left.pop()\n    y = x + w\n",
         "run by themselves, its statements raise IndexError"),
    ],
    ids=["yield", "return", "raises"],
)  # fmt: skip
def test_what_cannot_be_run_again_is_said_and_still_replayed(tmp_path: Path, body: str, why: str) -> None:
    text = f"from contextlib import contextmanager\n{HEAD}x + w\ng = torch.cuda.CUDAGraph()\n{body}"
    report = ran(tmp_path, text + "x.fill_(5.0)\ng.replay()\nassert y.tolist() == [7.0] * 4\n")
    (capture,) = report.facts["captures"]
    assert (capture["replays"], capture["compared"], capture["not compared"]) == (1, 0, why)


def test_a_copy_that_cannot_be_made_or_dies_is_a_reason_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> int:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    opened = len(os.listdir("/proc/self/fd"))
    assert beside._in_a_copy(lambda: [1]) == [1]
    with monkeypatch.context() as patch:
        patch.setattr(beside.pickle, "dumps", lambda answer, dumps=pickle.dumps: dumps(answer)[:-3])
        assert beside._in_a_copy(lambda: [1]) == "its copy did not end"
    monkeypatch.setattr(beside.os, "fork", refused)
    assert "Resource temporarily unavailable" in beside._in_a_copy(lambda: [1])
    assert len(os.listdir("/proc/self/fd")) == opened


def test_default_stream_and_registered_generators(tmp_path: Path) -> None:
    text = HEAD + dedent("""
    x + w
    g = torch.cuda.CUDAGraph()
    g.capture_begin()
    y = x + w
    g.capture_end()
    generator = torch.Generator(device="cuda")
    torch.rand(4, device="cuda", generator=generator)
    known = torch.cuda.CUDAGraph()
    known.register_generator_state(generator)
    with torch.cuda.graph(known):
        noise = torch.rand(4, device="cuda", generator=generator)
    known.replay()
    first = noise.tolist()
    known.replay()
    assert noise.tolist() != first
    """)
    assert lines(ran(tmp_path, text)) == {("CG304", line_of(text, "g.capture_begin"))}


def test_a_capture_without_a_warm_up(tmp_path: Path) -> None:
    text = f"{HEAD}g = torch.cuda.CUDAGraph()\nwith torch.cuda.graph(g):\n    y = x @ w\n"
    report = ran(tmp_path, text)
    assert lines(report, Severity.WARNING) == {("CG307", 6)}
    assert not report.errors


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


COMPILED = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = torch.nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x, seen):
        self.count.add_(1)
        {body}
        return self.lin(x)

net = torch.compile(Net().cuda().requires_grad_(False), mode="reduce-overhead")
seen = torch.zeros(8, device="cuda")
for n in {sizes}:
    net(torch.randn(n, 8, device="cuda"), seen)
"""


@pytest.mark.parametrize(
    ("body", "sizes", "part", "words"),
    [
        ("pass", "(2, 2)", None, ""),
        ("seen.add_(1)", "(2, 2)", "seen.add_", "address torch does not know"),
        ("x = x + torch.arange(8.0).to('cuda')", "(2, 2)", "arange", "runs on the CPU"),
        ("x = x * 2 if x.sum() > 0 else x", "(2, 2)", "x.sum() > 0", "the compiled graph ends here"),
        ("x = x + x[x > 0].sum()", "(2, 2)", "x[x > 0]", "no graph can hold it"),
        ("pass", "(2, 3)", "net(torch.randn", "the shape of an argument"),
    ],
)
def test_why_compiled_code_has_no_graph(tmp_path: Path, body: str, sizes: str, part: str, words: str) -> None:
    text = COMPILED.format(body=body, sizes=sizes)
    report = ran(tmp_path, text)
    assert not report.errors
    found = {(f.code, f.line) for f in report.findings}
    assert found == ({("CG314", line_of(text, part))} if part else set())
    assert all(f.severity is Severity.WARNING for f in report.findings)
    assert words in " ".join(f.message for f in report.findings)


def test_an_output_of_compiled_code_is_read_late(tmp_path: Path) -> None:
    text = HEAD + dedent("""
    @torch.compile(mode="reduce-overhead")
    def double(x):
        return x * 2

    first = double(x)
    first.sum()
    copied = double(x).clone()
    second = double(w)
    copied + second
    print(first)
    """)
    assert lines(ran(tmp_path, text)) == {("CG209", line_of(text, "print(first)"))}


def test_a_replay_launches_kernels_again_and_copies_to_the_host(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    text = """
    import torch, triton
    import triton.language as tl

    @triton.jit
    def double(x, y, n, B: tl.constexpr):
        at = tl.arange(0, B)
        tl.store(y + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)

    x, y = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
    host = torch.zeros(4, pin_memory=True)
    double[(1,)](x, y, 4, B=4)
    host.copy_(y, non_blocking=True)
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        double[(1,)](x, y, 4, B=4)
        host.copy_(y, non_blocking=True)
    x.fill_(5)
    g.replay()
    torch.cuda.synchronize()
    assert y.tolist() == host.tolist() == [10.0] * 4, (y, host)
    """
    assert not ran(tmp_path, text).findings


def cli(*words: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "onegraph", "check", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


def test_json_is_alone_on_stdout_and_the_program_has_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        HEAD + "import os, sys\nx + w\ng = torch.cuda.CUDAGraph()\nwith torch.cuda.graph(g):\n    y = x + w\n"
        "if __name__ == '__main__':\n    print('said', sys.argv)\n    os.system('echo shouted')\n"
    )
    done = cli("--json", "--run", "program.py", "--json", "--debug", "-m", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    body: dict[str, Any] = json.loads(done.stdout)
    assert body["facts"]["captures"][0]["line"] == 7
    assert "said ['program.py', '--json', '--debug', '-m']" in done.stderr
    assert "shouted" in done.stderr


def test_what_follows_from_another_finding_is_counted_apart(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        HEAD + "s = x.sum().item()\ng = torch.cuda.CUDAGraph()\nwith torch.cuda.graph(g):\n"
        "    s = x.sum().item()\n    y = x * s\nfor i in (2, 3):\n    x.fill_(i)\n    g.replay()\n"
    )
    done = cli("--json", "--run", "program.py", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    found = {f["code"]: f["follows"] and f["follows"]["code"] for f in json.loads(done.stdout)["findings"]}
    assert found == {"CG101": None, "CG202": "CG101"}


def test_a_module_that_raises_shows_its_traceback_and_its_findings(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(
        HEAD + "def late():\n    raise KeyError('lost')\n\nx + w\ng = torch.cuda.CUDAGraph()\n"
        "with torch.cuda.graph(g):\n    y = x * x.sum().item()\nlate()\n"
    )
    done = cli("--run", "-m", "package", cwd=tmp_path)
    assert done.returncode == 2
    assert "CG101 error" in done.stdout
    assert "in late\n" in done.stderr
    assert "onegraph/check" not in done.stderr
    assert done.stderr.splitlines()[-1] == "onegraph: error: -m package: the program raised KeyError: 'lost'"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("print(1)\n", "0 captures found"),
        ("import sys\nsys.exit(3)\n", r"sys.exit\(3\)"),
        ("def broken(:\n", "program.py:1: syntax error"),
        ("import nothing_of_the_kind\n", "the program raised ModuleNotFoundError"),
    ],
)
def test_what_cannot_be_reported_on(tmp_path: Path, text: str, words: str) -> None:
    script = tmp_path / "program.py"
    script.write_text(text)
    with pytest.raises(CheckError, match=words):
        run_program([str(script)])


@pytest.mark.parametrize("words", [[], ["-m"], ["missing.py"], ["--lr", "3"], ["-m", "nothing_of_the_kind"]])
def test_no_such_program(words: list[str]) -> None:
    with pytest.raises(CheckError, match=r"^--run"):
        run_program(words)


STATIC = """
import torch

class Object:
    def __init__(self):
        self.held = torch.zeros(4{device})

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = torch.nn.Linear(4, 4{device})
        self.register_buffer("buffer", torch.zeros(4{device}))
        self.plain = torch.zeros(4{device})
        self.caches = [torch.zeros(4{device})]
        self.object = Object()

net, other, outside, loose = Net(), Net(), torch.zeros(4{device}), Object()

def work(x, static, module):
    net.buffer.add_(1)
    net.plain.add_(1)
    net.caches[0].add_(1)
    net.object.held.add_(1)
    module.plain.add_(1)
    static.add_(1)
    outside.add_(1)  # not static
    loose.held.add_(1)  # not static
    x.add_(1)  # not static
    return net.lin(x)

marked = torch.zeros(4{device})
torch._dynamo.mark_static_address(marked)
run = torch.compile(work, {how})
with torch.no_grad():
    run(torch.ones(4{device}), marked, other)
"""


def test_what_torch_takes_for_static_is_what_dynamo_says(tmp_path: Path) -> None:
    """Written tensors: those that dynamo does not mark as static are those that inductor skips graphs for."""
    said: dict[str, bool] = {}

    def backend(module: Any, _: Any) -> Any:
        for node in module.graph.nodes:
            if node.op == "placeholder":
                said[node.name] = "_dynamo_static_input_type" in node.meta.get("tensor_dict", {})
        return module

    names: dict[str, Any] = {"backend": backend}
    exec(STATIC.format(device="", how="backend=backend"), names)
    assert len(said) == 11
    assert sum(not static for static in said.values()) == 3, said
    text = STATIC.format(device=", device='cuda'", how="mode='reduce-overhead'")
    report = ran(tmp_path, text)
    assert {(f.code, f.line) for f in report.findings} == {
        ("CG314", i) for i, line in enumerate(text.splitlines(), 1) if line.endswith("# not static")
    }
