"""Ops on weights in codes, made from one description of their format.

A `Coded` says what differs between formats: how bytes become numbers, which tensors a weight has and what they must
be, random weights and cases. From it follow four ops, each with reference, fake, check, cases and cost, and the
`WeightOps` that modules run them through:

    <name>_dequantize(weight, numbers) -> float32 [..., n, k]
    <name>_linear(x [..., k], weight [n, k], bias [n] or None, numbers, bool float32) -> [..., n]
    <name>_grouped_linear(x [..., G, k], weight [G, n, k], numbers) -> [..., G, n]
    <name>_experts(x [T, D], experts int32 [T, K], weights float32 [T, K], gate_up [E, 2F, D], down [E, D, F], numbers,
                   limit, alpha, shift) -> [T, D]

`weight` stands for the tensors of a weight, codes first, `numbers` for integers of the format. Results have the dtype
of x; with `float32`, float32. Group g of a grouped linear is x's group g times the weight's. Experts give the sum over
k of weights * (down(swiglu(gate_up(x))) + bias), with `limit`, `alpha` and `shift` of a `Gate`; gate rows come first,
then up rows, or [E, F, D] up rows alone with alpha -1 (`ReLU2`). Which experts run is read on the device. A format with
`expert_biases` takes a float32 bias [E, 2F] or None behind the tensors of gate_up, and [E, D] or None behind those of
down.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from onegraph.formats.weight import Dtypes, Shape, WeightFormat
from onegraph.ops.activation import Gate, between, check_gate, parts_of
from onegraph.ops.checks import FLOATS, check_routes
from onegraph.ops.registry import Case, Op, nbytes, register
from onegraph.ops.weight import KernelArgs, WeightOps

_EXACT = {torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 0.0}
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
_EXPERTS_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


Numbers = tuple[int, ...]


class Kernels(Protocol):
    """A format's kernels on a GPU; `W` is a weight as they are given it. What they do not take, references compute."""

    def takes(self, x: Tensor) -> bool:
        """Whether a kernel computes on `x`."""

    def takes_codes(self, codes: Tensor) -> bool:
        """Whether a kernel decodes `codes`."""

    def weight(self, shape: tuple[int, int, int], tensors: Mapping[str, Any], numbers: Numbers) -> Any:
        """Matrices [count, n, k] as the methods below take them, by the names of their tensors; None for those that no
        kernel knows."""

    def reads_linear(self, weight: Any, format: Any, dtype: torch.dtype, device: int) -> bool:
        """Whether linears with activations of `dtype` are computed from the codes of such a weight, which has no
        tensors yet."""

    def decode(self, weight: Any, dtype: torch.dtype) -> Tensor: ...

    def linear(self, x: Tensor, weight: Any, bias: Tensor | None, float32: bool) -> Tensor: ...

    def grouped_linear(self, x: Tensor, weight: Any) -> Tensor: ...

    def experts(
        self, x: Tensor, experts: Tensor, weights: Tensor, gate_up: Any, down: Any, gate: tuple[float, ...],
        biases: tuple[Tensor | None, Tensor | None],
    ) -> Tensor | None:  # fmt: skip
        """None for calls that they do not take."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Coded:
    """What a weight format is to its ops.

    Args:
        name: what the names of its ops begin with.
        module: the module that holds this description as `CODED`.
        tensors: names of the tensors of a weight, codes first, as `WeightFormat.fields` calls them; one whose name ends
            with "?" may be None.
        numbers: integers that the ops take besides, attributes of the `WeightFormat`.
        packed: inputs that a byte of codes holds.
        group: k is a multiple of it.
        decode: (*tensors, *numbers) -> float32 [..., n, k].
        wanted: (*tensors, *numbers) -> dtypes and shape of each tensor behind the codes. Raises ValueError for numbers
            that no weight has.
        expert_biases: whether experts take biases.
        kernels: "module:name" of its `Kernels`; None: it has none. on_gpu: ops that have one.
        cases: of each op, by its name without that of the format; it has the ops that have cases.
    """

    name: str
    module: str
    tensors: tuple[str, ...]
    numbers: tuple[str, ...] = ()
    packed: int = 1
    group: int = 1
    decode: Callable[..., Tensor]
    wanted: Callable[..., tuple[tuple[Dtypes, Shape], ...]]
    expert_biases: bool = False
    kernels: str | None = None
    on_gpu: tuple[str, ...] = ("linear", "grouped_linear", "experts")
    cases: Mapping[str, tuple[Case, ...]]

    # ------------------------------------------------------------------------------------------------------ references

    def linear(self, x: Tensor, *rest: Any) -> Tensor:
        weight, (bias, *numbers, float32) = self._first(rest)
        y = x.float() @ self.decode(*weight, *numbers).T
        y = y if bias is None else y + bias.float()
        return y if float32 else y.to(x.dtype)

    def grouped_linear(self, x: Tensor, *weight: Any) -> Tensor:
        return torch.einsum("...gk,gnk->...gn", x.float(), self.decode(*weight)).to(x.dtype).contiguous()

    def experts(self, x: Tensor, experts: Tensor, weights: Tensor, *rest: Any) -> Tensor:
        gate_up, down, numbers, gate = self._layers(rest)
        wide, dtype, (tokens, top_k), count = x.float(), x.dtype, experts.shape, gate_up[0].shape[0]

        def take(tensor: Tensor, index: Tensor | int) -> Tensor:
            return tensor[index] if isinstance(index, int) else tensor.index_select(0, index)

        def at(index: Tensor | int, x: Tensor) -> Tensor:
            """Of experts [P], row p of x [P, D] through its own; of one, every row."""
            for layer in (gate_up, down):
                *weight, bias = (None if t is None else take(t, index) for t in layer)
                decoded = self.decode(*weight, *numbers)
                x = x @ decoded.T if decoded.dim() == 2 else torch.einsum("pnk,pk->pn", decoded, x)
                x = x if bias is None else x + bias
                if layer is gate_up:  # rounded as between two launches
                    x = between(x, *gate).to(dtype).float()
            return x

        if experts.numel() <= count:  # few tokens: the weights that they use
            out: Tensor = at(experts.flatten(), wide.repeat_interleave(top_k, 0)).unflatten(0, (tokens, top_k))
            return (out * weights.unsqueeze(-1)).sum(1).to(x.dtype)
        total = torch.zeros_like(wide)
        for e in range(count):  # many: each expert on all tokens; what did not choose it may be infinite
            chose = experts == e
            gain = torch.where(chose, weights, 0.0).sum(1, keepdim=True)
            total += torch.where(chose.any(1, keepdim=True), gain * at(e, wide), 0.0)
        return total.to(x.dtype)

    def _first(self, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The tensors of a weight, and what is behind them."""
        return args[: len(self.tensors)], args[len(self.tensors) :]

    def _layers(self, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], ...]:
        """What is behind the routes of experts: tensors and bias of either layer, numbers, gate."""
        *rest, limit, alpha, shift = args
        layers = []
        for _ in range(2):
            weight, behind = self._first(tuple(rest))
            bias, rest = (behind[0], list(behind[1:])) if self.expert_biases else (None, list(behind))
            layers.append((*weight, bias))
        return *layers, tuple(rest), (limit, alpha, shift)

    # -------------------------------------------------------------------------------------------------------- on a GPU

    @cached_property
    def _kernels(self) -> Kernels:
        assert self.kernels is not None
        module, name = self.kernels.split(":")
        found: Kernels = getattr(import_module(module), name)
        return found

    def _weight(self, tensors: tuple[Any, ...], numbers: tuple[Any, ...] = ()) -> Any:
        *lead, n, width = tensors[0].shape
        names = (key.removesuffix("?") for key in self.tensors)
        named = dict(zip(names, tensors, strict=True))
        return self._kernels.weight((prod(lead), n, width * self.packed), named, tuple(numbers))

    def _reads(self, format: Any, n: int, k: int, dtype: torch.dtype, device: int) -> bool:
        weight = self._kernels.weight((1, n, k), {}, tuple(getattr(format, key) for key in self.numbers))
        return weight is not None and self._kernels.reads_linear(weight, format, dtype, device)

    def dequantize_on_gpu(self, *args: Any) -> Tensor:
        weight = self._weight(*self._first(args)) if self._kernels.takes_codes(args[0]) else None
        return self.decode(*args) if weight is None else self._kernels.decode(weight, torch.float32)

    def linear_on_gpu(self, x: Tensor, *rest: Any) -> Tensor:
        if self._kernels.takes(x):
            tensors, (bias, *numbers, float32) = self._first(rest)
            if (weight := self._weight(tensors, tuple(numbers))) is not None:
                return self._kernels.linear(x, weight, bias, float32)
        return self.linear(x, *rest)

    def grouped_linear_on_gpu(self, x: Tensor, *rest: Any) -> Tensor:
        weight = self._weight(*self._first(rest)) if self._kernels.takes(x) else None
        return self.grouped_linear(x, *rest) if weight is None else self._kernels.grouped_linear(x, weight)

    def experts_on_gpu(self, x: Tensor, experts: Tensor, weights: Tensor, *rest: Any) -> Tensor:
        y, alpha = None, rest[-2]
        if alpha > 0 and self._kernels.takes(x):  # no kernel here has GeLU (alpha 0) or the square of relu (-1)
            (*first, first_bias), (*second, second_bias), numbers, gate = self._layers(rest)
            gate_up, down = self._weight(tuple(first), numbers), self._weight(tuple(second), numbers)
            if gate_up is not None and down is not None:
                biases = first_bias, second_bias
                y = self._kernels.experts(x, experts, weights, gate_up, down, gate, biases)
        return self.experts(x, experts, weights, *rest) if y is None else y

    # ---------------------------------------------------------------------------------------------------------- checks

    def check_weight(self, *args: Any, dims: int | None = None, name: str = "codes") -> None:
        """The tensors of a weight against what a kernel reads: those of another size or layout are refused here."""
        tensors, _ = self._first(args)
        codes: Tensor = tensors[0]
        if (
            codes.dtype != torch.uint8
            or codes.dim() < 2
            or codes.dim() != (dims or codes.dim())
            or codes.shape[-1] * self.packed % self.group
        ):
            sizes = {None: "..., n", 2: "n", 3: "count, n"}[dims] + (f", k/{self.packed}" if self.packed > 1 else ", k")
            multiple = f", k % {self.group} == 0" if self.group > self.packed else ""
            raise ValueError(f"{name} is {codes.dtype} {tuple(codes.shape)}; it must be uint8 [{sizes}]{multiple}")
        named = {name: codes}
        for key, tensor, (dtypes, shape) in zip(self.tensors[1:], tensors[1:], self.wanted(*args), strict=True):
            if tensor is None and key.endswith("?"):
                continue
            what = f"the {key.removesuffix('?').replace('_', ' ')} of {name}"
            if tensor.dtype not in dtypes or tuple(tensor.shape) != tuple(shape):
                kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
                numbers = ", ".join(f"{key} = {args[len(tensors) + i]}" for i, key in enumerate(self.numbers))
                raise ValueError(
                    f"{what} is {tensor.dtype} {tuple(tensor.shape)}; {name} {tuple(codes.shape)}"
                    f"{' with ' * bool(numbers)}{numbers} needs {kinds} {tuple(shape)}"
                )
            named[what] = tensor
        for what, tensor in named.items():
            if not tensor.is_contiguous() or tensor.device != codes.device:
                raise ValueError(
                    f"{what} on {tensor.device} has strides {tensor.stride()}; contiguous on {codes.device} needed"
                )

    def _check_x(self, x: Tensor, codes: Tensor) -> None:
        k = codes.shape[-1] * self.packed
        if x.dtype not in FLOATS or x.dim() == 0 or x.shape[-1] != k or not x.is_contiguous():
            raise ValueError(
                f"x is {x.dtype} {tuple(x.shape)}; codes {tuple(codes.shape)} need a contiguous float32, bfloat16 "
                f"or float16 with a last dimension of {k}"
            )
        if x.device != codes.device:
            raise ValueError(f"x is on {x.device} and codes on {codes.device}; move them to one device")

    def _check_linear(self, x: Tensor, *rest: Any) -> None:
        weight, (bias, *numbers, _) = self._first(rest)
        self.check_weight(*weight, *numbers, dims=2)
        self._check_x(x, weight[0])
        _check_bias("bias", bias, FLOATS, weight[0].shape[:1], x.device)

    def _check_grouped_linear(self, x: Tensor, *weight: Any) -> None:
        self.check_weight(*weight, dims=3)
        codes = weight[0]
        self._check_x(x, codes)
        if x.dim() < 2 or x.shape[-2] != codes.shape[0]:
            raise ValueError(
                f"x has shape {tuple(x.shape)}; codes {tuple(codes.shape)} need [..., {codes.shape[0]}, k]"
            )

    def _check_experts(self, x: Tensor, experts: Tensor, weights: Tensor, *rest: Any) -> None:
        (*first, first_bias), (*second, second_bias), numbers, gate = self._layers(rest)
        self.check_weight(*first, *numbers, dims=3, name="gate_up")
        self.check_weight(*second, *numbers, dims=3, name="down")
        if x.dim() != 2:
            raise ValueError(f"x has shape {tuple(x.shape)}; it must be [T, D]")
        gate_up, down = first[0], second[0]
        self._check_x(x, gate_up)
        count, rows, _ = gate_up.shape
        parts = parts_of(gate[1])
        wanted = (count, x.shape[1], rows // (parts * self.packed))
        if rows % (parts * self.group) or rows % (parts * self.packed) or tuple(down.shape) != wanted:
            raise ValueError(f"down is {tuple(down.shape)}; gate_up {tuple(gate_up.shape)} needs {wanted}")
        check_routes(x, experts, weights)
        _check_bias("the bias of gate_up", first_bias, (torch.float32,), (count, rows), x.device)
        _check_bias("the bias of down", second_bias, (torch.float32,), (count, x.shape[1]), x.device)
        check_gate(f"{self.name}_experts", *gate)

    # ------------------------------------------------------------------------------------------------------------- ops

    @cached_property
    def ops(self) -> dict[str, Op]:
        """The ops that have cases, by name without that of the format; registered when first asked for."""
        records = {
            "dequantize": self._dequantize_op,
            "linear": self._linear_op,
            "grouped_linear": self._grouped_linear_op,
            "experts": self._experts_op,
        }
        found = {}
        for op, cases in self.cases.items():
            arguments, rest = records[op]()
            kernel = f"{self.module}:CODED.{op}_on_gpu" if self.kernels and op in self.on_gpu else None
            schema = f"({', '.join(arguments)}) -> Tensor"
            found[op] = register(Op(name=f"{self.name}_{op}", schema=schema, kernel=kernel, cases=cases, **rest))
        return found

    def _arguments(self, codes: str = "codes") -> list[str]:
        """The tensors of a weight as a schema has them; `codes`: the name of the first."""
        named = [codes, *(key if codes == "codes" else f"{codes}_{key}" for key in self.tensors[1:])]
        return [f"Tensor{'?' * name.endswith('?')} {name.removesuffix('?')}" for name in named]

    @property
    def _numbers(self) -> list[str]:
        return [f"int {key}" for key in self.numbers]

    def _dequantize_op(self) -> tuple[list[str], dict[str, Any]]:
        packed, count = self.packed, len(self.tensors)
        return [*self._arguments(), *self._numbers], {
            "reference": self.decode,
            "fake": lambda codes, *_: codes.new_empty(
                (*codes.shape[:-1], codes.shape[-1] * packed), dtype=torch.float32
            ),
            "check": self.check_weight,
            "tolerance": _EXACT,
            "bytes_moved": lambda codes, *rest: nbytes(codes, *rest[: count - 1]) + 4 * packed * codes.numel(),
            "flops": lambda codes, *_: 2 * packed * codes.numel(),
        }

    def _linear_op(self) -> tuple[list[str], dict[str, Any]]:
        count = len(self.tensors)
        return ["Tensor x", *self._arguments(), "Tensor? bias", *self._numbers, "bool float32"], {
            "reference": self.linear,
            "fake": lambda x, codes, *rest: x.new_empty(
                (*x.shape[:-1], codes.shape[0]), dtype=torch.float32 if rest[-1] else x.dtype
            ),
            "check": self._check_linear,
            "tolerance": _TOLERANCE,
            "bytes_moved": lambda x, codes, *rest: (
                nbytes(x, codes, *rest[:count])
                + (4 if rest[-1] else x.element_size()) * x.shape[:-1].numel() * codes.shape[0]
            ),
            "flops": lambda x, codes, *_: 2 * x.numel() * codes.shape[0],
        }

    def _grouped_linear_op(self) -> tuple[list[str], dict[str, Any]]:
        count = len(self.tensors)
        return ["Tensor x", *self._arguments(), *self._numbers], {
            "reference": self.grouped_linear,
            "fake": lambda x, codes, *_: x.new_empty((*x.shape[:-1], codes.shape[1])),
            "check": self._check_grouped_linear,
            "tolerance": _TOLERANCE,
            "bytes_moved": lambda x, codes, *rest: (
                nbytes(x, codes, *rest[: count - 1]) + x.element_size() * x.shape[:-1].numel() * codes.shape[1]
            ),
            "flops": lambda x, codes, *_: 2 * x.numel() * codes.shape[1],
        }

    def _experts_op(self) -> tuple[list[str], dict[str, Any]]:
        layers = [
            argument
            for layer in ("gate_up", "down")
            for argument in (*self._arguments(layer), *([f"Tensor? {layer}_bias"] if self.expert_biases else []))
        ]
        routes, gate = ("Tensor x", "Tensor experts", "Tensor weights"), ("float limit", "float alpha", "float shift")

        def bytes_moved(x: Tensor, experts: Tensor, weights: Tensor, *rest: Any) -> int:
            tensors = [each for each in rest if isinstance(each, Tensor)]
            count = tensors[0].shape[0]
            return 2 * nbytes(x) + min(experts.numel(), count) * (nbytes(*tensors) // count)

        return [*routes, *layers, *self._numbers, *gate], {
            "reference": self.experts,
            "fake": lambda x, *_: torch.empty_like(x),
            "check": self._check_experts,
            "tolerance": _EXPERTS_TOLERANCE,
            "bytes_moved": bytes_moved,
            "flops": lambda x, experts, weights, codes, *_: 3 * experts.numel() * x.shape[1] * codes.shape[1],
        }

    # --------------------------------------------------------------------------------------------- as a weight format

    @cached_property
    def weight(self) -> WeightOps:
        """How weights of the format are run."""
        dequantize, linear = self.ops["dequantize"], self.ops["linear"]
        grouped, experts = self.ops.get("grouped_linear"), self.ops.get("experts")
        names = tuple(key.removesuffix("?") for key in self.tensors)

        def tensors(weight: KernelArgs) -> tuple[Tensor | None, ...]:
            return tuple(map(weight.get, names))

        def numbers(format: WeightFormat) -> tuple[int, ...]:
            return tuple(getattr(format, key) for key in self.numbers)

        def run(
            format: WeightFormat, x: Tensor, weight: KernelArgs, bias: Tensor | None,
            add: None, eps: None, silu: bool, float32: bool,
        ) -> Tensor:  # fmt: skip
            y: Tensor = linear(x, *tensors(weight), bias, *numbers(format), float32)
            return y

        def run_grouped(format: WeightFormat, x: Tensor, weight: KernelArgs) -> Tensor:
            assert grouped is not None
            y: Tensor = grouped(x, *tensors(weight), *numbers(format))
            return y

        def run_experts(
            format: WeightFormat, x: Tensor, chosen: Tensor, weights: Tensor, gate_up: KernelArgs, down: KernelArgs,
            gate: Gate, biases: tuple[Tensor, Tensor] | None,
        ) -> Tensor:  # fmt: skip
            if biases is not None and not self.expert_biases:
                raise ValueError(f"{format} has no experts with biases; decode them, or give experts without")
            assert experts is not None
            added = [(bias,) if self.expert_biases else () for bias in biases or (None, None)]
            layers = *tensors(gate_up), *added[0], *tensors(down), *added[1]
            y: Tensor = experts(x, chosen, weights, *layers, *numbers(format), *gate.numbers)
            return y

        return WeightOps(
            linear=run,
            decode=lambda format, weight: dequantize(*tensors(weight), *numbers(format)),
            grouped=None if grouped is None else run_grouped,
            experts=None if experts is None else run_experts,
            reads=self._reads if self.kernels else None,
        )


def _check_bias(name: str, bias: Tensor | None, dtypes: Dtypes, shape: Shape, device: torch.device) -> None:
    if bias is None:
        return
    if bias.dtype not in dtypes or tuple(bias.shape) != tuple(shape) or not bias.is_contiguous():
        kind = "float32" if dtypes == (torch.float32,) else "float"
        raise ValueError(f"{name} is {bias.dtype} {tuple(bias.shape)}; it must be a contiguous {kind} {tuple(shape)}")
    if bias.device != device:
        raise ValueError(f"{name} is on {bias.device} and x on {device}; move them to one device")
