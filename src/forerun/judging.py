"""One row's tree before its rule: where the answer ends, what is told about it, and what happens if any of it fails.

Knows rows, rules and scores; no target and no drafter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from forerun.errors import Isolation
from forerun.scores import HostRow, Scores
from forerun.tree import TokenTree
from forerun.types import Drawn, Source, TokenLogprob, TracedNode, Verdict
from forerun.verify import rule_named
from forerun.verify.ladder import LadderRow

if TYPE_CHECKING:
    from forerun.step import Row

Logprobs = list[tuple[TokenLogprob, Mapping[int, TokenLogprob]]]
"""Of each emitted token, and of the likeliest at its place."""


class Judgement(NamedTuple):
    """What became of one row's tree."""

    verdict: Verdict
    """Of a row that failed it keeps nothing, and its token means nothing."""
    tokens: list[int]
    """What the row goes on with: those on the accepted path and the next one."""
    rule: str
    nodes: tuple[TracedNode, ...] = ()
    """For the trace, where one is wanted."""
    logprobs: Logprobs | None = None
    """One entry per emitted token where the request asked for log-probabilities."""


def judge(row: Row, scores: Scores, index: int, name: str) -> Judgement:
    """The verdict of the rule `name` on row `index` of `scores`, cut at a stop token: nothing is committed behind it.

    All that is done for this row alone in a step is done here. Nothing is raised. Why it failed is left in
    ``row.error``: a `NumericError` where the model's logits, or what processors made of them, are not finite, a
    `NoTokenLeftError` where what the request asked for bans every token, a `RequestError` for anything else.
    """
    tree = scores.trees[index]
    with Isolation(row):
        if row.error is None:
            return _judged(row, scores, index, name)
    return Judgement(Verdict(path=(), next_token=tree.tokens[0], kind=Source.TARGET), [tree.tokens[0]], name)


def raise_unless(isolate: bool, rows: Sequence[Row]) -> None:
    """Where rows are not isolated, the error of the first that failed is everybody's."""
    error = None if isolate else next((row.error for row in rows if row.error is not None), None)
    if error is not None:
        raise error


def _judged(row: Row, scores: Scores, index: int, name: str) -> Judgement:
    tree, target = scores.trees[index], scores.row(index)
    verdict = rule_named(name).verify(tree, target, row.rng())
    for kept, node in enumerate(verdict.path):
        if tree.tokens[node] in row.stop_ids:
            verdict = Verdict(path=verdict.path[:kept], next_token=tree.tokens[node], kind=Source.DRAFT)
            break
    tokens = [*(tree.tokens[node] for node in verdict.path), verdict.next_token]
    nodes = _traced_nodes(tree, target, set(verdict.path)) if row.traced else ()
    wanted = row.sampler.params.logprobs is not None
    logprobs = target.logprobs((0, *verdict.path), tokens) if wanted else None
    return Judgement(verdict, tokens, name, nodes, logprobs)


def _traced_nodes(tree: TokenTree, target: HostRow | LadderRow, accepted: set[int]) -> tuple[TracedNode, ...]:
    return tuple(
        TracedNode(
            token=tree.tokens[node],
            parent=tree.parents[node],
            draft_prob=_draft_prob(tree, target, node),
            target_prob=target.target_prob(node),
            accepted=node in accepted,
            probe=node in tree.probes,
        )
        for node in range(1, tree.size + 1)
    )


def _draft_prob(tree: TokenTree, target: HostRow | LadderRow, node: int) -> float | None:
    """Under what it was drawn from, else the drafter's confidence."""
    if tree.drawn[node] is not Drawn.DETERMINISTIC:
        return target.draft_prob(node)
    return tree.confidence[node] if tree.confidence else None
