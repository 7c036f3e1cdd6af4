"""Which requests reach the endpoints: none that a web page made a browser send, unless its origin is allowed.

A page of any site can send a POST of type text/plain to a server on loopback, and through DNS rebinding (a name that
first resolves to the site and then to 127.0.0.1) even read the answers. The Host and Origin headers show both.
"""

from __future__ import annotations

import ipaddress
import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from onegraph.serve.errors import APIError
from onegraph.serve.reply import json_response

_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]]+)(?::[0-9]*)?")
_JSON = re.compile(r"application/([a-z0-9.-]+\+)?json")


class Guard:
    """ASGI middleware.

    hosts: names that the Host header may have beside IP addresses and localhost; None allows any. origins: of web pages
    whose requests are answered, "*" for all; pages of this server itself need none.
    """

    def __init__(self, app: ASGIApp, hosts: tuple[str, ...] | None, origins: tuple[str, ...]) -> None:
        self._app, self._hosts, self._origins = app, hosts, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = self._refuse(scope["method"], Headers(scope=scope)) if scope["type"] == "http" else None
        if refused is None:
            await self._app(scope, receive, send)
        else:
            await json_response(refused.body(), refused.status)(scope, receive, send)

    def _refuse(self, method: str, headers: Headers) -> APIError | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if self._hosts is not None and not is_local(host) and _name(host) not in self._hosts:
            return APIError(
                f"Host: got {host[:80]!r}; allowed is an IP address or localhost; behind a proxy, start the server "
                "with --allow-host NAME or an API key",
                status=403,
                code="host_not_allowed",
            )
        if origin is not None and not _same(origin, host) and not {origin, "*"} & {*self._origins}:
            return APIError(
                f"web pages of {origin[:80]!r} may not send requests here; allow it with --allow-origin",
                status=403,
                code="origin_not_allowed",
            )
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if method == "POST" and not _JSON.fullmatch(kind):
            return APIError(f"Content-Type: got {kind[:80]!r}; allowed is application/json", status=415)
        return None


def _same(origin: str, host: str) -> bool:
    """Whether an Origin is the one that the Host header names."""
    scheme, _, place = origin.lower().partition("://")
    port = {"http": ":80", "https": ":443"}.get(scheme, "")
    return place.removesuffix(port) == host.lower().removesuffix(port)


def _name(host: str) -> str:
    """The host of a Host header without its port, in lower case; empty where it is malformed."""
    found = _HOST.fullmatch(host)
    return found[1].lower().rstrip(".") if found else ""


def is_local(host: str) -> bool:
    """Whether a Host header is one that no DNS name can give: an IP address, or localhost."""
    name = _name(host)
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
