"""The engine: rows that advance unevenly, finish, and are replaced by waiting requests.

Knows rows and requests. Does not know how a prompt became tokens, nor how a step works inside.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from forerun.engine.answer import Answer, Request
from forerun.engine.drafting import Drafting
from forerun.sampling import logprobs_of
from forerun.step import first_tokens, step
from forerun.target import Scored, Target
from forerun.types import Signal, StreamChunk, TokenLogprob


class Engine:
    """Continuous batching over a target's cache rows. Not thread-safe: one caller steps it.

    Args:
        target: its `rows` bound how many answers run at once.
        drafting: the drafters of this engine.
        check: verify the step's invariants (debug mode).
    """

    def __init__(self, target: Target, drafting: Drafting, *, check: bool = False) -> None:
        self.target, self.drafting, self._check = target, drafting, check
        self._waiting: deque[Answer] = deque()
        self._running: list[Answer] = []
        self._free = list(range(target.rows))
        self._requests: dict[str, Request] = {}
        self._unread: list[tuple[list[Answer], Mapping[Signal, Tensor]]] = []

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
        """Queue all answers of a request."""
        request.queued_at = time.perf_counter()
        self._waiting.extend(request.answers)

    def abort(self, request_id: str) -> None:
        """End a request's answers and free their rows; unknown ids are ignored, they may just have finished."""
        for answer in [*self._waiting, *self._running]:
            if answer.request.id == request_id:
                answer.abort()
        self._waiting = deque(answer for answer in self._waiting if answer.finish_reason is None)
        self._retire()

    @torch.inference_mode()
    def step(self) -> list[StreamChunk]:
        """Admit what fits and emit its first tokens; else advance every running answer. One chunk an answer."""
        admitted = self._admit()
        if admitted:
            chunks = self._prefill(admitted)
        elif self._running:
            chunks = self._decode()
        else:
            return []
        self._retire()
        return self._closed(chunks)

    def _admit(self) -> list[Answer]:
        admitted = []
        while self._waiting and self._free:
            answer = self._waiting.popleft()
            answer.row.row = heapq.heappop(self._free)
            admitted.append(answer)
        self._running.extend(admitted)
        self._running.sort(key=lambda answer: answer.row.row)
        self._requests = {answer.request.id: answer.request for answer in self._running}
        return admitted

    def _prefill(self, answers: Sequence[Answer]) -> list[StreamChunk]:
        wants_all = any(answer.request.params.prompt_logprobs is not None for answer in answers)
        scored = self._run_prompts(answers, wants_all)
        last = scored.logits
        if wants_all:
            ends = torch.tensor([len(answer.row.tokens) - 1 for answer in answers], device=last.device)
            last = scored.logits[torch.arange(len(answers), device=last.device), ends].unsqueeze(1)
            self._record_prompt_logprobs(answers, scored)
        emitted = first_tokens([answer.row for answer in answers], last)
        self._unread.append((list(answers), scored.signals))
        return [answer.absorb(tokens) for answer, tokens in zip(answers, emitted, strict=True)]

    def _run_prompts(self, answers: Sequence[Answer], all_logits: bool) -> Scored:
        """Prefill; several answers to one prompt run it once, the others copy its row."""
        leaders: dict[str, int] = {}
        for answer in answers:
            leaders.setdefault(answer.request.id, len(leaders))
        places = [leaders[answer.request.id] for answer in answers]
        first = [answers[places.index(place)] for place in range(len(leaders))]
        scored = self.target.prefill(
            [answer.row.row for answer in first],
            [answer.row.tokens for answer in first],
            signals=frozenset[Signal]().union(*(self.drafting.requires(answer.drafter) for answer in answers)),
            all_logits=all_logits,
        )
        if len(first) == len(answers):
            return scored
        for answer, place in zip(answers, places, strict=True):
            if answer is not first[place]:
                self.target.copy_row(first[place].row.row, answer.row.row, len(answer.row.tokens))
        signals = {signal: states[places] for signal, states in scored.signals.items()}
        return Scored(logits=scored.logits[places], signals=signals)

    def _decode(self) -> list[StreamChunk]:
        self._introduce()
        answers, began = self._running, time.perf_counter()
        rows = [answer.row for answer in answers]
        configs = [answer.request.speculative for answer in answers]
        depths = [config.num_speculative_tokens if config is not None else None for config in configs]
        groups = self.drafting.groups(rows, [answer.drafter for answer in answers], depths)
        emitted = step(self.target, rows, groups, check=self._check, admit=self.drafting.admit, since=began)
        self.drafting.learn(emitted)
        return [answer.absorb(tokens) for answer, tokens in zip(answers, emitted, strict=True)]

    def _introduce(self) -> None:
        """Show drafters the prompts of rows that came in since; after their first tokens, so that these never wait."""
        for answers, signals in self._unread:
            for key in {answer.drafter for answer in answers} - {None}:
                places = [i for i, a in enumerate(answers) if a.drafter == key and a.finish_reason is None]
                wanted = {signal: signals[signal][places] for signal in self.drafting.requires(key)}
                if key is not None and places:
                    self.drafting.introduce(key, [answers[place].row for place in places], wanted)
        self._unread.clear()

    def _retire(self) -> None:
        """Free the rows of answers that ended."""
        done = [answer for answer in self._running if answer.finish_reason is not None]
        if not done:
            return
        rows = [answer.row.row for answer in done]
        self.target.truncate(rows, [0] * len(rows))
        self.drafting.forget(rows, [0] * len(rows))
        for answer in done:
            heapq.heappush(self._free, answer.row.row)
            if answer.drafter is not None:
                self.drafting.watch(answer.drafter, answer.stats)
        self._running = [answer for answer in self._running if answer.finish_reason is None]

    def _closed(self, chunks: Sequence[StreamChunk]) -> list[StreamChunk]:
        """The chunks, each finished request's last one carrying its whole output."""
        last = {chunk.request_id: place for place, chunk in enumerate(chunks)}
        closed = []
        for place, chunk in enumerate(chunks):
            request = self._requests[chunk.request_id]
            ends = request.finished and last[chunk.request_id] == place
            closed.append(replace(chunk, output=request.output()) if ends else chunk)
        return closed

    def _record_prompt_logprobs(self, answers: Sequence[Answer], scored: Scored) -> None:
        for index, answer in enumerate(answers):
            top = answer.request.params.prompt_logprobs
            if top is not None and answer.index == 0:
                tokens = answer.request.prompt_tokens
                answer.request.prompt_logprobs = _prompt_logprobs(scored.logits[index], tokens, top)


def _prompt_logprobs(logits: Tensor, tokens: Sequence[int], top: int) -> list[Mapping[int, TokenLogprob] | None]:
    """vLLM's shape: None for the first token, then per token a dict that holds it and the likeliest."""
    result: list[Mapping[int, TokenLogprob] | None] = [None]
    for place, token in enumerate(tokens[1:]):
        chosen, best = logprobs_of(logits[place], token, top)
        result.append({**best, token: chosen})
    return result
