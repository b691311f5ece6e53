"""One TCP connection: how many there may be, how long a request may take to arrive, how long an answer may lie unread.

uvicorn's HTTP/1.1 protocol with three limits that it does not have. Knows no route and no engine.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from forerun.serve.protocol.errors import ApiError, bad_request
from forerun.serve.settings import ServeSettings

log = logging.getLogger(__name__)

CROWDED_S = 1.0
"""How long a request may take to arrive where its address has too many that are arriving."""
CUT_EVERY_S = 0.005
"""Between two of those: what is cut all at once keeps the others waiting."""
MAX_PIECES = 2_000
"""Chunks of one body that came together with others. Each takes some 20 microseconds: 4 MB in chunks of one byte would
take minutes."""
LINGER_S = 1.0
"""How long a refused connection stays half open: closing at once could take the answer away before it is read."""


class Connection(H11Protocol):
    """A connection within the operator's limits.

    Args:
        limits: `max_connections`, `max_arriving`, `receive_timeout_s` and `send_timeout_s` count here.
        arriving: requests that have not arrived, by address; shared by all connections of a server.
        count: told the code of every refusal.
        keywords: what uvicorn gives every protocol.
    """

    def __init__(
        self, *, limits: ServeSettings, arriving: Counter[str], count: Callable[[str], None], **keywords: Any
    ) -> None:
        super().__init__(**keywords)
        self._limits, self._addresses, self._count = limits, arriving, count
        self._refused = False
        self._pieces, self._next_event = 0, self.conn.next_event
        self.conn.next_event = self._counted  # type: ignore[method-assign]
        self._arrival: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=1)  # bytes; with 0 a TLS transport is always full
        if len(self.connections) > self._limits.max_connections:
            message = f"{self._limits.max_connections} connections are open, which is the limit; try again later"
            self._refuse(ApiError(503, message, code="too_many_connections", retry_after_s=1))
        else:
            self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._arrived()
        self.resume_writing()
        super().connection_lost(exc)
        vars(self.conn).pop("next_event", None)  # which names this connection, and would keep it and its last request

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._pieces = max(0, self._pieces - 1)
        super().data_received(data)
        self._await_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:
            self._await_request()

    def send_400_response(self, msg: str) -> None:
        self._refuse(bad_request(f"not an HTTP request that this server understands: {msg}", code="invalid_http"))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        super().resume_writing()

    def _counted(self) -> Any:
        """What h11 read next.

        Raises:
            RemoteProtocolError: the body comes in more pieces than any that is sent in earnest.
        """
        event = self._next_event()
        if isinstance(event, h11.Request):
            self._pieces = 0
        self._pieces += isinstance(event, h11.Data)
        if self._pieces > MAX_PIECES:
            raise h11.RemoteProtocolError(f"a body in more than {MAX_PIECES} pieces")
        return event

    def _await_request(self) -> None:
        """Start the clock unless it runs; stop it where the request is complete."""
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._arrived()
        elif self._arrival is None and not self._refused:
            self._addresses[self._address] += 1
            within = self._limits.receive_timeout_s
            if (beyond := self._addresses[self._address] - self._limits.max_arriving) > 0:
                within = min(within, CROWDED_S + CUT_EVERY_S * beyond)
            self._arrival = self.loop.call_later(within, self._late, within)

    def _arrived(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None
            self._addresses[self._address] -= 1
            if not self._addresses[self._address]:
                del self._addresses[self._address]

    @property
    def _address(self) -> str:
        return self.client[0] if self.client else ""

    def _late(self, within: float) -> None:
        self._refuse(ApiError(408, f"the request did not arrive within {within:g} s", code="request_timeout"))

    def _watch_reader(self, before: int) -> None:
        self._unread = self.loop.call_later(self._limits.send_timeout_s, self._check_reader, before)

    def _check_reader(self, before: int) -> None:
        """Cut the connection of a client that has read nothing since the last look."""
        left = self.transport.get_write_buffer_size()
        if left < before:
            self._watch_reader(left)
            return
        self._count("unread")
        log.info("a client did not read for %g s; its connection was cut", self._limits.send_timeout_s)
        self.transport.abort()

    def _refuse(self, error: ApiError) -> None:
        """Answer without the application, unless an answer has begun, and close."""
        self._arrived()
        self.connections.discard(self)
        self._refused = True
        begun = False
        if self.cycle is not None:
            begun = self.cycle.response_started and (
                not self.cycle.response_complete or self.conn.their_state is h11.SEND_BODY
            )
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.transport.is_closing():
            return
        self._count(error.code or "")
        if begun:
            self.transport.close()
            return
        self.transport.write(_response(error))
        if self.transport.can_write_eof():  # TLS cannot
            self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.abort)


def _response(error: ApiError) -> bytes:
    body = json.dumps(error.body()).encode()
    head = {"Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close"}
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in {**head, **error.headers}.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body
