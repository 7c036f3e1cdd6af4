"""Which Host and Origin headers reach the endpoints."""

import asyncio
from typing import Any

import pytest

from onegraph.serve.guard import Guard


def status(hosts: tuple[str, ...] | None, **headers: str) -> int:
    """Of a GET with these headers."""
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        sent.append(message)

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    asyncio.run(Guard(app, hosts, ())({"type": "http", "method": "GET", "headers": raw}, None, send))  # type: ignore[arg-type]
    return int(sent[0]["status"])


@pytest.mark.parametrize(
    ("hosts", "host", "wanted"),
    [
        (("name",), "name:8000", 200),
        (("name",), "evil.example:8000", 403),
        (("name",), "192.168.0.7:8000", 200),
        (("name",), "LOCALHOST:8000", 200),
        (None, "evil.example:8000", 200),
    ],
)
def test_hosts(hosts: tuple[str, ...] | None, host: str, wanted: int) -> None:
    assert status(hosts, host=host) == wanted


@pytest.mark.parametrize(
    ("host", "origin", "wanted"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000", 200),
        ("127.0.0.1:80", "http://127.0.0.1", 200),
        ("LOCALHOST:8000", "http://localhost:8000", 200),
        ("name", "https://name:443", 200),
        ("127.0.0.1:8000", "http://127.0.0.1", 403),
        ("127.0.0.1:8000", "http://evil.example", 403),
        ("127.0.0.1:8000", "null", 403),
    ],
)
def test_origins(host: str, origin: str, wanted: int) -> None:
    assert status(None, host=host, origin=origin) == wanted
