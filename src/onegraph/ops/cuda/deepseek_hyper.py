"""Launches `deepseek_hyper.cu`; what it does not take goes to Triton's kernels."""

import torch
from torch import Tensor

from onegraph.ops.cuda import build
from onegraph.ops.cuda.launcher import Launch, launch

STREAMS = 4
BLOCKS = 16  # of a cluster, which owns a token, or some of several
COLUMNS = 64 * BLOCKS  # of a stream: a warp's lanes hold two columns each
MAX_COLUMNS = 8 * COLUMNS  # 512 threads a block, 128 registers each
MAX_TOKENS = 16  # above, a program for each slice of each token fills the GPU

ARGUMENTS = build.Arguments(
    pointers=(
        "streams", "x", "post", "comb", "fn", "base", "scale", "norm", "out", "post_out", "comb_out",
    ),
    ints=("tokens", "iterations"),
    floats=("eps", "floor"),
)  # fmt: skip
KERNEL = build.Source(
    "deepseek_hyper",
    ops=("hyper_update_mix",),
    functions=("hyper_update_mix",),
    arguments=ARGUMENTS,
    capabilities=build.CLUSTERS,
    example={"HALF": 0, "WIDE": 1, "DIM": 4096, "PER": 1},
    otherwise="Triton's run",
)


def supports_input(streams: Tensor, norm: Tensor) -> bool:
    """Whether `deepseek_hyper.cu` computes on streams [..., H, D] with this weight of the norm."""
    *_, h, dim = streams.shape
    return (
        norm.dtype in (streams.dtype, torch.float32)
        and streams.dtype in (torch.bfloat16, torch.float16)
        and h == STREAMS
        and dim % COLUMNS == 0
        and dim <= MAX_COLUMNS
        and 0 < streams.numel() // (h * dim) <= MAX_TOKENS
    )


def defines(streams: Tensor, norm: Tensor, per: int) -> dict[str, int]:
    """What the kernel is compiled with, whose clusters take `per` tokens each."""
    half, wide = streams.dtype == torch.float16, norm.dtype == torch.float32
    return {"HALF": int(half), "WIDE": int(wide), "DIM": streams.shape[-1], "PER": per}


def hyper_update_mix(
    streams: Tensor, x: Tensor, post: Tensor, comb: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm: Tensor,
    eps: float, floor: float, iterations: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See `onegraph.ops.deepseek_hyper.hyper_update_mix`."""
    device = streams.device.index
    if not supports_input(streams, norm) or not KERNEL.is_built(device):
        from onegraph.ops.triton.deepseek_hyper import hyper_update_mix as fallback  # compiled as of its import

        return fallback(streams, x, post, comb, fn, base, scale, norm, eps, floor, iterations)
    *lead, h, dim = streams.shape
    out, post_out, comb_out = x.new_empty((*lead, dim)), torch.empty_like(post), torch.empty_like(comb)
    tokens = streams.numel() // (h * dim)
    # Of more tokens than clusters that run side by side each has two, and reads the weights once for them.
    per = 2 if tokens > build.device(device).sms // BLOCKS else 1
    launch(
        KERNEL, defines(streams, norm, per), Launch((BLOCKS * -(-tokens // per), 1, 1), dim // BLOCKS, 0, BLOCKS),
        streams=streams, x=x, post=post, comb=comb, fn=fn, base=base, scale=scale, norm=norm, out=out,
        post_out=post_out, comb_out=comb_out, tokens=tokens, iterations=iterations, eps=eps, floor=floor,
    )  # fmt: skip
    return out, post_out, comb_out
