"""A range test tries several learning rates in short runs from the same weights, on the same batches.

Each trial warms up and falls to zero like a run of its own, so that a high rate is judged by what it leaves, not by its
noise. A run is longer than a trial and wants a lower rate, so of rates that are nearly as good the lowest is taken.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from forerun.losses.objective import Batches
from forerun.training.loop import checkpoint
from forerun.training.loop.distributed import Parallel
from forerun.training.loop.settings import TrainSettings
from forerun.training.loop.update import backward, scale, set_rate

FACTORS = (1.0, 3.0, 10.0, 30.0)
"""Factors on both peak rates, lowest first. The defaults suit large heads and long runs; small heads that train for an
hour want more."""
LEAST = 24  # Steps of a trial
WARMUP = 0.2  # Share of a trial in which the rate rises
ALIKE = 0.06  # Share of the loss by which a higher rate must be better
WORSE = 1.2  # Times the best loss at which no higher rate is tried


def trial_steps(total: int) -> int:
    """Return the steps of one trial: all of them together are a tenth of a run of `total` steps, within limits.

    In eight steps a rate that is too high looks no worse than it is, but one that is right looks bad: SmolLM2's head
    wants more.
    """
    return min(40, max(LEAST, total // (10 * len(FACTORS))))


@dataclass(frozen=True, kw_only=True, slots=True)
class RangeTest:
    """A `RangeTest` runs the trials; weights, optimizers and random states are afterwards what they were."""

    model: nn.Module  # The objective as `wrap_parallel` returned it
    module: nn.Module  # What is trained
    optimizers: Sequence[torch.optim.Optimizer]  # Without state so far
    batches: Batches
    settings: TrainSettings
    parallel: Parallel
    steps: int  # Steps of a trial

    def run(self) -> dict[float, float]:
        """Map each factor to the mean loss of its trial's last quarter, in nats; infinite where it came apart.

        All processes must call it.
        """
        weights = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        kept = [weight.detach().clone() for weight in weights]
        found = dict[float, float]()
        for factor in FACTORS:
            with checkpoint.preserve_random():
                found[factor] = self._try(factor)
            with torch.no_grad():
                for weight, former in zip(weights, kept, strict=True):
                    weight.copy_(former)
            for optimizer in self.optimizers:
                optimizer.state.clear()
            if found[factor] > WORSE * min(found.values()):
                break  # a higher one would be worse still
        return found

    def _try(self, factor: float) -> float:
        settings, losses = self.settings, list[float]()
        for step in range(self.steps):
            position = step * settings.accumulation
            sums = backward(self.model, self.batches, position, 0.0, settings, self.parallel)
            norm = 0.0
            if sums.weight:
                norm = scale(self.module, self.parallel.world / sums.weight, settings.gradient_clip)
                losses.append(sums.loss / sums.weight)
            if not sums.broken and math.isfinite(norm):
                rising = (step + 1) / max(1, round(WARMUP * self.steps))
                set_rate(self.optimizers, factor * min(1.0, rising, 1 - step / self.steps), {})
                for optimizer in self.optimizers:
                    optimizer.step()
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            if sums.broken or not math.isfinite(norm):
                return math.inf
        last = losses[-max(1, len(losses) // 4) :]
        return sum(last) / len(last) if last else math.inf


def choose_factor(losses: Mapping[float, float]) -> float:
    """Return the factor with the lowest loss; of those that are alike the lowest factor, and 1 where all came apart."""
    best = min(losses.values())
    if not math.isfinite(best):
        return 1.0
    return min(factor for factor, loss in losses.items() if loss <= best * (1 + ALIKE))
