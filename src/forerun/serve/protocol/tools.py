"""Tools in OpenAI's words: what a request offers, and the calls in a conversation."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator

from forerun.nesting import MAX_DEPTH, nesting
from forerun.serve.protocol.common import Name, Strict
from forerun.serve.tools import Function
from forerun.serve.tools.base import NO_PARAMETERS

MAX_TOOLS = 128
"""Tools of one request, as OpenAI has it, and calls of one message."""
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
"""Of a function: nothing that could be taken for a mark."""


def _a_schema(value: dict[str, Any]) -> dict[str, Any]:
    properties, required = value.get("properties", {}), value.get("required", [])
    if not isinstance(properties, dict) or not all(isinstance(own, dict | bool) for own in properties.values()):
        raise ValueError("properties is an object of schemas")
    if not isinstance(required, list):
        raise ValueError("required is a list of names")
    if not all(isinstance(own.get("enum", []), list) for own in properties.values() if isinstance(own, dict)):
        raise ValueError("enum is a list of values")
    return value


Schema = Annotated[dict[str, Any], AfterValidator(_a_schema)]
"""JSON schema of a function's arguments."""


class FunctionDefinition(Strict):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: Schema | None = None
    """Without them the function takes no arguments."""
    strict: bool | None = None

    def function(self) -> Function:
        """The same without words for the model."""
        return Function(self.name, self.parameters or NO_PARAMETERS, bool(self.strict))


class Tool(Strict):
    """One of ``tools``."""

    type: Literal["function"]
    function: FunctionDefinition

    def plain(self) -> dict[str, Any]:
        """As chat templates read it; whether it is strict is not the model's business."""
        found = self.model_dump(exclude_unset=True, exclude={"function": {"strict"}})
        found["function"].setdefault("parameters", {"type": "object", "properties": {}})
        return found


class NamedFunction(Strict):
    """A function by its name."""

    name: Name


class NamedChoice(Strict):
    """A ``tool_choice`` that names the function to call."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Strict):
    """Which of the tools may be called, and whether one must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class AllowedChoice(Strict):
    """A ``tool_choice`` that allows some of the tools; the model is shown all."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedChoice | AllowedChoice


class FunctionCall(Strict):
    """What a call calls."""

    name: Name
    arguments: str
    """A JSON object as text."""

    @field_validator("arguments")
    @classmethod
    def _an_object(cls, value: str) -> str:
        if (depth := nesting(value).depth) > MAX_DEPTH:
            raise ValueError(f"nested {depth} levels deep, at most {MAX_DEPTH} are read")
        try:
            is_object = isinstance(json.loads(value or "{}"), dict)
        except (ValueError, RecursionError):
            is_object = False
        if not is_object:
            raise ValueError("the text of a JSON object is expected")
        return value


class ToolCall(Strict):
    """A call that the model made earlier in the conversation."""

    id: Name
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None
    """Clients that put a stream together leave it there."""

    def plain(self, *, text_arguments: bool) -> dict[str, Any]:
        """As chat templates read it: most want the arguments as an object, some as text."""
        arguments = self.function.arguments or "{}"
        called = {"name": self.function.name, "arguments": arguments if text_arguments else json.loads(arguments)}
        return {"id": self.id, "type": "function", "function": called}
