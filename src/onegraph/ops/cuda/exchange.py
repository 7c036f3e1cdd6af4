"""Launches `exchange.cu`."""

from typing import Any

import torch
from torch import Tensor

from onegraph.ops.cuda import build
from onegraph.ops.cuda.launcher import Launch, launch
from onegraph.ops.ranks import CHUNK, MAX_RANKS, part_of

THREADS = 2 * CHUNK
ITEMS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

# What `Exchange` of exchange.cuh asks of a kernel's arguments.
POINTERS = "state", "alarm", *(f"inbox{i}" for i in range(MAX_RANKS))
INTS = "room", "rank"
ARGUMENTS = build.Arguments(pointers=("x", "add", "out", *POINTERS), ints=(*INTS, "words", "rows", "part"))
KERNEL = build.Source(
    "exchange",
    # The last two where e8p_decode.cu and deepseek_hyper_ranks.cu do not run them.
    ops=("all_reduce", "all_gather", "e8p_all_reduce", "hyper_all_reduce"),
    functions=("all_reduce", "all_gather"),
    arguments=ARGUMENTS,
    capabilities=build.PORTABLE,
    example={"WORLD": 8, "ITEM": 1},
    families=("hopper", "portable"),
    sole=True,
)


def all_reduce(x: Tensor, add: Tensor | None, inboxes: list[Tensor], state: Tensor, alarm: Tensor, rank: int) -> Tensor:
    """See `onegraph.ops.exchange.all_reduce`."""
    out, words = torch.empty_like(x), x.numel() * x.element_size() // 4
    _exchange("all_reduce", x, out, words, (inboxes, state, alarm, rank), add=add, words=words, rows=1, part=words)
    return out


def all_gather(
    x: Tensor, width: int, unit: int, inboxes: list[Tensor], state: Tensor, alarm: Tensor, rank: int
) -> Tensor:
    """See `onegraph.ops.exchange.all_gather`."""
    rows, part = x.shape[0], part_of(width, unit, len(inboxes), 0)[1]
    out = x.new_empty(rows, width)
    group = inboxes, state, alarm, rank
    _exchange("all_gather", x, out, rows * part, group, add=None, words=width, rows=rows, part=part)
    return out


def peer_arguments(inboxes: list[Tensor], state: Tensor, alarm: Tensor, rank: int) -> dict[str, Any]:
    """POINTERS and INTS of a rank. Peer buffers, which lie on other GPUs too, by address."""
    boxes = [box.data_ptr() for box in inboxes] + [0] * (MAX_RANKS - len(inboxes))
    return dict(zip((*POINTERS, *INTS), (state, alarm, *boxes, inboxes[0].shape[2], rank), strict=True))


def _exchange(
    function: str, x: Tensor, out: Tensor, work: int, group: tuple[list[Tensor], Tensor, Tensor, int], **rest: Any
) -> None:
    # A block an SM at most: all of them run at once, and whoever waits keeps nobody from sending.
    blocks = max(1, min(-(-work // THREADS), build.device(x.device.index).sms))
    launch(
        KERNEL, {"WORLD": len(group[0]), "ITEM": ITEMS[x.dtype]}, Launch((blocks, 1, 1), THREADS, function=function),
        x=x, out=out, **peer_arguments(*group), **rest,
    )  # fmt: skip
