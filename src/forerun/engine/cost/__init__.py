"""What a pass of the target and a level of a drafter cost on this machine: measured once, kept on disk.

`CostModel` and `DraftCost` are plain numbers and import no torch; what measures is loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from forerun.engine.cost.model import CostModel, DraftCost, PassCost

if TYPE_CHECKING:
    from forerun.engine.cost.drafts import measure_draft
    from forerun.engine.cost.passes import measure
    from forerun.engine.cost.store import cache_folder, load_or_measure, save
    from forerun.engine.cost.trial import Trial, try_drafter

_HOMES = {
    "Trial": "forerun.engine.cost.trial",
    "cache_folder": "forerun.engine.cost.store",
    "load_or_measure": "forerun.engine.cost.store",
    "measure": "forerun.engine.cost.passes",
    "measure_draft": "forerun.engine.cost.drafts",
    "save": "forerun.engine.cost.store",
    "try_drafter": "forerun.engine.cost.trial",
}

__all__ = [
    "CostModel",
    "DraftCost",
    "PassCost",
    "Trial",
    "cache_folder",
    "load_or_measure",
    "measure",
    "measure_draft",
    "save",
    "try_drafter",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'forerun.engine.cost' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
