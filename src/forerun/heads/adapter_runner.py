"""Runs a head behind the target's first layers: each drafted node goes through them in its own slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forerun.devices import attention_kernels, send
from forerun.drafters.drawing import Shape
from forerun.heads.base import AdapterHead
from forerun.heads.runner import AttendingRunner, Committed, HiddenStates
from forerun.model import TransformersTarget
from forerun.model.inputs import Nodes
from forerun.model.layers import LayerRange
from forerun.model.masks import Block


class AdapterRunner(AttendingRunner):
    """Runs a head level by level: nodes run through the target's layers up to the head's boundary,
    in the slots in which they are scored, then through the head. Entries are the target's states of
    what is committed before the root.
    """

    head: AdapterHead
    shape: Shape | None = None  # Shape of the trees to come; None: it differs by row, and parents are read on the host
    _frontier: _Exited | None

    def __init__(self, head: AdapterHead, target: TransformersTarget, rows: int, slots: int, run: int = 0) -> None:
        super().__init__(head, target, rows, slots, run)
        self._plan = LayerRange(stop=head.config.boundaries[0])
        self._roots = [0] * rows
        self.rows: Sequence[int] = ()  # Rows of the latest trees
        self.ran: list[Tensor] = []  # Their states (B, F, H) at the boundary, level by level, the root first

    def ingest(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], hidden_states: HiddenStates) -> None:
        super().ingest(rows, tokens, hidden_states)
        for row, row_tokens in zip(rows, tokens, strict=True):
            self._roots[row] = row_tokens[-1]

    def _behind(self, run: int) -> int:
        return 1 + run

    def _read(self, new: Committed, fused: Tensor, block: Block, width: int) -> None:
        self._write_context(self.head, fused, block)

    def _begin(self, rows: Sequence[int], index: Tensor, lengths: Tensor, size: int, recorded: bool) -> Tensor:
        none = index.new_zeros(len(rows), 0)
        self._cache.begin(rows, none, size, index=index)
        self.rows, self.ran = rows, []
        roots, fits = [[-1]] * len(rows), [0] * len(rows)
        self._frontier = _Exited(lengths=lengths, ids=none, parents=roots, fits=fits, depth=0, width=size)
        return self._level(self._frontier, 0)

    def descend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        last = self._frontier
        assert last is not None, "only inside unroll"
        start, depth = 1 + last.ids.shape[1], last.depth + 1
        ids, target, fits = torch.cat([last.ids, tokens], dim=1), self.target, list[int]()
        for row, count in zip(self.rows, last.fits, strict=True):
            # A node behind the row's slots or the context is never submitted, and not run.
            held = target.lengths[row] + 1
            room = min(ids.shape[1], target.slots - held)
            fits.append(room if count == start - 1 and held + depth <= target.max_length else count)
        if self.shape is None:
            above = (parents + (start - last.size)).tolist()
            new: list[Sequence[int]] = [[*old, *row] for old, row in zip(last.parents, above, strict=True)]
        else:
            new = [self.shape.parents for _ in last.parents]
        self._frontier = replace(last, ids=ids, parents=new, fits=fits, depth=depth, size=tokens.shape[1])
        return self._level(self._frontier, start)

    def _level(self, trees: _Exited, start: int) -> Tensor:
        """Return logits (B, F, V) after the nodes from `start` on."""
        roots = [self._roots[row] for row in self.rows]
        nodes = Nodes.of_levels(roots, trees.ids, trees.parents, counts=trees.fits, start=start)
        states = self.target.run(self.rows, nodes, self._plan)
        self.ran.append(states)
        sees, depths = send((nodes.sees[:, start:], nodes.depths), self.device)
        lengths = trees.lengths.unsqueeze(1)
        self._cache.go_on(lengths + torch.arange(start, nodes.ids.shape[1], device=self.device))
        positions = lengths + depths
        here = positions[:, start:]
        block = Block(lengths=trees.lengths, sees=sees, query_positions=here, node_positions=positions)
        fused = self.head.fuse([states.to(self.device, self._dtype)])
        with attention_kernels(self.device):
            output = self.head.adapt(fused, self.head.angles(here, fused), self._attend(block, trees.width))
        return self.logits(output)


@dataclass(kw_only=True, slots=True)
class _Exited:
    """The trees that are being drafted by an adapter."""

    lengths: Tensor  # (B,) committed entries
    ids: Tensor  # (B, K) drafted tokens
    parents: Sequence[Sequence[int]]  # (B, K + 1) or more, of each node, the root's first
    fits: Sequence[int]  # (B,) drafted nodes, from the first, that each row has room for
    depth: int
    width: int  # Slots of the cache that hold all that any node will ever see
    size: int = 1  # Nodes of the last level
