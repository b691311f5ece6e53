"""The engine: rows that advance unevenly, finish, are replaced by waiting requests, and are
preempted when memory runs out.

Who gets the next row is decided in `scheduling`, what a step does in `decode.step`.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from forerun.core.tree import TokenTree
from forerun.decode.step import first_tokens, step
from forerun.engine.completion import Completion, Request
from forerun.engine.drafting import DrafterPool, NewSequence
from forerun.engine.grammar import drop_forbidden
from forerun.engine.scheduling import (
    PassTimes,
    Prefill,
    PrefillQueue,
    Scheduling,
    next_in_line,
    row_for,
    run_prefills,
)
from forerun.errors import ArgumentError
from forerun.model import Target
from forerun.model.recordings import FREE, bucket
from forerun.model.target import PREFILL_CHUNK
from forerun.types import StreamChunk

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedWeights:
    """The weights of a checkpoint that fits the target, not yet taken over."""

    folder: Path
    weights: Any  # In the back end's form


class Engine:
    """Continuous batching over a target's cache rows, which bound how many answers run at once. Not
    thread-safe: one caller steps it. `check` verifies the step's invariants (debug mode).
    """

    def __init__(self, target: Target, drafting: DrafterPool, scheduling: Scheduling, *, check: bool = False) -> None:
        self.target, self.drafting, self.scheduling, self._check = target, drafting, scheduling, check
        self.preemptions = 0  # Times that a running answer had to give its row back
        self.prefix_queries = 0  # Prompt tokens that were looked up
        self.prefix_hits = 0  # Prompt tokens that were found in the cache
        self._order = itertools.count()
        self._requests: dict[str, Request] = {}
        self._waiting: list[Completion] = []
        self._running: list[Completion] = []
        self._prefilling: list[Prefill] = []
        self._unshown: list[Prefill] = []  # Prompts of which drafters have not been shown all that was read
        self._prefixes = PrefixCache(target, enabled=self.scheduling.enable_prefix_caching)
        self._prefilled_last = False
        self._queue = PrefillQueue(scheduling, padded=target.pads_prompts)
        self._times, self._introducing_s = PassTimes(), 0.0
        self._kept_from: int | None = None  # Order of the first answer that is kept waiting
        self._cut_before = 0  # Order below which answers end at the next step

    @property
    def busy(self) -> bool:
        """True if a step would do anything."""
        return bool(self._running or self._admissible())

    @property
    def running(self) -> int:
        """Number of answers that hold a row."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Number of answers that wait for a row."""
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Queue all answers of a request. Raises ArgumentError if one could not be held even if it
        ran alone.
        """
        request.queued_at = request.queued_at or time.perf_counter()
        most = self.scheduling.kv_cache_tokens
        needed = max(len(answer.row.tokens) + answer.row.tokens_left for answer in request.answers)
        if most is not None and needed > most:
            raise ArgumentError(
                f"prompt and answer need up to {needed} tokens, the cache may hold {most}; lower max_tokens, shorten "
                "the prompt, or raise kv_cache_tokens"
            )
        request.arrived = self._queue.clock
        for answer in request.answers:
            answer.order = next(self._order)
        self._requests[request.id] = request
        self._waiting.extend(request.answers)

    def abort(self, request_id: str) -> None:
        """End a request's answers and free their rows; unknown ids are ignored, they may just have
        finished.
        """
        request = self._requests.pop(request_id, None)
        for answer in request.answers if request is not None else ():
            answer.abort()
        self._retire()
        if request is not None:
            request.release()

    def hold(self, *, cut: bool) -> None:
        """Keep the requests to come waiting until `resume`. With `cut` those that are here end at the next step, with
        what there is of them."""
        now = next(self._order)
        if self._kept_from is None:
            self._kept_from = now
        if cut:
            self._cut_before = now

    def resume(self) -> None:
        """Admit again all that waits."""
        self._kept_from = None

    def open_weights(self, model_path: str | Path, tokenizer: Any) -> OpenedWeights:
        """Open a checkpoint for `write_weights`, which takes time and memory; raises as `LLM.update_weights_from_disk`
        does. `tokenizer` is that of the model that runs."""
        folder = Path(model_path).expanduser()
        return OpenedWeights(folder=folder, weights=self.target.open_weights(folder, tokenizer))

    def write_weights(self, opened: OpenedWeights) -> None:
        """Run the target with other weights, with nothing running. What was computed with the former ones is forgotten,
        and what drafters have learned of texts stays."""
        began = time.perf_counter()
        self.target.write_weights(opened.weights, opened.folder)
        self.forget()
        self.drafting.reread()
        log.info("weights taken over from %s in %.2f s", opened.folder, time.perf_counter() - began)

    def load_drafter(self, key: str, model: str) -> None:
        """Have the requests to come drafted for by the model of another directory. Answers that wait or run finish with
        the drafter that they have, which goes with the last of them. ForerunError: the new one cannot be loaded, and
        nothing has changed."""
        former = self.drafting.swap(key, model)
        for row in self._prefixes.disown(key):
            self.drafting.forget(former, [row], [0])
        for answer in [*self._waiting, *self._running]:
            if answer.drafter == key:
                answer.drafter = former
        self._discard_replaced()

    def _discard_replaced(self) -> None:
        for key in self.drafting.replaced - {answer.drafter for answer in [*self._waiting, *self._running]}:
            self.drafting.discard(key)

    def forget(self) -> None:
        """Empty all free rows, with nothing running; they are then taken in the order of a new
        engine.
        """
        for row, drafter in self._prefixes.drop(0):
            self.drafting.forget(drafter, [row], [0])
        self._prefixes = PrefixCache(self.target, enabled=self.scheduling.enable_prefix_caching)
        self._prefilled_last = False

    def grow(self, rows: int, slots: int) -> None:
        """Give the cache so many rows of so many slots, with nothing running; drafters keep what they have learned."""
        self.forget()
        self.target.grow(rows, slots)
        self.drafting.grow(rows, slots)
        self._prefixes = PrefixCache(self.target, enabled=self.scheduling.enable_prefix_caching)

    @torch.inference_mode()
    def step(self) -> list[StreamChunk]:
        """Run one pass: over prompts, or over the next tokens of all that have been read; returns
        one chunk an answer. While there are both, they take turns: a long prompt delays the others
        by a chunk. Answers whose time is up end first, with what there is of them.
        """
        chunks = self._expire()
        self._preempt_youngest()
        self._admit()
        reading = {answer for text in self._prefilling for answer in text.answers}
        decoding = [answer for answer in self._running if answer not in reading]
        self._prefilled_last = bool(reading) and not (decoding and self._prefilled_last)
        if self._prefilled_last:
            chunks += self._prefill(beside=bool(decoding))
        elif decoding:
            chunks += self._decode(decoding)
        self._retire()
        return self._closed(chunks)

    # --- rows -------------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        while waiting := self._admissible():
            answer = next_in_line(waiting, self._running)
            if not self._make_room(answer):
                break
            self._waiting.remove(answer)
            self._allocate(answer)
            self._running.append(answer)
        self._running.sort(key=lambda answer: answer.row.cache_row)
        self._drop_prefixes()

    def _admissible(self) -> list[Completion]:
        """Return the answers that may have a row when one is free."""
        kept_from = self._kept_from
        return [answer for answer in self._waiting if kept_from is None or answer.order < kept_from]

    def _make_room(self, answer: Completion) -> bool:
        """Return whether there are a row and memory for an answer, if need be by preempting answers
        of whoever holds more than its share, but none in vain.
        """
        staying, leaving = list(self._running), list[Completion]()
        while not (leaving or len(self._prefixes)) or not self._fits([*staying, answer]):
            other = row_for(answer, staying, self.target.lengths)
            if other is None:
                return False
            staying.remove(other)
            leaving.append(other)
        for other in leaving:
            self._preempt(other)
        return True

    def _allocate(self, answer: Completion) -> None:
        """Give the answer a row; what it lacks there is prefilled with an answer to the same
        prompt, or by itself.
        """
        request = answer.request
        same = [text for text in self._prefilling if text.begins and text.answers[0].request is request]
        if same and not answer.tokens:
            same[0].answers.append(answer)
            answer.row.cache_row = self._take((), answer).row
            return
        requires = self.drafting.requires(answer.drafter)
        lacking = answer.row.tokens[:-1] if answer.tokens else list(answer.row.tokens)
        text = Prefill(answers=[answer], tokens=lacking, requires=requires)
        # A request that scores or times the whole prompt, or hands its hidden states on, reads all of it.
        whole = request.params.prompt_logprobs is not None or request.trace or (requires and request.params.n > 1)
        found = self._take(() if whole else text.tokens, answer, needs_drafter=bool(requires))
        answer.row.cache_row, text.done, text.known = found.row, found.shared, found.known
        self._prefilling.append(text)
        if self.scheduling.enable_prefix_caching and not answer.preemptions:
            self.prefix_queries += len(text.tokens)
            self.prefix_hits += found.shared
            request.cached_tokens = max(request.cached_tokens, found.shared)

    def _take(self, wanted: Sequence[int], answer: Completion, *, needs_drafter: bool = False) -> Allocation:
        busy = {other.row.cache_row: self._held(other) for other in self._running}
        salt, drafter = answer.row.cache_salt, answer.drafter
        found = self._prefixes.acquire(wanted, busy, salt=salt, drafter=drafter, needs_drafter=needs_drafter)
        if found.drafter is not None:
            self.drafting.forget(found.drafter, [found.row], [found.known])
        return found

    def _held(self, answer: Completion) -> CachedText:
        row = answer.row
        return row.tokens[: self.target.lengths[row.cache_row]], row.cache_salt

    def _release(self, answer: Completion, *, keep: bool) -> None:
        """Free the answer's row; with `keep`, what it holds serves prompts that begin alike."""
        row, drafter = answer.row, answer.drafter
        keep = keep and self._prefixes.enabled
        held: CachedText = self._held(answer) if keep else ((), None)
        remembers = keep and answer.introduced and not row.drafter_errors and self.drafting.remembers(drafter)
        if drafter is not None and answer.introduced:
            self.drafting.finish(drafter, row)
        if drafter is not None and not remembers:
            self.drafting.forget(drafter, [row.cache_row], [0])
        self._prefixes.release(row.cache_row, held, drafter if remembers else None)
        self._running.remove(answer)
        for text in [*self._prefilling, *self._unshown]:
            if answer in text.answers:
                text.answers.remove(answer)
        self._prefilling = [text for text in self._prefilling if text.answers]
        self._unshown = [text for text in self._unshown if text.answers]
        answer.introduced, row.cache_row = False, -1

    def _retire(self) -> None:
        self._waiting = [answer for answer in self._waiting if answer.finish_reason is None]
        for answer in [answer for answer in self._running if answer.finish_reason is not None]:
            self._release(answer, keep=not answer.failed)
            if answer.drafter is not None:
                self.drafting.watch(answer.drafter, answer.stats)
        if self.drafting.replaced:
            self._discard_replaced()

    def _expire(self) -> list[StreamChunk]:
        now, here = time.perf_counter(), [*self._waiting, *self._running]
        ending = [answer for answer in here if answer.order < self._cut_before or answer.request.late(now)]
        chunks = [answer.expire() for answer in ending]
        if chunks:
            self._retire()
        return chunks

    # --- memory -----------------------------------------------------------------------------------------------------

    def _preempt_youngest(self) -> None:
        """Preempt the youngest running answers until what all may hold after the coming pass fits."""
        while not self._fits(self._running):
            self._preempt(max(self._running, key=lambda answer: answer.order))
        self._drop_prefixes()

    def _preempt(self, answer: Completion) -> None:
        """Take an answer's row. It waits, and continues where it stood when what it held has been
        read again.
        """
        self._release(answer, keep=False)
        answer.preemptions += 1
        self.preemptions += 1
        self._waiting.append(answer)

    def _fits(self, answers: Sequence[Completion]) -> bool:
        most = self.scheduling.kv_cache_tokens
        return most is None or sum(map(self._claim, answers)) <= most

    def _claim(self, answer: Completion) -> int:
        """Return the tokens that an answer's row may hold after the next step."""
        row, config = answer.row, answer.request.speculative
        asked = config.num_speculative_tokens if config is not None else None
        return len(row.tokens) + min(row.tokens_left, 1 + self.drafting.depth(answer.drafter, asked))

    def _drop_prefixes(self) -> None:
        most = self.scheduling.kv_cache_tokens
        if most is None:
            return
        for row, drafter in self._prefixes.drop(most - sum(map(self._claim, self._running))):
            self.drafting.forget(drafter, [row], [0])

    # --- passes -----------------------------------------------------------------------------------------------------

    def _prefill(self, *, beside: bool) -> list[StreamChunk]:
        """Run the next chunks of prompts, and emit the first tokens of those that have been read to
        the end. `beside` says that answers wait for their next tokens meanwhile.
        """
        self._introduce()
        began = time.perf_counter()
        pieces = self._queue.next_pass(self._prefilling, self._budget(beside=beside))
        texts = [text for text, _ in pieces]
        logits = run_prefills(self.target, pieces)
        # What drafters make of a chunk comes with the next pass; that of the chunk before took about as long.
        took = time.perf_counter() - began + self._introducing_s
        self._times.add_pass(sum(len(tokens) for _, tokens in pieces), took)
        self._prefilling = [text for text in self._prefilling if not text.finished]
        self._unshown += [text for text in texts if text.finished or not text.shared]
        finished = ((index, text) for index, text in enumerate(texts) if text.finished)
        beginning = [(index, answer) for index, text in finished for answer in text.answers if not answer.tokens]
        ended = [answer.end_unbegun() for _, answer in beginning if not answer.row.tokens_left]
        beginning = [(index, answer) for index, answer in beginning if answer.row.tokens_left]
        if not beginning:
            return ended
        rows, indices = [answer.row for _, answer in beginning], [index for index, _ in beginning]
        emitted = first_tokens(rows, logits[indices], isolate=True)
        return ended + [answer.append(tokens) for (_, answer), tokens in zip(beginning, emitted, strict=True)]

    def _budget(self, *, beside: bool) -> int:
        """Return the number of prompt tokens for the next pass."""
        if self.scheduling.max_num_batched_tokens is not None:
            return self.scheduling.max_num_batched_tokens
        # An accelerator runs some hundred tokens in about the time of a few: shorter passes would gain nothing.
        return self._times.tokens(beside=beside) if self.target.device.type == "cpu" else PREFILL_CHUNK

    def _decode(self, answers: Sequence[Completion]) -> list[StreamChunk]:
        self._introduce()
        began = time.perf_counter()
        rows = [answer.row for answer in answers]
        configs = [answer.request.speculative for answer in answers]
        depths = [config.num_speculative_tokens if config is not None else None for config in configs]
        keys = [answer.drafter for answer in answers]
        groups = self.drafting.groups(rows, keys, depths, awaited=bool(self._prefilling))

        def admit(trees: list[TokenTree]) -> list[TokenTree]:
            return drop_forbidden(self.drafting.admit(trees), rows)

        emitted = step(self.target, rows, groups, check=self._check, admit=admit, since=began, isolate=True)
        self.drafting.learn(emitted)
        self.drafting.count_failures(rows)
        self._times.add_step(time.perf_counter() - began)
        return [answer.append(tokens) for answer, tokens in zip(answers, emitted, strict=True)]

    def _introduce(self) -> None:
        """Show drafters what was read of prompts since: before the next pass, so that no first
        token waits for it, and a chunk at a time, so that a long prompt holds nobody up. They
        bound themselves how many of its hidden states are kept.
        """
        if not self._unshown:
            return
        began = time.perf_counter()
        new_sequences = defaultdict[str, list[NewSequence]](list)
        for text in self._unshown:
            states = text.hidden_states()
            for index, answer in enumerate(text.answers):
                if answer.drafter is None:
                    continue
                answer.introduced = text.finished
                known, length = text.known if index == 0 else 0, len(answer.row.tokens) if text.finished else text.done
                if length > known:
                    count = min(length - known, length - 1)
                    part = {boundary: whole[:count] for boundary, whole in states.items()}
                    new = NewSequence(row=answer.row, known=known, length=length, states=part)
                    new_sequences[answer.drafter].append(new)
            text.shown()
        self._unshown.clear()
        for key, found in new_sequences.items():
            self.drafting.introduce(key, found)
        self._introducing_s = time.perf_counter() - began

    def _closed(self, chunks: Sequence[StreamChunk]) -> list[StreamChunk]:
        """Return the chunks, each finished request's last one carrying its whole output."""
        last = {chunk.request_id: index for index, chunk in enumerate(chunks)}
        closed = []
        for index, chunk in enumerate(chunks):
            request = self._requests[chunk.request_id]
            ends = request.finished and last[chunk.request_id] == index
            closed.append(request.closing(chunk) if ends else chunk)
        for request_id in last:
            if self._requests[request_id].finished:
                self._requests.pop(request_id).release()
        return closed


# --- the prefix cache -------------------------------------------------------------------------------------------------

BLOCK = 16
"""Tokens of a block, vLLM's size. Prompts share prefixes in whole blocks: otherwise the time of a
prompt would tell, token by token, how far a guess at another one is right.
"""
_FEW = FREE // 8  # Rows that a recorded pass over a few tokens of each runs without being asked
CachedText = tuple[Sequence[int], str | None]  # The content of a row's slots, and its isolation domain


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """A row of the cache for a sequence."""

    row: int
    shared: int  # Tokens that the row holds already
    drafter: str | None  # Key of the drafter that has not forgotten the row
    known: int = 0
    """Number of these tokens that the drafter may keep: one more than are shared, for the hidden
    state of the last shared token is gone, and the token behind it is the next that is run.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class _FreeRow:
    tokens: Sequence[int] = ()
    salt: str | None = None
    drafter: str | None = None
    writes: int = 0
    """Count `Target.writes` when the row became free: a pass that has written to it since, to
    measure, made its content worthless.
    """
    used: int = 0  # Rises with every row that becomes free


class PrefixCache:
    """The free rows of a target, and what still stands in their slots: a prompt that begins with
    that is read only from there on.
    """

    def __init__(self, target: Target, *, enabled: bool) -> None:
        self._target, self.enabled = target, enabled
        self._free = {row: _FreeRow() for row in range(target.rows)}
        self._clock = 0

    def __len__(self) -> int:
        return len(self._free)

    @property
    def held(self) -> int:
        """Tokens kept in free rows."""
        return sum(len(kept.tokens) for kept in self._free.values())

    def release(self, row: int, held: CachedText, drafter: str | None) -> None:
        """Free a row. Its slots keep their content, and so does the state of `drafter`, if one is
        named.
        """
        self._clock += 1
        self._target.truncate([row], [0])
        self._free[row] = _FreeRow(
            tokens=list(held[0]), salt=held[1], drafter=drafter, writes=self._target.writes[row], used=self._clock
        )

    def disown(self, drafter: str) -> list[int]:
        """Return the free rows of which a drafter keeps a state, and let the rows keep their tokens alone."""
        rows = [row for row, kept in self._free.items() if kept.drafter == drafter]
        self._free |= {row: replace(self._free[row], drafter=None) for row in rows}
        return rows

    def drop(self, most: int) -> list[tuple[int, str]]:
        """Keep at most so many tokens, those used last. Returns the rows to be forgotten, with
        their drafters' keys.
        """
        forgotten = []
        for row, kept in sorted(self._free.items(), key=lambda entry: entry[1].used):
            if self.held <= most:
                break
            self._free[row] = _FreeRow(used=kept.used)
            if kept.drafter is not None:
                forgotten.append((row, kept.drafter))
        return forgotten

    def acquire(
        self,
        wanted: Sequence[int],
        running: Mapping[int, CachedText],
        *,
        salt: str | None = None,
        drafter: str | None = None,
        needs_drafter: bool = False,
    ) -> Allocation:
        """Take a row: the one that holds most of the wanted text or, if a running row holds more, a
        copy of that. Otherwise it is the row that keeps the busy ones side by side (the cache reads
        neighbours without a copy), and of several such rows the one used least recently.

        Args:
            wanted: tokens, of which at least one is left to be read.
            running: what the busy rows hold.
            salt: isolation domain: what rows of another hold is as good as unknown.
            drafter: key of the one that will work for the row.
            needs_drafter: it reads hidden states: without its own state of the prefix, the target's is of no use.
        """
        shared = dict[int, int]()
        for row, kept in self._free.items():
            lost = kept.writes != self._target.writes[row] or (needs_drafter and kept.drafter != drafter)
            shared[row] = 0 if lost or kept.salt != salt else self._reusable(row, kept.tokens, wanted)
        best = max(shared, key=lambda row: shared[row])
        copied = {
            row: self._reusable(row, tokens, wanted)
            for row, (tokens, domain) in running.items()
            if self.enabled and domain == salt and not needs_drafter
        }
        source = max(copied, key=lambda row: copied[row], default=-1)
        lent = copied.get(source, 0)
        row = best
        if shared[best] < max(1, lent):
            row = min(self._free, key=lambda row: (*self._row_span((*running, row)), self._free[row].used, row))
        length = shared[best] if row == best and shared[best] >= lent else 0
        kept = self._free.pop(row)
        self._target.restore(row, length)  # its slots still hold them: see `_FreeRow.writes`
        self._target.clear(row)
        if lent > length:
            self._target.copy_row(source, row, lent)
            return Allocation(row=row, shared=lent, drafter=kept.drafter)
        known = length + 1 if length and kept.drafter == drafter else 0
        return Allocation(row=row, shared=length, drafter=kept.drafter, known=known)

    def _reusable(self, row: int, held: Sequence[int], wanted: Sequence[int]) -> int:
        """Return how many tokens a sequence can take over from a row that holds, or held, these."""
        return self._target.reusable(row, _common(held, wanted))

    def _row_span(self, rows: Sequence[int]) -> tuple[int, int]:
        """Return how far apart busy rows lie; and, where passes are recorded, how many rows these
        run, which is all up to the last, in powers of two: up to `_FEW` cost no more than one.
        """
        return max(rows) - min(rows), max(_FEW, bucket(max(rows) + 1)) if self._target.records else 0


def _common(held: Sequence[int], wanted: Sequence[int]) -> int:
    """Return the length of the common beginning in whole blocks, in tokens. Its last token is not
    included: its state is needed anew.
    """
    pairs = enumerate(zip(held, wanted, strict=False))
    length = next((index for index, (left, right) in pairs if left != right), min(len(held), len(wanted)))
    return max(0, length - 1) // BLOCK * BLOCK
