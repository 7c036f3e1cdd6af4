"""What a caller asks of one sequence, and what the engine tells about a run; both plain data."""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to continue one prompt.

    Args:
        max_tokens: generate at most this many.
        temperature: 0 takes the likeliest token; otherwise logits are divided by it.
        top_k: draw among the k likeliest, 0 for all. top_p: draw among the likeliest that reach this mass, 1 for all.
        seed: the same seed, prompt and model give the same tokens, in any batch; None draws a seed.
        stop: token ids that end the sequence; the one that did is the last of the result.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: Sequence[int] = ()

    def __post_init__(self) -> None:
        def require(name: str, fine: bool, allowed: str) -> None:
            if not fine:
                raise ValueError(f"{name}: got {getattr(self, name)!r}; allowed is {allowed}")

        for name in ("max_tokens", "top_k"):
            require(name, _is_index(getattr(self, name)), "a whole number")
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            require(name, isinstance(value, int | float) and math.isfinite(value), "a finite number")
        require("max_tokens", self.max_tokens >= 1, "1 or more")
        require(
            "temperature", self.temperature == 0 or 1e-3 <= self.temperature <= 1e3, "0 for greedy, or 0.001 to 1000"
        )
        require("top_k", 0 <= self.top_k < 2**31, "0 for off, or a count of tokens")
        require("top_p", 0 < self.top_p <= 1, "above 0, up to 1 for off")
        require(
            "seed", self.seed is None or (_is_index(self.seed) and -(2**63) <= self.seed < 2**63), "a 64-bit integer"
        )
        require("stop", all(_is_index(token) and token >= 0 for token in self.stop), "a list of token ids")


def _is_index(value: object) -> bool:
    try:
        operator.index(value)  # type: ignore[arg-type]  # whether it is one is asked
    except TypeError:
        return False
    return True


@dataclass(kw_only=True)
class Stats:
    """What the last `generate` did. Times exclude building graphs, which `build_seconds` holds.

    The first token of a sequence comes out of its prefill, so `decode_tokens` counts the others.
    """

    mode: str
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_steps: int = 0
    decode_seconds: float = 0.0
    build_seconds: float = 0.0

    @property
    def prefill_tokens_per_second(self) -> float:
        return self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0
