"""The books of one prompt's answers: they were taken on, and exactly one thing became of each of them."""

from __future__ import annotations

from typing import Any

from forerun.errors import SlowReaderError
from forerun.serve import logs
from forerun.serve.metrics import Metrics
from forerun.types import RequestOutput


class Account:
    """Opened when a prompt is handed to the engine, and to be closed whatever happens.

    Args:
        metrics: where it is counted.
        answers: how many are asked for.
        drafter: what drafts for them; None decodes plainly.
        prompt: to be written into the log; None writes nothing of it.
    """

    def __init__(self, metrics: Metrics, answers: int, drafter: str | None, prompt: Any = None) -> None:
        self._metrics, self._answers = metrics, answers
        self._record = logs.current()
        self._ending: str | None = "abort"
        metrics.admitted(answers)
        if self._record is not None:
            self._record.drafter = drafter or "none"
            self._record.prompts += [] if prompt is None else [prompt]

    def finished(self, output: RequestOutput) -> None:
        """All answers are there."""
        self._ending = None
        self._metrics.finished(output)
        if self._record is not None:
            self._record.finished(output)

    def failed(self, error: Exception) -> None:
        """It ended with an error; a client that does not read has left."""
        self._ending = "abort" if isinstance(error, SlowReaderError) else "error"

    def refused(self) -> None:
        """The engine did not take it."""
        self._ending = None
        self._metrics.refused(self._answers)

    def close(self) -> None:
        """Whoever came to no end of their own was dropped."""
        if self._ending is not None:
            self._metrics.dropped(self._answers, self._ending)
            if self._record is not None:
                self._record.finish_reasons += [self._ending] * self._answers
