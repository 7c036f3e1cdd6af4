"""Launches `exchange.cu`."""

from functools import cache

import torch
from torch import Tensor

from onegraph.ops.cuda import build
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


@cache
def _kernels(world: int, item: int, device: int) -> tuple[build.Kernel, ...]:
    return KERNEL.load({"WORLD": world, "ITEM": item}, device)


def all_reduce(x: Tensor, add: Tensor | None, inboxes: list[Tensor], state: Tensor, alarm: Tensor, rank: int) -> Tensor:
    """See `onegraph.ops.exchange.all_reduce`."""
    out = torch.empty_like(x)
    words = x.numel() * x.element_size() // 4
    _launch(0, x, out, words, inboxes, state, alarm, rank, add=build.pointer(add), words=words, rows=1, part=words)
    return out


def all_gather(
    x: Tensor, width: int, unit: int, inboxes: list[Tensor], state: Tensor, alarm: Tensor, rank: int
) -> Tensor:
    """See `onegraph.ops.exchange.all_gather`."""
    out = x.new_empty(x.shape[0], width)
    part = part_of(width, unit, len(inboxes), 0)[1]
    most = x.shape[0] * part
    _launch(1, x, out, most, inboxes, state, alarm, rank, add=0, words=width, rows=x.shape[0], part=part)
    return out


def given(inboxes: list[Tensor], state: Tensor, alarm: Tensor, rank: int) -> dict[str, int]:
    """POINTERS and INTS of a rank."""
    boxes = {f"inbox{i}": inboxes[i].data_ptr() if i < len(inboxes) else 0 for i in range(MAX_RANKS)}
    return build.addresses(state=state, alarm=alarm) | boxes | {"room": inboxes[0].shape[2], "rank": rank}


def _launch(
    function: int, x: Tensor, out: Tensor, work: int, inboxes: list[Tensor], state: Tensor, alarm: Tensor, rank: int,
    **rest: int,
) -> None:  # fmt: skip
    device, world = x.device.index, len(inboxes)
    arguments = ARGUMENTS.pack(**build.addresses(x=x, out=out), **given(inboxes, state, alarm, rank), **rest)
    # A block an SM at most: all of them run at once, and whoever waits keeps nobody from sending.
    blocks = max(1, min(-(-work // THREADS), build.device(device).sms))
    kernel = _kernels(world, ITEMS[x.dtype], device)[function]
    with torch.cuda.device(x.device):  # the driver launches in the current context
        kernel.launch((blocks, 1, 1), THREADS, 0, 1, torch.cuda.current_stream().cuda_stream, arguments)
