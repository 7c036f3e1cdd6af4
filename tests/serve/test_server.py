"""`onegraph serve` as its users meet it: the real `openai` client against a real server on a free port."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import onegraph
from forked import Forked
from fuzz import tiny
from onegraph import LLM
from onegraph.api.completion import StopTexts
from onegraph.api.tokenizer import Tokenizer
from onegraph.cli import main
from onegraph.cli.serve import origin
from onegraph.engine.choice import CHOICES, Choice
from onegraph.engine.params import SamplingParams
from onegraph.formats.checkpoint import Checkpoint
from onegraph.serve.app import Server, Settings
from onegraph.serve.errors import APIError
from onegraph.serve.http import bind, listen
from onegraph.serve.models import Models
from onegraph.serve.protocol import parse
from onegraph.serve.worker import Full, Prepare, Worker

KEY = "sesame"
JSON_TYPE = "Content-Type: application/json\r\n"
# Rows, pages and the queue are few, so that requests wait, make room for each other, and are refused.
OPTIONS = [
    "--max-num-seqs=6",
    "--max-model-len=96",
    "--kv-cache-tokens=160",
    "--queue=74",
    "--max-body=20000",
    "--grace=1",
]
DEEP: Any = {}
for _ in range(300):  # deeper than Python writes JSON
    DEEP = {"properties": {"a": DEEP}}
PROMPTS = ["the thing", "in the inn", "a", "12 hats and the thing in the inn"]
DEADLINE = 60.0


def schema(value: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": value}}


class Running:
    """A server in a process of its own."""

    def __init__(
        self, model: Path, port: int = 0, options: Sequence[str] = (), key: str | None = KEY, files: int | None = None
    ) -> None:
        """key: for clients. files: that the server may open."""
        words = ["serve", str(model), *OPTIONS, "--device=cpu", f"--port={port}", *options]
        self.process = Forked(words, os.environ | ({} if key is None else {"ONEGRAPH_API_KEY": key}), files)
        line = self.process.stderr.readline()
        assert line == f"loading {model}\n", (line or self.process.wait(DEADLINE), self.process.stderr.read())
        assert self.process.stderr.readline().startswith("memory: weights ")
        line = self.process.stderr.readline()
        assert line.startswith("serving "), line + self.process.stderr.read()
        self.url = line.split()[-1]
        self.port = int(self.url.split(":")[-1].removesuffix("/v1"))
        self.options: dict[str, Any] = {"base_url": self.url, "api_key": KEY, "max_retries": 0, "timeout": DEADLINE}
        self.client = openai.OpenAI(**self.options)

    def metrics(self) -> dict[str, float]:
        headers = {"authorization": f"Bearer {KEY}"}
        lines = httpx.get(self.url.removesuffix("v1") + "metrics", headers=headers).text.splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    def post(self, body: Any, path: str = "completions", **headers: str) -> httpx.Response:
        content = json.dumps(body) if isinstance(body, dict | list) else body
        headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"} | headers
        return httpx.post(f"{self.url}/{path}", content=content, headers=headers, timeout=DEADLINE)

    def until(self, fine: Any) -> dict[str, float]:
        """Metrics, once they are `fine`."""
        deadline = time.monotonic() + DEADLINE
        while not fine(found := self.metrics()):
            assert time.monotonic() < deadline, found
        return found

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("serve") / "plain")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Running]:
    found = Running(model)
    yield found
    found.end()


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, max_model_len=96, device="cpu") as found:
        yield found


# ------------------------------------------------------------------------------------------------------ same tokens


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_completions_are_those_of_generate(server: Running, llm: LLM, temperature: float) -> None:
    how: dict[str, Any] = {"max_tokens": 20, "temperature": temperature, "top_p": 0.9, "seed": 5}
    wanted = llm.generate(PROMPTS, **how)
    made = server.client.completions.create(model="plain", prompt=PROMPTS, **how)
    assert [(c.index, c.text, c.finish_reason) for c in made.choices] == [
        (i, w.text, w.finish_reason) for i, w in enumerate(wanted)
    ]
    assert made.usage is not None
    assert made.usage.prompt_tokens == sum(w.prompt_tokens for w in wanted)
    assert made.usage.completion_tokens == sum(len(w.tokens) for w in wanted)
    ids = llm.tokenizer.encode(PROMPTS[0])
    assert server.client.completions.create(model="plain", prompt=ids, **how).choices[0].text == wanted[0].text


def test_a_chat_is_that_of_chat_streamed_or_not(server: Running, llm: LLM) -> None:
    messages: Any = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Why is the sky blue?"}]
    plain = [{"role": "system", "content": "Be brief."}, messages[1]]
    wanted = llm.chat(plain, max_tokens=16, temperature=0.8, seed=3)
    how: dict[str, Any] = {"model": "plain", "messages": messages, "temperature": 0.8, "seed": 3}
    made = server.client.chat.completions.create(max_completion_tokens=16, **how)
    assert (made.choices[0].message.content, made.choices[0].message.role) == (wanted.text, "assistant")
    chunks = list(
        server.client.chat.completions.create(max_tokens=16, stream=True, stream_options={"include_usage": True}, **how)
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert len([piece for piece in pieces if piece]) > 1, "piece by piece"
    assert "".join(pieces) == wanted.text
    assert chunks[-2].choices[0].finish_reason == wanted.finish_reason
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(wanted.tokens)
    assert len({chunk.id for chunk in chunks}) == 1


def test_several_answers_draw_with_seeds_in_a_row(server: Running, llm: LLM) -> None:
    how: dict[str, Any] = {"max_tokens": 8, "temperature": 1.0}
    made = server.client.completions.create(model="plain", prompt=PROMPTS[:2], n=3, seed=7, **how)
    wanted = [llm.generate(prompt, seed=seed, **how).text for prompt in PROMPTS[:2] for seed in (7, 8, 9)]
    assert [choice.text for choice in made.choices] == wanted
    free = server.client.completions.create(model="plain", prompt="the", n=3, **how)
    assert len({choice.text for choice in free.choices}) > 1


def test_penalties_constraints_and_logprobs_are_those_of_generate(server: Running, llm: LLM) -> None:
    how: dict[str, Any] = {"max_tokens": 12, "temperature": 0.9, "seed": 2, "frequency_penalty": 1.5}
    own: dict[str, Any] = {"min_p": 0.01, "repetition_penalty": 1.2}
    wanted = llm.generate("the thing", logprobs=2, **how, **own)
    (made,) = server.client.completions.create(
        model="plain", prompt="the thing", logprobs=2, extra_body=own, **how
    ).choices
    assert made.text == wanted.text
    assert wanted.logprobs is not None
    assert made.logprobs is not None
    assert made.logprobs.token_logprobs == pytest.approx([each.logprob for each in wanted.logprobs], abs=1e-5)
    message: Any = [{"role": "user", "content": "Hi"}]
    shape: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["yes", "no"]}}}
    chunks = list(
        server.client.chat.completions.create(
            model="plain", messages=message, response_format=shape, logprobs=True, top_logprobs=3, seed=1, stream=True
        )
    )
    assert json.loads("".join(chunk.choices[0].delta.content or "" for chunk in chunks)) in ("yes", "no")
    assert chunks[-1].choices[0].finish_reason == "stop"
    told = [each for chunk in chunks if chunk.choices[0].logprobs for each in chunk.choices[0].logprobs.content or ()]
    assert [len(each.top_logprobs) for each in told] == [3] * len(told)
    assert told[0].logprob < 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_in_front_of_it(server: Running, llm: LLM, stream: bool) -> None:
    how: dict[str, Any] = {"max_tokens": 40, "temperature": 0.9, "seed": 5}
    whole = llm.generate("the thing", **how).text
    stop = next(whole[i : i + 3] for i in range(6, 30) if whole.find(whole[i : i + 3]) == i)
    made = server.client.completions.create(model="plain", prompt="the thing", stop=["no", stop], stream=stream, **how)
    choices = [chunk.choices[0] for chunk in made] if stream else made.choices
    assert "".join(choice.text for choice in choices) == whole[: whole.find(stop)]
    assert choices[-1].finish_reason == "stop"


def test_64_requests_at_once_each_as_if_alone(server: Running, llm: LLM) -> None:
    """Six rows, and pages for fewer: they queue, join, leave, make room and are resumed."""
    prompts = [PROMPTS[i % 4] + " in" * (i % 9) for i in range(64)]
    params = [SamplingParams(max_tokens=10 + i % 50, temperature=0.7 * (i % 2), seed=i) for i in range(64)]
    wanted = [made.text for made in llm.generate(prompts, params)]
    before = server.metrics()

    async def one(client: openai.AsyncOpenAI, i: int) -> str:
        asked = params[i]
        how: dict[str, Any] = {"max_tokens": asked.max_tokens, "temperature": asked.temperature, "seed": asked.seed}
        if i % 3:
            made = await client.completions.create(model="plain", prompt=prompts[i], **how)
            return made.choices[0].text
        stream = await client.completions.create(model="plain", prompt=prompts[i], stream=True, **how)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def every() -> list[str]:
        async with openai.AsyncOpenAI(**server.options) as client:
            return await asyncio.gather(*(one(client, i) for i in range(64)))

    assert asyncio.run(every()) == wanted
    after = server.until(lambda now: now["onegraph_running"] == 0)
    assert after["onegraph_preemptions_total"] > before["onegraph_preemptions_total"], "the case would not show it"
    done = 'onegraph_answers_total{end="finished"}'
    assert after[done] - before[done] == 64
    assert after["onegraph_pages_used"] == after["onegraph_waiting"] == 0


def test_a_prompt_with_a_known_beginning_is_not_read_twice(server: Running, llm: LLM) -> None:
    start = "the thing in the inn and 12 hats " * 3
    texts, costs = [], []
    for question in ("a", "the"):
        before = server.metrics()
        made = server.client.completions.create(model="plain", prompt=start + question, max_tokens=4, temperature=0)
        texts.append(made.choices[0].text)
        after = server.until(lambda now: now["onegraph_running"] == 0)
        names = ("onegraph_prompt_tokens_total", "onegraph_shared_tokens_total")
        costs.append([after[name] - before[name] for name in names])
    assert texts == [made.text for made in llm.generate([start + "a", start + "the"], max_tokens=4)]
    (first, _), (second, shared) = costs
    assert shared >= 16
    assert second < 16 < first


def test_prompts_with_other_salts_share_no_prefix(server: Running) -> None:
    prompt = "12 hats in the inn and the thing"  # a page and a half, in a cache of ten pages
    shared = []
    for salt in ("alice", "bob", None, "alice"):
        before = server.metrics()["onegraph_shared_tokens_total"]
        server.client.completions.create(
            model="plain", prompt=prompt, max_tokens=1, temperature=0, extra_body={"cache_salt": salt}
        )
        after = server.until(lambda now: now["onegraph_running"] == 0)
        shared.append(after["onegraph_shared_tokens_total"] - before)
    assert shared[:3] == [0, 0, 0]
    assert shared[3] >= 16
    with pytest.raises(openai.BadRequestError, match='cache_salt: got ""; allowed is a text'):
        server.client.completions.create(model="plain", prompt="a", extra_body={"cache_salt": ""})


def test_an_evicted_beginning_comes_back_from_host_memory(model: Path, llm: LLM) -> None:
    """A cache of ten pages, in which two of the prompts have room at most."""
    prompts = [f"{word} " * 9 for word in ("the thing", "in the inn", "12 hats")]
    wanted = [made.text for made in llm.generate(prompts, max_tokens=4)]
    running = Running(model, options=["--kv-offloading-size=0.01"])
    try:
        for _ in range(2):
            made = [running.client.completions.create(model="plain", prompt=p, max_tokens=4, temperature=0).choices[0]
                    for p in prompts]  # fmt: skip
            assert [each.text for each in made] == wanted
        found = running.metrics()
    finally:
        running.end()
    restored = found["onegraph_restored_tokens_total"]
    assert found["onegraph_shared_tokens_total"] >= restored >= 16
    assert found["onegraph_offloaded_tokens_total"] >= restored
    assert 0 < found["onegraph_host_pages_used"] <= found["onegraph_host_pages"]


# ------------------------------------------------------------------------------------------- leaving and slow clients


def test_who_leaves_gives_rows_and_pages_back(server: Running) -> None:
    before, prompts = server.metrics(), ["the thing"] * 7  # far more than are answered before somebody looks
    streams = [
        server.client.completions.create(model="plain", prompt=prompts, max_tokens=80, stream=True) for _ in range(10)
    ]
    next(iter(streams[0]))
    for stream in streams:
        stream.close()
    gone = 'onegraph_answers_total{end="cancelled"}'
    after = server.until(lambda now: now["onegraph_running"] == now["onegraph_waiting"] == 0)
    assert after["onegraph_pages_used"] == 0
    assert after[gone] > before[gone]
    connection = socket.create_connection(("127.0.0.1", server.port))
    body = json.dumps({"model": "plain", "prompt": prompts * 10, "max_tokens": 80}).encode()
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (KEY.encode(), len(body), body)
    )
    server.until(lambda now: now["onegraph_running"])
    connection.close()
    now = server.until(lambda now: now["onegraph_running"] == now["onegraph_pages_used"] == 0)
    assert now[gone] > after[gone], "a request that is not streamed, too"


def test_who_does_not_read_holds_up_nobody(model: Path) -> None:
    """Its pieces wait, as many as its answer has; the other answers, and those behind it in the queue, end."""
    with LLM(model, max_num_seqs=2, max_model_len=64, device="cpu") as llm:
        with Checkpoint.open(model) as checkpoint:
            worker = Worker(llm, Tokenizer(checkpoint), queue=2)
        worker.start()
        prompt, params = llm.tokenizer.encode("the"), SamplingParams(max_tokens=30)

        async def use() -> None:
            _, unread = worker.submit([llm.engine.request(prompt, params)], ())
            _, pieces = worker.submit([llm.engine.request(prompt, params) for _ in range(3)], ())
            with pytest.raises(Full):
                worker.submit([llm.engine.request(prompt, params)], ())
            ended = 0
            while ended < 3:
                ended += (await pieces.get()).last
            tokens = 0
            while tokens < 30:
                tokens += (await unread.get()).tokens

        asyncio.run(use())
        worker.close()
        assert not any(thread.is_alive() for thread in worker._threads)
        assert worker.pages[0] == 0


@pytest.mark.parametrize(("prepare", "first", "later"), [("plain", 4, 12), ("background", 4, 0), ("all", 21, 0)])
def test_no_request_waits_for_a_step_to_be_built(model: Path, prepare: Prepare, first: int, later: int) -> None:
    with LLM(model, max_num_seqs=2, max_model_len=64, device="cpu") as llm, Checkpoint.open(model) as checkpoint:
        worker, groups = Worker(llm, Tokenizer(checkpoint), queue=8, prepare=prepare), llm.engine.executor.groups
        real, hold = worker._build_later, threading.Event()
        worker._build_later = lambda: (hold.wait(60), real())  # type: ignore[method-assign]
        worker.start()
        assert len(groups) == first
        hold.set()
        while worker._later:
            time.sleep(0.01)
        prompt = llm.tokenizer.encode("the")

        async def ask(**how: Any) -> None:
            _, pieces = worker.submit([llm.engine.request(prompt, SamplingParams(max_tokens=3, **how))], ())
            while not (await pieces.get()).last:
                pass

        asyncio.run(ask())  # behind the last step that was built
        built = len(groups)
        for temperature, penalty, top in product((0, 1), (0, 1), (None, 2)):
            asyncio.run(ask(temperature=temperature, frequency_penalty=penalty, logprobs=top))
        worker.close()
        assert len(groups) - built == later
        assert built == (first if prepare == "plain" else 21)


def test_a_request_comes_between_steps_that_are_built_later(model: Path) -> None:
    with LLM(model, max_num_seqs=2, max_model_len=64, device="cpu") as llm, Checkpoint.open(model) as checkpoint:
        worker = Worker(llm, Tokenizer(checkpoint), queue=8)
        worker.start()
        real, prompt = worker._build, llm.tokenizer.encode("the")
        worker._build = lambda *step: (time.sleep(0.3), real(*step))  # type: ignore[method-assign]
        worker._later += [(choice, "decode") for choice in CHOICES]

        async def ask() -> None:
            _, pieces = worker.submit([llm.engine.request(prompt, SamplingParams(max_tokens=3))], ())
            while not (piece := await pieces.get()).last:
                assert not piece.error

        asyncio.run(ask())
        assert worker._later
        worker.close()
        assert not any(thread.is_alive() for thread in worker._threads)


def test_an_engine_that_fails_says_so_to_clients_and_in_the_log(
    model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(tokens: Any) -> None:
        raise RuntimeError("the device\nis lost")

    with LLM(model, max_num_seqs=2, max_model_len=64, device="cpu") as llm, Checkpoint.open(model) as checkpoint:
        models = Models.of("plain", worker := Worker(llm, Tokenizer(checkpoint), queue=2, prepare="plain"))
        models.start()
        monkeypatch.setattr(worker, "_dispatch_tokens", broken)
        app = Server(models, Settings()).app()

        async def ask() -> list[httpx.Response]:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://here") as client:
                body = {"model": "plain", "prompt": "the", "max_tokens": 3}
                return [await client.post("/v1/completions", json=body), await client.get("/health")]

        failed, health = asyncio.run(ask())
        why = "the engine failed, restart the server: RuntimeError: the device is lost"
        assert (failed.status_code, failed.json()["error"]["message"]) == (500, why)
        assert (health.status_code, health.json()["status"]) == (503, why)
        assert ("onegraph.serve.worker", logging.ERROR, why) in caplog.record_tuples
        worker.close()


def test_a_step_that_cannot_be_built_ends_who_needs_it(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not the requests beside it, and only while memory is short."""
    with LLM(model, max_num_seqs=4, max_model_len=64, device="cpu") as llm, Checkpoint.open(model) as checkpoint:
        plain: dict[str, Any] = {"model": "plain", "prompt": "the thing", "max_tokens": 30, "temperature": 0}
        penalized = plain | {"frequency_penalty": 1.5}
        named = {"prompts": "the thing", "max_tokens": 30, "temperature": 0}
        wanted = [llm.generate(**named).text, llm.generate(**named, frequency_penalty=1.5).text]
        steps = llm.engine.executor.ranks[0]
        llm.engine.executor.groups.clear()
        build, short = steps.build, True

        def broken(decoding: bool, choice: Choice, *rest: Any) -> Any:
            if short and decoding and choice.logprobs:
                raise MemoryError("of a graph,\nwhich is large")
            return build(decoding, choice, *rest)

        steps.build = broken  # type: ignore[method-assign]
        models = Models.of("plain", worker := Worker(llm, Tokenizer(checkpoint), queue=8))
        models.start()
        app = Server(models, Settings()).app()
        while worker._later:
            time.sleep(0.01)

        async def ask(*bodies: dict[str, Any]) -> list[httpx.Response]:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://here") as client:
                return await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))

        told = "the decode step with log-probabilities could not be built: of a graph, which is large; leave"
        assert told in caplog.text
        sound = [plain, penalized]
        first, second, *refused = asyncio.run(ask(*sound, *(body | {"logprobs": 1} for body in sound)))
        assert [each.json()["choices"][0]["text"] for each in (first, second)] == wanted
        for each in refused:
            assert each.status_code == 500
            assert "log-probabilities could not be built: of a graph, which is large; leave" in each.text
        short = False
        (again,) = asyncio.run(ask(plain | {"logprobs": 1}))
        assert again.json()["choices"][0]["text"] == wanted[0]
        assert worker.counts["failed"] == 2
        assert worker.pages[0] == 0
        worker.close()


# ----------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"", 400, "the body is not JSON"),
        (b"{", 400, "the body is not JSON"),
        (b"\xff\xfe{}", 400, "the body is not JSON"),
        (b"[" * 15000, 400, "the body is not JSON"),
        ([], 400, "the body is []; a JSON object is expected"),
        ({"prompt": "a"}, 400, "model is missing"),
        ({"model": "gpt-4", "prompt": "a"}, 404, "the model 'gpt-4' is not served here"),
        ({"model": "plain"}, 400, "prompt is missing"),
        ({"model": "plain", "prompt": ""}, 400, "got no tokens"),
        ({"model": "plain", "prompt": []}, 400, "prompt: got []"),
        ({"model": "plain", "prompt": ["a", [1, "b"]]}, 400, "prompt: got"),
        ({"model": "plain", "prompt": [10**9]}, 400, "got token 1000000000 at 0"),
        ({"model": "plain", "prompt": "\ud800"}, 400, "not UTF-8"),
        ({"model": "plain", "prompt": "a", "\ud800": 1}, 400, "is not known here"),
        ({"model": "plain", "prompt": "a", "temperature": "hot"}, 400, 'temperature: got "hot"'),
        ({"model": "plain", "prompt": "a", "temperature": 1e400}, 400, "temperature: got Infinity"),
        ({"model": "plain", "prompt": "a", "temperature": -1}, 400, "temperature: got -1; allowed is 0 for greedy"),
        ({"model": "plain", "prompt": "a", "max_tokens": 0}, 400, "max_tokens: got 0"),
        ({"model": "plain", "prompt": "a", "max_tokens": True}, 400, "max_tokens: got true"),
        (
            {"model": "plain", "prompt": "a", "seed": 2**63},
            400,
            "seed: got 9223372036854775808; allowed is a whole number from -9223372036854775808 to 9223372036854775679",
        ),
        (
            {"model": "plain", "prompt": "a", "max_tokens": 2**40},
            400,
            "max_tokens: got 1099511627776; allowed is a whole number from 1 to 2147483647",
        ),
        (b'{"n": ' + b"1" * 10_000 + b"}", 400, "the body is not JSON: a number has 10000 digits; allowed are 1000"),
        ({"model": "plain", "prompt": "a", "regex": "\ud800"}, 400, "regex: it has a lone surrogate"),
        ({"model": "plain", "prompt": "a", "top_k": -2}, 400, "top_k: got -2; allowed is a whole number up to"),
        ({"model": "plain", "prompt": "a", "stop": [""]}, 400, 'stop: got [""]'),
        ({"model": "plain", "prompt": "a", "tools": [{}]}, 400, "tools is not known here; allowed are"),
        ({"model": "plain", "prompt": "a", "suffix": "b"}, 400, "suffix is not supported; leave it out"),
        ({"model": "plain", "prompt": "a", "max_tokens": 0}, 400, "allowed is that with echo: true alone"),
        ({"model": "plain", "prompt": "a", "logit_bias": {"5": 101}}, 400, "a number from -100 to 100 each"),
        ({"model": "plain", "prompt": "a", "logit_bias": {"the": 1}}, 400, "logit_bias: got "),
        ({"model": "plain", "prompt": "a", "logit_bias": {"99999": 1}}, 400, "logit_bias: got token 99999"),
        (
            {"model": "plain", "prompt": "a", "min_tokens": 9, "max_tokens": 8},
            400,
            "min_tokens: got 9; allowed is 0 to",
        ),
        (
            {"model": "plain", "prompt": "a", "min_tokens": 2, "regex": "a"},
            400,
            "min_tokens: got 2 beside a constraint",
        ),
        (
            {"model": "plain", "prompt": "a", "stream_options": {"a": 1}},
            400,
            "stream_options is for stream: true alone",
        ),
        ({"model": "plain", "prompt": "a", "logprobs": 21}, 400, "logprobs: got 21; allowed is 0 to 20"),
        (
            {"model": "plain", "prompt": "a", "frequency_penalty": 3},
            400,
            "frequency_penalty: got 3; allowed is -2 to 2",
        ),
        ({"model": "plain", "prompt": "a", "regex": "("}, 400, "regex: "),
        (
            {"model": "plain", "prompt": "a", "response_format": schema({"type": "array", "minItems": 10**9})},
            400,
            "json_schema: it cannot be compiled: ran out of its 512 MiB; give a simpler one",
        ),
        ({"model": "plain", "prompt": "a", "response_format": schema(DEEP)}, 400, "json_schema: "),
        ({"model": "plain", "prompt": "a", "regex": "[^\\s\\S]"}, 400, "regex: no text matches it"),
        ({"model": "plain", "prompt": "a", "response_format": {"type": "xml"}}, 400, "response_format: got"),
        ({"model": "plain", "prompt": "a", "n": 4, "best_of": 3}, 400, "best_of: got 3; allowed is n, 4, and more"),
        ({"model": "plain", "prompt": "a", "stream": True, "best_of": 3}, 400, "leave stream out"),
        (
            {"model": "plain", "prompt": "a", "wat": 1},
            400,
            "wat is not known here; allowed are best_of, cache_salt, echo, frequency_penalty, guided_choice,",
        ),
        ({"model": "plain", "prompt": "a" * 200}, 400, "the context is 96; shorten the prompt to 95 tokens or less"),
        (
            {"model": "plain", "prompt": "a", "max_tokens": 96},
            400,
            "96 more were asked for; the context is 96; lower max_tokens to 95, or shorten the prompt",
        ),
        ({"model": "plain", "prompt": ["a"] * 2, "n": 50}, 400, "asks for 100 answers; 80 can be computed or wait"),
        ({"model": "plain", "prompt": "a" * 30000}, 413, "more than 20000 bytes"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(server: Running, body: Any, status: int, says: str) -> None:
    response = server.post(body)
    error = response.json()["error"]
    assert (response.status_code, says in error["message"]) == (status, True), error
    assert "\n" not in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": "a" * 200}, "prompt"),
        ({"prompt": "a", "max_tokens": 96}, "max_tokens"),
        ({"prompt": "a", "temperature": 1e300}, "temperature"),
        ({"prompt": "a", "regex": "("}, "regex"),
        (
            {
                "prompt": "a",
                "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": 5}}},
            },
            "response_format",
        ),
    ],
)
def test_the_field_that_is_wrong_is_named(server: Running, fields: dict[str, Any], param: str) -> None:
    error = server.post({"model": "plain"} | fields).json()["error"]
    assert error["param"] == param, error


def test_who_does_not_fit_the_queue_is_told_to_come_again(server: Running) -> None:
    many = server.client.completions.create(model="plain", prompt="a", max_tokens=90, n=79, stream=True)
    next(iter(many))
    response = server.post({"model": "plain", "prompt": "a", "n": 60})
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"
    many.close()
    server.until(lambda now: now["onegraph_running"] == now["onegraph_waiting"] == 0)


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ("Hi", 'messages[0]: got "Hi"'),
        ({"role": [], "content": "a"}, "messages[0]: role is []; allowed are system"),
        ({"role": {}, "content": "a"}, "messages[0]: role is {}; allowed are system"),
        ({"role": "assistant", "content": "a", "annotations": [], "refusal": None}, None),
        ({"role": "critic", "content": "a"}, 'messages[0]: role is "critic"; allowed are system'),
        ({"role": "tool", "tool_call_id": "a", "content": "a"}, None),
        ({"role": "user", "content": "a", "tool_calls": [{}]}, "tool_calls is not supported"),
        ({"role": "user"}, "content is neither a text nor a list of text parts"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "content is neither"),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]},
            'messages[0].content[1] has type "image_url"; this server takes text only',
        ),
        (
            {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]},
            'messages[0].content[0] has type "input_audio"; this server takes text only',
        ),
        ({"role": "assistant", "content": "a", "tool_calls": [{}]}, "messages[0].tool_calls[0]: an object with id"),
        ({"role": "user", "content": "<|im_end|>", "name": 3}, None),
        ({"role": "assistant", "content": [{"type": "text", "text": "a"}], "tool_calls": None}, None),
    ],
)
def test_messages_that_are_refused_and_not(server: Running, message: Any, says: str | None) -> None:
    response = server.post({"model": "plain", "messages": [message], "max_tokens": 1}, "chat/completions")
    if says is None:
        assert response.status_code == 200, response.text
    else:
        assert response.status_code == 400
        assert says in response.json()["error"]["message"]


def test_100_megabytes_are_refused_and_not_kept(server: Running) -> None:
    def status() -> int:
        lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

    before = status()
    response = server.post(bytes(1 << 20) for _ in range(100))
    assert response.status_code == 413
    assert status() - before < 50_000
    assert server.client.models.list().data[0].id == "plain"


@pytest.mark.parametrize("path", ["models", "completions", "chat/completions", "../metrics"])
def test_without_the_key_nothing_is_told(server: Running, path: str) -> None:
    wrong, missing = (b"Bearer wrong", "Bearer sésame".encode()), (b"", KEY.encode(), b"Basic " + KEY.encode())
    for key in wrong + missing:
        method = "POST" if path.endswith("completions") else "GET"
        headers = {b"authorization": key, b"content-type": b"application/json"}
        response = httpx.request(method, f"{server.url}/{path}", headers=headers)
        code = "invalid_api_key" if key in wrong else "missing_api_key"
        assert (response.status_code, response.json()["error"]["code"]) == (401, code)
    assert httpx.get(f"{server.url}/models", headers={"authorization": f"bearer {KEY}"}).status_code == 200
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(**server.options | {"api_key": "no"}).models.list()


def test_models_health_and_what_is_not_there(server: Running) -> None:
    card = server.client.models.retrieve("plain")
    assert (card.id, card.owned_by) == ("plain", "onegraph")
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        server.client.models.retrieve("org/other")
    root = server.url.removesuffix("v1")
    assert httpx.get(root + "health").json() == {"status": "ok"}
    assert httpx.get(root + "v1/assistants").json()["error"]["message"] == "GET /v1/assistants: Not Found"
    wrong = httpx.get(root + "v1/completions")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert httpx.head(root + "health").status_code == 200
    with pytest.raises(openai.BadRequestError, match="chat template has no switch for it") as refused:
        server.client.chat.completions.create(
            model="plain", messages=[{"role": "user", "content": "a"}], reasoning_effort="low"
        )
    assert refused.value.param == "reasoning_effort"


# -------------------------------------------------------------------------------------------------- beginning and end


def test_killed_restarted_and_interrupted(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ask: dict[str, Any] = {"model": "plain", "prompt": "the", "max_tokens": 90, "stream": True}
    first = Running(model)
    try:
        next(iter(first.client.completions.create(**ask)))
        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait()
        second = Running(model, port=first.port)
    finally:
        first.end()
    try:
        assert second.client.completions.create(**ask | {"stream": False, "max_tokens": 2}).choices
        assert main(["serve", str(model), "--port", str(second.port)]) == 2
        says = f"cannot listen at 127.0.0.1:{second.port}: Address already in use; give another --port, or end what"
        assert f"onegraph: error: {says} listens there\n" == capsys.readouterr().err
        streams = [iter(second.client.completions.create(**ask | {"n": 6})) for _ in range(10)]
        next(streams[0])
        second.process.send_signal(signal.SIGINT)
        _, errors = second.process.communicate(timeout=20)
        assert second.process.returncode == 130
        assert errors.splitlines()[-2:] == ["stopping: running requests have 1 s", "onegraph: interrupted"]
        assert "Traceback" not in errors
    finally:
        second.end()


@pytest.mark.parametrize(
    ("signals", "status", "lines"), [("INT INT", 130, ["onegraph: interrupted"]), ("TERM TERM", 0, [])]
)
def test_another_signal_does_not_wait(model: Path, signals: str, status: int, lines: list[str]) -> None:
    """Nor does it cut anybody off without a word."""
    first, *more = (signal.Signals[f"SIG{name}"] for name in signals.split())
    running = Running(model, options=["--grace=60"])
    ask: dict[str, Any] = {"model": "plain", "prompt": "the", "max_tokens": 90}
    try:
        with ThreadPoolExecutor() as pool:
            stream = running.client.completions.create(n=60, stream=True, extra_body={"ignore_eos": True}, **ask)
            next(iter(stream))
            whole = pool.submit(running.post, ask | {"n": 19})  # which waits behind those
            running.until(lambda now: now["onegraph_running"] + now["onegraph_waiting"] > 60)
            running.process.send_signal(first)
            assert running.process.stderr.readline() == "stopping: running requests have 60 s\n"
            for each in more:
                time.sleep(0.1)
                running.process.send_signal(each)
            _, errors = running.process.communicate(timeout=30)
            assert (errors.splitlines(), running.process.returncode) == (lines, status)
            assert whole.result().json()["error"]["message"] == "the server is shutting down"
            with pytest.raises(openai.APIError, match="the server is shutting down"):
                list(stream)
    finally:
        running.end()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_an_idle_server_ends_at_once_however_often_it_is_told(model: Path, number: signal.Signals, status: int) -> None:
    running = Running(model, options=["--grace=60"])
    try:
        for _ in range(2 if number == signal.SIGINT else 1):
            running.process.send_signal(number)
            time.sleep(0.01)
        _, errors = running.process.communicate(timeout=30)
        assert (
            errors.splitlines() == ["stopping: running requests have 60 s", "onegraph: interrupted"][: 1 + bool(status)]
        )
        assert running.process.returncode == status
    finally:
        running.end()


def test_who_does_not_read_is_cut_off_in_the_end(model: Path) -> None:
    """A connection whose client takes nothing has its grace, and the seconds that a last word may take."""
    running = Running(model, options=["--grace=0"])
    body = json.dumps({"model": "plain", "prompt": "the", "max_tokens": 90, "n": 40, "logprobs": 20, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\n{JSON_TYPE}"
    try:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", running.port))
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            running.until(lambda now: now['onegraph_answers_total{end="finished"}'] == 40)
            running.process.send_signal(signal.SIGINT)
            _, errors = running.process.communicate(timeout=30)
            assert errors.splitlines() == ["stopping: running requests have 0 s", "onegraph: interrupted"]
    finally:
        running.end()


def test_the_end_waits_for_no_body(model: Path) -> None:
    running = Running(model)
    try:
        with socket.create_connection(("127.0.0.1", running.port), timeout=DEADLINE) as client:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\n{JSON_TYPE}"
            client.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
            time.sleep(1)
            running.process.send_signal(signal.SIGINT)
            started = time.monotonic()
            assert client.recv(100).startswith(b"HTTP/1.1 503 ")
            assert time.monotonic() - started < 3.5, "its grace is 1 s"
            _, errors = running.process.communicate(timeout=20)
        assert "Traceback" not in errors
        assert errors.splitlines()[-2:] == ["stopping: running requests have 1 s", "onegraph: interrupted"]
    finally:
        running.end()


def test_what_clients_of_vllm_send(server: Running, llm: LLM) -> None:
    ask: dict[str, Any] = {"model": "plain", "max_tokens": 60, "temperature": 0.9}
    stops = sorted(llm.tokenizer.stops)
    seed = next(s for s in range(200) if len(llm.generate("a", max_tokens=60, temperature=0.9, seed=s).tokens) < 30)
    assert stops
    ended, gone_on = (
        server.post(ask | {"prompt": "a", "seed": seed, "top_k": -1, "ignore_eos": on}).json() for on in (False, True)
    )
    assert ended["choices"][0]["finish_reason"] == "stop"
    assert ended["usage"]["completion_tokens"] < 30
    assert (gone_on["choices"][0]["finish_reason"], gone_on["usage"]["completion_tokens"]) == ("length", 60)
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}, {"role": "user", "content": "a"}]
    thought = [said[0], said[1] | {"reasoning_content": "Well"}, said[2]]
    plain, same = (
        server.post(ask | {"messages": m, "seed": 1, "max_tokens": 8}, "chat/completions").json()
        for m in (said, thought)
    )
    assert plain["choices"] == same["choices"]
    wrong = server.post(ask | {"messages": [said[0] | {"reasoning": "Well"}]}, "chat/completions")
    assert "messages[0]: reasoning is not supported" in wrong.json()["error"]["message"]


def test_fields_of_other_servers(server: Running, llm: LLM) -> None:
    ask: dict[str, Any] = {"model": "plain", "prompt": "the thing in the inn", "max_tokens": 8, "temperature": 0}
    plain = server.post(ask).json()["choices"]
    harmless = {
        "best_of": 1, "use_beam_search": False, "length_penalty": 1.0, "skip_special_tokens": True, "min_tokens": 0,
        "priority": 0, "add_special_tokens": True, "typical_p": 1, "request_id": "x", "cache_prompt": True,
    }  # fmt: skip
    assert server.post(ask | harmless).json()["choices"] == plain
    for name, value in (("use_beam_search", True), ("bad_words", ["a"]), ("repeat_penalty", 1.1)):
        error = server.post(ask | {name: value}).json()["error"]
        assert (error["message"], error["param"]) == (f"{name} is not supported; leave it out", name)
    ids = llm.generate(ask["prompt"], max_tokens=8).tokens
    stop = next(i for i in range(1, 8) if ids[i] not in ids[:i])
    (ended,) = server.post(ask | {"stop_token_ids": [ids[stop]]}).json()["choices"]
    assert (ended["text"], ended["finish_reason"]) == (llm.tokenizer.decode(ids[: stop + 1]), "stop")
    last = server.post(ask | {"truncate_prompt_tokens": 3}).json()
    assert last["usage"]["prompt_tokens"] == 3
    tokens = llm.tokenizer.encode(ask["prompt"])[-3:]
    assert last["choices"][0]["text"] == llm.generate([tokens], max_tokens=8)[0].text
    assert server.post(ask | {"prompt": "the " * 200, "truncate_prompt_tokens": 5}).status_code == 200
    assert server.post(ask | {"prompt": "the " * 200, "truncate_prompt_tokens": -1}).json()["usage"] == {
        "prompt_tokens": 88, "completion_tokens": 8, "total_tokens": 96,
    }  # fmt: skip
    forced = server.post(ask | {"logit_bias": {str(ids[0]): -100, "70": 100}, "priority": -1}).json()["choices"][0]
    assert forced["text"] == llm.tokenizer.decode([70] * 8)
    ended = server.post(ask | {"stop_token_ids": [ids[stop]], "min_tokens": stop + 2}).json()
    assert ended["usage"]["completion_tokens"] > stop + 1
    end = next(iter(llm.tokenizer.stops))
    how = {"logit_bias": {str(end): 100}, "ignore_eos": True, "max_tokens": 2}
    name = llm.tokenizer.decode([end], special=True)
    for special, text in ((True, ""), (False, 2 * name)):
        assert server.post(ask | how | {"skip_special_tokens": special}).json()["choices"][0]["text"] == text
    (ended,) = server.post(ask | how | {"skip_special_tokens": False, "ignore_eos": False}).json()["choices"]
    assert (ended["text"], ended["finish_reason"]) == ("", "stop")
    where = plain[0]["text"].index(" ") if " " in plain[0]["text"] else 1
    text = plain[0]["text"][where]
    (ended,) = server.post(ask | {"stop": text, "min_tokens": 8}).json()["choices"]
    assert ended == plain[0], "no stop text is looked for"
    for how in ({"guided_choice": ["yes", "n.o"]}, {"structured_outputs": {"choice": ["yes", "n.o"]}}):
        assert server.post(ask | how).json()["choices"][0]["text"] in ("yes", "n.o")
    assert server.post(ask | {"guided_regex": "ab"}).json()["choices"][0]["text"] == "ab"
    for how in ({"guided_json": {"enum": [12]}}, {"structured_outputs": {"json": '{"enum": [12]}'}}):
        assert server.post(ask | how).json()["choices"][0]["text"] == "12"
    both = server.post(ask | {"guided_regex": "a", "structured_outputs": {"regex": "b"}}).json()["error"]
    assert "constrains the answer in another way too" in both["message"]


def test_tokens_of_a_text_and_text_of_tokens(server: Running, llm: LLM) -> None:
    """As vLLM's endpoints have them."""
    root = "../"
    text = "the thing <|im_end|> é"
    found = server.post({"model": "plain", "prompt": text}, root + "tokenize").json()
    assert found["tokens"] == llm.tokenizer.encode(text)
    assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), 96)
    assert server.post({"tokens": found["tokens"]}, root + "detokenize").json() == {"prompt": text}
    messages = [{"role": "user", "content": text}]
    asked = {"messages": messages, "add_generation_prompt": True}
    assert server.post(asked, root + "tokenize").json()["tokens"] == llm.tokenizer.chat(messages)
    long = server.post({"prompt": "the " * 4000}, root + "tokenize").json()
    assert long["count"] > 4000, "longer than the context"
    for path, body, says in (
        ("tokenize", {}, "give either prompt or messages"),
        ("tokenize", {"prompt": "a", "messages": messages}, "give either prompt or messages"),
        ("tokenize", {"prompt": ["a"]}, "prompt: got"),
        ("tokenize", {"prompt": "a", "model": "gpt-4"}, "the model 'gpt-4' is not served here"),
        ("tokenize", {"prompt": "\ud800"}, "not UTF-8"),
        ("detokenize", {"tokens": "a"}, "tokens: got"),
        ("detokenize", {}, "tokens is missing"),
    ):
        error = server.post(body, root + path).json()["error"]
        assert says in error["message"], error
    assert httpx.get(server.url.removesuffix("v1") + "version", headers={"authorization": f"Bearer {KEY}"}).json() == {
        "version": onegraph.__version__
    }
    with pytest.raises(openai.NotFoundError, match="embeddings are not supported: this server generates text"):
        server.client.embeddings.create(model="plain", input="a")


@pytest.mark.parametrize(
    ("config", "defaults"),
    [
        ({"do_sample": True, "temperature": 0.6, "top_k": 20}, {"temperature": 0.6, "top_k": 20}),
        ({"do_sample": False}, {"temperature": 0}),
        ({}, {"temperature": 0.7, "top_p": 0.95}),
    ],
)
def test_requests_draw_as_the_model_suggests(config: dict[str, Any], defaults: dict[str, Any], tmp_path: Path) -> None:
    """Where they do not say otherwise: generation_config.json, as in `chat`."""
    path = tiny.write_model(tmp_path / "plain")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 2} | config))
    running = Running(path)
    try:
        ask = {"model": "plain", "prompt": "the thing", "max_tokens": 20, "seed": 3}
        texts = [running.post(ask | how).json()["choices"][0]["text"] for how in ({}, defaults, {"temperature": 1.9})]
    finally:
        running.end()
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_a_request_that_the_listener_cuts_off_ends_quietly(llm: LLM) -> None:
    async def never(*_: Any) -> Any:
        await asyncio.sleep(DEADLINE)

    async def cut() -> None:
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
        task = asyncio.create_task(app(scope, never, never))
        await asyncio.sleep(0.1)
        task.cancel()
        await task

    app = Server(Models.of("plain", Worker(llm, llm.tokenizer, queue=2)), Settings()).app()
    asyncio.run(cut())


def test_who_reads_that_it_serves_can_connect(model: Path) -> None:
    class Heard(Exception):
        pass

    def ready() -> None:
        socket.create_connection(found.getsockname(), timeout=DEADLINE).close()
        raise Heard

    found = bind("127.0.0.1", 0)
    with LLM(model, max_model_len=96, device="cpu") as llm, Checkpoint.open(model) as checkpoint, found:
        worker = Worker(llm, Tokenizer(checkpoint), queue=2)
        with pytest.raises(Heard):
            listen(found, Models.of("plain", worker), Settings(), grace=0, ready=ready)
        worker.close()


def test_a_port_is_taken_before_the_model_is_loaded(model: Path) -> None:
    """Not only bound: of two servers begun together one would load in vain. Who comes early is answered."""
    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
        with pytest.raises(ValueError, match=f"cannot listen at 127.0.0.1:{port}: .*; give another --port"):
            bind("127.0.0.1", port)
    command = [sys.executable, "-m", "onegraph", "serve", str(model), "--device=cpu", f"--port={port}", "--grace=1"]
    first = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert first.stderr is not None
        assert first.stderr.readline() == f"loading {model}\n"
        with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE) as client:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            second = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=DEADLINE)
            assert second.returncode == 2
            assert second.stderr.startswith(f"onegraph: error: cannot listen at 127.0.0.1:{port}: "), second.stderr
            assert client.recv(100).startswith(b"HTTP/1.1 200 ")
        assert first.stderr.readline().startswith("memory: ")
        assert first.stderr.readline().startswith("serving ")
    finally:
        first.kill()
        first.communicate()


def said_at(level: str, model: Path) -> list[str]:
    """Lines on stderr of a server that answers a request and ends."""
    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    process = Forked(["serve", str(model), "--device=cpu", f"--port={port}", "--log-level", level], os.environ)
    try:
        deadline = time.monotonic() + DEADLINE
        while True:
            with contextlib.suppress(httpx.TransportError):
                body = {"model": "plain", "prompt": "the", "max_tokens": 1}
                assert httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=DEADLINE).is_success
                break
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=DEADLINE)
        return list(errors.splitlines())
    finally:
        process.kill()


@pytest.mark.parametrize("level", ["error", "warning", "info", "debug"])
def test_a_level_of_messages(level: str, model: Path) -> None:
    """Errors and warnings, of which there are none; what the server does; each request, and what uvicorn does."""
    said = said_at(level, model)
    ours = [line.split()[0] for line in said if not line.startswith(("INFO: ", "DEBUG: "))]
    assert ours == (["loading", "memory:", "serving", "stopping:"] if level in ("info", "debug") else [])
    asked = [line for line in said if line.endswith('"POST /v1/completions HTTP/1.1" 200 OK')]
    assert (len(asked), any("Application startup complete" in line for line in said)) == (
        (1, True) if level == "debug" else (0, False)
    )


def test_mistakes_on_the_command_line(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for words, says in (
        (["--api-key", ""], "--api-key: it is empty or not ASCII"),
        (["--host", "nowhere.invalid"], "cannot listen at nowhere.invalid:0"),
        (
            ["--kv-cache-tokens", "100", "--max-model-len", "200"],
            "--kv-cache-tokens: got 100; a sequence may have 200 tokens:",
        ),
        (
            ["--kv-offloading-size", "0"],
            "argument --kv-offloading-size: got '0'; allowed is a number from more than 0 to",
        ),
        (["--kv-offloading-size", "99999"], "--kv-offloading-size: got 99999 GiB; "),
        (
            ["--kv-offloading-size", "1", "--kv-cache-dtype", "turboquant:4"],
            "--kv-offloading-size: got 1; prefix caching is unsupported with turboquant:4",
        ),
        (["--max-model-len", "100000"], "--max-model-len is 100000; the model allows 1 to 256"),
        (["--capture", "on"], "--capture on needs a GPU, the device is cpu; use --capture off or auto"),
        (["--kv-cache-dtype", "turboquant"], "--kv-cache-dtype is 'turboquant'; allowed are exact, turboquant:4"),
        (["--allow-origin", "foo"], "--allow-origin: got 'foo'; allowed is scheme://host or"),
        (["--allow-origin", "http://a.example/chat"], "--allow-origin: got 'http://a.example/chat'; allowed is"),
        (["--served-model-name", ""], "--served-model-name: it is empty; leave it out"),
        (["--max-num-seqs", "0"], "argument --max-num-seqs: got '0'; allowed is an integer from 1"),
    ):
        assert main(["serve", str(model), "--port", "0", "--device", "cpu", *words]) == 2
        assert says in capsys.readouterr().err
    monkeypatch.setenv("ONEGRAPH_API_KEY", "")
    assert main(["serve", str(model), "--port", "0", "--device", "cpu"]) == 2
    assert "error: ONEGRAPH_API_KEY: it is empty or not ASCII; unset it" in capsys.readouterr().err
    monkeypatch.delitem(sys.modules, "onegraph.serve.http")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve", str(model)]) == 2
    says = 'serve needs uvicorn, which is not installed; in a checkout of onegraph: pip install -e ".[serve]"'
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ("http://a.example/", "http://a.example"),
        ("HTTPS://A.example:443", "https://a.example"),
        ("http://localhost:03000", "http://localhost:3000"),
        ("http://[::1]:80/", "http://[::1]"),
        ("https://a.example:80", "https://a.example:80"),
        ("null", "null"),
        ("*", "*"),
    ],
)
def test_an_origin_is_what_browsers_send(given: str, sent: str) -> None:
    assert origin(given) == sent


def test_a_model_of_the_current_directory_has_a_name(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model)
    running = Running(Path("."), options=["--allow-origin=http://a.example/"])
    try:
        assert running.client.models.list().data[0].id == "plain"
        answer = httpx.get(
            f"{running.url}/models", headers={"origin": "http://a.example", "authorization": f"Bearer {KEY}"}
        )
        assert answer.headers["access-control-allow-origin"] == "http://a.example"
    finally:
        running.end()


@pytest.mark.skipif(not os.environ.get("ONEGRAPH_SMOLLM2_4BIT"), reason="needs SmolLM2 in 4 bits: `make demo` makes it")
def test_a_real_model() -> None:
    path = Path(os.environ["ONEGRAPH_SMOLLM2_4BIT"])
    found = Running(path)
    try:
        messages: Any = [{"role": "user", "content": "What is the capital of Japan?"}]
        made = found.client.chat.completions.create(
            model=path.name, messages=messages, max_tokens=8, temperature=0, stream=True
        )
        assert "Tokyo" in "".join(chunk.choices[0].delta.content or "" for chunk in made)
    finally:
        found.end()


# --------------------------------------------------------------------------------------------------------- small parts


@settings(deadline=None)
@given(st.text("ab\n", max_size=30), st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3), st.data())
def test_stop_texts_are_found_wherever_the_text_is_cut(text: str, stops: list[str], data: st.DataObject) -> None:
    """The one that is complete first."""
    watch, shown, rest, met = StopTexts(stops), "", text, False
    while rest and not met:
        size = data.draw(st.integers(1, len(rest)))
        piece, rest = rest[:size], rest[size:]
        safe, met = watch.push(piece, final=not rest)
        shown += safe
    ends = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    assert shown == (text[: min(ends)[1]] if ends else text)
    assert met == bool(ends)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)
# Bodies whose fields are of the right kind, and one place of which is not
FIELDS: dict[str, Any] = {
    "model": "m", "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "n"},
        {"role": "assistant", "content": None, "annotations": [], "refusal": None, "reasoning_content": "r",
         "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": False}}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "stream": True, "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 2,
    "stop": ["a"], "n": 1,
    "chat_template_kwargs": {"thinking": True}, "logit_bias": {}, "max_tokens": 3, "metadata": {},
}  # fmt: skip
NAMES = ("model", "prompt", "messages", "max_tokens", "stop", "n", "seed", "stream", "stream_options", "top_k", "tools")


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=60)
@given(st.dictionaries(st.sampled_from(NAMES), JSON), st.booleans())
def test_whatever_the_body_is_it_is_understood_or_refused(body: dict[str, Any], chat: bool) -> None:
    try:
        asked = parse(json.dumps(body).encode(), chat=chat)
    except APIError as refused:
        found: APIError | None = refused
    else:
        found = None
        assert asked.prompts if not chat else asked.messages
    assert found is None or (found.status == 400 and str(found))


def places(value: Any) -> list[tuple[Any, Any]]:
    items = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    return [(value, key) for key, _ in items] + [place for _, inner in items for place in places(inner)]


@pytest.mark.parametrize("number", range(len(places(FIELDS))))
def test_whatever_a_field_is_it_is_understood_or_refused(number: int) -> None:
    parse(json.dumps(FIELDS).encode(), chat=True)
    for value in (None, True, -1, 1e300, "", "x", [], {}, [[]], [{}], {"a": []}, {"type": "function", "function": []}):
        fields = json.loads(json.dumps(FIELDS))
        holder, key = places(fields)[number]
        holder[key] = value
        with contextlib.suppress(APIError):
            parse(json.dumps(fields).encode(), chat=True)
