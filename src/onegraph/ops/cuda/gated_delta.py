"""Launches `gated_delta.cu` for steps, Triton's kernels for chunks of prompts and for Mamba2's norm over groups."""

from typing import Any

import torch
from torch import Tensor

from onegraph.ops.calls import MAX_TOKENS, GatedDelta, Mamba2
from onegraph.ops.cuda import build
from onegraph.ops.cuda.launcher import ALIGNMENT, Launch, aligned, launch

KEYS = 128  # numbers of a key
VALUES = 64, 128  # of a value
WIDTHS = 3, 4  # of the convolution
TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # as linear_state.cuh numbers them
THREADS = 256
PER_SM = 2  # blocks
MAX_DEPTH = 32  # records, which lie in shared memory

ARGUMENTS = build.Arguments(
    pointers=(
        "qkv", "z", "b", "a", "weight", "bias", "a_log", "dt_bias", "skip", "norm", "ring", "state", "base", "keys",
        "deltas", "decays", "slots", "positions", "counts", "out",
    ),
    ints=(
        "qkv_stride", "z_stride", "b_stride", "a_stride", "key_heads", "heads", "ring_size", "depth", "limit",
        "is_sigmoid", "many",
    ),
    floats=("eps", "beta_scale", "dt_min"),
)  # fmt: skip
KERNEL = build.Source(
    "gated_delta",
    ops=("gated_delta", "mamba2"),
    functions=("gated_delta",),
    arguments=ARGUMENTS,
    capabilities=build.PORTABLE,
    families=("hopper", "portable"),
    example={
        "TYPE": 2,
        "WEIGHT": 2,
        "NORM": 2,
        "STATE": 0,
        "TOKENS": 4,
        "WIDTH": 4,
        "DV": 128,
        "CHANNELS": 0,
        "DELTA": 1,
    },
    otherwise="torch computes gated delta and Mamba2 layers",
)


def supports(call: GatedDelta | Mamba2, x: Tensor) -> bool:
    """Whether `gated_delta.cu` runs this call, whose convolution is of x [B, Q, channels]."""
    (_, _, dv, dk), (rows, tokens, _) = call.state.shape, x.shape
    sizes = dk == KEYS and dv in VALUES and call.weight.shape[1] in WIDTHS and call.keys.shape[1] <= MAX_DEPTH
    return sizes and 0 < tokens <= MAX_TOKENS and rows > 0


def fitting(x: Tensor) -> Tensor:
    """x [B, Q, N] each of whose tokens is at a multiple of ALIGNMENT: itself, or a copy."""
    fits = x.data_ptr() % ALIGNMENT == 0 and x.stride(1) * x.element_size() % ALIGNMENT == 0
    return x if fits else aligned(x.contiguous())


def step(call: GatedDelta | Mamba2) -> Tensor:
    """Up to `MAX_TOKENS` tokens a row: the result, of Mamba2 before its norm and float32."""
    own: dict[str, Any]
    if isinstance(call, GatedDelta):
        x, a, channels = call.qkv, call.a, call.decays.shape[3] > 1
        own = {
            "b": call.b, "bias": None, "skip": None, "beta_scale": call.beta_scale, "dt_min": 0.0,
            "b_stride": call.b.stride(1), "is_sigmoid": int(call.sigmoid),
        }  # fmt: skip
    else:
        x, a, channels = call.xbc, call.dt, False
        own = {
            "b": None, "bias": call.bias, "skip": call.skip, "beta_scale": 1.0, "dt_min": call.dt_min, "b_stride": 0,
            "is_sigmoid": 0,
        }  # fmt: skip
    x, z, delta = fitting(x), fitting(call.z), isinstance(call, GatedDelta)
    (rows, tokens, _), (_, heads, dv, _), (_, depth, key_heads, _) = x.shape, call.state.shape, call.keys.shape
    out = torch.empty((rows, tokens, heads * dv), dtype=x.dtype if delta else torch.float32, device=x.device)
    defines = {
        "TYPE": TYPES[x.dtype], "WEIGHT": TYPES[call.weight.dtype], "NORM": TYPES[call.norm.dtype],
        "STATE": TYPES[call.state.dtype], "TOKENS": tokens, "WIDTH": call.weight.shape[1], "DV": dv,
        "CHANNELS": int(channels), "DELTA": int(delta),
    }  # fmt: skip
    at_once = PER_SM * build.device(x.device.index).sms
    records = 4 * depth * (KEYS + dv + (KEYS if channels else 1))
    launch(
        KERNEL, defines, Launch((heads, rows, 1), THREADS, records),
        qkv=x, z=z, a=a, weight=call.weight, a_log=call.a_log, dt_bias=call.dt_bias, norm=call.norm, ring=call.ring,
        state=call.state, base=call.base, keys=call.keys, deltas=call.deltas, decays=call.decays, slots=call.slots,
        positions=call.positions, counts=call.counts, out=out, qkv_stride=x.stride(1), z_stride=z.stride(1),
        a_stride=a.stride(1), key_heads=key_heads, heads=heads, ring_size=call.ring.shape[1], depth=depth,
        limit=call.limit, many=int(heads * rows > at_once), eps=call.eps, **own,
    )  # fmt: skip
    return out


def gated_delta(call: GatedDelta) -> Tensor | None:
    """See `onegraph.ops.gated_delta.gated_delta`; None for what no kernel takes."""
    if supports(call, call.qkv) and KERNEL.is_built(call.qkv.device.index):
        return step(call)
    from onegraph.ops.triton import gated_delta as chunks  # compiled as of its import

    if call.qkv.shape[1] <= MAX_TOKENS or not chunks.supports(call):
        return None
    result: Tensor = chunks.chunk(call)
    return result


def mamba2(call: Mamba2) -> Tensor | None:
    """See `onegraph.ops.mamba2.mamba2`; None for what no kernel takes."""
    from onegraph.ops.triton import gated_delta as chunks
    from onegraph.ops.triton import mamba2 as others

    result: Tensor
    if supports(call, call.xbc) and KERNEL.is_built(call.xbc.device.index):
        result = others.group_norm(step(call), call)
        return result
    if call.xbc.shape[1] <= MAX_TOKENS or not chunks.supports(call):
        return None
    result = others.chunk(call)
    return result
