"""What a drafter that costs a forward pass offers for a step, from running figures alone. Sees no draft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forerun.engine.controller.arm import Arm
from forerun.engine.controller.chooser import Offer, optimism
from forerun.engine.controller.costs import StepCosts
from forerun.engine.controller.moment import Moment
from forerun.engine.controller.survival import guessed
from forerun.engine.controller.switch import TRIAL_SHARE

# Before drafting: how deep.
#
# Sees running figures only, so no decision can depend on a value that is yet to be drawn.


@dataclass(frozen=True, kw_only=True, slots=True)
class Depth:
    """How deep to draft, and what that promises."""

    tokens: int
    """Depth, at least 1."""
    ratio: float
    """Expected tokens per time over those of plain decoding."""


def best_depth(curves: Sequence[Sequence[float]], times: Sequence[float], rows: int) -> Depth:
    """The depth with the most expected tokens per time, over all rows of the step.

    Args:
        curves: of each row that drafts, the probability that depth 1, 2, ... survives; rows may end early.
        times: entry d: a step that drafts to depth d, ms; entry 0 is plain decoding. At least two entries.
        rows: of the step, whether or not they draft.
    """
    plain = rows / times[0]
    best = Depth(tokens=1, ratio=0.0)
    expected = float(rows)
    for depth in range(1, len(times)):
        expected += sum(curve[depth - 1] for curve in curves if depth <= len(curve))
        ratio = expected / times[depth] / plain
        if ratio > best.ratio:
            best = Depth(tokens=depth, ratio=ratio)
    return best


_TRIAL = 100.0
"""Tokens that are added to the offer for rows on trial: a trial is not put off."""
_TIE = 1e-3
"""Tokens per ratio that order drafters which are kept on although plain decoding seems no worse."""
_RETURN = 1.25
"""Times over that reading a text must repay itself, by what is expected: answers end early and hopes are high."""
_PATIENCE = 8
"""Tokens that an answer goes without drafts because others wait for their first one."""
_Curves = Mapping[int, Sequence[float]]
"""Member -> probability that depth 1, 2, ... survives."""


def depth_times(arm: Arm, moment: Moment, costs: StepCosts, deepest: int, members: int) -> list[float]:
    """Entry d: a step in which this drafter drafts to depth d for so many members, ms; entry 0 is plain decoding."""
    last = len(moment.times) - 1
    sizes = (costs.filling.most(members, arm.sizes.expected(depth)) for depth in range(1, deepest + 1))
    steps = (
        moment.times[min(last, size)] + costs.draft_ms(arm.key, depth, moment.batch)
        for depth, size in enumerate(sizes, start=1)
    )
    return [moment.times[0], *steps]


def offer_of(arm: Arm, index: int, moment: Moment, costs: StepCosts) -> Offer | None:
    """The drafter's offer to the rows that it is on for, or on trial for; None where there are none.

    Where nothing does better than plain decoding, a drafter that is on counts as no worse: when to give up is the
    switch's business, which is patient, and not that of a noisy estimate. Where copies yield more, its time is dear.
    """
    curves = _curves(arm, moment)
    unread = {member: arm.drafter.unread(moment.rows[member].row, len(moment.rows[member].tokens)) for member in curves}
    curves = _repaying(arm, moment, costs, curves, unread)
    if not curves:
        return None
    depth, extra = _best(arm, moment, costs, curves)
    patience = moment.batch * extra / moment.times[0] / len(curves) + _TIE * depth.ratio
    return Offer(
        arm=index,
        depth=depth.tokens,
        nodes=min(len(moment.times) - 1, arm.sizes.expected(depth.tokens)),
        ms=costs.draft_ms(arm.key, depth.tokens, moment.batch),
        tokens={
            member: _promised(arm, moment, member, curve[: depth.tokens], patience) for member, curve in curves.items()
        },
        unread={member: unread[member] for member in curves},
    )


def _curves(arm: Arm, moment: Moment) -> _Curves:
    """Of the members that the drafter is on for, or on trial for."""
    found = {}
    for member, row in enumerate(moment.rows):
        limit, trying = min(arm.limit, moment.limits[member]), arm.switch.trying(row.row)
        if limit > 0 and (trying or arm.switch.on(row.row)):
            found[member] = guessed(limit) if trying else arm.survival.curve(row.row, limit)
    return found


def _best(arm: Arm, moment: Moment, costs: StepCosts, curves: _Curves) -> tuple[Depth, float]:
    """How deep to draft for these members, and what that adds to a plain step, ms."""
    times = depth_times(arm, moment, costs, max(map(len, curves.values())), len(curves))
    depth = best_depth(list(curves.values()), times, moment.batch)
    return depth, times[depth.tokens] - times[0]


def _promised(arm: Arm, moment: Moment, member: int, curve: Sequence[float], least: float) -> float:
    """Accepted tokens expected of a member and what is added for what is not known of it, at least so many."""
    row = moment.rows[member].row
    hoped = sum(curve) + optimism(curve, arm.survival.evidence(row), moment.step)
    return max(hoped, least) + (_TRIAL if arm.switch.trying(row) else 0.0)


def _repaying(arm: Arm, moment: Moment, costs: StepCosts, curves: _Curves, unread: Mapping[int, int]) -> _Curves:
    """Without the members whose text the drafter has yet to read and would not repay it in what is left to write.

    What a text repays is what drafting gains beyond the tokens that decoding yields in the same time without models, in
    the share of the steps that fall to this drafter. A text is read all the same where none has been for so long that
    it takes `TRIAL_SHARE` of the time; none in its first tokens while others wait for theirs.
    """
    readings = {member: costs.reading_ms(arm.key, unread[member]) for member in curves}
    if not any(readings.values()):
        return curves
    depth, extra = _best(arm, moment, costs, curves)
    unaided = moment.unaided * moment.batch / moment.times[0]
    found = {}
    for member, curve in curves.items():
        row, reading = moment.rows[member], readings[member]
        if moment.awaited and reading and len(row.tokens) - row.prompt_length <= _PATIENCE:
            continue
        accepted = sum(curve[: depth.tokens])
        steps = arm.used * row.room / max(1.0 + accepted, moment.unaided)
        gain = steps * (accepted - unaided * extra / len(curves))
        explores = moment.step - arm.read >= reading / moment.times[0] / TRIAL_SHARE
        if reading == 0.0 or arm.switch.trying(row.row) or explores or gain > _RETURN * unaided * reading:
            found[member] = curve
            arm.read = moment.step if reading else arm.read
    return found
