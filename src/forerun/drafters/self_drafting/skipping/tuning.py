"""Finds the set of skipped sub-layers that makes a token cheapest on given prompts: Draft & Verify's search.

Bayesian optimisation of the 2L yes-or-no choices (arXiv 2309.08168) by expected improvement; what is optimised is the
logarithm of the ms per token. Knows what a probe measures, no command line.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from forerun.drafters.self_drafting.skipping.measure import Costs, Probe, Worth, worth
from forerun.drafters.self_drafting.skipping.search import Search, Space
from forerun.drafters.self_drafting.skipping.sublayers import every

ITERATIONS = 60
"""Sets that are tried where neither a number nor a time is asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuned:
    """What a search found."""

    best: Worth
    costs: Costs
    trials: list[Worth]
    """Every set that was tried, in order."""
    seconds: float
    interrupted: bool
    """Ctrl-C ended it; the best so far is kept."""

    @property
    def plain_ms(self) -> float:
        """A token decoded plainly."""
        return self.costs.verify_ms[0]

    @property
    def speedup(self) -> float:
        """Plain ms per token / the best set's, from measured acceptance and measured passes."""
        return self.plain_ms / self.best.ms_per_token


def tune(
    probe: Probe,
    layers: int,
    *,
    iterations: int | None = None,
    budget_s: float | None = None,
    seed: int = 0,
    progress: Callable[[Worth, Worth], None] = lambda _tried, _best: None,
) -> Tuned:
    """Try sets until their number or the time is used up, every set has been tried, or Ctrl-C.

    Args:
        probe: measures a set.
        layers: of the model.
        iterations: sets to try; None: `ITERATIONS`, or as many as fit `budget_s`.
        budget_s: seconds; a set that was begun is finished.
        seed: of the search.
        progress: told the set just tried and the best one after each trial.

    Raises:
        KeyboardInterrupt: Ctrl-C before the first set was measured.
    """
    start = time.perf_counter()
    most = math.inf if iterations is None and budget_s is not None else iterations or ITERATIONS
    search, trials, interrupted = Search(Space(allowed=every(layers)), seed=seed), list[Worth](), False
    costs = probe.costs()
    try:
        while len(trials) < most and (budget_s is None or not trials or time.perf_counter() - start < budget_s):
            skip = search.ask()
            if skip is None:
                break
            found = worth(skip, probe.accepted(skip), costs, layers)
            search.tell(skip, -math.log(found.ms_per_token))
            trials.append(found)
            progress(found, _cheapest(trials))
    except KeyboardInterrupt:
        if not trials:
            raise
        interrupted = True
    return Tuned(
        best=_cheapest(trials),
        costs=costs,
        trials=trials,
        seconds=time.perf_counter() - start,
        interrupted=interrupted,
    )


def _cheapest(trials: list[Worth]) -> Worth:
    return min(trials, key=lambda trial: trial.ms_per_token)
