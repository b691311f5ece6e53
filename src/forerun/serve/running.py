"""Runs the application under uvicorn: SIGTERM and Ctrl-C drain first, a second signal ends at once.

A model that cannot be loaded ends it too.
"""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from types import FrameType
from typing import Any, cast

import uvicorn

from forerun.errors import ArgumentError
from forerun.serve.app import build_app
from forerun.serve.connections import Connection
from forerun.serve.session import Session, State

OTHER_FILES = 256
"""File descriptors that a server needs besides one a connection: weights, libraries, connections that are refused."""


class _Server(uvicorn.Server):
    """Keeps answering while it drains, so that ``/health`` can say 503."""

    def __init__(self, config: uvicorn.Config, session: Session) -> None:
        super().__init__(config)
        self._session = session

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, after which the process ends with 0; a second one ends it by the signal."""
        if self._session.state is State.DRAINING:
            self.force_exit = True
            super().handle_exit(sig, frame)
            return
        self._session.state = State.DRAINING

    async def on_tick(self, counter: int) -> bool:
        drained = self._session.state is State.DRAINING and self._session.in_flight == 0
        if drained or self._session.state is State.FAILED:
            self.should_exit = True
        return await super().on_tick(counter)


def server(session: Session, *, host: str, port: int) -> uvicorn.Server:
    """A server that is ready to run. Loggers are the caller's: nothing is configured here."""
    config = uvicorn.Config(
        build_app(session),
        host=host,
        port=port,
        http=cast(Any, partial(Connection, limits=session.settings, count=session.metrics.hung_up)),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(session.settings.drain_s),
    )
    return _Server(config, session)


def run(session: Session, *, host: str, port: int) -> None:
    """Serve until told to stop; returns when everything in flight has been answered.

    Raises:
        ArgumentError: more connections than the process may have open files.
    """
    allow_files(session.settings.max_connections + OTHER_FILES)
    asyncio.run(server(session, host=host, port=port).serve())


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
