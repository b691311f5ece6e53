"""A tree that a causal LM drafts, as one recording: the tokens that its cache lacks, then the tree
level by level, and the draws between the levels. It is one launch, where passes one by one are
packed, sent and launched each by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from forerun.core.tree import ancestor_mask
from forerun.devices import attention_kernels, constant, sent
from forerun.model.inputs import Nodes, scatter_rows
from forerun.model.masks import Block
from forerun.model.padding import Pass, running
from forerun.model.recordings import bucket, extend_rows, first_rows, round_tokens, wide
from forerun.model.target import Target


class UnrolledDraft(Protocol):
    """A draft as a dataclass of tensors (B, ..)."""

    @property
    def run(self) -> int:
        """Number of nodes, counted from the first, that the model has run."""
        ...


Tree = TypeVar("Tree", bound=UnrolledDraft)
Descend = Callable[[Tensor, range], Tensor]  # (ids (B, K) so far, the last level) -> its raw logits (B, F, V)


@torch.inference_mode()
def unroll(
    target: Target,
    rows: Sequence[int],
    tokens: Sequence[Sequence[int]],
    parents: Sequence[int],
    grow: Callable[..., Tree],
    *numbers: Tensor,
    key: Hashable,
) -> Tree:
    """Append ``tokens[i]``, at least one, to row ``rows[i]`` and draft a tree behind the last of
    them, its root. The cache then holds what `Target.prefill` and `Target.score` of the nodes that
    were run leave there, to be committed.

    Args:
        parents: (N,) of the nodes of the whole shape, level by level; -1 of the root.
        grow: makes a tree of the raw logits (B, 1, V) after the roots, with a `Descend` for those further down; it is
            called with both and the `numbers`.
        numbers: (B, ..) what differs from call to call under one key, on the device.
        key: what `grow` does.

    Returns:
        What `grow` made; where it is recorded it lives until the next call.
    """
    count, counts = len(rows), [len(one) for one in tokens]
    batch = min(target.cache.rows, bucket(max(rows) + 1))
    nodes = Nodes.of_prompt(tokens, least=round_tokens(max(counts), batch))
    held = [target.lengths[row] for row in rows]
    ends = [one + more - 1 + len(parents) for one, more in zip(held, counts, strict=True)]
    target._check_room(rows, [end - one for end, one in zip(ends, held, strict=True)], counts)
    target._note_passes(rows, nodes)
    target.cache.touch(rows, ends)
    width = wide(max(*ends, max(held) + nodes.fresh), target.cache.slots)
    course = _Course(target, tuple(parents), width)

    def work(lengths: Tensor, counts: Tensor, ids: Tensor, index: Tensor, *numbers: Tensor) -> Tree:
        first = course.root(lengths, counts, ids)
        base = (lengths + counts - 1).clamp_min(0)

        def descend(drafted: Tensor, level: range) -> Tensor:
            fresh = drafted[:, level.start - 1 : level.stop - 1]
            ids = fresh.new_zeros(batch, len(level)).index_copy_(0, index, fresh)
            return course.below(base, counts > 0, ids, level).index_select(0, index)

        return grow(first.index_select(0, index), descend, *numbers)

    more = bucket(count) - count  # for as many rows as a recording is: the last one again
    at = torch.tensor([*rows, *[rows[-1]] * more])
    host = [scatter_rows(part, rows, batch) for part in (torch.tensor(held), torch.tensor(counts), nodes.ids)]
    given = [extend_rows(one, more) for one in numbers]
    whole = "unrolled", key, course.parents, width, batch, nodes.fresh, len(at)
    with target._turn:
        tree: Tree = target.recordings.run(whole, work, *sent([*host, at], target.device), *given)
    for row, one, own in zip(rows, held, counts, strict=True):
        target.lengths[row] = one + own - bool(tree.run)  # below a root that was run it is node 0, and not committed
        target._ran.pop(row, None)
        if tree.run:
            target._ran[row] = 1 + tree.run
    return first_rows(tree, count) if more else tree


class _Course:
    """The passes over a tree of one shape, on the device alone: over the first rows of the cache,
    each in its place.
    """

    def __init__(self, target: Target, parents: tuple[int, ...], width: int) -> None:
        self.target, self.parents, self._width = target, parents, width

    @cached_property
    def _sees(self) -> Tensor:
        """(N, N) bool on the host: a node looks at itself and those above it."""
        return ancestor_mask(torch.tensor([self.parents[1:]], dtype=torch.int64))[0]

    def root(self, lengths: Tensor, counts: Tensor, ids: Tensor) -> Tensor:
        """Return logits (B, 1, V) after the last of the first `counts` (B,) of `ids` (B, N), which
        stand behind `lengths`.
        """
        size, device = ids.shape[1], ids.device
        steps = torch.arange(size, device=device)
        real, places = steps < counts.unsqueeze(1), lengths.unsqueeze(1) + steps
        sees = torch.ones(size, size, dtype=torch.bool, device=device).tril() & real.unsqueeze(2)
        states = self._run(lengths, sees, places, places, real, ids)
        last = (counts - 1).clamp_min(0).view(-1, 1, 1).expand(-1, 1, states.shape[2])
        return self.target.head(states.gather(1, last))

    def below(self, base: Tensor, takes_part: Tensor, ids: Tensor, level: range) -> Tensor:
        """Return logits (B, F, V) after the nodes `level`, which hold `ids` (B, F), of rows whose
        root stands at `base`.
        """
        device, depths = ids.device, self._sees[: level.stop].sum(-1) - 1
        sees = constant(tuple(self._sees[level.start : level.stop, : level.stop].flatten().tolist()), device)
        places = base.unsqueeze(1) + torch.arange(level.start, level.stop, device=device)
        positions = base.unsqueeze(1) + constant(tuple(depths.tolist()), device)
        real = takes_part.unsqueeze(1).expand_as(ids)
        seen = sees.bool().view(1, len(level), level.stop) & real.unsqueeze(2)
        return self.target.head(self._run(base, seen, positions, places, real, ids))

    def _run(
        self, lengths: Tensor, sees: Tensor, positions: Tensor, places: Tensor, real: Tensor, ids: Tensor
    ) -> Tensor:
        """Return states (B, N, H) after the final norm. `positions` (B, M) are those of the nodes
        behind `lengths`, of which the last N are run.
        """
        positions = positions.clamp_max(self.target.max_length - 1)
        block = Block(lengths, sees, positions[:, -ids.shape[1] :], positions)
        slots = torch.where(real, places, self.target.cache.dump)
        with running(Pass()), attention_kernels(self.target.device):
            states: Tensor = self.target._base(
                **self.target._announced(block, slots, ids, self._width)
            ).last_hidden_state
        return states
