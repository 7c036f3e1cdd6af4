"""Requests -> what the engine computes: chat template, tokenizer, lengths, constraints.

Requests of like length share a lane: a tokenizer with a process and a thread of its own. A long prompt delays only
longer ones and its like. A request that is cancelled while it waits for its lane is not tokenized.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, TypeVar

from onegraph.api.completion import expand_n
from onegraph.api.llm import LLM
from onegraph.api.token_text import PARTIAL
from onegraph.api.tokenizer import Tokenizer, TooLong
from onegraph.engine.arguments import ArgumentError
from onegraph.engine.params import ANSWER, SamplingParams
from onegraph.engine.sequence import Sequence
from onegraph.serve.dialect import AnswerForm, Dialect
from onegraph.serve.errors import ENDING, APIError
from onegraph.serve.protocol import CompletionRequest
from onegraph.serve.text import Echo

T = TypeVar("T")
NEIGHBOURS = 8  # tokens in front of one that its text may depend on: parts of a character, a space that is left out
LANES = (1 << 15, 1 << 19, 1 << 40)  # characters of a request that the lane takes


@dataclass(frozen=True)
class Read:
    """A request as the engine takes it: its answers, how many tokens its prompts have, what each answer echoes, how
    answers are read, and which control tokens are text in them."""

    sequences: list[Sequence]
    tokens: int
    echoes: list[Echo | None]
    form: AnswerForm
    keep: frozenset[int]


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
    def dialect(self) -> Dialect:
        """How the model thinks and calls functions."""
        return Dialect(self._llm.tokenizer)

    async def read(self, asked: CompletionRequest) -> Read:
        """Raises APIError. Cancelled, it does nothing more than what has begun."""
        return await self._run(asked.size, self._read, asked)

    async def tokenize(self, asked: CompletionRequest, special: bool) -> list[int]:
        """The tokens of a text or a conversation, however many. Raises APIError."""
        return await self._run(asked.size, self._tokenize, asked, special)

    async def detokenize(self, tokens: list[int]) -> str:
        """Their text, control tokens among it. Raises APIError."""
        return await self._run(len(tokens), self._detokenize, tokens)

    async def _run(self, size: int, work: Callable[..., T], *arguments: Any) -> T:
        """work(*arguments, lane) in the thread of the lane for `size`."""
        lane = next(lane for lane, most in zip(self._lanes, LANES, strict=True) if size <= most)
        try:
            return await asyncio.get_running_loop().run_in_executor(lane.thread, partial(work, *arguments, lane))
        except (RuntimeError, APIError):
            if self._closed:
                raise APIError(ENDING, status=503) from None
            raise

    def close(self) -> None:
        """Cancels what waits and ends the tokenizers' processes, and with them what runs."""
        self._closed = True
        for lane in self._lanes:
            lane.thread.shutdown(wait=False, cancel_futures=True)
            if "tokenizer" in vars(lane):
                lane.tokenizer.interrupt()

    def _prompts(
        self, asked: CompletionRequest, lane: _Lane, context: int | None, special: bool = True
    ) -> list[list[int]]:
        """Raises ValueError, TooLong among them."""
        if asked.messages is None:
            given = asked.prompts
            return [lane.tokenizer.encode(p, special, max_tokens=context) if isinstance(p, str) else p for p in given]
        messages, tools = self.dialect.messages(asked.messages, asked.tools)
        return [lane.tokenizer.chat(messages, asked.thinking, tools, max_tokens=context)]

    def _tokenize(self, asked: CompletionRequest, special: bool, lane: _Lane) -> list[int]:
        try:
            return self._prompts(asked, lane, None, special)[0]
        except ValueError as error:
            named = error.field if isinstance(error, ArgumentError) else "prompt"
            raise APIError(str(error), param=_field(named, asked)) from None

    def _detokenize(self, tokens: list[int], lane: _Lane) -> str:
        try:
            return lane.tokenizer.decode(tokens, special=True)
        except ValueError as error:
            raise APIError(str(error), param="tokens") from None

    def _read(self, asked: CompletionRequest, lane: _Lane) -> Read:
        llm, context = self._llm, self._llm.max_model_len
        name = _field("prompt", asked) or ""
        try:
            prompts = self._prompts(asked, lane, context if asked.keep is None else None)
            if asked.keep is not None:
                most = asked.keep if asked.keep > 0 else max(1, context - (asked.max_tokens or 1))
                prompts = [prompt[-most:] for prompt in prompts]
            name = ""
            stops = {*asked.stop_ids, *(() if asked.ignore_eos else lane.tokenizer.stops)}
            form, sampling = self._answer_form(asked)
            adapter = asked.model if asked.model in llm.engine.adapters else None
            params = SamplingParams(stop=sorted(stops), adapter=adapter, **sampling)
            base = llm.sampling_defaults.fill(params)
            sequences = []  # made first: that checks the ids, which `_echo` decodes
            for prompt in prompts:
                length = self._length(asked, prompt)
                answers = [replace(params, max_tokens=length) for params in expand_n(base, llm.random)]
                sequences += llm.engine.requests(prompt, answers)
            echoes = [
                echo
                for text, prompt in zip(asked.prompts if asked.messages is None else [""], prompts, strict=True)
                for echo in [_echo(asked, lane.tokenizer, text, prompt) if asked.echo else None] * base.n
            ]
            keep = form.keep
            if asked.special:
                keep |= frozenset(lane.tokenizer.control_tokens.values()) - stops
            return Read(sequences, sum(map(len, prompts)), echoes, form, keep)
        except TooLong as error:
            message = f"{error}; shorten the prompt to {context - 1} tokens or less"
            raise APIError(message, param=_field("prompt", asked), code="context_length_exceeded") from None
        except ValueError as error:  # a TemplateError or CheckpointError, too
            named = error.field if isinstance(error, ArgumentError) else ""
            raise APIError(str(error), param=_field(named, asked, name)) from None

    def _answer_form(self, asked: CompletionRequest) -> tuple[AnswerForm, dict[str, Any]]:
        """How answers are read, and the request's sampling with what constrains them so."""
        if asked.messages is None or self._llm.tokenizer.template is None:
            return AnswerForm(), asked.sampling
        own: dict[str, Any] = {
            name: asked.sampling[name] for name in ("json_schema", "regex") if name in asked.sampling
        }
        form = self.dialect.answer_form(asked.tools, asked.thinking, own)
        if form.grammar is None:
            return form, asked.sampling
        others = {name: value for name, value in asked.sampling.items() if name not in own}
        return form, others | {"grammar": form.grammar}

    def _length(self, asked: CompletionRequest, prompt: list[int]) -> int:
        context = self._llm.max_model_len
        room = context - len(prompt)
        most = room if asked.messages is not None else min(ANSWER, room)
        wanted = max(most, 1) if asked.max_tokens is None else max(asked.max_tokens, 1)  # one is drawn in any case
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
            raise APIError(message, param=param, code="context_length_exceeded")
        return wanted


def _echo(asked: CompletionRequest, tokenizer: Tokenizer, given: str | list[int], ids: list[int]) -> Echo:
    """given: the prompt as the request has it; ids: the tokens that are left of it."""
    whole = isinstance(given, str) and asked.keep is None
    text = given if isinstance(given, str) and whole else tokenizer.decode(ids, special=True)
    offsets: list[int] = []
    if "prompt_logprobs" in asked.sampling:
        rows = [ids[max(0, i - NEIGHBOURS) : end] for i in range(len(ids)) for end in (i, i + 1)]
        lengths = [len(each.rstrip(PARTIAL)) for each in tokenizer.decode_all(rows, special=True)]
        widths = [after - before for before, after in zip(lengths[::2], lengths[1::2], strict=True)]
        # From the end on: in front of a text the tokenizer may put tokens that are not in it.
        offsets = [max(0, at + len(text) - sum(widths)) for at in accumulate(widths[:-1], initial=0)]
    return Echo(text, offsets, alone=asked.max_tokens == 0)


def _field(what: str, asked: CompletionRequest, otherwise: str = "") -> str | None:
    """The request's field for an argument of the engine or the tokenizer; `otherwise` where it has none."""
    text = "prompt" if asked.messages is None else "messages"
    constraint = "tools" if asked.tools else "response_format"
    thinking = "reasoning_effort" if isinstance(asked.thinking, str) else "chat_template_kwargs"
    forms = {"thinking": thinking, "json_schema": constraint, "grammar": constraint, "tools": "tools"}
    if what in forms:
        return forms[what]
    if what == "prompt":
        return text
    return otherwise or (what if what in asked.sampling else None)
