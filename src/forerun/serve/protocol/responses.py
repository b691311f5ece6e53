"""OpenAI's ``/v1/responses``: the body, as a chat request; nothing is kept here between requests.

Knows no engine and no HTTP.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from forerun.serve.protocol.common import JsonSchema, ResponseFormat, Speculation, Strict
from forerun.serve.protocol.requests import ChatRequest, Message
from forerun.serve.protocol.tools import (
    FunctionCall,
    FunctionDefinition,
    NamedChoice,
    NamedFunction,
    Tool,
    ToolCall,
)

Status = Literal["in_progress", "completed", "incomplete"]


class Text(Strict):
    """A part of a message, or of the reasoning that came with an earlier response."""

    type: Literal["input_text", "output_text", "reasoning_text", "summary_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputMessage(Strict):
    """A turn of the conversation; an earlier response's message can be sent back as it is."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Text]
    id: str | None = None
    status: Status | None = None
    phase: None = None


class InputCall(Strict):
    """A call of an earlier response."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None


class InputCallOutput(Strict):
    """What a call brought."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[Text]
    id: str | None = None
    status: Status | None = None


class InputReasoning(Strict):
    """Reasoning of an earlier response."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[Text] | None = None
    content: list[Text] | None = None
    status: Status | None = None
    encrypted_content: None = None


Item = InputMessage | InputCall | InputCallOutput | InputReasoning


class ResponseTool(FunctionDefinition):
    """A function, flat."""

    type: Literal["function"]


class ResponseChoice(NamedFunction):
    """A ``tool_choice`` that names the function to call, flat."""

    type: Literal["function"]


class TextFormat(JsonSchema):
    """``text.format``, flat."""

    type: Literal["text", "json_object", "json_schema"]
    name: str = ""

    def chat(self) -> ResponseFormat:
        """As chat requests have it."""
        if self.type != "json_schema":
            return ResponseFormat(type=self.type)
        schema = JsonSchema.model_validate({"name": self.name, "schema": self.schema_})
        return ResponseFormat(type=self.type, json_schema=schema)


class TextOptions(Strict):
    """What the text must look like."""

    format: TextFormat | None = None


class ResponsesRequest(Strict):
    """``POST /v1/responses``."""

    model: str | None = None
    input: str | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    text: TextOptions | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseChoice | None = None
    parallel_tool_calls: bool = True
    stream: bool = False
    store: bool | None = None
    """Nothing is kept here: true is refused."""
    metadata: dict[str, str] | None = None
    """Comes back as it is."""
    user: str | None = None
    """Has no effect here."""
    speculative: Speculation | None = None

    @field_validator("store")
    @classmethod
    def _nothing_is_stored(cls, value: bool | None) -> bool | None:
        if value:
            raise ValueError("true is not supported: this server keeps no responses; send the whole conversation")
        return value

    def chat(self) -> ChatRequest:
        """The same as a chat request."""
        choice: Any = self.tool_choice
        if isinstance(choice, ResponseChoice):
            choice = NamedChoice(type="function", function=NamedFunction(name=choice.name))
        form = self.text.format if self.text is not None else None
        return ChatRequest(
            model=self.model,
            messages=list(self._messages()),
            max_completion_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            response_format=None if form is None else form.chat(),
            tools=[_tool(tool) for tool in self.tools] if self.tools else None,
            tool_choice=choice if self.tools or choice != "auto" else None,
            parallel_tool_calls=self.parallel_tool_calls,
            stream=self.stream,
            speculative=self.speculative,
        )

    def _messages(self) -> Iterator[Message]:
        if self.instructions is not None:
            yield Message(role="system", content=self.instructions)
        if isinstance(self.input, str):
            yield Message(role="user", content=self.input)
            return
        turn = _AssistantTurn()
        for item in self.input:
            if turn.takes(item):
                continue
            yield from turn.message()
            turn = _AssistantTurn()
            if isinstance(item, InputMessage):
                yield Message(role=item.role, content=_joined(item.content))
            elif isinstance(item, InputCallOutput):
                yield Message(role="tool", content=_joined(item.output), tool_call_id=item.call_id)
        yield from turn.message()


@dataclass(slots=True)
class _AssistantTurn:
    """Gathers what a response had as several items into the one message that it is in a chat."""

    _content: str | None = None
    _reasoning: str | None = None
    _calls: list[ToolCall] = field(default_factory=list)

    def takes(self, item: Item) -> bool:
        """Whether the item belongs to the turn."""
        if isinstance(item, InputReasoning):
            self._reasoning = (self._reasoning or "") + _joined(item.content or item.summary or [])
        elif isinstance(item, InputCall):
            called = FunctionCall(name=item.name, arguments=item.arguments)
            self._calls.append(ToolCall(id=item.call_id, function=called))
        elif isinstance(item, InputMessage) and item.role == "assistant" and not self._calls:
            self._content = (self._content or "") + _joined(item.content)
        else:
            return False
        return True

    def message(self) -> Iterator[Message]:
        """The turn as a message, if there was one."""
        if self._content is not None or self._calls:
            yield Message(
                role="assistant",
                content=self._content,
                tool_calls=self._calls or None,
                reasoning_content=self._reasoning,
            )


def _joined(content: str | list[Text]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _tool(tool: ResponseTool) -> Tool:
    return Tool(type="function", function=FunctionDefinition(**tool.model_dump(exclude={"type"}, exclude_unset=True)))
