"""Which sequence does what next: requests join and leave between steps, prompts are read beside decoding rows.

A step is one chunk of a prompt or one decode step of all rows; each is a replay, launched and not waited for. Captured,
one decode step is launched before the tokens of the one before are read, and rows are written anew only when who sits
in them changes: then, and only then, all that was launched is read first.
"""

from __future__ import annotations

from collections import deque
from time import perf_counter
from typing import TYPE_CHECKING

from torch import Tensor

from onegraph.engine.pages import extend_digests
from onegraph.engine.sequence import Sequence
from onegraph.ops.calls import BROKEN, DIRTY, NOTHING

if TYPE_CHECKING:
    from onegraph.engine.generate import Engine, Report

GROWTH = 64  # tokens that rows get pages for at a time, where there are enough: a block table changes once in so many


class Scheduler:
    """Runs sequences (`Engine.request`) on an engine, which is its own until `close`.

    Args:
        interleave: a decode step between two chunks of prompts, so that nobody's text stalls behind a long prompt.
            False: prompts first, for fewer and fuller decode steps.
        share: pages that hold the beginning of a prompt already are used again, where the cache's pages are pure
            (`Cache.pure_pages`: the exact cache, unless a step and a prompt compute otherwise; codes and DeepSeek-V4's
            windows depend on more than the tokens).

    A sequence gets pages for its prompt when it is admitted, in the order of `add`, and more as it grows. Where too few
    are free the youngest sequence gives up its own and waits; what it read is read again later, its output by prefill
    too where pages are pure, else by decode steps that are told their tokens. So its tokens are the same.

    Not thread-safe. Loops over `step` stand inside of `engine.running()`.
    """

    def __init__(self, engine: Engine, *, interleave: bool = True, share: bool = True) -> None:
        engine.claim()
        self.engine, self.stats = engine, engine.stats
        self._allocator, self._slots = engine._allocator, engine._slots
        if engine.soiled:
            self._clear_cache()
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # the oldest first
        self._interleave = interleave
        self._pure = engine.pure_pages
        self._share = share and self._pure
        self._rows: list[Sequence] = []  # that are loaded
        self._under_way: deque[tuple[list[Sequence], Report]] = deque()
        self._chunks: deque[tuple[Sequence, bool, Report]] = deque()  # of prompts; whether the next token is new
        self._stale = True  # the loaded rows are not those that should run
        self._ended = self._poisoned = False  # a sequence is done; one gave NaN
        self._dirty: set[Sequence] = set()  # NaN beside drafts, which rounds under way may meet too
        self._room = 0  # steps until a row's budget is used up
        self._ahead = 0  # steps that may be under way when another is launched
        self._decoded = True  # whether the last step was a decode step
        self._new: list[tuple[Sequence, int]] = []

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """It gets no more tokens; its row and pages are free in the next step."""
        sequence.cancelled = True
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        self._ended = True

    def step(self) -> list[tuple[Sequence, int]]:
        """Launch a chunk of a prompt or a decode step; (sequence, token) that the host learnt meanwhile, in order.

        A sequence that is `done` then has left. Token -1: the model gave NaN, `error` of the sequence says where; the
        others go on, from what they had.
        """
        started, built = perf_counter(), self.stats.build_seconds
        self._new = []
        if self._ended or self._poisoned:
            self.settle()
        self._admit()
        sequence = self._next_to_prefill()
        if sequence is None:
            self._decode()
        else:
            self._prefill(sequence)
        self._decoded = sequence is None
        seconds = perf_counter() - started - (self.stats.build_seconds - built)
        if sequence is None:
            self.stats.decode_seconds += seconds
        else:
            self.stats.prefill_seconds += seconds
        return self._new

    def close(self) -> None:
        """Everybody's rows and pages are free again, also after an error or an interrupt."""
        for sequence in self.running:
            self._give_back(sequence)
        self.running.clear()
        self.waiting.clear()
        # Nobody will learn whether what is under way gives NaN. Cleared when next used: a device may have failed.
        self.engine.soiled |= bool(self._poisoned or self._under_way or self._chunks)
        self._under_way.clear()
        self._chunks.clear()
        self.engine.release()

    # Who runs.

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.engine.max_batch:
            sequence = self.waiting[0]
            if not self._take_pages(sequence):
                break
            self.waiting.remove(sequence)  # others may stand before it now: see `settle`
            sequence.slot = self._slots.pop()
            sequence.to_prefill = sequence.length if self._pure else len(sequence.prompt)
            self.running.append(sequence)
            self.engine.begin(sequence)

    def _take_pages(self, sequence: Sequence) -> bool:
        """As `_take`, exactly where the sequence may be exact, unless pages are too few for that."""
        sequence.exact = self.engine.short.joins(sequence, self.running)
        if self._take(sequence):
            return True
        if not any(s.exact for s in (sequence, *self.running)):
            return False
        self._encode()
        sequence.exact = False
        return self._take(sequence)

    def _take(self, sequence: Sequence) -> bool:
        """For all its tokens and the next step, if enough stay free for a step of each of the others that grow."""
        size = self._allocator.page_size
        growing = sum(max(1, self._lacks(s, self.engine.span)) for s in self.running if self._lacks(s, s.limit) > 0)
        shared: list[int] = []
        if self._share:
            self._extend_digests(sequence, sequence.length)
            shared = self._allocator.share(sequence.digests[: (sequence.length - 1) // size])  # one token is read
        tokens = min(sequence.length + self.engine.span, sequence.limit)
        count = self._allocator.needed(tokens, sequence.exact) - len(shared)
        more = self._allocator.take(count) if count + growing <= self._allocator.free else None
        if more is None:
            self._allocator.give_back(shared)
            return False
        sequence.pages, sequence.read = shared + more, len(shared) * size
        self.stats.shared_tokens += sequence.read
        return True

    def _share_more(self, sequence: Sequence) -> None:
        """What others have read of its beginning since it was admitted: of prompts that come together, the first one
        reads for all."""
        size = self._allocator.page_size
        shared = self._allocator.share(sequence.digests[: (sequence.length - 1) // size])
        tokens = len(shared) * size
        if tokens <= sequence.read:
            self._allocator.give_back(shared)
            return
        self._allocator.give_back(sequence.pages[: len(shared)])
        sequence.pages[: len(shared)] = shared
        self.stats.shared_tokens += tokens - sequence.read
        sequence.read = tokens

    def settle(self) -> None:
        """Read what was launched; who is done leaves. After a NaN everybody starts over in a clean cache."""
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
        self.engine.clear()
        self.engine.soiled = False
        self._allocator.forget()

    def _preempt(self, sequence: Sequence) -> None:
        self._leave(sequence)
        self.waiting.appendleft(sequence)
        self.stats.preemptions += 1

    def _leave(self, sequence: Sequence) -> None:
        if sequence.error is None:
            self._remember(sequence)
        self.running.remove(sequence)
        self._give_back(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        self._allocator.give_back(sequence.pages)
        self._slots.append(sequence.slot)
        sequence.pages, sequence.read, sequence.to_prefill, sequence.exact = [], 0, 0, False

    def _remember(self, sequence: Sequence) -> None:
        """Its full pages may be shared from now on."""
        if self._share:
            full = sequence.read // self._allocator.page_size
            self._extend_digests(sequence, sequence.read)
            for page, digest in zip(sequence.pages[:full], sequence.digests, strict=False):
                self._allocator.remember(page, digest)

    def _extend_digests(self, sequence: Sequence, length: int) -> None:
        if len(sequence.digests) < length // self._allocator.page_size:
            known, ahead = sequence.tokens(0, length), self.engine.ahead_of_pages
            extend_digests(sequence.digests, known, self._allocator.page_size, ahead=int(ahead))

    # What runs.

    def _next_to_prefill(self) -> Sequence | None:
        if self._interleave and not self._decoded and any(s.decoding for s in self.running):
            return None
        return next((s for s in self.running if not s.decoding), None)

    def _prefill(self, sequence: Sequence) -> None:
        if self._share:
            self._share_more(sequence)
        end = min(sequence.read + self.engine.chunk, sequence.to_prefill)
        self._chunks.append((sequence, end == sequence.length, self.engine.prefill(sequence, end)))
        self.stats.prefill_tokens += end - sequence.read
        sequence.read = end
        self._remember(sequence)
        if sequence.decoding:
            self._stale = True
        if end == sequence.length:
            self._read_all()
        while len(self._chunks) > self.engine.ahead:
            self._read_chunk()

    def _decode(self) -> None:
        if self._stale or not self._room or not self._covered():
            self._reload()
        if not self._rows:
            return
        self._room -= 1
        read = max(s.read for s in self._rows)
        reach = read + len(self._under_way) * self.engine.reach + self.engine.span
        self._under_way.append((self._rows, self.engine.decode(reach)))
        self.stats.decode_steps += 1
        if len(self._under_way) > self._ahead:
            self._read()

    def _reload(self) -> None:
        """The rows that decode, each with a page for its next token; the youngest make room where pages run short."""
        self.settle()
        if self.engine.short.over(self.running):
            self._encode()
        while not self._grow():
            if any(s.exact for s in self.running):
                self._encode()
            else:
                self._preempt(self.running[-1])
        self._rows = [s for s in self.running if s.decoding]
        if self._rows:
            self.engine.load(self._rows)
            # A row that repeats is told each token: what it draws is what it knows but for a near-tie's rounding.
            self._room = 1 if any(s.repeating for s in self._rows) else min(s.left for s in self._rows)
            if self._rows[0].exact:
                self._room = min(self._room, self.engine.short.steps(self._rows))
            # What may follow a token is known when the host has it: the next step waits for the last.
            self._ahead = 0 if any(s.constraint for s in self._rows) else self.engine.ahead
        self._stale = False

    def _encode(self) -> None:
        """Those that are exact for being short turn into codes, which need fewer pages."""
        self.settle()
        rows = [s for s in self.running if s.exact]
        self.engine.encode([s for s in rows if s.read])
        for sequence in rows:
            sequence.exact = False
            reach = min(sequence.length + self.engine.span, sequence.limit)
            kept = self._allocator.needed(reach)
            self._allocator.give_back(sequence.pages[kept:])
            del sequence.pages[kept:]

    def _covered(self) -> bool:
        """Whether every loaded row has pages for its next tokens, or got them from those that are free."""
        if not self._missing(self.engine.span):
            return True
        if not self._grow():
            return False
        self.engine.load_tables(self._rows)
        return True

    def _grow(self) -> bool:
        """Pages for the next GROWTH tokens of all rows that decode, or for the next step; False where none are left."""
        for tokens in (max(GROWTH, self.engine.span), self.engine.span):
            missing = self._missing(tokens)
            if sum(count for _, count in missing) <= self._allocator.free:
                for sequence, count in missing:
                    sequence.pages += self._allocator.take(count) or []
                return True
        return False

    def _missing(self, tokens: int) -> list[tuple[Sequence, int]]:
        """Rows that decode and how many pages each lacks for its next `tokens` tokens, behind the steps under way."""
        ahead = len(self._under_way) * self.engine.reach + tokens
        return [(s, count) for s in self.running if s.decoding and (count := self._lacks(s, ahead)) > 0]

    def _lacks(self, sequence: Sequence, tokens: int) -> int:
        """Pages that it needs for so many tokens behind what is read, less those that it has."""
        reach = min(sequence.limit, sequence.read + tokens)
        return self._allocator.needed(reach, sequence.exact) - len(sequence.pages)

    # What came out.

    def _read_all(self) -> None:
        while self._under_way:
            self._read()
        while self._chunks:
            self._read_chunk()

    def _read_chunk(self) -> None:
        """The oldest chunk of a prompt: whether it gave NaN, and behind the last the first token."""
        sequence, new, (tokens, told) = self._chunks.popleft()
        token = int(tokens())
        if sequence.done:
            self._poisoned |= token < 0
        elif new or token < 0:
            self._hand_out(sequence, token, None if told is None else told()[0])

    def _read(self) -> None:
        """Wait for the oldest step under way. A row that was done before has run one too many, in its own pages: all
        that it tells is whether a NaN lies there."""
        rows, (tokens, told) = self._under_way.popleft()
        drawn, known = tokens().tolist(), None if told is None else told().unflatten(0, (len(rows), -1))
        for row, (sequence, new) in enumerate(zip(rows, drawn, strict=True)):
            if sequence in self._dirty:  # it starts over from what it had
                continue
            if DIRTY in new:
                self._dirty.add(sequence)
                self._poisoned = True
            if sequence.done:
                self._poisoned |= BROKEN in new
                continue
            for place, token in enumerate(new):
                if token <= NOTHING or sequence.done:
                    break
                sequence.read += 1
                own = None if known is None else known[row, place]
                self.stats.decode_tokens += self._hand_out(sequence, token, own)
            self._ended |= sequence.exact and sequence.read >= self.engine.short.tokens

    def _hand_out(self, sequence: Sequence, token: int, told: Tensor | None) -> bool:
        """The token behind all that a sequence has read; False where it was known."""
        if token < 0:
            self._poisoned = True
            sequence.error = FloatingPointError(
                f"prompt {sequence.index}: the model gives NaN at position {sequence.read}: its weights hold NaN or "
                "infinities, or activations overflow its dtype; check the checkpoint, or load it in float32"
            )
        elif sequence.read < sequence.length:
            return False
        else:
            sequence.take(token)
            if told is not None and (wanted := sequence.params.logprobs) is not None:
                sequence.logprobs.append(self.engine.choice_state().logprob(told, token, wanted))
        self._new.append((sequence, token))
        self._ended |= sequence.done
        return token >= 0
