"""/v1/responses and /v1/messages, with the real `openai` and `anthropic` clients, the application in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import httpx2
import openai
import pytest
from starlette.applications import Starlette

from fuzz import tiny
from onegraph import LLM
from onegraph.api.tokenizer import Tokenizer
from onegraph.formats.checkpoint import Checkpoint
from onegraph.serve.app import Server, Settings
from onegraph.serve.errors import APIError
from onegraph.serve.models import Models
from onegraph.serve.responses import Conversations, parse
from onegraph.serve.worker import Worker
from test_serve_tools import QWEN

KEY = "sesame"
HOW: Any = {"model": "tiny", "temperature": 0}
OTHER: Any = {"model": "tiny", "extra_body": {"temperature": 0}}  # of the other client, which has no such argument
ONE: Any = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny.write_model(
        tmp_path_factory.mktemp("endpoints") / "tiny", tiny.CONFIG | {"max_position_embeddings": 1024}
    )
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": QWEN}))
    return path


@pytest.fixture(scope="module")
def app(path: Path) -> Iterator[Starlette]:
    with LLM(path, max_num_seqs=4, device="cpu") as llm, Checkpoint.open(path) as checkpoint:
        worker = Worker(llm, Tokenizer(checkpoint), queue=8, prepare="plain")
        models = Models.of("tiny", worker)
        models.start()
        yield Server(models, Settings(api_key=KEY)).app()
        worker.close()


def use(app: Starlette, ask: Callable[[openai.AsyncOpenAI, anthropic.AsyncAnthropic], Awaitable[Any]]) -> Any:
    """What a conversation with the clients gives."""

    async def asked() -> Any:
        how: Any = {"api_key": KEY, "max_retries": 0}
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app=app))
        http2 = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app))
        async with (
            openai.AsyncOpenAI(base_url="http://here/v1", http_client=http, **how) as first,
            anthropic.AsyncAnthropic(base_url="http://here", http_client=http2, **how) as second,
        ):
            return await ask(first, second)

    return asyncio.run(asked())


def test_a_response_is_the_answer_of_a_chat(app: Starlette) -> None:
    async def ask(client: openai.AsyncOpenAI, _: Any) -> None:
        said: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
        chat = await client.chat.completions.create(messages=said, max_tokens=9, **HOW)
        how: Any = HOW | {"instructions": "Be brief.", "max_output_tokens": 9}
        made = await client.responses.create(input="Why?", **how)
        assert made.output_text == chat.choices[0].message.content
        assert (made.status, made.model, made.error) == ("incomplete", "tiny", None)
        assert made.incomplete_details is not None
        assert made.incomplete_details.reason == "max_output_tokens"
        assert made.usage is not None
        assert chat.usage is not None
        assert (made.usage.input_tokens, made.usage.output_tokens) == (chat.usage.prompt_tokens, 9)
        # What follows has the conversation so far, and no instructions but its own.
        said += [{"role": "assistant", "content": made.output_text}, {"role": "user", "content": "Go on."}]
        longer = await client.chat.completions.create(messages=said, max_tokens=9, **HOW)
        parts: Any = [{"role": "user", "content": [{"type": "input_text", "text": "Go on."}]}]
        after = await client.responses.create(input=parts, previous_response_id=made.id, **how)
        assert after.output_text == longer.choices[0].message.content
        bare = await client.responses.create(input=parts, previous_response_id=made.id, **how | {"instructions": None})
        assert bare.usage is not None
        assert after.usage is not None
        assert bare.usage.input_tokens < after.usage.input_tokens
        hidden = await client.responses.create(input="Why?", store=False, **how)
        for name in (hidden.id, "resp_0"):
            with pytest.raises(openai.NotFoundError, match="is not known; it was not stored"):
                await client.responses.create(input="a", previous_response_id=name, **how)
        form: Any = {"format": {"type": "json_schema", "name": "one", "schema": ONE, "strict": True}}
        held = await client.responses.create(input="Why?", text=form, **HOW)
        assert json.loads(held.output_text) in ({"a": 1}, {"a": 2})
        assert held.status == "completed"

    use(app, ask)


def test_a_response_streams_events(app: Starlette) -> None:
    async def ask(client: openai.AsyncOpenAI, _: Any) -> None:
        how: Any = HOW | {"input": "Why?", "max_output_tokens": 9}
        whole = await client.responses.create(**how)
        events = [event async for event in await client.responses.create(stream=True, **how)]
        kinds = [event.type.removeprefix("response.") for event in events]
        assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
        assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
        assert {*kinds[4:-4]} == {"output_text.delta"}
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert "".join(getattr(event, "delta", "") for event in events) == whole.output_text
        last: Any = events[-1]
        assert last.response.output_text == whole.output_text
        assert last.response.usage == whole.usage
        more: Any = HOW | {"previous_response_id": last.response.id, "max_output_tokens": 1}
        assert (await client.responses.create(input="On", **more)).usage is not None
        # The client's own reading of the events
        form: Any = {"format": {"type": "json_schema", "name": "one", "schema": ONE}}
        async with client.responses.stream(input="Why?", text=form, **HOW) as stream:
            final = await stream.get_final_response()
        assert json.loads(final.output_text) in ({"a": 1}, {"a": 2})

    use(app, ask)


@pytest.mark.parametrize("stream", [False, True])
def test_functions_are_called_and_their_results_are_read(app: Starlette, stream: bool) -> None:
    async def ask(client: openai.AsyncOpenAI, other: anthropic.AsyncAnthropic) -> None:
        tool: Any = {"type": "function", "name": "add", "parameters": ONE, "description": "Adds."}
        forced: Any = {"tools": [tool], "tool_choice": {"type": "function", "name": "add"}}
        if stream:
            async with client.responses.stream(input="1+1?", **HOW, **forced) as events:
                kinds = [event.type async for event in events]
                made: Any = await events.get_final_response()
            assert "response.function_call_arguments.done" in kinds
        else:
            made = await client.responses.create(input="1+1?", **HOW, **forced)
        (call,) = made.output
        assert (call.type, call.name, call.status) == ("function_call", "add", "completed")
        assert json.loads(call.arguments) in ({"a": 1}, {"a": 2})
        result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "2"}]
        after = await client.responses.create(input=result, previous_response_id=made.id, **HOW, max_output_tokens=4)
        said: Any = [{"role": "user", "content": "1+1?"}, call.model_dump(exclude_none=True), *result]
        same = await client.responses.create(input=said, **HOW, max_output_tokens=4)
        assert (after.output_text, after.usage) == (same.output_text, same.usage)

        ask_for: Any = OTHER | {"messages": [{"role": "user", "content": "1+1?"}], "max_tokens": 600}
        ask_for |= {"tools": [{"name": "add", "description": "Adds.", "input_schema": ONE}]}
        ask_for |= {"tool_choice": {"type": "tool", "name": "add"}}
        if stream:
            async with other.messages.stream(**ask_for) as pieces:
                message: Any = await pieces.get_final_message()
        else:
            message = await other.messages.create(**ask_for)
        (block,) = message.content
        assert (block.type, block.name, message.stop_reason) == ("tool_use", "add", "tool_use")
        assert block.input == json.loads(call.arguments), "the same prompt, and the same constraint"
        told: Any = {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "2"}]}
        turns: Any = [
            *ask_for["messages"],
            {"role": "assistant", "content": [block.model_dump(exclude_none=True)]},
            {"role": "user", "content": [told]},
        ]
        final = await other.messages.create(messages=turns, max_tokens=4, **OTHER)
        assert final.usage.input_tokens == after.usage.input_tokens

    use(app, ask)


def test_a_message_is_the_answer_of_a_chat(app: Starlette) -> None:
    async def ask(client: openai.AsyncOpenAI, other: anthropic.AsyncAnthropic) -> None:
        said: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
        chat = await client.chat.completions.create(messages=said, max_tokens=9, **HOW)
        text = chat.choices[0].message.content
        assert text
        assert chat.usage is not None
        cached: Any = {"cache_control": {"type": "ephemeral"}}
        parts: Any = [{"type": "text", "text": "Be brief.", **cached}]
        how: Any = OTHER | {"system": parts, "messages": said[1:], "max_tokens": 9}
        message: Any = await other.messages.create(**how)
        assert (message.content[0].text, message.stop_reason) == (text, "max_tokens")
        assert (message.usage.input_tokens, message.usage.output_tokens) == (chat.usage.prompt_tokens, 9)
        counted = await other.messages.count_tokens(model="tiny", system=parts, messages=said[1:])
        assert counted.input_tokens == chat.usage.prompt_tokens
        async with other.messages.stream(**how) as stream:
            streamed = "".join([piece async for piece in stream.text_stream])
            final = await stream.get_final_message()
        assert streamed == text
        assert (final.usage, final.stop_reason) == (message.usage, "max_tokens")
        stopped = await other.messages.create(**how, stop_sequences=[text[2], "never"])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", text[2])

    use(app, ask)


def test_what_is_not_supported_is_refused_in_a_sentence(app: Starlette) -> None:
    async def ask(client: openai.AsyncOpenAI, other: anthropic.AsyncAnthropic) -> None:
        for more, says in (
            ({"input": [{"type": "computer_call"}]}, 'got type "computer_call"; allowed are message'),
            ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "this server takes text"),
            ({"input": []}, "input: got []; allowed is a text or a list of messages"),
            ({"input": "a", "tools": [{"type": "web_search"}]}, "allowed are tools of type function"),
            ({"input": "a", "reasoning": {"effort": "huge"}}, 'effort: got "huge"; allowed are none, minimal, low'),
            ({"input": "a", "background": True}, "background is not supported; leave it out"),
            ({"input": "a", "extra_body": {"n": 2}}, "n is not known here"),
            ({"input": "a", "extra_body": {"max_tokens": 2}}, "max_tokens is not known here; use max_output_tokens"),
            (
                {"input": "a", "extra_body": {"response_format": {"type": "json_object"}}},
                "response_format is not known here; use text.format",
            ),
            ({"input": "a", "temperature": 1e9}, "temperature: got 1000000000.0; allowed is"),
        ):
            fields: Any = {"model": "tiny", **more}
            with pytest.raises(openai.BadRequestError) as refused:
                await client.responses.create(**fields)
            assert says in str(refused.value)
        user = {"role": "user", "content": "a"}
        for more, says in (
            ({"messages": [user, {"role": "assistant", "content": "Well"}]}, "which this server does not continue"),
            (
                {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
                'messages[0]: got "image"; allowed is a',
            ),
            ({"messages": [user], "tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]: got"),
            ({"messages": [user], "extra_body": {"temperature": -1}}, "temperature: got -1"),
            ({"messages": [user], "extra_body": {"wat": 1}}, "wat is not known here"),
            ({"messages": [user], "extra_body": {"n": 2}}, "n is not known here"),
            ({"messages": [user], "extra_body": {"stop": "a"}}, "stop is not known here; use stop_sequences"),
            (
                {"messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm"}]}]},
                "messages: they hold old thoughts alone",
            ),
        ):
            fields = {"model": "tiny", "max_tokens": 3, **more}
            with pytest.raises(anthropic.BadRequestError) as wrong:
                await other.messages.create(**fields)
            assert says in str(wrong.value)
            assert wrong.value.type == "invalid_request_error"
        with pytest.raises(anthropic.NotFoundError):
            await other.messages.create(model="claude", max_tokens=3, messages=[{"role": "user", "content": "a"}])
        with pytest.raises(anthropic.AuthenticationError):
            await other.with_options(api_key="wrong").messages.create(model="tiny", max_tokens=3, messages=[])

    use(app, ask)


@pytest.mark.parametrize("arguments", ['{"a": 1, "b', "[1]", '{"a": 1}'])
def test_a_conversation_goes_on_behind_a_call_that_was_cut(arguments: str) -> None:
    kept = Conversations()
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    usage = {"prompt_tokens": 1, "completion_tokens": 1}
    choice = {"message": {"content": None, "tool_calls": [call]}, "finish_reason": "length"}
    asked = {"model": "tiny", "input": "Hi"}
    said = parse(json.dumps(asked).encode(), kept)[1].whole({"choices": [choice], "usage": usage})
    assert said["output"][0]["arguments"] == arguments
    result = {"type": "function_call_output", "call_id": "call_1", "output": "3"}
    asked = {"model": "tiny", "previous_response_id": said["id"], "input": [result]}
    messages = parse(json.dumps(asked).encode(), kept)[0].messages
    assert messages is not None
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == ({"a": 1} if arguments == '{"a": 1}' else {})


@pytest.mark.parametrize("name", ["messages", "responses"])
def test_a_bug_is_told_in_the_form_of_the_endpoint(app: Starlette, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(f"onegraph.serve.{name}.parse", fail)

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
            return await http.post(f"/v1/{name}", json={}, headers={"Authorization": f"Bearer {KEY}"})

    told = asyncio.run(ask())
    assert told.status_code == 500
    assert told.json().get("type") == ("error" if name == "messages" else None)
    assert told.json()["error"]["message"] == "a bug: ZeroDivisionError; the server's log has more"


def test_conversations_are_kept_within_bounds() -> None:
    kept = Conversations(limit=250)
    for name in "abc":
        kept.keep(name, [{"role": "user", "content": name * 40}])
        kept.find("a")  # the one that is used stays
    kept.keep("d", [{"role": "user", "content": "d" * 40}])
    with pytest.raises(APIError, match="is not known"):
        kept.find("b")
    for name in "acd":
        assert kept.find(name)
    kept.keep("large", [{"role": "user", "content": "x" * 1000}])
    with pytest.raises(APIError, match="is not known"):
        kept.find("large")
