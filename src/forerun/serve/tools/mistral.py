"""Mistral writes ``[TOOL_CALLS]`` with a JSON list of calls behind it, or since version 11 with
``name[ARGS]{...}``.
"""

from __future__ import annotations

import secrets

from forerun.serve.tools.base import Function, Lark, ToolFormat, literal, read_arguments, read_calls
from forerun.serve.tools.incoming import Incoming, Kind, Piece, Steps

ARGS, CALL_ID = "[ARGS]", "[CALL_ID]"
_ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


class Mistral(ToolFormat):
    """`Mistral` has a list behind one mark, or a mark before each call."""

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

            one = lark.rule(self._one_of(write))
            return f"{one} ({lark.mark(self.mark)} {one})*" if many else one
        one = self._json_call(lark)
        return f'"[" {one} (", " {one})* "]"' if many else f'"[" {one} "]"'

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
