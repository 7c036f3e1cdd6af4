"""Runs the steps of a model on its devices: prefill of a chunk, a decode step of all rows, each one replay.

Everything that a step changes lives on the device and is advanced inside the step, so replays chain without host work:
position and last token of each row, and by `limits` also when a row stands still. The host decides only which sequence
is in which row (`engine/scheduler.py`), and writes the rows anew when that changes.
"""

from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from time import perf_counter
from typing import Literal

import torch
from torch import Tensor

from onegraph.engine.choice import SCORING, Choice, ChoiceState
from onegraph.engine.decoder import Cache, Model
from onegraph.engine.draft import MOST, MakeDrafter
from onegraph.engine.exact_window import Sizes
from onegraph.engine.inputs import Report, block_table, host_rows
from onegraph.engine.offload import offloading
from onegraph.engine.params import Stats
from onegraph.engine.per_token import check_invariant
from onegraph.engine.sequence import Sequence, StepError
from onegraph.engine.speculate import At, DraftTokens, Speculation
from onegraph.engine.steps import Steps
from onegraph.formats.turboquant import TurboQuantConfig
from onegraph.nn.peers import PeerError
from onegraph.ops.ahead import Ahead
from onegraph.runtime.graph import CaptureError, GraphPool, Runner
from onegraph.runtime.group import RankGroup, check_links, running
from onegraph.runtime.transfer import Download

ENCODED = 8  # rows that are encoded in one call, which holds their keys and values once more

Mode = Literal["eager", "captured", "split"]
Kind = Literal["decode", "prefill"]
Groups = dict[int, RankGroup]  # of a step, by count of drafts


class Executor:
    """Owns a model's steps, their graphs, the cache and the devices' streams.

    A step is a pipeline of the model's stages. Every device keeps its own positions, limits and block tables and
    advances them itself; what travels is the stream from each stage to the next, and the drawn tokens from the last to
    all others. Of a tensor-parallel model each rank runs every step on its share, and draws the same tokens from the
    same bits; the first one's are read.

    Args: see `Engine`.

    Attributes:
        ranks: the steps of each rank. speculation: None without drafts. groups: the steps that are built.
        ahead: steps that may be launched before the tokens of one are read.
        cache_dirty: a NaN may lie in the cache, or ranks may differ: it has to be cleared before anything else runs.
        host_pages, host_states: copies of the cache's pages, and of its snapshots, in host memory.
        trims: eager steps on a CPU read no more of chunks and tables than is in use.
    """

    def __init__(
        self,
        model: Model,
        sizes: Sizes,
        mode: Mode,
        *,
        chunk: int,
        kv: TurboQuantConfig | None,
        draft: MakeDrafter | Seq[MakeDrafter] | None,
        draft_tokens: DraftTokens,
        batch_invariant: bool,
        kv_offloading_size: float | None = None,
    ) -> None:
        self.model, self.sizes, self.mode, self.chunk = model, sizes, mode, chunk
        self.batch_invariant = batch_invariant
        captured = mode != "eager"
        for rank in model.ranks:
            check_links(rank.devices)
        self._pools = [[GraphPool(device) for device in rank.devices] for rank in model.ranks] if captured else []
        self.ahead = int(captured)
        self._compiling = Ahead() if model.devices[0].type == "cuda" else None
        caches = []
        for rank in model.ranks:
            cache = rank.new_cache(
                rows=sizes.rows, pages=sizes.pages, page_size=sizes.page_size, pages_per_row=sizes.per_row, kv=kv,
                spare=0 if draft is None else MOST,
            )  # fmt: skip
            if draft is not None and cache.rollback is not None and cache.rollback < MOST:
                raise ValueError(
                    f"draft: a round takes back up to {MOST} tokens; the model's state allows {cache.rollback}: leave "
                    "drafts out"
                )
            if batch_invariant:
                check_invariant(model, cache)
            caches.append(cache)
        self.speculation = None
        if draft is not None:
            self.speculation = Speculation.of(model.ranks, caches, draft, draft_tokens, sizes, kv)
        self.ranks = []
        for i, (rank, cache) in enumerate(zip(model.ranks, caches, strict=True)):
            rounds = None if self.speculation is None else self.speculation.ranks[i]
            counts = (0,) if self.speculation is None else self.speculation.counts
            split = mode == "split"
            self.ranks.append(
                Steps(rank, cache, sizes, rounds, counts, chunk=chunk, split=split, invariant=batch_invariant)
            )
        self.host_pages, self.host_states = offloading(
            self.ranks, kv_offloading_size, prefix_cacheable=self.prefix_cacheable
        )
        self.devices = [device for rank in model.ranks for device in rank.devices]
        self.groups: dict[tuple[Kind, Choice, bool], Groups] = {}
        self._loaded: tuple[Groups, At, Choice, list[Sequence]]  # of the decode step
        self._downloads: dict[tuple[Kind, int], Download] = {}  # by the kind of a step, and how much it says of a row
        # Not on a GPU, eagerly either: kernels split their work by shape, so that another shape rounds in another
        # order, and an eager step would draw other tokens at near-ties than the captured one that it is compared with.
        # Nor between stages, which hand on whole buffers.
        whole = all(len(rank.devices) == 1 for rank in model.ranks)
        self.trims = not captured and whole and self.devices[0].type == "cpu"
        self.cache_dirty = False
        self.stats = Stats(mode=mode)

    @property
    def cache(self) -> Cache:
        """The first rank's."""
        return self.ranks[0].cache

    @property
    def reach(self) -> int:
        """The largest number of tokens that a decode step brings a row."""
        return 1 if self.speculation is None else 1 + self.speculation.counts[-1]

    @property
    def prefix_cacheable(self) -> bool:
        """As `Cache.prefix_cacheable`, of all that is kept of a text. Prefill writes other bits than decode steps,
        which `batch_invariant` makes a difference."""
        drafted = self.speculation
        whole = drafted is None or drafted.drafter.prefix_cacheable
        return not self.batch_invariant and self.cache.prefix_cacheable and whole

    @property
    def snapshot_slots(self) -> Seq[int]:
        """Slots of the cache that belong to no sequence, for copies of what recurrent layers have made of a prefix."""
        return self.cache.snapshot_slots

    def copy_slot(self, source: int, target: int) -> None:
        """A slot's state becomes another one's, behind the steps that are launched."""
        for rank in self.ranks:
            rank.cache.copy_slot(source, target)

    @property
    def needs_next_token(self) -> bool:
        """Whether something kept of a token depends on the token behind it, so that equal pages have equal tokens up
        to the one behind their end."""
        return self.speculation is not None and self.speculation.drafter.needs_next_token

    def running(self) -> AbstractContextManager[None]:
        """The devices' streams; wrap a loop over steps in it once. All that follows works inside of it."""
        return running([pool for pools in self._pools for pool in pools])

    def step(
        self,
        kind: Kind,
        *,
        sampling: bool = False,
        shaping: bool = False,
        min_p: bool = False,
        logprobs: bool = False,
        prompt: bool = False,
        drafts: int = 0,
        exact: bool = False,
    ) -> RankGroup:
        """A step, built when first needed, one graph for each device and bucket: with the parts of a `Choice`, reading
        up to so many drafts, for exact rows or others. Raises CaptureError where it cannot be built."""
        choice = Choice(sampling, shaping, min_p, logprobs, prompt).settled
        if (kind, choice, exact) not in self.groups:
            started = perf_counter()
            try:
                self._add_step(kind, choice, exact)
            except PeerError:
                raise
            except Exception as error:
                what = f"the {kind} step" + (f" with {choice.words}" if choice.words else "")
                cure = f"leave {choice.words} out, or run" if choice.words else "run"
                raise CaptureError(
                    f"{what} could not be built: {' '.join(str(error).split())[:500] or type(error).__name__}; {cure} "
                    "with a smaller batch, context or cache if memory is short"
                ) from error
            finally:
                self.stats.build_seconds += perf_counter() - started
        return self.groups[kind, choice, exact][drafts]

    # What the scheduler calls.

    def begin(self, sequence: Sequence) -> None:
        """Before the first pass over a sequence in its slot: what penalties count and no decode step reads. Raises
        StepError, as do `prefill` and `load`."""
        self._step_of("prefill", [sequence], self._prefill_choice(sequence))
        if sequence.params.shaping:
            count = sequence.to_prefill - len(sequence.prompt)
            for state in self.choice_states():
                state.begin(sequence.slot, sequence.prompt, sequence.output[:count], sequence.params)
        if self.speculation is not None:
            self.speculation.begin(sequence)

    def prefill(self, sequence: Sequence, end: int) -> Report:
        """Launch a pass over a sequence's tokens from `read` to `end`; the report's token is BROKEN where any of these
        tokens met a NaN. Log-probabilities are those of the tokens behind each, where the prompt is scored, and of the
        drawn one, the last."""
        choice = self._prefill_choice(sequence)
        step = self._step_of("prefill", [sequence], choice)
        part = sequence.tokens(sequence.read, end)
        tokens = torch.zeros(1, self.chunk, dtype=torch.int64)
        tokens[0, : len(part)] = torch.tensor(part)
        further = {}
        if choice.prompt:
            further["following"] = following = torch.zeros_like(tokens)
            behind = sequence.tokens(sequence.read + 1, end + 1)
            following[0, : len(behind)] = torch.tensor(behind)
        step.load(tokens=tokens, **further, **self._rows([sequence], [end], choice))
        self._trim(len(part), end, sequence.exact)
        last = end == sequence.to_prefill
        if last:
            self._constrain([sequence])
        told = choice.prompt or (last and choice.logprobs)
        return self._fetch("prefill", step.replay(), choice._replace(logprobs=told))

    def _prefill_choice(self, sequence: Sequence) -> Choice:
        return SCORING if sequence.scored else Choice.of([sequence.params])

    def _step_of(self, kind: Kind, rows: list[Sequence], choice: Choice) -> RankGroup:
        """`step` of these rows, the oldest first. A StepError is of the youngest whose own step cannot be built, or
        where each could run alone, of the one that needs the most."""
        try:
            return self.step(kind, **choice._asdict(), exact=rows[0].exact)
        except CaptureError as error:
            own = {s: Choice.of([s.params]) for s in reversed(rows)}
            for sequence, needed in own.items() if len(rows) > 1 else ():
                self._step_of(kind, [sequence], needed)
            raise StepError(str(error), max(own, key=lambda s: sum(own[s]))) from error

    def _rows(self, rows: list[Sequence], limits: list[int], choice: Choice) -> dict[str, Tensor]:
        adapted = self.ranks[0].adapters is not None
        return host_rows(rows, self.sizes.per_row, limits=limits, choice=choice, adapted=adapted)

    def load(self, rows: list[Sequence]) -> None:
        """From now on decode steps are of these sequences, from where each one's `read` stands."""
        choice, exact = Choice.of(s.params for s in rows), rows[0].exact
        step = self._step_of("decode", rows, choice)
        if self.speculation is not None and self.speculation.auto:
            self._measure(step, len(rows), choice, exact)
        drawn = torch.tensor([s.tokens(s.read, s.read + 1)[0] for s in rows])
        limits = [self.sizes.exact_window.limit(s) for s in rows]
        _, bucket = step.load(drawn=drawn, **self._rows(rows, limits, choice))
        if self.speculation is not None:
            self.speculation.load(step, len(rows))
        self._loaded = self.groups["decode", choice, exact], (bucket, choice, exact), choice, rows

    def load_tables(self, rows: list[Sequence]) -> None:
        """Pages that loaded rows got since; their tokens and positions stay as the device has them."""
        self._loaded[0][0].load(table=block_table(rows, self.sizes.per_row))

    def decode(self, reach: int) -> Report:
        """Launch a step of the loaded rows, of which the longest then has up to `reach` tokens. The report's tokens are
        each row's new ones, int64 [B, W], NOTHING behind them."""
        groups, at, choice, rows = self._loaded
        drafts, bucket = self._drafts(rows, at, choice), at[0]
        self._trim(1, reach, rows[0].exact)
        self._constrain(rows)
        report, told = self._fetch("decode", groups[drafts].replay(bucket)[: len(rows)], choice)
        speculation = self.speculation
        if speculation is None:
            return lambda: report().unsqueeze(1), told
        return lambda: speculation.learn(rows, drafts, report(), self.stats), told

    def encode(self, rows: list[Sequence]) -> None:
        """Encode exact rows, into their first pages; no step of theirs is in flight."""
        for some in (rows[i : i + ENCODED] for i in range(0, len(rows), ENCODED)):
            pages = block_table(some, max(len(s.pages) for s in some))
            self._encode(pages, [s.slot for s in some], [s.read for s in some])

    def clear(self) -> None:
        """Forget all texts, and whatever ranks have sent."""
        if self.model.peers is not None:
            self.model.peers.reset()
        for rank in self.ranks:
            rank.cache.reset()
        if self.speculation is not None:
            self.speculation.reset()
        self.cache_dirty = False

    def check(self) -> None:
        """Raises PeerError where a rank waited for another in vain since the last `clear`. It reads no device."""
        if self.model.peers is not None:
            try:
                self.model.peers.check()
            except PeerError:
                self._mark_dirty()
                raise

    def choice_states(self) -> list[ChoiceState]:
        """Of each rank, made when first needed."""
        slots, rows = self.sizes.rows + 1, max(self.sizes.rows * self.reach, self.chunk + 1)
        for rank in self.ranks:
            if rank.choices is None:
                vocabulary, device = self.model.config.vocab_size, rank.model.devices[-1]
                rank.choices = ChoiceState(slots, rows, vocabulary, device, depth=self.ahead + 1)
        return [rank.choices for rank in self.ranks if rank.choices is not None]

    def _mark_dirty(self) -> None:
        self.cache_dirty = True

    def _compiled_ahead(self, choice: Choice, exact: bool) -> AbstractContextManager[None]:
        """Within it a step is built. If a kernel is in no cache, those of prefill and of decoding are compiled at once,
        since both are needed for an answer."""
        if self._compiling is None:
            return nullcontext()
        kinds = (False,) if choice.prompt else (False, True)
        return self._compiling.active([partial(self.ranks[0].run_once, decoding, choice, exact) for decoding in kinds])

    def _add_step(self, kind: Kind, choice: Choice, exact: bool) -> None:
        if choice.shaping or choice.logprobs:
            self.choice_states()
        with self._compiled_ahead(choice, exact):
            self.groups[kind, choice, exact] = self._build(kind == "decode", choice, exact)
        if exact and kind == "decode":  # what encodes rows is compiled now, too, by a row without tokens
            window = self.sizes.exact_window
            self._encode(torch.zeros(1, window.pages(window.tokens), dtype=torch.int32), [0], [0])

    def _build(self, decoding: bool, choice: Choice, exact: bool) -> Groups:
        """Ranks are warmed up and captured one by one, each alone: nothing else may be in flight."""
        peers, pools = self.model.peers, self._pools or [[]] * len(self.ranks)
        if peers is None:
            return self._grouped([self.ranks[0].build(decoding, choice, exact, pools[0])], decoding)
        self._wait()
        peers.arm(False)
        try:
            built = [rank.build(decoding, choice, exact, own) for rank, own in zip(self.ranks, pools, strict=True)]
            groups = self._grouped(built, decoding)
            if self.devices[0].type == "cuda":
                self._run_once(groups)
            self._wait()
        finally:
            peers.arm(True)
        return groups

    def _grouped(self, built: Seq[dict[int, list[Runner]]], decoding: bool) -> Groups:
        """Each rank's stages of a step, by count of drafts, as one group."""
        shared: tuple[str, ...] = ("drawn",) if decoding else ()
        state: list[Seq[Seq[Tensor]]] = []
        if decoding and self.speculation is not None:
            # The last stage alone knows how far a row has come, and tells the others.
            shared, state = ("drawn", "positions"), [rank.waiting for rank in self.speculation.ranks]
        failed = None if self.model.peers is None else self._mark_dirty
        return {
            count: RankGroup([rank[count] for rank in built], shared=shared, state=state, failed=failed)
            for count in built[0]
        }

    def _run_once(self, groups: Groups) -> None:
        """On padding, whose rows stand still: a first launch may wait for the whole GPU, which it must not do while a
        peer spins."""
        with self.running():
            for rank in range(len(self.ranks)):
                for group in groups.values():
                    for bucket in group.stages[0].buckets or (None,):
                        group.replay_rank(rank, bucket)

    def _wait(self) -> None:
        """For all that is in flight."""
        for device in self.devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def _encode(self, pages: Tensor, slots: list[int], tokens: list[int]) -> None:
        """See `TurboQuantCache.encode`."""
        for rank in self.ranks:
            for device, part in zip(rank.model.devices, rank.cache.parts, strict=True):
                numbers = (torch.tensor(each, dtype=torch.int32, device=device) for each in (slots, tokens))
                part.encode(pages.to(device), *numbers)

    def _trim(self, length: int, reach: int, exact: bool) -> None:
        """Before a step: the tokens of the chunk, the tokens that the longest row has then, whether rows are exact."""
        if self.trims:
            for rank in self.ranks:
                rank.length, rank.width = length, self.sizes.needed(reach, exact)

    def _drafts(self, rows: list[Sequence], at: At, choice: Choice) -> int:
        """How many drafts the next step reads: none where what may follow a token depends on those before it, or where
        the host knows the token already."""
        plain = choice.shaping or any(s.repeating for s in rows)
        return 0 if self.speculation is None or plain else self.speculation.choose(rows, at)

    def _measure(self, step: RankGroup, rows: int, choice: Choice, exact: bool) -> None:
        """Time rounds of each count of drafts, once for each batch size: on padding, which stands still."""
        assert self.speculation is not None
        bucket = step.stages[0].bucket_for(rows)
        at = bucket, choice, exact
        if choice.shaping or self.speculation.measured(at):
            return
        started = perf_counter()
        padding = {name: tensor[:bucket] for name, tensor in step.stages[0].padding.items()}
        for name in {"temperature", "min_p"} & padding.keys():  # greedy rows sample faster
            padding[name] = torch.full_like(padding[name], 0.5)
        step.load(**padding)
        self._trim(1, 1, True)
        for count in self.speculation.counts:
            run = partial(self.step("decode", **choice._asdict(), drafts=count, exact=exact).replay, bucket)
            self.speculation.measure(at, count, run, self._wait)
        self.stats.build_seconds += perf_counter() - started

    def _constrain(self, rows: list[Sequence]) -> None:
        """Upload what may follow in rows that are constrained; their last tokens must have been taken."""
        if found := {s.slot: s.constraint for s in rows if s.constraint is not None}:
            for state in self.choice_states():
                state.constrain(found)

    def _fetch(self, kind: Kind, report: Tensor, choice: Choice) -> Report:
        """Begin to copy what a step reports to the host: at most `ahead` + 1 of a kind at once."""
        said = report.numel() // len(report)
        tokens = 1 if report.dim() == 1 else said - 1  # of a round, which reports how many drafts wait, too
        rows = self.ranks[0].length + 1 if choice.prompt else len(report) * tokens
        told = self.choice_states()[0].fetch(kind, rows) if choice.logprobs else None
        if (kind, said) not in self._downloads:
            like = torch.zeros(self.sizes.rows * said, dtype=torch.int64, device=report.device)
            self._downloads[kind, said] = Download(like, depth=self.ahead + 1)
        # A GPU that never ends its part would hold the host for ever, which the other ranks have reported long since.
        look = self.check if len(self.ranks) > 1 else None
        fetched = self._downloads[kind, said].start(report.flatten(), look)

        def read() -> Tensor:
            found = fetched()
            self.check()
            return found.view(report.shape)

        return read, told
