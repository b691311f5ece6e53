"""Recurrent states as a part of the cache: one file for each kind of recurrence."""

from forerun.model.states.functions import FUNCTIONS, StateLayers, install, state_layers
from forerun.model.states.rows import Recurrence, RowStates, StatePass, Tree

__all__ = ["FUNCTIONS", "Recurrence", "RowStates", "StateLayers", "StatePass", "Tree", "install", "state_layers"]
