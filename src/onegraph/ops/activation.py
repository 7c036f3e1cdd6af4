"""The elementwise part of SwiGLU and GeGLU (Shazeer, arXiv 2002.05202), and which of them a model has."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from onegraph.ops.checks import FLOATS
from onegraph.ops.registry import Case, Op, nbytes, register
from onegraph.ops.strides import row_stride


def _swiglu(gate_up: Tensor, limit: float | None = None, alpha: float = 1.0, shift: float = 0.0) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    if limit is not None and limit < math.inf:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if alpha == 0:
        return (torch.nn.functional.gelu(gate, approximate="tanh") * (up + shift)).to(gate_up.dtype)
    if alpha == 1 and shift == 0:
        return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)
    return (torch.nn.functional.silu(alpha * gate) / alpha * (up + shift)).to(gate_up.dtype)


RELU2 = -1.0  # the alpha of `ReLU2`, which has no gate


def parts_of(alpha: float) -> int:
    """Numbers that the first product of an expert gives for each hidden unit."""
    return 1 if alpha == RELU2 else 2


def between(x: Tensor, limit: float, alpha: float, shift: float) -> Tensor:
    """What stands between the two products of an expert, by the numbers of a `Gate`: [..., 2F], or [..., F] of `ReLU2`
    -> [..., F], in its dtype."""
    return x.relu().square() if alpha == RELU2 else swiglu.reference(x, limit, alpha, shift)


def check_gate(op: str, limit: float, alpha: float, shift: float) -> None:
    """Raises ValueError where they are no `Gate`."""
    if not limit > 0:
        raise ValueError(f"{op}: limit is {limit}; it must be above 0, infinity for none")
    if alpha == RELU2 and limit == math.inf and shift == 0:
        return
    if not 0 <= alpha < math.inf or not math.isfinite(shift):
        raise ValueError(f"{op}: alpha is {alpha} and shift {shift}; both must be finite, alpha at least 0")


def _check_halves(op: str, gate_up: Tensor) -> None:
    if gate_up.dtype not in FLOATS:
        raise ValueError(f"{op}: gate_up is {gate_up.dtype}; allowed are float32, bfloat16 and float16")
    if gate_up.dim() == 0 or gate_up.shape[-1] % 2:
        raise ValueError(
            f"{op}: gate_up has shape {tuple(gate_up.shape)}; its last dimension must be even, gate then up"
        )
    if not gate_up.is_contiguous():
        raise ValueError(f"{op}: gate_up must be contiguous; call .contiguous() on it first")


def _check(gate_up: Tensor, limit: float | None = None, alpha: float = 1.0, shift: float = 0.0) -> None:
    _check_halves("swiglu", gate_up)
    check_gate("swiglu", math.inf if limit is None else limit, math.nan if alpha == RELU2 else alpha, shift)


def _halves_case(shape: tuple[int, ...], spread: float = 2.0) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        return (spread * torch.randn(shape, generator=generator)).to(device, dtype), None

    return Case(name="x".join(map(str, shape)) + ("_wide" if spread > 10 else ""), make=make)


def _case(
    shape: tuple[int, ...], spread: float = 2.0, limit: float | None = None, alpha: float = 1.0, shift: float = 0.0
) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        return (spread * torch.randn(shape, generator=generator)).to(device, dtype), limit, alpha, shift

    name = "x".join(map(str, shape)) + ("_wide" if spread > 10 else "") + (f"<{limit}" if limit else "")
    name += f",{alpha},{shift}" if alpha != 1 else ""
    return Case(name=name, make=make)


swiglu = register(
    Op(
        name="swiglu",
        schema="(Tensor gate_up, float? limit=None, float alpha=1.0, float shift=0.0) -> Tensor",
        reference=_swiglu,
        fake=lambda gate_up, *rest: gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2)),
        kernel="onegraph.ops.triton.activation:swiglu",
        check=_check,
        # 1536 is SmolLM2's width; the wide case reaches -200, where a naive exp(-x) overflows float32.
        cases=(
            _case((1, 1, 3072)), _case((3, 5, 82)), _case((7, 2000)), _case((2, 1, 28672)), _case((4, 96), 60.0),
            _case((1, 1, 4096), 8.0, 10.0), _case((3, 5, 82), 8.0, 2.5),
            _case((3, 5, 82), 8.0, 7.0, 1.702, 1.0), _case((2, 96), 2.0, math.inf, 1.702, 1.0),
            _case((3, 5, 82), 8.0, math.inf, 0.0),
        ),
        tolerance={torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4},
        bytes_moved=lambda gate_up, *rest: nbytes(gate_up) * 3 // 2,
        flops=lambda gate_up, *rest: 4 * gate_up.numel(),
    )
)  # fmt: skip
"""gate_up [..., 2F] -> g * sigmoid(alpha * g) * (u + shift) of its halves g = min(gate, limit), u = clamp(up, ±limit),
float32 inside, rounded once. Without the other arguments silu(gate) * up. alpha 0: gelu by tanh in place of
g * sigmoid(alpha * g)."""


def _geglu(gate_up: Tensor, up: Tensor | None = None) -> Tensor:
    gate, factor = gate_up.float().chunk(2, dim=-1) if up is None else (gate_up.float(), up.float())
    return (torch.nn.functional.gelu(gate, approximate="tanh") * factor).to(gate_up.dtype)


def _check_geglu(gate_up: Tensor, up: Tensor | None = None) -> None:
    if up is None:
        _check_halves("geglu", gate_up)
        return
    if gate_up.dtype not in FLOATS or up.dtype != gate_up.dtype or up.device != gate_up.device:
        raise ValueError(
            f"geglu: gate is {gate_up.dtype} on {gate_up.device}, up {up.dtype} on {up.device}; they must be float32, "
            "bfloat16 or float16, both the same, on one device"
        )
    if gate_up.dim() == 0 or up.shape != gate_up.shape or row_stride(up) is None or not gate_up.is_contiguous():
        raise ValueError(
            f"geglu: gate has shape {tuple(gate_up.shape)} and strides {gate_up.stride()}, up {tuple(up.shape)} and "
            f"{up.stride()}; shapes must agree, gate and rows of up be contiguous: call .contiguous() on them first"
        )


def _apart_case(shape: tuple[int, ...], gap: int) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        gate, up = (2 * torch.randn(shape, generator=generator).to(device, dtype) for _ in range(2))
        return gate, torch.nn.functional.pad(up, (0, gap))[..., : shape[-1]]

    return Case(name="x".join(map(str, shape)) + f" apart in {shape[-1] + gap}", make=make)


geglu = register(
    Op(
        name="geglu",
        schema="(Tensor gate_up, Tensor? up=None) -> Tensor",
        reference=_geglu,
        fake=lambda gate_up, up=None: gate_up.new_empty(
            (*gate_up.shape[:-1], gate_up.shape[-1] // 2) if up is None else gate_up.shape
        ),
        kernel="onegraph.ops.triton.activation:geglu",
        check=_check_geglu,
        cases=(
            _halves_case((1, 1, 3072)), _halves_case((3, 5, 82)), _halves_case((2, 1, 20480)),
            _halves_case((4, 96), 60.0), _apart_case((2, 1, 256), 512), _apart_case((3, 5, 41), 0),
        ),
        tolerance={torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4},
        bytes_moved=lambda gate_up, up=None: nbytes(gate_up) * (3 if up is None else 6) // 2,
        flops=lambda gate_up, up=None: 6 * gate_up.numel(),
    )
)  # fmt: skip
"""gate_up [..., 2F] -> gelu(gate) * up of its halves, gelu by tanh (Gemma), float32 inside, rounded once. With `up`
[..., F], gate_up [..., F] is the gate alone."""


@dataclass(frozen=True)
class GeGLU:
    """The gate of Gemma's MLP: gelu(gate) * up, gelu by tanh. limit, alpha, shift: what tells routed experts so."""

    numbers = math.inf, 0.0, 0.0
    limit, alpha, shift = numbers
    plain = False

    def __call__(self, gate_up: Tensor) -> Tensor:
        """[..., 2F], gate then up -> [..., F], in its dtype."""
        out: Tensor = geglu(gate_up)
        return out


@dataclass(frozen=True)
class SwiGLU:
    """Which gate a model's experts have: g * sigmoid(alpha * g) * (u + shift) with g = min(gate, limit) and u = up
    within ±limit. Llama, Qwen, Mixtral: the defaults; DeepSeek-V4: a limit; gpt-oss: 7, 1.702 and 1.

    Raises ValueError where limit is not above 0, alpha not finite and above 0, or shift not finite.
    """

    limit: float = math.inf
    alpha: float = 1.0
    shift: float = 0.0

    def __post_init__(self) -> None:
        check_gate("SwiGLU", *self.numbers)
        if self.alpha == 0:
            raise ValueError("SwiGLU: alpha is 0; it must be above 0 (GeGLU is another gate)")

    @property
    def plain(self) -> bool:
        """silu(gate) * up, which a linear may have in its launch."""
        return self == SwiGLU()

    @property
    def numbers(self) -> tuple[float, float, float]:
        """limit, alpha, shift, as ops take them."""
        return self.limit, self.alpha, self.shift

    def __call__(self, gate_up: Tensor) -> Tensor:
        """[..., 2F], gate then up -> [..., F], in its dtype."""
        out: Tensor = swiglu(gate_up, *self.numbers)
        return out


@dataclass(frozen=True)
class ReLU2:
    """The square of relu, without a gate (So et al., arXiv 2109.08668): the MLP of Nemotron-H has up rows alone."""

    numbers = math.inf, RELU2, 0.0
    limit, alpha, shift = numbers
    plain = False

    def __call__(self, up: Tensor) -> Tensor:
        """[..., F] -> [..., F], in its dtype."""
        return up.relu().square()


Gate = SwiGLU | GeGLU | ReLU2  # what stands between the two products of an expert
