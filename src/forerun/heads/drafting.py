"""Drafting with a head of any kind: a chain, a tree of fixed shape, or EAGLE-2's dynamic tree. The
head is fed with the target's features as tokens are committed, so a proposal starts at the root's
children with no catching up.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from forerun.core.acceptance import Proposal
from forerun.core.sampling import Sampler
from forerun.core.tree import TokenTree
from forerun.decode.drafter import DraftContext, DrafterSetup, LearningDrafter, check_least
from forerun.devices import constant, rows_of
from forerun.drafters.drawing import Children, DraftVocabulary, Draw, Shape
from forerun.drafters.kinds import READ_HEAD, HeadKind, Way, import_named, kind_named
from forerun.drafters.trees import DynamicTree, Expanded, FixedTree, Grown, NodeLimits, TreeOptions
from forerun.errors import ArgumentError
from forerun.heads.base import Head, check_fits
from forerun.heads.catalogue import check_head_named
from forerun.heads.runner import (
    AdapterRunner,
    BlockRunner,
    HeadRunner,
    ParallelRunner,
    RecurrentRunner,
    SequentialRunner,
    SharingRunner,
)
from forerun.model.identity import fingerprint
from forerun.model.kernels import forwards, packing
from forerun.model.transformers_target import require_layers
from forerun.types import Boundary, Budget, DraftKind

log = logging.getLogger(__name__)

RUNNERS: dict[Way, type[HeadRunner[Any]]] = {
    "sequential": SequentialRunner,
    "recurrent": RecurrentRunner,
    "parallel": ParallelRunner,
    "block": BlockRunner,
    "adapter": AdapterRunner,
    "sharing": SharingRunner,
}
"""The runner for each way to draft."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadDrafterConfig(TreeOptions):
    """Options of the drafters that run a draft head."""

    model: Any = None  # Directory or hub id of the head, or a loaded one; without one the error names known heads
    num_speculative_tokens: int = 5  # Length of the chain, or most tokens on one path of a tree; at most the head's own
    top_k: int | None = None
    """Draft EAGLE-2's dynamic tree: nodes expanded per level and children looked at per node
    (EAGLE: 10).

    Above temperature 0 a deterministic tree loses (docs/findings.md), so there ``draw="auto"`` draws a tree of fixed
    shape and no more nodes instead, without replacement; ``draw="deterministic"`` keeps the dynamic one.
    """
    nodes: int = 32  # Nodes of the dynamic tree, root not counted (EAGLE: 59)
    stop_below: float = 0.0  # Grow a dynamic tree no deeper once every open path is less likely than this; 0: never
    repack: bool = True  # Repack the linear layers of a head that was loaded here, where that is faster

    def __post_init__(self) -> None:
        self.check_tree("draft head")
        check_least("draft head", self, top_k=1, nodes=1)
        checks = [
            (
                self.top_k is None or (self.shape is None and self.tree is None),
                "shape and top_k exclude each other, and so do tree and top_k: fixed or dynamic tree",
            ),
            (0 <= self.stop_below < 1, f"stop_below must be in [0, 1), got {self.stop_below}"),
            (self.top_k is None or self.draw in ("auto", "deterministic"), "nodes of a dynamic tree are deterministic"),
        ]
        for passed, message in checks:
            if not passed:
                raise ArgumentError(f"draft head: {message}")


class HeadDrafter(LearningDrafter[Proposal]):
    """Drafts with a head; a kind of head adds its name and its default tree."""

    Config = HeadDrafterConfig
    reads_layers = True

    def __init__(self, config: HeadDrafterConfig, setup: DrafterSetup) -> None:
        super().__init__()
        self.config = config
        kind, target = kind_named(self.name), require_layers(setup.target, self.name)
        self.head = _load(config, setup, kind)
        deepest = self.head.config.max_depth or config.num_speculative_tokens
        self.tree = self._tree(min(deepest, config.num_speculative_tokens))
        self.sampled = self._sampled_tree(self.tree)  # Grows for requests above temperature 0; mostly the same
        if self.tree.depth > deepest and self.head.config.max_depth is not None:
            raise ArgumentError(
                f"{self.name}: the head drafts {deepest} tokens on one path, the shape asks for {self.tree.depth}"
            )
        self._target, self._runner = target, RUNNERS[kind.drafts]
        self.grow(setup.rows, setup.slots)
        self._vocabulary = None
        if self.head.config.reduced_vocabulary:
            self._vocabulary = DraftVocabulary(token_ids=self.head.token_ids, size=setup.target.vocab_size)
        self._ready = dict[int, bool]()  # Row -> whether the head has seen every committed token, the root included

    def default_tree(self, depth: int) -> FixedTree | DynamicTree:
        """Return the tree that is drafted, at most `depth` tokens on one path, if the options name
        none.
        """
        shape = Shape.regular((1,) * depth)
        return FixedTree(shape=shape, draw=Draw(self.config.draw), temperature=self.config.temperature)

    @property
    def depth(self) -> int | None:
        return None if self.head.config.max_depth is None else self.tree.depth

    def kind(self, sampler: Sampler) -> DraftKind:
        return (self.tree if sampler.greedy else self.sampled).kind(sampler)

    @property
    def requires(self) -> frozenset[Boundary]:
        return frozenset(self.head.config.boundaries)

    def grow(self, rows: int, slots: int) -> None:
        most = max(self.tree.run, self.sampled.run)
        self.runner = self._runner(self.head, self._target, rows, slots, most)

    def memory_bytes(self) -> int:
        return self.runner.memory_bytes()

    def extend(self, context: DraftContext) -> None:
        """Feed the head what was committed, with the target's own features."""
        super().extend(context)
        fed, new = list[int](), list[Sequence[int]]()
        for index, (row_id, tokens, fresh) in enumerate(zip(context.rows, context.tokens, context.fresh, strict=True)):
            known = max(1, len(tokens) - fresh)  # no feature stands before the very first token
            self._ready[row_id] = self.runner.lengths[row_id] == known - 1 and known < len(tokens)
            if self._ready[row_id]:
                fed.append(index)
                new.append(tokens[known:])
        if fed:
            hidden_states = {boundary: rows_of(states, fed) for boundary, states in context.hidden_states.items()}
            self.runner.ingest([context.rows[index] for index in fed], new, hidden_states)

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        super().truncate(rows, lengths)
        for row_id, length in zip(rows, lengths, strict=True):
            self.runner.truncate(row_id, max(0, length - 1))
            self._ready.pop(row_id, None)

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        ready = [self._ready.get(row, False) for row in context.rows]
        nodes = [count if known else 0 for count, known in zip(budget.nodes, ready, strict=True)]
        trees = context.trees()
        chosen = [self.tree if sampler.greedy else self.sampled for sampler in context.samplers]
        for tree in (self.tree,) if self.sampled is self.tree else (self.tree, self.sampled):
            theirs = [count if own is tree else 0 for count, own in zip(nodes, chosen, strict=True)]
            limits = Budget(nodes=theirs, depth=budget.depth)
            if isinstance(tree, DynamicTree):
                self._dynamic(tree, context, limits, trees)
            else:
                self._fixed(tree, context, limits, trees)
        return trees

    def stopped(self, children: Children) -> list[bool]:
        """Return, for each row (B,), whether a fixed tree grows no deeper than these children,
        whatever they are; empty: all grow.
        """
        return []

    def _dynamic(self, tree: DynamicTree, context: DraftContext, budget: Budget, trees: list[TokenTree]) -> None:
        active = [i for i, (n, d) in enumerate(zip(budget.nodes, budget.depth, strict=True)) if n > 0 and d > 0]
        if not active:
            return
        deepest = min(tree.depth, max(budget.depth[index] for index in active))

        def grow(logits: Tensor) -> Expanded:
            return tree.grow(logits, self.runner.descend, self._vocabulary, deepest)

        rows = [context.rows[index] for index in active]
        grown = self.runner.unroll(rows, tree.run, grow, levels=deepest, key=None if tree.stop_below else deepest)
        for index, cut, drafted in tree.cuts(context, active, grown, budget):
            trees[index], self._drafted[context.rows[index]] = cut, drafted

    def _fixed(self, tree: FixedTree, context: DraftContext, budget: Budget, trees: list[TokenTree]) -> None:
        within = [tree.shape.within(n, d) for n, d in zip(budget.nodes, budget.depth, strict=True)]
        active = [index for index, count in enumerate(within) if count > 0]
        if not active:
            return

        def descend(ids: Tensor, level: range) -> Tensor:
            above = tree.shape.levels[tree.shape.depths[level.start] - 1]
            index = tuple(tree.shape.parents[node] - above.start for node in level)
            tokens = ids[:, level.start - 1 : level.stop - 1]
            logits = self.runner.descend(tokens, constant(index, ids.device).expand_as(tokens))
            return logits.expand(-1, tokens.shape[1], -1)

        limits = NodeLimits(tree.shape.levels, [within[index] for index in active], self.stopped)
        size, recorded = self.runner.target.vocab_size, self.runner.recordings.active
        draws = tree.draws(context, active, self.runner.device, size, recorded=recorded)

        def grow(logits: Tensor, *numbers: Tensor) -> Grown:
            vocabulary, runner = self._vocabulary, self.runner
            return tree.grow(
                draws.with_tensors(numbers),
                max(within),
                logits,
                descend,
                vocabulary,
                enough=limits.enough,
                acceptance=lambda: runner.acceptance,
            )

        rows = [context.rows[index] for index in active]
        grown = self.runner.unroll(
            rows,
            tree.run,
            grow,
            *draws.tensors,
            levels=tree.shape.depths[max(within)],
            key=None if draws.key is None else (max(within), tree is self.sampled, draws.key),
        )
        for index, cut, submitted in tree.cuts(context, active, grown, limits.nodes):
            trees[index], self._drafted[context.rows[index]] = cut, submitted

    def _tree(self, depth: int) -> FixedTree | DynamicTree:
        config = self.config
        if config.top_k is not None:
            return DynamicTree(depth=depth, top_k=config.top_k, nodes=config.nodes, stop_below=config.stop_below)
        return self.default_tree(depth) if config.shape is None and config.tree is None else config.fixed_tree()

    def _sampled_tree(self, tree: FixedTree | DynamicTree) -> FixedTree | DynamicTree:
        """Return the fixed tree that replaces a dynamic tree for sampled requests, unless a dynamic
        one was asked for.
        """
        if isinstance(tree, FixedTree) or self.config.draw == Draw.DETERMINISTIC:
            return tree
        return tree.drawn(Draw(self.config.draw), self.config.temperature)


class BestFirstDrafter(HeadDrafter):
    """Drafts the tree of the likeliest paths (DDTree, arXiv 2604.12989) by default: for heads that
    compute all depths at once, so that a level costs nothing.
    """

    def default_tree(self, depth: int) -> DynamicTree:
        return DynamicTree(depth=depth, top_k=self.config.nodes, nodes=self.config.nodes)


def _load(config: HeadDrafterConfig, setup: DrafterSetup, kind: HeadKind) -> Head:
    """Load the head, checked against the target, in its dtype and on its device."""
    target, head = setup.target, config.model
    loaded = isinstance(head, str | Path) or (head is None and kind.in_target is not None)
    if head is None and kind.in_target is not None:
        head = import_named(kind.in_target)(target.name_or_path).build(target.dtype)
    check_head_named(kind, head, target.name_or_path)
    if isinstance(head, str | Path):
        from forerun.model.names import resolve

        stored = import_named(READ_HEAD)(resolve(head), num_layers=target.num_layers)
        _compare_weights(stored.target, target.name_or_path, head)
        head = stored.build(target.dtype)
    if not isinstance(head, Head):
        raise ArgumentError(
            f"{kind.name}: model is a directory, a hub id or a head of the kind {kind.stored_as}, got "
            f"{type(head).__name__}"
        )
    _check(head, setup, kind)
    if loaded:
        head = head.to(target.device).eval()
        if config.repack:
            repack(head)
    return head


def _compare_weights(trained_for: str | None, target: str, head: str | Path) -> None:
    """Warn of a head that was trained for other weights than those of the checkpoint `target`, as far as is known."""
    now = fingerprint(target) if trained_for is not None else None
    if now is not None and now != trained_for:
        log.warning(
            "%s was trained for another revision of the model than %s (weights %s, here %s): outputs stay right, but "
            "less of what it drafts is accepted. Take the weights that it was trained for, or continue training: "
            "draft.start=%s",
            *(head, target, trained_for, now, head),
        )


def repack(head: Head) -> None:
    """Make a head's modules faster in place, for a head that only drafts and is not trained."""
    packing.pack(head)
    forwards.install(head, None)


def _check(head: Head, setup: DrafterSetup, kind: HeadKind) -> None:
    """Refuse a head that was made for another target or another method, before the first token."""
    config, target, name = head.config, setup.target, kind.name
    if config.kind != kind.stored_as:
        raise ArgumentError(f"{name}: the checkpoint holds a head for the method {config.kind!r}; use that method")
    check_fits(config, target, name)
