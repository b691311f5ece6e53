"""Calls that write each argument between marks of its own, strings without quotes. Knows no marks.

A value is a string where the function's schema says so, else JSON where it reads as JSON.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from forerun.errors import ArgumentError
from forerun.serve.tools.base import Function, Lark, ToolFormat, literal
from forerun.serve.tools.incoming import Incoming, Kind, Piece, Steps

_UNWRITABLE = ("pattern", "format", "minLength", "maxLength")
"""Keywords for strings that cannot be enforced where a string ends at a mark."""


class FieldFormat(ToolFormat):
    """A call is a head with the name, its fields, and an end."""

    end: ClassVar[str] = "</tool_call>"
    """Mark that ends a call."""

    def read_calls(self, text: Incoming) -> Steps[bool]:
        name = yield from self.read_head(text)
        if not name:
            return False
        yield Piece(Kind.CALL, name)
        opening = "{"
        while (field := (yield from self.read_field(text))) is not None:
            key, raw = field
            value = json.dumps(self._value(name, key, raw), ensure_ascii=False)
            yield Piece(Kind.ARGUMENTS, f"{opening}{json.dumps(key, ensure_ascii=False)}: {value}")
            opening = ", "
        if (yield from self.read_end(text)):
            yield Piece(Kind.ARGUMENTS, "{}" if opening == "{" else "}")
        return True

    def block(self, lark: Lark, *, many: bool) -> str:
        one = lark.rule(" | ".join(self._call(lark, function) for function in self.functions))
        return f'{one} ("\\n" {lark.mark(self.mark)} {one})*' if many else one

    @abstractmethod
    def read_head(self, text: Incoming) -> Steps[str]:
        """Read up to the first field; the function's name, empty where this is no call."""

    @abstractmethod
    def read_field(self, text: Incoming) -> Steps[tuple[str, str] | None]:
        """Read one argument: its name and its text; None, with nothing read, where there is none."""

    @abstractmethod
    def read_end(self, text: Incoming) -> Steps[bool]:
        """Read the end of the call, if it is there."""

    @abstractmethod
    def write_head(self, name: str) -> str:
        """What stands between the mark and the first field."""

    @abstractmethod
    def write_field(self, lark: Lark, key: str, value: str | None) -> str:
        """One argument in Lark's notation; a `value` of None is any text."""

    @abstractmethod
    def write_end(self, lark: Lark) -> str:
        """What stands behind the last field."""

    def _value(self, name: str, key: str, raw: str) -> Any:
        function = next((one for one in self.functions if one.name == name), None)
        schema = function.parameters.get("properties", {}).get(key, {}) if function is not None else {}
        if _is_text(schema):
            return raw
        try:
            return json.loads(raw)
        except ValueError:
            return raw

    def _call(self, lark: Lark, function: Function) -> str:
        schema = function.parameters
        required = schema.get("required", ())
        if function.strict and "properties" not in schema:
            raise ArgumentError(f"strict function {function.name!r}: this model's calls need a schema with properties")
        fields = []
        for key, own in schema.get("properties", {}).items():
            field = lark.rule(self.write_field(lark, key, self._field_value(lark, function, own)))
            fields.append(field if key in required else f"{field}?")
        return " ".join([literal(self.write_head(function.name)), *fields, self.write_end(lark)])

    def _field_value(self, lark: Lark, function: Function, schema: Mapping[str, Any]) -> str | None:
        if not _is_text(schema):
            shared = {key: function.parameters[key] for key in ("$defs", "definitions") if key in function.parameters}
            return lark.json({**schema, **shared}, strict=function.strict)
        options = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if options is not None:
            return lark.rule(" | ".join(literal(option) for option in options))
        unwritable = next((keyword for keyword in _UNWRITABLE if keyword in schema), None)
        if function.strict and unwritable is not None:
            raise ArgumentError(
                f"strict function {function.name!r}: {unwritable!r} cannot be enforced in this model's calls"
            )
        return None


def _is_text(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return False
    options = schema.get("enum", [schema["const"]] if "const" in schema else [])
    kind = schema.get("type")
    return kind == "string" or (kind is None and bool(options) and all(isinstance(one, str) for one in options))
