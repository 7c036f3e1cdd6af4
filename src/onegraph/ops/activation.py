"""SwiGLU's elementwise part (Shazeer, arXiv 2002.05202) on the output of one fused gate/up linear."""

import torch
from torch import Tensor

from onegraph.ops.registry import Case, Op, nbytes, register


def _silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def _check(gate_up: Tensor) -> None:
    if gate_up.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"silu_mul: gate_up is {gate_up.dtype}; allowed are float32, bfloat16 and float16")
    if gate_up.dim() == 0 or gate_up.shape[-1] % 2:
        raise ValueError(
            f"silu_mul: gate_up has shape {tuple(gate_up.shape)}; its last dimension must be even, gate then up"
        )
    if not gate_up.is_contiguous():
        raise ValueError("silu_mul: gate_up must be contiguous; call .contiguous() on it first")


def _fake(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


def _case(shape: tuple[int, ...], spread: float = 2.0) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        return ((spread * torch.randn(shape, generator=generator)).to(device, dtype),)

    return Case(name="x".join(map(str, shape)) + ("_wide" if spread > 10 else ""), make=make)


silu_mul = register(
    Op(
        name="silu_mul",
        schema="(Tensor gate_up) -> Tensor",
        reference=_silu_mul,
        fake=_fake,
        kernel="onegraph.ops.triton.activation:silu_mul",
        check=_check,
        # 1536 is SmolLM2's width; the wide case reaches -200, where a naive exp(-x) overflows float32.
        cases=(_case((1, 1, 3072)), _case((3, 5, 82)), _case((7, 2000)), _case((2, 1, 28672)), _case((4, 96), 60.0)),
        tolerance={torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4},
        bytes_moved=lambda gate_up: nbytes(gate_up) * 3 // 2,
        flops=lambda gate_up: 5 * gate_up.numel() // 2,
    )
)
"""gate_up [..., 2F] -> silu(gate_up[..., :F]) * gate_up[..., F:], float32 inside, rounded once."""
