"""Rules that end a draft early, at one confidence threshold or at a bound on acceptance from the draft law's entropy.

Each looks at the law *before* its token is drawn. The token is drawn and submitted all the same, and drafting ends
behind it: a sampled token that is withdrawn because of its value biases the text, one that was drawn last does not.
Knows no model and no target.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from forerun.drafters.growth import Children
from forerun.errors import ArgumentError, nearest


class Stop(StrEnum):
    """When a draft is long enough."""

    NEVER = "never"
    """Only the budget ends it."""
    CONFIDENCE = "confidence"
    """The likeliest token has less than the threshold (transformers' ``assistant_confidence_threshold``, 0.4)."""
    SVIP = "svip"
    """The square root of the law's entropy exceeds the threshold (SVIP, arXiv 2411.18462)."""
    ADAEDL = "adaedl"
    """The lower bound ``1 - sqrt(0.2 entropy)`` on acceptance is below the threshold (AdaEDL, arXiv 2410.18351)."""


DEFAULTS = {Stop.CONFIDENCE: 0.4, Stop.SVIP: 0.6, Stop.ADAEDL: 0.4}
"""Threshold of each rule; SVIP and AdaEDL tune theirs to the pair of models."""
ENTROPY_SHARE = 0.2
"""AdaEDL's factor before the entropy, gamma in the paper."""


def entropies(laws: Tensor) -> Tensor:
    """(..,) float32, nats, of laws (.., V)."""
    values: Tensor = torch.special.entr(laws.float())
    return values.sum(-1)


def confident(laws: Tensor, threshold: float) -> Tensor:
    """(..,) bool: drafting goes on behind a token of this law (.., V), as its likeliest token reaches `threshold`."""
    return laws.amax(-1) >= threshold


def svip(laws: Tensor, threshold: float) -> Tensor:
    """(..,) bool: drafting goes on behind a token of this law (.., V), as its entropy is small. arXiv 2411.18462."""
    return entropies(laws).sqrt() <= threshold


def adaedl(laws: Tensor, threshold: float) -> Tensor:
    """(..,) bool: drafting goes on behind a token of this law (.., V), by a bound on acceptance. arXiv 2410.18351."""
    return 1 - (ENTROPY_SHARE * entropies(laws)).sqrt() >= threshold


_RULES: dict[Stop, Callable[[Tensor, float], Tensor]] = {
    Stop.CONFIDENCE: confident,
    Stop.SVIP: svip,
    Stop.ADAEDL: adaedl,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Stopping:
    """One rule with its threshold.

    Raises:
        ArgumentError: an unknown rule, or a threshold out of its range.
    """

    rule: Stop = Stop.NEVER
    threshold: float | None = None
    """None takes the rule's default."""

    def __post_init__(self) -> None:
        if self.threshold is None:
            return
        most = math.inf if self.rule is Stop.SVIP else 1.0
        if self.rule is Stop.NEVER or not 0 <= self.threshold <= most:
            expected = "none without a rule" if self.rule is Stop.NEVER else f"in 0..{most:g}"
            raise ArgumentError(f"the threshold of stop={self.rule.value} must be {expected}, got {self.threshold}")

    @property
    def active(self) -> bool:
        """Whether it ever ends a draft."""
        return self.rule is not Stop.NEVER

    def goes_on(self, laws: Tensor) -> Tensor:
        """(..,) bool: whether to draft behind a token that is drawn from these laws (.., V)."""
        if not self.active:
            return torch.ones(laws.shape[:-1], dtype=torch.bool, device=laws.device)
        threshold = DEFAULTS[self.rule] if self.threshold is None else self.threshold
        return _RULES[self.rule](laws, threshold)


def stopping_named(rule: str, threshold: float | None) -> Stopping:
    """The rule of that name.

    Raises:
        ArgumentError: there is none, or the threshold is out of its range.
    """
    known = [kind.value for kind in Stop]
    if rule not in known:
        raise ArgumentError(f"stop is one of {', '.join(known)}, got {rule!r}.{nearest(rule, known)}")
    return Stopping(rule=Stop(rule), threshold=threshold)


class Ending:
    """How many nodes each of B rows may submit while its tree grows level by level.

    A node that was grown is never taken back: where a level's law says stop, the tokens drawn from it are the last.
    """

    def __init__(self, stopping: Stopping, levels: Sequence[range], nodes: Sequence[int]) -> None:
        self.nodes = list(nodes)
        """(B,) from the first node on."""
        self._stopping, self._levels = stopping, levels
        self._goes_on: list[bool] | None = None

    def look(self, logits: Tensor) -> Tensor:
        """Shown the raw logits (B, F, V) of a level before anything is drawn from them; returns them."""
        if self._stopping.active:
            self._goes_on = self._stopping.goes_on(logits.float().softmax(-1)).any(-1).tolist()
        return logits

    def enough(self, depth: int, children: Children) -> bool:
        """Whether no row wants a level below the children of the nodes at `depth`."""
        last = self._levels[depth + 1].stop - 1
        for place, goes_on in enumerate(self._goes_on or ()):
            if not goes_on:
                self.nodes[place] = min(self.nodes[place], last)
        return max(self.nodes) <= last
