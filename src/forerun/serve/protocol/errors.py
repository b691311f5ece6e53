"""OpenAI's error envelope, and how everything that can go wrong is put into it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forerun.errors import ForerunError

_CODES = {
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    413: "request_too_large",
    415: "unsupported_media_type",
}
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(ForerunError):
    """What a client is told: an HTTP status and OpenAI's ``error`` object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param = status, param
        self.code = code or _CODES.get(status)
        self.retry_after_s = retry_after_s

    @property
    def kind(self) -> str:
        """OpenAI's ``type``."""
        return _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    @property
    def headers(self) -> dict[str, str]:
        """To send along."""
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}

    def body(self) -> dict[str, Any]:
        """The envelope."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400."""
    return ApiError(400, message, param=param, code=code)


def mistake() -> ApiError:
    """A 500: what nobody expected."""
    return ApiError(500, "the server made a mistake; its log says more", code="internal_error")


def from_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first complaint of pydantic about a body, naming the parameter."""
    error = errors[0]
    place = [str(part) for part in error["loc"] if part != "body"]
    param = ".".join(place) or None
    if error["type"] == "extra_forbidden":
        return bad_request(
            f"the parameter {param!r} is not supported by this server; leave it out", param, "unsupported"
        )
    if error["type"] == "json_invalid":
        return bad_request(f"the body is not valid JSON: {error.get('ctx', {}).get('error', error['msg'])}")
    if error["type"] == "missing":
        return bad_request(f"the parameter {param!r} is missing" if param else "the request has no body", param)
    message = str(error["msg"]).removeprefix("Value error, ")
    return bad_request(f"{param}: {message}" if param else message, param)
