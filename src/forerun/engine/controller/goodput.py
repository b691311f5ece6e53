"""Tokens per time that decoding yields of late, in units of plain decoding. Knows no clock."""

from __future__ import annotations

_MEMORY = 0.5 ** (1 / 16)
"""What a step still counts after the next one. Short, because a copied passage and fresh text differ: the tokens that
are left to write in a passage are worth the time that they take *there*."""
_PRIOR = 4.0
"""Plain steps that are assumed before the first."""


class Goodput:
    """Fading averages of tokens over plain step times."""

    def __init__(self) -> None:
        self._all, self._unaided = _Average(), _Average()

    @property
    def factor(self) -> float:
        """Times plain decoding, at least 1: whoever does worse has plain decoding to fall back on."""
        return self._all.factor

    @property
    def unaided(self) -> float:
        """The same of the steps in which no drafter took part that costs a forward pass."""
        return self._unaided.factor

    def add(self, tokens: float, cost: float, *, aided: bool) -> None:
        """A row emitted `tokens` in a step that took `cost` times a plain one; `aided` by a drafter's forward pass."""
        self._all.add(tokens, cost)
        if not aided:
            self._unaided.add(tokens, cost)


class _Average:
    def __init__(self) -> None:
        self._tokens = self._cost = _PRIOR

    @property
    def factor(self) -> float:
        return max(1.0, self._tokens / self._cost)

    def add(self, tokens: float, cost: float) -> None:
        self._tokens = _MEMORY * self._tokens + tokens
        self._cost = _MEMORY * self._cost + cost
