"""Routed experts in trellis codes on a GPU: how many pairs of a token and an expert a block takes, and the launches of
`trellis_experts.cu`: gate-up, down, combine.

One token: each pair is a chunk. More: pairs of an expert make chunks of CHUNKS[0], or of CHUNKS[1] where experts have
many; the codes of an expert are decoded once for each of its chunks. Nothing here computes more than MAX_PAIRS pairs,
float32, or dimensions that 64 does not divide.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from onegraph.ops.calls import TrellisExperts
from onegraph.ops.cuda import build
from onegraph.ops.cuda.e8p_common import ROWS, block
from onegraph.ops.cuda.launcher import Launch, aligned, launch, on_device
from onegraph.ops.cuda.trellis_portable import KERNELS as LINEAR
from onegraph.ops.cuda.trellis_portable import TrellisTiling
from onegraph.ops.cuda.workspace import Counters

MAX_PAIRS = 255  # of routes.cuh
CHUNKS = 4, 8  # pairs of a chunk; 8 where an expert has CROWDED pairs on average
CROWDED = 3
ROUTES = 6400  # bytes of `Routes` of routes.cuh at most: static shared memory of a block
FROM_X, FROM_GATED, FROM_PLAIN = 0, 1, 2  # SOURCE
ARRIVED = Counters(1 << 14)  # of a chunk and 128 rows

KERNELS = build.Source(
    "trellis_experts",
    ops=("trellis_experts",),
    functions=("trellis_experts", "trellis_experts_combine"),
    arguments=build.Arguments(
        pointers=("x", "codes", "in_scale", "out_scale", "bias", "add", "y", "kept", "scales", "squares", "sums",
                  "arrived", "experts", "weights"),
        floats=("limit", "alpha", "shift", "norm", "eps", "inverse_k"),
        ints=("tokens", "top_k", "matrices"),
    ),
    capabilities=build.PORTABLE,
    example=dict(LINEAR.example)
    | {"NORMED": 0, "ADDED": 0, "WIDE": 1, "TOKENS": 4, "SOURCE": 1, "HALVES": 1, "GELU": 0},
    families=("hopper", "portable"),
    shared=build.PORTABLE_SHARED - ROUTES,
    otherwise="experts in trellis codes run one linear after the other",
)  # fmt: skip


def chunk_of(tokens: int, top_k: int, experts: int) -> int:
    """Pairs of a chunk at most."""
    return 1 if tokens == 1 else CHUNKS[tokens * top_k >= CROWDED * experts and tokens > CHUNKS[0]]


def chunks_of(tokens: int, top_k: int, experts: int) -> int:
    """Chunks at most. Where a token chose an expert twice, the second times make chunks of their own."""
    pairs, chunk = tokens * top_k, chunk_of(tokens, top_k, experts)
    return min(pairs, pairs // chunk + experts * top_k)


def tiling(n: int, k: int, bits: int, chunk: int, chunks: int, busy: int, device: build.Device) -> TrellisTiling | None:
    """How a matrix is cut where `busy` of `chunks` share the GPU; None where nothing fits."""
    shared = min(device.shared, build.PORTABLE_SHARED) - (ROUTES if chunk > 1 else 0)
    own = replace(device, sms=max(1, device.sms // busy), shared=shared)
    found = [plan for plan in TrellisTiling.plans(n, k, bits, chunk, own) if plan.turns]
    found = [plan for plan in found if plan.whole or chunks * -(-n // ROWS) <= ARRIVED.size]
    return min(found, key=lambda plan: (plan.cost(n, bits, own), plan), default=None)


def supports_input(call: TrellisExperts) -> bool:
    """Whether the kernels here compute it."""
    (pairs, dim), wide = (call.experts.numel(), call.x.shape[1]), call.down_in_scale.shape[1]
    fits = 0 < pairs <= MAX_PAIRS and dim % 64 == 0 and wide % 64 == 0
    return fits and call.x.dtype in (torch.bfloat16, torch.float16)


def experts(call: TrellisExperts) -> Tensor | None:
    """See `onegraph.ops.trellis_experts.trellis_experts`; None for a call that nothing here computes."""
    index = call.x.device.index
    if not call.x.is_cuda or not supports_input(call) or not KERNELS.is_built(index):
        return None
    with on_device(index):
        values: list[Any] = [aligned(each) if isinstance(each, Tensor) else each for each in call]
        return compute(TrellisExperts(*values))


def compute(call: TrellisExperts) -> Tensor | None:
    """`call`, which is taken. None where no cut fits into shared memory."""
    (tokens, top_k), (count, *_), device = call.experts.shape, call.gate_up.shape, build.device(call.x.device.index)
    chunk, chunks = chunk_of(tokens, top_k, count), chunks_of(tokens, top_k, count)
    dim, wide = call.x.shape[1], call.down_in_scale.shape[1]
    width = call.gate_up_out_scale.shape[1]
    halves = call.gate_up_in_scale.dim() - 1  # 2: each is a matrix of its own
    busy = min(chunks, max(tokens * top_k // chunk, count))  # where no expert is chosen twice by a token
    first = tiling(width // halves, dim, call.bits, chunk, chunks * halves, busy * halves, device)
    second = tiling(dim, wide, call.bits, chunk, chunks, busy, device)
    if first is None or second is None:
        return None

    def run(cut: TrellisTiling, source: int, halves: int, x: Tensor, y: Tensor, *layer: Tensor | None) -> None:
        codes, in_scale, out_scale, bias = layer
        assert in_scale is not None
        assert out_scale is not None
        n, k = out_scale.shape[-1] // halves, in_scale.shape[-1]
        sums = torch.empty(
            0 if cut.whole else chunks * halves * cut.parts * cut.tokens * n, dtype=torch.float32, device=x.device
        )
        around = False, False, bias is not None, False, True
        defines = cut.defines(n, k, call.bits, call.x.dtype == torch.float16, around)
        defines |= {"CODE": call.code, "SOURCE": source, "HALVES": halves, "GELU": int(call.alpha == 0)}
        product = Launch((cut.strips * cut.parts, chunks * halves, 1), 32 * cut.warps, cut.shared(call.bits))
        summed = Launch((-(-n // 1024), tokens, 1), 256, function=KERNELS.functions[1])
        given = {"in_scale": in_scale, "out_scale": out_scale, "bias": bias, "experts": call.experts} | {
            "weights": call.weights, "limit": call.limit, "alpha": call.alpha, "shift": call.shift,
            "tokens": tokens, "top_k": top_k, "matrices": count, "norm": float((block(n) * block(k)) ** -0.5),
            "eps": -1.0, "inverse_k": 1 / k, "codes": codes, "add": None, "kept": None, "scales": None,
            "squares": None, "sums": sums, "arrived": 0 if cut.whole else ARRIVED.of(x.device.index),
        }  # fmt: skip
        launch(KERNELS, defines, product, **given, x=x, y=y)
        if source != FROM_X:
            launch(KERNELS, defines, summed, **given, x=y, y=out)

    out = torch.empty_like(call.x)
    inner = torch.empty(tokens * top_k, width, dtype=torch.float32, device=call.x.device)
    outer = torch.empty(tokens * top_k, dim, dtype=torch.float32, device=call.x.device)
    gate_up = call.gate_up, call.gate_up_in_scale, call.gate_up_out_scale, call.gate_up_bias
    run(first, FROM_X, halves, call.x, inner, *gate_up)
    down = call.down, call.down_in_scale, call.down_out_scale, call.down_bias
    run(second, FROM_GATED if width != wide else FROM_PLAIN, 1, inner, outer, *down)
    return out
