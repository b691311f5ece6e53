"""This package has the draft heads: one file for each kind, and what all kinds share.

A head is read from any public format and written in any; inside forerun there is one form: the kind's configuration,
its module's tensor names, layer ids as boundaries. The names below are loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forerun.heads.files import (
        FORMATS,
        Format,
        HeadCheckpoint,
        TargetFacts,
        differences,
        format_for,
        format_named,
        format_of,
        is_head,
        read_head,
        write_head,
    )

__all__ = [
    "FORMATS",
    "Format",
    "HeadCheckpoint",
    "TargetFacts",
    "differences",
    "format_for",
    "format_named",
    "format_of",
    "is_head",
    "read_head",
    "write_head",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'forerun.heads' has no attribute {name!r}")
    return getattr(importlib.import_module("forerun.heads.files"), name)
