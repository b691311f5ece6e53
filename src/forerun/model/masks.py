"""Attention masks for a block of tokens behind each row's committed ones: additive, in the model's dtype.

Additive floats are the one form that every attention implementation of transformers reads right. A sliding window is a
difference of positions, not of slots: siblings of a tree share a position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forerun.errors import UNSERVED, UnsupportedModelError
from forerun.model.kernels import streamed

STATES = ("linear_attention", "conv")  # Layer types that follow paths instead of a mask: see `states`
UNMASKED = (*STATES, "mlp", "moe")  # Those that keep no keys and values
_BOTH = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}  # Layers with a state and attention
_COMPRESSED = dict.fromkeys(("compressed_sparse_attention", "heavily_compressed_attention"), "sliding_attention")
"""Layers that see a window, and behind it entries that `compression` gives a mask of their own."""
WITH_STATES = frozenset({*STATES, *_BOTH})
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
INDEXED = "indexed_attention"  # Chooses by keys of an index among the tokens that full attention sees
WINDOWS = {SLIDING: "sliding_window", CHUNKED: "attention_chunk_size"}  # Layer type -> a key of configurations
AttentionMask = Tensor | dict[str, Tensor | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskStyle:
    """The kind of mask that a model's forward takes."""

    types: tuple[str, ...]  # Layer types present: `FULL`, `SLIDING` or `CHUNKED`; several are handed over as a dict
    window: int | None  # Positions that a sliding layer looks back, itself included
    chunk: int | None = None  # Positions of a chunk; a chunked layer looks at tokens of its own chunk
    unmasked: tuple[str, ...] = ()  # Types of `STATES` present
    both: tuple[str, ...] = ()  # Types of layers that have a state and attention

    @classmethod
    def of(cls, config: Any) -> MaskStyle:
        """Read the style from a text configuration. Raises UnsupportedModelError for other layer
        types, or sizes that differ.
        """
        listed = getattr(config, "layer_types", None)
        try:
            window, chunk = (getattr(config, key, None) for key in WINDOWS.values())
        except RuntimeError as error:  # transformers refuses to name one where layers differ
            raise UnsupportedModelError(
                f"{config.model_type}: layers of one kind have windows of different sizes; forerun makes one mask "
                f"for each kind. {UNSERVED}"
            ) from error
        seen_as = {**_BOTH, **_COMPRESSED}
        named = {seen_as.get(name, name) for name in listed or ()} - {*UNMASKED}
        both = tuple(name for name in _BOTH if name in (listed or ()))
        types = tuple(sorted(named)) or ((SLIDING,) if window and not listed else (FULL,))
        odd = [name for name in types if name not in (FULL, INDEXED, *WINDOWS)]
        if odd:
            raise UnsupportedModelError(
                f"{config.model_type}: layers of type {', '.join(odd)} keep a state that cannot be rolled back or have "
                f"a mask of their own; only full, sliding-window and chunked attention can be verified. {UNSERVED}"
            )
        return cls(
            types=types,
            window=window if SLIDING in types else None,
            chunk=chunk if CHUNKED in types else None,
            unmasked=tuple(name for name in STATES if name in (listed or ()) or (name == STATES[0] and both)),
            both=both,
        )

    def hand_over(self, masks: dict[str, Tensor]) -> AttentionMask:
        """Return the masks of all `types` as a model's forward takes them."""
        if len(masks) == 1:
            return next(iter(masks.values()))
        return {**masks, **dict.fromkeys(self.unmasked), **{name: masks[_BOTH[name]] for name in self.both}}

    def within(self, name: str, queries: Tensor, keys: Tensor) -> Tensor:
        """Return whether a layer of type `name` at positions `queries` (..) reaches back to `keys`
        (..): bool (..).
        """
        if name == SLIDING and self.window is not None:
            return queries - keys < self.window
        if name == CHUNKED and self.chunk is not None:
            return queries // self.chunk == keys // self.chunk
        return torch.ones((), dtype=torch.bool, device=keys.device)


@dataclass(frozen=True, slots=True)
class Block:
    """The tokens of one pass (queries) and the nodes that stand behind each row's committed tokens
    (keys).
    """

    lengths: Tensor  # (B,) int64 committed tokens
    sees: Tensor  # (B, N, M) bool: query n may look at node m. Node m stands in slot ``lengths + m``
    query_positions: Tensor  # (B, N) int64
    node_positions: Tensor  # (B, M) int64

    def key_positions(self, width: int) -> Tensor:
        """Return the positions (B, width) int64 of the tokens in a row's first slots."""
        slots = torch.arange(width, device=self.lengths.device)
        relative = slots - self.lengths.unsqueeze(1)
        node = relative.clamp(0, self.node_positions.shape[1] - 1)
        return torch.where(relative < 0, slots, self.node_positions.gather(1, node))

    def slots_of(self, positions: Tensor) -> Tensor:
        """Return where the tokens at `positions` (B, P) stand on each query's path: (B, N, P) int64 slots, any for
        positions that a path does not have.
        """
        count = self.sees.shape[2]
        depth = self.node_positions - self.lengths.unsqueeze(1)
        node = torch.where(self.sees, torch.arange(count, device=depth.device), 0)
        index_of_depth = depth.clamp(0, count - 1).unsqueeze(1).expand_as(node)
        path = torch.zeros_like(node).scatter_reduce(2, index_of_depth, node, "amax")  # (B, N, M) node by depth
        behind = positions - self.lengths.unsqueeze(1)
        index = behind.clamp(0, count - 1).unsqueeze(1).expand(-1, node.shape[1], -1)
        slots = self.lengths.view(-1, 1, 1) + path.gather(2, index)
        return torch.where((behind < 0).unsqueeze(1), positions.clamp(min=0).unsqueeze(1), slots)


def build(block: Block, style: MaskStyle, width: int, dtype: torch.dtype) -> AttentionMask:
    """Build the mask (B, 1, N, width): 0 where a query may look, else the dtype's minimum. A query
    that sees no node looks at slot 0.
    """
    tools = streamed(block.lengths.device)
    if tools is not None and dtype in tools.DTYPES and style.types in ((FULL,), (SLIDING,)):
        return style.hand_over({style.types[0]: tools.build_mask(block, width, style.window or 0, dtype)})
    slots = torch.arange(width, device=block.lengths.device)
    real = block.sees.any(2, keepdim=True)
    around = torch.cat([real, block.sees, torch.zeros_like(real)], 2)  # Committed tokens, the nodes, what is behind
    index = (slots - (block.lengths.unsqueeze(1) - 1)).clamp_(0, block.sees.shape[2] + 1)
    visible = around.gather(2, index.unsqueeze(1).expand(-1, block.sees.shape[1], -1))
    visible[..., 0] = True  # The first committed token, or the root
    places = slots if {FULL, INDEXED}.issuperset(style.types) else block.key_positions(width)
    return additive(visible, style, block.query_positions, places, dtype)


def additive(visible: Tensor, style: MaskStyle, queries: Tensor, keys: Tensor, dtype: torch.dtype) -> AttentionMask:
    """Return the additive mask (B, 1, N, M) of what is visible, (B, N, M) bool, and within reach of a layer: its
    tokens stand at the positions `queries` (B, N) and `keys` (B, M). A dict for mixed layers.
    """
    masks, zero = {}, torch.zeros((), dtype=dtype, device=visible.device)
    lowest = torch.full_like(zero, torch.finfo(dtype).min)
    for name in style.types:
        seen = (
            visible
            if name in (FULL, INDEXED)
            else visible & style.within(name, queries.unsqueeze(2), keys.unsqueeze(1))
        )
        masks[name] = torch.where(seen, zero, lowest).unsqueeze(1)
    return style.hand_over(masks)
