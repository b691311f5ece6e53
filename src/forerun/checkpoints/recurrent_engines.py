"""What serving engines make of Hydra heads and MLP speculators: none of today's loads one."""

from __future__ import annotations

from collections.abc import Iterator

from forerun.checkpoints.base import HeadCheckpoint, TargetFacts
from forerun.checkpoints.engines import EVERY, Engines, Finding, fails
from forerun.drafters.heads.kinds import kind_named

HERE = "draft with it in forerun"


class RecurrentEngines(Engines):
    """What is known of engines and heads of these kinds."""

    def findings(self, head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
        what, others = f"a {kind_named(head.config.kind).title} head", EVERY
        if head.config.kind == "mlp_speculator":
            others = " ".join(engine for engine in EVERY.split() if engine != "vllm")
            why = "has the format, and no drafter for it since its V1 engine (vLLM #47825)"
            yield from fails("vllm", what, why, f"{HERE}, or in a vLLM that still has its V0 engine")
        yield from fails(others, what, "has no such drafter", HERE)
