"""Tokens of all answers -> pieces of text, in a thread of its own, up to a stop string."""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from onegraph.api.tokenizer import TextStream, Tokenizer, advance
from onegraph.engine.sequence import Sequence as EngineSequence
from onegraph.formats.files import CheckpointError

TOGETHER = 8  # tokens of one answer that become text in one call


@dataclass(frozen=True)
class Piece:
    """What an answer got: text, and from how many tokens; the last one says why it ended."""

    index: int
    text: str = ""
    tokens: int = 0
    finish: Literal["stop", "length"] | None = None
    error: str | None = None

    @property
    def last(self) -> bool:
        return self.finish is not None or self.error is not None


class StopTexts:
    """Passes text on up to the first of `stops`, holding back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self._held = ""

    def push(self, text: str, final: bool) -> tuple[str, bool]:
        """The text that may be shown, and whether a stop was met."""
        text = self._held + text
        if found := [at for stop in self.stops if (at := text.find(stop)) >= 0]:
            return text[: min(found)], True
        longest = 0 if final else max(map(len, self.stops), default=1) - 1
        ends = (n for n in range(min(longest, len(text)), 0, -1) if any(s.startswith(text[-n:]) for s in self.stops))
        keep = next(ends, 0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False


@dataclass(eq=False)
class Answer:
    """One answer on its way: which choice of its request, its row in the engine, and where its pieces go.

    Who does not take pieces holds up nobody: they wait in `pieces`, at most as many as the answer has tokens.
    """

    index: int
    sequence: EngineSequence
    text: TextStream
    stops: StopTexts
    pieces: asyncio.Queue[Piece]
    loop: asyncio.AbstractEventLoop
    pending: list[int] = field(default_factory=list)  # tokens that are not text yet
    complete: bool = False  # no token comes behind those
    ended: bool = False  # its last piece is out

    def deliver(self, piece: Piece) -> None:
        """From any thread; nothing behind the last piece."""
        if not self.ended:
            self.ended = piece.last
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self.loop.call_soon_threadsafe(self.pieces.put_nowait, piece)


class Writer:
    """Makes text of what `put` brings, of all answers in one call to the tokenizer's process.

    on_stop: called with an answer that met a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, on_stop: Callable[[Answer], None]) -> None:
        self.tokenizer, self._on_stop = tokenizer, on_stop
        self._drawn: queue.SimpleQueue[list[tuple[Answer, list[int], bool]] | None] = queue.SimpleQueue()

    def put(self, drawn: list[tuple[Answer, list[int], bool]] | None) -> None:
        """(answer, its next tokens, whether they are its last) of each; None ends `run`."""
        self._drawn.put(drawn)

    def run(self) -> None:
        """The thread: takes all that has come meanwhile at once, so that it catches up where it falls behind."""
        busy: dict[Answer, None] = {}
        while True:
            try:
                while (drawn := self._drawn.get(block=not busy)) is not None:
                    for answer, tokens, complete in drawn:
                        answer.pending += tokens
                        answer.complete = complete
                        busy[answer] = None
            except queue.Empty:
                pass
            else:
                return
            self._round(list(busy))
            busy = {answer: None for answer in busy if answer.pending and not answer.ended}

    def _round(self, answers: list[Answer]) -> None:
        moves = []
        for answer in answers:
            # With stop strings one by one: how many tokens an answer has must not depend on how fast text is made.
            count = 1 if answer.stops.stops else TOGETHER
            tokens, answer.pending = answer.pending[:count], answer.pending[count:]
            moves.append((answer.text, tokens, answer.complete and not answer.pending))
        try:
            texts: list[str | CheckpointError] = [*advance(self.tokenizer, moves)]
        except CheckpointError:  # one of them cannot be decoded in bounded time and memory: which?
            texts = [self._alone(move) for move in moves]
        for answer, text, (_, tokens, final) in zip(answers, texts, moves, strict=True):
            if isinstance(text, CheckpointError):
                answer.deliver(Piece(answer.index, error=str(text)))
                self._on_stop(answer)
                continue
            shown, met = answer.stops.push(text, final)
            finish: Literal["stop", "length"] | None = "stop" if met else None
            if final and not met:
                finish = "stop" if tokens[-1] in answer.sequence.params.stop else "length"
            answer.deliver(Piece(answer.index, shown, len(tokens), finish))
            if met and not final:
                self._on_stop(answer)

    def _alone(self, move: tuple[TextStream, list[int], bool]) -> str | CheckpointError:
        try:
            return advance(self.tokenizer, [move])[0]
        except CheckpointError as error:
            return error
