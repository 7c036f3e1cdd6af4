"""`logprobs` of /v1/completions: names and places of tokens, whole and in a stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from fuzz import tiny
from onegraph import LLM
from onegraph.api.tokenizer import Tokenizer
from onegraph.formats.checkpoint import Checkpoint
from onegraph.serve.app import Server, Settings
from onegraph.serve.protocol import completion_logprobs
from onegraph.serve.text import TokenText
from onegraph.serve.worker import Worker

TEXT = "a é€ b 𝄞é."


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("logprobs") / "tiny")


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Iterator[Tokenizer]:
    with Checkpoint.open(path) as checkpoint:
        yield Tokenizer(checkpoint)


@pytest.fixture(scope="module")
def app(path: Path, tokenizer: Tokenizer) -> Iterator[Starlette]:
    with LLM(path, max_num_seqs=4, device="cpu") as llm:
        worker = Worker(llm, tokenizer, queue=8, prepare="plain")
        worker.start()
        yield Server(worker, Settings(name="tiny")).app()
        worker.close()


def ask(app: Starlette, **how: Any) -> list[dict[str, Any]]:
    """The choice of a whole answer, or those of a stream's chunks."""

    async def asked() -> str:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
            return (await http.post("/v1/completions", json={"model": "tiny", "prompt": "the"} | how)).text

    text = asyncio.run(asked())
    if not how.get("stream"):
        return [json.loads(text)["choices"][0]]
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(each)["choices"][0] for each in events]


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_have_their_place_in_the_text_that_comes_out(app: Starlette, tokenizer: Tokenizer, stream: bool) -> None:
    ids = tokenizer.encode(TEXT)
    chosen = ask(app, max_tokens=40, logprobs=0, regex="a é€ b 𝄞é\\.", stream=stream)
    assert "".join(choice["text"] for choice in chosen) == TEXT
    told = [choice["logprobs"] for choice in chosen if choice["logprobs"]]
    offsets = [offset for each in told for offset in each["text_offset"]]
    names = [name for each in told for name in each["tokens"]]
    before = [tokenizer.decode(ids[:i]) for i in range(len(ids))]  # ends with U+FFFD, once or more, within a character
    assert offsets[: len(ids)] == [len(text.rstrip("\ufffd")) for text in before]
    assert len(set(offsets)) < len(ids), "some characters are of several tokens"
    for name, token, offset in zip(names, ids, offsets, strict=False):
        assert name == f"token_id:{token}" or TEXT.startswith(name, offset)
    for each in told:
        assert [top[name] for top, name in zip(each["top_logprobs"], each["tokens"], strict=True)] == (
            each["token_logprobs"]
        )


def test_parts_of_a_character_have_their_bytes(app: Starlette, tokenizer: Tokenizer) -> None:
    """Those of all tokens together are the text, as clients of OpenAI's API join them."""

    async def asked() -> Any:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
            fields = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 5}
            fields |= {"model": "tiny", "max_tokens": 40, "regex": "a é€ b 𝄞é\\."}
            return (await http.post("/v1/chat/completions", json=fields)).json()["choices"][0]["logprobs"]["content"]

    told = asyncio.run(asked())
    assert bytes(byte for each in told for byte in each["bytes"]).decode().startswith(TEXT)
    names = [each["token"] for each in told]
    assert "\\xe2" in names
    assert not [
        name
        for each in told
        for name in (each["token"], *(t["token"] for t in each["top_logprobs"]))
        if "\ufffd" in name
    ]


def test_the_drawn_token_and_all_of_the_likeliest_are_there() -> None:
    top = (TokenText(5, "\ufffd", -1.0), TokenText(6, "\ufffd", -1.5), TokenText(7, "a", -2.0), TokenText(8, "b", -3.0))
    drawn = TokenText(9, "a", -4.0, top, 3)
    told = completion_logprobs([drawn, TokenText(6, "\ufffd", -1.5, top, 4)])
    assert told == {
        "tokens": ["a", "token_id:6"],
        "token_logprobs": [-4.0, -1.5],
        "top_logprobs": [
            {"token_id:5": -1.0, "token_id:6": -1.5, "token_id:7": -2.0, "b": -3.0, "a": -4.0},
            {"token_id:5": -1.0, "token_id:6": -1.5, "a": -2.0, "b": -3.0},
        ],
        "text_offset": [3, 4],
    }
