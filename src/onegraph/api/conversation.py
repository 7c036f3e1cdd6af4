"""Turns with a model: all that was said, and how much of it fits the context that the model has."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from typing import TYPE_CHECKING, Any

from onegraph.api.chat import Thinking
from onegraph.engine.params import SamplingParams

if TYPE_CHECKING:
    from onegraph.api.llm import LLM, Pieces

ROOM = 512  # tokens that an answer may have at the least, in a context of four times that and more
THOUGHT = "</think>"  # what ends a model's thoughts in front of its answer


def reserved_tokens(limit: int | None, context: int) -> int:
    """Tokens of a context that are kept for an answer of at most `limit`, however much was said before."""
    return min(limit or ROOM, ROOM, max(1, context // 4))


class Conversation:
    """A conversation with `llm`, one question and its answer after the other.

    Args:
        system: stands before everything, and stays when old turns are dropped.
        params: how to draw; its max_tokens is not asked.
        max_tokens: of an answer; None for what the context leaves.
        thinking: as `LLM.chat`.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        system: str | None = None,
        params: SamplingParams | None = None,
        max_tokens: int | None = None,
        thinking: Thinking = None,
    ) -> None:
        self._llm, self._params, self._limit, self._thinking = llm, params or SamplingParams(), max_tokens, thinking
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._turns: list[dict[str, str]] = []  # a question, its answer, the next question, ...
        self._first = 0  # of the turns that the model still sees
        self.dropped: list[str] = []
        self.budget = 0

    @property
    def messages(self) -> list[dict[str, str]]:
        """All that was said, behind the system prompt."""
        return [*self._system, *self._turns]

    @property
    def seen(self) -> list[dict[str, str]]:
        """What the model sees of `messages`: the system prompt, and the last turns."""
        return [*self._system, *self._turns[self._first :]]

    def reset(self) -> None:
        """Forgets every turn; the system prompt stays."""
        self._turns, self._first = [], 0

    def ask(self, text: str, cancelled: Callable[[], bool] | None = None) -> Pieces:
        """The answer, piece by piece; closed early, or `cancelled` as `LLM.stream` has it, it stops the model, and what
        was written stays in the conversation.

        Where question and answer do not fit the context any more, the model sees the oldest turns no longer; `dropped`
        holds their questions, `budget` how many tokens the answer may have. An answer without text (stopped at once,
        or in its thoughts) leaves no turn. Raises ValueError, and changes nothing, for a question that does not fit
        alone.
        """
        turns = [*self._turns, {"role": "user", "content": text}]
        context = self._llm.max_model_len
        room = reserved_tokens(self._limit, context)
        first = self._first
        while (needed := self._tokens(turns[first:])) + room > context:
            if first == len(turns) - 1:
                raise ValueError(
                    f"the question takes {needed} tokens in the chat template, and the context of {context} leaves "
                    f"{context - room} for it; shorten it, or give a larger max_model_len"
                )
            first += 2  # a question and its answer
        self.dropped = [turn["content"] for turn in turns[self._first : first : 2]]
        left = context - needed
        self.budget = left if self._limit is None else min(self._limit, left)
        return self._answer(turns, first, cancelled)

    def _tokens(self, turns: list[dict[str, str]]) -> int:
        return len(self._llm.tokenizer.chat([*self._system, *turns], self._thinking))

    def _answer(
        self, turns: list[dict[str, str]], first: int, cancelled: Callable[[], bool] | None
    ) -> Generator[str, None, None]:
        sampling: dict[str, Any] = {"thinking": self._thinking, "max_tokens": self.budget, "cancelled": cancelled}
        answer = ""
        with closing(self._llm.chat_stream([*self._system, *turns[first:]], self._params, **sampling)) as pieces:
            try:
                for piece in pieces:
                    answer += piece
                    yield piece
            except GeneratorExit:
                self._keep(turns, first, answer)
                raise
        self._keep(turns, first, answer)

    def _keep(self, turns: list[dict[str, str]], first: int, answer: str) -> None:
        """Without the thoughts, as those who train such models ask: they would fill the context."""
        said = answer.rpartition(THOUGHT)[2].strip()
        if said and not said.startswith("<think>"):
            self._turns, self._first = [*turns, {"role": "assistant", "content": said}], first
