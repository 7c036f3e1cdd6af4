"""Every field of every endpoint, with every kind of JSON: a request is read, or refused with an APIError."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from onegraph.serve import messages, responses
from onegraph.serve.errors import APIError
from onegraph.serve.protocol import parse

VALUES: list[Any] = [
    None, [], {}, "", "a", 3, -1, 1.5, True, [[]], [{}], [None], {"a": 1}, {"type": "function"}, {"type": []},
    [{"type": []}], [{"type": "message"}], [{"type": "function_call"}], [{"type": "function_call_output"}],
    [{"type": "function", "name": []}], [{"name": "a", "input_schema": 3}], {"type": "tool", "name": []},
    [{"role": "user", "content": [{"type": "text", "text": 3}]}],
    [{"role": "user", "content": [{"type": "tool_result"}]}],
    [{"role": "assistant", "content": [{"type": "tool_use", "id": [], "name": {}, "input": []}]}],
    [{"role": "assistant", "content": [{"type": "thinking", "thinking": "a"}]}],
    {"type": "json_schema"}, {"format": {"type": "json_schema"}}, {"format": []}, {"effort": []},
    {"type": "enabled", "budget_tokens": "a"},
]  # fmt: skip
HI = [{"role": "user", "content": "Hi"}]
SAMPLING = ("model", "stop", "seed", "n", "logit_bias", "stream", "stream_options", "temperature", "user", "metadata")
CHAT = (
    "messages", "max_tokens", "tools", "tool_choice", "parallel_tool_calls", "logprobs", "top_logprobs",
    "response_format", "guided_json", "guided_regex", "structured_outputs", "chat_template_kwargs", "reasoning_effort",
)  # fmt: skip
COMPLETION = (
    "prompt", "echo", "best_of", "logprobs", "suffix", "min_tokens", "stop_token_ids", "priority", "ignore_eos",
    "truncate_prompt_tokens", "skip_special_tokens", "min_p", "repetition_penalty",
)  # fmt: skip
MESSAGES = (
    "messages", "system", "max_tokens", "tools", "tool_choice", "thinking", "stop_sequences", "top_k", "top_p",
    "cache_control", "service_tier", "container", "output_config",
)  # fmt: skip


@pytest.mark.parametrize(
    ("read", "fine", "names"),
    [
        (partial(parse, chat=True), {"model": "m", "messages": HI}, CHAT),
        (partial(parse, chat=False), {"model": "m", "prompt": "Hi"}, COMPLETION),
        (messages.parse, {"model": "m", "max_tokens": 5, "messages": HI}, MESSAGES),
        (lambda body: responses.parse(body, responses.Conversations()), {"model": "m", "input": "Hi"}, responses.OWN),
    ],
    ids=["chat", "completions", "messages", "responses"],
)
def test_a_field_of_any_kind_is_read_or_refused(
    read: Callable[[bytes], object], fine: dict[str, Any], names: tuple[str, ...]
) -> None:
    read(json.dumps(fine).encode())
    statuses = []
    for name in (*names, *SAMPLING):
        for value in VALUES:
            try:
                read(json.dumps(fine | {name: value}).encode())
            except APIError as error:
                statuses.append(error.status)
    assert max(statuses) < 500
    assert len(statuses) > len(VALUES) * len(names) // 2
