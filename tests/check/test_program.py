"""`onegraph check --run`: programs as people write them, run as they are; the docs of torch give the clean ones."""

from pathlib import Path
from textwrap import dedent

import pytest
import torch
from programs import HEAD, cli, line_of, lines, ran

from onegraph.check import Severity
from onegraph.check.simulate.run import simulate_step

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
    g.replay()
    """)
    assert ran(tmp_path, text).findings == ()


def test_a_program_asks_for_times_and_memory(tmp_path: Path) -> None:
    text = HEAD + dedent("""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    x + w
    end.record()
    torch.cuda.synchronize()
    assert 1 / start.elapsed_time(end) > 0
    assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] == torch.cuda.max_memory_reserved() == 0
    assert torch.get_device_module() is torch.get_device_module("cuda") is torch.cuda
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_allocated() == torch.accelerator.memory_stats()["allocated_bytes.all.peak"] == 0
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        y = x + w
    g.replay()
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
        g.replay()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    """)
    assert ran(tmp_path, text).findings == ()


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


def test_a_capture_runs_nothing_and_replays_do(tmp_path: Path) -> None:
    """What the captured ops write is as it was when the capture ends, in a program and in a factory."""
    text = """
x.add_(0)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    x.add_(1)
assert x.tolist() == [1] * 4, x
graph.replay()
graph.replay()
assert x.tolist() == [3] * 4, x
"""
    assert ran(tmp_path, HEAD + text).findings == ()

    def factory():
        x, graph = torch.zeros(3, device="cuda"), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x.add_(1)
        assert x.tolist() == [0, 0, 0]
        graph.replay()
        assert x.tolist() == [1, 1, 1]
        return (lambda y: x + y), lambda i: (torch.full((3,), float(i), device="cuda"),)

    assert simulate_step(factory).errors == ()


def test_what_a_program_set_over_a_stand_in_outlives_the_import_of_the_compiler(tmp_path: Path) -> None:
    text = HEAD + dedent("""
    import sys
    streams, real = [], torch.cuda.set_stream

    def set_stream(stream):
        streams.append(stream)
        real(stream)

    torch.cuda.set_stream = set_stream
    assert "torch._dynamo" not in sys.modules
    import torch._dynamo
    torch.cuda.set_stream(torch.cuda.Stream())
    x + w
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g, stream=streams[-1]):
        y = x + w
    g.replay()
    """)
    (tmp_path / "program.py").write_text(text)
    done = cli("--run", "program.py", cwd=tmp_path)  # in a process of its own: this one has imported the compiler
    assert (done.returncode, "1 compared with eager" in done.stdout) == (0, True), done.stdout + done.stderr
