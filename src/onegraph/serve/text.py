"""Tokens of all answers -> pieces of text, in a thread of its own, up to a stop string."""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from onegraph.api.completion import StopTexts
from onegraph.api.token_text import TokenText, TokenTexts
from onegraph.api.tokenizer import TextStream, Tokenizer, advance
from onegraph.engine.sequence import Sequence as EngineSequence
from onegraph.formats.files import CheckpointError

TOGETHER = 8  # tokens of one answer that become text in one call


@dataclass(frozen=True)
class Echo:
    """A prompt, as an answer begins with it. offsets: characters of `text` in front of each token, where
    log-probabilities are asked for. alone: nothing else is in the answer."""

    text: str
    offsets: list[int]
    alone: bool


@dataclass(frozen=True)
class Piece:
    """What an answer got: text, and from how many tokens; the last one says why it ended, and at which stop text.
    logprobs: of these tokens, where they are asked for."""

    index: int
    text: str = ""
    tokens: int = 0
    finish: Literal["stop", "length"] | None = None
    error: str | None = None
    logprobs: tuple[TokenText, ...] = ()
    stop: str | None = None

    @property
    def last(self) -> bool:
        return self.finish is not None or self.error is not None


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
    echo: Echo | None = None  # until it is out
    pending: list[int] = field(default_factory=list)  # tokens that are not text yet
    complete: bool = False  # no token comes behind those
    ended: bool = False  # its last piece is out
    told: int = 0  # tokens whose log-probabilities are out
    written: int = 0  # characters that its tokens made, those of a stop string among them

    def deliver(self, piece: Piece) -> None:
        """From any thread; nothing behind the last piece."""
        deliver([(self, piece)])


def deliver(pieces: Sequence[tuple[Answer, Piece]]) -> None:
    """From any thread, to each answer its piece: an event loop is woken once for all of them, which costs a system call
    and, in a step of many rows, most of what a piece costs its writer."""
    bound: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Queue[Piece], Piece]]] = {}
    for answer, piece in pieces:
        if not answer.ended:
            answer.ended = piece.last
            bound.setdefault(answer.loop, []).append((answer.pieces, piece))
    for loop, found in bound.items():
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(_put, found)


def _put(found: Sequence[tuple[asyncio.Queue[Piece], Piece]]) -> None:
    for queue_, piece in found:
        queue_.put_nowait(piece)


class Writer:
    """Makes text of what `put` brings, of all answers in one call to the tokenizer's process.

    on_stop: called with an answer that met a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, on_stop: Callable[[Answer], None]) -> None:
        self.tokenizer, self._on_stop = tokenizer, on_stop
        self._texts = TokenTexts(tokenizer)
        self._drawn: queue.SimpleQueue[list[tuple[Answer, list[int], bool]] | None] = queue.SimpleQueue()

    def put(self, drawn: list[tuple[Answer, list[int], bool]] | None) -> None:
        """(answer, its next tokens, whether they are its last) of each; None ends `run` once all text is out."""
        self._drawn.put(drawn)

    def run(self) -> None:
        """The thread: takes all that has come meanwhile at once, so that it catches up where it falls behind."""
        busy: dict[Answer, None] = {}
        ending = False
        while busy or not ending:
            try:
                while (drawn := self._drawn.get(block=not busy)) is not None:
                    for answer, tokens, complete in drawn:
                        answer.pending += tokens
                        answer.complete = complete
                        busy[answer] = None
            except queue.Empty:
                pass
            else:
                ending = True
            if busy:
                self._round(list(busy))
            busy = {answer: None for answer in busy if answer.pending and not answer.ended}

    def _round(self, answers: list[Answer]) -> None:
        moves = []
        for answer in answers:
            # With stop strings one by one: how many tokens an answer has must not depend on how fast text is made. And
            # with log-probabilities: each token has its own place in the text.
            count = 1 if answer.stops.stops or answer.sequence.params.logprobs is not None else TOGETHER
            tokens, answer.pending = answer.pending[:count], answer.pending[count:]
            moves.append((answer.text, tokens, answer.complete and not answer.pending))
        try:
            texts: list[str | None] = [*advance(self.tokenizer, moves)]
        except (CheckpointError, OSError):  # one of them cannot be decoded in bounded time and memory: which?
            texts = [None] * len(moves)
        told: list[tuple[Answer, Piece]] = []
        stopped: list[Answer] = []
        for answer, text, move in zip(answers, texts, moves, strict=True):
            try:
                text = advance(self.tokenizer, [move])[0] if text is None else text
                shown, met = answer.stops.push(text, move[2])
                echo, echoed, answer.echo = answer.echo, self._echoed(answer), None
                answer.written += 0 if echo is None else len(echo.text)
                logprobs = self._logprobs(answer, len(move[1]))
                answer.written += len(text)
            except (CheckpointError, OSError) as error:
                told.append((answer, Piece(answer.index, error=str(error))))
                stopped.append(answer)
                continue
            _, tokens, final = move
            finish: Literal["stop", "length"] | None = "stop" if met else None
            if final and finish is None:
                finish = "stop" if _stopped(answer.sequence, tokens[-1]) else "length"
            piece = Piece(answer.index, shown, len(tokens), finish, logprobs=logprobs, stop=answer.stops.met)
            told.append((answer, piece if echo is None else _behind(echo, echoed, piece)))
            if met and not final:
                stopped.append(answer)
        deliver(told)
        for answer in stopped:
            self._on_stop(answer)

    def _logprobs(self, answer: Answer, count: int) -> tuple[TokenText, ...]:
        if answer.sequence.params.logprobs is None:
            return ()
        found = answer.sequence.logprobs[answer.told : answer.told + count]
        answer.told += count
        return self._texts.of([(each.token, each.logprob, each.top, answer.written) for each in found])

    def _echoed(self, answer: Answer) -> tuple[TokenText, ...]:
        """The prompt's tokens, where the answer begins with them and log-probabilities are asked for."""
        if answer.echo is None or not answer.echo.offsets:
            return ()
        first, *others = zip(answer.sequence.prompt, answer.echo.offsets, strict=True)
        scored = zip(answer.sequence.prompt_logprobs, others, strict=True)
        return self._texts.of(
            [(first[0], None, (), first[1]), *((each.token, each.logprob, each.top, at) for each, (_, at) in scored)]
        )


def _behind(echo: Echo, echoed: tuple[TokenText, ...], piece: Piece) -> Piece:
    """An answer's first piece with the prompt in front of it, or in place of it."""
    if echo.alone:
        return replace(piece, text=echo.text, tokens=0, finish="length", logprobs=echoed)
    return replace(piece, text=echo.text + piece.text, logprobs=echoed + piece.logprobs)


def _stopped(sequence: EngineSequence, last: int) -> bool:
    """Whether a sequence that is done ended of its own accord."""
    return last in sequence.params.stop or (sequence.constraint is not None and sequence.constraint.done)
