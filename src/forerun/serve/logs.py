"""The server's log has one line for each finished request and each unexpected error, as text or as
JSON.

No prompt, no completion, no key and no path that a client made up, unless the operator wants prompts.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from forerun.errors import EngineError, RequestError
from forerun.serve.settings import ServeSettings
from forerun.types import RequestOutput, SpeculationStats

log = logging.getLogger(__name__)

MOST = 4000  # Characters of one message or traceback in the log; of a longer one the middle is left out


@dataclass(kw_only=True, slots=True)
class RequestRecord:
    """Everything known about one HTTP request; it is written when the request ends. None where it does not apply."""

    request_id: str
    method: str
    route: str = "unmatched"  # The path as it was declared; a path that nobody declared is not written down
    status: int | None = None
    code: str | None = None  # Code of the error, as in OpenAI's envelope
    client: str | None = None
    duration_s: float = 0.0
    stream: bool | None = None
    drafter: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    ttft_s: float | None = None  # Time to the first token, seconds; the longest of several prompts'
    tokens_per_pass: float | None = None  # All tokens over all passes of the target
    finish_reasons: list[str] = field(default_factory=list)
    prompts: list[Any] = field(default_factory=list)  # Only where the operator wants them
    _stats: SpeculationStats = field(default_factory=SpeculationStats, init=False)

    def finished(self, output: RequestOutput) -> None:
        """Count one prompt's completions."""
        answers = output.outputs
        written = sum(len(answer.token_ids) for answer in answers)
        self.count(len(output.prompt_token_ids), written, [answer.finish_reason or "abort" for answer in answers])
        if output.time_to_first_token_s is not None:
            self.ttft_s = max(self.ttft_s or 0.0, output.time_to_first_token_s)
        for answer in answers:
            self._stats.add(answer.speculation)
        self.tokens_per_pass = self._stats.tokens_per_pass

    def count(self, prompt_tokens: int, completion_tokens: int, finish_reasons: Sequence[str]) -> None:
        """Count what one prompt's completions came to, whether or not they were cut off."""
        self.prompt_tokens = (self.prompt_tokens or 0) + prompt_tokens
        self.completion_tokens = (self.completion_tokens or 0) + completion_tokens
        self.finish_reasons += finish_reasons

    def fields(self) -> dict[str, Any]:
        """Return the fields that are worth writing, in the order above."""
        known = {key: round(value, 6) if isinstance(value, float) else value for key, value in asdict(self).items()}
        return {key: value for key, value in known.items() if value not in (None, []) and not key.startswith("_")}


_WRITTEN = "_forerun_written"  # Attribute of an exception that is in the log
RECORD: ContextVar[RequestRecord | None] = ContextVar("forerun_request", default=None)  # The request that runs here


def write(record: RequestRecord, *, routine: bool) -> None:
    """Write the one line of a request that has ended.

    It is below ``info`` if the request was `routine` and all went well, or the server was not
    ready.
    """
    status = record.status or 0
    quiet = routine and (status < 400 or status == 503)
    level = logging.ERROR if status == 500 else logging.DEBUG if quiet else logging.INFO
    log.log(level, "request", extra={"fields": record.fields()})


def write_error(error: BaseException, *, message: bool) -> None:
    """Write an unexpected error, once; with `message` also its text, which may quote a prompt."""
    if isinstance(error, EngineError | RequestError) and error.__cause__ is not None:
        error = error.__cause__
    record = RECORD.get()
    if record is not None:
        record.code = record.code or "internal_error"
    if getattr(error, _WRITTEN, False):
        return
    setattr(error, _WRITTEN, True)
    where = [f"{frame.name} ({frame.filename}:{frame.lineno})" for frame in traceback.extract_tb(error.__traceback__)]
    fields: dict[str, Any] = {
        "request_id": record.request_id if record is not None else None,
        "error": type(error).__name__,
        "message": shorten(str(error)) if message else "withheld; --log-prompts shows it",
        "where": shorten(" < ".join(reversed(where))),
    }
    log.error("a request failed", extra={"fields": fields})


def shorten(text: str) -> str:
    """Return the text, or its beginning and its end where it has more than `MOST` characters."""
    left = len(text) - MOST
    return text if left <= 0 else f"{text[: MOST // 2]} [{left} characters left out] {text[-MOST // 2 :]}"


def configure_logging(settings: ServeSettings) -> None:
    """Send everything to stderr in the requested format; of uvicorn only warnings, unless all is wanted."""
    logging.getLogger("uvicorn").setLevel("DEBUG" if settings.log_level == "debug" else "WARNING")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Lines(settings.log_format))
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler], force=True)


class Lines(logging.Formatter):
    """Formats a line for each record, of ``key=value`` or of JSON; long messages and tracebacks are cut at `MOST`."""

    def __init__(self, kind: Literal["text", "json"]) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")
        self._json = kind == "json"

    def formatException(self, ei: Any) -> str:
        return shorten(super().formatException(ei))

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = shorten(record.message)
        pairs = [f"{key}={_word(value)}" for key, value in getattr(record, "fields", {}).items()]
        return " ".join([super().formatMessage(record), *pairs])

    def format(self, record: logging.LogRecord) -> str:
        if not self._json:
            return super().format(record)
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": shorten(record.getMessage()),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def _word(value: Any) -> str:
    """Format a value as one word, quoted where it has blanks or anything that could end the line."""
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if text and text.isprintable() and not set(text) & set(' "=') else json.dumps(text)
