"""The chat page at the server's root: one file with its style and script, which talks to this server alone."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

_TEXT = Path(__file__).with_name("page.html").read_text(encoding="utf-8")


def _digest(tag: str) -> str:
    """Of the text of the page's one element of this name, as a Content-Security-Policy names it."""
    (inner,) = re.findall(f"<{tag}>(.*?)</{tag}>", _TEXT, re.S)
    return f"'sha256-{base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()}'"


_POLICY = {
    "default-src": "'none'",
    "script-src": _digest("script"),
    "style-src": _digest("style"),
    "connect-src": "'self'",
    "img-src": "data:",  # the empty icon: browsers request /favicon.ico otherwise
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
}
_HEADERS = {
    "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in _POLICY.items()),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


async def chat_page(request: Request) -> Response:
    """The page. It holds nothing of the server's, so it needs no API key; its requests do."""
    return Response(_TEXT, headers=_HEADERS, media_type="text/html")
