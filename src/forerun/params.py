"""`SamplingParams` and `StructuredOutputs` say how one request is to be completed. Imports no torch."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from forerun.errors import ArgumentError, name_unknown_arguments, refuse

if TYPE_CHECKING:
    from torch import Tensor

GREEDY_BELOW = 1e-5  # Temperatures below this are 0, as in vLLM: logits divided by less leave float32
MAX_TEMPERATURE = 1e4  # Larger ones are refused: all tokens are equally likely long before

NEUTRAL: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""These values hold where neither the request nor the checkpoint sets one; a checkpoint may set
these alone.
"""

LogitsProcessor = Callable[[Sequence[int], "Tensor"], "Tensor"]
"""A user's processor maps (all token ids so far, logits (V,) float32) to logits (V,).

It must be a function of these alone.
"""


_STRUCTURED = "structured_outputs=StructuredOutputs(...) takes json, json_object, regex, choice or grammar"
_NO_BEAMS = "there is no beam search; n=... draws several completions"
_ALL_LOGPROBS = "logprobs=-1 and prompt_logprobs=-1 give those of the whole vocabulary"
_WHITESPACE = "the schema or grammar alone says where whitespace may be"

INSTEAD = {
    "best_of": "n=... gives several completions, of which cumulative_logprob tells the likeliest",
    "early_stopping": _NO_BEAMS,
    "extra_args": "nothing reads it; a function in logits_processors may hold arguments of its own",
    "flat_logprobs": "log-probabilities are lists of dicts",
    **{f"guided_{kind}": _STRUCTURED for kind in ("decoding", "json", "json_object", "regex", "choice", "grammar")},
    "length_penalty": _NO_BEAMS,
    "logprob_token_ids": _ALL_LOGPROBS,
    "output_kind": "stream() yields the tokens of each step, generate() returns the whole output",
    "prompt_embeds": "a prompt is text or token ids",
    "prompt_logprob_start": _ALL_LOGPROBS,
    "prompt_logprob_token_ids": _ALL_LOGPROBS,
    "repetition_detection": "repetition_penalty makes repetitions unlikely, max_tokens ends them",
    "skip_clone": "parameters cannot be changed, so that none are copied",
    "spaces_between_special_tokens": "the tokenizer decides on them",
    "stream_interval": "stream() yields the tokens of each step",
    "use_beam_search": _NO_BEAMS,
    "watermarking": "nothing is watermarked",
}
"""Arguments of vLLM's `SamplingParams` map to what takes their place."""


@name_unknown_arguments(
    {
        "disable_additional_properties": "write additionalProperties: false into the JSON schema",
        "disable_any_whitespace": _WHITESPACE,
        "structural_tag": "grammar=... says the same in Lark's notation",
        "whitespace_pattern": _WHITESPACE,
    }
)
@dataclass(frozen=True, kw_only=True, slots=True)
class StructuredOutputs:
    """The form that the completion must have: exactly one of these fields is set. Names are vLLM's, which calls the
    class `StructuredOutputsParams`.
    """

    json: Mapping[str, Any] | str | None = None  # A JSON schema
    json_object: bool = False  # Any JSON object
    regex: str | None = None
    choice: Sequence[str] | None = None  # One of these strings
    grammar: str | None = None  # In Lark's notation, as llguidance reads it

    def __post_init__(self) -> None:
        for name in ("json", "regex", "grammar"):
            value, kinds, words = getattr(self, name), (str, Mapping) if name == "json" else str, "a string"
            if value is not None and not isinstance(value, kinds):
                raise ArgumentError(f"{name} must be {words}{' or a dict' * (name == 'json')}, got {_show(value)}")
        _check_flags(self, "json_object")
        if self.choice is not None and not _are_strings(self.choice):
            raise ArgumentError(f"choice must be a list of strings, got {_show(self.choice)}")
        if self.choice is not None and not list(self.choice):
            raise ArgumentError("choice is empty; give at least one string that the completion may be")
        given = [self.json, self.json_object or None, self.regex, self.choice, self.grammar]
        if sum(value is not None for value in given) != 1:
            raise ArgumentError("structured outputs take exactly one of json, json_object, regex, choice, grammar")


StructuredOutputsParams = StructuredOutputs  # As vLLM calls it


@name_unknown_arguments(INSTEAD)
@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """The sampling parameters of one request; names and meaning are vLLM's.

    ``None`` takes what the checkpoint's ``generation_config.json`` says, else the neutral value. Processors
    apply in this order: allowed tokens, bad words, min tokens, logit bias, penalties, user processors,
    temperature, min-p, top-k, top-p.
    """

    n: int = 1  # Completions per prompt
    temperature: float | None = None  # 0, or anything below 1e-5, is greedy and reads as 0.0; neutral 1, at most 10,000
    top_p: float | None = None  # Keep the smallest set of tokens whose mass reaches this, in (0, 1]
    top_k: int | None = None  # Keep the k likeliest tokens; 0 or -1 keeps all
    min_p: float | None = None  # Drop tokens less likely than this share of the likeliest, in [0, 1]
    repetition_penalty: float | None = None  # Divides (below zero: multiplies) logits of tokens so far; 1 is neutral
    presence_penalty: float = 0.0  # Logits subtracted once from every token in the output
    frequency_penalty: float = 0.0  # Logits subtracted per occurrence in the output
    logit_bias: Mapping[int, float] | None = None  # Added to the logits of these token ids; "5" is read as 5
    allowed_token_ids: Sequence[int] | None = None  # Only these token ids may be produced
    bad_words: Sequence[str] | None = None  # Strings that may not be produced as a token sequence
    logits_processors: Sequence[LogitsProcessor] = ()
    structured_outputs: StructuredOutputs | None = None
    """The form of the completion, which may be a dict of its fields; needs llguidance (extra ``serve``)."""
    seed: int | None = None  # 64 bits: same seed, same text, whoever else is in the batch. None draws one
    stop: str | Sequence[str] | None = None  # End the completion; cut off the text unless `include_stop_str_in_output`
    stop_token_ids: Sequence[int] | None = None  # Token ids that end the completion, besides the model's own
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16  # vLLM's default; None: to the end of the context; 0: only read the prompt
    min_tokens: int = 0  # Output tokens before any stop token id may be produced
    logprobs: int | None = None  # Log-probabilities of the chosen and of this many likeliest tokens; -1: of all
    prompt_logprobs: int | None = None  # The same for the prompt's tokens, always of the raw logits
    truncate_prompt_tokens: int | None = None  # Read only this many last ones; -1: what fits beside `max_tokens`
    logprobs_mode: str = "raw_logprobs"  # Before any processor; ``processed_logprobs``: of what was sampled from,
    # at temperature 0 of the processed logits, as vLLM has it
    allow_biased: bool = False
    """Give ``processed_logprobs`` also where a lossy rule verifies: they are the target's then, and the completion was
    not sampled from them.
    """
    detokenize: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name, value in _convert_types(self).items():
            object.__setattr__(self, name, value)
        _check_sampling(self)
        if self.temperature is not None and self.temperature < GREEDY_BELOW:
            object.__setattr__(self, "temperature", 0.0)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def clone(self) -> SamplingParams:
        """Return a copy."""
        return replace(self)

    def sealed(self) -> SamplingParams:
        """Return these parameters with read-only copies of their lists and dicts."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in values.items():
            if isinstance(value, list | dict):
                values[name] = tuple(value) if isinstance(value, list) else MappingProxyType(dict(value))
        return replace(self, **values)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


def token_ids(name: str, given: Any) -> list[int]:
    """Return a list, array or tensor of integers as a list of Python's own; an ArgumentError for
    anything else.
    """
    given = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(given, Iterable) and not isinstance(given, str | bytes | bytearray | Mapping):
        given = list(given)
        with suppress(TypeError):
            if not any(
                isinstance(each, bool) for each in given
            ):  # Which are integers to Python, and mistakes to people
                return list(map(operator.index, given))
    raise ArgumentError(f"{name} must be token ids, a list or array of integers, got {_show(given)}")


def _show(value: Any) -> str:
    return f"{value!r:.60} ({type(value).__name__})"


_WHOLE = ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "truncate_prompt_tokens")
_FLAGS = ("include_stop_str_in_output", "ignore_eos", "allow_biased", "detokenize", "skip_special_tokens")
_REAL = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def _convert_types(params: SamplingParams) -> dict[str, Any]:
    """Return integers and token ids as Python's own, where they are NumPy's or torch's.

    ArgumentError: a value is of another type than it must be.
    """
    converted = dict[str, Any]()
    for name in (*_WHOLE, *_REAL):
        value = getattr(params, name)
        whole = name in _WHOLE
        if value is None:
            continue
        if not isinstance(value, Real) or (whole and not isinstance(value, Integral)):
            raise ArgumentError(f"{name} must be {'an integer' if whole else 'a number'}, got {_show(value)}")
        converted[name] = operator.index(getattr(params, name)) if whole else value
    for name in ("allowed_token_ids", "stop_token_ids"):
        value = getattr(params, name)
        ids = None if value is None else token_ids(name, value)
        if not isinstance(value, Sequence):
            converted[name] = ids
    for name in ("stop", "bad_words"):
        value = getattr(params, name)
        if value is not None and not (isinstance(value, str) and name == "stop") and not _are_strings(value):
            raise ArgumentError(f"{name} must be a list of strings, got {_show(value)}")
    _check_flags(params, *_FLAGS)
    if (bias := params.logit_bias) is not None and (numbers := _bias(bias)).keys() != bias.keys():
        converted["logit_bias"] = numbers
    processors: Any = params.logits_processors if params.logits_processors is not None else ()
    if not isinstance(processors, Iterable) or not all(map(callable, processors)):
        raise ArgumentError(f"logits_processors must be a list of functions, got {_show(processors)}")
    outputs: Any = params.structured_outputs
    if not (outputs is None or isinstance(outputs, StructuredOutputs | Mapping)):
        raise ArgumentError(f"structured_outputs must be StructuredOutputs, or a dict of it, got {_show(outputs)}")
    converted["structured_outputs"] = StructuredOutputs(**outputs) if isinstance(outputs, Mapping) else outputs
    return {**converted, "logits_processors": processors}


def _check_flags(settings: object, *names: str) -> None:
    for name in names:
        if (value := getattr(settings, name)) not in (True, False, None):
            raise ArgumentError(f"{name} must be True or False, got {_show(value)}")


def _bias(given: Any) -> dict[int, float]:
    """Return biases by token id, where ids may be strings of digits, as in JSON. Raises ArgumentError for others."""
    if isinstance(given, Mapping) and all(isinstance(value, Real) for value in given.values()):
        keys = [int(key) if isinstance(key, str) and key.isdecimal() else key for key in given]
        with suppress(ArgumentError):
            return dict(zip(token_ids("logit_bias", keys), given.values(), strict=True))
    raise ArgumentError(f"logit_bias must map token ids to numbers, got {_show(given)}")


def _are_strings(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str) and all(isinstance(one, str) for one in value)


_BOUNDS: dict[str, tuple[float, float, str]] = {
    "n": (1, math.inf, "at least 1"),
    "temperature": (0, MAX_TEMPERATURE, f"in [0, {MAX_TEMPERATURE:g}], 0 is greedy"),
    "top_p": (math.ulp(0), 1, "in (0, 1]"),
    "top_k": (-1, math.inf, "-1 or 0 (off) or at least 1"),
    "min_p": (0, 1, "in [0, 1]"),
    "repetition_penalty": (1e-4, 1e4, "in [0.0001, 10000]"),
    "presence_penalty": (-2, 2, "in [-2, 2]"),
    "frequency_penalty": (-2, 2, "in [-2, 2]"),
    "max_tokens": (0, math.inf, "0 or more"),
    "min_tokens": (0, math.inf, "0 or more"),
    "logprobs": (-1, math.inf, "0 or more, or -1 for the whole vocabulary"),
    "prompt_logprobs": (-1, math.inf, "0 or more, or -1 for the whole vocabulary"),
    "seed": (-(2**63), 2**64 - 1, "from -2**63 to 2**64 - 1"),
}
"""These are the least and the most that each parameter may be, unless it is None, and the same in
words.
"""


def _check_sampling(params: SamplingParams) -> None:
    if None in (params.n, params.min_tokens, params.presence_penalty, params.frequency_penalty):
        raise ArgumentError("n, min_tokens, presence_penalty and frequency_penalty must be numbers, got None")
    for name, (least, most, words) in _BOUNDS.items():
        value = getattr(params, name)
        if value is not None and not least <= value <= most:
            raise ArgumentError(f"{name} must be {words}, got {value}")
    kept = params.truncate_prompt_tokens
    modes = ("raw_logprobs", "processed_logprobs")
    refuse(
        (
            params.max_tokens is not None and params.min_tokens > params.max_tokens,
            "min_tokens must not exceed max_tokens",
        ),
        (
            kept is not None and kept < 1 and kept != -1,
            f"truncate_prompt_tokens must be at least 1, or -1 for what fits, got {kept}",
        ),
        (params.stop is not None and not all(params.stop_strings), "stop strings must not be empty"),
        (
            params.stop_strings and not params.detokenize,
            "stop strings are only supported when detokenize is True, as they are looked for in the text; use "
            "stop_token_ids",
        ),
        (
            params.allowed_token_ids is not None and not len(params.allowed_token_ids),
            "allowed_token_ids must not be empty",
        ),
        (
            not all(bias < math.inf for bias in (params.logit_bias or {}).values()),
            "logit_bias must hold finite numbers, or -inf for a ban",
        ),
        (
            params.logprobs_mode not in modes,
            f"logprobs_mode must be {modes[0]!r} or {modes[1]!r}, got {params.logprobs_mode!r}",
        ),
    )


def begun(text: str, marks: Iterable[str]) -> int:
    """Return the length of the longest end of `text` that is a proper beginning of one of `marks`."""
    beginnings = (mark[:length] for mark in marks for length in range(1, len(mark)))
    return max((len(beginning) for beginning in beginnings if text.endswith(beginning)), default=0)
