"""The options of `quantize`: which are allowed, and what stands for those that are left open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from onegraph.api.cost import spill_bound
from onegraph.api.device import pick_device
from onegraph.formats.e8p import BITS, KEEP
from onegraph.quant.recipe import Recipe

RECIPES = {"cpu": "quick", "cuda": "good"}  # where none is asked for
TOKENS = {"cpu": 8192, "cuda": 16384}  # likewise; of a text, as many as it has


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The options of `quantize`, checked, with what was left open filled in for the device."""

    device: torch.device
    format: str
    recipe: str
    levers: Recipe
    calibration: str | Path
    tokens: int
    sequence: int
    experts: int | None
    activations: int | None

    @property
    def held(self) -> int:
        """Bytes of activations that may lie in memory."""
        return spill_bound(self.device) if self.activations is None else self.activations

    @property
    def layers(self) -> Mapping[str, int]:
        return self.levers.layers


def choose(
    *,
    bits: int = 4,
    format: str = "e8p",
    recipe: str | None = None,
    calibration: str | Path = "bundled",
    tokens: int | None = None,
    sequence: int = 512,
    layers: Mapping[str, int] | None = None,
    lm_head: int | None = None,
    embed_tokens: int | None = None,
    experts: int | None = None,
    expert_prior: float | None = None,
    seed: int = 0,
    activations: int | None = None,
    device: str | torch.device = "auto",
) -> Choices:
    """Raises ValueError for an option that is not allowed; the rest is in `quantize`."""
    target = pick_device(device)
    ends = lm_head or embed_tokens or experts
    if format == "nvfp4" and (bits != 4 or ends or any(r != KEEP for r in (layers or {}).values())):
        raise ValueError(
            "nvfp4 has one rate and keeps both ends: it takes no other bits, no lm_head, embed_tokens or experts, and "
            "layers may only keep a linear ({pattern: 16})"
        )
    if experts not in (None, *BITS, KEEP):
        raise ValueError(f"experts: got {experts!r}; allowed are 2, 3, 4, and 16 to keep them as they are")
    if activations is not None and activations < 0:
        raise ValueError(f"activations: got {activations!r}; it is a number of bytes")
    if format not in ("e8p", "nvfp4"):
        raise ValueError(f"format: got {format!r}; allowed are 'e8p' and 'nvfp4'")
    for name, value in (("tokens", tokens), ("sequence", sequence)):
        if not (type(value) is int and value >= 1) and not (name == "tokens" and value is None):
            raise ValueError(f"{name}: got {value!r}; allowed is a count of 1 and more")
    recipe = recipe or (RECIPES[target.type] if format == "e8p" else "good")
    rates: dict[str, Any] = {"bits": bits, "lm_head": lm_head, "embed_tokens": embed_tokens, "seed": seed}
    rates |= {} if expert_prior is None else {"expert_prior": expert_prior}
    return Choices(
        device=target,
        format=format,
        recipe=recipe,
        levers=Recipe.preset(recipe, layers=dict(layers or {}), **rates),
        calibration=calibration,
        tokens=tokens or TOKENS[target.type],
        sequence=sequence,
        experts=experts,
        activations=activations,
    )


def kind_of(calibration: str | Path) -> str:
    """ "self", "bundled" or "text"."""
    return str(calibration) if calibration in ("self", "bundled") else "text"
