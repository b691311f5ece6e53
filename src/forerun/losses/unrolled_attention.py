"""This module computes the attention of unrolled steps with PyTorch's FlexAttention (arXiv
2412.05496) on CUDA devices.

A function says what sees what, blocks of which no query sees a key are left out, and no mask of
queries times keys is ever made. The keys of step 0 and those of the steps after it stand side by
side, so one call does what `eagle3.ttt_attention` does query block by query block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.functional import pad

from forerun.errors import ArgumentError

BLOCK = 128  # Queries, and keys, of a block


class FlexMask:
    """A `FlexMask` says which positions see each other in rows of packed documents, as
    `eagle3.blocks_of` does.

    Args:
        documents: (B, S) int64, rising from left to right within a row, -1 for padding at its end.
    """

    def __init__(self, documents: Tensor, reach: int | None = None) -> None:
        self.length = documents.shape[1]
        last = documents.max() + 1  # padding is a document behind the others, so that all rise
        ordered = torch.where(documents < 0, last, documents)
        self.documents = pad(ordered, (0, -self.length % BLOCK), value=torch.iinfo(torch.int32).max)
        self.reach = torch.tensor(self.length if reach is None else max(0, reach), device=documents.device)
        self._masks: dict[int, flex.BlockMask] = {}

    def of(self, steps: int) -> flex.BlockMask:
        """Return the mask for keys of step 0 and of so many `steps` after it."""
        if steps not in self._masks:
            self._masks[steps] = self._made(steps)
        return self._masks[steps]

    def _made(self, steps: int) -> flex.BlockMask:
        documents, reach, size = self.documents, self.reach, self.documents.shape[1]
        rows, count = documents.shape[0], size // BLOCK
        first, last = documents[:, ::BLOCK], documents[:, BLOCK - 1 :: BLOCK]
        behind = torch.arange(count, device=documents.device)
        behind = (behind[:, None] - behind) * BLOCK  # from the first key of a block to the first query of another
        seen = (behind >= 0) & (last[:, None, :] >= first[:, :, None]) & ((behind - BLOCK + 1).clamp(min=0) < reach)
        whole = seen & (behind > 0) & (first[:, None, :] == last[:, :, None]) & (behind + BLOCK - 1 < reach)
        own = torch.eye(count, dtype=torch.bool, device=documents.device).expand(rows, -1, -1)
        partial = torch.cat([seen & ~whole, *[own] * steps], -1)
        whole = pad(whole, (0, steps * count))

        def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            place = key % size
            near = (query >= place) & (query - place < reach) & (documents[row, query] == documents[row, place])
            return torch.where(key < size, near, query == place)

        made: flex.BlockMask = flex.BlockMask.from_kv_blocks(
            *_list_blocks(partial),
            *_list_blocks(whole),
            BLOCK_SIZE=BLOCK,
            mask_mod=sees,
            seq_lengths=(size, (steps + 1) * size),
        )
        return made


def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, own: Sequence[tuple[Tensor, Tensor]], mask: FlexMask
) -> Tensor:
    """Return the attention of one unrolled step, (B, S, heads, D); arguments are those of
    `eagle3.ttt_attention`.
    """
    missing = (0, 0, 0, -mask.length % BLOCK)
    lines = [(key, value), *own]
    keys, values = (torch.cat([pad(line[part].to(value.dtype), missing) for line in lines], 2) for part in (0, 1))
    padded = pad(query.to(value.dtype), missing)
    attended: Tensor = kernel(query.device)(
        padded, keys, values, block_mask=mask.of(len(own)), enable_gqa=query.shape[1] != key.shape[1]
    )
    return attended[:, :, : mask.length].transpose(1, 2)


def check_device(device: torch.device) -> None:
    """Raise ArgumentError where FlexAttention has no backward pass."""
    if device.type != "cuda":
        raise ArgumentError(f"objective.flex_attention needs a CUDA device, not {device}; leave it away")


def kernel(device: torch.device) -> Callable[..., Any]:
    """Return PyTorch's function, compiled where there is a kernel for its backward pass."""
    if device.type == "cuda":
        return _compiled()
    return flex.flex_attention


@functools.cache
def _compiled() -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(flex.flex_attention)
    return compiled


def _list_blocks(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many key blocks each query block has, (B, 1, Q), and these first of all, (B, 1, Q,
    K), from (B, Q, K) bool.
    """
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1).int().unsqueeze(1), order.int().unsqueeze(1)
