"""Objectives are what heads and draft models learn: one file per objective and one line here.
Importing this imports no torch.
"""

from __future__ import annotations

from typing import Any

from forerun.drafters.heads.kinds import HeadKind, import_named
from forerun.errors import ArgumentError

OBJECTIVES: dict[str, str] = {
    "eagle3": "forerun.training.objectives.eagle3:Eagle3Objective",
    "eagle": "forerun.training.objectives.eagle:EagleObjective",
    "peagle": "forerun.training.objectives.peagle:PEagleObjective",
    "medusa": "forerun.training.objectives.medusa:MedusaObjective",
    "medusa2": "forerun.training.objectives.medusa2:Medusa2Objective",
    "hydra": "forerun.training.objectives.recurrent:RecurrentObjective",
    "mlp_speculator": "forerun.training.objectives.recurrent:RecurrentObjective",
    "dflash": "forerun.training.objectives.dflash:DFlashObjective",
    "dspark": "forerun.training.objectives.dspark:DSparkObjective",
    "kangaroo": "forerun.training.objectives.kangaroo:KangarooObjective",
    "dflash2": "forerun.training.objectives.dflash2:DFlash2Objective",
    "domino": "forerun.training.objectives.domino:DominoObjective",
    "mtp": "forerun.training.objectives.mtp:MtpObjective",
    "layerskip": "forerun.training.objectives.layerskip:LayerSkipObjective",
    "pard": "forerun.training.objectives.pard:PardObjective",
    "distill": "forerun.training.objectives.distill:DistillObjective",
}
"""Kinds of head, or the ones that they are stored as, map to ``module:Class``, a `batch.Objective`.
"""


def objective_for(kind: HeadKind) -> Any:
    """Return the class of a kind's objective, ``(head, target, settings)``; its ``Settings`` are
    the recipe's.

    ArgumentError for heads that cannot be trained here.
    """
    found = OBJECTIVES.get(kind.name) or OBJECTIVES.get(kind.stored_as)
    if found is None:
        raise ArgumentError(f"heads of the kind {kind.name} cannot be trained here; {', '.join(OBJECTIVES)} can")
    return import_named(found)
