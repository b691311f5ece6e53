"""What the target said about a step's trees: raw logits, and the processed laws that a rule or a drafter asks for.

Knows rows and trees; no rule and no drafter.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from forerun.errors import NumericError
from forerun.sampling import Sampler
from forerun.target.kernels import fused_ops
from forerun.tree import TokenTree

if TYPE_CHECKING:
    from forerun.step import Row

_NONE = -1
"""Stands for the largest of logits that hold NaN."""


class Scores:
    """The target's raw logits over a step's trees, and the processed laws that rules ask for."""

    def __init__(self, logits: Tensor, rows: Sequence[Row], row_trees: Sequence[TokenTree]) -> None:
        self.logits = logits
        """(B, N, V), raw."""
        self.trees = tuple(row_trees)
        self._rows = rows
        self._lengths = [len(row.tokens) for row in rows]
        self._argmax: list[list[int]] | None = None

    def row(self, index: int) -> RowScores:
        """One row's laws, as a rule sees them."""
        return RowScores(self, index)

    def of(self, members: Sequence[int]) -> Scores:
        """The scores of some of the rows, in that order: what a drafter may see of the rows that are its members.

        Always another object, though the logits may be the same: whoever assigns to it changes his own.
        """
        if list(members) == list(range(len(self._rows))):
            return copy.copy(self)
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
            self._argmax = _largest(self.logits)
        found = self._argmax[index][node]
        if found == _NONE:
            raise NumericError("the model produced NaN logits; check the checkpoint, or load it with dtype float32")
        return found


class RowScores:
    """`NodeLaws` of one row, each law computed at most once."""

    def __init__(self, scores: Scores, index: int) -> None:
        self._scores, self._index = scores, index
        self._laws: dict[int, Tensor] = {}

    def logits(self, node: int) -> Tensor:
        """(V,) raw logits after `node`."""
        return self._scores.logits[self._index, node]

    def law(self, node: int) -> Tensor:
        """(V,) float32 processed law after `node`."""
        if node not in self._laws:
            output = self._scores.output(self._index, node)
            self._laws[node] = self._scores.sampler(self._index).law(self.logits(node), output)
        return self._laws[node]

    def argmax(self, node: int) -> int:
        """Token of the largest processed logit after `node`."""
        sampler = self._scores.sampler(self._index)
        if sampler.neutral:
            return self._scores.raw_argmax(self._index, node)
        return int(sampler.process(self.logits(node), self._scores.output(self._index, node)).argmax())

    def known(self, node: int, token: int) -> float | None:
        """Target probability of `token` after `node` where a rule asked for that law; else None."""
        return float(self._laws[node][token]) if node in self._laws else None


def _largest(logits: Tensor) -> list[list[int]]:
    """Ids of the largest of (B, N, V), the first of equals; `_NONE` where there is NaN.

    On a CPU our own kernel finds those of bf16, numpy the others: torch takes three to six times as long.
    """
    if fused_ops.takes(logits):
        nodes, ids = logits.shape[1], fused_ops.largest(logits)
        return [ids[start : start + nodes] for start in range(0, len(ids), nodes)]
    if logits.device.type != "cpu":
        values, places = logits.max(-1)
        found: list[list[int]] = places.masked_fill_(values.isnan(), _NONE).tolist()
        return found
    flat = (logits.float() if logits.dtype is torch.bfloat16 else logits).flatten(0, 1).numpy()
    best = flat.argmax(-1)
    best[np.isnan(flat[np.arange(len(flat)), best])] = _NONE
    found = best.reshape(logits.shape[:2]).tolist()
    return found
