"""What a request gets that cannot be answered."""

from __future__ import annotations

from typing import Any

ENDING = "the server is shutting down"


class APIError(Exception):
    """What the client did wrong, as OpenAI's API says it: an HTTP status, one sentence, the field, a code."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> Any:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def overloaded() -> APIError:
    return APIError("too many requests wait already; try again in a second", status=429, code="rate_limit_exceeded")
