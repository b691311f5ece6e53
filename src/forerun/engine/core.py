"""The engine: continuous batching of requests over the rows of the target's KV cache.

`scheduling` decides which request gets a row or is preempted; `decode.step` is one step of all running rows.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from forerun.core.tree import TokenTree
from forerun.decode.step import first_tokens, step
from forerun.engine.completion import Completion, Request
from forerun.engine.drafting import DrafterPool, NewSequence
from forerun.engine.grammar import drop_forbidden
from forerun.engine.prefix_cache import Allocation, CachedText, PrefixCache
from forerun.engine.scheduling import (
    PassTimes,
    Prefill,
    PrefillQueue,
    Scheduling,
    completion_to_preempt,
    next_in_line,
    run_prefills,
)
from forerun.errors import ArgumentError
from forerun.model import Target
from forerun.model.target import PREFILL_CHUNK
from forerun.types import StreamChunk

log = logging.getLogger(__name__)


class Engine:
    """Continuous batching over a target's cache rows; at most one completion runs in each row. Not thread-safe: one
    caller steps it. `check` verifies the step's invariants (debug mode).
    """

    def __init__(self, target: Target, drafting: DrafterPool, scheduling: Scheduling, *, check: bool = False) -> None:
        self.target, self.drafting, self.scheduling, self._check = target, drafting, scheduling, check
        self.preemptions = 0  # Times that a running completion was preempted
        self.prefix_queries = 0  # Prompt tokens that were looked up
        self.prefix_hits = 0  # Prompt tokens that were found in the cache
        self._order = itertools.count()
        self._requests: dict[str, Request] = {}
        self._waiting: list[Completion] = []
        self._running: list[Completion] = []
        self._prefilling: list[Prefill] = []
        self._unread: list[Prefill] = []  # Prompts with prefilled tokens that their drafters have not read yet
        self._prefixes = PrefixCache(target, enabled=self.scheduling.enable_prefix_caching)
        self._prefilled_last = False
        self._queue = PrefillQueue(scheduling, padded=target.pads_prompts)
        self._times, self._drafters_read_s = PassTimes(), 0.0
        self._admit_before: int | None = None  # While admission is paused: order of the first completion that must wait
        self._abort_before = 0  # Completions with a smaller order are aborted at the next step

    @property
    def busy(self) -> bool:
        """True if there is work for a step."""
        return bool(self._running or self._admissible())

    @property
    def running(self) -> int:
        """Number of completions that hold a row."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Number of completions that wait for a row."""
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Queue all completions of a request. Raises ArgumentError if the cache could not hold one of them even
        alone.
        """
        request.queued_at = request.queued_at or time.perf_counter()
        most = self.scheduling.kv_cache_tokens
        needed = max(len(completion.row.tokens) + completion.row.tokens_left for completion in request.completions)
        if most is not None and needed > most:
            raise ArgumentError(
                f"prompt and output need up to {needed} tokens, the cache may hold {most}; lower max_tokens, shorten "
                "the prompt, or raise kv_cache_tokens"
            )
        request.arrived = self._queue.clock
        for completion in request.completions:
            completion.order = next(self._order)
        self._requests[request.id] = request
        self._waiting.extend(request.completions)

    def abort(self, request_id: str) -> None:
        """Abort a request and free its rows. Unknown ids are ignored, because the request may just have finished."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        for completion in request.completions:
            completion.abort()
        self._retire()
        request.release()

    def pause_admission(self, *, abort: bool) -> None:
        """Let new requests wait until `resume_admission`. With `abort`, present ones are aborted at the next step;
        their outputs hold the tokens that they have."""
        now = next(self._order)
        if self._admit_before is None:
            self._admit_before = now
        if abort:
            self._abort_before = now

    def resume_admission(self) -> None:
        """Admit waiting requests again."""
        self._admit_before = None

    def write_weights(self, weights: Any, folder: Path) -> None:
        """Replace the target's weights by those that `Target.open_weights` has read from a folder, while no request
        runs. Cached prefixes are dropped; drafters keep what they have learned from texts."""
        began = time.perf_counter()
        self.target.write_weights(weights, folder)
        self.forget()
        self.drafting.reread()
        log.info("weights taken over from %s in %.2f s", folder, time.perf_counter() - began)

    def load_drafter(self, key: str, model: str) -> None:
        """Draft for new requests with the model of another directory. Requests that wait or run keep their drafter,
        which is freed after the last of them. Raises ForerunError if the new model cannot be loaded; nothing changes
        then."""
        former = self.drafting.swap(key, model)
        for row in self._prefixes.disown(key):
            self.drafting.forget(former, [row], [0])
        for completion in [*self._waiting, *self._running]:
            if completion.drafter == key:
                completion.drafter = former
        self._discard_replaced()

    def _discard_replaced(self) -> None:
        for key in self.drafting.replaced - {completion.drafter for completion in [*self._waiting, *self._running]}:
            self.drafting.discard(key)

    def forget(self) -> None:
        """Drop all cached prefixes while no request runs. Rows are then allocated in the order of a new engine."""
        for row, drafter in self._prefixes.drop(0):
            self.drafting.forget(drafter, [row], [0])
        self._prefixes = PrefixCache(self.target, enabled=self.scheduling.enable_prefix_caching)
        self._prefilled_last = False

    def grow(self, rows: int, slots: int) -> None:
        """Give the cache this many rows and slots while no request runs; drafters keep what they have learned."""
        self.forget()
        self.target.grow(rows, slots)
        self.drafting.grow(rows, slots)
        self._prefixes = PrefixCache(self.target, enabled=self.scheduling.enable_prefix_caching)

    @torch.inference_mode()
    def step(self) -> list[StreamChunk]:
        """Run one pass, either a prefill of prompt chunks or a decoding step of all prefilled rows, and return the new
        chunks. If there is work of both kinds, they alternate, so a long prompt delays the others by one chunk at a
        time. Requests that have timed out end first.
        """
        chunks = self._expire()
        self._preempt_youngest()
        self._admit()
        prefilling = {completion for prefill in self._prefilling for completion in prefill.completions}
        decoding = [completion for completion in self._running if completion not in prefilling]
        prefill_now = bool(prefilling) and not (decoding and self._prefilled_last)
        self._prefilled_last = prefill_now
        if prefill_now:
            chunks += self._prefill(beside=bool(decoding))
        elif decoding:
            chunks += self._decode(decoding)
        self._retire()
        return self._closed(chunks)

    # --- rows -------------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        while waiting := self._admissible():
            completion = next_in_line(waiting, self._running)
            if not self._make_room(completion):
                break
            self._waiting.remove(completion)
            self._allocate(completion)
            self._running.append(completion)
        self._running.sort(key=lambda completion: completion.row.cache_row)
        self._drop_prefixes()

    def _admissible(self) -> list[Completion]:
        """Return the waiting completions that may get a row."""
        admit_before = self._admit_before
        return [completion for completion in self._waiting if admit_before is None or completion.order < admit_before]

    def _make_room(self, completion: Completion) -> bool:
        """Return whether there are a row and memory for a completion, after preempting completions of clients or users
        with more than their share. None is preempted if that would not suffice.
        """
        staying, leaving = list(self._running), list[Completion]()
        while not (leaving or len(self._prefixes)) or not self._fits([*staying, completion]):
            other = completion_to_preempt(completion, staying, self.target.lengths)
            if other is None:
                return False
            staying.remove(other)
            leaving.append(other)
        for other in leaving:
            self._preempt(other)
        return True

    def _allocate(self, completion: Completion) -> None:
        """Give the completion a row, and queue the prefill of the tokens that are not cached there; completions of one
        request share a prefill.
        """
        request = completion.request
        request.scheduled_at = request.scheduled_at or time.perf_counter()
        same = [prefill for prefill in self._prefilling if prefill.begins and prefill.completions[0].request is request]
        if same and not completion.tokens:
            same[0].completions.append(completion)
            completion.row.cache_row = self._take((), completion).row
            return
        requires = self.drafting.requires(completion.drafter)
        lacking = completion.row.tokens[:-1] if completion.tokens else list(completion.row.tokens)
        prefill = Prefill(completions=[completion], tokens=lacking, requires=requires)
        # Prompt log-probabilities, traces, and hidden states for several completions need the whole prompt prefilled.
        whole = request.params.prompt_logprobs is not None or request.trace or (requires and request.params.n > 1)
        allocation = self._take(() if whole else prefill.tokens, completion, needs_drafter=bool(requires))
        completion.row.cache_row, prefill.done, prefill.known = allocation.row, allocation.shared, allocation.known
        self._prefilling.append(prefill)
        if self.scheduling.enable_prefix_caching and not completion.preemptions:
            self.prefix_queries += len(prefill.tokens)
            self.prefix_hits += allocation.shared
            request.cached_tokens = max(request.cached_tokens, allocation.shared)

    def _take(self, wanted: Sequence[int], completion: Completion, *, needs_drafter: bool = False) -> Allocation:
        busy = {other.row.cache_row: self._held(other) for other in self._running}
        salt, drafter = completion.row.cache_salt, completion.drafter
        allocation = self._prefixes.acquire(wanted, busy, salt=salt, drafter=drafter, needs_drafter=needs_drafter)
        if allocation.drafter is not None:
            self.drafting.forget(allocation.drafter, [allocation.row], [allocation.known])
        return allocation

    def _held(self, completion: Completion) -> CachedText:
        row = completion.row
        return row.tokens[: self.target.lengths[row.cache_row]], row.cache_salt

    def _release(self, completion: Completion, *, keep: bool) -> None:
        """Free the completion's row; with `keep`, its content stays as a cached prefix."""
        row, drafter = completion.row, completion.drafter
        keep = keep and self._prefixes.enabled
        held: CachedText = self._held(completion) if keep else ((), None)
        remembers = keep and completion.drafter_has_read and not row.drafter_errors and self.drafting.remembers(drafter)
        if drafter is not None and completion.drafter_has_read:
            self.drafting.finish(drafter, row)
        if drafter is not None and not remembers:
            self.drafting.forget(drafter, [row.cache_row], [0])
        self._prefixes.release(row.cache_row, held, drafter if remembers else None)
        self._running.remove(completion)
        for prefill in [*self._prefilling, *self._unread]:
            if completion in prefill.completions:
                prefill.completions.remove(completion)
        self._prefilling = [prefill for prefill in self._prefilling if prefill.completions]
        self._unread = [prefill for prefill in self._unread if prefill.completions]
        completion.drafter_has_read, row.cache_row = False, -1

    def _retire(self) -> None:
        self._waiting = [completion for completion in self._waiting if completion.finish_reason is None]
        for completion in [completion for completion in self._running if completion.finish_reason is not None]:
            self._release(completion, keep=not completion.failed)
            if completion.drafter is not None:
                self.drafting.watch(completion.drafter, completion.stats)
        if self.drafting.replaced:
            self._discard_replaced()

    def _expire(self) -> list[StreamChunk]:
        now, chunks = time.perf_counter(), list[StreamChunk]()
        for completion in [*self._waiting, *self._running]:
            if completion.order < self._abort_before or completion.request.timed_out(now):
                chunks.append(completion.expire())
        if chunks:
            self._retire()
        return chunks

    # --- memory -----------------------------------------------------------------------------------------------------

    def _preempt_youngest(self) -> None:
        """Preempt the youngest running completions until the tokens of all rows after the next pass fit the cache."""
        while not self._fits(self._running):
            self._preempt(max(self._running, key=lambda completion: completion.order))
        self._drop_prefixes()

    def _preempt(self, completion: Completion) -> None:
        """Take a completion's row. It goes back to the waiting ones, and continues once its tokens are prefilled
        again.
        """
        self._release(completion, keep=False)
        completion.preemptions += 1
        self.preemptions += 1
        self._waiting.append(completion)

    def _fits(self, completions: Sequence[Completion]) -> bool:
        most = self.scheduling.kv_cache_tokens
        return most is None or sum(map(self._claim, completions)) <= most

    def _claim(self, completion: Completion) -> int:
        """Return the most tokens that a completion's row may hold after the next step."""
        row, config = completion.row, completion.request.speculative
        asked = config.num_speculative_tokens if config is not None else None
        return len(row.tokens) + min(row.tokens_left, 1 + self.drafting.depth(completion.drafter, asked))

    def _drop_prefixes(self) -> None:
        most = self.scheduling.kv_cache_tokens
        if most is None:
            return
        for row, drafter in self._prefixes.drop(most - sum(map(self._claim, self._running))):
            self.drafting.forget(drafter, [row], [0])

    # --- passes -----------------------------------------------------------------------------------------------------

    def _prefill(self, *, beside: bool) -> list[StreamChunk]:
        """Prefill the next chunks of prompts, and emit the first token of each prompt that is complete. `beside` says
        that running completions wait meanwhile.
        """
        self._let_drafters_read()
        began = time.perf_counter()
        pieces = self._queue.next_pass(self._prefilling, self._budget(beside=beside))
        texts = [prefill for prefill, _ in pieces]
        logits = run_prefills(self.target, pieces)
        # Drafters read this chunk before the next pass; the time for the chunk before stands for that.
        took = time.perf_counter() - began + self._drafters_read_s
        self._times.add_pass(sum(len(tokens) for _, tokens in pieces), took)
        self._prefilling = [prefill for prefill in self._prefilling if not prefill.finished]
        self._unread += [prefill for prefill in texts if prefill.finished or not prefill.shared]
        chunks, starting = list[StreamChunk](), list[tuple[int, Completion]]()
        for index, prefill in enumerate(texts):
            for completion in prefill.completions if prefill.finished and prefill.begins else ():
                if completion.row.tokens_left:
                    starting.append((index, completion))
                else:
                    chunks.append(completion.end_empty())
        if starting:
            rows = [completion.row for _, completion in starting]
            emitted = first_tokens(rows, logits[[index for index, _ in starting]], isolate=True)
            chunks += [completion.append(tokens) for (_, completion), tokens in zip(starting, emitted, strict=True)]
        return chunks

    def _budget(self, *, beside: bool) -> int:
        """Return the number of prompt tokens for the next pass."""
        if self.scheduling.max_num_batched_tokens is not None:
            return self.scheduling.max_num_batched_tokens
        # On an accelerator hundreds of tokens take about as long as a few, so shorter passes would gain nothing.
        return self._times.tokens(beside=beside) if self.target.device.type == "cpu" else PREFILL_CHUNK

    def _decode(self, completions: Sequence[Completion]) -> list[StreamChunk]:
        self._let_drafters_read()
        began = time.perf_counter()
        rows = [completion.row for completion in completions]
        configs = [completion.request.speculative for completion in completions]
        depths = [config.num_speculative_tokens if config is not None else None for config in configs]
        keys = [completion.drafter for completion in completions]
        groups = self.drafting.groups(rows, keys, depths, others_wait=bool(self._prefilling))

        def admit(trees: list[TokenTree]) -> list[TokenTree]:
            return drop_forbidden(self.drafting.admit(trees), rows)

        emitted = step(self.target, rows, groups, check=self._check, admit=admit, since=began, isolate=True)
        self.drafting.learn(emitted)
        self.drafting.count_failures(rows)
        self._times.add_step(time.perf_counter() - began)
        return [completion.append(tokens) for completion, tokens in zip(completions, emitted, strict=True)]

    def _let_drafters_read(self) -> None:
        """Let drafters read the prompt chunks that were prefilled since the last call. This happens before the next
        pass, so that no first token waits for it, and chunk by chunk, so that a long prompt does not delay the others.
        Drafters themselves limit how many hidden states they keep.
        """
        if not self._unread:
            return
        began = time.perf_counter()
        new_sequences = defaultdict[str, list[NewSequence]](list)
        for prefill in self._unread:
            states = prefill.hidden_states()
            for index, completion in enumerate(prefill.completions):
                if completion.drafter is None:
                    continue
                completion.drafter_has_read = prefill.finished
                known = prefill.known if index == 0 else 0
                length = len(completion.row.tokens) if prefill.finished else prefill.done
                if length > known:
                    count = min(length - known, length - 1)
                    part = {boundary: whole[:count] for boundary, whole in states.items()}
                    new = NewSequence(row=completion.row, known=known, length=length, states=part)
                    new_sequences[completion.drafter].append(new)
            prefill.mark_read()
        self._unread.clear()
        for key, sequences in new_sequences.items():
            self.drafting.read(key, sequences)
        self._drafters_read_s = time.perf_counter() - began

    def _closed(self, chunks: Sequence[StreamChunk]) -> list[StreamChunk]:
        """Return the chunks; the last chunk of each finished request carries the request's whole output."""
        last = {chunk.request_id: index for index, chunk in enumerate(chunks)}
        closed = []
        for index, chunk in enumerate(chunks):
            request = self._requests[chunk.request_id]
            ends = request.finished and last[chunk.request_id] == index
            closed.append(request.last_chunk(chunk) if ends else chunk)
        for request_id in last:
            if self._requests[request_id].finished:
                self._requests.pop(request_id).release()
        return closed
