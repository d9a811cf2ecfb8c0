"""Errors of the API, in the form that the clients of each route expect."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Sequence
from typing import Any

from allyouneed.errors import UserError

log = logging.getLogger("allyouneed.serve")

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable",
}
MOST_PROBLEMS = 100  # of a body that are looked at
TEI_ROUTES = ("/embed", "/rerank", "/info")
LIBRE_ROUTES = ("/translate", "/detect", "/languages", "/health")
DEEPL_ROUTES = ("/v2/", "/v3/")


class ApiError(UserError):
    """An error with an HTTP status. `param`: the field at fault; `code`: for programs; `retry_after`: in seconds."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code, self.retry_after = str(self), status, param, code, retry_after

    @property
    def type(self) -> str:
        default = "invalid_request_error" if self.status < 500 else "server_error"
        return TYPES.get(self.status, default)

    @property
    def headers(self) -> dict[str, str]:
        found = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return found | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})

    def status_for(self, path: str) -> int:
        """DeepL's clients expect 403 for a wrong key."""
        return 403 if self.status == 401 and path.startswith(DEEPL_ROUTES) else self.status

    def openai(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def body(self, path: str) -> dict[str, Any]:
        """In the form of the API that the path belongs to."""
        if path.startswith("/api/") or path in LIBRE_ROUTES:  # Ollama, LibreTranslate
            return {"error": self.message}
        if path.startswith(DEEPL_ROUTES):
            return {"message": self.message, "detail": self.code or self.type}
        if path in TEI_ROUTES:
            return {"error": self.message, "error_type": "Validation" if self.status < 500 else "Backend"}
        return self.openai()


def too_long(tokens: int, allowed: int, what: str = "the prompt", param: str | None = None) -> ApiError:
    return ApiError(
        f"{what} has {tokens} tokens, the model allows {allowed}; shorten it",
        param=param,
        code="context_length_exceeded",
    )


def over_limit(what: str, given: int, allowed: int, param: str | None = None) -> ApiError:
    return ApiError(f"{given} {what}, the limit is {allowed}", param=param or what, code="limit_exceeded")


def validation_error(problems: Sequence[Any]) -> ApiError:
    """One error for pydantic's list: the first field at fault, and the first few in the message."""
    lines, first = dict[str, None](), None
    for problem in problems[:MOST_PROBLEMS]:
        where = ".".join(str(part) for part in problem["loc"] if part not in ("body", "query", "path"))
        name = where.split(".", 1)[0] or None
        first = first or name
        unknown = problem["type"] == "extra_forbidden"
        message = "unknown field" if unknown else str(problem["msg"]).removeprefix("Value error, ")
        lines[f"{where}: {message}" if where else message] = None
    more = len(lines) - 4 + max(0, len(problems) - MOST_PROBLEMS)
    shown = "; ".join(list(lines)[:4]) + (f"; and {more} more" if more > 0 else "")
    return ApiError(shown, param=first, code="invalid_value")


def internal_error() -> ApiError:
    return ApiError("internal error; the server's log says where", 500, code="internal_error")


def log_failure(error: BaseException, what: str, with_message: bool = False) -> None:
    """Where it happened; the exception's own message only if texts may be logged, for it may quote one."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    message = f": {error}" if with_message else ""
    log.error("%s\n%s%s%s", what, frames, type(error).__name__, message)
