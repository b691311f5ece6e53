"""Times a drafter's real proposals: what a proposal costs whatever its depth, and what each level adds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from forerun.drafters.base import Drafter
from forerun.engine.cost.model import DraftCost
from forerun.engine.cost.trial import Trial, try_drafter
from forerun.errors import ArgumentError
from forerun.target import Target
from forerun.types import SamplingParams

STEPS = 32
"""Steps that are timed by default."""
SECONDS = 8.0


def measure_draft(
    target: Target,
    drafter: Drafter,
    text: Sequence[int],
    *,
    depth: int,
    steps: int = STEPS,
    seconds: float = SECONDS,
) -> DraftCost:
    """Let a drafter continue `text` on a free row, at full depth and at depth 1 in turns, and fit a line.

    What it does when it is shown accepted tokens (its share of the commit) counts, the target's pass does not, and the
    first step, in which it may catch up with the whole text, does not either. One row.

    Args:
        drafter: must know nothing of the target's free rows; what it learns from the text it keeps.
        text: token ids to begin with; a drafter that copies finds nothing in a text without repetition.
        depth: levels of a full draft.
        steps: that are timed.
        seconds: stop after this long.

    Raises:
        ArgumentError: no row is free, or the text does not fit beside the answer.
    """
    if depth < 1 or steps < 4:
        raise ArgumentError(f"a drafter is timed over at least 4 steps of depth 1 or more, got {steps} and {depth}")
    room = min(target.slots, target.max_length) - depth - 2
    if len(text) < 1 or len(text) + 2 > room:
        raise ArgumentError(f"the text to draft from must have between 1 and {room - 2} tokens, got {len(text)}")
    # A step of depth 1 emits at most two tokens, a full one depth + 1: half of the steps are of either kind.
    tokens = min(steps * (depth + 3) // 2 + 2, room - len(text))
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    plain = try_drafter(target, None, [list(text)], _short(params), depths=(0,), seconds=seconds / 4)
    trial = try_drafter(target, drafter, [list(text)], params, depths=(depth, 1), seconds=seconds)
    return fit(trial, besides_ms=median(_beside(plain)))


def fit(trial: Trial, *, besides_ms: float) -> DraftCost:
    """The line through the medians by depth; steps that drafted nothing count where there are no others."""
    times: dict[int, list[float]] = defaultdict(list)
    for done in trial.steps:
        if not done.first:
            times[done.depth].append(max(0.0, done.draft_ms + done.commit_ms - besides_ms))
    if len(times) > 1:
        times.pop(0, None)
    points = [(depth, median(found), len(found)) for depth, found in times.items()]
    if not points:
        raise ArgumentError("the text ended before a drafter could be timed; give a longer one")
    weight = sum(count for *_, count in points)
    mean_depth = sum(depth * count for depth, _, count in points) / weight
    mean_ms = sum(ms * count for _, ms, count in points) / weight
    spread = sum(count * (depth - mean_depth) ** 2 for depth, _, count in points)
    slope = sum(count * (depth - mean_depth) * (ms - mean_ms) for depth, ms, count in points)
    level = min(max(0.0, slope / spread), mean_ms / mean_depth) if spread else 0.0
    return DraftCost(fixed_ms=max(0.0, mean_ms - level * mean_depth), level_ms=level)


def _beside(trial: Trial) -> list[float]:
    """Time of each step but the first that is not the target's pass and its verification, ms."""
    return [done.draft_ms + done.commit_ms for done in trial.steps if not done.first] or [0.0]


def _short(params: SamplingParams) -> SamplingParams:
    """As few tokens as a median needs."""
    return SamplingParams(temperature=0.0, max_tokens=min(params.max_tokens or 1, 12), ignore_eos=True)
