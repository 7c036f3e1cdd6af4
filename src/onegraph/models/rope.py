"""Rotary position tables: default, linear, llama3, YaRN and proportional scaling, from either form of config.json.

Computed in float32 step by step as transformers does, since that is how the models were trained: at position 10⁵ the
float32 rounding of position * frequency is itself 3e-3 rad.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onegraph.models.fields import number

TYPES = ("default", "linear", "llama3", "yarn", "proportional")
_KEYS = {
    "default": {"factor"},  # some configs carry a factor that the default type does not read
    "linear": {"factor"},
    "proportional": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
}
_REQUIRED = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary embedding of a model. `original` is the context length that the model was first trained at.

    `score_factor` multiplies the scores of latent attention: the square of YaRN's mscale for all dimensions.
    `query_beta`: queries are scaled by their position too (`query_factors`). `sections`, `interleaved_sections`: pairs
    that turn with the time, height and width of an image; in a text the three are one position, and change nothing.
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original: int = 0
    low_freq: float = 1.0
    high_freq: float = 4.0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    partial: float = 1.0
    score_factor: float = 1.0
    query_beta: float = 0.0
    sections: tuple[int, ...] = ()
    interleaved_sections: bool = False

    @classmethod
    def from_dict(
        cls,
        config: Mapping[str, Any],
        *,
        default_theta: float,
        max_positions: int,
        partial: float | None = None,
        query_scaling: bool = False,
        mrope: bool = False,
    ) -> "Rope":
        """From the whole config.json: `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling`.

        partial: the part of each head that rotates where the config does not say; None: all of it, and whatever else
        the config says is refused. query_scaling, mrope: the family has `query_beta`, or `sections`.

        Raises ValueError on a type or key that is not known, and on numbers that make no sense.
        """
        parameters: dict[str, Any] = {}
        where = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
        given = config.get(where)
        if given is not None:
            if not isinstance(given, Mapping):
                raise ValueError(f"{where} is {given!r}; it must be an object or null")
            parameters = dict(given)
        named = [parameters.pop(key, None) for key in ("rope_type", "type")]
        kind = next((each for each in named if each is not None), "default")
        more: dict[str, Any] = {}
        if mrope:
            kind = "default" if kind == "mrope" else kind
            more = _sections(parameters.pop("mrope_section", None), parameters.pop("mrope_interleaved", None), where)
        if query_scaling and kind == "yarn":
            beta = parameters.pop("llama_4_scaling_beta", None)
            name = f"{where}.llama_4_scaling_beta"
            more["query_beta"] = 0.0 if beta is None else number(beta, name, low=0.0, high=1e3)
            parameters.pop("max_position_embeddings", None)  # what the top of the config says
        if not isinstance(kind, str) or kind not in TYPES:
            raise ValueError(
                f"{where} has the rope type {kind!r}, which is not supported; supported: {', '.join(TYPES)}"
            )
        inside = parameters.get("partial_rotary_factor")
        partial = 1.0 if kind == "proportional" and partial is None else partial
        if partial is None and inside not in (None, 1, 1.0):
            raise ValueError(f"{where}.partial_rotary_factor is {inside!r}; only full rotary embeddings are supported")

        def once(key: str, default: float) -> Any:
            """What is said at the top of the config, among the parameters, or alike in both."""
            given, above = parameters.pop(key, None), config.get(key)
            if given is not None and above is not None and given != above:
                raise ValueError(f"{key} is {above!r} and {where}.{key} is {given!r}; they must agree")
            found = above if given is None else given
            return default if found is None else found

        theta = number(once("rope_theta", default_theta), "rope_theta", low=1.0, high=1e12)
        part = 1.0 if partial is None else once("partial_rotary_factor", partial)
        part = number(part, "partial_rotary_factor", low=0.01, high=1.0)
        parameters.pop("partial_rotary_factor", None)
        parameters = {key: value for key, value in parameters.items() if value is not None}
        if unknown := sorted(set(map(str, parameters)) - _KEYS[kind]):
            raise ValueError(
                f"{where} has {', '.join(unknown)}, which rope type {kind!r} does not know here; "
                f"known: {', '.join(sorted(_KEYS[kind]))}"
            )
        for key in _REQUIRED.get(kind, ()):
            if key not in parameters:
                raise ValueError(f"{where} of type {kind!r} has no {key}")
        if kind == "default":
            return cls(theta=theta, partial=part, **more)

        def value(key: str, default: float, low: float, high: float) -> float:
            return number(parameters.get(key, default), f"{where}.{key}", low=low, high=high)

        # transformers: an original length beside rope_scaling, at the top of the config, comes first
        original = config.get("original_max_position_embeddings")
        original = parameters.get("original_max_position_embeddings", max_positions) if original is None else original
        if type(original) is not int or not 1 <= original <= 2**24:
            raise ValueError(f"{where}.original_max_position_embeddings is {original!r}; it must be an integer from 1")
        factor = value("factor", max(1.0, max_positions / original), 1.0, 1e6)
        if kind == "proportional":
            return cls(kind=kind, theta=theta, factor=value("factor", 1.0, 1.0, 1e6), partial=part, **more)
        if kind == "linear":
            return cls(kind=kind, theta=theta, factor=factor, partial=part, **more)
        if kind == "llama3":
            low, high = value("low_freq_factor", 1.0, 1e-6, 1e6), value("high_freq_factor", 4.0, 1e-6, 1e6)
            if not low < high:
                raise ValueError(f"{where}: low_freq_factor {low} must be below high_freq_factor {high}")
            return cls(
                kind=kind, theta=theta, factor=factor, original=original, low_freq=low, high_freq=high, partial=part,
                **more,
            )  # fmt: skip
        fast, slow = value("beta_fast", 32.0, 1e-6, 1e6), value("beta_slow", 1.0, 1e-6, 1e6)
        if slow > fast:
            raise ValueError(f"{where}: beta_slow {slow} must be at most beta_fast {fast}")
        if theta <= 1.0:
            raise ValueError(f"rope_theta is {theta}; YaRN takes its logarithm, so it must be above 1")
        truncate = parameters.get("truncate", True)
        if not isinstance(truncate, bool):
            raise ValueError(f"{where}.truncate is {truncate!r}; it must be true or false")
        scale, scale_all = value("mscale", 0.0, 0.0, 1e3), value("mscale_all_dim", 0.0, 0.0, 1e3)
        inferred = _mscale(factor, scale) / _mscale(factor, scale_all) if scale and scale_all else _mscale(factor, 1.0)
        return cls(
            kind=kind,
            theta=theta,
            factor=factor,
            original=original,
            attention_factor=value("attention_factor", inferred, 1e-3, 1e3),
            beta_fast=fast,
            beta_slow=slow,
            truncate=truncate,
            partial=part,
            score_factor=_mscale(factor, scale_all) ** 2 if scale_all else 1.0,
            **more,
        )

    def frequencies(self, dim: int) -> Tensor:
        """Angle per position of each pair of coordinates, float32 [dim / 2]."""
        plain = 1.0 / self.theta ** (torch.arange(0, dim, 2).float() / dim)
        if self.kind == "linear":
            return plain / self.factor
        if self.kind == "proportional":  # Gemma 4: the first pairs of the whole head turn, each half a head apart
            return plain.masked_fill(torch.arange(dim // 2) >= int(self.partial * dim // 2), 0.0) / self.factor
        if self.kind == "llama3":
            # Llama 3.1: wavelengths beyond original / low_freq are stretched, those below original / high_freq kept.
            turns = self.original / (2 * math.pi / plain)
            smooth = ((turns - self.low_freq) / (self.high_freq - self.low_freq)).clamp(0, 1)
            return (1 - smooth) * plain / self.factor + smooth * plain
        if self.kind == "yarn":
            # YaRN (Peng et al., arXiv 2309.00071, section 3.2): interpolate slow pairs, keep fast ones, ramp between.
            low, high = self._yarn_dim(dim, self.beta_fast), self._yarn_dim(dim, self.beta_slow)
            if self.truncate:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, dim - 1)
            high = high + 0.001 if low == high else high
            keep = 1 - ((torch.arange(dim // 2).float() - low) / (high - low)).clamp(0, 1)
            return plain / self.factor * (1 - keep) + plain * keep
        return plain

    def _yarn_dim(self, dim: int, turns: float) -> float:
        """The coordinate that makes `turns` full turns over the original context."""
        return dim * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

    def turned(self, dim: int) -> int:
        """How many of the coordinates of a head rotate, the first ones. Raises ValueError where they are no pairs."""
        size = dim if self.kind == "proportional" else int(dim * self.partial)
        if size < 2 or size % 2:
            raise ValueError(f"partial_rotary_factor {self.partial} of head_dim {dim} is {size}; it must be even")
        if self.sections and sum(self.sections) != size // 2:
            raise ValueError(f"mrope_section {list(self.sections)} adds up to {sum(self.sections)}, not to {size // 2}")
        return size

    def tables(self, dim: int, positions: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """cos and sin for heads of `dim`, float32 [positions, turned / 2] each, with YaRN's attention factor multiplied
        in."""
        angle = torch.outer(torch.arange(positions).float(), self.frequencies(self.turned(dim)))
        return (angle.cos() * self.attention_factor).to(device), (angle.sin() * self.attention_factor).to(device)

    def query_factors(self, positions: int, device: torch.device | str = "cpu") -> Tensor | None:
        """What a query is multiplied by at each position, 1 + beta ln(1 + floor(position / original)), float32
        [positions]; None where that is 1 at all of them."""
        if not self.query_beta or positions <= self.original:
            return None
        steps = torch.floor(torch.arange(positions) / self.original)
        return (1 + self.query_beta * torch.log(1 + steps)).to(device)


def _sections(given: object, interleaved: object, where: str) -> dict[str, Any]:
    sections = [] if given is None else given
    if not isinstance(sections, list) or not all(type(size) is int and size >= 0 for size in sections):
        raise ValueError(f"{where}.mrope_section is {given!r}; it must list numbers of pairs")
    if not isinstance(interleaved, bool | None):
        raise ValueError(f"{where}.mrope_interleaved is {interleaved!r}; it must be true or false")
    return {"sections": tuple(sections), "interleaved_sections": bool(interleaved)}


def _mscale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
