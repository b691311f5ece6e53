"""Tokens per time that decoding yields of late, in units of plain decoding. Knows no clock."""

from __future__ import annotations

_MEMORY = 0.5 ** (1 / 16)
"""What a step still counts after the next one. Short, because a copied passage and fresh text differ: the tokens that
are left to write in a passage are worth the time that they take *there*."""
_PRIOR = 4.0
"""Plain steps that are assumed before the first."""


class Goodput:
    """A fading average of tokens over plain step times."""

    def __init__(self) -> None:
        self._tokens = self._cost = _PRIOR

    @property
    def factor(self) -> float:
        """Times plain decoding, at least 1: whoever does worse has plain decoding to fall back on."""
        return max(1.0, self._tokens / self._cost)

    def add(self, tokens: float, cost: float) -> None:
        """A row emitted `tokens` in a step that took `cost` times a plain one."""
        self._tokens = _MEMORY * self._tokens + tokens
        self._cost = _MEMORY * self._cost + cost
