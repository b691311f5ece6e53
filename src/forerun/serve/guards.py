"""What every request passes first: a name, a key, a limit on its body. Plain ASGI, so that streams stay streams."""

from __future__ import annotations

import hmac
import json
import re
import secrets
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forerun.serve.protocol.errors import ApiError

OPEN_PATHS = ("/health", "/metrics", "/version", "/", "/playground.css", "/playground.js")
"""Need no key."""
_ID = re.compile(r"[\w.:-]{1,128}")


class RequestIds:
    """Echoes ``X-Request-Id``, or makes one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        name = given if _ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = name
            await send(message)

        await self._app(scope, receive, named)


class KeyCheck:
    """401 without one of the keys; compared in constant time."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app, self._keys = app, [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._keys and scope["path"] not in OPEN_PATHS and scope["method"] != "OPTIONS":
            scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
            good = [hmac.compare_digest(key.strip().encode(), own) for own in self._keys]
            if scheme.lower() != "bearer" or not any(good):
                await _refuse(send, ApiError(401, "a valid API key is needed: Authorization: Bearer KEY"))
                return
        await self._app(scope, receive, send)


class BodyLimit:
    """413 for a body of more than `most` bytes, announced or not."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app, self._most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "0")
        if not announced.isdecimal() or int(announced) > self._most:
            await _refuse(send, self._too_large())
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
                await _refuse(send, self._too_large())

        await self._app(scope, counted, corrected)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than the {self._most} bytes that this server takes")


async def _refuse(send: Send, error: ApiError) -> None:
    body = json.dumps(error.body()).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
