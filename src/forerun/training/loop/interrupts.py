"""Ctrl-C and SIGTERM: the first asks training to stop, the second stops it. Knows nothing of training."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

ECHO_S = 1.0
"""torchrun passes on the Ctrl-C that the terminal has already sent to every process; one press arrives twice."""


class Interrupts:
    """While entered, SIGINT and SIGTERM set `requested`; another one raises `KeyboardInterrupt`.

    Outside the main thread signals cannot be handled, and it does nothing.
    """

    def __init__(self) -> None:
        self.requested = False
        self._since = 0.0
        self._former: dict[int, Any] = {}
        self._echo_s = ECHO_S if "TORCHELASTIC_RUN_ID" in os.environ else 0.0

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._former = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.requested:
            self.requested, self._since = True, now
        elif now - self._since >= self._echo_s:
            raise KeyboardInterrupt
