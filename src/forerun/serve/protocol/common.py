"""Parameters that both completion endpoints share, and the parts of their answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema

from forerun.engine.grammar import MAX_CHOICES
from forerun.types import StructuredOutputs

MAX_STOPS = 16
"""Stop strings of one request; OpenAI allows 4."""
MAX_STOP_CHARACTERS = 256
MAX_BAD_WORDS = 1024
MAX_TOKEN_IDS = 10_000
"""Token ids of a bias, of what is allowed, and of what stops."""
MAX_NAME_CHARACTERS = 512
"""Of a name that a client chooses."""
MAX_PARTS = 1024
"""Parts of one message."""

Name = Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)]
"""What a client calls something."""
Salt = Annotated[str, Field(min_length=1, max_length=256)]
"""vLLM's ``cache_salt``."""
TokenIds = Annotated[list[int], Field(max_length=MAX_TOKEN_IDS, fail_fast=True)]
Phrase = Annotated[str, Field(max_length=MAX_STOP_CHARACTERS)]
"""Searched for at every token."""


class Strict(BaseModel):
    """Refuses parameters that it does not know, and values of another type.

    ``null`` is a field that is left out: many clients send all that they know of. Only what must be there must not be
    null.
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
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        found = handler(schema)
        described = handler.resolve_ref_schema(found)
        for name, own in described.get("properties", {}).items():
            if name not in described.get("required", ()):
                described["properties"][name] = _nullable(own)
        return found


class StreamOptions(Strict):
    """OpenAI's ``stream_options``, with vLLM's `continuous_usage_stats`."""

    include_usage: bool = False
    """A last chunk with the counts."""
    continuous_usage_stats: bool = False
    """Counts so far in every chunk."""
    include_obfuscation: Literal[False] = False


class Prediction(Strict):
    """OpenAI's Predicted Outputs: what the client expects the answer to be."""

    type: Literal["content"] = "content"
    content: str | Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)]

    @property
    def text(self) -> str:
        """All of it as one string."""
        return joined(self.content)


class TextPart(Strict):
    """A part of a message's content; this server reads text."""

    type: Literal["text"]
    text: str


class Speculation(Strict):
    """How this request is to be drafted, within the operator's limits. A drafter's other options are the operator's."""

    enabled: bool = True
    drafter: str | None = None
    """A drafter's name; None takes the server's own."""
    num_speculative_tokens: Annotated[int, Field(ge=1)] | None = None
    rule: str | None = None


class JsonSchema(Strict):
    """OpenAI's ``json_schema`` of a response format."""

    name: str
    schema_: Annotated[dict[str, Any], Field(alias="schema")] = {}
    description: str | None = None
    strict: bool | None = None
    """Always strict here."""


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
        """The same in the engine's words; None for text."""
        if self.json_schema is not None:
            return StructuredOutputs(json=self.json_schema.schema_)
        return StructuredOutputs(json_object=True) if self.type == "json_object" else None


JsonForm = dict[str, Any] | str | None
RegexForm = str | None
ChoiceForm = Annotated[list[str], Field(max_length=MAX_CHOICES, fail_fast=True)] | None
GrammarForm = str | None


class Structured(Strict):
    """vLLM's ``structured_outputs``."""

    json_: Annotated[JsonForm, Field(alias="json")] = None
    json_object: bool = False
    regex: RegexForm = None
    choice: ChoiceForm = None
    grammar: GrammarForm = None

    def structured(self) -> StructuredOutputs:
        """The same in the engine's words."""
        return StructuredOutputs(
            json=self.json_,
            json_object=self.json_object,
            regex=self.regex,
            choice=self.choice,
            grammar=self.grammar,
        )


class Sampling(Strict):
    """What `forerun.SamplingParams` is made of, in OpenAI's and vLLM's words."""

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
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """vLLM's: log-probabilities of the prompt's tokens, each with so many of the likeliest in its place."""
    truncate_prompt_tokens: Annotated[int, Field(ge=1, le=2**31)] | Literal[-1] | None = None
    """vLLM's: read only the prompt's last tokens; -1: as many as fit."""
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0)] = 0
    skip_special_tokens: bool = True
    response_format: ResponseFormat | None = None
    structured_outputs: Structured | None = None
    guided_json: JsonForm = None
    """vLLM's older names of what `structured_outputs` holds."""
    guided_regex: RegexForm = None
    guided_choice: ChoiceForm = None
    guided_grammar: GrammarForm = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    prediction: Prediction | None = None
    speculative: Speculation | None = None
    return_speculation_trace: bool = False
    """Every step of the answer (drafted, kept, probabilities, times) under ``speculation_trace``."""
    return_token_ids: bool = False
    """vLLM's: the ids of the prompt's and the answer's tokens."""
    return_tokens_as_token_ids: bool = False
    """vLLM's: log-probabilities name tokens ``token_id:ID``, which tells apart what has the same text."""
    priority: Annotated[int, Field(ge=-(2**31), le=2**31)] = 0
    """vLLM's: of a client's waiting requests the one with the lowest comes first."""
    user: Name | None = None
    """OpenAI's opaque name of an end user: an API key's share of the rows is shared evenly among its users."""
    cache_salt: Salt | None = None
    """Nothing is shared with requests of another salt, nor with other API keys in any case."""
    timeout_s: Annotated[float, Field(gt=0)] | None = None
    """From queueing to the end, seconds; then the answer ends with what there is, finish reason ``abort``."""

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
    """The schema of a value that may be null, too."""
    options = schema.get("anyOf", [])
    if {"type": "null"} in options:
        return schema
    outer: dict[str, Any] = {key: schema[key] for key in ("title", "description", "default") if key in schema}
    inner = {key: value for key, value in schema.items() if key not in outer}
    return {**outer, "anyOf": [*options, {"type": "null"}] if options else [inner, {"type": "null"}]}


def joined(content: str | list[TextPart]) -> str:
    """A content of one or several text parts as one string."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


Prediction.model_rebuild()
