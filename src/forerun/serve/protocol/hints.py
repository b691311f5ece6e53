"""Parameters that clients send by habit and that change nothing are taken out of a body before it is read."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from forerun.errors import list_some, warn_once

_log = logging.getLogger(__name__)

_READ_WHOLE = "the conversation is read whole, and nothing of it is cleared"
_SHOWN = "reasoning is shown as it was written, and not summarised"
_TERSE = "no chat template reads it; say in a message how long the answer is to be"
_SAME = "the server does so without it"

HINTS: Mapping[str, str] = {
    "service_tier": "all requests are served alike; --max-num-seqs and API keys share the rows",
    "prompt_cache_key": "prompts that begin alike are found without it",
    "prompt_cache_retention": "prompts that begin alike are found for as long as there is room",
    "safety_identifier": "nobody is told who asks",
    "verbosity": _TERSE,
    "text.verbosity": _TERSE,
    "reasoning.summary": _SHOWN,
    "reasoning.generate_summary": _SHOWN,
    "context_management": _READ_WHOLE,
    "stream_options.include_obfuscation": "streams are not padded",
}
"""Each hint of which any value is taken, by its place in a body, and why it changes nothing."""

ACCEPTED: Mapping[str, tuple[Sequence[Any], str]] = {
    "store": ([True], "no response is kept that could be fetched later"),  # False is a field: it is not recorded
    "include": (
        [
            "reasoning.encrypted_content",
            "web_search_call.action.sources",
            "web_search_call.results",
            "file_search_call.results",
            "code_interpreter_call.outputs",
            "computer_call_output.output.image_url",
            "message.input_image.image_url",
        ],
        "what it names does not exist here: nothing is encrypted, and no tool runs here",
    ),
    "modalities": (["text"], _SAME),
    "functions": ([], _SAME),  # The deprecated form of `tools`
    "function_call": (["none", "auto"], _SAME),
    "suffix": ([""], _SAME),
    "truncation": (["disabled"], _SAME),
    "speed": (["standard"], _SAME),
    **dict.fromkeys(("background", "use_beam_search", "early_stopping"), ([False], _SAME)),
    **dict.fromkeys(("post_sampling_probs", "timings_per_token", "return_progress"), ([False], _SAME)),
    **dict.fromkeys(("spaces_between_special_tokens", "cache_prompt"), ([True], _SAME)),
    **dict.fromkeys(("best_of", "length_penalty", "typical_p", "tfs_z"), ([1], _SAME)),
    **dict.fromkeys(("mirostat", "dry_multiplier", "xtc_probability", "dynatemp_range"), ([0], _SAME)),
    **dict.fromkeys(("min_keep", "n_probs"), ([0], _SAME)),
    "id_slot": ([-1], _SAME),
}
"""Hints only with such values, or with lists of such values, and why; others of their values are refused."""

_REASONS = {**HINTS, **{name: why for name, (_, why) in ACCEPTED.items()}}


def drop_hints(body: Any) -> Any:
    """Return a body without its hints, each of which is told once in the log."""
    for name, why in _REASONS.items() if isinstance(body, dict) else ():
        *outer, last = name.split(".")
        holder = body
        for part in outer:
            holder = holder.get(part) if isinstance(holder, dict) else None
        if isinstance(holder, dict) and last in holder and _is_hint(name, holder[last]):
            given = holder.pop(last)
            if given is not None:  # By a null a client says that it sets nothing
                note_hint(name, why)
    return body


def note_hint(name: str, why: str) -> None:
    """Write once into the log that clients send a hint, and why it changes nothing."""
    warn_once(_log, f"hint {name}", "requests send %s, which changes nothing: %s", name, why, level=logging.INFO)


def list_accepted(name: str) -> str:
    """Return the values of a parameter that are taken, as JSON in words; an empty string if it is not in `ACCEPTED`."""
    return list_some([*map(json.dumps, ACCEPTED[name][0])] or ["[]"], 10) if name in ACCEPTED else ""


def _is_hint(name: str, value: Any) -> bool:
    if name not in ACCEPTED:
        return True
    return all(one in ACCEPTED[name][0] for one in (value if isinstance(value, list) else [value]) if one is not None)
