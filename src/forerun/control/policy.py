"""The policy: decides before a step who drafts for which row and how deep, and after drafting which
of the nodes are scored.

One sentence decides all of it: *every drafter offers nodes with an acceptance estimate; take the trees, row by row and
bucket by bucket, that maximise expected accepted tokens minus the current goodput times what they cost.* Plain decoding
is the first bucket, a pass without drafted nodes; `explore` says when what is off is tried again.

Drafters that **copy** cost no forward pass: they are asked first, their trees of a row become one, and its nodes are
known when they are weighed. Of those that cost a **forward pass** only past steps are known: they offer a curve of
survival by depth with an upper confidence bound. `choice` has the sentence, as it is asked before drafting and after.

**Lossless**: what decides before drawing sees running figures and trees of deterministic nodes alone, what decides
after it takes away deterministic nodes alone (`Ranking` refuses others): whether a sampled node is submitted never
depends on its value.
"""

from __future__ import annotations

import dataclasses
import math
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from forerun.control.choice import Bid, Offer, allocate, best_depth, choose
from forerun.control.config import SpeculativeConfig
from forerun.control.costs import FREE, DraftCost, Nominal, PassCost, PassShape, StepCosts, Times
from forerun.control.explore import (
    Asked,
    LookupTrials,
    ModelTrials,
    PassTrials,
    Survival,
    optimism,
    settle,
)
from forerun.control.measuring import known_or_nominal
from forerun.control.ranking import Confidence, Ranking
from forerun.control.settings import SETTINGS
from forerun.core.acceptance import Acceptance
from forerun.core.tree import TokenTree, prune
from forerun.decode.drafter import DrafterSetup
from forerun.decode.row import Row
from forerun.decode.step import Emitted, Group, context_for
from forerun.drafters import entry_named
from forerun.drafters.guarded import Deferred
from forerun.types import Budget, StepTrace

_DEAREST_PASS = 8.0  # Most plain passes that a pass may cost for copies of its size to be asked for
_TRIAL_TOKENS = 100.0  # Added to what a row on trial is offered: more than a draft brings, so a trial is not put off
_UNKNOWN_LIMIT = 8  # Most tokens on a path of a drafter that does not say
_LEAST_LEVEL = 0.02  # First guess of a level's price, in plain passes, of a drafter without weights of its own


# --- a configuration's drafters, and its steps ------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class Arm:
    """One drafter and its running figures."""

    name: str
    key: str  # Key of its configuration: costs are kept under it
    drafter: Deferred
    copies: bool  # Asked before anybody is chosen, because a proposal costs no forward pass
    limit: int  # Most tokens on one path
    needs_prediction: bool = False  # Not asked for rows that brought none
    confidence: Confidence = field(default_factory=Confidence)  # Its calibration, if it costs a forward pass
    lookup_trials: LookupTrials = field(default_factory=LookupTrials)
    survival: Survival = field(default_factory=Survival)
    trials: ModelTrials = field(default_factory=ModelTrials)
    nodes: dict[int, float] = field(default_factory=dict)  # Depth -> nodes of a row in a proposal down to it, of late
    used: float = 1.0  # Share of its offers that were taken, of late

    @property
    def catches_up(self) -> bool:
        """True if it can be shown later what it was not shown in a step: it copies, and reads text alone."""
        return self.copies and not self.drafter.requires

    def expected_nodes(self, depth: int) -> int:
        """Return the nodes per row of a proposal down to `depth`, in proportion to the nearest that
        was seen, else a chain.
        """
        if not self.nodes:
            return depth
        nearest = min(self.nodes, key=lambda seen: (abs(seen - depth), seen))
        return max(1, math.ceil(self.nodes[nearest] * depth / nearest - 1e-9))


class _Lookup(NamedTuple):
    """The proposal of one copying drafter, made before anybody was chosen."""

    arm: int
    trees: Mapping[int, TokenTree]
    ms: float  # Time that asking took
    stands_for: float  # Rows that each row stands for that it was asked for


@dataclass(kw_only=True, slots=True)
class _StepPlan:
    """One step of the rows that a policy decides for, from plan to learning. Rows are indices into
    the step.
    """

    rows: Mapping[int, Row]
    limits: Mapping[int, int]  # Most tokens on a path; 0 where nothing may be drafted
    batch: int  # Rows of the step, other policies' included
    context: int  # Longest text, tokens
    awaited: bool  # Others wait for their first token
    trial: bool  # Passes with nodes are weighed as if they had never been dear
    times: Times  # Time of the step without drafting, ms, by size of the pass
    rate: float  # Tokens of a row in the time of a plain step, of late
    lookups: list[_Lookup] = field(default_factory=list)
    merged: dict[int, Ranking] = field(default_factory=dict)  # The trees of all that copy as one
    lookup_bids: dict[int, Bid] = field(default_factory=dict)
    gained: dict[int, float] = field(default_factory=dict)  # Tokens that a row gains by these, less what they cost
    offers: list[Offer] = field(default_factory=list)
    taken: dict[int, int] = field(default_factory=dict)  # Row -> the arm that drafts for it
    ranked: dict[int, Ranking] = field(default_factory=dict)  # Deterministic trees that are proposed, by row
    pruned: Container[int] = ()  # Rows that lost nodes after they were drafted
    counts: Sequence[int] = ()  # Nodes that the target scores, by row of the step

    @property
    def goodput(self) -> float:
        """The tokens per ms that the whole step yields of late."""
        return self.rate * self.batch / self.times[0]

    def of(self, arm: int) -> list[int]:
        """Return the rows that an arm drafts for."""
        return [row for row, found in self.taken.items() if found == arm]

    def offer(self, arm: int) -> Offer | None:
        """Return an arm's offer."""
        return next((offer for offer in self.offers if offer.arm == arm), None)

    def used(self) -> list[Offer]:
        """Return the offers that were taken."""
        arms = set(self.taken.values())
        return [offer for offer in self.offers if offer.arm in arms]

    def unread(self, offer: Offer) -> int:
        """Return the tokens that the drafter of an offer reads before it drafts for the rows that
        take it.
        """
        return sum(offer.unread[row] for row in self.of(offer.arm))


class Policy:
    """Plans the steps of the rows that share one configuration, and learns from them.

    Args:
        arms: the drafters to choose from; one where a drafter was named.
        costs: what passes and proposals cost.
        nodes: most drafted nodes of a row.
        measure: let what steps were seen to take correct `costs`. Off, decisions follow from the text and `costs`.
        chains: the target scores no trees: what drafters that copy hold becomes one path of each row.
        clock: seconds; times what drafters that copy take.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        costs: StepCosts,
        *,
        nodes: int,
        measure: bool = True,
        chains: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.arms, self.costs, self.measure = list(arms), costs, measure
        self.agreement = Confidence()  # Calibration of the merged trees of copying drafters, by who holds a node
        self.steps = 0
        self._goodput = Acceptance(weight=1.0, memory=SETTINGS.quick_memory)
        """A row's tokens per plain step's time: of all steps, and of those unaided by a drafter's
        forward pass.
        """
        self._most_taken = 0.0  # Nodes that the row took that took most, of late
        self._pass_trials = defaultdict[int, PassTrials](PassTrials)  # Trials by the number of rows in a step
        self._nodes, self._chains, self._clock = nodes, chains, clock
        self._plan: _StepPlan | None = None

    def with_free_drafts(self) -> Policy:
        """Return a policy over the same drafters that has learned nothing yet and to which drafts
        are free.
        """
        same = ("name", "key", "drafter", "copies", "limit", "needs_prediction")
        arms = [Arm(**{name: getattr(arm, name) for name in same}) for arm in self.arms]
        free = StepCosts(Nominal(slope=0.0), dict.fromkeys([arm.key for arm in arms], FREE), self.costs.shape)
        return Policy(arms, free, nodes=self._nodes, measure=False, chains=self._chains, clock=self._clock)

    def goodput(self, steps: str = "all") -> float:
        """Return the recent tokens per time over plain decoding's, to which one can fall back; of
        all or of unaided steps.
        """
        return max(1.0, self._goodput.estimate(steps, 1.0))

    def plan(
        self, rows: Sequence[Row], members: Sequence[int], depths: Sequence[int], *, awaited: bool = False
    ) -> list[Group]:
        """Return who drafts for whom in the coming step: one group for each drafter that drafts or is
        shown the text; rows that it does not draft for are listeners.

        Args:
            rows: of the whole step.
            members: which of them this policy decides for.
            depths: by member, most tokens on a path.
            awaited: others wait for their first token: whose text a drafter has yet to read can wait a little.
        """
        self.steps += 1
        own, batch = {index: rows[index] for index in members}, len(rows)
        context = max(len(row.tokens) for row in own.values())
        trial = self.measure and self._pass_trials[batch].due(self.steps)
        times = self.costs.times(batch, context, self._nodes, trial=trial)
        limits = {
            index: min(max(0, rows[index].tokens_left - 1), depth) for index, depth in zip(members, depths, strict=True)
        }
        plan = self._plan = _StepPlan(
            rows=own,
            limits=limits,
            batch=batch,
            context=context,
            awaited=awaited,
            trial=trial,
            times=times,
            rate=self.goodput(),
        )
        # Now and then nobody is asked, so that plain decoding, to which everything is compared, is seen.
        if not (self.measure and len(own) == batch and self.costs.plain_is_due(batch)):
            self._ask(plan)
            models = [index for index, arm in enumerate(self.arms) if not arm.copies]
            plan.offers = [offer for index in models if (offer := self._offer(plan, index)) is not None]
            if plan.lookup_bids or plan.offers:
                plan.taken = choose(plan.lookup_bids, plan.offers, self.costs.shape, times=times, goodput=plan.goodput)
        # One that was not asked and reads text alone is shown it when it is asked.
        asked = {found.arm for found in plan.lookups}
        shown = [index for index, arm in enumerate(self.arms) if index in asked or not arm.catches_up]
        return [self._group(plan, index) for index in shown]

    def _group(self, plan: _StepPlan, index: int) -> Group:
        arm, chosen, offer = self.arms[index], plan.of(index), plan.offer(index)
        deepest = arm.limit if offer is None else min(arm.limit, offer.depth)
        return Group(
            name=arm.name,
            drafter=arm.drafter,
            members=chosen,
            depths=[min(deepest, plan.limits[row]) for row in chosen],
            nodes=self._nodes,
            listeners=[row for row in plan.rows if plan.taken.get(row) != index],
            trees=[plan.merged[row].tree for row in chosen] if arm.copies and chosen else None,
        )

    def admit(self, trees: list[TokenTree]) -> list[TokenTree]:
        """Take away deterministic nodes that do not pay, before the target scores them; sampled
        rows stay as they are.
        """
        plan = self._plan
        assert plan is not None, "admit() comes after plan()"
        plan.counts = counts = [tree.size for tree in trees]
        if not any(counts):
            self._most_taken *= SETTINGS.quick_memory
            return trees
        for row, index in plan.taken.items():
            arm = self.arms[index]
            if counts[row] and arm.copies:
                plan.ranked[row] = plan.merged[row]
            elif counts[row] and (offer := plan.offer(index)) and row not in offer.tried and trees[row].prunable:
                plan.ranked[row] = Ranking.of(trees[row], arm.confidence.of(plan.rows[row].cache_row))
        if max(counts, default=0) > self._nodes:
            plan.times = self.costs.times(plan.batch, plan.context, max(counts), trial=plan.trial)
        fixed = [count for row, count in enumerate(counts) if row not in plan.ranked]
        worths = [ranking.worth for ranking in plan.ranked.values()]
        best = allocate(worths, self.costs.shape, times=plan.times, goodput=plan.goodput, fixed=fixed)
        pruned = {row: n for row, n in zip(plan.ranked, best, strict=True) if n < counts[row]}
        plan.counts, plan.pruned = [pruned.get(row, count) for row, count in enumerate(counts)], pruned
        self._most_taken = max(SETTINGS.quick_memory * self._most_taken, *(plan.counts[row] for row in plan.rows))
        return prune(trees, {row: plan.ranked[row].order[:n] for row, n in pruned.items()}) if pruned else trees

    def finish(self, row: Row) -> None:
        """Show a text that ends to the drafters that copy: it is worth remembering, also where they
        were not asked of late.
        """
        for arm in self.arms:
            if arm.catches_up:
                arm.drafter.catch_up(context_for([row], [0], [0], {}), [0])

    def forget(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Shrink rows to these lengths, 0 for those that are free."""
        for arm in self.arms:
            arm.drafter.truncate(rows, lengths)
        for row in (row for row, length in zip(rows, lengths, strict=True) if length == 0):
            self.agreement.forget(row)
            for arm in self.arms:
                arm.confidence.forget(row)
                arm.survival.forget(row)

    # --- drafters that copy -------------------------------------------------------------------------------------------

    def _ask(self, plan: _StepPlan) -> None:
        """Ask the drafters that copy, merge their trees for each row, and record what asking took
        and what it saves.
        """
        due = dict[int, list[int]]()
        for index, arm in enumerate(self.arms):
            arm.drafter.idle = arm.copies and not arm.lookup_trials.due(self.steps)
            if arm.copies and not arm.drafter.idle and (drafting := self._may_look_up(plan, arm)):
                due[index] = drafting
        if not due:
            return
        times = plan.times
        sizes = range(1 + min(times.most, 2 * max(SETTINGS.few, int(self._most_taken))))
        nodes = max(1, bisect_right(sizes, _DEAREST_PASS * times[0], key=times.__getitem__) - 1)
        for index, drafting in due.items():
            self._look_up(plan, index, drafting, nodes)
        for index, row in plan.rows.items():
            own = {found.arm: found.trees[index] for found in plan.lookups if index in found.trees}
            if own:
                estimate = self.agreement.of(row.cache_row)
                ranking = plan.merged[index] = Ranking.merge(own, self._nodes, estimate, chain=self._chains)
                gains = self._gains(ranking.worth, plan)
                plan.gained[index] = max(gains)
                paying = gains.index(plan.gained[index])
                main = max(own, key=lambda arm: ranking.held(arm, max(1, paying)))
                plan.lookup_bids[index] = Bid(main, paying, ranking.worth[paying])
        if self.measure and plan.lookups:
            self._settle(plan)

    def _may_look_up(self, plan: _StepPlan, arm: Arm) -> list[int]:
        """Return the rows that a drafter which copies may draft for."""
        return [
            row
            for row, limit in plan.limits.items()
            if limit > 0 and (plan.rows[row].prediction or not arm.needs_prediction)
        ]

    def _look_up(self, plan: _StepPlan, index: int, drafting: Sequence[int], nodes: int) -> None:
        arm = self.arms[index]
        wanted = arm.lookup_trials.of(drafting)
        began = self._clock()
        rows = [plan.rows[row] for row in wanted]
        budget = Budget(nodes=[nodes] * len(wanted), depth=[min(arm.limit, plan.limits[row]) for row in wanted])
        trees = arm.drafter.propose(context_for(rows, range(len(rows)), [0] * len(rows), {}), budget)
        found = {row: tree for row, tree in zip(wanted, trees, strict=True) if tree.size and tree.prunable}
        ms = 1e3 * (self._clock() - began) if self.measure else 0.0
        plan.lookups.append(_Lookup(index, found, ms, len(drafting) / len(wanted)))

    def _gains(self, worth: Sequence[float], plan: _StepPlan) -> list[float]:
        """Return, by the number of nodes of one row's tree, the tokens gained if the others have as many: the fixed
        cost of a pass with nodes is shared by all rows. One row alone never repays it.
        """
        times, even, price = plan.times, self.costs.shape.even, plan.goodput / plan.batch
        return [tokens - price * (times[even(plan.batch, n)] - times[0]) for n, tokens in enumerate(worth)]

    def _settle(self, plan: _StepPlan) -> None:
        """Record what asking took and what it saves, so that drafters for which it is not worth it
        are put off.
        """
        asked = list[Asked]()
        for index, found, ms, each in plan.lookups:
            cost = self.costs.lookup_ms(plan.batch, ms)
            others = {row: self._gains(plan.merged[row].worth_without(index), plan) for row in found}
            lost = sum(plan.gained[row] - max(gains) for row, gains in others.items())
            gain = each * lost / plan.goodput
            asked.append(Asked(self.arms[index].lookup_trials, cost, each * cost, gain))
        settle(asked, self.steps, plain_ms=plan.times[0])

    # --- drafters that cost a forward pass ----------------------------------------------------------------------------

    def _offer(self, plan: _StepPlan, index: int) -> Offer | None:
        """Return the drafter's offer to the rows that it may draft for, or None if there are none.
        In a trial it is worth more than anything to a few of them, as deep as it would go if nobody
        had seen it.
        """
        arm, curves, unread = self.arms[index], dict[int, Sequence[float]](), dict[int, int]()
        for member, row in plan.rows.items():
            if limit := min(arm.limit, plan.limits[member]):
                curves[member] = arm.survival.curve(row.cache_row, limit)
                unread[member] = arm.drafter.unread(row.cache_row, len(row.tokens))
        if not curves:
            return None
        time = self._times(plan, arm, max(map(len, curves.values())))
        depth, drafting, ratio = best_depth(list(curves.values()), time, plan.batch)
        row_ms = plan.batch * (time(depth, drafting) - plan.times[0]) / drafting
        offered = [] if arm.trials.off else self._worth_reading(plan, arm, curves, unread, depth, row_ms)
        doubted = arm.trials.begun or arm.trials.off or ratio < SETTINGS.pays
        tried = self._tried(plan, arm, unread) if (doubted or not offered) and arm.trials.due(self.steps) else []
        if tried and not doubted:
            # The drafter pays, but no text is worth reading for it: now and then the shortest are read.
            offered, tried = tried, []
            reading = self.costs.reading_ms(arm.key, sum(unread[row] for row in offered))
            arm.trials.wait_after(self.steps, reading / plan.times[0])
        if tried:
            guess = [SETTINGS.first_guess ** (1 + level) for level in range(arm.limit)]
            offered = [*offered, *(row for row in tried if row not in offered)]
            curves |= {row: guess[: len(curves[row])] for row in tried}
            depth, _, _ = best_depth([curves[row] for row in offered], time, plan.batch)
        if not offered:
            return None
        ms = self.costs.draft_ms(arm.key, depth, plan.batch, trial=plan.trial)
        bids = self._bids(plan, index, {row: curves[row][:depth] for row in offered}, depth, tried)
        return Offer(arm=index, depth=depth, ms=ms, bids=bids, doubted=doubted, tried=tried, unread=unread)

    def _worth_reading(
        self,
        plan: _StepPlan,
        arm: Arm,
        curves: Mapping[int, Sequence[float]],
        unread: Mapping[int, int],
        depth: int,
        row_ms: float,
    ) -> list[int]:
        """Return the rows whose texts the drafter knows, or which are worth reading for it."""
        found = list[int]()
        for member, curve in curves.items():
            reading = self.costs.reading_ms(arm.key, unread[member])
            if not reading or self._repays(plan, arm, plan.rows[member], reading, sum(curve[:depth]), row_ms):
                found.append(member)
        return found

    def _bids(
        self, plan: _StepPlan, index: int, curves: Mapping[int, Sequence[float]], depth: int, tried: Container[int]
    ) -> dict[int, Bid]:
        """Return the bid for each row: expected tokens, and what is added for their uncertainty or for a trial.

        Args:
            curves: the probabilities that depth 1, 2, ... survives, by row.
        """
        arm = self.arms[index]
        nodes, bids = min(self._nodes, arm.expected_nodes(depth)), dict[int, Bid]()
        for member, curve in curves.items():
            bonus = optimism(curve, arm.survival.evidence(plan.rows[member].cache_row), self.steps)
            bids[member] = Bid(index, nodes, sum(curve) + bonus + (_TRIAL_TOKENS if member in tried else 0.0))
        return bids

    def _tried(self, plan: _StepPlan, arm: Arm, unread: Mapping[int, int]) -> list[int]:
        """Return rows for a trial: a few of which little is to be read, together no more than a
        plain step takes.
        """
        rows = sorted(unread, key=lambda row: unread[row])[: SETTINGS.few]
        reading = list(accumulate(self.costs.reading_ms(arm.key, unread[row]) for row in rows))
        return [row for row, ms in zip(rows, reading, strict=True) if row == rows[0] or ms <= plan.times[0]]

    def _times(self, plan: _StepPlan, arm: Arm, deepest: int) -> Callable[[int, int], float]:
        """Return a function for the time of a step, ms, by the depth that a drafter drafts to (0:
        plain decoding) and the rows that it drafts for.
        """
        levels = [(0, 0.0)]
        for depth in range(1, deepest + 1):
            nodes = min(self._nodes, arm.expected_nodes(depth))
            levels.append((nodes, self.costs.draft_ms(arm.key, depth, plan.batch, trial=plan.trial)))
        times, even = plan.times, self.costs.shape.even
        return lambda depth, rows: times[even(rows, levels[depth][0])] + levels[depth][1]

    def _repays(self, plan: _StepPlan, arm: Arm, row: Row, reading: float, accepted: float, row_ms: float) -> bool:
        """Return whether a row's text, which the drafter has yet to read, is worth reading for what
        is left to write.

        What it repays is what drafting gains beyond the tokens that decoding yields in the same time without models, in
        the share of the steps that fall to this drafter. None is read in its first tokens while others wait for theirs.

        Args:
            reading: ms, once.
            accepted: tokens expected of a draft.
            row_ms: what drafting adds to a step for this row.
        """
        if plan.awaited and len(row.tokens) - row.prompt_length <= SETTINGS.few:
            return False
        unaided = self.goodput("unaided")
        per_ms, steps = unaided / plan.times[0], arm.used * row.tokens_left / max(1.0 + accepted, unaided)
        return steps * (accepted - per_ms * row_ms) > SETTINGS.returns * per_ms * reading

    # --- after the step -----------------------------------------------------------------------------------------------

    def learn(self, emitted: Sequence[Emitted]) -> None:
        """Learn from what the step committed: `emitted` of all its rows."""
        plan, self._plan = self._plan, None
        if plan is None:
            return
        # The committed text shows for every deterministic node whether it was right, submitted or not.
        for member, ranking in plan.merged.items():
            self.agreement.learn(plan.rows[member].cache_row, ranking, emitted[member].tokens)
        for arm in self.arms:
            if not arm.copies:
                arm.survival.age()
        for offer in plan.offers:
            arm, chosen = self.arms[offer.arm], plan.of(offer.arm)
            arm.used += (1 - SETTINGS.quick_memory) * (len(chosen) / len(offer.bids) - arm.used)
            if chosen:
                self._learn_outcomes(plan, offer, chosen, emitted)
        used, size = plan.used(), self.costs.shape.size(plan.counts)
        trace = next(emitted[member].trace for member in plan.rows)
        ms: float | None = None
        if self.measure and any(count for row, count in enumerate(plan.counts) if row not in plan.rows):
            self.costs.saw_pass(size, plan.batch, plan.context, trace.verify_ms)  # its host's work is not ours alone
        elif self.measure:
            ms = self._learn_times(plan, size, trace)
        tokens, cost = sum(len(emitted[row].tokens) for row in plan.rows) / len(plan.rows), 1.0
        if size or used or plan.lookups:  # no plain step
            cost = (plan.times[size] + sum(offer.ms for offer in used) if ms is None else ms) / plan.times[0]
        if size and plan.trial:
            self._pass_trials[plan.batch].wait_after(self.steps, max(0.0, cost - 1))
        elif size:
            self._pass_trials[plan.batch].drafted(self.steps)
        self._goodput.learn("all", tokens, cost)
        if not used:
            self._goodput.learn("unaided", tokens, cost)

    def _learn_outcomes(self, plan: _StepPlan, offer: Offer, chosen: Sequence[int], emitted: Sequence[Emitted]) -> None:
        arm, shape = self.arms[offer.arm], self.costs.shape
        matched = {
            member: arm.confidence.learn(plan.rows[member].cache_row, plan.ranked[member], emitted[member].tokens)
            for member in chosen
            if member in plan.ranked
        }
        if arm.drafter.failed:
            arm.drafter.failed = False
            arm.trials.fail(self.steps)
            return
        nodes = shape.nodes(shape.size([plan.counts[member] for member in chosen]), len(chosen))
        before = arm.nodes.setdefault(offer.depth, nodes)
        arm.nodes[offer.depth] = before + (1 - SETTINGS.quick_memory) * (nodes - before)
        tried = list[int]()
        for member in chosen:
            row, step = plan.rows[member], emitted[member]
            if step.tokens[-1] in row.stop_ids:
                continue
            # A drafter that stopped short of what it was allowed has not survived there. Of deterministic nodes that
            # were taken away the text still tells, as far as it goes, what would have been accepted.
            allowed = min(offer.depth, arm.limit, plan.limits[member])
            accepted, drafted = len(step.trace.path), min(allowed, step.depth + 1)
            if member in plan.pruned:
                accepted, drafted = matched[member], min(allowed, len(step.tokens))
            arm.survival.record(row.cache_row, accepted=accepted, drafted=drafted)
            if member in offer.tried:
                tried.append(1 + accepted)
        if not offer.doubted:
            arm.trials.drafted(self.steps)
        elif tried:
            reading = self.costs.reading_ms(arm.key, plan.unread(offer)) / plan.times[0]
            spent = (self._row_cost(plan, offer, len(chosen)) - 1) * len(chosen) / plan.batch + reading
            cost = self._row_cost(plan, offer, len(offer.bids))
            if arm.trials.tried(self.steps, tokens=sum(tried) / len(tried), cost=cost, spent=spent):
                arm.survival.renew()

    def _row_cost(self, plan: _StepPlan, offer: Offer, rows: int) -> float:
        """Return the plain steps that each of so many rows that are drafted for accounts for: what
        drafting adds is theirs alone.
        """
        ms = self._times(plan, self.arms[offer.arm], offer.depth)(offer.depth, rows)
        return 1 + (ms / plan.times[0] - 1) * plan.batch / rows

    def _learn_times(self, plan: _StepPlan, size: int, trace: StepTrace) -> float:
        """Correct the costs by what the step took; returns that without the time of reading a
        prompt, ms.
        """
        costs, host = self.costs, trace.draft_ms + trace.commit_ms
        costs.saw_pass(size, plan.batch, plan.context, trace.verify_ms)
        used, lookup_ms = plan.used(), sum(found.ms for found in plan.lookups)
        if not used:
            costs.saw_host(host, plan.batch, lookup_ms=lookup_ms)
        elif len(used) == 1:
            unread, key = plan.unread(used[0]), self.arms[used[0].arm].key
            own = host - costs.host_ms(plan.batch) - costs.lookup_ms(plan.batch, lookup_ms)
            costs.saw_draft(key, used[0].depth, plan.batch, own, unread=unread)
            host -= min(host, costs.reading_ms(key, unread))
        return host + trace.verify_ms


# --- from a configuration ---------------------------------------------------------------------------------------------


def policy_for(
    configs: Sequence[SpeculativeConfig],
    setup: DrafterSetup,
    *,
    nodes: int,
    reproducible: bool = True,
    costs: PassCost | None = None,
    measure: bool = False,
    chains: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> Policy:
    """Build a policy for these drafters; their costs and the target's are read, or assumed. Raises
    ForerunError for whatever keeps a drafter from being built.

    Args:
        configs: of one drafter, or of those to choose among (`arms_of`).
        setup: what drafters are built from.
        nodes: most drafted nodes of a row.
        reproducible: whether seeded requests are drafted for deterministically (`repeats`).
        costs: known costs, with what drafters cost in ``drafts``, if anything. None: what is kept of the target's, else
            nominal ones.
        measure: whether steps correct `costs`; those of None they do.
        chains, clock: as `Policy` takes them.
    """
    setup = dataclasses.replace(setup, pass_ms=None)  # the policy itself chooses how much is drafted
    arms = [_arm(own, setup, reproducible=reproducible) for own in configs]
    passes = costs if costs is not None else known_or_nominal(setup.target)
    guesses = dict.fromkeys([arm.key for arm in arms], FREE)
    for arm in (arm for arm in arms if not arm.copies):  # a level reads its memory once, as a pass reads the target's
        share = max(_LEAST_LEVEL, arm.drafter.memory_bytes() / max(1, setup.target.memory_bytes()))
        guesses[arm.key] = DraftCost(fixed_ms=0.0, level_ms=min(1.0, share) * passes.pass_ms(1))
    shape = PassShape(padded=setup.target.computes_padding)
    step_costs = StepCosts(passes, {**guesses, **getattr(passes, "drafts", {})}, shape)
    return Policy(arms, step_costs, nodes=nodes, measure=measure or costs is None, chains=chains, clock=clock)


def _arm(config: SpeculativeConfig, setup: DrafterSetup, *, reproducible: bool) -> Arm:
    drafter = Deferred.build(config.method, config.drafter_options, setup, reproducible=reproducible)
    own = getattr(drafter.drafter, "config", None)
    shape = getattr(own, "shape", None)
    named = len(shape) if shape else getattr(own, "num_speculative_tokens", None)
    entry = entry_named(config.method)
    return Arm(
        name=config.method,
        key=config.key,
        drafter=drafter,
        copies=entry.copies,
        limit=drafter.depth or named or _UNKNOWN_LIMIT,
        needs_prediction=entry.needs_prediction and getattr(own, "text", None) is None,
    )
