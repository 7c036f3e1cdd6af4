"""How trellis-coded weights are run: `WEIGHT`, made of the ops on them."""

import torch
from torch import Tensor

from onegraph.formats.rotated import hadamard_block
from onegraph.formats.trellis import TILE, TrellisFormat, decode
from onegraph.ops.activation import SwiGLU
from onegraph.ops.hadamard import hadamard, rotate_integers, rotate_rows
from onegraph.ops.trellis import trellis_embedding, trellis_linear
from onegraph.ops.trellis_experts import trellis_experts
from onegraph.ops.weight import KernelArgs, WeightOps

ROWS_AT_ONCE = 512  # when a layer is decoded: whole rotation blocks


def _stored(weight: KernelArgs) -> tuple[Tensor, ...]:
    return weight["codes"], weight["in_scale"], weight["out_scale"]


def _run(
    format: TrellisFormat, x: Tensor, weight: KernelArgs, bias: Tensor | None, add: Tensor | None, eps: float | None,
    silu: bool, float32: bool,
) -> Tensor:  # fmt: skip
    y: Tensor = trellis_linear(x, *_stored(weight), bias, format.rate, add, eps, silu, float32, format.code)
    return y


def _dense(format: TrellisFormat, weight: KernelArgs) -> Tensor:
    codes, in_scale, out_scale = _stored(weight)
    if in_scale.dim() == 2:  # gate and up, each with its own
        halves = zip(codes.chunk(2), in_scale, out_scale.chunk(2), strict=True)
        return torch.cat([_dense(format, {"codes": c, "in_scale": i, "out_scale": o}) for c, i, o in halves])
    n, k = out_scale.shape[0], in_scale.shape[0]
    dense = torch.empty(n, k, device=codes.device)
    for first in range(0, n, ROWS_AT_ONCE):
        part = slice(first, first + ROWS_AT_ONCE)
        q = decode(codes[first // TILE : (first + ROWS_AT_ONCE) // TILE], format.rate, format.code)
        if q.is_cuda:
            rows = hadamard(hadamard(q.float(), hadamard_block(k)).t().contiguous(), hadamard_block(n)).t()
        else:
            rows = rotate_rows(rotate_integers(q, hadamard_block(k)), hadamard_block(n))
        dense[part] = rows * out_scale[part].unsqueeze(1) * in_scale
    return dense


def _look_up(format: TrellisFormat, ids: Tensor, weight: KernelArgs) -> Tensor:
    rows: Tensor = trellis_embedding(ids, *_stored(weight), format.rate)
    return rows


def _run_experts(
    format: TrellisFormat, x: Tensor, experts: Tensor, weights: Tensor, gate_up: KernelArgs, down: KernelArgs,
    gate: SwiGLU,
    biases: tuple[Tensor, Tensor] | None,
) -> Tensor:  # fmt: skip
    first, second = biases or (None, None)
    layers = *_stored(gate_up), first, *_stored(down), second
    made: Tensor = trellis_experts(x, experts, weights, *layers, format.rate, *gate.numbers, format.code)
    return made


def _reads(format: TrellisFormat, n: int, k: int, dtype: torch.dtype, device: int) -> bool:
    from onegraph.ops.cuda import trellis as kernels

    return kernels.supports_weight(n, k, dtype, device)


def _steady(format: TrellisFormat, x: Tensor, weight: KernelArgs) -> bool:
    from onegraph.ops.cuda import trellis as kernels

    n, k = weight["out_scale"].shape[0], weight["in_scale"].shape[0]
    return x.is_cuda and kernels.steady(n, k, x.dtype, x.device.index)


WEIGHT = WeightOps(linear=_run, decode=_dense, embedding=_look_up, experts=_run_experts, steady=_steady, reads=_reads)
