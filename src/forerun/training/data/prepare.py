"""From data files to prepared data: read records, encode them, mark what the assistant wrote, cut, store."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from forerun.errors import ArgumentError, DataError
from forerun.manifests import TokenizerIdentity, digest_of
from forerun.training.data.store import PreparedData, write_prepared

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]  # ``{"role": ..., "content": ...}``, and what else the chat template reads (``tool_calls``...)

SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "function", "function_response", "observation"), "tool"),
    **{"system": "system", "developer": "developer"},
}
"""Who is meant by ShareGPT's ``from``, and by ``role``."""
EXAMPLES_KEPT = 5
Made = TypeVar("Made")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """The prepared data, and why records were left out."""

    data: PreparedData
    complaints: list[str]

    def summary(self) -> dict[str, Any]:
        """Counts and provenance for people and for JSON."""
        manifest = self.data.manifest
        return {
            "output": str(self.data.folder),
            **manifest["counts"],
            "max_length": manifest["max_length"],
            "tokenizer": manifest["tokenizer"]["name"],
            "hash": self.data.hash,
        }


def prepare(
    paths: Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    output: str | Path,
    *,
    max_length: int = 2048,
    split_long: bool = False,
    skip_bad: bool = False,
    last_turn_only: bool = False,
    name: str | None = None,
    on_record: Callable[[int], None] = lambda count: None,
) -> Prepared:
    """Turn data files (JSONL, JSON, parquet or plain text) into a prepared directory, with the target's `tokenizer`;
    the manifest calls it `name`. What is beyond `max_length` tokens is cut off, or split into further documents;
    `on_record` is told the number of records so far, after each. DataError for unusable input, or nothing left to learn
    from; ArgumentError if `output` holds something."""
    if max_length < 2:
        raise ArgumentError(f"max_length must be at least 2 tokens, got {max_length}")
    files = [Path(path) for path in paths]
    if not files:
        raise DataError("no data file was named")
    for index, path in enumerate(files):
        if path.resolve() in {other.resolve() for other in files[:index]}:
            raise DataError(f"data file {path} is named twice")
    encoder, bad = Encoder(tokenizer, last_turn_only=last_turn_only), BadRecords(skip=skip_bad)
    options = {
        "max_length": max_length,
        "split_long": split_long,
        "skip_bad": skip_bad,
        "last_turn_only": last_turn_only,
    }
    # Records understood; of these conversations; those cut or split; documents without a token to learn, after cutting.
    counts = {"records": 0, "conversations": 0, "cut": 0, "dropped": 0}
    sources: list[dict[str, Any]] = []
    about = {"max_length": max_length, "options": options, "sources": sources, "counts": counts}

    def documents() -> Iterator[tuple[list[int], list[bool]]]:
        usable = False
        for path in files:
            before = counts["records"]
            for record, encoded in usable_records(path, bad, encoder.encode):
                counts["records"] += 1
                counts["conversations"] += bool(record.messages)
                counts["cut"] += len(encoded.tokens) > max_length
                for start in range(0, len(encoded.tokens) if split_long else 1, max_length):
                    tokens, mask = encoded.tokens[start : start + max_length], encoded.mask[start : start + max_length]
                    # The first token of a document follows nothing, so it cannot be learned.
                    learned = any(mask[1:])
                    usable = usable or learned
                    counts["dropped"] += not learned
                    if learned:
                        yield tokens, mask
                on_record(counts["records"])
            sources.append({"path": path.name, "sha256": digest_of(path), "records": counts["records"] - before})
        counts["skipped"] = bad.count
        if not usable:
            reasons = f"{bad.count} records were skipped as bad, {counts['dropped']} documents had no token that counts"
            first = f"; the first: {bad.examples[0]}" if bad.examples else ""
            where = files[0] if len(files) == 1 else f"{len(files)} files"
            raise DataError(f"nothing to learn from in {where}: {reasons}{first}")

    data = write_prepared(Path(output), documents(), TokenizerIdentity.of(tokenizer, name), about)
    return Prepared(data=data, complaints=bad.examples)


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One entry of an input file. Exactly one of `messages` and `text` is filled."""

    where: str
    id: str  # The entry's own, else the file's name and the line
    messages: tuple[Message, ...] = ()  # The conversation, roles translated to those of chat templates
    tools: tuple[Mapping[str, Any], ...] = ()  # JSON schemas of the tools that the conversation may call
    pair: tuple[str, str] | None = None  # Prompt and completion, where the entry was that; `messages` says the same
    text: str = ""
    prompt_tokens: int = 0  # Tokens at the beginning of `text` that were given to the writer, so they do not count
    truncated: bool = False  # The last answer was cut off by a limit: its end is not the writer's


@dataclass(kw_only=True, slots=True)
class BadRecords:
    """What to do with entries that cannot be used: stop at the first, or keep the rest and count."""

    skip: bool
    count: int = 0
    examples: list[str] = field(default_factory=list)

    def report(self, complaint: str) -> None:
        """Take note of a bad entry; DataError if those are not to be skipped."""
        if not self.skip:
            raise DataError(f"{complaint} (--skip-bad leaves such entries out and keeps the rest)")
        self.count += 1
        if len(self.examples) < EXAMPLES_KEPT:
            self.examples.append(complaint)


def read_records(path: Path, bad: BadRecords) -> Iterator[Record]:
    """Every record of one file, in order; DataError if the file, or an entry that `bad` does not skip, is not usable.
    ``.jsonl``/``.ndjson``: one JSON object per line. ``.json``: an array of objects, one object, or lines after all.
    ``.parquet``: one record per row. Anything else is plain text, one record for the whole file."""
    return (record for record, _ in usable_records(path, bad, lambda record: None))


def usable_records(path: Path, bad: BadRecords, make: Callable[[Record], Made]) -> Iterator[tuple[Record, Made]]:
    """`read_records`, each with what `make` makes of it; one that it refuses with a `DataError` is bad."""
    if not path.is_file():
        what = "is a directory; name the files in it" if path.is_dir() else "does not exist"
        raise DataError(f"data file {path} {what}")
    if path.stat().st_size == 0:
        raise DataError(f"data file {path} is empty")
    readers = {".jsonl": _json_lines, ".ndjson": _json_lines, ".json": _json, ".parquet": _parquet}
    found, skipped_before = False, bad.count
    for name, number, value in readers.get(path.suffix.lower(), _text)(path, bad):
        found, where = True, f"{path}, {name}" if name else str(path)
        try:
            record = _record(value, where, f"{path.name}:{number}" if name else path.name)
            made = make(record)
        except DataError as error:
            bad.report(f"{where}: {error}")
        else:
            yield record, made
    if not found and bad.count == skipped_before:
        raise DataError(f"data file {path} holds no record")


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
                    bad.report(f"{path}, line {number}: broken JSON ({_brief(error)})")


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
        raise DataError(f"{path} is no readable parquet file ({_brief(error)})") from error


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 ({_brief(error)}); expected .jsonl, .json, .parquet or text") from error


def _brief(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _record(value: Any, where: str, fallback_id: str) -> Record:
    if not isinstance(value, Mapping):
        raise DataError(f"expected a JSON object, got {type(value).__name__}")
    # Parquet fills what a row lacks with None.
    entry = {key: item for key, item in value.items() if item is not None}
    name = next((str(entry[key]) for key in ("id", "conversation_id", "uuid") if key in entry), fallback_id)
    tools = tuple(entry["tools"]) if isinstance(entry.get("tools"), list) else ()
    common: dict[str, Any] = {"where": where, "id": name, "truncated": bool(entry.get("truncated", False))}
    for key in ("messages", "conversations"):
        if key in entry:
            return Record(**common, messages=_messages(entry[key], key), tools=tools)
    if "prompt" in entry:
        messages, pair = _from_pair(entry)
        return Record(**common, messages=messages, tools=tools, pair=pair)
    if "text" not in entry:
        raise DataError(
            f"no usable key among {sorted(map(str, entry))}; expected one of: 'messages' (role/content), "
            "'conversations' (from/value), 'prompt' with 'completion' or 'response', 'text'"
        )
    text, count = entry["text"], entry.get("prompt_tokens", 0)
    if not isinstance(text, str) or not text:
        raise DataError(f"'text' must be a string that is not empty, got {type(text).__name__}")
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise DataError(f"'prompt_tokens' must be a whole number of tokens, at least 0, got {count!r}")
    return Record(**common, text=text, prompt_tokens=count)


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
    prompt, completion = entry["prompt"], entry.get("completion", entry.get("response"))
    plain, answered = isinstance(prompt, str), isinstance(completion, str)
    messages: tuple[Message, ...] = ({"role": "user", "content": prompt},) if plain else _messages(prompt, "prompt")
    if answered:
        messages += ({"role": "assistant", "content": completion},)
    elif completion:
        messages += _messages(completion, "completion")
    return messages, (prompt, completion) if plain and answered else None


MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
NO_TEMPLATE = "a conversation, but the tokenizer has no chat template; use plain text or another target"
_REMEDY = "use a template that marks the assistant's words with {% generation %} ... {% endgeneration %}, or "


class Encoded(NamedTuple):
    """One document before it is cut: its token ids, and of each whether the assistant wrote it."""

    tokens: list[int]
    mask: list[bool]


class Encoder:
    """Encodes records with one tokenizer: token ids and the mask of what the assistant wrote, or only the last answers.

    Where the chat template marks the assistant's words (``{% generation %}``), transformers says which tokens those
    are; where it does not, the conversation is rendered prefix by prefix, and that is refused where prefixes do not fit
    into one another.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, last_turn_only: bool = False) -> None:
        self.tokenizer = tokenizer
        self.last_turn_only = last_turn_only
        self._special = frozenset(int(token) for token in tokenizer.added_tokens_decoder)

    def encode(self, record: Record) -> Encoded:
        """Token ids and mask of a record; DataError without an assistant turn, a chat template, or a usable mask."""
        if not record.messages:
            tokens, given = self._ids(record.text), record.prompt_tokens
            if given >= len(tokens):
                raise DataError(f"all {len(tokens)} tokens of the text are prompt ('prompt_tokens' {given})")
            encoded = Encoded(tokens, [index >= given for index in range(len(tokens))])
        elif not self.tokenizer.chat_template and record.pair is not None:
            prompt, answer = self._ids(record.pair[0]), self._ids(record.pair[1], special=False)
            if self.tokenizer.eos_token_id is not None:
                answer.append(int(self.tokenizer.eos_token_id))
            encoded = Encoded(prompt + answer, [False] * len(prompt) + [True] * len(answer))
        else:
            encoded = self._encode_chat(record)
        if record.truncated:
            # Not counted: the end-of-turn tokens by which the template closed an answer that a limit had cut off.
            last = next((i for i in range(len(encoded.mask) - 1, -1, -1) if encoded.mask[i]), -1)
            while last >= 0 and encoded.mask[last] and encoded.tokens[last] in self._special:
                encoded.mask[last] = False
                last -= 1
        return encoded

    def _encode_chat(self, record: Record) -> Encoded:
        if not self.tokenizer.chat_template:
            raise DataError(NO_TEMPLATE)
        turns = [index for index, message in enumerate(record.messages) if message["role"] == "assistant"]
        if not turns:
            raise DataError("no assistant turn, so there is nothing to learn from (forerun data regenerate writes one)")
        messages = record.messages[: turns[-1] + 1]
        template = self.tokenizer.get_chat_template(tools=list(record.tools) or None)
        if self.last_turn_only or not MARKER.search(template):
            return self._by_prefixes(messages, turns[-1:] if self.last_turn_only else turns, record)
        rendered = self._rendered(messages, record, return_assistant_tokens_mask=True)
        mask = [bool(counted) for counted in rendered["assistant_masks"]]
        if not any(mask):
            raise DataError(
                "the chat template's {% generation %} markers enclose no token of this conversation, "
                "so it gives no usable loss mask; correct the template"
            )
        return Encoded(list(rendered["input_ids"]), mask)

    def _by_prefixes(self, messages: Sequence[Message], turns: Iterable[int], record: Record) -> Encoded:
        tokens = self._rendered(messages, record)["input_ids"]
        mask = [False] * len(tokens)
        for turn in turns:
            if turn == 0:
                raise DataError("the conversation begins with the assistant, so its first answer has no prompt")
            prompt = self._rendered(messages[:turn], record, add_generation_prompt=True)["input_ids"]
            last, part = turn == len(messages) - 1, f"messages 1 to {turn + 1}"
            answered = tokens if last else self._rendered(messages[: turn + 1], record)["input_ids"]
            self._check_prefix(prompt, answered, f"the prompt for message {turn + 1}", part)
            self._check_prefix(answered, tokens, part, "the whole conversation")
            for index in range(len(prompt), self._stop(tokens, len(prompt), len(answered))):
                mask[index] = True
        if not any(mask):
            raise DataError("the chat template renders every answer of this conversation as nothing")
        return Encoded(tokens, mask)

    def _check_prefix(self, shorter: list[int], longer: list[int], which: str, whole: str) -> None:
        """Refuse a template by which an earlier part of the text depends on what comes later."""
        if longer[: len(shorter)] == shorter:
            return
        if self.tokenizer.decode(longer).startswith(self.tokenizer.decode(shorter)):
            raise DataError(
                f"no usable loss mask: the text of {which} begins that of {whole}, but its last tokens merge with "
                f"what follows; {_REMEDY}one whose prompt ends with a special token or a newline"
            )
        raise DataError(
            f"no usable loss mask: {which}, rendered alone, is not how {whole} begins. The chat template rewrites "
            f"earlier turns when later ones follow (dropping their thinking blocks, for example); {_REMEDY}count only "
            "the last answer of each conversation (--last-turn-only)"
        )

    def _stop(self, tokens: list[int], start: int, end: int) -> int:
        """Where the answer in ``tokens[start:end]`` ends: white space after its end-of-turn token is not its own."""
        last = next((index for index in range(end - 1, start - 1, -1) if tokens[index] in self._special), None)
        if last is None or last == end - 1 or self.tokenizer.decode(tokens[last + 1 : end]).strip():
            return end
        return last + 1

    def _rendered(self, messages: Sequence[Message], record: Record, **options: Any) -> Any:
        return apply_template(self.tokenizer, messages, record.tools, tokenize=True, return_dict=True, **options)

    def _ids(self, text: str, *, special: bool = True) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])


def apply_template(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], **options: Any
) -> Any:
    """What the chat template makes of a conversation; DataError if it refuses it."""
    from jinja2 import TemplateError

    tools = [dict(tool) for tool in tools]
    try:
        return tokenizer.apply_chat_template(list(messages), tools=tools or None, **options)
    except (TemplateError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"the chat template refuses the conversation: {error}") from error
