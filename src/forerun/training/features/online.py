"""Computes the target's hidden states for packed rows with a transformers model, and
checks any source of them.

A document's features are those that it has alone: the mask is block-diagonal and positions start anew. The probe
compares them with what the model reports itself: with a layer id off by one a head still trains, only worse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import cosine_similarity

from forerun.errors import ArgumentError, DataError, UnsupportedModelError
from forerun.losses.chunked_loss import working_dtype
from forerun.losses.objective import FeatureBatch, TokenBatch
from forerun.model.layers import base_of, capture_states, check_boundaries, device_of, evaluating, layers_of
from forerun.model.masks import AttentionMask, MaskStyle, additive
from forerun.model.support import context_length, reads_apart, text_config
from forerun.types import LAST_HIDDEN, Boundary


class OnlineFeatures:
    """Runs a loaded causal LM without gradients and captures its residual stream
    at the given boundaries.
    """

    def __init__(self, model: Any, boundaries: Sequence[Boundary]) -> None:
        """Prepare a transformers causal LM, sharded or not.

        `boundaries` are 0 .. layers, `LAST_HIDDEN` is always added. UnsupportedModelError for
        attention that is neither full, sliding, chunked nor indexed.
        """
        config = text_config(model)
        self.boundaries = distinct_boundaries(boundaries, config.num_hidden_layers)  # As given, without `LAST_HIDDEN`
        self.hidden_size: int = config.hidden_size
        self.max_length: int = context_length(config)  # Most tokens of a document
        self.model = model
        self._base = base_of(model)
        self._layers = layers_of(self._base, config.num_hidden_layers)[1]
        self._style = MaskStyle.of(config)
        self._apart = reads_apart(model)
        self._embedding: nn.Module = model.get_input_embeddings()

    @torch.no_grad()
    def features(self, batch: TokenBatch) -> FeatureBatch:
        """Return the states (B, S, Ht) of one forward pass, detached and on the model's input
        device; meaningless at padding.

        The mask takes B x S x S elements. An open autocast holds. ArgumentError if a document is
        longer than the model's context.
        """
        return self.learning(batch)

    def learning(self, batch: TokenBatch) -> FeatureBatch:
        """Return `features` through which gradients reach what learns in the model."""
        longest = int(batch.positions.max()) + 1
        if longest > self.max_length:
            raise ArgumentError(
                f"a document has {longest} tokens, but the target's context ends at {self.max_length}: "
                "prepare the data with a smaller maximum length"
            )
        device = device_of(self._embedding)
        batch = batch.to(device)
        one = PackedPass.of(batch, self._style, working_dtype(device, self.model.dtype), apart=self._apart)
        with evaluating(self._base), capture_states(self._layers, frozenset(self.boundaries)) as caught:
            last = self._run(one.inputs)
        for boundary, value in caught.items():
            if value.shape[2:] != (self.hidden_size,):
                raise UnsupportedModelError(
                    f"{type(self.model).__name__} hands several streams on between its layers: its states at boundary "
                    f"{boundary} are {tuple(value.shape[2:])} a token, and a head reads {self.hidden_size}. Train one "
                    "that reads the last state alone"
                )
        states = {**{boundary: caught[boundary] for boundary in self.boundaries}, LAST_HIDDEN: last}
        by_boundary = {boundary: one.restore(value.to(device)) for boundary, value in states.items()}
        return FeatureBatch(batch=batch, features=by_boundary)

    def documents(self, documents: Sequence[Sequence[int]]) -> list[dict[Boundary, Tensor]]:
        """Return the states (L, Ht) of whole documents, one document per row of one pass."""
        batch = batch_of(documents)
        features = self.features(batch).features
        lengths = enumerate(map(len, documents))
        return [{boundary: states[row, :length] for boundary, states in features.items()} for row, length in lengths]

    def _run(self, inputs: dict[str, Any]) -> Tensor:
        """Return the states (B, S, Ht) after the final norm."""
        sharded = isinstance(self.model, FSDPModule)
        if not sharded:
            return self._base(**inputs).last_hidden_state
        # FSDP gathers the embedding in the root's forward; the base alone would see its shards.
        states: list[Tensor] = []
        with self._base.register_forward_hook(lambda *call: states.append(call[-1].last_hidden_state)):
            self.model(**inputs, logits_to_keep=1)
        return states[0]


def distinct_boundaries(boundaries: Sequence[Boundary], num_layers: int) -> tuple[Boundary, ...]:
    """Return the boundaries without `LAST_HIDDEN`; ArgumentError if one is out of range or named
    twice.
    """
    chosen = tuple(boundary for boundary in boundaries if boundary != LAST_HIDDEN)
    check_boundaries(set(chosen), num_layers)
    if len(set(chosen)) != len(chosen):
        raise ArgumentError(f"boundaries must be distinct, got {', '.join(map(str, chosen))}")
    return chosen


def batch_of(documents: Sequence[Sequence[int]]) -> TokenBatch:
    """Return a batch with one document per row, padded on the right; the loss mask is all False."""
    rows = [torch.as_tensor(document, dtype=torch.int64) for document in documents]
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    index = torch.arange(tokens.shape[1])
    real = index < torch.tensor([[len(document)] for document in documents])
    return TokenBatch(
        tokens=tokens,
        loss_mask=torch.zeros_like(real),
        documents=real.long() - 1,
        positions=torch.where(real, index, 0),
    )


@dataclass(frozen=True, slots=True)
class PackedPass:
    """The inputs on which a model is run so that each document of packed windows sees itself alone.

    A mask does so for attention. A recurrent state would flow from one document into the next: where a model has them,
    each document is a row of its own, padded on the right, which no token before it sees.
    """

    inputs: dict[str, Any]
    places: tuple[Tensor, Tensor] | None = None  # (B, S) each: row and column of a window's tokens; None: their own

    @classmethod
    def of(cls, batch: TokenBatch, style: MaskStyle, dtype: torch.dtype, *, apart: bool) -> PackedPass:
        """Return the pass of a causal LM over a batch; `style` and `dtype` are those of its mask, and documents run
        `apart` where it keeps states.
        """
        if not apart:
            mask = packed_mask(batch, style, dtype)
            inputs = {"input_ids": batch.tokens, "position_ids": batch.positions, "attention_mask": mask}
            return cls({**inputs, "use_cache": False})
        rows = torch.arange(len(batch.tokens), device=batch.tokens.device).unsqueeze(1)
        numbers = rows * (batch.documents.max() + 1) + batch.documents.clamp(min=0)
        lines = torch.unique(numbers, return_inverse=True)[1]
        real = batch.documents >= 0
        alone = batch.tokens.new_zeros(int(lines.max()) + 1, int(batch.positions.max()) + 1)
        alone[lines[real], batch.positions[real]] = batch.tokens[real]
        return cls({"input_ids": alone, "use_cache": False}, (lines, batch.positions))

    def restore(self, states: Tensor) -> Tensor:
        """Return the states (B, S, H) of the windows' tokens, of those that the model gave."""
        return states if self.places is None else states[self.places]


def packed_mask(batch: TokenBatch, style: MaskStyle, dtype: torch.dtype) -> AttentionMask:
    """Return the `additive` mask of packed windows: a token sees its own document up to itself.

    Padding sees padding, so that no row is masked altogether, and nothing else sees it.
    """
    visible = (batch.documents.unsqueeze(2) == batch.documents.unsqueeze(1)).tril()
    return additive(visible, style, batch.positions, batch.positions, dtype)


COSINE = 0.999  # Mean cosine over the tokens that features must exceed
SCALE = 0.05  # Most that their length may differ; a norm with weights near one changes lengths and leaves directions


class BoundaryCheck:
    """Compares one boundary's features (tokens, Ht) with the target's own states
    at all boundaries.
    """

    def __init__(self, boundary: Boundary, states: Tensor, own: Mapping[Boundary, Tensor]) -> None:
        cosines = cosine_similarity(states, own[boundary], dim=-1)
        errors = {other: float((states - reference).norm()) for other, reference in own.items()}
        self.boundary = boundary
        self.cosine = float(cosines.mean())
        self.lowest = float(cosines.min())  # Cosine of the worst token; reported, not tested
        # Length of the features over that of the target's states, mean over the tokens.
        self.scale = float((states.norm(dim=-1) / own[boundary].norm(dim=-1)).mean())
        # The boundary whose states they resemble most. With NaN every comparison is false; the boundary itself comes
        # first, and its cosine fails it.
        self.nearest = min([boundary, *errors], key=lambda other: errors[other])

    @property
    def passed(self) -> bool:
        # `not >` instead of `<=`: NaN fails.
        return self.cosine > COSINE and abs(self.scale - 1) <= SCALE and self.nearest == self.boundary

    @property
    def summary(self) -> str:
        """Return what was measured, and what went wrong if anything did."""
        words = f"boundary {name_of(self.boundary)}: cosine {self.cosine:.5f}, length x {self.scale:.3f}"
        if not self.passed:
            words += f" (expected cosine > {COSINE}, length within {SCALE:.0%})"
        if not self.passed and self.nearest != self.boundary:
            near = LAST_HIDDEN not in (self.nearest, self.boundary) and abs(self.nearest - self.boundary) == 1
            words += f"; nearest is boundary {name_of(self.nearest)}" + (": layer ids are off by one" if near else "")
        return words


def require(checks: Sequence[BoundaryCheck]) -> None:
    """Raise DataError that names each boundary which failed."""
    failed = [check.summary for check in checks if not check.passed]
    if failed:
        raise DataError(
            f"the captured features are not the target's hidden states: {'; '.join(failed)}. Check the layer "
            "numbering and the final norm of the source; do not train on these."
        )


@torch.no_grad()
def reference_states(model: Any, tokens: Sequence[int]) -> dict[Boundary, Tensor]:
    """Return boundary 0 .. layers and `LAST_HIDDEN` -> (L, Ht) on the CPU, from
    ``output_hidden_states``.

    transformers' last entry is the state after the final norm; the raw one before it comes from a
    hook. Mamba's models leave the embeddings out: their first entry is what the first layer gave.
    """
    config = text_config(model)
    layers = layers_of(base_of(model), config.num_hidden_layers)[1]
    # A hook of its own: `capture_states` is under test.
    calls: list[tuple[Any, Any]] = []  # What entered a layer, and what it gave
    ids = torch.as_tensor(tokens, dtype=torch.int64, device=device_of(model.get_input_embeddings())).view(1, -1)
    with ExitStack() as hooks:
        for layer in (layers[0], layers[-1]):
            hooks.enter_context(layer.register_forward_hook(lambda _, given, output: calls.append((given, output))))
        states = model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    (entered, first), last = calls[0], _states_of(calls[-1][1])
    by_boundary = dict(enumerate(states[:-1]))
    if len(layers) > 1 and torch.equal(states[0], _states_of(first)):
        by_boundary = {0: entered[0], **dict(enumerate(states[:-1], start=1))}
    by_boundary |= {config.num_hidden_layers: last, LAST_HIDDEN: states[-1]}
    return {boundary: value[0].cpu() for boundary, value in by_boundary.items()}


def _states_of(output: Any) -> Tensor:
    """Return the states (B, N, H) of what a layer gave."""
    return output[0] if isinstance(output, tuple) else output


def compare(
    captured: Sequence[Mapping[Boundary, Tensor]], references: Sequence[Mapping[Boundary, Tensor]]
) -> list[BoundaryCheck]:
    """Compare features (L, Ht) of documents with the target's own `reference_states`, boundary by
    boundary.

    DataError where they have other boundaries or shapes.
    """
    references_by_boundary = {
        boundary: torch.cat([reference[boundary].float() for reference in references]) for boundary in references[0]
    }
    checks = []
    for boundary in captured[0]:
        states = torch.cat([document[boundary].float().cpu() for document in captured])
        if boundary not in references_by_boundary or states.shape != references_by_boundary[boundary].shape:
            expected = tuple(references_by_boundary[boundary].shape) if boundary in references_by_boundary else "none"
            raise DataError(f"boundary {name_of(boundary)}: features {tuple(states.shape)}, the target has {expected}")
        checks.append(BoundaryCheck(boundary, states, references_by_boundary))
    return checks


def name_of(boundary: Boundary) -> str:
    return "LAST_HIDDEN" if boundary == LAST_HIDDEN else str(boundary)
