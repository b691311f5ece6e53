"""This module measures acceptance and costs of drafters on the user's own prompts and machine, in
real steps.

Those are real engine steps at a chosen depth, one row at a time, without scheduler and policy: what
is measured does not depend on them.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from forerun.control.config import MAX_SPECULATIVE_TOKENS, SpeculativeConfig
from forerun.control.costs import CostModel, DraftCost
from forerun.control.measuring import free_rows, save
from forerun.core.sampling import Sampler
from forerun.decode.drafter import Drafter, DrafterSetup
from forerun.decode.row import Row
from forerun.decode.step import Group, context_for, first_tokens, step
from forerun.drafters import build, default_length
from forerun.engine.llm import LLM
from forerun.engine.prompts import Prompt, PromptReader
from forerun.errors import ArgumentError, ForerunError, first_line
from forerun.model import Target
from forerun.plan.planner import PlanLoad
from forerun.plan.prompts import UserPrompt
from forerun.types import SamplingParams, Source, SpeculationStats, StepTrace

FEWEST = 8
"""Acceptance by rank is only reported for depths that were seen this many times."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialStep:
    """Records one step of a trial."""

    drafted: int  # Nodes, probes not counted
    depth: int
    accepted: int
    context: int  # Committed tokens before the step
    ms: float  # Time of drafting and committing, without the target's pass and its verification
    first: bool  # True for the prompt's first step, in which a drafter may catch up with the whole prompt
    siblings: tuple[tuple[int, int | None], ...] = ()
    """For the root and each accepted node with children: the number of children, and the rank of
    the accepted one or None.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """The record of what a drafter did on some prompts."""

    steps: tuple[TrialStep, ...]

    @property
    def stats(self) -> SpeculationStats:
        """Return the counts in the form of a completion's."""
        stats = SpeculationStats()
        for done in self.steps:
            stats.record(tokens=done.accepted + 1, drafted=done.drafted, depth=done.depth, accepted=done.accepted)
        return stats

    @property
    def survival(self) -> list[float]:
        """Return the share of the drafting steps that accepted a node at each depth, steps with
        shorter drafts included.
        """
        stats = self.stats
        return [kept / stats.num_spec_steps for kept in stats.accepted_per_depth]

    @property
    def rank_acceptance(self) -> list[list[float]]:
        """Return acceptance by depth and rank, ``[d][r]``, as in `theory.RankAcceptance`.

        Of the accepted nodes at depth d with the most children that any had there, it says how many
        had the child of rank r accepted; no rank counts for more than the one before. Depths that
        were seen less than `FEWEST` times, and all below them, are left out.
        """
        by_depth = list[list[float]]()
        while True:
            seen = [done.siblings[len(by_depth)] for done in self.steps if len(done.siblings) > len(by_depth)]
            widest = max((count for count, _ in seen), default=0)
            ranks = [rank for count, rank in seen if count == widest]
            if len(ranks) < FEWEST:
                return by_depth
            rates = (ranks.count(rank) / len(ranks) for rank in range(widest))
            by_depth.append(list(itertools.accumulate(rates, min)))

    @property
    def coverage(self) -> float:
        """Return the share of the steps in which something was drafted."""
        return sum(done.drafted > 0 for done in self.steps) / len(self.steps) if self.steps else 0.0

    @property
    def tokens_per_pass(self) -> float:
        """Return the tokens per pass over all steps, those without a draft included.

        It is a forecast for long completions, so the passes over prompts are left out.
        """
        return self.stats.tokens_per_pass

    @property
    def nodes(self) -> float:
        return _mean([done.drafted for done in self.steps if done.drafted])

    @property
    def depth(self) -> float:
        return _mean([done.depth for done in self.steps if done.drafted])

    @property
    def context(self) -> int:
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
    seconds: float = math.inf,
) -> Trial:
    """Complete the prompts one after the other on a free row, which is free again afterwards.

    The drafter learns from what it sees, as in use; it must know nothing of the row. ArgumentError:
    no row is free, or a prompt does not fit.

    Args:
        drafter: None decodes plainly.
        params: resolved: no None where the checkpoint has a say.
        depths: most levels of a draft; the steps take turns.
    """
    [row_id] = free_rows(target, 1)
    deadline = time.perf_counter() + seconds
    done: list[TrialStep] = []
    turns = itertools.cycle(depths)
    most = params.max_tokens or 1
    for index, prompt in enumerate(prompts):
        row = Row(
            cache_row=row_id,
            tokens=list(prompt),
            prompt_length=len(prompt),
            sampler=Sampler(params, prompt),
            seed=(params.seed or 0) + index,
            stop_ids=stop_ids,
            tokens_left=most,
            rule=rule,
            traced=drafter is not None,
        )
        try:
            scored = target.prefill(
                [row_id], [row.tokens], boundaries=drafter.requires if drafter is not None else frozenset()
            )
            first_tokens([row], scored.logits)
            row.tokens_left -= 1
            if drafter is not None:
                drafter.extend(context_for([row], [0], [len(row.tokens)], scored.hidden_states))
            while row.tokens_left > 0 and row.tokens[-1] not in stop_ids and time.perf_counter() < deadline:
                done.append(_step(target, drafter, name, row, next(turns)))
        finally:
            target.truncate([row_id], [0])
            if drafter is not None:
                drafter.truncate([row_id], [0])
    return Trial(steps=tuple(done))


def _step(target: Target, drafter: Drafter | None, name: str, row: Row, depth: int) -> TrialStep:
    groups = []
    context = len(row.tokens) - 1
    if drafter is not None:
        groups = [Group(name=name, drafter=drafter, members=[0], depths=[depth], nodes=MAX_SPECULATIVE_TOKENS)]
    [emitted] = step(target, [row], groups)
    row.tokens_left -= len(emitted.tokens)
    return TrialStep(
        drafted=emitted.drafted,
        depth=emitted.depth if emitted.drafted else 0,
        accepted=sum(source is Source.DRAFT for source in emitted.sources),
        context=context,
        ms=emitted.trace.draft_ms + emitted.trace.commit_ms,
        first=emitted.trace.step == 1,  # 0 is the prompt's own
        siblings=_siblings(emitted.trace),
    )


def _siblings(trace: StepTrace) -> tuple[tuple[int, int | None], ...]:
    """Return `TrialStep.siblings` of a step's trace."""
    siblings, children = list[tuple[int, int | None]](), defaultdict[int, list[int]](list)
    for number, node in enumerate(trace.nodes, start=1):
        if not node.probe:
            children[node.parent].append(number)
    for above, accepted in zip((0, *trace.path), (*trace.path, None), strict=True):
        if below := children[above]:
            siblings.append((len(below), None if accepted is None else below.index(accepted)))
    return tuple(siblings)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def measure_draft(
    target: Target, drafter: Drafter, text: Sequence[int], *, depth: int, steps: int = 32, seconds: float = 8.0
) -> DraftCost:
    """Measure what a draft costs: let a drafter continue `text` (token ids) at `depth` and at depth
    1 in turns, and fit a line.

    The drafter must know nothing of the free rows. ArgumentError: no row is free, or the text does
    not fit beside the completion.

    What it does when it is shown accepted tokens (its share of the commit) counts; the target's
    pass does not, and neither does the first step, in which it may catch up with the whole text.
    """
    if depth < 1 or steps < 4:
        raise ArgumentError(f"a drafter is timed over at least 4 steps of depth 1 or more, got {steps} and {depth}")
    room = min(target.slots, target.max_length) - depth - 2
    if len(text) < 1 or len(text) + 2 > room:
        raise ArgumentError(f"the text to draft from must have between 1 and {room - 2} tokens, got {len(text)}")
    # A step of depth 1 emits at most two tokens, a full one depth + 1: half of the steps are of either kind.
    tokens = min(steps * (depth + 3) // 2 + 2, room - len(text))
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    short = replace(params, max_tokens=min(tokens, 12))  # as few as a median needs
    plain = try_drafter(target, None, [list(text)], short, depths=(0,), seconds=seconds / 4)
    trial = try_drafter(target, drafter, [list(text)], params, depths=(depth, 1), seconds=seconds)
    # Time of a plain step besides the target's pass and its verification.
    besides = [done.ms for done in plain.steps if not done.first]
    return fit(trial, besides_ms=median(besides or [0.0]))


def fit(trial: Trial, *, besides_ms: float) -> DraftCost:
    """Fit a line through the median times by depth; steps that drafted nothing count only where
    there are no others.
    """
    times: dict[int, list[float]] = defaultdict(list)
    for done in trial.steps:
        if not done.first:
            times[done.depth].append(max(0.0, done.ms - besides_ms))
    if len(times) > 1:
        times.pop(0, None)
    points = [(depth, median(milliseconds), len(milliseconds)) for depth, milliseconds in times.items()]
    if not points:
        raise ArgumentError("the text ended before a drafter could be timed; give a longer one")
    weight = sum(count for *_, count in points)
    mean_depth = sum(depth * count for depth, _, count in points) / weight
    mean_ms = sum(ms * count for _, ms, count in points) / weight
    spread = sum(count * (depth - mean_depth) ** 2 for depth, _, count in points)
    slope = sum(count * (depth - mean_depth) * (ms - mean_ms) for depth, ms, count in points)
    level = min(max(0.0, slope / spread), mean_ms / mean_depth) if spread else 0.0
    return DraftCost(fixed_ms=max(0.0, mean_ms - level * mean_depth), level_ms=level)


log = logging.getLogger(__name__)

Tell = Callable[[str], None]
LONGEST = 32  # Depth of a trial where neither user nor drafter says one


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredDrafter:
    """The record of one drafter on the user's prompts, and the cost of its drafts."""

    method: str
    model: str | None  # Directory or hub id of the drafter's model, where it has one
    trial: Trial
    draft: DraftCost

    @property
    def name(self) -> str:
        return self.method if self.model is None else f"{self.method} {self.model}"

    @property
    def deepest(self) -> int:
        """Return the levels of the deepest draft, at least 1: the K that was measured."""
        return max((done.depth for done in self.trial.steps), default=1) or 1

    def load(self, cost: CostModel, *, rows: int) -> PlanLoad:
        """Return the planner's load for a batch of `rows`. At a batch the drafter's cost is assumed
        to grow as the target's plain pass does.
        """
        trial, draft = self.trial, self.draft

        def draft_at(batch: int) -> DraftCost:
            share = cost.pass_ms(1, batch, trial.context) / cost.pass_ms(1, 1, trial.context)
            return DraftCost(fixed_ms=draft.fixed_ms * share, level_ms=draft.level_ms * share)

        return PlanLoad(
            survival=trial.survival or [0.0],
            cost=cost,
            draft=draft_at,
            rows=rows,
            context=trial.context,
            coverage=trial.coverage,
            nodes_per_level=trial.nodes / self.deepest,
            filled=trial.depth / self.deepest,
        )

    def record(self) -> dict[str, Any]:
        """Return the figures as a JSON object."""
        stats = self.trial.stats
        return {
            "drafter": self.method,
            "model": self.model,
            "steps": len(self.trial.steps),
            "tokens_per_pass": self.trial.tokens_per_pass,
            "draft_acceptance_rate": stats.draft_acceptance_rate,
            "acceptance_per_depth": self.trial.survival,
            "rank_acceptance": self.trial.rank_acceptance,
            "drafting_steps": self.trial.coverage,
            "drafted_nodes": self.trial.nodes,
            "context": self.trial.context,
            "fixed_ms": self.draft.fixed_ms,
            "level_ms": self.draft.level_ms,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedPrompts:
    """The prompts as the target reads them, with the parameters of their completions."""

    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    stop_ids: frozenset[int]
    asked: str  # How the model is prompted, in words (`describe_request`)

    @classmethod
    def of(
        cls,
        llm: LLM,
        prompts: Sequence[UserPrompt],
        *,
        temperature: float | None,
        max_tokens: int,
        limit: int,
        raw: bool = False,
    ) -> EncodedPrompts:
        """Return token ids and resolved parameters; ArgumentError if there is no prompt, or one
        leaves no room for a completion. `raw` as in `make_request`.
        """
        if not prompts or max_tokens < 2 or limit < 1:
            raise ArgumentError("acceptance is measured on at least one prompt and over at least two tokens")
        reader = PromptReader(
            tokenizer=llm.tokenizer,
            generation_config=llm.target.generation_config,
            vocab_size=llm.target.vocab_size,
            context=llm.max_model_len - max_tokens,
            default_seed=0,
        )
        return cls(
            prompts=[reader.tokens(make_request(llm, prompt, raw=raw))[1] for prompt in prompts[:limit]],
            params=reader.resolve(SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=0)),
            stop_ids=reader.end_ids(),
            asked=describe_request(llm, raw=raw),
        )


def make_request(llm: LLM, prompt: UserPrompt, *, raw: bool = False) -> Prompt:
    """Return a user's prompt as the engine takes it: every command asks it in this way.

    A text is a user's message where the model has a chat template, unless it is `raw`, and is continued as it stands
    elsewhere. A conversation needs the template (ArgumentError), and a mapping is the engine's own already.
    """
    if isinstance(prompt, Mapping):
        return prompt
    if isinstance(prompt, str):
        templated = llm.has_chat_template and not raw
        return llm.chat_prompt([{"role": "user", "content": prompt}]) if templated else {"prompt": prompt}
    return llm.chat_prompt(prompt)


def describe_request(llm: LLM, *, raw: bool) -> str:
    """Say in words how `make_request` asks a text."""
    if llm.has_chat_template and not raw:
        return "the prompt is a user's message in the chat template (--raw: as it stands)"
    return "the prompt is continued as it stands" + ("" if llm.has_chat_template else ": it has no chat template")


def measure_drafter(llm: LLM, config: SpeculativeConfig, answers: EncodedPrompts, tell: Tell) -> MeasuredDrafter:
    """Measure how one drafter helps with the completions; ForerunError if it cannot be built, or no row
    of the target is free.
    """
    target = llm.target
    drafter = build_beside(llm, config.method, config.drafter_options)
    depth = depth_of(config)
    model = config.options.get("model")
    tell(f"{config.method} drafts")
    prompts, stops = answers.prompts, answers.stop_ids
    trial = try_drafter(
        target, drafter, prompts, answers.params, depths=(depth,), name=config.method, stop_ids=stops, rule=config.rule
    )
    if not trial.steps:
        raise ArgumentError(
            "every completion ended with its first token, so nothing could be measured: the model has nothing to say "
            f"to these prompts as they are asked ({answers.asked}). Ask them in the other way, or give other prompts"
        )
    tell(f"what {config.method} costs")
    draft = measure_draft(target, drafter, prompts[0], depth=max(1, round(trial.depth) or depth))
    return MeasuredDrafter(method=config.method, model=None if model is None else str(model), trial=trial, draft=draft)


def build_beside(llm: LLM, method: str, options: Mapping[str, Any]) -> Drafter:
    """Build a drafter for the target of an `LLM`, beside those that draft there. Raises as `drafters.build`."""
    target = llm.target
    setup = DrafterSetup(target=target, tokenizer=llm.tokenizer, rows=target.rows, slots=target.slots)
    return build(method, options, setup)


def depth_of(config: SpeculativeConfig) -> int:
    """Return the levels that a configuration drafts at most; the drafter's own options limit it
    further.
    """
    return config.num_speculative_tokens or default_length(config.method) or LONGEST


def rank_models(
    llm: LLM, models: Sequence[str], answers: EncodedPrompts, tell: Tell, *, options: Mapping[str, Any]
) -> tuple[list[MeasuredDrafter], dict[str, str]]:
    """Measure every candidate draft model on the same prompts; return those, and the refused ones
    with the reason.
    """
    drafters, refused = list[MeasuredDrafter](), dict[str, str]()
    for model in models:
        config = SpeculativeConfig.parse({"method": "draft_model", "model": model, **options})
        assert config is not None
        try:
            drafters.append(measure_drafter(llm, config, answers, tell))
        except (ForerunError, OSError) as error:
            log.info("candidate %s cannot draft", model, exc_info=True)
            refused[model] = first_line(error)
    return drafters, refused


def save_draft_cost(llm: LLM, cost: CostModel, config: SpeculativeConfig, draft: DraftCost) -> CostModel:
    """Add a drafter's cost to the target's saved cost model."""
    known = cost.with_draft(config.key, draft)
    save(llm.target, known)
    return known
