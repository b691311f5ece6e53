"""Finds the parts of a transformers causal LM without knowing its family: base, layers, embedding, output head.

The head runs as a shallow copy of the causal LM whose base is a stub, so soft caps and logit scales are its own.
"""

from __future__ import annotations

import copy
import threading
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from forerun.errors import UNSERVED, UnsupportedModelError


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


def replaced(module: nn.Module, path: str, part: nn.Module) -> nn.Module:
    """A shallow copy of `module` with `part` at the dotted `path`; what lies along the path is copied likewise."""
    name, _, rest = path.partition(".")
    twin = shallow(module)
    twin._modules[name] = replaced(module.get_submodule(name), rest, part) if rest else part
    return twin


def base_name(model: Any) -> str:
    """The child of a causal LM that is the model without its output head: as its class says, else the one that embeds.

    Raises:
        UnsupportedModelError: there is none, or there are several.
    """
    prefix = str(model.base_model_prefix)
    if isinstance(model._modules.get(prefix), nn.Module):
        return prefix
    embedding = model.get_input_embeddings()
    holding = [
        name for name, child in model.named_children() if any(part is embedding for part in list(child.modules())[1:])
    ]
    if len(holding) != 1:
        raise UnsupportedModelError(f"{type(model).__name__} has no base model under {prefix!r}: expected a causal LM")
    return str(holding[0])


def base_of(model: Any) -> nn.Module:
    """The model without its output head."""
    return model.get_submodule(base_name(model))  # type: ignore[no-any-return]


_TURNS: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()


def turn_of(base: nn.Module) -> threading.RLock:
    """Held while a base model runs, by whoever runs it: two engines may have been given the same model object, and its
    hooks, its joint products and the sublayers that are left out belong to one pass at a time."""
    return _TURNS.setdefault(base, threading.RLock())


def layers_of(base: nn.Module, count: int) -> tuple[str, nn.ModuleList]:
    """Dotted name and list of the decoder layers: the one ModuleList of that length, nearest to the input embedding.

    Raises:
        UnsupportedModelError: none has that length, or several that lie equally near.
    """
    lists = {
        name: module
        for name, module in base.named_modules()
        if name and isinstance(module, nn.ModuleList) and len(module) == count
    }
    beside = [name for name in lists if _embeds(base.get_submodule(name.rpartition(".")[0]), base)]
    depth = min((name.count(".") for name in lists), default=0)
    nearest = beside or [name for name in lists if name.count(".") == depth]
    if len(nearest) != 1:
        raise UnsupportedModelError(
            f"{type(base).__name__}: expected one list of as many decoder layers as its configuration counts "
            f"({count}), found {', '.join(nearest) or 'none'}. {UNSERVED}"
        )
    return nearest[0], lists[nearest[0]]


def _embeds(part: nn.Module, whole: Any) -> bool:
    """Whether the input embedding of `whole` is in `part`."""
    embedding = whole.get_input_embeddings() if hasattr(whole, "get_input_embeddings") else None
    return any(module is embedding for module in part.modules())


def norm_after_layers(base: nn.Module, count: int) -> tuple[str, nn.Module]:
    """Dotted name and module of the final norm: the one child behind the `count` layers whose weights are all vectors.

    Raises:
        UnsupportedModelError: there is none, or there are several.
    """
    owner, _, last = layers_of(base, count)[0].rpartition(".")
    children = list(base.get_submodule(owner).named_children())
    after = children[[name for name, _ in children].index(last) + 1 :]
    found = [
        (f"{owner}.{name}" if owner else name, child)
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

    @property
    def decoder(self) -> _Stub:
        """Of OPT and its like, which call their base model's decoder."""
        return self

    def forward(self, *_args: object, **_kwargs: object) -> _States:
        return _States(self.states)


class OutputHead:
    """hidden states after the final norm -> raw logits, as the model itself computes them."""

    def __init__(self, model: Any) -> None:
        self._stub = _Stub()
        self._model = replaced(model, base_name(model), self._stub)
        self._token = torch.zeros(1, 1, dtype=torch.int64)

    def __call__(self, states: Tensor) -> Tensor:
        """(.., H) -> (.., V)."""
        self._stub.states = states if states.dim() == 3 else states.reshape(1, -1, states.shape[-1])
        logits: Tensor = self._model(input_ids=self._token, use_cache=False).logits.to(states.device)
        del self._stub.states
        return logits if states.dim() == 3 else logits.view(*states.shape[:-1], -1)
