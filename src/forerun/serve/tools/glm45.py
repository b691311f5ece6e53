"""``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>``: GLM 4.5 and later."""

from __future__ import annotations

import re
from typing import ClassVar

from forerun.serve.tools.base import FieldFormat, Lark, literal
from forerun.serve.tools.incoming import Incoming, Steps

KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_NAME = re.compile(r"[\w.-]*")


class Glm45(FieldFormat):
    """The name, then pairs of keys and values."""

    name: ClassVar[str] = "glm45"
    signs: ClassVar[tuple[str, ...]] = ("<tool_call>", KEY, VALUE)
    mark: ClassVar[str] = "<tool_call>"
    marks: ClassVar[tuple[str, ...]] = ("</tool_call>", KEY, KEY_END, VALUE, VALUE_END)

    def read_head(self, text: Incoming) -> Steps[str]:
        yield from text.skip_blanks()
        name = yield from text.matching(_NAME)
        yield from text.skip_blanks()
        start = text.at
        goes_on = (yield from text.starts(KEY)) or (yield from text.starts(self.end))
        text.at = start
        return name if goes_on else ""

    def read_field(self, text: Incoming) -> Steps[tuple[str, str] | None]:
        start = text.at
        if (yield from text.opens(KEY)):
            key = yield from text.up_to(KEY_END)
            if key is not None and (yield from text.opens(VALUE)):
                value = yield from text.up_to(VALUE_END)
                if value is not None:
                    return key.strip(), value
        text.at = start
        return None

    def read_end(self, text: Incoming) -> Steps[bool]:
        return (yield from text.opens(self.end))

    def write_head(self, name: str) -> str:
        return f"{name}\n"

    def write_field(self, lark: Lark, key: str, value: str | None) -> str:
        written = lark.until(VALUE_END) if value is None else f"{value} {lark.mark(VALUE_END)}"
        return f'{lark.mark(KEY)} {literal(key)} {lark.mark(KEY_END)} "\\n" {lark.mark(VALUE)} {written} "\\n"'

    def write_end(self, lark: Lark) -> str:
        return lark.mark(self.end)
