"""Pieces of a step captured one by one: what lies between them, and outputs that only the pool holds."""

from pathlib import Path

import pytest
from programs import HEAD, line_of, lines, ran

PIECES = """
import torch
x = torch.ones(8, device="cuda")
w = torch.full((8,), 2.0, device="cuda")

def attention(q):
    return q * 2  # not captured

for _ in range(2):
    a = x * w
    b = attention(a)
    c = b + 1
pool = torch.cuda.graph_pool_handle()
first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
with torch.cuda.graph(first, pool=pool):
    a = x * w
b = attention(a)
with torch.cuda.graph(second, pool=pool):
    c = b + 1
for i in range(4):
    x.fill_(float(i))
    first.replay()
    BETWEEN
    second.replay()
    print(c[0].item())
"""


def test_a_bridge_that_nothing_writes_again_is_stale(tmp_path: Path) -> None:
    text = PIECES.replace("BETWEEN", "made = attention(a)")
    assert lines(ran(tmp_path, text)) == {("CG205", 19)}


def test_a_bridge_that_is_written_each_time_is_clean(tmp_path: Path) -> None:
    assert lines(ran(tmp_path, PIECES.replace("BETWEEN", "b.copy_(attention(a))"))) == set()
    assert lines(ran(tmp_path, PIECES.replace("BETWEEN", "torch.mul(a, 2, out=b)"))) == set()


def test_graphs_of_two_pools_are_no_pieces_of_one_step(tmp_path: Path) -> None:
    text = PIECES.replace("BETWEEN", "pass").replace("second, pool=pool", "second")
    assert lines(ran(tmp_path, text)) == set()


WEAK = """
import torch
x = torch.ones(8, device="cuda")

class Weak:
    def __init__(self, tensor):
        self.__cuda_array_interface__ = tensor.__cuda_array_interface__

a, c = x * 2, x + 1
pool = torch.cuda.graph_pool_handle()
first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
with torch.cuda.graph(first, pool=pool):
    a = x * 2
weak = torch.as_tensor(Weak(a), device="cuda")
DROP
with torch.cuda.graph(second, pool=pool):
    c = x + 1
for i in range(3):
    x.fill_(float(i))
    first.replay()
    second.replay()
    print(weak[0].item())
"""


def test_an_output_that_only_a_view_without_ownership_refers_to_is_overwritten(tmp_path: Path) -> None:
    text = WEAK.replace("DROP", "del a")
    assert lines(ran(tmp_path, text)) == {("CG312", line_of(text, "print(weak"))}


def test_one_that_somebody_owns_is_not(tmp_path: Path) -> None:
    assert lines(ran(tmp_path, WEAK.replace("DROP", "kept = a"))) == set()


BREAKABLE = """
runner, parts, pool = None, [], torch.cuda.graph_pool_handle()
graph = None


def begin():
    global graph
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool)


def end():
    graph.capture_end()
    parts.append(graph.replay)


def attend(t):  # a piece that no capture can hold: it ends one, runs, and begins the next
    if runner is None:
        return count(t)
    end()
    out = count(t)
    parts.append(lambda: out.copy_(count(t)) if COPIES else count(t))
    begin()
    return out


def count(t):
    return t * (int((t > 0).sum().item()) + 1)


def model(t):
    return (attend(torch.relu(t @ w)) @ w).sum(-1)


x, w = torch.randn(4, 8, device="cuda"), torch.randn(8, 8, device="cuda")
model(x)
with torch.cuda.stream(torch.cuda.Stream()):
    runner = True
    begin()
    y = model(x)
    end()
    runner = None
torch.cuda.synchronize()
for i in range(3):
    x.copy_(torch.randn(4, 8, device="cuda"))
    for part in parts:
        part()
    assert not COPIES or torch.allclose(y, model(x)), i
"""


@pytest.mark.parametrize("copies", [True, False])
def test_a_capture_that_breaks_for_eager_code_needs_its_result_at_the_old_place(copies: bool, tmp_path: Path) -> None:
    text = HEAD + BREAKABLE.replace("COPIES", str(copies))
    at = line_of(text, "return (attend(")
    assert lines(ran(tmp_path, text)) == (set() if copies else {("CG205", at)})
