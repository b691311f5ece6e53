"""Residual distributions of all nodes of a step, computed on the device without waiting and fetched at once.

A rule's draws only decide at which residual it stops (`forerun.core.probs`), so all residuals can be computed before
any rule runs. The few numbers of each that a rule may read are fetched in one transfer, including the tokens that would
be drawn, for which the random numbers are sent along. On a CPU, where a transfer is free but a vector is not, a
residual is computed on demand (`HostResidual`); tests compare the two implementations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from forerun.core.probs import TINY
from forerun.core.rng import Rng, first_of
from forerun.core.rules import Reads
from forerun.core.sampling import (
    Edits,
    Sampler,
    check_highest,
    check_raw,
    check_sums,
    has_filters,
    probs_of,
    process_rows,
    settings_of,
    widen,
)
from forerun.core.tree import TokenTree
from forerun.devices import fetch, send, send_packed, unpack, widest
from forerun.errors import ArgumentError
from forerun.model.recordings import MET_BEFORE, Recordings
from forerun.types import Drawn, TokenLogprob

Logprobs = list[tuple[TokenLogprob, Mapping[int, TokenLogprob]]]
"""Log-probability of each chosen token, with those of the likeliest tokens at its position."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResidualsInput:
    """The inputs for verifying one row of a step."""

    tree: TokenTree
    sampler: Sampler
    rng: Rng
    reads: Reads  # Numbers that its rule reads
    edits: Edits | None  # Changes of its parameters to the raw logits
    draft_probs: bool = False  # Whether each sampled node's draft probability is needed


class Residuals:
    """The target's distributions and their residuals at the B rows x N nodes of a step.

    Args:
        raw: (B, N, V) logits of the model.
        rows: (B,) the rows to verify.
        top: number of likeliest tokens at every node, by raw logits, that are fetched, too.
        recordings: of the device.
    """

    def __init__(
        self, raw: Tensor, rows: Sequence[ResidualsInput], *, top: int = 0, recordings: Recordings | None = None
    ) -> None:
        self.rows, self.nodes = rows, raw.shape[1]
        values: Tensor | None = None  # The processed logits, if the rows' parameters change any
        self.failed = dict[tuple[int, int], BaseException]()
        if any(row.edits is not None for row in rows):
            values, self.failed = process_rows(raw, [row.edits for row in rows])
        self._vectors: dict[tuple[int, int], Tensor] = {}
        """Vectors (V,) by (flat node, residual step), for rows whose rng does not draw by `Rng.exponentials_for`."""
        tensors = self._compute(raw, values, top, Recordings(None) if recordings is None else recordings)
        processed = raw if values is None else values
        tensors = tensors | self._logprobs(raw, processed, tensors)  # A recording overwrites them
        names = [name for name in tensors if name != "probs"]
        self._read: dict[str, Any] = {
            name: tensor.tolist() for name, tensor in zip(names, fetch([tensors[n] for n in names]), strict=True)
        }

    def row(self, index: int) -> DeviceRow:
        """Return the distributions of one row, for its rule."""
        return DeviceRow(self, index)

    def number(self, name: str, flat: int, *where: int) -> Any:
        """Return a number that was fetched for a node. Raises ArgumentError if the row's rule does not declare it in
        `Reads`.
        """
        numbers: Any = self._read.get(name, ())
        for index in (*where, flat):
            if index >= len(numbers):
                raise ArgumentError(
                    f"the rule asks for {name}, which its `reads` does not declare; see `forerun.core.rules.Reads`"
                )
            numbers = numbers[index]
        return numbers

    # --- on the device ------------------------------------------------------------------------------------------------

    def _compute(self, raw: Tensor, values: Tensor | None, top: int, recordings: Recordings) -> dict[str, Tensor]:
        """Run `_form` on this step; it is recorded (CUDA graph) if steps with the same plan recur."""
        reads = [row.reads for row in self.rows]
        size = raw.shape[-1]
        levels = self._levels()
        plan = _Plan(
            levels=tuple([(len(level.nodes), tuple([len(step[0]) for step in level.steps])) for level in levels]),
            filters=any(has_filters(row.sampler.params) for row in self.rows),
            greedy=any(row.sampler.greedy for row in self.rows),
            entropy=any(read.entropy for read in reads),
            draft_prob=any(row.draft_probs for row in self.rows),
            probs=any(row.sampler.params.logprobs is not None for row in self.rows),
            top=min(top, size),
        )
        if not levels:
            return _form(plan, raw, values)
        entries, variates, host_drawn = self._exponentials(size, widest(raw.device))
        drafts, draft_entries = self._drafts(size, raw.device)
        settings = torch.tensor([settings_of(row.sampler.params) for row in self.rows], dtype=variates.dtype)
        weighted = [read.weighted for read in reads for _ in range(self.nodes)]
        columns = [entries, *self._parents()]
        columns += [column for level in levels for column in (level.nodes, *chain.from_iterable(level.steps))]
        host = [settings, variates, torch.tensor(weighted), draft_entries]
        host += [torch.tensor(column, dtype=torch.int64) for column in columns]

        def keep(level: int, step: int, left: Tensor) -> None:
            for node, vector in zip(levels[level].nodes, left, strict=False):
                if node // self.nodes in host_drawn:
                    self._vectors[node, step] = vector

        edited, sampled = values is not None, drafts is not None
        on_device = [raw, *([] if values is None else [values]), *([] if drafts is None else [drafts])]

        def work(packed: Tensor, raw: Tensor, *others: Tensor) -> dict[str, Tensor]:
            values, drafts = others[0] if edited else None, others[-1] if sampled else None
            return _form(plan, raw, values, drafts, unpack(packed, host), keep if host_drawn else None)

        key = plan, edited, sampled, *((tensor.dtype, tensor.shape) for tensor in (*host, *on_device))
        packed = send_packed(host, raw.device)
        tensors: dict[str, Tensor] = recordings.run(
            None if host_drawn else key, work, packed, *on_device, after=MET_BEFORE
        )
        return tensors

    def _levels(self) -> list[_Level]:
        weighted = any(row.reads.weighted for row in self.rows)
        by_depth = dict[int, list[int]]()
        for index, row in enumerate(self.rows):
            for node in range(0 if row.reads.argmax else row.tree.size + 1):
                by_depth.setdefault(row.tree.depths[node] if weighted else 0, []).append(index * self.nodes + node)
        return [self._level(by_depth[depth]) for depth in sorted(by_depth)]

    def _level(self, nodes: list[int]) -> _Level:
        rejectable = {flat: self.rejectable_children(flat) for flat in nodes}
        level = _Level(nodes=sorted(nodes, key=lambda flat: -len(rejectable[flat])), steps=[])
        for step in range(max(map(len, rejectable.values()), default=0)):
            children, tokens, deterministic, removed = list[int](), list[int](), list[int](), list[int]()
            for flat in level.nodes:
                if len(rejectable[flat]) > step:
                    row, child = flat // self.nodes, rejectable[flat][step]
                    tree = self.rows[row].tree
                    children.append(row * self.nodes + child)
                    tokens.append(tree.tokens[child])
                    deterministic.append(tree.drawn[child] is Drawn.DETERMINISTIC)
                    removed.append(tree.drawn[child] is Drawn.WITHOUT_REPLACEMENT)
            level.steps.append((children, tokens, deterministic, removed))
        return level

    def rejectable_children(self, flat: int) -> Sequence[int]:
        """Return the children of a node that its row's rule may reject, in order."""
        row = self.rows[flat // self.nodes]
        return row.tree.tried[flat % self.nodes][: row.reads.rejections]

    def _parents(self) -> tuple[list[int], list[int]]:
        """Return (B N,) parents, as flat nodes, and (B N,) tokens; roots and padding are their own parents, with
        token 0.
        """
        parents, tokens = list(range(len(self.rows) * self.nodes)), [0] * (len(self.rows) * self.nodes)
        for index, row in enumerate(self.rows):
            for node in range(1, row.tree.size + 1):
                parents[index * self.nodes + node] = index * self.nodes + row.tree.parents[node]
                tokens[index * self.nodes + node] = row.tree.tokens[node]
        return parents, tokens

    def _exponentials(self, vocabulary: int, dtype: torch.dtype) -> tuple[list[int], Tensor, set[int]]:
        """Return each flat node's index into the exponential variates, the variates (P, T), and the rows whose rng has
        none.
        """
        entries, numbers, host_drawn = [0] * (len(self.rows) * self.nodes), list[NDArray[np.float64]](), set[int]()
        for index, row in enumerate(self.rows):
            by_depth = dict[int, int]()
            for node in range(0 if row.reads.argmax else row.tree.size + 1):
                depth = row.tree.depths[node]
                if depth not in by_depth and index not in host_drawn:
                    exponentials = row.rng.exponentials_for(depth, vocabulary)
                    if exponentials is None:
                        host_drawn.add(index)
                        continue
                    by_depth[depth] = len(numbers)
                    numbers.append(exponentials)
                entries[index * self.nodes + node] = by_depth.get(depth, 0)
        if not numbers:
            numbers.append(Rng(0, 0).exponentials(0, vocabulary))
        stacked = torch.from_numpy(np.stack(numbers)).to(dtype)
        return entries, stacked.clamp_min_(torch.finfo(dtype).tiny), host_drawn

    def _drafts(self, vocabulary: int, device: torch.device) -> tuple[Tensor | None, Tensor]:
        """Return (P, V) the distributions that sampled children were drawn from, where entry 0 is all zeros, and each
        flat node's index into them. The first is None if nothing was sampled.
        """
        distributions = list[Tensor]()
        entries = torch.zeros(len(self.rows) * self.nodes, dtype=torch.int64)
        for index, row in enumerate(self.rows):
            for node, probs in row.tree.draft_probs.items():
                missing = vocabulary - len(probs)
                distributions.append(pad(probs.to(device), (0, missing)) if missing else probs.to(device))
                entries[index * self.nodes + node] = len(distributions)
        return (torch.stack([torch.zeros_like(distributions[0]), *distributions]) if distributions else None), entries

    def _logprobs(self, raw: Tensor, values: Tensor, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors for `logprobs`, for every row whose request has log-probabilities, from raw and processed
        logits (B, N, V).
        """
        fetched = dict[str, Tensor]()
        for index, row in enumerate(self.rows):
            count = row.sampler.params.logprobs
            if count is None:
                continue
            nodes = row.tree.size + 1
            span = slice(index * self.nodes, index * self.nodes + row.tree.size + 1)
            width = max(map(len, row.tree.children))
            below = [[row.tree.tokens[child] for child in children] for children in row.tree.children]
            padded = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens in below], dtype=torch.int64)
            chosen = [send([padded.view(nodes, width)], raw.device)[0]]
            chosen += [tensors["argmax"][span].unsqueeze(1)]
            chosen += [tensors["drawn"][:, span].T] if "drawn" in tensors else []
            tokens = torch.cat(chosen, dim=1)
            processed = row.sampler.params.logprobs_mode == "processed_logprobs"
            if processed and not row.sampler.greedy:
                logs = tensors["probs"][span].log()
            else:
                logs = (values if processed else raw)[index, :nodes].float().log_softmax(-1)
            chosen_logs = logs.gather(1, tokens)
            best = logs.topk(min(count, logs.shape[-1]))
            ranks = (logs.unsqueeze(1) > chosen_logs.unsqueeze(2)).sum(-1) + 1
            looked = {
                "tokens": tokens,
                "own": chosen_logs,
                "ranks": ranks,
                "best": best.indices,
                "best_own": best.values,
            }
            fetched |= {f"{name} {index}": tensor for name, tensor in looked.items()}
        return fetched

    # --- on the host --------------------------------------------------------------------------------------------------

    def check(self, flat: int) -> None:
        """Raise the error of a node without a distribution: that of `Sampler.process` or of a custom processor."""
        error = self.failed.get((flat // self.nodes, flat % self.nodes))
        if error is not None:
            raise error
        check_raw(self.number("raw_max", flat))
        check_highest(self.number("max", flat))

    def raw_argmax(self, rows: Sequence[int]) -> list[list[int]]:
        """Return (B', N) ids of the largest raw logits of these rows; -1 where a logit is NaN."""
        largest, ids = self._read["raw_max"], self._read["raw_argmax"]
        spans = [range(row * self.nodes, (row + 1) * self.nodes) for row in rows]
        return [[-1 if math.isnan(largest[flat]) else ids[flat] for flat in span] for span in spans]

    def top_ids(self, rows: Sequence[int], k: int) -> NDArray[np.int64] | None:
        """Return (B', N, k) ids of the largest raw logits of these rows, or None if fewer than k were fetched."""
        ids = np.array(self._read.get("top", ()), dtype=np.int64)
        if ids.ndim < 2 or ids.shape[1] < k:
            return None
        return ids.reshape(len(self.rows), self.nodes, -1)[list(rows), :, :k]

    def logprobs(self, index: int, node: int, token: int) -> tuple[TokenLogprob, Mapping[int, TokenLogprob]]:
        """Return the log-probability of `token` after `node`, and those of the likeliest tokens there. The rule must
        have been able to choose the token.
        """
        fetched = {name: self._read[f"{name} {index}"][node] for name in ("tokens", "own", "ranks", "best", "best_own")}
        position = fetched["tokens"].index(token)
        chosen = TokenLogprob(logprob=fetched["own"][position], rank=fetched["ranks"][position])
        best = enumerate(zip(fetched["best"], fetched["best_own"], strict=True), start=1)
        return chosen, {token: TokenLogprob(logprob=value, rank=rank) for rank, (token, value) in best}


class _Level(NamedTuple):
    """Nodes whose residuals are computed together: those of one depth if the rule weights its nodes, else all nodes."""

    nodes: list[int]  # Flat nodes, in the order of falling numbers of children to reject
    steps: list[tuple[list[int], list[int], list[int], list[int]]]
    """One entry per residual step, each for the first nodes of the group: flat ids of the rejected children, their
    tokens, whether each is deterministic, and whether it is removed from the distribution of its next sibling.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """The structure of a step that determines the operations of `_form`; a recording is valid for one plan."""

    levels: tuple[tuple[int, tuple[int, ...]], ...]
    """For each `_Level`: its number of nodes, and how many have a first, a second, ... child to reject. Empty if all
    rules only read the argmax.
    """
    filters: bool  # Whether a row has a top-k, top-p or min-p
    greedy: bool  # Whether a row is at temperature 0
    entropy: bool  # Whether a rule reads the entropy
    draft_prob: bool
    probs: bool
    top: int


def _form(
    plan: _Plan,
    raw: Tensor,
    values: Tensor | None,
    drafts: Tensor | None = None,
    host: Sequence[Tensor] = (),
    keep: Callable[[int, int, Tensor], None] | None = None,
) -> dict[str, Tensor]:
    """Compute all numbers that rules may read at a step's nodes, and ``probs`` (B N, V), which stay on the device.

    Args:
        raw: (B, N, V) logits of the model.
        values: (B, N, V) processed logits; None if they equal the raw ones.
        drafts: (P, V) distributions of sampled children; the first is all zeros.
        host: values that differ between steps, in the order of `Residuals._compute`.
        keep: called with (level, step, residual vectors).
    """
    exact = widest(raw.device)
    size = raw.shape[-1]
    tensors = {
        "raw_max": raw.amax(-1).flatten().to(exact),
        "raw_argmax": raw.argmax(-1).flatten(),
    }
    if values is None:
        tensors |= {"max": tensors["raw_max"], "argmax": tensors["raw_argmax"]}
        values = widen(raw) if plan.levels else raw
    else:
        tensors |= {"max": values.amax(-1).flatten().to(exact), "argmax": values.argmax(-1).flatten()}
    if plan.top:
        tensors["top"] = raw.topk(plan.top, dim=-1).indices.flatten(0, 1)
    if not plan.levels:
        return tensors
    settings, variates, is_weighted, draft_at, variate_at, parent_at, token_at, *ints = host
    probs = probs_of(values, settings, filters=plan.filters)
    if plan.greedy:
        point = torch.zeros_like(probs).scatter_(-1, values.argmax(-1, keepdim=True), 1.0)
        probs = torch.where(settings[:, :1, None] > 0, probs, point)
    outside = (probs * (values == -torch.inf)).sum(-1)
    probs = probs.flatten(0, 1)
    tensors |= {"probs": probs} if plan.probs else {}
    tensors |= {
        "sums": torch.stack([probs.sum(-1), probs.amin(-1), outside.flatten()]),
        "of_child": probs.view(-1).index_select(0, parent_at * size + token_at),
    }
    if plan.entropy:
        tensors["entropy"] = torch.special.entr(probs).sum(-1, dtype=exact)
    if drafts is not None and plan.draft_prob:
        tensors["draft_prob"] = drafts[draft_at.index_select(0, parent_at), token_at]
    height = max(len(counts) for _, counts in plan.levels)
    steps = torch.zeros(height, 3, len(probs), dtype=exact, device=raw.device)
    drawn = torch.zeros(height + 1, len(probs), dtype=torch.int64, device=raw.device)
    weights = torch.ones(len(probs), dtype=exact, device=raw.device)
    for level, (_, counts) in enumerate(plan.levels):
        at, ints = ints[0], ints[1:]
        draft = None if drafts is None else drafts.index_select(0, draft_at.index_select(0, at))
        state = _StepResidual.of(probs.index_select(0, at), draft, weights.index_select(0, at))
        variate, kind = variates.index_select(0, variate_at.index_select(0, at)), is_weighted.index_select(0, at)
        for step in range(len(counts) + 1):
            if step:
                children, asked, deterministic, removed, *ints = ints
                count = len(children)
                at, variate, kind, state = at[:count], variate[:count], kind[:count], state.first(count)
                numbers, below, state = state.reject(asked, deterministic > 0, removed > 0, kind)
                steps[step - 1].index_copy_(1, at, numbers)
                weights.index_copy_(0, children, below)
            drawn[step].index_copy_(0, at, first_of(state.left, variate))
            if keep is not None:
                keep(level, step, state.left)
    return tensors | {"steps": steps, "drawn": drawn}


@dataclass(frozen=True, kw_only=True, slots=True)
class _StepResidual:
    """The residuals of M nodes after the same number of rejections; `HostResidual` does the same arithmetic on the
    host.
    """

    left: Tensor  # (M, V) the target's probabilities, or the residuals
    mass: Tensor  # (M,) their sums
    draft: Tensor | None  # (M, V) distributions of the next sampled children
    draft_mass: Tensor
    weights: Tensor  # (M,) weights of the nodes; 1 for rules without weights

    @classmethod
    def of(cls, probs: Tensor, draft: Tensor | None, weights: Tensor) -> _StepResidual:
        mass = probs.sum(1, dtype=weights.dtype)
        draft_mass = mass if draft is None else draft.sum(1, dtype=weights.dtype)
        return cls(left=probs, mass=mass, draft=draft, draft_mass=draft_mass, weights=weights)

    def first(self, count: int) -> _StepResidual:
        """Return the residuals of the first `count` nodes."""
        left, mass, weights = self.left[:count], self.mass[:count], self.weights[:count]
        draft = None if self.draft is None else self.draft[:count]
        return _StepResidual(left=left, mass=mass, draft=draft, draft_mass=self.draft_mass[:count], weights=weights)

    def reject(
        self, tokens: Tensor, deterministic: Tensor, removed: Tensor, weighted: Tensor
    ) -> tuple[Tensor, Tensor, _StepResidual]:
        """Reject one child of each node. Return (3, M): whether the child may be accepted at all, its ratio, and the
        remaining mass; (M,) its weight; and the residuals after the rejection.

        Args:
            tokens: (M,) tokens of the children.
            deterministic: (M,) bool, whether they are deterministic.
            removed: (M,) bool, whether the token is removed from the next sibling's distribution.
            weighted: (M,) bool, whether the row's rule weights its nodes.
        """
        at = tokens.unsqueeze(1)
        none = torch.zeros_like(self.mass)
        target_probs = self.left.gather(1, at).squeeze(1).to(self.mass.dtype)
        left = self.left.scatter(1, at, 0.0)
        drafted = torch.ones_like(target_probs)
        draft = self.draft
        if draft is not None:
            drafted = torch.where(deterministic, drafted, draft.gather(1, at).squeeze(1).to(target_probs.dtype))
            factor = (self.mass / (self.draft_mass * self.weights)).to(left.dtype).unsqueeze(1)
            left = torch.where(deterministic.unsqueeze(1), left, (self.left - draft * factor).clamp_min(0))
        possible = drafted > 0
        draft_mass = torch.where(deterministic, torch.ones_like(target_probs), self.draft_mass)
        ratio = (target_probs / self.mass) / (drafted / draft_mass)
        mass = left.sum(1, dtype=target_probs.dtype)
        alive = possible & (self.weights >= TINY) & (mass > 0)
        weighted_mass = torch.where(alive, mass * self.weights / self.mass, none)
        total = weighted_mass + (1.0 - self.weights).clamp_min(0)
        share = torch.where(total > 0, weighted_mass / total, torch.ones_like(total))
        after = torch.where(weighted & possible, share, self.weights)
        below = torch.where(weighted, (self.weights * ratio).clamp_max(1.0), torch.ones_like(ratio))
        next_mass = self.draft_mass
        if draft is not None:
            gone = removed & possible
            draft = torch.where(gone.unsqueeze(1), draft.scatter(1, at, 0.0), draft)
            next_mass = torch.where(gone, draft.sum(1, dtype=target_probs.dtype), next_mass)
        rest = _StepResidual(
            left=torch.where(alive.unsqueeze(1), left, self.left),
            mass=torch.where(alive, mass, self.mass),
            draft=draft,
            draft_mass=next_mass,
            weights=after,
        )
        return torch.stack([possible.to(target_probs.dtype), ratio, weighted_mass]), below, rest


class DeviceRow:
    """Distributions of one row, computed on the device (`NodeProbs`)."""

    def __init__(self, residuals: Residuals, index: int) -> None:
        self._residuals, self._index = residuals, index
        self._first = index * residuals.nodes

    def probs(self, node: int) -> DeviceResidual:
        """Return the distribution of the token after `node`."""
        flat = self._first + node
        self._residuals.check(flat)
        check_sums(*(self._residuals.number("sums", flat, which) for which in range(3)))
        return DeviceResidual(self._residuals, flat, 0)

    def argmax(self, node: int) -> int:
        """Return the token of the largest processed logit after `node`."""
        self._residuals.check(self._first + node)
        return int(self._residuals.number("argmax", self._first + node))

    def target_prob(self, node: int) -> float | None:
        """Return the target's probability of the token of `node`, or None at temperature 0."""
        if "of_child" not in self._residuals._read:
            return None
        return float(self._residuals.number("of_child", self._first + node))

    def draft_prob(self, node: int) -> float:
        """Return the draft probability of a sampled node's token."""
        return float(self._residuals.number("draft_prob", self._first + node))

    def logprobs(self, nodes: Sequence[int], tokens: Sequence[int]) -> Logprobs:
        """Return the log-probability of each token after its node, and those of the likeliest tokens there."""
        return [self._residuals.logprobs(self._index, *pair) for pair in zip(nodes, tokens, strict=True)]


class DeviceResidual:
    """A distribution or residual whose numbers were computed on the device and fetched (`Probs`)."""

    __slots__ = ("_flat", "_residuals", "_step")

    def __init__(self, residuals: Residuals, flat: int, step: int) -> None:
        self._residuals, self._flat, self._step = residuals, flat, step

    @property
    def child(self) -> int | None:
        """The next child to try, see `Probs.child`."""
        row = self._residuals.rows[self._flat // self._residuals.nodes]
        for child in row.tree.tried[self._flat % self._residuals.nodes][self._step :]:
            if row.tree.drawn[child] is Drawn.DETERMINISTIC or self._number(0) > 0:
                return child
            self._step += 1
        return None

    @property
    def ratio(self) -> float:
        """The ratio target / draft at the child's token."""
        assert self.child is not None, "there is no child to ask"
        return self._number(1)

    def reject(self, weight: float = 1.0) -> tuple[DeviceResidual, float]:
        """Return the residual without the child, and its mass. The weight is the one that was used on the device."""
        assert self.child is not None, "there is no child to ask"
        return DeviceResidual(self._residuals, self._flat, self._step + 1), self._number(2)

    def draw(self, rng: Rng) -> int:
        """Return the token that was drawn from this distribution on the device, unless the rng draws in its own way."""
        vector = self._residuals._vectors.get((self._flat, self._step))
        if vector is not None:
            row = self._residuals.rows[self._flat // self._residuals.nodes]
            return rng.draw(vector, row.tree.depths[self._flat % self._residuals.nodes])
        return int(self._residuals.number("drawn", self._flat, self._step))

    def of_child(self, child: int) -> float:
        """Return the target's probability of a child's token."""
        flat = self._flat - self._flat % self._residuals.nodes + child
        return float(self._residuals.number("of_child", flat))

    @property
    def entropy(self) -> float:
        """Entropy of the target's distribution, in nats."""
        return float(self._residuals.number("entropy", self._flat))

    def _number(self, which: int) -> float:
        if self._step >= len(self._residuals.rejectable_children(self._flat)):
            raise ArgumentError(
                "the rule rejects more children than its `reads` declares; see `forerun.core.rules.Reads`"
            )
        return float(self._residuals.number("steps", self._flat, self._step, which))
