"""What each part of a model costs: the KL of the whole model with that part alone rounded to the lowest rate.

Parts are what one rate goes to: linears that share an input (one launch multiplies by them), the experts of a layer,
head and embedding. The unquantized model runs over the calibration text block by block, for its Hessians, and with it
the first rows of that text once for every part that has been rounded so far. So memory holds one block, its twin, and
a residual stream a part, of which what does not fit lies on disk; a model is read once. Rounding is the quick kind, by
LDLQ alone, under the inputs that the unquantized model has.

While errors are small KL is quadratic in them and adds up over parts (HIGGS, arXiv 2411.17525), so one rate is measured
and the others follow from what the format errs (`ERRORS`); docs/log.md has what that was held to.
"""

import copy
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from onegraph.quant.calibrate import QuantizableModel
from onegraph.quant.experts import quantize_experts
from onegraph.quant.hessian import Gathered, gather
from onegraph.quant.layer import dequantize, generator, quantize_embedding, quantize_group
from onegraph.quant.precision import tensor_cores
from onegraph.quant.recipe import Recipe
from onegraph.quant.result import EMBED, HEAD
from onegraph.quant.spill import Batches, Spill

LOWEST = 2  # bits: at 1, of formats that have it, errors no longer add up
Parts = tuple[str, ...]  # the linears, or stacks of experts, of one part, by full name
Costs = dict[Parts, float]  # KL in nats per token at the lowest rate
Progress = Callable[[int, int], None]  # (blocks done, blocks in all)


def quick(recipe: Recipe) -> Recipe:
    """The recipe that costs are measured by: one pass, whatever the rates and levers of the real one."""
    return Recipe(
        format=recipe.format,
        bits=LOWEST,
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
    progress: Progress | None = None,
    spill: Spill | None = None,
) -> Costs:
    """KL of each part whose rate is to be chosen.

    Args:
        tokens: int [N, T], for Hessians; KL is taken on the first `probed` rows of them.
        recipe: `quick` of the one that the model will be rounded by.
        free: by full name of each linear, stack of experts and end ("lm_head", "model.embed_tokens") whether its rate
            is to be chosen. Those of one part that are not stay unquantized.
        outer: reads "model.embed_tokens.weight" or "lm_head.weight"; needed where an end is free.

    Raises ValueError, as `quantize` does, for weights or inputs that are not finite.
    """
    return _Measuring(model, tokens, recipe, free, probed, outer, progress, spill or Spill()).run()


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
        spill: Spill,
    ) -> None:
        self.model, self.recipe, self.free, self.outer = model, recipe, free, outer
        self.progress, self.spill = progress, spill
        self.batches = tokens.split(max(1, recipe.batch_tokens // tokens.shape[1]))
        self.probe = tokens[:probed]
        self.swapped: dict[Parts, Batches] = {}

    @torch.no_grad()
    def run(self) -> Costs:
        model, spill = self.model, self.spill
        try:
            probe = spill.batches([model.embed(self.probe)])
            with tensor_cores(probe[0].device):
                stream = spill.batches(model.embed(part) for part in self.batches)
                if self.free.get(EMBED):
                    self.swapped[EMBED,] = spill.batches([self.embedded()])
                for i in range(model.num_blocks):
                    self.block(i, stream, probe)
                return self.costs(stream, probe[0])
        finally:
            spill.close()

    def block(self, i: int, stream: Batches, probe: Batches) -> None:
        """Take the streams of parts of earlier blocks through block `i`, and begin those of its own parts."""
        model, prefix = self.model, self.model.block_prefix(i)
        block = model.load_block(i)
        layers = model.expert_layers(block)
        experts = [at for at, layer in enumerate(layers) if self.free.get(prefix + layer.names[0])]
        groups = model.linear_groups(block)
        chosen = {
            at: names
            for at, group in enumerate(groups)
            if (names := [name for name, _ in group if self.free.get(prefix + name)])
        }
        gathered = gather(model, block, stream, list(chosen), experts=experts, spill=self.spill)
        for found in self.swapped.values():
            found[0] = model.run_block(block, found[0])
        for at, names in chosen.items():
            self.group(prefix, block, at, names, gathered, probe[0])
        for at in experts:
            twin = copy.deepcopy(block)
            quantize_experts(model.expert_layers(twin)[at], None, gathered.experts[at], LOWEST, self.recipe, prefix)
            gathered.experts[at].clear()
            first, second = layers[at].names
            self.swapped[prefix + first, prefix + second] = self.spill.batches([model.run_block(twin, probe[0])])
        probe[0] = model.run_block(block, probe[0])
        stream.take(gathered.outputs)
        if self.progress is not None:
            self.progress(i + 1, model.num_blocks)

    def group(
        self, prefix: str, block: nn.Module, at: int, names: list[str], gathered: Gathered, probe: Tensor
    ) -> None:
        twin = copy.deepcopy(block)
        chosen = [(prefix + name, module) for name, module in self.model.linear_groups(twin)[at] if name in names]
        if at not in gathered.moments:
            raise ValueError(
                f"{chosen[0][0]}: no row of the calibration text reaches it; give more text, or keep it with the rate "
                f"16 for '{chosen[0][0]}'"
            )
        weights = [module.weight.float() for _, module in chosen]
        source = generator(self.recipe.seed, chosen[0][0])
        try:
            made = quantize_group(weights, gathered.moments[at].h, [LOWEST] * len(chosen), self.recipe, source)
        except ValueError as error:
            raise ValueError(f"{chosen[0][0]}: {error}") from None
        for (_, module), tensors in zip(chosen, made, strict=True):
            module.weight.copy_(dequantize(tensors, LOWEST, self.recipe.format))
        parts = tuple(name for name, _ in chosen)
        self.swapped[parts] = self.spill.batches([self.model.run_block(twin, probe)])

    def embedded(self) -> Tensor:
        """The probe's rows of the rounded embedding, as the model takes them in."""
        table = self.read(EMBED)
        made = quantize_embedding(table, LOWEST, self.recipe, generator(self.recipe.seed, EMBED))
        return self.model.embed(self.probe, dequantize(made, LOWEST, self.recipe.format, embedding=True))

    def costs(self, stream: Batches, reference: Tensor) -> Costs:
        """Of all parts, from what has come through the model; `stream`, `reference`: of the unquantized model."""
        head = self.head(stream) if self.free.get(HEAD) else None
        totals: Costs = dict.fromkeys(self.swapped, 0.0)
        for row in range(len(reference)):
            want = self.model.head(reference[row]).float().log_softmax(-1)
            for parts, found in self.swapped.items():
                totals[parts] += _divergence(want, self.model.head(found[0][row]))
            if head is not None:
                totals[HEAD,] = totals.get((HEAD,), 0.0) + _divergence(want, self.model.head(reference[row], head))
        return {parts: max(total, 0.0) / self.probe.numel() for parts, total in totals.items()}

    def head(self, stream: Batches) -> Tensor:
        """The rounded head [V, D]."""
        weight = self.read(HEAD)
        h = torch.zeros(weight.shape[1], weight.shape[1], dtype=torch.float64, device=stream[0].device)
        rows = 0
        for batch in stream:
            x = self.model.final_norm(batch).reshape(-1, weight.shape[1]).float()
            h += (x.T @ x).double()
            rows += len(x)
        source = generator(self.recipe.seed, HEAD)
        made = quantize_group([weight.to(h.device)], (h / rows).float(), [LOWEST], self.recipe, source)
        return dequantize(made[0], LOWEST, self.recipe.format)

    def read(self, name: str) -> Tensor:
        assert self.outer is not None
        return self.outer(f"{name}.weight")


def _divergence(want: Tensor, logits: Tensor) -> float:
    """KL summed over tokens, nats; `want` are log-probabilities [T, V]."""
    got = logits.float().log_softmax(-1)
    return (want.exp() * (want - got)).sum(-1).double().sum().item()
