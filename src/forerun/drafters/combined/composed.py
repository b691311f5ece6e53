"""Drafters that combine other drafters. The members have their own configurations, and one member's failure does not
affect the others.

`first_of` drafts each row with the first of several drafters whose draft promises enough tokens. The last member takes
the remaining rows. A member is queried only for the rows that the members before it left, so a forward pass is only
run where it is needed. This is the routing of SAM-Decoding (arXiv 2411.10666), by expected tokens instead of match
lengths.

`merge` joins the trees of several drafters under one node budget. Deterministic nodes with the same path become one,
and the likeliest are kept. Sampled nodes come from one member only, whose tree is taken whole: merging or pruning it
would depend on drawn tokens and bias the output. Deterministic nodes of the others may be siblings or descendants of
sampled ones; traversal verification verifies such trees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from forerun.core.sampling import Sampler
from forerun.core.tree import TokenTree, join
from forerun.decode.drafter import DraftContext, Drafter, DrafterSetup, make_repeatable
from forerun.decode.scores import Scores
from forerun.drafters import entry_named
from forerun.drafters.guarded import Guarded
from forerun.errors import ArgumentError
from forerun.types import Boundary, Budget, DraftKind, Verdict

Spec = Mapping[str, Any] | str  # A member: ``{"method": name, option: value, ...}``, or a name alone


def options_of(owner: str, given: object) -> tuple[str, dict[str, Any]]:
    """Split a member's specification into its method and options. Raises ArgumentError if it is neither a name nor a
    configuration.
    """
    spec = {"method": given} if isinstance(given, str) else given
    if not isinstance(spec, Mapping) or not isinstance(spec.get("method"), str):
        raise ArgumentError(f'{owner}: a drafter is a name, or {{"method": "ngram", ...}} with options, got {given!r}')
    entry_named(spec["method"])
    return spec["method"], {name: value for name, value in spec.items() if name != "method"}


def check_specs(owner: str, given: object) -> None:
    """Raise ArgumentError unless `given` is a list of at least two members; also raises as `options_of` does."""
    if isinstance(given, str | Mapping) or not isinstance(given, Sequence) or len(given) < 2:
        raise ArgumentError(f'{owner}: drafters are two or more, like ["ngram", {{"method": "suffix"}}], got {given!r}')
    for spec in given:
        options_of(owner, spec)


@dataclass(frozen=True, kw_only=True, slots=True)
class ComposedConfig:
    """Options that combined drafters share."""

    drafters: Sequence[Spec] = ("suffix", "recycling")  # The members, each a name or ``{"method": name, ...}``
    greedy_with_seed: bool = True
    """Let members draft deterministically for sampled requests with a seed, so that their text is that of plain
    decoding. False lets members sample: more tokens are accepted, but the text depends on what was learned from other
    requests.
    """


class Composed(Drafter):
    """The base of drafters that choose among the proposals of several members, or join them."""

    def __init__(self, config: ComposedConfig, setup: DrafterSetup) -> None:
        self.config = config
        self.members = [Guarded.build(*options_of("member", spec), setup) for spec in config.drafters]

    def kind(self, sampler: Sampler) -> DraftKind:
        """Return the kind that covers the trees of all members, because each step decides anew which members draft."""
        seen = make_repeatable(sampler) if self.config.greedy_with_seed else sampler
        return DraftKind(sampled=any(member.kind(seen).sampled for member in self.members))

    @property
    def requires(self) -> frozenset[Boundary]:
        return frozenset[Boundary]().union(*(member.requires for member in self.members))

    @property
    def top_ids(self) -> int:
        return max(member.top_ids for member in self.members)

    def extend(self, context: DraftContext) -> None:
        for member in self.members:
            member.extend(context)

    def observe(self, context: DraftContext, verdicts: Sequence[Verdict], scores: Scores) -> None:
        for member in self.members:
            member.observe(context, verdicts, scores)

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        for member in self.members:
            member.truncate(rows, lengths)

    def grow(self, rows: int, slots: int) -> None:
        for member in self.members:
            member.grow(rows, slots)

    def reread(self) -> None:
        for member in self.members:
            member.reread()

    def memory_bytes(self) -> int:
        return sum(member.memory_bytes() for member in self.members)

    def for_members(self, context: DraftContext) -> DraftContext:
        """Return the context that members get."""
        return context.repeatable() if self.config.greedy_with_seed else context


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstOfConfig(ComposedConfig):
    """Options of `first_of`; the preferred member comes first."""

    min_tokens: float | Sequence[float] = 1.0
    """Expected tokens a draft needs: one number, or one for each member but the last."""

    def __post_init__(self) -> None:
        check_specs("first_of", self.drafters)
        wanted = len(self.drafters) - 1
        min_tokens = self.min_tokens
        if not isinstance(min_tokens, int | float) and len(min_tokens) != wanted:
            raise ArgumentError(
                f"first_of: min_tokens needs {wanted} numbers for {wanted + 1} drafters, got {min_tokens}"
            )
        if min(self.thresholds) < 0:
            raise ArgumentError(f"first_of: min_tokens must be 0 or more, got {min_tokens}")

    @property
    def thresholds(self) -> tuple[float, ...]:
        """The values of `min_tokens` for each member but the last."""
        if isinstance(self.min_tokens, int | float):
            return (float(self.min_tokens),) * (len(self.drafters) - 1)
        return tuple(self.min_tokens)


class FirstOfDrafter(Composed):
    """Takes each row's draft from the first member that promises enough. A draft with sampled nodes is always taken: to
    submit it or not, depending on its tokens, would bias the output.
    """

    name = "first_of"
    Config = FirstOfConfig
    config: FirstOfConfig

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        context = self.for_members(context)
        trees = context.trees()
        limits = enumerate(zip(budget.nodes, budget.depth, strict=True))
        left = [row for row, limit in limits if min(limit) > 0]
        for member, threshold in zip(self.members, (*self.config.thresholds, 0.0), strict=True):
            if not left:
                break
            share = Budget(nodes=[budget.nodes[row] for row in left], depth=[budget.depth[row] for row in left])
            drafted = dict(zip(left, member.propose(context.of(left), share), strict=True))
            good = {row: tree for row, tree in drafted.items() if _promises(tree, threshold)}
            for row, tree in good.items():
                trees[row] = tree
            left = [row for row in left if row not in good]
        return trees


def _promises(tree: TokenTree, threshold: float) -> bool:
    if not tree.size or threshold == 0 or tree.sampled:
        return tree.size > 0
    return sum(tree.survival()[1:]) >= threshold


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeConfig(ComposedConfig):
    """Options of `merge`. If several members sample, the sampled nodes of the first one are used."""

    nodes: int | None = None  # Most nodes of the joined tree; None takes the engine's limit

    def __post_init__(self) -> None:
        check_specs("merge", self.drafters)
        if self.nodes is not None and self.nodes < 1:
            raise ArgumentError(f"merge: nodes must be at least 1, got {self.nodes}; leave it out for no limit")


class MergeDrafter(Composed):
    """Joins the members' trees, row by row."""

    name = "merge"
    Config = MergeConfig
    config: MergeConfig

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        context, most = self.for_members(context), self.config.nodes
        nodes = [own if most is None else min(own, most) for own in budget.nodes]
        drafts = [member.propose(context, replace(budget, nodes=nodes)) for member in self.members]
        # The member whose trees go in whole is the first that sampled, else the first whose nodes were begun.
        sampled = (member for member, trees in enumerate(drafts) if any(tree.sampled for tree in trees))
        begun = (member for member, trees in enumerate(drafts) if any(tree.resume is not None for tree in trees))
        lead, joined = next(sampled, next(begun, 0)), []
        for root, row, count in zip(context.trees(), zip(*drafts, strict=True), nodes, strict=True):
            whole = row[lead].sampled or row[lead].resume is not None
            others = [tree for member, tree in enumerate(row) if member != lead or not whole]
            joined.append(join(row[lead] if whole else root, others, count))
        return joined
