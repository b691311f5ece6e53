"""Reads records of conversations and texts from files in the layouts that people have.
Imports no torch.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from forerun.errors import DataError, first_line

Message = dict[str, Any]  # ``{"role": ..., "content": ...}``, and what else the chat template reads (``tool_calls``...)

SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "function", "function_response", "observation"), "tool"),
    **dict.fromkeys(("system", "developer"), "system"),
}
"""These names are ShareGPT's ``from`` and ``role`` of each speaker; chat templates know no
developer, who is their system.
"""
NAMES = ("id", "conversation_id", "uuid", "question_id", "task_id")
"""An entry may be named by one of these keys."""
EXAMPLES_KEPT = 5
Made = TypeVar("Made")


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One entry of an input file. Exactly one of `messages`, `text` and `tokens` is
    filled.
    """

    where: str
    id: str  # The entry's own, else the file's name and the line
    messages: tuple[Message, ...] = ()  # The conversation, roles translated to those of chat templates
    tools: tuple[Mapping[str, Any], ...] = ()  # JSON schemas of the tools that the conversation may call
    plain: bool = False  # The entry has texts without roles: 'prompt', 'question' or 'turns'
    pair: tuple[str, str] | None = None  # Prompt and completion, where the entry was that; `messages` says the same
    text: str = ""
    tokens: tuple[int, ...] = ()  # The text in token ids, as a server recorded it (`forerun serve --record-traffic`)
    vocabulary: str = ""  # sha256 of the tokenizer's that `tokens` are of
    prompt_tokens: int = 0  # First tokens of `text` or `tokens` that were given to the writer, so they do not count
    category: str = ""  # Category that the entry names, or its source
    truncated: bool = False  # The last answer was cut off by a limit: its end is not the writer's


@dataclass(kw_only=True, slots=True)
class BadRecords:
    """The way to treat entries that cannot be used: stop at the first, or keep the
    rest and count.
    """

    skip: bool
    remedy: str = " (--skip-bad leaves such entries out and keeps the rest)"
    count: int = 0
    examples: list[str] = field(default_factory=list)

    def report(self, complaint: str) -> None:
        """Record a bad entry; DataError if those are not to be skipped."""
        if not self.skip:
            raise DataError(f"{complaint}{self.remedy}")
        self.count += 1
        if len(self.examples) < EXAMPLES_KEPT:
            self.examples.append(complaint)


def read_records(path: Path, bad: BadRecords) -> Iterator[Record]:
    """Read every record of one file, in order.

    DataError if the file, or an entry that `bad` does not skip, is not usable.
    ``.jsonl``/``.ndjson``: one JSON object per line. ``.json``: an array of objects, one object, or
    lines after all. ``.parquet``: one record per row. Anything else is plain text, one record for
    the whole file.
    """
    return (record for record, _ in usable_records(path, bad, lambda record: None))


def read_entries(rows: Iterable[Any], name: str, bad: BadRecords) -> Iterator[Record]:
    """Read the records of rows that are no file's, such as a data set's; errors as in
    `read_records`.
    """
    entries = ((f"row {number}", number, row) for number, row in enumerate(rows, start=1))
    return (record for record, _ in _usable(entries, name, bad, lambda record: None))


def usable_records(path: Path, bad: BadRecords, make: Callable[[Record], Made]) -> Iterator[tuple[Record, Made]]:
    """Read records, each with what `make` makes of it; one that it refuses with a `DataError` is
    bad.
    """
    if not path.is_file():
        what = "is a directory; name the files in it" if path.is_dir() else "does not exist"
        raise DataError(f"data file {path} {what}")
    if path.stat().st_size == 0:
        raise DataError(f"data file {path} is empty")
    readers = {".jsonl": _json_lines, ".ndjson": _json_lines, ".json": _json, ".parquet": _parquet}
    yield from _usable(readers.get(path.suffix.lower(), _text)(path, bad), str(path), bad, make)


def _usable(
    entries: Iterable[Entry], source: str, bad: BadRecords, make: Callable[[Record], Made]
) -> Iterator[tuple[Record, Made]]:
    any_entry, skipped_before, short = False, bad.count, Path(source).name
    for name, number, value in entries:
        any_entry, where = True, f"{source}, {name}" if name else source
        try:
            record = _record(value, where, f"{short}:{number}" if name else short)
            _check_characters(record)
            made = make(record)
        except DataError as error:
            bad.report(f"{where}: {error}")
        else:
            yield record, made
    if not any_entry and bad.count == skipped_before:
        raise DataError(f"data file {source} holds no record")


Entry = tuple[str, int, Any]  # Name in an error ("line 3"; empty where the file is one entry), number, value


def _text(path: Path, _bad: BadRecords) -> Iterator[Entry]:
    text = _read_text(path)
    if not text.strip():
        raise DataError(f"data file {path} holds nothing but white space")
    yield "", 0, {"text": text}


def _json_lines(path: Path, bad: BadRecords) -> Iterator[Entry]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield f"line {number}", number, json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
                except (ValueError, RecursionError) as error:
                    bad.report(f"{path}, line {number}: broken JSON ({first_line(error)})")


def _json(path: Path, bad: BadRecords) -> Iterator[Entry]:
    text = _read_text(path)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        try:
            json.loads(text.lstrip().split("\n", 1)[0])
        except json.JSONDecodeError:
            raise DataError(f"{path}, line {error.lineno}: broken JSON ({error.msg})") from error
        yield from _json_lines(path, bad)
        return
    entries = value if isinstance(value, list) else [value]
    yield from ((f"record {number}", number, entry) for number, entry in enumerate(entries, start=1))


def _parquet(path: Path, _bad: BadRecords) -> Iterator[Entry]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise DataError(f"reading {path} needs pyarrow; install it with: pip install 'forerun[train]'") from error
    try:
        with parquet.ParquetFile(path) as file:
            rows = (row for batch in file.iter_batches(batch_size=256) for row in batch.to_pylist())
            yield from ((f"row {number}", number, row) for number, row in enumerate(rows, start=1))
    except importlib.import_module("pyarrow").ArrowInvalid as error:
        raise DataError(f"{path} is no readable parquet file ({first_line(error)})") from error


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 ({first_line(error)}); expected .jsonl, .json, .parquet or text"
        ) from error


def _record(value: Any, where: str, fallback_id: str) -> Record:
    if not isinstance(value, Mapping):
        raise DataError(f"expected a JSON object, got {type(value).__name__}")
    # Parquet fills what a row lacks with None.
    entry = {key: item for key, item in value.items() if item is not None}
    name = next((str(entry[key]) for key in NAMES if key in entry), fallback_id)
    common: dict[str, Any] = {
        "where": where,
        "id": name,
        "category": str(entry.get("category", entry.get("source", ""))),
        "truncated": bool(entry.get("truncated", False)),
    }
    messages, pair = _conversation(entry)
    if messages:
        system = entry.get("system") or entry.get("system_prompt")
        if system and messages[0]["role"] != "system":
            messages = (_message({"role": "system", "content": system}, 0), *messages)
            pair = None
        if any(message["role"] == "user" and not message["content"].strip() for message in messages):
            raise DataError("a prompt, a message of the user, is blank; expected something to answer")
        plain = not {"messages", "conversations"} & entry.keys() and not isinstance(entry.get("prompt"), list)
        return Record(**common, messages=messages, tools=_tools(entry.get("tools")), plain=plain, pair=pair)
    if "token_ids" in entry:
        return Record(**common, **_read_recorded(entry))
    if "text" not in entry:
        raise DataError(
            f"no usable key among {sorted(map(str, entry))}; expected one of: 'messages' (role/content), "
            "'conversations' (from/value), 'turns' (what a user asks), 'question' with or without 'answer' or "
            "'response', 'prompt' with 'completion' or 'response', 'text'"
        )
    text, count = entry["text"], entry.get("prompt_tokens", 0)
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"'text' must be a string that is not blank, got {str(text)[:80]!r}")
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise DataError(f"'prompt_tokens' must be a whole number of tokens, at least 0, got {count!r}")
    return Record(**common, text=text, prompt_tokens=count)


def _read_recorded(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a record that a server has written."""
    prompt, answer = (_token_ids(entry, name) for name in ("prompt_token_ids", "token_ids"))
    if not isinstance(entry.get("vocabulary"), str):
        raise DataError("token ids need 'vocabulary', the sha256 that says of which tokenizer they are")
    return {"tokens": (*prompt, *answer), "prompt_tokens": len(prompt), "vocabulary": entry["vocabulary"]}


def _token_ids(entry: Mapping[str, Any], name: str) -> list[int]:
    ids = entry.get(name)
    if not isinstance(ids, list) or not ids or not all(type(token) is int and token >= 0 for token in ids):
        raise DataError(f"{name!r} must be a list of token ids that is not empty")
    return ids


def own_tokens(record: Record, vocabulary: str) -> list[int]:
    """Return a record's token ids; DataError where they are of another tokenizer than the one with this vocabulary."""
    if record.vocabulary != vocabulary:
        raise DataError("the token ids were recorded with another tokenizer; name the target that the server served")
    return list(record.tokens)


def _check_characters(record: Record) -> None:
    """Raise DataError for halves of surrogate pairs, which JSON can say (``\\ud800``) and which are
    no characters.
    """
    for text in (record.text, *(message["content"] for message in record.messages)):
        try:
            str(text).encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"character {error.start + 1} is half of a surrogate pair, U+{ord(str(text)[error.start]):X}, which "
                "stands for no character; whoever wrote the file cut a text in the middle of one"
            ) from error


def _conversation(entry: Mapping[str, Any]) -> tuple[tuple[Message, ...], tuple[str, str] | None]:
    """Return the messages of an entry, none where it is no conversation, with prompt and
    completion, where it was that.
    """
    for key in ("messages", "conversations"):
        if key in entry:
            return _messages(entry[key], key), None
    if "turns" in entry:
        return _turns(entry["turns"]), None
    if "question" in entry:
        asked = _pair(entry["question"], entry.get("answer", entry.get("response")))
        return _messages(asked, "question"), None
    return _from_pair(entry) if "prompt" in entry else ((), None)


def _tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    """Return the list of JSON schemas, also from its text; nothing is an empty list."""
    try:
        tools = json.loads(value) if isinstance(value, str) and value else value or []
    except (ValueError, RecursionError) as error:
        raise DataError(f"'tools' is text, but no JSON ({first_line(error)}); expected a list of tools") from error
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise DataError(f"'tools' must be a list of objects, or the JSON text of one; got {str(tools)[:80]!r}")
    return tuple(tools)


def _messages(value: Any, key: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise DataError(f"{key!r} must be a list of at least one message")
    return tuple(_message(message, number) for number, message in enumerate(value, start=1))


def _turns(value: Any) -> tuple[Message, ...]:
    """Return what a user asks one after the other, as in MT-Bench, Spec-Bench and SPEED-Bench."""
    if not isinstance(value, list) or not value or not all(isinstance(turn, str) and turn for turn in value):
        raise DataError("'turns' must be a list of at least one string, none of them empty")
    return tuple({"role": "user", "content": turn} for turn in value)


def _pair(question: Any, answer: Any) -> list[Message]:
    """Return a question and, where there is one, its answer, as in GSM8K and OpenOrca."""
    answered = [] if answer is None else [{"role": "assistant", "content": answer}]
    return [{"role": "user", "content": question}, *answered]


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
    calls = {"tool_calls": _calls(message.pop("tool_calls"), number)} if "tool_calls" in message else {}
    return {"role": role, "content": _join_parts(content, number), **message, **calls}


def _join_parts(content: Any, number: int) -> str:
    """Return the text of a message: a string, or the parts of one, as OpenAI has them."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise DataError(f"the content of message {number} must be a string, got {type(content).__name__}")
    texts = list[str]()
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise DataError(f"message {number} has a part of the type {kind!r}; expected parts of the type 'text'")
        texts.append(part["text"])
    return "".join(texts)


def _calls(value: Any, number: int) -> list[dict[str, Any]]:
    """Return tool calls as chat templates read them: their arguments, which OpenAI has as JSON
    text, are objects.
    """
    calls = list[dict[str, Any]]()
    for call in value if isinstance(value, list) else [value]:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise DataError(f"'tool_calls' of message {number} must be a list of objects, got {str(value)[:80]!r}")
        calls.append(dict(call))
        if isinstance(arguments := function.get("arguments"), str):
            read = {**function, "arguments": _arguments(arguments, number)}
            calls[-1] = {**call, "function": read} if "function" in call else read
    return calls


def _arguments(text: str, number: int) -> dict[str, Any]:
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"message {number} calls a tool with arguments that are no JSON ({first_line(error)})"
        ) from error
    if not isinstance(arguments, dict):
        raise DataError(f"message {number} calls a tool with arguments that are no JSON object: {text[:80]!r}")
    return arguments


def _from_pair(entry: Mapping[str, Any]) -> tuple[tuple[Message, ...], tuple[str, str] | None]:
    """Return prompt and completion, each a string or a list of messages; a prompt alone is a
    conversation to be answered.
    """
    prompt, completion = entry["prompt"], entry.get("completion", entry.get("response"))
    plain, answered = isinstance(prompt, str), isinstance(completion, str)
    if not plain and not isinstance(prompt, list):
        raise DataError(f"'prompt' must be a string, or a list of messages, got {str(prompt)[:80]!r}")
    messages: tuple[Message, ...] = ({"role": "user", "content": prompt},) if plain else _messages(prompt, "prompt")
    if answered:
        messages += ({"role": "assistant", "content": completion},)
    elif completion:
        messages += _messages(completion, "completion")
    return messages, (prompt, completion) if plain and answered else None
