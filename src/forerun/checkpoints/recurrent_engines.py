"""How serving engines treat Hydra heads, MLP speculators and Kangaroo's adapters: none of today's
loads one.
"""

from __future__ import annotations

from collections.abc import Iterator

from forerun.checkpoints.base import HeadCheckpoint, TargetFacts
from forerun.checkpoints.engines import EVERY, Engines, Finding, fails

HERE, NONE = "draft with it in forerun", "has no such drafter"


class HydraEngines(Engines):
    """Known facts about engines and Hydra heads."""

    def findings(self, head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
        return fails(EVERY, "a Hydra head", NONE, HERE)


class MlpSpeculatorEngines(Engines):
    """Known facts about engines and MLP speculators."""

    def findings(self, head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
        what, others = "an MLP speculator", EVERY.replace("vllm ", "")
        why = "has the format, and no drafter for it since its V1 engine (vLLM #47825)"
        yield from fails("vllm", what, why, f"{HERE}, or in a vLLM that still has its V0 engine")
        yield from fails(others, what, NONE, HERE)


class KangarooEngines(Engines):
    """Known facts about engines and Kangaroo's adapters."""

    def findings(self, head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
        return fails(EVERY, "a Kangaroo adapter", NONE, HERE)
