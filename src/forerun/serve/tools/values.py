"""A JSON schema decides what the arguments are that a model wrote as text; nothing is guessed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any
from urllib.parse import unquote

from forerun.errors import refuse_constant

_KINDS: dict[str, Any] = {
    "null": type(None),
    "boolean": bool,
    "integer": int,
    "number": int | float,
    "string": str,
    "array": list,
    "object": dict,
}
_PROBES: tuple[Any, ...] = (None, True, 0, 0.5, [], {})
_SOME_TEXT = "\0"  # A text that no schema names
_COMBINED = ("allOf", "anyOf", "oneOf")


class Schema:
    """The schema of one value: its types, options, combinations and references, but not
    what is in objects.

    Args:
        root: the document that references such as ``#/$defs/T`` are looked up in.
    """

    def __init__(self, schema: Any, root: Mapping[str, Any]) -> None:
        self.schema, self._root = schema, root

    def read(self, raw: str) -> str:
        """Return the JSON text of a value that was written as `raw`: the first of its readings that fits, else the
        first of the right type, else a string, or what JSON says where no string is expected."""
        readings = list(_readings(raw))
        for exact in (True, False):
            for text, value in readings:
                if self.fits(value, exact=exact):
                    return text
        return readings[0][0]

    def fits(self, value: Any, *, exact: bool = True) -> bool:
        """Return whether the schema allows a value, as far as it is looked at; not `exact`: one of the value's type."""
        try:
            return self._fits(self.schema, value, exact, {})
        except RecursionError:  # A chain of hundreds of references: what it comes to is not looked at
            return True

    def field(self, key: str) -> Schema:
        """Return the schema of the value under `key` of an object."""
        found = [fields[key] for fields in self._properties if key in fields]
        found = found or [one["additionalProperties"] for one in self.parts() if "additionalProperties" in one]
        return Schema(found[0] if len(found) == 1 else {"anyOf": found} if found else True, self._root)

    @property
    def fields(self) -> list[str]:
        """Return the keys of an object that the schema names."""
        return list(dict.fromkeys(key for fields in self._properties for key in fields))

    @property
    def required(self) -> set[str]:
        """Return the keys that an object must have."""
        return {key for one in self.parts("allOf") for key in _list(one.get("required")) if isinstance(key, str)}

    @cached_property
    def text(self) -> bool:
        """Return whether the value may be any string."""
        return self.fits(_SOME_TEXT)

    @cached_property
    def strings(self) -> list[str]:
        """Return the strings that the value may be where it may not be any string."""
        return [one for one in self._options if isinstance(one, str)] if not self.text else []

    @cached_property
    def only_strings(self) -> bool:
        """Return whether the value may be nothing but a string."""
        return not any(self.fits(probe) for probe in _PROBES) and all(isinstance(one, str) for one in self._options)

    def parts(self, *words: str) -> Iterator[Mapping[str, Any]]:
        """Yield the schema and all that it refers to or combines, with `words` for the ways in which it does."""
        waiting = [self.schema]
        seen = set[str]()
        while waiting:
            schema = waiting.pop(0)
            if not isinstance(schema, Mapping):
                continue
            yield schema
            waiting += [part for word in words or _COMBINED for part in _list(schema.get(word))]
            reference = schema.get("$ref")
            if isinstance(reference, str) and reference not in seen:
                seen.add(reference)
                waiting.append(self._resolve(reference))

    @property
    def _properties(self) -> list[Mapping[str, Any]]:
        named = (one.get("properties") for one in self.parts())
        return [one for one in named if isinstance(one, Mapping)]

    @property
    def _options(self) -> list[Any]:
        listed = (one for part in self.parts() for one in _options(part) or ())
        return [one for one in listed if self.fits(one)]

    def _fits(self, schema: Any, value: Any, exact: bool, known: dict[str, bool]) -> bool:
        """Return whether a part of the schema allows a value.

        `known` holds what references came to, each of which is followed once; False while it is
        being followed.
        """
        if not isinstance(schema, Mapping):
            return schema is not False
        if schema.get("nullable") is True and value is None:
            return True

        def fits(part: Any) -> bool:
            return self._fits(part, value, exact, known)

        reference = schema.get("$ref")
        kinds = schema.get("type")
        options = _options(schema)
        if isinstance(reference, str) and reference not in known:
            known[reference] = False
            known[reference] = fits(self._resolve(reference))
        every = _list(schema.get("allOf"))
        choices = [_list(schema.get(word)) for word in ("anyOf", "oneOf")]
        return (
            (not isinstance(reference, str) or known[reference])
            and (kinds is None or any(_is(value, kind) for kind in _list(kinds) or [kinds]))
            and (options is None or any(_same(value, option, exact) for option in options))
            and all(map(fits, every))
            and all(any(map(fits, some)) for some in choices if some)
        )

    def _resolve(self, reference: str) -> Any:
        """Return what a reference names; True, which allows anything, where that is not in the document."""
        if reference != "#" and not reference.startswith("#/"):
            return True
        resolved: Any = self._root
        for step in unquote(reference).split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(resolved, Mapping) and key in resolved:
                resolved = resolved[key]
            elif isinstance(resolved, list) and key.isdecimal() and int(key) < len(resolved):
                resolved = resolved[int(key)]
            else:
                return True
        return resolved


def _readings(raw: str) -> Iterator[tuple[str, Any]]:
    """Yield JSON texts and values that `raw` can stand for; as a string it comes behind what else it is."""
    text = raw.strip()
    if text.lower() in ("true", "false"):  # Templates in Python write True
        text = text.lower()
    elif text == "None":
        text = "null"
    value: Any = raw
    for strict in (True, False):
        try:
            value = json.loads(text, strict=strict, parse_constant=refuse_constant)
            text = text if strict else json.dumps(value, allow_nan=False)
            break
        except (ValueError, RecursionError):  # No JSON, or too deep
            value = raw
    if not isinstance(value, str):
        yield text, value
        if isinstance(value, float) and value.is_integer():
            yield str(int(value)), int(value)
    yield json.dumps(raw, ensure_ascii=False), raw
    if isinstance(value, str):
        yield json.dumps(value), value


def _options(schema: Mapping[str, Any]) -> list[Any] | None:
    return [schema["const"]] if "const" in schema else _list(schema["enum"]) if "enum" in schema else None


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def _is(value: Any, kind: Any) -> bool:
    """Return whether a value is of a type; of one that JSON schema does not know everything is."""
    known = _KINDS.get(kind) if isinstance(kind, str) else None
    return known is None or (isinstance(value, known) and (kind == "boolean" or not isinstance(value, bool)))


def _same(value: Any, option: Any, exact: bool) -> bool:
    kinds = [one for one in _KINDS if _is(value, one)]
    return any(_is(option, kind) for kind in kinds) and (not exact or bool(value == option))
