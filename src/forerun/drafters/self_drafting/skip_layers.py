"""Drafts with the target itself, some attention and MLP sub-layers left out, on the target's own cache.

Draft & Verify (arXiv 2309.08168), with the set of skipped sub-layers given, tuned beforehand (`forerun tune
skip-layers`) or searched while decoding (SWIFT, arXiv 2410.06916). Draft nodes see the prefix as the whole target left
it; scoring overwrites what drafting wrote. Output is lossless whatever is skipped; with ``search="swift"`` or several
requests at once the *text* for a seed may depend on what was decoded before, its distribution does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from forerun.core.scores import Scores
from forerun.core.tree import TokenTree
from forerun.drafters.base import DraftContext, DrafterSetup, check_choice, check_least
from forerun.drafters.self_drafting.base import SelfDrafter
from forerun.drafters.self_drafting.skipping import SkipFile, SkipSet, SkipTrial, Space, evenly, every, parse, propose
from forerun.drafters.trees import TreeOptions
from forerun.errors import ArgumentError
from forerun.model import LayerRange
from forerun.model.inputs import Nodes
from forerun.types import Budget, Drawn, Verdict

MAX_CANDIDATES = 1000
BAYES_EVERY = 25
GOOD_ENOUGH = 0.95
_MEMORY = 8  # Windows after which the best set's older counts fade
SEARCHES = ("swift",)
_FIRST_THRESHOLD = (0.8, 0.5)  # Initial adapted threshold: greedy, sampled (Draft & Verify)
_RATE_MEMORY, _STEP, _THRESHOLD_MEMORY = 0.5, 1e-2, 0.9  # Draft & Verify's beta 1, epsilon and beta 2


@dataclass(frozen=True, kw_only=True, slots=True)
class SkipLayersConfig(TreeOptions):
    """Options of `skip_layers`."""

    skip: Sequence[str] | str | None = None  # Sub-layers to leave out, ``["3.attn", ...]``, or the file of the tuner
    search: str | None = None  # ``swift`` searches the set while decoding, instead of `skip`
    skip_ratio: float = 0.45  # Share of all sub-layers that ``swift`` skips, 0..1
    search_window: int = 32  # Drafted nodes over which ``swift`` judges a set
    search_patience: int = 300  # ``swift`` ends after so many sets in a row that were no better
    stop_below: float | None = None  # Draft no deeper once all last nodes are less likely, 0..1; None: the whole shape
    adapt_threshold: bool = False
    """Move that threshold, for each request, so that `target_acceptance` of the drafted tokens are
    accepted. Without `stop_below` it begins at 0.8 for greedy requests and at 0.5 for sampled ones.
    """
    target_acceptance: float = 0.9  # Accepted / drafted, 0..1, that `adapt_threshold` aims at

    def __post_init__(self) -> None:
        self.check_tree("skip_layers")
        if (self.skip is None) == (self.search is None):
            given = "a list such as ['3.attn', '3.mlp'] or the file that forerun tune skip-layers wrote"
            raise ArgumentError(f"skip_layers needs either skip, {given}, or search='swift'")
        if self.search is not None:
            check_choice("skip_layers", self, "search", SEARCHES)
        for name in ("skip_ratio", "stop_below", "target_acceptance"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1:
                raise ArgumentError(f"skip_layers: {name} must lie between 0 and 1, got {value}")
        check_least("skip_layers", self, search_window=1, search_patience=1)


class SkipLayersDrafter(SelfDrafter):
    """Drafts with the target, some sub-layers left out."""

    name = "skip_layers"
    Config = SkipLayersConfig

    def __init__(self, config: SkipLayersConfig, setup: DrafterSetup) -> None:
        super().__init__(config.fixed_tree(), setup.target)
        self.config, layers = config, setup.target.num_layers
        self.search: OnlineSearch | None = None  # State of SWIFT's search; None if the set is given
        self.skip: SkipSet  # The sub-layers that the next draft leaves out; may be replaced between steps
        if config.search is not None:
            self.search = OnlineSearch(layers, config)
            self.skip = self.search.best
        elif isinstance(config.skip, str | Path):
            self.skip = SkipFile.read(Path(config.skip), setup.target).skip
        else:
            self.skip = parse(config.skip or (), layers)
        self._thresholds: dict[int, Threshold] = {}
        # Run one token with these left out: a model that cannot do this is refused now, not when it drafts.
        tried = frozenset(self.search.space.allowed) if self.search else self.skip
        row = min(range(self.target.rows), key=lambda row: self.target.lengths[row])
        self.target.run([row], [TokenTree(0)], LayerRange(stop=layers, skip=tried))
        self.target.truncate([row], [self.target.lengths[row]])

    def logits(self, rows: Sequence[int], nodes: Nodes) -> Tensor:
        tried = self.search is not None and self.skip != self.search.best
        return self.target.draft(rows, nodes, LayerRange(stop=self.target.num_layers, skip=self.skip), tried=tried)[1]

    def stop_below(self, row: int, *, greedy: bool) -> float | None:
        if not self.config.adapt_threshold:
            return self.config.stop_below
        if row not in self._thresholds:
            first = self.config.stop_below
            first = _FIRST_THRESHOLD[0 if greedy else 1] if first is None else first
            self._thresholds[row] = Threshold(first, self.config.target_acceptance)
        return self._thresholds[row].value

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
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


def agreement(scores: Scores, index: int) -> tuple[int, int]:
    """Return (nodes at which the draft's likeliest token was the target's, nodes that have
    children) of one row's tree, accepted or not: the target was asked at all of them.
    """
    tree, probs = scores.trees[index], scores.row(index)
    right = judged = 0
    for node, children in enumerate(tree.children):
        if not children:
            continue
        judged += 1
        given = tree.drawn[children[0]] is Drawn.DETERMINISTIC
        favourite = tree.tokens[children[0]] if given else int(tree.draft_probs[node].argmax())
        right += favourite == probs.argmax(node)
    return right, judged


class OnlineSearch:
    """SWIFT's online search: chooses the set that drafts the coming step, and learns from how it
    did.

    As in the paper a fixed share (`skip_ratio`) of all sub-layers is skipped, the first and the last layer are kept,
    candidates are random but for every 25th, which a Gaussian process proposes (upper confidence bound), and are judged
    over `search_window` drafted nodes by how often their likeliest token is the target's, until one scores .95 or
    `search_patience` in a row were no better. ArgumentError: the ratio leaves no choice.

    Unlike the paper a candidate drafts, every second step, and is judged at every drafted node, accepted or not, by the
    scores that verification computes anyway: no extra pass, but meanwhile half of the drafts come from candidates. One
    that can no longer win is dropped early, and the best set is measured on, so that a lucky one is replaced.
    """

    def __init__(self, layers: int, config: SkipLayersConfig) -> None:
        allowed = tuple(sublayer for sublayer in every(layers) if 0 < sublayer[0] < layers - 1)
        ratio, size = config.skip_ratio, round(config.skip_ratio * 2 * layers)
        if not 1 <= size < len(allowed):
            fitting = f"1 to {len(allowed) - 1} of {2 * layers}: SWIFT keeps the first and the last layer"
            raise ArgumentError(f"skip_layers: skip_ratio {ratio:g} skips {size} sub-layers, expected {fitting}")
        self.space = Space(allowed=allowed, size=size)
        self.candidates = 0  # Judged so far
        self._window, self._patience = config.search_window, config.search_patience
        self._proposing, self._random = np.random.default_rng(0), np.random.default_rng(1)
        self._best = _Record(evenly(allowed, size))
        self._candidate: _Record | None = None
        self._trials: list[SkipTrial] = []
        self._failed = 0
        self._step = 0

    @property
    def best(self) -> SkipSet:
        """The best set so far."""
        return self._best.skip

    @property
    def done(self) -> bool:
        """True if only the best set is used from now on."""
        found = self._best.judged >= 2 * self._window and self._best.score >= GOOD_ENOUGH
        return found or self.candidates >= MAX_CANDIDATES or self._failed >= self._patience

    def choose(self) -> SkipSet:
        """Return the set for the coming step: the best one, every second time a candidate."""
        self._step += 1
        if self.done or self._step % 2 or self._best.judged < self._window:
            return self._best.skip
        if self._candidate is None:
            self._candidate = _Record(self._next())
        return self._candidate.skip

    def observe(self, skip: SkipSet, right: int, judged: int) -> None:
        """Learn from a step that drafted with `skip`: at `right` of `judged` nodes its likeliest
        token was the target's.
        """
        record = self._best if skip == self._best.skip else self._candidate
        if record is None or skip != record.skip:
            return
        record.right, record.judged = record.right + right, record.judged + judged
        if record is not self._best:
            self._judge(record)
        elif record.judged > _MEMORY * self._window:
            record.right, record.judged = record.right / 2, record.judged / 2

    def _judge(self, candidate: _Record) -> None:
        """Decide on a candidate once its window is full, or once it cannot win any more."""
        left = max(0.0, self._window - candidate.judged)
        hopeless = (candidate.right + left) / (candidate.judged + left) <= self._best.score
        if left and not hopeless:
            return
        self.candidates += 1
        self._trials.append(SkipTrial(candidate.skip, candidate.score))
        self._candidate = None
        if hopeless:
            self._failed += 1
            return
        self._trials.append(SkipTrial(self._best.skip, self._best.score))
        self._best, self._failed = candidate, 0

    def _next(self) -> SkipSet:
        """Return the next candidate: a random set, every 25th time one that the trials so far
        favour; never the best one itself.
        """
        found: SkipSet | None = None
        if self._trials and (self.candidates + 1) % BAYES_EVERY == 0:
            found = propose(self.space, self._trials, self._proposing)
        while found is None or found == self._best.skip:
            found = self.space.random(self._random)
        return found


@dataclass(slots=True)
class Threshold:
    """Draft & Verify's adaptive threshold: it rises while too few drafted tokens are accepted, and
    falls again.
    """

    value: float  # Threshold in 0..1
    acceptance: float  # Running accepted / drafted, 0..1

    def update(self, accepted: int, drafted: int, wanted: float, *, whole: bool) -> None:
        """Learn from a step that accepted a path of `accepted` of `drafted` >= 1 tokens; `wanted`
        is the share to aim at. With `whole` drafting was not stopped, so that a lower threshold
        would change nothing.
        """
        self.acceptance = _RATE_MEMORY * self.acceptance + (1 - _RATE_MEMORY) * accepted / drafted
        step = 0.0 if whole else -_STEP
        if self.acceptance < wanted:
            step = _STEP
        self.value = min(1.0, max(0.0, self.value + (1 - _THRESHOLD_MEMORY) * step))


@dataclass(slots=True)
class _Record:
    """The counts of how often a set's likeliest token was the target's."""

    skip: SkipSet
    right: float = 0.0
    judged: float = 0.0

    @property
    def score(self) -> float:
        return self.right / self.judged if self.judged else 0.0
