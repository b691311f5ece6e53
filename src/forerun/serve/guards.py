"""Every request passes these guards first: a request id, an API key, a limit on its body, and a
strict JSON reader.

A client is known to the engine by a hash of its key with a secret that is drawn when the server starts: nothing that is
kept, counted or written tells a key.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import re
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forerun.engine.prompts import Lane, Lanes
from forerun.errors import of_the_process, refuse_constant
from forerun.nesting import MAX_DEPTH, nesting
from forerun.serve import logs
from forerun.serve.logs import RequestRecord
from forerun.serve.protocol.anthropic import CountRequest, MessagesRequest
from forerun.serve.protocol.errors import ApiError, from_validation, internal_error
from forerun.serve.protocol.hints import drop_hints
from forerun.serve.protocol.requests import ChatRequest, CompletionRequest
from forerun.serve.protocol.responses import ResponsesRequest
from forerun.serve.settings import ServeSettings
from forerun.serve.traffic import UNNAMED, owner_of

T = TypeVar("T")
_SECRET = secrets.token_bytes(32)
CLIENT: ContextVar[Client] = ContextVar("client")  # Whom this task serves; without a default, which could leak text
LOAD_DRAFTER = "/v1/load_drafter"
UPDATE_WEIGHTS = ("/update_weights_from_disk", "/update_weights_from_path")  # SGLang's name, and NVIDIA Dynamo's
TRAINER_PATHS = (*UPDATE_WEIGHTS, "/get_weight_version", "/sleep", "/wake_up", "/is_sleeping")
OPERATOR_PATHS = (LOAD_DRAFTER, *TRAINER_PATHS)  # Need the operator's key, and no client's will do
OPEN_PATHS = ("/health", "/ping", "/metrics", "/version", "/", "/playground.css", "/playground.js")  # Need no key
CLIENT_GONE = 499  # nginx's status for a request whose client left before its response began
_JSON = re.compile(r"application/([\w.-]+\+)?json", re.ASCII)
_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
MAX_BRACKETS = 50_000  # Objects and lists of one body: each takes Python as long as a thousand characters
MAX_ALL_KEYS = 100_000  # Keys of all objects of one body together
MAX_KEYS = 10_000  # Keys of one object: each unknown key makes a complaint of its own
COMPLETING = (ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest, CountRequest)  # Bodies with hints
_LANES = Lanes("forerun-bodies")


class RequestRecorder:
    """Stands outermost: gives each request its ``X-Request-Id`` and log line, and answers unexpected errors."""

    def __init__(self, app: ASGIApp, settings: ServeSettings, count: Callable[[str, str], None]) -> None:
        self._app, self._settings, self._count = app, settings, count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name_sent = Headers(scope=scope).get("x-request-id", "")
        started = time.perf_counter()
        name = name_sent if _ID.fullmatch(name_sent) else f"req-{secrets.token_hex(12)}"
        record = RequestRecord(
            request_id=name,
            method=scope["method"],
            client=scope["client"][0] if self._settings.log_clients and scope.get("client") else None,
        )
        logs.RECORD.set(record)
        # HEAD is served as GET is: the HTTP protocol has a scope of its own, and leaves the body out.
        scope = {
            **scope,
            "method": "GET" if scope["method"] == "HEAD" else scope["method"],
            "root_path": self._settings.root_path,
        }

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = record.request_id
            await send(message)

        try:
            await self._app(scope, receive, named)
        except BaseException as error:
            if of_the_process(error) or isinstance(error, asyncio.CancelledError):
                raise
            logs.write_error(error, message=self._settings.log_prompts)
            if record.status is None:
                await answer_refusal(scope, internal_error())(scope, receive, named)
        finally:
            record.status = record.status or CLIENT_GONE
            record.route = getattr(scope.get("route") or _route(scope), "path", record.route)
            record.duration_s = time.perf_counter() - started
            self._count(record.route, str(record.status))
            logs.write(record, routine=record.route in OPEN_PATHS)


def _route(scope: Scope) -> BaseRoute | None:
    """Return the route of a request that was refused before its route was looked up."""
    return next((one for one in scope["app"].routes if one.matches(scope)[0] is not Match.NONE), None)


class Guard:
    """Responds with 401 without one of the keys, 413 for a body above the operator's limit, and
    415 for other bodies.

    Other bodies are compressed, or do not say that they are JSON. A page of another origin may send a body without a
    type unasked, so such a body is not read either.
    """

    def __init__(self, app: ASGIApp, settings: ServeSettings) -> None:
        self._app, self._settings, self._most = app, settings, settings.max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        too_large = ApiError(413, f"the body is larger than the {self._most} bytes that this server takes")
        if (error := self._refusal(scope, too_large)) is not None:
            await answer_refusal(scope, error)(scope, receive, send)
            return
        read = 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._most:
                raise too_large
            return message

        await self._app(scope, counted, send)

    def _refusal(self, scope: Scope, too_large: ApiError) -> ApiError | None:
        """Return what is wrong with the head of a request, whose client is known from here on."""
        if own_path(scope) in OPERATOR_PATHS:
            operator_key = self._settings.admin_api_key
            if own_path(scope) in TRAINER_PATHS and not self._settings.allow_weight_updates:
                return ApiError(403, "this server was started without --allow-weight-updates")
            if operator_key is None:
                return ApiError(403, "this server was started without --admin-api-key")
            if _key_given(scope, (operator_key,)) is None:
                return ApiError(401, "the operator's key is needed (--admin-api-key): Authorization: Bearer KEY")
            CLIENT.set(Client(name="operator", domain=None))
        elif own_path(scope) not in OPEN_PATHS and scope["method"] != "OPTIONS":
            client = identify_client(scope, self._settings)
            if client is None:
                return ApiError(401, "a valid API key is needed: Authorization: Bearer KEY")
            CLIENT.set(client)
        headers = Headers(scope=scope)
        announced = headers.get("content-length", "0")
        if not announced.isdecimal() or int(announced) > self._most:
            return too_large
        if headers.get("content-encoding", "identity") != "identity":
            return ApiError(415, "bodies are read as they are: leave out Content-Encoding")
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        posts = scope["method"] == "POST" and own_path(scope) not in OPEN_PATHS
        has_body = kind or announced != "0" or "transfer-encoding" in headers  # Some POST requests have none
        if posts and has_body and not _JSON.fullmatch(kind):
            return ApiError(415, "bodies are JSON: send Content-Type: application/json", quoted=kind)
        return None


def answer_refusal(scope: Scope, error: ApiError) -> JSONResponse:
    """Return the response that is an error and nothing else, in the envelope that clients of the path
    know.
    """
    if (record := logs.RECORD.get()) is not None:
        record.code = error.code
    return JSONResponse(error.body(own_path(scope)), status_code=error.status, headers=error.headers)


def own_path(scope: Scope) -> str:
    """Return the path as routes are declared: without the prefix that a proxy offers the server
    under, if it was sent along.
    """
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


@dataclass(frozen=True, kw_only=True, slots=True)
class Client:
    """The sender of a request."""

    name: str  # Rows are shared evenly among names: one for each API key or, where there are none, for each address
    domain: str | None  # Isolation domain of the request; None is the one that unnamed clients share where they may
    key: str = ""  # The hash of its API key, where it has one
    traffic: str = UNNAMED  # What the files of its recorded conversations are named by

    def cache_salt(self, own: str | None) -> str | None:
        """Return the engine's salt for a request with a salt of its `own`, which narrows the domain
        and leads into no other.
        """
        return self.domain if own is None else _hash("salted", self.key, own)


def identify_client(scope: Scope, settings: ServeSettings) -> Client | None:
    """Return the client of an HTTP request; None where a key is needed and it has none that is
    right.
    """
    if not settings.api_keys:
        # An address names nobody, since all clients of a proxy have one: it decides about turns, not about text.
        shared = settings.share_unnamed
        address = scope["client"][0] if scope.get("client") else ""
        return Client(
            name=_hash("address", address), domain=None if shared else _hash("request", secrets.token_hex(16))
        )
    if (key := _key_given(scope, settings.api_keys)) is None:
        return None
    name = _hash("key", key)
    return Client(name=name, domain=name, key=name, traffic=owner_of(key))


def _key_given(scope: Scope, keys: Sequence[str]) -> str | None:
    """Return which of the keys a request brings; None where it is none of them."""
    headers = Headers(scope=scope)
    scheme, _, sent = headers.get("authorization", "").partition(" ")
    sent = sent if scheme.lower() == "bearer" else headers.get("x-api-key", "")  # Anthropic's
    right = [hmac.compare_digest(sent.strip().encode(), key.encode()) for key in keys]
    return keys[right.index(True)] if any(right) else None


def _hash(*parts: str) -> str:
    whole = "".join(f"{len(part)}:{part}" for part in parts)
    return hashlib.blake2b(whole.encode("utf-8", "surrogatepass"), key=_SECRET, digest_size=16).hexdigest()


def read_json(body: bytes) -> Any:
    """Return the value that a body holds.

    JSONDecodeError, of which FastAPI makes a 400: it is no JSON, or other readers would read it
    differently.
    """
    depth, brackets, keys = nesting(body)
    try:
        levels, lists = (depth, MAX_DEPTH, "levels of brackets"), (brackets, MAX_BRACKETS, "objects and lists")
        for count, most, what in (levels, lists, (keys, MAX_ALL_KEYS, "keys of objects")):
            if count > most:
                raise ValueError(f"it has {count} {what}, at most {most} are read")
        text = body.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_object, parse_constant=refuse_constant)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        why = str(error)
        if isinstance(error, UnicodeDecodeError):
            why = f"byte {error.start} is not UTF-8"
        elif isinstance(error, UnicodeEncodeError):
            why = "a string has half of a surrogate pair"
        raise json.JSONDecodeError(why, "", 0) from error


async def run_aside(http: Request, size: int, task: Callable[[], T]) -> T:
    """Run `task`, which handles something of so many bytes: at once, or in a thread of its own
    where that is large.

    In the thread clients take turns, and a client that has gone loses its turn.
    """
    if Lane.of(size) is Lane.SMALL:
        return task()
    return await unless_gone(http, _LANES.run(Lane.LARGE, task, client=CLIENT.get().name))


async def unless_gone(http: Request, work: Awaitable[T]) -> T:
    """Return the result of `work`, which is cancelled as soon as the client has gone; it will not
    read the 499.
    """

    async def gone() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client closed the connection", code="client_closed")
        return task.result()
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
        del task, watch, each  # whose error names this frame


class StrictRoute(APIRoute):
    """Reads and checks its body with `read_json` and `run_aside`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        kind: Any = None if self.body_field is None else self.body_field.field_info.annotation

        async def strict(request: Request) -> Response:
            strict_request = _Request(request.scope, request.receive)
            strict_request.kind = kind
            try:
                return await handler(strict_request)
            except Exception as error:
                if isinstance(error.__cause__, RequestValidationError | ApiError):
                    raise error.__cause__ from None  # which FastAPI makes another error of, where a body is read
                raise

        return strict


class _Request(Request):
    kind: type[BaseModel] | None = None  # Model of the body

    async def json(self) -> Any:
        body = await self.body()
        return await run_aside(self, len(body), lambda: self._check(body))

    def _check(self, body: bytes) -> Any:
        """Return the body as its kind: FastAPI takes such a value as it is, and would check any
        other in the event loop.
        """
        value = read_json(body)
        if self.kind is None:
            return value
        if self.kind in COMPLETING:
            drop_hints(value)
        try:
            return self.kind.model_validate(value)
        except ValidationError as error:
            errors = [
                {**complaint, "loc": ("body", *complaint["loc"])} for complaint in error.errors(include_url=False)
            ]
            raise from_validation(errors, value, self.kind.model_fields) from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_KEYS:
        raise ValueError(f"an object has {len(pairs)} keys, at most {MAX_KEYS} are read")
    value = dict(pairs)
    if len(value) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {twice[:64]!r} is there twice")
    return value
