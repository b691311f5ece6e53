"""Turns records into prepared data: encode them, mark what the assistant wrote, cut,
store.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from forerun.engine.prompts import check_variables, rendered, written_mark
from forerun.errors import ArgumentError, DataError, refuse
from forerun.training.data.records import BadRecords, Message, Record, own_tokens, usable_records
from forerun.training.data.store import UNWRITTEN, PreparedData, write_prepared
from forerun.writing import TokenizerIdentity, hash_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """The prepared data, and why records were left out."""

    data: PreparedData
    complaints: list[str]

    def summary(self) -> dict[str, Any]:
        """Return counts and provenance for people and for JSON."""
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
    chat_template_kwargs: Mapping[str, Any] | None = None,
    name: str | None = None,
    on_record: Callable[[int], None] = lambda count: None,
) -> Prepared:
    """Turn data files (JSONL, JSON, parquet or plain text) into a prepared directory, with the
    target's `tokenizer`.

    The manifest calls it `name`. What is beyond `max_length` tokens is cut off, or split into
    further documents. A conversation that ends with its user gets room for an answer of
    `answer_tokens`, written while a head trains. `chat_template_kwargs`: variables of the chat
    template, such as ``enable_thinking``. `on_record` is called with the number of records so far,
    after each. DataError for unusable input, or nothing left to learn from; ArgumentError if
    `output` holds something.
    """
    refuse(
        (max_length < 2, f"max_length must be at least 2 tokens, got {max_length}"),
        (answer_tokens < 0, f"answer_tokens must be at least 0, got {answer_tokens}"),
    )
    files = [Path(path) for path in paths]
    if not files:
        raise DataError("no data file was named")
    for index, path in enumerate(files):
        if path.resolve() in {other.resolve() for other in files[:index]}:
            raise DataError(f"data file {path} is named twice")
    variables = dict(chat_template_kwargs or {})
    encoder = RecordEncoder(tokenizer, last_turn_only=last_turn_only, answer_tokens=answer_tokens, variables=variables)
    bad = BadRecords(skip=skip_bad)
    options = {
        "max_length": max_length,
        "split_long": split_long,
        "skip_bad": skip_bad,
        "last_turn_only": last_turn_only,
        "answer_tokens": answer_tokens,
        "chat_template_kwargs": variables,
    }
    # Records understood; of these conversations; those cut or split; documents without a token to learn, after cutting,
    # those whose answer is yet to be written, and answers that are empty.
    counts = {"records": 0, "conversations": 0, "cut": 0, "dropped": 0, "unwritten": 0, "empty": 0}
    sources: list[dict[str, Any]] = []
    about = {"max_length": max_length, "options": options, "sources": sources, "counts": counts}

    def documents() -> Iterator[tuple[list[int], list[bool]]]:
        usable = False
        for path in files:
            before = counts["records"]
            for record, encoded in usable_records(path, bad, encoder.encode):
                counts["records"] += 1
                counts["conversations"] += bool(record.messages)
                counts["empty"] += sum(is_empty(record, turn) for turn in range(len(record.messages)))
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
            sources.append({"path": path.name, "sha256": hash_file(path), "records": counts["records"] - before})
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
NO_PROMPT = "the conversation begins with the assistant, so its first answer has no prompt"
_REMEDY = "use a template that marks the assistant's words with {% generation %} ... {% endgeneration %}, or "
_END = "\ue000end\ue000"  # Stands behind the last piece of a rendered answer, where no text has it


class Encoded(NamedTuple):
    """One document before it is cut: its token ids, and for each whether the assistant
    wrote it.
    """

    tokens: list[int]
    mask: list[bool]


class RecordEncoder:
    """Encodes records with one tokenizer: token ids and the mask of what the
    assistant wrote.

    The mask can be limited to the last answers. Where the chat template marks the assistant's words
    (``{% generation %}``), transformers says which tokens those are; where it does not, the
    conversation is rendered prefix by prefix, and that is refused where prefixes do not fit into
    one another. `variables` are the chat template's; ArgumentError for what cannot be one.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        last_turn_only: bool = False,
        answer_tokens: int = 0,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer, self.variables = tokenizer, dict(variables or {})
        check_variables(tokenizer, self.variables)
        self.last_turn_only, self.answer_tokens = last_turn_only, answer_tokens
        self._vocabulary = TokenizerIdentity.of(tokenizer).vocabulary
        self._special = frozenset(int(token) for token in tokenizer.added_tokens_decoder)

    def encode(self, record: Record) -> Encoded:
        """Return token ids and mask of a record; DataError without an assistant turn, a chat
        template, or a usable mask.
        """
        if record.tokens:
            tokens, prompt_length = own_tokens(record, self._vocabulary), record.prompt_tokens
            return Encoded(tokens, [index >= prompt_length for index in range(len(tokens))])
        if not record.messages:
            tokens, prompt_length = self._ids(record.text), record.prompt_tokens
            # A tokenizer may close a text, but what a limit cut off has no end.
            while record.truncated and tokens and tokens[-1] in self.tokenizer.all_special_ids:
                tokens.pop()
            return Encoded(tokens, [index >= prompt_length for index in range(len(tokens))])
        if not self.tokenizer.chat_template and record.pair is not None:
            prompt, answer = self._ids(record.pair[0]), self._ids(record.pair[1], special=False)
            if self.tokenizer.eos_token_id is not None and answer and not record.truncated:
                answer.append(int(self.tokenizer.eos_token_id))
            return Encoded(prompt + answer, [False] * len(prompt) + [True] * len(answer))
        return self._encode_chat(record)

    def _encode_chat(self, record: Record) -> Encoded:
        if not self.tokenizer.chat_template:
            raise DataError(NO_TEMPLATE)
        turns = [index for index, message in enumerate(record.messages) if message["role"] == "assistant"]
        if self.answer_tokens and turns[-1:] != [len(record.messages) - 1]:
            prompt = list(self._render(record.messages, record, add_generation_prompt=True)["input_ids"])
            room = [UNWRITTEN] * self.answer_tokens
            return Encoded(prompt + room, [False] * len(prompt) + [True] * len(room))
        if not turns:
            raise DataError(
                "no assistant turn, so there is nothing to learn from (forerun data regenerate writes one; "
                "--answer-tokens leaves room for one that is written while a head trains)"
            )
        turns = [turn for turn in turns if not is_empty(record, turn)]
        if not turns:
            prompt = list(self._render(record.messages[:-1], record, add_generation_prompt=True)["input_ids"])
            return Encoded(prompt, [False] * len(prompt))
        messages = record.messages[: turns[-1] + 1]
        self._check_calls(messages, turns[-1:] if self.last_turn_only else turns, record)
        if record.truncated:
            return self._encode_cut(messages, turns, record)
        return self._mask(messages, turns[-1:] if self.last_turn_only else turns, record)

    def _check_calls(self, messages: Sequence[Message], turns: Sequence[int], record: Record) -> None:
        """Refuse a tool call that the chat template leaves out: without it the conversation is
        rendered to the same text.

        It would be learned as an answer that ends early.
        """
        whole = None
        for turn in turns:
            calls = messages[turn].get("tool_calls") or []
            for index in range(len(calls)):
                whole = whole or self._render(messages, record, tokenize=False)
                others = [call for other, call in enumerate(calls) if other != index]
                less = {key: value for key, value in messages[turn].items() if key != "tool_calls"}
                less |= {"tool_calls": others} if others else {}
                try:
                    same = whole == self._render(
                        [*messages[:turn], less, *messages[turn + 1 :]], record, tokenize=False
                    )
                except DataError:  # A template that asks for as many results as calls has seen it
                    continue
                if same:
                    raise DataError(
                        "the chat template does not show the assistant's calls of tools (tool_calls): it leaves out "
                        f"call {index + 1} of {len(calls)} in message {turn + 1}, which would be learned as no call; "
                        "use a target whose template shows it, or leave such conversations out"
                    )

    def _encode_cut(self, messages: Sequence[Message], turns: Sequence[int], record: Record) -> Encoded:
        """Encode a last answer that a limit cut off: what was written behind its prompt, without an
        end of its turn.
        """
        if len(messages) == 1:
            raise DataError(NO_PROMPT)
        earlier = () if self.last_turn_only else turns[:-1]
        prompt = self._mask(messages[:-1], earlier, record, add_generation_prompt=True)
        written = self._ids(self._write_answer(messages, record), special=False)
        return Encoded(prompt.tokens + written, prompt.mask + [True] * len(written))

    def _write_answer(self, messages: Sequence[Message], record: Record) -> str:
        """Return the text of the last answer.

        Where its thinking was told apart, it is what the template shows of both, up to the end of
        what came last.
        """
        *before, answer = messages
        if not answer.get("reasoning_content"):
            return str(answer["content"])
        last = "content" if answer["content"] else "reasoning_content"
        marked = [*before, {**answer, last: f"{answer[last]}{_END}"}]
        prompt = self._render(before, record, add_generation_prompt=True, tokenize=False)
        whole, end, _ = self._render(marked, record, tokenize=False).partition(_END)
        if not end or not whole.startswith(prompt):
            raise DataError(
                f"the last answer was cut off, and the chat template does not show its {last} behind the prompt as it "
                "was written; let the target write longer answers (forerun data regenerate --max-tokens)"
            )
        return str(whole[len(prompt) :])

    def _mask(self, messages: Sequence[Message], turns: Sequence[int], record: Record, **ending: Any) -> Encoded:
        """Encode messages of which the `turns` count; `ending` says how the rendering ends, where
        not with the last of them.
        """
        template = self.tokenizer.get_chat_template(tools=list(record.tools) or None)
        marked = MARKER.search(template) and not self._writes_marks(messages, record)
        answers = sum(message["role"] == "assistant" for message in messages)
        if self.last_turn_only or not turns or len(turns) < answers or not marked:
            return self._by_prefixes(messages, turns, record, **ending)
        rendered = self._render(messages, record, return_assistant_tokens_mask=True, **ending)
        mask = [bool(counted) for counted in rendered["assistant_masks"]]
        if not any(mask):
            raise DataError(
                "the chat template's {% generation %} markers enclose no token of this conversation, "
                "so it gives no usable loss mask; correct the template"
            )
        return Encoded(list(rendered["input_ids"]), mask)

    def _writes_marks(self, messages: Sequence[Message], record: Record) -> bool:
        """Return whether text of the conversation looks like a control token; then no template
        tells which is which.
        """
        try:
            return written_mark(self.tokenizer, [messages, record.tools, self.variables]) is not None
        except ArgumentError as error:
            raise DataError(str(error)) from error

    def _by_prefixes(self, messages: Sequence[Message], turns: Sequence[int], record: Record, **ending: Any) -> Encoded:
        tokens = list(self._render(messages, record, **ending)["input_ids"])
        mask = [False] * len(tokens)
        for turn in turns:
            if turn == 0:
                raise DataError(NO_PROMPT)
            prompt = self._render(messages[:turn], record, add_generation_prompt=True)["input_ids"]
            whole = turn == len(messages) - 1 and not ending
            part = f"messages 1 to {turn + 1}"
            answered = tokens if whole else self._render(messages[: turn + 1], record)["input_ids"]
            which = f"the prompt for message {turn + 1}"
            if not (
                self._is_prefix(prompt, answered, which, part)
                and self._is_prefix(answered, tokens, part, "the whole conversation")
            ):
                return self._by_pieces(messages, turns, record, tokens, **ending)
            for index in range(len(prompt), self._stop(tokens, len(prompt), len(answered))):
                mask[index] = True
        if turns and not any(mask):
            raise DataError("the chat template renders every answer of this conversation as nothing")
        return Encoded(tokens, mask)

    def _by_pieces(
        self, messages: Sequence[Message], turns: Sequence[int], record: Record, merged: list[int], **ending: Any
    ) -> Encoded:
        """Encode every prompt and every answer by itself, as the target reads and writes them: no token reaches from
        one into the other.

        That is how an answer is learned whose first spaces would merge with the prompt's last line break. `merged` are
        the token ids of the text as a whole.
        """
        text = self._render(messages, record, tokenize=False, **ending)
        tokens, mask, read = list[int](), list[bool](), 0
        for turn in turns:
            prompt = self._render(messages[:turn], record, add_generation_prompt=True, tokenize=False)
            answered = text
            if ending or turn < len(messages) - 1:
                answered = self._render(messages[: turn + 1], record, tokenize=False)
            tokens += self._ids(text[read : len(prompt)], special=False)
            start = len(tokens)
            tokens += self._ids(text[len(prompt) : len(answered)], special=False)
            mask += [False] * (start - len(mask))
            mask += [start <= index < self._stop(tokens, start, len(tokens)) for index in range(start, len(tokens))]
            read = len(answered)
        tokens += self._ids(text[read:], special=False)
        mask += [False] * (len(tokens) - len(mask))
        # A tokenizer that begins every text with a space of its own would write one into the middle.
        if self._writes_marks(messages, record) or self.tokenizer.decode(tokens) != self.tokenizer.decode(merged):
            raise DataError(
                "no usable loss mask: the last tokens of a prompt or of an answer merge with what follows, and this "
                f"tokenizer cannot read them apart; {_REMEDY}one whose prompt ends with a special token or a newline"
            )
        return Encoded(tokens, mask)

    def _is_prefix(self, shorter: list[int], longer: list[int], which: str, whole: str) -> bool:
        """Return whether the tokens of an earlier part begin those of the whole; False where only its text does.

        DataError for a template in which an earlier part of the text depends on what comes later.
        """
        if longer[: len(shorter)] == shorter:
            return True
        if self.tokenizer.decode(longer).startswith(self.tokenizer.decode(shorter)):
            return False
        raise DataError(
            f"no usable loss mask: {which}, rendered alone, is not how {whole} begins. The chat template rewrites "
            f"earlier turns when later ones follow (dropping their thinking blocks, for example); {_REMEDY}count only "
            "the last answer of each conversation (--last-turn-only)"
        )

    def _stop(self, tokens: list[int], start: int, end: int) -> int:
        """Return where the answer in ``tokens[start:end]`` ends; white space after its end-of-turn
        token is not its own.
        """
        last = next((index for index in range(end - 1, start - 1, -1) if tokens[index] in self._special), None)
        if last is None or last == end - 1 or self.tokenizer.decode(tokens[last + 1 : end]).strip():
            return end
        return last + 1

    def _render(self, messages: Sequence[Message], record: Record, **options: Any) -> Any:
        how = {"tokenize": True, "return_dict": True, **self.variables, **options}
        return apply_template(self.tokenizer, messages, record.tools, **how)

    def _ids(self, text: str, *, special: bool = True) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])


def is_empty(record: Record, turn: int) -> bool:
    """Return whether an answer of the assistant says nothing, calls nothing and was not cut off.

    Only its end could be learned of it.
    """
    message = record.messages[turn]
    cut = record.truncated and turn == len(record.messages) - 1
    content = str(message["content"]).strip() or message.get("reasoning_content") or message.get("tool_calls")
    return message["role"] == "assistant" and not (cut or content)


def apply_template(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], **options: Any
) -> Any:
    """Render a conversation with the chat template; DataError if the template refuses it."""
    try:
        return rendered(tokenizer, messages, tools, **options)
    except ArgumentError as error:
        raise DataError(str(error)) from error
