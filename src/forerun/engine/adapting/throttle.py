"""Keeps work within a share of wall time: work is paid for with rest. Knows no work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Throttle:
    """A budget of seconds that several threads spend and one of them waits for.

    Args:
        share: most seconds of work per second of wall time.
        ending: ends every rest.
        now: a clock, seconds; `wait` takes seconds and returns True where `ending` was set meanwhile.
    """

    def __init__(
        self,
        share: float,
        ending: threading.Event,
        *,
        now: Callable[[], float] = time.perf_counter,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        self._share, self._now, self._wait = share, now, ending.wait if wait is None else wait
        self._lock = threading.Lock()
        self._began = self._paid_until = now()
        self.busy = 0.0
        """Seconds of work so far."""

    @property
    def used(self) -> float:
        """Seconds of work per second of wall time since the start."""
        return self.busy / max(1.0e-9, self._now() - self._began)

    @contextmanager
    def paced(self) -> Iterator[Callable[[], bool]]:
        """The block is work. What it is given rests until all work so far is paid for; True: it is time to end."""
        began = self._now()

        def pause() -> bool:
            nonlocal began
            self._spend(began)
            ending = self._wait(max(0.0, self._paid_until - self._now()))
            began = self._now()
            return ending

        try:
            yield pause
        finally:
            self._spend(began)

    def _spend(self, began: float) -> None:
        ended = self._now()
        with self._lock:
            self.busy += ended - began
            self._paid_until = max(self._paid_until, began) + (ended - began) / self._share
