"""Structured outputs: a JSON schema, a regular expression, a choice or a grammar as a logits processor (llguidance).

The mask after a node is a function of the node's own path, so drafts, sampling and verification need nothing of their
own for it: the law that a rule sees is the masked one, for every branch. Knows no model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forerun.errors import ArgumentError
from forerun.types import StructuredOutputs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BLANKS = r"( |\n{1,2}[ \t]{0,20})?"
"""Between the parts of a JSON text: as models write it, on one line or indented, but no answer full of blanks."""


class GrammarProcessor:
    """Leaves only the tokens that the grammar allows after an output; the end tokens where it may end.

    One parser follows whatever output was asked about last: it takes back what differs and reads what is new. Behind
    an end token, or any other that the grammar forbids, nothing can be kept: there only the end tokens are left.

    Args:
        matcher: at the beginning of the grammar.
        prompt_length: tokens of each call that are not the output.
        end_ids: tokens that may end an answer.
    """

    def __init__(self, matcher: Any, prompt_length: int, end_ids: Sequence[int]) -> None:
        self._matcher, self._prompt_length, self._end_ids = matcher, prompt_length, list(end_ids)
        self._read: list[int] = []

    def __call__(self, tokens: Sequence[int], logits: Tensor) -> Tensor:
        """(V,) logits with what is forbidden after `tokens` at minus infinity."""
        allowed = torch.zeros(len(logits), dtype=torch.bool)
        if self._follow(tokens[self._prompt_length :]):
            bits = self._bits()[: len(logits)]
            allowed[: len(bits)] = bits
        else:
            allowed[self._end_ids] = True
        return logits.masked_fill(~allowed.to(logits.device), -torch.inf)

    def valid(self, output: Sequence[int], draft: Sequence[int]) -> int:
        """How many of the drafted tokens the grammar allows behind an output."""
        return int(self._matcher.validate_tokens(list(draft))) if self._follow(output) else 0

    def _bits(self) -> Tensor:
        """bool, one for each token id and some more."""
        words = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        return ((words.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8)) & 1).flatten().bool()

    def _follow(self, output: Sequence[int]) -> bool:
        """Bring the parser to the end of `output`; False where the grammar does not allow it that far.

        A parser that was made to read a forbidden token never recovers, so it is asked first.
        """
        same = 0
        for mine, theirs in zip(self._read, output, strict=False):
            if mine != theirs:
                break
            same += 1
        if same < len(self._read):
            self._matcher.rollback(len(self._read) - same)
            del self._read[same:]
        for token in output[same:]:
            if (self._read and self._read[-1] in self._end_ids) or not self._matcher.validate_tokens([token]):
                return False
            self._matcher.consume_token(token)
            self._read.append(token)
        return True


class GrammarCompiler:
    """Makes processors for one model's tokenizer.

    Args:
        tokenizer: of the model.
        vocab_size: of the model, which may be larger.
        end_ids: tokens that may end an answer.

    Raises:
        ArgumentError: llguidance is not installed.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, end_ids: Sequence[int]) -> None:
        try:
            import llguidance.hf
        except ModuleNotFoundError as error:
            raise ArgumentError("structured outputs need llguidance: pip install 'forerun[serve]'") from error
        self.tokenizer, self._end_ids = tokenizer, sorted(end_ids)
        self._added = tokenizer.get_added_vocab()
        self._tokenizer = llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=self._end_ids)
        self._compiled = lru_cache(maxsize=64)(self._compile)

    def processor(self, wish: StructuredOutputs, prompt_length: int) -> GrammarProcessor:
        """A processor for one answer.

        Raises:
            ArgumentError: llguidance does not accept the schema, expression or grammar; says why.
        """
        matcher = self._compiled(*source(wish))
        return GrammarProcessor(matcher.deep_copy(), prompt_length, self._end_ids)

    def mark(self, text: str) -> str:
        """How a grammar in Lark's notation names `text`: as a string, or by its token's id where the tokenizer has one
        special token for it, since llguidance never matches the spelling of those."""
        token = self._added.get(text)
        special = token is not None and self._tokenizer.is_special_token(token)
        return f"<[{token}]>" if special else json.dumps(text, ensure_ascii=False)

    def _compile(self, kind: str, text: str) -> Any:
        from llguidance import LLMatcher

        grammars: dict[str, Any] = {
            "json": partial(LLMatcher.grammar_from_json_schema, defaults={"whitespace_pattern": _BLANKS}),
            "regex": LLMatcher.grammar_from_regex,
            "grammar": LLMatcher.grammar_from_lark,
        }
        try:
            matcher = LLMatcher(self._tokenizer, grammars[kind](text), log_level=0)
        except ValueError as error:
            raise ArgumentError(f"structured outputs: the {kind} cannot be read: {error}") from error
        if matcher.is_error():
            raise ArgumentError(f"structured outputs: the {kind} is not accepted: {matcher.get_error()}")
        return matcher


def source(wish: StructuredOutputs) -> tuple[str, str]:
    """Kind (``json``, ``regex`` or ``grammar``) and text, as llguidance reads them."""
    if wish.json is not None:
        return "json", wish.json if isinstance(wish.json, str) else json.dumps(wish.json)
    if wish.json_object:
        return "json", '{"type": "object"}'
    if wish.regex is not None:
        return "regex", wish.regex
    if wish.choice is not None:
        options = " | ".join(json.dumps(option) for option in wish.choice)
        return "grammar", f"start: {options}"
    assert wish.grammar is not None, "checked when it was made"
    return "grammar", wish.grammar
