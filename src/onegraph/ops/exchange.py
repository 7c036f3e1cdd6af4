"""What ranks hand each other inside of a step: sums of partial results, and the parts of a row.

A **rank** is a device that runs all layers on its shard of the weights, in parallel with others of the process. Each
has a peer buffer that its peers write into, and a state that counts the exchanges of each chunk of the buffer. Ops take
the peer buffers of all ranks and their own rank's state, and every rank calls the same ops in the same order. All ranks
get the same bits: sums are formed in float32 in rank order.

A rank whose peer does not come waits for a bounded time, raises the alarm and goes on with what it has; from then on it
waits no more (`onegraph.nn.peers.Peers` turns the alarm into an error). Ranks that are not armed do not exchange: each
goes on with its own part, so that one of them alone can warm up and be captured.
"""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from onegraph.ops.checks import FLOATS
from onegraph.ops.ranks import (
    ALARM,
    ARMED,
    CHUNK,
    EXPIRED,
    LAST_ROUND,
    LIMIT,
    MAX_RANKS,
    MODE,
    RAISED,
    RECORDS,
    ROUNDS,
    new_state,
    part_of,
    state_words,
)
from onegraph.ops.registry import Case, Op, nbytes, register


def swap(
    payload: Tensor, sizes: Sequence[int], inboxes: list[Tensor], state: Tensor, alarm: Tensor, rank: int
) -> list[Tensor]:
    """Send the words int32 [W] to all peers and take theirs, `sizes` of each; zeros of a peer that did not come."""
    rounds = state[ROUNDS : ROUNDS + -(-max(sizes) // CHUNK)]
    numbers, limit = rounds.repeat_interleave(CHUNK), int(state[LIMIT])
    armed = int(state[MODE]) == ARMED
    alone = not armed
    buffers, places = numbers & 1, torch.arange(len(numbers), device=state.device)
    for peer in range(len(inboxes)):
        if peer != rank and armed:
            own = slice(0, len(payload))
            packets = payload.long() & 0xFFFFFFFF | numbers[own] << 32
            inboxes[peer][buffers[own], rank, places[own]] = packets
    found = []
    for peer in range(len(inboxes)):
        theirs = slice(0, sizes[peer])
        at = buffers[theirs], peer, places[theirs]
        if peer == rank:
            found.append(payload)
            continue
        alone = alone or not _came(inboxes[rank], at, numbers[theirs], state, alarm, rank, limit)
        words = inboxes[rank][at]
        found.append(torch.zeros_like(words, dtype=torch.int32) if alone else _low(words))
    rounds.copy_(torch.where(rounds == LAST_ROUND, 1, rounds + 1))
    return found


def _came(
    inbox: Tensor, at: tuple[Tensor, int, Tensor], numbers: Tensor, state: Tensor, alarm: Tensor, rank: int, limit: int
) -> bool:
    """Wait until all words are of their rounds; False, and the alarm, where that takes longer than `limit`."""
    begun = time.monotonic_ns()
    while not bool((inbox[at] >> 32 == numbers).all()):
        late = time.monotonic_ns() - begun > limit
        if late:
            alarm[RECORDS + 2 * rank], alarm[RECORDS + 2 * rank + 1] = at[1] + 1, numbers[0]
            alarm[RAISED] = 1
        if late or int(alarm[RAISED]):
            state[MODE] = EXPIRED
            return False
        time.sleep(2e-5)  # the peer may be another thread of this process, which needs the interpreter
    return True


def _low(words: Tensor) -> Tensor:
    return words.view(torch.int32)[::2].contiguous()


def _reduce(x: Tensor, add: Tensor | None, inboxes: list[Tensor], state: Tensor, alarm: Tensor, rank: int) -> Tensor:
    payload = x.flatten().view(torch.int32)
    parts = swap(payload, [len(payload)] * len(inboxes), inboxes, state, alarm, rank)
    total = torch.zeros(x.numel(), dtype=torch.float32, device=x.device)
    for part in parts:
        total += part.view(x.dtype).float()
    if add is not None:
        total += add.flatten().float()
    return total.to(x.dtype).view_as(x)


def _gather(x: Tensor, width: int, unit: int, inboxes: list[Tensor], state: Tensor, alarm: Tensor, rank: int) -> Tensor:
    rows, ranks = x.shape[0], len(inboxes)
    spans = [part_of(width, unit, ranks, peer) for peer in range(ranks)]
    sizes = [rows * (last - first) for first, last in spans]
    parts = swap(x.flatten().view(torch.int32), sizes, inboxes, state, alarm, rank)
    return torch.cat([part.view(torch.float32).view(rows, -1) for part in parts], dim=1)


def check_group(op: str, words: int, inboxes: list[Tensor], state: Tensor, alarm: Tensor, rank: int) -> None:
    if not 1 <= len(inboxes) <= MAX_RANKS or not 0 <= rank < len(inboxes):
        raise ValueError(f"{op}: rank {rank} of {len(inboxes)}; allowed are 1 to {MAX_RANKS} ranks, from 0 on")
    ranks, own = len(inboxes), inboxes[rank]
    for inbox in inboxes:
        if inbox.dtype != torch.int64 or inbox.dim() != 3 or inbox.shape[:2] != (2, ranks) or inbox.shape != own.shape:
            raise ValueError(
                f"{op}: a peer buffer is {inbox.dtype} {tuple(inbox.shape)}; all must be int64 [2, {ranks}, words]"
            )
        if not inbox.is_contiguous():
            raise ValueError(f"{op}: a peer buffer has strides {inbox.stride()}; it must be contiguous")
    for name, tensor, size in (("state", state, state_words(own.shape[2])), ("alarm", alarm, ALARM)):
        if tensor.dtype != torch.int64 or tensor.shape != (size,) or not tensor.is_contiguous():
            raise ValueError(f"{op}: {name} is {tensor.dtype} {tuple(tensor.shape)}; it must be int64 [{size}]")
    if words > own.shape[2]:
        raise ValueError(
            f"{op}: a rank sends {words} words of 4 bytes, a peer buffer has room for {own.shape[2]}; send less at once"
        )


def _check_reduce(
    x: Tensor, add: Tensor | None, inboxes: list[Tensor], state: Tensor, alarm: Tensor, rank: int
) -> None:  # fmt: skip
    if x.dtype not in FLOATS or not x.is_contiguous() or x.numel() * x.element_size() % 4:
        raise ValueError(
            f"all_reduce: x is {x.dtype} {tuple(x.shape)}; it must be contiguous float32, bfloat16 or float16, in "
            "whole words of 4 bytes"
        )
    if add is not None and (add.dtype != x.dtype or add.shape != x.shape or not add.is_contiguous()):
        raise ValueError(f"all_reduce: add is {add.dtype} {tuple(add.shape)}; it must be as x, {tuple(x.shape)}")
    check_group("all_reduce", x.numel() * x.element_size() // 4, inboxes, state, alarm, rank)


def _check_gather(
    x: Tensor, width: int, unit: int, inboxes: list[Tensor], state: Tensor, alarm: Tensor, rank: int
) -> None:
    check_group("all_gather", 0, inboxes, state, alarm, rank)
    first, last = part_of(width, unit, len(inboxes), rank)
    start, end = part_of(width, unit, len(inboxes), len(inboxes) - 1)
    if start == end:  # who sends nothing is not waited for, and what it has not read yet would be written over
        raise ValueError(
            f"all_gather: {width} in units of {unit} leave nothing for the last of {len(inboxes)} ranks; take a "
            "smaller unit"
        )
    if x.dtype != torch.float32 or x.dim() != 2 or x.shape[1] != last - first or not x.is_contiguous():
        raise ValueError(
            f"all_gather: x is {x.dtype} {tuple(x.shape)}; rank {rank} must give contiguous float32 [rows, "
            f"{last - first}] of {width} in units of {unit}"
        )
    check_group("all_gather", x.shape[0] * part_of(width, unit, len(inboxes), 0)[1], inboxes, state, alarm, rank)


def alone(device: torch.device, words: int = 4096) -> tuple[list[Tensor], Tensor, Tensor]:
    """Of the only rank there is; several are for tests of their own, since each must run beside the others."""
    alarm = torch.zeros(ALARM, dtype=torch.int64)
    inbox = torch.zeros(2, 1, words, dtype=torch.int64, device=device)
    return [inbox], new_state(device, 1.0, words), alarm.pin_memory() if device.type == "cuda" else alarm


def _reduce_case(rows: int, width: int, add: bool) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        x, other = (torch.randn(rows, width, generator=generator).to(device, dtype) for _ in range(2))
        return x, other if add else None, *alone(device), 0

    return Case(name=f"{rows}x{width}{'+add' if add else ''}", make=make)


def _gather_case(rows: int, width: int) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        return torch.randn(rows, width, generator=generator).to(device), width, 1, *alone(device), 0

    return Case(name=f"{rows}x{width}", make=make)


_EXACT = {torch.float32: 0.0, torch.float16: 0.0, torch.bfloat16: 0.0}

all_reduce = register(
    Op(
        name="all_reduce",
        schema="(Tensor x, Tensor? add, Tensor(a!)[] inboxes, Tensor(b!) state, Tensor(c!) alarm, int rank) -> Tensor",
        reference=_reduce,
        fake=lambda x, *rest: torch.empty_like(x),
        kernel="onegraph.ops.cuda.exchange:all_reduce",
        sole=True,
        check=_check_reduce,
        cases=(_reduce_case(1, 64, False), _reduce_case(5, 34, True)),
        tolerance={torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3},
        bytes_moved=lambda x, add, inboxes, *rest: (2 + 4 * (len(inboxes) - 1)) * nbytes(x) + nbytes(add),
        flops=lambda x, add, inboxes, *rest: len(inboxes) * x.numel(),
    )
)
"""The sum of all ranks' x [...], of one shape, plus `add` of that shape (the residual stream, the same on all ranks),
rounded once, as x. inboxes: of each rank int64 [2, ranks, words]; state: this rank's, int64 [`state_words`]; alarm:
int64 [17], in the host's memory; rank: this one."""

all_gather = register(
    Op(
        name="all_gather",
        schema="(Tensor x, int width, int unit, Tensor(a!)[] inboxes, Tensor(b!) state, Tensor(c!) alarm, int rank) "
        "-> Tensor",
        reference=_gather,
        fake=lambda x, width, *rest: x.new_empty(x.shape[0], width),
        kernel="onegraph.ops.cuda.exchange:all_gather",
        sole=True,
        check=_check_gather,
        cases=(_gather_case(1, 64), _gather_case(3, 33)),
        tolerance=_EXACT,
        bytes_moved=lambda x, width, unit, inboxes, *rest: 2 * 4 * x.shape[0] * width + 2 * len(inboxes) * nbytes(x),
        flops=lambda x, *rest: x.numel(),
    )
)
"""The ranks' parts side by side: x float32 [rows, part] of each (`part_of`) -> [rows, width]. The others as of
`all_reduce`."""
