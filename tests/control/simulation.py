"""A world without models: drafters of known acceptance, passes of known cost, steps that only count.

The text is fixed in advance. A drafter that copies proposes it with errors; one that costs a pass is right by its own
coin. Time is added up from the world's costs, so nothing here depends on a clock.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from forerun.control.choice import Arm
from forerun.control.config import MAX_SPECULATIVE_TOKENS
from forerun.control.costs import READING, DraftCost, PassShape, StepCosts
from forerun.control.policy import Policy
from forerun.core.tree import TokenTree
from forerun.decode.drafter import DraftContext, Drafter, DrafterSetup
from forerun.decode.row import Row
from forerun.decode.step import Emitted, Group, context_for
from forerun.drafters.guarded import Deferred
from forerun.types import Budget, Drawn, Source, StepTrace

VOCABULARY = 16
UNIFORM = torch.full((VOCABULARY,), 1 / VOCABULARY)
LEVEL = DraftCost(fixed_ms=0.0, level_ms=0.1)
Alpha = Callable[[int, int], float]
"""(step, row) -> probability that a drafted token survives if its parent does."""


def truth(place: int) -> int:
    """The text: token of each place."""
    return 7 * place % VOCABULARY


@dataclass(frozen=True)
class Passes:
    """A pass over n nodes per row costs ``1 + slope * (rows * nodes - 1)`` ms."""

    slope: float = 0.03

    def pass_ms(self, nodes: float, rows: int = 1, context: int = 0) -> float:
        return 1.0 + self.slope * (rows * nodes - 1)


class Simulated(Drafter):
    """Proposes the text; each token is wrong with probability ``1 - alpha``."""

    name = "simulated"

    def __init__(self, alpha: Alpha, seed: int, *, drawn: Drawn, fails_at: int | None = None) -> None:
        self.alpha, self.random, self.drawn, self.fails_at = alpha, random.Random(seed), drawn, fails_at
        self.step = 0
        self.proposals = 0
        self.shown: dict[int, int] = {}
        self.read = 0
        """Tokens that it was shown in pieces too large to be caught up with in passing."""
        self.asked = 0
        """Rows that it was asked to draft for, step by step."""

    def extend(self, context: DraftContext) -> None:
        for row, tokens, fresh in zip(context.rows, context.tokens, context.fresh, strict=True):
            assert self.shown.get(row, 0) == len(tokens) - fresh, "tokens were left out or shown twice"
            self.shown[row] = len(tokens)
            self.read += fresh if fresh >= READING else 0

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        self.proposals += 1
        if self.fails_at is not None and self.step >= self.fails_at:
            raise RuntimeError("simulated failure")
        trees, budgets = context.trees(), zip(budget.nodes, budget.depth, strict=True)
        for row, tokens, tree, (nodes, depth) in zip(context.rows, context.tokens, trees, budgets, strict=True):
            parent, alpha = 0, self.alpha(self.step, row)
            self.asked += 1
            if nodes and depth:
                assert self.shown[row] == len(tokens), "asked before it was shown the text"
            for place in range(min(nodes, depth)):
                right = self.random.random() < alpha
                token = truth(len(tokens) + place) if right else (truth(len(tokens) + place) + 1) % VOCABULARY
                if self.drawn is not Drawn.DETERMINISTIC:
                    tree.set_probs(parent, UNIFORM)
                parent = tree.add(token, parent, drawn=self.drawn, confidence=alpha)
        return trees

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        for row in rows:
            self.shown.pop(row, None)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A drafter of the world."""

    name: str
    alpha: float | Alpha
    cost: DraftCost = LEVEL
    copies: bool = False
    limit: int = 12
    assumed: DraftCost | None = None
    """What the policy is told that it costs; None tells the truth."""
    fails_at: int | None = None
    reading_ms: float = 0.0
    """Of each token of a text that it has not been shown."""
    lookup_ms: float = 0.0
    """Of each row that it is asked for, as the policy's clock sees it."""


@dataclass
class Steps:
    """What happened."""

    names: list[list[str | None]] = field(default_factory=list)
    """By step and row: who drafted."""
    depths: list[list[int]] = field(default_factory=list)
    """By step and row: tokens drafted."""
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def rate(self, start: int = 0, stop: int | None = None) -> float:
        """Tokens per ms."""
        return sum(self.tokens[start:stop]) / sum(self.times[start:stop])


class World:
    """Rows that are decoded by a policy."""

    def __init__(
        self,
        *specs: Spec,
        rows: int = 1,
        passes: Any = Passes(),
        assumed: Any = None,
        measure: bool = False,
        seed: int = 0,
        shape: PassShape = PassShape(),  # noqa: B008
    ) -> None:
        self.specs, self.passes = specs, passes
        self.drafters = [
            Simulated(
                spec.alpha if callable(spec.alpha) else (lambda step, row, alpha=spec.alpha: alpha),
                seed + index,
                drawn=Drawn.DETERMINISTIC if spec.copies else Drawn.IID,
                fails_at=spec.fails_at,
            )
            for index, spec in enumerate(specs)
        ]
        target = SimpleNamespace(vocab_size=VOCABULARY)
        setup = DrafterSetup(target=target, tokenizer=None, rows=rows, slots=10**9)
        self._failures = setup.failures
        arms = [
            Arm(
                name=spec.name,
                key=spec.name,
                drafter=Deferred(drafter, spec.name, setup),
                is_lookup=spec.copies,
                max_depth=spec.limit,
            )
            for spec, drafter in zip(specs, self.drafters, strict=True)
        ]
        costs = StepCosts(assumed or passes, {spec.name: spec.assumed or spec.cost for spec in specs}, shape)
        self.policy = Policy(arms, costs, nodes=64, measure=measure, clock=lambda: 1e-3 * self._lookup_ms())
        self.rows = [self.row(index) for index in range(rows)]
        self.steps = Steps()
        self.count = 0
        self.others_wait = False
        """Whether others wait for their first token."""
        self._show(self.rows)

    def row(self, index: int, prompt: int = 5, room: int = 10**9) -> Row:
        """A new row with a prompt."""
        return Row(
            cache_row=index,
            tokens=[truth(place) for place in range(prompt)],
            prompt_length=prompt,
            sampler=None,
            seed=0,
            stop_ids=frozenset(),
            tokens_left=room,
        )

    def renew(self, index: int, prompt: int = 5, room: int = 10**9) -> None:
        """The row's answer ends and another begins in its place."""
        self.policy.forget([index], [0])
        self.rows[index] = self.row(index, prompt, room)
        self._show([self.rows[index]])

    def run(self, steps: int) -> Steps:
        """Decode so many steps."""
        for _ in range(steps):
            self._step()
        return self.steps

    def _show(self, rows: Sequence[Row]) -> None:
        for arm in self.policy.arms:
            arm.drafter.extend(context_for(rows, range(len(rows)), [len(row.tokens) for row in rows], {}))

    def _step(self) -> None:
        for drafter in self.drafters:
            drafter.step = self.count
        members = list(range(len(self.rows)))
        asked = -self._lookup_ms()
        groups = self.policy.plan(
            self.rows, members, [MAX_SPECULATIVE_TOKENS] * len(members), others_wait=self.others_wait
        )
        asked += self._lookup_ms()
        trees, spent = [TokenTree(row.tokens[-1]) for row in self.rows], asked - self._reading()
        for group in groups:
            spec = next(spec for spec in self.specs if spec.name == group.name)
            if group.members:
                for index, tree in zip(group.members, self._propose(group), strict=True):
                    trees[index] = tree
                spent += 0.0 if spec.copies else spec.cost.ms(max(group.depths))
        spent += sum(spec.cost.ms(1) for spec in self.specs if spec.copies) + self._reading()
        trees = self.policy.admit(trees)
        shape, counts = self.policy.costs.shape, [tree.size for tree in trees]
        nodes = shape.nodes(shape.size(counts), len(members))
        verify = self.passes.pass_ms(1 + nodes, len(members))
        emitted = [self._emit(index, trees[index], spent, verify) for index in members]
        self._teach(groups, emitted)
        self.policy.learn(emitted)
        for row in self.rows:
            row.drafter_errors += self._failures.pop(row.cache_row, 0)
        names = {index: group.name for group in groups for index in group.members}
        self.steps.names.append([names.get(index) for index in members])
        self.steps.depths.append(counts)
        self.steps.times.append(spent + verify)
        self.steps.tokens.append(sum(len(one.tokens) for one in emitted))
        self.count += 1

    def _reading(self) -> float:
        """What reading has taken so far, ms."""
        return sum(spec.reading_ms * drafter.read for spec, drafter in zip(self.specs, self.drafters, strict=True))

    def _lookup_ms(self) -> float:
        """What asking has taken so far, ms."""
        return sum(spec.lookup_ms * drafter.asked for spec, drafter in zip(self.specs, self.drafters, strict=True))

    def _propose(self, group: Group) -> Sequence[TokenTree]:
        if group.trees is not None:
            return group.trees
        budget = Budget(nodes=[group.nodes] * len(group.members), depth=group.depths)
        return group.drafter.propose(context_for(self.rows, group.members, [0] * len(group.members), {}), budget)

    def _emit(self, index: int, tree: TokenTree, spent: float, verify: float) -> Emitted:
        row, count, drafted, accepted = self.rows[index], tree.size, tree.tokens[1:], 0
        while accepted < count and drafted[accepted] == truth(len(row.tokens) + accepted):
            accepted += 1
        tokens = [truth(len(row.tokens) + place) for place in range(accepted + 1)]
        row.commit(tokens)
        row.tokens_left -= len(tokens)
        trace = StepTrace(
            step=self.count,
            position=0,
            drafter=None,
            rule="",
            nodes=(),
            path=tuple(range(1, accepted + 1)),
            next_token=tokens[-1],
            kind=Source.TARGET,
            draft_ms=spent,
            verify_ms=verify,
            commit_ms=0.0,
        )
        return Emitted(tokens=tokens, sources=[], drafted=count, depth=count, logprobs=None, trace=trace)

    def _teach(self, groups: Sequence[Group], emitted: Sequence[Emitted]) -> None:
        for group in groups:
            everyone = sorted((*group.members, *group.listeners))
            group.drafter.extend(context_for(self.rows, everyone, [len(emitted[i].tokens) for i in everyone], {}))


def optimum(alpha: float, cost: DraftCost, passes: Any, *, rows: int = 1, limit: int = 12) -> tuple[int, float]:
    """Best depth of a chain (0: plain) and its tokens per ms, by Leviathan's formula with the true costs."""
    rates = [rate_at(alpha, cost, passes, depth, rows=rows) for depth in range(limit + 1)]
    return max(range(limit + 1), key=rates.__getitem__), max(rates)


def rate_at(alpha: float, cost: DraftCost, passes: Any, depth: int, *, rows: int = 1) -> float:
    """Tokens per ms of a chain of that depth."""
    expected = sum(alpha**level for level in range(depth + 1))
    return rows * expected / (passes.pass_ms(depth + 1, rows) + (cost.ms(depth) if depth else 0.0))
