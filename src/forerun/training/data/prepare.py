"""From records to prepared data: encode them, mark what the assistant wrote, cut, store."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from forerun.errors import ArgumentError, DataError
from forerun.manifests import TokenizerIdentity, digest_of
from forerun.training.data.records import BadRecords, Message, Record, usable_records
from forerun.training.data.store import UNWRITTEN, PreparedData, write_prepared

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    answer_tokens: int = 0,
    name: str | None = None,
    on_record: Callable[[int], None] = lambda count: None,
) -> Prepared:
    """Turn data files (JSONL, JSON, parquet or plain text) into a prepared directory, with the target's `tokenizer`;
    the manifest calls it `name`. What is beyond `max_length` tokens is cut off, or split into further documents. A
    conversation that ends with its user gets room for an answer of `answer_tokens`, written while a head trains;
    `on_record` is told the number of records so far, after each. DataError for unusable input, or nothing left to learn
    from; ArgumentError if `output` holds something."""
    if max_length < 2:
        raise ArgumentError(f"max_length must be at least 2 tokens, got {max_length}")
    if answer_tokens < 0:
        raise ArgumentError(f"answer_tokens must be at least 0, got {answer_tokens}")
    files = [Path(path) for path in paths]
    if not files:
        raise DataError("no data file was named")
    for index, path in enumerate(files):
        if path.resolve() in {other.resolve() for other in files[:index]}:
            raise DataError(f"data file {path} is named twice")
    encoder = Encoder(tokenizer, last_turn_only=last_turn_only, answer_tokens=answer_tokens)
    bad = BadRecords(skip=skip_bad)
    options = {
        "max_length": max_length,
        "split_long": split_long,
        "skip_bad": skip_bad,
        "last_turn_only": last_turn_only,
        "answer_tokens": answer_tokens,
    }
    # Records understood; of these conversations; those cut or split; documents without a token to learn, after cutting,
    # and those whose answer is yet to be written.
    counts = {"records": 0, "conversations": 0, "cut": 0, "dropped": 0, "unwritten": 0}
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
                unwritten = encoded.tokens[-1:] == [UNWRITTEN]
                for start in range(0, len(encoded.tokens) if split_long and not unwritten else 1, max_length):
                    tokens, mask = encoded.tokens[start : start + max_length], encoded.mask[start : start + max_length]
                    # The first token of a document follows nothing, so it cannot be learned.
                    learned = any(mask[1:])
                    usable = usable or learned
                    counts["dropped"] += not learned
                    counts["unwritten"] += learned and unwritten
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

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, last_turn_only: bool = False, answer_tokens: int = 0
    ) -> None:
        self.tokenizer = tokenizer
        self.last_turn_only, self.answer_tokens = last_turn_only, answer_tokens
        self._special = frozenset(int(token) for token in tokenizer.added_tokens_decoder)

    def encode(self, record: Record) -> Encoded:
        """Token ids and mask of a record; DataError without an assistant turn, a chat template, or a usable mask."""
        if not record.messages:
            tokens, given = self._ids(record.text), record.prompt_tokens
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
        if self.answer_tokens and turns[-1:] != [len(record.messages) - 1]:
            prompt = list(self._rendered(record.messages, record, add_generation_prompt=True)["input_ids"])
            room = [UNWRITTEN] * self.answer_tokens
            return Encoded(prompt + room, [False] * len(prompt) + [True] * len(room))
        if not turns:
            raise DataError(
                "no assistant turn, so there is nothing to learn from (forerun data regenerate writes one; "
                "--answer-tokens leaves room for one that is written while a head trains)"
            )
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
