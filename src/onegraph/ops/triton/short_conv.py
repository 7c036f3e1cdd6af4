"""The convolution of short contexts: a program has some channels of some tokens of a row.

The program of a row's first tokens is the only one that reads what the ring held, so it writes the ring too, behind
what it has read of it.
"""

import triton
import triton.language as tl
from torch import Tensor

from onegraph.ops.calls import ShortConv
from onegraph.ops.triton.launch import let_next_start, on_device, options, wait_for_previous

CHANNELS = 64  # of a program
MAX_TOKENS = 32


@triton.jit
def taken(x, at, channel, real, C, GATED: tl.constexpr):
    """What the convolution takes at x's tokens [K] and channels [N]: before * input, rounded, where it is gated."""
    if GATED:
        before = tl.load(x + at[:, None] + channel[None, :], mask=real, other=0.0).to(tl.float32)
        inner = tl.load(x + at[:, None] + 2 * C + channel[None, :], mask=real, other=0.0).to(tl.float32)
        return (before * inner).to(x.dtype.element_ty)
    return tl.load(x + at[:, None] + channel[None, :], mask=real, other=0.0)


@triton.jit
def convolved(
    x, weight, bias, ring, row, slot, position, count, length, stride, token, channel, inside, C,
    WIDTH: tl.constexpr, RING: tl.constexpr, SILU: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """float32 [K, N] of a row's tokens [K] and channels [N]; nothing of the ring is written."""
    total = tl.zeros((token.shape[0], channel.shape[0]), dtype=tl.float32)
    for j in tl.static_range(WIDTH):
        at = token + (j - WIDTH + 1)
        here = ((at >= 0) & (at < count))[:, None] & inside[None, :]
        now = taken(x, (row * length + at) * stride, channel, here, C, GATED).to(tl.float32)
        before = position + at
        held = ((at < 0) & (before >= 0))[:, None] & inside[None, :]
        past = (slot * RING + before % RING) * C
        old = tl.load(ring + past[:, None] + channel[None, :], mask=held, other=0.0).to(tl.float32)
        gain = tl.load(weight + channel * WIDTH + j, mask=inside, other=0.0).to(tl.float32)
        total += tl.where(here, now, old) * gain[None, :]
    if BIAS:
        total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    return total


@triton.jit
def keep_inputs(
    x, ring, row, slot, position, count, length, stride, channel, inside, C,
    WIDTH: tl.constexpr, RING: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The latest inputs of a row into its ring. By the program that read the ring, behind it."""
    tl.debug_barrier()  # what other threads of the program read has been read
    first = tl.maximum(count - RING, 0)
    for start in range(first, count, BLOCK):
        token = start + tl.arange(0, BLOCK)
        real = ((token < count) & (slot > 0))[:, None] & inside[None, :]
        value = taken(x, (row * length + token) * stride, channel, real, C, GATED)
        at = (slot * RING + (position + token) % RING) * C
        tl.store(ring + at[:, None] + channel[None, :], value, mask=real)


@triton.jit(do_not_specialize=["length"])
def _convolve(
    x, weight, bias, ring, slots, positions, counts, out, length, stride, C,
    WIDTH: tl.constexpr, RING: tl.constexpr, SILU: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    BLOCK: tl.constexpr, CHANNELS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    part, tile, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    channel = part * CHANNELS + tl.arange(0, CHANNELS)
    token = tile * BLOCK + tl.arange(0, BLOCK)
    inside = channel < C
    wait_for_previous(PDL)
    slot, position = tl.load(slots + row).to(tl.int64), tl.load(positions + row)
    count = tl.minimum(tl.load(counts + row), length)
    # Padding is convolved like any token: it reads nothing that is not there.
    total = convolved(
        x, weight, bias, ring, row, slot, position, length, length, stride, token, channel, inside, C,
        WIDTH, RING, SILU, GATED, BIAS,
    )  # fmt: skip
    there = (token < length)[:, None] & inside[None, :]
    if GATED:
        at = (row * length + token) * stride + C
        total *= tl.load(x + at[:, None] + channel[None, :], mask=there, other=0.0).to(tl.float32)
    to = (row * length + token) * C
    tl.store(out + to[:, None] + channel[None, :], total.to(out.dtype.element_ty), mask=there)
    if tile == 0:
        keep_inputs(x, ring, row, slot, position, count, length, stride, channel, inside, C, WIDTH, RING, GATED, BLOCK)


def short_conv(call: ShortConv) -> Tensor:
    """See `onegraph.ops.short_conv.short_conv`."""
    x, (channels, width) = call.x, call.weight.shape
    batch, length, _ = x.shape
    out = x.new_empty(batch, length, channels)
    if out.numel() == 0:
        return out
    block = min(MAX_TOKENS, triton.next_power_of_2(max(length, width - 1)))
    with on_device(x):
        _convolve[(triton.cdiv(channels, CHANNELS), triton.cdiv(length, block), batch)](
            x, call.weight, call.bias, call.ring, call.slots, call.positions, call.counts, out, length, x.stride(1),
            channels, WIDTH=width, RING=call.ring.shape[1], SILU=call.silu, GATED=call.gated,
            BIAS=call.bias is not None, BLOCK=block, CHANNELS=CHANNELS, num_warps=2, **options(x),
        )  # fmt: skip
    return out
