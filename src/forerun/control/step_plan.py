"""`Arm` is a drafter with its running figures; `StepState`, `StepPlan` and `Admission` are the policy's input and its
decisions of one step, before drafting and after it.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from forerun.control.choice import Bid, Offer
from forerun.control.costs import Times
from forerun.control.explore import LookupTrials, ModelTrials, Survival
from forerun.control.ranking import Confidence, Ranking
from forerun.core.tree import TokenTree
from forerun.decode.row import Row
from forerun.drafters.guarded import Deferred


@dataclass(kw_only=True, slots=True)
class Arm:
    """One drafter that the policy chooses among, with its running figures."""

    name: str
    key: str  # Key of its configuration: costs are kept under it
    drafter: Deferred
    is_lookup: bool  # Its proposal costs no forward pass, so it is queried before anything is decided
    max_depth: int  # Most tokens on one path
    needs_prediction: bool = False  # It drafts only for rows whose request has a prediction
    confidence: Confidence = field(default_factory=Confidence)  # Calibration of its deterministic nodes
    lookup_trials: LookupTrials = field(default_factory=LookupTrials)
    survival: Survival = field(default_factory=Survival)
    trials: ModelTrials = field(default_factory=ModelTrials)
    nodes_by_depth: dict[int, float] = field(default_factory=dict)
    """Recent number of nodes per row of its proposals, by their depth."""
    chosen_share: float = 1.0  # Recent share of the rows it bid for that it was chosen for

    @property
    def catches_up(self) -> bool:
        """True if it can be shown later what it was not shown in a step: a lookup drafter that reads text only."""
        return self.is_lookup and not self.drafter.requires

    def expected_nodes(self, depth: int) -> int:
        """Return the expected nodes per row of a proposal down to `depth`: scaled from the nearest depth seen, else a
        chain.
        """
        if not self.nodes_by_depth:
            return depth
        nearest = min(self.nodes_by_depth, key=lambda seen: (abs(seen - depth), seen))
        return max(1, math.ceil(self.nodes_by_depth[nearest] * depth / nearest - 1e-9))


class StepState(NamedTuple):
    """The rows that the policy decides for in one step, by their index in the step, and the predicted times."""

    rows: Mapping[int, Row]
    max_depths: Mapping[int, int]  # Most tokens on a path; 0 where nothing may be drafted
    batch: int  # Rows of the step, those of other policies included
    context: int  # Longest text, tokens
    others_wait: bool  # Other requests wait for their first token
    pass_trial: bool  # Old measurements of passes with nodes are ignored, so that such a pass is tried again
    times: Times  # Time of the step without drafting, ms, by size of the pass
    rate: float  # Recent tokens of a row in the time of a plain step

    @property
    def goodput(self) -> float:
        """The recent tokens per ms of the whole step."""
        return self.rate * self.batch / self.times[0]


class LookupProposal(NamedTuple):
    """The trees that one lookup drafter proposed."""

    arm: int
    trees: Mapping[int, TokenTree]  # By row; rows without a draft are absent
    ms: float  # Time of the query
    rows_per_query: float  # Rows that it may draft for, per row that it was queried for


class LookupDrafts(NamedTuple):
    """The proposals of all lookup drafters, merged into one tree for each row."""

    proposals: Sequence[LookupProposal]
    merged: Mapping[int, Ranking]
    bids: Mapping[int, Bid]
    gains: Mapping[int, float]  # Expected accepted tokens of a row's merged tree, less what scoring it costs


class StepPlan(NamedTuple):
    """The decisions of one step before drafting."""

    step: StepState
    lookups: LookupDrafts
    offers: Sequence[Offer]
    assigned: Mapping[int, int]  # Row -> the arm that drafts for it

    def rows_of(self, arm: int) -> list[int]:
        """Return the rows that an arm drafts for."""
        return [row for row, chosen in self.assigned.items() if chosen == arm]

    def offer_of(self, arm: int) -> Offer | None:
        """Return the offer of an arm, if it made one."""
        return next((offer for offer in self.offers if offer.arm == arm), None)

    def accepted_offers(self) -> list[Offer]:
        """Return the offers of the arms that draft for at least one row."""
        arms = set(self.assigned.values())
        return [offer for offer in self.offers if offer.arm in arms]

    def unread_tokens(self, offer: Offer) -> int:
        """Return the tokens that a drafter must read before it drafts for the rows that are assigned to it."""
        return sum(offer.unread[row] for row in self.rows_of(offer.arm))


class Admission(NamedTuple):
    """The decisions of one step after drafting."""

    times: Times
    counts: Sequence[int]  # Nodes that the target scores, by row of the step
    ranked: Mapping[int, Ranking]  # Proposed trees that may be pruned, by row
    pruned: Container[int]  # Rows that lost drafted nodes


NO_LOOKUPS = LookupDrafts((), {}, {}, {})
