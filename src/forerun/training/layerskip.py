"""LayerSkip's objective (arXiv 2404.16710): every layer learns to predict through the target's own norm and head.

Layers are dropped at random, later ones more often, so that early layers learn to predict without them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from forerun.losses.chunked_loss import VocabularyLoss
from forerun.losses.objective import (
    FeatureBatch,
    FrozenTarget,
    LossReport,
    Natural,
    NotNegative,
    Objective,
    ObjectiveSettings,
    mark_counted,
)
from forerun.model.layers import base_of, capture_states, layers_of, norm_after_layers
from forerun.model.support import refuse_stateful, text_config
from forerun.training.distill import DraftStates


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSkipSettings(ObjectiveSettings):
    """The labels of the layers, which layers learn in which batch, and how often layers are dropped."""

    learn_from: Literal["target", "data"] = "target"
    """Source of the labels: the original target's distributions, which preserve its outputs, or the data's tokens, as
    in the paper.
    """
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Probability that a window skips the last layer; earlier layers are skipped exponentially less often."""
    exit_scale: NotNegative = 0.2
    """Weight of the exits relative to the last layer; later exits weigh more than earlier ones."""
    curriculum: Literal["rotational", "gradual", "all"] = "rotational"
    """Exits that learn in a batch: every `every`-th, one further in the next batch; or from the last to the first one,
    all from batch number `gradual_batches` on; or all of them."""
    every: Natural = 4
    gradual_batches: Natural = 1000


class LayerSkipObjective(Objective):
    """The weighted mean of the losses of a batch's exits and of the last layer's loss."""

    Settings: ClassVar[type[LayerSkipSettings]] = LayerSkipSettings

    def __init__(self, model: Any, target: FrozenTarget, settings: LayerSkipSettings | None = None) -> None:
        """Take the trained transformers causal LM `model`, and `target`, the original model."""
        refuse_stateful(
            model,
            "LayerSkip learns from inner layers over packed windows, where a state would flow from one text into the "
            "next, and early_exit cannot draft with such a target in every family. forerun train eagle3 trains a head",
        )
        self.target, self.settings = target, settings or LayerSkipSettings()
        self.reader = DraftStates(model, gradient_checkpointing=self.settings.gradient_checkpointing)
        base, count = base_of(model), text_config(model).num_hidden_layers
        self._layers, self._norm = layers_of(base, count)[1], norm_after_layers(base, count)[1]

    def parameters_module(self) -> nn.Module:
        return self.reader.model

    def __call__(self, batch: FeatureBatch) -> LossReport:
        """Return the loss, ``agreement_E`` and ``overlap_E``.

        ``agreement_E`` is how often the likeliest token after E layers is the target's, and ``overlap_E`` the
        probability that a token drawn there is accepted by the original target. Only `learn_from` target measures them.
        """
        training, last = self.parameters_module().training, len(self._layers)
        exits = self.exits(batch.number) if training else []
        with (
            self._dropping(len(batch.batch.tokens) if training else 0),
            capture_states(self._layers, set(exits)) as states,
        ):
            final = self.reader.states(batch.batch)
        weights = exit_weights(exits, last, self.settings.exit_scale)
        counts = mark_counted(batch.batch, -1)
        by_exit = {place: self._loss(self._norm(states[place]), counts, batch) for place in exits}
        by_exit[last] = self._loss(final, counts, batch)
        total = torch.stack([weights[place] * one.loss for place, one in by_exit.items()]).sum()
        seen, nothing = counts.sum().float(), total.new_zeros(())
        metrics = {"last_layer_loss": (by_exit[last].loss.detach(), seen)}
        for place in range(1, last + 1):
            one = by_exit.get(place)
            for name in ("agrees", "overlap"):
                value = (nothing, nothing) if one is None else (getattr(one, name).sum(), seen)
                metrics[f"{name}_{place}"] = value
        return LossReport(loss=total, weight=seen, metrics=metrics)

    def exits(self, number: int) -> list[int]:
        """Return the numbers of layers after which batch `number` has a loss, without the last layer."""
        settings, every = self.settings, range(1, len(self._layers))
        if settings.curriculum == "rotational":
            return [place for place in every if (place + number) % settings.every == 0]
        if settings.curriculum == "gradual":
            share = min(1.0, number / settings.gradual_batches)
            return [place for place in every if len(every) - place < share * len(every)]
        return list(every)

    def _loss(self, states: Tensor, counts: Tensor, batch: FeatureBatch) -> VocabularyLoss:
        return self.reader.loss(states, counts, batch, self.target, self.settings.learn_from)

    @contextmanager
    def _dropping(self, rows: int) -> Iterator[None]:
        """Let each of `rows` windows skip some layers within the context; 0: none does."""
        chances = dropout_chances(len(self._layers), self.settings.dropout)
        handles = []
        for layer, chance in zip(self._layers, chances, strict=True):
            dropped = torch.rand(rows) < chance
            if dropped.any():
                handles.append(layer.register_forward_hook(_passing(dropped), with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def exit_weights(exits: list[int], last: int, scale: float) -> dict[int, float]:
    """Map each exit, and the `last` layer, to its share of the loss (they sum to 1).

    After E layers it is ``scale * (0 + 1 + .. + E - 1)``, for the last one ``last - 1`` more than
    the one before it.
    """
    raw = {place: scale * place * (place - 1) / 2 for place in exits}
    raw[last] = last - 1 + scale * (last - 1) * (last - 2) / 2
    whole = sum(raw.values())
    return {place: value / whole for place, value in raw.items()}


def dropout_chances(layers: int, most: float) -> list[float]:
    """Return the probability of skipping each layer, which grows exponentially from 0 at the first to `most` at the
    last.
    """
    return [most * (2 ** (layer / max(1, layers - 1)) - 1) for layer in range(layers)]


def _passing(dropped: Tensor) -> Any:
    """Return a hook that passes the rows in `dropped` (B,) through a layer unchanged."""

    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        before = args[0] if args else kwargs["hidden_states"]
        after = output[0] if isinstance(output, tuple) else output
        mixed = torch.where(dropped.to(after.device).view(-1, 1, 1), before, after)
        return (mixed, *output[1:]) if isinstance(output, tuple) else mixed

    return hook
