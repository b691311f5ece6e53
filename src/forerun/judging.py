"""One row's tree before its rule: where the answer ends, what is told about it, and what happens if any of it fails.

Knows rows, rules and scores; no target and no drafter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

import torch

from forerun.errors import RequestError, of_the_process
from forerun.sampling import logprobs_of
from forerun.scores import RowScores, Scores
from forerun.tree import TokenTree
from forerun.types import Drawn, SamplingParams, Source, TokenLogprob, TracedNode, Verdict
from forerun.verify import rule_named

if TYPE_CHECKING:
    from forerun.step import Row

Logprobs = list[tuple[TokenLogprob, Mapping[int, TokenLogprob]]]
"""Of each emitted token, and of the likeliest at its place."""


class Isolation:
    """``with Isolation(row):`` around what is done for one row alone: if it raises, the row has an error and nothing is
    raised. So whatever belongs to one request (its distribution, processors, grammar, stop strings) ends that request.
    """

    __slots__ = ("_row",)

    def __init__(self, row: Row) -> None:
        self._row = row

    def __enter__(self) -> None:
        """Nothing is kept."""

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> bool:
        if error is None or of_the_process(error):
            return False
        self._row.error = self._row.error or RequestError.of(error)
        return True


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
    tree, laws = scores.trees[index], scores.row(index)
    verdict = rule_named(name).verify(tree, laws, row.rng())
    for kept, node in enumerate(verdict.path):
        if tree.tokens[node] in row.stop_ids:
            verdict = Verdict(path=verdict.path[:kept], next_token=tree.tokens[node], kind=Source.DRAFT)
            break
    tokens = [*(tree.tokens[node] for node in verdict.path), verdict.next_token]
    nodes = _traced_nodes(tree, laws, set(verdict.path)) if row.traced else ()
    logprobs = _logprobs(row.sampler.params, laws, verdict, tokens)
    return Judgement(verdict, tokens, name, nodes, logprobs)


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
                probe=node in tree.probes,
            )
        )
    return tuple(nodes)


def _draft_prob(tree: TokenTree, node: int) -> float | None:
    """Under the law that it was drawn from, else the drafter's confidence."""
    law = tree.laws.get(tree.parents[node])
    if law is not None and tree.drawn[node] is not Drawn.DETERMINISTIC:
        return float(law[tree.tokens[node]])
    return tree.confidence[node] if tree.confidence else None


def _logprobs(params: SamplingParams, laws: RowScores, verdict: Verdict, tokens: Sequence[int]) -> Logprobs | None:
    if params.logprobs is None:
        return None
    processed = params.logprobs_mode == "processed_logprobs"
    scored = [laws.law(node).log() if processed else laws.logits(node) for node in (0, *verdict.path)]
    return logprobs_of(torch.stack(scored), tokens, params.logprobs)
