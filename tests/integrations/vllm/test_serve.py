"""The OpenAI-compatible server on one of our checkpoints, with OpenAI's own client: streams, crowds, hang-ups.

On a CPU eagerly and in float32, where a batch rounds no near-tie the other way; on a GPU as a user starts it.
"""

import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed; `make vllm` installs it", allow_module_level=True)

START_SECONDS = 400  # a minute on two idle cores
SETTINGS = {
    "cpu": ["--enforce-eager", "--dtype", "float32"],
    "gpu": ["--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes", str(1 << 29)],
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM takes the GPU")),
        pytest.param("gpu", marks=pytest.mark.gpu),
    ],
)
def place(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(place: str, tiny_chat: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server that was told where the checkpoint is, and what is said above."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tiny_chat)]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), *SETTINGS[place]]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
    try:
        wait(process, port, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    import urllib.error
    import urllib.request

    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        assert process.poll() is None, f"the server ended: {log.read_text()[-3000:]}"
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise AssertionError(f"no answer within {START_SECONDS} s: {log.read_text()[-3000:]}")


@pytest.fixture
def client(server: str) -> Any:
    import openai

    return openai.OpenAI(base_url=f"{server}/v1", api_key="none", timeout=120, max_retries=0)


def ask(client: Any, text: str, **settings: Any) -> Any:
    settings = {"max_tokens": 24, "temperature": 0} | settings
    extra = {"ignore_eos": True}
    return client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": text}], extra_body=extra, **settings
    )


def test_a_stream_is_the_answer_in_pieces(client: Any) -> None:
    whole = ask(client, "the thing in the end")
    chunks = list(ask(client, "the thing in the end", stream=True, stream_options={"include_usage": True}))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content != ""
    assert len([piece for piece in pieces if piece]) > 3
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 24


def test_a_crowd_gets_what_each_would_get_alone(client: Any, place: str) -> None:
    """On a GPU but for near-ties in bfloat16, which kernels for more tokens round otherwise."""
    texts = [f"in the {'th' * i}e a" for i in range(12)]
    alone = [ask(client, text).choices[0].message.content for text in texts]
    with ThreadPoolExecutor(len(texts)) as pool:
        together = list(pool.map(lambda text: ask(client, text).choices[0].message.content, texts))
    assert len(set(alone)) > 6
    equal = sum(a == b for a, b in zip(together, alone, strict=True))
    assert equal >= (len(texts) if place == "cpu" else len(texts) // 2)


def test_who_hangs_up_frees_the_place(client: Any, server: str) -> None:
    """A stream that the client closes is aborted: the server soon runs nothing, long before 3000 tokens are made."""
    import urllib.request

    def running() -> float:
        text = urllib.request.urlopen(f"{server}/metrics", timeout=5).read().decode()
        lines = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running{")]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    stream = ask(client, "the", max_tokens=3000, stream=True)
    for _ in zip(range(3), stream, strict=False):
        pass
    assert running() == 1
    began = time.monotonic()
    stream.close()
    while running() and time.monotonic() - began < 20:
        time.sleep(0.2)
    assert running() == 0
    assert ask(client, "the").usage.completion_tokens == 24
