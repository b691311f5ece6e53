"""GLM 4.5 and later write
``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>``.
"""

from __future__ import annotations

from forerun.serve.tools.base import FieldFormat, Lark, literal
from forerun.serve.tools.incoming import Incoming, Steps

KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


class Glm45(FieldFormat):
    """`Glm45` writes the name, then pairs of keys and values."""

    name = "glm45"
    signs = ("<tool_call>", KEY, VALUE)
    mark = "<tool_call>"
    marks = ("</tool_call>", KEY, KEY_END, VALUE, VALUE_END)
    head = "{}\n"
    key_marks = (KEY, KEY_END)
    value_marks = (VALUE, VALUE_END)

    def read_head(self, text: Incoming) -> Steps[str]:
        yield from text.skip_blanks()
        return (yield from text.name())

    def write_field(self, lark: Lark, key: str, value: str | None) -> str:
        written = self.any_value(lark, VALUE_END) if value is None else f"{value} {lark.mark(VALUE_END)}"
        return f'{lark.mark(KEY)} {literal(key)} {lark.mark(KEY_END)} "\\n" {lark.mark(VALUE)} {written} "\\n"'
