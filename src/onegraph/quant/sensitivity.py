"""What each part of a model costs: its share of the KL of the whole model, with all other parts rounded too.

Parts are what one rate goes to: linears that share an input (one launch multiplies by them), or each linear; the
experts of a layer, head and embedding. All of them are rounded to one rate, the base, which is near the average that is
asked for. Then the errors of all grow together from none (t = 0) to those of the base rate (t = 1). By the chain rule
the KL of the model at t = 1 is a sum over parts,

    KL(1) = sum over parts of the integral of s_i(t) dt from 0 to 1,     s_i(t) = <gradient of KL(t) at W_i, E_i> ,

E_i the error of part i. So shares add up exactly, whatever the parts do to each other. A rate whose error is e times
that of the base loses what s_i integrates to up to sqrt(e). s_i is computed at `NODES`, and is linear in between; where
errors are small KL is quadratic and s_i goes through zero, as it is taken to do below the first node.

The model is read twice: forward, unquantized for its Hessians and with errors for the first rows of the text, and
backward block by block, as in `quant/fisher.py`. Memory holds one block, its twin, and gradients; codes and residual
streams lie on disk where they do not fit. Rounding is the quick kind, by LDLQ alone, under the inputs that the
unquantized model has.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from onegraph.ops.registry import reference_ops
from onegraph.quant.activation_offload import ActivationOffload, Batches
from onegraph.quant.allocate import ERRORS
from onegraph.quant.calibrate import QuantizableModel
from onegraph.quant.experts import put_layers, quantize_experts
from onegraph.quant.fisher import batch_tokens, begin_backward
from onegraph.quant.hessian import Gathered, gather
from onegraph.quant.layer import dequantize, generator, quantize_embedding, quantize_group
from onegraph.quant.precision import tensor_cores
from onegraph.quant.recipe import Recipe
from onegraph.quant.result import EMBED, HEAD

LOWEST = 2  # bits: at 1, of formats that have it, errors no longer add up
NODES = 0.5, 1.0  # sizes of errors that gradients are taken at: about those of one rate above the base, and the base
Parts = tuple[str, ...]  # the linears, or stacks of experts, of one part, by full name
Progress = Callable[[int, int], None]  # (steps done, steps in all)
Made = dict[str, dict[str, Tensor]]  # codes and scales, by linear or stack


@dataclass(frozen=True)
class Cost:
    """What a part loses at any rate.

    error: squared error of the format at the base rate, relative to unit variance. slopes: s_i at `NODES`, nats per
    token.
    """

    error: float
    slopes: tuple[float, float]

    @property
    def numbers(self) -> Tensor:
        """All of it, float64 [3]."""
        return torch.tensor([self.error, *self.slopes], dtype=torch.float64)

    def loss(self, error: float) -> float:
        """Nats per token at a rate with this squared error; never falls with it."""
        (near, far), (at, _) = (max(0.0, slope) for slope in self.slopes), NODES
        t = math.sqrt(error / self.error)
        found = near / at * min(t, at) ** 2 / 2
        if t > at:
            end = min(t, 1.0)
            slope = near + (far - near) * (end - at) / (1 - at)
            found += (near + slope) / 2 * (end - at)
        return found + far * max(0.0, t * t - 1) / 2


Costs = dict[Parts, Cost]


def base_rate(average: float, format: str) -> int:
    """The rate that costs are measured at where so many bits on average are wanted."""
    return max(LOWEST, min(int(average), max(rate for rate in ERRORS[format] if rate < 16)))


def quick(recipe: Recipe, base: int) -> Recipe:
    """The recipe that costs are measured by: one pass, whatever the rates and levers of the real one."""
    return Recipe(
        format=recipe.format,
        bits=base,
        seed=recipe.seed,
        damping=recipe.damping,
        descent=0,
        inputs="reference",
        batch_tokens=recipe.batch_tokens,
        expert_prior=recipe.expert_prior,
    )


def measure(
    model: QuantizableModel,
    tokens: Tensor,
    recipe: Recipe,
    free: Mapping[str, bool],
    *,
    probed: int,
    outer: Callable[[str], Tensor] | None = None,
    per_linear: bool = False,
    progress: Progress | None = None,
    spill: ActivationOffload | None = None,
) -> Costs:
    """The cost of each part whose rate is to be chosen.

    Args:
        tokens: int [N, T], for Hessians; KL is taken on the first `probed` rows of them.
        recipe: `quick` of the one that the model will be rounded by.
        free: by full name of each linear, stack of experts and end ("lm_head", "model.embed_tokens") whether its rate
            is to be chosen. Those of one part that are not stay unquantized.
        outer: reads "model.embed_tokens.weight" or "lm_head.weight"; needed where an end is free.
        per_linear: a linear is a part of its own, also where others share its input.

    Raises ValueError, as `quantize` does, for weights or inputs that are not finite.
    """
    measuring = _Measuring(model, tokens, recipe, free, probed, outer, progress, spill or ActivationOffload())
    measuring.per_linear = per_linear
    return measuring.run()


@dataclass
class _Path:
    """The model whose errors have the size `t`: residual streams behind its blocks so far, those in front of each of
    them, then gradients in their place, and the slopes of parts."""

    t: float
    hidden: Batches
    before: list[Batches]
    slopes: dict[Parts, float]


class _Measuring:
    def __init__(
        self,
        model: QuantizableModel,
        tokens: Tensor,
        recipe: Recipe,
        free: Mapping[str, bool],
        probed: int,
        outer: Callable[[str], Tensor] | None,
        progress: Progress | None,
        spill: ActivationOffload,
    ) -> None:
        self.model, self.recipe, self.free, self.outer = model, recipe, free, outer
        self.progress, self.spill = progress, spill
        self.batches = tokens.split(max(1, recipe.batch_tokens // tokens.shape[1]))
        first = model.embed(tokens[:1, :1])
        self.device, self.dtype = first.device, first.dtype
        self.probe = tokens[:probed].split(max(1, batch_tokens(first.device, first.shape[-1]) // tokens.shape[1]))
        self.made: list[tuple[list[tuple[str, str]], Batches]] = []  # of each block
        self.rounded: dict[str, Tensor] = {}  # of the ends, on the device
        self.per_linear = False

    @torch.no_grad()
    def run(self) -> Costs:
        model, spill = self.model, self.spill
        try:
            with tensor_cores(self.device):
                stream = spill.batches(model.embed(part) for part in self.batches)
                reference = spill.batches(model.embed(part) for part in self.probe)
                if self.free.get(EMBED):
                    self.rounded[EMBED] = self.embedding()
                paths = [_Path(t, spill.batches(self.embedded(t)), [], {}) for t in NODES]
                for i in range(model.num_blocks):
                    self.forward(i, stream, reference, paths)
                if self.free.get(HEAD):
                    self.rounded[HEAD] = self.head(stream)
                stream.clear()
                begin_backward(self.device)
                for path in paths:
                    self.behind(reference, path)
                for i in reversed(range(model.num_blocks)):
                    self.backward(i, paths)
                if self.free.get(EMBED):
                    for path in paths:
                        moved = zip(path.hidden, self.probe, strict=True)
                        path.slopes[EMBED,] = sum(_dot(gradient, self.moved(part)) for gradient, part in moved)
        finally:
            spill.close()
        error, count = ERRORS[self.recipe.format][self.recipe.bits], sum(part.numel() for part in self.probe)
        near, far = (path.slopes for path in paths)
        return {parts: Cost(error, (near[parts] / count, far[parts] / count)) for parts in far}

    # ------------------------------------------------------------------------------------------------------- forward

    def forward(self, i: int, stream: Batches, reference: Batches, paths: list[_Path]) -> None:
        """Round what is free of block `i`, and take all streams through it."""
        model = self.model
        block = model.load_block(i)
        twin, made = self.round(i, block, stream)
        kept = [(name, key) for name, tensors in made.items() for key in tensors]
        self.made.append((kept, self.spill.batches(made[name][key] for name, key in kept)))
        errors = list(self.errors(i, block, twin))
        for path in paths:
            self.apply(errors, path.t)
            path.before.append(self.spill.batches(batch.bfloat16() for batch in path.hidden))
            _advance(model, twin, path.hidden)
        _advance(model, block, reference)
        self.step(i + 1)

    def round(self, i: int, block: nn.Module, stream: Batches) -> tuple[nn.Module, Made]:
        """A twin of block `i` with what is free of it rounded; and that. Takes `stream` through the block."""
        model, prefix = self.model, self.model.block_prefix(i)
        layers, groups = model.expert_layers(block), model.linear_groups(block)
        experts = [at for at, layer in enumerate(layers) if self.free.get(prefix + layer.names[0])]
        chosen = [at for at, group in enumerate(groups) if any(self.free.get(prefix + name) for name, _ in group)]
        gathered = gather(model, block, stream, chosen, experts=experts, spill=self.spill)
        twin, made = copy.deepcopy(block), Made()
        for at in chosen:
            made |= self.group(prefix, twin, at, gathered)
        for at in experts:
            layer, seen = model.expert_layers(twin)[at], gathered.experts[at]
            made |= quantize_experts(layer, None, seen, self.recipe.bits, self.recipe, prefix)
            seen.clear()
        stream.take(gathered.outputs)
        return twin, made

    def group(self, prefix: str, twin: nn.Module, at: int, gathered: Gathered) -> Made:
        group = [(prefix + name, module) for name, module in self.model.linear_groups(twin)[at]]
        chosen = [(name, module) for name, module in group if self.free.get(name)]
        name, recipe = chosen[0][0], self.recipe
        if at not in gathered.moments:
            raise ValueError(
                f"{name}: no row of the calibration text reaches it; give more text, or keep it with the rate 16 for "
                f"'{name}'"
            )
        weights = [module.weight.float() for _, module in chosen]
        try:
            made = quantize_group(
                weights, gathered.moments[at].h, [recipe.bits] * len(chosen), recipe, generator(recipe.seed, name)
            )
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        for (_, module), tensors in zip(chosen, made, strict=True):
            module.weight.copy_(dequantize(tensors, recipe.bits, recipe.format))
        return {name: tensors for (name, _), tensors in zip(chosen, made, strict=True)}

    def errors(self, i: int, block: nn.Module, twin: nn.Module) -> Iterator[tuple[Parts, Tensor, Tensor, Tensor]]:
        """Of what is free of block `i`: its part, the weight as it is, the twin's, and the difference."""
        model, prefix = self.model, self.model.block_prefix(i)
        for plain, other in zip(model.linear_groups(block), model.linear_groups(twin), strict=True):
            pairs = [(prefix + name, a, b) for (name, a), (_, b) in zip(plain, other, strict=True)]
            chosen = [pair for pair in pairs if self.free.get(pair[0])]
            for name, a, b in chosen:
                parts = (name,) if self.per_linear else tuple(name for name, _, _ in chosen)
                yield parts, a.weight, b.weight, b.weight - a.weight
        for layer, like in zip(model.expert_layers(block), model.expert_layers(twin), strict=True):
            first, second = (prefix + name for name in layer.names)
            if self.free.get(first):
                for a, b in zip(layer.stacks, like.stacks, strict=True):
                    yield (first, second), a, b, b - a

    @staticmethod
    def apply(errors: list[tuple[Parts, Tensor, Tensor, Tensor]], t: float) -> None:
        """Let the twin's errors have this size."""
        for _, weight, rounded, error in errors:
            torch.add(weight, error, alpha=t, out=rounded)

    # ------------------------------------------------------------------------------------------------------ backward

    def behind(self, reference: Batches, path: _Path) -> None:
        """Put the gradient of KL behind the last block in place of the residual stream there."""
        plain, error = None, None
        if HEAD in self.rounded:
            assert self.outer is not None
            plain = self.outer(f"{HEAD}.weight").to(self.device, self.dtype)
            error = self.rounded[HEAD].to(self.dtype) - plain
            path.slopes[HEAD,] = 0.0
        for at, batch in enumerate(path.hidden):
            found = torch.empty_like(batch)
            for row in range(len(batch)):
                want = self.model.head(reference[at][row : row + 1]).float().log_softmax(-1)
                with torch.enable_grad(), reference_ops():
                    x = batch[row : row + 1].detach().clone().requires_grad_()
                    size = torch.full((), path.t, dtype=self.dtype, device=self.device, requires_grad=True)
                    weight = None if plain is None or error is None else plain + size * error
                    got = self.model.head(x, weight).float().log_softmax(-1)
                    gradients = torch.autograd.grad(
                        (want.exp() * (want - got)).sum(), [x, *[size][: weight is not None]]
                    )
                found[row : row + 1] = gradients[0]
                if weight is not None:
                    path.slopes[HEAD,] += gradients[1].item()
            path.hidden[at] = found

    def backward(self, i: int, paths: list[_Path]) -> None:
        """The slopes of block `i`'s parts; gradients behind it become those in front."""
        model, prefix = self.model, self.model.block_prefix(i)
        block = model.load_block(i)
        twin = copy.deepcopy(block)
        kept, tensors = self.made.pop()
        made = Made()
        for (name, key), tensor in zip(kept, tensors, strict=True):
            made.setdefault(name, {})[key] = tensor
        put_layers(model, prefix, twin, made, lambda name: self.recipe.bits, self.recipe.format)
        tensors.clear()
        errors = list(self.errors(i, block, twin))
        leaves = [rounded for _, _, rounded, _ in errors]
        for path in paths:
            self.apply(errors, path.t)
            for leaf in leaves:
                leaf.requires_grad_()
            before = path.before.pop()
            for at in range(len(before)):
                with torch.enable_grad(), reference_ops(), sdpa_kernel(SDPBackend.MATH):
                    x = before[at].to(self.dtype).requires_grad_()
                    output = model.run_block(twin, x)
                    first, *rest = torch.autograd.grad(output, [x, *leaves], path.hidden[at], allow_unused=True)
                path.hidden[at] = first
                for (parts, _, _, error), gradient in zip(errors, rest, strict=True):
                    slope = 0.0 if gradient is None else _dot(gradient, error)
                    path.slopes[parts] = path.slopes.get(parts, 0.0) + slope
            before.clear()
            for leaf in leaves:
                leaf.requires_grad_(False)
        self.step(2 * model.num_blocks - i)

    # ---------------------------------------------------------------------------------------------------------- ends

    def embedding(self) -> Tensor:
        """The rounded embedding [V, D]."""
        recipe = self.recipe
        made = quantize_embedding(self.read(EMBED), recipe.bits, recipe, generator(recipe.seed, EMBED))
        return dequantize(made, recipe.bits, recipe.format, embedding=True)

    def moved(self, tokens: Tensor) -> Tensor:
        """What rounding the embedding adds to the rows of `tokens`."""
        return self.model.embed(tokens, self.rounded[EMBED]) - self.model.embed(tokens)

    def embedded(self, t: float) -> Iterator[Tensor]:
        for part in self.probe:
            plain = self.model.embed(part)
            yield plain + t * self.moved(part) if EMBED in self.rounded else plain

    def head(self, stream: Batches) -> Tensor:
        """The rounded head [V, D]."""
        weight, recipe = self.read(HEAD), self.recipe
        h = torch.zeros(weight.shape[1], weight.shape[1], dtype=torch.float64, device=self.device)
        rows = 0
        for batch in stream:
            x = self.model.final_norm(batch).reshape(-1, weight.shape[1]).float()
            h += (x.T @ x).double()
            rows += len(x)
        source = generator(recipe.seed, HEAD)
        made = quantize_group([weight.to(self.device)], (h / rows).float(), [recipe.bits], recipe, source)
        return dequantize(made[0], recipe.bits, recipe.format)

    def read(self, name: str) -> Tensor:
        assert self.outer is not None
        return self.outer(f"{name}.weight")

    def step(self, done: int) -> None:
        if self.progress is not None:
            self.progress(done, 2 * self.model.num_blocks)


def _advance(model: QuantizableModel, block: nn.Module, stream: Batches) -> None:
    for at in range(len(stream)):
        stream[at] = model.run_block(block, stream[at])


def _dot(a: Tensor, b: Tensor) -> float:
    return (a.float() * b.float()).sum(dtype=torch.float64).item()
