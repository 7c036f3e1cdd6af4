"""What a graph's private pool holds: the captured step's storages under the rules of torch's caching allocator.

The rules are those of c10/cuda/CUDACachingAllocator.cpp without options: blocks are multiples of 512 bytes, those of up
to 1 MiB lie in segments of 2 MiB, larger ones in segments of 20 MiB or, from 10 MiB on, of their own size in whole
2 MiB; the smallest free block that fits is taken and split; freed neighbours join. Memory that kernels ask for by
themselves (workspaces of cuBLAS, intermediates of one op) is not in it.
"""

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from onegraph.check.simulate import frames
from onegraph.check.simulate.records import Step

_BLOCK, _SMALL, _SMALL_SEGMENT = 512, 1 << 20, 2 << 20
_LARGE_SEGMENT, _OWN_SEGMENT, _ROUND = 20 << 20, 10 << 20, 2 << 20
_MOST_LINES = 8


@dataclass(slots=True, eq=False)
class Block:
    """A piece of a segment. before, after: its neighbours there."""

    segment: int
    start: int
    size: int
    small: bool
    free: bool = True
    before: "Block | None" = None
    after: "Block | None" = None


class Pool:
    """A private pool: `reserved` bytes of segments, `used` bytes of blocks; blocks by the number of their storage."""

    def __init__(self) -> None:
        self.reserved = self.used = self.segments = 0
        self.blocks: dict[int, Block] = {}
        self._free: dict[bool, list[tuple[int, int, int]]] = {True: [], False: []}
        self._at: dict[tuple[int, int], Block] = {}

    def allocate(self, number: int, nbytes: int) -> None:
        """Storage `number` of `nbytes` bytes; none are no block."""
        if nbytes <= 0:
            return
        size = max(-(-nbytes // _BLOCK) * _BLOCK, _BLOCK)
        small = size <= _SMALL
        free = self._free[small]
        found = bisect_left(free, (size, -1, -1))
        if found < len(free):
            _, segment, start = free.pop(found)
            block = self._at[segment, start]
        else:
            block = self._segment(size, small)
        left = block.size - size
        if left >= _BLOCK if small else left > _SMALL:
            self._split(block, size)
        block.free = False
        self.used += block.size
        self.blocks[number] = block

    def release(self, number: int) -> None:
        """The last tensor of storage `number` is gone."""
        block = self.blocks.pop(number, None)
        if block is None:
            return
        self.used -= block.size
        block.free = True
        if block.before is not None and block.before.free:
            self._take(block.before)
            block = self._join(block.before, block)
        if block.after is not None and block.after.free:
            self._take(block.after)
            block = self._join(block, block.after)
        insort(self._free[block.small], (block.size, block.segment, block.start))

    def _segment(self, size: int, small: bool) -> Block:
        total = _SMALL_SEGMENT if small else _LARGE_SEGMENT if size < _OWN_SEGMENT else -(-size // _ROUND) * _ROUND
        self.reserved += total
        self.segments += 1
        block = self._at[self.segments, 0] = Block(self.segments, 0, total, small)
        return block

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.segment, block.start + size, block.size - size, block.small, True, block, block.after)
        if block.after is not None:
            block.after.before = rest
        block.size, block.after = size, rest
        self._at[rest.segment, rest.start] = rest
        insort(self._free[rest.small], (rest.size, rest.segment, rest.start))

    def _take(self, block: Block) -> None:
        free = self._free[block.small]
        free.pop(bisect_left(free, (block.size, block.segment, block.start)))

    def _join(self, first: Block, second: Block) -> Block:
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        del self._at[second.segment, second.start]
        return first


@dataclass(frozen=True, slots=True)
class Need:
    """What one capture asks of its pool, in bytes. reserved: by how much the segments grow; peak: most of blocks alive
    at once; kept: blocks that live on after it (outputs); alive: storages of the peak, by number, as (ops before they
    were made, bytes). spans: (segment, first byte, end) of every storage, by number."""

    reserved: int
    peak: int
    kept: int
    alive: dict[int, tuple[int, int]]
    spans: dict[int, tuple[int, int, int]]


def charge(pool: Pool, step: Step, shift: int = 0) -> Need:
    """Play what `step` allocated and freed into `pool`; `shift` sets its storages apart from those of another time."""
    before, base = pool.reserved, pool.used
    peak, alive = 0, {}
    held: dict[int, tuple[int, int]] = {}
    spans: dict[int, tuple[int, int, int]] = {}
    for number, nbytes, position in step.memory[: step.memory_end]:
        if nbytes < 0:
            pool.release(number + shift)
            held.pop(number, None)
            continue
        pool.allocate(number + shift, nbytes)
        held[number] = (position, nbytes)
        if (block := pool.blocks.get(number + shift)) is not None:
            spans[number] = (block.segment, block.start, block.start + block.size)
        if pool.used - base > peak:
            peak, alive = pool.used - base, dict(held)
    return Need(pool.reserved - before, peak, pool.used - base, alive, spans)


def facts(step: Step, locate: Callable[[frames.Chain], frames.CodeLocation | None]) -> dict[str, Any]:
    """The memory of a graph of `step` as a report tells it: bytes, and whose lines' tensors are alive at the peak."""
    pool = Pool()
    need = charge(pool, step)
    again = charge(pool, step, shift=1 << 40)
    return told(need, step, locate) | {"second graph of the pool": again.reserved}


def told(need: Need, step: Step, locate: Callable[[frames.Chain], frames.CodeLocation | None]) -> dict[str, Any]:
    """`need` in words and numbers that JSON has."""
    return {
        "pool": need.reserved,
        "peak": need.peak,
        "kept": need.kept,
        "at the peak": _lines(need, step, locate),
    }


def _lines(
    need: Need, step: Step, locate: Callable[[frames.Chain], frames.CodeLocation | None]
) -> list[dict[str, Any]]:
    """Lines whose tensors are alive at the peak, the largest first."""
    found: dict[tuple[str, int, str], list[int]] = {}
    for position, nbytes in need.alive.values():
        place = locate(step.ops[position].chain) if position < len(step.ops) else None
        if place is not None:
            found.setdefault((place.path, place.line, place.source.strip()), []).append(nbytes)
    ranked = sorted(found.items(), key=lambda item: (-sum(item[1]), item[0]))
    return [
        {"path": path, "line": line, "source": source, "bytes": sum(sizes), "tensors": len(sizes)}
        for (path, line, source), sizes in ranked[:_MOST_LINES]
    ]
