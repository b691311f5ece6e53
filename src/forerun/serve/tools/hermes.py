"""``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen 2.5 and 3, and many others."""

from __future__ import annotations

from typing import ClassVar

from forerun.serve.tools.base import Lark, ToolFormat, read_call
from forerun.serve.tools.incoming import Incoming, Steps

END = "</tool_call>"


class Hermes(ToolFormat):
    """One JSON object between each two marks."""

    name: ClassVar[str] = "hermes"
    signs: ClassVar[tuple[str, ...]] = ("<tool_call>",)
    mark: ClassVar[str] = "<tool_call>"
    marks: ClassVar[tuple[str, ...]] = (END,)

    def read_calls(self, text: Incoming) -> Steps[bool]:
        called = False
        while (yield from read_call(text)):
            called = True
        if called:
            yield from text.opens(END)
        return called

    def block(self, lark: Lark, *, many: bool) -> str:
        calls = " | ".join(self._json_call(lark, function) for function in self.functions)
        one = lark.rule(f'"\\n" ({calls}) "}}\\n" {lark.mark(END)}')
        return f'{one} ("\\n" {lark.mark(self.mark)} {one})*' if many else one
