"""The target without some of its attention and MLP sub-layers drafts for the whole target, on the target's own cache.

Draft & Verify (arXiv 2309.08168), with the set of skipped sub-layers given, tuned beforehand (`forerun tune
skip-layers`) or searched while decoding (SWIFT, arXiv 2410.06916; see `skipping.online`). Draft nodes see the prefix as
the whole target left it; scoring runs them in full and overwrites what drafting wrote. No weights and no memory of its
own. Output is lossless whatever is skipped; with ``search="swift"`` or several requests at once the *text* for a seed
may depend on what was decoded before, its law does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from forerun.drafters.base import DraftContext, DrafterSetup
from forerun.drafters.self_drafting import SelfDrafter
from forerun.drafters.skipping import file
from forerun.drafters.skipping.online import PATIENCE, SKIP_RATIO, WINDOW, OnlineSearch
from forerun.drafters.skipping.sublayers import SkipSet, parse
from forerun.drafters.tree_options import TreeOptions
from forerun.errors import ArgumentError, nearest
from forerun.step import Scores
from forerun.target import Plan
from forerun.types import Budget, Draft, Drawn, Verdict, empty_draft

SEARCHES = ("swift",)
_FIRST_THRESHOLD = (0.8, 0.5)
"""Where an adapted threshold begins: greedy, sampled (Draft & Verify)."""
_RATE_MEMORY, _STEP, _THRESHOLD_MEMORY = 0.5, 1e-2, 0.9
"""Draft & Verify's beta 1, epsilon and beta 2."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SkipLayersConfig(TreeOptions):
    """Options of `skip_layers`."""

    skip: Sequence[str] | str | None = None
    """Sub-layers that drafting leaves out, such as ``["3.attn", "3.mlp", "5.mlp"]``, or the path of the file that
    ``forerun tune skip-layers`` wrote."""
    search: str | None = None
    """``swift`` searches the set while decoding, instead of `skip`."""
    skip_ratio: float = SKIP_RATIO
    """Share of all sub-layers that ``swift`` skips, 0..1."""
    search_window: int = WINDOW
    """Drafted nodes over which ``swift`` judges a set."""
    search_patience: int = PATIENCE
    """``swift`` ends after so many sets in a row that were no better."""
    stop_below: float | None = None
    """Draft no deeper once every last node of a row is less likely than this, 0..1; that node itself is kept. None
    always drafts the whole shape."""
    adapt_threshold: bool = False
    """Move that threshold, for each request, so that `target_acceptance` of the drafted tokens are kept. Without
    `stop_below` it begins at 0.8 for greedy requests and at 0.5 for sampled ones."""
    target_acceptance: float = 0.9
    """Accepted / drafted, 0..1, that `adapt_threshold` aims at."""

    def __post_init__(self) -> None:
        self.check_tree("skip_layers")
        if (self.skip is None) == (self.search is None):
            raise ArgumentError(
                "skip_layers needs either skip, a list such as ['3.attn', '3.mlp'] or the file that forerun tune "
                "skip-layers wrote, or search='swift'"
            )
        if self.search is not None and self.search not in SEARCHES:
            raise ArgumentError(f"skip_layers: search is 'swift', got {self.search!r}.{nearest(self.search, SEARCHES)}")
        for name in ("skip_ratio", "stop_below", "target_acceptance"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1:
                raise ArgumentError(f"skip_layers: {name} must lie between 0 and 1, got {value}")
        for name in ("search_window", "search_patience"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"skip_layers: {name} must be at least 1, got {getattr(self, name)}")


@dataclass(slots=True)
class Threshold:
    """Draft & Verify's adaptive threshold: it rises while too little of what is drafted is kept, and falls again."""

    value: float
    """In 0..1."""
    acceptance: float
    """Running accepted / drafted, 0..1."""

    def update(self, accepted: int, drafted: int, wanted: float, *, whole: bool) -> None:
        """Learn from one step.

        Args:
            accepted: depth of the accepted path.
            drafted: depth of the drafted tree, at least 1.
            wanted: accepted / drafted to aim at.
            whole: drafting was not stopped, so that a lower threshold would change nothing.
        """
        self.acceptance = _RATE_MEMORY * self.acceptance + (1 - _RATE_MEMORY) * accepted / drafted
        step = 0.0 if whole else -_STEP
        if self.acceptance < wanted:
            step = _STEP
        self.value = min(1.0, max(0.0, self.value + (1 - _THRESHOLD_MEMORY) * step))


class SkipLayersDrafter(SelfDrafter):
    """Drafts with the target, some sub-layers left out."""

    name = "skip_layers"
    Config = SkipLayersConfig

    def __init__(self, config: SkipLayersConfig, setup: DrafterSetup) -> None:
        super().__init__(config.fixed_tree(), setup.target)
        self.config = config
        self.search: OnlineSearch | None = None
        """What SWIFT knows; None where the set is given."""
        if config.search is not None:
            self.search = OnlineSearch(
                setup.target.num_layers,
                config.skip_ratio,
                window=config.search_window,
                patience=config.search_patience,
            )
        self.skip: SkipSet = self.search.best if self.search else _given(config.skip, setup)
        """The sub-layers that the next draft leaves out; may be replaced between steps."""
        self._thresholds: dict[int, Threshold] = {}
        self._try_out(frozenset(self.search.space.allowed) if self.search else self.skip)

    def logits(self, rows: Sequence[int], roots: Sequence[int], draft: Draft, start: int) -> Tensor:
        plan = Plan(stop=self.target.num_layers, skip=self.skip)
        states = self.target.run(rows, roots, draft, plan, start=start)
        return self.target.lm_head(self.target.final_norm(states))

    def stop_below(self, row: int, *, greedy: bool) -> float | None:
        if not self.config.adapt_threshold:
            return self.config.stop_below
        if row not in self._thresholds:
            first = self.config.stop_below
            first = _FIRST_THRESHOLD[0 if greedy else 1] if first is None else first
            self._thresholds[row] = Threshold(first, self.config.target_acceptance)
        return self._thresholds[row].value

    def propose(self, context: DraftContext, budget: Budget) -> Draft:
        if self.search is not None:
            self.skip = self.search.choose()
        return super().propose(context, budget)

    def observe(self, context: DraftContext, verdicts: Sequence[Verdict], scores: Scores) -> None:
        right = judged = 0
        for index, (row, verdict) in enumerate(zip(context.rows, verdicts, strict=True)):
            tree = scores.trees[index]
            if not tree.size:
                continue
            threshold, depth = self._thresholds.get(row), max(tree.depths)
            if threshold is not None:
                whole = depth == len(self._tree.shape.widths)
                threshold.update(len(verdict.path), depth, self.config.target_acceptance, whole=whole)
            if self.search is not None and not self.search.done:
                own = agreement(scores, index)
                right, judged = right + own[0], judged + own[1]
        if self.search is not None and judged:
            self.search.observe(self.skip, right, judged)

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        super().truncate(rows, lengths)
        for row, length in zip(rows, lengths, strict=True):
            if length == 0:
                self._thresholds.pop(row, None)

    def _try_out(self, skip: SkipSet) -> None:
        """One token with these sub-layers left out: a model that cannot do this is refused now, not when it drafts."""
        row = min(range(self.target.rows), key=lambda row: self.target.lengths[row])
        plan = Plan(stop=self.target.num_layers, skip=skip)
        self.target.run([row], [0], empty_draft(1, self.target.device), plan)
        self.target.truncate([row], [self.target.lengths[row]])


def agreement(scores: Scores, index: int) -> tuple[int, int]:
    """(nodes at which the draft's likeliest token was the target's, nodes that have children) of one row's tree.

    Counts every node, whether or not it was accepted: the target was asked at all of them.
    """
    tree, laws = scores.trees[index], scores.row(index)
    right = judged = 0
    for node, children in enumerate(tree.children):
        if not children:
            continue
        judged += 1
        given = tree.drawn[children[0]] is Drawn.GIVEN
        favourite = tree.tokens[children[0]] if given else int(tree.laws[node].argmax())
        right += favourite == laws.argmax(node)
    return right, judged


def _given(skip: Sequence[str] | str | None, setup: DrafterSetup) -> SkipSet:
    """The set that a list or a file names."""
    if isinstance(skip, str | Path):
        path = Path(skip)
        found = file.read(path)
        found.check(setup.target, path)
        return found.skip
    return parse(skip or (), setup.target.num_layers)
