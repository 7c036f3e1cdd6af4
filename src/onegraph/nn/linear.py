"""Linear layers whose buffers are at their final shape from the start: dense, E8P, and siblings that share an input.

A layer is built from tensors, never resized or converted in place afterwards: a captured graph, and a serving engine
that restores registered storage, both hold on to the addresses they saw.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn

from onegraph.formats.e8p import MAX_BLOCK, codebook, hadamard_block, residual_dtype
from onegraph.ops.e8p import e8p_decode, e8p_linear
from onegraph.ops.hadamard import hadamard
from onegraph.ops.linear import linear

ROWS_AT_ONCE = 512  # when a layer is decoded: a vocabulary at once would take gigabytes, and four times as long
shared_codebook = lru_cache(maxsize=None)(codebook)  # 4 KB, one a device, so that it stays in cache across layers


class Linear(nn.Module):
    """y = x Wᵀ + b with weight [n, k] and optional bias [n] of one dtype; x [..., k] -> [..., n]."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        if weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
            raise ValueError(
                f"weight is {tuple(weight.shape)} and bias {None if bias is None else tuple(bias.shape)}; "
                "they must be [n, k] and [n]"
            )
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)

    def wide(self, x: Tensor) -> Tensor:
        """x [..., k] -> float32 [..., n]; not rounded to the weight's dtype on a GPU."""
        if self.bias is not None:
            return self(x).float()
        return linear(x, self.weight, True)


class E8PLinear(nn.Module):
    """A linear whose weight stays in E8P codes; one op a call. The layout is told in `formats/e8p.py`.

    Args:
        codes: int16 [n, k/8]; residual: None at 2 bits, uint8 at 3, int16 at 4, of the same shape.
        in_scale: [k]; out_scale: [n], with the checkpoint's global scale already multiplied in. Kept as float32.
        bias: [n] or None; bits: 2, 3 or 4.

    Raises ValueError where a shape or dtype disagrees with the others.
    """

    codes: Tensor
    residual: Tensor | None
    in_scale: Tensor
    out_scale: Tensor
    bias: Tensor | None
    codebook: Tensor

    def __init__(
        self,
        *,
        codes: Tensor,
        residual: Tensor | None,
        in_scale: Tensor,
        out_scale: Tensor,
        bias: Tensor | None = None,
        bits: int,
    ) -> None:
        super().__init__()
        wanted = residual_dtype(bits)
        if codes.dim() != 2 or codes.dtype != torch.int16:
            raise ValueError(f"codes is {tuple(codes.shape)} {codes.dtype}; it must be int16 [n, k/8]")
        got = None if residual is None else residual.dtype
        if got != wanted or (residual is not None and residual.shape != codes.shape):
            raise ValueError(f"residual is {got}; at {bits} bits it must be {wanted}, of the shape of codes")
        n, k = codes.shape[0], codes.shape[1] * 8
        for name, tensor, size in (("in_scale", in_scale, k), ("out_scale", out_scale, n), ("bias", bias, n)):
            if tensor is not None and tensor.shape != (size,):
                raise ValueError(f"{name} is {tuple(tensor.shape)}; codes {tuple(codes.shape)} ask for ({size},)")
        self.bits = bits
        self.register_buffer("codes", codes.contiguous())
        self.register_buffer("residual", None if residual is None else residual.contiguous())
        self.register_buffer("in_scale", in_scale.float().contiguous())
        self.register_buffer("out_scale", out_scale.float().contiguous())
        self.register_buffer("bias", None if bias is None else bias.float().contiguous())
        self.register_buffer("codebook", shared_codebook(codes.device), persistent=False)

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        return self.codes.shape[1] * 8

    def forward(
        self, x: Tensor, *, add: Tensor | None = None, eps: float | None = None, silu: bool = False, wide: bool = False
    ) -> Tensor:
        """x [..., k] ([..., 2k] with `silu`) -> [..., n] in one op; what the options fuse: `ops/e8p.py`."""
        return e8p_linear(
            x, self.codes, self.residual, self.codebook, self.in_scale, self.out_scale, self.bias, self.bits,
            add, eps, silu, wide,
        )  # fmt: skip

    def wide(self, x: Tensor, *, eps: float | None = None) -> Tensor:
        """x [..., k] -> float32 [..., n]; not rounded to x's dtype."""
        return self(x, eps=eps, wide=True)

    def after_norm(self, weight: Tensor) -> "E8PLinear":
        """The same codes, with the weight [k] of the RMSNorm in front in in_scale; to be called with the norm's eps."""
        return E8PLinear(
            codes=self.codes,
            residual=self.residual,
            in_scale=self.in_scale * weight.float(),
            out_scale=self.out_scale,
            bias=self.bias,
            bits=self.bits,
        )

    def dense(self, dtype: torch.dtype = torch.float32) -> Linear:
        """The layer decoded once, rotations and scales multiplied out: for CPUs, whose time goes into reading codes."""
        n, k = self.out_features, self.in_features
        weight = torch.empty(n, k, device=self.codes.device, dtype=dtype)
        for first in range(0, n, ROWS_AT_ONCE):  # whole rotation blocks: the last part is a multiple of n's block too
            part = slice(first, first + ROWS_AT_ONCE)
            residual = None if self.residual is None else self.residual[part]
            q = e8p_decode(self.codes[part], residual, self.codebook, self.bits).float()
            rows = hadamard(hadamard(q, hadamard_block(k)).t().contiguous(), hadamard_block(n)).t()
            weight[part] = rows * self.out_scale[part].unsqueeze(1) * self.in_scale
        return Linear(weight, None if self.bias is None else self.bias.to(dtype))

    def shard(self, *, rows: slice = slice(None), columns: slice = slice(None), keep_bias: bool = True) -> "E8PLinear":
        """The part of the layer that owns `rows` of its outputs and `columns` of its inputs, itself a valid layer.

        Bounds must be multiples of 128 (or the layer's ends): rotations run in blocks of at most 128, so a bound inside
        a block would mix what the parts hold. The outputs of all column parts add up to the whole layer's; give the
        bias to one of them only (`keep_bias=False` for the rest).
        """
        n, k = self.out_features, self.in_features
        first, last = _bounds(rows, n, "rows")
        left, right = _bounds(columns, k, "columns")
        for start, stop, size in ((first, last, n), (left, right, k)):
            if hadamard_block(stop - start) != hadamard_block(size):
                raise ValueError(
                    f"a part of {stop - start} of {size} would be rotated in blocks of {hadamard_block(stop - start)}, "
                    f"the layer is in blocks of {hadamard_block(size)}; choose another bound"
                )
        part = slice(first, last), slice(left // 8, right // 8)
        return E8PLinear(
            codes=self.codes[part].clone(),
            residual=None if self.residual is None else self.residual[part].clone(),
            in_scale=self.in_scale[left:right].clone(),
            out_scale=self.out_scale[first:last].clone(),
            bias=None if self.bias is None or not keep_bias else self.bias[first:last].clone(),
            bits=self.bits,
        )


def _bounds(part: slice, size: int, what: str) -> tuple[int, int]:
    start, stop = 0 if part.start is None else part.start, size if part.stop is None else part.stop
    if part.step not in (None, 1) or not 0 <= start < stop <= size:
        raise ValueError(f"{what} {start}:{stop} is no part of {size}; bounds must ascend within it, with step 1")
    if start % MAX_BLOCK or (stop % MAX_BLOCK and stop != size):
        raise ValueError(f"{what} {start}:{stop} cuts a rotation block; bounds must be multiples of {MAX_BLOCK}")
    return start, stop


class Siblings(nn.Module):
    """Linears that read the same input, outputs side by side: what cannot be one layer still has one layer's shape."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    @property
    def out_features(self) -> int:
        return sum(part.out_features for part in self.parts)  # type: ignore[misc]  # ModuleList forgets what it holds

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)


def fuse(parts: Sequence[Linear | E8PLinear]) -> Linear | E8PLinear | Siblings:
    """One layer with the rows of all `parts`, where that is exact; otherwise `Siblings`.

    E8P layers fuse if they have the same bits, bit-identical in_scale, and output rotation blocks that the
    concatenation keeps. Two launches saved a layer at q/k/v, one at gate/up.
    """
    if len(parts) == 1:
        return parts[0]
    dense = [part for part in parts if isinstance(part, Linear)]
    coded = [part for part in parts if isinstance(part, E8PLinear)]
    if len(dense) == len(parts):
        return Linear(torch.cat([part.weight for part in dense]), _joined([p.bias for p in dense], dense))
    if len(coded) == len(parts):
        first = coded[0]
        blocks = {hadamard_block(part.out_features) for part in coded}
        blocks.add(hadamard_block(sum(part.out_features for part in coded)))
        if (
            len(blocks) == 1
            and all(part.bits == first.bits for part in coded)
            and all(torch.equal(part.in_scale, first.in_scale) for part in coded)
        ):
            residuals = [part.residual for part in coded if part.residual is not None]
            return E8PLinear(
                codes=torch.cat([part.codes for part in coded]),
                residual=torch.cat(residuals) if residuals else None,
                in_scale=first.in_scale,
                out_scale=torch.cat([part.out_scale for part in coded]),
                bias=_joined([part.bias for part in coded], coded),
                bits=first.bits,
            )
    return Siblings(parts)


def _joined(biases: Sequence[Tensor | None], parts: Sequence[Linear | E8PLinear]) -> Tensor | None:
    """Biases one after the other; a part without one counts as zeros if another has one."""
    like = next((bias for bias in biases if bias is not None), None)
    if like is None:
        return None
    pairs = zip(biases, parts, strict=True)
    return torch.cat([like.new_zeros(part.out_features) if bias is None else bias for bias, part in pairs])
