"""Trees of a fixed shape, drafted a level at a time, and what is remembered of a proposal until the target has spoken.

Shared by every drafter that runs a model once per level. Knows no model: logits come from a function.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from forerun.acceptance import Acceptance, Proposal, by_draft_prob
from forerun.drafters.base import DraftContext
from forerun.drafters.domains import PerDomain
from forerun.drafters.drawing import Draws
from forerun.drafters.growth import Children, DraftVocabulary, Draw, Grower, Shape, grow, kind_of, resolve
from forerun.errors import NumericError
from forerun.sampling import Sampler
from forerun.tree import TreeBuilder
from forerun.types import Budget, DraftKind, Drawn

Descend = Callable[[Tensor, range], Tensor]
"""(ids (B, K) of all nodes so far, node ids of the last level) -> raw logits (B, F, V) of that level's nodes."""
Enough = Callable[[int, Children], bool]
"""(depth of the parents, their children) -> whether no further level is wanted. No node that it saw is taken back."""


class _Row(NamedTuple):
    """One row of a `Grown` on the host: entry k of each is of node k + 1."""

    tokens: list[int]
    drawn: list[int]
    confidence: list[float]
    valid: list[bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class Grown:
    """A tree of the full shape for every row, before any budget."""

    tokens: Tensor
    """(B, K) int64"""
    drawn: Tensor
    confidence: Tensor
    valid: Tensor | None
    laws: Tensor | None
    """(B, parents, V) by node id from the root on; None where all are given."""
    run: int
    """Nodes that the model has run, from the first."""

    def fetch(self) -> list[_Row]:
        """(B,) all but the laws, in four transfers. Not kept: a recording gives the same object with other numbers."""
        valid = torch.ones_like(self.tokens, dtype=torch.bool) if self.valid is None else self.valid
        columns = [values.tolist() for values in (self.tokens, self.drawn, self.confidence, valid)]
        return [_Row(*row) for row in zip(*columns, strict=True)]


@dataclass(kw_only=True, slots=True)
class Submitted(Proposal):
    """A proposal of a model that ran some of its nodes; numbered as it was grown."""

    run: int = 0
    """Nodes whose keys stand behind the root's; 0: the root is still committed."""

    def kept(self, committed: Sequence[int]) -> tuple[int, ...]:
        """The longest path among the nodes that were run which holds a beginning of `committed`."""
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents[: self.run], start=1):
            children.setdefault(parent, []).append(node)
        frontier = [0]
        for token in committed:
            below = [c for node in frontier for c in children.get(node, []) if self.tokens[c - 1] == token]
            if not below:
                break
            frontier = below
        node, path = frontier[0], list[int]()
        while node:
            path.append(node)
            node = self.parents[node - 1]
        return tuple(reversed(path))


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedTree:
    """How a drafter grows trees of one shape."""

    shape: Shape
    draw: Draw
    temperature: float | None = None
    """Draft at this temperature instead of the request's; requests at temperature 0 are not touched."""
    estimates: PerDomain[Acceptance] = field(default_factory=lambda: PerDomain(Acceptance))

    def kind(self, sampler: Sampler) -> DraftKind:
        """What the trees of a request hold."""
        return kind_of(self._draw(sampler), chain=self.shape.chain)

    def within(self, context: DraftContext, budget: Budget, max_length: int) -> list[int]:
        """How many nodes each row may submit; no path leaves the drafter's own context of `max_length`."""
        limits = zip(budget.nodes, budget.depth, context.tokens, strict=True)
        return [self.shape.within(nodes, min(depth, max_length - len(tokens))) for nodes, depth, tokens in limits]

    def grow(
        self,
        context: DraftContext,
        active: Sequence[int],
        nodes: int,
        logits: Tensor,
        descend: Descend,
        vocabulary: DraftVocabulary | None = None,
        *,
        draws: Draws | None = None,
        enough: Enough | None = None,
    ) -> Grown:
        """The first `nodes` nodes of the shape for the active rows.

        Args:
            active: rows of the context, B of them.
            logits: (B, 1, V) after the roots.
            descend: the model, one level further.
            vocabulary: the model's, where it is not the target's.
            draws: those of the active rows, see `draws`; None draws node by node on the host.
            enough: asked after every level whether the tree ends there.
        """
        growers = [] if draws is not None else self._growers(context, active)
        grown, run = list[Children](), 0
        ids = torch.zeros(len(active), 0, dtype=torch.int64, device=logits.device)

        def path(row: int, node: int) -> list[int]:
            found = list[int]()
            while node:
                found.append(int(ids[row, node - 1]))
                node = self.shape.parents[node - 1]
            return found[::-1]

        for depth, count in enumerate(self.shape.widths):
            level, chosen = self.shape.levels[depth], self.shape.chosen(depth)
            if draws is not None:
                children = draws.children(logits, depth, vocabulary)
            else:
                children = grow(logits, count, growers, level, path, vocabulary)
            grown.append(children if chosen is None else children.only(chosen))
            ids = torch.cat([ids, grown[-1].tokens.flatten(1)], dim=1)
            if ids.shape[1] >= nodes or (enough is not None and enough(depth, grown[-1])):
                break
            logits, run = descend(ids, self.shape.levels[depth + 1]), ids.shape[1]
        return _joined(grown, ids, run)

    def draws(
        self, context: DraftContext, active: Sequence[int], device: torch.device, *, recorded: bool = False
    ) -> Draws | None:
        """How the active rows draw where `grow` need read no value on the host; see `Draws.of`."""
        sorts = recorded or device.type != "cpu"
        return Draws.of(self._growers(context, active), self.shape, device, sorts=sorts)

    def cut(
        self, context: DraftContext, active: Sequence[int], grown: Grown, nodes: Sequence[int]
    ) -> list[tuple[TreeBuilder, Submitted]]:
        """The active rows' share of the tree: the first `nodes` (B,) that the budget allows, whatever they hold.

        A row for which the model's logits are not finite has none: the drafter failed it. Below a node where they are
        not there is nothing, since what was drawn above is submitted whatever follows from it.
        """
        cuts = []
        for place, (index, row) in enumerate(zip(active, grown.fetch(), strict=True)):
            failed = math.isnan(row.confidence[0])
            if failed:
                context.fail(index, not_finite())
            acceptance = self.estimates.of(context.salt(index))
            cuts.append(self._cut(grown, place, row, 0 if failed else nodes[place], acceptance))
        return cuts

    def _cut(
        self, grown: Grown, place: int, row: _Row, nodes: int, acceptance: Acceptance
    ) -> tuple[TreeBuilder, Submitted]:
        submitted = Submitted(tokens=row.tokens, parents=self.shape.parents, run=grown.run, acceptance=acceptance)
        builder, ids = TreeBuilder(), {0: 0}
        for node, parent in enumerate(self.shape.parents[:nodes], start=1):
            if parent not in ids or not row.valid[node - 1] or math.isnan(row.confidence[node - 1]):
                continue
            kind = Drawn(row.drawn[node - 1])
            evidence = by_draft_prob(kind, self.shape.ranks[node - 1], row.confidence[node - 1])
            submitted.evidence[node], confidence = evidence, acceptance.estimate(*evidence)
            ids[node] = builder.add(row.tokens[node - 1], ids[parent], drawn=kind, confidence=confidence)
            if kind is not Drawn.GIVEN:
                assert grown.laws is not None
                builder.set_law(ids[parent], grown.laws[place, parent])
        return builder, submitted

    def _growers(self, context: DraftContext, active: Sequence[int]) -> list[Grower]:
        return [self._grower(context, index) for index in active]

    def _grower(self, context: DraftContext, index: int) -> Grower:
        sampler = context.samplers[index]
        tokens, prompt = context.tokens[index], context.prompt_lengths[index]
        if self.temperature is not None and not sampler.greedy:
            sampler = _at_temperature(sampler, self.temperature)
        return Grower(
            draw=self._draw(sampler),
            sampler=sampler,
            coins=context.coins[index],
            output=() if sampler.neutral else tokens[prompt:],
        )

    def _draw(self, sampler: Sampler) -> Draw:
        return resolve(self.draw, greedy=sampler.greedy, chain=self.shape.chain)


def not_finite() -> NumericError:
    """What a drafter says of a row for which its model gives no numbers."""
    return NumericError("the drafter produced NaN or infinite logits; check its checkpoint, or load it as float32")


def _joined(grown: Sequence[Children], ids: Tensor, run: int) -> Grown:
    """The levels behind each other."""
    valid = laws = None
    if any(children.valid is not None for children in grown):
        parts = [torch.ones_like(c.tokens, dtype=torch.bool) if c.valid is None else c.valid for c in grown]
        valid = torch.cat([part.flatten(1) for part in parts], dim=1)
    if grown[0].laws is not None:
        laws = torch.cat([children.laws for children in grown if children.laws is not None], dim=1)
    return Grown(
        tokens=ids,
        drawn=torch.cat([children.drawn.flatten(1) for children in grown], dim=1),
        confidence=torch.cat([children.confidence.flatten(1) for children in grown], dim=1),
        valid=valid,
        laws=laws,
        run=run,
    )


def _at_temperature(sampler: Sampler, temperature: float) -> Sampler:
    params = dataclasses.replace(sampler.params, temperature=temperature)
    return Sampler(params, sampler.prompt, banned_until_min=sampler.banned_until_min, bad_words=sampler.bad_words)
