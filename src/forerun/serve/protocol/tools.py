"""Tools in OpenAI's words: what a request offers, and the calls in a conversation."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from forerun.serve.protocol.common import Strict
from forerun.serve.tools import Function
from forerun.serve.tools.base import NO_PARAMETERS

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
"""Of a function: nothing that could be taken for a mark."""


class FunctionDefinition(Strict):
    """A function that the model may call."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema; without one the function takes no arguments."""
    strict: bool | None = None

    @field_validator("parameters")
    @classmethod
    def _a_schema(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        properties, required = (value or {}).get("properties", {}), (value or {}).get("required", [])
        if not isinstance(properties, dict) or not all(isinstance(own, dict | bool) for own in properties.values()):
            raise ValueError("properties is an object of schemas")
        if not isinstance(required, list):
            raise ValueError("required is a list of names")
        if not all(isinstance(own.get("enum", []), list) for own in properties.values() if isinstance(own, dict)):
            raise ValueError("enum is a list of values")
        return value

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

    name: str


class NamedChoice(Strict):
    """A ``tool_choice`` that names the function to call."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedChoice


class FunctionCall(Strict):
    """What a call calls."""

    name: str
    arguments: str
    """A JSON object as text."""

    @field_validator("arguments")
    @classmethod
    def _an_object(cls, value: str) -> str:
        try:
            is_object = isinstance(json.loads(value or "{}"), dict)
        except ValueError:
            is_object = False
        if not is_object:
            raise ValueError("the text of a JSON object is expected")
        return value


class ToolCall(Strict):
    """A call that the model made earlier in the conversation."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall

    def plain(self, *, text_arguments: bool) -> dict[str, Any]:
        """As chat templates read it: most want the arguments as an object, some as text."""
        arguments = self.function.arguments or "{}"
        called = {"name": self.function.name, "arguments": arguments if text_arguments else json.loads(arguments)}
        return {"id": self.id, "type": "function", "function": called}
