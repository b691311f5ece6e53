"""Anthropic's ``/v1/messages`` is read here and turned into a chat request."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from forerun.errors import ArgumentError, about
from forerun.serve.protocol import requests
from forerun.serve.protocol.requests import ChatRequest, Message, Name, Strict, ToolCall, join_text


class CacheControl(Strict):
    """A hint about prompts that begin alike, which are found without it."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


class Cached(Strict):
    """A block that may bear the hint."""

    cache_control: CacheControl | None = None


class TextBlock(Cached):
    """Text of either side."""

    type: Literal["text"]
    text: str
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


Texts = Annotated[list[TextBlock], Field(max_length=requests.MAX_PARTS, fail_fast=True)]


class ThinkingBlock(Strict):
    """Reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""  # Empty here: nothing is signed


class ToolUseBlock(Cached):
    """A call that the model made earlier in the conversation."""

    type: Literal["tool_use"]
    id: Name
    name: requests.FunctionName
    input: dict[str, Any]


class ToolResultBlock(Cached):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: str | Texts = ""
    is_error: bool = False  # The model reads ``Error:`` before the content: chat templates have no other word for it


Block = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


class Turn(Strict):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(max_length=requests.MAX_PARTS, fail_fast=True)]

    @property
    def blocks(self) -> Sequence[Block]:
        """Return the content as blocks, also where it is one text."""
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content

    @model_validator(mode="after")
    def _fits_its_role(self) -> Turn:
        own = {"user": (TextBlock, ToolResultBlock), "assistant": (TextBlock, ThinkingBlock, ToolUseBlock)}
        wrong = next((block for block in self.blocks if not isinstance(block, own.get(self.role, TextBlock))), None)
        if wrong is not None:
            raise ValueError(f"a message of role {self.role!r} has no block of type {wrong.type!r}")
        return self


class InputTool(Cached):
    """A function that the model may call."""

    type: Literal["custom"] = "custom"
    name: requests.FunctionName
    description: str | None = None
    input_schema: requests.Schema
    strict: bool | None = None
    eager_input_streaming: bool | None = None  # Arguments are streamed as they come in any case

    def chat(self) -> dict[str, Any]:
        """Return the tool as chat requests have it."""
        function = {"name": self.name, "parameters": self.input_schema, "strict": self.strict}
        return {"type": "function", "function": {**function, "description": self.description}}


class InputChoice(Strict):
    """Anthropic's ``tool_choice``."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None  # Name of the tool to call, with the type ``tool``
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _names_a_tool(self) -> InputChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("type 'tool' needs a name, and no other has one")
        return self

    def chat(self) -> Any:
        """Return the choice as chat requests have it."""
        if self.name is not None:
            return requests.choose_function(self.name)
        return {"any": "required"}.get(self.type, self.type)


class OutputFormat(Strict):
    """Anthropic's ``output_config.format``."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Strict):
    """The way in which the completion is to be written."""

    effort: requests.ReasoningEffort | None = None
    format: OutputFormat | None = None


class UserMetadata(Strict):
    """Names the end user of a request."""

    user_id: Name | None = None


class CountRequest(Cached):
    """``POST /v1/messages/count_tokens`` takes a conversation."""

    own_names: ClassVar[Mapping[str, str]] = {
        **{"stop": "stop_sequences", "user": "metadata.user_id", "reasoning_effort": "output_config.effort"},
        "response_format": "output_config.format",
    }
    """The names here of what a chat request calls otherwise."""

    model: str | None = None
    messages: Annotated[list[Turn], Field(min_length=1, max_length=requests.MAX_MESSAGES, fail_fast=True)]
    system: str | Texts | None = None
    tools: Annotated[list[InputTool], Field(max_length=requests.MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: InputChoice | None = None
    thinking: requests.Thinking | None = None
    output_config: OutputConfig | None = None

    @property
    def goes_on(self) -> bool:
        """Return whether the completion continues the last message: it is an assistant's."""
        return self.messages[-1].role == "assistant"

    @model_validator(mode="after")
    def _ends_where_an_answer_can_begin(self) -> CountRequest:
        last = self.messages[-1].blocks[-1:]
        if self.goes_on and not (last and isinstance(last[0], TextBlock)):
            with about("messages"):
                raise ArgumentError("messages: an assistant's last message is continued, so it has to end with text")
        return self

    def chat(self) -> ChatRequest:
        """Return the same request as a chat request."""
        return ChatRequest.model_validate(self._chat())

    def _chat(self) -> dict[str, Any]:
        output = self.output_config or OutputConfig()
        choice = self.tool_choice
        return {
            "model": self.model,
            "messages": list(self._messages()),
            "tools": [tool.chat() for tool in self.tools or ()],
            "tool_choice": None if choice is None else choice.chat(),
            "parallel_tool_calls": choice is None or not choice.disable_parallel_tool_use,
            "thinking": self.thinking,
            "reasoning_effort": output.effort,
            "response_format": None if output.format is None else requests.json_of(output.format.schema_),
            "continue_final_message": self.goes_on,
        }

    def _messages(self) -> Iterator[Message]:
        if self.system is not None:
            yield Message(role="system", content=join_text(self.system))
        for role, turns in groupby(self.messages, key=lambda turn: turn.role):
            blocks = [block for turn in turns for block in turn.blocks]
            if role == "assistant":
                yield _make_message(blocks)
            else:
                yield from _read_blocks(role, blocks)


class MessagesRequest(CountRequest):
    """``POST /v1/messages`` takes this body."""

    max_tokens: Annotated[int, Field(ge=0)]  # 0 only reads the prompt
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    stop_sequences: Annotated[list[str], Field(max_length=requests.MAX_STOPS, fail_fast=True)] | None = None
    stream: bool = False
    metadata: UserMetadata | None = None
    speculative: requests.Speculation | None = None

    def _chat(self) -> dict[str, Any]:
        same = ("max_tokens", "temperature", "top_p", "top_k", "stream", "speculative")
        own = {name: getattr(self, name) for name in same} | {
            "stop": self.stop_sequences,
            "user": None if self.metadata is None else self.metadata.user_id,
        }
        return super()._chat() | own


def _read_blocks(role: Literal["user", "system"], blocks: Sequence[Block]) -> Iterator[Message]:
    for is_text, group in groupby(blocks, key=lambda block: isinstance(block, TextBlock)):
        some = list(group)
        if is_text:
            yield Message(role=role, content=join_text(some))
        for block in some:
            if isinstance(block, ToolResultBlock):
                brought = f"Error: {join_text(block.content)}" if block.is_error else join_text(block.content)
                yield Message(role="tool", content=brought, tool_call_id=block.tool_use_id)


def _make_message(blocks: Sequence[Block]) -> Message:
    uses = [block for block in blocks if isinstance(block, ToolUseBlock)]
    calls = [ToolCall.of(block.id, block.name, json.dumps(block.input)) for block in uses] or None
    reasoning = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock)) or None
    return Message(role="assistant", content=join_text(blocks), tool_calls=calls, reasoning_content=reasoning)
