"""The gradient of one optimizer step, exact for any number of processes and micro-batches.

Losses and weights are summed, never averaged, until both totals are known. Knows no optimizer and no schedule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from forerun.training.loop.distributed import Parallel, synchronised
from forerun.training.loop.objective import Batches
from forerun.training.loop.settings import TrainSettings


@dataclass(kw_only=True, slots=True)
class Sums:
    """What is added up over micro-batches, processes and steps."""

    loss: float = 0.0
    """Nats, over all counted predictions."""
    weight: float = 0.0
    """Counted predictions."""
    tokens: int = 0
    """Tokens, padding not counted."""
    seconds: float = 0.0
    """Wall seconds of the steps."""
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    """name -> (sum, count)."""
    broken: list[tuple[int, int]] = field(default_factory=list)
    """(position, rank) of the batches whose loss is not finite."""

    def add(self, other: Sums) -> None:
        """Add the sums of another step."""
        self.loss += other.loss
        self.weight += other.weight
        self.tokens += other.tokens
        self.seconds += other.seconds
        for name, (value, count) in other.metrics.items():
            former = self.metrics.get(name, (0.0, 0.0))
            self.metrics[name] = (former[0] + value, former[1] + count)

    def means(self) -> dict[str, float]:
        """Values by name; what was never counted is left out."""
        found = {"loss": self.loss / self.weight} if self.weight else {}
        found |= {name: value / count for name, (value, count) in self.metrics.items() if count}
        return found | {"tokens_per_second": self.tokens / max(self.seconds, 1e-9)}


def backward(model: nn.Module, batches: Batches, position: int, settings: TrainSettings, parallel: Parallel) -> Sums:
    """Add the gradient of the summed losses of one step to the parameters, as a mean over processes.

    Args:
        model: what `spread` returned.
        batches: the data.
        position: of the step's first batch.
        settings: accumulation and dtype.
        parallel: who we are.

    Returns:
        Sums over all processes, the same on each.
    """
    count, device = settings.accumulation, parallel.device
    finite = torch.ones(parallel.world, count, dtype=torch.float64, device=device)
    sums: list[Tensor] = []
    names: list[str] = []
    for micro in range(count):
        batch = batches.batch(position + micro, parallel.rank, parallel.world)
        with synchronised(model, last=micro + 1 == count):
            with torch.autocast(device.type, torch.bfloat16, enabled=settings.dtype == "bfloat16"):
                loss, weight, metrics = model(batch)
            loss.backward()
        names = sorted(metrics)
        parts = [loss.detach(), weight, (batch.batch.documents >= 0).sum()]
        parts += [part for name in names for part in metrics[name]]
        sums.append(torch.stack([part.detach().to(device, torch.float64) for part in parts]))
        finite[parallel.rank, micro] = torch.isfinite(loss.detach())
    flat = parallel.sums(torch.cat([(1 - finite).flatten(), torch.stack(sums).sum(0)]))
    flags, (total, weights, tokens, *pairs) = flat[: finite.numel()], flat[finite.numel() :]
    broken = [divmod(index, count) for index, flag in enumerate(flags) if flag]
    return Sums(
        loss=total,
        weight=weights,
        tokens=int(tokens),
        metrics={name: (pairs[2 * index], pairs[2 * index + 1]) for index, name in enumerate(names)},
        broken=[(position + micro, rank) for rank, micro in broken],
    )


def norm_of(gradients: list[Tensor]) -> float:
    """Euclidean norm over all gradients, shards of other processes included."""
    norm = nn.utils.get_total_norm(gradients)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def scale(module: nn.Module, factor: float, clip: float) -> float:
    """Multiply the gradients by `factor`, shorten them to the norm `clip` (0: any), and return the norm before that.

    Gradients are left alone if the norm is not finite.
    """
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    norm = norm_of(gradients) * factor
    if math.isfinite(norm):
        shortened = factor * clip / norm if clip and norm > clip else factor
        for gradient in gradients:
            gradient.mul_(shortened)
    return norm
