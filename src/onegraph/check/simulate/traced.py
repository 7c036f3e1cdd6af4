"""`torch.jit.trace` on the simulated machine: the function's Python runs once, its ops run in every call.

torch's own tracer does not see tensors of a device that is not there. What it would keep is kept here: the ops of one
run in order, with the Python numbers that they were given then, and how they are connected.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from onegraph.check import compat
from onegraph.check.report import CheckError
from onegraph.check.simulate.records import tensors_in, written


class _Tape(compat.TorchDispatchMode):
    """Writes down the ops that give or write tensors: (op, arguments, keywords, what it gave)."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # A number that Python read is a constant of the trace from now on.
        if next(tensors_in(out), None) is not None or (hasattr(func, "_schema") and written(func)):
            self.ops.append((func, args, kwargs or {}, out))
        return out


class _Traced:
    """The ops of one run of `function` on `examples`, with other inputs in their place."""

    def __init__(self, function: Callable[..., Any], examples: tuple[Any, ...]) -> None:
        self.examples = list(tensors_in(examples))
        with _Tape() as tape, torch.no_grad():
            self.result = function(*examples)
        self.ops = tape.ops

    def __call__(self, *given: Any) -> Any:
        inputs = list(tensors_in(given))
        if len(inputs) != len(self.examples):
            raise CheckError(
                f"a traced function: got {len(inputs)} tensors, allowed {len(self.examples)} as it was traced"
            )
        now = {id(example): tensor for example, tensor in zip(self.examples, inputs, strict=True)}

        def current(tensor: Tensor) -> Tensor:
            return now.get(id(tensor), tensor)

        for func, args, kwargs, out in self.ops:
            again = func(*_map(current, args), **_map(current, kwargs))
            now.update((id(before), after) for before, after in zip(tensors_in(out), tensors_in(again), strict=True))
        return _map(current, self.result)


def _map(change: Callable[[Tensor], Tensor], tree: Any) -> Any:
    return compat.tree_map(lambda value: change(value) if isinstance(value, Tensor) else value, tree)


def trace(func: Any, example_inputs: Any = None, *_: Any, **keywords: Any) -> Any:
    """`torch.jit.trace`: a function of the same tensors; of a module a copy that shares its parameters."""
    examples = keywords.get("example_kwarg_inputs") or example_inputs
    if isinstance(examples, dict):
        return func  # by keywords: as it is written
    examples = examples if isinstance(examples, tuple | list) else (examples,)
    traced = _Traced(func, tuple(examples))
    if not isinstance(func, nn.Module):
        return traced
    module = copy.copy(func)
    module.forward = traced
    return module
