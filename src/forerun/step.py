"""One step of speculative decoding: propose, score, verify, commit, learn. The engine and a cascade both call it.

Knows the target, the drafters' protocol and the rules. Does not know requests, text or scheduling.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from forerun import tree as trees
from forerun.drafters.base import DraftContext, Drafter
from forerun.errors import ForerunError
from forerun.judging import Judgement, judge
from forerun.sampling import Coins, Sampler, logprobs_of
from forerun.scores import RowScores, Scores
from forerun.target import Target
from forerun.tree import TokenTree
from forerun.types import (
    Budget,
    Draft,
    Drawn,
    Signal,
    Source,
    StepTrace,
    TokenLogprob,
    TracedNode,
    Verdict,
    empty_draft,
)

__all__ = [
    "Admit",
    "Emitted",
    "Group",
    "Row",
    "RowScores",
    "Scores",
    "context_for",
    "drafter_failed",
    "first_tokens",
    "step",
    "warn_drafter",
]

log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class Row:
    """One running sequence as the step sees it."""

    row: int
    """Cache row."""
    tokens: list[int]
    """Prompt and output; the last one is the root, not yet in the cache."""
    prompt_length: int
    sampler: Sampler
    seed: int
    stop_ids: frozenset[int]
    """Token ids that end the answer."""
    room: int
    """Tokens that may still be emitted, at least 1."""
    rule: str | None = None
    """A rule asked for by name; None takes the best one for how the draft was drawn."""
    traced: bool = False
    """Whether each node's probabilities are wanted in the `StepTrace`."""
    prediction: Sequence[int] = ()
    """What the client expects as the answer, token ids."""
    steps: int = 0
    """Steps done so far."""
    drafter_errors: int = 0
    """Times that a drafter failed it."""

    def coins(self) -> Coins:
        """The coins of the coming step."""
        return Coins(self.seed, len(self.tokens))


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Rows that share a drafter propose together."""

    name: str
    drafter: Drafter
    members: Sequence[int]
    """Indices into the step's rows."""
    depths: Sequence[int]
    """Per member, most tokens to draft on one path; the row's room limits it further."""
    nodes: int
    """Most drafted nodes per row."""
    listeners: Sequence[int] = ()
    """Rows that the drafter is shown the tokens of although it does not draft for them."""
    draft: Draft | None = None
    """The members' proposal, where it was made before the step."""


Admit = Callable[[Draft], Draft]
"""Chooses which drafted nodes are scored; may take away given nodes only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Emitted:
    """What one step committed to one row."""

    tokens: list[int]
    sources: list[Source]
    drafted: int
    """Drafted nodes, scouts not counted."""
    depth: int
    """Depth of the drafted tree, scouts not counted."""
    logprobs: list[tuple[TokenLogprob, Mapping[int, TokenLogprob]]] | None
    """One entry per token where the request asked for log-probabilities."""
    trace: StepTrace
    error: ForerunError | None = None
    """Why the row cannot go on: it got a token that means nothing, and has to end. The others are not concerned."""


@dataclass(slots=True)
class _Clock:
    """Wall times of the phases of a step, ms."""

    marks: list[float] = field(default_factory=lambda: [time.perf_counter()])

    def lap(self) -> None:
        self.marks.append(time.perf_counter())

    def ms(self, phase: int) -> float:
        return 1e3 * (self.marks[phase + 1] - self.marks[phase])


@torch.inference_mode()
def step(
    target: Target,
    rows: Sequence[Row],
    groups: Sequence[Group],
    *,
    check: bool = False,
    admit: Admit | None = None,
    since: float | None = None,
    isolate: bool = False,
) -> list[Emitted]:
    """Advance every row by at least one token.

    Args:
        target: whose cache holds all of each row's tokens but the last.
        rows: B running sequences; their tokens grow in place.
        groups: who drafts for whom; rows in no group decode plainly.
        check: also verify the invariants of DESIGN section 5 (debug mode).
        admit: chooses which of the drafted nodes are scored; None scores all.
        since: when the step began, `time.perf_counter`, where work was done for it before this call.
        isolate: a row whose numbers fail gets an `Emitted.error`, and the others go on; else the error is raised.
    """
    clock = _Clock() if since is None else _Clock([since])
    draft = _propose(target, rows, groups, check)
    if admit is not None:
        draft = admit(draft)
    row_trees = trees.token_trees(draft, [row.tokens[-1] for row in rows], target.vocab_size)
    clock.lap()
    signals = frozenset[Signal]().union(*(group.drafter.requires for group in groups))
    roots = [row.tokens[-1] for row in rows]
    scored = target.score([row.row for row in rows], roots, draft, signals=signals, resume=draft.resume)
    scores = Scores(scored.logits, rows, row_trees)
    judged = [judge(row, scores, index, isolate=isolate) for index, row in enumerate(rows)]
    verdicts = [judgement.verdict for judgement in judged]
    clock.lap()
    target.commit([row.row for row in rows], [verdict.path for verdict in verdicts])
    for row, verdict, tree in zip(rows, verdicts, row_trees, strict=True):
        row.tokens.extend((*(tree.tokens[node] for node in verdict.path), verdict.next_token))
    _teach(rows, groups, verdicts, scores, scored.signals)
    clock.lap()
    names = {index: group.name for group in groups for index in group.members}
    return [_emitted(row, scores, index, judged[index], clock, names.get(index)) for index, row in enumerate(rows)]


def first_tokens(rows: Sequence[Row], logits: Tensor, *, isolate: bool = False) -> list[Emitted]:
    """The tokens after the prompts: `logits` (B, 1, V) of the last prompt tokens. Appends them; nothing is drafted.

    `isolate` is that of `step`.
    """
    clock = _Clock()
    empty = empty_draft(len(rows))
    row_trees = trees.token_trees(empty, [row.tokens[-1] for row in rows], logits.shape[-1])
    scores = Scores(logits, rows, row_trees)
    judged = [judge(row, scores, index, isolate=isolate) for index, row in enumerate(rows)]
    for _ in range(3):
        clock.lap()
    for row, judgement in zip(rows, judged, strict=True):
        row.tokens.append(judgement.verdict.next_token)
    return [_emitted(row, scores, index, judged[index], clock, None) for index, row in enumerate(rows)]


def context_for(
    rows: Sequence[Row], members: Sequence[int], fresh: Sequence[int], signals: Mapping[Signal, Tensor]
) -> DraftContext:
    """What a drafter may see of the rows that are its members."""
    chosen = [rows[index] for index in members]
    return DraftContext(
        rows=[row.row for row in chosen],
        tokens=[row.tokens for row in chosen],
        prompt_lengths=[row.prompt_length for row in chosen],
        fresh=fresh,
        samplers=[row.sampler for row in chosen],
        coins=[row.coins() for row in chosen],
        signals=signals,
        predictions=[row.prediction for row in chosen],
    )


def drafter_failed(rows: Sequence[Row], name: str, task: str, error: Exception) -> None:
    """A drafter raised: say so once, count it for the rows that it worked for; the step goes on without it."""
    warn_drafter(name, task, repr(error))
    for row in rows:
        row.drafter_errors += 1


@lru_cache(maxsize=256)
def warn_drafter(name: str, task: str, error: str) -> None:
    """Say, once per kind of failure, that a drafter failed: it loses its drafts, never the step."""
    log.warning("drafter %r failed %s: %s", name, task, error)
    log.debug("drafter %r", name, exc_info=True)


def _propose(target: Target, rows: Sequence[Row], groups: Sequence[Group], check: bool) -> Draft:
    drafts = []
    for group in groups:
        depths = [min(depth, rows[index].room - 1) for index, depth in zip(group.members, group.depths, strict=True)]
        if max(depths, default=0) <= 0:
            continue
        budget = Budget(nodes=[group.nodes if depth > 0 else 0 for depth in depths], depth=depths)
        try:
            draft = group.draft
            if draft is None:
                draft = group.drafter.propose(context_for(rows, group.members, [0] * len(depths), {}), budget)
            trees.check(draft, target.vocab_size)
            if check:
                _check_laws(draft)
        except Exception as error:
            drafter_failed([rows[i] for i in group.members], group.name, "to propose; its rows decode plainly", error)
            continue
        drafts.append((group.members, draft))
    return trees.gather(drafts, len(rows)) if drafts else empty_draft(len(rows))


def _check_laws(draft: Draft) -> None:
    """Debug mode: every sampled node had a positive probability under a recorded law that sums to one."""
    for row in range(len(draft.counts)):
        builder = trees.rebuild(draft, row)
        for node, law in builder.laws.items():
            assert abs(float(law.double().sum()) - 1) < 1e-4, f"the law recorded at node {node} does not sum to 1"
        for token, parent, drawn in zip(builder.tokens, builder.parents, builder.drawn, strict=True):
            if drawn is not Drawn.GIVEN:
                assert builder.laws[parent][token] > 0, f"token {token} was drawn against the recorded law"


def _teach(
    rows: Sequence[Row],
    groups: Sequence[Group],
    verdicts: Sequence[Verdict],
    scores: Scores,
    signals: Mapping[Signal, Tensor],
) -> None:
    for group in groups:
        everyone = sorted((*group.members, *group.listeners))
        watched = everyone if group.drafter.watches else group.members
        try:
            if watched:
                chosen = [verdicts[index] for index in watched]
                context = _lesson(rows, watched, group.drafter, verdicts, signals)
                group.drafter.observe(context, chosen, scores.of(watched))
            if len(everyone) > len(watched):
                context = _lesson(rows, everyone, group.drafter, verdicts, signals)
            if everyone:
                group.drafter.extend(context)
        except Exception as error:
            drafter_failed([rows[index] for index in everyone], group.name, "to learn from a step", error)


def _lesson(
    rows: Sequence[Row],
    members: Sequence[int],
    drafter: Drafter,
    verdicts: Sequence[Verdict],
    signals: Mapping[Signal, Tensor],
) -> DraftContext:
    """What a drafter is shown of these rows after a step."""
    chosen = [verdicts[index] for index in members]
    wanted = {signal: _kept_states(signals[signal], members, chosen) for signal in drafter.requires}
    return context_for(rows, members, [len(verdict.path) + 1 for verdict in chosen], wanted)


def _kept_states(states: Tensor, members: Sequence[int], verdicts: Sequence[Verdict]) -> Tensor:
    """(B, F, H): the states of the root and of each accepted node, padded with the root's."""
    width = max(len(verdict.path) for verdict in verdicts) + 1
    nodes = [[0, *verdict.path] + [0] * (width - 1 - len(verdict.path)) for verdict in verdicts]
    index = torch.tensor(nodes, device=states.device)
    return states[torch.tensor(list(members), device=states.device).unsqueeze(1), index]


def _emitted(row: Row, scores: Scores, index: int, judgement: Judgement, clock: _Clock, drafter: str | None) -> Emitted:
    verdict, rule, laws, error = judgement
    tree = scores.trees[index]
    tokens = [*(tree.tokens[node] for node in verdict.path), verdict.next_token]
    trace = StepTrace(
        step=row.steps,
        position=len(row.tokens) - len(tokens),
        drafter=drafter,
        rule=rule,
        nodes=_traced_nodes(tree, laws, set(verdict.path)) if row.traced else (),
        path=verdict.path,
        next_token=verdict.next_token,
        kind=verdict.kind,
        draft_ms=clock.ms(0),
        verify_ms=clock.ms(1),
        commit_ms=clock.ms(2),
    )
    row.steps += 1
    return Emitted(
        tokens=tokens,
        sources=[Source.DRAFT] * len(verdict.path) + [verdict.kind],
        drafted=tree.size - len(tree.scouts),
        depth=max(depth for node, depth in enumerate(tree.depths) if node not in tree.scouts),
        logprobs=_logprobs(row, scores, index, verdict, tokens) if error is None else None,
        trace=trace,
        error=error,
    )


def _traced_nodes(tree: TokenTree, laws: RowScores, accepted: set[int]) -> tuple[TracedNode, ...]:
    nodes = []
    for node in range(1, tree.size + 1):
        token, parent = tree.tokens[node], tree.parents[node]
        nodes.append(
            TracedNode(
                token=token,
                parent=parent,
                draft_prob=_draft_prob(tree, node),
                target_prob=laws.known(parent, token),
                accepted=node in accepted,
                scout=node in tree.scouts,
            )
        )
    return tuple(nodes)


def _draft_prob(tree: TokenTree, node: int) -> float | None:
    """Under the law that it was drawn from, else the drafter's confidence."""
    law = tree.laws.get(tree.parents[node])
    if law is not None and tree.drawn[node] is not Drawn.GIVEN:
        return float(law[tree.tokens[node]])
    return tree.confidence[node] if tree.confidence else None


_Logprobs = list[tuple[TokenLogprob, Mapping[int, TokenLogprob]]]


def _logprobs(row: Row, scores: Scores, index: int, verdict: Verdict, tokens: list[int]) -> _Logprobs | None:
    params = row.sampler.params
    if params.logprobs is None:
        return None
    result: _Logprobs = []
    for node, token in zip((0, *verdict.path), tokens, strict=True):
        logits = scores.logits[index, node]
        if params.logprobs_mode == "processed_logprobs":
            logits = row.sampler.law(logits, scores.output(index, node)).log()
        result.append(logprobs_of(logits, token, params.logprobs))
    return result
