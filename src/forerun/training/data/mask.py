"""Records to token ids and the mask of what the assistant wrote.

``mask[i]`` is about token i itself: True if the assistant wrote it. Where the chat template marks the assistant's words
(``{% generation %}``), transformers says which tokens those are; where it does not, the conversation is rendered prefix
by prefix, and that is refused where prefixes do not fit into one another. Knows no files and no windows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forerun.errors import DataError
from forerun.training.data.read import Message, Record

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
"""What opens the assistant's words in a template with markers."""

_REMEDY = (
    "use a template that marks the assistant's words with {% generation %} ... {% endgeneration %}, "
    "or count only the last answer of each conversation (--last-turn-only)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """One document before it is cut."""

    tokens: list[int]
    """Token ids."""
    mask: list[bool]
    """Per token: the assistant wrote it."""


class Encoder:
    """Encodes records with one tokenizer.

    Args:
        tokenizer: the target's; a chat template is needed for conversations only.
        last_turn_only: count the last answer of each conversation and nothing else.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, last_turn_only: bool = False) -> None:
        self.tokenizer = tokenizer
        self.last_turn_only = last_turn_only
        self._special = frozenset(int(token) for token in tokenizer.added_tokens_decoder)

    def encode(self, record: Record) -> Encoded:
        """Token ids and mask of a record.

        Raises:
            DataError: no assistant turn, no chat template, a template that fails or without a usable mask.
        """
        if not record.messages:
            encoded = self._encode_text(record)
        elif not self.tokenizer.chat_template and record.pair is not None:
            encoded = self._encode_pair(*record.pair)
        else:
            encoded = self._encode_chat(record)
        if record.truncated:
            self._uncount_end(encoded)
        return encoded

    def _encode_text(self, record: Record) -> Encoded:
        tokens = self._ids(record.text)
        if record.prompt_tokens >= len(tokens):
            raise DataError(f"all {len(tokens)} tokens of the text are prompt ('prompt_tokens' {record.prompt_tokens})")
        return Encoded(tokens=tokens, mask=[index >= record.prompt_tokens for index in range(len(tokens))])

    def _encode_pair(self, prompt: str, completion: str) -> Encoded:
        """Without a template: the prompt, the completion, the end of text."""
        given, answer = self._ids(prompt), self._ids(completion, special=False)
        if self.tokenizer.eos_token_id is not None:
            answer = [*answer, int(self.tokenizer.eos_token_id)]
        return Encoded(tokens=given + answer, mask=[False] * len(given) + [True] * len(answer))

    def _encode_chat(self, record: Record) -> Encoded:
        if not self.tokenizer.chat_template:
            raise DataError("a conversation, but the tokenizer has no chat template; use plain text or another target")
        turns = [index for index, message in enumerate(record.messages) if message["role"] == "assistant"]
        if not turns:
            raise DataError("no assistant turn, so there is nothing to learn from (forerun data regenerate writes one)")
        messages = record.messages[: turns[-1] + 1]
        if self.last_turn_only or not self._marked(record):
            return self._by_prefixes(messages, turns[-1:] if self.last_turn_only else turns, record)
        rendered = self._apply(messages, record, return_assistant_tokens_mask=True)
        mask = [bool(counted) for counted in rendered["assistant_masks"]]
        if not any(mask):
            raise DataError(
                "the chat template's {% generation %} markers enclose no token of this conversation, "
                "so it gives no usable loss mask; correct the template"
            )
        return Encoded(tokens=list(rendered["input_ids"]), mask=mask)

    def _marked(self, record: Record) -> bool:
        template = self.tokenizer.get_chat_template(tools=list(record.tools) or None)
        return MARKER.search(template) is not None

    def _by_prefixes(self, messages: Sequence[Message], turns: Iterable[int], record: Record) -> Encoded:
        """Count, for each turn, what the rendered conversation has beyond the prompt for that turn."""
        tokens = self._rendered(messages, record)
        mask = [False] * len(tokens)
        for turn in turns:
            if turn == 0:
                raise DataError("the conversation begins with the assistant, so its first answer has no prompt")
            prompt = self._rendered(messages[:turn], record, add_generation_prompt=True)
            answered = tokens if turn == len(messages) - 1 else self._rendered(messages[: turn + 1], record)
            self._check_prefix(prompt, answered, f"the prompt for message {turn + 1}", f"messages 1 to {turn + 1}")
            self._check_prefix(answered, tokens, f"messages 1 to {turn + 1}", "the whole conversation")
            for index in range(len(prompt), self._stop(tokens, len(prompt), len(answered))):
                mask[index] = True
        if not any(mask):
            raise DataError("the chat template renders every answer of this conversation as nothing")
        return Encoded(tokens=tokens, mask=mask)

    def _check_prefix(self, shorter: list[int], longer: list[int], which: str, whole: str) -> None:
        """Refuse a template by which an earlier part of the text depends on what comes later."""
        if longer[: len(shorter)] == shorter:
            return
        if self.tokenizer.decode(longer).startswith(self.tokenizer.decode(shorter)):
            raise DataError(
                f"no usable loss mask: the text of {which} begins that of {whole}, but its last tokens merge with "
                "what follows, so no token boundary separates them; use a template that marks the assistant's words "
                "with {% generation %} ... {% endgeneration %}, or whose prompt ends with a special token or a newline"
            )
        raise DataError(
            f"no usable loss mask: {which}, rendered alone, is not how {whole} begins. The chat template rewrites "
            f"earlier turns when later ones follow (dropping their thinking blocks, for example); {_REMEDY}"
        )

    def _stop(self, tokens: list[int], start: int, end: int) -> int:
        """Where the answer in ``tokens[start:end]`` ends: white space after its end-of-turn token is not its own."""
        last = next((index for index in range(end - 1, start - 1, -1) if tokens[index] in self._special), None)
        if last is None or last == end - 1 or self.tokenizer.decode(tokens[last + 1 : end]).strip():
            return end
        return last + 1

    def _uncount_end(self, encoded: Encoded) -> None:
        """The template closed an answer that a limit had cut off; its writer did not."""
        last = next((i for i in range(len(encoded.mask) - 1, -1, -1) if encoded.mask[i]), -1)
        while last >= 0 and encoded.mask[last] and encoded.tokens[last] in self._special:
            encoded.mask[last] = False
            last -= 1

    def _rendered(
        self, messages: Sequence[Message], record: Record, *, add_generation_prompt: bool = False
    ) -> list[int]:
        return list(self._apply(messages, record, add_generation_prompt=add_generation_prompt)["input_ids"])

    def _apply(self, messages: Sequence[Message], record: Record, **options: Any) -> Any:
        from jinja2 import TemplateError

        tools = [dict(tool) for tool in record.tools] or None
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=True, return_dict=True, **options
            )
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise DataError(f"the chat template refuses the conversation: {error}") from error

    def _ids(self, text: str, *, special: bool = True) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])
