"""Qwen3-Coder and Qwen 3.5 write
``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``.
"""

from __future__ import annotations

from forerun.serve.tools.base import FieldFormat, Lark, literal
from forerun.serve.tools.incoming import Incoming, Steps

LINE = "\n"


class Qwen3Coder(FieldFormat):
    """`Qwen3Coder` has every mark and every value on lines of their own."""

    name = "qwen3_coder"
    signs = ("<tool_call>", "<function=", "<parameter=")
    mark = "<tool_call>"
    marks = ("</tool_call>",)
    head = "\n<function={}>\n"
    key_marks = ("<parameter=", ">")
    value_marks = ("", "</parameter>")
    own_lines = True
    closing = "</function>\n"

    def read_head(self, text: Incoming) -> Steps[str]:
        if not (yield from text.opens("<function=")):
            return ""
        return ((yield from text.up_to(">")) or "").strip()

    def write_field(self, lark: Lark, key: str, value: str | None) -> str:
        end = (
            "</parameter>\n"  # A free string ends there on whatever line: else one that lacks the break would never end
        )
        written = self.any_value(lark, end) if value is None else f"{value} {literal(LINE + end)}"
        return f"{literal(f'<parameter={key}>' + LINE)} {written}"
