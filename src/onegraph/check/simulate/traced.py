"""`torch.jit.trace` on the simulated machine: the function's Python runs once, its ops run in every call.

torch's own tracer does not see tensors of a device that is not there. What it would keep is kept here: the ops of one
run in order, with the Python numbers that they were given then, and how they are connected.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from onegraph.check.report import CheckError


class _Tape(TorchDispatchMode):
    """Writes down every op: (op, arguments, keywords, what it gave)."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.ops.append((func, args, kwargs or {}, out))
        return out


class _Traced:
    """The ops of one run of `function` on `examples`, with other inputs in their place."""

    def __init__(self, function: Callable[..., Any], examples: tuple[Any, ...]) -> None:
        self.examples = [leaf for leaf in tree_leaves(examples) if isinstance(leaf, Tensor)]
        with _Tape() as tape, torch.no_grad():
            self.result = function(*examples)
        self.ops = tape.ops

    def __call__(self, *given: Any) -> Any:
        inputs = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
        if len(inputs) != len(self.examples):
            raise CheckError(
                f"a traced function: got {len(inputs)} tensors, allowed {len(self.examples)} as it was traced"
            )
        now = {id(example): tensor for example, tensor in zip(self.examples, inputs, strict=True)}

        def current(tensor: Tensor) -> Tensor:
            return now.get(id(tensor), tensor)

        for func, args, kwargs, out in self.ops:
            again = func(*tree_map_only(Tensor, current, args), **tree_map_only(Tensor, current, kwargs))
            for before, after in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(before, Tensor):
                    now[id(before)] = after
        return tree_map_only(Tensor, current, self.result)


def trace(function: Any, example_inputs: Any = None, *_: Any, **keywords: Any) -> Any:
    """`torch.jit.trace`: a function of the same tensors; of a module a copy that shares its parameters."""
    examples = keywords.get("example_kwarg_inputs") or example_inputs
    if isinstance(examples, dict):
        return function  # by keywords: as it is written
    examples = examples if isinstance(examples, tuple | list) else (examples,)
    traced = _Traced(function, tuple(examples))
    if not isinstance(function, nn.Module):
        return traced
    module = copy.copy(function)
    module.forward = traced
    return module
