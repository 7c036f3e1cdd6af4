"""Where a model meets a graph: prompts in, tokens out, the decode step one replay.

Everything that a step changes lives on the device and is advanced inside the step, so replays chain without host work:
position and last token of each row, and by `limits` also when a row is to stand still. The host decides only which
sequence sits in which row (`engine/schedule.py`), and writes the rows anew when that changes.
"""

from collections.abc import Callable, Generator
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, closing
from functools import partial
from time import perf_counter
from typing import Literal

import torch
from torch import Tensor

from onegraph.engine.alone import check_invariant
from onegraph.engine.choice import Choice, ChoiceState, Constrain
from onegraph.engine.decoder import Cache, Model
from onegraph.engine.draft import MOST, MakeDrafter
from onegraph.engine.inputs import block_table, host_rows
from onegraph.engine.pages import PageAllocator
from onegraph.engine.params import SamplingParams, Stats
from onegraph.engine.schedule import Scheduler
from onegraph.engine.sequence import Sequence, make_sequences
from onegraph.engine.short import sizes_of
from onegraph.engine.speculate import At, DraftTokens, Speculation
from onegraph.engine.steps import Steps
from onegraph.engine.together import Runners, Together
from onegraph.formats.turboquant import TurboQuantConfig, parse_kv
from onegraph.runtime.beside import Beside
from onegraph.runtime.graph import GraphPool
from onegraph.runtime.pipeline import Pipeline, check_links
from onegraph.runtime.transfer import Download

ENCODED = 8  # rows that turn into codes in one call, which holds their keys and values once more
Tokens = list[tuple[int, int]]  # (prompt's number, token), of a step
Report = tuple[Callable[[], Tensor], Callable[[], Tensor] | None]  # what waits for a step's tokens, log-probabilities


class Engine:
    """Generates from a model with a paged KV cache and one graph for each device and batch-size bucket.

    A step is a pipeline of the model's stages. Every device keeps its own positions, limits and block tables and
    advances them itself; what travels is the stream from each stage to the next, and the drawn tokens from the last to
    all others. Of a model on ranks beside one another each runs every step on its share, and draws the same tokens from
    the same bits; the first one's are read.

    Args:
        model: see `Model`.
        max_batch: sequences that decode at once; further prompts wait for a free row.
        max_context: tokens of a sequence, prompt and continuation (default: the model's, at most 4096).
        page_size: tokens in a page of the cache (default: the model's `page_size`, or of codes what
            `engine.short.page_size_of` says).
        pages: pages of the cache, one of them the sentinel (default: enough for max_batch full sequences, and for some
            that are exact while short, of a cache in codes: `engine.short.sizes_of`).
        chunk: prompt tokens that one prefill step takes.
        kv: how keys and values are stored: None in the model's dtype, else a setting of
            `onegraph.formats.turboquant` or its text ("turboquant:4").
        draft: who drafts tokens for rounds that check several at once (`engine/draft.py`): what makes the drafter of
            each rank, or one that makes all of them; None for nobody. draft_tokens: how many a round checks, or "auto"
            for as many as pay.
        capture: True captures, False runs eagerly, "split" captures around attention (not of ranks), None captures
            where the model is on a GPU.
        batch_invariant: what a decode step computes of a token is the same, bit by bit, whatever rows and drafts are
            beside it. For dense models of the Llama kind on one device with an exact cache; others are a ValueError.

    A batch gives each prompt the tokens that it would get alone: with `batch_invariant` exactly, else up to the last
    bit of the matrix products (a GEMM of another batch size may round a near-tie the other way), and but for a cache in
    codes, whose rows are exact while the whole batch is short (`engine/short.py`). Draws never depend on the batch.

    Attributes:
        kv: how keys and values are stored, with the layers that the model keeps exact of its own accord.
        short: until when sequences are exact, of a cache in codes.

    Not thread-safe: one `generate`, `stream` or `Scheduler` at a time. Raises ValueError where a peer link between
    devices is missing; a device that fails while running comes out as a DeviceError that names it, a rank that waits
    for another in vain as a PeerError.
    """

    def __init__(
        self,
        model: Model,
        *,
        max_batch: int = 8,
        max_context: int | None = None,
        page_size: int | None = None,
        pages: int | None = None,
        chunk: int = 256,
        kv: TurboQuantConfig | str | None = None,
        draft: MakeDrafter | Seq[MakeDrafter] | None = None,
        draft_tokens: DraftTokens = "auto",
        capture: bool | Literal["split"] | None = None,
        batch_invariant: bool = False,
    ):
        self.model = model
        self.devices = model.devices
        for rank in model.beside:
            check_links(rank.devices)
        self.max_context = min(model.max_context, 4096) if max_context is None else max_context
        for name, value in (("max_batch", max_batch), ("page_size", page_size), ("chunk", chunk)):
            if value is not None and value < 1:
                raise ValueError(f"{name}: got {value}; allowed is 1 and more")
        if not 1 <= self.max_context <= model.max_context:
            raise ValueError(
                f"max_context: got {max_context}; the model was loaded for 1 to {model.max_context} tokens"
            )
        if capture not in (None, True, False, "split"):
            raise ValueError(f"capture: got {capture!r}; allowed are True, False, 'split' and None for automatic")
        if capture == "split" and len(model.beside) > 1:
            raise ValueError("capture: got 'split' for a model on several ranks; allowed are True, False and None")
        self.max_batch, self.chunk, self.batch_invariant = max_batch, chunk, batch_invariant
        captured = self.devices[0].type == "cuda" if capture is None else bool(capture)
        self.mode = "split" if capture == "split" else "captured" if captured else "eager"
        pools = [[GraphPool(device) for device in rank.devices] for rank in model.beside] if captured else []
        self.ahead = 1 if captured else 0  # steps launched before the tokens of one are read

        kv = parse_kv(kv) if isinstance(kv, str) else kv
        sizes = sizes_of(model, kv, rows=max_batch, context=self.max_context, page_size=page_size, pages=pages)
        page_size, total, self._per_row, self.short = sizes.page_size, sizes.pages, sizes.per_row, sizes.short
        self._speculation = None
        if draft is not None:
            self._speculation = Speculation.of(
                model.beside, draft, draft_tokens, context=self.max_context, rows=max_batch, pages=total,
                page_size=page_size, pages_per_row=sizes.coded, kv=kv,
            )  # fmt: skip
        ranks = []
        for i, rank in enumerate(model.beside):
            cache = rank.new_cache(
                rows=max_batch, pages=total, page_size=page_size, pages_per_row=self._per_row, kv=kv,
                spare=0 if draft is None else MOST,
            )  # fmt: skip
            if batch_invariant:
                check_invariant(model, cache)
            rounds = None if self._speculation is None else self._speculation.ranks[i]
            counts = (0,) if self._speculation is None else self._speculation.counts
            ranks.append(
                Steps(
                    rank, cache, rounds, counts, rows=max_batch, per_row=self._per_row, chunk=chunk,
                    split=self.mode == "split", invariant=batch_invariant, coded=sizes.coded, short=self.short,
                )
            )  # fmt: skip
        self.kv = cache.setting
        self._together = Together(ranks, pools, model.peers, self._soil)
        self._allocator = PageAllocator(total, page_size, self.short)
        self._slots = list(range(max_batch, 0, -1))  # of state that does not grow; slot 0 belongs to nobody
        self._runners: dict[tuple[str, Choice, bool], Runners] = {}  # of a step, by count of drafts
        self._loaded: tuple[Runners, At, Choice, list[Sequence]]  # of the decode step
        self.constrain: Constrain | None = None  # who makes a row's constraint; that takes a tokenizer
        self._downloads: dict[tuple[str, int], Download] = {}  # by the kind of a step, and how much it says of a row
        # What a step on a CPU need not look at, where the reference reads all that it may: see `_trim`.
        whole = all(len(rank.devices) == 1 for rank in model.beside)
        self._trims = not captured and whole and self.devices[0].type == "cpu"
        self._busy = False
        self.soiled = False  # a NaN may lie in the cache, or ranks have parted: the next Scheduler clears it
        self.stats = Stats(mode=self.mode)

    def generate(
        self,
        prompts: Seq[Seq[int]],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        on_token: Callable[[int, int], object] | None = None,
    ) -> list[list[int]]:
        """Continue each prompt (a list of token ids) and return the new tokens of each.

        Args:
            params: for all prompts, or one for each.
            on_token: called as on_token(prompt's number, token) as soon as the host has it; True ends that prompt.

        Raises ValueError for what cannot run (before anything does), FloatingPointError where the model gives NaN.
        """
        return [sequence.output for sequence in self.complete(prompts, params, on_token)]

    def complete(
        self,
        prompts: Seq[Seq[int]],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        on_token: Callable[[int, int], object] | None = None,
        on_done: Callable[[Sequence], object] | None = None,
    ) -> list[Sequence]:
        """`generate`, but all that is known of each: output, seed, log-probabilities.

        on_done: called with each as soon as it is done, behind the step's calls of `on_token`.
        """
        sequences = self._sequences(prompts, params)
        told, left = [0] * len(sequences), dict(enumerate(sequences))
        with self.running(), closing(self._run(sequences)) as steps:
            for tokens in steps:
                if on_token is not None:
                    for index, token in tokens:
                        if not sequences[index].cancelled:
                            told[index] += 1
                            if on_token(index, token) is True:
                                sequences[index].end(told[index])
                if on_done is not None:
                    for index in [index for index, each in left.items() if each.done and each.error is None]:
                        on_done(left.pop(index))
        return sequences

    def stream(
        self,
        prompts: Seq[Seq[int]],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Generator[tuple[int, int], None, None]:
        """`generate`, but (prompt's number, token) one by one, as soon as the host has it.

        Closed early or dropped, it gives back rows and pages; until it ends, nothing else may run. `cancelled` is asked
        before each step, of which a long prompt takes several: True ends the stream. Raises what `generate` raises.
        """
        return self._stream(self._sequences(prompts, params), cancelled)

    def request(self, prompt: Seq[int], params: SamplingParams) -> Sequence:
        """What a `Scheduler` of this engine takes. Raises ValueError for what cannot run."""
        return self._sequences([prompt], params)[0]

    def claim(self) -> None:
        """For a Scheduler, which is the only one until it calls `release`. Raises ValueError where another is."""
        if self._busy:
            raise ValueError("the engine is generating already; exhaust or close the stream that is open first")
        self._busy = True
        self.stats = Stats(mode=self.mode)

    def release(self) -> None:
        self._busy = False

    def running(self) -> AbstractContextManager[None]:
        """The devices' streams; wrap a loop over a step's `replay` in it once."""
        return self._together.running()

    def runner(
        self,
        kind: Literal["decode", "prefill"],
        *,
        sampling: bool = False,
        shaping: bool = False,
        min_p: bool = False,
        logprobs: bool = False,
        drafts: int = 0,
        exact: bool = False,
    ) -> Pipeline | Beside:
        """A step, built when first asked for, one graph for each device and bucket: greedy or sampling, with or without
        what changes logits before, with min-p, with log-probabilities or without, reading up to so many drafts; of a
        cache in codes for rows that are, or that are exact for being short."""
        choice = Choice(sampling, shaping, min_p, logprobs).settled
        if (kind, choice, exact) not in self._runners:
            started = perf_counter()
            if shaping or logprobs:
                self.choice_states()
            self._runners[kind, choice, exact] = self._together.build(kind == "decode", choice, exact)
            if exact and kind == "decode":  # what turns rows into codes is compiled now, too, by one without tokens
                pages = torch.zeros(1, self.short.pages(self.short.tokens), dtype=torch.int32)
                self._together.encode(pages, [0], [0])
            self.stats.build_seconds += perf_counter() - started
        return self._runners[kind, choice, exact][drafts]

    # The host's part.

    def check(self) -> None:
        """Raises PeerError where a rank waited for another in vain since the last run began. It asks no device."""
        self._together.check()

    def _soil(self) -> None:
        self.soiled = True

    @property
    def _steps(self) -> Steps:
        """The first rank's."""
        return self._together.first

    @property
    def _cache(self) -> Cache:
        """The first rank's."""
        return self._steps.cache

    @property
    def reach(self) -> int:
        """Tokens that a decode step brings a row at most."""
        return 1 if self._speculation is None else 1 + self._speculation.counts[-1]

    @property
    def drafts(self) -> bool:
        """Whether somebody drafts."""
        return self._speculation is not None

    @property
    def span(self) -> int:
        """Tokens behind where a row stands that a decode step may write: also those drafted behind what it brings."""
        return 2 * self.reach - 1

    @property
    def pure_pages(self) -> bool:
        """As `Cache.pure_pages`, of all that is kept of a text. Prefill writes other bits than decode steps, which
        `batch_invariant` makes a difference."""
        drafted = self._speculation
        return not self.batch_invariant and self._cache.pure_pages and (drafted is None or drafted.drafter.pure_pages)

    @property
    def ahead_of_pages(self) -> bool:
        """Whether something kept of a token depends on the token behind it, so that equal pages have equal tokens up
        to the one behind their end."""
        return self._speculation is not None and self._speculation.drafter.ahead

    def clear(self) -> None:
        """Forget all texts, after a NaN, or where ranks parted."""
        self._together.reset()
        if self._speculation is not None:
            self._speculation.reset()

    def _sequences(self, prompts: Seq[Seq[int]], params: SamplingParams | Seq[SamplingParams] | None) -> list[Sequence]:
        return make_sequences(
            prompts,
            params,
            vocabulary=self.model.config.vocab_size,
            max_context=self.max_context,
            allocator=self._allocator,
            constrain=self.constrain,
        )

    def _stream(
        self, sequences: list[Sequence], cancelled: Callable[[], bool] | None
    ) -> Generator[tuple[int, int], None, None]:
        """Who takes the tokens works on streams of his own: the engine's are current only while it computes."""
        steps = self._run(sequences)
        try:
            while cancelled is None or not cancelled():
                with self.running():
                    tokens = next(steps, None)
                if tokens is None:
                    return
                yield from tokens
        finally:
            steps.close()

    def _run(self, sequences: list[Sequence]) -> Generator[Tokens, None, None]:
        """All prompts first, then steps until all sequences are done: what each step gave at a time.

        Beginnings are shared within the call alone, so that a prompt given twice, to be timed say, is read twice.
        """
        with closing(Scheduler(self, interleave=False)) as scheduler:
            self._allocator.forget()
            for sequence in sequences:
                scheduler.add(sequence)
            while not scheduler.idle:
                new = scheduler.step()
                yield [(sequence.index, token) for sequence, token in new if token >= 0]
                for sequence, _ in new:
                    if sequence.cancelled:  # by who took the tokens
                        scheduler.cancel(sequence)
                    elif sequence.error is not None:
                        raise sequence.error
                    elif sequence.constraint is not None and sequence.constraint.problem:
                        raise ValueError(f"prompt {sequence.index}: {sequence.constraint.problem}")

    # What the scheduler has done on the devices. It works inside of `running()`.

    def begin(self, sequence: Sequence) -> None:
        """Before the first pass over a sequence in its slot: what penalties count and no decode step reads."""
        if sequence.params.shaping:
            count = sequence.to_prefill - len(sequence.prompt)
            for state in self.choice_states():
                state.begin(sequence.slot, sequence.prompt, sequence.output[:count])
        if self._speculation is not None:
            self._speculation.begin(sequence)

    def prefill(self, sequence: Sequence, end: int) -> Report:
        """Launch a pass over a sequence's tokens from `read` to `end`; what is returned fetches what it drew, BROKEN
        where any of these tokens met a NaN."""
        choice = Choice.of([sequence.params])
        runner = self.runner("prefill", **choice._asdict(), exact=sequence.exact)
        part = sequence.tokens(sequence.read, end)
        tokens = torch.zeros(1, self.chunk, dtype=torch.int64)
        tokens[0, : len(part)] = torch.tensor(part)
        runner.load(tokens=tokens, **host_rows([sequence], self._per_row, limits=[end], choice=choice))
        self._trim(len(part), end, sequence.exact)
        last = end == sequence.to_prefill
        if last:
            self._constrain([sequence])
        return self._fetch("prefill", runner.replay(), choice._replace(logprobs=last and choice.logprobs))

    def load(self, rows: list[Sequence]) -> None:
        """From now on decode steps are of these sequences, from where each one's `read` stands."""
        choice, exact = Choice.of(s.params for s in rows), rows[0].exact
        runner = self.runner("decode", **choice._asdict(), exact=exact)
        if self._speculation is not None and self._speculation.auto:
            self._measure(runner, len(rows), choice, exact)
        drawn = torch.tensor([s.tokens(s.read, s.read + 1)[0] for s in rows])
        limits = [self.short.limit(s) for s in rows]
        _, bucket = runner.load(drawn=drawn, **host_rows(rows, self._per_row, limits=limits, choice=choice))
        if self._speculation is not None:
            self._speculation.load(runner, len(rows))
        self._loaded = self._runners["decode", choice, exact], (bucket, choice, exact), choice, rows

    def encode(self, rows: list[Sequence]) -> None:
        """Those that are exact for being short turn into codes, in their first pages; nothing of them is under way."""
        for some in (rows[i : i + ENCODED] for i in range(0, len(rows), ENCODED)):
            pages = block_table(some, max(len(s.pages) for s in some))
            self._together.encode(pages, [s.slot for s in some], [s.read for s in some])

    def load_tables(self, rows: list[Sequence]) -> None:
        """Pages that loaded rows got since; their tokens and positions stay as the device has them."""
        self._loaded[0][0].load(table=block_table(rows, self._per_row))

    def decode(self, reach: int) -> Report:
        """Launch a step of the loaded rows, of which the longest then has up to `reach` tokens; what is returned
        fetches each row's new tokens, int64 [B, W]: NOTHING stands behind them."""
        runners, at, choice, rows = self._loaded
        drafts, bucket = self._drafts(rows, at, choice), at[0]
        self._trim(1, reach, rows[0].exact)
        self._constrain(rows)
        report, told = self._fetch("decode", runners[drafts].replay(bucket)[: len(rows)], choice)
        speculation = self._speculation
        if speculation is None:
            return lambda: report().unsqueeze(1), told
        return lambda: speculation.learn(rows, drafts, report(), self.stats), told

    def _drafts(self, rows: list[Sequence], at: At, choice: Choice) -> int:
        """How many drafts the next step reads: none where what may follow a token depends on those before it, or where
        the host knows the token already."""
        plain = choice.shaping or any(s.repeating for s in rows)
        return 0 if self._speculation is None or plain else self._speculation.choose(rows, at)

    def _measure(self, runner: Pipeline | Beside, rows: int, choice: Choice, exact: bool) -> None:
        """What rounds of each count of drafts cost, once for each batch size: on padding, which stands still."""
        assert self._speculation is not None
        bucket = runner.stages[0].bucket_for(rows)
        at = bucket, choice, exact
        if choice.shaping or self._speculation.measured(at):
            return
        started = perf_counter()
        padding = {name: tensor[:bucket] for name, tensor in runner.stages[0].padding.items()}
        for name in {"temperature", "min_p"} & padding.keys():  # of greedy rows a draw costs less
            padding[name] = torch.full_like(padding[name], 0.5)
        runner.load(**padding)
        self._trim(1, 1, True)
        for count in self._speculation.counts:
            run = partial(self.runner("decode", **choice._asdict(), drafts=count, exact=exact).replay, bucket)
            self._speculation.measure(at, count, run, self._together.wait)
        self.stats.build_seconds += perf_counter() - started

    def _constrain(self, rows: list[Sequence]) -> None:
        """Upload what may follow in rows that are constrained; their last tokens must have been taken."""
        if found := {s.slot: s.constraint for s in rows if s.constraint is not None}:
            for state in self.choice_states():
                state.constrain(found)

    def _fetch(self, kind: Literal["decode", "prefill"], report: Tensor, choice: Choice) -> Report:
        """Begin to copy what a step tells the host: `ahead` + 1 of a kind at once at most."""
        said = report.numel() // len(report)
        tokens = 1 if report.dim() == 1 else said - 1  # of a round, which says how many drafts wait, too
        told = self.choice_state().fetch(kind, len(report) * tokens) if choice.logprobs else None
        if (kind, said) not in self._downloads:
            like = torch.zeros(self.max_batch * said, dtype=torch.int64, device=report.device)
            self._downloads[kind, said] = Download(like, depth=self.ahead + 1)
        # A GPU that never ends its part would hold the host for ever, which the others have long told.
        look = self.check if len(self.model.beside) > 1 else None
        fetched = self._downloads[kind, said].start(report.flatten(), look)

        def read() -> Tensor:
            found = fetched()
            self.check()
            return found.view(report.shape)

        return read, told

    def choice_state(self) -> ChoiceState:
        """The first rank's."""
        return self.choice_states()[0]

    def choice_states(self) -> list[ChoiceState]:
        """Of each rank, made when first asked for."""
        slots, vocabulary = self.max_batch + 1, self.model.config.vocab_size
        return self._together.choices(
            lambda device: ChoiceState(slots, self.max_batch * self.reach, vocabulary, device, depth=self.ahead + 1)
        )

    def _trim(self, length: int, reach: int, exact: bool) -> None:
        """Before an eager step on a CPU: the tokens of the chunk and the pages of the longest row, of `reach` tokens;
        whether some are exact for being short.

        Not on a GPU, eagerly either: kernels split their work by shape, so that another shape rounds in another order,
        and an eager step would then draw other tokens at near-ties than the captured one that it is compared with. Nor
        between stages, which hand on whole buffers.
        """
        if self._trims:
            self._together.trim(length, self._allocator.needed(reach, exact))
