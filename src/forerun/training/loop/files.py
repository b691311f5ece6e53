"""Checkpoints on disk: written whole, found by number, removed by age. Knows no tensor."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError

from forerun.errors import CheckpointError
from forerun.writing import remove_folder, written_folder

CHECKPOINT = re.compile(r"checkpoint-(\d+)")
BEST = "best"


def checkpoints(output: Path) -> list[tuple[int, Path]]:
    """(step, directory) of the complete checkpoints in `output`, oldest first."""
    if not output.is_dir():
        return []
    found = [(CHECKPOINT.fullmatch(path.name), path) for path in output.iterdir() if path.is_dir()]
    return sorted((int(match.group(1)), path) for match, path in found if match)


def latest(output: Path) -> Path | None:
    """The newest complete checkpoint, or none."""
    found = checkpoints(output)
    return found[-1][1] if found else None


def write_directory(folder: Path, fill: Callable[[Path], None]) -> Path:
    """Let `fill` write into a fresh directory that takes the place of `folder`.

    Raises:
        CheckpointError: the disk is full, or refuses; what was there before is untouched.
    """
    try:
        with written_folder(folder) as fresh:
            fill(fresh)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(_refused(folder, error)) from error
    return folder


def rotate(output: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints; 0 keeps all."""
    for _, path in checkpoints(output)[:-keep] if keep else ():
        with suppress(OSError):
            remove_folder(path)


def _refused(folder: Path, error: Exception) -> str:
    previous = latest(folder.parent)
    kept = f"{previous} is intact" if previous else "there was no earlier checkpoint"
    try:
        free = f"{shutil.disk_usage(folder.parent).free / 2**20:.0f} MiB free"
    except OSError:
        free = "free space unknown"
    return (
        f"Writing {folder} failed: {error} ({free}). Nothing saved before was touched: {kept}. "
        "Make room or choose another output, then start the same command again: it resumes."
    )
