"""Parameters that both completion endpoints share, and the parts of their answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from forerun.types import StructuredOutputs

MAX_STOPS = 16
"""Stop strings of one request; OpenAI allows 4."""
MAX_STOP_CHARACTERS = 256


class Strict(BaseModel):
    """Refuses parameters that it does not know, and values of another type."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Strict):
    """OpenAI's ``stream_options``."""

    include_usage: bool = False


class Prediction(Strict):
    """OpenAI's Predicted Outputs: what the client expects the answer to be."""

    type: Literal["content"] = "content"
    content: str | list[TextPart]

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


class Structured(Strict):
    """vLLM's ``structured_outputs``."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    json_object: bool = False
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

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
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    seed: int | None = None
    n: Annotated[int, Field(ge=1)] = 1
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0)] = 0
    skip_special_tokens: bool = True
    response_format: ResponseFormat | None = None
    structured_outputs: Structured | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    prediction: Prediction | None = None
    speculative: Speculation | None = None
    return_speculation_trace: bool = False
    """Every step of the answer (drafted, kept, probabilities, times) under ``speculation_trace``."""
    user: str | None = None
    """OpenAI's opaque name of an end user: rows are shared evenly among those who are named."""
    timeout_s: Annotated[float, Field(gt=0)] | None = None
    """From queueing to the end, seconds; then the answer ends with what there is, finish reason ``abort``."""

    @field_validator("stop")
    @classmethod
    def _stops_in_bounds(cls, value: str | list[str] | None) -> str | list[str] | None:
        stops = [value] if isinstance(value, str) else value or []
        if len(stops) > MAX_STOPS:
            raise ValueError(f"at most {MAX_STOPS} stop strings, got {len(stops)}")
        if any(not 0 < len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
            raise ValueError(f"a stop string has 1 to {MAX_STOP_CHARACTERS} characters")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _bias_names_ids(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        wrong = next((key for key in value or {} if not key.isdecimal()), None)
        if wrong is not None:
            raise ValueError(f"keys are token ids, got {wrong!r}")
        return value


def joined(content: str | list[TextPart]) -> str:
    """A content of one or several text parts as one string."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


Prediction.model_rebuild()
