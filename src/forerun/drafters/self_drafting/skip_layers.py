"""Drafts with the target itself without some of its attention and MLP sub-layers, on the target's own cache.

This is Draft & Verify (arXiv 2309.08168). The set of skipped sub-layers is given, tuned beforehand
(`forerun tune skip-layers`) or searched while decoding (SWIFT, arXiv 2410.06916). Draft nodes attend to the whole
target's keys and values of the prefix; scoring overwrites those of the draft nodes. The output is lossless for every
set. With ``search="swift"`` or several requests at once the *text* for a seed may depend on earlier requests; its
distribution does not.

Sets of sub-layers, their names, their search and their file are here, too.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from forerun.core.tree import TokenTree
from forerun.decode.drafter import DraftContext, DrafterSetup, check_choice, check_least
from forerun.decode.scores import Scores
from forerun.drafters.self_drafting.early_exit import SelfDrafter
from forerun.drafters.trees import TreeOptions
from forerun.errors import ArgumentError, DataError, nearest, refuse
from forerun.model import LayerRange, TransformersTarget
from forerun.model.inputs import Nodes
from forerun.types import Budget, Drawn, Verdict
from forerun.writing import hash_json, read_object, write_file

Sublayer = tuple[int, str]  # (layer, "attn" | "mlp")
SkipSet = frozenset[Sublayer]

PARTS = ("attn", "mlp")


def every(layers: int) -> tuple[Sublayer, ...]:
    """Return all sub-layers of a model, in the order in which they run."""
    return tuple((layer, part) for layer in range(layers) for part in PARTS)


def names(skip: Iterable[Sublayer]) -> list[str]:
    """Return names such as ``["3.attn", "3.mlp"]``, in the order in which the sub-layers run."""
    return [f"{layer}.{part}" for layer, part in sorted(skip)]


def parse(given: Iterable[str], layers: int) -> SkipSet:
    """Return the set of sub-layers with names such as ``"3.attn"``. Raises ArgumentError for an unknown name, and if
    none or all are named.
    """
    by_name = {name: sublayer for sublayer in every(layers) for name in names([sublayer])}
    chosen = list(given)
    for name in chosen:
        if name not in by_name:
            every_name = f"0.attn, 0.mlp, ..., {layers - 1}.attn, {layers - 1}.mlp"
            raise ArgumentError(
                f"skip_layers: there is no sub-layer {name!r}; the model's are {every_name}."
                f"{nearest(str(name), by_name)}"
            )
    skip = frozenset(by_name[name] for name in chosen)
    refuse(
        (not skip, "skip_layers: nothing is skipped, so a draft would cost what the target costs"),
        (
            len(skip) == len(by_name),
            f"skip_layers: all {len(by_name)} sub-layers are skipped; leave at least one to draft with",
        ),
    )
    return skip


def evenly(allowed: Sequence[Sublayer], count: int) -> SkipSet:
    """Return `count` evenly spaced sub-layers of the allowed ones, half of them attention, to start a search with."""
    chosen = list[Sublayer]()
    for part, share in zip(PARTS, ((count + 1) // 2, count // 2), strict=True):
        candidates = [sublayer for sublayer in allowed if sublayer[1] == part]
        chosen += (candidates[(2 * index + 1) * len(candidates) // (2 * share)] for index in range(share))
    return frozenset(chosen)


Floats = NDArray[np.floating[Any]]

NOISE = 1e-2  # Variance of an observation relative to that of all values: Draft & Verify's alpha (arXiv 2309.08168)
_LENGTHS = (0.1, 0.25, 0.5, 1.0)  # Length scales of the exponential, as a share of the number of entries
_ADDITIVE = (0.0, 0.5, 0.9)


def predict(points: Floats, values: Floats, others: Floats, *, noise: float = NOISE) -> tuple[Floats, Floats]:
    """Return mean and standard deviation (m,) at `others` (m, d), by a Gaussian process with observations `values` (n,)
    at `points` (n, d). Points are subsets as vectors of 0 and 1; `noise` is the variance of an observation relative to
    that of all values.

    The kernel mixes the share of equal entries (additive effects) and an exponential of the Hamming distance (other
    effects). Of a few mixtures the one with the largest likelihood is used.
    """
    mean, scale = float(values.mean()), float(values.std()) or 1.0
    scaled, fits = (values - mean) / scale, []
    for kernel in itertools.product(_LENGTHS, _ADDITIVE):
        factor = np.linalg.cholesky(_likeness(points, points, *kernel) + noise * np.eye(len(values)))
        weights = np.linalg.solve(factor.T, np.linalg.solve(factor, scaled))
        evidence = -0.5 * float(scaled @ weights) - float(np.log(np.diag(factor)).sum())
        fits.append((evidence, kernel, factor, weights))
    _, kernel, factor, weights = max(fits, key=itemgetter(0))
    cross = _likeness(others, points, *kernel)
    spread = np.sqrt(np.clip(1.0 - (np.linalg.solve(factor, cross.T) ** 2).sum(0), 1e-12, None))
    return cross @ weights * scale + mean, spread * scale


def _likeness(left: Floats, right: Floats, length: float, additive: float) -> Floats:
    """Return the kernel (n, m) between subsets, in 0..1, 1 for equal ones."""
    share = (left @ (1.0 - right).T + (1.0 - left) @ right.T) / left.shape[1]
    return additive * (1.0 - share) + (1.0 - additive) * np.exp(-share / length)


_KAPPA = 2.5  # Standard deviations that are added to the mean of an untried subset
_POOL = 384  # Random candidates for the next subset; as many neighbours of the best one are added
_REMEMBERED = 300  # Most trials that the Gaussian process is fitted to: half of them the best, half the latest
_SHARES = (0.25, 0.5, 0.375, 0.125, 0.625)  # Shares of the sub-layers that the first trials skip, evenly spaced
_RANDOM_STARTS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """The subsets that may be proposed."""

    allowed: tuple[Sublayer, ...]  # Sub-layers that may be skipped, in order
    size: int | None = None  # Number of skipped sub-layers; None: any number but none and all

    def vector(self, skip: SkipSet) -> Floats:
        """Return a subset as a vector (d,) of 0 and 1."""
        return np.array([float(sublayer in skip) for sublayer in self.allowed])

    def random(self, random: np.random.Generator) -> SkipSet:
        """Return a random subset; without a fixed size every size is equally likely."""
        size = int(random.integers(1, len(self.allowed))) if self.size is None else self.size
        return frozenset(self.allowed[index] for index in random.permutation(len(self.allowed))[:size])

    def neighbour(self, skip: SkipSet, random: np.random.Generator) -> SkipSet:
        """Return the subset with one or two sub-layers exchanged or, without a fixed size, one added or removed."""
        inside, outside = sorted(skip), sorted(set(self.allowed) - skip)
        changed = set(skip)
        for _ in range(int(random.integers(1, 3))):
            leave = self.size is not None or random.random() < 2 / 3
            enter = self.size is not None or not leave or random.random() < 0.5
            if leave:
                changed.discard(inside[int(random.integers(len(inside)))])
            if enter and outside:
                changed.add(outside[int(random.integers(len(outside)))])
        valid = len(changed) == self.size if self.size is not None else 0 < len(changed) < len(self.allowed)
        return frozenset(changed) if valid else skip


class SkipTrial(NamedTuple):
    """One subset and its measured value."""

    skip: SkipSet
    value: float  # Larger is better


def propose(space: Space, trials: Sequence[SkipTrial], random: np.random.Generator) -> SkipSet | None:
    """Return the untried subset with the largest upper confidence bound by a Gaussian process; None if all were
    tried.
    """
    leaders = sorted(trials, key=lambda trial: -trial.value)[:3]
    pool = [space.neighbour(leader.skip, random) for leader in leaders for _ in range(_POOL // 3)]
    pool += [space.random(random) for _ in range(_POOL)]
    tried = {trial.skip for trial in trials}
    pool = [skip for skip in dict.fromkeys(pool) if skip not in tried]
    if not pool:
        return None
    latest, fitted = trials[-_REMEMBERED // 2 :], trials
    if len(trials) > _REMEMBERED:
        best = sorted(trials[: -_REMEMBERED // 2], key=lambda trial: -trial.value)
        fitted = [*best[: _REMEMBERED // 2], *latest]
    points = np.stack([space.vector(trial.skip) for trial in fitted])
    values = [trial.value for trial in fitted]
    mean, spread = predict(points, np.array(values), np.stack([space.vector(skip) for skip in pool]))
    return pool[int((mean + _KAPPA * spread).argmax())]


class Search:
    """Bayesian optimisation by an upper confidence bound, which starts with a few evenly spaced and random subsets."""

    def __init__(self, space: Space, *, seed: int = 0) -> None:
        self.space = space
        self.trials: list[SkipTrial] = []
        self._random = np.random.default_rng(seed)
        count = len(space.allowed)
        starts = [evenly(space.allowed, max(1, round(share * count))) for share in _SHARES]
        starts += [space.random(self._random) for _ in range(_RANDOM_STARTS)]
        self._starts = list(dict.fromkeys(starts))

    def ask(self) -> SkipSet | None:
        """Return the next subset to measure, or None if all were measured."""
        if len(self.trials) < len(self._starts):
            return self._starts[len(self.trials)]
        return propose(self.space, self.trials, self._random)

    def tell(self, skip: SkipSet, value: float) -> None:
        """Record a subset's value."""
        self.trials.append(SkipTrial(skip, value))


FORMAT = "forerun-skip-layers"
_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
_STRUCTURE = ("model_type", "num_hidden_layers", *_SIZES)  # Models that agree in these are of one kind


@dataclass(frozen=True, kw_only=True, slots=True)
class SkipFile:
    """A tuned set of sub-layers and its origin."""

    model: str  # Directory or hub id it was tuned on, for information: the model may be elsewhere now
    num_layers: int
    structure: str  # `structure_hash` of the model
    skip: SkipSet
    num_speculative_tokens: int  # Length of the chain at which the set was the cheapest, tokens
    measured: Mapping[str, Any] = field(default_factory=dict)  # Figures of the set, of plain decoding, and the setting
    trace: list[dict[str, Any]] = field(default_factory=list)  # Every set that was tried, in order

    def write(self, path: Path) -> None:
        """Write the file atomically. Raises DataError if it cannot be written."""
        body = {"format": FORMAT, **asdict(self), "skip": names(self.skip)}
        try:
            write_file(path, json.dumps(body, indent=1) + "\n")
        except OSError as error:
            raise DataError(f"{path} cannot be written: {error}. Choose another --output.") from error

    @classmethod
    def read(cls, path: Path, target: TransformersTarget) -> SkipFile:
        """Read the file at `path`. Raises DataError if it is missing or not a file of the tuner; ArgumentError if it
        was tuned on another kind of model than `target`.
        """
        body = read_object(path, "tune a set: forerun tune skip-layers")
        if body.get("format") != FORMAT:
            raise DataError(f"{path} is not a file that forerun tune skip-layers wrote: it lacks 'format': {FORMAT!r}")
        fields_read = {name: value for name, value in body.items() if name in cls.__dataclass_fields__}
        try:
            stored = cls(**fields_read | {"skip": parse(body["skip"], body["num_layers"])})
        except (KeyError, TypeError) as error:
            raise DataError(f"{path} is damaged ({error!r}); tune again") from error
        remedy = f"Tune a set for this model: forerun tune skip-layers MODEL --output {path.name}"
        refuse(
            (
                stored.num_layers != target.num_layers,
                f"{path} was tuned on {stored.model} with {stored.num_layers} layers; this model has "
                f"{target.num_layers}. {remedy}",
            ),
            (
                stored.structure != structure_hash(target),
                f"{path} was tuned on {stored.model}, which is built differently. {remedy}",
            ),
        )
        return stored


def structure_hash(target: TransformersTarget) -> str:
    """Return a hash of the model's family and sizes, without its weights."""
    facts = {name: getattr(target.config, name, None) for name in _STRUCTURE}
    return hash_json(facts)[:16]


MAX_CANDIDATES = 1000
BAYES_EVERY = 25
GOOD_ENOUGH = 0.95
_MEMORY = 8  # Windows after which the best set's counts fade
SEARCHES = ("swift",)
_FIRST_THRESHOLD = (0.8, 0.5)  # Initial adapted threshold: greedy, sampled (Draft & Verify)
_RATE_MEMORY, _STEP, _THRESHOLD_MEMORY = 0.5, 1e-2, 0.9  # Draft & Verify's beta 1, epsilon and beta 2


@dataclass(frozen=True, kw_only=True, slots=True)
class SkipLayersConfig(TreeOptions):
    """Options of `skip_layers`."""

    skip: Sequence[str] | str | None = None  # Sub-layers to leave out, ``["3.attn", ...]``, or the file of the tuner
    search: str | None = None  # ``swift`` searches the set while decoding, instead of `skip`
    skip_ratio: float = 0.45  # Share of all sub-layers that ``swift`` skips, 0..1
    search_window: int = 32  # Drafted nodes on which ``swift`` evaluates a set
    search_patience: int = 300  # ``swift`` ends after this many sets in a row that are no better
    stop_below: float | None = None
    """Draft no deeper once all last nodes are less likely, 0..1; None: draft the whole shape."""
    adapt_threshold: bool = False
    """Adapt that threshold, for each request, so that a share of `target_acceptance` of the drafted tokens is accepted.
    Without `stop_below` it starts at 0.8 for greedy requests and at 0.5 for sampled ones.
    """
    target_acceptance: float = 0.9  # Accepted / drafted, 0..1, that `adapt_threshold` aims at

    def __post_init__(self) -> None:
        self.check_tree("skip_layers")
        if (self.skip is None) == (self.search is None):
            raise ArgumentError(
                "skip_layers needs either skip, a list such as ['3.attn', '3.mlp'] or the file that forerun tune "
                "skip-layers wrote, or search='swift'"
            )
        if self.search is not None:
            check_choice("skip_layers", self, "search", SEARCHES)
        for name in ("skip_ratio", "stop_below", "target_acceptance"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1:
                raise ArgumentError(f"skip_layers: {name} must lie between 0 and 1, got {value}")
        check_least("skip_layers", self, search_window=1, search_patience=1)


class SkipLayersDrafter(SelfDrafter):
    """Drafts with the target without some sub-layers."""

    name = "skip_layers"
    Config = SkipLayersConfig

    def __init__(self, config: SkipLayersConfig, setup: DrafterSetup) -> None:
        super().__init__(config.fixed_tree(), setup.target)
        self.config, layers = config, setup.target.num_layers
        self.search: OnlineSearch | None = None  # State of SWIFT's search; None if the set is given
        self.skip: SkipSet  # The sub-layers that the next draft skips; may be replaced between steps
        if config.search is not None:
            self.search = OnlineSearch(layers, config)
            self.skip = self.search.best
        elif isinstance(config.skip, str | Path):
            self.skip = SkipFile.read(Path(config.skip), self.target).skip
        else:
            self.skip = parse(config.skip or (), layers)
        self._thresholds: dict[int, Threshold] = {}
        # Run one token with these left out: a model that cannot do this is refused now, not when it drafts.
        tried = frozenset(self.search.space.allowed) if self.search else self.skip
        row = min(range(self.target.rows), key=lambda row: self.target.lengths[row])
        self.target.run([row], [TokenTree(0)], LayerRange(stop=layers, skip=tried))
        self.target.truncate([row], [self.target.lengths[row]])

    def logits(self, rows: Sequence[int], nodes: Nodes) -> Tensor:
        return self.target.draft(
            rows,
            nodes,
            LayerRange(stop=self.target.num_layers, skip=self.skip),
            tried=self.search is not None and self.skip != self.search.best,
        )[1]

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
                threshold.update(
                    len(verdict.path), depth, self.config.target_acceptance, whole=depth == len(self._tree.shape.widths)
                )
            if self.search is not None and not self.search.done:
                agreed = agreement(scores, index)
                right, judged = right + agreed[0], judged + agreed[1]
        if self.search is not None and judged:
            self.search.observe(self.skip, right, judged)

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        super().truncate(rows, lengths)
        for row, length in zip(rows, lengths, strict=True):
            if length == 0:
                self._thresholds.pop(row, None)


def agreement(scores: Scores, index: int) -> tuple[int, int]:
    """Return (nodes at which the draft's likeliest token was the target's, nodes with children) of one row's tree,
    accepted or not: the target has scored all of them.
    """
    tree, probs = scores.trees[index], scores.row(index)
    right = judged = 0
    for node, children in enumerate(tree.children):
        if not children:
            continue
        judged += 1
        deterministic = tree.drawn[children[0]] is Drawn.DETERMINISTIC
        favourite = tree.tokens[children[0]] if deterministic else int(tree.draft_probs[node].argmax())
        right += favourite == probs.argmax(node)
    return right, judged


class OnlineSearch:
    """SWIFT's online search: it chooses the set that drafts in the next step, and learns from the result.

    As in the paper a fixed share (`skip_ratio`) of all sub-layers is skipped; the first and the last layer are kept.
    Candidates are random, except that a Gaussian process (upper confidence bound) proposes every 25th. A candidate is
    evaluated on `search_window` drafted nodes by how often its likeliest token is the target's. The search ends when
    one reaches 0.95, or when `search_patience` candidates in a row were no better. Raises ArgumentError if the ratio
    leaves no choice.

    Unlike in the paper, a candidate drafts in every second step, and is evaluated at every drafted node, accepted or
    not, with the scores that verification computes anyway. This needs no extra pass, but during the search half of the
    drafts come from candidates. A candidate that can no longer win is dropped early, and the best set is measured
    further, so that one that was only lucky is replaced.
    """

    def __init__(self, layers: int, config: SkipLayersConfig) -> None:
        allowed = tuple(sublayer for sublayer in every(layers) if 0 < sublayer[0] < layers - 1)
        ratio, size = config.skip_ratio, round(config.skip_ratio * 2 * layers)
        if not 1 <= size < len(allowed):
            raise ArgumentError(
                f"skip_layers: skip_ratio {ratio:g} skips {size} sub-layers, expected 1 to {len(allowed) - 1} of "
                f"{2 * layers}: SWIFT keeps the first and the last layer"
            )
        self.space = Space(allowed=allowed, size=size)
        self.candidates = 0  # Evaluated so far
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
        """Return the set for the next step: the best one or, every second time, a candidate."""
        self._step += 1
        if self.done or self._step % 2 or self._best.judged < self._window:
            return self._best.skip
        if self._candidate is None:
            self._candidate = _Record(self._next())
        return self._candidate.skip

    def observe(self, skip: SkipSet, right: int, judged: int) -> None:
        """Learn from a step that drafted with `skip`: at `right` of `judged` nodes its likeliest token was the
        target's.
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
        """Accept or drop a candidate once its window is full or it can no longer win."""
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
        """Return the next candidate: a random set or, every 25th time, one that the Gaussian process proposes; never
        the best one itself.
        """
        found: SkipSet | None = None
        if self._trials and (self.candidates + 1) % BAYES_EVERY == 0:
            found = propose(self.space, self._trials, self._proposing)
        while found is None or found == self._best.skip:
            found = self.space.random(self._random)
        return found


@dataclass(slots=True)
class Threshold:
    """Draft & Verify's adaptive threshold: it rises while too few drafted tokens are accepted, and falls otherwise."""

    value: float  # Threshold in 0..1
    acceptance: float  # Running accepted / drafted, 0..1

    def update(self, accepted: int, drafted: int, wanted: float, *, whole: bool) -> None:
        """Learn from a step that accepted `accepted` of `drafted` >= 1 tokens; `wanted` is the target share. `whole`
        says that the threshold did not stop drafting, so that a lower one would change nothing.
        """
        self.acceptance = _RATE_MEMORY * self.acceptance + (1 - _RATE_MEMORY) * accepted / drafted
        step = 0.0 if whole else -_STEP
        if self.acceptance < wanted:
            step = _STEP
        self.value = min(1.0, max(0.0, self.value + (1 - _THRESHOLD_MEMORY) * step))


@dataclass(slots=True)
class _Record:
    """Counts of the nodes at which a set's likeliest token was the target's."""

    skip: SkipSet
    right: float = 0.0
    judged: float = 0.0

    @property
    def score(self) -> float:
        return self.right / self.judged if self.judged else 0.0
