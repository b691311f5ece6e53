"""The same drafters on somebody else's engine: launch plans, and plug-ins. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from forerun.drafters import drafter_class, outside

COPYING = ("ngram", "suffix", "rest", "prediction", "first_of", "merge")
"""Drafters for a plug-in, which is handed a sequence's text and nothing of the target; the last two made of such alone.
`recycling` copies, too, but what the target thought likely."""


def reads_text_alone(method: str) -> bool:
    """Whether a plug-in may draft by it: one of `COPYING`, or a drafter outside of forerun (``module:Class``) that
    wants nothing of the target. ArgumentError: there is no such drafter."""
    if not outside(method):
        return method in COPYING
    from forerun.drafters.base import Drafter

    own = drafter_class(method)
    return all(getattr(own, name) is getattr(Drafter, name) for name in ("requires", "observes", "observe"))


def methods(config: Mapping[str, Any]) -> Iterator[str]:
    """A configuration's drafter and those that it is made of, however deep."""
    yield str(config.get("method"))
    for member in config.get("drafters", ()):
        yield from methods({"method": member} if isinstance(member, str) else member)
