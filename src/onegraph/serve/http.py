"""Listening: the socket, uvicorn, and the order in which things begin and end."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import errno
import signal
import socket
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import uvicorn

from onegraph.serve.app import Server, Settings
from onegraph.serve.connection import MAX_HEAD, Connection, connection_limit
from onegraph.serve.models import Models
from onegraph.serve.worker import Stopped

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
    models: Models,
    settings: Settings,
    *,
    grace: int,
    ready: Callable[[], None],
    ending: Callable[[], None] = lambda: None,
    verbose: bool = False,
) -> signal.Signals:
    """Serve until SIGINT or SIGTERM, which is returned: then no new connections, `grace` seconds for answers that run,
    and the end. Another signal ends the wait for answers, and one more that for them to be sent.

    ready: called once connections are taken. ending: called before it waits for answers that run. verbose: log a line
    per request, and all that uvicorn logs. Raises ValueError where a step cannot be built.
    """
    try:
        models.start()
    except Stopped as error:
        raise ValueError(str(error)) from None
    server = Server(models, settings)
    config = uvicorn.Config(
        server.app(),
        http=type("Limited", (Connection,), {"limit": connection_limit()}),  # one parser, whatever is installed
        loop="asyncio",
        ws="none",
        h11_max_incomplete_event_size=MAX_HEAD,
        backlog=1,  # connections that asyncio accepts before it handles one: out of files, it would try so many times
        log_config=_log_config(),
        log_level="debug" if verbose else "error",
        access_log=verbose,
        server_header=False,
    )
    listener = _Uvicorn(config, server, grace, ready, ending)
    with _handled(listener.handle_exit):
        listener.run(sockets=[found])
    return listener.told


def _log_config() -> dict[str, Any]:
    """uvicorn's own, with requests on stderr, too."""
    config = copy.deepcopy(uvicorn.config.LOGGING_CONFIG)
    config["handlers"]["access"]["stream"] = "ext://sys.stderr"
    return config


@contextlib.contextmanager
def _handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """SIGINT and SIGTERM call this, in the main thread."""
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, each in before.items():
            signal.signal(number, each)


class _Uvicorn(uvicorn.Server):
    """How it ends is ours: what still runs after `grace` seconds gets an error, where uvicorn cuts tasks off, and a
    signal is kept, where uvicorn raises it again once the event loop is about to close, into what ends there.

    told: the signal that ended it.
    """

    def __init__(
        self, config: uvicorn.Config, server: Server, grace: int, ready: Callable[[], None], ending: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._server, self._grace, self._ready, self._ending = server, grace, ready, ending
        self._hurry = asyncio.Event()  # to be waited for no longer
        self._loop: asyncio.AbstractEventLoop | None = None
        self.told = signal.SIGTERM

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing: `listen` has handlers from before the event loop begins until it is closed."""
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            self.should_exit, self.told = True, signal.Signals(sig)
        elif self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._hurry.set)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(BACKLOG)  # asyncio has set it to its own
        if self.started:
            self._ready()

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:  # a second
            now = asyncio.get_running_loop().time()
            for connection in list(self.server_state.connections):
                if isinstance(connection, Connection):
                    connection.expire(now)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._ending()
        late = asyncio.create_task(self._cut_off())
        try:
            await super().shutdown(sockets)
        finally:
            late.cancel()

    async def _cut_off(self) -> None:
        """What runs for too long gets an error; what is not sent soon ends without."""
        await self._pass(self._grace)
        self._server.end()
        await self._pass(LATE)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await asyncio.sleep(0.1)  # in which they notice
        for task in list(self.server_state.tasks):
            task.cancel()

    async def _pass(self, seconds: float) -> None:
        """Wait so long, or until there is another signal."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._hurry.wait()
        self._hurry.clear()
