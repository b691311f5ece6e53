"""One answer in the making, and the request it belongs to. Knows text and stops; does not know rows or scheduling."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forerun.engine.config import SpeculativeConfig
from forerun.engine.text import AnswerText, Detokenizer
from forerun.step import Emitted, Row
from forerun.types import (
    CompletionOutput,
    OutputToken,
    RequestOutput,
    SamplingParams,
    Source,
    SpeculationStats,
    StepTrace,
    StreamChunk,
    TokenLogprob,
)


@dataclass(kw_only=True, eq=False, slots=True)
class Request:
    """One prompt and how to answer it."""

    id: str
    prompt: str | None
    prompt_tokens: list[int]
    params: SamplingParams
    """Resolved: no None where there is a neutral value."""
    speculative: SpeculativeConfig | None
    trace: bool
    client: str | None = None
    """Whose request it is, where rows are to be shared fairly among clients."""
    timeout_s: float | None = None
    """Time from queueing to the end, seconds."""
    answers: list[Answer] = field(default_factory=list)
    prompt_logprobs: list[Mapping[int, TokenLogprob] | None] | None = None
    queued_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    cached_tokens: int = 0
    """Prompt tokens that were in the cache already."""

    @property
    def finished(self) -> bool:
        return all(answer.finish_reason is not None for answer in self.answers)

    def late(self, now: float) -> bool:
        """Whether its time is up at `now`, `time.perf_counter`."""
        return self.timeout_s is not None and self.queued_at is not None and now - self.queued_at >= self.timeout_s

    def output(self) -> RequestOutput:
        """What there is so far."""
        first, last, queued = self.first_token_at, self.last_token_at, self.queued_at
        return RequestOutput(
            request_id=self.id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_tokens,
            outputs=[answer.completion() for answer in self.answers],
            finished=self.finished,
            prompt_logprobs=self.prompt_logprobs,
            time_to_first_token_s=first - queued if first is not None and queued is not None else None,
            decode_s=last - first if first is not None and last is not None else None,
            num_cached_tokens=self.cached_tokens,
        )


@dataclass(kw_only=True, eq=False, slots=True)
class Answer:
    """One of a request's `n` answers."""

    request: Request
    index: int
    row: Row
    detokenizer: Detokenizer
    text: AnswerText
    drafter: str | None
    """Key of the drafter that works for it; None decodes plainly."""
    tokens: list[OutputToken] = field(default_factory=list)
    traces: list[StepTrace] = field(default_factory=list)
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    order: int = 0
    """Rises with every answer that is queued."""
    preemptions: int = 0
    """Times that it had to give its row back."""
    introduced: bool = False
    """Its drafter has been shown what it holds."""
    failed: bool = False
    """What its row holds is of no use to others."""

    def absorb(self, emitted: Emitted) -> StreamChunk:
        """Take one step's tokens in, one by one, up to the first that ends the answer."""
        if emitted.error is not None:
            return self._fail(emitted.error)
        new: list[OutputToken] = []
        for place, token in enumerate(emitted.tokens):
            new.append(self._output_token(emitted, place, token))
            self._check_end(token, new[-1].text, len(self.tokens) + len(new))
            if self.finish_reason is not None:
                break
        self._settle(len(emitted.tokens) - len(new))
        self._count(emitted, new)
        return StreamChunk(
            request_id=self.request.id,
            index=self.index,
            text=self.text.release(final=self.finish_reason is not None),
            tokens=new,
            trace=emitted.trace if self.request.trace else None,
            finish_reason=self.finish_reason,
        )

    def abort(self) -> None:
        """End the answer where it stands."""
        self.finish_reason = self.finish_reason or "abort"

    def expire(self, error: Exception | None = None) -> StreamChunk:
        """End the answer because its time is up, or of an error: a last chunk, with the text that was held back."""
        self.abort()
        self.text.add(self.detokenizer.flush())
        return StreamChunk(
            request_id=self.request.id,
            index=self.index,
            text=self.text.release(final=True),
            tokens=[],
            trace=None,
            finish_reason=self.finish_reason,
            error=error,
        )

    def _fail(self, error: Exception) -> StreamChunk:
        """End the whole request."""
        for answer in self.request.answers:
            answer.abort()
        self.failed = True
        return self.expire(error)

    def completion(self) -> CompletionOutput:
        """The answer so far."""
        return CompletionOutput(
            index=self.index,
            text=self.text.text,
            token_ids=[token.id for token in self.tokens],
            tokens=list(self.tokens),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            speculation=self.stats,
            trace=list(self.traces),
        )

    def _output_token(self, emitted: Emitted, place: int, token: int) -> OutputToken:
        chosen, top = emitted.logprobs[place] if emitted.logprobs is not None else (None, None)
        skipped = token in self.row.stop_ids and not self.request.params.include_stop_str_in_output
        return OutputToken(
            id=token,
            text="" if skipped else self.detokenizer.add(token),
            source=emitted.sources[place],
            step=emitted.trace.step,
            logprob=chosen,
            top_logprobs=top,
        )

    def _check_end(self, token: int, piece: str, length: int) -> None:
        """Set `finish_reason` if the token that made the answer `length` long ends it."""
        params = self.request.params
        self.row.room -= 1
        stop = self.text.add(piece, search=length >= params.min_tokens)
        if token in self.row.stop_ids:
            self.finish_reason = "stop"
            self.stop_reason = token if token in (params.stop_token_ids or ()) else None
        elif stop is not None:
            self.finish_reason, self.stop_reason = "stop", stop
        elif self.row.room <= 0:
            self.finish_reason = "length"
        if self.finish_reason is not None and stop is None:
            self.text.add(self.detokenizer.flush())

    def _settle(self, surplus: int) -> None:
        """Forget committed tokens behind the end of the answer."""
        if surplus:
            del self.row.tokens[-surplus:]

    def _count(self, emitted: Emitted, new: Sequence[OutputToken]) -> None:
        prefilled = not self.tokens
        self.tokens.extend(new)
        self.request.last_token_at = time.perf_counter()
        if prefilled:
            self.request.first_token_at = self.request.first_token_at or self.request.last_token_at
            return
        accepted = sum(token.source is Source.DRAFT for token in new)
        self.stats.record(drafted=emitted.drafted, depth=emitted.depth, accepted=accepted)
        self.stats.drafter_errors = self.row.drafter_errors
        if self.request.trace:
            self.traces.append(emitted.trace)
