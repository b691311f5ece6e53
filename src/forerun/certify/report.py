"""What was checked, with what outcome. Knows no model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How much to check."""

    prompts: int = 6
    """Prompts for the greedy and the log-probability check."""
    prompt_tokens: int = 192
    """Tokens of each, cut from the end."""
    max_tokens: int = 96
    """Tokens of each greedy answer."""
    detect: float = 0.1
    """Total variation from the target's distribution that each chi-square test is to detect; the number of answers
    drawn follows from it."""
    power: float = 0.99
    """Probability with which it does."""
    sample_tokens: int = 5
    """Tokens of each sampled answer: the first comes without a draft, the next from drafts up to three levels deep."""
    sample_prompt_tokens: int = 24
    temperatures: tuple[float, ...] = (0.0, 1.0)
    """0 asks for the greedy checks, any other for a chi-square test at that temperature."""
    family_error: float = 1e-6
    """Probability that any chi-square test of this run fails although all is well."""
    cells: int = 24
    """Most cells of a chi-square test: more see finer, and need more answers."""
    least: float = 0.01
    """Least probability of a cell."""
    seed: int = 20_260_101


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One piece of evidence."""

    name: str
    passed: bool
    summary: str
    """One line for people."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """The same and more for programs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Everything one run found."""

    model: str
    drafter: str
    dtype: str
    device: str
    checks: list[Check]

    @property
    def passed(self) -> bool:
        """Whether every check passed; no check is no proof."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    def record(self) -> dict[str, Any]:
        """The report as ``certify --json`` prints it."""
        checks = [
            {"name": check.name, "passed": check.passed, "summary": check.summary, **check.figures}
            for check in self.checks
        ]
        return {
            "passed": self.passed,
            "model": self.model,
            "drafter": self.drafter,
            "dtype": self.dtype,
            "device": self.device,
            "checks": checks,
        }
