"""Which sequence does what next: requests join and leave between steps, prompts are read while other rows decode.

A step is one chunk of a prompt or one decode step of all rows; each is a replay, launched and not waited for. Captured,
one decode step is launched before the tokens of the one before are read. Rows are written anew only when their
sequences change: then, and only then, all that was launched is read first.
"""

from collections import deque
from itertools import islice, takewhile
from time import perf_counter
from typing import Protocol

from torch import Tensor

from onegraph.engine.choice import token_logprob
from onegraph.engine.exact_window import ExactWindow
from onegraph.engine.inputs import Report
from onegraph.engine.pages import PageAllocator
from onegraph.engine.params import Stats
from onegraph.engine.prefixes import Executor as State
from onegraph.engine.prefixes import Prefixes
from onegraph.engine.sequence import Sequence, StepError
from onegraph.engine.snapshots import EVERY
from onegraph.ops.calls import NAN_DRAFTS, NAN_TOKEN, NO_TOKEN

GROWTH = 64  # tokens that rows get pages for at a time, where there are enough: a block table changes once in so many


class Executor(State, Protocol):
    """What runs the steps: `engine.executor.Executor`, which documents these members."""

    cache_dirty: bool

    @property
    def chunk(self) -> int: ...
    @property
    def ahead(self) -> int: ...
    @property
    def reach(self) -> int: ...
    def begin(self, sequence: Sequence) -> None: ...
    def prefill(self, sequence: Sequence, end: int) -> Report: ...
    def load(self, rows: list[Sequence]) -> None: ...
    def load_tables(self, rows: list[Sequence]) -> None: ...
    def decode(self, reach: int) -> Report: ...
    def encode(self, rows: list[Sequence]) -> None: ...
    def clear(self) -> None: ...


class Scheduler:
    """Runs sequences (`Engine.request`) on an executor, between `open` and `close`.

    A sequence gets pages for its prompt when it is admitted, in the order of `add`, and more as it grows. Where too few
    are free the youngest sequence is preempted: its pages are freed and it waits. Later it is read again, its output by
    prefill too where pages are prefix-cacheable, else by decode steps that repeat its tokens. So its tokens are the
    same.

    Attributes:
        prefixes: what texts may share. free_slots: of state that does not grow with the text; slot 0 belongs to no
            sequence.
        waiting: sequences by priority, then the oldest first. running: the oldest first.

    Not thread-safe. Loops over `step` stand inside of `Executor.running()`.
    """

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.prefixes = Prefixes(executor)
        self.free_slots = list(range(executor.sizes.rows, 0, -1))
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._in_flight: deque[tuple[list[Sequence], Report]] = deque()
        # Chunks of prompts: from where each is, and whether the next token is new
        self._chunks: deque[tuple[Sequence, int, bool, Report]] = deque()
        self._open = False

    def open(self, *, interleave: bool = True, share: bool = True) -> "Scheduler":
        """Itself, for one user until `close`. Raises ValueError where it is open.

        Args:
            interleave: a decode step between two chunks of prompts, so that no text stalls behind a long prompt. False:
                prompts first, for fewer and fuller decode steps.
            share: pages that hold the beginning of a prompt already are used again, where the cache is
                prefix-cacheable (the exact cache, unless a step and a prompt compute otherwise; codes and DeepSeek-V4's
                windows depend on more than the tokens). Of a model with recurrent state, up to a snapshot of it.
        """
        if self._open:
            raise ValueError("the engine is generating already; exhaust or close the stream that is open first")
        self.executor.stats = Stats(mode=self.stats.mode)
        if self.executor.cache_dirty:
            self._clear_cache()
        self._open = True
        self._interleave = interleave
        self._cacheable = self.executor.prefix_cacheable
        self.prefixes.sharing = share and self._cacheable
        self._rows: list[Sequence] = []  # that are loaded
        self._stale = True  # the loaded rows are not those that should run
        self._ended = self._poisoned = False  # a sequence is done; one gave NaN
        self._dirty: set[Sequence] = set()  # NaN in drafts, which rounds in flight may meet too
        self._steps_until_reload = 0
        self._ahead = 0  # steps that may be in flight when another is launched
        self._decoded = True  # whether the last step was a decode step
        self._new: list[tuple[Sequence, int]] = []
        return self

    @property
    def allocator(self) -> PageAllocator:
        """Of pages."""
        return self.prefixes.allocator

    @property
    def stats(self) -> Stats:
        """Since `open`."""
        return self.executor.stats

    @property
    def _span(self) -> int:
        """Tokens behind where a row stands that a decode step may write: also those drafted behind what it brings."""
        return 2 * self.executor.reach - 1

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, sequence: Sequence) -> None:
        """It waits behind those of its priority and of lower values."""
        ahead = sum(1 for _ in takewhile(lambda s: s.params.priority <= sequence.params.priority, self.waiting))
        self.waiting.insert(ahead, sequence)

    def cancel(self, sequence: Sequence) -> None:
        """It gets no more tokens; its row and pages are free in the next step."""
        sequence.cancelled = True
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        self._ended = True

    def step(self) -> list[tuple[Sequence, int]]:
        """Launch a chunk of a prompt or a decode step; (sequence, token) that were read meanwhile, in order.

        A sequence that is `done` then has finished. Token -1: the model gave NaN, or a step that the sequence needs
        could not be built, as its `error` says; the others continue from what they had.
        """
        started, built = perf_counter(), self.stats.build_seconds
        self._new = []
        if self._ended or self._poisoned:
            self.drain()
        sequence = None
        try:
            self._admit()
            sequence = self._next_to_prefill()
            if sequence is None:
                self._decode()
            else:
                self._prefill(sequence)
        except StepError as error:
            self._fail(error.sequence, error)
        self._decoded = sequence is None
        seconds = perf_counter() - started - (self.stats.build_seconds - built)
        if sequence is None:
            self.stats.decode_seconds += seconds
        else:
            self.stats.prefill_seconds += seconds
        return self._new

    def close(self) -> None:
        """Free all rows and pages, also after an error or an interrupt."""
        # Whether what is in flight gives NaN is never read. Cleared at the next `open`: a device may have failed.
        arriving = any(sequence.arrivals for sequence in self.running)
        self.executor.cache_dirty |= bool(self._poisoned or self._in_flight or self._chunks or arriving)
        for sequence in self.running:
            self._give_back(sequence)
        self.running.clear()
        self.waiting.clear()
        self._in_flight.clear()
        self._chunks.clear()
        self._open = False

    @property
    def _window(self) -> ExactWindow:
        return self.executor.sizes.exact_window

    # Which sequences run.

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.executor.sizes.rows:
            sequence = self.waiting[0]
            if not self._take_pages(sequence):
                break
            self.waiting.remove(sequence)  # others may be before it now: see `drain`
            sequence.slot = self.free_slots.pop()
            sequence.to_prefill = sequence.length if self._cacheable else len(sequence.prompt)
            self.prefixes.restore(sequence)
            self.running.append(sequence)
            self.executor.begin(sequence)

    def _take_pages(self, sequence: Sequence) -> bool:
        """As `_take`, exact where the sequence may be, unless pages are too few for that."""
        sequence.exact = self._window.admits(sequence, self.running)
        if self._take(sequence):
            return True
        if not any(s.exact for s in (sequence, *self.running)):
            return False
        self._encode()
        sequence.exact = False
        return self._take(sequence)

    def _take(self, sequence: Sequence) -> bool:
        """For all its tokens and the next step, if enough stay free for a step of each of the others that grow."""
        growing = sum(max(1, self._lacks(s, self._span)) for s in self.running if self._lacks(s, s.limit) > 0)
        shared, kept = self.prefixes.find(sequence)
        tokens = min(sequence.length + self._span, sequence.limit)
        count = self.executor.sizes.needed(tokens, sequence.exact) - len(shared)
        if count + growing > self.allocator.free:
            self.allocator.give_back(shared)
            return False
        try:
            more = self.prefixes.take(count, keep=len(kept))
        except BaseException:
            self.allocator.give_back(shared)
            raise
        self.prefixes.begin(sequence, shared, kept, more)
        return True

    def drain(self) -> None:
        """Read what was launched; sequences that are done leave. After a NaN all others start over in a clean cache."""
        self._read_all()
        for sequence in [s for s in self.running if s.done]:
            self._leave(sequence)
        if self._poisoned:
            for sequence in self.running[::-1]:
                self._preempt(sequence)
            self._clear_cache()
        self._ended = self._poisoned = False
        self._dirty.clear()
        self._stale = True

    def _clear_cache(self) -> None:
        """The next owner of a page masks what it finds there, and 0 * NaN is NaN."""
        self.prefixes.forget()
        self.executor.clear()

    def _preempt(self, sequence: Sequence) -> None:
        """It waits ahead of those of its priority, which are younger."""
        self._leave(sequence)
        ahead = sum(1 for _ in takewhile(lambda s: s.params.priority < sequence.params.priority, self.waiting))
        self.waiting.insert(ahead, sequence)
        self.stats.preemptions += 1

    def _join(self, sequence: Sequence) -> None:
        """Steps from now on come behind what is being copied from host memory for it."""
        for arrival in sequence.arrivals:
            arrival.join()
        sequence.arrivals = []

    def _leave(self, sequence: Sequence) -> None:
        self._join(sequence)
        if sequence.error is None:
            self.prefixes.remember(sequence)
        self.running.remove(sequence)
        self._give_back(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        self.allocator.give_back(sequence.pages)
        self.free_slots.append(sequence.slot)
        sequence.pages, sequence.read, sequence.to_prefill, sequence.exact = [], 0, 0, False
        sequence.kept, sequence.arrivals = 0, []

    # What runs.

    def _next_to_prefill(self) -> Sequence | None:
        if self._interleave and not self._decoded and any(s.decoding for s in self.running):
            return None
        to_read = [s for s in self.running if not s.decoding]
        here = (s for s in to_read if all(arrival.done for arrival in s.arrivals))
        # Others go first while the beginning of a prompt is being copied from host memory.
        return next(here, None if len(to_read) < len(self.running) else next(iter(to_read), None))

    def _prefill(self, sequence: Sequence) -> None:
        self._join(sequence)  # of two copies of a state into its slot the newer one is the last
        self.prefixes.share_more(sequence)
        self._join(sequence)
        end = min(sequence.read + self.executor.chunk, sequence.to_prefill)
        report = self.executor.prefill(sequence, end)
        self._chunks.append((sequence, sequence.read, end == sequence.length, report))
        self.stats.prefill_tokens += end - sequence.read
        sequence.read = end
        self.prefixes.remember(sequence)
        # Of a long prompt the last chunk and those at twice the last one's length: snapshots are few.
        if sequence.to_prefill - end < self.executor.chunk or end >= 2 * sequence.kept:
            self.prefixes.snapshot(sequence)
        if sequence.decoding:
            self._stale = True
        if end == sequence.length:
            self._read_all()
        while len(self._chunks) > self.executor.ahead:
            self._read_chunk()

    def _decode(self) -> None:
        if self._stale or not self._steps_until_reload or not self._covered():
            self._reload()
        if not self._rows:
            return
        self._steps_until_reload -= 1
        read = max(s.read for s in self._rows)
        reach = read + len(self._in_flight) * self.executor.reach + self._span
        self._in_flight.append((self._rows, self.executor.decode(reach)))
        self.stats.decode_steps += 1
        if len(self._in_flight) > self._ahead:
            self._read()

    def _reload(self) -> None:
        """The rows that decode, each with a page for its next token. For lack of pages, those of the highest priority
        value are preempted, of these the youngest first."""
        self.drain()
        if self._window.is_over(self.running):
            self._encode()
        while not self._grow():
            if any(s.exact for s in self.running):
                self._encode()
            else:
                self._preempt(max(reversed(self.running), key=lambda s: s.params.priority))
        self._rows = [s for s in self.running if s.decoding]
        if self._rows:
            self.executor.load(self._rows)
            # A row that repeats is given each token: it draws what is known but for a near-tie's rounding.
            self._steps_until_reload = 1 if any(s.repeating for s in self._rows) else min(s.left for s in self._rows)
            if self._rows[0].exact:
                self._steps_until_reload = min(self._steps_until_reload, self._window.steps(self._rows))
            # What may follow a token is known when the host has it: the next step waits for the last.
            self._ahead = 0 if any(s.constraint for s in self._rows) else self.executor.ahead
        self._stale = False

    def _encode(self) -> None:
        """Encode all exact rows, which need fewer pages then."""
        self.drain()
        rows = [s for s in self.running if s.exact]
        self.executor.encode([s for s in rows if s.read])
        for sequence in rows:
            sequence.exact = False
            reach = min(sequence.length + self._span, sequence.limit)
            kept = self.executor.sizes.needed(reach)
            self.allocator.give_back(sequence.pages[kept:])
            del sequence.pages[kept:]

    def _covered(self) -> bool:
        """Whether every loaded row has pages for its next tokens, or got them from those that are free."""
        if not self._missing(self._span):
            return True
        if not self._grow():
            return False
        self.executor.load_tables(self._rows)
        return True

    def _grow(self) -> bool:
        """Pages for the next GROWTH tokens of all rows that decode, or for the next step; False where none are left."""
        for tokens in (max(GROWTH, self._span), self._span):
            missing = self._missing(tokens)
            if (total := sum(count for _, count in missing)) <= self.allocator.free:
                pages = iter(self.prefixes.take(total))
                for sequence, count in missing:
                    sequence.pages += islice(pages, count)
                return True
        return False

    def _missing(self, tokens: int) -> list[tuple[Sequence, int]]:
        """Rows that decode and how many pages each lacks for its next `tokens` tokens, behind the steps in flight."""
        ahead = len(self._in_flight) * self.executor.reach + tokens
        return [(s, count) for s in self.running if s.decoding and (count := self._lacks(s, ahead)) > 0]

    def _lacks(self, sequence: Sequence, tokens: int) -> int:
        """Pages that it needs for so many tokens behind what is read, less those that it has."""
        reach = min(sequence.limit, sequence.read + tokens)
        return self.executor.sizes.needed(reach, sequence.exact) - len(sequence.pages)

    # What came out.

    def _read_all(self) -> None:
        while self._in_flight:
            self._read()
        while self._chunks:
            self._read_chunk()

    def _read_chunk(self) -> None:
        """The oldest chunk of a prompt: whether it gave NaN, and behind the last the first token."""
        sequence, start, new, (tokens, told) = self._chunks.popleft()
        token = int(tokens())
        known = None if told is None else told()
        if sequence.done:
            self._poisoned |= token < 0
            return
        if known is not None and sequence.scored and token >= 0:
            sequence.score(start, known[:-1])
        if new or token < 0:
            self._emit(sequence, token, None if known is None else known[-1])

    def _read(self) -> None:
        """Wait for the oldest step in flight. A row that was done before has run one too many, in its own pages: its
        report says only whether a NaN lies there."""
        rows, (tokens, told) = self._in_flight.popleft()
        drawn, known = tokens().tolist(), None if told is None else told().unflatten(0, (len(rows), -1))
        for row, (sequence, new) in enumerate(zip(rows, drawn, strict=True)):
            if sequence in self._dirty:  # it starts over from what it had
                continue
            if NAN_DRAFTS in new:
                self._dirty.add(sequence)
                self._poisoned = True
            if sequence.done:
                self._poisoned |= NAN_TOKEN in new
                continue
            for place, token in enumerate(new):
                if token <= NO_TOKEN or sequence.done:
                    break
                sequence.read += 1
                own = None if known is None else known[row, place]
                self.stats.decode_tokens += self._emit(sequence, token, own)
            self._ended |= sequence.exact and sequence.read >= self._window.tokens
            if sequence.read - sequence.kept >= EVERY * self.executor.sizes.page_size and not sequence.done:
                self.prefixes.snapshot(sequence)

    def _emit(self, sequence: Sequence, token: int, told: Tensor | None) -> bool:
        """The token behind all that a sequence has read; False where it was known."""
        if token < 0:
            self._poisoned = True
            error = FloatingPointError(
                f"prompt {sequence.index}: the model gives NaN at position {sequence.read}: its weights hold NaN or "
                "infinities, or activations overflow its dtype; check the checkpoint, or load it in float32"
            )
            self._fail(sequence, error)
            return False
        if sequence.read < sequence.length:
            return False
        sequence.take(token)
        if told is not None and (wanted := sequence.params.logprobs) is not None:
            sequence.logprobs.append(token_logprob(told.tolist(), token, wanted))
        self._new.append((sequence, token))
        self._ended |= sequence.done
        return True

    def _fail(self, sequence: Sequence, error: FloatingPointError | StepError) -> None:
        """It ends without another token."""
        sequence.error = error
        self._new.append((sequence, NAN_TOKEN))
        self._ended = True
