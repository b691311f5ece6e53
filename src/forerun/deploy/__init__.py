"""forerun's drafters run on other engines by launch plans and plug-ins. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from forerun.control.config import list_members
from forerun.drafters import drafter_class, is_outside
from forerun.errors import ArgumentError

COPYING = ("ngram", "suffix", "rest", "prediction", "first_of", "merge")
"""These drafters may run in a plug-in, which sees a sequence's tokens and nothing of the target.

The last two are made of such drafters alone. `recycling` copies, too, but from what the target
thought likely.
"""


def reads_text_alone(method: str) -> bool:
    """Return whether a plug-in may draft by `method`.

    It may by one of `COPYING`, or by a drafter outside of forerun (``module:Class``) that wants
    nothing of the target. ArgumentError: there is no such drafter.
    """
    if not is_outside(method):
        return method in COPYING
    from forerun.decode.drafter import Drafter

    drafter = drafter_class(method)
    return all(getattr(drafter, name) is getattr(Drafter, name) for name in ("requires", "observe"))


def list_methods(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of a configuration's drafter and of those that it is made of, however deep.
    ArgumentError: they are no list of names and configurations.
    """
    for member in list_members(config):
        yield str(member.get("method"))


def check_plugged(config: Mapping[str, Any], *, predictions: bool = False) -> None:
    """Raise ArgumentError where a plug-in would draft nothing by one of the configuration's
    drafters; `predictions` says that its requests may bring some.
    """
    if not predictions and any(
        one.get("method") == "prediction" and not one.get("text") for one in list_members(config)
    ):
        raise ArgumentError(
            "prediction: requests bring no prediction to a plug-in; give the one text that all answers resemble, "
            'option "text"'
        )
