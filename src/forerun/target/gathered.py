"""What the pieces of a prefill add up to: logits where they are wanted, hidden states left aligned. Knows no model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from forerun.target.nouns import Scored
from forerun.types import Signal


class Gathered:
    """Collects the passes of one prefill.

    Args:
        counts: tokens of each sequence.
        head: states (.., H) -> logits (.., V).
        all_logits: of every token; else of each sequence's last.
    """

    def __init__(self, counts: Sequence[int], head: Callable[[Tensor], Tensor], *, all_logits: bool) -> None:
        self._counts, self._head, self._all_logits = counts, head, all_logits
        self._logits: Tensor | None = None
        self._signals: dict[Signal, Tensor] = {}

    def add(self, active: Sequence[int], start: int, states: Tensor, signals: Mapping[Signal, Tensor]) -> None:
        """A pass over `active` sequences from token `start` on: states (B, M, H) after the final norm, and others."""
        for signal, value in signals.items():
            if signal not in self._signals:
                self._signals[signal] = value.new_zeros(len(self._counts), max(self._counts), value.shape[-1])
            self._signals[signal][active, start : start + value.shape[1]] = value
        if self._all_logits:
            self._put(active, slice(start, start + states.shape[1]), self._head(states))
            return
        places = [place for place, index in enumerate(active) if self._counts[index] <= start + states.shape[1]]
        if places:
            ending = [active[place] for place in places]
            last = states[places, [self._counts[index] - start - 1 for index in ending]]
            self._put(ending, slice(0, 1), self._head(last.unsqueeze(1)))

    def scored(self) -> Scored:
        """Logits (B, M, V), M the longest sequence, or (B, 1, V); signals (B, M, H)."""
        assert self._logits is not None, "a prefill has at least one token"
        return Scored(logits=self._logits, signals=self._signals)

    def _put(self, sequences: Sequence[int], tokens: slice, values: Tensor) -> None:
        if self._logits is None:
            size = max(self._counts) if self._all_logits else 1
            self._logits = values.new_zeros(len(self._counts), size, values.shape[-1])
        self._logits[sequences, tokens] = values
