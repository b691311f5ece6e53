"""Attention of training-time test (EAGLE-3, arXiv 2503.01840): every step sees the first step's past and its own line.

At step t the query of index i looks at all keys of step 0 up to i in its document, and at the keys that index i itself
produced in the steps 1..t. Blocks of queries at a time; nothing of size S x S is kept for the backward pass, which
computes the probabilities once more. Knows no head and no loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

QUERY_BLOCK = 256


def unrolled_attention(
    query: Tensor, key: Tensor, value: Tensor, own: Sequence[tuple[Tensor, Tensor]], documents: Tensor
) -> Tensor:
    """Attention of one unrolled step.

    Args:
        query: (B, heads, S, D), rotated.
        key: (B, groups, S, D) of step 0, rotated; value: the same shape.
        own: keys and values of the steps 1..t, shaped like `key`.
        documents: (B, S) int64, rising from left to right within a row, -1 for padding at its end.

    Returns:
        (B, S, heads, D)
    """
    # Under autocast a normed feature is wider than what a linear layer makes of it; the backward pass has no autocast.
    query, key = query.to(value.dtype), key.to(value.dtype)
    own = [(line_key.to(value.dtype), line_value.to(value.dtype)) for line_key, line_value in own]
    lines = torch.stack([torch.stack(pair) for pair in own]) if own else key.new_zeros(0, 2, *key.shape)
    attended: Tensor = _Unrolled.apply(query, key, value, lines, documents)  # type: ignore[no-untyped-call]
    return attended.transpose(1, 2)


class _Unrolled(torch.autograd.Function):
    """Flash-style: keeps the output and the normaliser of each query, recomputes the rest."""

    @staticmethod
    def forward(context: Any, query: Tensor, key: Tensor, value: Tensor, own: Tensor, documents: Tensor) -> Tensor:
        grouped = _grouped(query, key)
        keys, values = own.unbind(1)
        output = torch.empty_like(grouped)
        normalizers = grouped.new_empty(grouped.shape[:-1], dtype=torch.float32)
        lines = _lines(grouped, keys)
        for block, seen, hidden in _blocks(documents):
            scores = _scores(grouped[..., block, :], key[:, :, seen], hidden)
            near = lines[..., block]
            normalizer = scores.logsumexp(-1)
            if len(near):
                normalizer = torch.logaddexp(normalizer, near.logsumexp(0))
            law = torch.exp(scores - normalizer.unsqueeze(-1)).to(value.dtype)
            mixed = _times(law, value[:, :, seen])
            for line, line_value in zip(near, values, strict=True):
                weight = torch.exp(line - normalizer).to(value.dtype).unsqueeze(-1)
                mixed = mixed + weight * line_value[:, :, None, block]
            output[..., block, :] = mixed
            normalizers[..., block] = normalizer
        context.save_for_backward(query, key, value, own, documents, output, normalizers)
        return output.view(query.shape)

    @staticmethod
    def backward(context: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, own, documents, output, normalizers = context.saved_tensors
        keys, values = own.unbind(1)
        grouped, gradient = _grouped(query, key), _grouped(upstream[0], key)
        scale = query.shape[-1] ** -0.5
        inner = (gradient.float() * output.float()).sum(-1)
        query_grad = torch.empty_like(grouped)
        key_grad, value_grad = torch.zeros_like(key), torch.zeros_like(value)
        own_grad = torch.zeros_like(own)
        lines = _lines(grouped, keys)
        for block, seen, hidden in _blocks(documents):
            part, flow = grouped[..., block, :], gradient[..., block, :]
            law = torch.exp(_scores(part, key[:, :, seen], hidden) - normalizers[..., block].unsqueeze(-1))
            value_grad[:, :, seen] += _folded(law.to(value.dtype)).transpose(-1, -2) @ _folded(flow)
            pull = _times(flow, value[:, :, seen].transpose(-1, -2)).float() - inner[..., block].unsqueeze(-1)
            pull = pull.mul_(law).mul_(scale).to(key.dtype)
            block_grad = _times(pull, key[:, :, seen])
            key_grad[:, :, seen] += _folded(pull).transpose(-1, -2) @ _folded(part)
            for step in range(len(keys)):
                line_key, line_value = keys[step][:, :, None, block], values[step][:, :, None, block]
                weight = torch.exp(lines[step][..., block] - normalizers[..., block])
                own_grad[step, 1][:, :, block] = (weight.to(flow.dtype).unsqueeze(-1) * flow).sum(2)
                line_pull = ((flow * line_value).float().sum(-1) - inner[..., block]) * weight * scale
                line_pull = line_pull.to(part.dtype).unsqueeze(-1)
                block_grad = block_grad + line_pull * line_key
                own_grad[step, 0][:, :, block] = (line_pull * part).sum(2)
            query_grad[..., block, :] = block_grad
        return query_grad.view(query.shape), key_grad, value_grad, own_grad, None


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


def _scores(query: Tensor, key: Tensor, hidden: Tensor) -> Tensor:
    """(B, groups, R, n, m) float32; -inf where `hidden` (B, n, m)."""
    scores = _times(query * query.shape[-1] ** -0.5, key.transpose(-1, -2)).float()
    return scores.masked_fill_(hidden[:, None, None], -torch.inf)


def _lines(grouped: Tensor, keys: Tensor) -> Tensor:
    """(t, B, groups, R, S) float32: each query with the keys of its own index."""
    scale = grouped.shape[-1] ** -0.5
    if not len(keys):
        return grouped.new_empty(0, *grouped.shape[:-1], dtype=torch.float32)
    return torch.stack([(grouped * key.unsqueeze(2)).float().sum(-1) * scale for key in keys])


def _blocks(documents: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
    """Blocks of queries, the keys that any of them sees, and the pairs (B, n, m) that do not see each other."""
    length = documents.shape[1]
    index = torch.arange(length, device=documents.device)
    for first in range(0, length, QUERY_BLOCK):
        last = min(first + QUERY_BLOCK, length)
        same = documents == documents[:, first : first + 1]
        lowest = int(torch.where(same, index, length).min())
        block, seen = slice(first, last), slice(lowest, last)
        future = index[seen] > index[block, None]
        foreign = documents[:, None, seen] != documents[:, block, None]
        yield block, seen, foreign | future
