"""What to ask the target for one record, question by question, whoever answers: a record is a generator of questions.

A script yields `Question`s, is sent `Answer`s, and returns the finished line of the output. Knows no engine and no
network.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forerun.errors import ArgumentError, DataError
from forerun.training.data.read import Message, Record

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One thing to generate: the next turn of a conversation, or what follows a text."""

    messages: tuple[Message, ...]
    """The conversation so far; empty for plain text."""
    tools: tuple[Mapping[str, Any], ...]
    """Tools the conversation may call."""
    prompt: str
    """The text to continue, where there is no conversation."""
    seed: int | None
    """For the sampling, below 2**31; None leaves it to whoever answers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What the target wrote."""

    text: str
    truncated: bool
    """A limit on tokens ended it, not the target."""
    reasoning: str = ""
    """What an endpoint reports separately as the target's thinking."""


Script = Generator[Question, Answer, dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Director:
    """Makes the scripts."""

    tokenizer: PreTrainedTokenizerBase | None
    """Cuts prompts out of plain texts; needed for those only."""
    prompt_tokens: int = 64
    """Tokens of a plain text that are given; the target writes the rest."""
    seed: int | None = None
    """Mixed with each record's id and turn, so that a resumed run asks the same."""

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1:
            raise ArgumentError(f"prompt_tokens must be at least 1, got {self.prompt_tokens}")

    def script(self, record: Record) -> Script:
        """The questions of one record.

        Raises:
            DataError: when it is advanced: nothing in it can be answered, or a plain text without a tokenizer.
        """
        return self._conversation(record) if record.messages else self._text(record)

    def _conversation(self, record: Record) -> Script:
        """Keep what others said, write every turn of the assistant anew, and answer what was left unanswered.

        A conversation ends early where an answer is cut off, and before the first call of a tool: the tool's recorded
        reply would not fit another call.
        """
        history: list[Message] = []
        truncated = False
        for message in (*_askable(record.messages), None):
            if message is not None and message["role"] != "assistant":
                history.append(message)
                continue
            if truncated or not history or history[-1]["role"] not in ("user", "tool"):
                continue
            answer = yield self._question(record, tuple(history), "", len(history))
            turn: Message = {"role": "assistant", "content": answer.text}
            history.append(turn | ({"reasoning_content": answer.reasoning} if answer.reasoning else {}))
            truncated = answer.truncated
            if truncated:
                break
        while history and history[-1]["role"] != "assistant":
            history.pop()
        if not history:
            raise DataError("no user turn that could be answered without a tool")
        line: dict[str, Any] = {"id": record.id, "messages": history}
        if record.tools:
            line["tools"] = [dict(tool) for tool in record.tools]
        return line | ({"truncated": True} if truncated else {})

    def _text(self, record: Record) -> Script:
        if self.tokenizer is None:
            raise DataError("a plain text needs the target's tokenizer to cut its prompt; add --target MODEL")
        prompt = _beginning(record.text, self.prompt_tokens, self.tokenizer)
        answer = yield self._question(record, (), prompt, 0)
        if not answer.text:
            raise DataError("the target ends the text at once, so there is nothing to learn")
        text = prompt + answer.text
        given = _tokens_before(text, len(prompt), self.tokenizer)
        line: dict[str, Any] = {"id": record.id, "text": text, "prompt_tokens": given}
        return line | ({"truncated": True} if answer.truncated else {})

    def _question(self, record: Record, messages: tuple[Message, ...], prompt: str, turn: int) -> Question:
        seed = None
        if self.seed is not None:
            digest = hashlib.sha256(f"{self.seed}/{record.id}/{turn}".encode()).digest()
            seed = int.from_bytes(digest[:4], "big") >> 1
        return Question(messages=messages, tools=record.tools, prompt=prompt, seed=seed)


def _askable(messages: Sequence[Message]) -> list[Message]:
    """The messages before the first that calls a tool or reports from one."""
    kept: list[Message] = []
    for message in messages:
        if message.get("tool_calls") or message.get("function_call"):
            break
        if message["role"] == "tool":
            # Whoever spoke before it called it, in a way that this format does not mark.
            while kept and kept[-1]["role"] == "assistant":
                kept.pop()
            break
        kept.append(message)
    else:
        return kept
    while kept and kept[-1]["role"] != "assistant":
        kept.pop()
    return kept


def _offsets(text: str, tokenizer: PreTrainedTokenizerBase) -> list[tuple[int, int]]:
    if not tokenizer.is_fast:
        raise DataError("plain texts need a fast tokenizer, one that tells where each token stands")
    encoded = tokenizer(text, return_offsets_mapping=True, verbose=False)
    return [(int(start), int(end)) for start, end in encoded["offset_mapping"]]


def _beginning(text: str, tokens: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of its first `tokens` tokens; special tokens put in front take no part."""
    ends = [end for start, end in _offsets(text, tokenizer) if end > start]
    return text[: ends[min(tokens, len(ends)) - 1]] if ends else text


def _tokens_before(text: str, place: int, tokenizer: PreTrainedTokenizerBase) -> int:
    """How many tokens of `text` begin before a character; one that reaches across it is among them."""
    offsets = _offsets(text, tokenizer)
    return next((n for n, (start, end) in enumerate(offsets) if end > start >= place), len(offsets))
