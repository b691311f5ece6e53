"""`ApiError`: an HTTP status and the error envelope of OpenAI or Anthropic; whatever goes wrong becomes one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from forerun.errors import ForerunError

_CODES = {401: "invalid_api_key", 404: "not_found", 405: "method_not_allowed"}
_CODES |= {413: "request_too_large", 415: "unsupported_media_type"}
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}

_MOST = 1000  # Characters of a message
_PATH = re.compile(
    r"(?<![\w/#.:~-])(?:file://|~|\.{1,2})?(?:/[\w.@+~-]+){2,}/?(?::\d+)*|\b[\w./\\-]+\.(?:rs|py|c|cc|cpp|h)(?::\d+)+"
)
"""A path from the root with two names at least, or a place in a source file. Not a JSON pointer (``#/a/b``), no URL."""
_PANIC = re.compile(r"panicked at|PanicException")
_ANTHROPIC_TYPES = _TYPES | {413: "request_too_large", 503: "overloaded_error"}


class ApiError(ForerunError):
    """What a client is told: an HTTP status and OpenAI's ``error`` object, without places in files of this machine."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: int = 0
    ) -> None:
        super().__init__(presentable(message))
        self.status, self.param, self.code = status, param, code or _CODES.get(status)
        self.headers = {"Retry-After": str(retry_after_s)} if retry_after_s else {}  # To send along

    def body(self, path: str = "") -> dict[str, Any]:
        """The envelope that clients of `path` know: OpenAI's, or Anthropic's, whose message names the parameter."""
        if path.startswith("/v1/messages"):
            kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
            named = self.param is None or self.param in str(self)
            message = str(self) if named else f"{self.param}: {self}"
            return {"type": "error", "error": {"type": kind, "message": message}}
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def presentable(message: str) -> str:
    """A message for strangers: without paths and places in source code, a panic's words, or more than it takes."""
    if _PANIC.search(message):
        return "what the request asks for is more than a library here can take; simplify it"
    shown = _PATH.sub("(a file)", message[: 2 * _MOST])
    return shown if len(shown) <= _MOST else f"{shown[:_MOST]}..."


def refusal(error: Exception) -> ApiError:
    """A 400 for what the engine does not take: our own words, but not those of a library."""
    if isinstance(error, ForerunError):
        return bad_request(str(error))
    return bad_request(f"the model's libraries cannot read this request ({type(error).__name__})")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400."""
    return ApiError(400, message, param=param, code=code)


def mistake() -> ApiError:
    """A 500: what nobody expected."""
    return ApiError(500, "the server made a mistake; its log says more", code="internal_error")


def from_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first complaint of pydantic about a body, naming the parameter."""
    error = errors[0]
    location = [str(part) for part in error["loc"] if part != "body"]
    param = ".".join(location) or None
    if error["type"] == "extra_forbidden":
        message = f"the parameter {param!r} is not supported by this server; leave it out"
        return bad_request(message, param, "unsupported")
    if error["type"] == "json_invalid":
        return bad_request(f"the body is not valid JSON: {error.get('ctx', {}).get('error', error['msg'])}")
    if error["type"] == "missing":
        return bad_request(f"the parameter {param!r} is missing" if param else "the request has no body", param)
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "literal_error":
        message = f"only {error['ctx']['expected']} is supported"
    return bad_request(f"{param}: {message}" if param else message, param)
