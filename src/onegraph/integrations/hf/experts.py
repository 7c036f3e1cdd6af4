"""transformers' routed experts: all of a layer in one parameter each, `gate_up_proj` (or `up_proj`) and `down_proj`.

Their classes share one contract, that of `transformers.integrations.moe.use_experts_implementation`: how the matrices
lie is recognised by `has_gate`, `has_bias`, `is_transposed` and `is_concatenated`; `_apply_gate` is between them.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from onegraph.formats.weight import Tensors, WeightFormat
from onegraph.integrations.hf.modules import _Coded
from onegraph.ops.activation import SwiGLU

IMPLEMENTATION = "onegraph"


def holds_experts(module: Any) -> bool:
    """Whether a module is routed experts of the shared contract."""
    told = all(hasattr(module, name) for name in ("has_gate", "is_transposed", "is_concatenated", "num_experts"))
    return told and all(
        isinstance(p := getattr(module, name, None), Tensor) and p.dim() == 3 for name in stack_names(module)
    )


def stack_names(module: Any) -> tuple[str, str]:
    """Of the parameters that hold the first and the second matrix of all experts."""
    return ("gate_up_proj" if module.has_gate else "up_proj"), "down_proj"


def gate_first(module: Any, which: int, tensor: Tensor, dim: int) -> Tensor:
    """Rows as a module has them -> all gate rows, then all up rows."""
    if which or not module.has_gate or module.is_concatenated:
        return tensor
    return tensor.unflatten(dim, (-1, 2)).transpose(dim, dim + 1).flatten(dim, dim + 1)


def as_held(module: Any, which: int, tensor: Tensor, dim: int) -> Tensor:
    """The other way round."""
    if which or not module.has_gate or module.is_concatenated:
        return tensor
    return tensor.unflatten(dim, (2, -1)).transpose(dim, dim + 1).flatten(dim, dim + 1)


class HeldExperts:
    """Routed experts as the quantizer sees them (`onegraph.quant.calibrate.ExpertLayer`)."""

    def __init__(self, name: str, module: Any) -> None:
        self.module, self.count = module, module.num_experts
        first, second = stack_names(module)
        self.names = f"{name}.{first}", f"{name}.{second}"
        self.stacks = getattr(module, first), getattr(module, second)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """[E, n, k] of both stacks."""
        found = ((p.transpose(1, 2) if self.module.is_transposed else p).shape for p in self.stacks)
        return {name: tuple(shape) for name, shape in zip(self.names, found, strict=True)}

    def _rows(self, which: int, expert: int) -> Tensor:
        one = self.stacks[which][expert]
        return one.t() if self.module.is_transposed else one

    def weight(self, which: int, expert: int) -> Tensor:
        return gate_first(self.module, which, self._rows(which, expert), 0).float().contiguous()

    def put(self, which: int, expert: int, weight: Tensor) -> None:
        self._rows(which, expert).copy_(as_held(self.module, which, weight, 0))

    def inner(self, expert: int, x: Tensor) -> Tensor:
        bias = getattr(self.module, f"{stack_names(self.module)[0]}_bias")[expert] if self.module.has_bias else None
        hidden = nn.functional.linear(x, self._rows(0, expert), bias)
        found: Tensor = self.module._apply_gate(hidden) if self.module.has_gate else self.module.act_fn(hidden)
        return found


class CodedStack(_Coded):
    """All experts' matrices in codes, in the place of a parameter [E, n, k]: `stack[e]` is a dense matrix as the module
    would hold it.

    Args:
        names, stored: as of `_Coded`, experts in front of each shape.
        module: the experts that it is a part of; which: 0 for gate-up, 1 for down.
    """

    def __init__(
        self, format: WeightFormat, n: int, k: int, names: Mapping[str, str], stored: Any, dtype: torch.dtype,
        module: Any, which: int,
    ) -> None:  # fmt: skip
        super().__init__(format, n, k, names, stored, dtype)
        self._is_hf_initialized = True  # transformers' mark for: draw no numbers into it, as some classes do
        self.which, self.flags = which, _Flags(module)
        self.count = module.num_experts

    def prepare(self) -> None:
        stored: Any = {key: self._buffers[suffix] for key, suffix in self.names.items()}
        folded = [self.format.fold({key: tensor[e] for key, tensor in stored.items()}) for e in range(self.count)]
        for key, field in self.format.fields.items():
            if self.format.stored.get(key) == field:
                self._given[key] = self.names[key]
            else:
                self._derive(key, torch.stack([one[key] for one in folded]))
        for key, tensor in self.format.constants(self.device).items():
            self._derive(key, tensor)
        if self.device.type == "cpu":
            self.dense = torch.stack([self.decoded(e) for e in range(self.count)])

    def decoded(self, expert: int) -> Tensor:
        """Dense, as the module would hold it."""
        given: Tensors = {}
        constants = self.format.constants(self.device)
        for key, tensor in self.kernel_args.items():
            given[key] = tensor if key in constants else tensor[expert]
        rows = as_held(self.flags, self.which, self._ops.decode(self.format, given), 0).to(self.dtype)
        return rows.t().contiguous() if self.flags.is_transposed else rows

    def __getitem__(self, expert: Any) -> Tensor:
        return self.decoded(int(expert)) if self.dense is None else self.dense[expert]

    def plain(self, dtype: torch.dtype) -> nn.Parameter:
        """The parameter of the decoded weights."""
        found = torch.stack([self.decoded(e) for e in range(self.count)])
        return nn.Parameter(found.to(dtype), requires_grad=False)


class _Flags:
    """How a module of experts holds its matrices; a stack keeps it in place of the module, which has the stack."""

    def __init__(self, module: Any) -> None:
        self.has_gate, self.is_concatenated = module.has_gate, module.is_concatenated
        self.is_transposed = module.is_transposed


def swiglu_of(module: Any) -> SwiGLU | None:
    """The gate of a module as our ops have it, found by trying it; None for another one."""
    if not module.has_gate:
        return None
    probe = torch.linspace(-12, 12, 64).view(1, 64)[:, torch.randperm(64, generator=torch.Generator().manual_seed(0))]
    given = as_held(module, 0, probe, 1)
    tries = [SwiGLU()]
    limit = getattr(module, "limit", None) or getattr(module, "swiglu_limit", None)
    if isinstance(limit, float | int):
        tries += [SwiGLU(float(limit)), SwiGLU(float(limit), float(getattr(module, "alpha", 1.0)), 1.0)]
    wanted = module._apply_gate(given)
    return next((gate for gate in tries if torch.allclose(gate(probe), wanted, atol=1e-5)), None)


def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """`experts_implementation="onegraph"`: on a GPU experts from their codes in one op, where it has their gate;
    elsewhere the module's own loop over decoded ones."""
    first, second = (getattr(self, name) for name in stack_names(self))
    coded = isinstance(first, CodedStack) and isinstance(second, CodedStack)
    if coded and first.dense is None and first.format is second.format and (gate := self._onegraph_gate) is not None:
        run = first._ops.experts
        if run is not None:
            biases = biases_of(self)
            chosen, gains = top_k_index.to(torch.int32).contiguous(), top_k_weights.float().contiguous()
            x = hidden_states.contiguous()
            return run(first.format, x, chosen, gains, first.kernel_args, second.kernel_args, gate, biases)
    plain: Tensor = type(self).forward.__wrapped__(self, hidden_states, top_k_index, top_k_weights)
    return plain


def biases_of(module: Any) -> tuple[Tensor, Tensor] | None:
    """Gate-up's, gate rows first, and down's, in float32."""
    if not module.has_bias:
        return None
    first, second = (getattr(module, f"{name}_bias").float() for name in stack_names(module))
    return gate_first(module, 0, first, 1).contiguous(), second.contiguous()


def register() -> None:
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, forward)
