"""Weights in any format, and what multiplies by them: linear, grouped linear, siblings that share an input.

A layer is built from tensors, never resized or converted in place afterwards: a captured graph, and a serving engine
that restores registered storage, both hold on to the addresses they saw.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future

import torch
from torch import Tensor, nn

from onegraph.formats.dense import DENSE
from onegraph.formats.int8 import INT8
from onegraph.formats.weight import Part, Tensors, WeightFormat
from onegraph.nn.peers import Peer
from onegraph.ops import invariant
from onegraph.ops.cpu import packed
from onegraph.ops.cpu.packed import Packed
from onegraph.ops.weight import weight_ops


class Weight(nn.Module):
    """A matrix [..., n, k] in codes or dense: one buffer for each of the format's fields, under the field's name.

    Raises ValueError where a shape or dtype disagrees with the others.
    """

    def __init__(self, format: WeightFormat, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.format = format
        self.out_features, self.in_features = format.check(tensors)
        for key in format.fields:
            self.register_buffer(key, tensors[key].contiguous())
        self._constants = format.constants(next(iter(tensors.values())).device)
        for key, tensor in self._constants.items():
            self.register_buffer(key, tensor, persistent=False)

    @property
    def tensors(self) -> Tensors:
        """The format's fields by name."""
        return {key: self._buffers[key] for key in self.format.fields}  # type: ignore[misc]  # each is there

    @property
    def kernel_args(self) -> Tensors:
        """What the ops take: the fields, and the format's constants."""
        return {key: self._buffers[key] for key in (*self.format.fields, *self._constants)}  # type: ignore[misc]  # likewise

    @property
    def count(self) -> int:
        """Matrices in front: experts or groups; 1 of a single one."""
        key = next(key for key, field in self.format.fields.items() if field.columns and field.rows)
        return self.tensors[key].shape[:-2].numel()

    def at(self, index: int) -> Tensors:
        """The tensors of one of the matrices, in the same storage."""
        return {key: tensor[index] for key, tensor in self.tensors.items()}

    def extra_repr(self) -> str:
        return f"{self.out_features} x {self.in_features}, {self.format}"


class Linear(Weight):
    """y = x Wᵀ + b with W [n, k]; bias [n] or None.

    Dense, it is called with x of the weight's dtype; in codes, with float32, bfloat16 or float16.
    """

    bias: Tensor | None

    def __init__(self, format: WeightFormat, tensors: Mapping[str, Tensor], bias: Tensor | None = None) -> None:
        super().__init__(format, tensors)
        if bias is not None and bias.shape != (self.out_features,):
            raise ValueError(
                f"bias is {tuple(bias.shape)}; a layer of {self.out_features} outputs needs ({self.out_features},)"
            )
        self.register_buffer("bias", bias)

    def forward(
        self,
        x: Tensor,
        *,
        add: Tensor | None = None,
        eps: float | None = None,
        silu: bool = False,
        float32: bool = False,
    ) -> Tensor:
        """x [..., k] -> [..., n] in x's dtype, or with `float32` in float32, not rounded to x's dtype on a GPU.

        The others are for a format that fuses them (`WeightFormat.fuses`): `eps` puts the RMSNorm in front whose weight
        the layer holds (`after_norm`), `silu` SwiGLU, of x [..., 2k] = gate | up; `add` [..., n] is added behind.
        """
        if not invariant.on():
            return self._run(x, add, eps, silu, float32)
        steady = weight_ops(self.format).steady
        return invariant.in_passes(
            lambda x, add: self._run(x, add, eps, silu, float32), x, add,
            steady=steady is not None and steady(self.format, x, self.kernel_args),
        )  # fmt: skip

    def _run(self, x: Tensor, add: Tensor | None, eps: float | None, silu: bool, float32: bool) -> Tensor:
        return weight_ops(self.format).linear(self.format, x, self.kernel_args, self.bias, add, eps, silu, float32)

    def summed(self, x: Tensor, peer: Peer, add: Tensor | None = None, *, silu: bool = False) -> Tensor:
        """The sum of all ranks' results [..., n], plus `add`, which is the same on all of them; `silu` as in a call."""
        run = weight_ops(self.format).all_reduce
        found = None if run is None else run(self.format, x, self.kernel_args, self.bias, add, silu, peer.group)
        return peer.all_reduce(self._run(x, None, None, silu, False), add) if found is None else found

    def after_norm(self, weight: Tensor) -> "Linear":
        """The same layer with the weight [k] of the RMSNorm in front in it; to be called with the norm's eps."""
        return Linear(self.format, self.format.after_norm(self.tensors, weight), self.bias)

    def dense(self, dtype: torch.dtype = torch.float32) -> "Linear":
        """The layer decoded once: for CPUs, whose time goes into reading codes."""
        weight = weight_ops(self.format).decode(self.format, self.kernel_args).to(dtype)
        return dense(weight, None if self.bias is None else self.bias.to(dtype))

    def int8(self) -> "Linear":
        """The layer in int8 by row: for CPUs."""
        weight = weight_ops(self.format).decode(self.format, self.kernel_args)
        return Linear(INT8, INT8.encode(weight), self.bias)

    def float16(self, pool: Executor | None = None) -> "Linear":
        """The layer dense in float16, activations and sums float32: for CPUs whose torch has that (`ops.cpu.packed`).
        In float32 where float16 does not hold the weight: it is too large for it, or too small. pool: see
        `PackedLinear`."""
        whole = self.dense()
        weight = whole.tensors["weight"]
        return PackedLinear(weight, whole.bias, pool) if packed.holds(weight) else whole

    def part(
        self, *, rows: tuple[int, int] | None = None, columns: tuple[int, int] | None = None, keep_bias: bool = True
    ) -> "Linear":
        """The part of the layer that owns the outputs first..last of `rows` and the inputs of `columns`.

        The outputs of all column parts add up to the whole layer's; give the bias to one of them only. Raises
        ValueError where the part is no layer of its own: `WeightFormat.check_part`.
        """
        tensors = self.format.part(self.tensors, Part(rows, columns))
        bias = self.bias if self.bias is None or rows is None else self.bias[slice(*rows)].clone()
        return Linear(self.format, tensors, bias if keep_bias else None)


class PackedLinear(Linear):
    """A dense linear on a CPU whose weight [n, k], given in float32, is kept in float16 and in the order in which
    torch's kernel reads it; x may have any float dtype. `tensors` unpacks it.

    pool: threads that pack it, each of which packs one layer at a time; its first use waits for that.
    """

    _packed: Packed | Future[Packed]

    def __init__(self, weight: Tensor, bias: Tensor | None = None, pool: Executor | None = None) -> None:
        nn.Module.__init__(self)
        self.format, (self.out_features, self.in_features) = DENSE, weight.shape
        self._packed = packed.pack(weight, bias) if pool is None else pool.submit(packed.pack, weight, bias)
        self.register_buffer("bias", bias)

    def wait(self) -> Packed:
        """The packed weight, once the pool has made it."""
        if isinstance(self._packed, Future):
            self._packed = self._packed.result()
        return self._packed

    @property
    def tensors(self) -> Tensors:
        return {"weight": packed.unpack(self.wait())}

    @property
    def kernel_args(self) -> Tensors:
        return self.tensors

    def _run(self, x: Tensor, add: Tensor | None, eps: float | None, silu: bool, float32: bool) -> Tensor:
        y = packed.linear(x.float(), self.wait())
        return y if float32 else y.to(x.dtype)


def dense(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """The linear of a dense weight [n, k]."""
    return Linear(DENSE, {"weight": weight}, bias)


class GroupedLinear(Weight):
    """G independent linears side by side: x [..., G, k] -> [..., G, n], with W [G, n, k]."""

    def forward(self, x: Tensor) -> Tensor:
        run = weight_ops(self.format).grouped
        if run is None:
            raise ValueError(f"{self.format} has no grouped linear; load it dense")
        return run(self.format, x, self.kernel_args)


class ConcatLinear(nn.Module):
    """Linears that read the same input, outputs side by side: what cannot be one layer still has one layer's shape."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    @property
    def out_features(self) -> int:
        return sum(part.out_features for part in self.parts)  # type: ignore[misc]  # ModuleList forgets what it holds

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)


def join(parts: Sequence[Linear]) -> Linear | ConcatLinear:
    """One layer with the rows of all `parts`, where the format says that this is exact; otherwise `ConcatLinear`. Two
    launches saved a layer at q/k/v, one at gate/up."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0].format
    if any(part.format is not first for part in parts):
        return ConcatLinear(parts)
    joined = first.join([part.tensors for part in parts])
    return (
        ConcatLinear(parts) if joined is None else Linear(first, joined, _joined([part.bias for part in parts], parts))
    )


def fuse(parts: Sequence[Linear]) -> tuple[Linear, list[Linear]] | None:
    """Layers in codes that read the same input as one layer, and each of them anew in the storage of that one: who runs
    all of them together keeps no second copy of any. None where the format joins no layers, or not so."""
    whole = join(parts) if all(part.format.coded and part.bias is None for part in parts) else None
    if not isinstance(whole, Linear):
        return None
    found, first = list[Linear](), 0
    for part in parts:
        rows = Part(rows=(first, first + part.out_features))
        tensors = {key: field.cut(whole.tensors[key], rows) for key, field in whole.format.fields.items()}
        if not all(tensor.is_contiguous() for tensor in tensors.values()):
            return None
        found.append(Linear(whole.format, tensors))
        first += part.out_features
    return whole, found


def _joined(biases: Sequence[Tensor | None], parts: Sequence[Linear]) -> Tensor | None:
    """Biases one after the other; a part without one counts as zeros if another has one."""
    like = next((bias for bias in biases if bias is not None), None)
    if like is None:
        return None
    pairs = zip(biases, parts, strict=True)
    return torch.cat([like.new_zeros(part.out_features) if bias is None else bias for bias, part in pairs])
