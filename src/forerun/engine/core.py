"""The engine: rows that advance unevenly, finish, are replaced by waiting requests, and give way when memory runs out.

Knows requests, rows and passes. Does not know how a prompt became tokens, how a step works inside, nor who is next:
that is `scheduling`.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Sequence

import torch

from forerun.engine.answer import Answer, Request
from forerun.engine.drafting import Drafting, Newcomer
from forerun.engine.permitting import permitted
from forerun.engine.prefixes import Busy, Prefixes, Seat, Wish
from forerun.engine.reading import Reading, read
from forerun.engine.scheduling import Scheduling, next_in_line, pass_of, youngest
from forerun.errors import ArgumentError
from forerun.step import first_tokens, step
from forerun.target import Target
from forerun.types import Draft, StreamChunk


class Engine:
    """Continuous batching over a target's cache rows. Not thread-safe: one caller steps it.

    Args:
        target: its `rows` bound how many answers run at once.
        drafting: the drafters of this engine.
        check: verify the step's invariants (debug mode).
        scheduling: limits; default: `Scheduling()`.
    """

    def __init__(
        self, target: Target, drafting: Drafting, *, check: bool = False, scheduling: Scheduling | None = None
    ) -> None:
        self.target, self.drafting, self._check = target, drafting, check
        self.scheduling = Scheduling() if scheduling is None else scheduling
        self.preemptions = 0
        """Times that a running answer had to give its row back."""
        self.prefix_queries = 0
        """Prompt tokens that were looked up."""
        self.prefix_hits = 0
        """Prompt tokens that were found in the cache."""
        self._order = itertools.count()
        self._requests: dict[str, Request] = {}
        self._waiting: list[Answer] = []
        self._running: list[Answer] = []
        self._reading: list[Reading] = []
        self._unread: list[Reading] = []
        self._prefixes = Prefixes(target, enabled=self.scheduling.enable_prefix_caching)
        self._read_last = False

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._waiting or self._running)

    @property
    def running(self) -> int:
        """Answers that hold a row."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Answers that wait for a row."""
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Queue all answers of a request.

        Raises:
            ArgumentError: an answer could not be held even if it ran alone.
        """
        request.queued_at = time.perf_counter()
        most = self.scheduling.kv_cache_tokens
        needed = max(len(answer.row.tokens) + answer.row.room for answer in request.answers)
        if most is not None and needed > most:
            raise ArgumentError(
                f"prompt and answer need up to {needed} tokens, the cache may hold {most}; lower max_tokens, shorten "
                "the prompt, or raise kv_cache_tokens"
            )
        for answer in request.answers:
            answer.order = next(self._order)
        self._requests[request.id] = request
        self._waiting.extend(request.answers)

    def abort(self, request_id: str) -> None:
        """End a request's answers and free their rows; unknown ids are ignored, they may just have finished."""
        request = self._requests.pop(request_id, None)
        for answer in request.answers if request is not None else ():
            answer.abort()
        self._retire()
        if request is not None:
            request.release()

    @torch.inference_mode()
    def step(self) -> list[StreamChunk]:
        """One pass: over prompts, or over the next tokens of all that have been read. One chunk an answer.

        While there are both, they take turns: a long prompt delays the others by a piece, and never its own first
        token by a decoding step. Answers whose time is up end first, with what there is of them.
        """
        chunks = self._expire()
        self._make_room()
        self._admit()
        reading = {answer for text in self._reading for answer in text.answers}
        decoding = [answer for answer in self._running if answer not in reading]
        self._read_last = bool(reading) and not (decoding and self._read_last)
        if self._read_last:
            chunks += self._read()
        elif decoding:
            chunks += self._decode(decoding)
        self._retire()
        return self._closed(chunks)

    # --- rows -------------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        while self._waiting and len(self._prefixes):
            answer = next_in_line(self._waiting, self._running)
            if not self._fits([*self._running, answer]):
                break
            self._waiting.remove(answer)
            self._seat(answer)
            self._running.append(answer)
        self._running.sort(key=lambda answer: answer.row.row)
        self._drop_prefixes()

    def _seat(self, answer: Answer) -> None:
        """Give the answer a row, and what it lacks there to whoever reads the same prompt just now, or to itself."""
        request = answer.request
        same = [text for text in self._reading if text.begins and text.answers[0].request is request]
        if same and not answer.tokens:
            same[0].answers.append(answer)
            answer.row.row = self._take(Wish(tokens=(), salt=answer.row.cache_salt)).row
            return
        requires = self.drafting.requires(answer.drafter)
        text = Reading.of(answer, requires)
        # Who wants to see the whole prompt scored or timed, or to hand its hidden states on, reads all of it.
        whole = request.params.prompt_logprobs is not None or request.trace or (requires and request.params.n > 1)
        wanted = () if whole else text.tokens
        salt, drafter = answer.row.cache_salt, answer.drafter
        seat = self._take(Wish(tokens=wanted, salt=salt, drafter=drafter, needs_drafter=bool(requires)))
        answer.row.row, text.done, text.known = seat.row, seat.shared, seat.known
        self._reading.append(text)
        if self.scheduling.enable_prefix_caching and not answer.preemptions:
            self.prefix_queries += len(text.tokens)
            self.prefix_hits += seat.shared
            request.cached_tokens = max(request.cached_tokens, seat.shared)

    def _take(self, wish: Wish) -> Seat:
        seat = self._prefixes.seat(wish, {answer.row.row: self._held(answer) for answer in self._running})
        if seat.drafter is not None:
            self.drafting.forget(seat.drafter, [seat.row], [seat.known])
        return seat

    def _held(self, answer: Answer) -> Busy:
        row = answer.row
        return Busy(tokens=row.tokens[: self.target.lengths[row.row]], salt=row.cache_salt)

    def _leave(self, answer: Answer, *, keep: bool) -> None:
        """Free the answer's row; with `keep`, what it holds serves prompts that begin alike."""
        row, drafter = answer.row, answer.drafter
        keep = keep and self._prefixes.enabled
        held = self._held(answer) if keep else Busy(tokens=())
        remembers = keep and answer.introduced and not row.drafter_errors and self.drafting.remembers(drafter)
        if drafter is not None and not remembers:
            self.drafting.forget(drafter, [row.row], [0])
        self._prefixes.release(row.row, held, drafter if remembers else None)
        self._running.remove(answer)
        for text in [*self._reading, *self._unread]:
            if answer in text.answers:
                text.answers.remove(answer)
        self._reading = [text for text in self._reading if text.answers]
        self._unread = [text for text in self._unread if text.answers]
        answer.introduced, row.row = False, -1

    def _retire(self) -> None:
        """Free the rows of answers that ended."""
        self._waiting = [answer for answer in self._waiting if answer.finish_reason is None]
        for answer in [answer for answer in self._running if answer.finish_reason is not None]:
            self._leave(answer, keep=not answer.failed)
            if answer.drafter is not None:
                self.drafting.watch(answer.drafter, answer.stats)

    def _expire(self) -> list[StreamChunk]:
        """End the answers whose time is up."""
        now = time.perf_counter()
        chunks = [answer.expire() for answer in [*self._waiting, *self._running] if answer.request.late(now)]
        if chunks:
            self._retire()
        return chunks

    # --- memory -----------------------------------------------------------------------------------------------------

    def _make_room(self) -> None:
        """Before a pass: what the running answers may hold after it fits, or the youngest gives way."""
        while not self._fits(self._running):
            answer = youngest(self._running)
            self._leave(answer, keep=False)
            answer.preemptions += 1
            self.preemptions += 1
            self._waiting.append(answer)
        self._drop_prefixes()

    def _fits(self, answers: Sequence[Answer]) -> bool:
        most = self.scheduling.kv_cache_tokens
        return most is None or sum(map(self._claim, answers)) <= most

    def _claim(self, answer: Answer) -> int:
        """Tokens that its row may hold after the next step."""
        row, config = answer.row, answer.request.speculative
        asked = config.num_speculative_tokens if config is not None else None
        return len(row.tokens) + min(row.room, 1 + self.drafting.depth(answer.drafter, asked))

    def _drop_prefixes(self) -> None:
        most = self.scheduling.kv_cache_tokens
        if most is None:
            return
        for row, drafter in self._prefixes.drop(most - sum(map(self._claim, self._running))):
            self.drafting.forget(drafter, [row], [0])

    # --- passes -----------------------------------------------------------------------------------------------------

    def _read(self) -> list[StreamChunk]:
        """The next pieces of prompts, and the first tokens of those that have been read to the end."""
        limits = self.scheduling
        texts = pass_of(self._reading, limits.piece, limits.max_num_batched_tokens)
        logits = read(self.target, texts, limits.piece)
        done = [text for text in texts if text.finished]
        self._reading = [text for text in self._reading if not text.finished]
        self._unread += done
        beginning = [(place, answer) for place, text in enumerate(texts) if text in done for answer in text.answers]
        beginning = [(place, answer) for place, answer in beginning if not answer.tokens]
        ended = [answer.end_unbegun() for _, answer in beginning if not answer.row.room]
        beginning = [(place, answer) for place, answer in beginning if answer.row.room]
        if not beginning:
            return ended
        rows, places = [answer.row for _, answer in beginning], [place for place, _ in beginning]
        emitted = first_tokens(rows, logits[places], isolate=True)
        return ended + [answer.absorb(tokens) for (_, answer), tokens in zip(beginning, emitted, strict=True)]

    def _decode(self, answers: Sequence[Answer]) -> list[StreamChunk]:
        self._introduce()
        began = time.perf_counter()
        rows = [answer.row for answer in answers]
        configs = [answer.request.speculative for answer in answers]
        depths = [config.num_speculative_tokens if config is not None else None for config in configs]
        keys = [answer.drafter for answer in answers]
        groups = self.drafting.groups(rows, keys, depths, awaited=bool(self._reading))

        def admit(draft: Draft) -> Draft:
            return permitted(self.drafting.admit(draft), rows)

        emitted = step(self.target, rows, groups, check=self._check, admit=admit, since=began, isolate=True)
        self.drafting.learn(emitted)
        self.drafting.count_failures(rows)
        return [answer.absorb(tokens) for answer, tokens in zip(answers, emitted, strict=True)]

    def _introduce(self) -> None:
        """Show drafters the prompts of rows that came in since; after their first tokens, so that these never wait."""
        newcomers = defaultdict[str, list[Newcomer]](list)
        for text in self._unread:
            states = text.signals()
            for place, answer in enumerate(text.answers):
                if answer.drafter is not None:
                    known = text.known if place == 0 else 0
                    newcomers[answer.drafter].append(Newcomer(row=answer.row, known=known, states=states))
                    answer.introduced = True
        self._unread.clear()
        for key, found in newcomers.items():
            self.drafting.introduce(key, found)

    def _closed(self, chunks: Sequence[StreamChunk]) -> list[StreamChunk]:
        """The chunks, each finished request's last one carrying its whole output."""
        last = {chunk.request_id: place for place, chunk in enumerate(chunks)}
        closed = []
        for place, chunk in enumerate(chunks):
            request = self._requests[chunk.request_id]
            ends = request.finished and last[chunk.request_id] == place
            closed.append(request.closing(chunk) if ends else chunk)
        for request_id in last:
            if self._requests[request_id].finished:
                self._requests.pop(request_id).release()
        return closed
