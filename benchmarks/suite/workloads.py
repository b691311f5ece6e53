"""How the benchmark samples, and how much of the text runs in circles. Knows no model and no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """How to sample, and how often."""

    name: str
    temperature: float
    top_p: float = 1.0
    seeds: tuple[int, ...] = (1,)
    new_tokens: int = 96

    @property
    def label(self) -> str:
        """For tables and plots."""
        if self.temperature == 0:
            return "T = 0"
        return f"T = {self.temperature:g}, top-p {self.top_p:g}, {len(self.seeds)} seeds"


def settings(*, quick: bool) -> list[Setting]:
    """The headline (sampled) first, greedy beside it."""
    tokens = 48 if quick else 96
    seeds = (1,) if quick else (1, 2, 3, 4)
    return [
        Setting(name="sampled", temperature=0.8, top_p=0.95, seeds=seeds, new_tokens=tokens),
        Setting(name="greedy", temperature=0.0, new_tokens=tokens),
    ]


def loops(tokens: Sequence[int], *, window: int = 48, period: int = 16) -> bool:
    """True if the last `window` tokens repeat themselves with a period of at most `period`: text in circles."""
    tail = list(tokens[-window:])
    if len(tail) < window:
        return False
    return any(tail[step:] == tail[:-step] for step in range(1, period + 1))
