"""The recurrent states of a target's rows, and what the nodes of a step would make of them.

A row keeps one committed state for each recurrence of each layer. A pass over a tree leaves these alone: a layer keeps
what its nodes feed into the recurrence, and `RowStates.commit` moves the row to the end of the accepted path. So no
rejected token ever reaches a state, and no state is copied for each node.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from forerun.devices import send, send_ints
from forerun.errors import ArgumentError
from forerun.model.inputs import Nodes

CHUNK = 64  # Tokens of a prompt whose recurrence is computed at a time
SPACING = 64  # States that prefixes may end at stand behind multiples of so many tokens
MOST = 8  # States that a row keeps for prefixes: the first, the last, and those between them that leave even gaps

Fed = tuple[Tensor, ...]  # What nodes feed into a recurrence, (B, M, ..) each


@dataclass
class Tree:
    """Which node of a row follows which: M nodes, of which those from `start` on are run now."""

    sees: Tensor  # (B, M, M) bool: whether node n comes behind node m, or is it. Padding sees nothing
    start: int
    paths: Tensor | None = None  # (B, M, D) int64 nodes from the root down to each node, -1 behind it; None: chains
    ends: Tensor | None = None  # (B,) int64 the node behind which each row goes on; -1: before the root

    @classmethod
    def chain(cls, real: Tensor) -> Tree:
        """Return chains of the tokens that are real, (B, M) bool, and end at their last."""
        rows, size = real.shape
        sees = torch.ones(size, size, dtype=torch.bool, device=real.device).tril() & real.unsqueeze(2)
        return cls(sees.expand(rows, -1, -1), 0, ends=real.sum(1) - 1)

    def windows(self, size: int) -> Tensor:
        """Return where the last `size` tokens up to each fresh node stand, itself last: (B, N, size) int64 among
        ``size - 1`` committed tokens and the M nodes behind them.
        """
        count = self.sees.shape[1]
        back = torch.arange(size - 1, -1, -1, device=self.sees.device)
        if self.paths is None:
            places = torch.arange(count, device=back.device).unsqueeze(1) - back + size - 1
            return places[self.start :].expand(len(self.sees), -1, -1)
        paths = self.paths[:, self.start :]
        back_from = (paths >= 0).sum(2, keepdim=True) - 1 - back
        node = paths.gather(2, back_from.clamp(min=0))
        return torch.where(back_from >= 0, node + size - 1, back_from + size - 1).clamp(min=0)

    def behind(self, size: int) -> Tensor:
        """Return where the last `size` tokens stand behind which each row goes on: (B, size) int64 among so many
        committed tokens and the M nodes behind them.
        """
        assert self.ends is not None
        if self.paths is None:
            return self.ends.unsqueeze(1) + 1 + torch.arange(size, device=self.ends.device)
        whole = Tree(self.sees, 0, self.paths).windows(size + 1)
        return whole[torch.arange(len(self.ends), device=self.ends.device), self.ends, 1:]

    @property
    def reached(self) -> Tensor:
        """(B, M) bool: the nodes up to where each row goes on."""
        assert self.ends is not None
        seen = self.sees[torch.arange(len(self.ends), device=self.ends.device), self.ends.clamp(min=0)]
        return seen & (self.ends >= 0).unsqueeze(1)


class Recurrence(ABC):
    """Runs a layer's recurrence over tokens for all nodes of a tree at once."""

    inputs: Fed  # What the tokens of the pass feed into it, (B, N, ..) each

    @abstractmethod
    def fresh(self, rows: int) -> Tensor:
        """Return the states (rows, ..) of rows that hold nothing."""

    @abstractmethod
    def run(self, state: Tensor, inputs: Fed, earlier: Fed | None, tree: Tree) -> tuple[Tensor, Fed]:
        """Return what comes out for the fresh nodes (B, N, ..), behind the committed `state` (B, ..), and what
        `advance` needs of all nodes. `earlier` is what was returned of the nodes before `Tree.start`.
        """

    @staticmethod
    @abstractmethod
    def advance(state: Tensor, fed: Fed, tree: Tree) -> Tensor:
        """Return the states (B, ..) behind `Tree.ends`."""


# Its kind, its layer (a number, or the id of a module that has none), which of its states, which call of the pass
StateKey = tuple[type[Recurrence], int, int, int]


@dataclass
class StatePass:
    """Runs the recurrences of one pass from the states of its rows on."""

    states: RowStates
    rows: Sequence[int]
    lengths: Sequence[int]  # (B,) tokens of each row before the pass
    nodes: Nodes
    missing: int  # Nodes of padding that the pass has behind those of `nodes`
    appends: bool  # Whether its tokens are committed as they run, as a prompt's are
    kept: list[list[int]] = field(
        default_factory=list
    )  # (B,) lengths behind which states are kept, of those that it reaches
    fed: dict[StateKey, Fed] = field(default_factory=dict)
    _at: tuple[int, int] = (0, 0)
    _calls: int = 0
    _trees: dict[torch.device, Tree] = field(default_factory=dict)

    def enter(self, layer: int, number: int) -> None:
        """Note that the layer runs its state `number` from now on."""
        self._at, self._calls = (layer, number), 0

    def run(self, recurrence: Recurrence) -> Tensor:
        """Run a recurrence of the layer that was entered, for the tokens of this pass: (B, N, ..)."""
        key = (type(recurrence), *self._at, self._calls)
        self._calls += 1
        states = self.states.of(key, recurrence)
        state = _select(states, self.rows)
        tree = self.tree(states.device)
        if self.appends:
            outputs, state = self._append(key, recurrence, state, tree)
            _replace(states, self.rows, state)
            return outputs
        earlier = self.states.earlier(key, self.rows, tree.start) if tree.start else None
        outputs, self.fed[key] = recurrence.run(state, recurrence.inputs, earlier, tree)
        return outputs

    def _append(self, key: StateKey, recurrence: Recurrence, state: Tensor, tree: Tree) -> tuple[Tensor, Tensor]:
        """Return what comes out for chains of tokens, piece by piece, and the states behind them."""
        real = tree.sees.diagonal(dim1=1, dim2=2)
        outputs = []
        for start in range(0, real.shape[1], CHUNK):
            inputs = tuple(part[:, start : start + CHUNK] for part in recurrence.inputs)
            piece = Tree.chain(real[:, start : start + CHUNK])
            some, fed = recurrence.run(state, inputs, None, piece)
            for line, (before, lengths) in enumerate(zip(self.lengths, self.kept, strict=True)):
                for length in lengths:
                    end = length - before - start - 1
                    if 0 <= end < CHUNK:
                        fed_of_line = tuple(part[line : line + 1] for part in fed)
                        last = torch.tensor([end], device=state.device)
                        alone = Tree(piece.sees[line : line + 1], 0, ends=last)
                        kept_state = recurrence.advance(state[line : line + 1], fed_of_line, alone)[0].clone()
                        self.states.keep(self.rows[line], length, key, kept_state)
            state = recurrence.advance(state, fed, piece)
            outputs.append(some)
        return torch.cat(outputs, dim=1), state

    def tree(self, device: torch.device) -> Tree:
        """Return the tree of the pass on a device."""
        if device not in self._trees:
            nodes, missing = self.nodes, self.missing
            there = nodes.real | (torch.arange(nodes.real.shape[1]) < nodes.start)  # Run now, or earlier in the step
            host = [functional.pad(nodes.sees & there.unsqueeze(2), (0, missing, 0, missing))]
            if nodes.paths is not None:
                host.append(functional.pad(nodes.paths.long(), (0, 0, 0, missing), value=-1))
            sees, *paths = send(host, device)
            self._trees[device] = Tree(sees, nodes.start, *paths)
        return self._trees[device]

    def ended(self, lines: Sequence[int], ends: Sequence[int], device: torch.device) -> Tree:
        """Return the trees of some of the rows, which go on behind the nodes `ends`."""
        tree, (index, last) = self.tree(device), send([torch.tensor(lines), torch.tensor(ends)], device)
        paths = None if tree.paths is None else tree.paths.index_select(0, index)
        return Tree(tree.sees.index_select(0, index), tree.start, paths, last)


def _span(rows: Sequence[int]) -> bool:
    """Return whether rows follow each other, so that a view shows them."""
    return list(rows) == list(range(rows[0], rows[0] + len(rows)))


def _select(values: Tensor, rows: Sequence[int]) -> Tensor:
    """Return ``values[rows]``, a view where that is possible."""
    if _span(rows):
        return values.narrow(0, rows[0], len(rows))
    return values.index_select(0, send_ints(rows, values.device))


def _replace(values: Tensor, rows: Sequence[int], new: Tensor) -> None:
    """Make ``values[rows]`` what was found."""
    if _span(rows):
        values.narrow(0, rows[0], len(rows)).copy_(new)
    else:
        values.index_copy_(0, send_ints(rows, values.device), new)


class RowStates:
    """The committed states of all rows, allocated as layers are first seen, and the passes of a step.

    A prompt may begin with what a row holds only where a state was kept: behind some multiples of `SPACING` tokens.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._states: dict[StateKey, Tensor] = {}  # (rows, ..) each
        self._passes: dict[int, list[tuple[StatePass, int]]] = {}  # Those of a row's step, and the row's line in each
        self._kept: list[dict[int, dict[StateKey, Tensor]]] = [{} for _ in range(rows)]  # By row and length

    def of(self, key: StateKey, recurrence: Recurrence) -> Tensor:
        """Return the states (rows, ..) of a recurrence."""
        if key not in self._states:
            self._states[key] = recurrence.fresh(self.rows)
        return self._states[key]

    def reserve(self, other: RowStates) -> None:
        """Allocate the states that another target of the same model had to allocate."""
        for key, states in other._states.items():
            self._states[key] = states.new_zeros(self.rows, *states.shape[1:])

    def begin(
        self, rows: Sequence[int], lengths: Sequence[int], nodes: Nodes, *, missing: int, appends: bool
    ) -> StatePass:
        """Return a pass over `nodes` of these rows, which hold `lengths` tokens."""
        this = StatePass(self, list(rows), lengths, nodes, missing, appends)
        for line, (row, length, count) in enumerate(zip(rows, lengths, nodes.counts, strict=True)):
            self._kept[row] = {each: states for each, states in self._kept[row].items() if each <= length}
            if appends:
                self.forget(row)
                this.kept.append(self._plan(row, length, length + count))
            else:
                self._passes.setdefault(row, []).append((this, line))
        return this

    def earlier(self, key: StateKey, rows: Sequence[int], start: int) -> Fed:
        """Return what the nodes before `start`, which an earlier pass of the step ran, fed into a recurrence."""
        passes = [self._last(row, key) for row in rows]
        parts = zip(*([part[line, :start] for part in this.fed[key]] for this, line in passes), strict=True)
        return tuple(torch.stack(part) for part in parts)

    def commit(self, rows: Sequence[int], lengths: Sequence[int], paths: Sequence[tuple[int, ...]]) -> None:
        """Move each row, which holds ``lengths[i]`` tokens, behind its root and the nodes ``paths[i]``."""
        nodes = [(0, *path) for path in paths]
        kept_lengths = [
            (row, path[each - length - 1], each)
            for row, length, path in zip(rows, lengths, nodes, strict=True)
            for each in self._plan(row, length, length + len(path))
        ]
        for key, states in self._states.items():
            for row, end, length in kept_lengths:
                self.keep(row, length, key, self._behind(key, [row], [end])[1][0].clone())
            moved, behind = self._behind(key, rows, [path[-1] for path in nodes])
            _replace(states, moved, behind)
        for row in rows:
            self.forget(row)

    def _behind(self, key: StateKey, rows: Sequence[int], ends: Sequence[int]) -> tuple[list[int], Tensor]:
        """Return rows, in some order, and their states behind the nodes `ends` of their step."""
        batches: dict[int, tuple[StatePass, list[tuple[int, int, int]]]] = {}
        for row, end in zip(rows, ends, strict=True):
            this, line = self._last(row, key)
            batches.setdefault(id(this), (this, []))[1].append((row, line, end))
        moved = list[int]()
        advanced = list[Tensor]()
        states = self._states[key]
        for this, members in batches.values():
            some, lines, last = map(list, zip(*members, strict=True))
            fed = tuple(_select(part, lines) for part in this.fed[key])
            tree = this.ended(lines, last, states.device)
            advanced.append(key[0].advance(_select(states, some), fed, tree))
            moved += some
        return moved, torch.cat(advanced) if len(advanced) > 1 else advanced[0]

    def _plan(self, row: int, before: int, length: int) -> list[int]:
        """Choose the lengths behind which a row keeps states when it goes on from `before` to `length` tokens: return
        those behind `before`, and let go what they take the place of.
        """
        new = range((before // SPACING + 1) * SPACING, length + 1, SPACING)
        states = self._kept[row]
        lengths = sorted({*self._kept[row], *new})
        while len(lengths) > MOST:
            inner = range(1, len(lengths) - 1)
            del lengths[min(inner, key=lambda place: lengths[place + 1] - lengths[place - 1])]
        self._kept[row] = {each: states.get(each, {}) for each in lengths}
        return [each for each in new if each in self._kept[row]]

    def keep(self, row: int, length: int, key: StateKey, state: Tensor) -> None:
        """Keep a state behind the first `length` tokens of a row."""
        self._kept[row][length][key] = state

    def reusable(self, row: int, held: int, length: int) -> int:
        """Return how many of the first `length` tokens of a row, which holds `held` now, it can go back to."""
        return max([0, *(each for each in (*self._kept[row], held) if each <= length)])

    def forget(self, row: int) -> None:
        """Forget what ran in the row's step."""
        self._passes.pop(row, None)

    @torch.inference_mode()
    def copy_row(self, source: int, target: int, held: int, length: int) -> None:
        """Give row `target` the states behind the first `length` tokens of row `source`, which holds `held` now; both
        may be the same. Raises ArgumentError if no state was kept there.
        """
        kept_states = self._kept[source]
        if length not in (0, held, *kept_states):
            behind = ", ".join(map(str, [*sorted(kept_states), held]))
            raise ArgumentError(f"row {source} has recurrent states behind {behind} tokens, none behind {length}")
        self.forget(target)
        for key, states in self._states.items():
            if length in (0, held):
                states[target] = states[source] if length else 0
            else:
                states[target] = kept_states[length][key]
        if source != target:
            self._kept[target] = {each: state for each, state in kept_states.items() if each <= length}

    def nbytes(self) -> int:
        """Return the bytes of the committed states."""
        return sum(states.nbytes for states in self._states.values())

    def _last(self, row: int, key: StateKey) -> tuple[StatePass, int]:
        """Return the last pass of the row's step that ran the recurrence, and the row's line in it."""
        return next((this, line) for this, line in reversed(self._passes[row]) if key in this.fed)
