"""What the operator decides: address, keys, origins and limits. Imports no web framework."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.errors import ArgumentError


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeSettings:
    """Of one server."""

    model_name: str
    """What clients call the model."""
    api_keys: tuple[str, ...] = ()
    """Any of these opens the API; none: it is open to everybody who reaches the port."""
    allowed_origins: tuple[str, ...] = ()
    """Web pages of other origins that may call the API from a browser (CORS); ``*`` allows all."""
    max_body_bytes: int = 4_000_000
    max_queue: int = 256
    """Answers that wait or run at once; more are told to come back (429)."""
    max_n: int = 16
    """Answers to one prompt."""
    max_tokens: int | None = None
    """Of one answer; None: as many as the context holds."""
    max_speculative_tokens: int = 16
    """What a request may ask for at most."""
    client_drafters: tuple[str, ...] = ("ngram",)
    """Drafters that a request may choose besides the server's own; all of them need no files."""
    stream_buffer: int = 256
    """Chunks kept for a client that does not read; one more, and the request is dropped."""
    drain_s: float = 60.0
    """How long running requests may go on after SIGTERM."""

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_queue", "max_n", "max_speculative_tokens", "stream_buffer"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        if any(not key for key in self.api_keys):
            raise ArgumentError("an API key must not be empty")
