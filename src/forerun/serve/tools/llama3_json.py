"""Llama 3.1 and 3.2 write ``{"name": ..., "parameters": {...}}`` and nothing else, or behind
``<|python_tag|>``.
"""

from __future__ import annotations

from forerun.errors import ArgumentError
from forerun.serve.tools.base import Lark, ToolFormat, read_calls
from forerun.serve.tools.incoming import Incoming, Steps


class Llama3Json(ToolFormat):
    """`Llama3Json` answers begin with the name of a function that exists; several calls are
    separated by semicolons.
    """

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
        one = self._json_call(lark, "parameters")
        return f'{one} ("; " {one})*' if many else one
