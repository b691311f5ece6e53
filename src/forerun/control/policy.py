"""The policy decides before a step which drafter drafts for which row and how deep, and after drafting which
of the drafted nodes the target scores.

It takes the drafts, row by row, that maximise expected accepted tokens minus the current goodput times what they cost
(docs/control.md has the rule and a worked step). Plain decoding, a pass without drafted nodes, is one of the choices.
`choice` computes the maximum, before drafting and after it; `explore` says when a drafter that is off is tried again.

A **lookup drafter** costs no forward pass: it is queried first, the trees of a row are merged into one, and its nodes
are known when they are weighed. Of a drafter with a **forward pass** only past steps are known: it offers the
probability of survival by depth, with an upper confidence bound.

**Lossless**: decisions before drawing read running figures and trees of deterministic nodes only. Decisions after it
remove deterministic nodes only (`Ranking` refuses others). So whether a sampled node is submitted never depends on its
value.
"""

from __future__ import annotations

import dataclasses
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from itertools import accumulate

from forerun.control.choice import (
    NO_LOOKUPS,
    Admission,
    Arm,
    Bid,
    LookupDrafts,
    LookupProposal,
    Offer,
    StepPlan,
    StepState,
    allocate,
    best_depth,
    choose,
)
from forerun.control.config import SpeculativeConfig
from forerun.control.costs import FREE, DraftCost, Nominal, PassCost, PassShape, StepCosts, Times
from forerun.control.explore import (
    LookupOutcome,
    PassTrials,
    optimism,
    update_lookup_trials,
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

_MAX_LOOKUP_PASS = 8.0  # Lookup drafters propose no more nodes than fit a pass of this time, in plain passes
_MIN_LOOKUP_NODES = 16  # They may propose at least this many, if such a pass is not too slow
_EARLY_TOKENS = 8  # Output tokens of a request before a drafter reads its text, while others wait for their first token
_TRIAL_TOKENS = 100.0  # Added to a trial row's bid: more than any draft yields, so that the trial is not put off
_DEFAULT_DEPTH = 8  # Maximum draft depth of a drafter that states none
_MIN_DEPTH_COST = 0.02  # Least assumed cost of one draft depth, in plain passes, of a drafter without own weights


class Policy:
    """Plans the steps of the rows that share one configuration, and learns from them.

    Args:
        arms: the drafters to choose from; a single one where the configuration names a drafter.
        costs: what passes and proposals cost.
        nodes: most drafted nodes of a row.
        measure: correct `costs` by measured times. Off, decisions follow from the text and `costs` alone.
        chains: the target scores no trees: the lookup drafters' trees of a row become one path.
        clock: seconds; times the lookup drafters.
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
        self.agreement = Confidence()  # Calibration of merged trees, by which lookup drafters proposed a node
        self.steps = 0
        self._goodput = Acceptance(weight=1.0, memory=SETTINGS.quick_memory)
        """Tokens of a row per plain step's time."""
        self._most_scored = 0.0  # Recent maximum of nodes that were scored for one row
        self._pass_trials = defaultdict[int, PassTrials](PassTrials)  # By the number of rows in a step
        self._nodes, self._chains, self._clock = nodes, chains, clock
        self._plan: StepPlan | None = None
        self._admission: Admission | None = None

    def with_free_drafts(self) -> Policy:
        """Return a policy over the same drafters that has learned nothing yet and for which drafting costs nothing."""
        arms = [arm.renewed() for arm in self.arms]
        free = StepCosts(Nominal(slope=0.0), dict.fromkeys([arm.key for arm in arms], FREE), self.costs.shape)
        return Policy(arms, free, nodes=self._nodes, measure=False, chains=self._chains, clock=self._clock)

    def goodput(self) -> float:
        """Return the recent tokens per time, relative to plain decoding and at least 1."""
        return max(1.0, self._goodput.estimate(None, 1.0))

    # --- before drafting ----------------------------------------------------------------------------------------------

    def plan(
        self, rows: Sequence[Row], members: Sequence[int], depths: Sequence[int], *, others_wait: bool = False
    ) -> list[Group]:
        """Return which drafter drafts for which rows in the coming step: one group for each drafter that drafts or is
        shown the text. Rows that it does not draft for are listeners.

        Args:
            rows: all rows of the step.
            members: indices of the rows that this policy decides for.
            depths: by member, most tokens on a path.
            others_wait: other requests wait for their first token: reading a text for a drafter can wait a little.
        """
        self.steps += 1
        own_rows = {index: rows[index] for index in members}
        batch = len(rows)
        context = max(len(row.tokens) for row in own_rows.values())
        pass_trial = self.measure and self._pass_trials[batch].due(self.steps)
        step = StepState(
            rows=own_rows,
            max_depths={
                index: min(max(0, rows[index].tokens_left - 1), depth)
                for index, depth in zip(members, depths, strict=True)
            },
            batch=batch,
            context=context,
            others_wait=others_wait,
            pass_trial=pass_trial,
            times=self.costs.times(batch, context, self._nodes, trial=pass_trial),
            rate=self.goodput(),
        )
        lookups = NO_LOOKUPS
        offers = list[Offer]()
        assigned = dict[int, int]()
        # Plain decoding, to which everything is compared, is measured from time to time: nothing is drafted then.
        if not (self.measure and len(own_rows) == batch and self.costs.plain_is_due(batch)):
            lookups = self._query_lookups(step)
            models = [index for index, arm in enumerate(self.arms) if not arm.is_lookup]
            offers = [offer for index in models if (offer := self._offer(step, index)) is not None]
            if lookups.bids or offers:
                assigned = choose(lookups.bids, offers, self.costs.shape, times=step.times, goodput=step.goodput)
        plan = self._plan = StepPlan(step, lookups, offers, assigned)
        self._admission = Admission(step.times)
        # A drafter that can catch up later is shown the text only in steps in which it was queried.
        queried = {proposal.arm for proposal in lookups.proposals}
        shown = [index for index, arm in enumerate(self.arms) if index in queried or not arm.catches_up]
        return [self._group(plan, index) for index in shown]

    def _group(self, plan: StepPlan, index: int) -> Group:
        arm, chosen, offer = self.arms[index], plan.rows_of(index), plan.offer_of(index)
        deepest = arm.max_depth if offer is None else min(arm.max_depth, offer.depth)
        return Group(
            name=arm.name,
            drafter=arm.drafter,
            members=chosen,
            depths=[min(deepest, plan.step.max_depths[row]) for row in chosen],
            nodes=self._nodes,
            listeners=[row for row in plan.step.rows if plan.assigned.get(row) != index],
            trees=[plan.lookups.merged[row].tree for row in chosen] if arm.is_lookup and chosen else None,
        )

    # --- after drafting -----------------------------------------------------------------------------------------------

    def admit(self, trees: list[TokenTree]) -> list[TokenTree]:
        """Return the trees without the deterministic nodes that are not worth scoring; sampled nodes stay."""
        plan = self._plan
        assert plan is not None, "admit() comes after plan()"
        step, counts = plan.step, [tree.size for tree in trees]
        if not any(counts):
            self._admission = Admission(step.times, counts)
            self._most_scored *= SETTINGS.quick_memory
            return trees
        ranked, times = self._rank(plan, trees), step.times
        if max(counts) > self._nodes:
            times = self.costs.times(step.batch, step.context, max(counts), trial=step.pass_trial)
        fixed = [count for row, count in enumerate(counts) if row not in ranked]
        worths = [ranking.worth for ranking in ranked.values()]
        goodput = step.rate * step.batch / times[0]
        best = allocate(worths, self.costs.shape, times=times, goodput=goodput, fixed=fixed)
        pruned = {row: n for row, n in zip(ranked, best, strict=True) if n < counts[row]}
        scored = [pruned.get(row, count) for row, count in enumerate(counts)]
        self._admission = Admission(times, scored, ranked, pruned)
        self._most_scored = max(SETTINGS.quick_memory * self._most_scored, *(scored[row] for row in step.rows))
        return prune(trees, {row: ranked[row].order[:n] for row, n in pruned.items()}) if pruned else trees

    def _rank(self, plan: StepPlan, trees: Sequence[TokenTree]) -> dict[int, Ranking]:
        """Return the rankings of the trees that may be pruned, by row; trial drafts are scored whole."""
        ranked = dict[int, Ranking]()
        for row, index in plan.assigned.items():
            arm, tree = self.arms[index], trees[row]
            if tree.size and arm.is_lookup:
                ranked[row] = plan.lookups.merged[row]
            elif tree.size and (offer := plan.offer_of(index)) and row not in offer.trial_rows and tree.prunable:
                ranked[row] = Ranking.of(tree, arm.confidence.of(plan.step.rows[row].cache_row))
        return ranked

    # --- requests that end --------------------------------------------------------------------------------------------

    def finish(self, row: Row) -> None:
        """Show the text of a finished request to the lookup drafters, which may not have been queried recently, so
        that later requests can reuse it.
        """
        for arm in self.arms:
            if arm.catches_up:
                arm.drafter.catch_up(context_for([row], [0], [0], {}), [0])

    def forget(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Shrink rows to these lengths; length 0 frees a row."""
        for arm in self.arms:
            arm.drafter.truncate(rows, lengths)
        for row in (row for row, length in zip(rows, lengths, strict=True) if length == 0):
            self.agreement.forget(row)
            for arm in self.arms:
                arm.confidence.forget(row)
                arm.survival.forget(row)

    # --- lookup drafters ----------------------------------------------------------------------------------------------

    def _query_lookups(self, step: StepState) -> LookupDrafts:
        """Query the lookup drafters that are due, merge their trees for each row, and record what the queries cost and
        save.
        """
        due = dict[int, list[int]]()
        for index, arm in enumerate(self.arms):
            arm.drafter.idle = arm.is_lookup and not arm.lookup_trials.due(self.steps)
            if not arm.is_lookup or arm.drafter.idle:
                continue
            may_draft = [
                row
                for row, depth in step.max_depths.items()
                if depth > 0 and (step.rows[row].prediction or not arm.needs_prediction)
            ]
            if may_draft:
                due[index] = may_draft
        if not due:
            return NO_LOOKUPS
        nodes = self._lookup_nodes(step.times)
        proposals = [self._query(step, index, rows, nodes) for index, rows in due.items()]
        merged, bids, gains_by_row = dict[int, Ranking](), dict[int, Bid](), dict[int, float]()
        for index, row in step.rows.items():
            trees = {proposal.arm: proposal.trees[index] for proposal in proposals if index in proposal.trees}
            if trees:
                estimate = self.agreement.of(row.cache_row)
                ranking = merged[index] = Ranking.merge(trees, self._nodes, estimate, chain=self._chains)
                gains = self._gains(step, ranking.worth)
                gains_by_row[index] = max(gains)
                best = gains.index(gains_by_row[index])
                main = max(trees, key=lambda arm: ranking.held(arm, max(1, best)))
                bids[index] = Bid(main, best, ranking.worth[best])
        drafts = LookupDrafts(proposals, merged, bids, gains_by_row)
        if self.measure:
            self._record_lookups(step, drafts)
        return drafts

    def _lookup_nodes(self, times: Times) -> int:
        """Return the most nodes that a lookup drafter may propose for a row: as many as a pass holds that is not too
        slow, and at most twice as many as were scored recently.
        """
        sizes = range(1 + min(times.most, max(_MIN_LOOKUP_NODES, 2 * int(self._most_scored))))
        return max(1, bisect_right(sizes, _MAX_LOOKUP_PASS * times[0], key=times.__getitem__) - 1)

    def _query(self, step: StepState, index: int, eligible: Sequence[int], nodes: int) -> LookupProposal:
        """Query one lookup drafter for the eligible rows, or for a sample of them while it is off."""
        arm = self.arms[index]
        queried = arm.lookup_trials.sample(eligible)
        began = self._clock()
        rows = [step.rows[row] for row in queried]
        budget = Budget(
            nodes=[nodes] * len(queried), depth=[min(arm.max_depth, step.max_depths[row]) for row in queried]
        )
        trees = arm.drafter.propose(context_for(rows, range(len(rows)), [0] * len(rows), {}), budget)
        drafts = {row: tree for row, tree in zip(queried, trees, strict=True) if tree.size and tree.prunable}
        ms = 1e3 * (self._clock() - began) if self.measure else 0.0
        return LookupProposal(index, drafts, ms, len(eligible) / len(queried))

    def _gains(self, step: StepState, worth: Sequence[float]) -> list[float]:
        """Return the tokens gained by the number of nodes of one row's tree, if all rows have as many. A pass with
        nodes has a fixed cost that all rows share: one row alone never repays it.
        """
        times, size_of, price = step.times, self.costs.shape.size_of_equal_rows, step.goodput / step.batch
        return [tokens - price * (times[size_of(step.batch, n)] - times[0]) for n, tokens in enumerate(worth)]

    def _record_lookups(self, step: StepState, drafts: LookupDrafts) -> None:
        """Record what each query cost and saves, so that drafters that do not repay it are queried less often."""
        outcomes = list[LookupOutcome]()
        for index, trees, ms, rows_per_query in drafts.proposals:
            cost = self.costs.lookup_ms(step.batch, ms)
            without = {row: self._gains(step, drafts.merged[row].worth_without(index)) for row in trees}
            lost = sum(drafts.gains[row] - max(gains) for row, gains in without.items())
            gain = rows_per_query * lost / step.goodput
            outcomes.append(LookupOutcome(self.arms[index].lookup_trials, cost, rows_per_query * cost, gain))
        update_lookup_trials(outcomes, self.steps, plain_ms=step.times[0])

    # --- drafters with a forward pass ---------------------------------------------------------------------------------

    def _offer(self, step: StepState, index: int) -> Offer | None:
        """Return what a drafter bids for which rows, or None if it bids for none. A trial row gets the highest bid, and
        the survival curve of a drafter that was never seen.
        """
        arm, rows = self.arms[index], step.rows
        depths = {row: depth for row in rows if (depth := min(arm.max_depth, step.max_depths[row]))}
        if not depths:
            return None
        curves: dict[int, Sequence[float]] = {
            row: arm.survival.curve(rows[row].cache_row, depth) for row, depth in depths.items()
        }
        unread = {row: arm.drafter.unread(rows[row].cache_row, len(rows[row].tokens)) for row in depths}
        step_ms = self._step_times(step, arm, max(depths.values()))
        # The rows for which drafting pays
        depth, drafting, speedup = best_depth(list(curves.values()), step_ms, step.batch)
        eligible = list[int]()
        if not arm.trials.off:
            row_ms = step.batch * (step_ms(depth, drafting) - step.times[0]) / drafting
            eligible = self._rows_worth_reading(step, arm, curves, unread, depth, row_ms)
        # The rows of a trial, if one is due
        probation = arm.trials.under_way or arm.trials.off or speedup < SETTINGS.min_speedup
        trial_rows = list[int]()
        if (probation or not eligible) and arm.trials.due(self.steps):
            trial_rows = self._trial_rows(step, arm, unread)
        if trial_rows and not probation:
            # Drafting pays, but no text is worth reading. So that the drafter is seen, the shortest are read sometimes.
            eligible, trial_rows = trial_rows, []
            reading = self.costs.reading_ms(arm.key, sum(unread[row] for row in eligible))
            arm.trials.wait_after(self.steps, reading / step.times[0])
        if trial_rows:
            first_guess = [SETTINGS.first_guess**depth for depth in range(1, 1 + arm.max_depth)]
            eligible = [*eligible, *(row for row in trial_rows if row not in eligible)]
            curves |= {row: first_guess[: depths[row]] for row in trial_rows}
            depth, _, _ = best_depth([curves[row] for row in eligible], step_ms, step.batch)
        # The bids for both
        if not eligible:
            return None
        return Offer(
            arm=index,
            depth=depth,
            ms=self.costs.draft_ms(arm.key, depth, step.batch, trial=step.pass_trial),
            bids=self._bids(step, index, {row: curves[row][:depth] for row in eligible}, depth, trial_rows),
            probation=probation,
            trial_rows=trial_rows,
            unread=unread,
        )

    def _rows_worth_reading(
        self,
        step: StepState,
        arm: Arm,
        curves: Mapping[int, Sequence[float]],
        unread: Mapping[int, int],
        depth: int,
        row_ms: float,
    ) -> list[int]:
        """Return the rows whose text the drafter has read, or whose text is worth reading."""
        worth_reading = list[int]()
        for index, curve in curves.items():
            reading = self.costs.reading_ms(arm.key, unread[index])
            if not reading or self._repays_reading(step, step.rows[index], reading, sum(curve[:depth]), row_ms):
                worth_reading.append(index)
        return worth_reading

    def _bids(
        self, step: StepState, index: int, curves: Mapping[int, Sequence[float]], depth: int, trial_rows: Container[int]
    ) -> dict[int, Bid]:
        """Return the bid for each row: expected tokens, and what is added for their uncertainty or for a trial.

        Args:
            curves: by row, the probability that depth 1, 2, ... survives.
        """
        arm = self.arms[index]
        nodes, bids = min(self._nodes, arm.expected_nodes(depth)), dict[int, Bid]()
        for row, curve in curves.items():
            bonus = optimism(curve, arm.survival.evidence(step.rows[row].cache_row), self.steps)
            bids[row] = Bid(index, nodes, sum(curve) + bonus + (_TRIAL_TOKENS if row in trial_rows else 0.0))
        return bids

    def _trial_rows(self, step: StepState, arm: Arm, unread: Mapping[int, int]) -> list[int]:
        """Return the rows of a trial: those with the least text to read, which together takes no longer than a plain
        step, but at least one row.
        """
        rows = sorted(unread, key=lambda row: unread[row])[: SETTINGS.trial_rows]
        reading = list(accumulate(self.costs.reading_ms(arm.key, unread[row]) for row in rows))
        return [row for row, ms in zip(rows, reading, strict=True) if row == rows[0] or ms <= step.times[0]]

    def _step_times(self, step: StepState, arm: Arm, deepest: int) -> Callable[[int, int], float]:
        """Return a function for the time of a step, ms, by the draft depth (0: plain decoding) and the number of rows
        that are drafted for.
        """
        by_depth = [(0, 0.0)]
        for depth in range(1, deepest + 1):
            nodes = min(self._nodes, arm.expected_nodes(depth))
            by_depth.append((nodes, self.costs.draft_ms(arm.key, depth, step.batch, trial=step.pass_trial)))
        times, size_of = step.times, self.costs.shape.size_of_equal_rows
        return lambda depth, rows: times[size_of(rows, by_depth[depth][0])] + by_depth[depth][1]

    def _repays_reading(self, step: StepState, row: Row, reading: float, accepted: float, row_ms: float) -> bool:
        """Return whether reading a row's text repays itself in the rest of the completion.

        The return is what drafting gains beyond the tokens that decoding yields in the same time. While other requests
        wait for their first token, the text of a row that has just started is not read.

        Args:
            reading: ms, once.
            accepted: expected accepted tokens of a draft.
            row_ms: time that drafting adds to a step for this row.
        """
        if step.others_wait and len(row.tokens) - row.prompt_length <= _EARLY_TOKENS:
            return False
        per_ms = step.rate / step.times[0]
        steps = row.tokens_left / max(1.0 + accepted, step.rate)
        return steps * (accepted - per_ms * row_ms) > SETTINGS.reading_payback * per_ms * reading

    # --- after the step -----------------------------------------------------------------------------------------------

    def learn(self, emitted: Sequence[Emitted]) -> None:
        """Learn from what the step committed: `emitted` of all its rows."""
        plan, admission = self._plan, self._admission
        self._plan = self._admission = None
        if plan is None or admission is None:
            return
        step = plan.step
        # The committed text shows for every deterministic node whether it was right, submitted or not.
        for index, ranking in plan.lookups.merged.items():
            self.agreement.learn(step.rows[index].cache_row, ranking, emitted[index].tokens)
        for arm in self.arms:
            if not arm.is_lookup:
                arm.survival.age()
        for offer in plan.offers:
            chosen = plan.rows_of(offer.arm)
            if chosen:
                self._learn_outcomes(plan, admission, offer, chosen, emitted)
        size, trace = self.costs.shape.size(admission.counts), next(emitted[index].trace for index in step.rows)
        ms: float | None = None
        if self.measure and any(count for row, count in enumerate(admission.counts) if row not in step.rows):
            # Other policies drafted in this step, too: its host work is not this policy's alone.
            self.costs.saw_pass(size, step.batch, step.context, trace.verify_ms)
        elif self.measure:
            ms = self._learn_times(plan, size, trace)
        tokens = sum(len(emitted[row].tokens) for row in step.rows) / len(step.rows)
        self._learn_goodput(plan, admission, size, tokens, ms)

    def _learn_goodput(self, plan: StepPlan, admission: Admission, size: int, tokens: float, ms: float | None) -> None:
        """Learn from the tokens of a row and the time of the step, the predicted one if it was not measured."""
        step, accepted, cost = plan.step, plan.accepted_offers(), 1.0
        if size or accepted or plan.lookups.proposals:  # Not a plain step
            if ms is None:
                ms = admission.times[size] + sum(offer.ms for offer in accepted)
            cost = ms / admission.times[0]
        if size and step.pass_trial:
            self._pass_trials[step.batch].wait_after(self.steps, max(0.0, cost - 1))
        elif size:
            self._pass_trials[step.batch].note_drafted(self.steps)
        self._goodput.learn(None, tokens, cost)

    def _learn_outcomes(
        self, plan: StepPlan, admission: Admission, offer: Offer, chosen: Sequence[int], emitted: Sequence[Emitted]
    ) -> None:
        """Learn what became of a drafter's drafts for the rows that it was chosen for."""
        arm, step, shape = self.arms[offer.arm], plan.step, self.costs.shape
        matched = {
            index: arm.confidence.learn(step.rows[index].cache_row, admission.ranked[index], emitted[index].tokens)
            for index in chosen
            if index in admission.ranked
        }
        if arm.drafter.failed:
            arm.drafter.failed = False
            arm.trials.fail(self.steps)
            return
        nodes = shape.nodes(shape.size([admission.counts[index] for index in chosen]), len(chosen))
        before = arm.nodes_by_depth.setdefault(offer.depth, nodes)
        arm.nodes_by_depth[offer.depth] = before + (1 - SETTINGS.quick_memory) * (nodes - before)
        trial_tokens = list[int]()
        for index in chosen:
            row, result = step.rows[index], emitted[index]
            if result.tokens[-1] in row.stop_ids:
                continue
            # A draft that is shorter than it may be counts as rejected at the next depth. Of pruned nodes the committed
            # text says, as far as it goes, whether they would have been accepted.
            allowed = min(offer.depth, arm.max_depth, step.max_depths[index])
            accepted, drafted = len(result.trace.path), min(allowed, result.depth + 1)
            if index in admission.pruned:
                accepted, drafted = matched[index], min(allowed, len(result.tokens))
            arm.survival.record(row.cache_row, accepted=accepted, drafted=drafted)
            if index in offer.trial_rows:
                trial_tokens.append(1 + accepted)
        if not offer.probation:
            arm.trials.note_drafted(self.steps)
        elif trial_tokens:
            reading = self.costs.reading_ms(arm.key, plan.unread_tokens(offer)) / step.times[0]
            spent = (self._row_cost(step, offer, len(chosen)) - 1) * len(chosen) / step.batch + reading
            cost = self._row_cost(step, offer, len(offer.bids))
            tokens = sum(trial_tokens) / len(trial_tokens)
            if arm.trials.record_step(self.steps, tokens=tokens, cost=cost, spent=spent):
                arm.survival.renew()

    def _row_cost(self, step: StepState, offer: Offer, rows: int) -> float:
        """Return the plain steps that each of `rows` rows with a draft costs, if these share what drafting adds."""
        ms = self._step_times(step, self.arms[offer.arm], offer.depth)(offer.depth, rows)
        return 1 + (ms / step.times[0] - 1) * step.batch / rows

    def _learn_times(self, plan: StepPlan, size: int, trace: StepTrace) -> float:
        """Correct the costs by the measured times of the step, and return its time without reading prompts, ms."""
        costs = self.costs
        batch = plan.step.batch
        host = trace.draft_ms + trace.commit_ms
        costs.saw_pass(size, batch, plan.step.context, trace.verify_ms)
        accepted = plan.accepted_offers()
        lookup_ms = sum(proposal.ms for proposal in plan.lookups.proposals)
        if not accepted:
            costs.saw_host(host, batch, lookup_ms=lookup_ms)
        elif len(accepted) == 1:
            unread = plan.unread_tokens(accepted[0])
            key = self.arms[accepted[0].arm].key
            draft_ms = host - costs.host_ms(batch) - costs.lookup_ms(batch, lookup_ms)
            costs.saw_draft(key, accepted[0].depth, batch, draft_ms, unread=unread)
            host -= min(host, costs.reading_ms(key, unread))
        return host + trace.verify_ms


# --- from a configuration ---------------------------------------------------------------------------------------------


def policy_for(
    configs: Sequence[SpeculativeConfig],
    setup: DrafterSetup,
    *,
    nodes: int,
    greedy_with_seed: bool = True,
    costs: PassCost | None = None,
    measure: bool = False,
    chains: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> Policy:
    """Build a policy for these drafters. Raises the ForerunError that keeps a drafter from being built.

    Args:
        configs: of one drafter, or of those to choose among (`arms_of`).
        setup: what drafters are built from.
        nodes: most drafted nodes of a row.
        greedy_with_seed: draft deterministically for requests with a seed (`control.config.greedy_with_seed`).
        costs: known costs, with those of drafters in ``drafts``, if there are any. None: the target's costs from disk,
            else nominal ones; steps correct these.
        measure: let steps correct `costs`, too.
        chains, clock: as `Policy` takes them.
    """
    setup = dataclasses.replace(setup, pass_ms=None)  # The policy itself chooses how much is drafted
    arms = [_arm(config, setup, greedy_with_seed=greedy_with_seed) for config in configs]
    passes = costs if costs is not None else known_or_nominal(setup.target)
    guesses = dict.fromkeys([arm.key for arm in arms], FREE)
    for arm in (arm for arm in arms if not arm.is_lookup):
        # One draft depth reads the drafter's weights once, as a pass reads the target's.
        share = max(_MIN_DEPTH_COST, arm.drafter.memory_bytes() / max(1, setup.target.memory_bytes()))
        guesses[arm.key] = DraftCost(fixed_ms=0.0, level_ms=min(1.0, share) * passes.pass_ms(1))
    shape = PassShape(padded=setup.target.computes_padding)
    step_costs = StepCosts(passes, {**guesses, **getattr(passes, "drafts", {})}, shape)
    return Policy(arms, step_costs, nodes=nodes, measure=measure or costs is None, chains=chains, clock=clock)


def _arm(config: SpeculativeConfig, setup: DrafterSetup, *, greedy_with_seed: bool) -> Arm:
    drafter = Deferred.build(config.method, config.drafter_options, setup, greedy_with_seed=greedy_with_seed)
    built = getattr(drafter.drafter, "config", None)
    shape = getattr(built, "shape", None)
    configured = len(shape) if shape else getattr(built, "num_speculative_tokens", None)
    entry = entry_named(config.method)
    return Arm(
        name=config.method,
        key=config.key,
        drafter=drafter,
        is_lookup=entry.is_lookup,
        max_depth=drafter.depth or configured or _DEFAULT_DEPTH,
        needs_prediction=entry.needs_prediction and getattr(built, "text", None) is None,
    )
