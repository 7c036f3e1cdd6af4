"""What a caller asks of one sequence, and what the engine tells about a run; both plain data."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from onegraph.engine.arguments import ArgumentError, is_index, is_number, require

ANSWER = 256  # tokens of an answer at most, where nobody says how many
MAX_LOGPROBS = 20  # likeliest tokens that may be asked for, as OpenAI's API has it
MAX_BIASES = 512  # tokens of a sequence whose logits are changed by a bias or held back by `min_tokens`
# Fields of SamplingParams that models suggest values for, and what each is without
OFF: Mapping[str, float] = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to continue one prompt.

    Args:
        max_tokens: maximum number of tokens; None for 256, or what the context leaves behind the prompt.
        min_tokens: the token ids of `stop` are not drawn before as many tokens, and stop texts not looked for.
        temperature: divides the logits; 0 selects the most likely token.
        top_k: samples from the k most likely tokens, 0 for all. top_p: samples from the most likely tokens that reach
            this probability mass, 1 for all.
        min_p: draw among those at least this fraction as likely as the likeliest, 0 for all.
        repetition_penalty: logits of tokens that the prompt or the answer has are divided by it where positive, times
            it where negative (transformers'), 1 for off. None in these five: `LLM` and the server use the model's
            defaults, an `Engine` is greedy without a penalty.
        presence_penalty: taken off the logits of tokens that the answer has. frequency_penalty: taken off once for
            each time that it has them. Both OpenAI's: -2 to 2, 0 for off.
        logit_bias: {token id: what is added to its logit, -100 to 100}, before penalties.
        seed: the same seed, prompt and model give the same tokens, in any batch; None draws a seed.
        stop: what ends the sequence, token ids and texts. The id that did is the last of the tokens; a text that did,
            and what follows it, is not in the answer's text.
        n: answers to write; the i-th draws with seed + i, from i = 0 on.
        logprobs: None for none; else the log-probability of each token, and of so many likeliest ones in its place,
            by the model's own logits: before penalties, constraints and temperature (OpenAI's and vLLM's default).
        prompt_logprobs: the same of the prompt's tokens from the second on, which all are read then, whatever prefix
            is in the cache.
        priority: of the sequences that wait, those of the lowest are admitted first.
        json_schema: the answer is JSON that this schema allows (the schema, or its JSON text). regex: the answer
            matches this regular expression. grammar: the answer matches this grammar, in llguidance's dialect of Lark.
            At most one of the three; needs llguidance.
        adapter: name of a LoRA adapter that the model was loaded with; None for the model itself.
        cache_salt: the prompt shares cached prefixes only with prompts of the same salt.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: Sequence[int | str] = ()
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    priority: int = 0
    json_schema: dict[str, object] | str | None = None
    regex: str | None = None
    grammar: str | None = None
    adapter: str | None = None
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        def check(name: str, fine: bool, allowed: str) -> None:
            require(name, getattr(self, name), fine, allowed)

        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        check("top_k", self.top_k is None or is_index(self.top_k), "a whole number")
        check("n", is_index(self.n), "a whole number")
        most = self.max_tokens
        check("max_tokens", most is None or is_index(most), "a whole number, or None for what the context leaves")
        penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        for name in ("temperature", "top_p", "min_p", *penalties):
            fine = is_number(value := getattr(self, name)) or (value is None and name in OFF)
            check(name, fine, "a finite number")
        check("max_tokens", most is None or most >= 1, "1 or more")
        least = self.min_tokens
        check("min_tokens", is_index(least) and 0 <= least <= (most or least), "0 to max_tokens")
        value = self.temperature or 0
        check("temperature", value == 0 or 1e-3 <= value <= 1e3, "0 for greedy, or 0.001 to 1000")
        check("top_k", 0 <= (self.top_k or 0) < 2**31, "0 for off, or a count of tokens")
        check("top_p", self.top_p is None or 0 < self.top_p <= 1, "above 0, up to 1 for off")
        check("min_p", 0 <= (self.min_p or 0) <= 1, "0 for off, up to 1")
        penalty = 1 if self.repetition_penalty is None else self.repetition_penalty
        check("repetition_penalty", 1e-2 <= penalty <= 1e2, "0.01 to 100, 1 for off")
        for name in penalties[1:]:
            check(name, -2 <= getattr(self, name) <= 2, "-2 to 2, 0 for off")
        check("seed", self.seed is None or (is_index(self.seed) and -(2**63) <= self.seed < 2**63), "a 64-bit integer")
        fine = isinstance(self.stop, Sequence | Set) and all(map(_is_stop, self.stop))
        check("stop", fine, "a text, or a list of token ids and texts")
        check("n", 1 <= self.n <= 1024, "1 to 1024")
        for name in ("logprobs", "prompt_logprobs"):
            top = getattr(self, name)
            check(name, top is None or (is_index(top) and 0 <= top <= MAX_LOGPROBS), f"0 to {MAX_LOGPROBS}")
        check("priority", is_index(self.priority) and abs(self.priority) < 2**31, "a 32-bit whole number")
        bias = {} if self.logit_bias is None else self.logit_bias
        fine = isinstance(bias, Mapping) and all(
            is_index(token) and token >= 0 and is_number(value) and -100 <= value <= 100
            for token, value in bias.items()
        )
        check("logit_bias", fine, "a mapping of token ids to numbers from -100 to 100")
        count = len(bias) + (len(self.stop_tokens) if self.min_tokens else 0)
        if count > MAX_BIASES:
            held = ", with those that min_tokens holds back" if self.min_tokens else ""
            raise ArgumentError("logit_bias", f"logit_bias: got {count} tokens{held}; allowed are {MAX_BIASES}")
        check("regex", self.regex is None or isinstance(self.regex, str), "a regular expression")
        check("json_schema", _is_schema(self.json_schema), "a JSON schema: a dict, or its text")
        check("adapter", self.adapter is None or isinstance(self.adapter, str), "the name of an adapter, or None")
        salt = self.cache_salt
        check("cache_salt", salt is None or (isinstance(salt, str) and salt != ""), "a text, or None")
        check("grammar", self.grammar is None or isinstance(self.grammar, str), "a Lark grammar")
        given = [name for name in ("json_schema", "regex", "grammar") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ArgumentError(
                given[1],
                f"{given[1]}: got one beside {given[0]}; allowed is one of json_schema, regex, grammar",
            )
        if self.min_tokens and given:
            what = "a constraint (json_schema, regex, grammar, or tools that must be called)"
            why = "which says where the answer ends; leave one out"
            raise ArgumentError("min_tokens", f"min_tokens: got {least} beside {what}, {why}")

    def most(self, room: int) -> int:
        """Tokens to generate at most, where the context leaves `room` behind the prompt; 1 or more."""
        return max(1, min(ANSWER, room)) if self.max_tokens is None else self.max_tokens

    def with_defaults(self) -> "SamplingParams":
        """As an `Engine` samples where a field is None: greedy, without a penalty."""
        missing: dict[str, Any] = {name: value for name, value in OFF.items() if getattr(self, name) is None}
        return replace(self, **missing)

    @property
    def stop_tokens(self) -> frozenset[int]:
        """The token ids of `stop`."""
        return frozenset(what for what in self.stop if not isinstance(what, str))

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The texts of `stop`."""
        return tuple(what for what in self.stop if isinstance(what, str))

    @property
    def sampling(self) -> bool:
        """Whether a token is drawn, not the likeliest taken."""
        return bool(self.temperature)

    @property
    def constrained(self) -> bool:
        """Whether which token may follow depends on the ones before."""
        return any(each is not None for each in (self.json_schema, self.regex, self.grammar))

    @property
    def biased(self) -> bool:
        """Whether logits of some tokens are changed by what the caller says of them."""
        return bool(self.logit_bias) or self.min_tokens > 0

    @property
    def shaping(self) -> bool:
        """Whether logits are changed ahead of the draw: by penalties, biases, tokens held back, a constraint."""
        off = (self.repetition_penalty or 1, self.presence_penalty, self.frequency_penalty) == (1, 0, 0)
        return not off or self.constrained or self.biased


def _is_schema(value: object) -> bool:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return False
        return isinstance(value, dict | bool)
    return value is None or isinstance(value, dict)


def _is_stop(value: object) -> bool:
    return value != "" if isinstance(value, str) else is_index(value) and value >= 0  # type: ignore[operator]


@dataclass(frozen=True)
class TokenLogprob:
    """How likely a token was where it was drawn: natural logarithms of the model's own probabilities.

    top: (token, log-probability) of the likeliest there, the likeliest first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(kw_only=True)
class Stats:
    """What the last `generate` did. Times exclude building graphs, which `build_seconds` holds.

    The first token of a sequence comes out of its prefill, so `decode_tokens` counts the others. `shared_tokens` were
    found in pages of other sequences and not computed again, `restored_tokens` of them in host memory, to which
    `offloaded_tokens` were copied; `preemptions`: times that a sequence gave up its pages.
    `drafted_tokens` were read as drafts, and `accepted_tokens` of them were right; `drafted_at` and `accepted_at` count
    them by their place in the round, the first first.
    """

    mode: str
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_steps: int = 0
    decode_seconds: float = 0.0
    build_seconds: float = 0.0
    shared_tokens: int = 0
    restored_tokens: int = 0
    offloaded_tokens: int = 0
    preemptions: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    drafted_at: Counter[int] = field(default_factory=Counter)
    accepted_at: Counter[int] = field(default_factory=Counter)

    @property
    def prefill_tokens_per_second(self) -> float:
        return self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0
