"""This module writes files and folders atomically: whole or not at all. Imports no torch.

What is being written, about to be replaced or being removed has a hidden name of its own, so threads,
processes and containers that share a folder do not meet there. A killed process leaves only such
names, and `tidy` cleans them up.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LOCK = ".lock"
_PARTIAL, _OLD, _GONE = "partial", "old", "gone"
_HIDDEN = re.compile(rf"\.(.+)\.[0-9a-f]+\.({_PARTIAL}|{_OLD}|{_GONE})")


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """Yield a name beside `path`; what is written there replaces `path` when the block ends without an error.

    OSError: there is no room, or no permission; what was there before is untouched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = _hidden(path, _PARTIAL)
    try:
        yield fresh
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


@contextmanager
def written_folder(folder: Path) -> Iterator[Path]:
    """Yield a fresh folder that durably takes the place of `folder` if the block ends without an
    error. As `written`.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = _hidden(folder, _PARTIAL)
    fresh.mkdir()
    try:
        yield fresh
        for path in (*fresh.iterdir(), fresh):
            _make_durable(path)
        former = _hidden(folder, _OLD)
        if folder.exists():
            folder.rename(former)
        try:
            fresh.rename(folder)
        except OSError:
            if former.exists():
                former.rename(folder)
            raise
        shutil.rmtree(former, ignore_errors=True)
        _make_durable(folder.parent)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


@contextmanager
def alone(folder: Path) -> Iterator[bool]:
    """Yield whether no other process is in such a block for `folder`; a killed process leaves it.

    True where a file system, or the operating system, knows no locks, and where nothing can be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        yield True
        return
    try:
        yield _locked(descriptor)
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return True
    return True


def remove_folder(folder: Path) -> None:
    """Remove a folder at once, so that nobody ever sees half of it."""
    doomed = _hidden(folder, _GONE)
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def tidy(parent: Path) -> None:
    """Remove what killed processes left in `parent`, and undo replacements that were cut short.
    Only where nobody else writes.
    """
    for path in list(parent.iterdir()) if parent.is_dir() else []:
        match = _HIDDEN.fullmatch(path.name)
        if match is None:
            continue
        whole = parent / match[1]
        if match[2] == _OLD and not whole.exists():
            path.rename(whole)
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _hidden(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}.{kind}")


def _make_durable(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
