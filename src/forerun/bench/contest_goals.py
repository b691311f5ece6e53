"""The goals of the contest of drafters and of what speculation may cost. Knows no printing."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from forerun.bench.burden import Burden
from forerun.bench.contest import Contest, ContestLine
from forerun.bench.goals import Goal, at_least, at_most

FREE = ("ngram", "suffix", "recycling", "lookahead", "rest")
"""Drafters that need no training and no help from the client."""
COPYING = ("ngram", "suffix")
AUTO = "forerun auto"


def contest_goals(contest: Contest) -> list[Goal]:
    """Copying on edits, the best free method, `auto` beside the best, the host's share, predictions."""
    found = []
    for workload in contest.workloads:
        lines = contest.of(workload)
        if workload.startswith("edit"):
            found += _edit_goals(lines, workload)
        if workload.startswith("complete"):
            best = _fastest(lines, [f"forerun {name}" for name in FREE])
            found.append(at_least(f"training-free / plain, {workload}", 1.5, best.speedup, best.summary.arm))
        found += _auto_goals(lines, workload)
    found += _oracle_goal(contest)
    return [*found, *_host_goals(contest), *_predicted_goals(contest)]


def burden_goals(burdens: Iterable[Burden]) -> list[Goal]:
    """Never slower than plain decoding."""
    found = []
    for one in burdens:
        note = f"mean of {len(one.ratios)} pairs {one.mean:.3f}"
        found.append(at_least(f"{one.drafter} / plain, batch {one.batch}, lower bound", 0.97, one.low, note))
    return found


def _fastest(lines: Iterable[ContestLine], names: Iterable[str]) -> ContestLine:
    chosen = set(names)
    return max((line for line in lines if line.summary.arm in chosen), key=lambda line: line.speedup)


def _edit_goals(lines: list[ContestLine], workload: str) -> list[Goal]:
    best = _fastest(lines, [f"forerun {name}" for name in COPYING])
    found = [at_least(f"copying / plain, {workload}", 3.0, best.speedup, best.summary.arm)]
    theirs = next((line for line in lines if line.summary.arm == "transformers prompt lookup"), None)
    if theirs is not None:
        quotient = best.summary.tokens_per_second / theirs.summary.tokens_per_second
        found.append(at_least(f"copying / transformers prompt lookup, {workload}", 1.3, quotient, best.summary.arm))
    return found


def _auto_goals(lines: list[ContestLine], workload: str) -> list[Goal]:
    """Beside the best single drafter."""
    single = [
        line.summary.arm for line in lines if line.summary.arm.startswith("forerun ") and line.summary.arm != AUTO
    ]
    auto = next((line for line in lines if line.summary.arm == AUTO), None)
    if auto is None or not single:
        return []
    best = _fastest(lines, single)
    note = f"{auto.speedup:.2f} x, best single: {best.summary.arm}, {best.speedup:.2f} x"
    return [at_least(f"auto / best single drafter, {workload}", 0.95, auto.speedup / best.speedup, note)]


def _oracle_goal(contest: Contest) -> list[Goal]:
    """Over all workloads, against whoever took the best drafter of each beforehand."""
    mine, theirs = 0.0, 0.0
    for workload in contest.workloads:
        lines = {line.summary.arm: line for line in contest.of(workload)}
        auto = lines.pop(AUTO, None)
        if auto is None:
            return []
        best = _fastest(lines.values(), [name for name in lines if name.startswith("forerun ")])
        mine += auto.seconds
        theirs += auto.seconds * auto.speedup / best.speedup
    return [at_least("auto / best drafter of each workload, over the mix", 0.97, theirs / mine)] if mine else []


def _host_goals(contest: Contest) -> list[Goal]:
    """Drafting by copy, verification and commit of greedy steps."""
    found = []
    for line in contest.lines:
        greedy = line.workload in ("complete, T = 0", "edit, replayed")
        if greedy and line.host_share is not None and line.summary.arm in [f"forerun {name}" for name in COPYING]:
            found.append(at_most(f"time outside the model, {line.summary.arm}, {line.workload}", 0.03, line.host_share))
    return found


def _predicted_goals(contest: Contest) -> list[Goal]:
    """The planner's figure beside the clock's."""
    errors = [abs(line.predicted / line.speedup - 1) for line in contest.lines if line.predicted is not None]
    if not errors:
        return []
    return [
        at_most("plan's speed-up beside the measured one, median error", 0.10, median(errors), f"{len(errors)} rows")
    ]
