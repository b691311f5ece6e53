"""An `ApiError` is an HTTP status and the error envelope of OpenAI or Anthropic; every error
becomes one.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from forerun.errors import ArgumentError, ForerunError, nearest

OTHER_NAMES = {
    **dict.fromkeys(("max_new_tokens", "max_length", "n_predict", "num_predict", "max_output_tokens"), "max_tokens"),
    **dict.fromkeys(("stop_sequences", "stop_strings", "stop_words"), "stop"),
    **dict.fromkeys(("num_return_sequences", "num_completions"), "n"),
    **{"inputs": "prompt", "input": "prompt", "system": "messages", "repeat_penalty": "repetition_penalty"},
}
"""Other engines and endpoints use these names for parameters of this one."""
_CODES = {
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    413: "request_too_large",
    415: "unsupported_media_type",
}
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}

_MOST, _QUOTED = 1000, 200  # Characters of a message, and of what it quotes
_PATH = re.compile(
    r"(?<![\w/#.:~-])(?:file://|~|\.{1,2})?(?:/[\w.@+~-]+){2,}/?(?::\d+)*|\b[\w./\\-]+\.(?:rs|py|c|cc|cpp|h)(?::\d+)+"
)
"""This pattern matches a path from the root with two names at least, or a place in a source file.

It does not match a JSON pointer (``#/a/b``), or a URL.
"""
_PANIC = re.compile(r"panicked at|PanicException")
_ANTHROPIC_TYPES = _TYPES | {413: "request_too_large", 503: "overloaded_error"}


class ApiError(ForerunError):
    """The error that a client is told: an HTTP status and OpenAI's ``error`` object, without
    paths of this machine.

    The client's own words, `quoted`, stand before the message as they are, and behind it `listed`,
    what to send.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int = 0,
        quoted: str = "",
        listed: Sequence[str] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        shown = " ".join([clean_message(message), *filter(None, [" or ".join(map(repr, listed))])])
        super().__init__(f"{quoted[:_QUOTED]!r}: {shown}" if quoted else shown)
        self.status, self.param, self.code = status, param, code or _CODES.get(status)
        self.headers = dict(headers or {})  # To send along
        if retry_after_s:
            self.headers["Retry-After"] = str(retry_after_s)
        if status == 401:
            self.headers["WWW-Authenticate"] = "Bearer"

    def body(self, path: str = "") -> dict[str, Any]:
        """Return the envelope that clients of `path` know: OpenAI's, or Anthropic's, whose message
        names the parameter.
        """
        if path.startswith("/v1/messages"):
            kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
            named = self.param is None or self.param in str(self)
            return {
                "type": "error",
                "error": {"type": kind, "message": str(self) if named else f"{self.param}: {self}"},
            }
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def clean_message(message: str) -> str:
    """Return a message for strangers: without paths, places in source code or a panic's words, and
    not too long.
    """
    if _PANIC.search(message):
        return "what the request asks for is more than a library here can take; simplify it"
    shown = _PATH.sub("(a file)", message[: 2 * _MOST])
    return shown if len(shown) <= _MOST else f"{shown[:_MOST]}..."


def refusal(error: Exception, names: Mapping[str, str] | None = None) -> ApiError:
    """Return a 400 for what the engine does not take: in our own words, but not those of a library.

    `names` are the request's names for the engine's parameters, where they differ.
    """
    if isinstance(error, ForerunError):
        param = error.param if isinstance(error, ArgumentError) else None
        return bad_request(str(error), (names or {}).get(param or "", param))
    return bad_request(f"the model's libraries cannot read this request ({type(error).__name__})")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return a 400."""
    return ApiError(400, message, param=param, code=code)


def internal_error() -> ApiError:
    """Return a 500 for an unexpected error."""
    return ApiError(500, "the server made a mistake; its log says more", code="internal_error")


def from_validation(errors: Sequence[Mapping[str, Any]], body: Any = None, known: Collection[str] = ()) -> ApiError:
    """Return the first complaint of pydantic about a body, naming the parameter.

    `body` tells its names from those that pydantic gives to the branches of a union; `known` are
    the body's parameters.
    """
    complaints = [_Complaint.of(error, body) for error in errors]
    [first, *others] = _of_fitting_branch(complaints)
    param = ".".join(map(str, first.path)) or None
    error = first.error
    if error["type"] == "extra_forbidden":
        hint = "leave it out"
        other = OTHER_NAMES.get(param or "")
        if len(first.path) == 1 and known:
            hint = f"did you mean {other!r}?" if other in known else nearest(str(param), known, 0.75).lstrip() or hint
        message = f"the parameter {param!r} is not supported by this server; {hint[0].lower()}{hint[1:]}"
        return bad_request(message, param, "unsupported")
    if error["type"] == "json_invalid":
        return bad_request(f"the body is not valid JSON: {error.get('ctx', {}).get('error', error['msg'])}")
    if error["type"] == "missing":
        return bad_request(f"the parameter {param!r} is missing" if param else "the request has no body", param)
    message = " or ".join([first.message, *(other.message.removeprefix("Input should be ") for other in others)])
    if error["type"] == "literal_error" and not others:
        same = [
            complaint.error["ctx"]["expected"]
            for complaint in complaints
            if complaint.is_literal and complaint.path == first.path
        ]
        message = f"only {' or '.join(dict.fromkeys(same))} is supported"
    named = getattr(error.get("ctx", {}).get("error"), "param", None)  # By a check of the whole body
    return bad_request(f"{param}: {message}" if param else message, param or named)


class _Complaint(NamedTuple):
    """One of pydantic's errors; each branch of a union has its own."""

    error: Mapping[str, Any]
    path: tuple[int | str, ...]  # Names and places in the body
    branches: tuple[tuple[int, str], ...]  # Unions on the way: the length of the path to each, and its branch

    @classmethod
    def of(cls, error: Mapping[str, Any], body: Any) -> _Complaint:
        """Split an error's location into names and branches by what the body holds; without a body
        all parts are names.
        """
        location = tuple(error["loc"])
        location = location[1:] if location[:1] == ("body",) else location
        value = body
        path = list[int | str]()
        branches = list[tuple[int, str]]()
        has_body = body is not None
        for depth, part in enumerate(location):
            last = depth == len(location) - 1
            more = None if last else location[depth + 1]
            if has_body and not _is_name(part, value, more, missing=error["type"] == "missing"):
                branches.append((len(path), str(part)))
                continue
            path.append(part)
            if has_body and not last:
                value = value[part]
        return cls(error, tuple(path), tuple(branches))

    @property
    def message(self) -> str:
        if self.error["type"] in ("model_type", "dict_type"):
            return "Input should be an object"
        return str(self.error["msg"]).removeprefix("Value error, ")

    @property
    def is_literal(self) -> bool:
        return bool(self.error["type"] == "literal_error")

    def of_another_type(self, depth: int) -> bool:
        """Return whether a branch, the union's number `depth` on the way, takes no value of the
        type that is given.
        """
        if len(self.branches) > depth + 1 or len(self.path) > self.branches[depth][0]:
            return False
        value = self.error["input"]
        other = not isinstance(value, str if "'" in self.error["msg"] else int)
        return other if self.is_literal else bool(self.error["type"].endswith("_type"))


def _is_name(part: int | str, value: Any, more: int | str | None, *, missing: bool) -> bool:
    """Return whether a part of an error's location is in the body, or missing there, and no name of
    a branch.

    `more` is the part behind it.
    """
    if isinstance(value, list):
        return isinstance(part, int)
    if not isinstance(value, dict):
        return False
    if value.get("type") == part and (more in value or (missing and more is not None and part not in value)):
        return False  # the branch of a union that is told by its type
    return part in value or (more is None and missing)


def _of_fitting_branch(complaints: Sequence[_Complaint], depth: int = 0) -> list[_Complaint]:
    """Return the complaint of the branch that is meant; where the value has no branch's type, one
    of each.
    """
    first = complaints[0]
    if len(first.branches) <= depth:
        return [first]
    branches = defaultdict[str, list[_Complaint]](list)
    at = first.branches[depth][0]
    for complaint in complaints:
        if (
            len(complaint.branches) > depth
            and complaint.branches[depth][0] == at
            and complaint.path[:at] == first.path[:at]
        ):
            branches[complaint.branches[depth][1]].append(complaint)
    fitting = [
        branch for branch in branches.values() if not any(complaint.of_another_type(depth) for complaint in branch)
    ]
    if not fitting:
        distinct = {branch[0].message: branch[0] for branch in branches.values()}
        return list(distinct.values())
    return _of_fitting_branch(min(fitting, key=lambda branch: _distance(branch, at)), depth + 1)


def _distance(branch: Sequence[_Complaint], at: int) -> tuple[bool, int, int]:
    """Return how far a value is from a branch of a union, whose place in the path is `at`.

    The parts are: of another kind, by how many complaints, and how early in a list the first is.
    """
    other = any(complaint.is_literal and complaint.path[at:] == ("type",) for complaint in branch)
    places = [-place for complaint in branch for place in complaint.path[at : at + 1] if isinstance(place, int)]
    return other, len(branch), max(places, default=0)
