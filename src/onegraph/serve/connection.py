"""Connections: how many there may be at once, and how long a silent one stays open."""

from __future__ import annotations

import asyncio
import json
import os
import resource
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

CONNECTIONS = 1024  # at once, and fewer where the process may open fewer files
SPARE_FILES = 64  # that connections leave to the rest of the process
MAX_HEAD = 64 << 10  # bytes of a request's head
HEAD_SECONDS = 10  # in which a request's head must be complete: from the connection's start, or from the last response
STALLED = 60  # seconds that a client may take nothing of what was written to it


def connection_limit() -> int:
    """How many connections the limit on open files (`ulimit -n`) allows, at most CONNECTIONS."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return CONNECTIONS
    return max(1, min(CONNECTIONS, soft - len(os.listdir("/dev/fd")) - SPARE_FILES))


class Connection(H11Protocol):
    """uvicorn's HTTP/1.1 protocol with a deadline and a limit.

    A connection without a request is idle. `expire` closes one that is idle for HEAD_SECONDS or whose client takes no
    bytes for STALLED. Above `limit` connections the one that is idle longest is closed; where none is idle, the new one
    gets a 503.
    """

    limit = CONNECTIONS

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since, self._unsent = self.loop.time(), 0
        found = [each for each in self.connections if isinstance(each, Connection) and not each.transport.is_closing()]
        if len(found) <= self.limit:
            return
        idle = [each for each in found if each is not self and each.idle]
        if idle:
            min(idle, key=lambda each: each._since).transport.abort()
        else:
            self._refuse(503, "too many connections are open; try again in a second")

    @property
    def idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        if not self.transport.is_closing():
            super().data_received(data)

    def on_response_complete(self) -> None:
        self._since = self.loop.time()
        super().on_response_complete()

    def expire(self, now: float) -> None:
        """Ends the connection where its time is over. now: the event loop's time in seconds."""
        if not self.idle and not self.transport.is_closing():
            return  # the application has its own deadlines for bodies and streams
        unsent = self.transport.get_write_buffer_size()
        if unsent != self._unsent:
            self._unsent, self._since = unsent, now
        if now - self._since > (STALLED if unsent else HEAD_SECONDS):
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None and not self.cycle.response_complete:  # a damaged body
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._refuse(400, f"not a valid HTTP/1.1 request with one Host header and a head of up to {MAX_HEAD} bytes")

    def _refuse(self, status: int, message: str) -> None:
        """Writes an error object and closes the connection; closes it at once where a response has begun."""
        kind = "server_error" if status >= 500 else "invalid_request_error"
        error: dict[str, Any] = {"message": message, "type": kind, "param": None, "code": None}
        body = json.dumps({"error": error}).encode()
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        headers += [(b"content-length", str(len(body)).encode()), (b"retry-after", b"1")][: 1 + (status == 503)]
        try:
            response = h11.Response(status_code=status, headers=headers, reason=HTTPStatus(status).phrase.encode())
            events: list[h11.Event] = [response, h11.Data(data=body), h11.EndOfMessage()]
            self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        except h11.LocalProtocolError:
            pass
        self.transport.close()
