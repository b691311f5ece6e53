"""Models write tool calls in these formats. Adding one is one class and one name in `FORMATS`.

The most particular formats come first there: the first whose signs a chat template shows is taken
for its own.
"""

from __future__ import annotations

import secrets

from forerun.errors import ArgumentError, refuse_unknown
from forerun.serve.tools.base import FieldFormat, Function, Lark, ToolFormat, literal, read_arguments, read_calls
from forerun.serve.tools.incoming import Incoming, Kind, Piece, Steps


def _mark(words: str) -> str:
    """Return DeepSeek's mark of these words, with wide bars, and a block character between words."""
    return f"<\uff5c{words.replace(' ', chr(0x2581))}\uff5c>"


CALLS, CALLS_END = _mark("tool calls begin"), _mark("tool calls end")
CALL, CALL_END, SEPARATOR = _mark("tool call begin"), _mark("tool call end"), _mark("tool sep")
FENCE, FENCE_END = "```json\n", "\n```"


class DeepSeekV3(ToolFormat):
    """A section of calls; the name stands before the separator (V3.1), or behind it and "function"."""

    name = "deepseek_v3"
    signs = (CALLS,)
    mark = CALLS
    marks = (CALL, SEPARATOR, CALL_END, CALLS_END)

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


ARGS, CALL_ID = "[ARGS]", "[CALL_ID]"
_ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


class Mistral(ToolFormat):
    """A list behind one mark, or a mark before each call."""

    name = "mistral"
    signs = ("[TOOL_CALLS]",)
    mark = "[TOOL_CALLS]"
    marks = (ARGS, CALL_ID)

    def read_calls(self, text: Incoming) -> Steps[bool]:
        if not (yield from text.opens("[")):
            return (yield from self._read_named(text))
        return (yield from read_calls(text, between=",", end="]"))

    def block(self, lark: Lark, *, many: bool) -> str:
        if ARGS in self.template:

            def write(function: Function) -> str:
                arguments = lark.json(function.parameters, strict=function.strict)
                return f"{literal(function.name)} {lark.mark(ARGS)} {arguments}"

            call = lark.rule(self._one_of(write))
            return f"{call} ({lark.mark(self.mark)} {call})*" if many else call
        call = self._json_call(lark)
        return f'"[" {call} (", " {call})* "]"' if many else f'"[" {call} "]"'

    def new_id(self) -> str:
        """Return an id of nine letters or digits, because Mistral's templates refuse anything else."""
        return "".join(secrets.choice(_ALPHABET) for _ in range(9))

    def _read_named(self, text: Incoming) -> Steps[bool]:
        yield from text.skip_blanks()
        name = yield from text.name()
        if (yield from text.starts(CALL_ID)):
            yield from text.name()
        yield from text.starts(ARGS)
        yield from text.skip_blanks()
        if not name or (yield from text.next()) != "{":
            return False
        yield Piece(Kind.CALL, name)
        yield from read_arguments(text)
        return True


class Llama3Json(ToolFormat):
    """Completions begin with the name of a function that exists; several calls are separated by semicolons."""

    name = "llama3_json"
    signs = ('{"name": function name, "parameters":',)
    mark = "<|python_tag|>"

    def read_opening(self, text: Incoming) -> Steps[bool]:
        return (yield from self.read_calls(text))

    def read_calls(self, text: Incoming) -> Steps[bool]:
        names = {function.name for function in self.functions}
        return (yield from read_calls(text, names, between=";"))

    def grammar(self, lark: Lark, *, forced: bool, many: bool, content: str | None = None) -> str:
        if content is not None:
            raise ArgumentError("models that write calls as plain JSON cannot have a response_format beside tools")
        calls = lark.rule(self.block(lark, many=many))
        if forced:
            return calls
        text = lark.without(self.mark, of="/\\s*([^{\\s](.|\\n)*)?/")
        return lark.rule(f"{calls} | {lark.mark(self.mark)} {calls} | {text}")

    def block(self, lark: Lark, *, many: bool) -> str:
        call = self._json_call(lark, "parameters")
        return f'{call} ("; " {call})*' if many else call


KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


class Glm45(FieldFormat):
    """Writes the name, then pairs of keys and values."""

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


LINE = "\n"


class Qwen3Coder(FieldFormat):
    """Every mark and every value on lines of their own."""

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


END = "</tool_call>"


class Hermes(ToolFormat):
    """One JSON object between each two marks."""

    name = "hermes"
    signs = ("<tool_call>",)
    mark = "<tool_call>"
    marks = (END,)

    def read_calls(self, text: Incoming) -> Steps[bool]:
        return (yield from read_calls(text, end=END))

    def block(self, lark: Lark, *, many: bool) -> str:
        call = lark.rule(f'"\\n" {self._json_call(lark)} "\\n" {lark.mark(END)}')
        return self._repeat(lark, call, many=many)


FORMATS: dict[str, type[ToolFormat]] = {
    one.name: one for one in (Qwen3Coder, Glm45, Hermes, Mistral, DeepSeekV3, Llama3Json)
}


def check_parser(name: str) -> None:
    """Refuse an unknown ``--tool-call-parser``."""
    refuse_unknown("there is no tool-call-parser", name, ("auto", "none", *FORMATS))


def find_format(parser: str, template: str) -> type[ToolFormat] | None:
    """Return the format called `parser`; for ``auto`` the one that a chat template shows; None
    where there is none.
    """
    if parser != "auto":
        return FORMATS.get(parser)
    return next((each for each in FORMATS.values() if all(sign in template for sign in each.signs)), None)
