"""One step of speculative decoding: propose, score, verify, commit, learn. The engine and a cascade both call it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from forerun.core.rng import TOLERANCE
from forerun.core.rules import default_rule, rule_named
from forerun.core.tree import TokenTree, fetch_masses, without
from forerun.decode.drafter import DraftContext, Drafter, warn_drafter
from forerun.decode.residuals import DeviceRow, Logprobs
from forerun.decode.row import Row
from forerun.decode.scores import HostRow, Scores
from forerun.devices import send
from forerun.errors import InvalidDraftError, Isolation, NumericError
from forerun.model import Scored, Target
from forerun.model.recordings import round_tokens
from forerun.types import Boundary, Budget, DraftKind, Drawn, Source, StepTrace, TracedNode, Verdict


class Verified(NamedTuple):
    """The result of verifying one row's tree."""

    verdict: Verdict  # For a row that failed it accepts nothing, and its token is meaningless
    tokens: list[int]  # Tokens that are committed: those on the accepted path and the next one
    rule: str
    nodes: tuple[TracedNode, ...] = ()  # For the trace, if one was requested
    logprobs: Logprobs | None = None  # One entry per emitted token, if the request has `logprobs`


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Rows that one drafter drafts for together."""

    name: str
    drafter: Drafter  # A `Guarded` one, or a wrapper around it, unless a failure may end the step
    members: Sequence[int]  # Indices into the step's rows
    depths: Sequence[int]  # Per member, most tokens to draft on one path; `Row.tokens_left` limits it further
    nodes: int  # Most drafted nodes per row
    listeners: Sequence[int] = ()  # Rows whose tokens the drafter reads although it does not draft for them
    trees: Sequence[TokenTree] | None = None  # The members' proposals, if they were made before the step


Admit = Callable[[list[TokenTree]], list[TokenTree]]
"""A function that chooses which drafted nodes are scored; it may only remove deterministic nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Emitted:
    """The tokens that one step committed to one row. If the row has an error, the token is meaningless."""

    tokens: list[int]
    sources: list[Source]
    drafted: int  # Drafted nodes, probes not counted
    depth: int  # Depth of the drafted tree, probes not counted
    logprobs: Logprobs | None  # One entry per token, if the request has `logprobs`
    trace: StepTrace


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
        target: its cache holds all of each row's tokens except the last one.
        rows: B running sequences; their tokens grow in place.
        groups: which drafter drafts for which rows; rows in no group decode plainly.
        check: also verify the invariants of drafts (debug mode).
        admit: chooses which of the drafted nodes are scored; None scores all.
        since: when the step began, `time.perf_counter`, if work for it was done before this call.
        isolate: a row that fails gets a `Row.error`, and the others go on; else the error is raised.
    """
    marks = [time.perf_counter() if since is None else since]
    rules = _rules(rows, groups)
    trees = propose_trees(rows, groups)
    if admit is not None:
        trees = admit(trees)
    trees = _without_impossible(trees, rows, groups, check=check)
    marks.append(time.perf_counter())
    boundaries = frozenset[Boundary]().union(*(group.drafter.requires for group in groups))
    scored = target.score([row.cache_row for row in rows], trees, boundaries=boundaries, padded=False)
    top = max((group.drafter.top_ids for group in groups), default=0)
    scores = Scores(scored.logits, rows, trees, rules, top=top, flat=scored.flat, recordings=target.verifying)
    verified = [verify(row, scores, index, rules[index]) for index, row in enumerate(rows)]
    lost = _drop_drafts_and_rescore(target, rows, scored, trees)
    if lost:
        scores = Scores(scored.logits, rows, trees, rules, top=top, flat=scored.flat)
    names = {index: group.name for group in groups for index in group.members}
    for index, error in lost.items():
        if index in names:
            warn_drafter(names[index], "to draft what can be scored", error)
            rows[index].drafter_errors += 1
        verified[index] = verify(rows[index], scores, index, rules[index])
    _raise_unless(isolate, rows)
    verdicts = [result.verdict for result in verified]
    marks.append(time.perf_counter())
    target.commit([row.cache_row for row in rows], [verdict.path for verdict in verdicts])
    for row, result in zip(rows, verified, strict=True):
        row.commit(result.tokens)
    _teach(rows, groups, verdicts, scores, scored.hidden_states)
    marks.append(time.perf_counter())
    return [
        _make_emitted(row, trees[index], verified[index], marks, names.get(index)) for index, row in enumerate(rows)
    ]


def first_tokens(rows: Sequence[Row], logits: Tensor, *, isolate: bool = False) -> list[Emitted]:
    """Commit the first tokens after prompts, from `logits` (B, 1, V) of the prompts' last tokens; nothing is drafted.
    `isolate` works as in `step`.
    """
    began, rules = time.perf_counter(), _rules(rows, [])
    scores = Scores(logits, rows, [TokenTree(row.tokens[-1]) for row in rows], rules)
    verified = [verify(row, scores, index, rules[index]) for index, row in enumerate(rows)]
    _raise_unless(isolate, rows)
    marks = [began, *[time.perf_counter()] * 3]
    for row, result in zip(rows, verified, strict=True):
        row.commit(result.tokens)
    return [_make_emitted(row, scores.trees[index], verified[index], marks, None) for index, row in enumerate(rows)]


def context_for(
    rows: Sequence[Row], members: Sequence[int], fresh: Sequence[int], hidden_states: Mapping[Boundary, Tensor]
) -> DraftContext:
    """Return the context that a drafter gets of its members."""
    chosen = [rows[index] for index in members]
    return DraftContext(
        rows=tuple([row.cache_row for row in chosen]),
        tokens=tuple([row.tokens for row in chosen]),
        prompt_lengths=tuple([row.prompt_length for row in chosen]),
        fresh=tuple(fresh),
        samplers=tuple([row.sampler for row in chosen]),
        rng=tuple([row.rng() for row in chosen]),
        hidden_states=hidden_states,
        predictions=tuple([row.prediction for row in chosen]),
        cache_salts=tuple([row.cache_salt for row in chosen]),
    )


def _rules(rows: Sequence[Row], groups: Sequence[Group]) -> list[str]:
    """Return the rule that verifies each row. It depends on the kind of trees that the drafter may propose, so it is
    fixed before anything is drawn.
    """
    kinds = dict.fromkeys(range(len(rows)), DraftKind())
    kinds |= {index: group.drafter.kind(rows[index].sampler) for group in groups for index in group.members}
    return [row.rule or default_rule(kinds[index], greedy=row.sampler.greedy) for index, row in enumerate(rows)]


def propose_trees(rows: Sequence[Row], groups: Sequence[Group]) -> list[TokenTree]:
    """Let each group's drafter propose, and return one tree per row."""
    trees = [TokenTree(row.tokens[-1]).seal() for row in rows]
    for group in groups:
        depths = [
            min(depth, rows[index].tokens_left - 1) for index, depth in zip(group.members, group.depths, strict=True)
        ]
        if max(depths, default=0) <= 0:
            continue
        budget = Budget(nodes=[group.nodes if depth > 0 else 0 for depth in depths], depth=depths)
        drafted = group.trees
        if drafted is None:
            drafted = group.drafter.propose(context_for(rows, group.members, [0] * len(depths), {}), budget)
        for index, tree in zip(group.members, drafted, strict=True):
            trees[index] = tree
    return trees


def _without_impossible(
    trees: list[TokenTree], rows: Sequence[Row], groups: Sequence[Group], *, check: bool
) -> list[TokenTree]:
    """Return the trees without the nodes whose recorded draft probabilities are no distribution, and without the nodes
    below them. A node with the probability 0 stays, because its own token must not decide whether it is submitted. In
    both cases the drafter fails for the row, so that it drafts no more there. `check` verifies what the others record.
    """
    impossible = fetch_masses(trees)
    trees = list(trees)
    for group in groups:
        for index in group.members:
            tree = trees[index]
            wrong = {node: mass for node, mass in tree.masses.items() if not abs(mass - 1) < TOLERANCE}
            if wrong:
                found = _describe(tree, *next(iter(wrong.items())))
                trees[index] = without(tree, wrong)
            elif index in impossible:
                node = impossible[index]
                found = f"node {node} was sampled, but the draft probs of its parent give its token the probability 0"
            else:
                if check:
                    _check_probs(tree)
                continue
            error = InvalidDraftError(f"{found}; record with set_probs what was drawn from, after all processing")
            group.drafter.fail([rows[index].cache_row], "to propose", error)
    return trees


def _describe(tree: TokenTree, node: int, mass: float) -> str:
    """Say why the draft probabilities of a node, which add up to `mass`, are no distribution; NaN: one is negative."""
    probs, what = tree.draft_probs[node], f"the draft probs of node {node}"
    if not math.isnan(mass):
        return f"{what} are no distribution: they add up to {mass:.6g}"
    if probs.isnan().any():
        return f"{what} hold NaN"
    if probs.max() <= 0:
        return f"{what} are negative, as log-probabilities are, and should be probabilities"
    return f"{what} hold the negative number {float(probs.min()):.6g}"


def _check_probs(tree: TokenTree) -> None:
    """Assert, in debug mode, that every sampled node had a positive probability under a recorded
    distribution that sums to one.
    """
    for node, probs in tree.draft_probs.items():
        sums_to_one = abs(float(probs.double().sum()) - 1) < TOLERANCE
        assert sums_to_one, f"the draft probs recorded at node {node} do not sum to 1"
    for token, parent, drawn in zip(tree.tokens, tree.parents, tree.drawn, strict=True):
        if drawn is not Drawn.DETERMINISTIC:
            assert tree.draft_probs[parent][token] > 0, f"token {token} was drawn against the recorded distribution"


def _teach(
    rows: Sequence[Row],
    groups: Sequence[Group],
    verdicts: Sequence[Verdict],
    scores: Scores,
    hidden_states: Mapping[Boundary, Tensor],
) -> None:
    shown = dict[tuple[tuple[int, ...], frozenset[Boundary]], DraftContext]()

    def context(drafter: Drafter, members: Sequence[int]) -> DraftContext:
        key = tuple(members), drafter.requires
        if key not in shown:
            chosen = [verdicts[index] for index in members]
            states_read = {boundary: hidden_states[boundary] for boundary in drafter.requires}
            committed = [len(verdict.path) + 1 for verdict in chosen]
            shown[key] = context_for(rows, members, committed, _gather_states(states_read, members, chosen))
        return shown[key]

    for group in groups:
        drafter, members = group.drafter, [index for index in group.members if rows[index].error is None]
        everyone = sorted([*members, *(index for index in group.listeners if rows[index].error is None)])
        watched = everyone if drafter.watches else members
        if watched:
            drafter.observe(context(drafter, watched), [verdicts[index] for index in watched], scores.of(watched))
        if everyone:
            drafter.extend(context(drafter, everyone))


def _gather_states(
    hidden_states: Mapping[Boundary, Tensor], members: Sequence[int], verdicts: Sequence[Verdict]
) -> dict[Boundary, Tensor]:
    """Return (B, F, H) by boundary: the hidden states of the root and of each accepted node, padded with the root's. On
    an accelerator they are padded to the size of a recorded pass.
    """
    if not hidden_states:
        return {}
    width = max(len(verdict.path) for verdict in verdicts) + 1
    if any(states.device.type != "cpu" for states in hidden_states.values()):
        width = round_tokens(width, len(verdicts))
    nodes = [[0, *verdict.path] + [0] * (width - 1 - len(verdict.path)) for verdict in verdicts]
    places = [torch.tensor(list(members)).unsqueeze(1), torch.tensor(nodes)]
    by_device = {device: send(places, device) for device in {states.device for states in hidden_states.values()}}
    return {boundary: states[tuple(by_device[states.device])] for boundary, states in hidden_states.items()}


def _make_emitted(row: Row, tree: TokenTree, result: Verified, marks: Sequence[float], drafter: str | None) -> Emitted:
    """Return the result of a step for a row. `marks` are the times at which drafting, verifying and committing began,
    and at which the step ended.
    """
    verdict, (draft_ms, verify_ms, commit_ms) = result.verdict, [1e3 * (end - start) for start, end in pairwise(marks)]
    trace = StepTrace(
        step=row.steps,
        position=len(row.tokens) - len(result.tokens),
        drafter=drafter,
        rule=result.rule,
        nodes=result.nodes,
        path=verdict.path,
        next_token=verdict.next_token,
        kind=verdict.kind,
        draft_ms=draft_ms,
        verify_ms=verify_ms,
        commit_ms=commit_ms,
    )
    row.steps += 1
    return Emitted(
        tokens=result.tokens,
        sources=[Source.DRAFT] * len(verdict.path) + [verdict.kind],
        drafted=tree.size - len(tree.probes),
        depth=max(depth for node, depth in enumerate(tree.depths) if node not in tree.probes),
        logprobs=result.logprobs,
        trace=trace,
    )


def _drop_drafts_and_rescore(
    target: Target, rows: Sequence[Row], scored: Scored, row_trees: list[TokenTree]
) -> dict[int, NumericError]:
    """Drop the drafts of rows with numeric errors and score their roots again, so that these rows decode plainly in
    this step. Return the errors that they had, by index into `rows`. Of each such row this changes in place:

    * the cache: the slots after the root are cleared;
    * ``row_trees[index]`` becomes the tree of the root alone, and ``rows[index].error`` None;
    * the root's logits and hidden states in `scored` are replaced by the new ones.

    NaN or infinity in one slot's keys and values reaches all tokens of the row, whether or not they attend to it: a
    drafted token that overflows, or the leftovers of a draft that was never scored, make the root's scores NaN. Rows
    with an empty tree and clean slots keep their error.
    """
    numeric = {index: row.error for index, row in enumerate(rows) if isinstance(row.error, NumericError)}
    lost = {index: error for index, error in numeric.items() if target.clear(rows[index].cache_row) > 1}
    if not lost:
        return lost
    indices = list(lost)
    for index in indices:
        row_trees[index], rows[index].error = TokenTree(rows[index].tokens[-1]), None
    roots = [row_trees[index] for index in indices]
    again = target.score([rows[index].cache_row for index in indices], roots, boundaries=scored.hidden_states.keys())
    if scored.flat is None:
        scored.logits[indices, 0] = again.logits[:, 0]
    else:
        scored.logits[0, scored.flat.starts[indices]] = again.logits[:, 0]
    for boundary, states in scored.hidden_states.items():
        states[indices, 0] = again.hidden_states[boundary][:, 0]
    return lost


def verify(row: Row, scores: Scores, index: int, name: str) -> Verified:
    """Return the verdict of the rule `name` on row `index` of `scores`, cut at a stop token: nothing is committed after
    it.

    Nothing is raised: a failure of this row is stored in ``row.error``, as a `NumericError` if numbers are not finite,
    a `NoTokenLeftError` if every token is banned, a `RequestError` for anything else.
    """
    tree = scores.trees[index]
    with Isolation(row):
        if row.error is None:
            return _run_rule(row, scores, index, name)
    # Reached only if the row has failed, before or in the block.
    return Verified(Verdict(path=(), next_token=tree.tokens[0], kind=Source.TARGET), [tree.tokens[0]], name)


def _raise_unless(isolate: bool, rows: Sequence[Row]) -> None:
    """Raise the error of the first row that failed, unless rows are isolated from each other."""
    error = None if isolate else next((row.error for row in rows if row.error is not None), None)
    if error is not None:
        raise error


def _run_rule(row: Row, scores: Scores, index: int, name: str) -> Verified:
    tree = scores.trees[index]
    target = scores.row(index)
    verdict = rule_named(name).verify(tree, target, row.rng())
    accepted = set(verdict.path)
    for length, node in enumerate(verdict.path):
        if tree.tokens[node] in row.stop_ids:
            # A drafted stop token was accepted: it becomes the next token after the path, and nothing follows it.
            accepted = set(verdict.path[: length + 1])
            verdict = Verdict(path=verdict.path[:length], next_token=tree.tokens[node], kind=Source.DRAFT)
            break
    tokens = [*(tree.tokens[node] for node in verdict.path), verdict.next_token]
    nodes = _traced_nodes(tree, target, accepted) if row.traced else ()
    has_logprobs = row.sampler.params.logprobs is not None
    logprobs = target.logprobs((0, *verdict.path), tokens) if has_logprobs else None
    return Verified(verdict, tokens, name, nodes, logprobs)


def _traced_nodes(tree: TokenTree, target: HostRow | DeviceRow, accepted: set[int]) -> tuple[TracedNode, ...]:
    return tuple(
        TracedNode(
            token=tree.tokens[node],
            parent=tree.parents[node],
            draft_prob=tree.confidence[node] if drawn is Drawn.DETERMINISTIC else target.draft_prob(node),
            target_prob=target.target_prob(node),
            accepted=node in accepted,
            probe=node in tree.probes,
        )
        for node, drawn in enumerate(tree.drawn)
        if node
    )
