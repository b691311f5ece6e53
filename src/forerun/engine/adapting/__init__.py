"""Online adaptation: a drafter learns from what the target says while it serves (arXiv 2310.07177).

Whatever it learns, answers keep the target's law: a rule judges what was drafted against the law it was drawn from, and
asks nobody whose weights that law came from. Stands beside the controller: knows drafters, targets and steps; the engine
knows it as something that is put around a drafter.
"""

from forerun.engine.adapting.adaptation import Adaptation, AdaptationStats
from forerun.engine.adapting.settings import AdaptConfig, refuse_unless_adaptable

__all__ = ["AdaptConfig", "Adaptation", "AdaptationStats", "refuse_unless_adaptable"]
