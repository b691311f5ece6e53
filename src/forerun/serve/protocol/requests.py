"""The bodies that clients send."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from forerun.serve.protocol.common import Sampling, Strict, TextPart, joined
from forerun.serve.protocol.tools import NamedChoice, Tool, ToolCall, ToolChoice


class Message(Strict):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    """Only an assistant's may be missing, where it has called tools."""
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    """An assistant's."""
    tool_call_id: str | None = None
    """Of the call that a tool's message answers."""
    reasoning_content: str | None = None
    """An assistant's; whether the model reads it again is its template's choice."""
    reasoning: str | None = None
    """The same under vLLM's newer name."""
    refusal: None = None
    """Clients send it back as they got it."""

    @model_validator(mode="after")
    def _fits_its_role(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content is missing; only an assistant's message with tool_calls may have none")
        if self.role != "assistant" and self.tool_calls is not None:
            raise ValueError("only an assistant's message has tool_calls")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("a message of role 'tool' needs tool_call_id, and no other has one")
        return self

    def plain(self, *, text_arguments: bool = False) -> dict[str, Any]:
        """As chat templates read it; templates know no developer, who is their system.

        Args:
            text_arguments: the arguments of calls as JSON text, and no content as None; else an object and "".
        """
        found: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role}
        found["content"] = joined(self.content) if self.content is not None else None if text_arguments else ""
        if self.tool_calls:
            found["tool_calls"] = [call.plain(text_arguments=text_arguments) for call in self.tool_calls]
        reasoning = self.reasoning_content or self.reasoning
        more = {"name": self.name, "tool_call_id": self.tool_call_id, "reasoning_content": reasoning}
        return found | {key: value for key, value in more.items() if value is not None}


class ChatRequest(Sampling):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(min_length=1)] | None = None
    tool_choice: ToolChoice | None = None
    """None is ``auto`` where there are tools."""
    parallel_tool_calls: bool = True
    """False: at most one call."""
    chat_template_kwargs: dict[str, Any] | None = None
    """vLLM's: further variables of the chat template, such as ``enable_thinking``."""

    @property
    def offered(self) -> list[Tool]:
        """The tools that the model is shown: none where it must not call any."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def callable_tools(self) -> list[Tool]:
        """The tools that it may call: the one that `tool_choice` names, or all."""
        named = self.tool_choice.function.name if isinstance(self.tool_choice, NamedChoice) else None
        return [tool for tool in self.offered if named in (None, tool.function.name)]

    @property
    def must_call(self) -> bool:
        """Whether the answer has to be a call."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedChoice)

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        return self


class CompletionRequest(Sampling):
    """``POST /v1/completions``."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: Annotated[int, Field(ge=1)] = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> CompletionRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        if self.echo and self.logprobs is not None:
            raise ValueError("echo together with logprobs is not supported; ask for one of them")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or several, each text or token ids."""
        if isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)


class TokenizeRequest(Strict):
    """``POST /tokenize``: of a text, or of a conversation as the model reads it."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(Strict):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: list[int]
