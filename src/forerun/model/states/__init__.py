"""Recurrent states as a part of the cache: one file for each kind of recurrence, and here the functions, methods and
forwards of transformers through which layers reach their states, with what takes their place in a pass of forerun.

A family's modelling file has a convolution, a scan or a delta rule of its own, all with the same names and arguments.
While a pass of forerun runs, these names lead to the files beside this one; at any other time to the file's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from forerun.model.inputs import Pass
from forerun.model.states import convolution, linear_attention, node_by_node
from forerun.model.states.rows import StatePass
from forerun.model.switches import names_of, redirect

FUNCTIONS: dict[str, Callable[..., Any]] = {
    **convolution.FUNCTIONS,
    **linear_attention.FUNCTIONS,
    **node_by_node.FUNCTIONS,
}
METHODS: dict[str, Callable[..., Any]] = {
    **convolution.METHODS,
    **node_by_node.METHODS,
}
FORWARDS: dict[str, Callable[..., Any]] = {
    **convolution.FORWARDS,
    **linear_attention.FORWARDS,
    **node_by_node.FORWARDS,
}
"""A name that a layer's forward uses, or takes as an argument -> what runs in place of all of this forward."""
KINDS = (*FUNCTIONS, *METHODS, *FORWARDS)
StateLayers = dict[type[nn.Module], frozenset[str]]  # Classes of layers, and the names in `KINDS` that each uses
KEPT = frozenset({"update_conv_state", "update_recurrent_state"})  # Methods of a cache by which a layer keeps a state
MASKING = "apply_mask_to_padding_states"  # The function that zeroes padding, which feeds no state here


def state_layers(model: nn.Module) -> StateLayers:
    """Return the classes of a model's layers that keep a state, and the names of ours that they use."""
    return of_classes({type(module) for module in model.modules()})


def of_classes(kinds: Iterable[type[nn.Module]]) -> StateLayers:
    """Return those among classes that keep a state: in the cache, or in a way of their own that we know."""
    layers: StateLayers = {}
    for kind in kinds:
        names = frozenset(names_of(kind))
        if names.intersection(KEPT) or names.intersection((*METHODS, *FORWARDS)):
            layers[kind] = names.intersection(KINDS)
    return layers


def keep_outside(layers: StateLayers) -> bool:
    """Return whether some of these layers keep their state in an object of their own, not in the cache."""
    return any(KEPT.isdisjoint(names_of(kind)) for kind in layers)


def uses_cache(model: nn.Module) -> bool:
    """Return whether any layer writes to the cache that a model is handed."""
    wanted = KEPT | {"update"}
    return any(not wanted.isdisjoint(names_of(kind)) for kind in {type(module) for module in model.modules()})


def install(layers: StateLayers) -> None:
    """Redirect the functions of these layers to ours while a pass of forerun runs."""
    for kind, names in layers.items():
        redirect(kind, MASKING, _as_it_is, _states)
        for name in names:
            if name in FORWARDS:
                redirect(kind, "forward", _entered(FORWARDS[name]), _states)
            elif name in METHODS:
                redirect(kind, name, _entered(METHODS[name]), _states)
            else:
                redirect(kind, name, _plain(FUNCTIONS[name]), _states)


def _states(this: Pass) -> StatePass | None:
    states: StatePass | None = this.states
    return states


def _plain(ours: Callable[..., Any]) -> Callable[..., Any]:
    return lambda this, _original, *args, **kwargs: ours(this, *args, **kwargs)


def _entered(ours: Callable[..., Any]) -> Callable[..., Any]:
    """Return `ours` for a method: its module says which state runs."""

    def run(this: StatePass, _original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        this.enter(id(module), 0)
        return ours(this, module, *args, **kwargs)

    return run


def _as_it_is(_this: StatePass, _original: Any, values: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
    return values
