"""Hermes, Qwen 2.5 and 3, and many others write ``<tool_call>{"name": ..., "arguments":
{...}}</tool_call>``.
"""

from __future__ import annotations

from forerun.serve.tools.base import Lark, ToolFormat, read_calls
from forerun.serve.tools.incoming import Incoming, Steps

END = "</tool_call>"


class Hermes(ToolFormat):
    """`Hermes` has one JSON object between each two marks."""

    name = "hermes"
    signs = ("<tool_call>",)
    mark = "<tool_call>"
    marks = (END,)

    def read_calls(self, text: Incoming) -> Steps[bool]:
        return (yield from read_calls(text, end=END))

    def block(self, lark: Lark, *, many: bool) -> str:
        one = lark.rule(f'"\\n" {self._json_call(lark)} "\\n" {lark.mark(END)}')
        return self._repeated(lark, one, many=many)
