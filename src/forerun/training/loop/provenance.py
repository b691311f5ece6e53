"""``run.json``: what a run was made of. Training reads nothing from it."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from forerun.errors import CheckpointError
from forerun.training.loop.distributed import Parallel
from forerun.training.loop.settings import TrainSettings
from forerun.writing import written


def describe(settings: TrainSettings, parallel: Parallel, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Versions, seed, command, settings, git commit, device and start time (UTC); `extra` is added."""
    cuda = parallel.device.type == "cuda"
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "argv": sys.argv,
        "seed": settings.seed,
        "settings": settings.to_json(),
        "versions": {"python": platform.python_version()}
        | {name: _version(name) for name in ("forerun", "torch", "transformers")},
        "git_commit": _commit(),
        "device": torch.cuda.get_device_name(parallel.device) if cuda else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "world": parallel.world,
        "mode": parallel.mode,
        **extra,
    }


def write(output: Path, run: dict[str, Any]) -> None:
    """Write ``output/run.json``; the runs that went before in this directory move into "previous".

    Raises:
        CheckpointError: the directory cannot be written.
    """
    path = output / "run.json"
    try:
        former = json.loads(path.read_text(encoding="utf-8"))
        previous = [*former.pop("previous", []), former]
    except (OSError, ValueError, AttributeError):
        previous = []
    try:
        with written(path) as fresh:
            fresh.write_text(json.dumps({**run, "previous": previous}, indent=1, default=str) + "\n", encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error}. Choose another output, or make room.") from error


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
