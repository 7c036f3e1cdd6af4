"""Launches `gated_delta.cu` for steps, Triton's kernels for chunks of prompts."""

import torch
from torch import Tensor

from onegraph.ops.calls import MAX_TOKENS, GatedDelta
from onegraph.ops.cuda import build
from onegraph.ops.cuda.launcher import ALIGNMENT, Launch, aligned, launch

DIM = 128  # of keys and values
WIDTHS = 3, 4  # of the convolution
TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # as linear_state.cuh numbers them
THREADS = 256
MAX_DEPTH = 32  # records, which lie in shared memory

ARGUMENTS = build.Arguments(
    pointers=(
        "qkv", "z", "b", "a", "weight", "a_log", "dt_bias", "norm", "ring", "state", "base", "keys", "deltas",
        "decays", "slots", "positions", "counts", "out",
    ),
    ints=(
        "qkv_stride", "z_stride", "b_stride", "a_stride", "key_heads", "heads", "ring_size", "depth", "limit",
        "is_sigmoid",
    ),
    floats=("eps", "beta_scale"),
)  # fmt: skip


def shared(depth: int, channels: bool) -> int:
    """Bytes of shared memory for records, beside what the kernel has without."""
    return 4 * depth * (2 * DIM + (DIM if channels else 1))


KERNEL = build.Source(
    "gated_delta",
    ops=("gated_delta",),
    functions=("gated_delta",),
    arguments=ARGUMENTS,
    capabilities=build.PORTABLE,
    families=("hopper", "portable"),
    example={"TYPE": 2, "WEIGHT": 2, "NORM": 2, "STATE": 0, "TOKENS": 4, "WIDTH": 4, "CHANNELS": 0},
    otherwise="torch computes gated delta layers",
)


def supports(call: GatedDelta) -> bool:
    """Whether `gated_delta.cu` runs this call."""
    return (
        call.state.shape[2:] == (DIM, DIM)
        and call.weight.shape[1] in WIDTHS
        and call.keys.shape[1] <= MAX_DEPTH
        and 0 < call.qkv.shape[1] <= MAX_TOKENS
        and len(call.slots) > 0
    )


def defines(call: GatedDelta) -> dict[str, int]:
    return {
        "TYPE": TYPES[call.qkv.dtype], "WEIGHT": TYPES[call.weight.dtype], "NORM": TYPES[call.norm.dtype],
        "STATE": TYPES[call.state.dtype], "TOKENS": call.qkv.shape[1], "WIDTH": call.weight.shape[1],
        "CHANNELS": int(call.decays.shape[3] > 1),
    }  # fmt: skip


def by_fours(x: Tensor) -> Tensor:
    """x [B, Q, N] whose tokens can be read four numbers at once: itself, or a copy."""
    fits = x.data_ptr() % ALIGNMENT == 0 and x.stride(1) % 4 == 0
    return x if fits else aligned(x.contiguous())


def step(call: GatedDelta) -> Tensor:
    """Up to `MAX_TOKENS` tokens a row."""
    qkv, z = by_fours(call.qkv), by_fours(call.z)
    rows, tokens, _ = qkv.shape
    heads, (_, depth, key_heads, _) = call.state.shape[1], call.keys.shape
    out = qkv.new_empty(rows, tokens, heads * DIM)
    given = defines(call)
    launch(
        KERNEL, given, Launch((heads, rows, 1), THREADS, shared(depth, bool(given["CHANNELS"]))),
        qkv=qkv, z=z, b=call.b, a=call.a, weight=call.weight, a_log=call.a_log, dt_bias=call.dt_bias, norm=call.norm,
        ring=call.ring, state=call.state, base=call.base, keys=call.keys, deltas=call.deltas, decays=call.decays,
        slots=call.slots, positions=call.positions, counts=call.counts, out=out, qkv_stride=qkv.stride(1),
        z_stride=z.stride(1), b_stride=call.b.stride(1), a_stride=call.a.stride(1), key_heads=key_heads, heads=heads,
        ring_size=call.ring.shape[1], depth=depth, limit=call.limit, is_sigmoid=int(call.sigmoid), eps=call.eps,
        beta_scale=call.beta_scale,
    )  # fmt: skip
    return out


def gated_delta(call: GatedDelta) -> Tensor | None:
    """See `onegraph.ops.gated_delta.gated_delta`; None for what no kernel takes."""
    if supports(call) and KERNEL.is_built(call.qkv.device.index):
        return step(call)
    from onegraph.ops.triton import gated_delta as chunks  # compiled as of its import

    if call.qkv.shape[1] <= MAX_TOKENS or not chunks.supports(call):
        return None
    result: Tensor = chunks.chunk(call)
    return result
