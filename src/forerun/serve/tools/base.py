"""A format of tool calls says how a model writes calls into its text, and the grammar of what it
may write.

Calls are JSON (`read_calls`) or have a mark around each argument (`FieldFormat`).
"""

from __future__ import annotations

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from forerun.errors import ArgumentError
from forerun.serve.tools.incoming import Incoming, Kind, Piece, Steps, collect
from forerun.serve.tools.values import Schema

NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_SPACING = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""These are the blanks in a grammar's JSON: one where models write one.

A weak model would fill its completion with more.
"""


@dataclass(frozen=True, slots=True)
class Function:
    """A function that may be called."""

    name: str
    parameters: Mapping[str, Any]  # JSON schema of its arguments
    strict: bool = False  # The arguments must obey the schema


class Lark:
    """Collects the rules of a grammar, in Lark's notation as llguidance reads it; `mark` is `GrammarCompiler.mark`."""

    def __init__(self, mark: Callable[[str], str]) -> None:
        self.mark = mark
        self._rules: list[str] = []

    def rule(self, body: str, *, lazy: bool = False) -> str:
        """Add a rule and return its name."""
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def json(self, schema: Mapping[str, Any], *, strict: bool) -> str:
        """Add a rule for a value of this schema; keywords that llguidance cannot enforce are left
        out unless `strict`.
        """
        options = _SPACING if strict else {**_SPACING, "lenient": True}
        return self.rule(f"%json {json.dumps({**schema, 'x-guidance': options})}")

    def until(self, mark: str, text: str | None = None) -> str:
        """Add a rule for any text up to `mark`, and the mark; `text` is a terminal that says what
        the text may be.
        """
        written = self.mark(mark)
        if written.startswith('"'):
            return self.rule(f"{text or 'TEXT'} {written}", lazy=True)
        return self.rule(f"{text or self.without(mark)} {written}")

    def without(self, mark: str, *, of: str = "TEXT") -> str:
        """Add a terminal for any text in which `mark` is not spelled out, since a reader would take
        it for the mark.

        `of` is the terminal that the text is taken from.
        """
        return self.terminal(f"{of} & ~(TEXT {literal(mark)} TEXT)")

    def terminal(self, body: str) -> str:
        """Add a terminal and return its name."""
        name = f"TEXT_{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def text(self, start: str) -> str:
        """Return the whole grammar."""
        return "\n".join([f"start: {start}", *self._rules, "TEXT: /(.|\\n)*/", "BLANKS: /\\s{0,8}/", ""])


def literal(text: str) -> str:
    """Return a string in Lark's notation."""
    return json.dumps(text, ensure_ascii=False)


class ToolFormat(ABC):
    """The way in which calls of `functions` are written.

    Some formats come in several versions, which the chat `template` tells apart.
    """

    name: ClassVar[str]  # vLLM's name of the parser
    signs: ClassVar[tuple[str, ...]]  # Texts in a chat template, all of which together tell this format
    mark: ClassVar[str]  # Text that begins a call
    marks: ClassVar[tuple[str, ...]] = ()  # Other marks, which the tokenizer may know as special tokens

    def __init__(self, template: str, functions: Sequence[Function]) -> None:
        self.template, self.functions = template, functions

    def read(self, text: Incoming, *, called: bool = False) -> Steps[None]:
        """Read a completion, or the rest of one that has `called`: text, and calls behind each mark.

        What looks like a call and is none stays text.
        """
        called = called or (yield from self.read_opening(text))
        while (start := (yield from text.until(self.mark, Kind.CONTENT, drop_end=called))) is not None:
            behind = text.at
            if (yield from self.read_calls(text)):
                called = True
            else:
                text.at = behind
                yield Piece(Kind.CONTENT, text.text[start:behind], start, behind)

    def grammar(self, lark: Lark, *, forced: bool, many: bool, content: str | None = None) -> str:
        """Add what a completion may be, and return the rule's name.

        It must be a call (`forced`), may be several (`many`), or may be `content` (the body of a
        rule) instead of calls; None is any text, also around calls.
        """
        block = self.block(lark, many=many)
        if forced or content is not None:
            calls = lark.rule(f"{lark.mark(self.mark)} {block}")
            return calls if forced else lark.rule(f"{calls} | {content}")
        call = lark.rule(f"{lark.until(self.mark)} {block}")
        text = lark.without(self.mark)
        return lark.rule(f"{call}* {text}" if many else f"{call} | {text}")

    def read_opening(self, text: Incoming) -> Steps[bool]:
        """Read calls that begin the completion without a mark; False, with nothing passed on, where there is none."""
        yield from ()
        return False

    @abstractmethod
    def read_calls(self, text: Incoming) -> Steps[bool]:
        """Read the calls behind a mark; False, with nothing passed on, where there is none."""

    @abstractmethod
    def block(self, lark: Lark, *, many: bool) -> str:
        """Return the body of a rule for what stands behind the first mark: one call, or several."""

    def new_id(self) -> str:
        """Return an id for a call."""
        return f"call_{secrets.token_hex(12)}"

    def _one_of(self, write: Callable[[Function], str]) -> str:
        return " | ".join(map(write, self.functions))

    def _json_call(self, lark: Lark, arguments: str = "arguments") -> str:
        """Add a rule for ``{"name": ..., "arguments": ...}``."""

        def write(function: Function) -> str:
            head = f'{{"name": {json.dumps(function.name)}, "{arguments}": '
            return f"{literal(head)} {lark.json(function.parameters, strict=function.strict)}"

        return lark.rule(f'({self._one_of(write)}) "}}"')

    def _repeat(self, lark: Lark, one: str, *, many: bool) -> str:
        """Return a rule's body for one call, or several with a line's end and the mark between
        them.
        """
        return f'{one} ("\\n" {lark.mark(self.mark)} {one})*' if many else one


# --- calls as JSON ---

ARGUMENT_KEYS = ("arguments", "parameters")


def read_calls(text: Incoming, names: Container[str] | None = None, *, between: str = "", end: str = "") -> Steps[bool]:
    """Read as many calls as there are, perhaps with a mark `between` each two and at the `end`;
    return whether there was one.

    It is a call as soon as its arguments begin behind its name (one of `names`, if given).
    """
    called, start = False, text.at
    while (yield from _read_object(text, names)):
        yield from text.opens(between)
        called, start = True, text.at
    text.at = start
    if called:
        yield from text.opens(end)
    return called


def read_arguments(text: Incoming) -> Steps[None]:
    """Pass a call's arguments on: an object as it arrives; a string that holds one, or null, when it is complete."""
    yield from text.skip_blanks()
    if (yield from text.next()) == "{":
        yield from text.json_value()
    else:
        yield Piece(Kind.ARGUMENTS, _as_object((yield from collect(text.json_value()))))


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
            value = yield from collect(text.json_value())
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
    """Return the text of an object: as it is, out of a JSON string, or an empty one for null and
    nothing.
    """
    if raw in ("", "null"):
        return "{}"
    if raw.startswith('"'):
        try:
            return str(json.loads(raw, strict=False))
        except ValueError:
            return raw
    return raw


# --- calls with a mark around each argument ---

_UNWRITABLE = ("pattern", "format", "minLength", "maxLength")  # Not enforceable where a string ends at a mark
_NO_STRING = {"type": ["null", "boolean", "number", "array", "object"]}


class FieldFormat(ToolFormat):
    """Writes a call as a head with the name, its fields, and an end."""

    head: ClassVar[str]  # Text between the mark and the first field, with ``{}`` for the name
    key_marks: ClassVar[tuple[str, str]]
    value_marks: ClassVar[tuple[str, str]]  # Around the name and the text of an argument; the first may be empty
    own_lines: ClassVar[bool] = False  # A value begins and ends with a line break that is not its own
    closing: ClassVar[str] = ""  # Text before the `end`; a call may lack it
    end: ClassVar[str] = "</tool_call>"  # Mark that ends a call

    @abstractmethod
    def read_head(self, text: Incoming) -> Steps[str]:
        """Read up to the first field and return the function's name, empty where this is no call."""

    @abstractmethod
    def write_field(self, lark: Lark, key: str, value: str | None) -> str:
        """Write one argument in Lark's notation; a `value` of None is any text."""

    @property
    def _goes_on(self) -> tuple[str, ...]:
        """Return the marks that can stand behind the head and behind a value."""
        return tuple(mark for mark in (self.key_marks[0], self.closing.strip(), self.end) if mark)

    def read_calls(self, text: Incoming) -> Steps[bool]:
        name = yield from self.read_head(text)
        if not name or not (yield from text.comes(self._goes_on)):
            return False
        yield Piece(Kind.CALL, name)
        opening = "{"
        arguments = self._arguments(name)
        while (field := (yield from self._read_field(text))) is not None:
            key, raw = field
            value = arguments.field(key).read(raw)
            yield Piece(Kind.ARGUMENTS, f"{opening}{json.dumps(key, ensure_ascii=False)}: {value}")
            opening = ", "
        closed = bool(self.closing) and (yield from text.opens(self.closing.strip()))
        ended = yield from text.opens(self.end)
        if not closed and not ended:  # A field is malformed, or the text ends within the call
            ended = (yield from text.up_to(self.end)) is not None
        if closed or ended:
            yield Piece(Kind.ARGUMENTS, "{}" if opening == "{" else "}")
        if not ended and (not closed or (yield from text.comes((self.end,), ended=True))):
            text.at = len(text.text)  # The text has ended within the call, of which nothing is content
        return True

    def block(self, lark: Lark, *, many: bool) -> str:
        call = lark.rule(self._one_of(lambda function: self._call(lark, function)))
        return self._repeat(lark, call, many=many)

    def any_value(self, lark: Lark, end: str) -> str:
        """Add a rule for any text that is read as one value up to `end`, and the end."""
        text = lark.terminal(
            f"TEXT & ~(TEXT {literal(self.value_marks[1])} /\\s*/ ({' | '.join(map(literal, self._goes_on))}) TEXT)"
        )
        return lark.until(end, text)

    def _arguments(self, name: str) -> Schema:
        parameters: Mapping[str, Any] = next(
            (function.parameters for function in self.functions if function.name == name), {}
        )
        return Schema(parameters, parameters)

    def _read_field(self, text: Incoming) -> Steps[tuple[str, str] | None]:
        """Read one argument, its name and its text; None, with nothing read, where there is none.

        A value may hold the mark that ends it: it ends where the call can go on behind it.
        """
        start, (opening, end) = text.at, self.value_marks
        if (yield from text.opens(self.key_marks[0])):
            key = yield from text.up_to(self.key_marks[1])
            if key is not None and (not opening or (yield from text.opens(opening))):
                value = yield from text.up_to(end, self._goes_on)
                if value is not None:
                    return key.strip(), value.removeprefix("\n").removesuffix("\n") if self.own_lines else value
        text.at = start
        return None

    def _call(self, lark: Lark, function: Function) -> str:
        schema = self._arguments(function.name)
        keys, required = schema.fields, schema.required
        if function.strict and not any("properties" in part for part in schema.parts()):
            raise ArgumentError(f"strict function {function.name!r}: this model's calls need a schema with properties")
        fields = []
        for key in keys:
            field = lark.rule(self.write_field(lark, key, self._field_value(lark, function, schema.field(key))))
            fields.append(field if key in required else f"{field}?")
        closing = [literal(self.closing)] if self.closing else []
        return " ".join([literal(self.head.format(function.name)), *fields, *closing, lark.mark(self.end)])

    def _field_value(self, lark: Lark, function: Function, schema: Schema) -> str | None:
        """Write a value in Lark's notation: strings as they are, all else as JSON; None where it
        may be any string.
        """
        if schema.text:
            unwritable = [keyword for part in schema.parts() for keyword in _UNWRITABLE if keyword in part]
            if function.strict and unwritable:
                name = function.name
                raise ArgumentError(f"strict function {name!r}: {unwritable[0]!r} cannot be enforced in its calls")
            return None
        written = list(map(literal, schema.strings))
        if not written or not schema.only_strings:
            shared = {key: function.parameters[key] for key in ("$defs", "definitions") if key in function.parameters}
            other = [schema.schema, _NO_STRING] if written else [schema.schema]
            written.append(lark.json({"allOf": other, **shared}, strict=function.strict))
        return lark.rule(" | ".join(written))
