"""To which sizes a pass is padded, so that shapes are few and a row's bits depend on little. Knows no model."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.errors import ArgumentError

BLOCK = 512
"""Cache slots that the CPU attention kernel takes at a time."""
AWKWARD = range(193, 384)
"""A last block of this many slots is summed in another order than a full one. Seen on an AMD with AVX-512, where the
widths outside always agreed to the bit; with these, a token would get other bits as the text grows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Buckets:
    """Sizes that the nodes and the visible cache of a scoring pass are padded up to.

    Both are functions of committed length and node count only, never of what other steps did. With one entry in
    `nodes`, plain and speculative steps have the same shapes: the reproducible mode (docs/losslessness.md).
    """

    nodes: tuple[int, ...] = ()
    """Allowed N, rising; larger passes are not padded. Empty: N is never padded."""
    width: int = 64
    """Visible cache slots are a multiple of this; on a CPU `AWKWARD` last blocks are left out."""

    def __post_init__(self) -> None:
        if self.width < 1 or any(size < 1 for size in self.nodes) or list(self.nodes) != sorted(set(self.nodes)):
            raise ArgumentError(f"buckets need a positive width and rising positive node counts, got {self}")

    def pad_nodes(self, count: int) -> int:
        """The smallest allowed N that holds `count` nodes."""
        return next((size for size in self.nodes if size >= count), count)

    def pad_width(self, used: int, slots: int, *, on_cpu: bool = True) -> int:
        """The visible width that holds `used` slots of the `slots` that there are."""
        width = -(-used // self.width) * self.width
        while on_cpu and width % BLOCK in AWKWARD:
            width += self.width
        return min(width, slots)
