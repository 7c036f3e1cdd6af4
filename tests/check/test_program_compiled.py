"""`onegraph check --run`: functions that torch compiles with graphs of its own."""

from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from programs import HEAD, line_of, lines, ran

from onegraph.check import Severity

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


def test_a_constant_of_compiled_code_is_no_copy_from_the_host(tmp_path: Path) -> None:
    """Compiled code holds it on the device; uncompiled, the same line cannot be captured."""
    text = HEAD + dedent("""
    def masked(x):
        return torch.where(x > 2, x, torch.tensor(0.5, device=x.device))

    whole = torch.compile(masked, mode="reduce-overhead")
    masked = torch.compile(masked)
    whole(x)
    masked(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = masked(x)
    x.copy_(torch.tensor([0.0, 1.0, 3.0, 4.0], device="cuda"))
    graph.replay()
    assert y.tolist() == [0.5, 0.5, 3.0, 4.0], y
    """)
    assert ran(tmp_path, text).findings == ()
    uncompiled = text.replace("torch.compile(masked)", "masked")
    assert lines(ran(tmp_path, uncompiled)) == {("CG102", line_of(uncompiled, "torch.where"))}
