"""Computes the attention of unrolled steps with PyTorch's FlexAttention (arXiv
2412.05496) on CUDA devices.

A function says what sees what, blocks of which no query sees a key are left out, and no mask of
queries times keys is ever made. The keys of step 0 and those of the steps after it stand side by
side, so one call does what `eagle3.ttt_attention` does query block by query block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.functional import pad

from forerun.errors import ArgumentError

BLOCK = 128  # Queries, and keys, of a block


class FlexMask:
    """Which positions see each other in rows of packed documents, as
    `eagle3.blocks_of` does.

    Args:
        documents: (B, S) int64, rising from left to right within a row, -1 for padding at its end.
    """

    def __init__(self, documents: Tensor, reach: int | None = None) -> None:
        self.length = documents.shape[1]
        last = documents.max() + 1  # Padding counts as a last document, so that document numbers rise
        ordered = torch.where(documents < 0, last, documents)
        self.documents = pad(ordered, (0, -self.length % BLOCK), value=torch.iinfo(torch.int32).max)
        self.reach = torch.tensor(self.length if reach is None else max(0, reach), device=documents.device)
        self._masks: dict[int, flex.BlockMask] = {}

    def of(self, steps: int) -> flex.BlockMask:
        """Return the mask for the keys of step 0 and of `steps` further steps."""
        if steps not in self._masks:
            self._masks[steps] = self._make(steps)
        return self._masks[steps]

    def _make(self, steps: int) -> flex.BlockMask:
        documents, reach, size = self.documents, self.reach, self.documents.shape[1]
        rows, count = documents.shape[0], size // BLOCK
        first, last = documents[:, ::BLOCK], documents[:, BLOCK - 1 :: BLOCK]
        behind = torch.arange(count, device=documents.device)
        behind = (behind[:, None] - behind) * BLOCK  # from the first key of a block to the first query of another
        seen = (behind >= 0) & (last[:, None, :] >= first[:, :, None]) & ((behind - BLOCK + 1).clamp(min=0) < reach)
        whole = seen & (behind > 0) & (first[:, None, :] == last[:, :, None]) & (behind + BLOCK - 1 < reach)
        itself = torch.eye(count, dtype=torch.bool, device=documents.device).expand(rows, -1, -1)
        partial = torch.cat([seen & ~whole, *[itself] * steps], -1)
        whole = pad(whole, (0, steps * count))

        def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            place = key % size
            near = (query >= place) & (query - place < reach) & (documents[row, query] == documents[row, place])
            return torch.where(key < size, near, query == place)

        return flex.BlockMask.from_kv_blocks(
            *_list_blocks(partial),
            *_list_blocks(whole),
            BLOCK_SIZE=BLOCK,
            mask_mod=sees,
            seq_lengths=(size, (steps + 1) * size),
        )


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
        return _compile()
    return flex.flex_attention


@functools.cache
def _compile() -> Callable[..., Any]:
    return torch.compile(flex.flex_attention)


def _list_blocks(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many key blocks each query block has, (B, 1, Q), and these first of all, (B, 1, Q,
    K), from (B, Q, K) bool.
    """
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1).int().unsqueeze(1), order.int().unsqueeze(1)


# What EAGLE-3 learns
QUERY_BLOCK = {"cpu": 64, "cuda": 256}
"""So many queries are computed at a time: on a CPU few enough that their probabilities stay in the
cache.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryBlock:
    """Queries that are computed together, and what they see of step 0."""

    queries: slice
    keys: slice  # From the first that any of the queries sees to the last
    hidden: Tensor  # (B, queries, keys) bool: pairs that do not see each other


Mask = Sequence[QueryBlock] | FlexMask
"""An attention mask says which positions see each other in a row of documents."""


def blocks_of(documents: Tensor, reach: int | None = None) -> list[QueryBlock]:
    """Return the blocks of `documents` (B, S), int64, rising from left to right within a row, -1
    for padding at its end.

    `reach`: keys of step 0 that a query sees, counted back from its own; at step t of a window W it
    is W - t. None: all of its document. The masks take at most B x S x S bytes; all steps and
    layers of one reach share them.
    """
    length = documents.shape[1]
    size = QUERY_BLOCK.get(documents.device.type, QUERY_BLOCK["cuda"])
    reach = length if reach is None else max(0, reach)
    index = torch.arange(length, device=documents.device)
    blocks = []
    for first in range(0, length, size):
        last = min(first + size, length)
        same = documents == documents[:, first : first + 1]
        lowest = max(int(torch.where(same, index, length).min()), first - reach + 1)
        queries, keys = slice(first, last), slice(lowest, last)
        distance = index[queries, None] - index[keys]
        foreign = documents[:, None, keys] != documents[:, queries, None]
        blocks.append(QueryBlock(queries=queries, keys=keys, hidden=foreign | (distance < 0) | (distance >= reach)))
    return blocks


def ttt_attention(
    query: Tensor, key: Tensor, value: Tensor, own: Sequence[tuple[Tensor, Tensor]], blocks: Mask
) -> Tensor:
    """Return the attention of one unrolled step, (B, S, heads, D).

    Args:
        query: (B, heads, S, D), rotated.
        key: (B, groups, S, D) of step 0, rotated; value: the same shape.
        own: keys and values of the steps 1..t, shaped like `key`.
        blocks: of the documents, from `blocks_of` or a `FlexMask`.
    """
    if isinstance(blocks, FlexMask):
        return flex_attention(query, key, value, own, blocks)
    # Under autocast a normed feature is wider than what a linear layer makes of it; the backward pass has no autocast.
    query, key = query.to(value.dtype), key.to(value.dtype)
    flat = [part.to(value.dtype) for line in own for part in line]
    attended: Tensor = _TttAttention.apply(blocks, query, key, value, *flat)  # type: ignore[no-untyped-call]
    return attended.transpose(1, 2)


class _TttAttention(torch.autograd.Function):
    """`_TttAttention` is flash-style attention: it saves the output and the scores of the own line,
    and recomputes the rest.
    """

    @staticmethod
    def forward(
        context: Any, blocks: Sequence[QueryBlock], query: Tensor, key: Tensor, value: Tensor, *own: Tensor
    ) -> Tensor:
        grouped = _group_heads(query, key) * query.shape[-1] ** -0.5
        lines = _lines(grouped, own[::2])
        output, weights = torch.empty_like(grouped), torch.empty_like(lines)
        for block in blocks:
            probs, weights[..., block.queries, :] = _probs(grouped, key, lines, block)
            output[..., block.queries, :] = _multiply(probs.to(value.dtype), value[:, :, block.keys])
        for weight, line_value in zip(weights.to(value.dtype).unsqueeze(-2).unbind(-1), own[1::2], strict=True):
            output.addcmul_(weight, line_value.unsqueeze(2))
        context.blocks = blocks
        context.save_for_backward(query, key, value, lines, output, *own)
        return output.view(query.shape)

    @staticmethod
    def backward(context: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, lines, output, *own = context.saved_tensors
        scale = query.shape[-1] ** -0.5
        grouped, gradient = _group_heads(query, key) * scale, _group_heads(upstream[0], key)
        inner = (gradient.float() * output.float()).sum(-1, keepdim=True)
        query_grad, weights = torch.empty_like(grouped), torch.empty_like(lines)
        wide = torch.promote_types(key.dtype, torch.float32)  # many blocks add to the same keys
        key_grad, value_grad = torch.zeros_like(key, dtype=wide), torch.zeros_like(value, dtype=wide)
        for block in context.blocks:
            probs, weights[..., block.queries, :] = _probs(grouped, key, lines, block)
            part, flow = grouped[..., block.queries, :], gradient[..., block.queries, :]
            value_grad[:, :, block.keys] += _fold_heads(probs.to(value.dtype)).transpose(-1, -2) @ _fold_heads(flow)
            pull = _multiply(flow, value[:, :, block.keys].transpose(-1, -2)).float()
            pull = pull.sub_(inner[..., block.queries, :]).mul_(probs).to(key.dtype)
            query_grad[..., block.queries, :] = _multiply(pull, key[:, :, block.keys])
            key_grad[:, :, block.keys] += _fold_heads(pull).transpose(-1, -2) @ _fold_heads(part)
        own_grad: list[Tensor] = []
        for weight, line_key, line_value in zip(weights.unsqueeze(-2).unbind(-1), own[::2], own[1::2], strict=True):
            pull = (gradient * line_value.unsqueeze(2)).float().sum(-1, keepdim=True)
            pull = pull.sub_(inner).mul_(weight).to(key.dtype)
            query_grad.addcmul_(pull, line_key.unsqueeze(2))
            own_grad += [(pull * grouped).sum(2), (weight.to(value.dtype) * gradient).sum(2)]
        query_grad = query_grad.mul_(scale).view(query.shape)
        return None, query_grad, key_grad.to(key.dtype), value_grad.to(value.dtype), *own_grad


def _probs(grouped: Tensor, key: Tensor, lines: Tensor, block: QueryBlock) -> tuple[Tensor, Tensor]:
    """Return a block's probabilities, float32: (B, groups, R, n, m) over step 0, (.., t) over the
    queries' own line.
    """
    scores = _multiply(grouped[..., block.queries, :], key[:, :, block.keys].transpose(-1, -2)).float()
    scores = scores.masked_fill_(block.hidden[:, None, None], -torch.inf)
    seen = scores.shape[-1]
    probs = torch.softmax(torch.cat([scores, lines[..., block.queries, :]], -1), -1)
    return probs[..., :seen], probs[..., seen:]


def _group_heads(query: Tensor, key: Tensor) -> Tensor:
    """Group (B, heads, S, D) into (B, groups, heads of a group, S, D)."""
    return query.reshape(query.shape[0], key.shape[1], -1, *query.shape[2:])


def _fold_heads(states: Tensor) -> Tensor:
    """Fold (B, groups, R, n, D) into (B, groups, R * n, D)."""
    return states.flatten(2, 3)


def _multiply(left: Tensor, right: Tensor) -> Tensor:
    """Multiply (B, groups, R, n, k) @ (B, groups, k, m), the same right factor for all heads of a
    group.
    """
    product = _fold_heads(left) @ right
    return product.view(*left.shape[:4], right.shape[-1])


def _lines(grouped: Tensor, keys: Sequence[Tensor]) -> Tensor:
    """Return (B, groups, R, S, t) float32: each scaled query with the keys of its own index."""
    if not keys:
        return grouped.new_empty(*grouped.shape[:-1], 0, dtype=torch.float32)
    return torch.stack([(grouped * key.unsqueeze(2)).float().sum(-1) for key in keys], -1)


def attend_documents(documents: Tensor, windows: Sequence[int | None]) -> Callable[..., Tensor]:
    """Return the attention of a head's layers over packed `documents` (B, S), called as
    `heads.base.Attend`; `windows` are by layer.
    """
    blocks = {window: blocks_of(documents, window) for window in windows}

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return ttt_attention(query, key, value, (), blocks[windows[layer]])

    return attend
