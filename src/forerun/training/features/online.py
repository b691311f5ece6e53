"""The target's hidden states for packed rows, from a transformers model in this process.

Documents that share a row do not see each other: the mask is block-diagonal and positions start anew, so a document's
features are those that it has alone. Knows nothing of heads, files or objectives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from forerun.errors import ArgumentError
from forerun.target.layers import base_of, captured, device_of, layers_of
from forerun.target.masks import FULL, AttentionMask, MaskStyle
from forerun.target.support import context_length, refuse_stateful, text_config
from forerun.training.batch import FeatureBatch, TokenBatch, working_dtype
from forerun.types import LAST_HIDDEN, Signal


class OnlineFeatures:
    """Runs a loaded causal LM without gradients and catches its residual stream at the given boundaries."""

    def __init__(self, model: Any, boundaries: Sequence[Signal]) -> None:
        """Look at the model; nothing of it is changed.

        Args:
            model: a transformers causal LM, on any device, sharded or not.
            boundaries: 0 .. layers; `LAST_HIDDEN` is always added.

        Raises:
            UnsupportedModelError: recurrent state, or a layer that is neither full, sliding nor chunked attention.
            ArgumentError: a boundary that the model does not have, or one named twice.
        """
        refuse_stateful(type(model), model.config.model_type)
        config = text_config(model)
        self.boundaries = check_boundaries(boundaries, config.num_hidden_layers)
        """Ascending or as given, without `LAST_HIDDEN`."""
        self.hidden_size: int = config.hidden_size
        self.max_length: int = context_length(config)
        """Most tokens of a document."""
        self.model = model
        self._base = base_of(model)
        self._layers = layers_of(self._base, config.num_hidden_layers)[1]
        self._style = MaskStyle.of(config)
        self._embedding: nn.Module = model.get_input_embeddings()

    @property
    def signals(self) -> tuple[Signal, ...]:
        """What `features` gives, in the order in which it is stored: the boundaries, then `LAST_HIDDEN`."""
        return (*self.boundaries, LAST_HIDDEN)

    @torch.no_grad()
    def features(self, batch: TokenBatch) -> FeatureBatch:
        """The states (B, S, Ht) of one forward pass, each detached and on the model's input device.

        The mask takes B x S x S elements. States at padding are meaningless. Honours an autocast that is open.

        Raises:
            ArgumentError: a document is longer than the model's context.
        """
        longest = int(batch.positions.max()) + 1
        if longest > self.max_length:
            raise ArgumentError(
                f"a document has {longest} tokens, but the target's context ends at {self.max_length}: "
                "prepare the data with a smaller maximum length"
            )
        device = device_of(self._embedding)
        batch = batch.to(device)
        inputs = {
            "input_ids": batch.tokens,
            "position_ids": batch.positions,
            "attention_mask": packed_mask(batch, self._style, working_dtype(device, self.model.dtype)),
            "use_cache": False,
        }
        with _evaluating(self._base), captured(self._layers, frozenset(self.boundaries)) as caught:
            last = self._run(inputs)
        states = {signal: caught[signal].to(device) for signal in self.boundaries}
        return FeatureBatch(batch=batch, features={**states, LAST_HIDDEN: last.to(device)})

    def documents(self, documents: Sequence[Sequence[int]]) -> list[dict[Signal, Tensor]]:
        """The states (L, Ht) of whole documents, one document per row of one pass."""
        batch = batch_of(documents)
        found = self.features(batch).features
        return [
            {signal: states[row, : len(tokens)] for signal, states in found.items()}
            for row, tokens in enumerate(documents)
        ]

    def _run(self, inputs: dict[str, Any]) -> Tensor:
        """States (B, S, Ht) after the final norm."""
        if not _gathers_at_root(self.model):
            last: Tensor = self._base(**inputs).last_hidden_state
            return last
        # FSDP gathers the embedding in the root's forward; the base alone would see its shards.
        kept: list[Tensor] = []
        handle = self._base.register_forward_hook(lambda *call: kept.append(call[-1].last_hidden_state))
        try:
            self.model(**inputs, logits_to_keep=1)
        finally:
            handle.remove()
        return kept[0]


def check_boundaries(boundaries: Sequence[Signal], num_layers: int) -> tuple[Signal, ...]:
    """The boundaries without `LAST_HIDDEN`.

    Raises:
        ArgumentError: one is out of range or named twice.
    """
    chosen = tuple(boundary for boundary in boundaries if boundary != LAST_HIDDEN)
    odd = [boundary for boundary in chosen if not 0 <= boundary <= num_layers]
    if odd:
        raise ArgumentError(
            f"there is no layer boundary {odd[0]}: the target has {num_layers} layers, so boundaries are "
            f"0..{num_layers} (b is the state after b layers, 0 the embeddings)"
        )
    if len(set(chosen)) != len(chosen):
        raise ArgumentError(f"boundaries must be distinct, got {', '.join(map(str, chosen))}")
    return chosen


def batch_of(documents: Sequence[Sequence[int]]) -> TokenBatch:
    """One document per row, padded on the right; the loss mask is all False."""
    size = max(len(tokens) for tokens in documents)
    lengths = torch.tensor([len(tokens) for tokens in documents]).unsqueeze(1)
    places = torch.arange(size)
    real = places < lengths
    tokens = torch.zeros(len(documents), size, dtype=torch.int64)
    for row, document in enumerate(documents):
        tokens[row, : len(document)] = torch.as_tensor(document, dtype=torch.int64)
    return TokenBatch(
        tokens=tokens,
        loss_mask=torch.zeros_like(real),
        documents=real.long() - 1,
        positions=torch.where(real, places, 0),
    )


def packed_mask(batch: TokenBatch, style: MaskStyle, dtype: torch.dtype) -> AttentionMask:
    """The additive mask (B, 1, S, S): a token sees its own document up to itself; a dict for mixed layers.

    Padding sees padding, so that no row is masked altogether, and is seen by nobody else. A sliding window counts
    positions within the document.
    """
    places = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    same = batch.documents.unsqueeze(2) == batch.documents.unsqueeze(1)
    visible = same & (places.unsqueeze(1) >= places)
    zero = torch.zeros((), dtype=dtype, device=visible.device)
    lowest = torch.full_like(zero, torch.finfo(dtype).min)
    masks = {}
    for name in style.types:
        seen = visible
        if name != FULL:
            seen = visible & style.within(name, batch.positions.unsqueeze(2), batch.positions.unsqueeze(1))
        masks[name] = torch.where(seen, zero, lowest).unsqueeze(1)
    return masks if len(masks) > 1 else next(iter(masks.values()))


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """While open, no dropout: a trainer's ``train()`` reaches the frozen target too."""
    switched = [child for child in module.modules() if child.training]
    for child in switched:
        child.training = False
    try:
        yield
    finally:
        for child in switched:
            child.training = True


def _gathers_at_root(model: Any) -> bool:
    if not torch.distributed.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule

    return isinstance(model, FSDPModule)
