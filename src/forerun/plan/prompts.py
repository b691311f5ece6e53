"""Reads the prompts to plan for: one a line, or JSON lines with ``prompt`` or ``messages``. Knows no tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forerun.errors import DataError

JSON_LINES = (".jsonl", ".ndjson")
UserPrompt = str | Sequence[Mapping[str, Any]]
"""A text, or the messages of a conversation whose last answer is wanted."""


def read_prompts(path: Path) -> list[UserPrompt]:
    """The prompts of a file, empty lines left out.

    Raises:
        DataError: it cannot be read, holds none, or a line of JSON has neither ``prompt`` nor ``messages``.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read prompts from {path}: {error}") from error
    filled = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not filled:
        raise DataError(f"{path} holds no prompts; one a line is expected, or JSON lines with 'prompt' or 'messages'")
    if path.suffix not in JSON_LINES:
        return [line for _, line in filled]
    return [_from_json(line, f"{path}:{number}") for number, line in filled]


def _from_json(line: str, where: str) -> UserPrompt:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where} is not JSON: {error}") from error
    fields = record if isinstance(record, dict) else {}
    text, messages = fields.get("prompt"), fields.get("messages")
    if isinstance(text, str):
        return text
    if isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages):
        # What an assistant said last is what the target shall write itself.
        asked: list[dict[str, Any]] = messages[:-1] if messages[-1].get("role") == "assistant" else messages
        return asked
    raise DataError(f"{where} needs 'prompt' (a string) or 'messages' (a list), got {line[:60]!r}")
