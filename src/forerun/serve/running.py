"""Runs the application under uvicorn: SIGTERM and Ctrl-C drain first, a second signal ends at once.

A model that cannot be loaded ends it too, and so does the end of the drain time, whatever still computes.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import socket
import ssl
import sys
from collections import Counter
from functools import partial
from types import FrameType
from typing import Any, cast

import uvicorn

from forerun.errors import ArgumentError, ForerunError
from forerun.serve.app import build_app
from forerun.serve.connections import Connection
from forerun.serve.session import Session, State

log = logging.getLogger(__name__)

WRITING_S = 0.2
"""How long clients may take to read that their answers were cut off."""
LAST_S = 0.75
"""After the drain time: when the process ends even if Python has not come to it."""
OTHER_FILES = 256
"""File descriptors that a server needs besides one a connection: weights, libraries, connections that are refused."""


class _Server(uvicorn.Server):
    """Keeps answering while it drains, so that ``/health`` can say 503, and is gone when the drain time is over."""

    def __init__(self, config: uvicorn.Config, session: Session) -> None:
        super().__init__(config)
        self._session = session

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains; a second one ends the process at once, by the signal."""
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
        """Wait no longer for clients who do not read."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def server(session: Session, *, host: str, port: int) -> uvicorn.Server:
    """A server that is ready to run. Loggers are the caller's: nothing is configured here.

    Raises:
        ArgumentError: the files for HTTPS cannot be used.
    """
    settings = session.settings
    config = uvicorn.Config(
        build_app(session),
        host=host,
        port=port,
        http=cast(Any, partial(Connection, limits=session.settings, arriving=Counter(), count=session.metrics.hung_up)),
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


def run(session: Session, *, host: str, port: int) -> int:
    """Serve until told to stop or until the model turns out to be unusable.

    Returns:
        The exit code: 0 where everything that was taken on has been answered, 1 where answers were cut off at the end
        of the drain time or something failed that nobody expected, 2 where the model cannot be loaded.

    Raises:
        ArgumentError: nothing can listen there, or more connections than the process may have open files.
    """
    allow_files(session.settings.max_connections + OTHER_FILES)
    serving, listener = server(session, host=host, port=port), listen(host, port)
    scheme = "http" if session.settings.ssl_certfile is None else "https"
    log.info("listening on %s://%s:%d", scheme, f"[{host}]" if ":" in host else host, listener.getsockname()[1])
    return asyncio.run(_served(session, serving, listener))


async def _served(session: Session, serving: uvicorn.Server, listener: socket.socket) -> int:
    await serving.serve(sockets=[listener])
    if session.failure is not None:
        code = 2 if isinstance(session.failure, ForerunError | OSError) else 1
    else:
        code = 1 if session.cut_off else 0
    if session.stuck:  # Python would wait for its thread, perhaps for ever
        logging.shutdown()
        os._exit(code)
    return code


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens, so that a wrong address is known before anything is loaded.

    Raises:
        ArgumentError: there is no such address, or another process has it.
    """
    if not 0 <= port < 1 << 16:
        raise ArgumentError(f"--port is a number from 0 (any free one) to 65535, got {port}")
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ArgumentError(
            f"cannot listen on {host!r}, port {port}: {why}; choose another --host or --port"
        ) from error


def allow_files(count: int) -> None:
    """Raise the soft limit of open files to `count` where it is lower. Windows has none.

    Raises:
        ArgumentError: the hard limit is lower, too.
    """
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and count > hard:
        raise ArgumentError(
            f"{count} open files are needed and {hard} allowed: lower --max-connections by {count - hard}, "
            "or raise the limit (ulimit -Hn, LimitNOFILE=)"
        )
    if soft != resource.RLIM_INFINITY and soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
