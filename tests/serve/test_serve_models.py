"""Several models behind one server: loaded when asked for, unloaded when idle, with the real `openai` client."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import subprocess
import sys
import time
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import openai
import pytest

from fuzz import tiny
from onegraph import LLM
from onegraph.api.memory import Memory
from onegraph.api.tokenizer import Tokenizer
from onegraph.cli import main
from onegraph.cli.common import Parser
from onegraph.cli.serve import add_parser, names_of
from onegraph.engine.params import SamplingParams
from onegraph.formats.checkpoint import Checkpoint
from onegraph.serve.app import Server, Settings
from onegraph.serve.models import LoadError, Model, Models
from onegraph.serve.worker import Full, Stopped, Worker

HOW: dict[str, Any] = {"prompt": "the thing", "max_tokens": 12, "temperature": 0}
LIMIT = 10  # of two rows and a queue of eight
DEADLINE = 60.0


class Loads:
    """Models to load from `paths`, what was loaded in which order, and what loading does besides."""

    def __init__(self, paths: dict[str, Path]) -> None:
        self.paths, self.order = paths, list[str]()
        self.gate = Event()  # loading waits for it
        self.gate.set()
        self.broken = set[str]()
        self.free: int | None = None  # bytes that a model is told to be free while another is loaded
        self.llms = list["weakref.ref[LLM]"]()

    def models(self, **how: Any) -> Models:
        made = [Model(name, self._load(name), max_model_len=200, limit=LIMIT) for name in self.paths]
        return Models(made, **how)

    def _load(self, name: str) -> Callable[[Callable[[], None], Callable[[Memory], None]], Worker]:
        def load(check: Callable[[], None], announce: Callable[[Memory], None]) -> Worker:
            self.order.append(name)
            while not self.gate.wait(0.01):
                check()
            if name in self.broken:
                raise ValueError(f"{name}: its shards\nare damaged")

            def told(memory: Memory) -> None:
                announce(memory if self.free is None else replace(memory, free=self.free))

            path = self.paths[name]
            llm = LLM(path, max_num_seqs=2, max_model_len=200, device="cpu", on_memory=told)
            self.llms.append(weakref.ref(llm))
            with Checkpoint.open(path) as checkpoint:
                return Worker(llm, Tokenizer(checkpoint), queue=LIMIT - 2, prepare="plain")

        return load


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: tiny.write_model(folder / name, seed=i) for i, name in enumerate("abc")}


@pytest.fixture(scope="module")
def texts(paths: dict[str, Path]) -> dict[str, str]:
    """What each answers."""
    found = {}
    for name, path in paths.items():
        with LLM(path, max_model_len=200, device="cpu") as llm:
            found[name] = llm.generate(HOW["prompt"], max_tokens=12, temperature=0).text
    assert len({*found.values()}) == len(found), "the case would not show a model"
    return found


@pytest.fixture
def loads(paths: dict[str, Path]) -> Loads:
    return Loads(paths)


def use(models: Models, ask: Callable[[openai.AsyncOpenAI], Awaitable[Any]]) -> Any:
    """What a conversation with the client gives, of a server that began with the first model."""
    server = Server(models, Settings())
    app = server.app()

    async def asked() -> Any:
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=httpx.ASGITransport(app=app)) as http,
        ):
            client = openai.AsyncOpenAI(base_url="http://here/v1", api_key="none", max_retries=0, http_client=http)
            return await ask(client)

    models.start()
    return asyncio.run(asked())


async def metrics(client: openai.AsyncOpenAI) -> dict[str, float]:
    lines = (await client._client.get("http://here/metrics")).text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


async def until(fine: Callable[[], Any]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not fine():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def children() -> set[str]:
    tasks = Path("/proc/self/task").glob("*/children")
    return {child for each in tasks for child in each.read_text().split()}


# ----------------------------------------------------------------------------------------------------------- swapping


def test_each_request_gets_the_model_it_names(loads: Loads, texts: dict[str, str]) -> None:
    """Many at once: whoever waits for the same model is answered by one load."""

    async def ask(client: openai.AsyncOpenAI) -> None:
        names = list("abcabcbbca")
        made = await asyncio.gather(*[client.completions.create(model=name, **HOW) for name in names])
        assert [(each.model, each.choices[0].text) for each in made] == [(name, texts[name]) for name in names]
        assert loads.order in (list("abc"), list("abca")), "the last one for a may come behind the first for b"
        assert [each.id for each in (await client.models.list()).data] == ["a", "b", "c"]
        with pytest.raises(openai.NotFoundError, match="the model 'd' is not served here; this is 'a', 'b', 'c'"):
            await client.completions.create(model="d", **HOW)
        found = await metrics(client)
        assert [found[f'onegraph_model_loaded{{model="{name}"}}'] for name in "abc"] == [
            name == loads.order[-1] for name in "abc"
        ]
        assert [found[f'onegraph_model_loads_total{{model="{name}"}}'] for name in "abc"] == [
            loads.order.count(name) for name in "abc"
        ]
        assert found["onegraph_generated_tokens_total"] == 12 * len(names), "also of models that are unloaded"
        assert found['onegraph_answers_total{end="finished"}'] == len(names)

    use(loads.models(), ask)


def test_what_is_unloaded_is_freed(loads: Loads) -> None:
    async def ask(client: openai.AsyncOpenAI) -> None:
        after = []
        for name in "babab":
            await client.completions.create(model=name, **HOW)
            gc.collect()
            after.append(len(children()))
        assert max(after) == after[0], "its tokenizers' processes, too"
        assert [found() is not None for found in loads.llms] == [False] * 5 + [True]

    use(loads.models(), ask)


def test_an_answer_that_runs_is_complete_before_its_model_goes(loads: Loads, paths: dict[str, Path]) -> None:
    how: dict[str, Any] = {"prompt": "the thing", "max_tokens": 150, "temperature": 0}
    with LLM(paths["a"], max_model_len=200, device="cpu") as llm:
        wanted = llm.generate("the thing", max_tokens=150, temperature=0)
    models = loads.models()

    async def ask(client: openai.AsyncOpenAI) -> None:
        long = asyncio.create_task(client.completions.create(model="a", stream=True, **how))
        await until(lambda: models.workers[models.all[0]].running)
        other = asyncio.create_task(client.completions.create(model="b", **HOW))
        await until(lambda: models.all[0].leaving)
        late = asyncio.create_task(client.completions.create(model="a", **HOW))  # behind the one for b
        text = "".join([chunk.choices[0].text async for chunk in await long])
        assert text == wanted.text
        await asyncio.gather(other, late)
        assert loads.order == ["a", "b", "a"]

    use(models, ask)


def test_tokens_are_those_of_the_model_too(loads: Loads) -> None:
    async def ask(client: openai.AsyncOpenAI) -> None:
        post = client._client.post
        made = (await post("http://here/tokenize", json={"model": "b", "prompt": "the"})).json()
        assert made["max_model_len"] == 200
        assert loads.order == ["a", "b"]
        text = (await post("http://here/detokenize", json={"model": "b", "tokens": made["tokens"]})).json()["prompt"]
        assert text.endswith("the")

    use(loads.models(), ask)


def test_as_many_stay_as_may_and_fit(loads: Loads, caplog: pytest.LogCaptureFixture) -> None:
    async def ask(client: openai.AsyncOpenAI) -> None:
        for name in "abacb":  # c takes the place of b, b that of a
            await client.completions.create(model=name, **HOW)
        assert loads.order == ["a", "b", "c", "b"]
        assert {model.name for model in models.workers} == {"b", "c"}
        loads.free = 1000  # bytes
        await client.completions.create(model="a", **HOW)
        assert {model.name for model in models.workers} == {"a"}, "no other one fits beside it"
        assert loads.order[4:] == ["a", "a"], "tried beside another one first"

    models = loads.models(most=2)
    use(models, ask)
    assert [each.name for each in caplog.records if each.levelname == "ERROR"] == [], "to be tried again is no error"


def test_an_idle_model_is_unloaded(loads: Loads, texts: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "onegraph")

    async def ask(client: openai.AsyncOpenAI) -> None:
        await until(lambda: not models.workers)
        assert (await client._client.get("http://here/health")).status_code == 200
        assert (await client.completions.create(model="a", **HOW)).choices[0].text == texts["a"]
        await until(lambda: not models.workers)

    models = loads.models(keep_alive=0.2)
    use(models, ask)
    assert loads.order == ["a", "a"]
    assert ("onegraph.serve.models", logging.INFO, "unloaded a") in caplog.record_tuples


def test_a_worker_that_is_closed_writes_what_was_drawn(paths: dict[str, Path]) -> None:
    """The last tokens of an answer and the end come at once to the thread that makes text."""
    with LLM(paths["a"], max_model_len=200, device="cpu") as llm, Checkpoint.open(paths["a"]) as checkpoint:
        worker = Worker(llm, Tokenizer(checkpoint), queue=2, prepare="plain")
        engine, writer = worker._threads

        async def use() -> int:
            engine.start()
            request = llm.engine.request(llm.tokenizer.encode("the"), SamplingParams(max_tokens=20))
            _, pieces = worker.submit([request], ())
            await until(lambda: worker.idle_s)
            worker.close()
            writer.start()
            tokens = 0
            async with asyncio.timeout(DEADLINE):
                while not (piece := await pieces.get()).last:
                    tokens += piece.tokens
            return tokens + piece.tokens

        assert asyncio.run(use()) == 20
        writer.join(DEADLINE)
        assert not writer.is_alive()


# ----------------------------------------------------------------------------------------------------- what goes wrong


def test_a_model_that_cannot_be_loaded_is_an_error_of_its_requests(
    loads: Loads, texts: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    async def ask(client: openai.AsyncOpenAI) -> None:
        loads.broken.add("b")
        asked = [client.completions.create(model=name, **HOW) for name in "bab"]
        first, made, second = await asyncio.gather(*asked, return_exceptions=True)
        for error in (first, second):
            assert isinstance(error, openai.InternalServerError)
            assert error.status_code == 503
            assert "the model 'b' could not be loaded: b: its shards are damaged" in str(error)
            assert "ERROR" in caplog.text
        assert not isinstance(made, BaseException)
        assert made.choices[0].text == texts["a"]
        loads.broken.clear()
        assert (await client.completions.create(model="b", **HOW)).choices[0].text == texts["b"]

    use(loads.models(), ask)


def test_as_many_requests_wait_for_a_model_as_may(loads: Loads) -> None:
    async def ask(client: openai.AsyncOpenAI) -> None:
        loads.gate.clear()
        several = {**HOW, "model": "b", "n": LIMIT - 1, "temperature": 1}
        waits = asyncio.create_task(client.completions.create(**several))
        await until(lambda: models.all[1].waiting)
        assert (await metrics(client))["onegraph_waiting"] == LIMIT - 1
        with pytest.raises(openai.RateLimitError, match="too many requests wait"):
            await client.completions.create(**several)
        loads.gate.set()
        assert len((await waits).choices) == LIMIT - 1

    models = loads.models()
    use(models, ask)


def test_a_model_is_not_loaded_for_clients_that_are_gone(loads: Loads) -> None:
    models = loads.models()
    server = Server(models, Settings())
    app = server.app()

    async def ask() -> None:
        async def answer(name: str, leave: asyncio.Event) -> list[Any]:
            async def receive() -> Any:
                if sent:
                    await leave.wait()
                    return {"type": "http.disconnect"}
                sent.append(1)
                return {"type": "http.request", "body": json.dumps({"model": name, **HOW}).encode()}

            async def send(message: Any) -> None:
                answers.append(message)

            sent, answers = list[int](), list[Any]()
            head = [(b"content-type", b"application/json"), (b"host", b"here")]
            scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": head}
            await app(scope, receive, send)
            return answers

        leave, stay = asyncio.Event(), asyncio.Event()
        loads.gate.clear()
        loading = asyncio.create_task(answer("b", stay))
        await until(lambda: loads.order == ["a", "b"])
        gone = asyncio.create_task(answer("c", leave))
        await until(lambda: models.all[2].waiting)
        leave.set()
        await gone
        assert not models.all[2].waiting
        loads.gate.set()
        assert (await loading)[0]["status"] == 200
        await until(lambda: not models._queue)
        assert loads.order == ["a", "b"]
        await models.close()

    models.start()
    asyncio.run(ask())


def test_places_of_whom_leaves_at_the_last_moment_are_free(loads: Loads) -> None:
    models = loads.models()

    async def wait() -> None:
        task = asyncio.create_task(models.reserve(models.all[0], LIMIT))
        await asyncio.sleep(0)
        models._answer(models.all[0], None)  # it is loaded ...
        task.cancel()  # ... and nobody has looked yet
        with pytest.raises(asyncio.CancelledError):
            await task
        found = models.try_reserve(models.all[0], LIMIT)
        assert found is not None
        with pytest.raises(Full):
            models.try_reserve(models.all[0], 1)
        found.worker.release(LIMIT)
        await models.close()
        with pytest.raises(Stopped):
            models.try_reserve(models.all[0], 1)

    models.start()
    asyncio.run(wait())


def test_the_end_does_not_wait_for_a_model_that_is_loading(loads: Loads) -> None:
    async def ask(client: openai.AsyncOpenAI) -> Any:
        loads.gate.clear()
        waits = asyncio.create_task(client.completions.create(model="b", **HOW))
        await until(lambda: loads.order == ["a", "b"])
        await models.close()
        with pytest.raises(openai.InternalServerError, match="the server is shutting down"):
            await waits

    models = loads.models()
    started = time.monotonic()
    use(models, ask)
    assert time.monotonic() - started < DEADLINE / 2
    assert not models.workers


def test_a_first_model_that_is_broken_ends_the_start(loads: Loads) -> None:
    loads.broken.add("a")
    with pytest.raises(ValueError, match="its shards"):
        loads.models().start()
    with pytest.raises(LoadError, match="could not be loaded: a: its shards are damaged"):
        loads.models()._load_or_tell(loads.models().all[0])


# ------------------------------------------------------------------------------------------------------- command line


def test_the_command_serves_several(paths: dict[str, Path], texts: dict[str, str]) -> None:
    command = [sys.executable, "-m", "onegraph", "serve", str(paths["a"]), f"two={paths['b']}", "--device=cpu"]
    command += ["--port=0", "--keep-alive=600", "--max-num-seqs=2", "--max-model-len=200"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        lines = [process.stderr.readline() for _ in range(5)]
        assert [line.partition(":")[0].split()[0] for line in lines] == ["a", "two", "loading", "memory", "serving"]
        assert ": memory: weights " in lines[1]
        assert "KV cache" in lines[1]
        assert lines[4].startswith("serving a, two at http://127.0.0.1:")
        client = openai.OpenAI(base_url=lines[4].split()[-1], api_key="none", max_retries=0, timeout=DEADLINE)
        assert [card.id for card in client.models.list().data] == ["a", "two"]
        for name, of in (("two", "b"), ("a", "a"), ("two", "b")):
            assert client.completions.create(model=name, **HOW).choices[0].text == texts[of]
        chat: Any = [{"role": "user", "content": "Hi"}]
        chunks = list(client.chat.completions.create(model="a", messages=chat, max_tokens=4, stream=True))
        assert chunks[-1].choices[0].finish_reason in ("stop", "length")
        process.terminate()
        rest = process.stderr.read()
        assert process.wait(DEADLINE) == 0, rest
        assert rest.count("unloaded a\n") == 2, rest
        assert rest.count("unloaded two\n") == 1 + 1, rest
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["{a}", "{a}"], "two models have the name 'a'; give one of them another: NAME="),
        (["x={a}", "x={b}"], "two models have the name 'x'"),
        (["={a}"], "MODEL: got '={a}'; allowed is MODEL or NAME=MODEL"),
        (["{a}", "{b}", "--served-model-name=x"], "--served-model-name: it is for one model, 2 are given; write NAME="),
        (["{a}", "{b}", "--lora-modules=x=y"], "--lora-modules: it is for one model, 2 are given; serve the model"),
        (["{a}", "b=nowhere"], "nowhere"),
        (["{a}", "{b}", "--max-model-len=300"], "--max-model-len is 300; the model allows 1 to 256"),
        (["{a}", "--max-loaded-models=0"], "--max-loaded-models: got '0'; allowed is an integer from 1"),
        (["{a}", "--keep-alive=0"], "--keep-alive: got '0'; allowed is a number from more than 0"),
    ],
)
def test_mistakes(words: list[str], says: str, paths: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    names = {name: str(path) for name, path in paths.items()}
    command = ["serve", "--port=0", "--device=cpu", *(word.format(**names) for word in words)]
    assert main(command) == 2
    printed = capsys.readouterr().err
    assert says.format(**names)[:60] in printed, printed
    assert "loading" not in printed, "before anything is loaded"


def test_a_path_with_an_equals_sign_is_a_path(paths: dict[str, Path], tmp_path: Path) -> None:
    parser = Parser()
    add_parser(parser.add_subparsers())
    odd = tmp_path / "lr=1e-4"
    odd.symlink_to(paths["a"])
    assert names_of(parser.parse_args(["serve", str(odd)])) == {"lr=1e-4": str(odd)}
    assert names_of(parser.parse_args(["serve", f"x={odd}"])) == {"x": str(odd)}
