"""Pieces of a step captured one by one: what lies between them, and outputs that only the pool holds."""

from pathlib import Path

from programs import line_of, lines, ran

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
