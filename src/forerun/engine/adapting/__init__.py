"""Online adaptation: a drafter learns from what the target says while it serves (arXiv 2310.07177).

Whatever it learns, answers keep the target's law: a rule judges what was drafted against the law that it was drawn from
and does not ask whose weights that law came from. Stands beside the policy: knows drafters, targets and steps; the
engine knows it as something that is put around a drafter. From `training` it takes how directories are written and how
tokenizers are told apart. Its `settings` are imported without torch, so names are looked up when asked for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forerun.engine.adapting.adaptation import Adaptation, AdaptationStats

__all__ = ["Adaptation", "AdaptationStats"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from forerun.engine.adapting import adaptation

    return getattr(adaptation, name)
