"""Launches `gated_delta.cu` for steps, Triton's kernels for chunks of prompts and for Mamba2's norm over groups."""

from typing import Any

import torch
from torch import Tensor

from onegraph.ops.calls import MAX_TOKENS, GatedDelta, Mamba2
from onegraph.ops.cuda import build
from onegraph.ops.cuda.launcher import ALIGNMENT, TYPES, Launch, aligned, launch

KEYS = 128  # numbers of a key
VALUES = 64, 128  # of a value
WIDTHS = 3, 4  # of the convolution
THREADS = 256
PER_SM = 2  # blocks
MAX_DEPTH = 32  # records, which lie in shared memory
MAX_HIDDEN = 4096  # widths of x that b and a are computed from here: of 5120 a launch in front is quicker (docs/log.md)
MAX_SHARED = 65 << 10  # bytes of records and of what x is multiplied by; beside the kernel's own a block has 99 KB

ARGUMENTS = build.Arguments(
    pointers=(
        "qkv", "z", "b", "a", "weight", "bias", "a_log", "dt_bias", "skip", "norm", "x", "rates", "x_norm", "ring",
        "state", "base", "keys", "deltas", "decays", "slots", "positions", "counts", "out",
    ),
    ints=(
        "qkv_stride", "z_stride", "b_stride", "a_stride", "x_stride", "key_heads", "heads", "ring_size", "depth",
        "limit", "is_sigmoid", "many",
    ),
    floats=("eps", "beta_scale", "dt_min", "x_eps"),
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
        "HIDDEN": 5120,
        "GAIN": 0,
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


def weight_bytes(call: GatedDelta) -> int:
    """Bytes of shared memory that a block holds to compute b and a of its head; 0 where they are given, or where an op
    of its own computes them."""
    if call.rates is None:
        return 0
    rates, gain = call.rates, call.x_norm
    hidden = rates.shape[1]
    size = hidden * (2 * rates.element_size() + (rates if gain is None else gain).element_size())
    placed = all(t is None or t.data_ptr() % ALIGNMENT == 0 for t in (rates, gain))
    fits = hidden % 8 == 0 and hidden <= MAX_HIDDEN and size + record_bytes(call) <= MAX_SHARED
    return size if fits and placed else 0


def record_bytes(call: GatedDelta | Mamba2) -> int:
    """Bytes of shared memory for the records of a block."""
    return call.keys.shape[1] * 4 * (KEYS + call.state.shape[2] + call.decays.shape[3])


def step(call: GatedDelta | Mamba2) -> Tensor:
    """Up to `MAX_TOKENS` tokens a row: the result, of Mamba2 before its norm and float32."""
    own: dict[str, Any] = {"b": None, "a": None, "b_stride": 0, "a_stride": 0, "bias": None, "skip": None}
    own |= {"x": None, "rates": None, "x_norm": None, "x_stride": 0, "x_eps": 0.0, "dt_min": 0.0}
    weights, hidden, gain = 0, 0, torch.float32
    if isinstance(call, GatedDelta):
        weights = weight_bytes(call)
        x, channels = call.qkv, call.decays.shape[3] > 1
        own |= {"beta_scale": call.beta_scale, "is_sigmoid": int(call.sigmoid)}
        if call.x is not None and call.rates is not None:
            given, hidden = fitting(call.x), call.rates.shape[1]
            gain = (call.rates if call.x_norm is None else call.x_norm).dtype
            own |= {"x": given, "x_stride": given.stride(1), "rates": call.rates}
            own |= {"x_norm": call.x_norm, "x_eps": call.x_eps}
        else:
            assert call.b is not None
            assert call.a is not None
            own |= {"b": call.b, "a": call.a, "b_stride": call.b.stride(1), "a_stride": call.a.stride(1)}
    else:
        x, channels = call.xbc, False
        own |= {"a": call.dt, "a_stride": call.dt.stride(1), "bias": call.bias, "skip": call.skip}
        own |= {"beta_scale": 1.0, "dt_min": call.dt_min, "is_sigmoid": 0}
    x, z, delta = fitting(x), fitting(call.z), isinstance(call, GatedDelta)
    (rows, tokens, _), (_, heads, dv, _), (_, depth, key_heads, _) = x.shape, call.state.shape, call.keys.shape
    out = torch.empty((rows, tokens, heads * dv), dtype=x.dtype if delta else torch.float32, device=x.device)
    norm = call.weight if call.norm is None else call.norm
    defines = {
        "TYPE": TYPES[x.dtype], "WEIGHT": TYPES[call.weight.dtype], "NORM": TYPES[norm.dtype],
        "STATE": TYPES[call.state.dtype], "TOKENS": tokens, "WIDTH": call.weight.shape[1], "DV": dv,
        "CHANNELS": int(channels), "DELTA": int(delta), "HIDDEN": hidden, "GAIN": TYPES[gain],
    }  # fmt: skip
    at_once = PER_SM * build.device(x.device.index).sms
    launch(
        KERNEL, defines, Launch((heads, rows, 1), THREADS, weights + record_bytes(call)),
        qkv=x, z=z, weight=call.weight, a_log=call.a_log, dt_bias=call.dt_bias, norm=call.norm, ring=call.ring,
        state=call.state, base=call.base, keys=call.keys, deltas=call.deltas, decays=call.decays, slots=call.slots,
        positions=call.positions, counts=call.counts, out=out, qkv_stride=x.stride(1), z_stride=z.stride(1),
        key_heads=key_heads, heads=heads, ring_size=call.ring.shape[1], depth=depth,
        limit=call.limit, many=int(heads * rows > at_once), eps=call.eps, **own,
    )  # fmt: skip
    return out


def takes_rates(call: GatedDelta) -> bool:
    """Whether b and a of this call are computed in its launch."""
    return weight_bytes(call) > 0 and supports(call, call.qkv) and KERNEL.is_built(call.qkv.device.index)


def gated_delta(call: GatedDelta) -> Tensor | None:
    """See `onegraph.ops.gated_delta.gated_delta`; None for what no kernel takes. b and a are given where `takes_rates`
    is False."""
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
