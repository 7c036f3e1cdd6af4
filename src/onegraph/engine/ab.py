"""What each component of a model costs in another precision: one at a time put in, the rest as it was, and measured.

A component is a set of modules or buffers that a precision map would treat as one. The other precision is a quantized
checkpoint of the same model (`exchanged`), or NVFP4 made here from the model's own weights (`in_nvfp4`), which also
says what a component that checkpoints keep as it is, such as a router's gate, would cost.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from onegraph.engine.evaluate import evaluate
from onegraph.formats.nvfp4 import NVFP4
from onegraph.models.parts import Component
from onegraph.ops.weight import weight_ops
from onegraph.quant.nvfp4 import quantize_weight

Model = Any  # one whose config says its parts, as `models.llama.Llama`
Module = TypeVar("Module", bound=nn.Module)
Parts = Mapping[str, nn.Module | Tensor]  # by path


@dataclass(frozen=True)
class Cost:
    """One component alone in the other precision: KL(model ‖ model with it), nats per token; top-1 agreement."""

    component: str
    kl: float
    kl_error: float
    top1: float

    def as_dict(self) -> dict[str, float | str]:
        return asdict(self)


def components_of(model: Model) -> Mapping[str, Component]:
    found: Mapping[str, Component] = model.config.parts.components
    return found


@torch.no_grad()
def costs(
    model: Model,
    changes: Mapping[str, Callable[[], Parts]],
    tokens: Tensor,
    *,
    window: int,
    progress: Callable[[int, int], None] | None = None,
) -> list[Cost]:
    """One entry for each of `changes`, then "all" of them at once.

    Args:
        model: the one that stays as it is; of the Llama family, loaded with `fused=False`.
        changes: component -> what makes its parts, called when it is their turn (`exchanged` or `in_nvfp4`).

    Raises ValueError where there is nothing to change.
    """
    if not changes:
        raise ValueError("the model and its reference have the same weights in every component")
    found = []
    for done, name in enumerate([*changes, "all"]):
        parts = {
            path: part
            for make in (changes.values() if name == "all" else [changes[name]])
            for path, part in make().items()
        }
        result = evaluate(_with(model, parts), tokens, reference=model, window=window)
        assert result.kl is not None
        assert result.kl_error is not None
        assert result.top1 is not None
        found.append(Cost(name, result.kl, result.kl_error, result.top1))
        if progress is not None:
            progress(done + 1, len(changes) + 1)
    return found


def exchanged(model: Model, reference: Model) -> dict[str, Callable[[], Parts]]:
    """The components in which `model` differs from `reference`, as `model` has them.

    Raises ValueError where the two are not of one family, or fused: a fused linear holds its norm's weight.
    """
    _check(model)
    _check(reference)
    if components_of(model) != components_of(reference):
        raise ValueError("the model and its reference are of different families; compare two forms of one model")
    found: dict[str, Callable[[], Parts]] = {}
    there = _by_component(reference)
    for name, mine in _by_component(model).items():
        theirs = there[name]
        if mine.keys() != theirs.keys():
            raise ValueError(
                f"{name}: the model and its reference have different layers; compare two forms of one model"
            )
        if not all(_same(mine[path], theirs[path]) for path in mine):
            found[name] = partial(dict, mine)
    return found


def in_nvfp4(model: Model) -> dict[str, Callable[[], Parts]]:
    """Every component of a dense model as NVFP4 would have it: the numbers that its codes stand for.

    Raises ValueError where the model is fused or quantized already.
    """
    _check(model)
    components = _by_component(model)
    whole = all(buffer.is_floating_point() for parts in components.values() for buffer in _tensors(parts))
    # codes that were decoded at load are floats
    if not whole or model.config.quantization is not None:
        raise ValueError("the model is quantized already; give the unquantized one, or it as --reference")
    return {name: partial(_all_rounded, parts) for name, parts in components.items() if parts}


def _tensors(parts: Parts) -> Iterator[Tensor]:
    for part in parts.values():
        yield from part.buffers() if isinstance(part, nn.Module) else (part,)


def _all_rounded(parts: Parts) -> Parts:
    return {path: _rounded(part) for path, part in parts.items()}


def _check(model: Model) -> None:
    if any(getattr(module, "fused", False) for module in model.modules()):
        raise ValueError("components are exchanged between models whose ops run alone; load them with fused=False")


def _by_component(model: Model) -> dict[str, Parts]:
    """The parts of each component; none of one whose layers this model does not have."""
    parts = model.config.parts
    layers = [*parts.linears, *parts.stacks, parts.embedding[0], *(name.rpartition(".")[0] for name in parts.tensors)]
    has = {parts.component_of(layer) for layer in layers}
    return {name: _parts(model, part, whole=name in has) for name, part in parts.components.items()}


def _parts(model: Model, component: Component, *, whole: bool) -> Parts:
    """By path; a block that has none of a part is left out. whole: each path must be met in some block, or the
    component would be left out of what is measured."""
    found: dict[str, nn.Module | Tensor] = {}
    blocks = len(model.blocks)
    for pattern in component.paths:
        paths = [pattern.replace("*", str(i)) for i in range(blocks if "*" in pattern else 1)]
        met = {path: part for path in paths if (part := _at(model, path)) is not None}
        assert met or not whole, f"no block has {pattern}, which {component.layers} is said to become"
        found |= met
    return found


def _at(model: Model, path: str) -> Any:
    """The module or buffer of a path; None where there is none."""
    part: Any = model
    for name in path.split("."):
        part = getattr(part, name, None)
    return part


def _same(one: nn.Module | Tensor, other: nn.Module | Tensor) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    mine, theirs = dict(one.named_buffers()), dict(other.named_buffers())
    return mine.keys() == theirs.keys() and all(
        mine[k].dtype == theirs[k].dtype and torch.equal(mine[k], theirs[k]) for k in mine
    )


def _rounded(part: nn.Module | Tensor) -> nn.Module | Tensor:
    if isinstance(part, Tensor):
        return _rounded_tensor(part)
    made = copy.deepcopy(part)
    for module in made.modules():
        for name, tensor in module._buffers.items():
            if tensor is not None and not name.endswith("bias"):  # those of experts are as wide as matrices
                module._buffers[name] = _rounded_tensor(tensor)
    return made


def _rounded_tensor(tensor: Tensor) -> Tensor:
    """Matrices [..., n, k] as NVFP4 has them, each with its global scale; vectors and odd widths as they are."""
    if tensor.dim() < 2 or tensor.shape[-1] % NVFP4.group:
        return tensor
    matrices = []
    for matrix in tensor.flatten(0, -3) if tensor.dim() > 2 else tensor.unsqueeze(0):
        made = quantize_weight(matrix)
        made["global_scale"] = made["global_scale"].expand(len(matrix)).contiguous()
        matrices.append(weight_ops(NVFP4).decode(NVFP4, made).to(tensor.dtype))
    return torch.stack(matrices).view_as(tensor)


def _with(model: Model, parts: Parts) -> Model:
    """`model` with other parts; every tensor that is not one of them is shared."""
    whole = _shallow(model)
    made: dict[str, nn.Module] = {"": whole}

    def own(path: str) -> nn.Module:
        if path not in made:
            parent, _, name = path.rpartition(".")
            made[path] = own(parent)._modules[name] = _shallow(getattr(own(parent), name))
        return made[path]

    for path, part in parts.items():
        parent, _, name = path.rpartition(".")
        owner = own(parent)
        if isinstance(part, nn.Module):
            owner._modules[name] = part
        else:
            owner._buffers[name] = part
    return whole


def _shallow(module: Module) -> Module:
    made = copy.copy(module)
    made._modules, made._buffers = dict(module._modules), dict(module._buffers)
    return made
