"""New weights for a model that is in use: made ready beside it, then exchanged in no time, the old ones handed back.

Works on plain parameters and on layers that `kernels.packing` repacked. Tied weights stay tied. Values only: names,
shapes and dtypes are the model's own. Knows no training.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from forerun.errors import CheckpointError
from forerun.target.kernels.packing import Contents, FusedLinear, PackedLinear, PackedWeight


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """A whole set of weights in the form in which one model holds them."""

    parameters: tuple[tuple[nn.Parameter, Tensor], ...]
    """What is exchanged, and its values."""
    packed: tuple[tuple[PackedWeight, Contents], ...]

    def nbytes(self) -> int:
        """Bytes of the values, padding of packed layouts not counted."""
        return sum(value.nbytes for _, value in self.parameters) + sum(weight.nbytes() for weight, _ in self.packed)


@torch.no_grad()
def ready(model: nn.Module, state: Mapping[str, Tensor]) -> Weights:
    """The values of `state` as `model` would hold them: its dtypes, its devices, its layouts. Changes nothing.

    Args:
        state: as the ``state_dict`` of the plain model, any floating dtype.

    Raises:
        CheckpointError: a tensor is missing or has another shape.
    """
    parameters = tuple((own, _like(own, state, name)) for name, own in model.named_parameters())
    layers = defaultdict[int, list[tuple[str, PackedLinear | FusedLinear]]](list)
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear | FusedLinear):
            layers[id(module.packed_weight)].append((name, module))
    packed = []
    for members in layers.values():
        members.sort(key=lambda member: member[1].index)
        weight = members[0][1].packed_weight
        matrices = [_of_shape(state, f"{name}.weight", (m.out_features, m.in_features)) for name, m in members]
        biases = [state[f"{name}.bias"] for name, _ in members] if weight.bias is not None else []
        packed.append((weight, weight.ready(matrices, biases)))
    return Weights(parameters=parameters, packed=tuple(packed))


def exchange(weights: Weights) -> Weights:
    """Put these weights into the model that they were made for; returns what was there.

    On a CPU pointers change and no value is copied. On an accelerator values are copied into place, because recorded
    passes read where they lie. Call it between passes, in the thread that runs them.
    """
    with torch.inference_mode(False):
        parameters = []
        for own, value in weights.parameters:
            if own.device.type == "cpu":
                parameters.append((own, own.data))
                own.data = value
            else:
                parameters.append((own, own.data.clone()))
                own.data.copy_(value)
    packed = tuple((weight, weight.exchange(contents)) for weight, contents in weights.packed)
    return Weights(parameters=tuple(parameters), packed=packed)


def _like(own: Tensor, state: Mapping[str, Tensor], name: str) -> Tensor:
    return _of_shape(state, name, tuple(own.shape)).to(device=own.device, dtype=own.dtype, copy=True)


def _of_shape(state: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    value = state.get(name)
    if value is None or tuple(value.shape) != shape:
        found = "is missing" if value is None else f"has the shape {tuple(value.shape)}"
        raise CheckpointError(f"{name} {found}, expected {shape}: these are another model's weights")
    return value
