"""What a pass of the target and a proposal of a drafter cost on this machine: measured once, kept on disk, corrected.

* **Numbers**: `CostModel` (a pass over n nodes, by rows and context), `DraftCost` (fixed and per level). The planner
  reads them, too; ``v(n) = T(n) / T(1)`` is what a pass costs in passes over one node (docs/planning.md).
* **Measuring**: `load_or_measure` times passes on free rows within a time budget, and keeps the figures: one JSON file
  per model, device, dtype, threads, packing and torch version.
* **Prediction**: `StepCosts`, what a step will take, corrected by what steps were seen to take. Costs are a staircase;
  `PassShape` says which nodes of which rows make up one stair.

Only what measures imports torch, inside its functions; what predicts is handed the times.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import re
import time
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import TypeAdapter

from forerun.caching import cache_root
from forerun.engine.policy.settings import SETTINGS
from forerun.errors import ArgumentError
from forerun.writing import written

if TYPE_CHECKING:
    import torch

    from forerun.model import Target

log = logging.getLogger(__name__)

# --- numbers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftCost:
    """What one drafter configuration costs per proposal, wall time."""

    fixed_ms: float  # Whatever the depth: catching up with the accepted tokens, look-ups, host work; ms
    level_ms: float
    """Per level of depth, ms; about 0 for drafters that copy and for those that draft all levels in one pass."""

    def __post_init__(self) -> None:
        if not (self.fixed_ms >= 0 and self.level_ms >= 0):
            raise ArgumentError(f"a drafter's cost cannot be negative, got {self.fixed_ms} and {self.level_ms} ms")

    def ms(self, depth: int) -> float:
        """A proposal down to `depth`, ms."""
        return self.fixed_ms + self.level_ms * depth


FREE = DraftCost(fixed_ms=0.0, level_ms=0.0)


class PassCost(Protocol):
    """Anything that says what a target pass costs: measured (`CostModel`), nominal, or from a data sheet."""

    def pass_ms(self, nodes: float, rows: int = 1, context: int = 0) -> float:
        """Wall time of one pass over `nodes` nodes in each of `rows` rows behind `context` tokens, ms."""
        ...


class Nominal:
    """A pass cost for where none could be measured. In plain passes; ratios seen while running make milliseconds."""

    def __init__(self, slope: float = 0.04) -> None:
        """`slope`: what each node adds, in passes over one."""
        self.slope = slope

    def pass_ms(self, nodes: float, rows: int = 1, context: int = 0) -> float:
        """In passes of a single node."""
        return 1.0 + self.slope * (nodes * rows - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """Measured wall time of target passes over a grid of (rows, nodes per row, context)."""

    nodes: tuple[int, ...]  # Scored nodes of a row, root included; rising, the first is 1
    rows: tuple[int, ...]  # Rows of a pass, rising
    contexts: tuple[int, ...]  # Committed tokens of every row, rising
    pass_times_ms: tuple[tuple[tuple[float, ...], ...], ...]
    """``pass_times_ms[context][rows][nodes]`` by index into the three grids; in nodes they never fall."""
    drafts: dict[str, DraftCost] = field(default_factory=dict)  # What drafters cost, by `SpeculativeConfig.key`
    stairs: bool = True
    """Passes are padded up to the next measured size; False: they are not, and costs between sizes are interpolated."""

    def __post_init__(self) -> None:
        for name in ("nodes", "rows", "contexts"):
            grid = getattr(self, name)
            if not grid or list(grid) != sorted(set(grid)) or grid[0] < (0 if name == "contexts" else 1):
                raise ArgumentError(f"{name} of a cost model must be rising positive numbers, got {grid}")
        if self.nodes[0] != 1:
            raise ArgumentError(f"a cost model needs the cost of a pass over one node, got sizes {self.nodes}")
        lines = [line for plane in self.pass_times_ms for line in plane]
        shape = [len(self.pass_times_ms), *{len(plane) for plane in self.pass_times_ms}, *{len(line) for line in lines}]
        if shape != [len(self.contexts), len(self.rows), len(self.nodes)]:
            raise ArgumentError("pass_times_ms must hold one time for each context, row count and node count")
        if not all(time > 0 for line in lines for time in line):
            raise ArgumentError("pass_times_ms must be positive")

    def pass_ms(self, nodes: float, rows: int = 1, context: int = 0) -> float:
        """Wall time of one pass, ms.

        Sizes between the measured ones are rounded up (`stairs`) or interpolated; rows and contexts are interpolated.
        Above the grid costs go on linearly; where only one row count was measured, a pass over B rows of N nodes
        counts as one of B * N nodes. Contexts below the grid cost what its first one does.
        """
        if nodes < 1 or rows < 1 or context < 0:
            raise ArgumentError(f"a pass has at least one node and one row, got {nodes} nodes, {rows} rows, {context}")
        if len(self.rows) == 1 and rows > self.rows[0]:
            nodes, rows = -(-nodes * rows // self.rows[0]), self.rows[0]
        by_context = [
            _along(self.rows, [_along(self.nodes, line, nodes, stairs=self.stairs) for line in plane], rows)
            for plane in self.pass_times_ms
        ]
        return _along(self.contexts, by_context, context)

    def v(self, nodes: float, rows: int = 1, context: int = 0) -> float:
        """``pass_ms(nodes) / pass_ms(1)`` at the same rows and context."""
        return self.pass_ms(nodes, rows, context) / self.pass_ms(1, rows, context)

    def with_draft(self, key: str, draft: DraftCost) -> CostModel:
        """The same with a drafter's cost added or replaced."""
        return replace(self, drafts={**self.drafts, key: draft})

    def record(self) -> dict[str, Any]:
        """As JSON knows it."""
        return asdict(self)


def _along(grid: Sequence[int], values: Sequence[float], where: float, *, stairs: bool = False) -> float:
    """`values` on a rising `grid` at `where`: the next one up (`stairs`) or interpolated.

    Below the grid its first value, above it a straight line through its last two that does not fall.
    """
    index = bisect_left(grid, where)
    if index == 0 or len(grid) == 1:
        return values[0]
    if index == len(grid):
        slope = (values[-1] - values[-2]) / (grid[-1] - grid[-2])
        return values[-1] + max(0.0, slope) * (where - grid[-1])
    share = 1.0 if stairs else (where - grid[index - 1]) / (grid[index] - grid[index - 1])
    return values[index - 1] + share * (values[index] - values[index - 1])


# --- measuring --------------------------------------------------------------------------------------------------------

NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # Sizes that are measured by default, root included
CONTEXTS = (64, 512, 2048)
"""Committed tokens that are measured by default, as far as they fit; the cost of attention is a line between them."""
ROWS = (1, 4, 16, 64)  # Row counts that are measured by default, as far as the target has them; its own number is added
Point = tuple[int, int, int]  # (context, rows, nodes)
Grid = Mapping[str, tuple[int, ...]]  # What is measured: ``nodes``, ``rows`` and ``contexts``, rising


def load_or_measure(
    target: Target,
    *,
    rows: Sequence[int] | None = None,
    nodes: Sequence[int] = NODES,
    contexts: Sequence[int] = CONTEXTS,
    repeats: int = 7,
    seconds: float = 10.0,
    force: bool = False,
    tell: Callable[[str], None] = lambda _: None,
) -> CostModel:
    """What this target's passes cost here: read from disk, else measured on free rows and kept.

    One pass is what one step asks of the target: from token ids to the argmax of every node on the host, and the
    commit. The rows are free again afterwards; what stands in their slots is overwritten. Contexts are only announced,
    not prefilled: the cost of attention does not depend on what it reads. Where more sizes are wanted than a file
    holds, both are measured together. A file that is corrupt, foreign or of another format is ignored with a warning.

    Args:
        rows: how many rows a pass has; default 1, 4, 16, 64 and all rows, as far as they are there.
        nodes: scored nodes of a row, root included; 1 is added.
        contexts: committed tokens of each row, as far as they fit.
        repeats: passes of each size; the lower quartile counts.
        seconds: stop adding passes after this long; the smallest sizes are measured in any case.
        force: measure although there is a file; the drafters in it are forgotten.
        tell: told how far it is.

    Raises:
        ArgumentError: a size is out of range, or it must be measured and too few rows are free.
    """
    if rows is None:
        rows = sorted({*(count for count in ROWS if count < target.rows), target.rows})
    if not rows or not nodes or min(*rows, *nodes, 1) < 1 or max(rows) > target.rows:
        raise ArgumentError(f"rows must be in 1..{target.rows} and node counts at least 1, got {rows} and {nodes}")
    room = min(target.slots, target.max_length)
    sizes = sorted({1, *(size for size in nodes if size < room)})
    fitting = {max(0, min(context, room - sizes[-1])) for context in contexts}
    grid: Grid = {"nodes": tuple(sizes), "rows": tuple(sorted(set(rows))), "contexts": tuple(sorted(fitting))}
    kept = None if force else _read(target)
    if kept is not None:
        if all(set(sizes) <= set(kept[0][name]) for name, sizes in grid.items()):
            return kept[1]
        most = {"nodes": room, "rows": target.rows, "contexts": room}
        known = {name: [size for size in sizes if size <= most[name]] for name, sizes in kept[0].items()}
        grid = {name: tuple(sorted({*sizes, *known[name]})) for name, sizes in grid.items()}
    free = free_rows(target, grid["rows"][-1])
    try:
        samples = _sampled(target, free, grid, repeats, seconds, tell)
    finally:
        target.truncate(free, [0] * len(free))
    drafts = {} if kept is None else kept[1].drafts
    cost = replace(_fitted(grid, samples), drafts=drafts, stairs=bool(target.buckets.nodes))
    _write(target, grid, cost)
    return cost


def known_or_nominal(target: Target) -> PassCost:
    """From disk or by measuring on free rows; where none are free, a nominal figure that steps will correct."""
    try:
        return load_or_measure(target)
    except ArgumentError:
        free = sum(length == 0 for length in target.lengths)
        log.info("%d rows are free to measure what a pass costs", free)
        return load_or_measure(target, rows=(free,)) if free else Nominal()


def free_rows(target: Target, count: int) -> list[int]:
    """`count` rows that hold no token, neighbours where there are such: the cache reads those without a copy.

    Raises:
        ArgumentError: there are fewer.
    """
    free = [row for row, length in enumerate(target.lengths) if length == 0]
    if len(free) < count:
        raise ArgumentError(f"{count} free rows are needed to measure, the target has {len(free)}; measure before use")
    runs = [free[start : start + count] for start in range(len(free) - count + 1)]
    return min(runs, key=lambda run: run[-1] - run[0])


def _sampled(
    target: Target, rows: Sequence[int], grid: Grid, repeats: int, seconds: float, tell: Callable[[str], None]
) -> dict[Point, list[float]]:
    """Wall times in seconds, the cheapest points first; behind further contexts few sizes, for what they add is smooth.

    The first round, with a warm-up of each size, decides what fits the budget.
    """
    deadline, room = time.perf_counter() + seconds, min(target.slots, target.max_length)
    first, nodes, least = grid["contexts"][0], grid["nodes"], grid["rows"][0]
    few = {nodes[0], *(n for n in nodes if n in (4, 16, 64)), nodes[-1]}
    every = [(c, r, n) for c in grid["contexts"] for r in grid["rows"] for n in nodes if c + n <= room]
    samples, rate = dict[Point, list[float]](), 0.0
    for point in sorted((p for p in every if p[0] == first or p[2] in few), key=lambda p: (p[1] * p[2], p)):
        tokens, needed = point[1] * point[2], point[:2] == (first, least) and point[2] in nodes[:2]
        if not needed and time.perf_counter() + 2 * rate * tokens > deadline:
            continue
        tell(f"{point[2]} nodes in {point[1]} rows behind {point[0]} tokens")
        _time(target, rows, point)
        samples[point] = [_time(target, rows, point)]
        rate = samples[point][0] / tokens
    for turn in range(1, repeats):
        tell(f"round {turn + 1} of {repeats}")
        for point, times in samples.items():
            if time.perf_counter() > deadline:
                return samples
            times.append(_time(target, rows, point))
    return samples


def _time(target: Target, rows: Sequence[int], point: Point) -> float:
    from torch import inference_mode

    from forerun.core.tree import TokenTree

    context, count, nodes = point
    used = list(rows[:count])
    for row in used:
        target.lengths[row] = context
    trees = [TokenTree((7919 * row + 13) % target.vocab_size) for row in used]
    for tree in trees:
        tree.add_path(index % min(97, target.vocab_size) for index in range(nodes - 1))
    with inference_mode():
        began = time.perf_counter()
        # The argmax on the host is what a greedy step reads; on an accelerator it also waits for the pass to end.
        target.score(used, trees).logits.argmax(-1).tolist()
        target.commit(used, [()] * count)
        return time.perf_counter() - began


def _fitted(grid: Grid, samples: Mapping[Point, Sequence[float]]) -> CostModel:
    """Times in ms; sizes that were left out are filled in, row counts and contexts with too few sizes are dropped."""
    # The lower quartile: what else runs on the machine can only add to a time.
    ms = {point: 1e3 * sorted(times)[(len(times) - 1) // 4] for point, times in samples.items()}
    nodes, first = grid["nodes"], grid["contexts"][0]
    known = {(c, r): [n for n in nodes if (c, r, n) in ms] for c in grid["contexts"] for r in grid["rows"]}
    least = min(2, len(nodes))
    rows = [r for r in grid["rows"] if len(known[first, r]) >= least]
    contexts = [c for c in grid["contexts"] if all(len(known[c, r]) >= least for r in rows)]
    base = {(r, n): 0.0 for r in rows for n in nodes}
    planes = list[list[list[float]]]()
    for c in contexts:
        plane = list[list[float]]()
        for r in rows:  # behind further contexts what they add to the first one's times is interpolated
            added = [ms[c, r, n] - base[r, n] for n in known[c, r]]
            plane.append(rising([base[r, n] + _along(known[c, r], added, n) for n in nodes]))
        planes.append(plane)
        base = {(r, n): planes[0][i][j] for i, r in enumerate(rows) for j, n in enumerate(nodes)}
    times = tuple(tuple(map(tuple, plane)) for plane in planes)
    return CostModel(nodes=nodes, rows=tuple(rows), contexts=tuple(contexts), pass_times_ms=times)


def rising(values: Sequence[float]) -> list[float]:
    """The nearest sequence that never falls (pool adjacent violators): a pass over more nodes is not cheaper."""
    pools: list[tuple[float, int]] = []
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (low, many), (high, more) = pools.pop(-2), pools.pop()
            pools.append(((low * many + high * more) / (many + more), many + more))
    return [value for value, count in pools for _ in range(count)]


# --- on disk ----------------------------------------------------------------------------------------------------------

FORMAT = 1  # Raise it when figures of before are no longer comparable
_VOLATILE = ("_name_or_path", "name_or_path", "transformers_version", "torch_dtype")


def save(target: Target, cost: CostModel) -> Path:
    """Keep `cost`, to which drafters were added, as that of this target; returns the file.

    Drafters whose configuration holds a Python object are left out: their key means nothing to another process.
    """
    kept = _read(target)
    own = {"nodes": cost.nodes, "rows": cost.rows, "contexts": cost.contexts}
    lasting = {key: draft for key, draft in cost.drafts.items() if not re.search(r"@\d+", key)}
    return _write(target, own if kept is None else kept[0], replace(cost, drafts=lasting))


def file_of(target: Target) -> Path:
    """Where this target's costs are kept: in ``cost`` below `cache_root`."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(target.name_or_path).name) or "model"
    return cache_root() / "cost" / f"{name}-{_hash(identity(target))[:16]}.json"


def identity(target: Target) -> dict[str, Any]:
    """All that a pass's cost depends on. The values of the weights do not matter, their number and type do."""
    import torch

    from forerun.model.kernels import native
    from forerun.model.kernels.packing import FusedLinear, PackedLinear

    on_cpu = target.device.type == "cpu"
    modules = list(target.model.modules())
    return {
        "model": type(target.model).__name__,
        "config": _hash({key: value for key, value in target.config.to_dict().items() if key not in _VOLATILE}),
        "attention": str(getattr(target.config, "_attn_implementation", None)),
        "weights_bytes": target.memory_bytes() - target.cache.nbytes(),
        "device": device_name(target.device),
        "dtype": str(target.dtype),
        "threads": torch.get_num_threads() if on_cpu else None,
        "kernel": native.version() if on_cpu and native.attention_kernel() is not None else None,
        "packed": sum(isinstance(module, PackedLinear | FusedLinear) for module in modules),
        "compiled": any(type(getattr(module, "forward", None)).__name__ == "CompiledForward" for module in modules),
        "torch": torch.__version__,
        "buckets": asdict(target.buckets),
    }


def device_name(device: torch.device) -> str:
    """The product's name where it can be had."""
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return str(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _read(target: Target) -> tuple[Grid, CostModel] | None:
    """What is kept for this target: the sizes that were asked for, and their costs."""
    path = file_of(target)
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        body = {key: kept[key] for key in ("format", "identity", "grid", "cost")}
        own = json.loads(json.dumps(identity(target), default=str))
        if body["format"] != FORMAT or kept["sha256"] != _hash(body) or body["identity"] != own:
            raise ValueError("its format, hash or identity is another's")
        return TypeAdapter(tuple[dict[str, tuple[int, ...]], CostModel]).validate_python((body["grid"], body["cost"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s is no cost model of this target (%r); measuring anew", path, error)
        return None


def _write(target: Target, grid: Grid, cost: CostModel) -> Path:
    """All or nothing. A cache that cannot be written is no reason to fail."""
    path = file_of(target)
    body = {"format": FORMAT, "identity": identity(target), "grid": grid, "cost": cost.record()}
    try:
        with written(path) as fresh:
            text = json.dumps({**body, "sha256": _hash(body)}, indent=1, default=str)
            fresh.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        log.warning("the cost model could not be kept in %s: %s", path, error)
    return path


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


# --- prediction -------------------------------------------------------------------------------------------------------

_CONTEXT_STEP = 256  # Predictions are renewed when the context grows into the next multiple of this, tokens
_LEAST_MS = 1e-3


@dataclass(frozen=True, slots=True)
class PassShape:
    """How the drafted nodes of several rows make up the size of one pass.

    Where padding is computed like everything else, a pass is as wide as its widest row, and a size is a width; where it
    is left out (see `Target.computes_padding`), a size counts the nodes of all rows together.
    """

    padded: bool = False

    def size(self, counts: Sequence[int]) -> int:
        """Of a pass over `counts` drafted nodes, by row."""
        return max(counts, default=0) if self.padded else sum(counts)

    def even(self, rows: int, nodes: int) -> int:
        """The size of a pass of `rows` rows in which each has `nodes` drafted nodes."""
        return nodes if self.padded else rows * nodes

    def nodes(self, size: int, rows: int) -> float:
        """Drafted nodes that each of `rows` rows would have in a pass of this size."""
        return size if self.padded else size / rows


class Times(dict[int, float]):
    """Size of a pass -> the time of a step with it, ms; worked out when it is asked for."""

    def __init__(self, most: int, time: Callable[[int], float]) -> None:
        """`most`: the largest size, larger ones take as long; `time` works one out."""
        self.most, self._time = most, time

    def __missing__(self, size: int) -> float:
        found = self[size] = self._time(size) if size <= self.most else self[self.most]
        return found


class Correction:
    """Factors for predictions: the machine's pace of late, common to all sizes, times what each size has of its own.

    The pace is quick, so a size that was not seen for long follows when the machine becomes slower; what a size has of
    its own is slow, and leans on its family's while it was seen seldom. A size that is new tells what it has of its own
    and nothing of the pace: else one that is dearer than predicted would seem to say that all have become so. Medians,
    so a garbage collection moves nothing. Sizes are tuples; those that begin with 0 (plain passes) are a family.
    """

    def __init__(self) -> None:
        self._latest: deque[tuple[tuple[int, int], float]] = deque(maxlen=SETTINGS.pace_window)
        self._seen: dict[tuple[int, int], deque[tuple[int, float]]] = {}
        self._own: dict[tuple[int, int], float] = {}  # Median of the ratios kept of a size, the pace taken out
        self._family = dict[bool, float]()  # Median of these by family
        self._count = 0
        self._pace = 1.0

    def add(self, size: tuple[int, int], seen: float, predicted: float) -> None:
        """Take in one figure."""
        self._count += 1
        ratio = max(seen, _LEAST_MS) / max(predicted, _LEAST_MS)
        own, new = self._seen.setdefault(size, deque(maxlen=SETTINGS.window)), SETTINGS.new
        if len(own) >= new or all(len(others) < new for others in self._seen.values()):
            self._latest.append((size, ratio))
            self._pace = median(ratio / self._own.get(size, 1.0) for size, ratio in self._latest)
        own.append((self._count, ratio / self._pace))
        while own[0][0] < self._count - SETTINGS.stale:
            own.popleft()
        self._own[size] = median(ratio for _, ratio in own)
        family = size[0] > 0
        self._family[family] = median(factor for other, factor in self._own.items() if (other[0] > 0) == family)

    def known(self, size: tuple[int, int]) -> int:
        """Figures of this size that still count."""
        return sum(count > self._count - SETTINGS.stale for count, _ in self._seen.get(size, ()))

    def factor(self, size: tuple[int, int]) -> float:
        """To multiply a prediction with; a size that was never seen is as its family is."""
        many, common = len(self._seen.get(size, ())), self._family.get(size[0] > 0, 1.0)
        return self._pace * (many * self._own.get(size, 1.0) + common) / (many + 1)


class StepCosts:
    """Times of passes and drafts in ms, for the sizes that the policy weighs. Times are handed in.

    Args:
        passes: what passes cost, over as many nodes in each row.
        drafts: what drafters cost, calibrated or guessed, by key.
        shape: what size of a pass nodes of several rows make up.
    """

    def __init__(
        self,
        passes: PassCost,
        drafts: Mapping[str, DraftCost] | None = None,
        shape: PassShape = PassShape(),
    ) -> None:
        self._drafts, self.shape = dict(drafts or {}), shape
        self._calibrated = lru_cache(maxsize=8192)(
            lambda size, rows, context: passes.pass_ms(1 + shape.nodes(size, rows), rows, context)
        )
        self._pass, self._draft = Correction(), defaultdict[str, Correction](Correction)
        self._seen = defaultdict[Hashable, deque[float]](lambda: deque(maxlen=SETTINGS.window))
        """The latest of: a plain step's host work in ms; what asking those that copy adds, over the time that they take
        themselves, both by about how many rows; what a drafter's first look at a token takes in ms, by its key."""

    def times(self, rows: int, context: int, nodes: int) -> Times:
        """By size: a pass over `rows` rows of up to `nodes` drafted nodes each, and a plain step's host work.

        What asking those that copy takes is no part of it: it is spent whatever is then submitted.
        """
        host = self.host_ms(rows)

        def time(size: int) -> float:
            return self._predicted(size, rows, context) * self._pass.factor(_alike(size, rows)) + host

        return Times(self.shape.even(rows, nodes), time)

    def draft_ms(self, key: str, depth: int, rows: int) -> float:
        """A proposal down to `depth` by a drafter in a step of `rows` rows that it knows the text of."""
        return self._proposal(key, depth, rows) * self._draft[key].factor((depth, rows))

    def reading_ms(self, key: str, tokens: int) -> float:
        """A drafter's first look at so many tokens; 0 while that has never been seen."""
        return tokens * self._latest(("reading", key), 0.0) if tokens >= SETTINGS.reading else 0.0

    def plain_is_due(self, rows: int) -> bool:
        """Whether plain decoding of about so many rows, which everything is held against, has been seen too seldom: a
        assumed cost that no step ever corrects would go on to justify the nodes that keep it from being seen."""
        return min(len(self._seen["host", _about(rows)]), self._pass.known(_alike(0, rows))) < SETTINGS.plain_steps

    def saw_pass(self, size: int, rows: int, context: int, ms: float) -> None:
        """A pass of this size over `rows` rows, and its verification, took this long."""
        self._pass.add(_alike(size, rows), ms, self._predicted(size, rows, context))

    def saw_draft(self, key: str, depth: int, rows: int, ms: float, *, unread: int = 0) -> None:
        """The proposal of one drafter took this long, `unread` tokens being read before it."""
        if unread >= SETTINGS.reading:
            self._seen["reading", key].append(max(0.0, ms - self.draft_ms(key, depth, rows)) / unread)
        else:
            self._draft[key].add((depth, rows), ms, self._proposal(key, depth, rows))

    def host_ms(self, rows: int) -> float:
        """Host work of a step of so many rows in which nobody is asked; 0 while that was never seen."""
        return self._latest(("host", _about(rows)), 0.0)

    def lookup_ms(self, rows: int, ms: float) -> float:
        """What it adds to a step that drafters which copy are asked, if they themselves take `ms` for it.

        The rest is merging, ranking and handing over their trees, and learning from them.
        """
        return ms * self._latest(("lookup", _about(rows)), SETTINGS.lookup_overhead)

    def saw_host(self, ms: float, rows: int, *, lookup_ms: float) -> None:
        """The host work of a step without a drafter's forward pass took this long; `lookup_ms` is what those that copy
        took of it themselves, 0 where none was asked."""
        if lookup_ms == 0.0:
            self._seen["host", _about(rows)].append(ms)
        else:
            self._seen["lookup", _about(rows)].append(max(1.0, (ms - self.host_ms(rows)) / lookup_ms))

    def _latest(self, key: Hashable, unseen: float) -> float:
        """The median of what was seen of late; a garbage collection moves nothing."""
        seen = self._seen.get(key)
        return median(seen) if seen else unseen

    def _proposal(self, key: str, depth: int, rows: int) -> float:
        """As calibrated on one row, growing with the rows as the target's pass does."""
        growth = self._predicted(0, rows, 0) / self._predicted(0, 1, 0) if rows > 1 else 1.0
        return self._drafts[key].ms(depth) * growth

    def _predicted(self, size: int, rows: int, context: int) -> float:
        return self._calibrated(size, rows, context // _CONTEXT_STEP * _CONTEXT_STEP)


def _alike(size: int, rows: int) -> tuple[int, int]:
    """What passes are corrected alike: of about as many rows, and of about the same size, in steps of an eighth."""
    shift = max(0, size.bit_length() - 4)
    return size >> shift << shift, _about(rows)


def _about(rows: int) -> int:
    return rows if rows < 4 else 2 ** rows.bit_length()
