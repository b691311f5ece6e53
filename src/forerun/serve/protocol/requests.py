"""The bodies that clients send."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from forerun.serve.protocol.common import MAX_PARTS, Name, Sampling, Strict, TextPart, joined
from forerun.serve.protocol.neutral import NeutralChat, NeutralCompletion
from forerun.serve.protocol.tools import MAX_TOOLS, AllowedChoice, NamedChoice, Tool, ToolCall, ToolChoice

MAX_MESSAGES = 4096
MAX_TOKENS = 200_000
"""That are made into text at once."""
MAX_PROMPTS = 4096
"""That one request may hold whatever the server's queue; `--max-queue` limits it further."""
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Thinking(Strict):
    """Whether the model is to reason before it answers, in the words of Anthropic, DeepSeek and others."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    """A goal for the model's reasoning in Anthropic's API; here `max_tokens` alone bounds it."""
    display: Literal["summarized"] = "summarized"
    """What was thought is shown as it is."""


class Message(Strict):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    """Only an assistant's may be missing, where it has called tools."""
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    """An assistant's."""
    tool_call_id: Name | None = None
    """Of the call that a tool's message answers."""
    reasoning_content: str | None = None
    """An assistant's; whether the model reads it again is its template's choice."""
    reasoning: str | None = None
    """The same under vLLM's newer name."""
    annotations: Annotated[list[Any], Field(max_length=MAX_PARTS)] | None = None
    """Clients send back what they got."""

    @model_validator(mode="after")
    def _fits_its_role(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content is missing; only an assistant's message with tool_calls may have none")
        if self.role != "assistant" and self.tool_calls:
            raise ValueError("only an assistant's message has tool_calls")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("a message of role 'tool' needs tool_call_id, and no other has one")
        return self

    @property
    def text(self) -> str:
        """Its content; empty where there is none."""
        return joined(self.content or "")

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


class ChatRequest(Sampling, NeutralChat):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    """0 only reads the prompt, here and in completions."""
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    """None is ``auto`` where there are tools."""
    parallel_tool_calls: bool = True
    """False: at most one call."""
    chat_template_kwargs: dict[str, Any] | None = None
    """vLLM's: further variables of the chat template, such as ``enable_thinking``."""
    reasoning_effort: ReasoningEffort | None = None
    """A variable of the chat template, where it has it."""
    thinking: Thinking | None = None
    """Switches the chat template's reasoning, where it can be switched."""
    add_generation_prompt: bool | None = None
    """vLLM's: the prompt ends with what opens the answer; None is true unless the last message is continued."""
    continue_final_message: bool = False
    """vLLM's: the answer goes on with the last message."""

    @property
    def offered(self) -> list[Tool]:
        """The tools that the model is shown: none where it must not call any."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def callable_tools(self) -> list[Tool]:
        """The tools that it may call: those that `tool_choice` names, or all."""
        names = self.chosen
        return [tool for tool in self.offered if names is None or tool.function.name in names]

    @property
    def chosen(self) -> list[str] | None:
        """The functions that `tool_choice` names; None where it names none."""
        if isinstance(self.tool_choice, NamedChoice):
            return [self.tool_choice.function.name]
        if isinstance(self.tool_choice, AllowedChoice):
            return [tool.function.name for tool in self.tool_choice.allowed_tools.tools]
        return None

    @property
    def must_call(self) -> bool:
        """Whether the answer has to be a call."""
        if isinstance(self.tool_choice, AllowedChoice):
            return self.tool_choice.allowed_tools.mode == "required"
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedChoice)

    @property
    def many_calls(self) -> bool:
        """Whether the answer may hold several calls: a function that is named is called once."""
        return self.parallel_tool_calls and not isinstance(self.tool_choice, NamedChoice)

    @field_validator("top_logprobs")
    @classmethod
    def _needs_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise ValueError("needs logprobs: true")
        return value

    @field_validator("continue_final_message")
    @classmethod
    def _begins_or_goes_on(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("add_generation_prompt"):
            raise ValueError("the answer goes on with the last message or begins; leave add_generation_prompt out")
        return value


class CompletionRequest(Sampling, NeutralCompletion):
    """``POST /v1/completions``."""

    prompt: (
        str
        | Annotated[list[int], Field(fail_fast=True)]
        | Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True)]
        | Annotated[list[Annotated[list[int], Field(fail_fast=True)]], Field(max_length=MAX_PROMPTS, fail_fast=True)]
    )
    max_tokens: Annotated[int, Field(ge=0)] = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False

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
    messages: Annotated[list[Message], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(Strict):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: Annotated[list[int], Field(max_length=MAX_TOKENS, fail_fast=True)]
