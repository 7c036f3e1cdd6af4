"""Causal depthwise convolution over the latest tokens of a sequence, as LFM2's layers and linear attention have it.

A sequence keeps the inputs of its latest tokens in a ring, at position modulo its length. Positions before 0 are zeros
whatever the ring holds, so that a recycled slot needs no clearing, and going back to an earlier position needs no copy:
a ring of `width - 1 + n` places holds what a convolution needs after a step of up to n tokens, wherever it begins.
"""

import torch
from torch import Tensor

from onegraph.ops.calls import MAX_TOKENS, ShortConv
from onegraph.ops.cases import Draw
from onegraph.ops.checks import FLOATS, Wanted, check_tensors
from onegraph.ops.deepseek_compress import check_rows, write_ring
from onegraph.ops.registry import Case, Op, nbytes, register


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, ring: Tensor, slots: Tensor, positions: Tensor, silu: bool
) -> Tensor:
    """x [B, Q, C] at positions[b] + i, what came before from the ring -> float32 [B, Q, C]. The ring stays as it is."""
    width, size = weight.shape[1], ring.shape[1]
    before = positions.unsqueeze(1) + torch.arange(1 - width, 0, dtype=torch.int32, device=x.device)
    at = (slots.unsqueeze(1) * size + before % size).flatten().long()
    past = ring.view(-1, ring.shape[2]).index_select(0, at).view(*before.shape, -1)
    past = torch.where((before >= 0).unsqueeze(2), past, 0)
    seen = torch.cat((past, x), dim=1).float()
    out = sum(seen[:, j : j + x.shape[1]] * weight[:, j].float() for j in range(width))
    assert isinstance(out, Tensor)
    if bias is not None:
        out = out + bias.float()
    return torch.nn.functional.silu(out) if silu else out


def _short_conv(call: ShortConv) -> Tensor:
    x, after = call.x, None
    if call.gated:
        before, after, x = call.x.chunk(3, dim=2)
        x = before * x
    out = convolve(x, call.weight, call.bias, call.ring, call.slots, call.positions, call.silu)
    write_ring(call.ring, x, call.slots, call.positions, call.counts)
    return (out if after is None else after.float() * out).to(call.x.dtype)


def check_stacked(op: str, **stacked: Tensor) -> None:
    """Each is a float [B, Q, N], perhaps columns of a wider tensor whose tokens are evenly apart."""
    for name, x in stacked.items():
        if x.dim() != 3 or x.dtype not in FLOATS:
            raise ValueError(
                f"{op}: {name} is {x.dtype} {tuple(x.shape)}; it must be float32, bfloat16 or float16 [B, Q, N]"
            )
        batch, tokens, width = x.shape
        if (width > 1 and x.stride(2) != 1) or (batch > 1 and tokens > 0 and x.stride(0) != tokens * x.stride(1)):
            raise ValueError(
                f"{op}: {name} has strides {x.stride()}; its columns must be contiguous and its tokens evenly apart: "
                "call .contiguous()"
            )


def check_ring(op: str, x: Tensor, ring: Tensor, weight: Tensor) -> None:
    """weight [C, W] of at least 2 columns in x's dtype or float32, a ring for steps of x's tokens."""
    if weight.dim() != 2 or weight.shape[1] < 2 or weight.dtype not in (x.dtype, torch.float32):
        raise ValueError(
            f"{op}: weight is {weight.dtype} {tuple(weight.shape)}; it must be {x.dtype} or float32 [channels, width], "
            "of width 2 or more"
        )
    channels, width = weight.shape
    wanted: dict[str, Wanted] = {
        "ring": (ring, x.dtype, (-1, -1, channels)),
        "weight": (weight, weight.dtype, tuple(weight.shape)),
    }
    check_tensors(op, x.device, **wanted)
    least = width - 1 + (x.shape[1] if x.shape[1] <= MAX_TOKENS else 0)
    if ring.shape[1] < least:
        raise ValueError(
            f"{op}: ring has {ring.shape[1]} places; a convolution of width {width} over {x.shape[1]} tokens needs "
            f"{least}"
        )


def _check(call: ShortConv) -> None:
    op, x = "short_conv", call.x
    check_stacked(op, x=x)
    check_ring(op, x, call.ring, call.weight)
    channels = call.weight.shape[0]
    if x.shape[2] != channels * (3 if call.gated else 1):
        raise ValueError(
            f"{op}: x has {x.shape[2]} columns; {channels} channels need {channels}, or {3 * channels} where gated"
        )
    check_tensors(op, x.device, bias=(call.bias, call.weight.dtype, (channels,)))
    check_rows(op, x, slots=call.slots, positions=call.positions, counts=call.counts)


def _empty(call: ShortConv) -> Tensor:
    return call.x.new_empty((*call.x.shape[:2], call.weight.shape[0]))


def _case(
    name: str, channels: int, width: int, positions: list[int], counts: list[int], *, tokens: int = 0,
    silu: bool = False, bias: bool = False, gated: bool = False, spare: int = 8, apart: int = 0,
) -> Case:  # fmt: skip
    """apart: columns between one token's input and the next one's."""

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        draw = Draw(device, dtype, generator)
        rows, wide = len(positions), channels * (3 if gated else 1)
        x = draw.randn(rows, tokens or max(counts), wide + apart)[..., :wide]
        return (
            x, draw.randn(channels, width), draw.randn(channels) if bias else None,
            draw.randn(rows + 2, width - 1 + spare, channels), draw.ints(list(range(rows, 0, -1))),
            draw.ints(positions), draw.ints(counts), silu, gated,
        )  # fmt: skip

    return Case(name=name, make=make)


short_conv = register(
    Op(
        name="short_conv",
        call=ShortConv,
        schema="-> Tensor",
        reference=_short_conv,
        fake=_empty,
        kernel="onegraph.ops.triton.short_conv:short_conv",
        check=_check,
        cases=(
            _case("lfm2", 64, 3, [0, 1, 2, 700], [1, 1, 1, 1], gated=True),
            _case("lfm2_verify", 64, 3, [0, 5, 9], [4, 0, 3], gated=True, bias=True, apart=8),
            _case("silu", 48, 4, [0, 2, 17], [1, 1, 1], silu=True, apart=16),
            _case("mamba2", 40, 4, [11, 3], [2, 2], silu=True, bias=True),
            _case("chunk", 40, 4, [0, 5, 40, 7], [21, 3, 17, 0], silu=True),
            _case("lfm2_chunk", 24, 3, [0, 64], [70, 13], gated=True, spare=2),
        ),
        tolerance={torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3},
        bytes_moved=lambda call: (
            nbytes(call.x, call.weight) + 3 * call.x.shape[:2].numel() * nbytes(call.weight[:, :1])
        ),
        flops=lambda call: 2 * call.x.shape[:2].numel() * call.weight.numel(),
    )
)  # fmt: skip
"""x [B, Q, C] -> [B, Q, C], the convolution of each channel with weight [C, W] (the last column is the token's own)
and bias [C], then SiLU where `silu`; float32 inside, rounded once.

Row b's tokens stand at positions[b] + i, the first counts[b] are real; int32 [B]. ring [slots, R, C] holds the inputs
of the latest tokens of the sequence in slots[b], token t at t mod R, with R >= W - 1 + Q of decode steps (Q up to
`MAX_TOKENS`); slot 0 belongs to no sequence and is never written. `gated`: x [B, Q, 3 C] is (before | after | input) of
LFM2: the convolution is of before * input, rounded, and its result is multiplied by after. x may be columns of a wider
tensor."""
