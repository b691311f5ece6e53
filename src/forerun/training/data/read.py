"""Input files of every usual kind to one kind of record: a conversation, a prompt with its completion, or plain text.

Knows file formats and key names. Knows no tokenizer and does not judge what a conversation says.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forerun.errors import DataError

Message = dict[str, Any]
"""``{"role": ..., "content": ...}`` and whatever else the chat template reads (``tool_calls``, ``name``...)."""

JSON_LINES = (".jsonl", ".ndjson")
SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
    "function_call": "assistant",
}
"""Who is meant by ShareGPT's ``from``, and by ``role``."""
COMPLETIONS = ("completion", "response")
LISTS = ("messages", "conversations")
IDS = ("id", "conversation_id", "uuid")
EXPECTED = (
    "one of: 'messages' (role/content), 'conversations' (from/value), 'prompt' with 'completion' or 'response', 'text'"
)
EXAMPLES_KEPT = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One entry of an input file. Exactly one of `messages` and `text` is filled."""

    where: str
    """File and line (or record number), as errors name it."""
    id: str
    """The entry's own id, else the file's name and the line."""
    messages: tuple[Message, ...] = ()
    """The conversation, roles translated to those of chat templates."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas of the tools that the conversation may call."""
    pair: tuple[str, str] | None = None
    """Prompt and completion as plain strings, where the entry was such a pair; `messages` then says the same."""
    text: str = ""
    """Plain text."""
    prompt_tokens: int = 0
    """Tokens at the beginning of `text` that were given to the writer, so they do not count."""
    truncated: bool = False
    """The last answer was cut off by a limit: its end is not the writer's."""


@dataclass(kw_only=True, slots=True)
class BadRecords:
    """What to do with entries that cannot be used: stop at the first, or keep the rest and count."""

    skip: bool
    """True keeps going."""
    count: int = 0
    """Entries left out so far."""
    examples: list[str] = field(default_factory=list)
    """The first few complaints."""

    def report(self, complaint: str) -> None:
        """Take note of a bad entry.

        Raises:
            DataError: bad entries are not to be skipped.
        """
        if not self.skip:
            raise DataError(f"{complaint} (--skip-bad leaves such entries out and keeps the rest)")
        self.count += 1
        if len(self.examples) < EXAMPLES_KEPT:
            self.examples.append(complaint)


def read_records(path: Path, bad: BadRecords) -> Iterator[Record]:
    """Every record of one file, in order.

    ``.jsonl``/``.ndjson``: one JSON object per line. ``.json``: an array of objects, one object, or lines after all.
    ``.parquet``: one record per row. Anything else is plain text, one record for the whole file.

    Raises:
        DataError: the file is missing, empty or not what its name says; or an entry is bad and `bad` does not skip.
    """
    if not path.is_file():
        what = "is a directory; name the files in it" if path.is_dir() else "does not exist"
        raise DataError(f"data file {path} {what}")
    if path.stat().st_size == 0:
        raise DataError(f"data file {path} is empty")
    suffix = path.suffix.lower()
    if suffix in JSON_LINES:
        yield from _records(_json_lines(path, bad), path, bad)
    elif suffix == ".json":
        yield from _records(_json(path, bad), path, bad)
    elif suffix == ".parquet":
        yield from _records(_parquet(path), path, bad)
    else:
        text = _read_text(path)
        if not text.strip():
            raise DataError(f"data file {path} holds nothing but white space")
        yield Record(where=str(path), id=path.name, text=text)


Entry = tuple[str, int, Any]
"""How to name the place in an error ("line 3"), its number, and the value found there."""


def _records(entries: Iterator[Entry], path: Path, bad: BadRecords) -> Iterator[Record]:
    found, skipped_before = False, bad.count
    for place, number, value in entries:
        found = True
        where = f"{path}, {place}"
        try:
            record = _record(value, where, f"{path.name}:{number}")
        except DataError as error:
            bad.report(f"{where}: {error}")
            continue
        yield record
    if not found and bad.count == skipped_before:
        raise DataError(f"data file {path} holds no record")


def _json_lines(path: Path, bad: BadRecords) -> Iterator[Entry]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                value = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except (ValueError, RecursionError) as error:
                bad.report(f"{path}, line {number}: broken JSON ({_brief(error)})")
                continue
            yield f"line {number}", number, value


def _json(path: Path, bad: BadRecords) -> Iterator[Entry]:
    text = _read_text(path)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        if not _is_json(text.lstrip().split("\n", 1)[0]):
            raise DataError(f"{path}, line {error.lineno}: broken JSON ({error.msg})") from error
        yield from _json_lines(path, bad)
        return
    entries = value if isinstance(value, list) else [value]
    yield from ((f"record {number}", number, entry) for number, entry in enumerate(entries, start=1))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except json.JSONDecodeError:
        return False
    return True


def _parquet(path: Path) -> Iterator[Entry]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise DataError(f"reading {path} needs pyarrow; install it with: pip install 'forerun[train]'") from error
    try:
        with parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=256):
                for value in batch.to_pylist():
                    number += 1
                    yield f"row {number}", number, value
    except importlib.import_module("pyarrow").ArrowInvalid as error:
        raise DataError(f"{path} is no readable parquet file ({_brief(error)})") from error


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text ({_brief(error)}); known kinds: .jsonl, .json, .parquet, text"
        ) from error


def _brief(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _record(value: Any, where: str, fallback_id: str) -> Record:
    if not isinstance(value, Mapping):
        raise DataError(f"expected a JSON object, got {type(value).__name__}")
    # Parquet fills what a row lacks with None.
    entry = {key: item for key, item in value.items() if item is not None}
    name = next((str(entry[key]) for key in IDS if key in entry), fallback_id)
    tools = tuple(entry.get("tools") or ()) if isinstance(entry.get("tools"), list) else ()
    truncated = bool(entry.get("truncated", False))
    for key in LISTS:
        if key in entry:
            return Record(where=where, id=name, messages=_messages(entry[key], key), tools=tools, truncated=truncated)
    if "prompt" in entry:
        messages, pair = _from_pair(entry)
        return Record(where=where, id=name, messages=messages, tools=tools, pair=pair, truncated=truncated)
    if "text" in entry:
        return Record(where=where, id=name, text=_text(entry), prompt_tokens=_count(entry), truncated=truncated)
    raise DataError(f"no usable key among {sorted(map(str, entry))}; expected {EXPECTED}")


def _messages(value: Any, key: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise DataError(f"{key!r} must be a list of at least one message")
    return tuple(_message(message, number) for number, message in enumerate(value, start=1))


def _message(value: Any, number: int) -> Message:
    if not isinstance(value, Mapping):
        raise DataError(f"message {number} must be an object, got {type(value).__name__}")
    message = {key: item for key, item in value.items() if item is not None}
    speaker = message.pop("from", None) or message.pop("role", None)
    role = SPEAKERS.get(str(speaker).lower())
    if role is None:
        raise DataError(f"message {number} is from {speaker!r}; expected one of {', '.join(SPEAKERS)}")
    content = message.pop("value", None) if "value" in message else message.pop("content", None)
    if content is None and not message.get("tool_calls"):
        raise DataError(f"message {number} ({role}) has no content")
    if content is not None and not isinstance(content, str | list):
        raise DataError(f"the content of message {number} must be a string, got {type(content).__name__}")
    return {"role": role, "content": "" if content is None else content, **message}


def _from_pair(entry: Mapping[str, Any]) -> tuple[tuple[Message, ...], tuple[str, str] | None]:
    """Prompt and completion, each a string or a list of messages; a prompt alone is a conversation to be answered."""
    prompt = entry["prompt"]
    completion = next((entry[key] for key in COMPLETIONS if key in entry), None)
    if not isinstance(prompt, str):
        rest = completion if isinstance(completion, list) else []
        messages = _messages(prompt, "prompt") + (_messages(rest, "completion") if rest else ())
        if isinstance(completion, str):
            messages += ({"role": "assistant", "content": completion},)
        return messages, None
    question: Message = {"role": "user", "content": prompt}
    if completion is None:
        return (question,), None
    if not isinstance(completion, str):
        return (question, *_messages(completion, "completion")), None
    return (question, {"role": "assistant", "content": completion}), (prompt, completion)


def _text(entry: Mapping[str, Any]) -> str:
    text = entry["text"]
    if not isinstance(text, str) or not text:
        raise DataError(f"'text' must be a string that is not empty, got {type(text).__name__}")
    return text


def _count(entry: Mapping[str, Any]) -> int:
    count = entry.get("prompt_tokens", 0)
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise DataError(f"'prompt_tokens' must be a whole number of tokens, at least 0, got {count!r}")
    return count
