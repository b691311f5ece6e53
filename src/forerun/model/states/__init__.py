"""Recurrent states as a part of the cache: one file for each kind of recurrence."""

from forerun.model.states.functions import (
    KEPT,
    KINDS,
    StateLayers,
    install,
    keep_outside,
    of_classes,
    state_layers,
    uses_cache,
)
from forerun.model.states.rows import MOST, Recurrence, RowStates, StatePass, Tree

__all__ = [
    "KEPT",
    "KINDS",
    "MOST",
    "Recurrence",
    "RowStates",
    "StateLayers",
    "StatePass",
    "Tree",
    "install",
    "keep_outside",
    "of_classes",
    "state_layers",
    "uses_cache",
]
