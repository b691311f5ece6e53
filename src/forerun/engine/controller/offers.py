"""What a drafter that costs a forward pass offers for a step, from running figures alone. Sees no draft."""

from __future__ import annotations

from forerun.engine.controller.arm import Arm
from forerun.engine.controller.chooser import Offer, optimism
from forerun.engine.controller.costs import StepCosts
from forerun.engine.controller.depth import best_depth
from forerun.engine.controller.moment import Moment
from forerun.engine.controller.survival import guessed

_TRIAL = 100.0
"""Tokens that are added to the offer for rows on trial: a trial is not put off."""
_TIE = 1e-3
"""Tokens per ratio that order drafters which are kept on although plain decoding seems no worse."""


def depth_times(arm: Arm, moment: Moment, costs: StepCosts, deepest: int) -> list[float]:
    """Entry d: a step that drafts to depth d with this drafter, ms; entry 0 is plain decoding."""
    last = len(moment.times) - 1
    steps = (
        moment.times[min(last, arm.sizes.expected(depth))] + costs.draft_ms(arm.key, depth)
        for depth in range(1, deepest + 1)
    )
    return [moment.times[0], *steps]


def offer_of(arm: Arm, index: int, moment: Moment, costs: StepCosts, steps: int) -> Offer | None:
    """The drafter's offer to the rows that it is on for, or on trial for; None where there are none.

    Where nothing does better than plain decoding, a drafter that is on counts as no worse: when to give up is the
    switch's business, which is patient, and not that of a noisy estimate. Where copies yield more, its time is dear.
    """
    members = [
        member
        for member, row in enumerate(moment.rows)
        if moment.limits[member] > 0 and (arm.switch.on(row.row) or arm.switch.trying(row.row))
    ]
    if not members:
        return None
    limits = {member: min(arm.limit, moment.limits[member]) for member in members}
    curves = {
        member: guessed(limit)
        if arm.switch.trying(moment.rows[member].row)
        else arm.survival.curve(moment.rows[member].row, limit)
        for member, limit in limits.items()
    }
    times = depth_times(arm, moment, costs, max(limits.values()))
    depth = best_depth(list(curves.values()), times)
    extra = times[depth.tokens] - times[0]
    patience = moment.batch * extra / moment.times[0] / len(members) + _TIE * depth.ratio
    tokens = {}
    for member, curve in curves.items():
        row = moment.rows[member].row
        reached = curve[: depth.tokens]
        hoped = sum(reached) + optimism(reached, arm.survival.evidence(row), steps)
        tokens[member] = max(hoped, patience) + (_TRIAL if arm.switch.trying(row) else 0.0)
    return Offer(
        arm=index,
        depth=depth.tokens,
        nodes=min(len(moment.times) - 1, arm.sizes.expected(depth.tokens)),
        ms=costs.draft_ms(arm.key, depth.tokens),
        tokens=tokens,
    )
