"""A server that is fed damaged requests and connections: it answers each in words for people, and goes on."""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from . import tiny
from .damage import absurd, damage_bytes, damage_json

SECONDS = 30  # in which an answer must be there
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("completions", {"model": "plain", "prompt": "the thing", "max_tokens": 2, "stop": ["a"], "logprobs": 2, "n": 2}),
    ("completions", {"model": "plain", "prompt": [[1, 2, 3], [4]], "max_tokens": 1, "stream": True, "seed": 3}),
    (
        "chat/completions",
        {
            "model": "plain", "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True},
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "a"}]},
                {"role": "user", "content": "the <|im_end|>", "name": "x"},
                {"role": "assistant", "content": None, "annotations": [], "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "1", "content": "3"},
            ],
            "tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}],
            "tool_choice": "auto", "logprobs": True, "top_logprobs": 1, "temperature": 0.5,
        },
    ),
    (
        "chat/completions",
        {
            "model": "plain", "max_tokens": 3, "messages": [{"role": "user", "content": "a"}],
            "response_format": {
                "type": "json_schema", "json_schema": {"name": "x", "schema": {
                    "type": "object", "properties": {"a": {"type": "integer", "minimum": 1}}, "required": ["a"]}},
            },
        },
    ),
)  # fmt: skip
TOOLS = """\
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{{ m.tool_call_id }}{% for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
"""


class Served:
    """internals: what no answer may have."""

    def __init__(self, folder: Path, internals: re.Pattern[str]) -> None:
        self._internals = internals
        model = tiny.write_model(folder / "plain")
        (model / "chat_template.jinja").write_text(TOOLS)
        self._errors = (folder / "stderr").open("w+")
        how = [
            "--device=cpu",
            "--port=0",
            "--max-num-seqs=4",
            "--max-model-len=96",
            "--max-body=100000",
            "--prepare=plain",
        ]
        command = [sys.executable, "-m", "onegraph", "serve", str(model), *how]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(command, stderr=self._errors, env=environment)
        deadline = time.monotonic() + 4 * SECONDS
        while not (found := re.search(r"serving \S+ at http://127\.0\.0\.1:(\d+)/v1\n", self.said())):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the server did not start: {self.said()}")
            time.sleep(0.05)
        self.port = int(found[1])
        self._quiet = self.said()

    def said(self) -> str:
        self._errors.seek(0)
        return self._errors.read()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._errors.close()

    def message(self, rng: random.Random) -> str:
        """A request one to three places of which are wrong. What it was and the status; raises AssertionError."""
        path, body = rng.choice(BODIES)
        damaged = damage_json(rng, body) if rng.random() < 0.9 else body | {rng.choice([*body, "x", ""]): absurd(rng)}
        data = json.dumps(damaged).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        try:
            connection.request("POST", f"/v1/{path}", data, {"content-type": "application/json"})
            response = connection.getresponse()
            text = response.read().decode()
        finally:
            connection.close()
        what = f"POST {path} {data[:1500].decode()}"
        self._judge(response.status, text, what)
        return f"{what} -> {'0' if response.status == 200 else '2'} (HTTP {response.status})"

    def _judge(self, status: int, text: str, what: str) -> None:
        if status == 200:
            return self._check_alive(what)
        error = json.loads(text)["error"]["message"]
        if status >= 500 or "\n" in error or not error or len(error) > 1000 or self._internals.search(error):
            raise AssertionError(f"{what}\nHTTP {status}: {error}")
        return self._check_alive(what)

    def connection(self, rng: random.Random) -> str:
        """A connection that is damaged, cut, dripped, pipelined or left; then somebody else is served."""
        path, body = rng.choice(BODIES)
        data = json.dumps(body).encode()
        head = f"POST /v1/{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        request = f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
        request = damage_bytes(rng, request) if rng.random() < 0.7 else request * rng.choice((1, 2, 3))
        pieces = sorted(rng.randrange(len(request) + 1) for _ in range(rng.choice((0, 0, 1, 4))))
        ending = rng.choice(("read", "read", "close", "reset", "half"))
        read = 0
        with socket.create_connection(("127.0.0.1", self.port), timeout=SECONDS) as client:
            client.settimeout(0.3)
            try:
                for start, stop in zip([0, *pieces], [*pieces, len(request)], strict=True):
                    client.sendall(request[start:stop])
                    time.sleep(0.002 * bool(pieces))
                if ending == "half":
                    client.shutdown(socket.SHUT_WR)
                if ending == "reset":
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                while ending in ("read", "half") and (more := client.recv(1 << 16)):
                    read += len(more)
            except OSError:  # it may close, and it may wait for more
                pass
        what = f"connection {request[:200]!r} in {len(pieces) + 1} pieces, then {ending}"
        self._check_alive(what)
        return f"{what} -> {'0' if read else '2'}"

    def _check_alive(self, what: str) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        try:
            connection.request("GET", "/health")
            found = connection.getresponse().read()
        finally:
            connection.close()
        if found != b'{"status": "ok"}' or self.said() != self._quiet:
            raise AssertionError(f"{what}\nhealth {found!r}, stderr {self.said()[len(self._quiet) :][-1500:]}")
