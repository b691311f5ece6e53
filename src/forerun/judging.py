"""One row's tree before its rule: which rule judges, where the answer ends, and what happens if numbers fail.

Knows rows, rules and scores; no target and no drafter.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from forerun.errors import ForerunError, NoTokenLeftError, NumericError
from forerun.scores import RowScores, Scores
from forerun.types import Source, Verdict
from forerun.verify import default_rule, rule_named

if TYPE_CHECKING:
    from forerun.step import Row

log = logging.getLogger(__name__)


class Judgement(NamedTuple):
    """What became of one row's tree."""

    verdict: Verdict
    rule: str
    laws: RowScores
    """Those that the rule asked for."""
    error: ForerunError | None = None
    """Why there is no verdict: the one given keeps nothing, and its token means nothing."""


def judge(row: Row, scores: Scores, index: int, *, isolate: bool) -> Judgement:
    """The verdict on row `index` of `scores`, cut at a stop token so that nothing is committed behind it.

    Args:
        isolate: hand the error of a row without a law back instead of raising it.

    Raises:
        NumericError: the model's logits, or what processors made of them, are not finite.
        NoTokenLeftError: what the request asked for bans every token.
    """
    tree, laws = scores.trees[index], scores.row(index)
    name = default_rule(tree, greedy=row.sampler.greedy)
    if row.rule is not None and tree.size:
        if rule_named(row.rule).accepts(tree):
            name = row.rule
        else:
            _warn(row.rule, name)
    try:
        verdict = rule_named(name).verify(tree, laws, row.coins())
    except (NoTokenLeftError, NumericError) as error:
        if not isolate:
            raise
        nothing = Verdict(path=(), next_token=tree.tokens[0], kind=Source.TARGET)
        return Judgement(nothing, name, laws, error)
    for kept, node in enumerate(verdict.path):
        if tree.tokens[node] in row.stop_ids:
            cut = Verdict(path=verdict.path[:kept], next_token=tree.tokens[node], kind=Source.DRAFT)
            return Judgement(cut, name, laws)
    return Judgement(verdict, name, laws)


@lru_cache(maxsize=64)
def _warn(asked: str, used: str) -> None:
    log.warning("rule %r cannot judge drafts that were drawn this way; %r judges them", asked, used)
