"""``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``: Qwen3-Coder, Qwen 3.5."""

from __future__ import annotations

from typing import ClassVar

from forerun.serve.tools.base import FieldFormat, Lark, literal
from forerun.serve.tools.incoming import Incoming, Steps

LINE = "\n"


class Qwen3Coder(FieldFormat):
    """Every mark and every value on lines of their own."""

    name: ClassVar[str] = "qwen3_coder"
    signs: ClassVar[tuple[str, ...]] = ("<tool_call>", "<function=", "<parameter=")
    mark: ClassVar[str] = "<tool_call>"
    marks: ClassVar[tuple[str, ...]] = ("</tool_call>",)

    def read_head(self, text: Incoming) -> Steps[str]:
        if not (yield from text.opens("<function=")):
            return ""
        return ((yield from text.up_to(">")) or "").strip()

    def read_field(self, text: Incoming) -> Steps[tuple[str, str] | None]:
        start = text.at
        if (yield from text.opens("<parameter=")):
            key = yield from text.up_to(">")
            value = yield from text.up_to("</parameter>")
            if key is not None and value is not None:
                return key.strip(), value.removeprefix("\n").removesuffix("\n")
        text.at = start
        return None

    def read_end(self, text: Incoming) -> Steps[bool]:
        ended = yield from text.opens("</function>")
        return (yield from text.opens(self.end)) or ended

    def write_head(self, name: str) -> str:
        return f"\n<function={name}>\n"

    def write_field(self, lark: Lark, key: str, value: str | None) -> str:
        end = "\n</parameter>\n"
        written = lark.until(end) if value is None else f"{value} {literal(end)}"
        return f"{literal(f'<parameter={key}>' + LINE)} {written}"

    def write_end(self, lark: Lark) -> str:
        return f'"</function>\\n" {lark.mark(self.end)}'
