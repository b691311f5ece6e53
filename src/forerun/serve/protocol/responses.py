"""OpenAI's ``/v1/responses`` is read here and turned into a chat request; nothing is kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from forerun.serve.protocol import requests
from forerun.serve.protocol.hints import ACCEPTED
from forerun.serve.protocol.requests import ChatRequest, Message, Name, Neutral, Strict, ToolCall, join_text

LOGPROBS = "message.output_text.logprobs"  # What `include` has to name for log-probabilities


class ResponseText(Strict):
    """A part of a message, or of the reasoning that came with an earlier response."""

    type: Literal["input_text", "output_text", "reasoning_text", "summary_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=requests.MAX_PARTS)] | None = None
    logprobs: list[Any] | None = None


Texts = Annotated[list[ResponseText], Field(max_length=requests.MAX_PARTS, fail_fast=True)]


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
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: Name
    output: str | Texts


class InputReasoning(InputItem):
    """Reasoning of an earlier response."""

    type: Literal["reasoning"]
    summary: Texts | None = None
    content: Texts | None = None


Item = InputMessage | InputCall | InputCallOutput | InputReasoning


class ResponseTool(requests.FunctionDefinition):
    """A function, flat."""

    type: Literal["function"]


class ResponseChoice(requests.NamedFunction):
    """A ``tool_choice`` that names the function to call, flat."""

    type: Literal["function"]


class ResponseAllowed(Strict):
    """A ``tool_choice`` that allows some of the tools, flat."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ResponseChoice], Field(min_length=1, max_length=requests.MAX_TOOLS, fail_fast=True)]


class TextFormat(Strict):
    """``text.format``: a chat's `response_format`, flat."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    description: str | None = None
    strict: bool | None = None  # Always strict here

    @model_validator(mode="after")
    def _complete(self) -> TextFormat:
        if self.type == "json_schema" and self.schema_ is None:
            raise ValueError("type 'json_schema' needs a schema")
        more = sorted(name.strip("_") for name in self.model_fields_set - {"type"})
        if self.type != "json_schema" and more:
            raise ValueError(f"only type 'json_schema' takes {', '.join(more)}, got type {self.type!r}")
        return self

    def chat(self) -> dict[str, Any]:
        """Return the format as chat requests have it."""
        return {"type": self.type} if self.schema_ is None else requests.json_of(self.schema_)


class TextOptions(Strict):
    """The form that the text must have."""

    format: TextFormat | None = None


class Reasoning(Strict):
    """The amount of thinking that is asked of the model."""

    effort: requests.ReasoningEffort | None = None


class ResponsesRequest(Neutral):
    """``POST /v1/responses`` takes this body."""

    own_names: ClassVar[Mapping[str, str]] = {
        **{"messages": "input", "max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens"},
        **{"reasoning_effort": "reasoning.effort", "response_format": "text.format"},
    }
    """The names here of what a chat request calls otherwise."""

    model: str | None = None
    input: str | Annotated[list[Item], Field(min_length=1, max_length=requests.MAX_MESSAGES, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    text: TextOptions | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=requests.MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseChoice | ResponseAllowed | None = None
    parallel_tool_calls: bool = True
    stream: bool = False
    reasoning: Reasoning | None = None
    user: Name | None = None
    cache_salt: requests.Salt | None = None
    speculative: requests.Speculation | None = None
    include: Annotated[list[str], Field(max_length=requests.MAX_PARTS, fail_fast=True)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0

    @field_validator("include")
    @classmethod
    def _known(cls, value: list[str] | None) -> list[str] | None:
        known = (LOGPROBS, *ACCEPTED["include"][0])
        if unknown := [one for one in value or () if one not in known]:
            raise ValueError(f"there is no {unknown[0][:64]!r} here; it takes {', '.join(known)}")
        return value

    @field_validator("top_logprobs")
    @classmethod
    def _needs_include(cls, value: int, info: ValidationInfo) -> int:
        if value and LOGPROBS not in (info.data.get("include") or ()):
            raise ValueError(f'needs include: ["{LOGPROBS}"]')
        return value

    @property
    def wants_logprobs(self) -> bool:
        """Return whether the text comes with the log-probabilities of its tokens."""
        return LOGPROBS in (self.include or ())

    def chat(self) -> ChatRequest:
        """Return the same request as a chat request."""
        choice: Any = self.tool_choice
        if isinstance(choice, ResponseChoice):
            choice = requests.choose_function(choice.name)
        elif isinstance(choice, ResponseAllowed):
            choice = {
                "type": choice.type,
                "allowed_tools": {
                    "mode": choice.mode,
                    "tools": [requests.choose_function(tool.name) for tool in choice.tools],
                },
            }
        functions = [tool.model_dump(exclude={"type"}, exclude_unset=True) for tool in self.tools or ()]
        form = self.text.format if self.text is not None else None
        same = ("model", "temperature", "top_p", "parallel_tool_calls", "stream", "cache_salt", "speculative", "user")
        fields = {
            "messages": list(self._messages()),
            "max_completion_tokens": self.max_output_tokens,
            "response_format": None if form is None else form.chat(),
            "tools": [{"type": "function", "function": function} for function in functions] or None,
            "tool_choice": choice,
            "logprobs": self.wants_logprobs,
            "top_logprobs": self.top_logprobs,
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
        }
        fields |= {"store": self.store} if "store" in self.model_fields_set else {}
        return ChatRequest.model_validate({name: getattr(self, name) for name in same} | fields)

    def _messages(self) -> Iterator[Message]:
        if self.instructions is not None:
            yield Message(role="system", content=self.instructions)
        if isinstance(self.input, str):
            yield Message(role="user", content=self.input)
            return
        turn: dict[str, Any] = {}  # what a response had as several items is one message in a chat
        for item in self.input:
            if isinstance(item, InputReasoning):
                more = join_text(item.content or item.summary or [])
                turn["reasoning_content"] = turn.get("reasoning_content", "") + more
            elif isinstance(item, InputCall):
                turn.setdefault("tool_calls", []).append(ToolCall.of(item.call_id, item.name, item.arguments))
            elif isinstance(item, InputMessage) and item.role == "assistant" and "tool_calls" not in turn:
                turn["content"] = turn.get("content", "") + join_text(item.content)
            else:
                yield from _end_turn(turn)
                turn = {}
                if isinstance(item, InputMessage):
                    yield Message(role=item.role, content=join_text(item.content))
                else:
                    yield Message(role="tool", content=join_text(item.output), tool_call_id=item.call_id)
        yield from _end_turn(turn)


def _end_turn(turn: dict[str, Any]) -> Iterator[Message]:
    if "content" in turn or "tool_calls" in turn:
        yield Message(role="assistant", **turn)
