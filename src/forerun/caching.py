"""The cache folder holds compiled kernels, measured costs and whatever else can be made again.
Imports no torch.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from forerun.writing import written

_log = logging.getLogger(__name__)


def read_kept(path: Path) -> Any:
    """Return the JSON value that a file of the cache holds; None if it is missing or broken."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def keep(path: Path, value: Any, what: str) -> None:
    """Write a JSON value to a file of the cache; where that fails, log at debug level that `what`
    is not kept.
    """
    try:
        with written(path) as fresh:
            fresh.write_text(json.dumps(value), encoding="utf-8")
    except OSError as error:
        _log.debug("%s is not kept: %s", what, error)


def cache_root() -> Path:
    """Return the cache folder: ``$FORERUN_CACHE``, else ``$XDG_CACHE_HOME/forerun``, else ``~/.cache/forerun``.

    A user without a home directory, as in a container, gets a private folder in the temporary directory.
    """
    chosen = os.environ.get("FORERUN_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "forerun"
    except RuntimeError:
        return _without_home()


@cache
def _without_home() -> Path:
    """Return a private folder in the temporary directory, the same one in every process.

    Where somebody else owns a folder of that name, each process gets a fresh one.
    """
    folder = Path(tempfile.gettempdir()) / f"forerun-{os.geteuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    private = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
    return folder if private else Path(tempfile.mkdtemp(prefix="forerun-"))
