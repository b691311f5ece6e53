"""An `ApiError` is an HTTP status and the error envelope of OpenAI or Anthropic; every error
becomes one.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from forerun.errors import ArgumentError, ForerunError, find_near, list_some
from forerun.serve.protocol.hints import list_accepted

OTHER_NAMES = {
    **dict.fromkeys(("max_new_tokens", "max_length", "n_predict", "num_predict", "max_output_tokens"), "max_tokens"),
    **dict.fromkeys(("stop_sequences", "stop_strings", "stop_words"), "stop"),
    **dict.fromkeys(("num_return_sequences", "num_completions"), "n"),
    **{"inputs": "prompt", "input": "prompt", "system": "messages", "repeat_penalty": "repetition_penalty"},
    **{"functions": "tools", "function_call": "tool_choice", "best_of": "n", "speculative_config": "speculative"},
    **{name: f"speculative.{name}" for name in ("drafter", "num_speculative_tokens", "rule")},
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
        to_operator: bool = False,
    ) -> None:
        """Make an error; `to_operator` leaves paths in its message, which are the operator's own."""
        told = message[:_MOST] if to_operator else clean_message(message)
        shown = " ".join([told, *filter(None, [" or ".join(map(repr, listed))])])
        super().__init__(f"{quoted[:_QUOTED]!r}: {shown}" if quoted else shown)
        self.status, self.param, self.code = status, param, code or _CODES.get(status)
        self.headers = dict(headers or {})  # To send along
        if retry_after_s:
            self.headers["Retry-After"] = str(retry_after_s)
        if status == 401:
            self.headers["WWW-Authenticate"] = "Bearer"

    def rename(self, names: Mapping[str, str]) -> None:
        """Name the parameter as the client sent it: `names` are its names for those of the engine or a chat request."""
        before = self.param or ""
        head, dot, rest = before.partition(".")
        if head not in names:
            return
        self.param = f"{names[head]}{dot}{rest}"
        if str(self).startswith(before):
            self.args = (self.param + str(self)[len(before) :],)

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
    if not isinstance(error, ForerunError):
        return bad_request(f"the model's libraries cannot read this request ({type(error).__name__})")
    refused = bad_request(str(error), error.param if isinstance(error, ArgumentError) else None)
    refused.rename(names or {})
    return refused


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return a 400."""
    return ApiError(400, message, param=param, code=code)


def internal_error() -> ApiError:
    """Return a 500 for an unexpected error."""
    return ApiError(500, "the server made a mistake; its log says more", code="internal_error")


_OLLAMA = "this server speaks OpenAI's API, not Ollama's: the client's base URL is http://HOST:PORT/v1"
_ABSENT = {
    **{"embed": "this server has no embeddings", "rerank": "this server does not rank texts"},
    **{"score": "this server does not rank texts", "images": "this server makes no images"},
    **{"audio": "this server has no audio", "moderations": "this server does not moderate"},
    **{"files": "this server keeps no files", "batches": "this server has no batches; send the requests at once"},
    **{"assistants": "this server has no assistants", "threads": "this server keeps no conversations"},
    **{"conversations": "this server keeps no conversations", "fine_tuning": "this server does not train"},
    **{"realtime": "this server has no realtime sessions", "api": _OLLAMA},
    "responses": "this server keeps no responses; send the whole conversation as input",
}
"""These parts of paths ask for what this server does not have."""


def no_such_path(path: str, paths: Collection[str]) -> ApiError:
    """Return the 404 for a path that is not served: it names the nearest of the `paths` that are, or what is missing
    here.
    """
    parts = [part for part in path.split("/") if part]
    own = [part for part in parts if part != "v1"]
    begun = "/".join(["", "v1", *own])
    absent = next((words for name, words in _ABSENT.items() if any(part.startswith(name) for part in own[:1])), None)
    near = begun if begun in paths else "" if absent is not None else find_near(path, paths, 0.7)
    if near:
        hint = "a client's base URL ends with one /v1: this is" if begun in paths else "the nearest is"
    else:
        hint = absent or "GET /openapi.json lists what is served"
    return ApiError(404, f"there is no such path here; {hint}", quoted=path, listed=[near] if near else [])


def from_validation(errors: Sequence[Mapping[str, Any]], body: Any = None, known: Collection[str] = ()) -> ApiError:
    """Return what is wrong with a body by pydantic's first complaint, naming the parameter; of unknown parameters all
    are named.

    `body` tells its names from those that pydantic gives to the branches of a union, and is the text where it is no
    JSON; `known` are the body's parameters.
    """
    complaints = [_Complaint.of(error, body) for error in errors]
    [first, *others] = _of_fitting_branch(complaints)
    if (kind := _wrong_type(first, complaints)) is not None:
        first, others = kind, []
    param = ".".join(map(str, first.path)) or None
    error = first.error
    if error["type"] == "extra_forbidden":
        return _unknown([one for one in complaints if one.is_unknown and one.branches == first.branches], known)
    if error["type"] == "json_invalid":
        return bad_request(f"the body is not valid JSON: {error['ctx']['error']}{_place(error, body)}")
    if error["type"] == "missing":
        return bad_request(f"the parameter {param!r} is missing" if param else "the request has no body", param)
    message = " or ".join([first.message, *(other.message.removeprefix(_EXPECTED) for other in others)])
    if first.is_literal and not others:
        expected = dict.fromkeys(one.expected for one in complaints if one.is_literal and one.path == first.path)
        message = f"only {' or '.join(expected)} is supported{_not_here(error['input'])}"
    named = getattr(error.get("ctx", {}).get("error"), "param", None)  # By a check of the whole body
    return bad_request(f"{param}: {message}" if param else message, param or named)


def _unknown(complaints: Sequence[_Complaint], known: Collection[str]) -> ApiError:
    """Return a 400 that names all unknown parameters, each with the one that is meant, or the values that are taken."""
    names = [".".join(map(str, one.path)) for one in complaints]
    remedies = list[str]()
    for one, name in zip(complaints, names, strict=True):
        other = OTHER_NAMES.get(name, "")
        near = find_near(name, known, 0.75) if len(one.path) == 1 else ""
        if meant := other if other.partition(".")[0] in known else near:
            remedies.append(f"did you mean {meant!r}{f' in place of {name!r}' if len(names) > 1 else ''}?")
        elif values := list_accepted(name):
            remedies.append(f"of {name!r} only {values} is taken")
    listed = list_some([repr(name[:_QUOTED]) for name in names], 10)
    are = f"parameter {listed} is" if len(names) == 1 else f"parameters {listed} are"
    remedy = "; ".join(remedies) or ("leave it out" if len(names) == 1 else "leave them out")
    return bad_request(f"the {are} not supported by this server; {remedy}", names[0], "unsupported")


def _place(error: Mapping[str, Any], body: Any) -> str:
    """Return where in a text its JSON ends to be JSON; nothing where that is not known."""
    at = error["loc"][-1]
    if not isinstance(body, str) or not body or not isinstance(at, int):
        return ""
    return f" (line {body.count(chr(10), 0, at) + 1}, column {at - body.rfind(chr(10), 0, at)})"


_NOT_READ = ("image", "document", "file", "audio", "video")


def _not_here(value: Any) -> str:
    """Return what to add about a value that is not one of those that are supported."""
    if not isinstance(value, str):
        return ""
    other = next((kind for kind in _NOT_READ if kind in value), None)
    return f", got {value[:_QUOTED]!r}" + (f": this server reads text, no {other}" if other else "")


def _wrong_type(first: _Complaint, complaints: Sequence[_Complaint]) -> _Complaint | None:
    """Return the complaint about the ``type`` of the object that `first` is about, from which the others may follow."""
    places = {(*first.path[:depth], "type") for depth in range(len(first.path) + 1)}
    return next(
        (one for one in complaints if one.is_literal and one.path in places and one.branches == first.branches), None
    )


_EXPECTED = "expected "
_WORDS = {
    **{"string_type": "a text", "string_unicode": "a text", "list_type": "a list", "bool_type": "true or false"},
    **{"int_type": "a whole number", "int_from_float": "a whole number", "float_type": "a number"},
    **{"finite_number": "a finite number", "model_type": "an object", "dict_type": "an object"},
    **{"too_long": "at most {max_length} items", "too_short": "at least {min_length} items"},
    **{"string_too_long": "at most {max_length} characters", "string_too_short": "at least {min_length} characters"},
    **{"string_pattern_mismatch": "a text that matches {pattern}", "less_than_equal": "at most {le}"},
    **{"greater_than_equal": "at least {ge}", "greater_than": "more than {gt}", "less_than": "less than {lt}"},
    "union_tag_not_found": "an object with a type",
}
"""Pydantic's errors say by these words what was expected."""


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
        """Return what is wrong, in our words."""
        kind, given = self.error["type"], self.error.get("input")
        if kind == "union_tag_invalid":
            return f"only {self.error['ctx']['expected_tags']} is supported{_not_here(self.error['ctx']['tag'])}"
        if kind == "literal_error":
            return _EXPECTED + self.expected
        if kind not in _WORDS:
            return str(self.error["msg"]).removeprefix("Value error, ")
        expected = _EXPECTED + re.sub(r"\b(1 \w+)s$", r"\1", _WORDS[kind].format(**self.error.get("ctx", {})))
        number = isinstance(given, int | float) and not isinstance(given, bool) and len(f"{given}") < _QUOTED
        return f"{expected}, got {given}" if number and not kind.endswith("_type") else expected

    @property
    def expected(self) -> str:
        """The values that a literal may have, in words."""
        return str(self.error["ctx"]["expected"])

    @property
    def is_unknown(self) -> bool:
        return bool(self.error["type"] == "extra_forbidden")

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
