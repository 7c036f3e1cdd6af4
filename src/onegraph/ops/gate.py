"""Output gates of attention (Qwen3-Next, Qwen3.5): each head's query comes with a gate behind it, and its result is
multiplied by the gate's sigmoid before the linear behind attention."""

import torch
from torch import Tensor

from onegraph.ops.checks import FLOATS
from onegraph.ops.registry import Case, Op, nbytes, register


def _split_gates(qkv: Tensor, heads: int, dim: int) -> tuple[Tensor, Tensor]:
    queries, rest = qkv.split((2 * heads * dim, qkv.shape[2] - 2 * heads * dim), dim=2)
    q, gates = queries.unflatten(2, (heads, 2, dim)).unbind(3)
    return torch.cat((q.flatten(2), rest), dim=2), gates.flatten(2).clone(memory_format=torch.contiguous_format)


def _check_split(qkv: Tensor, heads: int, dim: int) -> None:
    op = "split_gates"
    if qkv.dim() != 3 or qkv.dtype not in FLOATS or not qkv.is_contiguous():
        raise ValueError(
            f"{op}: qkv is {tuple(qkv.shape)} {qkv.dtype}; it must be contiguous float32, bfloat16 or float16 "
            "[batch, tokens, (2 heads + 2 kv_heads) * head_dim]"
        )
    if heads < 1 or dim < 1 or qkv.shape[2] <= 2 * heads * dim or qkv.shape[2] % dim:
        raise ValueError(
            f"{op}: qkv holds {qkv.shape[2]} numbers a token; {heads} heads of {dim} with a gate each take "
            f"{2 * heads * dim}, and keys and values of {dim} follow"
        )


def _gate_heads(x: Tensor, gates: Tensor) -> Tensor:
    return (x.float() * gates.float().sigmoid()).to(x.dtype)


def _check_gate(x: Tensor, gates: Tensor) -> None:
    if x.dtype not in FLOATS or gates.dtype != x.dtype or gates.shape != x.shape or gates.device != x.device:
        raise ValueError(
            f"gate_heads: x is {tuple(x.shape)} {x.dtype} on {x.device}, gates {tuple(gates.shape)} {gates.dtype} on "
            f"{gates.device}; both must be alike, float32, bfloat16 or float16"
        )
    if not (x.is_contiguous() and gates.is_contiguous()):
        raise ValueError("gate_heads: x and gates must be contiguous; call .contiguous() on them first")


def _split_case(name: str, *, batch: int, tokens: int, heads: int, kv_heads: int, dim: int) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        qkv = torch.randn(batch, tokens, (2 * heads + 2 * kv_heads) * dim, generator=generator)
        return qkv.to(device, dtype), heads, dim

    return Case(name=name, make=make)


def _gate_case(shape: tuple[int, ...], spread: float = 2.0) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        x, gates = (torch.randn(shape, generator=generator) for _ in range(2))
        return x.to(device, dtype), (spread * gates).to(device, dtype)

    return Case(name="x".join(map(str, shape)) + ("_wide" if spread > 10 else ""), make=make)


split_gates = register(
    Op(
        name="split_gates",
        schema="(Tensor qkv, int heads, int dim) -> (Tensor, Tensor)",
        reference=_split_gates,
        fake=lambda qkv, heads, dim: (
            qkv.new_empty((*qkv.shape[:2], qkv.shape[2] - heads * dim)),
            qkv.new_empty((*qkv.shape[:2], heads * dim)),
        ),
        kernel="onegraph.ops.triton.gate:split_gates",
        check=_check_split,
        cases=(
            _split_case("qwen3_5", batch=2, tokens=3, heads=6, kv_heads=1, dim=256),
            _split_case("small", batch=1, tokens=5, heads=3, kv_heads=3, dim=20),
        ),
        tolerance={torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 0.0},
        bytes_moved=lambda qkv, heads, dim: 2 * nbytes(qkv),
        flops=lambda qkv, heads, dim: 0,
    )
)
"""qkv [B, Q, (2 heads + 2 kv_heads) D], a token's vectors query 0, gate 0, query 1, gate 1, ..., then keys and values
-> the same without gates [B, Q, (heads + 2 kv_heads) D], and the gates [B, Q, heads D]."""

gate_heads = register(
    Op(
        name="gate_heads",
        schema="(Tensor x, Tensor gates) -> Tensor",
        reference=_gate_heads,
        fake=lambda x, gates: torch.empty_like(x),
        kernel="onegraph.ops.triton.gate:gate_heads",
        check=_check_gate,
        cases=(_gate_case((2, 3, 1536)), _gate_case((1, 1, 77)), _gate_case((3, 96), 60.0)),
        tolerance={torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4},
        bytes_moved=lambda x, gates: 3 * nbytes(x),
        flops=lambda x, gates: 4 * x.numel(),
    )
)
"""x * sigmoid(gates), of one shape and dtype, float32 inside, rounded once."""
