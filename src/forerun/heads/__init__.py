"""Head checkpoints in the public formats: what a serving engine loads, as a head that forerun drafts with, and back.

Inside forerun there is one form (`EagleConfig`, its module's tensor names, layer ids as boundaries); every format is
converted to and from it here, and nowhere else.
"""

from __future__ import annotations

from forerun.heads.files import Format, HeadCheckpoint, TargetFacts, differences
from forerun.heads.formats import FORMATS, format_for, format_named, format_of, is_head, read_head, write_head

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
