"""Functions of transformers through which layers reach their recurrent states, and what takes their place in a pass of
forerun.

A family's modelling file has a convolution, a scan or a delta rule of its own, all with the same names and arguments.
While a pass of forerun runs, these names lead to `convolution`, `linear_attention` and `selective_scan`; at any other
time to the file's own. So a model that a user handed in stays what it was.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from forerun.model.padding import current
from forerun.model.states import convolution, linear_attention, selective_scan

FUNCTIONS: dict[str, Callable[..., Any]] = {
    **convolution.FUNCTIONS,
    **linear_attention.FUNCTIONS,
    **selective_scan.FUNCTIONS,
}
StateLayers = dict[type[nn.Module], frozenset[str]]  # Classes of layers, and the names in `FUNCTIONS` that each uses
KEPT = ("update_conv_state", "update_recurrent_state")  # Methods of a cache by which a layer keeps a state
MASKING = "apply_mask_to_padding_states"  # The function that zeroes padding, which feeds no state here


class _Switch:
    """A function of a modelling file, or ours while a pass of forerun runs."""

    def __init__(self, original: Callable[..., Any], ours: Callable[..., Any]) -> None:
        self.original = original
        self.ours = ours
        self.__wrapped__ = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        this = current().states
        return self.original(*args, **kwargs) if this is None else self.ours(this, *args, **kwargs)


def state_layers(model: nn.Module) -> StateLayers:
    """Return the classes of a model's layers that keep a state in the cache, and the names of ours that they use."""
    found: StateLayers = {}
    for kind in {type(module) for module in model.modules()}:
        names = frozenset(_names(kind))
        if names.intersection(KEPT):
            found[kind] = names.intersection(FUNCTIONS)
    return found


def install(layers: StateLayers) -> None:
    """Lead the functions of these layers to ours while a pass of forerun runs."""
    for kind, names in layers.items():
        namespace = inspect.unwrap(kind.forward).__globals__
        for name in (*names, MASKING):
            if name in namespace and not isinstance(namespace[name], _Switch):
                namespace[name] = _Switch(namespace[name], FUNCTIONS.get(name, _as_it_is))


def _as_it_is(_this: Any, values: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
    return values


def _names(kind: type[nn.Module]) -> Iterator[str]:
    """Yield the names that a class's forward uses."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    yield from code.co_names if code is not None else ()
