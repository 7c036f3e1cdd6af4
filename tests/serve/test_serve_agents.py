"""Coding agents: the requests that they sent while they repaired a file (`record_agents.py`) are answered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serve.record_agents import DIFF, DONE, TITLE, WHOLE, AgentScript
from serve.record_clients import served

from test_serve_clients import joined

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent.parent / "fixtures" / "agent_requests.json").read_text())


@pytest.fixture(scope="module")
def script() -> Iterator[AgentScript]:
    with served() as found:
        yield AgentScript(found._app)


@pytest.mark.parametrize("name", RECORDED)
def test_requests_of_agents_are_answered(name: str, script: AgentScript) -> None:
    async def post(body: Any) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=script), base_url="http://here") as http:
            return await http.post("/v1/chat/completions", json=body, timeout=120)

    for entry in RECORDED[name]["requests"]:
        body, text = entry["request"], entry["script"]
        script.texts = [text]
        reply = asyncio.run(post(body))
        assert reply.status_code == 200, reply.text
        if body.get("stream"):
            message, finish = joined(reply.text)
        else:
            message, finish = (choice := reply.json()["choices"][0])["message"], choice["finish_reason"]
        if "<tool_call>" in text:
            (made,) = message["tool_calls"]
            wanted = json.loads(text.split("\n")[1])
            assert (made["function"]["name"], finish) == (wanted["name"], "tool_calls")
            assert json.loads(made["function"]["arguments"]) == wanted["arguments"]
        else:
            assert (message["content"], message.get("tool_calls") or [], finish) == (text, [], "stop")


def test_the_record_has_what_is_claimed() -> None:
    """Both forms of edits, whole answers and streams, calls of tools and their results."""
    texts = {name: [entry["script"] for entry in each["requests"]] for name, each in RECORDED.items()}
    assert {WHOLE, DIFF} <= {*texts["aider"]}
    assert {TITLE, DONE} <= {*texts["opencode"]}
    assert sum("<tool_call>" in text for text in texts["opencode"]) == 2
    bodies = [entry["request"] for each in RECORDED.values() for entry in each["requests"]]
    assert {True, False} == {bool(body.get("stream")) for body in bodies}
    assert "tool" in {message["role"] for body in bodies for message in body["messages"]}
