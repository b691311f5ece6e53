"""Runs a drafter on real prompts at a depth of our choosing, and writes down what was kept and what it cost.

Real engine steps, one row at a time, without scheduler and controller: what is measured does not depend on what the
controller would have decided. Knows no cost model and no disk.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

from forerun.drafters.base import Drafter
from forerun.engine.config import MAX_SPECULATIVE_TOKENS
from forerun.engine.cost.passes import free_rows
from forerun.sampling import Sampler
from forerun.step import Group, Row, context_for, first_tokens, step
from forerun.target import Target
from forerun.types import SamplingParams, Source, SpeculationStats


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialStep:
    """One step of a trial."""

    drafted: int
    """Nodes, probes not counted."""
    depth: int
    accepted: int
    context: int
    """Committed tokens before the step."""
    draft_ms: float
    verify_ms: float
    commit_ms: float
    first: bool
    """Whether it was the prompt's first one, in which a drafter may catch up with the whole prompt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What a drafter did on some prompts."""

    steps: tuple[TrialStep, ...]

    @property
    def stats(self) -> SpeculationStats:
        """The counts, as an answer's."""
        stats = SpeculationStats()
        for done in self.steps:
            stats.record(drafted=done.drafted, depth=done.depth, accepted=done.accepted)
        return stats

    @property
    def survival(self) -> list[float]:
        """Share of the drafting steps that kept a node at depth d + 1, also of those whose draft was shorter."""
        stats = self.stats
        return [kept / stats.num_spec_steps for kept in stats.accepted_per_depth]

    @property
    def coverage(self) -> float:
        """Share of the steps in which something was drafted."""
        return sum(done.drafted > 0 for done in self.steps) / len(self.steps) if self.steps else 0.0

    @property
    def tokens_per_pass(self) -> float:
        """Over all steps, those without a draft included."""
        return 1 + sum(done.accepted for done in self.steps) / len(self.steps) if self.steps else 1.0

    @property
    def nodes(self) -> float:
        """Mean drafted nodes of the drafting steps."""
        return _mean([done.drafted for done in self.steps if done.drafted])

    @property
    def depth(self) -> float:
        """Mean depth of the drafting steps."""
        return _mean([done.depth for done in self.steps if done.drafted])

    @property
    def context(self) -> int:
        """Mean committed tokens before a step."""
        return round(_mean([done.context for done in self.steps]))


def try_drafter(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    depths: Sequence[int],
    name: str = "plain",
    stop_ids: frozenset[int] = frozenset(),
    rule: str | None = None,
    seconds: float | None = None,
) -> Trial:
    """Answer the prompts one after the other on a free row, which is free again afterwards.

    The drafter learns from what it sees, as in use; it must know nothing of the row.

    Args:
        drafter: None decodes plainly.
        params: resolved: no None where the checkpoint has a say.
        depths: most levels of a draft; the steps take turns.
        stop_ids: tokens that end an answer.
        seconds: stop after this long.

    Raises:
        ArgumentError: no row is free, or a prompt does not fit.
    """
    [row_id] = free_rows(target, 1)
    deadline = time.perf_counter() + (seconds or float("inf"))
    done: list[TrialStep] = []
    turns = itertools.cycle(depths)
    for index, prompt in enumerate(prompts):
        row = Row(
            row=row_id,
            tokens=list(prompt),
            prompt_length=len(prompt),
            sampler=Sampler(params, prompt),
            seed=(params.seed or 0) + index,
            stop_ids=stop_ids,
            room=params.max_tokens or 1,
            rule=rule,
        )
        try:
            _begin(target, drafter, row)
            group = _Turns(drafter=drafter, name=name, depths=turns)
            done += _answer(target, row, group, len(prompt) + (params.max_tokens or 1), deadline)
        finally:
            target.truncate([row_id], [0])
            if drafter is not None:
                drafter.truncate([row_id], [0])
    return Trial(steps=tuple(done))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Turns:
    drafter: Drafter | None
    name: str
    depths: itertools.cycle[int]

    def next(self) -> list[Group]:
        """Who drafts in the next step."""
        if self.drafter is None:
            return []
        depths = [next(self.depths)]
        return [Group(name=self.name, drafter=self.drafter, members=[0], depths=depths, nodes=MAX_SPECULATIVE_TOKENS)]


def _begin(target: Target, drafter: Drafter | None, row: Row) -> None:
    """Prefill, first token, and the drafter's first look."""
    signals = drafter.requires if drafter is not None else frozenset()
    scored = target.prefill([row.row], [row.tokens], signals=signals)
    first_tokens([row], scored.logits)
    row.room -= 1
    if drafter is not None:
        drafter.extend(context_for([row], [0], [len(row.tokens)], scored.signals))


def _answer(target: Target, row: Row, turns: _Turns, end: int, deadline: float) -> list[TrialStep]:
    done: list[TrialStep] = []
    while len(row.tokens) < end and row.tokens[-1] not in row.stop_ids and time.perf_counter() < deadline:
        context = len(row.tokens) - 1
        [emitted] = step(target, [row], turns.next())
        row.room -= len(emitted.tokens)
        done.append(
            TrialStep(
                drafted=emitted.drafted,
                depth=emitted.depth if emitted.drafted else 0,
                accepted=sum(source is Source.DRAFT for source in emitted.sources),
                context=context,
                draft_ms=emitted.trace.draft_ms,
                verify_ms=emitted.trace.verify_ms,
                commit_ms=emitted.trace.commit_ms,
                first=not done,
            )
        )
    return done


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
