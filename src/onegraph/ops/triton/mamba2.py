"""Mamba2: a chunk of a prompt, which the kernels of gated delta layers scan, and the norm over a group's heads."""

import triton
import triton.language as tl
from torch import Tensor

from onegraph.ops.calls import Mamba2
from onegraph.ops.triton.gated_delta import scanned
from onegraph.ops.triton.launch import let_next_start, on_device, options, wait_for_previous

TOKENS = 4  # of a program, or fewer
NUMBERS = 8192  # of a program's tokens


@triton.jit(do_not_specialize=["length"])
def _group_norm(
    y, z, norm, base, slots, positions, counts, out, length, stride, eps,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr,
    GATE: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program has some tokens of a group. With GATE y is not gated yet, and its row's base is to be moved. Without
    NORM what is gated stays as it is."""
    let_next_start(PDL)
    group, tile, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    token, column = tile * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    inside = column < SIZE
    if NORM:
        gain = tl.load(norm + group * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    slot = tl.load(slots + row).to(tl.int64)
    count = tl.where(slot > 0, tl.minimum(tl.load(counts + row), length), 0)
    place = row * length + token
    there = (token < count)[:, None] & inside[None, :]
    at = (place * GROUPS * SIZE + group * SIZE)[:, None] + column[None, :]
    x = tl.load(y + at, mask=there, other=0.0)
    if GATE:
        gate = tl.load(z + (place * stride + group * SIZE)[:, None] + column[None, :], mask=there, other=0.0)
        gate = gate.to(tl.float32)
        x *= gate / (1.0 + tl.exp(-gate))
    if NORM:
        x *= tl.rsqrt(tl.sum(x * x, axis=1) / SIZE + eps)[:, None] * gain[None, :]
    tl.store(out + at, x.to(out.dtype.element_ty), mask=(token < length)[:, None] & inside[None, :])
    if GATE and (tile == 0) & (count > 0):
        head = tl.arange(0, WIDE)
        to = base + slot * HEADS + group * (HEADS // GROUPS) + head
        tl.store(to, tl.load(positions + row) + count + 0 * head, mask=head < HEADS // GROUPS)


def group_norm(y: Tensor, call: Mamba2, gate: bool = False) -> Tensor:
    """y float32 [B, Q, ...] of H P numbers a token -> the op's result [B, Q, H P]. gate: of a chunk, see the kernel."""
    (batch, length, _), groups, (heads, size) = call.xbc.shape, call.keys.shape[2], call.state.shape[1:3]
    out, width = call.xbc.new_empty(batch, length, heads * size), heads * size // groups
    wide = triton.next_power_of_2(width)
    block = min(TOKENS, triton.next_power_of_2(length), max(1, NUMBERS // wide))
    with on_device(out):
        _group_norm[(groups, triton.cdiv(length, block), batch)](
            y, call.z, call.norm, call.base, call.slots, call.positions, call.counts, out, length, call.z.stride(1),
            call.eps, HEADS=heads, GROUPS=groups, SIZE=width, WIDTH=wide,
            WIDE=triton.next_power_of_2(heads // groups), GATE=gate, NORM=call.norm is not None, BLOCK=block,
            num_warps=4 if wide <= 2048 else 8, **options(out),
        )  # fmt: skip
    return out


def chunk(call: Mamba2) -> Tensor:
    """More tokens a row than a step has, see `onegraph.ops.mamba2.mamba2`."""
    return group_norm(scanned(call), call, gate=True)
