"""OpenAI's ``/v1/responses``: the body, as a chat request; nothing is kept here between requests.

Knows no engine and no HTTP.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from forerun.serve.protocol.requests import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    AllowedChoice,
    AllowedTools,
    ChatRequest,
    FunctionDefinition,
    JsonSchema,
    Message,
    Name,
    NamedChoice,
    NamedFunction,
    Neutral,
    Nothing,
    ReasoningEffort,
    ResponseFormat,
    Salt,
    Speculation,
    Strict,
    Tool,
    ToolCall,
)


class Text(Strict):
    """A part of a message, or of the reasoning that came with an earlier response."""

    type: Literal["input_text", "output_text", "reasoning_text", "summary_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=MAX_PARTS)] | None = None
    logprobs: list[Any] | None = None


Texts = Annotated[list[Text], Field(max_length=MAX_PARTS, fail_fast=True)]


class InputItem(Strict):
    """An item of the conversation; those of an earlier response can be sent back as they are."""

    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class InputMessage(InputItem):
    """A turn of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Texts


class InputCall(InputItem):
    """A call of an earlier response."""

    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: str


class InputCallOutput(InputItem):
    """What a call brought."""

    type: Literal["function_call_output"]
    call_id: Name
    output: str | Texts


class InputReasoning(InputItem):
    """Reasoning of an earlier response."""

    type: Literal["reasoning"]
    summary: Texts | None = None
    content: Texts | None = None


Item = InputMessage | InputCall | InputCallOutput | InputReasoning


class ResponseTool(FunctionDefinition):
    """A function, flat."""

    type: Literal["function"]


class ResponseChoice(NamedFunction):
    """A ``tool_choice`` that names the function to call, flat."""

    type: Literal["function"]


class ResponseAllowed(Strict):
    """A ``tool_choice`` that allows some of the tools, flat."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ResponseChoice], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class TextFormat(JsonSchema):
    """``text.format``, flat."""

    type: Literal["text", "json_object", "json_schema"]
    name: str = ""

    def chat(self) -> ResponseFormat:
        """As chat requests have it."""
        return ResponseFormat.of(self.schema_) if self.type == "json_schema" else ResponseFormat(type=self.type)


class TextOptions(Strict):
    """What the text must look like."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] = "medium"


class Reasoning(Strict):
    """How much the model is to think."""

    effort: ReasoningEffort | None = None


class ResponsesRequest(Neutral):
    """``POST /v1/responses``."""

    model: str | None = None
    input: str | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    text: TextOptions | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseChoice | ResponseAllowed | None = None
    parallel_tool_calls: bool = True
    stream: bool = False
    reasoning: Reasoning | None = None
    user: Name | None = None
    cache_salt: Salt | None = None
    speculative: Speculation | None = None
    background: Literal[False] = False
    truncation: Literal["disabled"] = "disabled"
    include: Nothing = None
    top_logprobs: Literal[0] = 0

    def chat(self) -> ChatRequest:
        """The same as a chat request."""
        choice: Any = self.tool_choice
        if isinstance(choice, ResponseChoice):
            choice = NamedChoice.of(choice.name)
        elif isinstance(choice, ResponseAllowed):
            tools = AllowedTools(mode=choice.mode, tools=[NamedChoice.of(tool.name) for tool in choice.tools])
            choice = AllowedChoice(type="allowed_tools", allowed_tools=tools)
        form = self.text.format if self.text is not None else None
        return ChatRequest(
            model=self.model,
            messages=list(self._messages()),
            max_completion_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            response_format=None if form is None else form.chat(),
            tools=[_tool(tool) for tool in self.tools] if self.tools else None,
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls,
            stream=self.stream,
            cache_salt=self.cache_salt,
            speculative=self.speculative,
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            user=self.user,
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
            self._calls.append(ToolCall.of(item.call_id, item.name, item.arguments))
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
