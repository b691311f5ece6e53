"""Something else runs on the machine for a while: the policy drafts again when it has ended, and little is lost by
trying where drafts do not pay."""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from control.simulation import Spec, World
from forerun.control.costs import DraftCost, Nominal
from selection import one_in

BEGINS, ENDS = 100, 200
"""Passes between which something else runs."""
COPY = Spec(name="c", alpha=0.85, cost=DraftCost(fixed_ms=0.02, level_ms=0.0), copies=True, limit=16)


@dataclass
class Disturbed:
    """A pass takes longer, by what `times` says of its nodes, while something else runs."""

    times: Callable[[float, random.Random], float] = lambda nodes, chance: 1.0
    slope: float = 0.2  # Plain passes that a node costs
    chance: random.Random = field(default_factory=lambda: random.Random(1))
    passes: int = 0

    def pass_ms(self, nodes: float, rows: int = 1, context: int = 0) -> float:
        self.passes += 1
        return 30.0 * (1 + self.slope * (rows * nodes - 1)) * self.now(nodes)

    def now(self, nodes: float) -> float:
        """Times over what it takes otherwise."""
        return self.times(nodes, self.chance) if BEGINS < self.passes <= ENDS else 1.0


@dataclass(frozen=True, kw_only=True)
class DisturbedDraft(DraftCost):
    """A drafter's forward passes on the same machine."""

    machine: Disturbed

    def ms(self, depth: float) -> float:
        return super().ms(depth) * self.machine.now(1 + depth)


DISTURBANCES: dict[str, Callable[[float, random.Random], float]] = {
    "nodes": lambda nodes, chance: 8.0 if nodes > 1 else 1.0,
    "large passes": lambda nodes, chance: 8.0 if nodes > 4 else 1.0,
    "all": lambda nodes, chance: 8.0,
    "erratic": lambda nodes, chance: chance.lognormvariate(1.5, 1.0),
}


CASES = list(itertools.product([False, True], [1, 4], DISTURBANCES))


@pytest.mark.parametrize(("model", "rows", "name"), one_in(5, CASES))
def test_when_it_has_ended_as_much_is_drafted_as_before(model: bool, rows: int, name: str) -> None:
    rates = []
    for times in (Disturbed.times, DISTURBANCES[name]):
        machine = Disturbed(times=times)
        true = DraftCost(fixed_ms=0.0, level_ms=2.0)
        draft = DisturbedDraft(fixed_ms=0.0, level_ms=2.0, machine=machine)
        head = Spec(name="m", alpha=0.85, cost=draft, assumed=true)
        steps = World(head if model else COPY, rows=rows, passes=machine, assumed=Nominal(), measure=True).run(1200)
        rates.append(steps.rate(800))
    assert rates[1] > 0.9 * rates[0]


@pytest.mark.parametrize(("nodes", "rows"), [(3.0, 4), (6.0, 1)])
def test_little_is_lost_by_trying_where_passes_with_nodes_are_dear(nodes: float, rows: int) -> None:
    """And stay so: nothing that can be accepted repays them."""
    copy = Spec(name="c", alpha=0.5, cost=DraftCost(fixed_ms=0.02, level_ms=0.0), copies=True, limit=16)
    dear = Disturbed(slope=0.0)
    dear.now = lambda count: nodes if count > 1 else 1.0
    steps = World(copy, rows=rows, passes=dear, assumed=Nominal(), measure=True).run(2000)
    plain = rows / 30.02
    assert steps.rate(200) > 0.985 * plain
    assert sum(any(depths) for depths in steps.depths[200:]) >= 2


@pytest.mark.parametrize("model", [False, True])
def test_a_first_measurement_in_a_bad_moment_is_corrected(model: bool) -> None:
    """It said that a node costs twelve plain passes, which nothing would have tried again."""
    machine, draft = Disturbed(), DraftCost(fixed_ms=0.0, level_ms=2.0)
    spec = Spec(name="m", alpha=0.85, cost=draft) if model else COPY
    rates = [
        World(spec, passes=machine, assumed=Nominal(slope), measure=True).run(1200).rate(800) for slope in (0.2, 12.0)
    ]
    assert rates[1] > 0.9 * rates[0]
