"""Sets of attention and MLP sub-layers that a draft pass leaves out: their names, their search, their file."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from forerun.errors import ArgumentError, DataError, nearest
from forerun.manifests import read_object
from forerun.writing import written

if TYPE_CHECKING:
    from forerun.model import Target


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
    """Return the set behind names such as ``"3.attn"``. Raises ArgumentError if an unknown one is
    named, or nothing or everything.
    """
    known = {name: sublayer for sublayer in every(layers) for name in names([sublayer])}
    chosen = list(given)
    for name in chosen:
        if name not in known:
            every_name = f"0.attn, 0.mlp, ..., {layers - 1}.attn, {layers - 1}.mlp"
            hint = nearest(str(name), known)
            raise ArgumentError(f"skip_layers: there is no sub-layer {name!r}; the model's are {every_name}.{hint}")
    skip = frozenset(known[name] for name in chosen)
    if not skip:
        raise ArgumentError("skip_layers: nothing is skipped, so a draft would cost what the target costs")
    if len(skip) == len(known):
        raise ArgumentError(f"skip_layers: all {len(known)} sub-layers are skipped; leave at least one to draft with")
    return skip


def evenly(allowed: Sequence[Sublayer], count: int) -> SkipSet:
    """Return `count` of the allowed sub-layers, half of them attention, at even distances: where a
    search may begin.
    """
    chosen = list[Sublayer]()
    for part, share in zip(PARTS, ((count + 1) // 2, count // 2), strict=True):
        own = [sublayer for sublayer in allowed if sublayer[1] == part]
        chosen += (own[(2 * index + 1) * len(own) // (2 * share)] for index in range(share))
    return frozenset(chosen)


Floats = NDArray[np.floating[Any]]

NOISE = 1e-2  # Variance of an observation relative to that of all values: Draft & Verify's alpha (arXiv 2309.08168)
_LENGTHS = (0.1, 0.25, 0.5, 1.0)  # Length scales of the exponential, as a share of the number of entries
_ADDITIVE = (0.0, 0.5, 0.9)


def predict(points: Floats, values: Floats, others: Floats, *, noise: float = NOISE) -> tuple[Floats, Floats]:
    """Return mean and standard deviation (m,) at `others` (m, d), subsets as vectors of 0 and 1: a
    small Gaussian process that knows `values` (n,) at `points` (n, d), with a variance of `noise`
    relative to that of all values.

    The likeness of subsets mixes the share of entries in which they agree (effects that add up) and an exponential of
    their Hamming distance (effects that do not); the mixture is the likeliest of a few.
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
    """Return the likeness (n, m) of subsets, in 0..1, 1 for equal ones."""
    share = (left @ (1.0 - right).T + (1.0 - left) @ right.T) / left.shape[1]
    likeness: Floats = additive * (1.0 - share) + (1.0 - additive) * np.exp(-share / length)
    return likeness


_KAPPA = 2.5  # Standard deviations above the mean at which an untried subset is valued
_POOL = 384  # Random subsets among which the next one is chosen; as many neighbours of the best come on top
_REMEMBERED = 300  # Most trials that the Gaussian process is fitted to: the best half and the latest half
_SHARES = (0.25, 0.5, 0.375, 0.125, 0.625)  # Shares of the sub-layers that the first trials skip, at even distances
_RANDOM_STARTS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """The subsets that may be proposed."""

    allowed: tuple[Sublayer, ...]  # Sub-layers that may be skipped, in order
    size: int | None = None  # How many are skipped; None: any number but none and all

    def vector(self, skip: SkipSet) -> Floats:
        """Return a subset as a vector (d,) of 0 and 1."""
        return np.array([float(sublayer in skip) for sublayer in self.allowed])

    def random(self, random: np.random.Generator) -> SkipSet:
        """Return a random subset; without a fixed size every size is equally likely."""
        size = int(random.integers(1, len(self.allowed))) if self.size is None else self.size
        return frozenset(self.allowed[index] for index in random.permutation(len(self.allowed))[:size])

    def neighbour(self, skip: SkipSet, random: np.random.Generator) -> SkipSet:
        """Return the subset with one or two sub-layers exchanged; without a fixed size, one may be
        added or removed as well.
        """
        inside, outside = sorted(skip), sorted(set(self.allowed) - skip)
        found = set(skip)
        for _ in range(int(random.integers(1, 3))):
            leave = self.size is not None or random.random() < 2 / 3
            enter = self.size is not None or not leave or random.random() < 0.5
            if leave:
                found.discard(inside[int(random.integers(len(inside)))])
            if enter and outside:
                found.add(outside[int(random.integers(len(outside)))])
        valid = len(found) == self.size if self.size is not None else 0 < len(found) < len(self.allowed)
        return frozenset(found) if valid else skip


class SkipTrial(NamedTuple):
    """One subset and its measured value."""

    skip: SkipSet
    value: float  # Larger is better


def propose(space: Space, trials: Sequence[SkipTrial], random: np.random.Generator) -> SkipSet | None:
    """Return the untried subset of largest upper confidence bound by a Gaussian process; None if
    all were tried.
    """
    leaders = sorted(trials, key=lambda trial: -trial.value)[:3]
    pool = [space.neighbour(leader.skip, random) for leader in leaders for _ in range(_POOL // 3)]
    pool += [space.random(random) for _ in range(_POOL)]
    tried = {trial.skip for trial in trials}
    pool = [skip for skip in dict.fromkeys(pool) if skip not in tried]
    if not pool:
        return None
    latest, known = trials[-_REMEMBERED // 2 :], trials
    if len(trials) > _REMEMBERED:
        best = sorted(trials[: -_REMEMBERED // 2], key=lambda trial: -trial.value)
        known = [*best[: _REMEMBERED // 2], *latest]
    points, values = np.stack([space.vector(trial.skip) for trial in known]), [trial.value for trial in known]
    mean, spread = predict(points, np.array(values), np.stack([space.vector(skip) for skip in pool]))
    return pool[int((mean + _KAPPA * spread).argmax())]


class Search:
    """Bayesian optimisation by an upper confidence bound, after a few subsets at even distances and
    at random.
    """

    def __init__(self, space: Space, *, seed: int = 0) -> None:
        self.space = space
        self.trials: list[SkipTrial] = []
        self._random = np.random.default_rng(seed)
        count = len(space.allowed)
        starts = [evenly(space.allowed, max(1, round(share * count))) for share in _SHARES]
        starts += [space.random(self._random) for _ in range(_RANDOM_STARTS)]
        self._starts = list(dict.fromkeys(starts))

    def ask(self) -> SkipSet | None:
        """Return the next subset to measure, or None if every one was."""
        if len(self.trials) < len(self._starts):
            return self._starts[len(self.trials)]
        return propose(self.space, self.trials, self._random)

    def tell(self, skip: SkipSet, value: float) -> None:
        """Record a subset's value."""
        self.trials.append(SkipTrial(skip, value))


FORMAT = "forerun-skip-layers"
_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
_STRUCTURE = ("model_type", "num_hidden_layers", *_SIZES)  # Models that agree in these are taken for relatives


@dataclass(frozen=True, kw_only=True, slots=True)
class SkipFile:
    """A tuned set of sub-layers and where it comes from."""

    model: str  # Directory or hub id it was tuned on; for the reader, not compared: the same model may lie elsewhere
    num_layers: int
    structure: str  # `structure_hash` of the model
    skip: SkipSet
    num_speculative_tokens: int  # Length of the chain at which the set was the cheapest, tokens
    measured: Mapping[str, Any] = field(default_factory=dict)  # Figures of the set, of plain decoding, and the setting
    trace: list[dict[str, Any]] = field(default_factory=list)  # Every set that was tried, in order

    def write(self, path: Path) -> None:
        """Write the file; it is whole or not there. Raises DataError if it cannot be written."""
        body = {"format": FORMAT, **asdict(self), "skip": names(self.skip)}
        try:
            with written(path) as fresh:
                fresh.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise DataError(f"{path} cannot be written: {error}. Choose another --output.") from error

    @classmethod
    def read(cls, path: Path, target: Target) -> SkipFile:
        """Read the file at `path`. Raises DataError if it is missing, or not what the tuner writes;
        ArgumentError if it was tuned on another kind of model than `target`.
        """
        body = read_object(path, "tune a set: forerun tune skip-layers")
        if body.get("format") != FORMAT:
            raise DataError(f"{path} is not a file that forerun tune skip-layers wrote: it lacks 'format': {FORMAT!r}")
        known = {name: value for name, value in body.items() if name in cls.__dataclass_fields__}
        try:
            found = cls(**known | {"skip": parse(body["skip"], body["num_layers"])})
        except (KeyError, TypeError) as error:
            raise DataError(f"{path} is damaged ({error!r}); tune again") from error
        remedy = f"Tune a set for this model: forerun tune skip-layers MODEL --output {path.name}"
        if found.num_layers != target.num_layers:
            tuned = f"{path} was tuned on {found.model} with {found.num_layers} layers"
            raise ArgumentError(f"{tuned}; this model has {target.num_layers}. {remedy}")
        if found.structure != structure_hash(target):
            raise ArgumentError(f"{path} was tuned on {found.model}, which is built differently. {remedy}")
        return found


def structure_hash(target: Target) -> str:
    """Return a hash of the kind of model: of family and sizes, not of the weights."""
    facts = {name: getattr(target.config, name, None) for name in _STRUCTURE}
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]
