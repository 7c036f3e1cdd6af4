"""Which of transformers' modules are linears that our formats can take the place of."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

GROUP = 8  # inputs that E8P codes together


def plain_linear(module: nn.Module) -> nn.Linear | None:
    """The module as a linear, where all that it does is x W^T + b: itself, or a new one for GPT-2's Conv1D, whose
    weight lies transposed."""
    if isinstance(module, nn.Linear) and _multiplies(module):
        return module
    if isinstance(module, Conv1D):
        n, k = size_of(module)
        linear = nn.Linear(k, n, bias=True, device="meta", dtype=module.weight.dtype)
        linear.weight = nn.Parameter(module.weight.detach().t().contiguous(), requires_grad=False)
        linear.bias = nn.Parameter(module.bias.detach(), requires_grad=False)
        return linear
    return None


def _multiplies(module: nn.Linear) -> bool:
    """Whether a linear computes x W^T + b and no more; classes with a forward of their own are tried on a few rows."""
    if type(module).forward is nn.Linear.forward:
        return True
    source = torch.Generator().manual_seed(0)
    rows, k = min(4, module.out_features), module.in_features

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=source, device="cpu")  # transformers loads within the meta device

    weight, x = drawn(rows, k), drawn(2, k)
    bias = None if module.bias is None else drawn(rows)
    tried = copy.copy(module)
    tried._parameters = {"weight": nn.Parameter(weight), "bias": None if bias is None else nn.Parameter(bias)}
    try:
        with torch.no_grad():
            return torch.allclose(tried(x), nn.functional.linear(x, weight, bias), atol=1e-5)
    except (RuntimeError, AttributeError, TypeError, ValueError):  # it asks for more than a weight and an input
        return False


def size_of(module: Any) -> tuple[int, int]:
    """Outputs and inputs of what `plain_linear` takes."""
    shape = tuple(module.weight.shape)
    return (shape[1], shape[0]) if isinstance(module, Conv1D) else (shape[0], shape[1])


def why_left(name: str, module: nn.Module, experts: Mapping[str, nn.Module]) -> str | None:
    """Why the matrices of a module of a block stay as they are; None for a linear that is rounded.

    experts: those of the block, by name.
    """
    if not isinstance(module, Conv1D) and not (isinstance(module, nn.Linear) and _multiplies(module)):
        return f"{type(module).__name__} is no plain linear"
    n, k = size_of(module)
    parents = {each.rpartition(".")[0]: each for each in experts}
    above = name.rpartition(".")[0]
    beside = next((each for parent, each in parents.items() if above == parent or above.startswith(f"{parent}.")), None)
    if beside is not None and n in (1, getattr(experts[beside], "num_experts", None)):
        return "it chooses or weighs experts, for which a rounding error is another expert"
    if k % GROUP:
        return f"its {k} inputs do not come in groups of {GROUP}"
    return None
