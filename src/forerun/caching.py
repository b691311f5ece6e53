"""Where forerun keeps what it made and can make again. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """``$FORERUN_CACHE``, else ``$XDG_CACHE_HOME/forerun``, else ``~/.cache/forerun``."""
    chosen = os.environ.get("FORERUN_CACHE")
    return Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "forerun"
