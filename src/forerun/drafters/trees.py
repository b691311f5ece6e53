"""Token trees that are grown depth by depth from a model's logits: of a fixed shape, or EAGLE-2's dynamic tree. Shared
by all drafters that run a model once for each depth; the logits come from a function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forerun.core.acceptance import Acceptance, Proposal, by_draft_prob
from forerun.core.sampling import Sampler
from forerun.core.tree import TokenTree, masses_of
from forerun.decode.drafter import DraftContext, Drafted, PerDomain, check_choice, check_least, with_params
from forerun.devices import fetch
from forerun.drafters.drawing import Children, DraftVocabulary, Draw, Draws, Grower, HostDraws, Shape, resolve
from forerun.errors import ArgumentError, NumericError
from forerun.params import GREEDY_BELOW, MAX_TEMPERATURE
from forerun.types import Budget, DraftKind, Drawn

Descend = Callable[[Tensor, range], Tensor]  # (ids (B, K) so far, nodes of the last depth) -> raw logits (B, F, V)
Enough = Callable[[int, Children], bool]  # (depth of the parents, children) -> whether to grow no further
Expand = Callable[[Tensor, Tensor], Tensor]  # (tokens, parents in the depth above (B, F)) -> logits (B, F or 1, V')


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedTree:
    """Grows trees of one fixed shape."""

    shape: Shape
    draw: Draw
    temperature: float | None = None  # Draft at this temperature instead of the request's, unless that is 0
    estimates: PerDomain[Acceptance] = field(default_factory=lambda: PerDomain(Acceptance))

    @property
    def run(self) -> int:
        return self.shape.size

    @property
    def depth(self) -> int:
        return len(self.shape.widths)

    def kind(self, sampler: Sampler) -> DraftKind:
        """Return the kind of trees that a request gets, which decides the verification rule."""
        draw, chain = self._draw(sampler), self.shape.chain
        return DraftKind(sampled=draw is not Draw.DETERMINISTIC, chain=chain, multipath=draw is Draw.GREEDY_K)

    def within(self, context: DraftContext, budget: Budget, max_length: int) -> list[int]:
        """Return how many nodes each row may submit. No path exceeds the draft model's context of `max_length`."""
        limits = zip(budget.nodes, budget.depth, context.tokens, strict=True)
        return [self.shape.within(nodes, min(depth, max_length - len(tokens))) for nodes, depth, tokens in limits]

    def grow(
        self,
        draws: Draws | HostDraws,
        nodes: int,
        logits: Tensor,
        descend: Descend,
        vocabulary: DraftVocabulary | None = None,
        *,
        enough: Enough | None = None,
        acceptance: Callable[[], Tensor | None] = lambda: None,
    ) -> Grown:
        """Grow the first `nodes` nodes of the shape for the rows of `draws`, from the logits (B, 1, V) after the roots.

        Args:
            descend: runs the model for the next depth.
            enough: called after every depth; returns whether the tree ends there.
            acceptance: returns, for the parents (B, F) at one depth, the estimated acceptance of a token drawn below
                each, if known.
        """
        levels, run = list[Children](), 0
        ids = torch.zeros(len(logits), 0, dtype=torch.int64, device=logits.device)
        for depth in range(len(self.shape.widths)):
            children = draws.children(logits, depth, ids, vocabulary)
            chosen = self.shape.chosen(depth)
            children = children.with_acceptance(acceptance())
            levels.append(children if chosen is None else children.only(chosen))
            ids = torch.cat([ids, levels[-1].tokens.flatten(1)], dim=1)
            if ids.shape[1] >= nodes or (enough is not None and enough(depth, levels[-1])):
                break
            logits, run = descend(ids, self.shape.levels[depth + 1]), ids.shape[1]
        return Grown.of(levels, ids, run)

    def draws(
        self,
        context: DraftContext,
        active: Sequence[int],
        device: torch.device,
        vocabulary: int,
        *,
        recorded: bool = False,
    ) -> Draws | HostDraws:
        """Return the draws of the active rows of the context: `Draws` where possible, else `HostDraws`."""
        growers = [self._grower(context, index) for index in active]
        sorts = recorded or device.type != "cpu"
        draws = Draws.of(growers, self.shape, device, vocabulary=vocabulary, sorts=sorts)
        return HostDraws(shape=self.shape, growers=growers) if draws is None else draws

    def cuts(
        self, context: DraftContext, active: Sequence[int], grown: Grown, nodes: Sequence[int]
    ) -> Iterator[tuple[int, TokenTree, Submitted]]:
        """Yield (index, tree, proposal) of the active rows of the context: the first `nodes` (B,) nodes, which the
        budget allows, independent of their tokens. A row gets no nodes if the logits after its root are not finite,
        which counts as a failure of the drafter. Deeper nodes without finite logits just have no children, because the
        nodes above them were drawn and must be submitted.
        """
        for entry, (index, row) in enumerate(zip(active, grown.fetch(), strict=True)):
            failed = math.isnan(row.confidence[0])
            if failed:
                context.fail(index, not_finite())
            tree = TokenTree(context.tokens[index][-1])
            acceptance = self.estimates.of(context.salt(index))
            yield index, tree, self._cut(tree, grown, entry, row, 0 if failed else nodes[entry], acceptance)

    def _cut(
        self, tree: TokenTree, grown: Grown, at: int, row: _GrownRow, nodes: int, acceptance: Acceptance
    ) -> Submitted:
        tokens, parents = [tree.tokens[0], *row.tokens], self.shape.parents
        # Nodes behind these were not run for this row, which may stand at the end of the model's context.
        submitted = Submitted(tokens=tokens, parents=parents, run=min(grown.run, nodes), acceptance=acceptance)
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
                tree.set_probs(ids[parent], grown.probs[at, parent], row.masses[parent])
        return submitted

    def _grower(self, context: DraftContext, index: int) -> Grower:
        sampler = context.samplers[index]
        if self.temperature is not None and not sampler.greedy:
            sampler = with_params(sampler, temperature=self.temperature)
        return Grower(
            draw=self._draw(sampler),
            sampler=sampler,
            rng=context.rng[index],
            output=() if sampler.neutral else context.tokens[index][context.prompt_lengths[index] :],
        )

    def _draw(self, sampler: Sampler) -> Draw:
        return resolve(self.draw, greedy=sampler.greedy, chain=self.shape.chain)


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicTree:
    """EAGLE-2's dynamic tree (arXiv 2406.16858): the likeliest paths are expanded depth by depth, then the likeliest
    nodes are kept; all are deterministic. Selection runs on the device; the host fetches the finished trees once.
    """

    depth: int  # Most tokens on a path
    top_k: int  # Nodes expanded per depth, and candidate children per node
    nodes: int  # Nodes kept, without the root
    stop_below: float = 0.0
    """Grow no deeper once every open path is less likely than this; 0 needs no read from the device."""
    estimates: PerDomain[Acceptance] = field(default_factory=lambda: PerDomain(Acceptance))

    @property
    def run(self) -> int:
        """Most nodes that the model runs; leaves are not run."""
        return self.top_k * (self.depth - 1)

    def kind(self, sampler: Sampler) -> DraftKind:
        return DraftKind()

    def grow(self, logits: Tensor, expand: Expand, vocabulary: DraftVocabulary | None, depth: int) -> Expanded:
        """Expand from the logits (B, 1, V') after the roots down to at most `depth`, and keep the likeliest nodes."""
        pool = _Pool(min(self.top_k, logits.shape[-1]))
        none = torch.zeros(len(logits), 1, dtype=torch.float32, device=logits.device)
        tokens, scores = pool.add(logits, none, none.long(), 1)
        above = torch.zeros_like(tokens)
        ids = torch.arange(1, pool.width + 1, device=logits.device).expand_as(scores)
        for level in range(2, depth + 1):
            if self.stop_below and float(scores.max().exp()) < self.stop_below:
                break
            named = tokens if vocabulary is None else vocabulary.token_ids[tokens]
            first = pool.size + 1
            below, sums = pool.add(expand(named, above), scores, ids, level)
            scores, best = sums.topk(min(self.top_k, sums.shape[1]), dim=1)
            above, tokens, ids = best // pool.width, below.gather(1, best), first + best
        return pool.best(self.nodes, vocabulary)

    def drawn(self, draw: Draw, temperature: float | None = None) -> FixedTree:
        """Return the fixed tree that replaces it above temperature 0: two children for each node, as deep as its number
        of nodes allows.
        """
        shapes = [Shape.regular((2,) * wide + (1,) * (self.depth - wide)) for wide in range(self.depth + 1)]
        fitting = [shape for shape in shapes if shape.size <= self.nodes] or shapes[:1]
        return FixedTree(shape=fitting[-1], draw=draw, temperature=temperature)

    def cuts(
        self, context: DraftContext, active: Sequence[int], grown: Expanded, budget: Budget
    ) -> Iterator[tuple[int, TokenTree, Drafted]]:
        """Yield (index, tree, proposal) of the active rows of the context, within the budget. A row without finite
        logits gets no tree, which counts as a failure of the drafter.
        """
        for index, row in zip(active, grown.fetch(), strict=True):
            if any(math.isnan(node.probability) for node in row):
                context.fail(index, not_finite())
                continue
            root, salt = context.tokens[index][-1], context.salt(index)
            tree, drafted = self.cut(root, row, budget.nodes[index], budget.depth[index], salt)
            yield index, tree, drafted

    def cut(
        self, root: int, grown: Sequence[Candidate], nodes: int, depth: int, salt: str | None = None
    ) -> tuple[TokenTree, Drafted]:
        """Return one row's tree, in the isolation domain `salt`: its likeliest candidates within its budget."""
        drafted, ids = Drafted(TokenTree(root), self.estimates.of(salt)), {0: 0}
        for candidate in sorted([candidate for candidate in grown if candidate.depth <= depth][:nodes]):
            if candidate.parent in ids:  # Else rounding made its score equal to its parent's, which was cut
                evidence = by_draft_prob(Drawn.DETERMINISTIC, candidate.rank, candidate.probability)
                ids[candidate.entry + 1] = drafted.add(candidate.token, ids[candidate.parent], evidence)
        return drafted.tree, drafted


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeOptions:
    """Options for the shape of the draft and for how tokens are drawn; methods add their own."""

    num_speculative_tokens: int = 8  # Length of the chain, tokens; a tree's depth is that of `shape`
    shape: Sequence[int] | None = None  # Children of each node at depth 0, 1, ...; None drafts a chain
    tree: Sequence[int] | str | None = None
    """Any tree, instead of `shape`: the parents of node 1, 2, ..., where 0 is the root (see `forerun plan`), or the
    name mc_sim_7b_63, Medusa's tree.
    """
    draw: str = "auto"  # ``auto``, ``deterministic``, ``iid``, ``without_replacement`` or ``greedy_k``
    temperature: float | None = None  # Draft at this temperature instead of the request's, unless that is 0

    def check_tree(self, method: str) -> None:
        """Raise ArgumentError, naming `method`, unless the options are valid."""
        check_drawing(method, self)
        if self.shape is not None and (not self.shape or min(self.shape) < 1):
            raise ArgumentError(
                f"{method}: shape needs at least one depth and one child for each node, got {self.shape}"
            )
        if self.tree is None:
            return
        if self.shape is not None or not self.tree or self.draw == Draw.GREEDY_K:
            raise ArgumentError(
                f"{method}: tree replaces shape and needs at least one node; draw='greedy_k' needs a shape with "
                f"equally many children for all nodes of one depth; got {self.tree}"
            )
        Shape.of(self.tree)

    def fixed_tree(self) -> FixedTree:
        """Return the fixed tree that the options describe."""
        regular = self.shape or (1,) * self.num_speculative_tokens
        return FixedTree(
            shape=Shape.regular(regular) if self.tree is None else Shape.of(self.tree),
            draw=Draw(self.draw),
            temperature=self.temperature,
        )


def check_drawing(method: str, options: Any) -> None:
    """Raise ArgumentError unless `draw`, `num_speculative_tokens` and `temperature` of a configuration are valid."""
    check_choice(method, options, "draw", [kind.value for kind in Draw])
    check_least(method, options, num_speculative_tokens=1)
    if options.temperature is not None and not GREEDY_BELOW <= options.temperature <= MAX_TEMPERATURE:
        raise ArgumentError(
            f"{method}: temperature must be in [{GREEDY_BELOW:g}, {MAX_TEMPERATURE:g}], got {options.temperature}; "
            "draw='deterministic' drafts the likeliest tokens"
        )


def not_finite() -> NumericError:
    """Return the error for a row for which the draft model's logits are not finite."""
    return NumericError("the drafter produced NaN or infinite logits; check its checkpoint, or load it as float32")


class NodeLimits:
    """Counts how many nodes each of B rows may submit while its tree grows depth by depth. A node that was grown is
    never taken back, so whether it is submitted does not depend on its token. `stopped` returns, for each row (B,),
    whether it drafts no deeper than the given children; empty if all rows continue.
    """

    def __init__(self, levels: Sequence[range], nodes: list[int], stopped: Callable[[Children], list[bool]]) -> None:
        self.nodes = list(nodes)  # (B,) number of nodes, counted from the first
        self._levels, self._stopped = levels, stopped

    def enough(self, depth: int, children: Children) -> bool:
        """Return whether all rows end with these children of the nodes at `depth`."""
        last = self._levels[depth + 1].stop - 1
        for row, stopped in enumerate(self._stopped(children)):
            if stopped:
                self.nodes[row] = min(self.nodes[row], last)
        return max(self.nodes) <= last


@dataclass(kw_only=True, slots=True)
class Submitted(Proposal):
    """A proposal of a model that has run some of its nodes, which are numbered as they were grown."""

    run: int = 0  # Nodes whose keys are in the cache after the root's; 0: only the root's are

    def accepted(self, committed: Sequence[int]) -> tuple[int, ...]:
        """Return the longest path of nodes that were run whose tokens are a prefix of `committed`."""
        paths: dict[int, tuple[int, ...]] = {0: ()}
        for node in range(1, self.run + 1):
            above = paths.get(self.parents[node])
            if above is not None and len(above) < len(committed) and committed[len(above)] == self.tokens[node]:
                paths[node] = (*above, node)
        return max(paths.values(), key=len)


class _GrownRow(NamedTuple):
    """One row of a `Grown` on the host: entry k of each list belongs to node k + 1."""

    tokens: list[int]
    drawn: list[int]
    confidence: list[float]
    valid: list[bool]
    masses: list[float]  # Sums, by parent, of the distributions of sampled children; empty if all are deterministic


@dataclass(frozen=True, kw_only=True, slots=True)
class Grown(Children):
    """A tree of the full shape for every row, before it is cut to a budget; tensors are by node, (B, K)."""

    run: int  # Number of nodes, counted from the first, that the model has run

    @classmethod
    def of(cls, levels: Sequence[Children], ids: Tensor, run: int) -> Grown:
        """Concatenate the children of all depths, whose tokens are `ids` (B, K)."""

        def flat(values: Callable[[Children], Tensor]) -> Tensor:
            return torch.cat([values(children).flatten(1) for children in levels], dim=1)

        probs = [children.probs for children in levels if children.probs is not None]
        return cls(
            tokens=ids,
            drawn=flat(lambda children: children.drawn),
            confidence=flat(lambda children: children.confidence),
            valid=flat(Children.validity) if any(children.valid is not None for children in levels) else None,
            probs=torch.cat(probs, dim=1) if probs else None,
            run=run,
        )

    def fetch(self) -> list[_GrownRow]:
        """Fetch everything but the probs, as (B,) rows, in one transfer. It is not cached, because a recording returns
        the same object with new values.
        """
        masses = self.confidence[:, :0] if self.probs is None else masses_of(self.probs)
        columns = fetch([self.tokens, self.drawn, self.confidence, self.validity(), masses])
        return [_GrownRow(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


class Candidate(NamedTuple):
    """One node of an `Expanded` on the host."""

    entry: int
    token: int
    parent: int
    probability: float
    depth: int
    rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Expanded:
    """The likeliest nodes of every row, best first."""

    order: Tensor  # (B, n) index of each node in the pool: parents come before children
    tokens: Tensor  # (B, n) the target's token ids
    parents: Tensor  # (B, n) index of the parent in the pool, plus one; 0 is the root
    probabilities: Tensor  # (B, n) draft probability of the token after its parent
    depths: Tensor  # (B, n) from 1
    ranks: Tensor  # (B, n) among its siblings, likeliest 0

    def fetch(self) -> list[list[Candidate]]:
        """Fetch the nodes (B, n) in one transfer."""
        fields = (self.order, self.tokens, self.parents, self.probabilities, self.depths, self.ranks)
        rows = zip(*(part.tolist() for part in fetch(fields)), strict=True)
        return [[Candidate(*node) for node in zip(*row, strict=True)] for row in rows]


class _Pool:
    """All candidate nodes, depth by depth: the `width` likeliest children of each expanded node."""

    def __init__(self, width: int) -> None:
        self.width, self.size = width, 0
        self._levels: list[tuple[Tensor, ...]] = []  # Tokens, scores, parents, log-probabilities, depths

    def add(self, logits: Tensor, scores: Tensor, ids: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """Add the children of the nodes with logits (B, F, V') or (B, 1, V'), scores and ids (B, F), and return the
        children's tokens and scores, (B, F * width).
        """
        best = logits.float().log_softmax(-1).topk(self.width, dim=-1)
        shape = (*scores.shape, self.width)
        tokens, logs = best.indices.expand(shape).flatten(1), best.values.expand(shape)
        sums, parents = (scores.unsqueeze(-1) + logs).flatten(1), ids.unsqueeze(-1).expand(shape).flatten(1)
        self._levels.append((tokens, sums, parents, logs.flatten(1), torch.full_like(tokens, depth)))
        self.size += tokens.shape[1]
        return tokens, sums

    def best(self, nodes: int, vocabulary: DraftVocabulary | None) -> Expanded:
        columns = (torch.cat(parts, dim=1) for parts in zip(*self._levels, strict=True))
        tokens, scores, parents, logs, depths = columns
        order = scores.topk(min(nodes, self.size), dim=1).indices
        named = tokens if vocabulary is None else vocabulary.token_ids[tokens]
        return Expanded(
            order=order,
            tokens=named.gather(1, order),
            parents=parents.gather(1, order),
            probabilities=logs.gather(1, order).exp(),
            depths=depths.gather(1, order),
            ranks=order % self.width,
        )
