"""Two engines' answers and drafts side by side: are the texts equal, and is as much accepted at each position?

**Noise.** What is accepted at a position is k successes in the n drafts that reached so far. Both engines' counts are
compared by Fisher's exact test, which assumes that both are binomial with the same unknown rate; steps of one text are
not independent, so agreement step by step is counted too wherever both engines draft the same length. Knows no engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from forerun.certify.reference import first_difference

SIGNIFICANCE = 0.01
"""Chance of a false alarm, of all positions of an arm together."""
SAME_STEPS = 0.98
"""Share of the comparable steps that must accept the same number of tokens where both engines run the same drafter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One answer and its speculative steps, in order; steps without a draft are not among them."""

    token_ids: list[int]
    text: str
    drafted: list[int]
    """Tokens of each step's chain."""
    accepted: list[int]
    """How many of them were kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """One position of the chain: what each engine accepted of the drafts that reached so far."""

    arm: str
    index: int
    """0 is the first drafted token."""
    accepted: tuple[int, int]
    """Ours, theirs."""
    drafted: tuple[int, int]
    """Ours, theirs."""

    @property
    def chance(self) -> float:
        """p-value: how likely counts at least this far apart are if both rates are the same."""
        return fisher(self.accepted, self.drafted)

    @property
    def rates(self) -> tuple[float, float]:
        """Shares that were accepted, ours and theirs; 0 where nothing was drafted."""
        ours, theirs = (kept / max(1, tried) for kept, tried in zip(self.accepted, self.drafted, strict=True))
        return ours, theirs


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """Steps that both engines began at the same place of the same text with room for a whole draft."""

    same: int
    """Of these, both accepted the same number of tokens."""
    compared: int

    @property
    def agree(self) -> bool:
        """Whether there were any, and all but a few ties are the same."""
        return self.compared > 0 and self.same >= SAME_STEPS * self.compared


@dataclass(frozen=True, kw_only=True, slots=True)
class TextDifference:
    """Where an answer of theirs leaves our plain one."""

    arm: str
    prompt: int
    position: int | None
    """Of the first token that differs; None: the same tokens, another text."""


def fisher(right: tuple[int, int], tried: tuple[int, int]) -> float:
    """Fisher's exact test, two-sided: the p-value of so many right ones out of those tried in two samples."""
    (one, other), both = tried, sum(right)
    weights = {
        k: math.comb(one, k) * math.comb(other, both - k) for k in range(max(0, both - other), min(one, both) + 1)
    }
    return sum(weight for weight in weights.values() if weight <= weights[right[0]]) / sum(weights.values())


def positions(arm: str, ours: Sequence[Answer], theirs: Sequence[Answer], length: int) -> list[Position]:
    """One line for each of the `length` positions of a chain."""
    return [
        Position(
            arm=arm,
            index=index,
            accepted=(_count(ours, index, "accepted"), _count(theirs, index, "accepted")),
            drafted=(_count(ours, index, "drafted"), _count(theirs, index, "drafted")),
        )
        for index in range(length)
    ]


def same_steps(ours: Sequence[Answer], theirs: Sequence[Answer], length: int) -> Steps:
    """Only for drafters that always draft `length` tokens: then the place of a step follows from the steps before.

    An answer is followed up to the first step where the two differ, or where the end of the answer shortens our draft.
    """
    same = compared = 0
    for one, other in zip(ours, theirs, strict=True):
        whole = len(list(takewhile(lambda drafted: drafted == length, one.drafted)))
        pairs = list(zip(one.accepted[:whole], other.accepted, strict=False))
        equal = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        same += equal
        compared += min(equal + 1, len(pairs))
    return Steps(same=same, compared=compared)


def text_differences(arm: str, plain: Sequence[Answer], theirs: Sequence[Answer]) -> list[TextDifference]:
    """Every answer that is not our plain one, token for token and character for character."""
    found = []
    for prompt, (one, other) in enumerate(zip(plain, theirs, strict=True)):
        position = first_difference(one.token_ids, other.token_ids)
        if position is not None or one.text != other.text:
            found.append(TextDifference(arm=arm, prompt=prompt, position=position))
    return found


def mean_length(answers: Sequence[Answer]) -> float:
    """Tokens of a step that drafted, the target's own included."""
    steps = [kept for answer in answers for kept in answer.accepted]
    return 1 + sum(steps) / max(1, len(steps))


def bound(lines: Sequence[Position]) -> float:
    """The p-value below which a position's difference is no noise: `SIGNIFICANCE`, shared out among all lines."""
    return SIGNIFICANCE / max(1, len(lines))


def _count(answers: Sequence[Answer], index: int, name: str) -> int:
    return sum(length > index for answer in answers for length in getattr(answer, name))
