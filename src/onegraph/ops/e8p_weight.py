"""How weights in E8P are run: `WEIGHT`, made of the ops on them."""

from typing import Any

import torch
from torch import Tensor

from onegraph.formats.e8p import E8PFormat
from onegraph.formats.rotated import hadamard_block
from onegraph.ops.activation import Gate
from onegraph.ops.e8p import e8p_decode, e8p_linear
from onegraph.ops.e8p_all_reduce import MAX_TOKENS, e8p_all_reduce
from onegraph.ops.e8p_chain import e8p_chain
from onegraph.ops.e8p_embedding import e8p_embedding
from onegraph.ops.e8p_experts import e8p_experts
from onegraph.ops.hadamard import hadamard, rotate_integers, rotate_rows
from onegraph.ops.weight import ChainOps, KernelArgs, WeightOps

ROWS_AT_ONCE = 512  # when a layer is decoded: a vocabulary at once would take gigabytes, and four times as long


def _stored(weight: KernelArgs) -> tuple[Tensor | None, ...]:
    """In the order of the ops' arguments."""
    return weight["codes"], weight.get("residual"), weight["codebook"], weight["in_scale"], weight["out_scale"]


def _run(
    format: E8PFormat, x: Tensor, weight: KernelArgs, bias: Tensor | None, add: Tensor | None, eps: float | None,
    silu: bool, float32: bool,
) -> Tensor:  # fmt: skip
    y: Tensor = e8p_linear(x, *_stored(weight), bias, format.rate, add, eps, silu, float32)
    return y


def _all_reduce(
    format: E8PFormat, x: Tensor, weight: KernelArgs, bias: Tensor | None, add: Tensor | None, silu: bool, group: Any
) -> Tensor | None:
    if not 1 <= x.shape[:-1].numel() <= MAX_TOKENS:
        return None
    made: Tensor = e8p_all_reduce(x, *_stored(weight), bias, format.rate, add, silu, *group)
    return made


def _dense(format: E8PFormat, weight: KernelArgs) -> Tensor:
    codes, residual, table = weight["codes"], weight.get("residual"), weight["codebook"]
    n, k = codes.shape[0], codes.shape[1] * 8
    dense = torch.empty(n, k, device=codes.device)
    for first in range(0, n, ROWS_AT_ONCE):  # whole rotation blocks: the last part is a multiple of n's block too
        part = slice(first, first + ROWS_AT_ONCE)
        q = e8p_decode(codes[part], None if residual is None else residual[part], table, format.rate)
        if q.is_cuda:
            rows = hadamard(hadamard(q.float(), hadamard_block(k)).t().contiguous(), hadamard_block(n)).t()
        else:  # the same bits in a tenth of the time
            rows = rotate_rows(rotate_integers(q, hadamard_block(k)), hadamard_block(n))
        torch.mul(rows.mul_(weight["out_scale"][part].unsqueeze(1)), weight["in_scale"], out=dense[part])
    return dense


def _look_up(format: E8PFormat, ids: Tensor, weight: KernelArgs) -> Tensor:
    rows: Tensor = e8p_embedding(ids, *_stored(weight), format.rate)
    return rows


def _run_experts(
    format: E8PFormat, x: Tensor, experts: Tensor, weights: Tensor, gate_up: KernelArgs, down: KernelArgs, gate: Gate,
    biases: tuple[Tensor, Tensor] | None, add: Tensor | None = None,
) -> Tensor:  # fmt: skip
    both = []
    for weight, bias in zip((gate_up, down), biases or (None, None), strict=True):
        both += [weight["codes"], weight.get("residual"), weight["in_scale"], weight["out_scale"], bias]
    made: Tensor = e8p_experts(x, experts, weights, gate_up["codebook"], *both, format.rate, *gate.numbers, add)
    return made


def _chain_most(format: E8PFormat, sizes: tuple[int, int, int, int]) -> int:
    from onegraph.ops.cuda import e8p_chain as kernel

    return kernel.MAX_TOKENS if kernel.supports_shape(1, sizes, format.rate, torch.bfloat16) else 0


def _chain(
    format: E8PFormat, x: Tensor, residual: Tensor, weights: list[KernelArgs], biases: list[Tensor | None], eps: float
) -> tuple[Tensor, Tensor]:
    made: tuple[Tensor, Tensor] = e8p_chain(
        x,
        residual,
        [each["codes"] for each in weights],
        [each["residual"] for each in weights if "residual" in each],
        weights[0]["codebook"],
        [each["in_scale"] for each in weights],
        [each["out_scale"] for each in weights],
        biases,
        format.rate,
        eps,
    )
    return made


def _steady(format: E8PFormat, x: Tensor, weight: KernelArgs) -> bool:
    from onegraph.ops.cuda import e8p as kernels

    n, k = weight["codes"].shape[0], weight["codes"].shape[1] * 8
    return x.is_cuda and kernels.steady(n, k, format.rate, x.dtype, x.device.index)


def _reads(format: E8PFormat, n: int, k: int, dtype: torch.dtype, device: int) -> bool:
    from onegraph.ops.cuda import e8p as kernels

    return kernels.supports_weight(n, k, format.rate, dtype, device)


WEIGHT = WeightOps(
    linear=_run,
    all_reduce=_all_reduce,
    decode=_dense,
    embedding=_look_up,
    experts=_run_experts,
    experts_add=True,
    chain=ChainOps(_chain_most, _chain),
    steady=_steady,
    reads=_reads,
)
