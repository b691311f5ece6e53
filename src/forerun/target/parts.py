"""Finds the parts of a transformers causal LM without knowing its family: base, layers, embedding, output head.

The head runs as a shallow copy of the causal LM whose base is a stub, so soft caps and logit scales are its own.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from forerun.errors import UnsupportedModelError


def shallow(module: nn.Module) -> nn.Module:
    """A copy that shares every parameter and submodule, whose children may be replaced without touching the original.

    A forward that accelerate or a compiler put on the instance is dropped: it would call the original.
    """
    twin = copy.copy(module)
    twin.__dict__ = dict(module.__dict__)
    twin.__dict__["_modules"] = dict(module._modules)
    for name in ("forward", "_hf_hook", "_old_forward"):
        twin.__dict__.pop(name, None)
    twin.__dict__["_compiled_call_impl"] = None
    return twin


def base_of(model: Any) -> nn.Module:
    """The model without its output head."""
    base = getattr(model, model.base_model_prefix, None)
    if not isinstance(base, nn.Module) or base is model:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no base model under {model.base_model_prefix!r}: expected a causal LM"
        )
    return base


def layers_of(base: nn.Module, count: int) -> tuple[str, nn.ModuleList]:
    """Name and list of the decoder layers: the one ModuleList of that length."""
    for name, child in base.named_children():
        if isinstance(child, nn.ModuleList) and len(child) == count:
            return name, child
    raise UnsupportedModelError(f"{type(base).__name__} has no list of {count} layers among its children")


def norm_after_layers(base: nn.Module, count: int) -> tuple[str, nn.Module]:
    """Name and module of the final norm: the one child behind the `count` layers whose weights are all vectors."""
    children = list(base.named_children())
    after = children[[name for name, _ in children].index(layers_of(base, count)[0]) + 1 :]
    found = [
        (name, child)
        for name, child in after
        if list(child.parameters()) and all(weight.dim() == 1 for weight in child.parameters())
    ]
    if len(found) != 1:
        raise UnsupportedModelError(
            f"{type(base).__name__}: expected one norm after the layers, found "
            f"{', '.join(name for name, _ in found) or 'none'}"
        )
    return found[0]


def device_of(module: nn.Module) -> torch.device:
    """Where a module computes, also if accelerate keeps its weights elsewhere between calls."""
    hook = getattr(module, "_hf_hook", None)
    placed = getattr(hook, "execution_device", None)
    if placed is not None:
        return torch.device("cuda", placed) if isinstance(placed, int) else torch.device(placed)
    return next(module.parameters()).device


def is_quantised(model: nn.Module) -> bool:
    """Whether weights are stored as integers or below 16 bits: by transformers, or with torch's own int8 layers."""
    if getattr(model, "is_quantized", False):
        return True
    return any(type(module).__module__.startswith("torch.ao.nn.quantized") for module in model.modules())


class _States:
    """Looks like a base model's output; all that is not the last hidden state is None."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Stub(nn.Module):
    """Stands in for the base model and returns the states it was given."""

    states: Tensor

    def forward(self, *_args: object, **_kwargs: object) -> _States:
        return _States(self.states)


class OutputHead:
    """hidden states after the final norm -> raw logits, as the model itself computes them."""

    def __init__(self, model: Any) -> None:
        self._stub = _Stub()
        self._model = shallow(model)
        self._model._modules[model.base_model_prefix] = self._stub
        self._token = torch.zeros(1, 1, dtype=torch.int64)

    def __call__(self, states: Tensor) -> Tensor:
        """(.., H) -> (.., V)."""
        self._stub.states = states if states.dim() == 3 else states.reshape(1, -1, states.shape[-1])
        logits: Tensor = self._model(input_ids=self._token, use_cache=False).logits.to(states.device)
        del self._stub.states
        return logits if states.dim() == 3 else logits.view(*states.shape[:-1], -1)
