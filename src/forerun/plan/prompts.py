"""Reads files of a user's prompts. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from forerun.errors import DataError
from forerun.training.data.records import BadRecords, Record, read_records

UserPrompt = str | Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""A `UserPrompt` is a text, a prompt as the engine takes it, or the messages of a conversation whose last turn is
wanted.
"""


_RECORDS = (".jsonl", ".ndjson", ".json", ".parquet")


def read_prompts(path: Path) -> list[UserPrompt]:
    """Return the prompts of a file: those of its records, in all layouts of `read_records`, or one a line of plain
    text, empty lines left out. DataError if it holds none, or something else.
    """
    if not path.is_file():
        raise DataError(f"cannot read prompts from {path}: there is no such file")
    if path.suffix.lower() in _RECORDS:
        return [_asked(record) for record in read_records(path, BadRecords(skip=False, remedy=""))]
    try:
        filled = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read prompts from {path}: {error}") from error
    if not filled:
        raise DataError(f"{path} holds no prompts; one a line is expected, or JSON lines with 'prompt', 'messages' ...")
    return list(filled)


def _asked(record: Record) -> UserPrompt:
    """Return the prompt of a record: a conversation ends before its last answer, or where a question has none."""
    if record.tokens:
        return {"prompt_token_ids": list(record.tokens[: record.prompt_tokens])}
    if record.text:
        return record.text
    roles = [message["role"] for message in record.messages]
    unanswered = (place for place, pair in enumerate(pairwise(roles), start=1) if pair == ("user", "user"))
    messages = record.messages[: next(unanswered, len(roles) - (roles[-1] == "assistant"))]
    if "user" not in roles[: len(messages)]:
        raise DataError(f"{record.where}: there is no prompt; expected a message of a user")
    return str(messages[0]["content"]) if record.plain and len(messages) == 1 else list(messages)
