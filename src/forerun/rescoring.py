"""A row whose numbers failed is scored again without its draft, which may be the reason. Knows rows and the target.

A token's keys and values reach all others of its row, whether or not these see it: a drafted token whose numbers
overflow takes the row's root with it, and so does what was left behind the root by a draft that was never scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from forerun.errors import NumericError
from forerun.target import Scored, Target
from forerun.tree import TokenTree, token_trees
from forerun.types import empty_draft

if TYPE_CHECKING:
    from forerun.step import Row


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
