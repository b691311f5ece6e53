"""Packs the tokens of a pass: trees and chains into a rectangle, padded to few sizes, or the real tokens alone.

`Nodes` are the tokens. `Buckets` pads nodes and visible cache to few sizes, so that a row's bits depend on little. With
`Flat` the real tokens of a pass are one sequence to all layers; attention alone puts them back in their rows, where
their keys are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from forerun.core.tree import Resume, TokenTree, ancestor_mask
from forerun.devices import send_ints
from forerun.errors import ArgumentError
from forerun.types import LAST_HIDDEN, Boundary

BLOCK = 512  # Cache slots that the CPU attention kernel takes at a time
AWKWARD = range(193, 384)
"""Block lengths that are summed in another order than a full block when they come last. Seen on an
AMD with AVX-512, where the widths outside always agreed to the bit; with these, a token would get
other bits as the text grows.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Buckets:
    """Sizes that the nodes and the visible cache of a scoring pass are padded up to. Both are
    functions of committed length and node count only, never of what other steps did. With one entry
    in `nodes`, plain and speculative steps have the same shapes: the reproducible mode
    (docs/losslessness.md).
    """

    nodes: tuple[int, ...] = ()  # Allowed N, rising; larger passes are not padded. Empty: N is never padded.
    width: int = 64  # Visible cache slots are a multiple of this; on a CPU `AWKWARD` last blocks are left out

    def __post_init__(self) -> None:
        if self.width < 1 or any(size < 1 for size in self.nodes) or list(self.nodes) != sorted(set(self.nodes)):
            raise ArgumentError(f"buckets need a positive width and rising positive node counts, got {self}")

    def pad_nodes(self, count: int) -> int:
        """Return the smallest allowed N that holds `count` nodes."""
        return next((size for size in self.nodes if size >= count), count)

    def pad_width(self, used: int, slots: int, *, on_cpu: bool = True) -> int:
        """Return the visible width that holds `used` slots out of `slots`."""
        width = -(-used // self.width) * self.width
        while on_cpu and width % BLOCK in AWKWARD:
            width += self.width
        return min(width, slots)


@dataclass(frozen=True, slots=True)
class Flat:
    """The indices of the M real tokens of a pass among its B rows of N."""

    kept: Tensor  # (M,) int64 index into B * N, rising
    starts: Tensor  # (B + 1,) int64, on the CPU: which of the M are a row's, from its own entry to the next one
    rows: int
    nodes: int

    @classmethod
    def of(cls, real: Tensor) -> Flat | None:
        """Return the real tokens by the mask `real` (B, N) bool, or None where nothing is padding."""
        if bool(real.all()):
            return None
        kept = real.flatten().nonzero().squeeze(1)
        return cls(kept, functional.pad(real.sum(1).cumsum(0), (1, 0)), *real.shape)

    def flatten(self, values: Tensor) -> Tensor:
        """Gather (B, N, ..) -> (1, M, ..)."""
        return values.flatten(0, 1).index_select(0, self.kept.to(values.device)).unsqueeze(0)

    def restore(self, values: Tensor) -> Tensor:
        """Scatter (1, M, ..) -> (B, N, ..), zeros for padding."""
        whole = values.new_zeros(self.rows * self.nodes, *values.shape[2:])
        whole.index_copy_(0, self.kept.to(values.device), values[0])
        return whole.view(self.rows, self.nodes, *values.shape[2:])


@dataclass(frozen=True, slots=True)
class TreePaths:
    """The order in which each node of a tree counts the keys that it sees: the committed tokens,
    then its ancestors and itself. It is not the order of the slots, where siblings stand between
    ancestors, but that of plain decoding.
    """

    lengths: Tensor  # (B,) int64 committed tokens
    nodes: Tensor  # (B, N, D) int32 from the root down to the node itself, -1 behind it; m stands in slot lengths + m


@dataclass(kw_only=True, slots=True)
class Pass:
    """The properties of one pass that the attention of all layers needs."""

    flat: Flat | None = None  # How its tokens stand; None: as a rectangle
    paths: TreePaths | None = None  # None: every token counts the keys that it sees in the order of their slots
    exact: bool = False  # Whether attention follows `paths` even where that is dear: in reproducible mode
    rows: Tensor | None = None  # (B,) rows that attention selects among those of the cache; None: it is handed theirs
    reads: bool = False  # Its tokens are a prompt's. No bits of theirs have to be those of a step
    prompt: object | None = None
    """An object that whole passes share from one over a prompt to the next: what is inside the model is looked at
    in the first of them. None: it is looked at in this pass, too.
    """
    states: Any = None  # What its layers do with recurrent states (`states.StatePass`); None: they keep none
    positions: Any = None  # Those of its tokens (`positions.Positions`), for models that would count them themselves
    _repeated: tuple[Tensor, int, Tensor] | None = None

    def repeat(self, mask: Tensor, times: int) -> Tensor:
        """Repeat a mask (B, 1, N, W) -> (B, 1, times * N, W), once for all layers, which share it."""
        if times == 1:
            return mask
        last = self._repeated
        if last is None or last[0] is not mask or last[1] != times:
            last = self._repeated = (mask, times, mask.repeat(1, 1, times, 1))
        return last[2]


_RUNNING: ContextVar[Pass | None] = ContextVar("forerun_pass", default=None)


@contextmanager
def running(this: Pass) -> Iterator[None]:
    """Make `this` the pass of this thread while open; other engines run theirs in other threads."""
    token = _RUNNING.set(this)
    try:
        yield
    finally:
        _RUNNING.reset(token)


def current() -> Pass:
    """Return the pass that runs in this thread; a plain one where somebody else calls the model."""
    return _RUNNING.get() or Pass()


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

    def resumed(self, writes: Sequence[int], boundaries: Set[Boundary]) -> Resumed | None:
        """Return the part of `resume` that still holds, or None. A row is run anew if its slots
        were written since (`writes` (B,) counts the passes over each row) or if it stands at
        another boundary than the first. None also if a state below the boundary is asked for, which
        only a whole pass computes.
        """
        good = [
            resume
            for resume, now in zip(self.resume, writes, strict=False)
            if resume is not None and resume.stamp == now
        ]
        if not good or any(boundary != LAST_HIDDEN and boundary < good[0].boundary for boundary in boundaries):
            return None
        boundary = good[0].boundary
        counts = list[int]()
        for resume, now in zip(self.resume, writes, strict=True):
            holds = resume is not None and resume.stamp == now and resume.boundary == boundary
            counts.append(len(resume.states) if resume is not None and holds else 0)
        states = good[0].states.new_zeros(len(counts), max(counts), good[0].states.shape[1])
        for row, (resume, count) in enumerate(zip(self.resume, counts, strict=True)):
            if resume is not None and count:
                states[row, :count] = resume.states
        return Resumed(boundary=boundary, states=states, counts=counts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """The results of one forward pass."""

    logits: Tensor  # (B, N, V) raw logits in the model's dtype; N is 1 after a prefill without ``all_logits``
    hidden_states: Mapping[Boundary, Tensor] = field(default_factory=dict)  # (B, N, H) of the tokens run, left aligned
    flat: Flat | None = None  # Where the logits are those of the real tokens alone, (1, M, V): which these are


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
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
    depths = sees.sum(-1) - 1
    steps = np.arange(shape[1])
    real = torch.arange(shape[1] + 1) <= torch.tensor(counts).unsqueeze(1)
    paths = None
    if ((above != steps) & (steps < np.array(counts)[:, None])).any():
        size = shape[1] + 1
        on_path = torch.arange(size).where(sees, size).sort(-1).values[..., : int(depths.max()) + 1]
        paths = on_path.where(on_path < size, -1).to(torch.int32)
    reach = (depths * real).amax(1).add(1).tolist()
    return {"sees": sees, "depths": depths, "real": real, "paths": paths, "reach": reach}


def scatter_rows(values: Tensor, rows: Sequence[int], batch: int, rest: int = 0) -> Tensor:
    """Scatter (B', ..) into (B, ..): each row at its own index, `rest` elsewhere. Never write to what it returns."""
    if len(rows) == batch and list(rows) == list(range(batch)):
        return values
    scattered = values.new_full((batch, *values.shape[1:]), rest)
    scattered[list(rows)] = values
    return scattered


def take_last(values: Tensor, counts: Sequence[int]) -> Tensor:
    """Return each row's last of its first `counts` (B,): (B, N, ..) -> (B, 1, ..)."""
    ends = send_ints([count - 1 for count in counts], values.device)
    return values.gather(1, ends.view(-1, 1, 1).expand(-1, 1, values.shape[-1]))


def pad_right(values: Tensor, missing: int, value: int = 0) -> Tensor:
    """Pad (B, N) -> (B, N + missing)."""
    return torch.nn.functional.pad(values, (0, missing), value=value) if missing else values
