"""One prompt on its way through the engine, and the checks that it must pass before anything runs."""

import operator
import secrets
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from torch import Tensor

from onegraph.engine.acceptance import Acceptance
from onegraph.engine.arguments import ArgumentError
from onegraph.engine.choice import Constrain, Constraint, token_logprob
from onegraph.engine.exact_window import Sizes
from onegraph.engine.params import SamplingParams, TokenLogprob
from onegraph.runtime.graph import CaptureError
from onegraph.runtime.offload import Arrival


@dataclass(eq=False)
class Sequence:
    """The host's view of a row: what came in, what was generated, which pages and which slot hold it.

    most: tokens of the output at most. read: tokens of prompt and output that are in the cache. to_prefill: how
    many of them prefill reads, set when the sequence is admitted. arrivals: copies of its beginning from host memory
    that are under way. kept: how many were at its latest snapshot. exact:
    whether a cache in codes holds it exactly, because it is short. digests: of its full pages, as far as they were
    needed. constraint: what may follow. logprobs: of each token of the output, where they are asked for;
    prompt_logprobs likewise, of the prompt's tokens from the second on, and one list for all answers to a prompt.
    drafts: how they fare, where somebody drafts.
    cancelled: it ends before the next token. error: why it ended before its time. adapter: its slot of
    `nn.lora.Adapters`, 0 for none.
    """

    index: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    most: int
    pages: list[int] = field(default_factory=list)
    slot: int = 0
    output: list[int] = field(default_factory=list)
    read: int = 0
    to_prefill: int = 0
    arrivals: list[Arrival] = field(default_factory=list)
    kept: int = 0
    exact: bool = False
    digests: list[bytes] = field(default_factory=list)
    constraint: Constraint | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    drafts: Acceptance = field(default_factory=Acceptance)
    cancelled: bool = False
    error: "FloatingPointError | StepError | None" = None
    adapter: int = 0

    @property
    def length(self) -> int:
        """Tokens known so far, of prompt and output."""
        return len(self.prompt) + len(self.output)

    @property
    def scored(self) -> bool:
        """Whether log-probabilities of its prompt are still to be found, which takes reading all of it."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.prompt) - 1

    @property
    def limit(self) -> int:
        """Tokens that ever enter the cache: the last one generated is not read again."""
        return len(self.prompt) + self.most - 1

    @property
    def left(self) -> int:
        return self.most - len(self.output)

    @property
    def done(self) -> bool:
        if self.cancelled or self.error is not None or not self.left:
            return True
        if self.constraint is not None and self.constraint.done:
            return True
        return bool(self.output) and self.output[-1] in self.params.stop

    @property
    def decoding(self) -> bool:
        """Whether prefill is through with it."""
        return bool(self.to_prefill) and self.read >= self.to_prefill

    @property
    def repeating(self) -> bool:
        """Whether the next decode step reads a token that is not the newest: it was preempted, and catches up."""
        return self.read + 1 < self.length

    def tokens(self, start: int, end: int) -> list[int]:
        """Tokens `start` to `end` of prompt and output together."""
        split = len(self.prompt)
        return self.prompt[start:end] + self.output[max(0, start - split) : max(0, end - split)]

    def end(self, count: int) -> None:
        """Whoever takes its tokens wants no more than the first `count` of its output."""
        self.cancelled = True
        del self.output[count:], self.logprobs[count:]
        self.read = min(self.read, self.length)

    def take(self, token: int) -> None:
        """A token was drawn for it."""
        self.output.append(token)
        if self.constraint is not None:
            self.constraint.take(token)

    def score(self, start: int, told: Tensor) -> None:
        """Prefill told of the tokens from `start` + 1 on, as far as they are the prompt's and were not known."""
        wanted = self.params.prompt_logprobs
        assert wanted is not None
        known = len(self.prompt_logprobs)
        for place, row in enumerate(told[known - start : len(self.prompt) - 1 - start].tolist(), start=known + 1):
            self.prompt_logprobs.append(token_logprob(row, self.prompt[place], wanted))


class StepError(CaptureError):
    """A step could not be built. sequence: the one that needs it; the others run without."""

    def __init__(self, message: str, sequence: Sequence) -> None:
        super().__init__(message)
        self.sequence = sequence


def make_sequences(
    prompts: Seq[Seq[int]],
    params: SamplingParams | Seq[SamplingParams] | None,
    *,
    vocabulary: int,
    sizes: Sizes,
    constrain: Constrain | None = None,
    adapters: Mapping[str, int] | None = None,
) -> list[Sequence]:
    """A `Sequence` for each prompt; raises ArgumentError (got / allowed / what to do) for the first that cannot run."""
    if params is None or isinstance(params, SamplingParams):
        params = [params or SamplingParams()] * len(prompts)
    if len(params) != len(prompts):
        raise ValueError(f"params: got {len(params)} for {len(prompts)} prompts; give one for each, or one for all")
    sequences: list[Sequence] = []
    for index, (prompt, wanted) in enumerate(zip(prompts, params, strict=True)):
        seed = secrets.randbits(63) if wanted.seed is None else wanted.seed
        tokens = _tokens(index, prompt, vocabulary)
        sequence = Sequence(index, tokens, wanted, seed, wanted.most(sizes.context - len(tokens)))
        sequence.adapter = _slot(wanted.adapter, adapters or {})
        if sequences and _scored_alike(sequences[-1], sequence):  # answers to one prompt, which is scored once
            sequence.prompt_logprobs = sequences[-1].prompt_logprobs
        _check_size(sequence, sizes)
        _check_text(sequence, constrain)
        _check_biases(sequence, vocabulary)
        if constrain is not None and wanted.constrained:
            sequence.constraint = constrain(wanted)
        sequences.append(sequence)
    return sequences


def _scored_alike(one: Sequence, other: Sequence) -> bool:
    scores = [each.params.prompt_logprobs for each in (one, other)]
    return None not in scores and scores[0] == scores[1] and one.adapter == other.adapter and one.prompt == other.prompt


def _slot(name: str | None, adapters: Mapping[str, int]) -> int:
    if name is not None and name not in adapters:
        allowed = f"allowed are {', '.join(adapters)}" if adapters else "the model is loaded without adapters"
        raise ArgumentError("adapter", f"adapter: got {name!r}; {allowed}, and None for none")
    return 0 if name is None else adapters[name]


def _tokens(index: int, prompt: Seq[int], vocabulary: int) -> list[int]:
    tokens = []
    for at, token in enumerate(prompt):
        try:
            tokens.append(operator.index(token))
        except TypeError:
            raise ArgumentError(
                "prompt", f"prompt {index}: got {token!r} at {at}; allowed are token ids, whole numbers"
            ) from None
        if not 0 <= tokens[-1] < vocabulary:
            raise ArgumentError(
                "prompt",
                f"prompt {index}: got token {token} at {at}; the model's vocabulary is 0 to {vocabulary - 1}: use the "
                "model's own tokenizer",
            )
    if not tokens:
        raise ArgumentError(
            "prompt", f"prompt {index}: got no tokens; a prompt needs one or more, e.g. the begin-of-text token"
        )
    return tokens


def _check_text(sequence: Sequence, constrain: Constrain | None) -> None:
    """What needs a tokenizer, or several sequences, is for who has them."""
    wanted = sequence.params
    if wanted.n != 1:
        raise ArgumentError("n", f"n: got {wanted.n}; allowed is 1: the engine continues each prompt once, LLM takes n")
    if wanted.stop_texts:
        raise ArgumentError(
            "stop", f"stop: got {wanted.stop_texts[0]!r}; allowed are token ids: the engine has no text, LLM does"
        )
    if wanted.constrained and constrain is None:
        raise ValueError("json_schema, regex: got one; the engine has no tokenizer: use LLM, or set its `constrain`")


def _check_biases(sequence: Sequence, vocabulary: int) -> None:
    for token in sequence.params.logit_bias or ():
        if token >= vocabulary:
            raise ArgumentError(
                "logit_bias", f"logit_bias: got token {token}; the model's vocabulary is 0 to {vocabulary - 1}"
            )
    if sequence.params.min_tokens > sequence.most:
        raise ArgumentError(
            "min_tokens", f"min_tokens: got {sequence.params.min_tokens}; the answer has {sequence.most} tokens at most"
        )


def _check_size(sequence: Sequence, sizes: Sizes) -> None:
    max_context, length, asked = sizes.context, len(sequence.prompt), sequence.params.max_tokens
    if length + sequence.most > max_context:
        room = max_context - length
        cure = f"set max_tokens to {room} or less" if room > 0 else "shorten the prompt"
        found = (
            f"got {length} tokens, which leave none for an answer"
            if asked is None
            else f"{length} tokens and max_tokens {asked} make {length + asked}"
        )
        raise ArgumentError(
            "prompt",
            f"prompt {sequence.index}: {found}; the context is {max_context}: {cure}, or load the model with a larger "
            "max_model_len",
        )
    pages = sizes.needed(sequence.limit)
    if pages > sizes.pages - 1:
        raise ArgumentError(
            "prompt",
            f"prompt {sequence.index}: {sequence.limit} tokens need {pages} pages of {sizes.page_size}; the cache "
            f"has {sizes.pages - 1} besides the sentinel: make the engine with pages={pages + 1} or more",
        )
