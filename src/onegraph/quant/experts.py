"""Routed experts: each is rounded under the inputs of the tokens that chose it, with those of all tokens mixed in.

An expert that few tokens reach has a Hessian of low rank, which rounds the directions that it has not seen as if they
did not matter. So with n tokens of its own it is shrunk toward what the layer's tokens would give it all together,

    H = (n H_e + m H_shared) / (n + m),        m = `Recipe.expert_prior` times the number of inputs,

for gate-up the second moment of the layer's inputs, which all experts share, for down that of what this expert's own
gate-up makes of them (units of two experts have nothing to do with each other). The sampling error of a second moment
goes with inputs / n, so m grows with the inputs; the factor is measured (docs/log.md).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onegraph.formats.fused import stacked
from onegraph.formats.weight import Tensors
from onegraph.quant.calibrate import ExpertLayer, QuantizableModel
from onegraph.quant.code import CODES
from onegraph.quant.hessian import Moments, Seen, corrected, drift
from onegraph.quant.layer import dequantize, generator, quantize_group
from onegraph.quant.recipe import Recipe

Pair = tuple[Tensor, Tensor | None]  # inputs [T, k] of a matrix, and the unquantized model's for the same tokens
SHARED_ROWS = 4096  # of the layer's tokens, evenly spread, that each expert's shared moments are taken on


def shrunk(own: Pair, shared: Pair, prior: float) -> Moments:
    """The moments of an expert: of its own inputs [n, k], and of the shared ones as if they were prior * k tokens."""
    (x, ref), (all_x, all_ref) = own, shared
    tokens = prior * x.shape[1]
    if not len(x):
        tokens = max(tokens, 1.0)  # an expert without tokens has the shared ones even where none are mixed in
    total = len(x) + tokens

    def mixed(left: Tensor, right: Tensor, all_left: Tensor, all_right: Tensor) -> Tensor:
        h = (left.T @ right).double()
        h += (all_left.T @ all_right).double() * (tokens / len(all_left))
        return (h / total).float()

    cross = None if ref is None or all_ref is None else mixed(ref, x, all_ref, all_x)
    return Moments(mixed(x, x, all_x, all_x), cross)


@dataclass
class _Rounding:
    layer: ExpertLayer
    plain: ExpertLayer | None
    bits: int
    recipe: Recipe
    prefix: str

    def expert(self, at: int, own: Pair, shared: Pair) -> tuple[Tensors, Tensors]:
        behind = None if self.recipe.inputs == "group" else (self.inner(at, own), self.inner(at, shared))
        first = self.matrix(0, at, own, shared)
        own, shared = behind or (self.inner(at, own), self.inner(at, shared))
        return first, self.matrix(1, at, own, shared)

    def inner(self, at: int, inputs: Pair) -> Pair:
        x, ref = inputs
        return self.layer.inner(at, x), None if self.plain is None or ref is None else self.plain.inner(at, ref)

    def matrix(self, which: int, at: int, own: Pair, shared: Pair) -> Tensors:
        name, recipe = f"{self.prefix}{self.layer.names[which]} of expert {at}", self.recipe
        moments = shrunk(own, shared, recipe.expert_prior)
        weight = self.layer.weight(which, at)
        if not torch.isfinite(weight).all():
            raise ValueError(f"{name}: the weight is not finite; the checkpoint is damaged")
        weight = corrected(weight, drift(moments, recipe.damping) if recipe.correct else None, recipe.correct)
        try:
            made = quantize_group([weight], moments.h, [self.bits], recipe, generator(recipe.seed, name))[0]
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        self.layer.put(which, at, dequantize(made, self.bits, recipe.format))
        return {key: tensor.cpu() for key, tensor in made.items()}


def quantize_experts(
    layer: ExpertLayer,
    plain: ExpertLayer | None,
    seen: Seen,
    bits: int,
    recipe: Recipe,
    prefix: str,
) -> dict[str, Tensors]:
    """Round all experts of a layer and put the rounded weights in place.

    Args:
        plain: the same layer of the unquantized model, whose inputs `seen` has too; None without correction.
        prefix: of the block.

    Returns the checkpoint tensors of gate-up and down by name, each with the experts in front. Raises ValueError that
    names an expert whose weight or inputs are not finite.
    """
    rounding = _Rounding(layer, plain, bits, recipe, prefix)
    made: tuple[list[Tensors], list[Tensors]] = ([], [])
    shared = seen.spread(SHARED_ROWS)
    for expert in range(layer.count):
        for each, tensors in zip(made, rounding.expert(expert, seen.routed(expert), shared), strict=True):
            each.append(tensors)
    format = CODES[recipe.format].formats[bits]
    return {
        prefix + name: {key.removeprefix("x."): t for key, t in stacked(format, "x", each).items()}
        for name, each in zip(layer.names, made, strict=True)
    }


def put_stacks(layer: ExpertLayer, prefix: str, stacks: Mapping[str, Tensors], bits: int, format: str) -> None:
    """Replace the weights of a layer by what `stacks`, read from a piece on disk, stand for."""
    for which, name in enumerate(layer.names):
        if (stack := stacks.get(prefix + name)) is not None:
            for expert in range(layer.count):
                device = layer.weight(which, expert).device
                one = {key: tensor[expert].to(device) for key, tensor in stack.items()}
                layer.put(which, expert, dequantize(one, bits, format))


def put_layers(
    model: QuantizableModel,
    prefix: str,
    block: Any,
    layers: Mapping[str, Tensors],
    bits_of: Callable[[str], int],
    format: str,
) -> None:
    """Replace the weights of a block by what `layers`, by full name, stand for."""
    for layer in model.expert_layers(block):
        put_stacks(layer, prefix, layers, bits_of(prefix + layer.names[0]), format)
    for group in model.linear_groups(block):
        for name, module in group:
            if (tensors := layers.get(prefix + name)) is not None:
                on_device = {key: tensor.to(module.weight.device) for key, tensor in tensors.items()}
                module.weight.copy_(dequantize(on_device, bits_of(prefix + name), format))
