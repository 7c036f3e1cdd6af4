"""SwiGLU's elementwise part."""

import torch
from torch import Tensor

from onegraph.ops.norm import FLOATS
from onegraph.ops.registry import Case, Op, nbytes, register


def _swiglu(gate_up: Tensor, limit: float | None = None) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def _check(gate_up: Tensor, limit: float | None = None) -> None:
    if gate_up.dtype not in FLOATS:
        raise ValueError(f"swiglu: gate_up is {gate_up.dtype}; allowed are float32, bfloat16 and float16")
    if gate_up.dim() == 0 or gate_up.shape[-1] % 2:
        raise ValueError(
            f"swiglu: gate_up has shape {tuple(gate_up.shape)}; its last dimension must be even, gate then up"
        )
    if not gate_up.is_contiguous():
        raise ValueError("swiglu: gate_up must be contiguous; call .contiguous() on it first")
    if limit is not None and not limit > 0:
        raise ValueError(f"swiglu: limit is {limit}; it must be above 0, or None for none")


def _case(shape: tuple[int, ...], spread: float = 2.0, limit: float | None = None) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        return (spread * torch.randn(shape, generator=generator)).to(device, dtype), limit

    name = "x".join(map(str, shape)) + ("_wide" if spread > 10 else "") + (f"<{limit}" if limit else "")
    return Case(name=name, make=make)


swiglu = register(
    Op(
        name="swiglu",
        schema="(Tensor gate_up, float? limit=None) -> Tensor",
        reference=_swiglu,
        fake=lambda gate_up, limit=None: gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2)),
        kernel="onegraph.ops.triton.activation:swiglu",
        check=_check,
        # 1536 is SmolLM2's width; the wide case reaches -200, where a naive exp(-x) overflows float32.
        cases=(
            _case((1, 1, 3072)), _case((3, 5, 82)), _case((7, 2000)), _case((2, 1, 28672)), _case((4, 96), 60.0),
            _case((1, 1, 4096), 8.0, 10.0), _case((3, 5, 82), 8.0, 2.5),
        ),
        tolerance={torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4},
        bytes_moved=lambda gate_up, limit=None: nbytes(gate_up) * 3 // 2,
        flops=lambda gate_up, limit=None: 4 * gate_up.numel(),
    )
)  # fmt: skip
"""gate_up [..., 2F] -> silu(gate) * up of its halves, float32 inside, rounded once; with a limit (DeepSeek-V4)
silu(min(gate, limit)) * clamp(up, ±limit)."""
