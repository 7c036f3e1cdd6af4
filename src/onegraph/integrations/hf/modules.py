"""Layers in our formats in the place of transformers' own: buffers are the checkpoint's tensors, saving gives the file
back.

What a call reads (scales folded, or a decoded weight on a CPU) is derived from them once after loading, in buffers that
are not saved.
"""

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from onegraph.formats.weight import Tensors, WeightFormat
from onegraph.ops.weight import weight_ops

Stored = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # suffix of a name in the file -> (shape, dtype)
READY = "ready_"  # before the names of derived buffers, which may be those of stored ones


class _Coded(nn.Module):
    """One layer's checkpoint tensors under their own names, empty until loaded.

    Args:
        format: of the layer, of n outputs and k inputs.
        names: the format's fields in a file -> suffix of the tensor's name.
        stored: those tensors, and "bias" where there is one, as the file holds them, dtypes included: float32 scales
            stay float32 when saved again.
        dtype: of the activations.
    """

    bias: Tensor | None
    dense: Tensor | None

    def __init__(
        self, format: WeightFormat, n: int, k: int, names: Mapping[str, str], stored: Stored, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.format, self.out_features, self.in_features = format, n, k
        self.dtype, self.names = dtype, dict(names)
        for suffix, (shape, kind) in stored.items():
            self.register_buffer(suffix, torch.empty(shape, dtype=kind))
        if "bias" not in stored:
            self.register_buffer("bias", None)
        self.register_buffer("dense", None, persistent=False)
        self._ops, self._given = weight_ops(format), dict[str, str]()  # what the ops take -> the buffer that it is

    @property
    def device(self) -> torch.device:
        held: Any = self._buffers[next(iter(self.names.values()))]
        return held.device

    @property
    def ready(self) -> bool:
        """Whether `prepare` was called."""
        return bool(self._given)

    @property
    def kernel_args(self) -> Tensors:
        """What the ops take."""
        return {key: self._buffers[name] for key, name in self._given.items()}  # type: ignore[misc]  # each is there

    def prepare(self) -> None:
        """Derives what calls read, where the stored tensors lie. Call it once after loading; moving the module repeats
        it."""
        stored: Any = {key: self._buffers[suffix] for key, suffix in self.names.items()}
        for key, tensor in (self.format.fold(stored) | self.format.constants(self.device)).items():
            if tensor is stored.get(key):
                self._given[key] = self.names[key]
            else:
                self._derive(key, tensor)

    def _derive(self, key: str, tensor: Tensor) -> None:
        self._given[key] = READY + key
        self.register_buffer(READY + key, tensor, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """`.to()`, `.cuda()` and the like move the stored tensors, leave their dtypes; activations take the dtype."""
        ready = self.ready
        self._drop()
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.device)).dtype

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(fn(torch.empty(0, dtype=torch.uint8, device=tensor.device)).device)

        super()._apply(moved, recurse)
        if ready and self.device.type != "meta":
            self.prepare()
        return self

    def _drop(self) -> None:
        for name in self._given.values():
            if name.startswith(READY):
                delattr(self, name)
        self._given.clear()
        self.dense = None

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.format}"


class CodedLinear(_Coded):
    """x [..., k] -> [..., n] in x's dtype; on a CPU, where reading codes takes long, from the decoded weight."""

    def prepare(self) -> None:
        super().prepare()
        if self.device.type == "cpu":
            self.dense = self._ops.decode(self.format, self.kernel_args).to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        if self.dense is not None:
            bias = None if self.bias is None else self.bias.to(self.dense.dtype)
            return nn.functional.linear(x, self.dense, bias)
        if torch.is_grad_enabled() and x.requires_grad:
            out: Tensor = _Trained.apply(x, self)  # type: ignore[no-untyped-call, unused-ignore]
            return out
        return self.run(x)

    def run(self, x: Tensor) -> Tensor:
        """From the codes; without a gradient."""
        return self._ops.linear(self.format, x, self.kernel_args, self.bias, None, None, False, False)

    @property
    def weight(self) -> Tensor:
        """Dense [n, k]: some models read it past the layer's call, or draw numbers into it before it is loaded."""
        if not self.ready:
            nothing = torch.empty(0, self.in_features)
            nothing._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers' mark for: leave it
            return nothing
        return self._ops.decode(self.format, self.kernel_args).to(self.dtype) if self.dense is None else self.dense

    def plain(self, dtype: torch.dtype) -> nn.Linear:
        """transformers' own layer with the decoded weight."""
        linear = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta", dtype=dtype)
        weight = self._ops.decode(self.format, self.kernel_args).to(dtype)
        linear.weight = nn.Parameter(weight, requires_grad=False)
        if self.bias is not None:
            linear.bias = nn.Parameter(self.bias.to(dtype), requires_grad=False)
        return linear


class _Trained(torch.autograd.Function):
    """A coded layer with the gradient of its input: adapters in front of it are trained, its codes are not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: CodedLinear) -> Tensor:
        ctx.layer = layer
        return layer.run(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """The weight is decoded for the time of one product."""
        return gradient @ ctx.layer.weight.to(gradient.dtype), None


class CodedEmbedding(_Coded):
    """ids int [...] -> rows [..., D] in the model's dtype. Raises ValueError for a format without a lookup.

    Attributes:
        factor: of the rows, rounded to the dtype (Gemma's root of the hidden size).
    """

    def __init__(self, format: WeightFormat, *args: Any, factor: float = 1.0) -> None:
        super().__init__(format, *args)
        self.factor = factor
        self._look_up = self._ops.embedding
        if self._look_up is None:
            raise ValueError(f"an embedding cannot be stored as {format}; keep it dense")

    def forward(self, ids: Tensor) -> Tensor:
        assert self._look_up is not None
        rows = self._look_up(self.format, ids, self.kernel_args).to(self.dtype)
        return rows if self.factor == 1 else rows * _rounded(self.factor, rows.dtype)

    def plain(self, dtype: torch.dtype) -> nn.Embedding:
        """A layer as transformers' own with the decoded rows."""
        assert self._look_up is not None
        rows = self._look_up(self.format, torch.arange(self.out_features, device=self.device), self.kernel_args)
        made = ScaledEmbedding.from_pretrained(rows.to(dtype))
        made.factor = self.factor
        return made


class ScaledEmbedding(nn.Embedding):
    """Rows of an embedding times `factor`, rounded to their dtype."""

    factor = 1.0

    def forward(self, ids: Tensor) -> Tensor:
        rows = super().forward(ids)
        return rows if self.factor == 1 else rows * _rounded(self.factor, rows.dtype)


def _rounded(factor: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(factor, dtype=dtype))
