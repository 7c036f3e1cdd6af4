"""Clients with tools and structured output: their recorded requests, and the clients themselves where installed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
from serve.record_clients import CALL, DONE, TASKS, Script, client, served

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent.parent / "fixtures" / "client_requests.json").read_text())
WEATHER = {"city": ("Rome", "Oslo"), "sunny": (True, False)}


@pytest.fixture(scope="module")
def script() -> Iterator[Script]:
    with served() as found:
        yield found


def fits(text: str) -> bool:
    found = json.loads(text)
    return found.keys() == WEATHER.keys() and all(found[key] in values for key, values in WEATHER.items())


def joined(lines: str) -> tuple[dict[str, Any], str]:
    """The message that a stream's chunks make, and why it ended."""
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    finish = ""
    for line in filter(None, lines.split("\n")):
        data = line.removeprefix("data: ")
        choices = [] if data == "[DONE]" else json.loads(data)["choices"]
        for choice in choices:
            finish = choice["finish_reason"] or finish
            message["content"] += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls", ()):
                if call["index"] == len(message["tool_calls"]):
                    message["tool_calls"].append({"function": dict(call["function"], arguments="")})
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return message, finish


@pytest.mark.parametrize("name", RECORDED)
def test_requests_of_clients_are_answered(name: str, script: Script) -> None:
    async def post(body: Any) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=script), base_url="http://here") as http:
            return await http.post("/v1/chat/completions", json=body, timeout=60)

    for entry in RECORDED[name]["requests"]:
        script.texts = [entry["script"]] if "script" in entry else []
        body = entry["request"]
        reply = asyncio.run(post(body))
        assert reply.status_code == 200, reply.text
        if body.get("stream"):
            message, finish = joined(reply.text)
        else:
            (choice,) = reply.json()["choices"]
            message, finish = choice["message"], choice["finish_reason"]
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        if entry.get("script") == CALL:
            assert ([each["name"] for each in functions], finish) == (["get_weather"], "tool_calls")
            assert json.loads(functions[0]["arguments"]) == {"city": "Rome"}
            assert not message["content"]
        elif "script" in entry:
            assert (message["content"], functions, finish) == (entry["script"], [], "stop")
        elif body.get("tools"):
            assert [fits(each["arguments"]) for each in functions] == [True]
        else:
            assert fits(message["content"])


def test_the_record_has_what_is_claimed() -> None:
    """Calls and their results, streams, forced calls and both kinds of JSON."""
    bodies = [entry["request"] for each in RECORDED.values() for entry in each["requests"]]
    assert {"tool"} <= {message["role"] for body in bodies for message in body["messages"]}
    assert {True, False} == {bool(body.get("stream")) for body in bodies}
    assert any(body.get("tool_choice") == "required" for body in bodies)
    assert any(isinstance(body.get("tool_choice"), dict) for body in bodies)
    kinds = {body.get("response_format", {}).get("type") for body in bodies}
    assert kinds >= {"json_object", "json_schema"}
    assert any(tool["function"].get("strict") for body in bodies for tool in body.get("tools", ()))
    assert {entry.get("script") for each in RECORDED.values() for entry in each["requests"]} >= {CALL, DONE, None}


MODULES = {"langchain-openai": "langchain_openai", "pydantic-ai-slim": "pydantic_ai", "instructor": "instructor",
           "openai-agents": "agents"}  # fmt: skip


@pytest.mark.parametrize("name", TASKS)
def test_clients_do_their_tasks(name: str, script: Script) -> None:
    if find_spec(MODULES[name]) is None:
        pytest.skip(f"{name} is not installed; tests/serve/record_clients.py says how")
    asyncio.run(TASKS[name](script, client(script)))  # type: ignore[arg-type]
