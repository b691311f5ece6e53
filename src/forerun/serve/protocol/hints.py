"""Hints that clients send by habit, and that change nothing here: they are taken out of a body before it is read."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from forerun.errors import warn_once

_log = logging.getLogger(__name__)

_READ_WHOLE = "the conversation is read whole, and nothing of it is cleared"
_SHOWN = "reasoning is shown as it was written, and not summarised"
_TERSE = "no chat template reads it; say in a message how long the answer is to be"

HINTS: Mapping[str, str] = {
    "store": "no response is kept that could be fetched later",
    "service_tier": "all requests are served alike; --max-num-seqs and API keys share the rows",
    "prompt_cache_retention": "prompts that begin alike are found for as long as there is room",
    "verbosity": _TERSE,
    "text.verbosity": _TERSE,
    "include": "what it names does not exist here: nothing is encrypted, and no tool runs here",
    "reasoning.summary": _SHOWN,
    "reasoning.generate_summary": _SHOWN,
    "context_management": _READ_WHOLE,
    "stream_options.include_obfuscation": "streams are not padded",
}
"""Each hint by its place in a body, and why it changes nothing. Any value of theirs is taken, but for `_ONLY`."""

_ONLY: Mapping[str, Collection[Any]] = {
    "store": (True,),  # False keeps a conversation out of recorded traffic
    "include": (
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
        "file_search_call.results",
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "message.input_image.image_url",
    ),
}
"""These are hints only with such values, or with lists of such values."""


def drop_hints(body: Any) -> Any:
    """Return a body without its hints, each of which is told once in the log."""
    for name, why in HINTS.items() if isinstance(body, dict) else ():
        *outer, last = name.split(".")
        holder = body
        for part in outer:
            holder = holder.get(part) if isinstance(holder, dict) else None
        if isinstance(holder, dict) and last in holder and _is_hint(name, holder[last]):
            note_hint(name, why)
            del holder[last]
    return body


def note_hint(name: str, why: str) -> None:
    """Write once into the log that clients send a hint, and why it changes nothing."""
    warn_once(_log, f"hint {name}", "requests send %s, which changes nothing: %s", name, why, level=logging.INFO)


def _is_hint(name: str, value: Any) -> bool:
    if name not in _ONLY:
        return True
    return all(one in _ONLY[name] for one in (value if isinstance(value, list) else [value]) if one is not None)
