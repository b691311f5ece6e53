"""What `forerun plan`'s formula says of an arm, from its acceptance and from costs that were measured apart.

Knows traces and the cost model; runs no arm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from forerun import LLM
from forerun.control.config import SpeculativeConfig
from forerun.control.costs import CostModel, DraftCost
from forerun.decode.drafter import DrafterSetup
from forerun.drafters import build
from forerun.plan.measured import measure_draft
from forerun.plan.theory import predict
from forerun.types import StepTrace


def draft_cost(llm: LLM, config: Mapping[str, Any], text: Sequence[int]) -> DraftCost:
    """What a drafter costs beside the target's passes, timed over `text` on a free row."""
    wish = SpeculativeConfig.parse(config)
    assert wish is not None, "a drafter is named"
    target = llm.target
    setup = DrafterSetup(target=target, tokenizer=llm.tokenizer, rows=target.rows, slots=target.slots)
    drafter = build(wish.method, wish.drafter_options, setup)
    return measure_draft(target, drafter, text, depth=wish.num_speculative_tokens or 8)


def planned_speedup(cost: CostModel, draft: DraftCost, steps: Sequence[StepTrace]) -> float:
    """Predicted speed-up over plain decoding of a run with these steps, one row."""
    drafting = [step for step in steps if step.nodes]
    if not drafting:
        return 1.0
    depths = [_depth(step) for step in drafting]
    survival = [
        sum(len(step.path) > level for step in drafting) / len(drafting)
        for level in range(max(len(step.path) for step in drafting))
    ]
    prediction = predict(
        cost,
        acceptance_per_depth=survival,
        draft=draft,
        depth=mean(depths),
        nodes=mean(len(step.nodes) for step in drafting),
        context=round(mean(step.position for step in steps)),
        coverage=len(drafting) / len(steps),
    )
    return prediction.speedup


def _depth(step: StepTrace) -> int:
    depths = [0]
    for node in step.nodes:
        depths.append(depths[node.parent] + 1)
    return max(depths)
