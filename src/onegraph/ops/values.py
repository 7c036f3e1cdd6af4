"""Values of attention that are normed, and may be the keys as their linear gave them (Gemma 4)."""

import torch
from torch import Tensor

from onegraph.ops.checks import FLOATS
from onegraph.ops.registry import Case, Op, nbytes, register


def _normed_values(qkv: Tensor, heads: int, kv_heads: int, dim: int, eps: float) -> Tensor:
    before = (heads + kv_heads) * dim
    values = qkv[..., -kv_heads * dim :].unflatten(2, (kv_heads, dim)).float()
    normed = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return torch.cat((qkv[..., :before], normed.flatten(2).to(qkv.dtype)), dim=2)


def _check(qkv: Tensor, heads: int, kv_heads: int, dim: int, eps: float) -> None:
    sizes = [(heads + n * kv_heads) * dim for n in (1, 2)]
    if qkv.dim() != 3 or qkv.dtype not in FLOATS or not qkv.is_contiguous():
        raise ValueError(
            f"normed_values: qkv is {tuple(qkv.shape)} {qkv.dtype}; it must be contiguous float32, bfloat16 or float16 "
            "[batch, tokens, numbers]"
        )
    if min(heads, kv_heads, dim) < 1 or qkv.shape[2] not in sizes:
        raise ValueError(
            f"normed_values: qkv holds {qkv.shape[2]} numbers a token; {heads} heads and {kv_heads} kv heads of {dim} "
            f"need {sizes[1]}, or {sizes[0]} where keys are values"
        )


def _case(name: str, *, batch: int, tokens: int, heads: int, kv_heads: int, dim: int, own: bool) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        qkv = torch.randn(batch, tokens, (heads + (1 + own) * kv_heads) * dim, generator=generator)
        return qkv.to(device, dtype), heads, kv_heads, dim, 1e-6

    return Case(name=name, make=make)


normed_values = register(
    Op(
        name="normed_values",
        schema="(Tensor qkv, int heads, int kv_heads, int dim, float eps) -> Tensor",
        reference=_normed_values,
        fake=lambda qkv, heads, kv_heads, dim, eps: qkv.new_empty((*qkv.shape[:2], (heads + 2 * kv_heads) * dim)),
        kernel="onegraph.ops.triton.values:normed_values",
        check=_check,
        cases=(
            _case("gemma4", batch=2, tokens=3, heads=8, kv_heads=2, dim=512, own=False),
            _case("gemma4_near", batch=1, tokens=2, heads=4, kv_heads=2, dim=256, own=True),
            _case("small", batch=1, tokens=5, heads=3, kv_heads=3, dim=20, own=False),
        ),
        tolerance={torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4},
        bytes_moved=lambda qkv, *_: 2 * nbytes(qkv),
        flops=lambda qkv, *_: 4 * qkv.numel(),
    )
)
"""qkv [B, Q, (heads + 2 kv_heads) D], or [B, Q, (heads + kv_heads) D] where keys are values -> [B, Q, (heads + 2
kv_heads) D], each head of values divided by the root of its mean square plus eps, float32 inside, rounded once. Queries
and keys stay as they are."""
