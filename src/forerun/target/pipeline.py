"""Tokens at different depths in one pass, for decoders whose layers share their weights.

Where layer i + g has the weights of layer i, token k at block d and token k + 1 at block d - 1 need the same matrices:
one pass over both reads them once. Every token keeps its own layer in the cache. Knows no drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forerun.errors import UnsupportedModelError
from forerun.target.inputs import Nodes
from forerun.target.nouns import Plan, Resume
from forerun.target.parts import is_quantised
from forerun.target.resuming import compare

if TYPE_CHECKING:
    from forerun.target.model import Target
    from forerun.types import Draft


def shared_block(target: Target) -> int:
    """How many layers the block has that a target repeats.

    Raises:
        UnsupportedModelError: there is none: each layer has weights of its own.
    """
    count = target.num_layers
    types = getattr(target.config, "layer_types", None) or [None] * count
    storages = [
        [weight.data_ptr() for weight in layer.parameters()]
        + [id(getattr(m, "packed_weight", None)) for m in layer.modules()]
        for layer in target._layers
    ]
    for size in range(1, count // 2 + 1):
        same = all(storages[i] == storages[i - size] and types[i] == types[i - size] for i in range(size, count))
        if count % size == 0 and same and not is_quantised(target.model):
            return size
    raise UnsupportedModelError(
        f"{type(target.model).__name__} has weights of its own in each of its {count} layers, as most models have. "
        "Pipelined drafting needs a decoder that runs the same layers several times; use early_exit"
    )


class _Cache:
    """The target's cache for a batch of B * F tokens: token f of a row is at block ``blocks[f]``."""

    is_compileable = False

    def __init__(self, target: Target, rows: Sequence[int], slots: Tensor, width: int) -> None:
        self.blocks: list[int] = []
        self.size = 0
        self._cache, self._rows, self._slots, self._width = target.cache, rows, slots, width

    def update(self, keys: Tensor, values: Tensor, layer: int, *_args: object, **_kwargs: object) -> Any:
        """As `SlotCache.update`, each token at its own layer."""
        batch = len(self._rows)
        seen = []
        for place, block in enumerate(self.blocks):
            self._cache.begin(self._rows, self._slots[:, place : place + 1], self._width)
            mine = [part.reshape(batch, -1, *part.shape[1:])[:, place] for part in (keys, values)]
            seen.append(self._cache.update(mine[0], mine[1], block * self.size + layer % self.size))
        return tuple(torch.stack(list(parts), dim=1).flatten(0, 1) for parts in zip(*seen, strict=True))


class Pipeline:
    """Runs the tokens of a chain through a shared block, each at its own depth."""

    def __init__(self, target: Target) -> None:
        """Find the block; errors as `shared_block`."""
        self.target, self.size = target, shared_block(target)
        self.depth: int = target.num_layers // self.size
        """Passes of the block that make the whole model."""

    @classmethod
    def proved(cls, target: Target) -> Pipeline:
        """For a target whose logits come out the same; raises UnsupportedModelError, also where nothing is shared."""
        pipeline = cls(target)
        compare(target, _stream, (0, 1))
        return pipeline

    @torch.inference_mode()
    def advance(
        self, rows: Sequence[int], roots: Sequence[int], draft: Draft, states: Tensor | None, blocks: Sequence[int]
    ) -> Tensor:
        """One pass: each of the last F nodes of a chain goes through its block; they rise by one.

        Args:
            draft: the chain so far; nodes beyond a row's count are padding.
            states: (B, F or F - 1, H) before their blocks; without those of the last node it enters the model now.
            blocks: (F,) which of the model's `depth` blocks each node runs next.

        Returns:
            (B, F, H) behind their blocks.
        """
        target, count, batch = self.target, len(blocks), len(rows)
        nodes = target._tree(rows, roots, draft, draft.size + 1 - count)
        if states is None or states.shape[1] < count:
            new = self._enter(rows, replace(nodes, start=draft.size))
            states = new if states is None else torch.cat([states, new], dim=1)
        inputs = target._place(rows, nodes, padded=False)
        masks = inputs["attention_mask"]
        lengths = torch.tensor([target.lengths[row] for row in rows]).unsqueeze(1)
        slots = torch.where(nodes.real, lengths + torch.arange(draft.size + 1), target.cache.dump)[:, -count:]
        width = next(iter(masks.values())).shape[-1] if isinstance(masks, dict) else masks.shape[-1]
        cache = _Cache(target, rows, slots.to(target.device), width)
        cache.blocks, cache.size = list(blocks), self.size

        def apart(mask: Tensor) -> Tensor:
            return mask.transpose(1, 2).reshape(batch * count, 1, 1, width)

        inputs |= {
            "input_ids": inputs["input_ids"].reshape(-1, 1),
            "position_ids": inputs["position_ids"].reshape(-1, 1),
            "attention_mask": {k: apart(m) for k, m in masks.items()} if isinstance(masks, dict) else apart(masks),
            "past_key_values": cache,
        }
        block = Plan(start=self.size, stop=2 * self.size)
        return target._ranges.run(block, inputs, states.reshape(batch * count, 1, -1)).view(batch, count, -1)

    def _enter(self, rows: Sequence[int], nodes: Nodes) -> Tensor:
        """States (B, 1, H) of the last node before the first layer."""
        inputs = self.target._place(rows, nodes, padded=False)
        return self.target._ranges.run(Plan(start=0, stop=0), inputs, None)


def _stream(target: Target, roots: Sequence[int], draft: Draft) -> Resume:
    """A whole chain through the pipeline, one token behind the other."""
    pipeline, states, finished = Pipeline(target), None, list[Tensor]()
    for step in range(pipeline.depth + draft.size):
        first, last = len(finished), min(step, draft.size)
        nodes = {name: getattr(draft, name)[:, :last] for name in ("tokens", "parents", "drawn")}
        blocks = [step - node for node in range(first, last + 1)]
        so_far = replace(draft, counts=draft.counts.clamp(max=last), **nodes)
        states = pipeline.advance([0], roots, so_far, states, blocks)
        if blocks[0] == pipeline.depth - 1:
            finished.append(states[:, :1])
            states = states[:, 1:]
    whole = torch.cat(finished, dim=1)
    return Resume(boundary=target.num_layers, states=whole, counts=[whole.shape[1]], stamps=list(target.writes))
