"""This module runs the application under uvicorn, and adds three limits to its HTTP/1.1
connections.

The limits are how many there may be, how long a request may take to arrive, and how long a response
may lie unread. SIGTERM and Ctrl-C drain first, a second signal ends at once, and so does the end of
the drain time.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import logging
import os
import signal
import socket
import ssl
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from types import FrameType
from typing import Any, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from forerun.errors import ArgumentError, ForerunError
from forerun.serve.app import build_app
from forerun.serve.protocol.errors import ApiError, bad_request
from forerun.serve.session import Session, State
from forerun.serve.settings import ServeSettings

log = logging.getLogger(__name__)

CROWDED_S = 1.0  # How long a request may take to arrive where its address has too many that are arriving
CUT_EVERY_S = 0.005  # Between two of those: what is cut all at once keeps the others waiting
MAX_PIECES = 2_000  # Chunks of one body that came with others, some 20 us each: 4 MB byte by byte would take minutes
LINGER_S = 1.0  # How long a refused connection stays half open: or the response could go before it is read
WRITING_S = 0.2  # How long clients may take to read that their completions were cut off
LAST_S = 0.75  # After the drain time: when the process ends even if Python has not come to it
OTHER_FILES = 256  # File descriptors besides one a connection: weights, libraries, refused connections


def run(session: Session, *, host: str, listener: socket.socket) -> int:
    """Serve what comes to `listener` until told to stop or until the model turns out to be unusable.

    Returns the exit code: 0 where all that was admitted was completed, 1 where completions were cut
    off at the end of the drain time or something unexpected failed, 2 where the model cannot be
    loaded.
    """
    allow_files(session.settings.max_connections + OTHER_FILES)
    port = listener.getsockname()[1]
    serving = server(session, host=host, port=port)
    scheme = "http" if session.settings.ssl_certfile is None else "https"
    session.url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
    log.info("listening on %s; the model is loading", session.url)
    return asyncio.run(_serve(session, serving, listener))


def server(session: Session, *, host: str, port: int) -> uvicorn.Server:
    """Return a server that is ready to run; loggers are the caller's, nothing is configured here."""
    settings = session.settings
    count = partial(session.metrics.count, "forerun:connections_refused", 1)
    config = uvicorn.Config(
        build_app(session),
        host=host,
        port=port,
        http=cast(Any, partial(Connection, limits=session.settings, arriving=Counter(), count=count)),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
        ssl_ca_certs=settings.ssl_ca_certs,
        ssl_cert_reqs=ssl.CERT_NONE if settings.ssl_ca_certs is None else ssl.CERT_REQUIRED,
    )
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        files = (settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_ca_certs)
        raise ArgumentError(f"cannot speak HTTPS with {', '.join(name for name in files if name)}: {error}") from error
    return _Server(config, session)


async def _serve(session: Session, serving: uvicorn.Server, listener: socket.socket) -> int:
    await serving.serve(sockets=[listener])
    if session.failure is not None:
        code = 2 if isinstance(session.failure, ForerunError | OSError) else 1
    else:
        code = 1 if session.cut_off else 0
    late = session.state is State.DRAINING and not session.drain_left_s
    if session.stuck or late:  # Python would wait for a thread, perhaps for ever, or take longer to end than is left
        logging.shutdown()
        os._exit(code)
    return code


def allow_files(count: int) -> None:
    """Raise the soft limit of open files to `count` where it is lower. Windows has none."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and count > hard:
        raise ArgumentError(
            f"{count} open files are needed and {hard} allowed: lower --max-connections by {count - hard}, or raise "
            "the limit (ulimit -Hn, LimitNOFILE=)"
        )
    if soft != resource.RLIM_INFINITY and soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


class _Server(uvicorn.Server):
    """A server that keeps responding while it drains, so that ``/health`` can say 503, and is gone when
    the drain time is over.
    """

    def __init__(self, config: uvicorn.Config, session: Session) -> None:
        super().__init__(config)
        self._session = session

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal; end the process at once, by the signal, at a second one."""
        if self._session.state is State.DRAINING:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        self._session.begin_drain()
        # No thread of Python's: one that computes may hold the interpreter, and keep all others from running.
        faulthandler.dump_traceback_later(self._session.drain_left_s + LAST_S, exit=True)

    async def on_tick(self, counter: int) -> bool:
        if self._session.state in (State.DRAINING, State.FAILED):
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._session.drain()
        asyncio.get_running_loop().call_later(self._session.drain_left_s + WRITING_S, self._hang_up)
        await super().shutdown(sockets)

    def _hang_up(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()


class Connection(H11Protocol):
    """A connection that stays within the operator's `limits`.

    `count` is called with the code of every refusal, and `arriving`, shared by all connections of a
    server, holds the number of requests that have not arrived, by address.
    """

    def __init__(
        self, *, limits: ServeSettings, arriving: Counter[str], count: Callable[[str], None], **keywords: Any
    ) -> None:
        super().__init__(**keywords)
        self._limits, self._addresses, self._count = limits, arriving, count
        self._refused = False
        self._pieces = 0
        self._next_event = self.conn.next_event
        self.conn.next_event = self._count_piece  # type: ignore[method-assign]
        self._arrival: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if (stream := transport.get_extra_info("socket")) is not None:
            # asyncio does so for sockets of its own making alone: without it a client's delayed acknowledgement keeps
            # the first bytes of a response back for 40 ms.
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        transport.set_write_buffer_limits(high=1)  # bytes; with 0 a TLS transport is always full
        if len(self.connections) > self._limits.max_connections:
            self._refuse(
                ApiError(
                    503,
                    f"{self._limits.max_connections} connections are open, which is the limit; try again later",
                    code="too_many_connections",
                    retry_after_s=1,
                )
            )
        else:
            self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._note_arrival()
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

    def _count_piece(self) -> Any:
        """Return what h11 read next; RemoteProtocolError for a body in more pieces than any that is
        sent in earnest.
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
            self._note_arrival()
        elif self._arrival is None and not self._refused:
            self._addresses[self._address] += 1
            within = self._limits.receive_timeout_s
            if (beyond := self._addresses[self._address] - self._limits.max_arriving) > 0:
                within = min(within, CROWDED_S + CUT_EVERY_S * beyond)
            late = ApiError(408, f"the request did not arrive within {within:g} s", code="request_timeout")
            self._arrival = self.loop.call_later(within, self._refuse, late)

    def _note_arrival(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None
            self._addresses[self._address] -= 1
            if not self._addresses[self._address]:
                del self._addresses[self._address]

    @property
    def _address(self) -> str:
        return self.client[0] if self.client else ""

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
        """Respond without the application, unless a response has begun, and close."""
        self._note_arrival()
        self.connections.discard(self)
        self._refused = True
        begun = False
        cycle = self.cycle
        if cycle is not None:
            answering = not cycle.response_complete or self.conn.their_state is h11.SEND_BODY
            begun = cycle.response_started and answering
            cycle.disconnected = True
            cycle.message_event.set()
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
    lines = [f"{name}: {value}" for name, value in {**head, **error.headers}.items()]
    return "\r\n".join([f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}", *lines, "", ""]).encode() + body
