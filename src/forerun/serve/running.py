"""Runs the application under uvicorn: SIGTERM and Ctrl-C drain first, a second signal ends at once.

A model that cannot be loaded ends it too.
"""

from __future__ import annotations

import asyncio
from types import FrameType

import uvicorn

from forerun.serve.app import build_app
from forerun.serve.session import Session, State


class _Server(uvicorn.Server):
    """Keeps answering while it drains, so that ``/health`` can say 503."""

    def __init__(self, config: uvicorn.Config, session: Session) -> None:
        super().__init__(config)
        self._session = session

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._session.state is State.DRAINING or self._session.in_flight == 0:
            super().handle_exit(sig, frame)
            return
        self._session.state = State.DRAINING

    async def on_tick(self, counter: int) -> bool:
        drained = self._session.state is State.DRAINING and self._session.in_flight == 0
        if drained or self._session.state is State.FAILED:
            self.should_exit = True
        return await super().on_tick(counter)


def run(session: Session, *, host: str, port: int, log_level: str = "info") -> None:
    """Serve until told to stop; returns when everything in flight has been answered."""
    config = uvicorn.Config(
        build_app(session),
        host=host,
        port=port,
        log_level=log_level,
        access_log=False,
        timeout_graceful_shutdown=int(session.settings.drain_s),
    )
    asyncio.run(_Server(config, session).serve())
