"""Measures the time of the target's passes on this machine, from steps or in a calibration on free rows, and keeps it
on disk.

There is one JSON file for each model, device, dtype, number of threads, packing and torch version. torch is imported
inside the functions that time something.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING, Any

from forerun.control.costs import CostModel, Nominal, PassCost, along
from forerun.errors import ArgumentError
from forerun.writing import cache_root, hash_json, read_sealed, write_sealed

if TYPE_CHECKING:
    from forerun.model import Target

log = logging.getLogger(__name__)

NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # Sizes that are measured by default, root included
CONTEXTS = (64, 512, 2048)
"""Numbers of committed tokens that are measured by default, as far as they fit; the cost between them is interpolated.
"""
_FIRST_NODES = (1, 2, 4, 8, 16, 32)  # Sizes that are timed before the first draft
ROWS = (1, 4, 16, 64)  # Row counts that are measured by default, as far as the target has them; its own number is added
_FEW_TIMES = 3  # Times of a size that steps must have shown before it is kept
_KEPT_WEIGHT = 24  # Number of times that a kept one counts for, where new ones of its size are averaged with it
_INSTANT = 1e-3  # Least time of a pass, ms
_SIZES_SEEN = 4  # Sizes of passes that steps must have shown before they are kept
Point = tuple[int, int, int]  # (context, rows, nodes)
Grid = Mapping[str, tuple[int, ...]]  # The measured sizes: ``nodes``, ``rows`` and ``contexts``, rising
_NOT_CALIBRATED: Grid = {"nodes": (), "rows": (), "contexts": ()}  # Grid of costs from steps, not from a calibration


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
    """Return the cost of this target's passes on this machine: read from disk, else measured on free rows and written
    to disk.

    One pass is the target's work in a step: from token ids to the argmax of every node on the host, and the commit. The
    contents of the free rows' slots are overwritten. Contexts are announced without a prefill: the cost of attention
    does not depend on the values that it reads. If the file lacks some of the sizes, all are measured together. A file
    that is corrupt, foreign or of another format is ignored with a warning. Raises ArgumentError if a size is out of
    range, or if too few rows are free to measure.

    Args:
        rows: numbers of rows of a pass; by default 1, 4, 16, 64 and all rows, as far as the target has them.
        nodes: scored nodes of a row, root included; 1 is added.
        contexts: committed tokens of each row, as far as they fit.
        repeats: passes of each size; the lower quartile counts.
        seconds: no pass is started after this long; the smallest sizes are measured in any case.
        force: measure even if there is a file; the drafters' costs in it are dropped.
        tell: called with a line about the progress.
    """
    if rows is None:
        rows = sorted({*(count for count in ROWS if count < target.rows), target.rows})
    if not rows or not nodes or min(*rows, *nodes, 1) < 1 or max(rows) > target.rows:
        raise ArgumentError(f"rows must be in 1..{target.rows} and node counts at least 1, got {rows} and {nodes}")
    room = min(target.slots, target.max_length)
    grid = _grid(target, rows, nodes, contexts)
    stored = None if force else _read(target)
    if stored is not None:
        if all(set(sizes_needed) <= set(stored[0][name]) for name, sizes_needed in grid.items()):
            return stored[1]
        most = {"nodes": room, "rows": target.rows, "contexts": room}
        measured = {name: [size for size in sizes if size <= most[name]] for name, sizes in stored[0].items()}
        grid = {name: tuple(sorted({*sizes, *measured[name]})) for name, sizes in grid.items()}
    cost = replace(_measure(target, grid, repeats, seconds, tell), drafts={} if stored is None else stored[1].drafts)
    _write(target, grid, cost)
    return cost


def known_or_nominal(target: Target) -> PassCost:
    """Return the cost of this target's passes from disk, where a calibration or another process has written it.

    Else a few sizes are timed on a free row, on a CPU, and written to disk until steps correct them: kernels differ,
    and a second node costs between a hundredth and all of the first. Other processes make all sizes look equally slow,
    so a node counts at least its nominal cost, and nothing is written if the largest size takes less than that. Costs
    start nominal where others made a size look dearer than as many plain passes, where there was no time for sizes
    above two, and on an accelerator, where the first pass of each size is recorded.
    """
    stored = _read(target)
    if stored is not None:
        return stored[1]
    if target.device.type != "cpu" or all(target.lengths):
        return Nominal()
    grid = _grid(target, (1,), _FIRST_NODES, CONTEXTS[:1])
    cost = _measure(target, grid, repeats=3, seconds=0.5, tell=lambda _: None)
    nominal = Nominal()
    [[seen]] = cost.pass_times_ms
    if cost.nodes[-1] <= _FIRST_NODES[1] or any(ms > seen[0] * n for n, ms in zip(cost.nodes, seen, strict=True)):
        return nominal
    least = [seen[0] * nominal.pass_ms(nodes) for nodes in cost.nodes]
    if seen[-1] >= least[-1]:
        _write(target, _NOT_CALIBRATED, cost)
    return replace(cost, pass_times_ms=((tuple(map(max, seen, least)),),))


def keep_steps(target: Target, seen: Mapping[tuple[int, int], Sequence[float]]) -> None:
    """Write the times of real steps to disk, for the next process that loads this target.

    They are written as times of a pass over one row: for each number of rows alone too few sizes are seen. What was
    seen in other contexts, or by earlier processes, is scaled by the smallest size seen there and here. Fewer than
    four sizes say too little and are not written; a calibration is more precise and is not overwritten. A few times of
    a size that is seldom drafted may all fall into a slow moment, and a size that looks dear is drafted no more: so
    new times only move what is known, each by its share. Passes that are larger than the seen ones are assumed to
    cost at least the `Nominal` cost of each further node.

    Args:
        seen: times of passes, ms, by (context, nodes of all rows).
    """
    by_context = defaultdict[int, dict[int, Sequence[float]]](dict)
    for (context, nodes), times in seen.items():
        if len(times) >= _FEW_TIMES:
            by_context[context][nodes] = times
    if not by_context:
        return
    least = {context: max(median_low(sizes[min(sizes)]), _INSTANT) / 1e3 for context, sizes in by_context.items()}
    context = max(by_context, key=lambda other: len(by_context[other][min(by_context[other])]))
    often = defaultdict[int, list[float]](list)
    for other, sizes in by_context.items():  # Contexts and moments differ in pace; sizes are compared within each
        for nodes, times in sizes.items():
            often[nodes] += [ms / 1e3 * least[context] / least[other] for ms in times]
    stored = _read(target) if len(often) >= _SIZES_SEEN else None
    if len(often) < _SIZES_SEEN or (stored is not None and stored[0]["nodes"]):
        return
    often.setdefault(1, often[min(often)])
    samples = {(context, 1, nodes): times for nodes, times in often.items()}
    cost = _fit({"contexts": (context,), "rows": (1,), "nodes": tuple(sorted(often))}, samples)
    if stored is not None:
        cost = _merge(stored[1], cost, {nodes: len(times) for nodes, times in often.items()})
    _write(target, _NOT_CALIBRATED, replace(_extrapolate(cost), stairs=bool(target.buckets.nodes)))


def _merge(stored: CostModel, fresh: CostModel, counts: Mapping[int, int]) -> CostModel:
    """Return `fresh` averaged with what was kept, at its pace: a kept time counts for `_KEPT_WEIGHT`, a fresh one for
    the number of times that it comes from.
    """
    pace = fresh.pass_ms(1) / stored.pass_ms(1)
    sizes = sorted({*stored.nodes[:-1], *fresh.nodes})  # The last kept size was not seen, see `_extrapolate`
    merged = list[float]()
    for nodes in sizes:
        count = counts.get(nodes, 0)
        before = pace * stored.pass_ms(nodes)
        merged.append((_KEPT_WEIGHT * before + count * fresh.pass_ms(nodes)) / (_KEPT_WEIGHT + count))
    return replace(fresh, nodes=tuple(sizes), pass_times_ms=((tuple(make_rising(merged)),),))


def _extrapolate(cost: CostModel) -> CostModel:
    """Return a copy with one more size, twice as large as the largest one. Each further node costs the nominal price,
    or the price of a node in the upper half of the measured sizes if that is higher.
    """
    last, least_price = cost.nodes[-1], Nominal().slope

    def time_of_twice(rows: int, times: Sequence[float]) -> float:
        price = 2 * (times[-1] - along(cost.nodes, times, last / 2)) / last
        return times[-1] + last * max(price, least_price * rows * times[0])

    planes = tuple(
        tuple((*times, time_of_twice(rows, times)) for rows, times in zip(cost.rows, plane, strict=True))
        for plane in cost.pass_times_ms
    )
    return replace(cost, nodes=(*cost.nodes, 2 * last), pass_times_ms=planes)


def free_rows(target: Target, count: int) -> list[int]:
    """Return `count` rows that hold no token, neighbouring ones if possible, which the cache reads without a copy.
    Raises ArgumentError if there are fewer.
    """
    free = [row for row, length in enumerate(target.lengths) if length == 0]
    if len(free) < count:
        raise ArgumentError(f"{count} free rows are needed to measure, the target has {len(free)}; measure before use")
    runs = [free[start : start + count] for start in range(len(free) - count + 1)]
    return min(runs, key=lambda run: run[-1] - run[0])


def _grid(target: Target, rows: Sequence[int], nodes: Sequence[int], contexts: Sequence[int]) -> Grid:
    """Return those of the sizes that fit the target, and one node."""
    room = min(target.slots, target.max_length)
    sizes = sorted({1, *(size for size in nodes if size < room)})
    fitting = {max(0, min(context, room - sizes[-1])) for context in contexts}
    return {"nodes": tuple(sizes), "rows": tuple(sorted(set(rows))), "contexts": tuple(sorted(fitting))}


def _measure(target: Target, grid: Grid, repeats: int, seconds: float, tell: Callable[[str], None]) -> CostModel:
    """Time passes of these sizes on free rows, and free the rows again."""
    free = free_rows(target, grid["rows"][-1])
    try:
        samples = _sample(target, free, grid, repeats, seconds, tell)
    finally:
        target.truncate(free, [0] * len(free))
    return replace(_fit(grid, samples), stairs=bool(target.buckets.nodes))


def _sample(
    target: Target, rows: Sequence[int], grid: Grid, repeats: int, seconds: float, tell: Callable[[str], None]
) -> dict[Point, list[float]]:
    """Return wall times in seconds, the cheapest points first. At longer contexts a few sizes suffice, because the time
    that a context adds is smooth. The first round, with a warm-up of each size, decides which points fit the budget.
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
    from forerun.decode.scores import top_ids

    context, count, nodes = point
    used = list(rows[:count])
    target.announce(used, context)
    trees = [TokenTree((7919 * row + 13) % target.vocab_size) for row in used]
    for tree in trees:
        tree.add_path(index % min(97, target.vocab_size) for index in range(nodes - 1))
    with inference_mode():
        began = time.perf_counter()
        # A greedy step reads the likeliest tokens on the host; on an accelerator that waits for the pass to end.
        top_ids(target.score(used, trees).logits, 1).tolist()
        target.commit(used, [()] * count)
        return time.perf_counter() - began


def _fit(grid: Grid, samples: Mapping[Point, Sequence[float]]) -> CostModel:
    """Return the cost model of samples, the wall times in seconds of each (context, rows, nodes).

    Sizes that were not measured are interpolated; row counts and contexts with too few sizes are dropped, and so are
    sizes that nothing was measured at. The model's times are ``pass_times_ms[context][rows][nodes]``, in ms.
    """
    # The lower quartile counts, because other processes can only add to a time.
    ms = {point: 1e3 * sorted(times)[(len(times) - 1) // 4] for point, times in samples.items()}
    first_context, timed = grid["contexts"][0], {size for _, _, size in ms}
    sizes = tuple(size for size in grid["nodes"] if size in timed)
    pairs = [(context, count) for context in grid["contexts"] for count in grid["rows"]]
    measured = {pair: [size for size in sizes if (*pair, size) in ms] for pair in pairs}
    fewest = min(2, len(sizes))
    counts = [count for count in grid["rows"] if len(measured[first_context, count]) >= fewest]
    contexts = [
        context for context in grid["contexts"] if all(len(measured[context, count]) >= fewest for count in counts)
    ]
    base = {(count, size): 0.0 for count in counts for size in sizes}  # Times at the first context, by rows and nodes
    planes = list[tuple[tuple[float, ...], ...]]()
    for context in contexts:
        plane = list[tuple[float, ...]]()
        for count in counts:  # For longer contexts, the time that they add to the first context's times is interpolated
            seen = measured[context, count]
            added = [max(0.0, ms[context, count, size] - base[count, size]) for size in seen]
            times = [base[count, size] + along(seen, added, size) for size in sizes]
            plane.append(tuple(make_rising(times)))
        planes.append(tuple(plane))
        base = {(count, size): planes[0][i][j] for i, count in enumerate(counts) for j, size in enumerate(sizes)}
    return CostModel(nodes=sizes, rows=tuple(counts), contexts=tuple(contexts), pass_times_ms=tuple(planes))


def make_rising(values: Sequence[float]) -> list[float]:
    """Return the nearest sequence that never falls (pool adjacent violators): a pass over more
    nodes is not cheaper.
    """
    pools: list[tuple[float, int]] = []
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (low, many), (high, more) = pools.pop(-2), pools.pop()
            pools.append(((low * many + high * more) / (many + more), many + more))
    return [value for value, count in pools for _ in range(count)]


# --- on disk ----------------------------------------------------------------------------------------------------------

FORMAT = 1  # To be raised when earlier figures are no longer comparable


def save(target: Target, cost: CostModel) -> Path:
    """Write `cost`, to which drafters were added, to this target's file, and return the path. Drafters whose
    configuration holds a Python object are left out: their key means nothing to another process.
    """
    stored = _read(target)
    sizes = {"nodes": cost.nodes, "rows": cost.rows, "contexts": cost.contexts}
    lasting = {key: draft for key, draft in cost.drafts.items() if not re.search(r"@\d+", key)}
    return _write(target, sizes if stored is None else stored[0], replace(cost, drafts=lasting))


def file_of(target: Target) -> Path:
    """Return the file of this target's costs, in ``cost`` below `cache_root`."""
    return _place(target)[0]


def _place(target: Target) -> tuple[Path, Mapping[str, Any]]:
    """Return this target's file, and the identity that its name is made of."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(target.name_or_path).name) or "model"
    identity = json.loads(json.dumps(target.identity(), default=str))  # As it is read back
    return cache_root() / "cost" / f"{name}-{hash_json(identity)[:16]}.json", identity


def _read(target: Target) -> tuple[Grid, CostModel] | None:
    """Read this target's file: the grid of its calibration (empty if the costs are from steps), and the costs."""
    path, identity = _place(target)
    if not path.exists():
        return None
    from pydantic import TypeAdapter

    try:
        body = read_sealed(path, "it is written anew")
        if body["format"] != FORMAT or body["identity"] != identity:
            raise ValueError("its format or identity is another's")
        return TypeAdapter(tuple[dict[str, tuple[int, ...]], CostModel]).validate_python((body["grid"], body["cost"]))
    except (ValueError, KeyError, TypeError) as error:
        log.warning("%s is no cost model of this target (%r); measuring anew", path, error)
        return None


def _write(target: Target, grid: Grid, cost: CostModel) -> Path:
    """Write the file atomically. An error is logged, not raised: without a cache everything still works."""
    path, identity = _place(target)
    try:
        write_sealed(path, {"format": FORMAT, "identity": identity, "grid": grid, "cost": asdict(cost)})
    except OSError as error:
        log.warning("the cost model could not be kept in %s: %s", path, error)
    return path
