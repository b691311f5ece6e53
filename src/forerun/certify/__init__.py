"""Tests of losslessness for users: of their own model through the engine's public API, or of a server.

A plan says how much is checked, and a report what was found, whether an engine was examined or a server. They need no
torch, so that the command has them before a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class CertifyPlan:
    """A plan says how much to check."""

    prompts: int = 6  # Prompts for the greedy and the log-probability check
    prompt_tokens: int = 192  # First tokens of each
    max_tokens: int = 96  # Tokens of each greedy completion
    detect: float = 0.2  # Total variation that each chi-square test detects; decides how many completions are drawn
    power: float = 0.99  # Probability of detecting it
    sample_tokens: int = 5  # Tokens of each sampled completion: the first has no draft, the next ones up to depth 3
    sample_prompt_tokens: int = 24
    temperatures: tuple[float, ...] = (0.0, 0.7)  # 0: greedy checks; above: chi-square tests; 1 hides orders
    family_error: float = 1e-6
    """Probability that any chi-square test of this run fails although speculation is lossless."""
    ways: int | None = None  # Ways to sample that are tested; None: all, and drafts that are sampled
    cells: int = 24  # Most cells of a chi-square test: more cells show finer differences, and need more completions
    seed: int = 20_260_101

    @property
    def least(self) -> float:
        """Return the least probability of a cell: a coarse test draws few completions, so it has few cells."""
        return max(0.01, self.detect / (20 if self.ways is None else 8))

    @property
    def longest(self) -> int:
        """Return the most tokens of a prompt and its completion."""
        sampled = self.sample_prompt_tokens + self.sample_tokens
        return max(self.prompt_tokens + self.max_tokens, sampled) + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One check and its outcome."""

    id: str  # Short, the same in every release; programs look a check up by it
    name: str  # For people
    passed: bool
    summary: str  # One line for people
    figures: Mapping[str, Any] = field(default_factory=dict)  # The same and more for programs
    left_out: bool = False  # True where nothing was examined, for the reason in `summary`
    shown_by: tuple[str, ...] = ()  # Commands that show the fault, in order

    def record(self) -> dict[str, Any]:
        """Return the check as ``--json`` prints it."""
        return (
            {"id": self.id, "name": self.name, "passed": self.passed, "summary": self.summary, **self.figures}
            | ({"left_out": True} if self.left_out else {})
            | ({"shown_by": list(self.shown_by)} if self.shown_by else {})
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Everything one run found."""

    model: str
    drafter: str
    dtype: str
    device: str
    runs_as: str  # The number format and what computes, in words
    checks: list[Check]
    quick: bool = False  # A first look, whose checks see large differences alone

    @property
    def passed(self) -> bool:
        """True if there were checks, none was left out, and all passed."""
        return any(not check.left_out for check in self.checks) and all(check.passed for check in self.checks)

    def record(self) -> dict[str, Any]:
        """The report as ``certify --json`` prints it."""
        return {"passed": self.passed, **asdict(self), "checks": [check.record() for check in self.checks]}


Stage = tuple[str, Callable[[], Iterable[Check]]]
"""A stage of a run is its description and the function that makes its checks."""


def run_stages(
    stages: Sequence[Stage], progress: Callable[[str], None], news: Callable[[str], None]
) -> list[list[Check]]:
    """Run the stages one after the other, and return the checks of each.

    Args:
        stages: all stages of the run.
        progress: is told what is being done.
        news: is told what should stay to be read: which stage of how many begins, and each check's verdict.
    """
    by_stage = list[list[Check]]()
    for number, (what, examine) in enumerate(stages, 1):
        news(f"stage {number} of {len(stages)}: {what}")
        progress(what)
        checks = list[Check]()
        for check in examine():
            verdict = "none" if check.left_out else "pass" if check.passed else "FAIL"
            news(f"  {verdict}  {check.name}")
            checks.append(check)
        by_stage.append(checks)
    return by_stage
