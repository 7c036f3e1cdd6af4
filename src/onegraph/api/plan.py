"""What quantizing would make and what it costs, from config.json and the headers of the weights alone."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from onegraph.api.auto import settle
from onegraph.api.budget import Chosen, Layers
from onegraph.api.calibration import Source, draw, estimated, kind_of, shortage, sources, told
from onegraph.api.choices import TOKENS, Choices, choose
from onegraph.api.cost import Work, estimate, sampling_memory
from onegraph.api.deprecated import renamed
from onegraph.api.hub import locate
from onegraph.api.outline import Outline, described, outline, table_entry
from onegraph.api.pace import duration
from onegraph.api.resources import check_resources
from onegraph.api.size import Size, human_bytes, human_count, size_of, size_with
from onegraph.api.tokenizer import Tokenizer
from onegraph.formats.checkpoint import Checkpoint, TensorInfo
from onegraph.formats.nvfp4 import NVFP4, written_config
from onegraph.formats.quantization import OWN
from onegraph.formats.rotated import KEEP, RotatedFormat, fits, resolve_rates
from onegraph.formats.weight import WeightFormat
from onegraph.models.load import checkpoint_config
from onegraph.models.loader import Loader
from onegraph.models.memory import resident
from onegraph.models.wrapper import TextCheckpoint, text_checkpoint
from onegraph.quant.result import EMBED, HEAD
from onegraph.quant.sensitivity import Costs

NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # of a block or an expert


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What `quantize` would make of a model, and what that costs on a device.

    Args:
        source: the path, or org/name@commit of the hub. matched: the linears of each pattern of `layers`. rates: the
            patterns that `quantize` goes by, those for `experts` among them, and rates that were chosen. own: whether
            our own decoder runs it, `why` not; positions: that it has; expert_inputs: of each stack of experts.
        linears: how many linears are quantized, each expert's two counted. left: layers that stay as they are, and why.
        before, after: sizes on disk, `after` exact.
        seconds: an estimate, on a CPU from a second of probes. memory: bytes on the device; process: what Python and
            torch have there already; rounding: of `memory` all but for the model that writes text.
        disk: bytes of OUT and of finished blocks beside it. hessians: what they add where there is room to keep them.
        notes: what one should know of the choices, a line each. chosen: whether rates are, within a budget.
        weights: how many are rounded to each rate of a calibrated format.
        recipe, calibration, tokens: None for a format that is not calibrated; calibration is "bundled", "self" or
            "text". extended: whether the model goes on with the text up to so many tokens. text: tokens of each source,
            about where the model has no tokenizer yet; empty before they are drawn. text_lines: that in words, and
            whether it is enough.
    """

    source: str
    device: str
    format: str
    bits: float
    recipe: str | None
    calibration: str | None
    tokens: int | None
    extended: bool
    matched: Mapping[str, list[str]]
    linears: int
    left: Mapping[str, str]
    rates: Mapping[str, int]
    own: bool
    why: str
    positions: int
    expert_inputs: Mapping[str, int]
    before: Size
    after: Size
    seconds: float
    memory: int
    rounding: int
    disk: int
    hessians: int
    notes: list[str]
    chosen: bool = False
    text: Mapping[str, int] = field(default_factory=dict)
    text_lines: list[str] = field(default_factory=list)
    weights: Mapping[int, int] = field(default_factory=dict)
    process: int = 0

    @property
    def left_lines(self) -> list[str]:
        """A line for each kind of layer that is left as it is, with why: numbers of blocks and experts as *."""
        kinds: dict[tuple[str, str], int] = {}
        for name, why in self.left.items():
            key = NUMBER.sub("*", name), why
            kinds[key] = kinds.get(key, 0) + 1
        return [f"left as it is: {name} ({count} of them): {why}" for (name, why), count in kinds.items()]

    def __str__(self) -> str:
        """In a line: what is done, and what it costs."""
        weights = f"{human_count(self.before.linear_parameters)} weights in {self.linears} linears"
        how = f"{self.format}, {self.bits:.3g} bits{'' if float(self.bits).is_integer() else ' on average'}"
        if self.recipe is not None:
            text = {"self": "text that the model samples", "bundled": "the bundled corpus", "text": "the text"}
            how += f", recipe {self.recipe}, at most {self.tokens} tokens of {text[str(self.calibration)]}"
            how += " and of what the model writes behind it" if self.extended else ""
        size = f"{self.before.stored} -> {human_bytes(self.after.total_bytes)}"
        time = duration(self.seconds)
        probed = self.device == "cpu" or self.recipe is None  # a GPU's rates of rounding are those of an H200
        time = f"estimated {time} from a probe" if probed else f"{time} on an H200"
        return (
            f"{weights} ({how}) on {self.device}: {size}, {time}, {human_bytes(self.memory + self.process)} of memory, "
            f"{human_bytes(self.disk)} of disk{self._where}"
        )

    @property
    def _where(self) -> str:
        if self.own:
            return ""
        return f"; onegraph's own decoder does not run this ({self.why}): OUT will run in transformers only"

    def as_dict(self) -> dict[str, Any]:
        """As JSON; the linears of a pattern are counted. own: whether onegraph's own decoder runs it, why: if not."""
        told: dict[str, Any] = {}
        told |= {name: getattr(self, name) for name in ("source", "device", "format", "bits", "recipe", "calibration")}
        told |= {"tokens": self.tokens, "extended": self.extended, "linears": self.linears, "chosen": self.chosen}
        told |= {"layers": {pattern: len(names) for pattern, names in self.matched.items()}}
        told |= {"left": dict(self.left), "own": self.own, "why": self.why}
        told |= {"before": self.before.as_dict(), "after": self.after.as_dict()}
        told |= {"seconds": round(self.seconds, 1), "memory": self.memory, "disk": self.disk}
        told |= {"process": self.process}
        return told | {"text": dict(self.text), "text_lines": self.text_lines, "notes": self.notes}


@renamed(source="model", out="output", tokens="num_calibration_tokens", sequence="calibration_seq_len",
         extend="self_generate", activations="activation_memory")  # fmt: skip
def plan(model: str | PathLike[str], output: str | PathLike[str] | None = None, **options: Any) -> Plan:
    """What `quantize(model, output, **options)` would do: reads only config.json, headers and a file of text.

    Args:
        model: as for `quantize`; a directory with only config.json is enough, and only that is fetched from the hub.
        output: checked as `quantize` checks it, if given.
        options: those of `quantize`.

    Raises ValueError for what `quantize` would refuse before it begins.
    """
    choices = choose(**options)
    text = sources(choices.calibration, min(choices.sequence, choices.tokens)) if choices.format in OWN else []
    located = locate(model, weights=False, option="model")
    with text_checkpoint(described(located.path)) as checkpoint:
        _, found, line = settle(choices, partial(build_plan, checkpoint, located.name))
        found = replace(found, notes=[*([line] if line else []), *found.notes])
        if output is not None:
            check_resources(found, Path(output))
        return _with_text(found, checkpoint, choices, text) if text else found


def _with_text(found: Plan, checkpoint: Checkpoint, choices: Choices, text: Sequence[Source]) -> Plan:
    """The plan with the tokens of each source, counted where the model's tokenizer is there."""
    if checkpoint.sidecar("tokenizer.json") is None:
        counts, notes = estimated(text, choices.tokens), ["calibration: estimated; the model has no tokenizer.json yet"]
    else:
        drawn = draw(Tokenizer(checkpoint), text, choices.tokens)
        counts, notes = dict(drawn.counts), drawn.notes
    wanted, count = TOKENS[choices.recipe], sum(counts.values())
    warning = None if choices.extend else shortage(choices.calibration, count, choices.tokens, wanted)
    return replace(found, text=counts, text_lines=[told(counts), *notes, *([warning] if warning else [])])


def build_plan(checkpoint: Checkpoint, name: str, choices: Choices) -> Plan:
    """The plan for an open checkpoint; where rates are to be chosen, as if all weights mattered alike, which is right
    in size. Raises ValueError for what cannot be quantized as asked."""
    if choices.format == "nvfp4":
        found = _survey_nvfp4(checkpoint, name, choices)
    elif choices.budget is not None:
        found = allotted(checkpoint, name, choices, None)[0]
    else:
        found = _survey_own(checkpoint, name, choices, outline(checkpoint))
    rest = checkpoint.rest_bytes if isinstance(checkpoint, TextCheckpoint) else 0
    if found.own:  # draft layers, which sizes leave out
        unread = checkpoint_config(checkpoint).parts.ignored
        rest += sum(checkpoint.info(name).nbytes for name in checkpoint.names if unread(name))
    return replace(found, disk=found.disk + rest)


def allotted(checkpoint: Checkpoint, name: str, choices: Choices, costs: Costs | None) -> tuple[Plan, Choices, Chosen]:
    """The plan with the rates that the budget of `choices` buys, the choices with these in place, and what is known of
    them. costs: measured; None: as if all weights mattered alike. Raises ValueError, as `build_plan` does."""
    found = outline(checkpoint)
    layers = budget_layers(checkpoint, choices, found)
    measured, rest = costs is not None, 0
    costs = layers.alike() if costs is None else costs
    if layers.budget.size is not None:  # what is stored besides the parts, exactly: of the smallest model there is
        least = layers.least(costs)
        whole = _survey_own(checkpoint, name, with_rates(choices, layers, least.rates), found)
        rest = 8 * whole.after.total_bytes - least.cost
    chosen = layers.choose(costs, rest)
    decided = with_rates(choices, layers, chosen.rates)
    plan = _survey_own(checkpoint, name, decided, found, 0 if measured else len(costs))
    bits = chosen.bits if layers.budget.bits is None else layers.budget.bits
    return replace(plan, bits=round(bits, 3), chosen=True), decided, chosen


def budget_layers(checkpoint: Checkpoint, choices: Choices, found: Outline | None = None) -> Layers:
    """The layers of a checkpoint as the budget of `choices` sees them."""
    found = outline(checkpoint) if found is None else found
    assert choices.budget is not None
    budget, recipe_options = choices.budget, choices.recipe_options
    if not found.own:
        _refuse_foreign(choices, found.why)
        budget = replace(budget, ends=frozenset())
    patterns = with_experts(choices, found).layers
    return Layers.of(
        found, checkpoint, budget, patterns, {HEAD: recipe_options.lm_head, EMBED: recipe_options.embed_tokens}
    )


def with_rates(choices: Choices, layers: Layers, rates: Mapping[str, int]) -> Choices:
    """The choices with a rate for each layer and end that the budget left open, the most common one as the model's."""
    inside = {name: rate for name, rate in rates.items() if name not in (HEAD, EMBED)}
    common = layers.common(inside)
    ends = {name: None if rate == KEEP else rate for name, rate in rates.items() if name not in inside}
    recipe_options = replace(
        choices.recipe_options,
        bits=common or choices.recipe_options.bits,
        lm_head=ends.get(HEAD, choices.recipe_options.lm_head),
        embed_tokens=ends.get(EMBED, choices.recipe_options.embed_tokens),
    )
    return replace(choices, recipe_options=recipe_options, allotted=inside, budget=None)


def _survey_own(checkpoint: Checkpoint, name: str, choices: Choices, found: Outline, parts: int = 0) -> Plan:
    """parts: how many will be measured before."""
    if not found.own:
        _refuse_foreign(choices, found.why)
    found.check(checkpoint)
    choices, found = with_draft(choices, found)
    choices = with_experts(choices, found)
    shapes = found.shapes
    own = OWN[choices.format].formats
    rates = resolve_rates(choices.rates, shapes, choices.recipe_options.bits, tuple(own))
    formats = {layer: own[rate] for layer in shapes if (rate := rates.get(layer, choices.recipe_options.bits)) != KEEP}
    if not formats:
        raise ValueError(f"{checkpoint.path}: no layer is left to be rounded; {_why_none(found)}")
    _one_rate(found, formats)
    made = _made(checkpoint, formats, rates | dict.fromkeys(found.kept, KEEP), choices, found.layer_of, shapes)
    before, after = (
        (size_of(checkpoint), size_of(made)) if found.own else size_with(checkpoint, made, shapes, found.layer_of)
    )
    work = replace(_work(found, formats, before, after, choices), parts=parts, probed=choices.probed)
    planned = _plan(name, choices, formats, shapes, before, after, work, found, _notes(checkpoint, choices))
    return replace(planned, weights=_weights(checkpoint, choices, formats, shapes))


def _weights(
    checkpoint: Checkpoint, choices: Choices, formats: Mapping[str, RotatedFormat], shapes: Mapping[str, Sequence[int]]
) -> dict[int, int]:
    """Rounded weights by rate, those of the ends with them."""
    rated = [(format.rate, math.prod(shapes[layer])) for layer, format in formats.items()]
    for end, rate in ((HEAD, choices.recipe_options.lm_head), (EMBED, choices.recipe_options.embed_tokens)):
        if rate is not None:
            tensor = f"{end}.weight" if f"{end}.weight" in checkpoint else f"{EMBED}.weight"  # a tied head
            rated.append((rate, math.prod(checkpoint.shape(tensor))))
    return {rate: sum(count for each, count in rated if each == rate) for rate, _ in sorted(rated)}


def _notes(checkpoint: Checkpoint, choices: Choices) -> list[str]:
    """Of a tied pair, one of which alone makes the model larger."""
    rates = {"lm_head": choices.recipe_options.lm_head, "embed_tokens": choices.recipe_options.embed_tokens}
    asked = [name for name, rate in rates.items() if rate is not None]
    if f"{HEAD}.weight" in checkpoint or len(asked) != 1:
        return []
    (other,) = set(rates) - set(asked)
    return [
        f"note: lm_head and embed_tokens are one matrix here, and with {asked[0]} in codes it is stored beside them; "
        f"with {other} in codes too the model is smaller"
    ]


def _refuse_foreign(choices: Choices, why: str) -> None:
    """Raises ValueError for options that only models of our own decoder have."""
    told = f"this model runs in transformers only ({why})"
    ends: dict[str, int | str | None] = {
        "lm_head": choices.recipe_options.lm_head, "embed_tokens": choices.recipe_options.embed_tokens
    }  # fmt: skip
    if choices.budget is not None and choices.budget.size is None:
        ends |= {end.rpartition(".")[2]: "auto" for end in choices.budget.ends}
    for name, bits in ends.items():
        if bits is not None:
            raise ValueError(f"{name}: got {bits}, and {told}, where it stays as it is; leave the option out")
    if choices.sampled:
        what = "self_generate" if choices.extend else "calibration 'self'"
        raise ValueError(f"{what} needs onegraph's own decoder, and {told}; give a text long enough")


def _survey_nvfp4(checkpoint: Checkpoint, name: str, choices: Choices) -> Plan:
    parsed = checkpoint_config(checkpoint)
    if checkpoint.config.get("quantization_config") is not None:
        raise ValueError(f"{checkpoint.path}: is quantized already; give the unquantized model")
    loader = Loader(checkpoint, parsed, torch.float32)
    if loader.parts.stacks:
        stack = next(iter(loader.parts.stacks))
        raise ValueError(f"{stack} and others hold all experts in one tensor, which nvfp4 has no form for; choose e8p")
    shapes: dict[str, tuple[int, ...]] = {each: checkpoint.shape(f"{each}.weight") for each in rounded_layers(loader)}
    kept = resolve_rates(choices.layers, shapes, 4)
    formats: dict[str, WeightFormat] = {each: NVFP4 for each in shapes if each not in kept}
    made = _made(checkpoint, formats, {}, choices, lambda name: name.removesuffix(".weight"), shapes)
    sizes = [(n, k, 4) for n, k in (shapes[each] for each in formats)]
    work = Work(recipe_options=None, search=choices.recipe != "quick", groups=sizes)
    return _plan(name, choices, formats, shapes, size_of(checkpoint), size_of(made), work, None, [])


def _plan(
    name: str, choices: Choices, formats: Mapping[str, WeightFormat], shapes: Mapping[str, tuple[int, ...]],
    before: Size, after: Size, work: Work, found: Outline | None, notes: list[str],
) -> Plan:  # fmt: skip
    calibrated = choices.format in OWN
    seconds, rounding = estimate(work, choices.device)
    memory = max(rounding, sampling_memory(work, choices.device) if work.sampled else 0)
    kept = {layer: "kept: its rate is 16" for layer in shapes if layer not in formats}
    return Plan(
        source=name,
        device=str(choices.device),
        format=choices.format,
        bits=choices.recipe_options.bits,
        recipe=choices.recipe if calibrated else None,
        calibration=kind_of(choices.calibration) if calibrated else None,
        tokens=choices.tokens if calibrated else None,
        extended=choices.extend,
        matched={pattern: [layer for layer in shapes if fits(layer, pattern)] for pattern in choices.layers},
        linears=sum(shapes[layer][0] if len(shapes[layer]) == 3 else 1 for layer in formats),
        left=kept | dict(found.left if found is not None else {}),
        rates=choices.rates,
        own=found is None or found.own,
        why="" if found is None else found.why,
        positions=0 if found is None else found.positions,
        expert_inputs={layer: shape[2] for layer, shape in shapes.items() if len(shape) == 3},
        before=before,
        after=after,
        seconds=seconds,
        memory=memory,
        rounding=rounding,
        process=resident() if choices.device.type == "cpu" else 0,
        disk=after.total_bytes + (after.linear_bytes + work.spilled + work.factors if calibrated else 0),
        hessians=work.hessians if calibrated and choices.recipe_options.inputs == "reference" else 0,
        notes=notes,
    )


def with_experts(choices: Choices, found: Outline) -> Choices:
    """The choices with a rate for experts, in front of what `layers` says: the one asked for; else those that the
    checkpoint has in MXFP4 stay so. Raises ValueError where there are none to have one."""
    stacks = {
        prefix + name: name for prefix, names in found.blocks.items() for name, shape in names.items() if shape[2:]
    }
    if choices.experts is not None and not stacks:
        raise ValueError(f"experts: got {choices.experts}, and this model has no routed experts")
    rate = KEEP if choices.experts is None and found.published else choices.experts
    if rate is None:
        return choices
    asked = dict(choices.layers)  # a pattern of its own keeps its place there: the last match wins
    patterns = {pattern: rate for local in stacks.values() if (pattern := f"*.{local}") not in asked}
    return replace(choices, recipe_options=replace(choices.recipe_options, layers=patterns | asked))


def with_draft(choices: Choices, found: Outline) -> tuple[Choices, Outline]:
    """The choices with a rate for the draft layer, in front of what `layers` says, and the outline with that layer,
    where it is to be rounded. Raises ValueError where there is none."""
    if choices.draft_layers is None:
        return choices, found
    if not found.draft:
        raise ValueError(f"draft_layers: got {choices.draft_layers}, and this checkpoint has no draft layer")
    patterns = {f"{root}*": choices.draft_layers for root in found.draft} | dict(choices.layers)
    choices = replace(choices, recipe_options=replace(choices.recipe_options, layers=patterns))
    return choices, replace(found, blocks={**found.blocks, **found.draft})


def _why_none(found: Outline) -> str:
    whys = dict.fromkeys(found.left.values())
    return "; ".join(whys) if whys and not found.shapes else "the rates by pattern keep all of them"


def _one_rate(found: Outline, formats: Mapping[str, WeightFormat]) -> None:
    """Raises ValueError where the two matrices of a layer's experts have two rates."""
    for prefix, names in found.blocks.items():
        stacks = [prefix + name for name, shape in names.items() if len(shape) == 3]
        for first, second in zip(stacks[::2], stacks[1::2], strict=True):
            if formats.get(first) is not formats.get(second):
                raise ValueError(f"{first} and {second} have two rates; experts of a layer must have one")


def rounded_layers(loader: Loader) -> list[str]:
    """The checkpoint's names of the linears that may be rounded to NVFP4: all whose inputs come in its groups, but the
    head and those that never are."""
    kept = {loader.parts.head, *loader.parts.steady}
    return [
        loader.stored[f"{name}.weight"].removesuffix(".weight")
        for name, (_, k, _) in loader.parts.linears.items()
        if name not in kept and k % NVFP4.group == 0 and f"{name}.weight" in loader
    ]


def _made(
    checkpoint: Checkpoint,
    formats: Mapping[str, WeightFormat],
    rates: Mapping[str, int],
    choices: Choices,
    layer_of: Callable[[str], str | None],
    shapes: Mapping[str, tuple[int, ...]],
) -> Checkpoint:
    """The table of tensors that `quantize` would write; there is no file behind it."""
    recipe, own = choices.recipe_options, choices.format in OWN
    formats = dict(formats)
    config = nvfp4_config(checkpoint, formats)
    if own:
        written = OWN[choices.format]
        told = written(bits=recipe.bits, layers=rates, lm_head=recipe.lm_head, embed_tokens=recipe.embed_tokens)
        config, ends = told.to_dict(), {HEAD: recipe.lm_head, EMBED: recipe.embed_tokens}
        formats |= {layer: written.formats[rate] for layer, rate in ends.items() if rate is not None}
    tensors: dict[str, TensorInfo] = {}
    made = set[str]()

    def put(layer: str, shape: tuple[int, ...]) -> None:
        *lead, n, k = shape
        try:
            layout = formats[layer].layout(n, k)
        except ValueError as error:
            local = ".".join(layer.split(".")[-2:])
            raise ValueError(f"{layer}: {error}; keep it with the rate 16 for '*{local}'") from None
        files = formats[layer].names((), layer)
        found = {files[key]: ((*lead, *shape), dtype) for key, (shape, dtype) in layout.items()}
        tensors.update({name: table_entry(checkpoint.path, *what) for name, what in found.items()})

    for name in checkpoint.names:
        owner, _, kind = name.rpartition(".")
        info = checkpoint.info(name)
        layer = layer_of(f"{owner}.weight" if kind == "bias" else name)
        if layer not in formats:
            tensors[name] = table_entry(checkpoint.path, info.shape, info.dtype)
        elif kind == "bias":
            tensors[f"{layer}.bias"] = table_entry(checkpoint.path, info.shape, torch.float32 if own else info.dtype)
        elif layer not in made:  # a stack of experts has many tensors
            made.add(layer)
            put(layer, shapes.get(layer, info.shape))
    if f"{HEAD}.weight" not in checkpoint and HEAD in formats:
        put(HEAD, checkpoint.shape(f"{EMBED}.weight"))
    elif f"{HEAD}.weight" not in checkpoint and EMBED in formats:
        info = checkpoint.info(f"{EMBED}.weight")
        tensors[f"{HEAD}.weight"] = table_entry(checkpoint.path, info.shape, info.dtype)
    return Checkpoint(checkpoint.path, checkpoint.config | {"quantization_config": config}, tensors)


def nvfp4_config(checkpoint: Checkpoint, chosen: Collection[str]) -> dict[str, Any]:
    """The quantization_config of a checkpoint whose linears `chosen` become NVFP4."""
    wide = [name.removesuffix(".weight") for name in checkpoint.names if len(checkpoint.shape(name)) == 2]
    return written_config({*wide, HEAD} - set(chosen))


def _work(found: Outline, formats: Mapping[str, WeightFormat], before: Size, after: Size, choices: Choices) -> Work:
    groups: dict[tuple[str, str, int], tuple[int, int, int]] = {}
    experts, linears = [], []
    for prefix, names in found.blocks.items():
        for name, shape in names.items():
            format = formats.get(prefix + name)
            if not isinstance(format, RotatedFormat):
                continue
            *lead, n, k = shape
            if lead:
                experts += [(n, k, format.rate)] * lead[0]
            else:  # siblings share an input, and nearly always a parent and its number of inputs
                key = prefix + name.rpartition(".")[0], "o_proj" * name.endswith("o_proj"), k
                groups[key] = groups.get(key, (0, 0, 0))[0] + n, k, format.rate
                linears.append((n, k, format.rate))
    return Work(
        recipe_options=choices.recipe_options,
        groups=list(groups.values()),
        linears=linears,
        experts=experts,
        routed=sum(len(shape) == 3 for names in found.blocks.values() for shape in names.values()) // 2,
        block=found.weights,
        blocks=len(found.blocks),
        hidden=found.hidden,
        carried=found.carried,
        inner=found.inner,
        vocab=found.vocab,
        tokens=choices.tokens,
        sequence=min(choices.sequence, choices.tokens, found.positions),
        sampled=choices.sampled,
        parameters=before.parameters,
        cached=found.cached,
        written=after.total_bytes,
        activations=choices.held,
    )
