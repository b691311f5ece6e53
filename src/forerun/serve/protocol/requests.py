"""These are the bodies of OpenAI's completion endpoints, with vLLM's parameters, and of
``/tokenize`` and ``/detokenize``.

Parameters that clients send by habit, and that change nothing here, are `hints`: no body has them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from forerun.engine.grammar import MAX_CHOICES
from forerun.errors import ArgumentError, about, refuse
from forerun.nesting import MAX_DEPTH, nesting
from forerun.serve.tools.base import NO_PARAMETERS, Function
from forerun.types import StructuredOutputs

MAX_STOPS = 16  # Stop strings of one request; OpenAI allows 4
MAX_STOP_CHARACTERS = 256
MAX_BAD_WORDS = 1024
MAX_TOKEN_IDS = 10_000  # Token ids of a bias, of what is allowed, and of what stops
MAX_NAME_CHARACTERS = 512  # Longest name that a client may choose
MAX_PARTS = 1024  # Parts of one message

Name = Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)]  # A name that the client chooses
Salt = Annotated[str, Field(min_length=1, max_length=256)]  # vLLM's ``cache_salt``
RequestId = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]  # As the header ``X-Request-Id`` may be
TokenIds = Annotated[list[int], Field(max_length=MAX_TOKEN_IDS, fail_fast=True)]
Phrase = Annotated[str, Field(max_length=MAX_STOP_CHARACTERS)]  # Searched for at every token


class Strict(BaseModel):
    """A body that refuses parameters that it does not know, and values of another type.

    ``null`` is a field that is left out: many clients send all that they know of. Only what must be
    there must not be null.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict) or all(own is not None for own in value.values()):
            return value
        required = {field.alias or name for name, field in cls.model_fields.items() if field.is_required()}
        return {key: own for key, own in value.items() if own is not None or key in required}

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> dict[str, Any]:
        reference: dict[str, Any] = handler(schema)
        described = handler.resolve_ref_schema(reference)
        for name, property_schema in described.get("properties", {}).items():
            if name not in described.get("required", ()):
                described["properties"][name] = _nullable(property_schema)
        return reference


class StreamOptions(Strict):
    """OpenAI's ``stream_options``, with vLLM's `continuous_usage_stats`."""

    include_usage: bool = False  # A last chunk with the counts
    continuous_usage_stats: bool = False  # Counts so far in every chunk


class TextPart(Strict):
    """A part of a message's content; this server reads text."""

    type: Literal["text"]
    text: str


class Prediction(Strict):
    """OpenAI's Predicted Outputs: what the client expects the completion to be."""

    type: Literal["content"] = "content"
    content: str | Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)]


class Speculation(Strict):
    """The drafting of this request, within the operator's limits. A drafter's other options are the operator's."""

    enabled: bool = True
    drafter: str | None = None  # A drafter's name; None takes the server's own
    num_speculative_tokens: Annotated[int, Field(ge=1)] | None = None
    rule: str | None = None


class JsonSchema(Strict):
    """OpenAI's ``json_schema`` of a response format."""

    name: str
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None  # Always strict here


class ResponseFormat(Strict):
    """OpenAI's ``response_format``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _complete(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("type 'json_schema' needs json_schema, and only that type takes one")
        return self

    def structured(self) -> StructuredOutputs | None:
        """Return the same in the engine's words; None for text."""
        if self.json_schema is not None:
            return StructuredOutputs(json=self.json_schema.schema_)
        return StructuredOutputs(json_object=True) if self.type == "json_object" else None


JsonForm = dict[str, Any] | str | None
ChoiceForm = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)] | None


class Structured(Strict):
    """vLLM's ``structured_outputs``."""

    json_: Annotated[JsonForm, Field(alias="json")] = None
    json_object: bool = False
    regex: str | None = None
    choice: ChoiceForm = None
    grammar: str | None = None

    def structured(self) -> StructuredOutputs:
        """Return the same in the engine's words."""
        return StructuredOutputs(**self.model_dump(by_alias=True))


MaxTokens = Annotated[int, Field(ge=-1), AfterValidator(lambda value: None if value == -1 else value)]
"""0 only reads the prompt; -1, which is None when it is read, is no limit, as in vLLM and llama-server."""


class Neutral(Strict):
    """The parameters of all of OpenAI's endpoints that change nothing here."""

    store: Literal[False] = False  # Who sends it is not recorded to train on
    metadata: Annotated[dict[Annotated[str, Field(max_length=64)], Name], Field(max_length=16)] | None = None
    """Metadata for what is kept; ``/v1/responses`` gives it back."""


class Sampling(Neutral):
    """The fields that `forerun.SamplingParams` is made of, in OpenAI's and vLLM's words."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=1e-4, le=1e4)] | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_TOKEN_IDS)] | None
    ) = None
    bad_words: Annotated[list[Phrase], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] | None = None
    allowed_token_ids: TokenIds | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    n: Annotated[int, Field(ge=1)] = 1
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None  # vLLM's: of the prompt, this many likeliest each
    truncate_prompt_tokens: Annotated[int, Field(ge=1, le=2**31)] | Literal[-1] | None = None  # Its last; -1: what fits
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0)] = 0
    skip_special_tokens: bool = True
    response_format: ResponseFormat | None = None
    structured_outputs: Structured | None = None
    guided_json: JsonForm = None  # vLLM's older names of what `structured_outputs` holds
    guided_regex: str | None = None
    guided_choice: ChoiceForm = None
    guided_grammar: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    prediction: Prediction | None = None
    speculative: Speculation | None = None
    return_speculation_trace: bool = False  # Every step: what was drafted and accepted, probabilities, times
    return_token_ids: bool = False  # vLLM's: the ids of the prompt's and the answer's tokens
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] | None = None  # vLLM's; None: as the server says
    allow_biased: bool = False  # Give processed log-probabilities where a lossy rule verifies: they are the target's
    return_tokens_as_token_ids: bool = False  # vLLM's: log-probabilities name tokens ``token_id:ID``, never two alike
    priority: Annotated[int, Field(ge=-(2**31), le=2**31)] = 0  # vLLM's: of a client's waiting the lowest comes first
    request_id: RequestId | None = None  # vLLM's: the answer's id ends with it; None: drawn at random
    user: Name | None = None  # An end user's opaque name: a key's share of the rows is shared evenly among its users
    cache_salt: Salt | None = None  # Nothing is shared with another salt, nor with other API keys in any case
    timeout_s: Annotated[float, Field(gt=0)] | None = (
        None  # Seconds from queueing; then the completion ends (``abort``)
    )

    @field_validator("stop")
    @classmethod
    def _stops_in_bounds(cls, value: str | list[str] | None) -> str | list[str] | None:
        stops = [value] if isinstance(value, str) else value or []
        if any(not 0 < len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
            raise ValueError(f"a stop string has 1 to {MAX_STOP_CHARACTERS} characters")
        return value

    @field_validator("stream_options")
    @classmethod
    def _needs_stream(cls, value: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if value is not None and not info.data.get("stream"):
            raise ValueError("needs stream: true")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _bias_names_ids(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        wrong = next((key for key in value or {} if not (key.isdecimal() and len(key) < 10)), None)
        if wrong is not None:
            raise ValueError(f"keys are token ids, got {wrong[:64]!r}")
        return value


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    if {"type": "null"} in schema.get("anyOf", ()):
        return schema
    outer: dict[str, Any] = {key: schema[key] for key in ("title", "description", "default") if key in schema}
    inner = {key: value for key, value in schema.items() if key not in outer}
    return {**outer, "anyOf": [inner, {"type": "null"}]}


def join_text(content: str | Sequence[Strict]) -> str:
    """Return the text of a content as one string, whatever other parts it has."""
    return content if isinstance(content, str) else "".join(getattr(part, "text", "") for part in content)


def json_of(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the `response_format` of JSON of that schema."""
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}


def choose_function(name: str) -> dict[str, Any]:
    """Return the `tool_choice` of that function."""
    return {"type": "function", "function": {"name": name}}


# --- tools ---

MAX_TOOLS = 128  # Tools of one request, as OpenAI has it, and calls of one message
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]  # Nothing that could be taken for a mark


def _a_schema(value: dict[str, Any]) -> dict[str, Any]:
    properties, required = value.get("properties", {}), value.get("required", [])
    if not isinstance(properties, dict) or not all(
        isinstance(property_schema, dict | bool) for property_schema in properties.values()
    ):
        raise ValueError("properties is an object of schemas")
    if not isinstance(required, list):
        raise ValueError("required is a list of names")
    if not all(
        isinstance(property_schema.get("enum", []), list)
        for property_schema in properties.values()
        if isinstance(property_schema, dict)
    ):
        raise ValueError("enum is a list of values")
    return value


Schema = Annotated[dict[str, Any], AfterValidator(_a_schema)]  # JSON schema of a function's arguments


class FunctionDefinition(Strict):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: Schema | None = None  # Without them the function takes no arguments
    strict: bool | None = None

    def function(self) -> Function:
        """Return the function without the description for the model."""
        return Function(self.name, self.parameters or NO_PARAMETERS, bool(self.strict))


class Tool(Strict):
    """One of ``tools``."""

    type: Literal["function"]
    function: FunctionDefinition

    def plain(self) -> dict[str, Any]:
        """Return the tool as chat templates read it, without `strict`, which the model need not
        know.
        """
        found = self.model_dump(exclude_unset=True, exclude={"function": {"strict"}})
        found["function"].setdefault("parameters", {"type": "object", "properties": {}})
        return found


class NamedFunction(Strict):
    """Names a function."""

    name: Name


class NamedChoice(Strict):
    """A ``tool_choice`` that names the function to call."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Strict):
    """The tools that may be called, and whether one must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class AllowedChoice(Strict):
    """A ``tool_choice`` that allows some of the tools; the model is shown all."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedChoice | AllowedChoice


class FunctionCall(Strict):
    """A call's function and arguments."""

    name: Name
    arguments: str  # A JSON object as text

    @field_validator("arguments")
    @classmethod
    def _an_object(cls, value: str) -> str:
        if (depth := nesting(value).depth) > MAX_DEPTH:
            raise ValueError(f"nested {depth} levels deep, at most {MAX_DEPTH} are read")
        try:
            is_object = isinstance(json.loads(value or "{}"), dict)
        except ValueError:
            is_object = False
        if not is_object:
            raise ValueError("the text of a JSON object is expected")
        return value


class ToolCall(Strict):
    """A call that the model made earlier in the conversation."""

    id: Name
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None  # Clients that put a stream together leave it there

    @classmethod
    def of(cls, call_id: str, name: str, arguments: str) -> ToolCall:
        """Return a call with those arguments, JSON text."""
        return cls(id=call_id, function=FunctionCall(name=name, arguments=arguments))

    def plain(self) -> dict[str, Any]:
        """Return the call as `LLM.chat_prompt` reads it."""
        return self.model_dump(exclude={"index"})


# --- conversations and bodies ---

MAX_MESSAGES = 4096
MAX_TOKENS = 200_000  # That are made into text at once
MAX_PROMPTS = 4096  # That one request may hold whatever the server's queue; `--max-queue` limits it further
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Thinking(Strict):
    """The choice whether the model reasons before its final text, in the words of Anthropic, DeepSeek and others."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None  # Anthropic's goal; here `max_tokens` alone bounds it
    display: Literal["summarized"] = "summarized"  # Reasoning is shown as it is


class Message(Strict):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    """Only an assistant's content may be missing, where it has called tools."""
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None  # An assistant's
    tool_call_id: Name | None = None  # Id of the call that a tool's message answers
    reasoning_content: str | None = None  # An assistant's; whether the model reads it again is its template's choice
    reasoning: str | None = None  # The same under vLLM's newer name
    annotations: Annotated[list[Any], Field(max_length=MAX_PARTS)] | None = None  # Clients send back what they got

    @model_validator(mode="after")
    def _fits_its_role(self) -> Message:
        refuse(
            (
                self.content is None and not (self.role == "assistant" and self.tool_calls),
                "content is missing; only an assistant's message with tool_calls may have none",
            ),
            (self.role != "assistant" and self.tool_calls, "only an assistant's message has tool_calls"),
            (
                (self.role == "tool") != (self.tool_call_id is not None),
                "a message of role 'tool' needs tool_call_id, and no other has one",
            ),
            error=ValueError,
        )
        return self

    def plain(self) -> dict[str, Any]:
        """Return the message as `LLM.chat_prompt` reads it; chat templates know no developer, who is their system."""
        message = self.model_dump(include={"content"})
        message["role"] = "system" if self.role == "developer" else self.role
        if self.tool_calls:
            message["tool_calls"] = [call.plain() for call in self.tool_calls]
        reasoning = self.reasoning_content or self.reasoning
        more = {"name": self.name, "tool_call_id": self.tool_call_id, "reasoning_content": reasoning}
        return message | {key: value for key, value in more.items() if value is not None}


class ChatRequest(Sampling):
    """``POST /v1/chat/completions`` takes this body."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None  # None is ``auto`` where there are tools
    parallel_tool_calls: bool = True  # False: at most one call
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's: more variables of the template (``enable_thinking``)
    reasoning_effort: ReasoningEffort | None = None  # A variable of the chat template, where it has it
    thinking: Thinking | None = None  # Switches the chat template's reasoning, where it can be switched
    add_generation_prompt: bool | None = None  # vLLM's: opens the completion; None: unless the last message goes on
    continue_final_message: bool = False  # vLLM's: the completion continues the last message
    add_special_tokens: Literal[False] = False  # The chat template writes them
    include_reasoning: bool = True  # vLLM's: whether the response shows the reasoning

    @property
    def offered(self) -> list[Tool]:
        """Return the tools that the model is shown: none where it must not call any."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def callable_tools(self) -> list[Tool]:
        """Return the tools that the model may call: those that `tool_choice` names, or all."""
        names = self.chosen
        return [tool for tool in self.offered if names is None or tool.function.name in names]

    @property
    def chosen(self) -> list[str] | None:
        """Return the functions that `tool_choice` names; None where it names none."""
        if isinstance(self.tool_choice, NamedChoice):
            return [self.tool_choice.function.name]
        if isinstance(self.tool_choice, AllowedChoice):
            return [tool.function.name for tool in self.tool_choice.allowed_tools.tools]
        return None

    @property
    def must_call(self) -> bool:
        """Return whether the completion has to be a call."""
        if isinstance(self.tool_choice, AllowedChoice):
            return self.tool_choice.allowed_tools.mode == "required"
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedChoice)

    @property
    def many_calls(self) -> bool:
        """Return whether the completion may hold several calls; a function that is named is called
        once.
        """
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
            raise ValueError(
                "the completion continues the last message or begins anew; leave add_generation_prompt out"
            )
        return value


class CompletionRequest(Sampling):
    """``POST /v1/completions`` takes this body."""

    prompt: (
        str
        | Annotated[list[int], Field(fail_fast=True)]
        | Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True)]
        | Annotated[list[Annotated[list[int], Field(fail_fast=True)]], Field(max_length=MAX_PROMPTS, fail_fast=True)]
    )
    max_tokens: MaxTokens | None = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False
    add_special_tokens: Literal[True] = True

    @property
    def prompts(self) -> list[str | list[int]]:
        """Return one or several prompts, each text or token ids."""
        if isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)


class TokenizeRequest(Strict):
    """``POST /tokenize`` takes a text, or a conversation as the model reads it."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True  # A conversation ends with what opens the completion
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            with about("prompt"):
                raise ArgumentError("give either prompt or messages")
        if self.messages is None and "add_generation_prompt" in self.model_fields_set:
            with about("add_generation_prompt"):
                raise ArgumentError("add_generation_prompt belongs to messages; leave it out beside prompt")
        return self


class LoadDrafterRequest(Strict):
    """``POST /v1/load_drafter`` takes a directory on the server's machine."""

    model: Annotated[str, Field(min_length=1)]


class UpdateWeightsRequest(Strict):
    """``POST /update_weights_from_disk`` takes a checkpoint on the server's machine; SGLang's words."""

    model_path: Annotated[str, Field(min_length=1)]
    mode: Literal["wait", "abort"] = "wait"  # What becomes of the completions that run
    abort_all_requests: bool = False  # As `mode` "abort"
    weight_version: Name | None = None  # What ``GET /get_weight_version`` says from then on; None: the path
    load_format: Literal["auto", "safetensors"] = "auto"
    flush_cache: Literal[True] = True
    is_async: Literal[False] = False
    keep_pause: Literal[False] = False


class DetokenizeRequest(Strict):
    """``POST /detokenize`` takes token ids."""

    model: str | None = None
    tokens: Annotated[list[int], Field(max_length=MAX_TOKENS, fail_fast=True)]
