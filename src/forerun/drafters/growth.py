"""From a draft distribution to the children of a node: top-k, iid, without replacement, greedy-k; and the fixed shape
of a tree.

Shared by every drafter whose distribution is known at a node before its children are drawn. What is recorded is what
was drawn from. Knows no model and no rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache, partial
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from forerun.core.sampling import Rng, Sampler
from forerun.errors import ArgumentError, NumericError, of_the_process
from forerun.types import DraftKind, Drawn

T = TypeVar("T")
P = ParamSpec("P")


class Draw(StrEnum):
    """How the children of a node come about."""

    AUTO = "auto"
    """Given at temperature 0; above it a chain is drawn iid and a tree without replacement."""
    DETERMINISTIC = "deterministic"
    """The likeliest tokens."""
    IID = "iid"
    WITHOUT_REPLACEMENT = "without_replacement"
    GREEDY_K = "greedy_k"
    """The likeliest tokens and one drawn from the distribution restricted to the others (arXiv 2502.18779)."""


def resolve(draw: Draw, *, greedy: bool, chain: bool) -> Draw:
    """What `draw` means for one row; at temperature 0 there is nothing to draw."""
    if greedy:
        return Draw.DETERMINISTIC
    if draw is not Draw.AUTO:
        return draw
    return Draw.IID if chain else Draw.WITHOUT_REPLACEMENT


def kind_of(draw: Draw, *, chain: bool) -> DraftKind:
    """What trees hold whose nodes are drawn so; `draw` is never AUTO."""
    return DraftKind(sampled=draw is not Draw.DETERMINISTIC, chain=chain, multipath=draw is Draw.GREEDY_K)


@dataclass(frozen=True)
class Shape:
    """A tree that is decided before anything is drawn. Nodes are numbered level by level, siblings side by side."""

    counts: tuple[int, ...]
    """(N,) children of every node, the root's first; nodes behind the last entry have none."""

    @classmethod
    def regular(cls, children: Sequence[int]) -> Shape:
        """The tree in which each node at depth 0, 1, ... has so many children; ones make a chain."""
        counts, width = list[int](), 1
        for count in children:
            counts += [count] * width
            width *= count
        return cls(tuple(counts))

    @classmethod
    def of(cls, parents: Sequence[int]) -> Shape:
        """The tree with these parents of node 1, 2, ..., 0 the root.

        Raises:
            ArgumentError: a parent does not come before its child, or the nodes are not numbered level by level.
        """
        for node, parent in enumerate(parents, start=1):
            if not 0 <= parent < node or (node > 1 and parent < parents[node - 2]):
                raise ArgumentError(
                    f"node {node} of the tree has parent {parent}; number the nodes level by level, siblings side by "
                    "side: parents come before their children and never fall"
                )
        return cls(tuple(parents.count(node) for node in range(max(parents, default=-1) + 1)))

    @property
    def size(self) -> int:
        """K, nodes without the root."""
        return sum(self.counts)

    @property
    def chain(self) -> bool:
        return all(count == 1 for count in self.counts)

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """(N,) parent of each node, -1 of the root."""
        return (-1, *(node for node, count in enumerate(self.counts) for _ in range(count)))

    @cached_property
    def levels(self) -> tuple[range, ...]:
        """Node ids of each depth, the root's included."""
        levels, last = [range(1)], len(self.parents)
        while levels[-1].stop < last:
            below = sum(self.counts[levels[-1].start : levels[-1].stop])
            levels.append(range(levels[-1].stop, levels[-1].stop + below))
        return tuple(levels)

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Most children of a node at depth 0, 1, ..."""
        return tuple(max(self.counts[level.start : level.stop]) for level in self.levels[:-1])

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """(N,) place of each node among its siblings, the eldest 0."""
        return (0, *(rank for count in self.counts for rank in range(count)))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """(N,) depth of each node."""
        return tuple(depth for depth, level in enumerate(self.levels) for _ in level)

    def paths(self, depth: int) -> tuple[int, ...]:
        """(F * depth) for each node of a level, the nodes from the root's child down to it."""
        found = list[int]()
        for node in self.levels[depth]:
            path = [node] if node else []
            while len(path) < depth:
                path.insert(0, self.parents[path[0]])
            found += path
        return tuple(found)

    def chosen(self, depth: int) -> list[int] | None:
        """Which of ``widths[depth]`` children of every node of a level there are; None where all are."""
        level, width = self.levels[depth], self.widths[depth]
        counts = [self.counts[node] if node < len(self.counts) else 0 for node in level]
        if min(counts) == width:
            return None
        return [place * width + rank for place, count in enumerate(counts) for rank in range(count)]

    def within(self, nodes: int, depth: int) -> int:
        """How many nodes, from the first, fit a budget: decided by the shape alone, so never by a drawn value."""
        last = self.levels[min(depth, len(self.widths))].stop - 1 if depth > 0 else 0
        return max(0, min(nodes, last))


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftVocabulary:
    """A drafter's own, smaller vocabulary."""

    token_ids: Tensor
    """(V',) int64, the target's id of each entry."""
    size: int
    """V, of the target."""

    def spread(self, logits: Tensor) -> Tensor:
        """(.., V') -> (.., V): tokens that the drafter lacks are impossible."""
        wide = logits.new_full((*logits.shape[:-1], self.size), -torch.inf)
        wide[..., self.token_ids] = logits
        return wide


@dataclass(frozen=True, kw_only=True, slots=True)
class Grower:
    """How one row draws."""

    draw: Draw
    """Never AUTO."""
    sampler: Sampler
    """Of the request, so that draft and target distributions see the same processors."""
    rng: Rng
    output: Sequence[int]
    """The row's output so far, root included; may be empty where `sampler.neutral`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Children:
    """The children of a level: F parent nodes in each of B rows, C children each."""

    tokens: Tensor
    """(B, F, C) int64"""
    drawn: Tensor
    """(B, F, C) uint8"""
    confidence: Tensor
    """(B, F, C) float32: of a deterministic node its probability; of a drawn one a figure that does not depend on its
    value."""
    valid: Tensor | None
    """(B, F, C) bool: False where the distribution had no further token; None where all are good."""
    probs: Tensor | None
    """(B, F, V) of each parent, the distribution that its sampled children were drawn from; None where all are
    deterministic."""

    def only(self, chosen: Sequence[int]) -> Children:
        """Those children alone, by index into (F * C); as (B, M, 1), the eldest siblings of a node being the first."""

        def pick(values: Tensor) -> Tensor:
            return values.flatten(1).index_select(1, constant(tuple(chosen), values.device)).unsqueeze(-1)

        valid = None if self.valid is None else pick(self.valid)
        tokens, drawn, confidence = pick(self.tokens), pick(self.drawn), pick(self.confidence)
        return Children(tokens=tokens, drawn=drawn, confidence=confidence, valid=valid, probs=self.probs)


@lru_cache(maxsize=1024)
@torch.inference_mode(mode=False)
def constant(values: tuple[int, ...], device: torch.device) -> Tensor:
    """(N,) int64 on a device, taken there once: a level that needs it does not wait for the host. Never write to it."""
    return torch.tensor(values, dtype=torch.int64, device=device)


def likeliest(logits: Tensor, count: int, vocabulary: DraftVocabulary | None = None) -> Children:
    """The `count` likeliest tokens at each node, from raw logits (B, F, V): no distribution, no wait for the host."""
    best = logits.topk(count, dim=-1) if count > 1 else logits.max(dim=-1, keepdim=True)
    confidence = (best.values.float() - logits.logsumexp(-1, keepdim=True).float()).exp()
    drawn = torch.full(best.indices.shape, int(Drawn.DETERMINISTIC), dtype=torch.uint8, device=logits.device)
    tokens = best.indices if vocabulary is None else vocabulary.token_ids[best.indices]
    return Children(tokens=tokens, drawn=drawn, confidence=confidence, valid=None, probs=None)


def grow(
    logits: Tensor,
    count: int,
    growers: Sequence[Grower],
    level: range,
    paths: Callable[[int, int], list[int]],
    vocabulary: DraftVocabulary | None = None,
) -> Children:
    """Children of every node of a level.

    Args:
        logits: (B, F, V) raw, over the target's vocabulary, or (B, F, V') over `vocabulary`.
        count: C, children per node.
        growers: (B,) one per row.
        level: the F node ids.
        paths: (row, node) -> tokens from the root's child to the node; called only where a processor needs them.
        vocabulary: of the drafter, where it is not the target's.
    """
    if vocabulary is not None:
        logits = vocabulary.spread(logits)
    batch, width = logits.shape[:2]
    found = [
        [
            attempt(_NONE, _children, logits[row, place], count, growers[row], node, partial(paths, row, node))
            for place, node in enumerate(level)
        ]
        for row in range(batch)
    ]
    probs = None
    if any(grower.draw is not Draw.DETERMINISTIC for grower in growers):
        blank = logits.new_zeros(logits.shape[-1], dtype=torch.promote_types(logits.dtype, torch.float32))
        rows = [torch.stack([blank if node.probs is None else node.probs for node in nodes]) for nodes in found]
        probs = torch.stack(rows)

    def pack(name: str, dtype: torch.dtype) -> Tensor:
        values = [[list(getattr(node, name)) + [0] * (count - len(node.tokens)) for node in nodes] for nodes in found]
        return torch.tensor(values, dtype=dtype, device=logits.device).view(batch, width, count)

    short = any(len(node.tokens) < count for nodes in found for node in nodes)
    lengths = torch.tensor([[len(node.tokens) for node in nodes] for nodes in found], device=logits.device)
    valid = torch.arange(count, device=logits.device) < lengths.unsqueeze(-1) if short else None
    return Children(
        tokens=pack("tokens", torch.int64),
        drawn=pack("drawn", torch.uint8),
        confidence=pack("confidence", torch.float32),
        valid=valid,
        probs=probs,
    )


@dataclass(frozen=True, slots=True)
class Siblings:
    """The children of one node, in the order they were drawn."""

    tokens: list[int]
    drawn: list[Drawn]
    confidence: list[float]
    probs: Tensor | None
    """(V,) what the sampled ones were drawn from; None where all are deterministic."""


_NONE = Siblings([], [], [], None)


def _children(logits: Tensor, count: int, grower: Grower, node: int, path: Callable[[], list[int]]) -> Siblings:
    """Where numbers are not finite there is one child, whose confidence says so."""
    sampler = grower.sampler
    output = [] if sampler.neutral else [*grower.output, *path()]
    try:
        probs = sampler.process(logits, output).softmax(-1) if sampler.greedy else sampler.probs(logits, output)
    except NumericError:
        return Siblings([0], [Drawn.DETERMINISTIC], [math.nan], None)
    return siblings(probs, count, grower.draw, lambda probs, index: grower.rng.drafted(probs, node, index))


def attempt(instead: T, work: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> T:
    """What `work` gives, which applies one row's own processors, or `instead` where it raises.

    The target meets the same error, if it comes there; or it knows tokens that are left where a smaller vocabulary has
    none. The other rows have no part in it.
    """
    try:
        return work(*arguments, **keywords)
    except BaseException as error:
        if of_the_process(error):
            raise
        return instead


def siblings(probs: Tensor, count: int, draw: Draw, pick: Callable[[Tensor, int], int]) -> Siblings:
    """Up to `count` children of one node, fewer where the distribution's support is smaller.

    Args:
        probs: (V,) float32, what the drafter expects after the node.
        count: at least 1.
        draw: never AUTO.
        pick: (probs, child's index) -> token drawn from that distribution.
    """
    if draw is Draw.DETERMINISTIC:
        return _given(probs, count)
    if draw is Draw.IID:
        tokens = [pick(probs, index) for index in range(count)]
        return Siblings(tokens, [Drawn.IID] * count, [float(probs.max())] * count, probs)
    if draw is Draw.WITHOUT_REPLACEMENT:
        return _without_replacement(probs, count, pick)
    return _greedy_k(probs, count, pick)


def _given(probs: Tensor, count: int) -> Siblings:
    best = probs.topk(min(count, len(probs)))
    pairs = [(token, prob) for token, prob in zip(best.indices.tolist(), best.values.tolist(), strict=True) if prob > 0]
    return Siblings(
        [token for token, _ in pairs], [Drawn.DETERMINISTIC] * len(pairs), [prob for _, prob in pairs], None
    )


def _without_replacement(probs: Tensor, count: int, pick: Callable[[Tensor, int], int]) -> Siblings:
    """One after the other, the elder ones removed and the rest renormalised."""
    rest, tokens, confidence = probs.clone(), list[int](), list[float]()
    for index in range(min(count, int((probs > 0).sum()))):
        confidence.append(float(rest.max()))
        token = pick(rest, index)
        tokens.append(token)
        rest[token] = 0.0
        rest /= rest.sum().clamp_min(torch.finfo(rest.dtype).tiny)
    return Siblings(tokens, [Drawn.WITHOUT_REPLACEMENT] * len(tokens), confidence, probs)


def _greedy_k(probs: Tensor, count: int, pick: Callable[[Tensor, int], int]) -> Siblings:
    """The ``count - 1`` likeliest, and one drawn from the distribution restricted to the others, which is what is
    recorded."""
    best = _given(probs, count - 1) if count > 1 else Siblings([], [], [], None)
    rest = probs.clone()
    rest[best.tokens] = 0.0
    mass = float(rest.sum())
    if mass <= 0:
        return best
    rest /= rest.sum()
    token = pick(rest, len(best.tokens))
    confidence = [*best.confidence, float(rest.max()) * mass]
    return Siblings([*best.tokens, token], [*best.drawn, Drawn.IID], confidence, rest)
