"""The processes that torchrun started: rank and world, DDP and FSDP2 of the
module, and collectives.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from forerun.errors import ArgumentError, ForerunError
from forerun.losses.objective import FeatureBatch, Objective

Mode = Literal["single", "ddp", "fsdp"]
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallel:
    """Rank and device of this process, and how many there are."""

    rank: int = 0
    world: int = 1  # Processes in all
    mode: Mode = "single"  # "ddp": every process holds all weights; "fsdp": each holds a part (FSDP2)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @classmethod
    def from_environment(cls, mode: Mode = "ddp", device: torch.device | str | None = None) -> Parallel:
        """Join the processes that torchrun started, if any.

        `device` None is the local rank's CUDA device, else CPU. ArgumentError for an unknown mode,
        or "single" with several processes.
        """
        if mode not in ("single", "ddp", "fsdp"):
            raise ArgumentError(f"mode={mode!r} is unknown; expected single, ddp or fsdp.")
        world = int(os.environ.get("WORLD_SIZE", "1"))
        local = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
        device_here = torch.device(local if device is None else device)
        if world == 1:
            return cls(device=device_here)
        if mode == "single":
            raise ArgumentError(f"mode='single', but torchrun started {world} processes; choose ddp or fsdp.")
        if device_here.type == "cuda":
            torch.cuda.set_device(device_here)
        if not dist.is_initialized():
            dist.init_process_group("nccl" if device_here.type == "cuda" else "gloo")
        return cls(rank=dist.get_rank(), world=world, mode=mode, device=device_here)

    @property
    def first(self) -> bool:
        """Return whether this process writes files and logs."""
        return self.rank == 0

    def wait(self) -> None:
        if self.world > 1:
            dist.barrier()

    def close(self) -> None:
        """Leave the group of processes; call it once, at the end of the program."""
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def sums(self, values: Tensor) -> list[float]:
        """Return the n sums of (n,) over all processes, in float64."""
        values = values.to(self.device, torch.float64)
        if self.world > 1:
            dist.all_reduce(values)
        return [float(value) for value in values.tolist()]

    def share(self, value: Result) -> Result:
        """Return the first process's value, on all."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def collect(self, value: str) -> list[str]:
        """Return every process's text, by rank, on all."""
        if self.world == 1:
            return [value]
        box: list[Any] = [None] * self.world
        dist.all_gather_object(box, value)
        return box

    def on_first(self, work: Callable[[], Result]) -> Result:
        """Do `work` on the first process; its result, or its `ForerunError`, reaches all."""
        if self.world == 1:
            return work()
        outcome: Any = None
        if self.first:
            try:
                outcome = work()
            except ForerunError as error:
                outcome = error
        outcome = self.share(outcome)
        if isinstance(outcome, ForerunError):
            raise outcome
        return outcome

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Overwrite `tensor` with the first process's and return it; same shape and dtype everywhere."""
        if self.world > 1:
            dist.broadcast(tensor, src=0)
        return tensor


class Forward(nn.Module):
    """Wraps an objective as a module whose forward pass is the loss, for DDP and FSDP."""

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self.trained = objective.parameters_module()
        # A bound method, not the objective: one that is a module itself would register the target as ours.
        self._loss = objective.__call__

    def forward(self, batch: FeatureBatch) -> tuple[Tensor, Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """Return (sum of losses, weight, metrics) of a micro-batch."""
        report = self._loss(batch)
        return report.loss, report.weight, dict(report.metrics)


def wrap_parallel(objective: Objective, parallel: Parallel) -> nn.Module:
    """Return the objective's forward pass, distributed as `parallel` says.

    All start from the first one's weights, and gradients come out averaged. FSDP2 shards the
    trainable parameters as one group, gathered once: a drafter is a few layers.
    """
    forward = Forward(objective)
    if parallel.mode == "single":
        return forward
    with torch.no_grad():
        for tensor in (*forward.trained.parameters(), *forward.trained.buffers()):
            parallel.broadcast(tensor.detach())
    if parallel.mode == "ddp":
        # Buffers are constants (position tables, vocabulary maps). torch 2.13 has renamed the option.
        parameters = inspect.signature(DistributedDataParallel.__init__).parameters
        name = "forward_sync_buffers" if "forward_sync_buffers" in parameters else "broadcast_buffers"
        return DistributedDataParallel(forward, **{name: False})  # type: ignore[arg-type]
    frozen = {parameter for parameter in forward.parameters() if not parameter.requires_grad}
    fully_shard(forward, mesh=init_device_mesh(parallel.device.type, (parallel.world,)), ignored_params=frozen)
    return forward


def shard_like(whole: Tensor, like: Tensor) -> Tensor:
    """Return this process's part of a tensor that every process holds, laid out as `like` where
    that is sharded.
    """
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


@contextmanager
def sync_gradients(model: nn.Module, last: bool) -> Iterator[None]:
    """Exchange gradients in the `last` micro-batch of a step only; before, each process adds up its own."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    waiting = isinstance(model, DistributedDataParallel) and not last
    with model.no_sync() if waiting else nullcontext():  # type: ignore[operator]
        yield


@contextmanager
def gather_parameters(model: nn.Module) -> Iterator[None]:
    """Gather a sharded module's parameters meanwhile, so that it can draft. All processes must take part."""
    if not isinstance(model, FSDPModule):
        yield
        return
    model.unshard()
    try:
        yield
    finally:
        model.reshard()
