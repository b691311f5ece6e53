"""The cache folder: compiled kernels, measured costs and whatever else can be made again. Imports no torch."""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path


def cache_root() -> Path:
    """``$FORERUN_CACHE``, else ``$XDG_CACHE_HOME/forerun``, else ``~/.cache/forerun``; for a user without a home
    directory, as in a container, a folder of theirs alone among the temporary files."""
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
    """The same in every process, unless somebody else has laid one ready under that name."""
    folder = Path(tempfile.gettempdir()) / f"forerun-{os.geteuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    private = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
    return folder if private else Path(tempfile.mkdtemp(prefix="forerun-"))
