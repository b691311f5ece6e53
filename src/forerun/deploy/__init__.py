"""The same drafters on somebody else's engine: launch plans, and plug-ins. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from forerun.drafters import drafter_class, outside
from forerun.errors import ArgumentError

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
    """A configuration's drafter and those that it is made of, however deep. ArgumentError: they are no list of names
    and configurations."""
    for one in members(config):
        yield str(one.get("method"))


def members(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The same, their configurations."""
    yield config
    made_of = config.get("drafters", ())
    if not isinstance(made_of, list | tuple) or not all(isinstance(one, str | Mapping) for one in made_of):
        raise ArgumentError(
            f'{config.get("method")}: drafters is a list of names or configurations such as {{"method": "suffix"}}, '
            f"got {made_of!r}"
        )
    for member in made_of:
        yield from members({"method": member} if isinstance(member, str) else member)


def check_plugged(config: Mapping[str, Any]) -> None:
    """ArgumentError: a plug-in would draft nothing by a drafter of it."""
    if any(one.get("method") == "prediction" and not one.get("text") for one in members(config)):
        raise ArgumentError(
            "prediction: requests bring no prediction to a plug-in; give the one text that all answers resemble, "
            'option "text"'
        )
