"""The inputs of one pass, the nodes of a batch of trees, and its outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.core.tree import Resume, TokenTree, ancestor_mask
from forerun.devices import send_ints
from forerun.model.padding import Flat
from forerun.types import LAST_HIDDEN, Boundary


@dataclass(frozen=True, kw_only=True, slots=True)
class Nodes:
    """The tokens of a pass on the host: a batch of trees, packed. A chunk of a prompt is a chain."""

    ids: Tensor  # (B, N) int64; on the device where they were drafted there. All else is on the host
    depths: Tensor  # (B, N) int64, positions behind the row's committed tokens
    sees: Tensor  # (B, N, N) bool: who looks at whom
    real: Tensor  # (B, N) bool; the rest is padding
    counts: Sequence[int]  # (B,) how many are real
    reach: Sequence[int]  # (B,) positions that the deepest real one needs behind the committed tokens
    start: int  # Nodes before this one were run earlier in the step; they are seen, not run
    paths: Tensor | None = None
    """(B, N, D) int32, the nodes from the root down to each node, -1 behind it; None if all rows
    are chains, where a key's slot says how many a node sees before it.
    """
    resume: Sequence[Resume | None] = ()  # (B,) what the first nodes of each row have already run through; or empty

    @classmethod
    def of_prompt(cls, pieces: Sequence[Sequence[int]], least: int = 0) -> Nodes:
        """Pack chains of unequal lengths, padded on the right to the longest, or to `least`."""
        counts = [len(piece) for piece in pieces]
        size = max(least, *counts)
        steps = torch.arange(size)
        return cls(
            ids=torch.tensor([[*piece, *[0] * (size - len(piece))] for piece in pieces]),
            depths=steps.expand(len(pieces), -1),
            sees=torch.ones(size, size, dtype=torch.bool).tril().expand(len(pieces), -1, -1),
            real=steps < torch.tensor(counts).unsqueeze(1),
            counts=counts,
            reach=counts,
            start=0,
        )

    @classmethod
    def of_trees(cls, trees: Sequence[TokenTree], *, start: int = 0) -> Nodes:
        """Pack trees of unequal sizes, padded to the largest."""
        counts = [tree.size for tree in trees]
        ids, parents = np.zeros((2, len(trees), max(counts) + 1), np.int64)
        for row, tree in enumerate(trees):
            ids[row, : tree.size + 1], parents[row, : tree.size + 1] = tree.tokens, tree.parents
        resume = [tree.resume for tree in trees]
        return cls._of(torch.from_numpy(ids), parents[:, 1:], counts, start, resume)

    @classmethod
    def of_levels(
        cls,
        roots: Sequence[int],
        ids: Tensor,
        parents: Sequence[int] | Sequence[Sequence[int]],
        *,
        counts: Sequence[int],
        start: int,
    ) -> Nodes:
        """Pack trees that grow level by level on their device; nodes before `start` have been run.

        Args:
            ids: (B, K) tokens of the nodes so far.
            parents: (K + 1,) or more, of each node, the root's first; (B, K + 1) where the trees have several shapes.
            counts: (B,) drafted nodes of each row; the rest is padding.
        """
        size = ids.shape[1]
        wide = np.broadcast_to(np.array(parents, np.int64)[..., 1 : size + 1], (len(roots), size))
        ids = torch.cat([send_ints(roots, ids.device).view(-1, 1), ids], dim=1)
        return cls._of(ids, wide, [min(size, count) for count in counts], start, ())

    @classmethod
    def _of(
        cls, ids: Tensor, parents: NDArray[np.int64], counts: Sequence[int], start: int, resume: Sequence[Resume | None]
    ) -> Nodes:
        shape = _shape(parents.tobytes(), parents.shape, tuple(counts))
        return cls(**shape, ids=ids, counts=[count + 1 for count in counts], start=start, resume=resume)

    def chains(self) -> Tensor:
        """Return the `paths` of chains."""
        size = self.ids.shape[1]
        steps = torch.arange(size, dtype=torch.int32)
        return steps.where(steps <= steps.unsqueeze(1), -1).expand(len(self.ids), -1, -1)

    def structure(
        self, committed: Sequence[int], *, missing: int, unseen: int, dump: int, longest: int
    ) -> list[Tensor]:
        """Return the parts of a `masks.Block` behind so many committed tokens (B,), and slots (B, N). N counts
        `missing` nodes of padding, which are written to the slot `dump`, M `unseen` ones; a sequence has at most
        `longest` positions.
        """
        lengths = torch.tensor(committed, dtype=torch.int64).unsqueeze(1)
        positions = (lengths + self.depths).clamp(max=longest - 1)
        slots = torch.where(self.real, lengths + torch.arange(self.ids.shape[1]), dump)
        sees = (self.sees & self.real.unsqueeze(2))[:, self.start :]
        return [
            lengths.squeeze(1),
            torch.nn.functional.pad(sees, (0, unseen, 0, missing)) if missing else sees,
            pad_right(positions[:, self.start :], missing),
            pad_right(positions, unseen),
            pad_right(slots[:, self.start :], missing, dump),
        ]

    @property
    def fresh(self) -> int:
        return self.ids.shape[1] - self.start

    def begun(self, writes: Sequence[int], boundaries: Set[Boundary]) -> Begun | None:
        """Return the part of `resume` that still holds, or None. A row is run anew if its slots
        were written since (`writes` (B,) counts the passes over each row) or if it stands at
        another boundary than the first. None also if a state below the boundary is asked for, which
        only a whole pass computes.
        """
        good = [one for one, now in zip(self.resume, writes, strict=False) if one is not None and one.stamp == now]
        if not good or any(boundary != LAST_HIDDEN and boundary < good[0].boundary for boundary in boundaries):
            return None
        boundary, counts = good[0].boundary, list[int]()
        for one, now in zip(self.resume, writes, strict=True):
            holds = one is not None and one.stamp == now and one.boundary == boundary
            counts.append(len(one.states) if one is not None and holds else 0)
        states = good[0].states.new_zeros(len(counts), max(counts), good[0].states.shape[1])
        for row, (one, count) in enumerate(zip(self.resume, counts, strict=True)):
            if one is not None and count:
                states[row, :count] = one.states
        return Begun(boundary=boundary, states=states, counts=counts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """The results of one forward pass."""

    logits: Tensor  # (B, N, V) raw logits in the model's dtype; N is 1 after a prefill without ``all_logits``
    hidden_states: Mapping[Boundary, Tensor] = field(default_factory=dict)  # (B, N, H) of the tokens run, left aligned
    flat: Flat | None = None  # Where the logits are those of the real tokens alone, (1, M, V): which these are


@dataclass(frozen=True, kw_only=True, slots=True)
class Begun:
    """The states of B trees after the target's first layers, where they were run and still hold."""

    boundary: int  # Layers that the nodes have run through, at least 1
    states: Tensor  # (B, R, H) at that boundary
    counts: Sequence[int]  # (B,) how many of the R were run; 0 for a row that has to be run whole


@lru_cache(maxsize=256)
def _shape(parents: bytes, shape: tuple[int, ...], counts: tuple[int, ...]) -> dict[str, Any]:
    """Return what follows from the int64 parents (B, K) of trees with so many drafted nodes each: the fields of
    `Nodes` of these names. Most steps draft trees of a known shape, so results are cached and shared; never write to
    them.
    """
    above = np.frombuffer(parents, np.int64).reshape(shape)
    sees = ancestor_mask(torch.from_numpy(above.copy()))
    depths, steps = sees.sum(-1) - 1, np.arange(shape[1])
    real = torch.arange(shape[1] + 1) <= torch.tensor(counts).unsqueeze(1)
    paths = None
    if ((above != steps) & (steps < np.array(counts)[:, None])).any():
        size = shape[1] + 1
        found = torch.arange(size).where(sees, size).sort(-1).values[..., : int(depths.max()) + 1]
        paths = found.where(found < size, -1).to(torch.int32)
    reach = (depths * real).amax(1).add(1).tolist()
    return {"sees": sees, "depths": depths, "real": real, "paths": paths, "reach": reach}


def scatter_rows(values: Tensor, rows: Sequence[int], batch: int, rest: int = 0) -> Tensor:
    """Scatter (B', ..) into (B, ..): each row at its own index, `rest` elsewhere. Never write to what it returns."""
    if len(rows) == batch and list(rows) == list(range(batch)):
        return values
    found = values.new_full((batch, *values.shape[1:]), rest)
    found[list(rows)] = values
    return found


def take_last(values: Tensor, counts: Sequence[int]) -> Tensor:
    """Return each row's last of its first `counts` (B,): (B, N, ..) -> (B, 1, ..)."""
    ends = send_ints([count - 1 for count in counts], values.device)
    return values.gather(1, ends.view(-1, 1, 1).expand(-1, 1, values.shape[-1]))


def pad_right(values: Tensor, missing: int, value: int = 0) -> Tensor:
    """Pad (B, N) -> (B, N + missing)."""
    return torch.nn.functional.pad(values, (0, missing), value=value) if missing else values
