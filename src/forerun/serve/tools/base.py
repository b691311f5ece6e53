"""What a format of tool calls is: how a model writes calls into its text, and the grammar of what it may write.

Each format is one file and one line of the registry. Knows no request and no model.
"""

from __future__ import annotations

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from forerun.serve.tools.incoming import Incoming, Kind, Piece, Steps

NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_SPACING = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""Blanks in a grammar's JSON: one where models write one. A weak model would fill its answer with more."""


@dataclass(frozen=True, slots=True)
class Function:
    """A function that may be called."""

    name: str
    parameters: Mapping[str, Any]
    """JSON schema of its arguments."""
    strict: bool = False
    """The arguments must obey the schema."""


class Lark:
    """A grammar in the making, in Lark's notation as llguidance reads it.

    Args:
        mark: how the grammar names a mark (`forerun.LLM.grammar_mark`).
    """

    def __init__(self, mark: Callable[[str], str]) -> None:
        self.mark = mark
        self._rules: list[str] = []

    def rule(self, body: str, *, lazy: bool = False) -> str:
        """A new rule; its name."""
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def json(self, schema: Mapping[str, Any], *, strict: bool) -> str:
        """A value of this schema; keywords that llguidance cannot enforce are left out unless `strict`."""
        options = _SPACING if strict else {**_SPACING, "lenient": True}
        return self.rule(f"%json {json.dumps({**schema, 'x-guidance': options})}")

    def until(self, mark: str) -> str:
        """Any text up to `mark`, and the mark."""
        written = self.mark(mark)
        return self.rule(f"TEXT {written}", lazy=written.startswith('"'))

    def text(self, start: str) -> str:
        """The whole grammar."""
        return "\n".join([f"start: {start}", *self._rules, "TEXT: /(.|\\n)*/", "BLANKS: /\\s{0,8}/", ""])


def literal(text: str) -> str:
    """A string in Lark's notation."""
    return json.dumps(text, ensure_ascii=False)


class ToolFormat(ABC):
    """How calls are written.

    Args:
        template: the model's chat template, for formats that come in several versions.
        functions: that may be called.
    """

    name: ClassVar[str]
    """vLLM's name of the parser."""
    signs: ClassVar[tuple[str, ...]]
    """Texts in a chat template, all of which together tell this format."""
    mark: ClassVar[str]
    """Where calls begin."""
    marks: ClassVar[tuple[str, ...]] = ()
    """Other marks, which the tokenizer may know as special tokens."""
    text_arguments: ClassVar[bool] = False
    """The template wants the arguments of earlier calls as JSON text, not as an object, and no empty content."""

    def __init__(self, template: str, functions: Sequence[Function]) -> None:
        self.template, self.functions = template, functions

    def read(self, text: Incoming) -> Steps[None]:
        """Read an answer: text, and calls behind each mark. What looks like a call and is none stays text."""
        called = yield from self.read_opening(text)
        while (start := (yield from text.until(self.mark, Kind.CONTENT, drop_end=called))) is not None:
            behind = text.at
            if (yield from self.read_calls(text)):
                called = True
            else:
                text.at = behind
                yield Piece(Kind.CONTENT, text.text[start:behind])

    def grammar(self, lark: Lark, *, forced: bool, many: bool, content: str | None = None) -> str:
        """What an answer may be, as a rule's name.

        Args:
            forced: it must be a call.
            many: it may be several.
            content: what it may be instead of calls, as the body of a rule; None is any text, also around calls.
        """
        block = self.block(lark, many=many)
        if forced or content is not None:
            calls = lark.rule(f"{lark.mark(self.mark)} {block}")
            return calls if forced else lark.rule(f"{calls} | {content}")
        call = lark.rule(f"{lark.until(self.mark)} {block}")
        return lark.rule(f"{call}* TEXT" if many else f"{call} | TEXT")

    def read_opening(self, text: Incoming) -> Steps[bool]:
        """Read calls that begin the answer without a mark; False, with nothing passed on, where there is none."""
        yield from ()
        return False

    @abstractmethod
    def read_calls(self, text: Incoming) -> Steps[bool]:
        """Read the calls behind a mark; False, with nothing passed on, where there is none."""

    @abstractmethod
    def block(self, lark: Lark, *, many: bool) -> str:
        """What stands behind the first mark: one call, or several."""

    def new_id(self) -> str:
        """An id for a call."""
        return f"call_{secrets.token_hex(12)}"

    def _json_call(self, lark: Lark, function: Function, arguments: str = "arguments") -> str:
        """``{"name": ..., "arguments": ...}`` up to the brace that ends it."""
        head = f'{{"name": {json.dumps(function.name)}, "{arguments}": '
        return f"{literal(head)} {lark.json(function.parameters, strict=function.strict)}"
