"""Directories that exist completely or not at all, and the order of checkpoints on disk. Knows no tensor.

A directory is written under a name that begins with a dot, made durable, and renamed. Whoever is killed before leaves
only a dotted directory, which `tidy` removes at the next start.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from forerun.errors import CheckpointError

CHECKPOINT = re.compile(r"checkpoint-(\d+)")
BEST = "best"
PARTIAL, OLD, GONE = ".partial", ".old", ".gone"
"""Endings of hidden directories: being written, about to be replaced, being removed."""


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


def tidy(output: Path) -> None:
    """Remove what an earlier run left half-written or half-removed, and finish an exchange that was cut short."""
    if not output.is_dir():
        return
    for path in list(output.iterdir()):
        if path.name.startswith(".") and path.name.endswith(OLD):
            whole = output / path.name[1 : -len(OLD)]
            if not whole.exists():
                path.rename(whole)
    for path in list(output.iterdir()):
        if path.name.startswith(".") and path.name.endswith((PARTIAL, OLD, GONE)):
            shutil.rmtree(path, ignore_errors=True)


def write_directory(folder: Path, fill: Callable[[Path], None]) -> Path:
    """Let `fill` write into a hidden directory beside `folder`, then make it `folder`, in the place of a former one.

    Raises:
        CheckpointError: the disk is full, or refuses; what was there before is untouched.
    """
    partial, old = (folder.with_name(f".{folder.name}{ending}") for ending in (PARTIAL, OLD))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        fill(partial)
        for path in (*partial.iterdir(), partial):
            _make_durable(path)
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
        partial.rename(folder)
        _make_durable(folder.parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(_refused(folder, error)) from error
    shutil.rmtree(old, ignore_errors=True)
    return folder


def rotate(output: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints; 0 keeps all."""
    for _, path in checkpoints(output)[:-keep] if keep else ():
        # Renamed first: a directory that is half removed must not look like a checkpoint.
        doomed = path.with_name(f".{path.name}{GONE}")
        try:
            path.rename(doomed)
        except OSError:
            continue
        shutil.rmtree(doomed, ignore_errors=True)


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


def _make_durable(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
