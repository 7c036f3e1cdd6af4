"""Requests -> what the engine computes: chat template, tokenizer, lengths, constraints.

Requests of like length share a lane: a tokenizer with a process and a thread of its own. A long prompt delays only
longer ones and its like. A request that is cancelled while it waits for its lane is not tokenized.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, TypeVar

from onegraph.api.completion import copies
from onegraph.api.llm import LLM
from onegraph.api.tokenizer import Tokenizer, TooLong
from onegraph.engine.arguments import ArgumentError
from onegraph.engine.params import ANSWER, SamplingParams
from onegraph.engine.sequence import Sequence
from onegraph.serve.protocol import Asked, Refused
from onegraph.serve.tools import CallForm, find_form

T = TypeVar("T")
LANES = (1 << 15, 1 << 19, 1 << 40)  # characters of a request that the lane takes


class _Lane:
    """tokenizer: whose copy this lane uses; None to use `first` itself."""

    def __init__(self, first: Tokenizer, *, copy: bool) -> None:
        self._first, self._copy = first, copy
        self.thread = ThreadPoolExecutor(1, "prompts")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return self._first.copy() if self._copy else self._first


class Prompts:
    """The lanes of one server."""

    def __init__(self, llm: LLM) -> None:
        self._llm, self._closed = llm, False
        self._lanes = [_Lane(llm.tokenizer, copy=i > 0) for i in range(len(LANES))]

    @cached_property
    def form(self) -> CallForm | None:
        """How the model calls functions, None where it does not."""
        return find_form(self._llm.tokenizer.template)

    async def read(self, asked: Asked) -> tuple[list[Sequence], int]:
        """The engine's requests, and how many tokens the prompts have. Raises Refused. Cancelled, it does nothing more
        than what has begun."""
        return await self._run(asked.size, self._read, asked)

    async def tokenize(self, asked: Asked, special: bool) -> list[int]:
        """The tokens of a text or a conversation, however many. Raises Refused."""
        return await self._run(asked.size, self._tokenize, asked, special)

    async def detokenize(self, tokens: list[int]) -> str:
        """Their text, control tokens among it. Raises Refused."""
        return await self._run(len(tokens), self._detokenize, tokens)

    async def _run(self, size: int, work: Callable[..., T], *arguments: Any) -> T:
        """work(*arguments, lane) in the thread of the lane for `size`."""
        lane = next(lane for lane, most in zip(self._lanes, LANES, strict=True) if size <= most)
        try:
            return await asyncio.get_running_loop().run_in_executor(lane.thread, partial(work, *arguments, lane))
        except (RuntimeError, Refused):
            if self._closed:
                raise Refused("the server is shutting down", status=503) from None
            raise

    def close(self) -> None:
        """Cancels what waits and ends the tokenizers' processes, and with them what runs."""
        self._closed = True
        for lane in self._lanes:
            lane.thread.shutdown(wait=False, cancel_futures=True)
            if "tokenizer" in vars(lane):
                lane.tokenizer.interrupt()

    def _prompts(self, asked: Asked, lane: _Lane, context: int | None, special: bool = True) -> list[list[int]]:
        """Raises ValueError, TooLong among them."""
        if asked.messages is None:
            given = asked.prompts
            return [lane.tokenizer.encode(p, special, max_tokens=context) if isinstance(p, str) else p for p in given]
        if asked.speaks_of_tools and self.form is None:
            raise Refused(
                "tools: the model's chat template knows none, or writes calls in a form that is not known here",
                param="tools" if asked.tools else "messages", code="unsupported_parameter",
            )  # fmt: skip
        tools = None if asked.tools is None else asked.tools.defined
        return [lane.tokenizer.chat(asked.messages, asked.thinking, tools, max_tokens=context)]

    def _tokenize(self, asked: Asked, special: bool, lane: _Lane) -> list[int]:
        try:
            return self._prompts(asked, lane, None, special)[0]
        except ValueError as error:
            named = error.field if isinstance(error, ArgumentError) else "prompt"
            raise Refused(str(error), param=_field(named, asked)) from None

    def _detokenize(self, tokens: list[int], lane: _Lane) -> str:
        try:
            return lane.tokenizer.decode(tokens, special=True)
        except ValueError as error:
            raise Refused(str(error), param="tokens") from None

    def _read(self, asked: Asked, lane: _Lane) -> tuple[list[Sequence], int]:
        llm, context = self._llm, self._llm.max_model_len
        name = _field("prompt", asked) or ""
        try:
            prompts = self._prompts(asked, lane, context if asked.keep is None else None)
            if asked.keep is not None:
                prompts = [prompt[-asked.keep :] for prompt in prompts]
            name = ""
            stops = {*asked.stop_ids, *(() if asked.ignore_eos else lane.tokenizer.stops)}
            base = llm.sampling_defaults.fill(SamplingParams(stop=sorted(stops), **asked.sampling))
            rows = [
                (prompt, replace(params, max_tokens=self._length(asked, prompt)))
                for prompt in prompts
                for params in copies(base, llm.random)
            ]
            return [llm.engine.request(*row) for row in rows], sum(map(len, prompts))
        except TooLong as error:
            message = f"{error}; shorten the prompt to {context - 1} tokens or less"
            raise Refused(message, param=_field("prompt", asked), code="context_length_exceeded") from None
        except ValueError as error:  # a TemplateError or CheckpointError, too
            named = error.field if isinstance(error, ArgumentError) else ""
            raise Refused(str(error), param=_field(named, asked, name)) from None

    def _length(self, asked: Asked, prompt: list[int]) -> int:
        context = self._llm.max_model_len
        room = context - len(prompt)
        most = room if asked.messages is not None else min(ANSWER, room)
        wanted = asked.max_tokens or max(most, 1)
        if wanted > room:
            cure = (
                f"lower max_tokens to {room}, or shorten the prompt"
                if room > 0
                else f"shorten the prompt to {context - 1} tokens or less"
            )
            message = (
                f"the prompt has {len(prompt)} tokens, {wanted} more were asked for; the context is {context}; {cure}"
            )
            param = "max_tokens" if room > 0 else _field("prompt", asked)
            raise Refused(message, param=param, code="context_length_exceeded")
        return wanted


def _field(what: str, asked: Asked, otherwise: str = "") -> str | None:
    """The request's field for an argument of the engine or the tokenizer; `otherwise` where it has none."""
    text = "prompt" if asked.messages is None else "messages"
    forms = {"thinking": "chat_template_kwargs", "json_schema": "tools" if asked.tools else "response_format"}
    if what in forms:
        return forms[what]
    if what == "prompt":
        return text
    return otherwise or (what if what in asked.sampling else None)
