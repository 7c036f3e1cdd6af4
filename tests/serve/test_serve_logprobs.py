"""`logprobs` of /v1/completions: names and places of tokens, whole and in a stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from starlette.applications import Starlette
from transformers import LlamaForCausalLM

from fuzz import tiny
from onegraph import LLM
from onegraph.api.token_text import TokenText
from onegraph.api.tokenizer import Tokenizer
from onegraph.formats.checkpoint import Checkpoint
from onegraph.serve.app import Server, Settings
from onegraph.serve.logprobs import completion_logprobs
from onegraph.serve.models import Models
from onegraph.serve.prompts import _echo
from onegraph.serve.protocol import CompletionRequest
from onegraph.serve.text import Echo
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
        models = Models.of("tiny", worker)
        models.start()
        yield Server(models, Settings()).app()
        worker.close()


async def post(app: Starlette, how: dict[str, Any]) -> str:
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
        return (await http.post("/v1/completions", json={"model": "tiny", "prompt": "the"} | how)).text


async def answered(app: Starlette, **how: Any) -> list[dict[str, Any]]:
    """The choices of a whole answer."""
    choices: list[dict[str, Any]] = json.loads(await post(app, how))["choices"]
    return choices


def ask(app: Starlette, **how: Any) -> list[dict[str, Any]]:
    """The choice of a whole answer, or those of a stream's chunks."""
    text = asyncio.run(post(app, how))
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


def test_an_echo_is_the_prompt_with_its_log_probabilities(app: Starlette, path: Path, tokenizer: Tokenizer) -> None:
    """As lm-evaluation-harness asks for it: several prompts of token ids, each answer of one token."""
    ids = [tokenizer.encode(text) for text in ("the thing in the inn", "12 hats", TEXT)]
    chosen = asyncio.run(answered(app, prompt=ids, max_tokens=1, temperature=0, logprobs=1, echo=True, seed=1234))
    oracle = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)
    for choice, prompt in zip(chosen, ids, strict=True):
        with torch.no_grad():
            laws = oracle(torch.tensor([prompt])).logits[0].double().log_softmax(-1)
        told = choice["logprobs"]
        names, logprobs, tops = told["tokens"], told["token_logprobs"], told["top_logprobs"]
        assert len(names) == len(logprobs) == len(tops) == len(told["text_offset"]) == len(prompt) + 1
        assert (logprobs[0], tops[0]) == (None, None)
        wanted = [law[token].item() for law, token in zip(laws, prompt[1:], strict=False)]
        assert logprobs[1:-1] == pytest.approx(wanted, abs=1e-4)
        assert [max(top.values()) for top in tops[1:]] == pytest.approx(laws.amax(1).tolist(), abs=1e-4)
        greedy = [max(top.values()) == own for top, own in zip(tops[1:], logprobs[1:], strict=True)]
        likeliest = [law.argmax().item() == token for law, token in zip(laws, prompt[1:], strict=False)]
        assert greedy == [*likeliest, True]
        text = tokenizer.decode(prompt, special=True)
        assert choice["text"].startswith(text)
        before = [tokenizer.decode(prompt[:i], special=True).rstrip("\ufffd") for i in range(len(prompt) + 1)]
        assert told["text_offset"] == list(map(len, before))


def test_an_echo_alone_streamed_cut_and_without_log_probabilities(app: Starlette, tokenizer: Tokenizer) -> None:
    ask_for = {"prompt": "the thing", "max_tokens": 4, "temperature": 0, "logprobs": 2}
    (plain,), (whole,) = ask(app, **ask_for), ask(app, **ask_for, echo=True)
    assert whole["text"] == "the thing" + plain["text"]
    count = len(tokenizer.encode("the thing"))
    assert whole["logprobs"]["token_logprobs"][count:] == plain["logprobs"]["token_logprobs"]
    assert whole["logprobs"]["text_offset"][count:] == [9 + at for at in plain["logprobs"]["text_offset"]]
    streamed = ask(app, **ask_for, echo=True, stream=True)
    assert "".join(each["text"] for each in streamed) == whole["text"]
    told = [each["logprobs"]["token_logprobs"] for each in streamed if each["logprobs"]]
    assert [each for some in told for each in some] == whole["logprobs"]["token_logprobs"]
    (alone,) = ask(app, **ask_for | {"max_tokens": 0}, echo=True)
    assert (alone["text"], alone["finish_reason"]) == ("the thing", "length")
    assert alone["logprobs"]["token_logprobs"] == whole["logprobs"]["token_logprobs"][:count]
    (bare,) = ask(app, prompt="the thing", max_tokens=0, echo=True)
    assert (bare["text"], bare["logprobs"]) == ("the thing", None)
    (cut,) = ask(app, prompt="the thing", max_tokens=0, echo=True, truncate_prompt_tokens=2)
    assert cut["text"] == tokenizer.decode(tokenizer.encode("the thing")[-2:], special=True)


def test_an_echo_decodes_valid_tokens_once_a_prompt(app: Starlette, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = json.loads(asyncio.run(post(app, {"prompt": [-5], "echo": True, "logprobs": 1})))["error"]
    assert wrong["param"] == "prompt"
    assert wrong["message"].startswith("prompt 0: got token -5 at 0; the model's vocabulary is 0 to ")
    made: list[str | list[int]] = []

    def counted(asked: CompletionRequest, tokenizer: Tokenizer, given: str | list[int], ids: list[int]) -> Echo:
        made.append(given)
        return _echo(asked, tokenizer, given, ids)

    monkeypatch.setattr("onegraph.serve.prompts._echo", counted)
    choices = asyncio.run(answered(app, prompt=["the", "a"], n=2, max_tokens=1, echo=True, logprobs=0))
    assert made == ["the", "a"]
    assert [each["text"][: len(said)] for each, said in zip(choices, ["the", "the", "a", "a"], strict=True)] == [
        "the", "the", "a", "a",
    ]  # fmt: skip


def test_the_best_answers_are_the_likeliest(app: Starlette) -> None:
    how = {"prompt": ["the", "a"], "max_tokens": 5, "temperature": 1.5, "seed": 3, "ignore_eos": True}
    every = asyncio.run(answered(app, **how, n=6, logprobs=0))
    means = [sum(each["logprobs"]["token_logprobs"]) for each in every]
    best = asyncio.run(answered(app, **how, n=2, best_of=6))
    ranked = [sorted(range(at, at + 6), key=lambda i: -means[i])[:2] for at in (0, 6)]
    assert [each["text"] for each in best] == [every[i]["text"] for some in ranked for i in some]
    assert [(each["index"], each["logprobs"]) for each in best] == [(i, None) for i in range(4)]
