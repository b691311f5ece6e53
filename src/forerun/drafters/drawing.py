"""Children of a whole level at once, from numbers that were drawn before the first level.

So levels follow each other without a wait for the host, and may be one recording. What comes out is what `growth.grow`
draws one node at a time from the same coins; that serves where processors look at each node's path. Knows no model and
no rule.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from forerun.devices import widest
from forerun.drafters.growth import Children, DraftVocabulary, Draw, Grower, Shape, likeliest
from forerun.errors import NoTokenLeftError, NumericError
from forerun.sampling import law_of, quantiles
from forerun.types import Drawn, SamplingParams

_EVERYTHING = 2.0
"""A mass that no set of tokens reaches: stands for no top-p."""


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
    """(B,) where each law is filtered by itself, on the host; empty where all are sorted at once."""
    numbers: tuple[Tensor, ...]
    """Empty where no row is sampled; else, in the device's widest type, uniforms (B, children of all levels) and
    settings (B, 5): whether the row is sampled, temperature, top-k, top-p, min-p. Nothing else differs between calls
    with the same `key`."""

    @classmethod
    def of(cls, growers: Sequence[Grower], shape: Shape, device: torch.device, *, sorts: bool) -> Draws | None:
        """None where the host has to look at every node: processors, or coins of another kind.

        `sorts`: filter all laws of a level at once; on a CPU it is faster one by one.
        """
        if not all(grower.sampler.neutral for grower in growers):
            return None
        sampled = [grower for grower in growers if not grower.sampler.greedy]
        filters = any(_filters(grower.sampler.params) for grower in sampled)
        numbers: tuple[Tensor, ...] = ()
        if sampled:
            places = _places(shape)
            uniforms = [row for grower in growers if (row := grower.coins.uniforms(places)) is not None]
            if len(uniforms) < len(growers):
                return None
            settings = [_setting(grower.sampler.params) for grower in growers]
            numbers = tuple(
                torch.from_numpy(np.array(table)).to(widest(device)).to(device) for table in (uniforms, settings)
            )
        drawn = {grower.draw for grower in sampled}
        assert len(drawn) < 2, "one tree draws in one way"
        return cls(
            shape=shape,
            draw=drawn.pop() if drawn else Draw.GIVEN,
            greedy=len(sampled) < len(growers),
            filters=filters,
            one_by_one=[grower.sampler.params for grower in growers] if filters and not sorts else (),
            numbers=numbers,
        )

    @property
    def key(self) -> Hashable:
        """Tells courses of one shape apart."""
        return self.draw, self.greedy, self.sampled, self.filters

    @property
    def sampled(self) -> bool:
        """Whether there are rows above temperature 0."""
        return bool(self.numbers)

    def of_numbers(self, numbers: tuple[Tensor, ...]) -> Draws:
        """The same course with other numbers."""
        return replace(self, numbers=numbers)

    def children(self, logits: Tensor, depth: int, vocabulary: DraftVocabulary | None = None) -> Children:
        """As many children of every node at `depth` as any has there, from raw logits (B, F, V)."""
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
            laws=drawn.laws,
        )

    def _drawn(self, logits: Tensor, depth: int, count: int) -> Children:
        laws = self._laws(logits)
        before = sum(len(self.shape.levels[above]) * self.shape.widths[above] for above in range(depth))
        size = laws.shape[1] * count
        uniforms = self.numbers[0][:, before : before + size].view(-1, laws.shape[1], count)
        if self.draw is Draw.GIVEN:
            tokens, chances = _top(laws, count)
            return _packed([(tokens, chances, chances > 0, Drawn.GIVEN)], None)
        if self.draw is Draw.IID:
            surest = laws.amax(-1, keepdim=True).expand(-1, -1, count)
            return _packed([(quantiles(laws, uniforms), surest, surest > 0, Drawn.IID)], laws)
        if self.draw is Draw.WITHOUT_REPLACEMENT:
            return _without_replacement(laws, uniforms)
        return _greedy_k(laws, uniforms)

    def _laws(self, logits: Tensor) -> Tensor:
        """(B, F, V) float32."""
        if not self.one_by_one:
            return laws_of(logits, self.numbers[1], filters=self.filters)
        rows = zip(logits.float(), self.one_by_one, strict=True)
        return torch.stack([torch.stack([_law_of(node, params) for node in row]) for row, params in rows])


_Drawn = tuple[Tensor, Tensor, Tensor, Drawn]
"""Tokens, confidence and validity (B, F, C) of children that came about in one way."""


def _packed(parts: Sequence[_Drawn], laws: Tensor | None) -> Children:
    kinds = [torch.full_like(tokens, int(kind), dtype=torch.uint8) for tokens, _, _, kind in parts]
    return Children(
        tokens=torch.cat([part[0] for part in parts], dim=-1),
        drawn=torch.cat(kinds, dim=-1),
        confidence=torch.cat([part[1] for part in parts], dim=-1),
        valid=torch.cat([part[2] for part in parts], dim=-1),
        laws=laws,
    )


def _without_replacement(laws: Tensor, uniforms: Tensor) -> Children:
    """One after the other, the elder ones removed and the rest renormalised."""
    rest, parts = laws, list[_Drawn]()
    for index in range(uniforms.shape[-1]):
        surest, token = rest.amax(-1, keepdim=True), quantiles(rest, uniforms[..., index : index + 1])
        parts.append((token, surest, surest > 0, Drawn.WITHOUT_REPLACEMENT))
        rest = _renormalised(rest.scatter(-1, token, 0.0))
    return _packed(parts, laws)


def _greedy_k(laws: Tensor, uniforms: Tensor) -> Children:
    """The likeliest, and one drawn from the law restricted to the others."""
    parts, rest, count = list[_Drawn](), laws, uniforms.shape[-1] - 1
    if count:
        tokens, chances = _top(laws, count)
        parts.append((tokens, chances, chances > 0, Drawn.GIVEN))
        rest = laws.scatter(-1, tokens, 0.0)
    mass = rest.sum(-1, keepdim=True)
    rest = _renormalised(rest)
    surest = rest.amax(-1, keepdim=True) * mass
    parts.append((quantiles(rest, uniforms[..., -1:]), surest, mass > 0, Drawn.IID))
    return _packed(parts, rest)


def _top(laws: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Tokens and probabilities (B, F, C) of the likeliest; zeros where there are fewer tokens."""
    best = laws.topk(min(count, laws.shape[-1]), dim=-1)
    missing = count - best.indices.shape[-1]
    return pad(best.indices, (0, missing)), pad(best.values, (0, missing))


def _renormalised(rest: Tensor) -> Tensor:
    return rest / rest.sum(-1, keepdim=True).clamp_min(torch.finfo(rest.dtype).tiny)


def _law_of(logits: Tensor, params: SamplingParams) -> Tensor:
    """`sampling.law_of`; NaN where that refuses the logits (V,)."""
    try:
        return law_of(logits, params)
    except (NumericError, NoTokenLeftError):
        return torch.full_like(logits, torch.nan)


def laws_of(logits: Tensor, settings: Tensor, *, filters: bool) -> Tensor:
    """(B, F, V) float32: `sampling.law_of` for each row's settings; NaN where that refuses the logits."""
    temperature, top_k, top_p, min_p = settings[:, 1:, None, None].unbind(1)
    values = logits.float()
    scaled = (values - values.amax(-1, keepdim=True)) / temperature.float()
    if not filters:
        return scaled.softmax(-1)
    scaled = scaled.masked_fill(scaled < min_p.log().float(), -torch.inf)
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    last = (top_k.long() - 1).clamp(0, logits.shape[-1] - 1).expand(-1, logits.shape[1], -1)
    scaled = scaled.masked_fill(scaled < ordered.gather(-1, last), -torch.inf)
    laws = scaled.softmax(-1)
    falling = laws.gather(-1, order)
    inside = falling.cumsum(-1, dtype=widest(laws.device)) - falling < top_p
    return _renormalised(laws * torch.zeros_like(inside).scatter(-1, order, inside))


@lru_cache(maxsize=64)
def _places(shape: Shape) -> tuple[tuple[int, int], ...]:
    """(node, index) of every child, level by level, as wide as the level's widest node."""
    levels = zip(shape.levels[:-1], shape.widths, strict=True)
    return tuple((node, index) for level, width in levels for node in level for index in range(width))


def _filters(params: SamplingParams) -> bool:
    return bool(params.min_p or (params.top_k or 0) > 0 or (params.top_p is not None and params.top_p < 1))


def _setting(params: SamplingParams) -> tuple[float, ...]:
    temperature = 1.0 if params.greedy or params.temperature is None else params.temperature
    top_k = params.top_k if params.top_k is not None and params.top_k > 0 else 1 << 31
    top_p = params.top_p if params.top_p is not None and params.top_p < 1 else _EVERYTHING
    return (0.0 if params.greedy else 1.0, temperature, top_k, top_p, params.min_p or 0.0)
