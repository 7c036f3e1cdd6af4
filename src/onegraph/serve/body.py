"""The bodies of requests: read within a deadline and a size, and all of them within a total."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request

from onegraph.serve.errors import ENDING, APIError, overloaded

BODY_SECONDS = 60  # in which a body must be there
DISCARDED = 1 << 28  # bytes of a body too large that are read and dropped, so that its sender gets to read the answer
TOTAL = 1 << 28  # bytes of all bodies that are in memory, where a single one may not have more


class Bodies:
    """limit: bytes of one body."""

    def __init__(self, limit: int) -> None:
        self._limit, self._total = limit, max(TOTAL, limit)
        self._bytes = 0  # in memory
        self._ended = False
        self._reading: set[asyncio.Timeout] = set()

    def end(self) -> None:
        """Every body that is not complete is refused. In the event loop."""
        self._ended = True
        for body in self._reading:
            if not body.expired():
                body.reschedule(0)

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """The body of a request, which counts as memory in use until the context ends. Raises APIError."""
        parts: list[bytes] = []
        try:
            await self._receive(request, parts)
            yield b"".join(parts)
        finally:
            self._bytes -= sum(map(len, parts))

    async def _receive(self, request: Request, parts: list[bytes]) -> None:
        size = 0
        try:
            async with asyncio.timeout(0 if self._ended else BODY_SECONDS) as reading:
                self._reading.add(reading)
                try:
                    async for part in request.stream():
                        size += len(part)
                        if size <= self._limit:
                            self._bytes += len(part)
                            parts.append(part)
                            if self._bytes > self._total:
                                raise overloaded()
                        elif size > self._limit + DISCARDED:
                            break
                finally:
                    self._reading.remove(reading)
        except TimeoutError:
            if self._ended:
                raise APIError(ENDING, status=503) from None
            raise APIError(f"the body did not come within {BODY_SECONDS} s", status=408) from None
        if size > self._limit:
            raise APIError(f"the body has more than {self._limit} bytes (--max-body)", status=413)
