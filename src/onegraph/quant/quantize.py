"""Quantize a model block by block: gather, round, put the rounded weights in place, go on.

Memory holds one block (two where earlier layers' error is corrected for) and the residual stream of the calibration
text. Each finished block is a piece on disk, and is read from there when the checkpoint is written. A job that was
killed runs the stream through its pieces and goes on, and ends with the same bytes: nothing random depends on what ran
before. Each piece is kept under the name of all that it depends on, so that a job with other rates for some layers
takes over what they do not touch.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onegraph.formats.e8p import KEEP, E8PConfig, resolve_rates
from onegraph.quant.calibrate import QuantizableModel
from onegraph.quant.hessian import Moments, corrected, gather
from onegraph.quant.layer import Tensors, dequantize, generator, quantize_embedding, quantize_group
from onegraph.quant.partial import Partial, key_of
from onegraph.quant.recipe import Recipe
from onegraph.quant.tune import tune

Progress = Callable[[int, int, str], None]  # (steps done, steps in all, what is next)
HEAD, EMBED = "lm_head", "model.embed_tokens"


class Layers(Mapping[str, Tensors]):
    """Quantized linears by name, sorted, their checkpoint tensors on the CPU. Those of pieces on disk are read when
    they are asked for, and one piece is in memory at a time."""

    def __init__(self, partial: Partial | None) -> None:
        self._partial = partial
        self._held: dict[str, Tensors] = {}
        self._pieces: dict[str, tuple[str, str]] = {}  # linear -> name and key of its piece
        self._latest: tuple[tuple[str, str], dict[str, Tensors]] | None = None

    def put(self, name: str, key: str, made: Mapping[str, Tensors]) -> None:
        """The piece `name` with all its linears; it replaces what was known of them."""
        if self._partial is None:
            self._held |= {owner: {k: v.cpu() for k, v in tensors.items()} for owner, tensors in made.items()}
        else:
            self._pieces |= dict.fromkeys(made, (name, key))

    def __getitem__(self, linear: str) -> Tensors:
        if self._partial is None:
            found = self._held[linear]
        else:
            piece = self._pieces[linear]
            if self._latest is None or self._latest[0] != piece:
                self._latest = None  # two pieces are not in memory at once
                self._latest = piece, load_piece(self._partial, *piece) or {}
            found = self._latest[1][linear]
        return dict(sorted(found.items()))

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._held if self._partial is None else self._pieces))

    def __len__(self) -> int:
        return len(self._held if self._partial is None else self._pieces)

    def __contains__(self, linear: object) -> bool:
        return linear in self._held or linear in self._pieces


def load_piece(partial: Partial | None, name: str, key: str) -> dict[str, Tensors] | None:
    """Linears of a piece on disk, None where it is not there."""
    found = None if partial is None else partial.load(name, key)
    if found is None:
        return None
    layers: dict[str, Tensors] = {}
    for full, tensor in found.items():
        owner, _, suffix = full.rpartition(".")
        layers.setdefault(owner, {})[suffix] = tensor
    return layers


@dataclass(frozen=True)
class Quantized:
    """What `quantize` made: the config for config.json and, per linear, its checkpoint tensors on the CPU.

    Where finished blocks are kept on disk, so are `layers`: they can be read until the `Partial` is removed.
    """

    config: E8PConfig
    layers: Mapping[str, Tensors]

    def tensors(self, names: Iterable[str], read: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """All tensors of the new checkpoint, from those of the source: `names`, and `read` to get one.

        Weights of quantized linears are replaced; everything else goes through as it is. Quantizing the embedding alone
        of a tied model leaves its head the old weight, under the head's own name.
        """
        names = list(names)
        for name in names:
            owner, _, kind = name.rpartition(".")
            if owner not in self.layers:
                yield name, read(name)
            elif kind == "weight":
                yield from ((f"{owner}.{suffix}", tensor) for suffix, tensor in self.layers[owner].items())
            elif kind == "bias":
                yield name, read(name).float()
            else:
                raise ValueError(f"the source has the tensor {name!r}, which a quantized linear cannot keep")
        tied = f"{HEAD}.weight" not in names
        if tied and HEAD in self.layers:
            yield from ((f"{HEAD}.{suffix}", tensor) for suffix, tensor in self.layers[HEAD].items())
        elif tied and EMBED in self.layers:
            yield f"{HEAD}.weight", read(f"{EMBED}.weight")


def quantize(
    model: QuantizableModel,
    tokens: Tensor,
    recipe: Recipe,
    partial: Partial | None = None,
    *,
    outer: Callable[[str], Tensor] | None = None,
    progress: Progress | None = None,
) -> Quantized:
    """Quantize `model` on calibration `tokens` int [N, T].

    Args:
        partial: where finished blocks are kept, and the result lies; None keeps them in memory only.
        outer: reads "model.embed_tokens.weight" or "lm_head.weight"; needed to quantize those.
        progress: called after every group of linears and every step of tuning.

    Raises ValueError for a rate map that matches nothing, tokens of a wrong kind, or a Hessian that is not finite.
    Deterministic on one machine: the same model, tokens, recipe and number of threads give the same bytes.
    """
    if tokens.dim() != 2 or tokens.dtype not in (torch.int32, torch.int64) or not tokens.numel():
        raise ValueError(f"tokens is {tokens.dtype} {tuple(tokens.shape)}; it must be an integer tensor [N, T]")
    return _Job(model, tokens, recipe, partial, outer, progress).run()


class _Job:
    def __init__(
        self,
        model: QuantizableModel,
        tokens: Tensor,
        recipe: Recipe,
        partial: Partial | None,
        outer: Callable[[str], Tensor] | None,
        progress: Progress | None,
    ) -> None:
        self.model, self.recipe, self.partial, self.outer, self.progress = model, recipe, partial, outer, progress
        if (recipe.lm_head or recipe.embed_tokens) and outer is None:
            raise ValueError("to quantize lm_head or embed_tokens, quantize() must be given `outer` to read them")
        first = model.linear_groups(model.load_block(0))
        shapes = {name: tuple(module.weight.shape) for group in first for name, module in group}
        prefixes = [model.block_prefix(i) for i in range(model.num_blocks)]
        rates = resolve_rates(recipe.layers, [p + n for p in prefixes for n in shapes], recipe.bits)
        self.config = E8PConfig(
            bits=recipe.bits, layers=rates, lm_head=recipe.lm_head, embed_tokens=recipe.embed_tokens
        )
        for name, (n, k) in shapes.items():
            for prefix in prefixes:
                try:
                    self.config.format_of(prefix + name).check_size(n, k)
                except ValueError as error:
                    raise ValueError(f"{name}: {error}; keep it with the rate 16 for '*{name}'") from None
        self.done, self.total = 0, len(first) * model.num_blocks
        self.batch = max(1, recipe.batch_tokens // tokens.shape[1])
        self.tokens, self.names, self.layers = tokens, list(shapes), Layers(partial)
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
        for i in range(model.num_blocks):
            prefix = model.block_prefix(i)
            made = key_of(chain, i, {name: self.config.bits_of(prefix + name) for name in self.names})
            if recipe.inputs == "reference":
                keys[f"inputs-{i:05d}"] = key_of(text, "inputs", i)
            else:
                chain = made
            keys[f"block-{i:05d}"] = made
        keys["tuned"] = key_of([keys[f"block-{i:05d}"] for i in range(model.num_blocks)], recipe.to_dict())
        keys["embed"] = key_of(levers, recipe.embed_tokens)
        keys["head"] = key_of(chain, recipe.lm_head)
        return keys

    @torch.no_grad()
    def run(self) -> Quantized:
        model, recipe = self.model, self.recipe
        stream = [model.embed(part) for part in self.tokens.split(self.batch)]
        reference = list(stream) if recipe.correct or recipe.tune else None
        for i in range(model.num_blocks):
            self.block(i, stream, reference)
        if recipe.tune is not None:
            assert reference is not None
            self.kept("tuned", lambda: self.tuned(reference))
        self.ends(stream)
        return Quantized(self.config, self.layers)

    def tuned(self, reference: list[Tensor]) -> dict[str, Tensors]:
        def show(step: int, steps: int, loss: float) -> None:
            self.total = blocks + steps
            self.step(f"tuning, KL {loss:.4f}")

        blocks = self.done
        return tune(self.model, self.tokens, reference, self.layers, self.config, self.recipe, show)

    def kept(self, name: str, make: Callable[[], dict[str, Tensors]]) -> dict[str, Tensors] | None:
        """The piece `name` from disk; or made now and put there, and None."""
        found = load_piece(self.partial, name, self.keys[name])
        made = make() if found is None else found
        if found is None and self.partial is not None:
            flat = {f"{owner}.{suffix}": t for owner, tensors in made.items() for suffix, t in tensors.items()}
            self.partial.save(name, self.keys[name], flat)
        self.layers.put(name, self.keys[name], made)
        return found

    def block(self, i: int, stream: list[Tensor], reference: list[Tensor] | None) -> None:
        """Quantize block `i` (or read it) and take `stream`, and `reference`, through it."""
        model, inputs = self.model, self.recipe.inputs
        block = model.load_block(i)
        plain = copy.deepcopy(block) if reference is not None else None
        groups, prefix = model.linear_groups(block), model.block_prefix(i)
        outputs: list[Tensor] | None = None  # of the unquantized block, where that is what the stream goes through

        def make() -> dict[str, Tensors]:
            nonlocal outputs
            made: dict[str, Tensors] = {}
            pair = None if plain is None or reference is None or not self.recipe.correct else (plain, reference)
            moments: dict[int, Moments] = {}
            if inputs == "reference":
                moments, outputs = self.inputs(i, block, stream)
            elif inputs == "block":
                moments, _ = gather(model, block, stream, range(len(groups)), pair)
            for at, group in enumerate(groups):
                if inputs == "group":
                    moments, _ = gather(model, block, stream, [at], pair)
                made |= self.group(prefix, group, moments[at])
                self.step(f"{prefix}{group[0][0]}")
            return made

        found = self.kept(f"block-{i:05d}", make)
        if found is not None:
            if inputs != "reference":
                self.put(prefix, groups, found)
            self.step(f"block {i} was done before", len(groups))
        if outputs is not None:
            stream[:] = outputs
        else:
            _advance(model, block, stream)
        if plain is not None and reference is not None:
            _advance(model, plain, reference)

    def inputs(self, i: int, block: nn.Module, stream: list[Tensor]) -> tuple[dict[int, Moments], list[Tensor]]:
        """Moments of the unquantized block `i`, from disk where an earlier job left them there, and its outputs."""
        name, groups = f"inputs-{i:05d}", self.model.linear_groups(block)
        found = None if self.partial is None else self.partial.load(name, self.keys[name])
        if found is not None:
            outputs = [self.model.run_block(block, batch) for batch in stream]
            return {at: Moments(found[str(at)].to(stream[0].device), None) for at in range(len(groups))}, outputs
        moments, outputs = gather(self.model, block, stream, range(len(groups)))
        if self.partial is not None and self.partial.keep_inputs:
            self.partial.save(name, self.keys[name], {str(at): moment.h for at, moment in moments.items()})
        return moments, outputs

    def group(self, prefix: str, group: list[tuple[str, Any]], moments: Moments) -> dict[str, Tensors]:
        chosen = [(prefix + name, module, self.config.bits_of(prefix + name)) for name, module in group]
        chosen = [item for item in chosen if item[2] != KEEP]
        if not chosen:
            return {}
        for name, module, _ in chosen:
            if not torch.isfinite(module.weight).all():
                raise ValueError(f"{name}: the weight is not finite; the checkpoint is damaged")
        recipe = self.recipe
        weights = [corrected(module.weight.float(), moments, recipe.damping, recipe.correct) for _, module, _ in chosen]
        rates = [bits for _, _, bits in chosen]
        try:
            made = quantize_group(weights, moments.h, rates, recipe, generator(recipe.seed, chosen[0][0]))
        except ValueError as error:
            raise ValueError(f"{chosen[0][0]}: {error}") from None
        for (_, module, bits), tensors in zip(chosen, made, strict=True):
            module.weight.copy_(dequantize(tensors, bits))
        return {name: tensors for (name, _, _), tensors in zip(chosen, made, strict=True)}

    def put(self, prefix: str, groups: list[list[tuple[str, Any]]], layers: Mapping[str, Tensors]) -> None:
        """Replace the block's weights by what `layers` stand for."""
        for group in groups:
            for name, module in group:
                if (tensors := layers.get(prefix + name)) is not None:
                    bits = self.config.bits_of(prefix + name)
                    on_device = {key: tensor.to(module.weight.device) for key, tensor in tensors.items()}
                    module.weight.copy_(dequantize(on_device, bits))

    def ends(self, stream: list[Tensor]) -> None:
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


def _advance(model: QuantizableModel, block: nn.Module, stream: list[Tensor]) -> None:
    for at, batch in enumerate(stream):
        stream[at] = model.run_block(block, batch)
