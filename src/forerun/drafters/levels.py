"""Trees of a fixed shape, drafted a level at a time, and what is remembered of a proposal until the target has spoken.

Shared by every drafter that runs a model once per level. Knows no model: logits come from a function.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from forerun.core.acceptance import Acceptance, Proposal, by_draft_prob
from forerun.core.sampling import Processing, Sampler, distribution_of, has_filters, probs_of, quantiles, settings_of
from forerun.core.tree import TokenTree, masses_of
from forerun.devices import fetched, sent, widest
from forerun.drafters.base import DraftContext
from forerun.drafters.domains import PerDomain
from forerun.drafters.growth import (
    Children,
    DraftVocabulary,
    Draw,
    Grower,
    Shape,
    constant,
    grow,
    kind_of,
    likeliest,
    resolve,
)
from forerun.errors import NoTokenLeftError, NumericError
from forerun.types import Budget, DraftKind, Drawn, SamplingParams

# Children of a whole level at once, from numbers that were drawn before the first level.
#
# So levels follow each other without a wait for the host, and may be one recording. What comes out is what
# `growth.grow` draws one node at a time from the same rng; that serves where processors look at each node's path.
# Knows no model and no rule.


@dataclass(frozen=True, kw_only=True, slots=True)
class Draws:
    """How B rows draw a tree of one shape: the same course whatever the numbers are."""

    shape: Shape
    draw: Draw
    """Of the rows above temperature 0; never AUTO. The others take the likeliest tokens."""
    greedy: bool
    """Whether there are rows at temperature 0."""
    filters: bool
    """Whether a row asks for top-k, top-p or min-p."""
    one_by_one: Sequence[SamplingParams]
    """(B,) where each distribution is filtered by itself, on the host; empty where all are sorted at once."""
    numbers: tuple[Tensor, ...]
    """Empty where no row is sampled; else, in the device's widest type, uniforms (B, children of all levels) and
    settings (B, 5), see `sampling.settings_of`."""
    processing: Processing | None
    """What penalties, biases and bans do to the logits; None: nothing. Beside it and `numbers`, nothing differs between
    calls with the same `key`."""

    @classmethod
    def of(
        cls, growers: Sequence[Grower], shape: Shape, device: torch.device, *, vocabulary: int, sorts: bool
    ) -> Draws | None:
        """None where the host has to look at every node: a user's own processors, or an rng of another kind.

        `vocabulary`: the target's size. `sorts`: filter all distributions of a level at once; on a CPU it is faster one
        by one.
        """
        if not all(grower.sampler.neutral or grower.sampler.fits(vocabulary) for grower in growers):
            return None
        sampled = [grower for grower in growers if not grower.sampler.greedy]
        filters = any(has_filters(grower.sampler.params) for grower in sampled)
        numbers: tuple[Tensor, ...] = ()
        if sampled:
            places = _places(shape)
            uniforms = [row for grower in growers if (row := grower.rng.uniforms(places)) is not None]
            if len(uniforms) < len(growers):
                return None
            settings = [settings_of(grower.sampler.params) for grower in growers]
            tables = [torch.from_numpy(np.array(table)).to(widest(device)) for table in (uniforms, settings)]
            numbers = tuple(sent(tables, device))
        drawn = {grower.draw for grower in sampled}
        assert len(drawn) < 2, "one tree draws in one way"
        return cls(
            shape=shape,
            draw=drawn.pop() if drawn else Draw.DETERMINISTIC,
            greedy=len(sampled) < len(growers),
            filters=filters,
            one_by_one=[grower.sampler.params for grower in growers] if filters and not sorts else (),
            numbers=numbers,
            processing=Processing.of([g.sampler.edits(vocabulary, g.output, ()) for g in growers], vocabulary, device),
        )

    @property
    def key(self) -> Hashable:
        """Tells courses of one shape apart."""
        processing = None if self.processing is None else self.processing.key
        return self.draw, self.greedy, self.sampled, self.filters, processing

    @property
    def sampled(self) -> bool:
        """Whether there are rows above temperature 0."""
        return bool(self.numbers)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that differs between calls with the same `key`."""
        return self.numbers + (() if self.processing is None else self.processing.tensors)

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> Draws:
        """The same course with other numbers."""
        count = len(self.numbers)
        processing = None if self.processing is None else self.processing.with_tensors(tensors[count:])
        return replace(self, numbers=tensors[:count], processing=processing)

    def children(self, logits: Tensor, depth: int, ids: Tensor, vocabulary: DraftVocabulary | None = None) -> Children:
        """As many children of every node at `depth` as any has there, from raw logits (B, F, V).

        `ids`: (B, K) tokens of all nodes so far.
        """
        if self.processing is None:
            return self._children(logits, depth, vocabulary)
        wide = logits if vocabulary is None else vocabulary.spread(logits)
        values = self._processed(self.processing, wide, depth, ids)
        none = values.amax(-1, keepdim=True) == -torch.inf
        children = self._children(torch.where(none, 0.0, values), depth, None)
        valid = torch.ones_like(children.tokens, dtype=torch.bool) if children.valid is None else children.valid
        return replace(children, valid=valid & ~none)

    def _processed(self, processing: Processing, logits: Tensor, depth: int, ids: Tensor) -> Tensor:
        batch, width, size = logits.shape
        values = logits.to(torch.promote_types(logits.dtype, torch.float32))
        paths = ids.index_select(1, constant(tuple(node - 1 for node in self.shape.paths(depth)), ids.device))
        first = torch.arange(batch * width, device=ids.device).view(batch, width, 1) * size
        drafted = (first + paths.view(batch, width, depth)).flatten()
        depths = torch.full((1, width), depth, dtype=torch.int64, device=ids.device)
        return processing.apply(values, drafted, depths)

    def _children(self, logits: Tensor, depth: int, vocabulary: DraftVocabulary | None) -> Children:
        count = self.shape.widths[depth]
        if not self.sampled:
            return likeliest(logits, count, vocabulary)
        drawn = self._drawn(logits if vocabulary is None else vocabulary.spread(logits), depth, count)
        if not self.greedy:
            return drawn
        given = likeliest(logits, count, vocabulary)
        sampled = self.numbers[1][:, :1, None] > 0
        assert drawn.valid is not None
        return Children(
            tokens=torch.where(sampled, drawn.tokens, given.tokens),
            drawn=torch.where(sampled, drawn.drawn, given.drawn),
            confidence=torch.where(sampled, drawn.confidence, given.confidence),
            valid=drawn.valid | ~sampled,
            probs=drawn.probs,
        )

    def _drawn(self, logits: Tensor, depth: int, count: int) -> Children:
        probs = self._probs(logits)
        before = sum(len(self.shape.levels[above]) * self.shape.widths[above] for above in range(depth))
        size = probs.shape[1] * count
        uniforms = self.numbers[0][:, before : before + size].view(-1, probs.shape[1], count)
        if self.draw is Draw.DETERMINISTIC:
            tokens, chances = _top(probs, count)
            return _packed([(tokens, chances, chances > 0, Drawn.DETERMINISTIC)], None)
        if self.draw is Draw.IID:
            surest = probs.amax(-1, keepdim=True).expand(-1, -1, count)
            return _packed([(quantiles(probs, uniforms), surest, surest > 0, Drawn.IID)], probs)
        if self.draw is Draw.WITHOUT_REPLACEMENT:
            return _without_replacement(probs, uniforms)
        return _greedy_k(probs, uniforms)

    def _probs(self, logits: Tensor) -> Tensor:
        """(B, F, V) float32."""
        if not self.one_by_one:
            return probs_of(logits, self.numbers[1], filters=self.filters)
        rows = zip(logits.float(), self.one_by_one, strict=True)
        return torch.stack([torch.stack([_distribution_of(node, params) for node in row]) for row, params in rows])


_Drawn = tuple[Tensor, Tensor, Tensor, Drawn]
"""Tokens, confidence and validity (B, F, C) of children that came about in one way."""


def _packed(parts: Sequence[_Drawn], probs: Tensor | None) -> Children:
    kinds = [torch.full_like(tokens, int(kind), dtype=torch.uint8) for tokens, _, _, kind in parts]
    return Children(
        tokens=torch.cat([part[0] for part in parts], dim=-1),
        drawn=torch.cat(kinds, dim=-1),
        confidence=torch.cat([part[1] for part in parts], dim=-1),
        valid=torch.cat([part[2] for part in parts], dim=-1),
        probs=probs,
    )


def _without_replacement(probs: Tensor, uniforms: Tensor) -> Children:
    """One after the other, the elder ones removed and the rest renormalised."""
    rest, parts = probs, list[_Drawn]()
    for index in range(uniforms.shape[-1]):
        surest, token = rest.amax(-1, keepdim=True), quantiles(rest, uniforms[..., index : index + 1])
        parts.append((token, surest, surest > 0, Drawn.WITHOUT_REPLACEMENT))
        rest = _renormalised(rest.scatter(-1, token, 0.0))
    return _packed(parts, probs)


def _greedy_k(probs: Tensor, uniforms: Tensor) -> Children:
    """The likeliest, and one drawn from the distribution restricted to the others."""
    parts, rest, count = list[_Drawn](), probs, uniforms.shape[-1] - 1
    if count:
        tokens, chances = _top(probs, count)
        parts.append((tokens, chances, chances > 0, Drawn.DETERMINISTIC))
        rest = probs.scatter(-1, tokens, 0.0)
    mass = rest.sum(-1, keepdim=True)
    rest = _renormalised(rest)
    surest = rest.amax(-1, keepdim=True) * mass
    parts.append((quantiles(rest, uniforms[..., -1:]), surest, mass > 0, Drawn.IID))
    return _packed(parts, rest)


def _top(probs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Tokens and probabilities (B, F, C) of the likeliest; zeros where there are fewer tokens."""
    best = probs.topk(min(count, probs.shape[-1]), dim=-1)
    missing = count - best.indices.shape[-1]
    return pad(best.indices, (0, missing)), pad(best.values, (0, missing))


def _renormalised(rest: Tensor) -> Tensor:
    return rest / rest.sum(-1, keepdim=True).clamp_min(torch.finfo(rest.dtype).tiny)


def _distribution_of(logits: Tensor, params: SamplingParams) -> Tensor:
    """`sampling.distribution_of`; NaN where that refuses the logits (V,)."""
    try:
        return distribution_of(logits, params)
    except (NumericError, NoTokenLeftError):
        return torch.full_like(logits, torch.nan)


@lru_cache(maxsize=64)
def _places(shape: Shape) -> tuple[tuple[int, int], ...]:
    """(node, index) of every child, level by level, as wide as the level's widest node."""
    levels = zip(shape.levels[:-1], shape.widths, strict=True)
    return tuple((node, index) for level, width in levels for node in level for index in range(width))


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
    masses: list[float]
    """By parent, the sum of what its sampled children were drawn from; empty where all are deterministic."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grown:
    """A tree of the full shape for every row, before any budget."""

    tokens: Tensor
    """(B, K) int64"""
    drawn: Tensor
    confidence: Tensor
    valid: Tensor | None
    probs: Tensor | None
    """(B, parents, V) by node id from the root on; None where all are deterministic."""
    run: int
    """Nodes that the model has run, from the first."""

    def fetch(self) -> list[_Row]:
        """(B,) all but the probs, in one transfer. Not kept: a recording gives the same object with other numbers."""
        valid = torch.ones_like(self.tokens, dtype=torch.bool) if self.valid is None else self.valid
        masses = self.confidence[:, :0] if self.probs is None else masses_of(self.probs)
        columns = [values.tolist() for values in fetched([self.tokens, self.drawn, self.confidence, valid, masses])]
        return [_Row(*row) for row in zip(*columns, strict=True)]


@dataclass(kw_only=True, slots=True)
class Submitted(Proposal):
    """A proposal of a model that ran some of its nodes; numbered as it was grown."""

    run: int = 0
    """Nodes whose keys stand behind the root's; 0: the root is still committed."""

    def kept(self, committed: Sequence[int]) -> tuple[int, ...]:
        """The longest path among the nodes that were run which holds a beginning of `committed`."""
        children: dict[int, list[int]] = {}
        for node in range(1, self.run + 1):
            children.setdefault(self.parents[node], []).append(node)
        frontier = [0]
        for token in committed:
            below = [c for node in frontier for c in children.get(node, []) if self.tokens[c] == token]
            if not below:
                break
            frontier = below
        node, path = frontier[0], list[int]()
        while node:
            path.append(node)
            node = self.parents[node]
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
        ids = torch.zeros(len(logits), 0, dtype=torch.int64, device=logits.device)

        def path(row: int, node: int) -> list[int]:
            found = list[int]()
            while node:
                found.append(int(ids[row, node - 1]))
                node = self.shape.parents[node]
            return found[::-1]

        for depth, count in enumerate(self.shape.widths):
            level, chosen = self.shape.levels[depth], self.shape.chosen(depth)
            if draws is not None:
                children = draws.children(logits, depth, ids, vocabulary)
            else:
                children = grow(logits, count, growers, level, path, vocabulary)
            grown.append(children if chosen is None else children.only(chosen))
            ids = torch.cat([ids, grown[-1].tokens.flatten(1)], dim=1)
            if ids.shape[1] >= nodes or (enough is not None and enough(depth, grown[-1])):
                break
            logits, run = descend(ids, self.shape.levels[depth + 1]), ids.shape[1]
        return _joined(grown, ids, run)

    def draws(
        self,
        context: DraftContext,
        active: Sequence[int],
        device: torch.device,
        vocabulary: int,
        *,
        recorded: bool = False,
    ) -> Draws | None:
        """How the active rows draw where `grow` need read no value on the host; see `Draws.of`."""
        sorts = recorded or device.type != "cpu"
        return Draws.of(self._growers(context, active), self.shape, device, vocabulary=vocabulary, sorts=sorts)

    def cut(
        self, context: DraftContext, active: Sequence[int], grown: Grown, nodes: Sequence[int]
    ) -> list[tuple[TokenTree, Submitted]]:
        """The active rows' share of the tree: the first `nodes` (B,) that the budget allows, whatever they hold.

        A row for which the model's logits are not finite has none: the drafter failed it. Below a node where they are
        not there is nothing, since what was drawn above is submitted whatever follows from it.
        """
        cuts = []
        for place, (index, row) in enumerate(zip(active, grown.fetch(), strict=True)):
            failed = math.isnan(row.confidence[0])
            if failed:
                context.fail(index, not_finite())
            tree, acceptance = TokenTree(context.tokens[index][-1]), self.estimates.of(context.salt(index))
            submitted = self._cut(tree, grown, place, row, 0 if failed else nodes[place], acceptance)
            cuts.append((tree, submitted))
        return cuts

    def _cut(
        self, tree: TokenTree, grown: Grown, place: int, row: _Row, nodes: int, acceptance: Acceptance
    ) -> Submitted:
        tokens, parents = [tree.tokens[0], *row.tokens], self.shape.parents
        submitted = Submitted(tokens=tokens, parents=parents, run=grown.run, acceptance=acceptance)
        ids = {0: 0}
        for node in range(1, nodes + 1):
            parent, confidence = parents[node], row.confidence[node - 1]
            if parent not in ids or not row.valid[node - 1] or math.isnan(confidence):
                continue
            kind = Drawn(row.drawn[node - 1])
            evidence = submitted.evidence[node] = by_draft_prob(kind, self.shape.ranks[node], confidence)
            ids[node] = tree.add(tokens[node], ids[parent], drawn=kind, confidence=acceptance.estimate(*evidence))
            if kind is not Drawn.DETERMINISTIC:
                assert grown.probs is not None
                tree.set_probs(ids[parent], grown.probs[place, parent], row.masses[parent])
        return submitted

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
            rng=context.rng[index],
            output=() if sampler.neutral else tokens[prompt:],
        )

    def _draw(self, sampler: Sampler) -> Draw:
        return resolve(self.draw, greedy=sampler.greedy, chain=self.shape.chain)


def not_finite() -> NumericError:
    """What a drafter says of a row for which its model gives no numbers."""
    return NumericError("the drafter produced NaN or infinite logits; check its checkpoint, or load it as float32")


def _joined(grown: Sequence[Children], ids: Tensor, run: int) -> Grown:
    """The levels behind each other."""
    valid = probs = None
    if any(children.valid is not None for children in grown):
        parts = [torch.ones_like(c.tokens, dtype=torch.bool) if c.valid is None else c.valid for c in grown]
        valid = torch.cat([part.flatten(1) for part in parts], dim=1)
    if grown[0].probs is not None:
        probs = torch.cat([children.probs for children in grown if children.probs is not None], dim=1)
    return Grown(
        tokens=ids,
        drawn=torch.cat([children.drawn.flatten(1) for children in grown], dim=1),
        confidence=torch.cat([children.confidence.flatten(1) for children in grown], dim=1),
        valid=valid,
        probs=probs,
        run=run,
    )


def _at_temperature(sampler: Sampler, temperature: float) -> Sampler:
    params = dataclasses.replace(sampler.params, temperature=temperature)
    return Sampler(params, sampler.prompt, banned_until_min=sampler.banned_until_min, bad_words=sampler.bad_words)
