"""The thread that runs the engine: requests in from anywhere, tokens out to the thread that makes text of them.

It alone touches the scheduler. Commands reach it by a queue, between two steps; nothing in it waits for a client.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from typing import Literal

from onegraph.api.completion import StopTexts
from onegraph.api.llm import LLM
from onegraph.api.tokenizer import Tokenizer
from onegraph.engine.choice import CHOICES, SCORING, Choice
from onegraph.engine.executor import Kind
from onegraph.engine.scheduler import Scheduler
from onegraph.engine.sequence import Sequence as EngineSequence
from onegraph.serve.errors import ENDING
from onegraph.serve.text import Answer, Echo, Piece, Writer

Prepare = Literal["background", "all", "plain"]
LOG = logging.getLogger(__name__)


class Full(Exception):
    """As many answers wait as may."""


class Stopped(Exception):
    """The engine failed, or the server is ending."""


class Worker:
    """Writes answers on an LLM's engine, which is its own from `start` to `close`.

    Args:
        tokenizer: beside the LLM's own, for what is generated: reading a long prompt holds up nobody's text.
        queue: answers that may wait besides the `max_batch` that are computed.
        prepare: what steps `start` builds, which on a GPU are captured: "all" that a request may need, or "plain" ones
            for greedy and sampled tokens. The others are built when a request first needs one; with "background" also
            one after the other while there is nothing to compute.

    counts: of answers "submitted", "finished", "cancelled" and "failed", and "generated_tokens".
    failure: why the engine's thread is not running.
    """

    def __init__(self, llm: LLM, tokenizer: Tokenizer, *, queue: int, prepare: Prepare = "background") -> None:
        self.llm, self.limit = llm, llm.engine.max_batch + queue
        steps: list[tuple[Choice, Kind]] = [(choice, kind) for choice in CHOICES for kind in ("decode", "prefill")]
        steps.append((SCORING, "prefill"))
        plain = [(choice, kind) for choice, kind in steps if not any(choice[1:])]
        self._first = steps if prepare == "all" else plain
        self._later = [step for step in steps if step not in plain] if prepare == "background" else []
        self.counts: Counter[str] = Counter()
        self.failure: str | None = None
        self._scheduler: Scheduler | None = None
        self._writer = Writer(tokenizer, lambda answer: self.cancel([answer]))
        self._commands = _Commands()
        self._answers: dict[EngineSequence, Answer] = {}  # that the engine has
        self._live, self._lock = 0, threading.Lock()  # answers that are not over
        self._used = time.monotonic()  # when the last one was over
        self._ready = threading.Event()
        self._building = False  # a step beside the first ones
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._run, self._writer.run)]

    # Called from other threads.

    def start(self) -> None:
        """Returns when the first graphs are built. Raises Stopped where one cannot be."""
        for thread in self._threads:
            thread.start()
        self._ready.wait()
        if self.failure is not None:
            raise Stopped(self.failure)

    def reserve(self, count: int) -> None:
        """Counts `count` answers, whose prompts are yet to be tokenized, among those that wait, until `release`. Raises
        Full, Stopped."""
        with self._lock:
            if self.failure is not None:
                raise Stopped(self.failure)
            if self._live + count > self.limit:
                raise Full
            self._live += count

    def release(self, count: int) -> None:
        with self._lock:
            self._live -= count
            self._used = time.monotonic()

    def submit(
        self,
        sequences: Sequence[EngineSequence],
        stops: Sequence[str],
        *,
        reserved: bool = False,
        keep: frozenset[int] = frozenset(),
        echoes: Sequence[Echo | None] = (),
    ) -> tuple[list[Answer], asyncio.Queue[Piece]]:
        """Begin an answer to each (`Engine.request`), all or none, up to the first of `stops`.

        Their pieces come through one queue of the running event loop. reserved: `reserve` has found places for as
        many, which the caller then releases. keep: as `Tokenizer.stream`. echoes: what each begins with. Raises Full,
        Stopped.
        """
        pieces: asyncio.Queue[Piece] = asyncio.Queue()
        loop, stream = asyncio.get_running_loop(), self._writer.tokenizer.stream
        answers = [
            Answer(i, each, stream(keep), StopTexts(stops, each.params.min_tokens), pieces, loop, echo)
            for i, (each, echo) in enumerate(zip(sequences, echoes or [None] * len(sequences), strict=True))
        ]
        with self._lock:
            if self.failure is not None:
                raise Stopped(self.failure)
            if self._live + len(answers) > self.limit and not reserved:
                raise Full
            self._live += len(answers)
            self.counts["submitted"] += len(answers)
            self._commands.put("add", answers)
        return answers, pieces

    def cancel(self, answers: Sequence[Answer]) -> None:
        """No more tokens: rows and pages are free in the engine's next step. Nothing for answers that are over."""
        self._commands.put("cancel", answers)

    def stop(self) -> None:
        """End after this step; whoever still waits gets an error."""
        self._commands.put("close", ())

    def close(self, seconds: float = 5.0) -> None:
        """`stop`, and wait for the end, `seconds` at most: a step that hangs holds up nobody. What is captured while
        nothing runs is waited for: the model's memory is free only behind it."""
        self.stop()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(seconds / len(self._threads))
                while self._building and thread.is_alive():
                    thread.join(0.1)

    @property
    def running(self) -> int:
        """Answers that have a row."""
        return 0 if self._scheduler is None else len(self._scheduler.running)

    @property
    def waiting(self) -> int:
        return max(0, self._live - self.running)

    @property
    def pages(self) -> tuple[int, int]:
        """Pages of the cache that somebody has, and all."""
        allocator = self.llm.engine.scheduler.allocator
        return allocator.capacity - allocator.free, allocator.capacity

    @property
    def host_pages(self) -> tuple[int, int]:
        """Pages that are in host memory, and how many may be."""
        host = self.llm.engine.executor.host_pages
        return host.used, len(host)

    @property
    def idle_s(self) -> float:
        """Seconds since the last answer was over; 0 while there is one."""
        with self._lock:
            return 0.0 if self._live else time.monotonic() - self._used

    @property
    def totals(self) -> Counter[str]:
        """`counts`, and of the engine "prompt_tokens", "shared_tokens", "restored_tokens", "offloaded_tokens",
        "decode_steps" and "preemptions"."""
        stats = self.llm.engine.stats
        return self.counts + Counter(
            prompt_tokens=stats.prefill_tokens,
            shared_tokens=stats.shared_tokens,
            restored_tokens=stats.restored_tokens,
            offloaded_tokens=stats.offloaded_tokens,
            decode_steps=stats.decode_steps,
            preemptions=stats.preemptions,
        )

    # The engine's thread.

    def _run(self) -> None:
        engine, executor = self.llm.engine, self.llm.engine.executor
        why = ENDING
        try:
            with executor.running(), closing(engine.scheduler.open()) as scheduler:
                for step in self._first:
                    self._build(*step)
                self._scheduler = scheduler
                self._ready.set()
                while self._handle_commands(scheduler):
                    self._dispatch_tokens(scheduler.step())
        except Exception as error:  # a device, or a bug: what the sequences had computed is lost
            why = f"the engine failed, restart the server: {type(error).__name__}: {' '.join(str(error).split())[:500]}"
            if self._ready.is_set():  # otherwise it is the error of starting
                LOG.error("%s", why)
        self._scheduler = None  # a closed worker keeps no cache
        with self._lock:
            self.failure = why
        self._ready.set()
        lost = [*self._answers.values(), *self._commands.late()]
        for answer in lost:
            answer.deliver(Piece(answer.index, error=why))
        self._over(len(lost), "failed")
        self._writer.put(None)

    def _build(self, choice: Choice, kind: Kind) -> None:
        executor = self.llm.engine.executor
        for exact in (False, True) if executor.sizes.exact_window.tokens else (False,):
            executor.step(kind, **choice._asdict(), exact=exact)

    def _build_later(self) -> None:
        """The next step that no request has needed yet."""
        choice, kind = self._later.pop(0)
        self._building = True
        try:
            self._build(choice, kind)
        except Exception as error:  # for lack of memory, say; a request that needs the step tries again
            LOG.warning("captured when a request first needs it: %s", " ".join(str(error).split())[:500])
        finally:
            self._building = False

    def _handle_commands(self, scheduler: Scheduler) -> bool:
        """Do what was asked meanwhile, and wait for more where there is nothing to compute. False: to end."""
        while True:
            command = self._commands.next(wait=scheduler.idle and not self._later)
            if command is None and scheduler.idle:
                self._build_later()
                continue
            if command is None:
                return True
            what, answers = command
            if what == "close":
                return False
            for answer in answers:
                if what == "add":
                    self._answers[answer.sequence] = answer
                    scheduler.add(answer.sequence)
                elif self._answers.pop(answer.sequence, None) is not None:
                    scheduler.cancel(answer.sequence)
                    self._over(1, "finished" if answer.ended else "cancelled")  # a stop string is an end

    def _dispatch_tokens(self, new: list[tuple[EngineSequence, int]]) -> None:
        """A step's tokens to the writer, each answer's together."""
        tokens: dict[EngineSequence, list[int]] = {}
        for sequence, token in new:
            if sequence in self._answers:
                tokens.setdefault(sequence, []).append(token)
        drawn = []
        for sequence, own in tokens.items():
            answer = self._answers[sequence]
            failed = sequence.error or (sequence.constraint.problem if sequence.constraint is not None else "")
            if failed:
                answer.deliver(Piece(answer.index, error=str(failed)))
            else:
                self.counts["generated_tokens"] += len(own)
                drawn.append((answer, own, sequence.done))
            if sequence.done:
                del self._answers[sequence]
                self._over(1, "failed" if failed else "finished")
        if drawn:
            self._writer.put(drawn)

    def _over(self, count: int, how: str) -> None:
        self.counts[how] += count
        self.release(count)


class _Commands:
    """What the engine's thread is to do."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[str, Sequence[Answer]]] = queue.SimpleQueue()

    def put(self, what: str, answers: Sequence[Answer]) -> None:
        """what: "add", "cancel" or "close"."""
        self._queue.put((what, answers))

    def next(self, wait: bool) -> tuple[str, Sequence[Answer]] | None:
        try:
            return self._queue.get(block=wait)
        except queue.Empty:
            return None

    def late(self) -> list[Answer]:
        """What was to be added when nobody read any more."""
        found: list[Answer] = []
        while command := self.next(wait=False):
            found += command[1] if command[0] == "add" else ()
        return found
