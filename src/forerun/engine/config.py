"""What a user may say about speculation, in vLLM's words and in ours, as one typed value. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forerun.drafters import AUTO, entry_named, methods
from forerun.errors import ArgumentError

MAX_SPECULATIVE_TOKENS = 128
"""Larger K is refused: no drafter is that good, and the tree mask grows with its square."""

_ALIASES = {
    "drafter": "method",
    "ngram_prompt_lookup_max": "prompt_lookup_max",
    "ngram_prompt_lookup_min": "prompt_lookup_min",
    "rejection_sample_method": "rule",
    "suffix_decoding_max_tree_depth": "max_tree_depth",
    "suffix_decoding_max_cached_requests": "max_cached_requests",
    "suffix_decoding_max_spec_factor": "max_spec_factor",
    "suffix_decoding_min_token_prob": "min_token_prob",
    "max_matching_ngram_size": "prompt_lookup_max",
}
_RULE_ALIASES = {"strict": "token_rejection", "standard": "token_rejection"}


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculativeConfig:
    """Which drafter, how far ahead, and how it is judged."""

    method: str
    num_speculative_tokens: int | None = None
    """Most drafted tokens on one path; None takes the method's own default."""
    rule: str | None = None
    """A verification rule by name; None takes the best for how the draft was drawn."""
    adaptive: bool | None = None
    """Let the controller decide how much to draft, or nothing; None: for the method ``auto`` alone."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The method's own options."""

    @classmethod
    def parse(cls, given: Mapping[str, Any] | str | SpeculativeConfig | None) -> SpeculativeConfig | None:
        """From a dict, from JSON, or from vLLM's ``speculative_config``; None and ``{"enabled": False}`` mean off.

        Raises:
            ArgumentError: no method can be inferred, or a value is out of range.
        """
        if given is None or isinstance(given, SpeculativeConfig):
            return given
        if isinstance(given, str):
            given = _from_json(given)
        values = {_ALIASES.get(key, key): value for key, value in given.items()}
        if not values.pop("enabled", True):
            return None
        method = _method(values)
        tokens = values.pop("num_speculative_tokens", None)
        if tokens is not None and not (isinstance(tokens, int) and 1 <= tokens <= MAX_SPECULATIVE_TOKENS):
            raise ArgumentError(
                f"num_speculative_tokens must be a whole number from 1 to {MAX_SPECULATIVE_TOKENS}, got {tokens!r}"
            )
        rule = values.pop("rule", None)
        return cls(
            method=method,
            num_speculative_tokens=tokens,
            rule=_RULE_ALIASES.get(rule, rule),
            adaptive=_adaptive(values.pop("adaptive", None), method),
            options=values,
        )

    @property
    def controlled(self) -> bool:
        """Whether the controller decides."""
        return self.method == AUTO if self.adaptive is None else self.adaptive

    @property
    def drafter_options(self) -> dict[str, Any]:
        """What the drafter's `Config` is built from."""
        tokens = {} if self.num_speculative_tokens is None else {"num_speculative_tokens": self.num_speculative_tokens}
        return {**tokens, **self.options}

    @property
    def key(self) -> str:
        """The same for configurations that can share one drafter; what drafting costs is kept under it."""
        options = {name: _plain(value) for name, value in sorted(self.drafter_options.items())}
        return f"{self.method}:{json.dumps(options, sort_keys=True)}"


def _adaptive(value: Any, method: str) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise ArgumentError(f"adaptive is true or false, got {value!r}")
    if value is False and method == AUTO:
        raise ArgumentError(f"{AUTO} is adaptive by nature; name a drafter to draft the same at every step")
    return value


def from_old_keywords(keywords: dict[str, Any]) -> dict[str, Any] | None:
    """The keywords of older vLLM tutorials as a ``speculative_config``; takes them out of `keywords`.

    ``speculative_model="[ngram]"`` or a model directory, ``num_speculative_tokens``, ``ngram_prompt_lookup_max`` and
    ``ngram_prompt_lookup_min``.
    """
    old = ("speculative_model", "num_speculative_tokens", "ngram_prompt_lookup_max", "ngram_prompt_lookup_min")
    found = {name: keywords.pop(name) for name in old if keywords.get(name) is not None}
    if not found:
        return None
    model = found.pop("speculative_model", None)
    if model is None:
        raise ArgumentError(f"{', '.join(found)} given without speculative_model; use speculative_config={{...}}")
    return {"method": "ngram", **found} if model == "[ngram]" else {"model": model, **found}


def _from_json(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ArgumentError(
            f"the speculative configuration is not JSON ({error.msg} at character {error.pos}); expected for example "
            '{"method": "ngram", "num_speculative_tokens": 8}'
        ) from None
    if not isinstance(value, dict):
        raise ArgumentError(f"the speculative configuration must be a JSON object, got {type(value).__name__}")
    return value


def _method(values: dict[str, Any]) -> str:
    method = values.pop("method", None)
    model = values.get("model")
    if method is None and model in ("ngram", "[ngram]"):
        method = "ngram"
    if method == "ngram" and model in ("ngram", "[ngram]"):
        del values["model"]
    if method is None and model is not None:
        method = "draft_model"
    if method is None:
        raise ArgumentError(f"the speculative configuration names no method; there are {', '.join(methods())}")
    entry_named(str(method))
    return str(method)


def _plain(value: Any) -> Any:
    """Something JSON knows; objects (a loaded model, say) are told apart by identity."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in sorted(value.items())}
    return value if isinstance(value, str | int | float | bool | type(None)) else f"{type(value).__name__}@{id(value)}"
