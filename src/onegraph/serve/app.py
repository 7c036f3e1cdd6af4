"""The HTTP side of `onegraph serve`: OpenAI's endpoints, health and metrics, as a Starlette application."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from onegraph.api.completion import copies
from onegraph.engine.arguments import ArgumentError
from onegraph.engine.params import ANSWER, SamplingParams
from onegraph.engine.sequence import Sequence as EngineSequence
from onegraph.serve.metrics import Metrics
from onegraph.serve.protocol import Asked, Refused, parse
from onegraph.serve.reply import Reply, dumps
from onegraph.serve.text import Answer, Piece
from onegraph.serve.tools import CallForm, find_form
from onegraph.serve.worker import Full, Stopped, Worker

BODY_SECONDS = 60  # in which a body must be there
DISCARDED = 1 << 28  # bytes of a body too large that are read and dropped, so that its sender gets to read the answer
STALLED = 60  # seconds that a client may take to read what the sockets' buffers do not hold


@dataclass(frozen=True, kw_only=True)
class Settings:
    """name: of the model, as clients call it. api_key: None for none. max_body: bytes. origins: of web pages whose
    scripts may ask, as browsers tell them, "*" for all."""

    name: str
    api_key: str | None = None
    max_body: int = 4 << 20
    origins: tuple[str, ...] = ()


class Server:
    """What the endpoints share."""

    def __init__(self, worker: Worker, settings: Settings) -> None:
        self.worker, self.settings = worker, settings
        self.metrics = Metrics(worker)
        self.created = int(time.time())
        self._ended = False
        self._bodies: set[asyncio.Timeout] = set()  # that have not come yet

    @cached_property
    def form(self) -> CallForm | None:
        """How the model calls functions, None where it does not."""
        return find_form(self.worker.llm.tokenizer.template)

    def app(self) -> Starlette:
        routes = [
            Route("/v1/completions", self._guarded(self.completions), methods=["POST"]),
            Route("/v1/chat/completions", self._guarded(self.chat), methods=["POST"]),
            Route("/v1/models", self._guarded(self.models)),
            Route("/v1/models/{name:path}", self._guarded(self.model)),
            Route("/health", self.health),
            Route("/metrics", self.report),
        ]
        handlers: dict[Any, Any] = {HTTPException: _http_error, Exception: _internal_error}
        pages = Middleware(
            CORSMiddleware, allow_origins=self.settings.origins, allow_methods=["*"], allow_headers=["*"]
        )
        middleware = [pages] if self.settings.origins else []
        middleware.insert(0, Middleware(_CutOff))
        return Starlette(routes=routes, exception_handlers=handlers, lifespan=self._lifespan, middleware=middleware)

    def end(self) -> None:
        """Whoever still waits for an answer, or has not sent all of a request, gets an error. In the event loop."""
        self._ended = True
        self.worker.stop()
        for body in self._bodies:
            if not body.expired():
                body.reschedule(0)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await asyncio.to_thread(self.worker.close)

    def _guarded(self, endpoint: Callable[[Request], Any]) -> Callable[[Request], Any]:
        """The API key, and every refusal as OpenAI's error object."""

        async def guarded(request: Request) -> Response:
            try:
                self._authorize(request)
                response: Response = await endpoint(request)
            except Refused as refused:
                headers = {"Retry-After": "1"} if refused.status in (429, 503) else None
                response = json_response(refused.body(), refused.status, headers)
            except ClientDisconnect:
                response = Response(status_code=400)
            self.metrics.responses.labels(request.scope["route"].path, str(response.status_code)).inc()
            return response

        return guarded

    def _authorize(self, request: Request) -> None:
        key = self.settings.api_key
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if key is None:
            return
        if scheme.lower() != "bearer" or not given.strip():
            raise Refused("no API key: send it as 'Authorization: Bearer KEY'", status=401, code="missing_api_key")
        if not hmac.compare_digest(given.strip().encode(), key.encode()):
            raise Refused("wrong API key", status=401, code="invalid_api_key")

    # ------------------------------------------------------------------------------------------------------- endpoints

    async def health(self, request: Request) -> Response:
        failure = self.worker.failure
        return json_response({"status": "ok" if failure is None else failure}, 200 if failure is None else 503)

    async def report(self, request: Request) -> Response:
        return Response(generate_latest(self.metrics.registry), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        self._check_name(request.path_params["name"])
        return json_response(self._card())

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, chat=False)

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, chat=True)

    def _card(self) -> dict[str, Any]:
        about = {"id": self.settings.name, "object": "model", "created": self.created, "owned_by": "onegraph"}
        return about | {"max_model_len": self.worker.llm.max_model_len}

    def _check_name(self, name: str | None) -> None:
        if name != self.settings.name:
            message = f"the model {name!r} is not served here; this is {self.settings.name!r}"
            raise Refused(message, status=404, param="model", code="model_not_found")

    # --------------------------------------------------------------------------------------------------------- answers

    async def _answer(self, request: Request, *, chat: bool) -> Response:
        asked = parse(await self._body(request), chat=chat)
        self._check_name(asked.model)
        if self.worker.full:  # before any work is done for it
            raise _overloaded()
        sequences, prompt_tokens = await asyncio.to_thread(self._sequences, asked)  # a long prompt takes a while
        started = time.perf_counter()
        try:
            answers, pieces = self.worker.submit(sequences, asked.stops)
        except Full:
            raise _overloaded() from None
        except Stopped as stopped:
            raise Refused(str(stopped), status=503) from None
        reply = Reply(asked, self.settings.name, prompt_tokens, self.form)
        timed = self.metrics.timed(_until_over(pieces, len(answers)), started)
        if asked.stream:
            return _EventStream(reply.events(timed), lambda: self.worker.cancel(answers))
        return await self._whole(request, reply, timed, answers)

    async def _body(self, request: Request) -> bytes:
        limit, size, parts = self.settings.max_body, 0, []
        try:
            async with asyncio.timeout(0 if self._ended else BODY_SECONDS) as waiting, self._counted(waiting):
                async for part in request.stream():
                    size += len(part)
                    if size <= limit:
                        parts.append(part)
                    elif size > limit + DISCARDED:
                        break
        except TimeoutError:
            if self._ended:
                raise Refused("the server is shutting down", status=503) from None
            raise Refused(f"the body did not come within {BODY_SECONDS} s", status=408) from None
        if size > limit:
            raise Refused(f"the body has more than {limit} bytes (--max-body)", status=413)
        return b"".join(parts)

    @asynccontextmanager
    async def _counted(self, body: asyncio.Timeout) -> AsyncIterator[None]:
        self._bodies.add(body)
        try:
            yield
        finally:
            self._bodies.remove(body)

    def _sequences(self, asked: Asked) -> tuple[list[EngineSequence], int]:
        """What the engine is to do, and how many tokens the prompts have."""
        llm = self.worker.llm
        name = _field("prompt", asked) or ""
        try:
            if asked.messages is not None:
                if asked.speaks_of_tools and self.form is None:
                    raise Refused(
                        "tools: the model's chat template knows none, or writes calls in a form that is not known here",
                        param="tools" if asked.tools else "messages", code="unsupported_parameter",
                    )  # fmt: skip
                tools = None if asked.tools is None else asked.tools.defined
                prompts = [llm.tokenizer.chat(asked.messages, asked.thinking, tools)]
            else:
                prompts = [llm.tokenizer.encode(p) if isinstance(p, str) else p for p in asked.prompts]
            name, most = "", self.worker.limit
            if (count := len(prompts) * asked.sampling.get("n", 1)) > most:
                raise Refused(
                    f"the request asks for {count} answers; {most} can be computed or wait at once", param="n"
                )
            stops = () if asked.ignore_eos else sorted(llm.tokenizer.stops)
            base = llm.sampling_defaults.fill(SamplingParams(stop=stops, **asked.sampling))
            rows = [
                (prompt, replace(params, max_tokens=self._length(asked, prompt)))
                for prompt in prompts
                for params in copies(base, llm.random)
            ]
            return [llm.engine.request(*row) for row in rows], sum(map(len, prompts))
        except ValueError as error:  # a TemplateError or CheckpointError, too
            raise Refused(str(error), param=_field(_named(error), asked, name)) from None

    def _length(self, asked: Asked, prompt: list[int]) -> int:
        context = self.worker.llm.max_model_len
        room = context - len(prompt)
        most = room if asked.messages is not None else min(ANSWER, room)
        wanted = asked.max_tokens or max(most, 1)
        if wanted > room:
            cure = (
                f"lower max_tokens to {room}, or shorten the prompt"
                if room > 0
                else f"shorten the prompt to {context - 1} tokens or less"
            )
            message = (
                f"the prompt has {len(prompt)} tokens, {wanted} more were asked for; the context is {context}; {cure}"
            )
            param = "max_tokens" if room > 0 else _field("prompt", asked)
            raise Refused(message, param=param, code="context_length_exceeded")
        return wanted

    async def _whole(
        self, request: Request, reply: Reply, pieces: AsyncIterator[Piece], answers: Sequence[Answer]
    ) -> Response:
        gone = asyncio.create_task(_disconnected(request.receive))
        work = asyncio.create_task(reply.whole(pieces))
        try:
            await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ClientDisconnect
            return json_response(work.result())
        finally:
            gone.cancel()
            work.cancel()
            self.worker.cancel(answers)


class _EventStream(Response):
    """Sends events while they come; ends, and says so to `on_end`, when the client has gone or does not read."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], on_end: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._events, self._on_end = events, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(_disconnected(receive))
        work = asyncio.create_task(self._send(send))
        try:
            await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            gone.cancel()
            work.cancel()
            self._on_end()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for event in self._events:
            async with asyncio.timeout(STALLED):
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class _CutOff:
    """Ends quietly where the listener cancels a request: the time to send the last answers in is over."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            if scope["type"] != "http":
                raise


async def _until_over(pieces: asyncio.Queue[Piece], count: int) -> AsyncIterator[Piece]:
    """What comes through the queue, until `count` answers have ended or one failed."""
    while count:
        piece = await pieces.get()
        count -= piece.last
        yield piece
        if piece.error is not None:
            return


def _named(error: ValueError) -> str:
    return error.field if isinstance(error, ArgumentError) else ""


def _field(what: str, asked: Asked, otherwise: str = "") -> str | None:
    """The request's field for an argument of the engine or the tokenizer; `otherwise` where it has none."""
    text = "prompt" if asked.messages is None else "messages"
    forms = {"thinking": "chat_template_kwargs", "json_schema": "tools" if asked.tools else "response_format"}
    if what in forms:
        return forms[what]
    if what == "prompt":
        return text
    return otherwise or (what if what in asked.sampling else None)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _overloaded() -> Refused:
    return Refused("too many requests wait already; try again in a second", status=429, code="rate_limit_exceeded")


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(dumps(value), status, headers, media_type="application/json")


async def _http_error(request: Request, error: HTTPException) -> Response:
    message = f"{request.method} {request.url.path}: {error.detail}"
    headers = dict(error.headers or {})  # which methods a path has
    return json_response(Refused(message, status=error.status_code).body(), error.status_code, headers)


async def _internal_error(request: Request, error: Exception) -> Response:
    return json_response(Refused(f"a bug: {type(error).__name__}; the server's log has more", status=500).body(), 500)
