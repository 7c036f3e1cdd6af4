"""Layers whose weights stay in NVFP4: linear, grouped linear, routed experts. All buffers are final from the start."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from onegraph.formats.nvfp4 import GROUP, NVFP4Tensors
from onegraph.nn.linear import Linear
from onegraph.ops.nvfp4 import activation_scale, nvfp4_dequantize_weight
from onegraph.ops.nvfp4_linear import nvfp4_experts, nvfp4_grouped_linear, nvfp4_linear, nvfp4_linear_w4a4

Activations = Literal["dynamic", "frozen"]


def _rows(global_scale: Tensor, codes: Tensor) -> Tensor:
    """A global scale as the ops take it, one float32 a row: [] or [...] for each matrix -> [..., n]."""
    shape = codes.shape[:-1]
    if global_scale.shape not in ((), shape[:-1], shape):
        raise ValueError(
            f"global_scale is {tuple(global_scale.shape)}; codes {tuple(codes.shape)} ask for (), "
            f"{tuple(shape[:-1])} or {tuple(shape)}"
        )
    if global_scale.shape != shape and global_scale.dim():
        global_scale = global_scale.unsqueeze(-1)
    return global_scale.float().expand(shape).contiguous()


def _check(codes: Tensor, scale: Tensor, dims: int) -> None:
    wanted = (*codes.shape[:-1], codes.shape[-1] * 2 // GROUP)
    if codes.dim() != dims or codes.dtype != torch.uint8 or codes.shape[-1] % 8:
        raise ValueError(
            f"codes is {codes.dtype} {tuple(codes.shape)}; it must be uint8 of {dims} dimensions, k % 16 == 0"
        )
    if scale.dtype != torch.uint8 or tuple(scale.shape) != wanted:
        raise ValueError(
            f"scale is {scale.dtype} {tuple(scale.shape)}; codes {tuple(codes.shape)} ask for uint8 {wanted}, the bits "
            "of E4M3, rows neither padded nor swizzled"
        )


class NVFP4Linear(nn.Module):
    """y = x Wᵀ + b with W [n, k] in NVFP4; x [..., k] -> [..., n] in x's dtype.

    Args:
        codes: uint8 [n, k/2]; scale: uint8 [n, k/16], the bits of E4M3; global_scale: float32 [] or one a row [n].
        bias: [n] or None.
        activations: None leaves them as they are (weights only). "dynamic" quantizes them too (W4A4), with a global
            scale that the device makes from each call's x. "frozen" takes `input_scale`: given, or the largest of what
            calls saw while `observing` was on.

    Raises ValueError where a shape or dtype disagrees with the others.
    """

    codes: Tensor
    scale: Tensor
    global_scale: Tensor
    bias: Tensor | None
    input_scale: Tensor | None

    def __init__(
        self,
        *,
        codes: Tensor,
        scale: Tensor,
        global_scale: Tensor,
        bias: Tensor | None = None,
        input_scale: Tensor | None = None,
        activations: Activations | None = None,
    ) -> None:
        super().__init__()
        _check(codes, scale, 2)
        if activations not in (None, "dynamic", "frozen"):
            raise ValueError(f"activations is {activations!r}; allowed: None, 'dynamic', 'frozen'")
        if bias is not None and bias.shape != codes.shape[:1]:
            raise ValueError(f"bias is {tuple(bias.shape)}; codes {tuple(codes.shape)} ask for ({codes.shape[0]},)")
        self.activations, self.observing = activations, False
        self.register_buffer("codes", codes.contiguous())
        self.register_buffer("scale", scale.contiguous())
        self.register_buffer("global_scale", _rows(global_scale, codes))
        self.register_buffer("bias", None if bias is None else bias.float().contiguous())
        if activations == "frozen" and input_scale is None:
            input_scale = torch.zeros((), device=codes.device)
        self.register_buffer("input_scale", None if input_scale is None else input_scale.float().reshape(()))

    @classmethod
    def of(
        cls, tensors: NVFP4Tensors, bias: Tensor | None = None, activations: Activations | None = None
    ) -> "NVFP4Linear":
        """The layer that `formats.nvfp4.read_linear` read."""
        return cls(
            codes=tensors.codes,
            scale=tensors.scale,
            global_scale=tensors.global_scale,
            bias=bias,
            input_scale=tensors.input_scale,
            activations=activations,
        )

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        return self.codes.shape[1] * 2

    def forward(self, x: Tensor) -> Tensor:
        if self.activations is None:
            return nvfp4_linear(x, self.codes, self.scale, self.global_scale, self.bias)
        frozen = self.input_scale if self.activations == "frozen" else None
        if frozen is not None and self.observing:
            frozen.copy_(torch.maximum(frozen, activation_scale(x)))
        return nvfp4_linear_w4a4(x, self.codes, self.scale, self.global_scale, frozen, self.bias)

    def wide(self, x: Tensor) -> Tensor:
        """x [..., k] -> float32 [..., n]."""
        return self(x.float())

    def dense(self, dtype: torch.dtype = torch.float32) -> Linear:
        """The layer decoded once."""
        weight = nvfp4_dequantize_weight(self.codes, self.scale, self.global_scale).to(dtype)
        return Linear(weight, None if self.bias is None else self.bias.to(dtype))


def fuse_nvfp4(parts: Sequence[NVFP4Linear]) -> NVFP4Linear:
    """One layer with the rows of all `parts`, exact: each keeps its global scale. A frozen activation scale is the
    largest of theirs. Raises ValueError where one has a bias and another has none, or activations differ."""
    first = parts[0]
    if len({(part.activations, part.bias is None, part.in_features) for part in parts}) != 1:
        raise ValueError("the layers differ in inputs, bias or activations; they cannot be one")
    scales = [part.input_scale for part in parts if part.input_scale is not None]
    return NVFP4Linear(
        codes=torch.cat([part.codes for part in parts]),
        scale=torch.cat([part.scale for part in parts]),
        global_scale=torch.cat([part.global_scale for part in parts]),
        bias=None if first.bias is None else torch.cat([part.bias for part in parts if part.bias is not None]),
        input_scale=torch.stack(scales).amax() if len(scales) == len(parts) else None,
        activations=first.activations,
    )


class NVFP4GroupedLinear(nn.Module):
    """x [..., G, k] -> [..., G, n]: each group has its own weight. codes uint8 [G, n, k/2], scale uint8 [G, n, k/16],
    global_scale float32 [], [G] or [G, n]."""

    codes: Tensor
    scale: Tensor
    global_scale: Tensor

    def __init__(self, *, codes: Tensor, scale: Tensor, global_scale: Tensor) -> None:
        super().__init__()
        _check(codes, scale, 3)
        self.register_buffer("codes", codes.contiguous())
        self.register_buffer("scale", scale.contiguous())
        self.register_buffer("global_scale", _rows(global_scale, codes))

    def forward(self, x: Tensor) -> Tensor:
        return nvfp4_grouped_linear(x, self.codes, self.scale, self.global_scale)


class NVFP4Experts(nn.Module):
    """Routed SwiGLU experts: x [T, D], experts int32 [T, K], weights float32 [T, K] -> [T, D].

    gate_up: codes uint8 [E, 2F, D/2] (gate rows, then up rows) with scale uint8 [E, 2F, D/16] and global_scale [], [E]
    or [E, 2F]; down: the same for [E, D, F]. Which experts run is read on the device: no counts come to the host. A
    shared expert is one with E = 1, or two linears around `swiglu`.
    """

    gate_up: Tensor
    gate_up_scale: Tensor
    gate_up_global: Tensor
    down: Tensor
    down_scale: Tensor
    down_global: Tensor

    def __init__(
        self,
        *,
        gate_up: Tensor,
        gate_up_scale: Tensor,
        gate_up_global: Tensor,
        down: Tensor,
        down_scale: Tensor,
        down_global: Tensor,
        limit: float,
    ) -> None:
        super().__init__()
        _check(gate_up, gate_up_scale, 3)
        _check(down, down_scale, 3)
        wanted = (gate_up.shape[0], gate_up.shape[2] * 2, gate_up.shape[1] // 4)
        if gate_up.shape[1] % 32 or tuple(down.shape) != wanted:
            raise ValueError(f"down is {tuple(down.shape)}; gate_up {tuple(gate_up.shape)} asks for {wanted}")
        self.limit = limit
        self.register_buffer("gate_up", gate_up.contiguous())
        self.register_buffer("gate_up_scale", gate_up_scale.contiguous())
        self.register_buffer("gate_up_global", _rows(gate_up_global, gate_up))
        self.register_buffer("down", down.contiguous())
        self.register_buffer("down_scale", down_scale.contiguous())
        self.register_buffer("down_global", _rows(down_global, down))

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        return nvfp4_experts(
            x,
            experts,
            weights,
            self.gate_up,
            self.gate_up_scale,
            self.gate_up_global,
            self.down,
            self.down_scale,
            self.down_global,
            self.limit,
        )
