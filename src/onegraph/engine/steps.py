"""The steps that an engine runs, and the graphs that are made of them.

The capture contract holds for `Steps.step` and `Steps.round`: everything that they change lies on the device and is
advanced there. Each is a function of its input buffers (`engine/inputs.py`) and of what outlives it: the cache, what
changes logits, and what drafts.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor

from onegraph.engine.choice import Choice, ChoiceState, draw, row_slices
from onegraph.engine.decoder import AuxHiddenStates, Cache, Decoder, SplitAttention
from onegraph.engine.draft import Pass, Rows, TargetOutputs, view
from onegraph.engine.exact_window import Sizes
from onegraph.engine.inputs import batch_sizes, row_inputs
from onegraph.engine.per_token import PerTokenDecoder
from onegraph.engine.rounds import RoundState, draw_each
from onegraph.nn.lora import Adapters, adapted
from onegraph.ops.calls import NAN_TOKEN
from onegraph.ops.draft import accept_drafts, begin_round
from onegraph.ops.invariant import batch_invariant
from onegraph.ops.step import begin_step, finish_step
from onegraph.runtime.graph import GraphPool, Runner


class Steps:
    """Of one rank.

    Args:
        rounds: what decode steps that check drafts keep; None where they read a token of each row. counts: drafts that
            they may read. chunk: tokens of a prefill step. split: capture around attention. invariant: what a decode
            step computes of a token does not depend on the tokens and rows in the same step.

    Attributes:
        choices: made when a row first needs penalties, a constraint or log-probabilities.
        decoder: what decode steps run: the model, or a form of it.
        width: pages of a row that attention reads; length: tokens of a prefill step. Fixed where steps are captured.
    """

    def __init__(
        self,
        model: Decoder,
        cache: Cache,
        sizes: Sizes,
        rounds: RoundState | None = None,
        counts: Sequence[int] = (0,),
        *,
        chunk: int,
        split: bool,
        invariant: bool = False,
    ) -> None:
        self.model, self.cache, self.sizes, self.rounds, self.counts = model, cache, sizes, rounds, counts
        self.chunk, self.split = chunk, split
        on_cpu = model.devices[0].type == "cpu"
        self.invariant = invariant and not on_cpu
        self.decoder = cast(Decoder, PerTokenDecoder(model)) if invariant and on_cpu else model
        self.adapters: Adapters | None = getattr(model, "adapters", None)
        self.choices: ChoiceState | None = None
        self.width, self.length = sizes.per_row, chunk

    def build(self, decoding: bool, choice: Choice, exact: bool, pools: Sequence[GraphPool]) -> dict[int, list[Runner]]:
        """Stages of a step, by count of drafts, for exact rows or for others; all counts at once, because they share
        their inputs. These are zeros: no row has a sequence, so that warm-up touches nothing but the sentinel page."""
        stages = range(len(self.model.devices))
        inputs = [self.inputs(stage, decoding, choice) for stage in stages]
        return {
            count: [
                Runner(
                    self.of(stage, decoding, choice, count, exact),
                    inputs[stage] | self._carried(stage, decoding, count),
                    batch_sizes(self.sizes.rows) if decoding else None,
                    capture=bool(pools),
                    pool=pools[stage] if pools else None,
                    split="attention" if self.split else (),
                )
                for stage in stages
            ]
            for count in self._drafts(decoding, choice)
        }

    @torch.no_grad()
    def run_once(self, decoding: bool, choice: Choice, exact: bool) -> None:
        """Runs a step as `build` will, each of its forms once, eagerly and on inputs that are its own."""
        for stage, count in product(range(len(self.model.devices)), self._drafts(decoding, choice)):
            inputs = self.inputs(stage, decoding, choice) | self._carried(stage, decoding, count)
            for rows in reversed(batch_sizes(self.sizes.rows)) if decoding else (None,):
                views = inputs if rows is None else {name: tensor[:rows] for name, tensor in inputs.items()}
                self.of(stage, decoding, choice, count, exact)(**views)

    def _drafts(self, decoding: bool, choice: Choice) -> Sequence[int]:
        """How many drafts steps read: the most first, into whose memory the others fit."""
        rounds = decoding and self.rounds is not None and not choice.shaping
        return sorted(self.counts, reverse=True) if rounds else (0,)

    def of(self, stage: int, decoding: bool, choice: Choice, drafts: int, exact: bool = False) -> Callable[..., Tensor]:
        """A step as a function of its inputs."""
        if decoding and self.rounds is not None:
            return partial(self.round, stage, choice, drafts, exact=exact)
        return partial(self.step, stage, choice, exact=exact)

    def inputs(self, stage: int, decoding: bool, choice: Choice) -> dict[str, Tensor]:
        """The static buffers of one stage's step, but for what the stage before hands on."""
        device = self.model.devices[stage]
        rows, adapted = self.sizes.rows if decoding else 1, self.adapters is not None
        inputs = row_inputs(rows, self.sizes.per_row, choice, device, adapted=adapted)
        if decoding:
            inputs["drawn"] = torch.zeros(self.sizes.rows, dtype=torch.int64, device=device)
        else:
            inputs["tokens"] = torch.zeros(1, self.chunk, dtype=torch.int64, device=device)
            if choice.prompt:
                inputs["following"] = torch.zeros_like(inputs["tokens"])
        return inputs

    def _carried(self, stage: int, decoding: bool, drafts: int) -> dict[str, Tensor]:
        """What the stage before hands on, of all tokens of a step."""
        if not stage:
            return {}
        rows, length = (self.sizes.rows, 1 + drafts) if decoding else (1, self.chunk)
        shape, device = self.model.stream_shape(rows, length), self.model.devices[stage]
        return {"stream": torch.zeros(shape, dtype=self.model.dtype, device=device)}

    # What graphs hold.

    def step(
        self, stage: int, choice: Choice, positions: Tensor, limits: Tensor, table: Tensor, exact: bool = False,
        **inputs: Tensor,
    ) -> Tensor:  # fmt: skip
        """One stage's part of a step: what the next stage takes, or from the last what the host reads, int64 [B].

        Decoding reads each row's last token (`drawn`, int64 [B]) and puts the next one in its place; prefill reads up
        to `chunk` tokens of a prompt (`tokens`, [1, chunk]) and draws the one behind them, BROKEN where any of them
        met a NaN: the last one's logits need not, which a window may keep from seeing it. With `choice.prompt` it tells
        how likely `following`, [1, chunk], are, each behind its token; and then of the drawn one.
        """
        decoding = "drawn" in inputs
        tokens = inputs["drawn"].unsqueeze(1) if decoding else inputs["tokens"][:, : self.length]
        # Padding rows and rows at their end have 0 tokens to read, and stay where they are.
        counts, after = begin_step(positions, limits, tokens.shape[1])
        table, slots = table[:, : self.width], inputs["slots"]
        model, taps = self.decoder if decoding else self.model, self._taps()
        with batch_invariant(self.invariant and decoding):
            stream = inputs["stream"] if stage else model.enter(tokens)
            with adapted(self.adapters, inputs.get("adapters")):
                stream = self._run(model, stage, stream, tokens, table, positions, counts, slots, exact, taps)
            if stage < len(model.devices) - 1:
                positions.copy_(after)
                carried: Tensor = stream
                return carried
            hidden = model.leave(stream)
            if choice.prompt:
                self._score(model, hidden[0], inputs["following"][0, : self.length])
            new, logits = self._draw(model, hidden, counts, after, inputs, choice)
        if self.rounds is not None:
            made = None
            if taps is not None:
                following = self.rounds.following(slots, positions, tokens.shape[1], new)
                made = TargetOutputs(stream=stream, hidden=taps, following=following)
            table = table[:, : self.sizes.coded]
            self.rounds.drafter.read(
                Pass(tokens=tokens, positions=positions, counts=counts, table=table, slots=slots, made=made)
            )
        last = inputs["drawn"] if decoding else torch.empty_like(new)
        report: Tensor = finish_step(new, logits, after, last, positions)
        return report if decoding else report.masked_fill(_broken(hidden, counts), NAN_TOKEN)

    def round(
        self, stage: int, choice: Choice, drafts: int, positions: Tensor, limits: Tensor, table: Tensor,
        exact: bool = False, **inputs: Tensor,
    ) -> Tensor:  # fmt: skip
        """One stage's part of a decode step that reads each row's last token and up to `drafts` drafts behind it, keeps
        those that are right, and drafts anew: what the next stage takes, or from the last what the host reads, int64
        [B, drafts + 2]: new tokens, then how many drafts wait."""
        assert self.rounds is not None
        drawn, slots, table = inputs["drawn"], inputs["slots"], table[:, : self.width]
        waiting = self.rounds.waiting[stage]
        tokens, counts, places = begin_round(positions, limits, slots, drawn, *waiting, drafts + 1)
        model, taps = self.decoder, self._taps()
        with batch_invariant(self.invariant):
            stream = inputs["stream"] if stage else model.enter(tokens)
            with adapted(self.adapters, inputs.get("adapters")):
                stream = self._run(model, stage, stream, tokens, table, positions, counts, slots, exact, taps)
            if stage < len(model.devices) - 1:
                carried: Tensor = stream
                return carried
            hidden = model.leave(stream)
            if drafts:
                logits = model.logits(hidden.flatten(0, 1))
                new = draw_each(logits, places, inputs, sampling=choice.sampling)
                if choice.logprobs:
                    assert self.choices is not None
                    self.choices.tell(logits, new.view(-1))
            else:
                first, logits = self._draw(model, hidden, counts, places.view(-1), inputs, choice)
                new = first.unsqueeze(1)
        state, drafter, table = self.rounds.state, self.rounds.drafter, table[:, : self.sizes.coded]
        report, taken = accept_drafts(new, logits, tokens, counts, slots, drawn, positions, state.history)
        read = None
        if taps is not None:
            made = TargetOutputs(stream=stream, hidden=taps, following=new)
            read = Pass(
                tokens=tokens, positions=positions - taken, counts=taken, table=table, slots=slots, made=made
            )  # fmt: skip
        rows = Rows(
            positions=positions, drawn=drawn, table=table, inputs=inputs | {"limits": limits},
            sampling=choice.sampling, count=drafts if drafter.steady else state.count, read=read,
        )  # fmt: skip
        return torch.cat((report, drafter.draft(rows).unsqueeze(1)), dim=1)

    def _taps(self) -> AuxHiddenStates | None:
        """Where the model puts the hidden states that the drafter reads; None where it reads none."""
        layers = None if self.rounds is None else self.rounds.drafter.layers
        return None if layers is None else dict.fromkeys(layers)

    def _run(
        self, model: Decoder, stage: int, stream: Any, tokens: Tensor, table: Tensor, positions: Tensor, counts: Tensor,
        slots: Tensor, exact: bool, taps: AuxHiddenStates | None,
    ) -> Any:  # fmt: skip
        cache = SplitAttention(self.seen(stage, positions, counts, table, slots, exact))
        if not taps:
            return model.run(stage, stream, tokens, cache)
        return model.run(stage, stream, tokens, cache, taps)

    def seen(
        self, stage: int, positions: Tensor, counts: Tensor, table: Tensor, slots: Tensor, exact: bool = False
    ) -> Any:
        """A stage's part of the cache, as exact rows or others see it."""
        if (window := self.sizes.exact_window).tokens:
            table = table[:, : window.pages(window.tokens) if exact else self.sizes.coded]
        part = view(self.cache.parts[stage], positions, counts, table, slots)
        return part.exactly() if exact else part

    def _draw(
        self, model: Decoder, hidden: Tensor, counts: Tensor, after: Tensor, inputs: dict[str, Tensor], choice: Choice
    ) -> tuple[Tensor, Tensor]:
        """From hidden states [B, Q, D]: the token behind each row's last one, and the model's logits there."""
        if hidden.shape[1] == 1:
            hidden = hidden.squeeze(1)
        else:
            last = (counts.long() - 1).clamp(min=0)
            hidden = hidden.gather(1, last.view(-1, 1, 1).expand(-1, 1, hidden.shape[2])).squeeze(1)
        logits = model.logits(hidden)
        if self.choices is None or not (choice.shaping or choice.logprobs):
            return draw(logits, after, inputs, sampling=choice.sampling), logits
        at = self.length if choice.prompt else 0
        return self.choices.choose(logits, counts, after, inputs, choice, at), logits

    def _score(self, model: Decoder, hidden: Tensor, following: Tensor) -> None:
        """Tell the log-probabilities of tokens int64 [Q] behind hidden states [Q, D], with few logits at a time."""
        assert self.choices is not None
        for rows in row_slices(len(hidden), self.model.config.vocab_size):
            self.choices.tell(model.logits(hidden[rows]), following[rows], rows.start)


def _broken(hidden: Tensor, counts: Tensor) -> Tensor:
    """Of hidden states [B, Q, D]: rows in which one of the first `counts` tokens has a NaN, bool [B]. What a layer
    writes to the cache comes from a token's own residual stream, which never loses a NaN."""
    real = torch.arange(hidden.shape[1], dtype=counts.dtype, device=hidden.device) < counts.unsqueeze(1)
    return (hidden.isnan().any(dim=2) & real).any(dim=1)
