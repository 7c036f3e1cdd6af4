"""Real clients against the server, and the requests that they send, for tests that need no client installed.

    python -m pip install langchain-openai "pydantic-ai-slim[openai]" instructor openai-agents
    PYTHONPATH=src:tests python tests/serve/record_clients.py tests/fixtures/client_requests.json

Each task is done by its client to the end and checked. The model is random: where a request leaves the answer free, it
is held to a text of the script, and `script` of the recorded request says which; otherwise the request's own constraint
makes the answer.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
from pydantic import BaseModel
from serve.call_texts import CASES
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fuzz import tiny
from onegraph import LLM
from onegraph.api.tokenizer import Tokenizer
from onegraph.formats.checkpoint import Checkpoint
from onegraph.serve.app import Server, Settings
from onegraph.serve.models import Models
from onegraph.serve.worker import Worker

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
DONE = "It is sunny in Rome."


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Rome", "Oslo"]
    sunny: bool


class Script:
    """Passes requests on to the server, held to the next text where their answer is free, and writes them down."""

    def __init__(self, app: ASGIApp) -> None:
        self._app, self.texts, self.requests = app, list[str](), list[Any]()
        self.further: dict[str, Any] = {}  # fields that every request is given

    def next_text(self, asked: Any) -> str:
        return self.texts.pop(0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            return await self._app(scope, receive, send)
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        asked = json.loads(body)
        entry: dict[str, Any] = {"request": asked}
        self.requests.append(entry)
        given = dict(asked)
        free = asked.get("tool_choice", "auto") == "auto"
        if free and asked.get("response_format", {}).get("type") in (None, "text", "json_object"):
            given.pop("response_format", None)
            given["regex"] = re.escape(entry.setdefault("script", self.next_text(asked)))
        given |= {"parallel_tool_calls": False} if asked.get("tool_choice") == "required" else {}
        data = json.dumps(given | self.further | {"seed": 1}).encode()
        headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
        scope = {**scope, "headers": [*headers, (b"content-length", str(len(data)).encode())]}
        sent = False

        async def again() -> Message:
            nonlocal sent
            if sent:
                await asyncio.sleep(3600)
            sent = True
            return {"type": "http.request", "body": data, "more_body": False}

        await self._app(scope, again, send)


@contextmanager
def served(form: str = "hermes"):  # type: ignore[no-untyped-def]
    """A server of a tiny model whose template writes calls in a form."""
    with tempfile.TemporaryDirectory() as folder:
        path = tiny.write_model(Path(folder) / "tiny", tiny.CONFIG | {"max_position_embeddings": 8192})
        about = json.loads((path / "tokenizer_config.json").read_text())
        (path / "tokenizer_config.json").write_text(json.dumps(about | {"chat_template": CASES[form].template}))
        with LLM(path, max_num_seqs=2, max_model_len=8192, device="cpu") as llm, Checkpoint.open(path) as checkpoint:
            worker = Worker(llm, Tokenizer(checkpoint), queue=8, prepare="plain")
            models = Models.of("tiny", worker)
            models.start()
            yield Script(Server(models, Settings()).app())
            worker.close()


def client(script: Script) -> openai.AsyncOpenAI:
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app=script))
    return openai.AsyncOpenAI(base_url="http://here/v1", api_key="none", max_retries=0, http_client=http)


def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


async def langchain(script: Script, api: openai.AsyncOpenAI) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model="tiny", async_client=api.chat.completions, root_async_client=api, api_key="none")
    with_tools = chat.bind_tools([get_weather])
    script.texts = [CALL, DONE, CALL, '{"city": "Rome", "sunny": true}']
    turns: list[Any] = [HumanMessage("How is the weather in Rome?")]
    turns.append(await with_tools.ainvoke(turns))
    (call,) = turns[1].tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Rome"})
    turns.append(ToolMessage(get_weather(**call["args"]), tool_call_id=call["id"]))
    assert (await with_tools.ainvoke(turns)).content == DONE
    chunks = [chunk async for chunk in with_tools.astream(turns[:1])]
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert [(call["name"], call["args"]) for call in whole.tool_calls] == [("get_weather", {"city": "Rome"})]
    assert len(chunks) > 5
    for method in ("json_mode", "function_calling", "json_schema"):
        found = await chat.with_structured_output(Weather, method=method).ainvoke("The weather in Rome, as JSON?")
        assert isinstance(found, Weather), (method, found)


async def pydantic_ai(script: Script, api: openai.AsyncOpenAI) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("tiny", provider=OpenAIProvider(openai_client=api))
    assert isinstance((await Agent(model, output_type=Weather).run("The weather in Rome?")).output, Weather)
    script.texts = [CALL, DONE]
    assert (await Agent(model, tools=[get_weather]).run("The weather in Rome?")).output == DONE


async def instructor(script: Script, api: openai.AsyncOpenAI) -> None:
    import instructor

    script.texts = ['{"city": "Rome", "sunny": true}']
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON):
        made = await instructor.from_openai(api, mode=mode).chat.completions.create(
            model="tiny", response_model=Weather, messages=[{"role": "user", "content": "The weather in Rome?"}],
            max_retries=1,
        )  # fmt: skip
        assert isinstance(made, Weather)


async def openai_agents(script: Script, api: openai.AsyncOpenAI) -> None:
    from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(True)
    model = OpenAIChatCompletionsModel("tiny", openai_client=api)
    agent = Agent(name="w", instructions="Help.", model=model, tools=[function_tool(get_weather)])
    script.texts = [CALL, DONE] * 2
    assert (await Runner.run(agent, "The weather in Rome?")).final_output == DONE
    streamed = Runner.run_streamed(agent, "The weather in Rome?")
    assert [event async for event in streamed.stream_events()]
    assert streamed.final_output == DONE
    typed = Agent(name="w", model=model, output_type=Weather)
    assert isinstance((await Runner.run(typed, "The weather in Rome?")).final_output, Weather)


TASKS: dict[str, Callable[[Script, openai.AsyncOpenAI], Awaitable[None]]] = {
    "langchain-openai": langchain, "pydantic-ai-slim": pydantic_ai, "instructor": instructor,
    "openai-agents": openai_agents,
}  # fmt: skip


def main(target: Path) -> None:
    found: dict[str, Any] = {}
    with served() as script:
        for name, task in TASKS.items():
            script.requests = []
            asyncio.run(task(script, client(script)))
            found[name] = {"version": version(name), "openai": version("openai"), "requests": script.requests}
            print(name, version(name), len(script.requests), "requests")
    target.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
