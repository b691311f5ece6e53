"""What goes into one pass (ids, positions, mask, slots of the cache) and what comes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from forerun.core.tree import Resume, TokenTree, ancestor_mask
from forerun.devices import sent, sent_ints
from forerun.model import masks
from forerun.model.cache import SlotCache
from forerun.model.masks import MaskStyle
from forerun.model.padding import Buckets, Flat
from forerun.model.recordings import bucket, wide
from forerun.types import LAST_HIDDEN, Boundary


@lru_cache(maxsize=256)
def _relations(parents: bytes, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Who sees whom (B, N, N) and the depths (B, N) of trees with these int64 parents (B, K). Most steps draft trees of
    a shape that was drafted before; what is returned is shared and never written to."""
    sees = ancestor_mask(torch.from_numpy(np.frombuffer(parents, np.int64).reshape(shape).copy()))
    return sees, sees.sum(-1) - 1


def _spread(values: Tensor, rows: Sequence[int], batch: int, rest: int) -> Tensor:
    """(B', ..) -> (B, ..): each row at its own place, `rest` elsewhere."""
    spread = values.new_full((batch, *values.shape[1:]), rest)
    spread[list(rows)] = values
    return spread


def _filled(values: Tensor, missing: int, value: int = 0) -> Tensor:
    """(B, N) -> (B, N + missing)"""
    return pad(values, (0, missing), value=value) if missing else values


@dataclass(frozen=True, kw_only=True, slots=True)
class Begun:
    """What the first layers have begun of B trees, as far as it still holds."""

    boundary: int  # Layers that the nodes have run through, at least 1
    states: Tensor  # (B, R, H) at that boundary
    counts: Sequence[int]  # (B,) how many of the R were run; 0 for a row that has to be run whole


@dataclass(frozen=True, kw_only=True, slots=True)
class Nodes:
    """The tokens of a pass on the host: a batch of trees, packed. A piece of a prompt is a chain."""

    ids: Tensor  # (B, N) int64; on the device where they were drafted there. All else is on the host
    depths: Tensor  # (B, N) int64, positions behind the row's committed tokens
    sees: Tensor  # (B, N, N) bool: who looks at whom
    real: Tensor  # (B, N) bool; the rest is padding
    start: int  # Nodes before this one were run earlier in the step; they are seen, not run
    resume: Sequence[Resume | None] = ()  # (B,) what the first nodes of each row have already run through; or empty

    @classmethod
    def of_prompt(cls, pieces: Sequence[Sequence[int]], least: int = 0) -> Nodes:
        """Chains of unequal lengths, padded on the right to the longest, or to `least`."""
        size = max(least, *(len(piece) for piece in pieces))
        steps = torch.arange(size)
        return cls(
            ids=torch.tensor([[*piece, *[0] * (size - len(piece))] for piece in pieces]),
            depths=steps.expand(len(pieces), -1),
            sees=torch.ones(size, size, dtype=torch.bool).tril().expand(len(pieces), -1, -1),
            real=steps < torch.tensor([len(piece) for piece in pieces]).unsqueeze(1),
            start=0,
        )

    @classmethod
    def of_trees(cls, trees: Sequence[TokenTree], *, start: int = 0) -> Nodes:
        """Trees of unequal sizes, padded to the largest."""
        counts = [tree.size for tree in trees]
        ids, parents = np.zeros((2, len(trees), max(counts) + 1), np.int64)
        for row, tree in enumerate(trees):
            ids[row, : tree.size + 1], parents[row, : tree.size + 1] = tree.tokens, tree.parents
        resume = [tree.resume for tree in trees]
        return cls._of(torch.from_numpy(ids), parents[:, 1:], counts, start, resume)

    @classmethod
    def of_levels(
        cls, roots: Sequence[int], ids: Tensor, parents: Sequence[int], *, counts: Sequence[int], start: int
    ) -> Nodes:
        """Trees of one shape that grow level by level, on their device; nodes before `start` have been run.

        Args:
            ids: (B, K) tokens of the nodes so far.
            parents: (K + 1,) or more, of each node, the root's first.
            counts: (B,) drafted nodes of each row; the rest is padding.
        """
        size = ids.shape[1]
        wide = np.broadcast_to(np.array(parents[1 : size + 1], np.int64), (len(roots), size))
        ids = torch.cat([sent_ints(roots, ids.device).view(-1, 1), ids], dim=1)
        return cls._of(ids, wide, [min(size, count) for count in counts], start, ())

    @classmethod
    def _of(
        cls, ids: Tensor, parents: NDArray[np.int64], counts: Sequence[int], start: int, resume: Sequence[Resume | None]
    ) -> Nodes:
        sees, depths = _relations(parents.tobytes(), parents.shape)
        real = torch.arange(ids.shape[1]) <= torch.tensor(counts).unsqueeze(1)
        return cls(ids=ids, depths=depths, sees=sees, real=real, start=start, resume=resume)

    @property
    def fresh(self) -> int:
        """Tokens of a row that this pass runs."""
        return self.ids.shape[1] - self.start

    def begun(self, writes: Sequence[int], boundaries: Set[Boundary]) -> Begun | None:
        """What of `resume` still holds: rows whose slots were written since, by the passes `writes` (B,) over each row
        up to now, and those at another boundary than the first, run anew. None where a state below the boundary is
        asked for, which only a whole pass sees."""
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

    def reach(self) -> list[int]:
        """Per row, positions that its deepest token needs behind the committed ones."""
        deepest: list[int] = (self.depths * self.real).amax(1).add(1).tolist()
        return deepest


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """What stays the same from pass to pass."""

    cache: SlotCache
    style: MaskStyle
    buckets: Buckets
    max_length: int  # Positions that the model was made for
    dtype: torch.dtype  # Of the masks

    def recorded(
        self, rows: Sequence[int], committed: Sequence[int], nodes: Nodes, device: torch.device
    ) -> tuple[list[Tensor], int]:
        """What `enter` takes, the tensors on the device: sizes are powers of two, and every row stands at its own place
        in the cache. So one recording serves all rows and texts of about these sizes, and nothing of the cache is
        copied. Other rows' places, and nodes that are not there, are padding: in the dump slot, looking at slot 0."""
        batch, size = min(self.cache.rows, bucket(max(rows) + 1)), bucket(nodes.fresh)
        width, missing = wide(max(committed) + nodes.start + size, self.cache.slots), size - nodes.fresh
        *others, slots = self._structure(committed, nodes, missing, missing)
        host = [*(_spread(part, rows, batch, 0) for part in others), _spread(slots, rows, batch, self.cache.dump)]
        ids = _filled(nodes.ids[:, nodes.start :], missing)
        if ids.device.type == "cpu":
            return sent([*host, _spread(ids, rows, batch, 0)], device), width
        *there, index = sent([*host, torch.tensor(rows, dtype=torch.int64)], device)
        return [*there, ids.new_zeros(batch, size).index_copy_(0, index, ids)], width

    def _structure(self, committed: Sequence[int], nodes: Nodes, missing: int, unseen: int) -> list[Tensor]:
        """Lengths (B,), sees (B, N, M), query positions (B, N), node positions (B, M) and slots (B, N) of a pass: N
        counts `missing` nodes of padding, M `unseen` ones."""
        lengths = torch.tensor(committed, dtype=torch.int64).unsqueeze(1)
        positions = (lengths + nodes.depths).clamp(max=self.max_length - 1)
        slots = torch.where(nodes.real, lengths + torch.arange(nodes.ids.shape[1]), self.cache.dump)
        sees = (nodes.sees & nodes.real.unsqueeze(2))[:, nodes.start :]
        return [
            lengths.squeeze(1),
            pad(sees, (0, unseen, 0, missing)) if missing else sees,
            _filled(positions[:, nodes.start :], missing),
            _filled(positions, unseen),
            _filled(slots[:, nodes.start :], missing, self.cache.dump),
        ]

    def enter(self, tensors: Sequence[Tensor], width: int) -> dict[str, Any]:
        """Keyword arguments for the base model's forward, from what was packed for a recording."""
        lengths, sees, query_positions, node_positions, places, ids = tensors
        block = masks.Block(lengths=lengths, sees=sees, query_positions=query_positions, node_positions=node_positions)
        rows = torch.arange(len(ids), device=ids.device)
        self.cache.begin(range(len(ids)), places, width, index=rows)
        return self._inputs(block, ids, width, None)

    def place(
        self,
        rows: Sequence[int],
        committed: Sequence[int],
        nodes: Nodes,
        *,
        padded: bool,
        device: torch.device,
        flat: Flat | None = None,
        select: bool = True,
    ) -> dict[str, Any]:
        """Keyword arguments for the base model's forward; tells the cache where the tokens go. Padding nodes are
        written to the dump slot and look at slot 0 alone. The width counts them, so that it is the same for a plain and
        a speculative step that are padded to the same N. With `flat` the model is handed the real tokens alone, as one
        sequence; the mask stays that of the rows. `select` is that of `SlotCache.begin`."""
        size = self.buckets.pad_nodes(nodes.fresh) if padded else nodes.fresh
        missing, used = size - nodes.fresh, max(committed) + nodes.start + size
        width = self.buckets.pad_width(used, self.cache.slots, on_cpu=device.type == "cpu")
        host = [*self._structure(committed, nodes, missing, 0), torch.tensor(rows, dtype=torch.int64)]
        ids = _filled(nodes.ids[:, nodes.start :], missing)
        there = sent([*host, ids] if ids.device.type == "cpu" else host, device)
        lengths, sees, query_positions, positions, places, index = there[:6]
        block = masks.Block(lengths=lengths, sees=sees, query_positions=query_positions, node_positions=positions)
        self.cache.begin(rows, places, width, index=index, real=flat, select=select)
        ids = there[-1] if ids.device.type == "cpu" else ids
        return self._inputs(block, ids, width, flat)

    def _inputs(self, block: masks.Block, ids: Tensor, width: int, flat: Flat | None) -> dict[str, Any]:
        positions = block.query_positions
        return {
            "input_ids": ids if flat is None else flat.flatten(ids),
            "position_ids": positions if flat is None else flat.flatten(positions),
            "attention_mask": masks.build(block, self.style, width, self.dtype),
            "past_key_values": self.cache,
            "use_cache": True,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """What one forward pass said."""

    logits: Tensor  # (B, N, V) raw logits in the model's dtype; N is 1 after a prefill without ``all_logits``
    hidden_states: Mapping[Boundary, Tensor] = field(default_factory=dict)  # (B, N, H) of the tokens run, left aligned
