"""Calls written as JSON: ``{"name": ..., "arguments": {...}}``. Knows no marks around them."""

from __future__ import annotations

import json
from collections.abc import Container

from forerun.serve.tools.incoming import Incoming, Kind, Piece, Steps, collected

ARGUMENT_KEYS = ("arguments", "parameters")


def read_call(text: Incoming, names: Container[str] | None = None) -> Steps[bool]:
    """Read one call. It is one as soon as its arguments begin behind its name: from there on whatever comes is theirs.

    Args:
        names: the functions that there are; None takes any name for one.

    Returns:
        Whether it was a call; if not, nothing has been read.
    """
    start = text.at
    called = yield from _read_object(text, names)
    if not called:
        text.at = start
    return called


def read_arguments(text: Incoming) -> Steps[None]:
    """Pass a call's arguments on: an object as it arrives; a string that holds one, or null, when it is complete."""
    yield from text.skip_blanks()
    if (yield from text.next()) == "{":
        yield from text.json_value()
    else:
        yield Piece(Kind.ARGUMENTS, _as_object((yield from collected(text.json_value()))))


def _read_object(text: Incoming, names: Container[str] | None) -> Steps[bool]:
    name, early, called = "", "", False
    if not (yield from text.opens("{")):
        return False
    while not (yield from text.opens("}")):
        key = yield from _key(text)
        if key is None:
            return called
        if key == "name" and not name:
            name = (yield from text.json_string()) or ""
            if not name or (names is not None and name not in names):
                return False
        elif key in ARGUMENT_KEYS and name and not called:
            yield Piece(Kind.CALL, name)
            called = True
            yield from read_arguments(text)
        else:
            value = yield from collected(text.json_value())
            early = value if key in ARGUMENT_KEYS else early
        yield from text.opens(",")
    if name and not called:
        yield Piece(Kind.CALL, name)
        yield Piece(Kind.ARGUMENTS, _as_object(early))
    return bool(name)


def _key(text: Incoming) -> Steps[str | None]:
    yield from text.skip_blanks()
    key = yield from text.json_string()
    if key is None or not (yield from text.opens(":")):
        return None
    yield from text.skip_blanks()
    return key


def _as_object(raw: str) -> str:
    """The text of an object: as it is, out of a JSON string, or an empty one for null and nothing."""
    if raw in ("", "null"):
        return "{}"
    if raw.startswith('"'):
        try:
            return str(json.loads(raw, strict=False))
        except ValueError:
            return raw
    return raw
