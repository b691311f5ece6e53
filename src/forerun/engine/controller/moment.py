"""What a controller holds between planning a step and learning from it. Knows nothing but shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forerun.engine.controller.admission import GivenTree
from forerun.engine.controller.arm import Arm
from forerun.engine.controller.chooser import PLAIN, Choice, Copy, Offer
from forerun.step import Row


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What one copying drafter proposed, before anybody was chosen."""

    arm: int
    trees: Mapping[int, GivenTree]
    """Member -> its tree, where it has nodes."""
    ms: float
    """What asking took."""
    each: float
    """Members that each one stands for that it was asked for."""


@dataclass(kw_only=True, slots=True)
class Moment:
    """One step of the rows that a controller works for."""

    step: int
    """How many the controller has planned."""
    awaited: bool
    """Others wait for their first token."""
    rows: Sequence[Row]
    """Its members, in the order of the step."""
    members: Sequence[int]
    """Indices of these into the step's rows."""
    batch: int
    """Rows of the step."""
    context: int
    """Longest text among the members, tokens."""
    limits: Sequence[int]
    """By member: most tokens on a path; 0 where nothing may be drafted."""
    times: Sequence[float] = ()
    """Entry s: a pass of size s, and the host work, ms."""
    factor: float = 1.0
    """Tokens per time that decoding yields of late, over plain decoding's."""
    unaided: float = 1.0
    """The same where no drafter took part that costs a forward pass."""
    asked: list[Asked] = field(default_factory=list)
    copied: dict[int, GivenTree] = field(default_factory=dict)
    """Member -> the trees of all that copy, as one."""
    copies: dict[int, Copy] = field(default_factory=dict)
    offers: list[Offer] = field(default_factory=list)
    choice: Choice = PLAIN
    trees: dict[int, GivenTree] = field(default_factory=dict)
    """Member -> the deterministic tree that is proposed, wherever it comes from."""
    pruned: set[int] = field(default_factory=set)
    """Members that lost nodes after they were drafted."""
    matched: dict[int, int] = field(default_factory=dict)
    """Member -> how many of the committed tokens its deterministic tree held, before any node was taken away."""
    submitted: list[int] = field(default_factory=list)
    """By member: nodes that the target scores."""
    size: int = 0
    """Of the pass."""

    @property
    def goodput(self) -> float:
        """Tokens per ms of the whole step that decoding yields of late."""
        return self.factor * self.batch / self.times[0]

    def offer(self, member: int) -> Offer | None:
        """The offer that was taken for a member."""
        arm = self.choice.offers.get(member)
        return next((offer for offer in self.offers if offer.arm == arm), None)

    def unread(self, offer: Offer) -> int:
        """Tokens that the drafter of an offer reads before it drafts for the members that take it."""
        return sum(offer.unread[member] for member, arm in self.choice.offers.items() if arm == offer.arm)

    def row_ids(self) -> list[int]:
        """Cache rows of the members."""
        return [row.row for row in self.rows]

    def chosen(self, arm: Arm, index: int) -> list[int]:
        """Members that an arm drafts for."""
        taken = self.choice.copies if arm.copies else self.choice.offers
        return [member for member, found in sorted(taken.items()) if found == index]
