"""What a graph's pool holds: the allocator's rules, lifetimes in a step, and what reports say of both."""

import itertools
import json
import random
from typing import Any

import pytest
import torch

from onegraph.check import check_step
from onegraph.check.output import html, text
from onegraph.check.simulate.memory import Pool

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("nbytes", "used", "reserved"),
    [
        (0, 0, 0),
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (21 * MIB, 22 * MIB, 22 * MIB),  # what is left is split off where it is more than 1 MiB
    ],
)
def test_one_block_and_its_segment(nbytes: int, used: int, reserved: int) -> None:
    pool = Pool()
    pool.allocate(1, nbytes)
    assert (pool.used, pool.reserved) == (used, reserved)


def test_freed_memory_is_used_again_and_neighbours_join() -> None:
    pool = Pool()
    for number in range(4):
        pool.allocate(number, 512 * KIB)
    assert pool.reserved == 2 * MIB
    pool.release(1)
    pool.release(2)
    pool.allocate(5, MIB)  # the two holes together
    assert (pool.reserved, pool.used) == (2 * MIB, 2 * MIB)
    assert pool.blocks[5].start == 512 * KIB


def test_blocks_never_overlap_and_everything_comes_back() -> None:
    rng, pool, live = random.Random(0), Pool(), []
    for number in range(2000):
        if live and rng.random() < 0.5:
            pool.release(live.pop(rng.randrange(len(live))))
        else:
            pool.allocate(number, rng.choice([1, 700, 5000, 300 * KIB, 2 * MIB, 12 * MIB]))
            live.append(number)
        if number % 50 == 0:
            spans = sorted((b.segment, b.start, b.start + b.size) for b in pool.blocks.values())
            assert all(a[0] != b[0] or a[2] <= b[1] for a, b in itertools.pairwise(spans))
    for number in live:
        pool.release(number)
    assert pool.used == 0
    sizes = {}
    for size, segment, _ in (*pool._free[True], *pool._free[False]):
        assert segment not in sizes  # each segment is one block again
        sizes[segment] = size
    assert sum(sizes.values()) == pool.reserved


def chain():
    """Two tensors of 4 MiB are alive at once, never three."""

    def step(x):
        a = x + 1
        b = a * 2
        del a
        c = b - 1
        del b
        return c

    return step, lambda i: (torch.full((1024, 1024), float(i), device="cuda"),)


def keeping():
    """All three are alive at the end."""

    def step(x):
        a = x + 1
        b = a * 2
        c = b - 1
        return a, b, c

    return step, lambda i: (torch.full((1024, 1024), float(i), device="cuda"),)


def test_lifetimes_decide_the_peak() -> None:
    first, second = check_step(chain).facts["memory"], check_step(keeping).facts["memory"]
    assert (first["peak"], first["kept"], first["pool"]) == (8 * MIB, 4 * MIB, 20 * MIB)
    assert (second["peak"], second["kept"]) == (12 * MIB, 12 * MIB)
    assert [line["source"] for line in first["at the peak"]] == ["a = x + 1", "b = a * 2"]
    assert {line["bytes"] for line in second["at the peak"]} == {4 * MIB}


def test_a_second_graph_adds_what_no_free_block_holds() -> None:
    # 3 x 4 MiB stay in a segment of 20; of the second graph's three, two fit beside them.
    assert check_step(keeping).facts["memory"]["second graph of the pool"] == 20 * MIB
    assert check_step(chain).facts["memory"]["second graph of the pool"] == 0


def test_storages_have_their_size_everywhere() -> None:
    report = check_step(keeping)
    assert {(s.kind, s.bytes) for s in report.storages} == {("input", 4 * MIB), ("graph", 4 * MIB)}
    assert {s["bytes"] for s in json.loads(report.to_json())["storages"]} == {4 * MIB}
    page = html.render(report)
    (data,) = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert {s[2] for s in data["storages"]} == {4 * MIB}
    assert data["memory"]["peak"] == 12 * MIB
    assert data["memory"]["at the peak"][0]["file"].endswith("test_memory.py")


def test_one_line_of_text() -> None:
    told = text.summary(check_step(keeping))
    assert "memory of the graph: 20.0 MiB, at its peak 12.0 MiB of tensors (4.0 MiB of line test_memory.py:" in told
    assert "a second such graph in its pool adds 20.0 MiB" in told


def test_text_has_no_memory_of_a_graph_that_cannot_be() -> None:
    def factory() -> Any:
        return (lambda x: x * x.sum().item()), (lambda i: (torch.full((4,), float(i), device="cuda"),))

    report = check_step(factory)
    assert report.facts["memory"]["pool"]
    assert "memory of the graph" not in text.summary(report)
    assert "memory of the graph" in text.summary(report.select(ignore=("CG",)))
