"""The HTTP side of `onegraph serve`, a Starlette application: OpenAI's and Anthropic's endpoints, health, metrics."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from onegraph import __version__
from onegraph.serve import messages, responses
from onegraph.serve.blocks import Form
from onegraph.serve.body import Bodies
from onegraph.serve.connection import STALLED
from onegraph.serve.errors import APIError, overloaded
from onegraph.serve.guard import Guard
from onegraph.serve.metrics import Metrics
from onegraph.serve.models import Loaded, LoadError, Model, Models
from onegraph.serve.page import chat_page
from onegraph.serve.prompts import Prompts
from onegraph.serve.protocol import CompletionRequest, parse
from onegraph.serve.reply import Reply, json_response
from onegraph.serve.text import Piece
from onegraph.serve.tokens import parse_detokenize, parse_tokenize
from onegraph.serve.worker import Full, Stopped

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """api_key: None for none. max_body: bytes. origins, hosts: as `Guard`."""

    api_key: str | None = None
    max_body: int = 4 << 20
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] | None = None


class Server:
    """What the endpoints share."""

    def __init__(self, models: Models, settings: Settings) -> None:
        self.served, self.settings = models, settings
        self.metrics = Metrics(models)
        self.created = int(time.time())
        self.bodies = Bodies(settings.max_body)
        self.conversations = responses.Conversations()

    def app(self) -> Starlette:
        routes = [
            Route("/v1/completions", self._guarded(self.completions), methods=["POST"]),
            Route("/v1/chat/completions", self._guarded(self.chat), methods=["POST"]),
            Route("/v1/models", self._guarded(self.models)),
            Route("/v1/models/{name:path}", self._guarded(self.model)),
            Route("/v1/responses", self._guarded(self.responses), methods=["POST"]),
            Route("/v1/messages", self._guarded(self.messages, messages.error_body), methods=["POST"]),
            Route("/v1/messages/count_tokens", self._guarded(self.count_tokens, messages.error_body), methods=["POST"]),
            Route("/v1/embeddings", self._guarded(self.embeddings), methods=["POST"]),
            Route("/tokenize", self._guarded(self.tokenize), methods=["POST"]),
            Route("/detokenize", self._guarded(self.detokenize), methods=["POST"]),
            Route("/version", self._guarded(self.version)),
            Route("/health", self.health),
            Route("/", chat_page),
            Route("/metrics", self._guarded(self.report)),
        ]
        handlers: dict[Any, Any] = {HTTPException: _http_error, Exception: _internal_error}
        pages = Middleware(
            CORSMiddleware, allow_origins=self.settings.origins, allow_methods=["*"], allow_headers=["*"]
        )
        middleware = [pages] if self.settings.origins else []
        guard = Middleware(Guard, hosts=self.settings.hosts, origins=self.settings.origins)
        middleware = [Middleware(_CutOff), guard, *middleware]
        return Starlette(routes=routes, exception_handlers=handlers, lifespan=self._lifespan, middleware=middleware)

    def end(self) -> None:
        """Every request that has no answer yet, or is not complete, gets an error. In the event loop."""
        self.served.end()
        self.bodies.end()

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        unloading = asyncio.create_task(self.served.unload_idle())
        try:
            yield
        finally:
            unloading.cancel()
            await self.served.close()

    def _guarded(
        self, endpoint: Callable[[Request], Any], body: Callable[[APIError], Any] = APIError.body
    ) -> Callable[[Request], Any]:
        """The API key, and every refusal as OpenAI's error object, or as `body` has it."""

        async def guarded(request: Request) -> Response:
            request.state.error_body = body
            try:
                self._authorize(request)
                response: Response = await endpoint(request)
            except APIError as refused:
                headers = {"Retry-After": "1"} if refused.status in (429, 503) else None
                response = json_response(body(refused), refused.status, headers)
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
        if "x-api-key" in request.headers:  # Anthropic's
            scheme, given = "bearer", request.headers["x-api-key"]
        if scheme.lower() != "bearer" or not given.strip():
            raise APIError("no API key: send it as 'Authorization: Bearer KEY'", status=401, code="missing_api_key")
        if not hmac.compare_digest(given.strip().encode(), key.encode()):
            raise APIError("wrong API key", status=401, code="invalid_api_key")

    # ------------------------------------------------------------------------------------------------------- endpoints

    async def health(self, request: Request) -> Response:
        failure = self.served.failure
        return json_response({"status": "ok" if failure is None else failure}, 200 if failure is None else 503)

    async def report(self, request: Request) -> Response:
        return Response(generate_latest(self.metrics.registry), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": list(map(self._card, self.served.names))})

    async def model(self, request: Request) -> Response:
        return json_response(self._card(request.path_params["name"]))

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, lambda body: (parse(body, chat=False), None))

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, lambda body: (parse(body, chat=True), None))

    async def responses(self, request: Request) -> Response:
        return await self._answer(request, lambda body: responses.parse(body, self.conversations))

    async def messages(self, request: Request) -> Response:
        return await self._answer(request, messages.parse)

    async def count_tokens(self, request: Request) -> Response:
        async with self.bodies.read(request) as body:
            asked, _ = messages.parse(body, count=True)
            model = self._model(asked.model)
            tokens = await self._tokenized(request, model, lambda prompts: prompts.tokenize(asked, True))
        return json_response({"input_tokens": len(tokens)})

    async def embeddings(self, request: Request) -> Response:
        raise APIError("embeddings are not supported: this server generates text", status=404, code="not_supported")

    async def version(self, request: Request) -> Response:
        return json_response({"version": __version__})

    async def tokenize(self, request: Request) -> Response:
        async with self.bodies.read(request) as body:
            name, asked, special = parse_tokenize(body)
            model = self._model(name)
            tokens = await self._tokenized(request, model, lambda prompts: prompts.tokenize(asked, special))
        about = {"count": len(tokens), "max_model_len": model.max_model_len}
        return json_response(about | {"tokens": tokens, "token_strs": None})

    async def detokenize(self, request: Request) -> Response:
        async with self.bodies.read(request) as body:
            name, tokens = parse_detokenize(body)
            text = await self._tokenized(request, self._model(name), lambda prompts: prompts.detokenize(tokens))
            return json_response({"prompt": text})

    async def _tokenized(self, request: Request, model: Model, work: Callable[[Prompts], Coroutine[Any, Any, T]]) -> T:
        """What `work` gives, which counts towards the queue like an answer."""
        async with self._reserved(request, model, 1) as (_, prompts):
            return await _while_connected(request, work(prompts))

    @asynccontextmanager
    async def _reserved(self, request: Request, model: Model, count: int) -> AsyncIterator[Loaded]:
        """Places in the queue of a model, which is loaded first, for as long as the context lasts; of an answer,
        `Worker.submit` goes on from there."""
        try:
            loaded = self.served.try_reserve(model, count)
            if loaded is None:
                loaded = await _while_connected(request, self.served.reserve(model, count))
        except Full:
            raise overloaded() from None
        except (Stopped, LoadError) as error:
            raise APIError(str(error), status=503) from None
        try:
            yield loaded
        finally:
            loaded.worker.release(count)

    def _card(self, name: str) -> dict[str, Any]:
        model = self._model(name)
        about = {"id": name, "object": "model", "created": self.created, "owned_by": "onegraph"}
        about |= {"parent": model.name} if name != model.name else {}
        return about | {"max_model_len": model.max_model_len}

    def _model(self, name: str | None) -> Model:
        """None stands for the first one."""
        found = self.served.all[0] if name is None else self.served.find(name)
        if found is None:
            message = f"the model {name!r} is not served here; this is {', '.join(map(repr, self.served.names))}"
            raise APIError(message, status=404, param="model", code="model_not_found")
        return found

    # --------------------------------------------------------------------------------------------------------- answers

    async def _answer(
        self, request: Request, understand: Callable[[bytes], tuple[CompletionRequest, Form | None]]
    ) -> Response:
        """understand: a body -> what it asks for, and the form of its answer where that is not OpenAI's of old."""
        async with self.bodies.read(request) as body:
            asked, shape = understand(body)
            model = self._model(asked.model)
            if asked.answers > model.limit:
                message = f"the request asks for {asked.answers} answers; {model.limit} can be computed or wait"
                raise APIError(f"{message} at once", param="n")
            started = time.perf_counter()
            async with self._reserved(request, model, asked.answers) as (worker, prompts):
                read = await _while_connected(request, prompts.read(asked))
                try:
                    answers, pieces = worker.submit(
                        read.sequences, asked.stops, reserved=True, keep=read.keep, echoes=read.echoes
                    )
                except Stopped as stopped:
                    raise APIError(str(stopped), status=503) from None
        reply = Reply(asked, asked.model, read.tokens, read.form)
        timed = self.metrics.timed(_until_over(pieces, len(answers)), started)
        if asked.stream:
            events = reply.events(timed)
            events = events if shape is None else shape.events(events, reply.prompt_tokens)
            return _EventStream(events, lambda: worker.cancel(answers))
        try:
            whole = await _while_connected(request, reply.whole(timed))
        finally:
            worker.cancel(answers)
        return json_response(whole if shape is None else shape.whole(whole))


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


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` gives. Raises ClientDisconnect, and cancels `work`, where the client goes before."""
    gone = asyncio.create_task(_disconnected(request.receive))
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({gone, task}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        gone.cancel()
        task.cancel()


async def _http_error(request: Request, error: HTTPException) -> Response:
    message = f"{request.method} {request.url.path}: {error.detail}"
    headers = dict(error.headers or {})  # which methods a path has
    return json_response(APIError(message, status=error.status_code).body(), error.status_code, headers)


async def _internal_error(request: Request, error: Exception) -> Response:
    """In the form of the endpoint that failed."""
    body = getattr(request.state, "error_body", APIError.body)
    return json_response(body(APIError(f"a bug: {type(error).__name__}; the server's log has more", status=500)), 500)
