"""Quantize a model block by block: gather, round, put the rounded weights in place, go on.

Memory holds one block (two where earlier layers' error is corrected for) and the residual stream of the calibration
text, or the part of it that its bound allows (`quant/activation_offload.py`). Each finished block is a piece on disk,
and is read from there when the checkpoint is written. A job that was killed runs the stream through its pieces and goes
on, and ends with the same bytes: nothing random depends on what ran before. Each piece is kept under the name of all
that it depends on, so that a job with other rates for some layers takes over what they do not touch.
"""

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from onegraph.formats.quantization import OWN
from onegraph.formats.rotated import KEEP, resolve_rates
from onegraph.formats.weight import Tensors
from onegraph.quant.activation_offload import ActivationOffload, Batches
from onegraph.quant.calibrate import QuantizableModel
from onegraph.quant.experts import put_layers, quantize_experts
from onegraph.quant.fisher import LARGEST, Factors, kl_factors
from onegraph.quant.hessian import Moments, Seen, corrected, drift, gather
from onegraph.quant.layer import dequantize, generator, quantize_embedding, quantize_group
from onegraph.quant.precision import tensor_cores
from onegraph.quant.recipe import Recipe
from onegraph.quant.result import EMBED, HEAD, Layers, Quantized, load_piece
from onegraph.quant.resumable import Piece, ResumableWork, key_of
from onegraph.quant.tune import tune

Progress = Callable[[int, int, str], None]  # (steps done, steps in all, what is next)


def quantize(
    model: QuantizableModel,
    tokens: Tensor,
    recipe: Recipe,
    partial: ResumableWork | None = None,
    *,
    outer: Callable[[str], Tensor] | None = None,
    progress: Progress | None = None,
    spill: ActivationOffload | None = None,
) -> Quantized:
    """Quantize `model` on calibration `tokens` int [N, T].

    Args:
        partial: where finished blocks are kept, and the result lies; None keeps them in memory only.
        outer: reads "model.embed_tokens.weight" or "lm_head.weight"; needed to quantize those.
        progress: called after every group of linears, every layer of experts and every step of tuning.
        spill: where activations go that do not fit; None keeps them in memory.

    Raises ValueError for a rate map that matches nothing, tokens of a wrong kind, or a Hessian that is not finite.
    Deterministic on one machine: the same model, tokens, recipe and number of threads give the same bytes.
    """
    if tokens.dim() != 2 or tokens.dtype not in (torch.int32, torch.int64) or not tokens.numel():
        raise ValueError(f"tokens is {tokens.dtype} {tuple(tokens.shape)}; it must be an integer tensor [N, T]")
    return _Job(model, tokens, recipe, partial, outer, progress, spill or ActivationOffload()).run()


class _Job:
    def __init__(
        self,
        model: QuantizableModel,
        tokens: Tensor,
        recipe: Recipe,
        partial: ResumableWork | None,
        outer: Callable[[str], Tensor] | None,
        progress: Progress | None,
        spill: ActivationOffload,
    ) -> None:
        self.factors: dict[int, Factors] = {}  # of blocks, where they are not kept on disk
        self.spill, self.counts = spill, dict[tuple[str, str], list[int]]()
        self.model, self.recipe, self.partial, self.outer, self.progress = model, recipe, partial, outer, progress
        self.numbers = range(model.num_blocks + model.num_drafts)
        if (recipe.lm_head or recipe.embed_tokens) and outer is None:
            raise ValueError("to quantize lm_head or embed_tokens, quantize() must be given `outer` to read them")
        self.shapes = {
            model.block_prefix(i) + name: shape for i in self.numbers for name, shape in model.shapes(i).items()
        }
        config = OWN[recipe.format]
        rates = resolve_rates(recipe.layers, self.shapes, recipe.bits, tuple(config.formats))
        rates |= dict.fromkeys(model.kept, KEEP)
        self.config = config(bits=recipe.bits, layers=rates, lm_head=recipe.lm_head, embed_tokens=recipe.embed_tokens)
        for i in self.numbers:
            for name, shape in model.shapes(i).items():
                try:
                    self.config.format_of(model.block_prefix(i) + name).check_size(*shape[-2:])
                except ValueError as error:
                    raise ValueError(f"{name}: {error}; keep it with the rate 16 for '*{name}'") from None
        self.done, self.total = 0, len(self.shapes)
        self.batch = max(1, recipe.batch_tokens // tokens.shape[1])
        self.tokens, self.layers = tokens, Layers(partial)
        self.keys = self.piece_keys()
        if partial is not None:
            partial.keep(self.keys)

    def step(self, what: str, count: int = 1) -> None:
        self.done += count
        if self.progress is not None:
            self.progress(self.done, self.total, what)

    def piece_keys(self) -> dict[str, str]:
        """Piece -> what names all that it depends on.

        A block's rounding depends on its own rates and, where Hessians are gathered behind quantized blocks, on those
        of all blocks before it. Recipes for tuning and for both ends touch no block.
        """
        recipe, model = self.recipe, self.model
        levers = recipe.to_dict()
        for name in ("bits", "layers", "lm_head", "embed_tokens", "tune"):
            del levers[name]
        text = key_of(self.tokens.to(torch.int64), self.batch)
        chain = key_of(text, levers)
        keys: dict[str, str] = {}
        for i in self.numbers:
            prefix = model.block_prefix(i)
            made = key_of(chain, i, {name: self.config.bits_of(prefix + name) for name in model.shapes(i)})
            if recipe.inputs == "reference":
                keys[f"inputs-{i:05d}"] = key_of(text, "inputs", i)
            elif i < model.num_blocks:  # nothing is behind a draft layer
                chain = made
            keys[f"block-{i:05d}"] = keys[f"counts-{i:05d}"] = made
            if recipe.fisher and i < model.num_blocks:
                kept = [name for name in model.shapes(i) if self.config.bits_of(prefix + name) == KEEP]
                asked = recipe.fisher, recipe.seed, recipe.fisher_outputs and ("float16", LARGEST), kept
                keys[f"fisher-{i:05d}"] = key_of(text, "fisher", i, asked)
        keys["tuned"] = key_of([keys[f"block-{i:05d}"] for i in range(model.num_blocks)], recipe.to_dict())
        keys["tuning"] = keys["tuned"]
        keys["embed"] = key_of(levers, recipe.embed_tokens)
        keys["head"] = key_of(chain, recipe.lm_head)
        return keys

    @torch.no_grad()
    def run(self) -> Quantized:
        try:
            with tensor_cores(self.model.embed(self.tokens[:1, :1]).device):
                self.blocks()
        finally:
            self.spill.close()
        return Quantized(self.config, self.layers, self.counts)

    def blocks(self) -> None:
        """All that the recipe asks for, into `layers` and `counts`."""
        model, recipe = self.model, self.recipe
        if recipe.fisher:
            self.gather_factors()
        stream = self.spill.batches(model.embed(part) for part in self.tokens.split(self.batch))
        reference = self.spill.batches(stream) if recipe.correct or recipe.tune else None
        for i in range(model.num_blocks):
            self.block(i, stream, reference)
        self.drafts(stream, reference)
        if recipe.tune is not None:
            assert reference is not None
            self.kept("tuned", lambda: self.tuned(reference))
            if self.partial is not None:
                self.partial.discard("tuning")
        self.ends(stream)

    def drafts(self, stream: Batches, reference: Batches | None) -> None:
        """Quantize the draft layers on what the model gives them."""
        model = self.model
        for i in self.numbers[model.num_blocks :]:
            block, found = model.load_block(i), list[Batches]()
            for each in (stream, *([] if reference is None else [reference])):
                pairs = zip(self.tokens.split(self.batch), each, strict=True)
                found.append(self.spill.batches(model.draft_inputs(block, *pair) for pair in pairs))
            del block
            self.block(i, found[0], found[1] if found[1:] else None)

    def tuned(self, reference: Batches) -> dict[str, Tensors]:
        def show(step: int, steps: int, loss: float) -> None:
            self.done, self.total = blocks + step - 1, blocks + steps
            self.step(f"tuning, KL {loss:.4f}")

        blocks, piece = self.done, None if self.partial is None else Piece(self.partial, "tuning", self.keys["tuning"])
        return tune(self.model, self.tokens, list(reference), self.layers, self.config, self.recipe, show, piece)

    def kept(self, name: str, make: Callable[[], dict[str, Tensors]]) -> dict[str, Tensors] | None:
        """The piece `name` from disk; or made now and put there, and None."""
        found = load_piece(self.partial, name, self.keys[name])
        made = make() if found is None else found
        if found is None and self.partial is not None:
            flat = {f"{owner}.{suffix}": t for owner, tensors in made.items() for suffix, t in tensors.items()}
            self.partial.save(name, self.keys[name], flat)
        self.layers.put(name, self.keys[name], made)
        return found

    def block(self, i: int, stream: Batches, reference: Batches | None) -> None:
        """Quantize block `i` (or read it) and take `stream`, and `reference`, through it."""
        model, inputs = self.model, self.recipe.inputs
        block = model.load_block(i)
        plain = copy.deepcopy(block) if reference is not None else None
        groups, prefix = model.linear_groups(block), model.block_prefix(i)
        wanted = self.wanted(prefix, block)
        counts: dict[int, Tensor] = {}
        outputs: Batches | None = None  # of the unquantized block, where that is what the stream goes through

        def make() -> dict[str, Tensors]:
            nonlocal outputs
            made: dict[str, Tensors] = {}
            factors = self.factors_of(i) if self.recipe.fisher and i < model.num_blocks else Factors()
            weights = self.weights(prefix, groups, factors)
            pair = None if plain is None or reference is None or not self.recipe.correct else (plain, reference)
            moments: dict[int, Moments] = {}
            seen: dict[int, Seen] = {}
            if inputs == "reference":
                moments, seen, outputs = self.inputs(i, block, stream, wanted)
            elif inputs == "block":
                rounded = [
                    at
                    for at, group in enumerate(groups)
                    if any(self.config.bits_of(prefix + name) != KEEP for name, _ in group)
                ]
                gathered = gather(
                    model, block, stream, rounded, pair, weights=weights, experts=wanted, spill=self.spill
                )
                moments, seen = gathered.moments, gathered.experts
                gathered.outputs.clear()
            for at, group in enumerate(groups):
                if inputs == "group":
                    gathered = gather(model, block, stream, [at], pair, weights=weights, spill=self.spill)
                    moments = gathered.moments
                    gathered.outputs.clear()
                made |= self.group(prefix, group, moments.pop(at, None), factors)
                self.step(f"{prefix}{group[0][0]}", len(group))
            for at in wanted:
                if inputs == "group":
                    gathered = gather(model, block, stream, [], pair, experts=[at], spill=self.spill)
                    seen = gathered.experts
                    gathered.outputs.clear()
                made |= self.experts(prefix, block, None if pair is None else plain, at, seen[at])
                counts[at] = seen[at].counts(model.expert_layers(block)[at].count)
                seen[at].clear()
            return made

        found = self.kept(f"block-{i:05d}", make)
        if found is not None:
            if inputs != "reference":
                self.put(prefix, block, found)
            self.step(f"block {i} was done before", len(model.shapes(i)))
        self.count(i, prefix, block, counts)
        if outputs is not None:
            stream.take(outputs)
        else:
            _advance(model, block, stream)
        if plain is not None and reference is not None:
            _advance(model, plain, reference)

    def gather_factors(self) -> None:
        """The output factors of all blocks, on disk or in memory; not where they are there, or all is rounded."""
        there, names = self.partial, range(self.model.num_blocks)

        def missing(kind: str) -> bool:
            return there is None or not all(there.has(f"{kind}-{i:05d}", self.keys[f"{kind}-{i:05d}"]) for i in names)

        if not missing("block") or not missing("fisher"):
            return
        recipe = self.recipe
        found = kl_factors(
            self.model,
            self.tokens,
            seed=recipe.seed,
            draws=recipe.fisher,
            outputs=recipe.fisher_outputs,
            rounded=lambda name: self.config.bits_of(name) != KEEP,
            spill=self.spill,
            progress=lambda count: self.step(f"gradients of {count} of {len(names)} blocks", 0),
        )
        for i, factors in found:
            if there is None:
                self.factors[i] = factors
            else:
                there.save(f"fisher-{i:05d}", self.keys[f"fisher-{i:05d}"], factors.flat())

    def weights(self, prefix: str, groups: list[list[tuple[str, Any]]], factors: Factors) -> dict[int, list[Tensor]]:
        """Weights of the tokens of each batch, by the group whose inputs they are of."""
        found = {}
        for at, group in enumerate(groups):
            whole = factors.of_group([prefix + name for name, _ in group if self.config.bits_of(prefix + name) != KEEP])
            if whole is not None:
                found[at] = [part.reshape(-1, 1) for part in whole.split(self.batch)]
        return found

    def factors_of(self, i: int) -> Factors:
        if self.partial is None:
            return self.factors.pop(i)
        return Factors.of(self.partial.load(f"fisher-{i:05d}", self.keys[f"fisher-{i:05d}"]) or {})

    def wanted(self, prefix: str, block: nn.Module) -> list[int]:
        """The expert layers that are rounded. Raises ValueError for one whose two matrices have two rates."""
        found = []
        for at, layer in enumerate(self.model.expert_layers(block)):
            first, second = (prefix + name for name in layer.names)
            if self.config.bits_of(first) != self.config.bits_of(second):
                raise ValueError(f"{first} and {second} have two rates; experts of a layer must have one")
            found += [at] if self.config.bits_of(first) != KEEP else []
        return found

    def count(self, i: int, prefix: str, block: nn.Module, counts: Mapping[int, Tensor]) -> None:
        """Keep the tokens of each expert, or read what an earlier job counted."""
        name = f"counts-{i:05d}"
        if counts and self.partial is not None:
            self.partial.save(name, self.keys[name], {str(at): count for at, count in counts.items()})
        elif not counts and self.partial is not None and (kept := self.partial.load(name, self.keys[name])) is not None:
            counts = {int(at): count for at, count in kept.items()}
        for at, count in counts.items():
            first, second = self.model.expert_layers(block)[at].names
            self.counts[prefix + first, prefix + second] = count.tolist()

    def experts(
        self, prefix: str, block: nn.Module, plain: nn.Module | None, at: int, seen: Seen
    ) -> dict[str, Tensors]:
        layer = self.model.expert_layers(block)[at]
        twin = None if plain is None else self.model.expert_layers(plain)[at]
        bits = self.config.bits_of(prefix + layer.names[0])
        made = quantize_experts(layer, twin, seen, bits, self.recipe, prefix)
        self.step(f"{prefix}{layer.names[0]}", 2)
        return made

    def inputs(
        self, i: int, block: nn.Module, stream: Batches, wanted: list[int]
    ) -> tuple[dict[int, Moments], dict[int, Seen], Batches]:
        """Moments of the unquantized block `i` and what its experts saw, from disk where an earlier job left them
        there, and its outputs."""
        name, groups = f"inputs-{i:05d}", self.model.linear_groups(block)
        found = None if self.partial is None else self.partial.load(name, self.keys[name])
        if found is not None and all(f"{at}.0.x" in found for at in wanted):
            outputs = self.spill.batches(self.model.run_block(block, batch) for batch in stream)
            device = stream[0].device
            reached = [at for at in range(len(groups)) if str(at) in found]
            seen = {}
            for at in wanted:
                x = self.spill.batches(found[f"{at}.{j}.x"].to(device) for j in range(len(stream)))
                seen[at] = Seen(x, [found[f"{at}.{j}.chosen"].to(device) for j in range(len(stream))], None)
            return {at: Moments(found[str(at)].to(device), None) for at in reached}, seen, outputs
        gathered = gather(self.model, block, stream, range(len(groups)), experts=wanted, spill=self.spill)
        if self.partial is not None and self.partial.keep_inputs and not self.spill.used:  # a piece is made in memory
            kept = {str(at): moment.h for at, moment in gathered.moments.items()}
            for at, one in gathered.experts.items():
                for j, (given, chosen) in enumerate(zip(one.x, one.chosen, strict=True)):
                    kept |= {f"{at}.{j}.x": given, f"{at}.{j}.chosen": chosen}
            self.partial.save(name, self.keys[name], kept)
        return gathered.moments, gathered.experts, gathered.outputs

    def group(
        self, prefix: str, group: list[tuple[str, Any]], moments: Moments | None, factors: Factors
    ) -> dict[str, Tensors]:
        chosen = [(prefix + name, module, self.config.bits_of(prefix + name)) for name, module in group]
        chosen = [item for item in chosen if item[2] != KEEP]
        if not chosen:
            return {}
        if moments is None:
            name = chosen[0][0]
            raise ValueError(
                f"{name}: no row of the calibration text reaches it; give more text, or keep it with the rate 16 for "
                f"'{name}'"
            )
        for name, module, _ in chosen:
            if not torch.isfinite(module.weight).all():
                raise ValueError(f"{name}: the weight is not finite; the checkpoint is damaged")
        recipe = self.recipe
        off = drift(moments, recipe.damping) if recipe.correct else None
        weights = [corrected(module.weight.float(), off, recipe.correct) for _, module, _ in chosen]
        rates = [bits for _, _, bits in chosen]
        source, h = generator(recipe.seed, chosen[0][0]), moments.under(recipe.fisher_tokens)
        del off, moments  # of a wide linear each takes a gigabyte
        try:
            if all(name in factors.triangles for name, _, _ in chosen):
                outputs = [functools.partial(factors.of_outputs, name, h.device) for name, _, _ in chosen]
                made = quantize_group(weights, h, rates, recipe, source, outputs)
            else:
                made = quantize_group(weights, h, rates, recipe, source)
        except ValueError as error:
            raise ValueError(f"{chosen[0][0]}: {error}") from None
        for (_, module, bits), tensors in zip(chosen, made, strict=True):
            module.weight.copy_(dequantize(tensors, bits, recipe.format))
        return {name: tensors for (name, _, _), tensors in zip(chosen, made, strict=True)}

    def put(self, prefix: str, block: nn.Module, layers: Mapping[str, Tensors]) -> None:
        """Replace the block's weights by what `layers` stand for."""
        put_layers(self.model, prefix, block, layers, self.config.bits_of, self.config.format)

    def ends(self, stream: Batches) -> None:
        """Head and embedding, if asked for."""
        recipe = self.recipe
        if recipe.embed_tokens is not None:
            weight, bits = self.read(EMBED), recipe.embed_tokens
            source = generator(recipe.seed, EMBED)
            self.kept("embed", lambda: {EMBED: quantize_embedding(weight, bits, recipe, source)})
        if recipe.lm_head is not None:
            rate = recipe.lm_head

            def head() -> dict[str, Tensors]:
                weight = self.read(HEAD)
                h = torch.zeros(weight.shape[1], weight.shape[1], dtype=torch.float64, device=stream[0].device)
                for batch in stream:
                    x = self.model.final_norm(batch).reshape(-1, weight.shape[1]).float()
                    h += (x.T @ x).double()
                mean = (h / self.tokens.numel()).float()
                source = generator(recipe.seed, HEAD)
                return {HEAD: quantize_group([weight.to(mean.device)], mean, [rate], recipe, source)[0]}

            self.kept("head", head)

    def read(self, name: str) -> Tensor:
        assert self.outer is not None
        return self.outer(f"{name}.weight")


def _advance(model: QuantizableModel, block: nn.Module, stream: Batches) -> None:
    for at in range(len(stream)):
        stream[at] = model.run_block(block, stream[at])
