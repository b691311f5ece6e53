"""This module has what a training step reads and gives, and the interfaces of data and objectives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from forerun.types import Boundary


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBatch:
    """A `TokenBatch` holds packed windows: B rows of S tokens.

    A row may hold several documents and end in padding.
    """

    tokens: Tensor  # (B, S) int64
    loss_mask: Tensor  # (B, S) bool: the assistant wrote the token, so predicting it counts; False for padding
    documents: Tensor  # (B, S) int64: the document's number in the row, from 0; -1: padding. Attention stays inside one
    positions: Tensor  # (B, S) int64: position within the document, from 0

    def to(self, device: torch.device | str) -> TokenBatch:
        return TokenBatch(**{item.name: getattr(self, item.name).to(device) for item in fields(self)})


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureBatch:
    """A `FeatureBatch` is a `TokenBatch` with the target's hidden states."""

    batch: TokenBatch
    features: Mapping[Boundary, Tensor]  # boundary -> (B, S, Ht); `LAST_HIDDEN` is the state after the final norm
    number: int = 0  # Number of the batch in its run, from 0
    done: float = 0.0  # Share of the run that lies before its step, in [0, 1); the training loop says it

    def to(self, device: torch.device | str) -> FeatureBatch:
        """Return the same on another device."""
        return replace(
            self,
            batch=self.batch.to(device),
            features={boundary: states.to(device) for boundary, states in self.features.items()},
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LossReport:
    """A `LossReport` holds the losses of one micro-batch, as sums.

    Sums can be added over micro-batches and processes, means cannot.
    """

    loss: Tensor
    """The sum over the counted predictions, () float32, nats, with graph.

    It must reach every trainable parameter, also when nothing counts: other processes wait for the
    gradient.
    """
    weight: Tensor  # () float32: counted predictions. A step's loss is (sum of losses) / (sum of weights) of all ranks
    metrics: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """name -> (sum, count), both () without graph; the same names on every process and in every micro-batch."""


class Objective(Protocol):
    """An `Objective` is a loss over a batch.

    Those that a recipe names are made from ``(head, target, settings)`` and have `Settings`.
    """

    def parameters_module(self) -> nn.Module:
        """Return the module that is trained, saved, and distributed over processes.

        Frozen parts that others own (the target) stay outside.
        """

    def __call__(self, batch: FeatureBatch) -> LossReport:
        """Return the loss of a micro-batch; read parameters from the module each time, never from a
        stored tensor.
        """

    def rates(self, done: float) -> Mapping[str, float]:
        """Map prefixes of parameter names to factors on their learning rate in one step.

        `done` is the share of the run that lies before the step. Other parameters have the factor
        1. The prefixes are always the same, and none is a prefix of another.
        """
        return {}


class Batches(Protocol):
    """`Batches` are data addressed by position, so that resuming needs nothing but a number."""

    steps_per_epoch: int  # Batches in one pass over the data; `batch` goes on beyond it (next epoch, another order)

    def batch(self, step: int, rank: int, world: int) -> FeatureBatch:
        """Return the share of process `rank` of `world` in batch number `step`, from 0.

        It is a function of its arguments, and of the learning model's weights by then where that
        one writes. The shares of all ranks together are the same batch for every `world`, and so is
        what is trained.
        """


def working_dtype(device: torch.device, otherwise: torch.dtype) -> torch.dtype:
    """Return the dtype of matrix products on `device`: autocast's where one is open, else
    `otherwise`.
    """
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else otherwise
