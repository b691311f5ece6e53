"""The children of a node are drawn from a draft distribution: top-k, iid, without replacement, or greedy-k.

All drafters share this whose distribution at a node is known before its children are drawn. The recorded distribution
is the one that was drawn from. `Draws` draws all nodes of one depth at once, from random numbers that were made before
the first depth, so that depths follow each other without a wait for the host and may be one recording (CUDA graph).
`HostDraws` draws the same tokens node by node, for processors that read each node's path.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from forerun.core.rng import Rng, quantiles
from forerun.core.sampling import Processing, Sampler, distribution_of, has_filters, probs_of, settings_of, widen
from forerun.devices import constant, send, widest
from forerun.errors import ArgumentError, NumericError, of_the_process
from forerun.types import Drawn, SamplingParams

T = TypeVar("T")


class Draw(StrEnum):
    """The ways of drawing the children of a node."""

    AUTO = "auto"  # Deterministic at temperature 0; above it, iid for a chain and without replacement for a tree
    DETERMINISTIC = "deterministic"  # The likeliest tokens
    IID = "iid"
    WITHOUT_REPLACEMENT = "without_replacement"
    GREEDY_K = "greedy_k"  # The likeliest tokens and one drawn from the others (arXiv 2502.18779)


def resolve(draw: Draw, *, greedy: bool, chain: bool) -> Draw:
    """Return the way of drawing for one row, never AUTO; at temperature 0 it is DETERMINISTIC."""
    if greedy:
        return Draw.DETERMINISTIC
    if draw is not Draw.AUTO:
        return draw
    return Draw.IID if chain else Draw.WITHOUT_REPLACEMENT


@dataclass(frozen=True)
class Shape:
    """The fixed shape of a tree, decided before anything is drawn. Nodes are numbered depth by depth, siblings next to
    each other.
    """

    counts: tuple[int, ...]
    """(N,) number of children of every node, the root first; nodes after the last entry have none."""

    @classmethod
    def regular(cls, children: Sequence[int]) -> Shape:
        """Return the tree whose nodes at depth 0, 1, ... have `children` children each; ones give a chain."""
        counts, width = list[int](), 1
        for count in children:
            counts += [count] * width
            width *= count
        return cls(tuple(counts))

    @classmethod
    def of(cls, parents: Sequence[int] | str) -> Shape:
        """Return the tree with these parents of node 1, 2, ... (0 is the root), or one of `PUBLISHED` by name. Raises
        ArgumentError for another name, and unless nodes are numbered depth by depth.
        """
        if isinstance(parents, str):
            if parents not in PUBLISHED:
                raise ArgumentError(f"unknown tree {parents!r}; there are {', '.join(PUBLISHED)}, or parents of nodes")
            return cls(PUBLISHED[parents])
        for node, parent in enumerate(parents, start=1):
            if not 0 <= parent < node or (node > 1 and parent < parents[node - 2]):
                raise ArgumentError(
                    f"node {node} of the tree has parent {parent}; number the nodes depth by depth, siblings next to "
                    "each other, parents before their children"
                )
        return cls(tuple(parents.count(node) for node in range(max(parents, default=-1) + 1)))

    @property
    def size(self) -> int:
        """Number of nodes K without the root."""
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
        """Node ids by depth, the root at depth 0."""
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
        """(N,) rank of each node among its siblings, 0 for the first."""
        return (0, *(rank for count in self.counts for rank in range(count)))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """(N,) depth of each node."""
        return tuple(depth for depth, level in enumerate(self.levels) for _ in level)

    def path(self, node: int) -> list[int]:
        """Return the nodes from the root's child down to `node`; empty for the root."""
        nodes = list[int]()
        while node:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def chosen(self, depth: int) -> list[int] | None:
        """Return which of the ``widths[depth]`` children of every node at `depth` exist; None if all do."""
        level, width = self.levels[depth], self.widths[depth]
        counts = [self.counts[node] if node < len(self.counts) else 0 for node in level]
        if min(counts) == width:
            return None
        return [index * width + rank for index, count in enumerate(counts) for rank in range(count)]

    def within(self, nodes: int, depth: int) -> int:
        """Return how many nodes, from the first one on, fit a budget. It depends on the shape only, never on a drawn
        token.
        """
        last = self.levels[min(depth, len(self.widths))].stop - 1 if depth > 0 else 0
        return max(0, min(nodes, last))


PUBLISHED: dict[str, tuple[int, ...]] = {
    # Medusa's and Hydra's sparse tree of 63 nodes, made for heads of Vicuna 7B by their accuracies on Alpaca.
    "mc_sim_7b_63": (
        *(10, 10, 7, 3, 2, 1, 1, 1, 1, 1, 1),
        *(10, 3, 2, 1, 1, 1, 1, 1, 0, 0, 2, 0, 0, 0, 0, 0, 0, 1, *[0] * 10, 2),
    )
}
"""Published trees by their names, as `Shape.counts`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftVocabulary:
    """A drafter's own, smaller vocabulary."""

    token_ids: Tensor  # (V',) int64, target token id of each entry
    size: int  # V, of the target

    def to_target_vocab(self, logits: Tensor) -> Tensor:
        """Map logits (.., V') to the target's vocabulary, (.., V): tokens that the drafter lacks get minus infinity."""
        wide = logits.new_full((*logits.shape[:-1], self.size), -torch.inf)
        wide[..., self.token_ids] = logits
        return wide


@dataclass(frozen=True, kw_only=True, slots=True)
class Grower:
    """The draw settings of one row."""

    draw: Draw  # Never AUTO
    sampler: Sampler  # The request's sampler, so that the draft distribution has the same processors as the target's
    rng: Rng
    output: Sequence[int]  # The row's output so far, root included; may be empty where `sampler.neutral`


@dataclass(frozen=True, kw_only=True, slots=True)
class Children:
    """The children of the nodes of one depth: F parent nodes in each of B rows, C children each."""

    tokens: Tensor  # (B, F, C) int64
    drawn: Tensor  # (B, F, C) uint8
    confidence: Tensor
    """(B, F, C) float32: a deterministic node's probability; for a drawn one independent of its token."""
    valid: Tensor | None  # (B, F, C) bool: False where the distribution had no further token; None: all are valid
    probs: Tensor | None  # (B, F, V) distribution of each parent's sampled children; None if there are none

    def validity(self) -> Tensor:
        """Return `valid` as a tensor, also if it is None."""
        return torch.ones_like(self.tokens, dtype=torch.bool) if self.valid is None else self.valid

    def with_acceptance(self, acceptance: Tensor | None) -> Children:
        """Replace the confidence of drawn children by `acceptance` (B, F), the estimate for each parent."""
        if acceptance is None:
            return self
        estimate = acceptance.unsqueeze(-1).float()
        return replace(self, confidence=torch.where(self.drawn == int(Drawn.DETERMINISTIC), self.confidence, estimate))

    def only(self, chosen: Sequence[int]) -> Children:
        """Select children by index into (F * C), as (B, M, 1); siblings keep their order."""
        index = constant(tuple(chosen), self.tokens.device)

        def pick(values: Tensor) -> Tensor:
            return values.flatten(1).index_select(1, index).unsqueeze(-1)

        picked = {name: pick(getattr(self, name)) for name in _COLUMNS}
        return replace(self, **picked, valid=None if self.valid is None else pick(self.valid))


_COLUMNS = ("tokens", "drawn", "confidence")


def likeliest(logits: Tensor, count: int, vocabulary: DraftVocabulary | None = None) -> Children:
    """Return the `count` likeliest tokens at each node, from raw logits (B, F, V), without computing a distribution or
    waiting for the device.
    """
    best = logits.topk(count, dim=-1) if count > 1 else logits.max(dim=-1, keepdim=True)
    confidence = (best.values.float() - logits.logsumexp(-1, keepdim=True).float()).exp()
    return Children(
        tokens=best.indices if vocabulary is None else vocabulary.token_ids[best.indices],
        drawn=torch.full(best.indices.shape, int(Drawn.DETERMINISTIC), dtype=torch.uint8, device=logits.device),
        confidence=confidence,
        valid=None,
        probs=None,
    )


Pick = Callable[[Tensor, range], Tensor]  # (distributions (B, F, V), indices of n children) -> drawn tokens (B, F, n)


def children_of(probs: Tensor, count: int, draw: Draw, pick: Pick) -> Children:
    """Draw `count` children of every node from `probs` (B, F, V) in the way `draw`, which is not AUTO; `pick` draws the
    sampled ones. Children beyond a distribution's support are not valid.
    """
    if draw is Draw.DETERMINISTIC:
        return _pack_children([_top(probs, count)], None)
    if draw is Draw.IID:
        surest = probs.amax(-1, keepdim=True).expand(-1, -1, count)
        return _pack_children([(pick(probs, range(count)), surest, surest > 0, Drawn.IID)], probs)
    rest, parts = probs, list[_Drawn]()
    if draw is Draw.WITHOUT_REPLACEMENT:  # One after the other; drawn tokens are removed and the rest is renormalised
        for index in range(count):
            surest = rest.amax(-1, keepdim=True)
            token = pick(rest, range(index, index + 1))
            parts.append((token, surest, surest > 0, Drawn.WITHOUT_REPLACEMENT))
            rest = _renormalise(rest.scatter(-1, token, 0.0))
        return _pack_children(parts, probs)
    if count > 1:
        parts.append(_top(probs, count - 1))
        rest = probs.scatter(-1, parts[0][0], 0.0)
    mass = rest.sum(-1, keepdim=True)
    rest = _renormalise(rest)
    surest = rest.amax(-1, keepdim=True) * mass
    parts.append((pick(rest, range(count - 1, count)), surest, mass > 0, Drawn.IID))
    return _pack_children(parts, rest)


_Drawn = tuple[Tensor, Tensor, Tensor, Drawn]  # Tokens, confidence, validity (B, F, C) of children, and their kind


def _pack_children(parts: Sequence[_Drawn], probs: Tensor | None) -> Children:
    kinds = [torch.full_like(tokens, int(kind), dtype=torch.uint8) for tokens, _, _, kind in parts]
    return Children(
        tokens=torch.cat([part[0] for part in parts], dim=-1),
        drawn=torch.cat(kinds, dim=-1),
        confidence=torch.cat([part[1] for part in parts], dim=-1).float(),
        valid=torch.cat([part[2] for part in parts], dim=-1),
        probs=probs,
    )


def _top(probs: Tensor, count: int) -> _Drawn:
    """Return the likeliest tokens, padded with zeros where there are fewer."""
    best = probs.topk(min(count, probs.shape[-1]), dim=-1)
    tokens, chances = (pad(values, (0, count - values.shape[-1])) for values in (best.indices, best.values))
    return tokens, chances, chances > 0, Drawn.DETERMINISTIC


def _renormalise(rest: Tensor) -> Tensor:
    return rest / rest.sum(-1, keepdim=True).clamp_min(torch.finfo(rest.dtype).tiny)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostDraws:
    """Draws a tree of one shape for B rows, node by node on the host; it has the interface of `Draws`."""

    shape: Shape
    growers: Sequence[Grower]  # (B,)
    key: ClassVar[None] = None  # It reads values on the host, so it cannot be recorded
    tensors: ClassVar[tuple[Tensor, ...]] = ()

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> HostDraws:
        return self

    def children(self, logits: Tensor, depth: int, ids: Tensor, vocabulary: DraftVocabulary | None = None) -> Children:
        """Draw the children of the nodes at `depth`, as `Draws.children` does."""
        if vocabulary is not None:
            logits = vocabulary.to_target_vocab(logits)
        blank = logits.new_zeros(1, 1, logits.shape[-1], dtype=torch.promote_types(logits.dtype, torch.float32))
        none = _pack_children([_top(blank, self.shape.widths[depth])], None)
        drawn_nodes = [
            [
                attempt(none, self._of_node, logits[row, index], grower, node, ids[row])
                for index, node in enumerate(self.shape.levels[depth])
            ]
            for row, grower in enumerate(self.growers)
        ]

        def joined(values: Callable[[Children], Tensor]) -> Tensor:
            return torch.cat([torch.cat([values(node) for node in nodes], dim=1) for nodes in drawn_nodes])

        sampled = any(grower.draw is not Draw.DETERMINISTIC for grower in self.growers)
        probs = joined(lambda node: blank if node.probs is None else node.probs) if sampled else None
        columns = {name: joined(attrgetter(name)) for name in _COLUMNS}
        return Children(**columns, valid=joined(Children.validity), probs=probs)

    def _of_node(self, logits: Tensor, grower: Grower, node: int, ids: Tensor) -> Children:
        """Draw the children of one node, (1, 1, C). If its logits are not finite, no child is valid and the confidences
        are not finite either.
        """
        sampler, draw, path = grower.sampler, grower.draw, self.shape.path(node)
        output = [] if sampler.neutral else [*grower.output, *(int(ids[above - 1]) for above in path)]
        try:
            probs = sampler.process(logits, output).softmax(-1) if sampler.greedy else sampler.probs(logits, output)
        except NumericError:
            probs, draw = torch.full_like(logits, torch.nan), Draw.DETERMINISTIC
        pick = on_host(lambda probs, index: grower.rng.drafted(probs, node, index))
        return children_of(probs.view(1, 1, -1), self.shape.widths[len(path)], draw, pick)


def on_host(draw: Callable[[Tensor, int], int]) -> Pick:
    """Return a `Pick` that draws one node's children one by one with `draw`: (distribution (V,), index of the child) ->
    token.
    """

    def pick(probs: Tensor, indices: range) -> Tensor:
        some = bool(probs.sum() > 0)
        return torch.tensor([[[draw(probs[0, 0], index) if some else 0 for index in indices]]], device=probs.device)

    return pick


def attempt(instead: T, work: Callable[..., T], *arguments: Any) -> T:
    """Return the result of `work`, which applies one row's processors, or `instead` if it raises. The error is not
    lost: the target raises it, too, when it scores that node, unless the drafter's smaller vocabulary alone has no
    token left.
    """
    try:
        return work(*arguments)
    except BaseException as error:
        if of_the_process(error):
            raise
        return instead


@dataclass(frozen=True, kw_only=True, slots=True)
class Draws:
    """Draws a tree of one shape for B rows, with operations that do not depend on the values."""

    shape: Shape
    draw: Draw  # For rows above temperature 0, never AUTO; the others take the likeliest tokens
    greedy: bool  # Whether there are rows at temperature 0
    filters: bool  # Whether a row has a top-k, top-p or min-p
    one_by_one: Sequence[SamplingParams]  # (B,) if distributions are filtered one by one, on the host; else empty
    numbers: tuple[Tensor, ...]
    """Empty if no row is sampled; else, in the device's widest type, uniform numbers (B, children of all depths) and
    settings (B, 5), see `sampling.settings_of`.
    """
    processing: Processing | None
    """Penalties, biases and bans. Calls with one `key` differ in its tensors and in `numbers`."""

    @classmethod
    def of(
        cls, growers: Sequence[Grower], shape: Shape, device: torch.device, *, vocabulary: int, sorts: bool
    ) -> Draws | None:
        """Prepare the draws of these rows; None if the host has to process every node, because of a custom processor or
        another kind of rng. With `sorts` all distributions of one depth are filtered at once; a CPU is faster one by
        one.
        """
        if not all(grower.sampler.neutral or grower.sampler.fits(vocabulary) for grower in growers):
            return None
        sampled = [grower for grower in growers if not grower.sampler.greedy]
        filters = any(has_filters(grower.sampler.params) for grower in sampled)
        numbers: tuple[Tensor, ...] = ()
        if sampled:
            children = _child_indices(shape)
            uniforms = [row for grower in growers if (row := grower.rng.uniforms(children)) is not None]
            if len(uniforms) < len(growers):
                return None
            settings = [settings_of(grower.sampler.params) for grower in growers]
            tables = [torch.from_numpy(np.array(table)).to(widest(device)) for table in (uniforms, settings)]
            numbers = tuple(send(tables, device))
        drawn = {grower.draw for grower in sampled}
        assert len(drawn) < 2, "all sampled rows of a tree draw in the same way"
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
        """The properties that determine the operations for one shape."""
        processing = None if self.processing is None else self.processing.key
        return self.draw, self.greedy, bool(self.numbers), self.filters, processing

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that differ between calls with the same `key`."""
        return self.numbers + (() if self.processing is None else self.processing.tensors)

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> Draws:
        """Return the same draws with other tensors."""
        count = len(self.numbers)
        return replace(
            self,
            numbers=tensors[:count],
            processing=None if self.processing is None else self.processing.with_tensors(tensors[count:]),
        )

    def children(self, logits: Tensor, depth: int, ids: Tensor, vocabulary: DraftVocabulary | None = None) -> Children:
        """Draw the children of every node at `depth`, as many as the node with the most children has, from raw logits
        (B, F, V) and the tokens `ids` (B, K) of all nodes so far.
        """
        if self.processing is None:
            return self._children(logits, depth, vocabulary)
        wide = logits if vocabulary is None else vocabulary.to_target_vocab(logits)
        values = self._process(self.processing, wide, depth, ids)
        none = values.amax(-1, keepdim=True) == -torch.inf
        children = self._children(torch.where(none, 0.0, values), depth, None)
        return replace(children, valid=children.validity() & ~none)

    def _process(self, processing: Processing, logits: Tensor, depth: int, ids: Tensor) -> Tensor:
        batch, width, size = logits.shape
        values = widen(logits)
        above = tuple(one - 1 for node in self.shape.levels[depth] for one in self.shape.path(node))
        paths = ids.index_select(1, constant(above, ids.device))
        first = torch.arange(batch * width, device=ids.device).view(batch, width, 1) * size
        drafted = (first + paths.view(batch, width, depth)).flatten()
        depths = torch.full((1, width), depth, dtype=torch.int64, device=ids.device)
        return processing.apply(values, drafted, depths)

    def _children(self, logits: Tensor, depth: int, vocabulary: DraftVocabulary | None) -> Children:
        count = self.shape.widths[depth]
        if not self.numbers:
            return likeliest(logits, count, vocabulary)
        drawn = self._draw_level(logits if vocabulary is None else vocabulary.to_target_vocab(logits), depth, count)
        if not self.greedy:
            return drawn
        greedy = likeliest(logits, count, vocabulary)
        sampled = self.numbers[1][:, :1, None] > 0
        assert drawn.valid is not None
        mixed = {name: torch.where(sampled, getattr(drawn, name), getattr(greedy, name)) for name in _COLUMNS}
        return replace(drawn, **mixed, valid=drawn.valid | ~sampled)

    def _draw_level(self, logits: Tensor, depth: int, count: int) -> Children:
        if not self.one_by_one:
            probs = probs_of(logits, self.numbers[1], filters=self.filters)
        else:  # A node without finite numbers or without allowed tokens has no distribution
            rows = zip(logits.float(), self.one_by_one, strict=True)
            nan = torch.full_like(logits[0, 0], torch.nan, dtype=torch.float32)
            distributions = [[attempt(nan, distribution_of, node, params) for node in row] for row, params in rows]
            probs = torch.stack([torch.stack(row) for row in distributions])
        before = sum(len(self.shape.levels[above]) * self.shape.widths[above] for above in range(depth))
        uniforms = self.numbers[0][:, before : before + probs.shape[1] * count].view(-1, probs.shape[1], count)

        def pick(rest: Tensor, which: range) -> Tensor:
            return quantiles(rest, uniforms[..., which.start : which.stop])

        return children_of(probs, count, self.draw, pick)


@lru_cache(maxsize=64)
def _child_indices(shape: Shape) -> tuple[tuple[int, int], ...]:
    """Return (node, index) of every child, depth by depth, each node padded to the most children at its depth."""
    levels = zip(shape.levels[:-1], shape.widths, strict=True)
    return tuple((node, index) for level, width in levels for node in level for index in range(width))
