"""Launches `deepseek_hyper_ranks.cu`; what it does not take is exchanged in a launch of its own, then Triton's run."""

import torch
from torch import Tensor

from onegraph.ops.cuda import build, exchange
from onegraph.ops.cuda.deepseek_hyper import BLOCKS, defines, supports_input
from onegraph.ops.cuda.launcher import Launch, launch
from onegraph.ops.ranks import CHUNK

ARGUMENTS = build.Arguments(
    pointers=(
        "streams", "x", "post", "logits", "fn", "base", "scale", "norm", "out", "post_out", "logits_out",
        *exchange.POINTERS,
    ),
    ints=(*exchange.INTS, "tokens", "iterations"),
    floats=("eps", "floor"),
)  # fmt: skip
KERNEL = build.Source(
    "deepseek_hyper_ranks",
    ops=("hyper_all_reduce",),
    functions=("hyper_all_reduce",),
    arguments=ARGUMENTS,
    capabilities=build.CLUSTERS,
    example={"HALF": 0, "WIDE": 1, "DIM": 4096, "PER": 1, "WORLD": 2},
    otherwise="Triton's run, behind an exchange of its own",
)


def words(tokens: int, dim: int) -> int:
    """Of a peer buffer that the kernel uses: a block's begin a chunk."""
    return tokens * BLOCKS * -(-dim // (2 * BLOCKS) // CHUNK) * CHUNK


def hyper_all_reduce(
    streams: Tensor, x: Tensor, post: Tensor, logits: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm: Tensor,
    eps: float, floor: float, iterations: int, inboxes: list[Tensor], state: Tensor, alarm: Tensor, rank: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See `onegraph.ops.deepseek_hyper_ranks.hyper_all_reduce`."""
    *lead, h, dim = streams.shape
    device, tokens, group = streams.device.index, streams.numel() // (h * dim), (inboxes, state, alarm, rank)
    fits = words(tokens, dim) <= inboxes[0].shape[2]
    if not fits or not supports_input(streams, norm) or not KERNEL.is_built(device):
        from onegraph.ops.triton.deepseek_hyper import hyper_update_mix as fallback  # compiled as of its import

        total = exchange.all_reduce(x, None, *group)
        return fallback(streams, total, post, logits, fn, base, scale, norm, eps, floor, iterations, logits=True)
    out, post_out, logits_out = x.new_empty((*lead, dim)), torch.empty_like(post), torch.empty_like(logits)
    per = 2 if tokens > build.device(device).sms // BLOCKS else 1  # as in deepseek_hyper.py
    launch(
        KERNEL, {**defines(streams, norm, per), "WORLD": len(inboxes)},
        Launch((BLOCKS * -(-tokens // per), 1, 1), dim // BLOCKS, 0, BLOCKS),
        streams=streams, x=x, post=post, logits=logits, fn=fn, base=base, scale=scale, norm=norm, out=out,
        post_out=post_out, logits_out=logits_out, tokens=tokens, iterations=iterations, eps=eps, floor=floor,
        **exchange.peer_arguments(*group),
    )  # fmt: skip
    return out, post_out, logits_out
