"""Sizes that passes are padded to, and passes that run only their real tokens.

`Buckets` pads nodes and visible cache to few sizes, so that a row's bits depend on little. With `Flat` the real tokens
of a pass are one sequence to all layers; attention alone puts them back in their rows, where their keys are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional

from forerun.errors import ArgumentError

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
