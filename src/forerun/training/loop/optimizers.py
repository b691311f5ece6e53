"""Which optimizer moves which parameter, and Muon for matrices that are spread over processes.

Knows parameter names and shapes; does not know the drafter they belong to, nor the schedule.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from forerun.training.loop.settings import TrainSettings

HEADS = frozenset({"lm_head", "output_head", "wte", "wpe"})
"""Modules whose matrices are indexed by token or position, beside those with "embed" in their name."""

MUON_OPTIONS = ("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
"""Arguments of `torch.optim.Muon`; a group that was loaded holds more."""


def indexed_by_token(name: str) -> bool:
    """True for embeddings and output heads, by the parts of a parameter's dotted name."""
    parts = name.split(".")
    return any("embed" in part or part in HEADS for part in parts)


def moved_by_muon(name: str, parameter: Tensor) -> bool:
    """True for the two-dimensional matrices of the layers."""
    return parameter.ndim == 2 and not indexed_by_token(name)


def decayed(name: str, parameter: Tensor) -> bool:
    """True for matrices, output heads included; embeddings, norms and biases are not pulled to zero."""
    return parameter.ndim >= 2 and not any("embed" in part or part in ("wte", "wpe") for part in name.split("."))


def build_optimizers(module: nn.Module, settings: TrainSettings) -> list[torch.optim.Optimizer]:
    """The optimizers of the trainable parameters of `module`; each group keeps its peak rate under "peak".

    Sharded parameters (FSDP2) are taken as they are, so call this after sharding.
    """
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    optimizers: list[torch.optim.Optimizer] = []
    if settings.optimizer == "muon":
        matrices = [parameter for name, parameter in named if moved_by_muon(name, parameter)]
        named = [(name, parameter) for name, parameter in named if not moved_by_muon(name, parameter)]
        if matrices:
            muon = WholeMatrixMuon(
                matrices,
                lr=settings.muon_learning_rate,
                weight_decay=settings.weight_decay,
                momentum=settings.muon_momentum,
                adjust_lr_fn="match_rms_adamw",
            )
            optimizers.append(muon)
    groups = [
        {"params": [p for name, p in named if decayed(name, p)], "weight_decay": settings.weight_decay},
        {"params": [p for name, p in named if not decayed(name, p)], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if groups:
        optimizers.append(torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, fused=True))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return optimizers


def set_rate(optimizers: Iterable[torch.optim.Optimizer], factor: float) -> None:
    """Set every group's learning rate to `factor` times its peak."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * factor


class WholeMatrixMuon(torch.optim.Muon):
    """Muon (https://kellerjordan.github.io/posts/muon/) that moves sharded matrices exactly as it moves whole ones.

    Orthogonalising needs the whole matrix, in bfloat16; left to sharded arithmetic, partial sums would round elsewhere
    and two processes would train another model than one. So each matrix is gathered, moved by torch's own Muon on
    every process, and its shard kept. One whole matrix exists at a time; the momentum stays sharded.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        sharded = [
            (parameter, group)
            for group in self.param_groups
            for parameter in group["params"]
            if isinstance(parameter, DTensor)
        ]
        if not sharded:
            return super().step(closure)  # type: ignore[no-untyped-call]
        for parameter, group in sharded:
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
        alone.step()  # type: ignore[no-untyped-call]
        parameter.copy_(_shard(whole.detach(), parameter))
        state["momentum_buffer"].copy_(_shard(momentum, parameter))


def _shard(whole: Tensor, like: DTensor) -> DTensor:
    """This process's part of a tensor that every process holds, laid out as `like`."""
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
