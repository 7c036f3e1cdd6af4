"""Prompts that a draft head's model answers, so that it has text of its own to learn from.

A part are pieces of a text: unchanged, and inside of tasks; some of these have the model copy the piece, so that
the head learns to follow a quotation. Another part the model makes up: given the opening of a user's turn, a model
that was trained on conversations writes a question (Xu et al., "Magpie", arXiv 2406.08464), so prompts do not run out.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from onegraph.api.calibration import corpus_text
from onegraph.api.llm import LLM
from onegraph.api.text import read_text
from onegraph.api.tokenizer import Tokenizer
from onegraph.engine.params import SamplingParams, Stats
from onegraph.models.eagle_texts import Written

PIECE = 160  # characters of the text that a prompt is made of at most
PROMPT = 112  # tokens of a prompt at most, what a chat template adds included
HELD = 12  # one prompt of so many is held out, and so is one part of the text
QUESTION = 48  # tokens of a question that the model asks itself
ASKED = 0.35  # of the prompts, which it does
COPIED = 0.25  # of the others, to which the answer is given: the piece itself
PLAIN = 0.3  # of what is left, which are pieces as they stand
COPY = (
    "Copy this passage exactly as it stands:\n\n{}",
    "Write the following once more, without changing anything:\n\n{}",
    "Say this back to me:\n\n{}",
    "{}\n\nQuote what I just wrote.",
)
TASKS = (
    *COPY,
    "{}",
    "Continue this:\n\n{}",
    "Rewrite this in other words:\n\n{}",
    "Summarize in a sentence:\n\n{}",
)
TWICE = "{}\n\n{}\n\n"  # for models without a chat template, which then go on with it a third time


class Pieces:
    """Pieces of a text, drawn by `seed`. Parts of the text are held out: those of one kind never meet the others.

    Raises ValueError for too little text.
    """

    def __init__(self, files: Sequence[str | PathLike[str]], seed: int) -> None:
        whole = "\n\n".join(read_text(Path(file)) for file in files) if files else corpus_text()
        if len(whole) < (HELD + 1) * PIECE:
            raise ValueError(f"text: got {len(whole)} characters; allowed is {(HELD + 1) * PIECE} and more")
        size = max(PIECE, len(whole) // (8 * HELD))
        parts = [whole[start : start + size] for start in range(0, len(whole) - PIECE + 1, size)]
        self._parts = {True: parts[::HELD], False: [part for i, part in enumerate(parts) if i % HELD]}
        self._draw = random.Random(seed)

    def piece(self, held: bool) -> str:
        """From the beginning of a word on."""
        part = self._draw.choice(self._parts[held])
        start = self._draw.randrange(len(part) - PIECE // 2)
        piece = part[start : start + self._draw.randint(PIECE // 2, PIECE)]
        return piece.partition(" ")[2] or piece


@dataclass(frozen=True)
class _Asked:
    prompt: list[int]
    held: bool
    params: SamplingParams
    answer: list[int] | None  # None: the model is to write it


class Prompts:
    """Prompts for a loaded model, drawn by `seed`, and its answers of `length` tokens at most.

    ran: called as ran(stats) whenever the engine ran.
    """

    def __init__(
        self, llm: LLM, pieces: Pieces, length: int, seed: int, ran: Callable[[Stats], object] = lambda stats: None
    ) -> None:
        self._llm, self._pieces, self._length, self._ran = llm, pieces, length, ran
        self._draw, self._seed, self._count = random.Random(seed + 1), seed, 0
        self._opening, self._stops = _opening(llm.tokenizer), tuple(llm.tokenizer.stops)

    def answered(self, count: int) -> Iterator[tuple[bool, Written]]:
        """So many prompts with the model's answers, half of these greedy, and whether a prompt is held out."""
        numbers = range(self._count, self._count + count)
        self._count += count
        questions = self._questions([i for i in numbers if self._opening and self._draw.random() < ASKED])
        some = [self._asked(i, questions.get(i)) for i in numbers]
        asked = [each for each in some if each.answer is None]
        answers = iter(self._written([each.prompt for each in asked], [each.params for each in asked]))
        for each in some:
            answer = next(answers) if each.answer is None else each.answer
            yield each.held, Written([*each.prompt, *answer], len(each.prompt))

    def _asked(self, i: int, question: str | None) -> _Asked:
        held = i % HELD == 0
        piece, params = self._pieces.piece(held), self._params(i, self._length, 0.8 * self._draw.randrange(2))
        if question is None and self._draw.random() < COPIED and (copied := self._copied(piece)) is not None:
            return _Asked(copied[0], held, params, copied[1])
        return _Asked(self._prompt(piece, question), held, params, None)

    def _copied(self, piece: str) -> tuple[list[int], list[int]] | None:
        """A prompt that asks for the piece again, and the piece, which small models seldom answer with; None where
        that is too long."""
        tokenizer = self._llm.tokenizer
        if tokenizer.template is None:
            prompt = tokenizer.encode(TWICE.format(piece, piece))
        else:
            prompt = tokenizer.chat([{"role": "user", "content": self._draw.choice(COPY).format(piece)}])
        return (prompt, tokenizer.encode(piece, special=False)[: self._length]) if len(prompt) <= PROMPT else None

    def _prompt(self, piece: str, question: str | None) -> list[int]:
        tokenizer = self._llm.tokenizer
        if question is None and self._draw.random() < PLAIN:
            return tokenizer.encode(piece)[:PROMPT]
        if tokenizer.template is None:
            return tokenizer.encode(TWICE.format(piece, piece))[:PROMPT]
        words = self._draw.choice(TASKS).format(piece) if question is None else question
        ids = tokenizer.chat([{"role": "user", "content": words}])
        return ids if len(ids) <= PROMPT else tokenizer.encode(piece)[:PROMPT]

    def _questions(self, numbers: Sequence[int]) -> dict[int, str]:
        """What the model asks itself, by number."""
        if not numbers:
            return {}
        params = [self._params(i, QUESTION, 1.0) for i in numbers]
        found = self._written([self._opening] * len(numbers), params)
        words = self._llm.tokenizer.decode_all(found)
        return {i: said for i, text in zip(numbers, words, strict=True) if (said := text.strip())}

    def _written(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
        found = self._llm.engine.generate(prompts, params)
        self._ran(self._llm.stats)
        return found

    def _params(self, i: int, most: int, temperature: float) -> SamplingParams:
        return SamplingParams(max_tokens=most, temperature=temperature, seed=self._seed + i, stop=self._stops)


def _opening(tokenizer: Tokenizer) -> list[int]:
    """What a user's first words stand behind; nothing where there is no chat template, it rewrites words, or it leaves
    no room for any."""
    if tokenizer.template is None:
        return []
    parts = tokenizer.template.parts([{"role": "user", "content": "Hi"}])
    ids = [] if parts is None else tokenizer.encode(parts[0], special=False)
    return ids if len(ids) < PROMPT else []
