"""This module counts the depth and number of a text's brackets in linear time, before anything
parses it.

Parsers that call themselves once a level run out of stack, and Python's own reader spends most of its time on objects
and lists. So both have a limit that is checked first.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

MAX_DEPTH = 64  # Levels of brackets in a JSON text, a schema or a grammar. Ordinary ones have fewer than twenty.

_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
"""This pattern matches a JSON string.

It is possessive and accepts a string without an end; otherwise a text of quotation marks would take
quadratic time.
"""
_OPENING, _CLOSING = b"[{(", b"]})"
_STEPS = bytes(1 if byte in _OPENING else 255 if byte in _CLOSING else 0 for byte in range(256))  # Up, or down (-1)
_OTHERS = bytes(byte for byte in range(256) if byte not in _OPENING + _CLOSING)


class Nesting(NamedTuple):
    """Counts the brackets of a text outside its strings."""

    depth: int  # Most that are open at once
    opened: int  # How many there are
    colons: int  # In JSON one for each key


def nesting(text: str | bytes) -> Nesting:
    """Count the brackets of a text; those within ``"strings"`` do not count."""
    content = text.encode("utf-8", "replace") if isinstance(text, str) else text
    bare = _STRING.sub(b"", content)
    steps = np.frombuffer(bare.translate(_STEPS, _OTHERS), dtype=np.int8)
    depth = max(0, int(steps.cumsum(dtype=np.int64).max())) if len(steps) else 0
    return Nesting(depth, int((steps > 0).sum()), bare.count(b":"))
