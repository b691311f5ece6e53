"""Trees of deterministic nodes, ranked by how likely each path survives; merged, and pruned.
Sampled nodes are refused.

What a drafter's own confidence in such a node is worth is learned from which nodes the text went on with, submitted or
not.

The exploration schedule: when something that is off, or was not seen for long, is tried again.
Sees counts and ratios; no draft, no clock.

One schedule, `TrialSchedule`: after `interval` steps, twice as many after each failure up to a limit, and more where a
trial is dear; a few rows are tried for all. What is on is doubted, too: estimates fade (`Survival`), and what little
stands behind a figure is added to it (`optimism`). Nothing here depends on the value of a draft that is not drawn yet.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from forerun.control.settings import SETTINGS
from forerun.core.acceptance import Acceptance, compare_draft
from forerun.core.tree import TokenTree

Estimate = Callable[[int, float], float]
"""Maps who proposed a node, as bits, and the stated confidence to the probability that it survives
its parent.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranking:
    """The nodes of a tree with their expected gain. All are deterministic: nothing else may be
    pruned.
    """

    tree: TokenTree  # Its confidences are those that were stated
    survival: tuple[float, ...]  # Entry k: probability that the whole path to node k survives; 1 for the root
    holders: tuple[int, ...]  # (N,) who proposed each node, as bits
    order: tuple[int, ...]  # Node ids by falling survival; parents come before their children
    worth: tuple[float, ...]  # Entry n: expected number of accepted tokens if the first n of `order` are submitted

    @classmethod
    def of(cls, tree: TokenTree, estimate: Estimate, holders: Sequence[int] | None = None) -> Ranking:
        """Rank a tree; without `holders` its nodes have no proposer (bits 0). Asserts that the tree
        holds no sampled node, whose fate may not depend on its value, no probe, and no nodes that
        have already run.
        """
        assert tree.prunable, "only deterministic nodes may be pruned after they were drawn"
        bits, survival = holders or [0] * (tree.size + 1), [1.0]
        for node in range(1, tree.size + 1):
            survival.append(survival[tree.parents[node]] * estimate(bits[node], tree.confidence[node]))
        order, left, total, worth = _by_survival(survival), survival[:], 0.0, [0.0]
        for node in order:  # siblings exclude each other: together they cannot survive more often than their parent
            parent = tree.parents[node]
            gain = min(survival[node], left[parent])
            left[parent] -= gain
            total += gain
            worth.append(total)
        return cls(tree=tree, survival=tuple(survival), holders=tuple(bits), order=tuple(order), worth=tuple(worth))

    @classmethod
    def merge(cls, found: Mapping[int, TokenTree], most: int, estimate: Estimate, *, chain: bool = False) -> Ranking:
        """Merge trees of one row, by who proposed them, into one of at most `most` nodes, or its
        best path (`chain`). Asserts as `of` does. The surest of those that hold a path says how
        likely it is, and `estimate` what that is worth: the surest of several is too sure, above
        all where the others hold something else or nothing.
        """
        joined, survival, holders = _join(found)
        best = list(joined.best_path()[:most]) if chain else sorted(_by_survival(survival)[:most])
        kept = joined.only(best) if len(best) < joined.size else joined
        return cls.of(kept.seal(), estimate, [0, *(holders[node] for node in best)])

    def held(self, who: int, nodes: int) -> float:
        """Return how much of the gain of its `nodes` best nodes one of the proposers holds."""
        return sum(self.survival[node] for node in self.order[:nodes] if self.holders[node] >> who & 1)


def _join(found: Mapping[int, TokenTree]) -> tuple[TokenTree, list[float], list[int]]:
    """Join trees: returns the tree, the survival of each node, and who proposed it."""
    assert all(tree.prunable for tree in found.values()), "only deterministic nodes may be merged"
    if len(found) == 1:
        [(who, tree)] = found.items()
        return tree, tree.survival(), [0, *[1 << who] * tree.size]
    root = next(iter(found.values())).tokens[0]
    tokens, parents, survival, holders, there = [root], [-1], [1.0], [0], dict[tuple[int, int], int]()
    for who, tree in found.items():
        ids, alive = [0], tree.survival()
        for node in range(1, tree.size + 1):
            place = ids[tree.parents[node]], tree.tokens[node]
            twin = there.setdefault(place, len(tokens))
            if twin == len(tokens):
                tokens.append(place[1])
                parents.append(place[0])
                survival.append(0.0)
                holders.append(0)
            ids.append(twin)
            survival[twin] = max(survival[twin], alive[node])
            holders[twin] |= 1 << who
    above = [survival[parent] for parent in parents[1:]]
    sure = [own / whole if whole > 0 else 0.0 for own, whole in zip(survival[1:], above, strict=True)]
    return TokenTree.of(root, tokens[1:], parents[1:], sure), survival, holders


def _by_survival(survival: Sequence[float]) -> list[int]:
    """Return node ids, the likeliest first; of equals the one that came first, so parents precede
    their children.
    """
    return sorted(range(1, len(survival)), key=lambda node: (-survival[node], node))


class Confidence:
    """Calibrates stated confidences: the share of nodes with such a confidence that survived, over
    all rows and of one row.

    Of deterministic nodes only, whose would-be acceptance follows from the committed text whether or not they were
    submitted. Nodes may be of kinds that are learned apart, such as who proposed them.
    """

    def __init__(self) -> None:
        self._shared = Acceptance(weight=SETTINGS.weight, memory=SETTINGS.node_memory)
        self._rows: dict[int, Acceptance] = {}

    def of(self, row: int) -> Estimate:
        """Return the estimate for a row's nodes: below 1, for longer paths must be less likely."""
        shared, own = self._shared, self._rows.get(row)

        def estimate(holders: int, stated: float) -> float:
            key = holders, min(int(10 * stated), 9)
            common = shared.estimate(key, stated)
            return min(0.999, common if own is None else own.estimate(key, common))

        return estimate

    def learn(self, row: int, ranking: Ranking, committed: Sequence[int]) -> int:
        """Compare a tree with what followed the root, and return how many of these tokens it held."""
        own = self._rows.get(row)
        if own is None:
            own = self._rows[row] = Acceptance(weight=SETTINGS.weight, memory=SETTINGS.row_node_memory)
        tree, deepest = ranking.tree, 0
        for node, right in compare_draft(tree.tokens, tree.parents, committed):
            key = ranking.holders[node], min(int(10 * tree.confidence[node]), 9)
            self._shared.learn(key, right)
            own.learn(key, right)
            if right:
                deepest = max(deepest, tree.depths[node])
        return deepest

    def forget(self, row: int) -> None:
        """Forget a row that is free."""
        self._rows.pop(row, None)


class TrialSchedule:
    """The schedule of trials of one drafter; `first` is the step of the first one."""

    def __init__(self, first: int) -> None:
        self._due, self._wait = first, 1

    def due(self, step: int) -> bool:
        """Return whether it may be tried in this step."""
        return step >= self._due

    def wait_after(self, step: int, spent: float = 0.0) -> None:
        """Schedule the next trial after one that ended, which took `spent` plain steps."""
        self._due = step + self._wait * max(SETTINGS.interval, round(spent / SETTINGS.trial_share))
        self._wait = min(SETTINGS.longest, 2 * self._wait)


def few(members: Sequence[int]) -> Sequence[int]:
    """Return some of many rows that represent all of them in a trial."""
    return members[:: -(-len(members) // SETTINGS.trial_rows)] if members else members


class PassTrials(TrialSchedule):
    """The schedule, by the number of rows, for checking whether passes with nodes are still as
    expensive as when they were last seen: what else ran on the machine then may have ended, and
    what is not drafted is not seen.
    """

    def __init__(self) -> None:
        super().__init__(first=SETTINGS.interval)
        self._ended = math.inf  # When drafting has ended, if no step from now on drafts

    def due(self, step: int) -> bool:
        return super().due(step) or step >= self._ended

    def drafted(self, step: int) -> None:
        """Note that nodes were scored because that pays."""
        self._ended = step + SETTINGS.interval

    def wait_after(self, step: int, spent: float = 0.0) -> None:
        super().wait_after(step, spent)
        self._ended = math.inf


class ModelTrials(TrialSchedule):
    """The schedule for trying a drafter with a forward pass although its figures speak against it,
    for a few rows: all learn from these, for the figures of a row start from what all rows showed
    (`Survival`).
    """

    def __init__(self) -> None:
        super().__init__(first=SETTINGS.interval)
        self._steps, self._tokens, self._cost, self._spent = 0, 0.0, 0.0, 0.0  # Figures of the current trial
        self.off = False  # It raised: it drafts on trial alone until a trial passes

    @property
    def begun(self) -> bool:
        """True while a trial goes on."""
        return self._steps > 0

    def drafted(self, step: int) -> None:
        """Note that it drafted because its figures are good."""
        self._due, self._wait = max(self._due, step + SETTINGS.interval), 1

    def tried(self, step: int, *, tokens: float, cost: float, spent: float) -> bool:
        """Record a step of a trial, which added `spent` plain steps; returns whether the trial has
        passed with it. A row that was tried had `tokens`, and would answer for `cost` plain steps
        if all rows were drafted for.
        """
        self._steps, self._spent = self._steps + 1, self._spent + spent
        self._tokens, self._cost = self._tokens + tokens, self._cost + cost
        good = self._tokens >= SETTINGS.pays * self._cost
        if self._steps < SETTINGS.trial_steps[good]:
            return False
        self._end(step)
        self.off = self.off and not good
        return good

    def fail(self, step: int) -> None:
        """Note that the drafter raised."""
        self.off = True
        self._end(step)

    def _end(self, step: int) -> None:
        self.wait_after(step, self._spent)
        self._steps, self._tokens, self._cost, self._spent = 0, 0.0, 0.0, 0.0


class LookupTrials(TrialSchedule):
    """The schedule for asking a drafter that copies: always if that is cheap or repays itself, else
    on trial, for a few rows.
    """

    def __init__(self) -> None:
        super().__init__(first=0)
        self._seen = deque[tuple[float, float]](maxlen=SETTINGS.off_after)
        """Pairs (ms added, ms saved) of the latest steps that it was asked in."""
        self._needed = SETTINGS.off_after

    def of(self, members: Sequence[int]) -> Sequence[int]:
        """Return the members to ask it for: in a trial a few represent all."""
        trying = self._needed == SETTINGS.lookup_steps and len(self._seen) <= self._needed
        return few(members) if trying else members

    def looked_up(self, step: int, *, ms: float, gain_ms: float) -> None:
        """Record that it was asked, which added `ms` to the step; what it drafts is expected to
        save `gain_ms` of decoding.
        """
        self._seen.append((ms, gain_ms))
        if len(self._seen) == SETTINGS.off_after:
            self._due, self._wait = step, 1

    def loss_ms(self, plain_ms: float) -> float:
        """Return what asking takes beyond what it saves, a step; 0 if it is cheap, repays itself or
        is too new to tell.
        """
        if len(self._seen) < self._needed:
            return 0.0
        cost = median([ms for ms, _ in self._seen])
        gain = sum([gain for _, gain in self._seen]) / len(self._seen)
        return max(0.0, cost - gain) if cost > SETTINGS.cheap * plain_ms else 0.0


def settle(asked: Sequence[tuple[LookupTrials, float, float]], step: int, *, gain_ms: float, plain_ms: float) -> None:
    """Put off the drafter that loses most by being asked; the others are looked at again: they may
    have drafted the same. `asked` holds the trials of each drafter, what asking it added to the
    step (ms, for all rows), and the tokens that its nodes alone would bring: what all save
    together, `gain_ms`, is shared by these.
    """
    tokens = sum(own for *_, own in asked)
    for trials, ms, own in asked:
        trials.looked_up(step, ms=ms, gain_ms=gain_ms * own / tokens if tokens > 0 else 0.0)
    losses = [trials.loss_ms(plain_ms) for trials, *_ in asked]
    if max(losses, default=0.0) > 0.0:
        worst = asked[losses.index(max(losses))][0]
        worst.wait_after(step)
        worst._needed = SETTINGS.lookup_steps
        for trials, *_ in asked:
            trials._seen.clear()


class Survival:
    """Acceptance by depth of one drafter: a row starts from what all rows showed and departs from
    it as it learns. What was not seen for long fades, and so does its `evidence`: it is tried
    again, also while something else pays.
    """

    def __init__(self) -> None:
        self._long, self._shared = Acceptance(weight=SETTINGS.weight), Acceptance(weight=SETTINGS.weight)
        self._rows: dict[int, Acceptance] = {}
        self._all: list[float] = []
        """Estimates of all rows together for no depth, depth 1, ..., as far as computed since they
        last learned.
        """

    def record(self, row: int, *, accepted: int, drafted: int) -> None:
        """Count a step whose path of `drafted` tokens was accepted up to `accepted`; what lies
        behind is unseen.
        """
        own = self._rows.setdefault(row, Acceptance(weight=SETTINGS.weight, memory=SETTINGS.row_memory))
        self._all.clear()
        for depth in range(min(accepted + 1, drafted)):
            self._shared.learn(depth, depth < accepted)
            own.learn(depth, depth < accepted)

    def age(self) -> None:
        """Fade what was seen: a step has passed, whoever drafted in it."""
        lost = 1 - SETTINGS.shared_memory
        self._all.clear()
        right, tried = self._shared.counts(0)
        self._long.fade(SETTINGS.long_memory)
        self._long.learn(0, lost * right, lost * tried)
        self._shared.fade(SETTINGS.shared_memory)
        for own in self._rows.values():
            own.fade(SETTINGS.idle_memory)

    def curve(self, row: int | None, depth: int) -> list[float]:
        """Return the probability that depth 1, 2, ... `depth` survives; of all rows together if
        `row` is None or new.
        """
        own, all_rows = self._rows.get(row) if row is not None else None, self._all
        if not all_rows:
            all_rows.append(self._long.estimate(0, SETTINGS.first_guess))
        while len(all_rows) <= depth:
            all_rows.append(self._shared.estimate(len(all_rows) - 1, all_rows[-1]))
        mine, alive, found = all_rows[0], 1.0, list[float]()
        for level in range(depth):
            expected = min(0.995, max(0.005, all_rows[level + 1] + SETTINGS.carried * (mine - all_rows[level])))
            mine = expected if own is None else own.estimate(level, expected)
            alive *= mine
            found.append(alive)
        return found

    def evidence(self, row: int) -> float:
        """Return the steps that support a row's curve; those of other rows count up to a limit."""
        own = self._rows[row].counts(0)[1] if row in self._rows else 0.0
        return 1.0 + own + min(SETTINGS.shared_evidence, self._shared.counts(0)[1])

    def renew(self) -> None:
        """Fade what was seen before a trial that passed, for it tells little."""
        self._all.clear()
        for known in (self._long, self._shared, *self._rows.values()):
            known.fade(0.25)

    def forget(self, row: int) -> None:
        """Forget a row that is free."""
        self._rows.pop(row, None)


def optimism(curve: Sequence[float], evidence: float, steps: int) -> float:
    """Return the tokens to add to an expectation for its uncertainty: an upper confidence bound
    (arXiv 2505.15141) from the probability that depth 1, 2, ... survives, the steps that support
    it, and the steps so far of all drafters.
    """
    mean = sum(curve)
    square = sum((2 * depth - 1) * alive for depth, alive in enumerate(curve, start=1))
    deviation = math.sqrt(max(0.05, square - mean * mean))
    return SETTINGS.exploration * deviation * math.sqrt(math.log(2.0 + steps) / evidence)
