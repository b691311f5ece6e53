"""What the loop asks of a loss and of the data. Knows nothing of either."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor, nn

from forerun.training.batch import FeatureBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class LossReport:
    """The losses of one micro-batch, as sums: sums can be added over micro-batches and processes, means cannot."""

    loss: Tensor
    """() float32, nats, with graph: the sum over the counted predictions. Must reach every trainable parameter through
    the graph, also when nothing counts: other processes wait for the gradient."""
    weight: Tensor
    """() float32: counted predictions. The step's loss is (sum of losses) / (sum of weights) over all processes."""
    metrics: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """name -> (sum, count), both () without graph; the same names on every process and in every micro-batch."""


class Objective(Protocol):
    """A loss over a batch. Those that a recipe names are made from ``(head, target, settings)`` and have `Settings`."""

    def parameters_module(self) -> nn.Module:
        """What is trained, saved, and spread over processes. Frozen parts that others own (the target) stay outside."""
        ...

    def __call__(self, batch: FeatureBatch) -> LossReport:
        """The loss of a micro-batch; must read parameters from the module each time, never from a stored tensor."""
        ...


class Batches(Protocol):
    """Data addressed by position, so that resuming needs nothing but a number."""

    steps_per_epoch: int
    """Batches in one pass over the data; `batch` goes on beyond it (next epoch, another order)."""

    def batch(self, step: int, rank: int, world: int) -> FeatureBatch:
        """The share of process `rank` of `world` in batch number `step`, from 0.

        A function of its arguments alone (no global random state). The shares of all ranks together are the same batch
        for every `world`: that makes training independent of the number of processes.
        """
        ...
