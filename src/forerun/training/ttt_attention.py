"""Attention of training-time test (EAGLE-3, arXiv 2503.01840): every step sees the first step's past and its own line.

At step t the query of index i looks at all keys of step 0 up to i in its document, and at the keys that index i itself
produced in the steps 1..t; with a sliding window at those that are near enough: it stands at position i + t. Blocks of
queries at a time; the probabilities are not kept for the backward pass, which computes them once more. Knows no head
and no loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

QUERY_BLOCK = {"cpu": 64, "cuda": 256}
"""Queries at a time: on a CPU few enough that their probabilities stay in the cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Queries that are computed together, and what they see of step 0."""

    queries: slice
    """n of them."""
    keys: slice
    """m of them: from the first that any of the queries sees to the last."""
    hidden: Tensor
    """(B, n, m) bool: pairs that do not see each other."""


def blocks_of(documents: Tensor, reach: int | None = None) -> list[Block]:
    """The blocks of `documents` (B, S), int64, rising from left to right within a row, -1 for padding at its end.

    Args:
        reach: keys of step 0 that a query sees, counted back from its own; none if it is not positive. None: all of its
            document. At step t of a window W it is W - t.

    Their masks together take at most B x S x S bytes; all steps and layers of one reach share them.
    """
    length, size = documents.shape[1], QUERY_BLOCK.get(documents.device.type, QUERY_BLOCK["cuda"])
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
        blocks.append(Block(queries=queries, keys=keys, hidden=foreign | (distance < 0) | (distance >= reach)))
    return blocks


def ttt_attention(
    query: Tensor, key: Tensor, value: Tensor, own: Sequence[tuple[Tensor, Tensor]], blocks: Sequence[Block]
) -> Tensor:
    """Attention of one unrolled step.

    Args:
        query: (B, heads, S, D), rotated.
        key: (B, groups, S, D) of step 0, rotated; value: the same shape.
        own: keys and values of the steps 1..t, shaped like `key`.
        blocks: of the documents, from `blocks_of`.

    Returns:
        (B, S, heads, D)
    """
    # Under autocast a normed feature is wider than what a linear layer makes of it; the backward pass has no autocast.
    query, key = query.to(value.dtype), key.to(value.dtype)
    flat = [part.to(value.dtype) for line in own for part in line]
    attended: Tensor = _TttAttention.apply(blocks, query, key, value, *flat)  # type: ignore[no-untyped-call]
    return attended.transpose(1, 2)


class _TttAttention(torch.autograd.Function):
    """Flash-style: keeps the output and the scores of the own line, recomputes the rest."""

    @staticmethod
    def forward(
        context: Any, blocks: Sequence[Block], query: Tensor, key: Tensor, value: Tensor, *own: Tensor
    ) -> Tensor:
        grouped = _grouped(query, key) * query.shape[-1] ** -0.5
        lines = _lines(grouped, own[::2])
        output, weights = torch.empty_like(grouped), torch.empty_like(lines)
        for block in blocks:
            law, weights[..., block.queries, :] = _law(grouped, key, lines, block)
            output[..., block.queries, :] = _times(law.to(value.dtype), value[:, :, block.keys])
        for weight, line_value in zip(weights.to(value.dtype).unsqueeze(-2).unbind(-1), own[1::2], strict=True):
            output.addcmul_(weight, line_value.unsqueeze(2))
        context.blocks = blocks
        context.save_for_backward(query, key, value, lines, output, *own)
        return output.view(query.shape)

    @staticmethod
    def backward(context: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, lines, output, *own = context.saved_tensors
        scale = query.shape[-1] ** -0.5
        grouped, gradient = _grouped(query, key) * scale, _grouped(upstream[0], key)
        inner = (gradient.float() * output.float()).sum(-1, keepdim=True)
        query_grad, weights = torch.empty_like(grouped), torch.empty_like(lines)
        wide = torch.promote_types(key.dtype, torch.float32)  # many blocks add to the same keys
        key_grad, value_grad = torch.zeros_like(key, dtype=wide), torch.zeros_like(value, dtype=wide)
        for block in context.blocks:
            law, weights[..., block.queries, :] = _law(grouped, key, lines, block)
            part, flow = grouped[..., block.queries, :], gradient[..., block.queries, :]
            value_grad[:, :, block.keys] += _folded(law.to(value.dtype)).transpose(-1, -2) @ _folded(flow)
            pull = _times(flow, value[:, :, block.keys].transpose(-1, -2)).float()
            pull = pull.sub_(inner[..., block.queries, :]).mul_(law).to(key.dtype)
            query_grad[..., block.queries, :] = _times(pull, key[:, :, block.keys])
            key_grad[:, :, block.keys] += _folded(pull).transpose(-1, -2) @ _folded(part)
        own_grad: list[Tensor] = []
        for weight, line_key, line_value in zip(weights.unsqueeze(-2).unbind(-1), own[::2], own[1::2], strict=True):
            pull = (gradient * line_value.unsqueeze(2)).float().sum(-1, keepdim=True)
            pull = pull.sub_(inner).mul_(weight).to(key.dtype)
            query_grad.addcmul_(pull, line_key.unsqueeze(2))
            own_grad += [(pull * grouped).sum(2), (weight.to(value.dtype) * gradient).sum(2)]
        return (
            None,
            query_grad.mul_(scale).view(query.shape),
            key_grad.to(key.dtype),
            value_grad.to(value.dtype),
            *own_grad,
        )


def _law(grouped: Tensor, key: Tensor, lines: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """Probabilities of a block's queries, float32: (B, groups, R, n, m) over step 0, (.., t) over their own line."""
    scores = _times(grouped[..., block.queries, :], key[:, :, block.keys].transpose(-1, -2)).float()
    scores = scores.masked_fill_(block.hidden[:, None, None], -torch.inf)
    seen = scores.shape[-1]
    law = torch.softmax(torch.cat([scores, lines[..., block.queries, :]], -1), -1)
    return law[..., :seen], law[..., seen:]


def _grouped(query: Tensor, key: Tensor) -> Tensor:
    """(B, heads, S, D) -> (B, groups, heads of a group, S, D)."""
    return query.reshape(query.shape[0], key.shape[1], -1, *query.shape[2:])


def _folded(states: Tensor) -> Tensor:
    """(B, groups, R, n, D) -> (B, groups, R * n, D)."""
    return states.flatten(2, 3)


def _times(left: Tensor, right: Tensor) -> Tensor:
    """(B, groups, R, n, k) @ (B, groups, k, m), the same right factor for all heads of a group."""
    product = _folded(left) @ right
    return product.view(*left.shape[:4], right.shape[-1])


def _lines(grouped: Tensor, keys: Sequence[Tensor]) -> Tensor:
    """(B, groups, R, S, t) float32: each scaled query with the keys of its own index."""
    if not keys:
        return grouped.new_empty(*grouped.shape[:-1], 0, dtype=torch.float32)
    return torch.stack([(grouped * key.unsqueeze(2)).float().sum(-1) for key in keys], -1)
