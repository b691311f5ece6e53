"""What is generated in the benchmark: held-out contexts, sampling settings, and how much of the text runs in circles.

Knows no model and no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forerun.demo import prompts
from forerun.errors import ArgumentError

CONTEXT = 300
"""Tokens before the first generated one."""


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


def contexts(tokenizer: Any, *, count: int, length: int = CONTEXT) -> list[list[int]]:
    """`count` pieces of `length` tokens out of the shipped held-out files, from inside each file.

    Raises:
        ArgumentError: the files do not hold that many pieces.
    """
    encoded = [tokenizer.encode(prompt.text, add_special_tokens=False, verbose=False) for prompt in prompts()]
    pieces: list[list[int]] = []
    taken = 0
    while len(pieces) < count:
        # The first piece of every file starts behind its headline; later ones follow it.
        starts = [len(ids) // 8 + taken * length for ids in encoded]
        fresh = [
            ids[start : start + length]
            for ids, start in zip(encoded, starts, strict=True)
            if start + length <= len(ids)
        ]
        if not fresh:
            raise ArgumentError(
                f"the held-out files hold {len(pieces)} pieces of {length} tokens, {count} were asked for"
            )
        pieces += fresh
        taken += 1
    return pieces[:count]


def loops(tokens: Sequence[int], *, window: int = 48, period: int = 16) -> bool:
    """True if the last `window` tokens repeat themselves with a period of at most `period`: text in circles."""
    tail = list(tokens[-window:])
    if len(tail) < window:
        return False
    return any(tail[step:] == tail[:-step] for step in range(1, period + 1))
