"""Runs the arms against each other, interleaved, and sums up what each did. Knows no goals and no output format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median

from benchmarks.suite.arms import Arm, Run
from benchmarks.suite.workloads import Setting, loops

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmSummary:
    """One arm under one setting, over all prompts and seeds."""

    arm: str
    tokens_per_second: float
    """Decoding alone: all tokens over all time."""
    median_tokens_per_second: float
    """Over the runs."""
    first_token_ms: float
    """Median time to first token, ms."""
    looping: float
    """Share of the answers whose end repeats itself."""
    tokens_per_pass: float | None = None
    """Tokens per pass of the target; None where the arm does not tell."""
    draft_ms: float | None = None
    """Mean time per step for drafting, ms."""
    verify_ms: float | None = None
    """Mean time per step for the target's pass and the verdict, ms."""
    predicted_speedup: float | None = None
    """What these times promise: tokens per pass x time of a plain pass / (draft + verify)."""
    realised_share: float | None = None
    """Measured speed-up over `predicted_speedup`."""


def measure(arms: Sequence[Arm], prompts: Sequence[Sequence[int]], setting: Setting, progress: Progress) -> list[Run]:
    """Every arm answers every prompt under every seed, warmed up; they take turns, in another order each time."""
    warm_up(arms, prompts, setting, progress)
    return take_turns(arms, prompts, setting, progress)


def take_turns(
    arms: Sequence[Arm], prompts: Sequence[Sequence[int]], setting: Setting, progress: Progress
) -> list[Run]:
    """`measure` without warming up."""
    runs: list[Run] = []
    for seed in setting.seeds:
        for index, prompt in enumerate(prompts):
            turn = (index + seed) % len(arms)
            for arm in (*arms[turn:], *arms[:turn]):
                progress(f"{setting.label}, prompt {index + 1} of {len(prompts)}, seed {seed}: {arm.name}")
                runs.append(arm.run(index, prompt, setting, seed))
    return runs


def warm_up(arms: Sequence[Arm], prompts: Sequence[Sequence[int]], setting: Setting, progress: Progress) -> None:
    """A short answer by every arm, not counted."""
    for arm in arms:
        progress(f"{setting.label}: warming up {arm.name}")
        arm.run(0, prompts[0], replace(setting, new_tokens=12), setting.seeds[0])


def summarise(runs: Sequence[Run], order: Sequence[str], plain: str = "forerun plain") -> list[ArmSummary]:
    """One line per arm, in that order; `plain` is the arm that speed-ups are measured against."""
    groups = {name: [run for run in runs if run.arm == name] for name in order}
    base = _rate(groups[plain]) if plain in groups else None
    base_pass = mean(_verify_times(groups[plain])) if plain in groups else None
    return [_summary(name, group, base, base_pass) for name, group in groups.items()]


def _summary(name: str, runs: Sequence[Run], base: float | None, base_pass: float | None) -> ArmSummary:
    rate = _rate(runs)
    line = ArmSummary(
        arm=name,
        tokens_per_second=rate,
        median_tokens_per_second=median(run.decode_tokens / run.decode_s for run in runs),
        first_token_ms=1e3 * median(run.first_s for run in runs),
        looping=mean(loops(run.tokens) for run in runs),
    )
    steps = [step for run in runs for step in run.trace]
    if not steps:
        return line
    per_pass = sum(run.decode_tokens for run in runs) / len(steps)
    draft, verify = mean(step.draft_ms for step in steps), mean(step.verify_ms for step in steps)
    line = replace(line, tokens_per_pass=per_pass, draft_ms=draft, verify_ms=verify)
    if base is None or base_pass is None or any(step.drafter for step in steps) is False:
        return line
    predicted = per_pass * base_pass / (draft + verify)
    return replace(line, predicted_speedup=predicted, realised_share=rate / base / predicted)


def _rate(runs: Sequence[Run]) -> float:
    return sum(run.decode_tokens for run in runs) / sum(run.decode_s for run in runs)


def _verify_times(runs: Sequence[Run]) -> list[float]:
    return [step.verify_ms for run in runs for step in run.trace]
