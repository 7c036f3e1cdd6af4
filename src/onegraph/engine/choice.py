"""How a step chooses its tokens: which of its parts the rows need, the state behind them, and the host's share.

A step of which no row asks for penalties, a bias, a constraint or log-probabilities has none of this state. Counts of
tokens, biases and masks belong to slots, which a sequence keeps while rows move; the host writes them when a sequence
begins, the step counts from there.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from itertools import product
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from onegraph.engine.params import MAX_BIASES, MAX_LOGPROBS, SamplingParams, TokenLogprob
from onegraph.ops.sampling import greedy, sample
from onegraph.ops.shaping import OUTPUT, PROMPT, adjust_logits, mask_words, min_p
from onegraph.runtime.transfer import Download, Upload


class Constraint(Protocol):
    """What decides, from the tokens so far, which may follow."""

    problem: str
    """Why it ended before its time, empty where it did not."""

    @property
    def done(self) -> bool:
        """Whether nothing may follow."""

    def fill(self, allowed: Tensor) -> None:
        """Write the tokens that may follow: a bit each, the lowest first, into int32 [ceil(V / 32)] on the host."""

    def take(self, token: int) -> None:
        """A token was drawn."""


Constrain = Callable[[SamplingParams], Constraint]
LOGITS_AT_ONCE = 1 << 24  # numbers: 64 MB in float32
ALWAYS = 2**31 - 1  # a position that no sequence reaches


def row_slices(rows: int, vocabulary: int) -> Iterator[slice]:
    """Parts of `rows` whose logits are LOGITS_AT_ONCE numbers at most, one row at the least."""
    step = max(1, LOGITS_AT_ONCE // vocabulary)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


class Choice(NamedTuple):
    """The parts of a step's end: draw or take the likeliest, change logits before, draw with min-p, tell
    log-probabilities of what is drawn, and of what the prompt itself has behind each token that a prefill step reads.
    """

    sampling: bool = False
    shaping: bool = False
    min_p: bool = False
    logprobs: bool = False
    prompt: bool = False

    @classmethod
    def of(cls, params: Iterable[SamplingParams]) -> "Choice":
        """What these rows need together. A row's token does not depend on what others need."""
        found = [(p.sampling, p.shaping, p.sampling and bool(p.min_p), p.logprobs is not None) for p in params]
        return cls(*(any(column) for column in zip(*found, strict=True))).settled if found else cls()

    @property
    def settled(self) -> "Choice":
        """One of `CHOICES` that does as much: what changes logits and draws knows min-p, so that graphs are fewer."""
        return self._replace(min_p=self.sampling and (self.min_p or self.shaping))

    @property
    def words(self) -> str:
        """What it does besides drawing, for a message; empty where it does no more."""
        told = "penalties, a bias or a constraint", "min-p", "log-probabilities", "log-probabilities of the prompt"
        return " and ".join(word for word, needed in zip(told, self[1:], strict=True) if needed)


PLAIN = Choice()
SCORING = Choice(*[True] * 5)  # of all prompts that are scored: whatever else a row needs is in it, so it is one graph
CHOICES = tuple(dict.fromkeys(Choice(*parts).settled for parts in product((False, True), repeat=4)))


def row_values(params: Seq[SamplingParams], choice: Choice) -> dict[str, Tensor]:
    """The inputs that a step with `choice` has for each row, [B] each, on the host."""
    params = [p.with_defaults() for p in params]
    values = {
        "temperature": torch.tensor([p.temperature for p in params], dtype=torch.float32),
        "top_k": torch.tensor([p.top_k for p in params], dtype=torch.int32),
        "top_p": torch.tensor([p.top_p for p in params], dtype=torch.float32),
    }
    if choice.min_p:
        values["min_p"] = torch.tensor([p.min_p for p in params], dtype=torch.float32)
    if choice.shaping:
        values |= {
            "repetition": torch.tensor([p.repetition_penalty for p in params], dtype=torch.float32),
            "presence": torch.tensor([p.presence_penalty for p in params], dtype=torch.float32),
            "frequency": torch.tensor([p.frequency_penalty for p in params], dtype=torch.float32),
            "constrained": torch.tensor([p.constrained for p in params], dtype=torch.int32),
            "biased": torch.tensor([p.biased for p in params], dtype=torch.int32),
        }
    return values


def row_buffers(rows: int, choice: Choice, device: torch.device) -> dict[str, Tensor]:
    """The static buffers of `row_values`. A padding row has zeros: it has seen no token that they could change."""
    values = row_values([SamplingParams()] * rows, choice)
    return {name: torch.zeros(rows, dtype=value.dtype, device=device) for name, value in values.items()}


def draw(logits: Tensor, after: Tensor, inputs: Mapping[str, Tensor], *, sampling: bool, own: bool = False) -> Tensor:
    """Tokens int64 [B] from logits [B, V]; `after` int32 [B] are their positions. With min-p where inputs have it. own:
    logits are float32 and nobody reads them again."""
    if not sampling:
        likeliest: Tensor = greedy(logits)
        return likeliest
    if "min_p" in inputs:
        if not own:  # min-p cuts in place
            logits = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        top_p = min_p(logits, *(inputs[name] for name in ("temperature", "top_k", "top_p", "min_p")))
        inputs = {**inputs, "top_p": top_p}
    drawn: Tensor = sample(logits, *(inputs[name] for name in ("temperature", "top_k", "top_p", "seed")), after)
    return drawn


class ChoiceState:
    """What steps keep between them for `Choice`, and its way to and from the host.

    Args:
        slots: of sequences, the one of padding rows included.
        rows: that a step tells of at most: one for each token that a row may draw in it, or that a chunk has and draws.
        depth: steps of a kind under way whose log-probabilities the host has not read.
    """

    def __init__(self, slots: int, rows: int, vocabulary: int, device: torch.device, *, depth: int) -> None:
        self.seen = torch.zeros(slots, vocabulary, dtype=torch.int32, device=device)
        self.allowed = torch.zeros(slots, mask_words(vocabulary), dtype=torch.int32, device=device)
        # Token, what is added to its logit, and from which position on no more; float64 holds all three.
        self.biases = torch.zeros(slots, 3, MAX_BIASES, dtype=torch.float64, device=device)
        self.top = min(MAX_LOGPROBS, vocabulary)
        self.told = torch.zeros(rows, 1 + 2 * self.top, dtype=torch.float64, device=device)
        self._masks = torch.zeros(self.allowed.shape, dtype=torch.int32)  # the host's copy of `allowed`
        self._counts = Upload(torch.zeros(vocabulary, dtype=torch.int32, device=device))
        self._biases = Upload(torch.zeros_like(self.biases[0]))
        self._upload = Upload(self.allowed)
        self._downloads = {kind: Download(self.told, depth) for kind in ("decode", "prefill")}

    # Within a step: the capture contract holds here.

    def choose(
        self, logits: Tensor, counts: Tensor, after: Tensor, inputs: dict[str, Tensor], choice: Choice, at: int = 0
    ) -> Tensor:
        """`draw`, with all that `choice` asks for. counts int32 [B]: tokens that the step reads of each row. at: as
        `tell`."""
        shaped = logits
        if choice.shaping:
            if "drawn" in inputs:  # the token that is read counts, unless the row stands still
                last = inputs["drawn"].masked_fill(counts == 0, -1)
            else:  # the host has counted all of the prompt
                last = torch.full_like(counts, -1, dtype=torch.int64)
            shaped = adjust_logits(
                self._biased(logits, after, inputs["slots"], inputs["biased"]), last, inputs["slots"], self.seen,
                self.allowed, inputs["repetition"], inputs["presence"], inputs["frequency"], inputs["constrained"],
            )  # fmt: skip
        tokens = draw(shaped, after, inputs, sampling=choice.sampling, own=choice.shaping)
        if choice.logprobs:
            self.tell(logits, tokens, at)
        return tokens

    def _biased(self, logits: Tensor, after: Tensor, slots: Tensor, biased: Tensor) -> Tensor:
        """Logits float32 [B, V] with the biases of each row's slot that hold at the position of its next token. Unused
        ones add 0 to token 0, so the order of the sums changes no bit. biased int32 [B]: 0 ignores the slot's."""
        tokens, values, until = self.biases[slots.long()].unbind(1)
        holds = (after.unsqueeze(1) < until) & (biased != 0).unsqueeze(1)
        values = values.masked_fill(~holds, 0.0)
        return logits.float().scatter_add(1, tokens.long(), values.float())

    def tell(self, logits: Tensor, tokens: Tensor, at: int = 0) -> None:
        """Of tokens int64 [B] behind logits [B, V], from row `at` of `told` on: the log-probability, those of the
        likeliest, and their ids, in float64, which holds all three."""
        logits = logits.float()
        drawn = logits.gather(1, tokens.unsqueeze(1))
        values, ids = logits.topk(self.top, dim=1)
        norm = logits.logsumexp(dim=1, keepdim=True)
        self.told[at : at + len(logits)].copy_(torch.cat((drawn - norm, values - norm, ids.double()), dim=1))

    # The host's part, between steps.

    def begin(self, slot: int, prompt: Seq[int], output: Seq[int], params: SamplingParams) -> None:
        """Count what stands before the next token of the sequence in this slot, and write its biases.

        output: those tokens of the answer that prefill reads (again), and no decode step will.
        """
        size = self.seen.shape[1]
        row = OUTPUT * torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=size)
        row[torch.tensor(prompt, dtype=torch.int64)] += PROMPT  # once for each token, however often it is named
        self._counts(row.int())
        self.seen[slot].copy_(self._counts.target)
        if not params.biased:
            return
        biases = [(token, value, ALWAYS) for token, value in (params.logit_bias or {}).items()]
        if params.min_tokens:
            until = len(prompt) + params.min_tokens
            # A tokenizer may end texts with tokens that the model has no logits of.
            biases += [(token, float("-inf"), until) for token in sorted(params.stop_tokens) if token < size]
        table = torch.zeros_like(self._biases.target, device="cpu")
        table[:, : len(biases)] = torch.tensor(biases, dtype=torch.float64).view(-1, 3).T
        self._biases(table)
        self.biases[slot].copy_(self._biases.target)

    def constrain(self, constraints: Mapping[int, Constraint]) -> None:
        """Upload what may follow in each slot that has a constraint; the last token must have been taken."""
        for slot, constraint in constraints.items():
            constraint.fill(self._masks[slot])
        if constraints:
            self._upload(self._masks[: max(constraints) + 1])

    def fetch(self, kind: str, rows: int) -> Callable[[], Tensor]:
        """Begin to copy the first rows of log-probabilities that a step of this kind told, one for each token; what it
        returns waits for them."""
        return self._downloads[kind].start(self.told[:rows])


def token_logprob(told: list[float], token: int, wanted: int) -> TokenLogprob:
    """A row of what `ChoiceState.fetch` gives, with `wanted` of the likeliest."""
    drawn, *rest = told
    values, ids = rest[:wanted], rest[len(rest) // 2 :][:wanted]
    return TokenLogprob(token, drawn, tuple(zip(map(int, ids), values, strict=True)))
