"""A request and its completions: their tokens, the detokenized text, and the stop conditions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from forerun.control.config import SpeculativeConfig
from forerun.decode.row import Row
from forerun.decode.step import Emitted
from forerun.errors import Isolation
from forerun.params import begun
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

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_INCOMPLETE = "\ufffd"


@dataclass(kw_only=True, eq=False, slots=True)
class Request:
    """One prompt with its sampling parameters, and the `n` completions that it gets."""

    id: str
    prompt: str | None
    prompt_tokens: list[int]
    params: SamplingParams  # Resolved: neutral values instead of None
    speculative: SpeculativeConfig | None
    trace: bool
    priority: int = 0  # Of a client's waiting requests the one with the lowest number comes first
    client: str | None = None  # Rows are shared fairly among clients; None: a client of its own
    user: str | None = None  # A client's rows are shared fairly among its users
    arrived: int = 0  # Prompt tokens that the engine had prefilled when the request arrived
    timeout_s: float | None = None  # Longest time from queueing to the end, seconds
    completions: list[Completion] = field(default_factory=list)
    prompt_logprobs: list[Mapping[int, TokenLogprob] | None] | None = None  # Of the part prefilled so far
    queued_at: float | None = None  # `time.perf_counter`; an earlier arrival, where it waited before it was queued
    scheduled_at: float | None = None  # When the first of its completions got a row
    first_token_at: float | None = None
    last_token_at: float | None = None
    cached_tokens: int = 0  # Prompt tokens that were found in the prefix cache

    def set_owner(self, *, cache_salt: str | None, client: str | None, user: str | None, priority: int) -> None:
        """Set the request's isolation domain, client, user and priority, see `LLM.submit`."""
        self.client, self.user, self.priority = client, user, priority
        for completion in self.completions:
            completion.row.cache_salt = cache_salt

    @property
    def complete_prompt_logprobs(self) -> list[Mapping[int, TokenLogprob] | None] | None:
        """The prompt's log-probabilities, or None until they are complete."""
        found = self.prompt_logprobs
        return found if found is not None and len(found) == len(self.prompt_tokens) else None

    @property
    def finished(self) -> bool:
        return all(completion.finish_reason is not None for completion in self.completions)

    def timed_out(self, now: float) -> bool:
        """Return whether the request has timed out at `now`, `time.perf_counter`."""
        return self.timeout_s is not None and self.queued_at is not None and now - self.queued_at >= self.timeout_s

    def last_chunk(self, chunk: StreamChunk) -> StreamChunk:
        """Return the request's last chunk, with the whole output."""
        row = self.completions[chunk.index].row
        with Isolation(row):
            return replace(chunk, output=self.output())
        # Reached only if the block raised: `Isolation` made the error the row's.
        return replace(chunk, error=row.error)

    def release(self) -> None:
        """Drop the completions of a finished request, to break reference cycles.

        Completions refer to their request, and rows to errors whose tracebacks refer to the rows. Masks and grammar
        parsers would stay in memory until Python's cycle collector runs, which is rare in a large process.
        """
        for completion in self.completions:
            completion.row.error = None
        self.completions.clear()

    def output(self) -> RequestOutput:
        """Return the output so far."""
        queued, scheduled = self.queued_at, self.scheduled_at
        first, last = self.first_token_at, self.last_token_at
        return RequestOutput(
            request_id=self.id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_tokens,
            outputs=[completion.output() for completion in self.completions],
            finished=self.finished,
            prompt_logprobs=self.complete_prompt_logprobs,
            time_to_first_token_s=first - queued if first is not None and queued is not None else None,
            decode_s=last - first if first is not None and last is not None else None,
            num_cached_tokens=self.cached_tokens,
            queue_s=scheduled - queued if scheduled is not None and queued is not None else None,
        )


@dataclass(kw_only=True, eq=False, slots=True)
class Completion:
    """One of a request's `n` completions while it is generated."""

    request: Request
    index: int
    row: Row
    detokenizer: Detokenizer
    text: CompletionText
    drafter: str | None = None  # Key of the drafter that drafts for it; None decodes plainly
    tokens: list[OutputToken] = field(default_factory=list)
    traces: list[StepTrace] = field(default_factory=list)
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    last_token_at: float | None = None  # `time.perf_counter` of the last step that gave it tokens
    order: int = 0  # Position in the order of arrival
    preemptions: int = 0  # Times that it was preempted
    drafter_has_read: bool = False  # Its drafter has read its text
    failed: bool = False  # Its row in the cache must not be reused as a prefix

    def append(self, emitted: Emitted) -> StreamChunk:
        """Append one step's tokens, up to the first that ends the completion. If the row failed in the step, or its
        text cannot be decoded, the whole request ends; other requests go on.
        """
        with Isolation(self.row):
            if self.row.error is None:
                return self._append(emitted)
        return self._fail()  # Reached only if the row has failed, before or in the block

    def _append(self, emitted: Emitted) -> StreamChunk:
        new: list[OutputToken] = []
        for position, token in enumerate(emitted.tokens):
            new.append(self._output_token(emitted, position, token))
            self._check_end(token, new[-1].text, len(self.tokens) + len(new))
            if self.finish_reason is not None:
                break
        if surplus := len(emitted.tokens) - len(new):
            self.row.shorten(surplus)  # Tokens that were committed after the end
        first = not self.tokens
        since_last_s = self._count(emitted, new)
        text = self.text.release(final=self.finish_reason is not None)
        trace = emitted.trace if self.request.trace and not first else None  # The prompt's pass drafts nothing
        return self._chunk(text, new, trace, since_last_s, first=first)

    def end_empty(self) -> StreamChunk:
        """End a completion of zero tokens (``max_tokens=0``) after its prompt was prefilled, and return its only
        chunk.
        """
        if self.row.error is not None:
            return self._fail()
        self.finish_reason = "length"
        return self._chunk("", [], first=True)

    def abort(self) -> None:
        """End the completion with the tokens that it has."""
        self.finish_reason = self.finish_reason or "abort"

    def expire(self) -> StreamChunk:
        """End the completion because its request timed out, and return its last chunk, with the text held back so
        far.
        """
        self.abort()
        with Isolation(self.row):
            self.text.add(self.detokenizer.flush())
            return self._chunk(self.text.release(final=True), [], first=not self.tokens)
        return self._fail()  # Reached only if the block raised

    def _fail(self) -> StreamChunk:
        """End the whole request with the row's error. The text is not touched, because decoding it may have failed."""
        for completion in self.request.completions:
            completion.abort()
        self.failed = True
        return self._chunk("", [])

    def _chunk(
        self,
        text: str,
        tokens: list[OutputToken],
        trace: StepTrace | None = None,
        since_last_s: float | None = None,
        *,
        first: bool = False,
    ) -> StreamChunk:
        """Return a chunk of the completion. The `first` one carries the prompt's token ids and log-probabilities."""
        return StreamChunk(
            request_id=self.request.id,
            index=self.index,
            text=text,
            tokens=tokens,
            trace=trace,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            prompt_token_ids=self.request.prompt_tokens if first else None,
            prompt_logprobs=self.request.complete_prompt_logprobs if first else None,
            since_last_s=since_last_s,
            error=self.row.error,
        )

    def output(self) -> CompletionOutput:
        """Return the output so far."""
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

    def _output_token(self, emitted: Emitted, position: int, token: int) -> OutputToken:
        chosen, top = emitted.logprobs[position] if emitted.logprobs is not None else (None, None)
        skipped = token in self.row.stop_ids and not self.request.params.include_stop_str_in_output
        return OutputToken(
            id=token,
            text="" if skipped else self.detokenizer.add(token),
            source=emitted.sources[position],
            step=emitted.trace.step,
            logprob=chosen,
            top_logprobs=top,
        )

    def _check_end(self, token: int, piece: str, length: int) -> None:
        """Set `finish_reason` if the token, which is number `length` of the completion, ends it."""
        params = self.request.params
        self.row.tokens_left -= 1
        stop = self.text.add(piece, search=length >= params.min_tokens)
        if token in self.row.stop_ids:
            self.finish_reason = "stop"
            self.stop_reason = token if token in (params.stop_token_ids or ()) else None
        elif stop is not None:
            self.finish_reason, self.stop_reason = "stop", stop
        elif self.row.tokens_left <= 0:
            self.finish_reason = "length"
        if self.finish_reason is not None and stop is None:
            self.text.add(self.detokenizer.flush())

    def _count(self, emitted: Emitted, new: Sequence[OutputToken]) -> float | None:
        """Count a step's tokens, and return the seconds since the step before; None for the first."""
        self.tokens.extend(new)
        before, now = self.last_token_at, time.perf_counter()
        self.last_token_at = self.request.last_token_at = now
        if before is None:
            self.request.first_token_at = self.request.first_token_at or now
            self.stats.begin(len(new))
            return None
        accepted = sum(token.source is Source.DRAFT for token in new)
        drafted, rule = emitted.drafted, emitted.trace.rule
        self.stats.record(tokens=len(new), drafted=drafted, depth=emitted.depth, accepted=accepted, rule=rule)
        self.stats.drafter_errors = self.row.drafter_errors
        if self.request.trace:
            self.traces.append(emitted.trace)
        return now - before


class Detokenizer:
    """Detokenizes output ids incrementally. A character that spans several tokens appears with its last token.

    With every token a short window is decoded, and the difference to its earlier text is returned. This works for every
    tokenizer.
    """

    _WINDOW = 5  # Tokens of context in the window: of the prompt, or before an incomplete character
    _LONGEST = 12
    """Length of the window, in tokens, after which a new one begins, which takes an additional decoding."""
    _SPAN = 4
    """Most tokens that one character spans. If so many tokens give no complete text (bytes that form no character, or
    tokens that each end within one), all characters but the last are final.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, prompt: Sequence[int], *, skip_special: bool) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._ids = list(prompt[-self._WINDOW :])
        self._start = 0
        self._read = len(self._ids)
        self._held = False  # The last decoded character is incomplete and held back
        self._told: int | None = None  # Characters of the window that were returned; None: computed on demand

    def add(self, token: int) -> str:
        """Return the text that `token` adds; empty while a character is incomplete."""
        self._ids.append(token)
        return self._advance(final=False)

    def flush(self) -> str:
        """Return the text of an incomplete character at the end of the completion."""
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        if self._tokenizer is None or (self._read == len(self._ids) and not self._held):
            return ""
        if self._told is None:
            self._told = len(self._decode(self._ids[self._start : self._read])) - self._held
        told, text = self._told, self._decode(self._ids[self._start :])
        incomplete = not final and text.endswith(_INCOMPLETE)
        if incomplete and len(self._ids) - self._read < self._SPAN:
            return ""
        last, self._read, self._held = self._read, len(self._ids), incomplete
        self._told = len(text) - incomplete
        if final:
            self._start, self._told = max(0, self._read - self._WINDOW), None
        elif self._read - self._start > self._LONGEST:
            self._start, self._told = last, None
        return text[told : len(text) - incomplete]

    def _decode(self, ids: Sequence[int]) -> str:
        assert self._tokenizer is not None
        skip = self._skip_special
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False))


@dataclass(slots=True)
class CompletionText:
    """The text of one completion. It finds stop strings, and holds back text that may become one."""

    stops: tuple[str, ...]
    include_stop: bool
    text: str = ""
    sent: int = 0  # Characters already returned by `release`

    def add(self, piece: str, *, search: bool = False) -> str | None:
        """Append a piece of text. With `search`, cut the text at a stop string that it completes, and return that
        string; else return None.
        """
        start = len(self.text)
        self.text += piece
        hits = [(self.text.find(stop, max(0, start - len(stop) + 1)), stop) for stop in self.stops if search]
        at, stop = min((hit for hit in hits if hit[0] >= 0), default=(0, None))
        if stop is None:
            return None
        self.text = self.text[: at + len(stop) if self.include_stop else at]
        return stop

    def release(self, *, final: bool) -> str:
        """Return the new text that cannot become part of a stop string; all of it if `final`."""
        held = 0 if final else begun(self.text, self.stops)
        end = max(self.sent, len(self.text) - held)
        piece, self.sent = self.text[self.sent : end], end
        return piece
