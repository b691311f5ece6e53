"""The controller: how much to draft, with whom, or not at all. One idea per file; `Controller` puts them together."""

from forerun.engine.controller.arm import Arm, Sizes
from forerun.engine.controller.auto import arms_of
from forerun.engine.controller.controller import Controller
from forerun.engine.controller.costs import Nominal, StepCosts
from forerun.engine.controller.deferred import Deferred

__all__ = ["Arm", "Controller", "Deferred", "Nominal", "Sizes", "StepCosts", "arms_of"]
