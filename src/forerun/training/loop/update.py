"""One optimizer step has the gradient of (sum of losses) / (sum of weights) over all micro-batches
and processes.

So their numbers change nothing but rounding. The optimizers that apply it are here, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from forerun.devices import multiplies
from forerun.losses.objective import Batches
from forerun.training.loop.distributed import Parallel, shard_like, sync_gradients
from forerun.training.recipe import TrainSettings


@dataclass(kw_only=True, slots=True)
class Sums:
    """Adds up losses, weights, tokens and metrics over micro-batches, processes and steps."""

    loss: float = 0.0  # Nats, over all counted predictions
    weight: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)  # name -> (sum, count)
    broken: list[tuple[int, int]] = field(default_factory=list)  # (position, rank) of batches whose loss is not finite

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
        """Return means by name; what was never counted is left out."""
        found = {"loss": self.loss / self.weight} if self.weight else {}
        found |= {name: value / count for name, (value, count) in self.metrics.items() if count}
        return found | {"tokens_per_second": self.tokens / max(self.seconds, 1e-9)}


def backward(
    model: nn.Module, batches: Batches, position: int, done: float, settings: TrainSettings, parallel: Parallel
) -> Sums:
    """Add the gradient of the summed losses of one step to the parameters, as a mean over
    processes.

    `model` is what `wrap_parallel` returned, `position` that of the step's first batch, `done` the
    share of the run that lies before it; the sums are over all processes.
    """
    count, device = settings.accumulation, parallel.device
    broken = torch.zeros(parallel.world, count, dtype=torch.float64, device=device)
    sums: list[Tensor] = []
    names: list[str] = []
    for micro in range(count):
        batch = replace(batches.batch(position + micro, parallel.rank, parallel.world), done=done)
        with sync_gradients(model, last=micro + 1 == count):
            with torch.autocast(device.type, torch.bfloat16, enabled=settings.halves(device)):
                loss, weight, metrics = model(batch)
            loss.backward()
        names = sorted(metrics)
        parts = [loss.detach(), weight, (batch.batch.documents >= 0).sum()]
        parts += [part for name in names for part in metrics[name]]
        sums.append(torch.stack([part.detach().to(device, torch.float64) for part in parts]))
        broken[parallel.rank, micro] = ~torch.isfinite(loss.detach())
    flat = parallel.sums(torch.cat([broken.flatten(), torch.stack(sums).sum(0)]))
    flags, (total, weights, tokens, *pairs) = flat[: broken.numel()], flat[broken.numel() :]
    return Sums(
        loss=total,
        weight=weights,
        tokens=int(tokens),
        metrics=dict(zip(names, zip(pairs[::2], pairs[1::2], strict=True), strict=True)),
        broken=[(position + index % count, index // count) for index, flag in enumerate(flags) if flag],
    )


def scale(module: nn.Module, factor: float, clip: float) -> float:
    """Multiply the gradients by `factor`, shorten them to the norm `clip` (0: any), and return the norm before that.
    Gradients are left alone if the norm is not finite."""
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    total = nn.utils.get_total_norm(gradients)
    norm = float(total.full_tensor() if isinstance(total, DTensor) else total) * factor
    if math.isfinite(norm):
        shortened = factor * clip / norm if clip and norm > clip else factor
        for gradient in gradients:
            gradient.mul_(shortened)
    return norm


MUON_OPTIONS = ("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
"""The arguments of `torch.optim.Muon`; a group that was loaded holds more."""


def embeddings(module: nn.Module) -> set[str]:
    """Return the names of the parameters of embeddings, of tokens or positions."""
    own = {id(one) for part in module.modules() if isinstance(part, nn.Embedding) for one in part.parameters()}
    return {name for name, parameter in module.named_parameters() if id(parameter) in own}


def select_muon_parameters(module: nn.Module) -> set[str]:
    """Return the names of the two-dimensional matrices of layers, which Muon moves.

    They are neither embeddings nor what has a row for each token, as an output head does.
    """
    configs = [getattr(part, "config", None) for part in module.modules()]
    sizes = {getattr(config, key, None) for config in configs for key in ("vocab_size", "draft_vocab_size")}
    embedded = embeddings(module)
    return {
        name
        for name, parameter in module.named_parameters()
        # A draft vocabulary may be as large as a layer is wide, and layers have no rows for tokens.
        if parameter.ndim == 2 and name not in embedded and ("layers" in name.split(".") or len(parameter) not in sizes)
    }


def build_optimizers(
    module: nn.Module, settings: TrainSettings, parts: Iterable[str] = ()
) -> list[torch.optim.Optimizer]:
    """Build the optimizers of the trainable parameters of `module`.

    Each group keeps its peak rate under "peak", and under "part" which of the `parts` the names of
    its parameters begin with. Sharded parameters (FSDP2) are taken as they are, so call this after
    sharding.
    """
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    optimizers: list[torch.optim.Optimizer] = []
    if settings.optimizer == "muon":
        moved = select_muon_parameters(module)
        matrices = _by_part([pair for pair in named if pair[0] in moved], parts)
        named = [pair for pair in named if pair[0] not in moved]
        options: dict[str, Any] = {
            "weight_decay": settings.weight_decay,
            "momentum": settings.muon_momentum,
            "lr": settings.muon_learning_rate,
            "adjust_lr_fn": "match_rms_adamw",
        }
        optimizers += [Muon(matrices, **options)] if matrices else []
    groups, embedded = [], embeddings(module)
    # Embeddings, norms and biases are not pulled to zero; output heads are.
    for pulled, decay in ((True, settings.weight_decay), (False, 0.0)):
        members = [pair for pair in named if (pair[1].ndim >= 2 and pair[0] not in embedded) == pulled]
        groups += [{**group, "weight_decay": decay} for group in _by_part(members, parts)]
    if groups:
        optimizers.append(torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, fused=True))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return optimizers


def _by_part(named: Sequence[tuple[str, Tensor]], parts: Iterable[str]) -> list[dict[str, Any]]:
    """Return a group of parameters for each part that there is, and one of the others."""
    groups: dict[str | None, list[Tensor]] = {}
    for name, parameter in named:
        groups.setdefault(next((part for part in parts if name.startswith(part)), None), []).append(parameter)
    return [{"params": members, "part": part} for part, members in groups.items()]


def set_rate(optimizers: Iterable[torch.optim.Optimizer], factor: float, rates: Mapping[str, float]) -> None:
    """Set every group's learning rate to `factor` times its peak, and times what `rates` has for its part."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * factor * rates.get(group["part"], 1.0)


def _orthogonalising_context(device: torch.device) -> AbstractContextManager[object]:
    """Return the context for a step of torch's Muon, which asks for bfloat16."""
    return nullcontext() if multiplies(device, torch.bfloat16) else _InFloat32()


class _InFloat32(TorchFunctionMode):
    """`_InFloat32` lets `Tensor.bfloat16` make a copy in float32 while open."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.bfloat16:
            return args[0].to(torch.float32, copy=True)
        return function(*args, **(kwargs or {}))


class Muon(torch.optim.Muon):
    """`Muon` (https://kellerjordan.github.io/posts/muon/) is torch's, but for two things.

    A sharded matrix is gathered, moved on every process, and its shard kept: in sharded arithmetic
    the bfloat16 sums of orthogonalising would round elsewhere, and two processes would train
    another model than one. And a CPU that only emulates bfloat16 orthogonalises in float32, which
    at the demo's size takes 2 s a step instead of 60.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        pairs = [(parameter, group) for group in self.param_groups for parameter in group["params"]]
        if not any(isinstance(parameter, DTensor) for parameter, _ in pairs):
            with _orthogonalising_context(pairs[0][0].device):
                return super().step(closure)  # type: ignore[no-untyped-call]
        for parameter, group in pairs:
            if parameter.grad is not None:
                self._step_whole(parameter, {name: group[name] for name in MUON_OPTIONS})
        return None

    def _step_whole(self, parameter: DTensor, options: dict[str, Any]) -> None:
        state, gradient = self.state[parameter], parameter.grad
        assert isinstance(gradient, DTensor), "sharded with its parameter"
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        whole = nn.Parameter(parameter.full_tensor())
        whole.grad = gradient.full_tensor()
        alone = torch.optim.Muon([whole], **options)
        momentum = state["momentum_buffer"].full_tensor()
        alone.state[whole]["momentum_buffer"] = momentum
        with _orthogonalising_context(whole.device):
            alone.step()  # type: ignore[no-untyped-call]
        parameter.copy_(shard_like(whole.detach(), parameter))
        state["momentum_buffer"].copy_(shard_like(momentum, parameter))
