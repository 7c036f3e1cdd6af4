"""A backward pass without torch's engine, which on a CPU build refuses tensors of any other device.

The graph of nodes is torch's own, recorded as on a GPU, and so are the nodes' formulas: each is called from here, in
the order in which the engine would call them. What the engine does beside that is done here as far as values depend on
it: sums of gradients, broadcast gradients summed back, dtypes, `.grad`. Hooks of tensors and nodes are not run.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from onegraph.check.report import Severity
from onegraph.check.rules.errors import NOT_PERMITTED
from onegraph.check.simulate.device import refuse
from onegraph.check.simulate.world import World

_LEAF = 2**64 - 1
"""Sequence number of the nodes that accumulate into a leaf."""


class Backward:
    """Stands in for `torch.autograd.graph._engine_run_backward` while a simulation runs."""

    def __init__(self, world: World) -> None:
        self.world = world

    def __call__(
        self,
        outputs: Sequence[Any],
        gradients: Sequence[Tensor | None],
        retain_graph: bool,
        create_graph: bool,
        inputs: Sequence[Any],
        allow_unreachable: bool = False,
        accumulate_grad: bool = False,
    ) -> tuple[Tensor | None, ...]:
        """Gradients of `inputs`, or with accumulate_grad their sums in `.grad` (of all leaves where none are named)."""
        if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
            self.world.see("CG101", "anomaly mode reads on the host whether a gradient is NaN", NOT_PERMITTED)
        found: dict[tuple[Any, int], Tensor] = {}
        pending: dict[Any, dict[int, Tensor]] = {}
        roots = [_edge(o) for o in outputs]
        waits = _dependencies([node for node, _ in roots])
        leaves = {id(node.variable): (node, 0) for node in waits if hasattr(node, "variable")}
        wanted = [leaves.get(id(i)) or _edge(i) for i in inputs]
        for (node, index), gradient in zip(roots, gradients, strict=True):
            if gradient is not None:
                _add(pending, node, index, gradient)
        ready = [node for node in dict.fromkeys(node for node, _ in roots) if not waits[node]]
        with torch.set_grad_enabled(create_graph):
            while ready:
                node = max(ready, key=lambda n: n._sequence_nr())
                ready.remove(node)
                given = pending.pop(node, {})
                for edge in wanted:
                    if edge[0] is node and edge[1] in given:
                        found[edge] = given[edge[1]]
                self._stale(node)
                results = self._run(node, given, accumulate_grad and (not wanted or any(e[0] is node for e in wanted)))
                for (following, index), result in zip(node.next_functions, results, strict=False):
                    if following is None:
                        continue
                    if result is not None:
                        _add(pending, following, index, _fitted(result, following, index))
                    waits[following] -= 1
                    if not waits[following]:
                        ready.append(following)
        if not accumulate_grad and not allow_unreachable and any(edge not in found for edge in wanted):
            refuse("One of the differentiated Tensors appears to not have been used in the graph.")
        return tuple(found.get(edge) for edge in wanted)

    def _run(self, node: Any, given: dict[int, Tensor], accumulate: bool) -> tuple[Any, ...]:
        if hasattr(node, "variable"):
            if accumulate and 0 in given:
                if node.variable.grad is None:
                    self.world.first_gradient(node.variable)
                _accumulate(node.variable, given[0])
            return ()
        if not given:
            return (None,) * len(node.next_functions)
        gradients = [given.get(i) for i in range(len(node._input_metadata))]
        if hasattr(node, "apply"):  # a torch.autograd.Function
            out = node.apply(*[_zeros(node, i) if g is None else g for i, g in enumerate(gradients)])
        else:
            out = node(*gradients)
        return tuple(out) if isinstance(out, tuple | list) else (out,)

    def _stale(self, node: Any) -> None:
        world = self.world
        if world.phase == "step" and node._sequence_nr() != _LEAF and world.recorded_before(node._sequence_nr()):
            text = f"the backward pass goes through {node.name()}, whose forward ran before the step"
            happens = "CUDA error: operation would make the capture depend on work outside of it"
            world.see("CG306", text, happens, severity=Severity.ERROR)


def stale(outputs: Sequence[Any], first: int) -> str:
    """Name of a node below `outputs` that was recorded before node number `first`; "" where there is none."""
    for node in _dependencies([_edge(o)[0] for o in outputs]):
        if node._sequence_nr() != _LEAF and node._sequence_nr() < first:
            return str(node.name())
    return ""


def _edge(tensor: Any) -> tuple[Any, int]:
    edge = tensor if isinstance(tensor, torch.autograd.graph.GradientEdge) else get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _dependencies(roots: list[Any]) -> dict[Any, int]:
    """How many edges lead to each node that can be reached."""
    waits = dict.fromkeys(roots, 0)
    queue = list(waits)
    while queue:
        for following, _ in queue.pop().next_functions:
            if following is None:
                continue
            if following not in waits:
                waits[following] = 0
                queue.append(following)
            waits[following] += 1
    return waits


def _add(pending: dict[Any, dict[int, Tensor]], node: Any, index: int, gradient: Tensor) -> None:
    given = pending.setdefault(node, {})
    given[index] = given[index] + gradient if index in given else gradient


def _fitted(gradient: Tensor, node: Any, index: int) -> Tensor:
    """A gradient in the shape and dtype of what it is the gradient of."""
    meta = node._input_metadata[index]
    if gradient.shape != torch.Size(meta.shape):
        gradient = gradient.sum_to_size(meta.shape)
    return gradient if gradient.dtype is meta.dtype else gradient.to(meta.dtype)


def _zeros(node: Any, index: int) -> Tensor:
    meta = node._input_metadata[index]
    return torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device)


def _accumulate(variable: Tensor, gradient: Tensor) -> None:
    """As torch does: the first gradient is kept as it is, the next ones are added in place."""
    if variable.grad is None:
        variable.grad = gradient.detach()
    else:
        with torch.no_grad():
            variable.grad.add_(gradient)
