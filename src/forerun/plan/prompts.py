"""Reads files of a user's prompts. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forerun.errors import DataError

UserPrompt = str | Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""A `UserPrompt` is a text, a prompt as the engine takes it, or the messages of a conversation whose last turn is
wanted.
"""


def read_prompts(path: Path) -> list[UserPrompt]:
    """Return the prompts of a file, empty lines left out; DataError if it holds none, or something
    else.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read prompts from {path}: {error}") from error
    filled = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not filled:
        raise DataError(f"{path} holds no prompts; one a line is expected, or JSON lines with 'prompt' or 'messages'")
    if path.suffix not in (".jsonl", ".ndjson"):
        return [line for _, line in filled]
    return [_from_json(line, f"{path}:{number}") for number, line in filled]


def _from_json(line: str, where: str) -> UserPrompt:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where} is not JSON: {error}") from error
    fields = record if isinstance(record, dict) else {}
    text, messages = fields.get("prompt"), fields.get("messages")
    if isinstance(text, str) and text.strip():
        return text
    if isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages):
        # The last message of an assistant is left out: the target writes it itself.
        return messages[:-1] if messages[-1].get("role") == "assistant" else messages
    raise DataError(f"{where} needs 'prompt' (a string that is not blank) or 'messages' (a list), got {line[:60]!r}")
