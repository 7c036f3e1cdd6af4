"""Listening: the socket, uvicorn, and the order in which things begin and end."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable

import uvicorn

from onegraph.serve.app import Server, Settings
from onegraph.serve.worker import Stopped, Worker

BACKLOG = 2048  # connections that wait until they are taken: all that come while the model is loaded
CURES = {
    errno.EADDRINUSE: "give another --port, or end what listens there",
    errno.EADDRNOTAVAIL: "give a --host of this machine",
    errno.EACCES: "give a --port from 1024 on",
}
LATE = 3  # seconds more, in which answers that were cut off are sent


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens at this address, port 0 for a free one. Raises ValueError.

    Done before the model is loaded, so that a port that is in use is told at once; where sockets are bound only, two of
    them may have one port. Who connects meanwhile waits until `listen` takes it.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restart need not wait for old connections
            found.bind(address)
            found.listen(BACKLOG)
        except BaseException:
            found.close()
            raise
    except (OSError, UnicodeError, OverflowError) as error:
        number, why = (error.errno, error.strerror) if isinstance(error, OSError) else (None, str(error))
        cure = "give another --host" if isinstance(error, socket.gaierror | UnicodeError) else CURES.get(number or 0)
        where = f"{f'[{host}]' if ':' in host else host}:{port}"
        raise ValueError(f"cannot listen at {where}: {why}" + (f"; {cure}" if cure else "")) from None
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

    ready: called once connections are taken. ending: called before it waits for answers that run. Raises ValueError
    where a step cannot be built.
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
        backlog=BACKLOG,
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
