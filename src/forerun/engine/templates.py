"""Conversations through a model's chat template. Knows a tokenizer; knows no model."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from forerun.errors import ArgumentError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SANITIZE = "sanitize_control_tokens"
"""transformers' argument by which what stands in messages is text, whatever it says."""
_marks: WeakKeyDictionary[PreTrainedTokenizerBase, re.Pattern[str]] = WeakKeyDictionary()


def conversation(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any],
    encode: Callable[[str], Sequence[int]],
) -> dict[str, Any]:
    """The conversation as text and token ids, ending where the answer begins.

    Control tokens, such as the marks of roles, come from the template alone: where messages, tools or variables hold
    the text of one, that is read as text.

    Args:
        variables: of the template, besides messages and tools; also ``add_generation_prompt`` (whether it ends with
            what opens the answer; True) and ``continue_final_message`` (whether it ends within the last one; False).
        encode: makes token ids of a text that is not too long.

    Raises:
        ArgumentError: a variable that is not the template's, a conversation that it refuses, the text of a control
            token where it cannot be read as text, or whatever `encode` refuses.
    """
    text = _applied(tokenizer, messages, tools, variables, tokenize=False)
    ids, mark = encode(text), _written_mark(tokenizer, [messages, tools, variables])
    if mark is None:
        return {"prompt": text, "prompt_token_ids": list(ids)}
    if _SANITIZE not in inspect.signature(tokenizer.apply_chat_template).parameters:
        raise _cannot(mark, f"{type(tokenizer).__name__} of this version of transformers has no {_SANITIZE}")
    ids = _applied(tokenizer, messages, tools, variables, tokenize=True, return_dict=False, **{_SANITIZE: True})
    return {"prompt": text, "prompt_token_ids": list(ids)}


def _applied(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any],
    **options: Any,
) -> Any:
    ending = {"add_generation_prompt": True, "continue_final_message": False}
    taken = inspect.signature(tokenizer.apply_chat_template).parameters.keys() - ending.keys()
    reserved = sorted(taken & variables.keys())
    if reserved:
        raise ArgumentError(f"{', '.join(reserved)}: not a variable of the chat template; leave it out")
    try:
        return tokenizer.apply_chat_template(
            list(messages), tools=list(tools or ()) or None, **options, **{**ending, **variables}
        )
    except Exception as error:  # a template is a program that came with the checkpoint
        raise ArgumentError(f"the chat template refuses this conversation: {error}") from error


def _written_mark(tokenizer: PreTrainedTokenizerBase, given: Any) -> str | None:
    """The text of some control token that stands in what users wrote; None where there is none.

    Raises:
        ArgumentError: it stands in the name of a field, which transformers does not look at.
    """
    marks, found = _marks.get(tokenizer), None
    if marks is None:
        texts = [text for text in tokenizer.added_tokens_encoder if not text.isspace()]
        marks = _marks[tokenizer] = re.compile("|".join(map(re.escape, texts)) or "(?!)")
    for text, is_name in _strings(given):
        mark = marks.search(text)
        if mark is not None and is_name:
            raise _cannot(mark[0], f"it is part of the name of a field, {text[:80]!r}")
        found = found or (mark and mark[0])
    return found


def _strings(given: Any) -> Iterator[tuple[str, bool]]:
    """Every string in nested lists and mappings, and whether it names a field."""
    left = [given]
    while left:
        one = left.pop()
        if isinstance(one, str):
            yield one, False
        elif isinstance(one, Mapping):
            yield from ((name, True) for name in one if isinstance(name, str))
            left.extend(one.values())
        elif isinstance(one, Sequence):
            left.extend(one)


def _cannot(mark: str, reason: str) -> ArgumentError:
    return ArgumentError(
        f"{mark!r} is a control token of this model and cannot be read as text here: {reason}; leave it out"
    )
