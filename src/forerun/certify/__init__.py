"""The proof of losslessness as a user's tool, on the user's own model and through the engine's public API.

A plan says how much is checked; it needs no torch, so that the command has it before a model.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class CertifyPlan:
    """A plan says how much to check."""

    prompts: int = 6  # Prompts for the greedy and the log-probability check
    prompt_tokens: int = 192  # First tokens of each
    max_tokens: int = 96  # Tokens of each greedy answer
    detect: float = 0.2  # Total variation that each chi-square test is to detect; sets how many answers are drawn
    power: float = 0.99  # Probability with which it does
    sample_tokens: int = 5  # Tokens of each sampled answer: the first has no draft, the next have up to three levels
    sample_prompt_tokens: int = 24
    temperatures: tuple[float, ...] = (0.0, 0.7)  # 0: greedy checks; above: chi-square tests; 1 hides orders
    family_error: float = 1e-6  # Probability that any chi-square test of this run fails although all is well
    cells: int = 24  # Most cells of a chi-square test: more see finer, and need more answers
    seed: int = 20_260_101

    @property
    def least(self) -> float:
        """Return the least probability of a cell: a coarse test takes few answers, and so few cells."""
        return max(0.01, self.detect / 20)

    @property
    def longest(self) -> int:
        """Return the most tokens of a prompt and its answer."""
        sampled = self.sample_prompt_tokens + self.sample_tokens
        return max(self.prompt_tokens + self.max_tokens, sampled) + 1
