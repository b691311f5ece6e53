"""One step of speculative decoding: propose, score, verify, commit, learn. The engine and a cascade both call it.

Knows the target, the drafters' protocol and the rules. Does not know requests, text or scheduling.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from forerun import tree as trees
from forerun.drafters.base import DraftContext, Drafter
from forerun.errors import NumericError
from forerun.sampling import Coins, Sampler, logprobs_of
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
from forerun.verify import default_rule, rule_named

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
    steps: int = 0
    """Steps done so far."""

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


class Scores:
    """The target's raw logits over a step's trees, and the processed laws that rules ask for."""

    def __init__(self, logits: Tensor, rows: Sequence[Row], row_trees: Sequence[TokenTree]) -> None:
        self.logits = logits
        """(B, N, V), raw."""
        self.trees = row_trees
        self._rows = rows
        self._lengths = [len(row.tokens) for row in rows]
        self._argmax: list[list[int]] | None = None

    def row(self, index: int) -> RowScores:
        """One row's laws, as a rule sees them."""
        return RowScores(self, index)

    def of(self, members: Sequence[int]) -> Scores:
        """The scores of some of the rows, in that order: what a drafter may see of the rows that are its members."""
        if list(members) == list(range(len(self._rows))):
            return self
        chosen = Scores(
            self.logits[list(members)], [self._rows[index] for index in members], [self.trees[i] for i in members]
        )
        chosen._lengths = [self._lengths[index] for index in members]
        return chosen

    def sampler(self, index: int) -> Sampler:
        """The row's sampling parameters."""
        return self._rows[index].sampler

    def output(self, index: int, node: int) -> list[int]:
        """The row's output up to and including `node`, as it was when the tree was scored."""
        tree, row = self.trees[index], self._rows[index]
        return [*row.tokens[row.prompt_length : self._lengths[index]], *(tree.tokens[step] for step in tree.path(node))]

    def raw_argmax(self, index: int, node: int) -> int:
        """Argmax of the raw logits, computed for the whole batch at the first call: one transfer to the host."""
        if self._argmax is None:
            values, ids = self.logits.max(-1)
            if bool(torch.isnan(values).any()):
                raise NumericError("the model produced NaN logits; check the checkpoint, or load it with dtype float32")
            self._argmax = ids.tolist()
        return self._argmax[index][node]


class RowScores:
    """`NodeLaws` of one row, each law computed at most once."""

    def __init__(self, scores: Scores, index: int) -> None:
        self._scores, self._index = scores, index
        self._laws: dict[int, Tensor] = {}

    def law(self, node: int) -> Tensor:
        """(V,) float32 processed law after `node`."""
        if node not in self._laws:
            logits = self._scores.logits[self._index, node]
            output = self._scores.output(self._index, node)
            self._laws[node] = self._scores.sampler(self._index).law(logits, output)
        return self._laws[node]

    def argmax(self, node: int) -> int:
        """Token of the largest processed logit after `node`."""
        sampler = self._scores.sampler(self._index)
        if sampler.neutral:
            return self._scores.raw_argmax(self._index, node)
        logits = self._scores.logits[self._index, node]
        return int(sampler.process(logits, self._scores.output(self._index, node)).argmax())

    def known(self, node: int, token: int) -> float | None:
        """Target probability of `token` after `node` where a rule asked for that law; else None."""
        return float(self._laws[node][token]) if node in self._laws else None


@dataclass(slots=True)
class _Clock:
    """Wall times of the phases of a step, ms."""

    marks: list[float] = field(default_factory=lambda: [time.perf_counter()])

    def lap(self) -> None:
        self.marks.append(time.perf_counter())

    def ms(self, phase: int) -> float:
        return 1e3 * (self.marks[phase + 1] - self.marks[phase])


@torch.inference_mode()
def step(target: Target, rows: Sequence[Row], groups: Sequence[Group], *, check: bool = False) -> list[Emitted]:
    """Advance every row by at least one token.

    Args:
        target: whose cache holds all of each row's tokens but the last.
        rows: B running sequences; their tokens grow in place.
        groups: who drafts for whom; rows in no group decode plainly.
        check: also verify the invariants of DESIGN section 5 (debug mode).
    """
    clock = _Clock()
    draft = _propose(target, rows, groups, check)
    row_trees = trees.token_trees(draft, [row.tokens[-1] for row in rows], target.vocab_size)
    clock.lap()
    signals = frozenset[Signal]().union(*(group.drafter.requires for group in groups))
    roots = [row.tokens[-1] for row in rows]
    scored = target.score([row.row for row in rows], roots, draft, signals=signals, resume=draft.resume)
    scores = Scores(scored.logits, rows, row_trees)
    judged = [_judge(row, scores, index) for index, row in enumerate(rows)]
    verdicts = [verdict for verdict, _, _ in judged]
    clock.lap()
    target.commit([row.row for row in rows], [verdict.path for verdict in verdicts])
    for row, verdict, tree in zip(rows, verdicts, row_trees, strict=True):
        row.tokens.extend((*(tree.tokens[node] for node in verdict.path), verdict.next_token))
    _teach(rows, groups, verdicts, scores, scored.signals)
    clock.lap()
    names = {index: group.name for group in groups for index in group.members}
    return [_emitted(row, scores, index, judged[index], clock, names.get(index)) for index, row in enumerate(rows)]


def first_tokens(rows: Sequence[Row], logits: Tensor) -> list[Emitted]:
    """The tokens after the prompts: `logits` (B, 1, V) of the last prompt tokens. Appends them; nothing is drafted."""
    clock = _Clock()
    empty = empty_draft(len(rows))
    row_trees = trees.token_trees(empty, [row.tokens[-1] for row in rows], logits.shape[-1])
    scores = Scores(logits, rows, row_trees)
    judged = [_judge(row, scores, index) for index, row in enumerate(rows)]
    for _ in range(3):
        clock.lap()
    for row, (verdict, _, _) in zip(rows, judged, strict=True):
        row.tokens.append(verdict.next_token)
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
    )


@lru_cache(maxsize=256)
def warn_drafter(name: str, task: str, error: str) -> None:
    """Say, once per kind of failure, that a drafter failed: it loses its drafts, never the step."""
    log.warning("drafter %r failed %s: %s", name, task, error)
    log.debug("drafter %r", name, exc_info=True)


@lru_cache(maxsize=64)
def _warn_rule(asked: str, used: str) -> None:
    log.warning("rule %r cannot judge drafts that were drawn this way; %r judges them", asked, used)


def _propose(target: Target, rows: Sequence[Row], groups: Sequence[Group], check: bool) -> Draft:
    drafts = []
    for group in groups:
        depths = [min(depth, rows[index].room - 1) for index, depth in zip(group.members, group.depths, strict=True)]
        if max(depths, default=0) <= 0:
            continue
        budget = Budget(nodes=[group.nodes if depth > 0 else 0 for depth in depths], depth=depths)
        try:
            draft = group.drafter.propose(context_for(rows, group.members, [0] * len(depths), {}), budget)
            trees.check(draft, target.vocab_size)
            if check:
                _check_laws(draft)
        except Exception as error:
            warn_drafter(group.name, "to propose; its rows decode plainly", repr(error))
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


_Judgement = tuple[Verdict, str, RowScores]


def _judge(row: Row, scores: Scores, index: int) -> _Judgement:
    """The row's verdict, cut at a stop token so that nothing is committed behind it; the rule; the laws asked for."""
    tree, laws = scores.trees[index], scores.row(index)
    name = default_rule(tree, greedy=row.sampler.greedy)
    if row.rule is not None and tree.size:
        if rule_named(row.rule).accepts(tree):
            name = row.rule
        else:
            _warn_rule(row.rule, name)
    verdict = rule_named(name).verify(tree, laws, row.coins())
    for kept, node in enumerate(verdict.path):
        if tree.tokens[node] in row.stop_ids:
            cut = Verdict(path=verdict.path[:kept], next_token=tree.tokens[node], kind=Source.DRAFT)
            return cut, name, laws
    return verdict, name, laws


def _teach(
    rows: Sequence[Row],
    groups: Sequence[Group],
    verdicts: Sequence[Verdict],
    scores: Scores,
    signals: Mapping[Signal, Tensor],
) -> None:
    for group in groups:
        chosen = [verdicts[index] for index in group.members]
        fresh = [len(verdict.path) + 1 for verdict in chosen]
        wanted = {signal: _kept_states(signals[signal], group.members, chosen) for signal in group.drafter.requires}
        context = context_for(rows, group.members, fresh, wanted)
        try:
            group.drafter.observe(context, chosen, scores.of(group.members))
            group.drafter.extend(context)
        except Exception as error:
            warn_drafter(group.name, "to learn from a step", repr(error))


def _kept_states(states: Tensor, members: Sequence[int], verdicts: Sequence[Verdict]) -> Tensor:
    """(B, F, H): the states of the root and of each accepted node, padded with the root's."""
    width = max(len(verdict.path) for verdict in verdicts) + 1
    nodes = [[0, *verdict.path] + [0] * (width - 1 - len(verdict.path)) for verdict in verdicts]
    index = torch.tensor(nodes, device=states.device)
    return states[torch.tensor(list(members), device=states.device).unsqueeze(1), index]


def _emitted(
    row: Row, scores: Scores, index: int, judgement: _Judgement, clock: _Clock, drafter: str | None
) -> Emitted:
    verdict, rule, laws = judgement
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
        logprobs=_logprobs(row, scores, index, verdict, tokens),
        trace=trace,
    )


def _traced_nodes(tree: TokenTree, laws: RowScores, accepted: set[int]) -> tuple[TracedNode, ...]:
    nodes = []
    for node in range(1, tree.size + 1):
        token, parent = tree.tokens[node], tree.parents[node]
        nodes.append(
            TracedNode(
                token=token,
                parent=parent,
                draft_prob=float(tree.laws[parent][token]) if parent in tree.laws else None,
                target_prob=laws.known(parent, token),
                accepted=node in accepted,
            )
        )
    return tuple(nodes)


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
