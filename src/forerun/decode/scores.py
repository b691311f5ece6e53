"""The target's scores for a step's trees: raw logits, and the distributions that rules and drafters read."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.core.probs import HostResidual
from forerun.core.rules import rule_named
from forerun.core.sampling import Edits, Sampler
from forerun.core.tree import TokenTree
from forerun.decode.residuals import DeviceRow, Logprobs, Residuals, ResidualsInput
from forerun.decode.row import Row
from forerun.devices import rows_of
from forerun.errors import Isolation, NumericError
from forerun.model import largest
from forerun.model import top_ids as compiled_top_ids
from forerun.model.inputs import Flat
from forerun.model.recordings import Recordings
from forerun.types import TokenLogprob

_BLOCK = 64  # Logits of a block, of which only the maximum is sorted at first


class Scores:
    """The target's raw logits over a step's trees, and the distributions computed from them.

    On a CPU everything is computed on demand. On an accelerator everything that rules and drafters may read is computed
    beforehand and fetched at once (`Residuals`).

    Args:
        logits: (B, N, V), raw; with `flat` (1, M, V), without padding.
        rows: B sequences.
        row_trees: the tree of each row.
        rules: the name of each row's rule.
        top: number of ids per node that `top_ids` will return; 0: none.
        flat: the nodes that the logits belong to; on a CPU only.
        recordings: of the device, to record the computation.
    """

    def __init__(
        self,
        logits: Tensor,
        rows: Sequence[Row],
        row_trees: Sequence[TokenTree],
        rules: Sequence[str],
        *,
        top: int = 0,
        flat: Flat | None = None,
        recordings: Recordings | None = None,
    ) -> None:
        self.logits, self._flat = logits, flat
        self._starts = None if flat is None else flat.starts.tolist()
        self.trees = tuple(row_trees)
        self._rows = rows
        self._indices: Sequence[int] = range(len(rows))
        self._lengths = [len(row.tokens) for row in rows]
        self._argmax: list[list[int]] | None = None
        self._residuals: Residuals | None = None
        if logits.device.type != "cpu":
            self._residuals = self._form(rules, top, recordings)

    def row(self, index: int) -> HostRow | DeviceRow:
        """Return the distributions of one row, for its rule."""
        return HostRow(self, index) if self._residuals is None else self._residuals.row(self._indices[index])

    def of(self, members: Sequence[int]) -> Scores:
        """Return the scores of some of the rows, in that order, for a drafter that reads only its members. The result
        is always another object, so that assigning to its fields does not change this one.
        """
        some = copy.copy(self)
        if list(members) == list(range(len(self._rows))):
            return some
        some._rows, some.trees = [self._rows[i] for i in members], tuple([self.trees[i] for i in members])
        some._lengths, some._indices = [self._lengths[i] for i in members], [self._indices[i] for i in members]
        return some

    def sampler(self, index: int) -> Sampler:
        """Return the row's sampling parameters."""
        return self._rows[index].sampler

    def committed(self, index: int) -> Sequence[int]:
        """Return the row's output at the time when the tree was scored."""
        row = self._rows[index]
        return row.tokens[row.prompt_length : self._lengths[index]]

    def output(self, index: int, node: int) -> list[int]:
        """Return the row's output up to and including `node`."""
        tree = self.trees[index]
        return [*self.committed(index), *(tree.tokens[step] for step in tree.path(node))]

    def logits_at(self, index: int, node: int) -> Tensor:
        """Return the raw logits (V,) after a row's node."""
        row = self._indices[index]
        return self.logits[row, node] if self._starts is None else self.logits[0, self._starts[row] + node]

    def raw_argmax(self, index: int, node: int) -> int:
        """Return the argmax of the raw logits after `node`; the first call computes it for the whole batch."""
        if self._argmax is None:
            self._argmax = self._largest()
        found = self._argmax[self._indices[index]][node]
        if found < 0:
            raise NumericError("the model produced NaN logits; check the checkpoint, or load it with dtype float32")
        return found

    def top_ids(self, k: int) -> NDArray[np.int64]:
        """Return (B, N, k) ids of the largest raw logits, the largest first. A drafter that calls
        this declares it in `Drafter.top_ids`.
        """
        if self._residuals is None or (fetched := self._residuals.top_ids(self._indices, k)) is None:
            ids = top_ids(self.logits, k).cpu()
            return rows_of(ids if self._flat is None else self._flat.restore(ids), self._indices).numpy()
        return fetched

    def _largest(self) -> list[list[int]]:
        """Return the ids of the largest raw logits of all rows' nodes; -1 where a logit is NaN."""
        if self._residuals is not None:
            return self._residuals.raw_argmax(range(len(self._residuals.rows)))
        found = largest(self.logits)
        return found if self._starts is None else [found[0][a:b] for a, b in pairwise(self._starts)]

    def _form(self, rules: Sequence[str], top: int, recordings: Recordings | None) -> Residuals:
        inputs = []
        for index, (row, tree, rule) in enumerate(zip(self._rows, self.trees, rules, strict=True)):
            edits: Edits | None = None
            if not row.sampler.neutral:
                with Isolation(row):
                    paths = [[tree.tokens[step] for step in tree.path(node)] for node in range(tree.size + 1)]
                    edits = row.sampler.edits(self.logits.shape[-1], self.committed(index), paths)
            reads = rule_named(rule).reads
            row_inputs = ResidualsInput(
                tree=tree, sampler=row.sampler, rng=row.rng(), reads=reads, edits=edits, draft_probs=row.traced
            )
            inputs.append(row_inputs)
        return Residuals(self.logits, inputs, top=top, recordings=recordings)


class HostRow:
    """Distributions of one row on the host, each computed on demand (`NodeProbs`)."""

    def __init__(self, scores: Scores, index: int) -> None:
        self._scores, self._index = scores, index
        self._known: dict[int, Tensor] = {}

    def probs(self, node: int) -> HostResidual:
        """Return the processed distribution after `node`, float32."""
        if node not in self._known:
            output = self._scores.output(self._index, node)
            self._known[node] = self._scores.sampler(self._index).probs(self._logits(node), output)
        return HostResidual(self._scores.trees[self._index], node, self._known[node])

    def argmax(self, node: int) -> int:
        """Return the token of the largest processed logit after `node`."""
        sampler = self._scores.sampler(self._index)
        if sampler.neutral:
            return self._scores.raw_argmax(self._index, node)
        return int(sampler.process(self._logits(node), self._scores.output(self._index, node)).argmax())

    def target_prob(self, node: int) -> float | None:
        """Return the target's probability of the token of `node`, or None if no rule read its parent's distribution."""
        tree = self._scores.trees[self._index]
        probs = self._known.get(tree.parents[node])
        return None if probs is None else float(probs[tree.tokens[node]])

    def draft_prob(self, node: int) -> float:
        """Return the draft probability of a sampled node's token."""
        tree = self._scores.trees[self._index]
        return float(tree.draft_probs[tree.parents[node]][tree.tokens[node]])

    def logprobs(self, nodes: Sequence[int], tokens: Sequence[int]) -> Logprobs:
        """Return the log-probability of each token after its node, and those of the likeliest tokens there."""
        params = self._scores.sampler(self._index).params
        processed = params.logprobs_mode == "processed_logprobs"
        if processed and params.greedy:  # Of the processed logits, as vLLM has it: a point mass tells nothing
            sampler, index = self._scores.sampler(self._index), self._index
            scored = [sampler.process(self._logits(node), self._scores.output(index, node)) for node in nodes]
        else:
            scored = [self.probs(node).values.log() if processed else self._logits(node) for node in nodes]
        return logprobs_of(torch.stack(scored), tokens, params.logprobs or 0)

    def _logits(self, node: int) -> Tensor:
        return self._scores.logits_at(self._index, node)


def top_ids(logits: Tensor, k: int) -> Tensor:
    """Return (B, N, k) ids of the largest logits (B, N, V), the largest first, ties in any order. They are in the k
    blocks with the largest maxima, so only those are sorted: seven times as fast as sorting all for V = 150,000.
    """
    if (found := compiled_top_ids(logits, k)) is not None:
        return found
    if logits.device.type == "cpu":
        # torch compares bfloat16 slowly: 12 nodes of 49,152 logits took 0.65 ms, in float32 0.40
        logits = logits.float()
    size = logits.shape[-1]
    whole = size // _BLOCK * _BLOCK
    if whole < 4 * k * _BLOCK:
        return logits.topk(k).indices
    maxima = logits[..., :whole].view(*logits.shape[:-1], whole // _BLOCK, _BLOCK).amax(-1)
    blocks = maxima.topk(k, sorted=False).indices
    ids = (blocks.unsqueeze(-1) * _BLOCK + torch.arange(_BLOCK, device=logits.device)).flatten(-2)
    if whole < size:
        rest = torch.arange(whole, size, device=logits.device)
        ids = torch.cat([ids, rest.expand(*ids.shape[:-1], -1)], -1)
    best = logits.gather(-1, ids).topk(k).indices
    return ids.gather(-1, best)


def logprobs_of(logits: Tensor, tokens: Sequence[int], top: int) -> Logprobs:
    """Return the log-probability of each token (M,) and of the `top` likeliest tokens at its position, under
    softmax(logits (M, V)).
    """
    entries: Logprobs = []
    together = _TOGETHER_ON_A_CPU if logits.device.type == "cpu" else _TOGETHER
    for start in range(0, len(tokens), together):
        part = slice(start, start + together)
        values = logits[part].float()
        total = values.logsumexp(-1, keepdim=True)
        chosen_logits = values.gather(-1, torch.tensor(tokens[part], device=values.device).unsqueeze(-1))
        # Summed as float32, exact below 2**24, in half the time of counting booleans
        ranks = torch.gt(values, chosen_logits, out=torch.empty_like(values)).sum(-1).int() + 1
        ids = (
            top_ids(values.unsqueeze(0), min(top, values.shape[-1]))[0]
            if top
            else chosen_logits.new_empty(len(chosen_logits), 0).long()
        )
        best = (values.gather(-1, ids) - total).tolist()
        likeliest = [
            {token: TokenLogprob(logprob=v, rank=rank) for rank, (token, v) in enumerate(zip(*pair, strict=True), 1)}
            for pair in zip(ids.tolist(), best, strict=True)
        ]
        chosen = zip((chosen_logits - total).squeeze(-1).tolist(), ranks.tolist(), likeliest, strict=True)
        entries += [(TokenLogprob(logprob=v, rank=r), others) for v, r, others in chosen]
    return entries


_TOGETHER, _TOGETHER_ON_A_CPU = 64, 8
"""Positions scored together: each takes float32 over the vocabulary, and 8 of 49,152 stay in a core's cache."""
