"""One step of speculative decoding: propose, score, verify, commit, learn. The engine and a cascade both call it.

Knows the target, the drafters' protocol and the rules. Does not know requests, text or scheduling.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forerun import tree as trees
from forerun.devices import sent
from forerun.drafters.base import DraftContext, Drafter, warn_drafter
from forerun.errors import ForerunError, InvalidDraftError, NumericError
from forerun.judging import Judgement, Logprobs, judge, raise_unless
from forerun.sampling import TOLERANCE, Rng, Sampler
from forerun.scores import Scores
from forerun.target import Scored, Target
from forerun.tree import TokenTree, token_trees
from forerun.types import (
    Budget,
    CommittedTokens,
    Draft,
    DraftKind,
    Drawn,
    Signal,
    Source,
    StepTrace,
    Verdict,
    empty_draft,
)
from forerun.verify import default_rule

# A row whose numbers failed is scored again without its draft, which may be the reason. Knows rows and the target.
#
# A token's keys and values reach all others of its row, whether or not these see it: a drafted token whose numbers
# overflow takes the row's root with it, and so does what was left behind the root by a draft that was never scored.


def score_roots_again(
    target: Target, rows: Sequence[Row], scored: Scored, row_trees: list[TokenTree]
) -> dict[int, NumericError]:
    """Let rows that failed for their numbers, and had more in their slots than the root, decode plainly in this step.

    What stood behind their roots is gone, their trees are empty, the scores at their roots are new, and they have no
    error any longer.

    Returns:
        the errors that they had, by index into `rows`.
    """
    numeric = {index: row.error for index, row in enumerate(rows) if isinstance(row.error, NumericError)}
    lost = {index: error for index, error in numeric.items() if target.clear(rows[index].row) > 1}
    if not lost:
        return lost
    chosen, places = [rows[index] for index in lost], list(lost)
    roots, nothing = [row.tokens[-1] for row in chosen], empty_draft(len(lost))
    again = target.score([row.row for row in chosen], roots, nothing, signals=scored.signals.keys())
    scored.logits[places, 0] = again.logits[:, 0]
    for signal, states in scored.signals.items():
        states[places, 0] = again.signals[signal][:, 0]
    for index, row, tree in zip(places, chosen, token_trees(nothing, roots, target.vocab_size), strict=True):
        row_trees[index], row.error = tree, None
    return lost


__all__ = [
    "Admit",
    "Emitted",
    "Group",
    "Row",
    "Scores",
    "context_for",
    "first_tokens",
    "step",
]


@dataclass(kw_only=True, slots=True)
class Row:
    """One running sequence as the step sees it."""

    row: int
    """Cache row."""
    tokens: list[int]
    """Prompt and output; the last one is the root, not yet in the cache. Kept as `CommittedTokens`."""
    prompt_length: int
    sampler: Sampler
    seed: int
    stop_ids: frozenset[int]
    """Token ids that end the answer."""
    room: int
    """Tokens that may still be emitted, at least 1."""
    rule: str | None = None
    """A rule asked for by name; None takes the best one for what its drafter may draft."""
    traced: bool = False
    """Whether each node's probabilities are wanted in the `StepTrace`."""
    prediction: Sequence[int] = ()
    """What the client expects as the answer, token ids."""
    cache_salt: str | None = None
    """Isolation domain: what is kept of the text serves rows of the same domain only."""
    adapt: bool = True
    """Whether online adaptation may learn from it."""
    steps: int = 0
    """Steps done so far."""
    drafter_errors: int = 0
    """Times that a drafter failed it."""
    error: ForerunError | None = None
    """Why it cannot go on and has to end; see `judging.Isolation`. The others are not concerned."""

    def __post_init__(self) -> None:
        self.tokens, self.prediction = CommittedTokens(self.tokens), tuple(self.prediction)

    def commit(self, tokens: Iterable[int]) -> None:
        """The text goes on with these."""
        list.extend(self.tokens, tokens)

    def shorten(self, count: int) -> None:
        """Take back the last `count` tokens."""
        list.__delitem__(self.tokens, slice(len(self.tokens) - count, None))

    def rng(self) -> Rng:
        """The random draws of the coming step."""
        return Rng(self.seed, len(self.tokens))


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Rows that share a drafter propose together."""

    name: str
    drafter: Drafter
    """`Guarded`, or around one that is, wherever a failure shall not end the step."""
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
"""Chooses which drafted nodes are scored; may take away deterministic nodes only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Emitted:
    """What one step committed to one row; of one that has an error now, a token that means nothing."""

    tokens: list[int]
    sources: list[Source]
    drafted: int
    """Drafted nodes, probes not counted."""
    depth: int
    """Depth of the drafted tree, probes not counted."""
    logprobs: Logprobs | None
    """One entry per token where the request asked for log-probabilities."""
    trace: StepTrace


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
        check: also verify the invariants of drafts (debug mode).
        admit: chooses which of the drafted nodes are scored; None scores all.
        since: when the step began, `time.perf_counter`, where work was done for it before this call.
        isolate: a row that fails gets a `Row.error`, and the others go on; else the error is raised.
    """
    clock = _Clock() if since is None else _Clock([since])
    rules = _rules(rows, groups)
    draft = _propose(target, rows, groups, check)
    if admit is not None:
        draft = admit(draft)
    names = {index: group.name for group in groups for index in group.members}
    draft = _lawful(draft, rows, names)
    row_trees = trees.token_trees(draft, [row.tokens[-1] for row in rows], target.vocab_size)
    clock.lap()
    signals = frozenset[Signal]().union(*(group.drafter.requires for group in groups))
    roots = [row.tokens[-1] for row in rows]
    scored = target.score([row.row for row in rows], roots, draft, signals=signals, resume=draft.resume)
    top = max((group.drafter.top_ids for group in groups), default=0)
    scores = Scores(scored.logits, rows, row_trees, rules, draft=draft, top=top)
    judged = [judge(row, scores, index, rules[index]) for index, row in enumerate(rows)]
    lost = score_roots_again(target, rows, scored, row_trees)
    if lost:
        scores = Scores(scored.logits, rows, row_trees, rules, draft=draft, top=top)
    for index, error in lost.items():
        if index in names:
            _failed(rows[index], names[index], "to draft what can be scored", error)
        judged[index] = judge(rows[index], scores, index, rules[index])
    raise_unless(isolate, rows)
    verdicts = [judgement.verdict for judgement in judged]
    clock.lap()
    target.commit([row.row for row in rows], [verdict.path for verdict in verdicts])
    for row, judgement in zip(rows, judged, strict=True):
        row.commit(judgement.tokens)
    _teach(rows, groups, verdicts, scores, scored.signals)
    clock.lap()
    return [_emitted(row, scores, index, judged[index], clock, names.get(index)) for index, row in enumerate(rows)]


def first_tokens(rows: Sequence[Row], logits: Tensor, *, isolate: bool = False) -> list[Emitted]:
    """The tokens after the prompts: `logits` (B, 1, V) of the last prompt tokens. Appends them; nothing is drafted.

    `isolate` is that of `step`.
    """
    clock = _Clock()
    empty = empty_draft(len(rows))
    row_trees = trees.token_trees(empty, [row.tokens[-1] for row in rows], logits.shape[-1])
    rules = _rules(rows, [])
    scores = Scores(logits, rows, row_trees, rules)
    judged = [judge(row, scores, index, rules[index]) for index, row in enumerate(rows)]
    raise_unless(isolate, rows)
    for _ in range(3):
        clock.lap()
    for row, judgement in zip(rows, judged, strict=True):
        row.commit(judgement.tokens)
    return [_emitted(row, scores, index, judged[index], clock, None) for index, row in enumerate(rows)]


def context_for(
    rows: Sequence[Row], members: Sequence[int], fresh: Sequence[int], signals: Mapping[Signal, Tensor]
) -> DraftContext:
    """What a drafter may see of the rows that are its members."""
    chosen = [rows[index] for index in members]
    return DraftContext(
        rows=tuple([row.row for row in chosen]),
        tokens=tuple([row.tokens for row in chosen]),
        prompt_lengths=tuple([row.prompt_length for row in chosen]),
        fresh=tuple(fresh),
        samplers=tuple([row.sampler for row in chosen]),
        rng=tuple([row.rng() for row in chosen]),
        signals=signals,
        predictions=tuple([row.prediction for row in chosen]),
        cache_salts=tuple([row.cache_salt for row in chosen]),
        adapt=tuple([row.adapt for row in chosen]),
    )


def _rules(rows: Sequence[Row], groups: Sequence[Group]) -> list[str]:
    """The rule that verifies each row, by what its drafter may draft: known before anything is drawn."""
    kinds = [DraftKind()] * len(rows)
    for group in groups:
        for index in group.members:
            kinds[index] = group.drafter.kind(rows[index].sampler)
    return [
        row.rule if row.rule is not None else default_rule(kind, greedy=row.sampler.greedy)
        for row, kind in zip(rows, kinds, strict=True)
    ]


def _propose(target: Target, rows: Sequence[Row], groups: Sequence[Group], check: bool) -> Draft:
    drafts = []
    for group in groups:
        depths = [min(depth, rows[index].room - 1) for index, depth in zip(group.members, group.depths, strict=True)]
        if max(depths, default=0) <= 0:
            continue
        budget = Budget(nodes=[group.nodes if depth > 0 else 0 for depth in depths], depth=depths)
        draft = group.draft
        if draft is None:
            draft = group.drafter.propose(context_for(rows, group.members, [0] * len(depths), {}), budget)
        if check:
            _check_laws(draft)
        drafts.append((group.members, draft))
    return trees.gather(drafts, len(rows)) if drafts else empty_draft(len(rows))


def _failed(row: Row, name: str, task: str, error: Exception) -> None:
    """A drafter lost its draft for a row: say so once, and count it."""
    warn_drafter(name, task, repr(error))
    row.drafter_errors += 1


def _lawful(draft: Draft, rows: Sequence[Row], names: Mapping[int, str]) -> Draft:
    """The draft without what was drawn from no distribution, which its drafter loses, with all below; it is counted.

    What was drawn above stays: whether a node is submitted may not depend on its own value.
    """
    wrong = {place: mass for place, mass in draft.masses.items() if not abs(mass - 1) < TOLERANCE}
    for index, mass in {index: mass for (index, _), mass in wrong.items()}.items():
        error = InvalidDraftError(f"sampled from what is no distribution: its probabilities add up to {mass}")
        _failed(rows[index], names[index], "to propose", error)
    return trees.without(draft, wrong) if wrong else draft


def _check_laws(draft: Draft) -> None:
    """Debug mode: every sampled node had a positive probability under a recorded law that sums to one."""
    for row in range(len(draft.counts)):
        builder = trees.rebuild(draft, row)
        for node, law in builder.laws.items():
            assert abs(float(law.double().sum()) - 1) < 1e-4, f"the law recorded at node {node} does not sum to 1"
        for token, parent, drawn in zip(builder.tokens, builder.parents, builder.drawn, strict=True):
            if drawn is not Drawn.DETERMINISTIC:
                assert builder.laws[parent][token] > 0, f"token {token} was drawn against the recorded law"


def _teach(
    rows: Sequence[Row],
    groups: Sequence[Group],
    verdicts: Sequence[Verdict],
    scores: Scores,
    signals: Mapping[Signal, Tensor],
) -> None:
    for group in groups:
        members = [index for index in group.members if rows[index].error is None]
        everyone = sorted([*members, *(index for index in group.listeners if rows[index].error is None)])
        watched = everyone if group.drafter.watches else members
        if watched:
            chosen = [verdicts[index] for index in watched]
            context = _lesson(rows, watched, group.drafter, verdicts, signals)
            group.drafter.observe(context, chosen, scores.of(watched))
        if len(everyone) > len(watched):
            context = _lesson(rows, everyone, group.drafter, verdicts, signals)
        if everyone:
            group.drafter.extend(context)


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
    index, chosen = sent([torch.tensor(nodes), torch.tensor(list(members))], states.device)
    return states[chosen.unsqueeze(1), index]


def _emitted(row: Row, scores: Scores, index: int, judgement: Judgement, clock: _Clock, drafter: str | None) -> Emitted:
    verdict, tree = judgement.verdict, scores.trees[index]
    trace = StepTrace(
        step=row.steps,
        position=len(row.tokens) - len(judgement.tokens),
        drafter=drafter,
        rule=judgement.rule,
        nodes=judgement.nodes,
        path=verdict.path,
        next_token=verdict.next_token,
        kind=verdict.kind,
        draft_ms=clock.ms(0),
        verify_ms=clock.ms(1),
        commit_ms=clock.ms(2),
    )
    row.steps += 1
    return Emitted(
        tokens=judgement.tokens,
        sources=[Source.DRAFT] * len(verdict.path) + [verdict.kind],
        drafted=tree.size - len(tree.probes),
        depth=max(depth for node, depth in enumerate(tree.depths) if node not in tree.probes),
        logprobs=judgement.logprobs,
        trace=trace,
    )
