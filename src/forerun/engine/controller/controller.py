"""The controller of one configuration: before a step who drafts and how deep, after drafting which nodes are scored.

One rule decides all of it: expected tokens less the running goodput times what they cost, staircase by staircase
(docs/control.md); plain decoding is the first stair. What is decided before drawing sees running figures alone; what
is decided after drafting sees deterministic nodes alone. Knows drafters only as arms, and no request.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence

from forerun import tree as trees
from forerun.engine.controller.admission import GivenTree, prunable, prune
from forerun.engine.controller.arm import Arm, Sizes
from forerun.engine.controller.asking import Reach, Turn, settle
from forerun.engine.controller.chooser import PLAIN, Choice, Copy, choose
from forerun.engine.controller.confidence import Confidence
from forerun.engine.controller.costs import FreeDrafts, StepCosts
from forerun.engine.controller.goodput import Goodput
from forerun.engine.controller.moment import Asked, Moment
from forerun.engine.controller.offers import depth_times, offer_of
from forerun.step import Emitted, Group, Row, context_for
from forerun.types import Budget, Draft, Signal

# After a step: what it teaches about its drafters and its costs. Knows no drafter's inside.


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
    """What the text went on with tells for every deterministic node whether it was right, submitted or not."""
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

    Of deterministic nodes that were taken away the text still tells, as far as it was committed, what would have been
    kept.
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


Clock = Callable[[], float]
"""Seconds."""
_DEAREST = 4.0
"""Plain steps that a pass may cost to be thought of at all: copies of more nodes are not even asked for."""


class Controller:
    """Plans the steps of the rows that share one configuration, and learns from them.

    Args:
        arms: the drafters to choose from; one where a drafter was named.
        costs: what passes and proposals cost.
        nodes: most drafted nodes of a row.
        measure: let what steps were seen to take correct `costs`. Off, decisions follow from the text and `costs`.
        clock: times what drafters that copy take.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        costs: StepCosts,
        *,
        nodes: int,
        measure: bool = True,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.arms, self.costs, self.measure = list(arms), costs, measure
        self.goodput = Goodput()
        self.agreement = Confidence()
        self.steps = 0
        self._reach = Reach()
        self._nodes, self._clock = nodes, clock
        self._moment: Moment | None = None

    def with_free_drafts(self) -> Controller:
        """The same drafters under a controller that has learned nothing yet and to which drafts are free."""
        arms = [
            Arm(
                name=arm.name,
                key=arm.key,
                drafter=arm.drafter,
                copies=arm.copies,
                limit=arm.limit,
                sizes=Sizes(self._nodes),
            )
            for arm in self.arms
        ]
        costs = FreeDrafts([arm.key for arm in arms], self.costs.filling)
        return Controller(arms, costs, nodes=self._nodes, measure=False, clock=self._clock)

    def requires(self) -> frozenset[Signal]:
        """The hidden states that any of its drafters reads."""
        return frozenset[Signal]().union(*(arm.drafter.requires for arm in self.arms))

    def plan(
        self, rows: Sequence[Row], members: Sequence[int], depths: Sequence[int | None], *, awaited: bool = False
    ) -> list[Group]:
        """Who drafts for whom in the coming step.

        Args:
            rows: of the whole step.
            members: which of them this controller works for.
            depths: by member, the request's own limit of tokens on a path.
            awaited: others wait for their first token: whose text a drafter has yet to read can wait a little.

        Returns:
            One group per drafter; rows that it does not draft for are its listeners.
        """
        self.steps += 1
        moment = self._moment = _begin(self.steps, rows, members, depths, awaited=awaited)
        for arm in self.arms:
            if not arm.copies:
                arm.switch.begin(moment.row_ids())
        moment.times = self.costs.times(moment.batch, moment.context, self._nodes)
        plain = self._looks_at_plain(moment)
        if not plain:
            self._ask(moment)
        moment.factor, moment.unaided = self.goodput.factor, self.goodput.unaided
        moment.copies = self._copies(moment)
        self._settle(moment)
        found = (offer_of(arm, index, moment, self.costs) for index, arm in enumerate(self.arms) if not arm.copies)
        moment.offers = [offer for offer in found if offer is not None]
        moment.choice = PLAIN if plain else self._choice(moment)
        return [self._group(moment, arm, index) for index, arm in enumerate(self.arms)]

    def admit(self, draft: Draft) -> Draft:
        """Take away deterministic nodes that do not pay, before the target scores them; sampled rows stay as they
        are."""
        moment = self._moment
        assert moment is not None, "admit() comes after plan()"
        self._rank(moment, draft)
        counts = [len(row.tokens) for row in draft.rows]
        places = {moment.members[member]: member for member in moment.trees}
        fixed = [count for index, count in enumerate(counts) if index not in places]
        if max(counts, default=0) > self._nodes:
            moment.times = self.costs.times(moment.batch, moment.context, max(counts))
        worths = [tree.worth for tree in moment.trees.values()]
        best = self.costs.filling.best(worths, times=moment.times, goodput=moment.goodput, fixed=fixed)
        taken = {moment.members[member]: count for member, count in zip(moment.trees, best, strict=True)}
        keep = {index: moment.trees[places[index]].order[:n] for index, n in taken.items() if n < counts[index]}
        counts = [taken.get(index, count) for index, count in enumerate(counts)]
        moment.pruned = {places[index] for index in keep}
        moment.submitted = [counts[index] for index in moment.members]
        self._reach.took(max(moment.submitted))
        moment.size = self.costs.filling.size(counts)
        return prune(draft, keep) if keep else draft

    def learn(self, emitted: Sequence[Emitted]) -> None:
        """Take in what the step committed: `emitted` of all its rows."""
        moment = self._moment
        if moment is not None:
            self._moment = None
            learn(self.arms, moment, emitted, self.agreement, self.costs, self.goodput, measure=self.measure)

    def forget(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Rows shrank to these lengths, 0 for those that are free."""
        for arm in self.arms:
            arm.drafter.truncate(rows, lengths)
        for row, length in zip(rows, lengths, strict=True):
            if length == 0:
                self.agreement.forget(row)
                for arm in self.arms:
                    arm.forget(row)

    def memory_bytes(self) -> int:
        """Bytes held by its drafters."""
        return sum(arm.drafter.memory_bytes() for arm in self.arms)

    def _ask(self, moment: Moment) -> None:
        """Collect the drafts of those that copy."""
        for index, arm in enumerate(self.arms):
            arm.drafter.idle = arm.copies and not arm.asking.due(self.steps)
            if not arm.copies or arm.drafter.idle:
                continue
            if (asked := self._asked(moment, arm, index)) is not None:
                moment.asked.append(asked)

    def _asked(self, moment: Moment, arm: Arm, index: int) -> Asked | None:
        drafting = [member for member, limit in enumerate(moment.limits) if limit > 0]
        wanted = arm.asking.of(drafting)
        if not wanted:
            return None
        began = self._clock()
        context = context_for(moment.rows, wanted, [0] * len(wanted), {})
        depths = [min(arm.limit, moment.limits[member]) for member in wanted]
        dearest = bisect_right(moment.times, _DEAREST * moment.times[0]) - 1
        nodes = max(1, min(dearest, self._reach.nodes()))
        draft = arm.drafter.propose(context, Budget(nodes=[nodes] * len(wanted), depth=depths))
        found = {
            member: self._tree(draft, place, arm, context.rows[place])
            for place, member in enumerate(wanted)
            if draft.rows[place].tokens and prunable(draft, place)
        }
        ms = 1e3 * (self._clock() - began)
        return Asked(arm=index, trees=found, ms=ms, each=len(drafting) / len(wanted))

    @staticmethod
    def _tree(draft: Draft, place: int, arm: Arm, row: int) -> GivenTree:
        return GivenTree.of(draft, place, lambda stated: arm.confidence.estimate(row, stated))

    def _copies(self, moment: Moment) -> dict[int, Copy]:
        """For each member the trees of all that copy as one, and what of it pays; the time is shared by all rows."""
        found = dict[int, Copy]()
        for member in range(len(moment.rows)):
            own = [(asked.arm, asked.trees[member]) for asked in moment.asked if member in asked.trees]
            if own:
                tree = moment.copied[member] = self._joined(dict(own), moment.rows[member].row)
                width = self._width(tree, moment)
                main = max(own, key=lambda pair: pair[1].expected(width))
                found[member] = Copy(arm=main[0], worth=tree.worth, width=width)
        return found

    def _joined(self, trees: Mapping[int, GivenTree], row: int) -> GivenTree:
        def estimate(holders: int, stated: float) -> float:
            return self.agreement.estimate(row, stated, holders)

        return GivenTree.joined(trees, self._nodes, estimate)

    def _width(self, tree: GivenTree, moment: Moment) -> int:
        """Nodes of one row's tree that pay, if the others have as many: what a pass with nodes costs in any case is
        shared by all rows."""
        times, most = moment.times, self.costs.filling.most
        price = moment.goodput / moment.batch
        gains = [worth - price * (times[most(moment.batch, n)] - times[0]) for n, worth in enumerate(tree.worth)]
        return gains.index(max(gains))

    def _settle(self, moment: Moment) -> None:
        """Say what asking took and what it saves, so that those are left in peace for whom it is not worth it."""
        turns = [
            Turn(
                asking=self.arms[asked.arm].asking,
                ms=asked.each * self.costs.asking_ms(moment.batch, asked.ms),
                tokens=asked.each * sum(tree.expected(moment.copies[m].width) for m, tree in asked.trees.items()),
            )
            for asked in moment.asked
        ]
        each = min((asked.each for asked in moment.asked), default=1.0)
        widths = ([copy.width for copy in moment.copies.values()] * round(each))[: len(moment.rows)]
        saved = each * sum(copy.tokens for copy in moment.copies.values()) / moment.goodput
        gain = saved - (moment.times[self.costs.filling.size(widths)] - moment.times[0])
        settle(turns, self.steps, gain_ms=max(0.0, gain), plain_ms=moment.times[0])

    def _looks_at_plain(self, moment: Moment) -> bool:
        """Whether nobody shall be asked, so that what everything is held against is seen."""
        return self.measure and len(moment.rows) == moment.batch and self.costs.plain_is_due(moment.batch)

    def _choice(self, moment: Moment) -> Choice:
        return choose(
            len(moment.rows),
            moment.copies,
            moment.offers,
            times=moment.times,
            goodput=moment.goodput,
            filling=self.costs.filling,
        )

    def _group(self, moment: Moment, arm: Arm, index: int) -> Group:
        chosen = moment.chosen(arm, index)
        draft, depths = None, [min(arm.limit, moment.limits[member]) for member in chosen]
        if arm.copies and chosen:
            draft = trees.stack([moment.copied[member].builder() for member in chosen])
        elif chosen:
            offer = next(offer for offer in moment.offers if offer.arm == index)
            depths = [min(offer.depth, limit) for limit in depths]
        return Group(
            name=arm.name,
            drafter=arm.drafter,
            members=[moment.members[member] for member in chosen],
            depths=depths,
            nodes=self._nodes,
            listeners=[index for member, index in enumerate(moment.members) if member not in chosen],
            draft=draft,
        )

    def _rank(self, moment: Moment, draft: Draft) -> None:
        """The trees of the members that were given a draft, ranked."""
        for member in moment.choice.copies:
            if draft.rows[moment.members[member]].tokens:
                moment.trees[member] = moment.copied[member]
        for member, arm_index in moment.choice.offers.items():
            place, arm = moment.members[member], self.arms[arm_index]
            on_trial = arm.switch.trying(moment.rows[member].row)  # which would teach nothing without its nodes
            if draft.rows[place].tokens and not on_trial and prunable(draft, place):
                moment.trees[member] = self._tree(draft, place, arm, moment.rows[member].row)


def _begin(
    step: int, rows: Sequence[Row], members: Sequence[int], depths: Sequence[int | None], *, awaited: bool
) -> Moment:
    own = [rows[index] for index in members]
    rooms = [max(0, row.room - 1) for row in own]
    return Moment(
        step=step,
        awaited=awaited,
        rows=own,
        members=members,
        batch=len(rows),
        context=max(len(row.tokens) for row in own),
        limits=[room if depth is None else min(room, depth) for room, depth in zip(rooms, depths, strict=True)],
    )
