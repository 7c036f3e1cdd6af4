"""The chat page in a real browser: against scripted answers, and against a real server."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from browsers import Tab
from fuzz import tiny
from onegraph.serve.errors import APIError
from onegraph.serve.page import chat_page
from onegraph.serve.reply import event, json_response
from test_server import KEY, Running

EVIL = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script> **a** &amp; \U0001f642"
WAIT = object()  # in an answer: until `Scripted.go` is set


def chunk(finish: str | None = None, **delta: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def usage(tokens: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"completion_tokens": tokens}}


class Scripted:
    """A server with the page whose answers are given: lists of events, or an error.

    bodies: of the requests. left: whether the client closed the connection during an answer.
    """

    def __init__(self) -> None:
        self.answers: list[list[Any] | APIError] = []
        self.bodies: list[dict[str, Any]] = []
        self.go, self.left = threading.Event(), threading.Event()
        routes = [Route("/", chat_page), Route("/v1/models", self._models)]
        routes.append(Route("/v1/chat/completions", self._chat, methods=["POST"]))
        listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        self._server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), log_level="error"))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listening]})
        self._thread.start()

    def end(self) -> None:
        self.go.set()
        self._server.should_exit = True
        self._thread.join()

    async def _models(self, request: Request) -> Response:
        return json_response({"data": [{"id": "base"}, {"id": "adapter"}]})

    async def _chat(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        answer = self.answers.pop(0)
        if isinstance(answer, APIError):
            return json_response(answer.body(), answer.status)
        return StreamingResponse(self._events(answer), media_type="text/event-stream")

    async def _events(self, answer: list[Any]) -> AsyncIterator[bytes]:
        try:
            for each in answer:
                if each is WAIT:
                    while not self.go.is_set():
                        await asyncio.sleep(0.01)
                else:
                    for byte in (data := event(each))[:-1]:  # characters and events arrive in pieces
                        yield bytes([byte])
                    yield data[-1:]
            yield b"data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.left.set()
            raise


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    found = Scripted()
    yield found
    found.end()


@pytest.fixture
def tab(tmp_path: Path, scripted: Scripted) -> Iterator[Tab]:
    with Tab(tmp_path) as found:
        found.open(scripted.url)
        found.until("$('model').options.length === 2")
        yield found
        assert all(url.startswith((scripted.url, "data:")) for url in found.requested), found.requested
        assert [each for each in found.complaints if "400 (Bad Request)" not in each] == []


def ask(tab: Tab, text: str) -> None:
    tab.until("!$('send').hidden")
    tab.click("#input")
    tab.type(text)
    tab.press("Enter", text="\r")


def articles(tab: Tab) -> list[list[str]]:
    """Role and lines of each part of the conversation."""
    return tab.value("[...document.querySelectorAll('article')].map(a => [a.className, ...a.innerText.split('\\n')])")


def test_a_conversation_is_shown_as_text_and_sent_whole(tab: Tab, scripted: Scripted) -> None:
    scripted.answers += [
        [chunk(reasoning_content="Hm, "), chunk(reasoning_content=EVIL), chunk(content=EVIL), chunk("stop"), usage(7)],
        [chunk(content="Two\n\n  lines"), chunk("length")],
    ]
    ask(tab, "Why <b>?")
    tab.until("document.querySelectorAll('article').length === 2 && !$('send').hidden")
    shown = articles(tab)
    assert shown[0] == ["user", "You", "Why <b>?"]
    assert shown[1][:4] == ["assistant", "base", "Reasoning", EVIL]
    assert re.fullmatch(r"7 tokens in [0-9.]+ s", shown[1][-1])
    thoughts = "document.querySelector('.reasoning')"
    assert tab.value(f"[{thoughts}.open, {thoughts}.lastChild.textContent]") == [False, "Hm, " + EVIL]
    tab.click(".reasoning summary")
    assert tab.value(f"{thoughts}.open")
    assert tab.value("[document.title, document.querySelectorAll('img, article script').length]") == ["onegraph", 0]

    tab.click("#settings > summary")
    for name, text in (("system", "Be brief."), ("temperature", "0"), ("limit", "9")):
        tab.click(f"#{name}")
        tab.type(text)
    tab.value("$('model').value = 'adapter'")
    ask(tab, "And?")
    tab.until("document.querySelectorAll('article').length === 4 && !$('send').hidden")
    assert articles(tab)[3] == [
        "assistant",
        "adapter",
        "Two",
        "",
        "  lines",
        "",
        "Cut off at the maximum number of tokens.",
    ]
    first, second = scripted.bodies
    question = {"role": "user", "content": "Why <b>?"}
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    assert first == {"model": "base", "messages": [question], **streamed}
    assert second == {
        "model": "adapter",
        "messages": [
            {"role": "system", "content": "Be brief."},
            question,
            {"role": "assistant", "content": EVIL},
            {"role": "user", "content": "And?"},
        ],
        "temperature": 0,
        "max_tokens": 9,
        **streamed,
    }


@pytest.mark.parametrize("how", ["button", "key"])
def test_stopping_closes_the_connection_and_keeps_what_was_written(tab: Tab, scripted: Scripted, how: str) -> None:
    scripted.answers += [[chunk(content="One"), WAIT], [chunk(content="Three"), chunk("stop")]]
    ask(tab, "Count")
    tab.until("document.querySelector('.assistant .text')?.innerText === 'One'")
    assert tab.value("[$('send').hidden, $('stop').hidden]") == [True, False]
    assert tab.value("document.querySelector('.assistant').ariaBusy") == "true"
    tab.click("#stop") if how == "button" else tab.press("Escape")
    tab.until("!$('send').hidden")
    assert scripted.left.wait(30)
    assert articles(tab)[1][-1] == "Stopped."
    ask(tab, "On")
    tab.until("document.querySelectorAll('article').length === 4 && !$('send').hidden")
    assert [each["content"] for each in scripted.bodies[1]["messages"]] == ["Count", "One", "On"]


def test_a_turn_that_fails_is_taken_back(tab: Tab, scripted: Scripted) -> None:
    scripted.answers += [
        APIError("the prompt does not fit"),
        [APIError("the GPU is gone", status=500).body()],
        [chunk(content="Yes"), chunk("stop")],
    ]
    for problem in ("the prompt does not fit", "the GPU is gone"):
        tab.value("$('input').value = ''")
        ask(tab, "Really?")
        tab.until(
            f"[...document.querySelectorAll('.problem')].some(p => p.innerText === '{problem}') && !$('send').hidden"
        )
        assert tab.value("$('input').value") == "Really?"
    tab.value("$('model').replaceChildren()")  # as where the server was not there when the page was loaded
    tab.press("Enter", text="\r")
    tab.until("document.querySelectorAll('article').length === 6 && !$('send').hidden")
    assert [each["content"] for each in scripted.bodies[2]["messages"]] == ["Really?"]


def test_a_new_chat_forgets_the_old_one_while_it_is_answered(tab: Tab, scripted: Scripted) -> None:
    scripted.answers += [[chunk(content="One"), WAIT], [chunk(content="New"), chunk("stop")]]
    ask(tab, "Old")
    tab.until("document.querySelector('.assistant .text')?.innerText === 'One'")
    tab.click("#new")
    assert scripted.left.wait(30)
    assert articles(tab) == []
    ask(tab, "Hello")
    tab.until("document.querySelectorAll('article').length === 2 && !$('send').hidden")
    assert [each["content"] for each in scripted.bodies[1]["messages"]] == ["Hello"]


def test_the_page_follows_an_answer_until_its_reader_scrolls_up(tab: Tab, scripted: Scripted) -> None:
    lines = chunk(content="a line\n" * 100)
    scripted.answers += [[lines, WAIT, lines, chunk("stop")], [chunk(content="end"), chunk("stop")]]
    at_end = "page.scrollTop > 500 && page.scrollHeight - page.clientHeight - page.scrollTop < 2"
    ask(tab, "Write")
    tab.until(at_end)
    tab.value("page.scrollTop = 0")
    scripted.go.set()
    tab.until("!$('send').hidden")
    assert tab.value("document.querySelector('.assistant .text').innerText.length") > 1000
    assert tab.value("page.scrollTop") == 0
    ask(tab, "Go on")
    tab.until(f"document.querySelectorAll('article').length === 4 && !$('send').hidden && {at_end}")


def test_keys_labels_and_limits(tab: Tab, scripted: Scripted) -> None:
    assert tab.value("document.activeElement.id") == "input"
    tab.press("Enter", text="\r")
    tab.type("a")
    tab.press("Enter", text="\r", modifiers=8)
    tab.type("b")
    assert tab.value("$('input').value") == "a\nb"
    tab.value("$('limit').value = '0'")
    tab.press("Enter", text="\r")
    tab.until("$('settings').open && document.activeElement.id === 'limit'")
    assert scripted.bodies == []
    fields = "[...document.querySelectorAll('input, select, textarea')]"
    assert tab.value(f"{fields}.filter(e => !e.labels.length).map(e => e.id)") == []
    assert tab.value("[...document.querySelectorAll('button')].every(e => e.innerText || e.hidden)")


def contrast(colors: list[str]) -> float:
    """Of two CSS colors, as WCAG defines it."""

    def luminance(color: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
        red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted(map(luminance, colors))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colors_of_both_schemes_have_contrast(tab: Tab, scheme: str) -> None:
    tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    tab.value("tell('trouble', true)")
    pairs = tab.value(
        "['body', 'summary', 'label', '#status', '#send'].map(name => {"
        "  const e = document.querySelector(name), of = (e) => getComputedStyle(e);"
        "  return [of(e).color, of(name === '#send' ? e : document.body).backgroundColor];})"
    )
    assert [pair for pair in pairs if contrast(pair) < 4.5] == []
    assert (contrast([pairs[0][1], "rgb(255, 255, 255)"]) < 2) == (scheme == "light")


def test_the_policy_allows_no_script_style_or_request_of_others(tmp_path: Path, scripted: Scripted) -> None:
    with Tab(tmp_path) as tab:
        tab.open(scripted.url)
        tab.until("$('model').options.length === 2")
        assert tab.complaints == []
        markup = "document.body.innerHTML = '<img src=x onerror=document.title=1>'"
        assert tab.value(f"(() => {{ try {{ {markup}; }} catch (error) {{ return error.name; }} }})()") == "TypeError"
        other = scripted.url.replace("127.0.0.1", "localhost")
        assert tab.value(f"fetch('{other}v1/models').catch(error => error.name)") == "TypeError"
        assert any("Content Security Policy" in each for each in tab.complaints)


def test_the_page_of_a_real_server(tmp_path: Path) -> None:
    """With a key, which the page has a field for once it is needed. It alone is served without the key."""
    server = Running(tiny.write_model(tmp_path / "plain"))
    try:
        root = server.url.removesuffix("v1")
        page = httpx.get(root)
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert httpx.get(root, headers={"host": "evil.example"}).status_code == 200, "with a key any name is fine"
        assert httpx.get(root, headers={"origin": "http://evil.example"}).status_code == 403
        with Tab(tmp_path) as tab:
            tab.open(root)
            tab.until("document.querySelector('#status').innerText.startsWith('no API key')")
            assert tab.value("document.activeElement.id") == "key"
            tab.type(KEY)
            tab.press("Tab")
            tab.until("$('model').value === 'plain'")
            tab.click("#settings > summary")
            for name, text in (("temperature", "0"), ("limit", "8")):
                tab.click(f"#{name}")
                tab.type(text)
            ask(tab, "the thing")
            tab.until("document.querySelectorAll('article').length === 2 && !$('send').hidden")
            question: Any = [{"role": "user", "content": "the thing"}]
            wanted = (
                server.client.chat.completions.create(model="plain", messages=question, temperature=0, max_tokens=8)
                .choices[0]
                .message.content
            )
            assert tab.value("document.querySelector('.assistant .text').textContent") == wanted
            assert wanted
            assert tab.value("messages") == [*question, {"role": "assistant", "content": wanted}]
    finally:
        server.end()
