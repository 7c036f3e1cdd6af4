"""Files in which nobody names a step: where the code captures, the reader looks, and says where it found nothing."""

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from onegraph.check import cli
from onegraph.check.source import check_tree

# name -> (text, findings: "CODE severity line, ..."; None: no step in it)
FILES: dict[str, tuple[str, str | None]] = {
    "docs": (
        """\
import torch
g = torch.cuda.CUDAGraph()
static_input = torch.empty((5,), device="cuda")
s = torch.cuda.Stream()
s.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(s):
    for _ in range(3):
        static_output = static_input * 2
torch.cuda.current_stream().wait_stream(s)
with torch.cuda.graph(g):
    static_output = static_input * static_input.sum().item()
static_input.copy_(torch.full((5,), 3, device="cuda"))
g.replay()
print(static_output.tolist())
""",
        "CG101 error 11",
    ),
    "docs_ok": (
        """\
import torch
g = torch.cuda.CUDAGraph()
static_input = torch.empty((5,), device="cuda")
with torch.cuda.graph(g):
    static_output = static_input * 2
g.replay()
print(static_output.tolist(), static_output.sum().item())
""",
        "",
    ),
    "alias": (
        """\
import torch
from torch.cuda import graph as capture
x = torch.zeros(4, device="cuda")
with capture(torch.cuda.CUDAGraph()):
    y = x[x > 0]
""",
        "CG104 error 5",
    ),
    "alias2": (
        """\
import torch.cuda as tc, torch
x = torch.zeros(4, device="cuda")
with tc.graph(tc.CUDAGraph()):
    y = x.cpu()
""",
        "CG101 error 4",
    ),
    "alias3": (
        """\
import torch
capture = torch.cuda.graph
x = torch.zeros(4, device="cuda")
def f():
    with capture(torch.cuda.CUDAGraph()):
        y = x.cpu()
""",
        "CG101 error 6",
    ),
    "variable": (
        """\
import torch
x = torch.zeros(4, device="cuda")
ctx = torch.cuda.graph(torch.cuda.CUDAGraph())
with ctx:
    y = x.cpu()
""",
        "CG101 error 5",
    ),
    "uncalled": (
        """\
import torch
def capture(model, x):
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        y = model(x)
        n = y.argmax().item()
    return g, y
""",
        "CG101 warning 6",
    ),
    "uncalled_param": (
        """\
import torch
def capture(x):
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        n = x.argmax().item()
    x.tolist()
""",
        "CG101 warning 4",
    ),
    "nested": (
        """\
import torch
def main():
    x = torch.zeros(4, device="cuda")
    def run():
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            return x.sum().item()
    x.item()
    return run
""",
        "CG101 error 6",
    ),
    "async": (
        """\
import torch
async def capture():
    x = torch.zeros(4, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        return x.sum().item()
""",
        "CG101 error 5",
    ),
    "async_method": (
        """\
import torch
class Runner:
    def __init__(self):
        self.x = torch.zeros(4, device="cuda")
    async def capture(self):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            return await self.inner()
    async def inner(self):
        return self.x.sum().item()
""",
        "CG101 error 9",
    ),
    "begin": (
        """\
import torch
x = torch.zeros(4, device="cuda")
g = torch.cuda.CUDAGraph()
s = torch.cuda.Stream()
with torch.cuda.stream(s):
    x.sum().item()
    g.capture_begin()
    y = x * x.sum().item()
    g.capture_end()
    x.sum().item()
x.sum().item()
""",
        "CG101 error 8",
    ),
    "begin_fn": (
        """\
import torch
def f(g: torch.cuda.CUDAGraph):
    x = torch.zeros(4, device="cuda")
    g = torch.cuda.CUDAGraph()
    try:
        g.capture_begin()
        y = x * x.sum().item()
    finally:
        g.capture_end()
    x.tolist()
""",
        "CG101 error 7",
    ),
    "self_graph": (
        """\
import torch
class R:
    def __init__(self, model):
        self.graph = torch.cuda.CUDAGraph()
        self.model = model
        self.x = torch.zeros(4, device="cuda")
    def capture(self):
        self.graph.capture_begin()
        self.y = self.model(self.x) + self.x.sum().item()
        self.graph.capture_end()
""",
        "CG101 error 9",
    ),
    "graphed": (
        """\
import torch
def f(x):
    return x * x.sum().item()
sample = torch.zeros(4, device="cuda")
g = torch.cuda.make_graphed_callables(f, (sample,))
""",
        "CG101 error 3",
    ),
    "graphed_module": (
        """\
import torch
from torch.cuda import make_graphed_callables
class M(torch.nn.Module):
    def forward(self, x):
        return x * x.sum().item()
def build():
    m = M().cuda()
    return make_graphed_callables((m, m), ((torch.zeros(4, device="cuda"),), (torch.zeros(4, device="cuda"),)))
""",
        "CG101 error 5",
    ),
    "exitstack": (
        """\
import torch, contextlib
x = torch.zeros(4, device="cuda")
with contextlib.ExitStack() as stack:
    stack.enter_context(torch.cuda.graph(torch.cuda.CUDAGraph()))
    y = x.tolist()
z = x.tolist()
""",
        "CG101 error 5",
    ),
    "exitstack_closed": (
        """\
import torch, contextlib
x = torch.zeros(4, device="cuda")
stack = contextlib.ExitStack()
stack.enter_context(torch.cuda.graph(torch.cuda.CUDAGraph()))
with contextlib.ExitStack() as inner:
    inner.enter_context(torch.no_grad())
    inner.close()
y = x.tolist()
stack.pop_all().close()
z = x.tolist()
""",
        "CG101 error 8",
    ),
    "named": (
        """\
import torch
def decode_step(x, cache):
    cache.add_(x)
    return x * x.sum().item()
def helper(x):
    return x.sum().item()
""",
        "CG101 warning 4",
    ),
    "named_method": (
        """\
import torch
class Engine:
    def __init__(self):
        self.w = torch.zeros(4, device="cuda")
    def decode_step(self, x):
        return self.w * x.sum().item()
""",
        "CG101 warning 6",
    ),
    "main": (
        """\
import torch
def run(x):
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        y = x * x.sum().item()
    return y
if __name__ == "__main__":
    run(torch.zeros(4, device="cuda"))
""",
        "CG101 error 5",
    ),
    "called": (
        """\
import torch
def work(x):
    return x * x.sum().item()
def main():
    x = torch.zeros(4, device="cuda")
    work(x)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        work(x)
main()
""",
        "CG101 error 3",
    ),
    "conditional": (
        """\
import torch
def main(use: bool, x: torch.Tensor):
    w = torch.zeros(4, device="cuda")
    if use:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            w.sum().item()
""",
        "CG101 error 6",
    ),
    "if_defined": (
        """\
import torch
try:
    import apex
except ImportError:
    def f():
        w = torch.zeros(4, device="cuda")
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            w.sum().item()
""",
        "CG101 error 8",
    ),
    "none": (
        """\
import torch
def train(loss: torch.Tensor):
    return loss.item()
""",
        None,
    ),
    "none2": (
        """\
x = 1
""",
        None,
    ),
    "graph_other": (
        """\
import networkx
def f():
    with networkx.graph() as g:
        g.item()
""",
        None,
    ),
    "one_gpu": (
        """\
import torch
def capture(fn, *args):
    static = [a.clone() for a in args]
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        out = fn(*static)
    return g, out
""",
        "",
    ),
    "factory_inputs_with_options": (
        """\
import torch
def inputs(i, n=4): return (torch.full((n,), float(i), device="cuda"),)
def decode(batch=4, *, dtype=torch.float32):
    def step(x):
        torch.cuda.synchronize()
        return x + 1
    return step, inputs
def mask(*, width: int = 4):
    def step(x):
        return x[x > 3].sum()
    return step, lambda i, n=4: (torch.full((n,), float(i), device="cuda"),)
""",
        "CG106 error 5, CG104 error 10",
    ),
    "factory_needs_arguments": (
        """\
import torch
def decode(batch):
    def step(x):
        return x / x.max().item()
    return step, lambda i: (torch.ones(4, device="cuda"),)
def pair(batch=4):
    def step(x):
        return x / x.max().item()
    return step, lambda i, j: (torch.ones(4, device="cuda"),)
def options(batch=4):
    def step(x):
        return x / x.max().item()
    return step, lambda i, *, n: (torch.ones(4, device="cuda"),)
""",
        None,
    ),
    "step_with_options_returns_a_pair": (
        """\
import torch
def decode_step(x: torch.Tensor = None, scale=1.0):
    y = x / x.max().item()
    return y, scale
""",
        "CG101 warning 3",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_captures_are_read_where_they_stand(name: str, tmp_path: Path) -> None:
    text, wanted = FILES[name]
    path = tmp_path / f"{name}.py"
    path.write_text(text)
    report = check_tree(str(path))
    assert report.facts["unread"] == []
    assert ", ".join(f"{f.code} {f.severity} {f.line}" for f in report.findings) == (wanted or "")
    assert (report.facts["steps found"] == 0) is (wanted is None)


def run(*argv: object) -> int:
    parser = argparse.ArgumentParser()
    cli.add_parsers(parser.add_subparsers(dest="command"))
    args = parser.parse_args([str(a) for a in argv])
    return int(args.run(args))


def test_no_step_is_no_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty, good, bad = (tmp_path / f"{name}.py" for name in ("none", "docs_ok", "docs"))
    for path in (empty, good, bad):
        path.write_text(FILES[path.stem][0])
    assert run("check", empty) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "0 steps found" in captured.err
    assert run("check", empty, "--allow-no-steps") == 0
    assert "0 steps found" in capsys.readouterr().out
    assert run("check", good) == 0
    assert "nothing found" in capsys.readouterr().out
    assert run("check", empty, good) == 0  # one of them has a step
    assert run("check", empty, bad) == 1
    assert run("check", tmp_path) == 1
    bad.unlink()
    good.unlink()
    assert run("check", tmp_path) == 2


@pytest.fixture(scope="module")
def hook(repo: Path) -> list[str]:
    """The command of the hook `onegraph-check`, as pre-commit puts it together, without the file names."""
    hooks = yaml.safe_load((repo / ".pre-commit-hooks.yaml").read_text())
    (found,) = (h for h in hooks if h["id"] == "onegraph-check")
    program, *rest = shlex.split(found["entry"])
    assert program == "onegraph"
    return [sys.executable, "-m", "onegraph", *rest, *found.get("args", [])]


@pytest.mark.parametrize(
    ("names", "status"),
    [
        (["docs_ok", "none", "none2", "one_gpu"], 0),
        (["none", "none2"], 0),
        (["docs_ok", "none", "docs"], 1),
        (["named"], 1),
        (["broken", "docs_ok"], 2),
    ],
)
def test_the_hook_fails_on_a_hazard_and_on_nothing_else(
    names: list[str], status: int, hook: list[str], repo: Path, tmp_path: Path
) -> None:
    for name in names:
        (tmp_path / f"{name}.py").write_text(FILES.get(name, ("import torch\ndef f(:\n", None))[0])
    environment = {**os.environ, "PYTHONPATH": str(repo / "src")}
    done = subprocess.run(
        [*hook, *(f"{n}.py" for n in names)], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert ("CG101" in done.stdout) is (status == 1)
