"""`onegraph serve` under clients that mean harm: raw sockets against a real server."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from fuzz import tiny
from onegraph.api.tokenizer import Tokenizer, TooLong
from onegraph.formats.checkpoint import Checkpoint
from onegraph.serve import connection
from test_server import DEADLINE, JSON_TYPE, KEY, Running

BODY = json.dumps({"model": "plain", "prompt": "the", "max_tokens": 2}).encode()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("attacks") / "plain")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Running]:
    found = Running(model, options=["--max-body=8000000"])
    yield found
    found.end()


@pytest.fixture(scope="module")
def keyless(model: Path) -> Iterator[Running]:
    found = Running(model, options=["--allow-origin=http://page.example", "--allow-host=proxy.example"], key=None)
    yield found
    found.end()


def raw(server: Running, data: bytes) -> bytes:
    """All that the server answers, until it closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE) as client:
        client.sendall(data)
        found = b""
        while more := client.recv(1 << 16):
            found += more
        return found


def post(*lines: str, body: bytes = BODY) -> bytes:
    head = "\r\n".join(["POST /v1/completions HTTP/1.1", *lines, "Connection: close", f"Content-Length: {len(body)}"])
    return f"{head}\r\n\r\n".encode() + body


def error(response: bytes) -> tuple[int, str]:
    head, _, body = response.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["message"]


# ----------------------------------------------------------------------------------------------------- giant prompts


def test_giant_prompts_delay_nobody(server: Running) -> None:
    """40 prompts of 4 MB, which cannot fit, and a short one behind them."""
    texts = [{"prompt": "the " * 1_000_000}, {"messages": [{"role": "user", "content": "é " * 1_000_000}]}]
    paths = ["completions", "chat/completions"]
    with ThreadPoolExecutor(40) as pool:
        giants = [pool.submit(server.post, {"model": "plain"} | texts[i % 2], paths[i % 2]) for i in range(40)]
        time.sleep(0.2)
        started = time.monotonic()
        assert server.post({"model": "plain", "prompt": "the", "max_tokens": 2}).status_code == 200
        waited = time.monotonic() - started
        answers = [each.result() for each in giants]
    assert waited < 20, "with two cores that are also the clients'; 200 s and more where each is tokenized"
    for answer in answers:
        assert answer.status_code == 400
        found = answer.json()["error"]
        assert found["code"] == "context_length_exceeded"
        assert "96 tokens stand for" in found["message"]


def test_long_prompts_have_a_lane_of_their_own(model: Path, tmp_path: Path) -> None:
    """Where the bytes tell nothing, since the tokenizer drops blanks: short requests pass while long ones are read, and
    those whose clients have gone are not read at all."""
    path = tiny.write_model(tmp_path / "plain")
    content = json.loads((path / "tokenizer.json").read_text())
    double = {
        "type": "Replace",
        "pattern": {"Regex": "q"},
        "content": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    }
    (path / "tokenizer.json").write_text(json.dumps(content | {"normalizer": double}))
    running = Running(path, options=["--max-body=4000000"])
    body = json.dumps({"model": "plain", "prompt": "q" * 400_000}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\n{JSON_TYPE}"
    try:
        running.post({"model": "plain", "prompt": "a", "max_tokens": 1})
        clients = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(20)]
        for client in clients:
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        running.until(lambda now: now["onegraph_waiting"] >= 15)
        started = time.monotonic()
        assert running.post({"model": "plain", "prompt": "the", "max_tokens": 2}).status_code == 200
        assert time.monotonic() - started < 10
        assert running.metrics()["onegraph_waiting"] >= 10, "else the long ones were no burden"
        for client in clients:
            client.close()
        started = time.monotonic()
        running.until(lambda now: now["onegraph_waiting"] <= 1)
        assert time.monotonic() - started < 10, "the one that has begun is read to its end, the others are dropped"
    finally:
        running.end()


def test_waiting_prompts_count_towards_the_queue(model: Path) -> None:
    running = Running(model, options=["--queue=0", "--max-num-seqs=1"])
    try:
        long = running.client.completions.create(model="plain", prompt="a", max_tokens=90, stream=True)
        next(iter(long))
        assert running.post({"model": "plain", "prompt": "the " * 4000}).status_code == 429
        long.close()
    finally:
        running.end()


def test_a_text_with_too_many_bytes_is_refused_before_it_is_tokenized(model: Path) -> None:
    with Checkpoint.open(model) as checkpoint:
        tokenizer = Tokenizer(checkpoint)
    longest = max(len(data) for data in tokenizer.token_bytes()[0].values())
    assert tokenizer.bytes_per_token == longest
    assert len(tokenizer.encode("the thing", max_tokens=96)) < 96
    with pytest.raises(TooLong, match=f"the prompt has 5000 bytes; 96 tokens stand for {96 * longest} bytes at most"):
        tokenizer.encode("a" * 5000, max_tokens=96)
    with pytest.raises(TooLong):
        tokenizer.chat([{"role": "user", "content": "a" * 5000}], max_tokens=96)


@pytest.mark.parametrize(
    ("change", "factor"),
    [
        ({}, 1),
        ({"normalizer": {"type": "NFC"}}, 3),
        ({"normalizer": {"type": "Prepend", "prepend": "x"}}, 1),
        ({"normalizer": {"type": "Replace", "pattern": {"String": "aa"}, "content": "a"}}, None),
        ({"normalizer": {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "aaa"}}, None),
        ({"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}}, None),
        ({"pre_tokenizer": {"type": "Whitespace"}}, None),
    ],
)
def test_what_a_token_stands_for_at_most(change: dict[str, Any], factor: int | None, tmp_path: Path) -> None:
    path = tiny.write_model(tmp_path / "m")
    with Checkpoint.open(path) as checkpoint:
        longest = Tokenizer(checkpoint).bytes_per_token
    content = json.loads((path / "tokenizer.json").read_text())
    (path / "tokenizer.json").write_text(json.dumps(content | change))
    with Checkpoint.open(path) as checkpoint:
        found = Tokenizer(checkpoint).bytes_per_token
    assert found == (None if factor is None or longest is None else factor * longest)


# -------------------------------------------------------------------------------------------------------- connections


def test_silent_connections_are_closed(server: Running) -> None:
    heads = [b"", b"POST /v1/comp", b"GET /health HTTP/1.1\r\nHost: a\r\nX: "]
    clients = [socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE) for _ in heads]
    started = time.monotonic()
    for client, head in zip(clients, heads, strict=True):
        client.sendall(head)
    kept = socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE)
    kept.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
    assert kept.recv(9) == b"HTTP/1.1 "
    drip = threading.Thread(target=_drip, args=(clients[2],), daemon=True)
    drip.start()  # a byte a second does not help
    for client in clients:
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b""
    assert connection.HEAD_SECONDS - 1 < time.monotonic() - started < 3 * connection.HEAD_SECONDS
    for client in [*clients, kept]:
        client.close()


def _drip(client: socket.socket) -> None:
    with contextlib.suppress(OSError):
        for _ in range(60):
            client.sendall(b"x")
            time.sleep(1)


def test_more_connections_than_files(model: Path) -> None:
    """Idle ones make room for new ones, and nothing is written."""
    running = Running(model, files=256)
    try:
        idle = []
        for i in range(400):
            idle.append(socket.create_connection(("127.0.0.1", running.port), timeout=DEADLINE))
            if i % 100 == 99:
                assert running.client.completions.create(model="plain", prompt="a", max_tokens=1).choices
        assert len(os.listdir(f"/proc/{running.process.pid}/fd")) < 256
        for each in idle:
            each.close()
        running.process.send_signal(signal.SIGTERM)
        _, errors = running.process.communicate(timeout=DEADLINE)
        assert errors.splitlines() == ["stopping: running requests have 1 s"]
    finally:
        running.end()


def test_where_none_is_idle_new_connections_are_refused(model: Path) -> None:
    running = Running(model, files=128)
    ask = (
        f"Host: a\r\nAuthorization: Bearer {KEY}\r\n{JSON_TYPE}Content-Length: 100\r\n\r\n{{"  # a body that never comes
    )
    try:
        clients, refused = [], b""
        while not refused and len(clients) < 128:
            client = socket.create_connection(("127.0.0.1", running.port), timeout=DEADLINE)
            client.sendall(f"POST /v1/completions HTTP/1.1\r\n{ask}".encode())
            client.settimeout(0.05)
            with contextlib.suppress(TimeoutError):
                refused = client.recv(1 << 16)
            clients.append(client)
        assert refused.startswith(b"HTTP/1.1 503 Service Unavailable\r\n"), refused
        assert error(refused) == (503, "too many connections are open; try again in a second")
        clients[0].close()
        running.until(lambda now: now["onegraph_running"] == 0)
    finally:
        running.end()


@pytest.mark.parametrize(
    "request_",
    [
        post("Host: a", "Host: b", JSON_TYPE.strip()),
        post(JSON_TYPE.strip()),
        post("Host: a", "X: " + "a" * (10 << 20)),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
        b"GET /health HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\nzzz\r\n",
    ],
)
def test_malformed_requests_are_refused(server: Running, request_: bytes) -> None:
    """By one parser with fixed limits, whatever else is installed."""
    try:
        status, said = error(raw(server, request_))
    except (ConnectionResetError, BrokenPipeError):  # it closes while the 10 MB are still sent
        return
    assert (status, said[:30]) == (400, "not a valid HTTP/1.1 request w")


def test_a_damaged_body_ends_its_request_alone(server: Running) -> None:
    head = f"Host: a\r\nAuthorization: Bearer {KEY}\r\n{JSON_TYPE}Transfer-Encoding: chunked\r\n\r\n"
    answer = raw(server, f"POST /v1/completions HTTP/1.1\r\n{head}1\r\n{{\r\nzz\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert server.client.models.list().data


# ------------------------------------------------------------------------------------------------------------ browsers


@pytest.mark.parametrize(
    ("lines", "status", "says"),
    [
        (["Host: evil.example", "Content-Type: application/json"], 403, "Host: got 'evil.example'"),
        (["Host: evil.example:80", "Content-Type: application/json"], 403, "allowed is an IP address or localhost"),
        (["Host: 127.0.0.1.evil.example", "Content-Type: application/json"], 403, "Host: got"),
        (
            ["Host: 127.0.0.1", "Content-Type: text/plain"],
            415,
            "Content-Type: got 'text/plain'; allowed is application",
        ),
        (["Host: 127.0.0.1"], 415, "Content-Type: got ''"),
        (["Host: 127.0.0.1", JSON_TYPE.strip(), "Origin: http://evil.example"], 403, "web pages of 'http://evil.ex"),
        (["Host: 127.0.0.1", JSON_TYPE.strip(), "Origin: null"], 403, "web pages of 'null' may not"),
        (["Host: 127.0.0.1", "Content-Type: application/json; charset=utf-8"], 200, ""),
        (["Host: localhost:8000", JSON_TYPE.strip()], 200, ""),
        (["Host: [::1]:8000", JSON_TYPE.strip()], 200, ""),
        (["Host: proxy.example", JSON_TYPE.strip()], 200, ""),
        (["Host: localhost:8000", JSON_TYPE.strip(), "Origin: http://localhost:8000"], 200, ""),
        (["Host: localhost:8000", JSON_TYPE.strip(), "Origin: http://page.example"], 200, ""),
    ],
)
def test_what_a_web_page_can_send(keyless: Running, lines: list[str], status: int, says: str) -> None:
    answer = raw(keyless, post(*lines))
    if status == 200:
        assert answer.startswith(b"HTTP/1.1 200 "), answer
    else:
        found = error(answer)
        assert (found[0], says in found[1]) == (status, True), found


def test_with_a_key_any_host_may_be_asked_for(server: Running) -> None:
    lines = ["Host: proxy.example", JSON_TYPE.strip(), f"Authorization: Bearer {KEY}"]
    assert raw(server, post(*lines)).startswith(b"HTTP/1.1 200 ")


# ----------------------------------------------------------------------------------------------------- ends and stderr


def test_streams_do_not_hold_up_the_end(model: Path) -> None:
    """Three streams that are read, with more to write than the grace lets them."""
    running = Running(model, options=["--grace=1"])
    ask = {"model": "plain", "prompt": "the", "max_tokens": 90, "n": 20, "ignore_eos": True, "stream": True}

    def read() -> str:
        headers = {"authorization": f"Bearer {KEY}"}
        with httpx.stream("POST", f"{running.url}/completions", json=ask, headers=headers, timeout=DEADLINE) as answer:
            return "".join(answer.iter_text())

    try:
        with ThreadPoolExecutor(3) as pool:
            streams = [pool.submit(read) for _ in range(3)]
            running.until(lambda now: now["onegraph_running"] > 0)
            started = time.monotonic()
            running.process.send_signal(signal.SIGTERM)
            running.process.communicate(timeout=DEADLINE)
            assert time.monotonic() - started < 1 + 3 + 6, "grace, the last bytes, and the end of Python"
            for each in streams:
                assert each.result().endswith(("[DONE]\n\n", "}}\n\n"))
    finally:
        running.end()


def test_a_full_stderr_stops_nothing(model: Path) -> None:
    command = [sys.executable, "-m", "onegraph", "serve", str(model), "--device=cpu", "--port=0", "--grace=1"]
    with open("/dev/full", "w") as full:
        process = subprocess.Popen(command, stderr=full, stdout=full)
    try:
        deadline = time.monotonic() + DEADLINE
        while not (ports := _listening(process.pid)):
            assert process.poll() is None, process.returncode
            assert time.monotonic() < deadline
            time.sleep(0.1)
        answer = httpx.get(f"http://127.0.0.1:{ports[0]}/health", timeout=DEADLINE)
        assert answer.json() == {"status": "ok"}
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE) == 0
    finally:
        process.kill()
        process.wait()


def _listening(pid: int) -> list[int]:
    """The TCP ports that a process listens at."""
    sockets = set()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            sockets.add(os.readlink(each).removeprefix("socket:[").removesuffix("]"))
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return [int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and row[9] in sockets]
