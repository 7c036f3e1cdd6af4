"""Listening: the socket, uvicorn, and the order in which things begin and end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import uvicorn

from onegraph.serve.app import Server, Settings
from onegraph.serve.worker import Stopped, Worker

LATE = 3  # seconds more, in which answers that were cut off are sent


def bind(host: str, port: int) -> socket.socket:
    """A socket at this address, port 0 for a free one. Taken before the model is loaded, so that a port that is in use
    is told at once; nobody can connect until `listen`. Raises ValueError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restart need not wait for old connections
        found.bind(address)
    except (OSError, UnicodeError, OverflowError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ValueError(f"cannot listen at {host}:{port}: {why}") from None
    return found


def listen(
    found: socket.socket,
    worker: Worker,
    settings: Settings,
    *,
    grace: int,
    ready: Callable[[], None],
    ending: Callable[[], None] = lambda: None,
) -> None:
    """Serve until SIGINT or SIGTERM: then no new connections, `grace` seconds for answers that run, and the end.

    ready: called once connections are taken, before the first request. ending: called before it waits for answers that
    run. Raises Stopped where it cannot be built.
    """
    try:
        worker.start()
    except Stopped as error:
        raise ValueError(str(error)) from None
    server = Server(worker, settings)
    config = uvicorn.Config(
        server.app(),
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=grace + LATE,
    )
    _Uvicorn(config, server, grace, ready, ending).run(sockets=[found])


class _Uvicorn(uvicorn.Server):
    """After `grace` seconds what still runs ends with an error of ours; uvicorn would cut its tasks off."""

    def __init__(
        self, config: uvicorn.Config, server: Server, grace: int, ready: Callable[[], None], ending: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._server, self._grace, self._ready, self._ending = server, grace, ready, ending

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._ending()
        late = asyncio.get_running_loop().call_later(self._grace, self._server.end)
        try:
            await super().shutdown(sockets)
        finally:
            late.cancel()
