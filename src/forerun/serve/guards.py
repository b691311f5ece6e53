"""What every request passes first: a name, a key, a limit on its body. Plain ASGI, so that streams stay streams."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import time
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forerun.errors import of_the_process
from forerun.serve import identity, logs
from forerun.serve.logs import RequestRecord
from forerun.serve.protocol.errors import ApiError, mistake
from forerun.serve.settings import ServeSettings

OPEN_PATHS = ("/health", "/ping", "/metrics", "/version", "/", "/playground.css", "/playground.js")
"""Need no key."""
CLIENT_GONE = 499
"""nginx's status for a request whose client left before its answer began."""
_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


def own_path(scope: Scope) -> str:
    """The path as routes are declared: without the one that a proxy offers the server under, if it was sent along."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _as_routed(scope: Scope, root_path: str) -> Scope:
    """``HEAD`` is answered as ``GET`` is: the HTTP protocol has a scope of its own, and leaves the body out."""
    return {**scope, "method": "GET" if scope["method"] == "HEAD" else scope["method"], "root_path": root_path}


class Recorder:
    """Outermost: gives each request its ``X-Request-Id`` and its line in the log, and answers for unexpected errors.

    Args:
        settings: what may be written.
        count: told the route and the status of every request that ended.
    """

    def __init__(self, app: ASGIApp, settings: ServeSettings, count: Callable[[str, int], None]) -> None:
        self._app, self._settings, self._count = app, settings, count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record, started = self._record(scope), time.perf_counter()
        logs.begin(record)
        scope = _as_routed(scope, self._settings.root_path)

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
                await refuse(scope, named, mistake())
        finally:
            record.status = record.status or CLIENT_GONE
            record.route = getattr(scope.get("route"), "path", record.route)
            record.duration_s = time.perf_counter() - started
            self._count(record.route, record.status)
            logs.write(record, routine=record.route in OPEN_PATHS)

    def _record(self, scope: Scope) -> RequestRecord:
        given = Headers(scope=scope).get("x-request-id", "")
        name = given if _ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        client = scope["client"][0] if self._settings.log_clients and scope.get("client") else None
        return RequestRecord(request_id=name, method=scope["method"], client=client)


class KeyCheck:
    """401 without one of the keys; else what follows knows the client."""

    def __init__(self, app: ASGIApp, settings: ServeSettings) -> None:
        self._app, self._clients = app, identity.Clients(settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and own_path(scope) not in OPEN_PATHS and scope["method"] != "OPTIONS":
            client = self._clients.of(scope)
            if client is None:
                await refuse(scope, send, ApiError(401, "a valid API key is needed: Authorization: Bearer KEY"))
                return
            identity.begin(client)
        await self._app(scope, receive, send)


class BodyLimit:
    """413 for a body of more than `most` bytes, announced or not; 415 for one that is compressed."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app, self._most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        announced, coding = headers.get("content-length", "0"), headers.get("content-encoding", "identity")
        if not announced.isdecimal() or int(announced) > self._most:
            await refuse(scope, send, self._too_large())
            return
        if coding != "identity":
            await refuse(scope, send, ApiError(415, "bodies are read as they are: leave out Content-Encoding"))
            return
        read, refused = 0, False

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._most:
                raise self._too_large()
            return message

        async def corrected(message: Message) -> None:
            """Whatever the application makes of an unfinished body, the answer is a 413."""
            nonlocal refused
            if read <= self._most:
                await send(message)
            elif not refused:
                refused = True
                await refuse(scope, send, self._too_large())

        await self._app(scope, counted, corrected)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than the {self._most} bytes that this server takes")


async def refuse(scope: Scope, send: Send, error: ApiError) -> None:
    """Answer with an error and nothing else."""
    if (record := logs.current()) is not None:
        record.code = error.code
    body = json.dumps(error.body(own_path(scope))).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
