"""Keeps cost models on disk: one JSON file per (model, device, dtype, threads, packing, torch version), with a hash.

A file that is corrupt, foreign or of another format is ignored with a warning and measured anew. Where more sizes are
wanted than a file holds, both are measured together. Knows no drafter.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from forerun.caching import cache_root
from forerun.engine.cost.model import CostModel
from forerun.engine.cost.passes import NODES, REPEATS, SECONDS, Grid, Tell, measure
from forerun.target import Target
from forerun.target.kernels import building, native
from forerun.target.kernels.packing import FusedLinear, PackedLinear
from forerun.writing import written

log = logging.getLogger(__name__)

FORMAT = 1
"""Raise it when figures of before are no longer comparable."""
ROWS = (1, 4, 16, 64)
"""Row counts that are measured by default, as far as the target has them free; its own number is added."""
_VOLATILE = ("_name_or_path", "name_or_path", "transformers_version", "torch_dtype")


def load_or_measure(
    target: Target,
    *,
    rows: Sequence[int] | None = None,
    nodes: Sequence[int] = NODES,
    contexts: Sequence[int] | None = None,
    repeats: int = REPEATS,
    seconds: float = SECONDS,
    force: bool = False,
    tell: Tell | None = None,
) -> CostModel:
    """What this target's passes cost here: read from disk, else measured (see `measure`) and kept.

    Args:
        rows: default 1, 4, 16, 64 and all rows, as far as they are there.
        force: measure although there is a file; the drafters in it are forgotten.

    Raises:
        ArgumentError: it must be measured and too few rows are free.
    """
    if rows is None:
        rows = sorted({*(count for count in ROWS if count < target.rows), target.rows})
    grid = Grid.fitting(target, rows=rows, nodes=nodes, contexts=contexts)
    kept = None if force else _read(target)
    if kept is not None and grid.within(kept[0]):
        return kept[1]
    if kept is not None:
        grid = grid.joined(kept[0], rows=target.rows)
    cost = measure(
        target, rows=grid.rows, nodes=grid.nodes, contexts=grid.contexts, repeats=repeats, seconds=seconds, tell=tell
    )
    if kept is not None:
        cost = replace(cost, drafts=kept[1].drafts)
    _write(target, grid, cost)
    return cost


def save(target: Target, cost: CostModel) -> Path:
    """Keep `cost`, to which drafters were added, as that of this target; returns the file.

    Drafters whose configuration holds a Python object are left out: their key means nothing to another process.
    """
    kept = _read(target)
    own = Grid(nodes=cost.nodes, rows=cost.rows, contexts=cost.contexts)
    lasting = {key: draft for key, draft in cost.drafts.items() if not re.search(r"@\d+", key)}
    return _write(target, own if kept is None else kept[0], replace(cost, drafts=lasting))


def cache_folder() -> Path:
    """Where costs are kept: below `cache_root`."""
    return cache_root() / "cost"


def file_of(target: Target) -> Path:
    """Where this target's costs are kept."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(target.name_or_path).name) or "model"
    return cache_folder() / f"{name}-{_hash(identity(target))[:16]}.json"


def identity(target: Target) -> dict[str, Any]:
    """All that a pass's cost depends on. The values of the weights do not matter, their number and type do."""
    model = target.model
    config = {key: value for key, value in target.config.to_dict().items() if key not in _VOLATILE}
    modules = list(model.modules())
    return {
        "model": type(model).__name__,
        "config": _hash(config),
        "attention": str(getattr(target.config, "_attn_implementation", None)),
        "weights_bytes": target.memory_bytes() - target.cache.nbytes(),
        "device": device_name(target.device),
        "dtype": str(target.dtype),
        "threads": torch.get_num_threads() if target.device.type == "cpu" else None,
        "kernel": building.version() if target.device.type == "cpu" and native.kernel() is not None else None,
        "packed": sum(isinstance(module, PackedLinear | FusedLinear) for module in modules),
        "compiled": any(type(getattr(module, "forward", None)).__name__ == "CompiledForward" for module in modules),
        "torch": torch.__version__,
        "buckets": asdict(target.buckets),
    }


def device_name(device: torch.device) -> str:
    """The product's name where it can be had."""
    if device.type == "cuda":
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
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        log.warning("%s cannot be read (%s); measuring anew", path, error)
        return None
    try:
        kept = json.loads(text)
        body = {key: kept[key] for key in ("format", "identity", "grid", "cost")}
        if body["format"] != FORMAT or kept["sha256"] != _hash(body) or body["identity"] != _plain(identity(target)):
            raise ValueError("its format, hash or identity is another's")
        sizes = {name: tuple(numbers) for name, numbers in body["grid"].items()}
        return Grid(**sizes), CostModel.from_record(body["cost"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("%s is no cost model of this target (%r); measuring anew", path, error)
        return None


def _write(target: Target, grid: Grid, cost: CostModel) -> Path:
    """All or nothing. A cache that cannot be written is no reason to fail."""
    path = file_of(target)
    body = _plain({"format": FORMAT, "identity": identity(target), "grid": asdict(grid), "cost": cost.record()})
    try:
        with written(path) as fresh:
            fresh.write_text(json.dumps({**body, "sha256": _hash(body)}, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        log.warning("the cost model could not be kept in %s: %s", path, error)
    return path


def _plain(value: Any) -> Any:
    """As it comes back from JSON: tuples are lists."""
    return json.loads(json.dumps(value, default=str))


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
