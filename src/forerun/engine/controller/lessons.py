"""After a step: what it teaches about its drafters and its costs. Knows no drafter's inside."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.engine.controller.arm import Arm
from forerun.engine.controller.confidence import Confidence
from forerun.engine.controller.costs import StepCosts
from forerun.engine.controller.goodput import Goodput
from forerun.engine.controller.moment import Moment
from forerun.engine.controller.offers import depth_times
from forerun.step import Emitted


def learn(
    arms: Sequence[Arm],
    moment: Moment,
    emitted: Sequence[Emitted],
    agreement: Confidence,
    costs: StepCosts,
    goodput: Goodput,
    *,
    measure: bool,
) -> None:
    """Count what the step kept, judge who drafted, correct the costs; `agreement` is of the joined trees."""
    own = [emitted[index] for index in moment.members]
    _confidences(arms, moment, own)
    for member, tree in moment.copied.items():
        agreement.learn(moment.rows[member].row, tree.nodes, own[member].tokens, tree.holders)
    for offer in moment.offers:
        arms[offer.arm].offered(taken=len(moment.chosen(arms[offer.arm], offer.arm)) / len(offer.tokens))
    for index, arm in enumerate(arms):
        if arm.copies:
            continue
        arm.survival.age()
        if moment.chosen(arm, index):
            _acceptance(arm, index, moment, own, costs)
    spent = moment.times[min(moment.size, len(moment.times) - 1)]
    spent += sum(offer.ms for offer in moment.offers if offer.arm in moment.choice.offers.values())
    if measure and own:
        spent = _times(arms, moment, own[0], costs)
    goodput.add(
        sum(len(one.tokens) for one in own) / len(own), spent / moment.times[0], aided=bool(moment.choice.offers)
    )


def _confidences(arms: Sequence[Arm], moment: Moment, own: Sequence[Emitted]) -> None:
    """What the text went on with tells for every given node whether it was right, submitted or not."""
    for asked in moment.asked:
        for member, tree in asked.trees.items():
            arms[asked.arm].confidence.learn(moment.rows[member].row, tree.nodes, own[member].tokens)
    for member, tree in moment.trees.items():
        arm = moment.choice.offers.get(member)
        if arm is not None:
            confidence = arms[arm].confidence
            moment.matched[member] = confidence.learn(moment.rows[member].row, tree.nodes, own[member].tokens)


def _acceptance(arm: Arm, index: int, moment: Moment, own: Sequence[Emitted], costs: StepCosts) -> None:
    chosen = moment.chosen(arm, index)
    if arm.drafter.drafter.failed:
        arm.drafter.drafter.failed = False
        arm.switch.fail([moment.rows[member].row for member in chosen])
        return
    offer = next(offer for offer in moment.offers if offer.arm == index)
    cost = cost_for_all = _cost(arm, moment, costs, offer.depth, len(chosen))
    if any(arm.switch.trying(moment.rows[member].row) for member in chosen):
        cost_for_all = _cost(arm, moment, costs, offer.depth, max(len(chosen), arm.switch.waiting))
        reading = costs.reading_ms(arm.key, moment.unread(offer)) / moment.times[0]
        arm.switch.spend((cost - 1) * len(chosen) / moment.batch + reading)
    scored = [moment.submitted[member] for member in chosen]
    arm.sizes.saw(offer.depth, costs.filling.nodes(costs.filling.size(scored), len(scored)))
    for member in chosen:
        row, step = moment.rows[member], own[member]
        if step.tokens[-1] in row.stop_ids:
            continue
        accepted, drafted = _outcome(moment, member, step, min(offer.depth, arm.limit, moment.limits[member]))
        arm.survival.record(row.row, accepted=accepted, drafted=drafted)
        if arm.switch.trying(row.row):
            passed = arm.switch.tried(row.row, accepted=accepted, drafted=drafted, cost=cost_for_all)
            if passed is not None:
                arm.survival.renew(row.row, passed)
        else:
            hoped = sum(arm.survival.curve(row.row, offer.depth)) if moment.submitted[member] else 0.0
            arm.switch.judge(row.row, (1 + hoped) / cost)


def _cost(arm: Arm, moment: Moment, costs: StepCosts, depth: int, members: int) -> float:
    """Plain steps that each of so many members answers for that it drafts for: what this adds is theirs alone."""
    times = depth_times(arm, moment, costs, depth, members)
    return 1 + (times[-1] / times[0] - 1) * moment.batch / members


def _outcome(moment: Moment, member: int, step: Emitted, allowed: int) -> tuple[int, int]:
    """(accepted, drafted). A drafter that stopped short of what it was allowed has not survived there.

    Of given nodes that were taken away the text still tells, as far as it was committed, what would have been kept.
    """
    if member in moment.pruned:
        return moment.matched[member], min(allowed, len(step.tokens))
    return len(step.trace.path), min(allowed, step.depth + 1)


def _times(arms: Sequence[Arm], moment: Moment, step: Emitted, costs: StepCosts) -> float:
    """Correct the costs by what the step took; returns that without what reading a prompt took, ms."""
    trace = step.trace
    host = trace.draft_ms + trace.commit_ms
    costs.saw_pass(moment.size, moment.batch, moment.context, trace.verify_ms)
    used = [offer for offer in moment.offers if offer.arm in moment.choice.offers.values()]
    asked_ms = sum(asked.ms for asked in moment.asked)
    if not used:
        costs.saw_host(host, moment.batch, asked_ms=asked_ms)
    elif len(used) == 1:
        unread = moment.unread(used[0])
        key = arms[used[0].arm].key
        own = host - costs.host_ms(moment.batch) - costs.asking_ms(moment.batch, asked_ms)
        costs.saw_draft(key, used[0].depth, moment.batch, own, unread=unread)
        host -= min(host, costs.reading_ms(key, unread))
    return host + trace.verify_ms
