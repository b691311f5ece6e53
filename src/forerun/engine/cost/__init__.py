"""What a pass of the target and a level of a drafter cost on this machine: measured once, kept on disk.

`CostModel` and `DraftCost` are plain numbers and import no torch; what measures is loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from forerun.engine.cost.model import CostModel, DraftCost, PassCost

if TYPE_CHECKING:
    from forerun.engine.cost.passes import measure
    from forerun.engine.cost.store import cache_folder, load_or_measure, save

_HOMES = {
    "cache_folder": "forerun.engine.cost.store",
    "load_or_measure": "forerun.engine.cost.store",
    "measure": "forerun.engine.cost.passes",
    "save": "forerun.engine.cost.store",
}

__all__ = [
    "CostModel",
    "DraftCost",
    "PassCost",
    "cache_folder",
    "load_or_measure",
    "measure",
    "save",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'forerun.engine.cost' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
