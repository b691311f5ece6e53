"""What one pass of the target costs, over 1 to 16 nodes, beside its linear layers alone. Knows no drafter.

The linear layers alone, with weights in the fastest layout there is, are the floor: on a processor they are bound by
reading the weights (few rows) or by arithmetic (many rows), whatever surrounds them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from forerun.core.tree import TokenTree
from forerun.model import TransformersTarget
from forerun.model.kernels.packing import PackedLinear, PackedWeight

NODES = (1, 2, 4, 8, 16)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCosts:
    """Medians in ms, by number of scored nodes."""

    step_ms: dict[int, float]
    """The whole pass: inputs, layers, output head."""
    floor_ms: dict[int, float]
    """The linear layers alone, output head included."""
    first_pass_s: float
    """The first passes with one node and with more: where compilation happens."""

    def overhead(self, nodes: int = 1) -> float:
        """Step over floor."""
        return self.step_ms[nodes] / self.floor_ms[nodes]

    def flatness(self, nodes: int = 16) -> float:
        """A pass over `nodes` over a pass over one."""
        return self.step_ms[nodes] / self.step_ms[1]

    def floor_flatness(self, nodes: int = 16) -> float:
        """The same of the linear layers alone: what this machine allows at best."""
        return self.floor_ms[nodes] / self.floor_ms[1]


@torch.inference_mode()
def measure_steps(target: TransformersTarget, context: Sequence[int], *, repeats: int) -> StepCosts:
    """Time passes behind `context`, the sizes and the floor taking turns; `target`'s first row is used and freed."""
    target.truncate([0], [0])
    target.prefill([0], [list(context[:-1])])
    began = time.perf_counter()
    for nodes in NODES[:2]:
        target.score([0], [chain(context, nodes - 1)])
    first_pass_s = time.perf_counter() - began
    linears = linear_layers(target.model)
    steps: dict[int, list[float]] = {nodes: [] for nodes in NODES}
    floors: dict[int, list[float]] = {nodes: [] for nodes in NODES}
    for _ in range(repeats):
        for nodes in NODES:
            tree = chain(context, nodes - 1)
            began = time.perf_counter()
            target.score([0], [tree])
            steps[nodes].append(time.perf_counter() - began)
            floors[nodes].append(_time_linears(linears, nodes, target.dtype))
    target.truncate([0], [0])
    return StepCosts(
        step_ms={nodes: 1e3 * median(times) for nodes, times in steps.items()},
        floor_ms={nodes: 1e3 * median(times) for nodes, times in floors.items()},
        first_pass_s=first_pass_s,
    )


def chain(context: Sequence[int], count: int) -> TokenTree:
    """The first `count` tokens of a context behind its last one."""
    tree = TokenTree(context[-1])
    tree.add_path(context[:count])
    return tree


def linear_layers(model: nn.Module) -> list[Any]:
    """Every linear layer once: packed weights (fused ones count as one), and plain layers where nothing was packed."""
    found: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, PackedLinear):
            found[id(module.packed_weight)] = module.packed_weight
        elif isinstance(module, nn.Linear):
            found[id(module)] = module
    return list(found.values())


def _time_linears(layers: Sequence[Any], rows: int, dtype: torch.dtype) -> float:
    inputs: dict[int, Tensor] = {}
    for layer in layers:
        inputs.setdefault(layer.in_features, torch.randn(rows, layer.in_features).to(dtype))
    began = time.perf_counter()
    for layer in layers:
        states = inputs[layer.in_features]
        if isinstance(layer, PackedWeight):
            layer.apply(states)
        else:
            layer(states)
    return time.perf_counter() - began
