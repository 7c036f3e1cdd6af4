"""The options of `quantize`: which are allowed, and what stands for those that are left open."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from onegraph.api.budget import Budget
from onegraph.api.calibration import Calibration, check
from onegraph.api.cost import spill_bound
from onegraph.api.device import pick_device
from onegraph.engine.arguments import is_index, is_number, require, require_flag
from onegraph.formats.quantization import OWN
from onegraph.formats.rotated import KEEP
from onegraph.quant.recipe import Recipe
from onegraph.quant.result import EMBED, HEAD

RECIPES = {"cpu": "quick", "cuda": "good"}  # where none is asked for
TOKENS = {"quick": 24_576, "good": 196_608, "best": 196_608}  # of calibration: all of the corpus
PROBED = {"cpu": 2048, "cuda": 4096}  # tokens that a layer's cost is measured on, where rates are chosen

AUTO = "auto"  # a format that is chosen by what the others would lose and take (`api/auto.py`)
PREFER = ("quality", "speed")

End = int | Literal["auto"] | None  # rate of the head or the embedding: "auto" is to be chosen, 16 and None keep it


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The options of `quantize`, checked, with what was left open filled in for the device.

    draft_layers: rate of the draft layer, None to keep it. extend: whether the model goes on with a text that is too
    short. budget: what rates are to be chosen within, None where each is given. allotted: rates by layer that were
    chosen so. either: where the format is to be chosen, the choices with each of those that the options suit; refused:
    why they do not suit the others; prefer: what counts.
    """

    device: torch.device
    format: str
    recipe: str
    recipe_options: Recipe
    calibration: Calibration
    tokens: int
    sequence: int
    extend: bool
    experts: int | None
    draft_layers: int | None
    activations: int | None
    budget: Budget | None = None
    allotted: Mapping[str, int] = field(default_factory=dict)
    either: tuple[Choices, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    prefer: Literal["quality", "speed"] = "quality"

    @property
    def sampled(self) -> bool:
        """Whether the model writes text to calibrate on."""
        return self.extend or self.calibration == "self"

    @property
    def probed(self) -> int:
        """Tokens that KL is taken on where rates are chosen."""
        return min(PROBED[self.device.type], self.tokens)

    @property
    def held(self) -> int:
        """Bytes of activations that may lie in memory."""
        return spill_bound(self.device) if self.activations is None else self.activations

    @property
    def layers(self) -> Mapping[str, int]:
        """Rates by pattern, as the user gave them."""
        return self.recipe_options.layers

    @property
    def rates(self) -> dict[str, int]:
        """Rates by name and pattern, in the order that they are gone by: the last match wins."""
        return dict(self.allotted) | dict(self.layers)


def choose(*, format: str = "e8p", prefer: str | None = None, **options: Any) -> Choices:
    """Raises ValueError for an option that is not allowed; the rest is in `quantize`."""
    formats = *OWN, "nvfp4", AUTO
    if format not in formats:
        allowed = f"{', '.join(map(repr, formats[:-1]))} and {AUTO!r}"
        raise ValueError(f"format: got {format!r}; allowed are {allowed}")
    require("prefer", prefer, prefer in (None, *PREFER), "'quality', 'speed', or None for quality")
    if format != AUTO:
        if prefer is not None:
            raise ValueError(
                f"prefer: got {prefer!r} with the format {format!r}; it is for format {AUTO!r}: leave it out"
            )
        return _choose(format, **options)
    found, refused = list[Choices](), dict[str, str]()
    for each in OWN:
        try:
            found.append(_choose(each, **options))
        except ValueError as error:
            refused[each], last = str(error), error
    if not found:
        raise last
    return replace(found[0], either=tuple(found), refused=refused, prefer="speed" if prefer == "speed" else "quality")


def _choose(
    format: str,
    *,
    bits: float | None = None,
    size: int | None = None,
    recipe: str | None = None,
    calibration: Calibration = "bundled",
    num_calibration_tokens: int | None = None,
    calibration_seq_len: int = 512,
    self_generate: bool | None = None,
    layers: Mapping[str, int] | None = None,
    lm_head: End = None,
    embed_tokens: End = None,
    experts: int | None = None,
    draft_layers: int | None = None,
    expert_prior: float | None = None,
    per_linear: bool = False,
    seed: int = 0,
    activation_memory: int | None = None,
    device: str | torch.device = "auto",
) -> Choices:
    coded = tuple(OWN[format].formats) if format in OWN else (2, 3, 4)
    rates, told = (*coded, KEEP), ", ".join(map(str, coded))
    fine = isinstance(layers, Mapping | None) and all(isinstance(pattern, str) for pattern in layers or ())
    require("layers", layers, fine, "a mapping of pattern to bits, such as {'*.down_proj': 4}, or None")
    for name, end in (("lm_head", lm_head), ("embed_tokens", embed_tokens)):
        fine = end in (None, "auto") or (is_index(end) and end in rates)
        require(name, end, fine, f"{told}, {KEEP} to keep it, or 'auto'")
    require("recipe", recipe, isinstance(recipe, str | None), "the name of a recipe, or None for the device's")
    check(calibration)
    require_flag("self_generate", self_generate, none="False")
    require_flag("per_linear", per_linear)
    require("expert_prior", expert_prior, expert_prior is None or is_number(expert_prior), "a number, or None")
    require("seed", seed, is_index(seed), "a whole number")
    fine = activation_memory is None or (is_index(activation_memory) and activation_memory >= 0)
    require("activation_memory", activation_memory, fine, "a number of bytes, or None for an eighth of what is free")
    target = pick_device(device)
    ends = lm_head or embed_tokens or experts
    if format == "nvfp4" and (
        bits not in (None, 4) or size is not None or ends or any(r != KEEP for r in (layers or {}).values())
    ):
        raise ValueError(
            "nvfp4 has one rate and keeps both ends: it takes no other bits, no size, lm_head, embed_tokens or "
            "experts, and layers may only keep a linear ({pattern: 16})"
        )
    if experts not in (None, *rates):
        raise ValueError(f"experts: got {experts!r}; allowed are {told}, and 16 to keep them as they are")
    if draft_layers not in (None, KEEP) and (format == "nvfp4" or draft_layers not in rates):
        allowed = "is 16" if format == "nvfp4" else f"are {told}, and 16"
        raise ValueError(f"draft_layers: got {draft_layers!r}; allowed {allowed} to keep them as they are")
    if self_generate and (format == "nvfp4" or calibration == "self"):
        why = "nvfp4 reads no text" if format == "nvfp4" else "with calibration 'self' the model writes all of it"
        raise ValueError(f"self_generate lets the model continue a short text, and {why}; leave it out")
    lengths = {"num_calibration_tokens": num_calibration_tokens, "calibration_seq_len": calibration_seq_len}
    for name, value in lengths.items():
        if not (type(value) is int and value >= 1) and not (name == "num_calibration_tokens" and value is None):
            raise ValueError(f"{name}: got {value!r}; allowed is a count of 1 and more")
    recipe = recipe or (RECIPES[target.type] if format in OWN else "good")
    if bits is not None and size is not None:
        raise ValueError(f"bits and size: got {bits!r} and {size!r}, which are two budgets; give one of them")
    bits = 4 if bits is None else bits
    if per_linear and format == "nvfp4":
        raise ValueError("per_linear: got True, and nvfp4 has one rate; leave it out")
    budget = _budget(format, bits, size, coded, {HEAD: lm_head, EMBED: embed_tokens}, per_linear)
    recipe_options: dict[str, Any] = {"format": format} if format in OWN else {}
    recipe_options |= {"bits": bits if budget is None else int(bits), "seed": seed}
    recipe_options |= {"lm_head": _kept(lm_head), "embed_tokens": _kept(embed_tokens)}
    recipe_options |= {} if expert_prior is None else {"expert_prior": expert_prior}
    return Choices(
        device=target,
        format=format,
        recipe=recipe,
        recipe_options=Recipe.preset(recipe, layers=dict(layers or {}), **recipe_options),
        calibration=calibration,
        tokens=num_calibration_tokens or TOKENS[recipe],
        sequence=calibration_seq_len,
        extend=bool(self_generate),
        experts=experts,
        draft_layers=_kept(draft_layers),
        activations=activation_memory,
        budget=budget,
    )


def _budget(
    format: str, bits: float, size: int | None, rates: tuple[int, ...], ends: Mapping[str, End], per_linear: bool
) -> Budget | None:
    """What rates are to be chosen within; None where `bits` is the rate of all. Of a size both ends are part, unless
    the user has set their rates."""
    low, high = rates[0], rates[-1]
    if isinstance(bits, bool) or not isinstance(bits, int | float) or not (math.isfinite(bits) and low <= bits <= high):
        more = [(min(own.formats), max(own.formats), name) for name, own in OWN.items() if max(own.formats) > high]
        told = "".join(f", and from {least} to {most} with format {name!r}" for least, most, name in more)
        raise ValueError(f"bits: got {bits!r}; allowed is a number from {low} to {high}{told}")
    auto = frozenset(end for end, rate in ends.items() if rate == "auto")
    if size is None:
        chosen = auto or per_linear or bits != int(bits)
        return Budget(format=format, bits=bits, ends=auto, per_linear=per_linear) if chosen else None
    if type(size) is not int or size < 1:
        raise ValueError(f"size: got {size!r}; it is a number of bytes")
    ends_too = auto | {end for end, rate in ends.items() if rate is None}
    return Budget(format=format, size=size, ends=ends_too, per_linear=per_linear)


def _kept(rate: End) -> int | None:
    """The rate of an end as a recipe has it."""
    return rate if isinstance(rate, int) and rate != KEEP else None
