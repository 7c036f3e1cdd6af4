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


UNORDERED = """
import torch
x, static, y = (torch.zeros(4, device="cuda") for _ in range(3))
first, second, side = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph(), torch.cuda.Stream()
with torch.cuda.stream(side):
    first.capture_begin()
    a = MADE
    first.capture_end()
    BEFORE
    b = a * 3  # between two pieces
    second.capture_begin()
    y.copy_(b)
    second.capture_end()
for i in range(3):
    x.fill_(float(i))
    first.replay()
    b.copy_(a * 3)
    second.replay()
    assert y[0].item() == 3 * (i + 1)
"""


@pytest.mark.parametrize(("made", "code"), [("x + 1", "CG209"), ("static.copy_(x + 1)", "CG305")])
def test_a_read_before_the_first_replay_loses_no_result(made: str, code: str, tmp_path: Path) -> None:
    text = UNORDERED.replace("MADE", made)
    assert lines(ran(tmp_path, text.replace("BEFORE", "pass"))) == set()
    after = text.replace("BEFORE", "first.replay(); torch.cuda.synchronize()")
    assert lines(ran(tmp_path, after)) == {(code, line_of(after, "# between"))}


def test_of_memory_that_the_graph_did_not_make_another_stream_may_read_what_was_there(tmp_path: Path) -> None:
    other = "with torch.cuda.stream(torch.cuda.Stream()): there = a * 3"
    text = UNORDERED.replace("MADE", "static.copy_(x + 1)").replace("BEFORE", other)
    assert lines(ran(tmp_path, text)) == {("CG305", line_of(text, "there = "))}


def test_the_null_handle_asks_for_a_pool_of_its_own(tmp_path: Path) -> None:
    text = PIECES.replace("torch.cuda.graph_pool_handle()", "(0, 0)").replace("BETWEEN", "pass")
    assert lines(ran(tmp_path, text)) == set()


ACROSS = """
import torch
x, y = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda")
first, second, main, side = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph(), torch.cuda.Stream(), torch.cuda.Stream()


def captured(handle):
    with torch.cuda.stream(torch.cuda.ExternalStream(handle)):
        return torch.cuda.is_current_stream_capturing()


with torch.cuda.stream(main):
    first.capture_begin()
    assert captured(main.cuda_stream) and not captured(side.cuda_stream)
    side.wait_stream(main)
    assert captured(side.cuda_stream)
    with torch.cuda.stream(side):
        a = x + 1
    main.wait_stream(side)
    first.capture_end()
    second.capture_begin()
    assert not captured(side.cuda_stream)  # it is part of the first capture alone
    if captured(side.cuda_stream):
        main.wait_stream(side)
    y.copy_(a * 2)
    second.capture_end()
first.replay()
second.replay()
assert y[0].item() == 2
"""


def test_a_capture_holds_the_streams_that_wait_for_it(tmp_path: Path) -> None:
    assert lines(ran(tmp_path, ACROSS)) == set()
