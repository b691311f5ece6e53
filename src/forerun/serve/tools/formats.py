"""DeepSeek V3 and R1 write a call's arguments into a fenced block, V3.1 right behind the name."""

from __future__ import annotations

from forerun.serve.tools.base import Function, Lark, ToolFormat, literal, read_arguments
from forerun.serve.tools.incoming import Incoming, Kind, Piece, Steps


def _mark(words: str) -> str:
    """Return DeepSeek's mark of these words, with wide bars, and a block character between words."""
    return f"<\uff5c{words.replace(' ', chr(0x2581))}\uff5c>"


CALLS, CALLS_END = _mark("tool calls begin"), _mark("tool calls end")
CALL, CALL_END, SEPARATOR = _mark("tool call begin"), _mark("tool call end"), _mark("tool sep")
FENCE, FENCE_END = "```json\n", "\n```"


class DeepSeekV3(ToolFormat):
    """`DeepSeekV3` is a section of calls; the name stands before the separator (V3.1), or behind it
    and "function".
    """

    name = "deepseek_v3"
    signs = (CALLS,)
    mark = CALLS
    marks = (CALL, SEPARATOR, CALL_END, CALLS_END)
    text_arguments = True

    def read_calls(self, text: Incoming) -> Steps[bool]:
        called = False
        while (yield from self._read_one(text)):
            called = True
        if called:
            yield from text.opens(CALLS_END)
        return called

    def block(self, lark: Lark, *, many: bool) -> str:
        fenced = "```json" in self.template
        calls = self._one_of(lambda function: self._call(lark, function, fenced=fenced))
        one = lark.rule(f"{lark.mark(CALL)} ({calls}) {lark.mark(CALL_END)}")
        joint = '"\\n"' if fenced else ""
        return f"{one} ({joint} {one})* {lark.mark(CALLS_END)}" if many else f"{one} {lark.mark(CALLS_END)}"

    def _call(self, lark: Lark, function: Function, *, fenced: bool) -> str:
        arguments = lark.json(function.parameters, strict=function.strict)
        separator = lark.mark(SEPARATOR)
        if not fenced:
            return f"{literal(function.name)} {separator} {arguments}"
        head = f"{function.name}\n{FENCE}"
        return f'"function" {separator} {literal(head)} {arguments} {literal(FENCE_END)}'

    def _read_one(self, text: Incoming) -> Steps[bool]:
        start = text.at
        name = ""
        if (yield from text.opens(CALL)):
            name = yield from text.name()
            name = name if (yield from text.starts(SEPARATOR)) else ""
            yield from text.skip_blanks()
            if name == "function" and (yield from text.next()) != "{":
                name = yield from text.name()
                yield from text.opens(FENCE.rstrip())
                yield from text.skip_blanks()
        if not name or (yield from text.next()) != "{":
            text.at = start
            return False
        yield Piece(Kind.CALL, name)
        yield from read_arguments(text)
        yield from text.opens(FENCE_END.strip())
        yield from text.opens(CALL_END)
        return True
