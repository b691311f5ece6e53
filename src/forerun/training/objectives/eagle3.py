"""EAGLE-3's objective is the training-time test (arXiv 2503.01840): the head is unrolled on its own
features for T steps.

At step t, index i reads the embedding of token i + 1 + t and its own feature of step t - 1 (at t =
0 the target's), stands at position i + t, and predicts token i + 2 + t: its distribution is pulled
towards the target's after token i + 1 + t. Only predictions of counted tokens of the same document
enter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from forerun.drafters.heads.base import Advanced
from forerun.drafters.heads.eagle import EagleHead
from forerun.errors import ArgumentError
from forerun.training.batch import FeatureBatch, LossReport
from forerun.training.chunked_loss import VocabularyLoss
from forerun.training.flex_attention import FlexMask, check_device, flex_attention
from forerun.training.objectives.base import (
    DecoderObjective,
    DecoderSettings,
    FrozenTarget,
    chain_metrics,
    check_unrolling,
    mark_counted,
    run_or_checkpoint,
    shift_left,
    shift_right,
    unrolled_weights,
)
from forerun.types import LAST_HIDDEN


@dataclass(frozen=True, kw_only=True, slots=True)
class Eagle3Settings(DecoderSettings):
    """`Eagle3Settings` are steps, weights and divergence of the objective."""

    steps: int = 7
    """T, the number of times that the head is unrolled."""
    decay: float = 0.8
    """Base of the steps' weights: step t weighs decay^t, normalised to sum 1."""
    flex_attention: bool = False
    """On CUDA: FlexAttention, which makes no mask of queries times keys; the figures are the same."""

    def __post_init__(self) -> None:
        check_unrolling(self.steps, self.decay)

    @property
    def weights(self) -> list[float]:
        """Return the weights (T,) of the steps, summing to 1."""
        return unrolled_weights(self.steps, self.decay)


@dataclass(frozen=True, kw_only=True, slots=True)
class UnrolledStep:
    """An `UnrolledStep` is one step of the unrolled head."""

    step: int
    output: Tensor  # (B, S, H): what the output head reads; entry i predicts token i + 2 + step
    counted: Tensor


class Eagle3Objective(DecoderObjective):
    """An `Eagle3Objective` is the loss of a head on a batch of features."""

    kind: ClassVar[str] = "eagle3"
    Settings: ClassVar[type[Eagle3Settings]] = Eagle3Settings
    head: EagleHead
    settings: Eagle3Settings

    def __init__(self, head: EagleHead, target: FrozenTarget, settings: Eagle3Settings | None = None) -> None:
        if head.config.kind != self.kind:
            raise ArgumentError(f"this objective trains heads of the kind {self.kind}, this one is {head.config.kind}")
        super().__init__(head, target, settings)

    def __call__(self, batch: FeatureBatch) -> LossReport:
        """Return the weighted sum over all steps and counted predictions, and acceptance by step."""
        last = batch.features[LAST_HIDDEN]
        steps = list(self.unroll(batch))
        shares = torch.tensor(self.settings.weights, device=last.device).view(-1, 1, 1)
        counts = torch.stack([step.counted for step in steps])
        found = self._loss(steps, counts * shares, last)
        metrics = chain_metrics(counts, found.agrees, found.overlap)
        return LossReport(loss=found.loss, weight=found.weights.sum(), metrics=metrics)

    def unroll(self, batch: FeatureBatch) -> Iterator[UnrolledStep]:
        """Yield the head's outputs, step by step."""
        tokens, past = batch.batch, list[tuple[Tensor, ...]]()
        features = self.fused(batch)
        windows = {self.head.config.window(layer) for layer in range(len(self.head.layers))}
        mask_of: Callable[..., Mask] = blocks_of
        if self.settings.flex_attention:
            check_device(tokens.documents.device)
            mask_of = FlexMask
        everything = mask_of(tokens.documents) if None in windows else ()
        for step in range(self.settings.steps):
            blocks = {size: everything if size is None else mask_of(tokens.documents, size - step) for size in windows}
            ids = shift_left(tokens.tokens, step + 1, 0)
            features, output, *own = self._advance(ids, features, tokens.positions + step, blocks, past)
            past.append(tuple(own))
            yield UnrolledStep(step=step, output=output, counted=mark_counted(tokens, step))

    def _advance(
        self,
        ids: Tensor,
        features: Tensor,
        positions: Tensor,
        blocks: Mapping[int | None, Mask],
        past: list[tuple[Tensor, ...]],
    ) -> tuple[Tensor, ...]:
        """Return (feature, output, key of layer 0, value of layer 0, key of layer 1, ...) of one
        step; `blocks` are by window.
        """

        def run(features: Tensor, *flat: Tensor) -> tuple[Tensor, ...]:
            own: list[Tensor] = []
            size = 2 * len(self.head.layers)
            steps = [flat[start : start + size] for start in range(0, len(flat), size)]

            def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
                own.extend((key, value))
                line = [(step[2 * layer], step[2 * layer + 1]) for step in steps] + [(key, value)]
                window = self.head.config.window(layer)
                near = line[1:] if window is None else line[1:][-window:]
                return ttt_attention(query, line[0][0], line[0][1], near, blocks[window])

            embeds = self.embed(ids).to(features.dtype)
            result: Advanced = self.head.advance(embeds, features, self.head.angles(positions, features), attend)
            return (result.feature, result.output, *own)

        flat = [tensor for step in past for tensor in step]
        found: tuple[Tensor, ...] = run_or_checkpoint(run, features, *flat, again=self.settings.gradient_checkpointing)
        return found

    def _loss(self, steps: Sequence[UnrolledStep], weights: Tensor, last: Tensor) -> VocabularyLoss:
        """Return the loss of all steps at once, so that the output head has one gradient.

        `weights` are (T, B, S), `last` is (B, S, Ht). It is arranged by the predicted token: there
        all steps follow the same distribution of the target.
        """
        outputs = torch.stack([shift_right(step.output, step.step + 1) for step in steps], 2)
        shares = torch.stack([shift_right(weights[step.step], step.step + 1) for step in steps], 2)
        found = self.divergence(outputs.flatten(0, 2), self.output_head(), shares.flatten(), last)
        entered, agrees, overlap, losses = (
            torch.stack([shift_left(part, step + 1, 0.0) for step, part in enumerate(values.view_as(shares).unbind(2))])
            for values in (found.weights, found.agrees, found.overlap, found.losses)
        )
        return VocabularyLoss(loss=found.loss, weights=entered, agrees=agrees, overlap=overlap, losses=losses)


QUERY_BLOCK = {"cpu": 64, "cuda": 256}
"""So many queries are computed at a time: on a CPU few enough that their probabilities stay in the
cache.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryBlock:
    """A `QueryBlock` is queries that are computed together, and what they see of step 0."""

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
