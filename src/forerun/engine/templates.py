"""Conversations through a model's chat template. Knows a tokenizer; knows no model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forerun.errors import ArgumentError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def rendered(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any],
) -> str:
    """The conversation as text, ending where the answer begins.

    Args:
        variables: of the template, besides messages and tools.

    Raises:
        ArgumentError: a variable that is not the template's, or a conversation that it refuses.
    """
    from jinja2 import TemplateError

    reserved = sorted(inspect.signature(tokenizer.apply_chat_template).parameters.keys() & variables.keys())
    if reserved:
        raise ArgumentError(f"{', '.join(reserved)}: not a variable of the chat template; leave it out")
    try:
        text: str = tokenizer.apply_chat_template(
            list(messages), tools=list(tools or ()) or None, tokenize=False, add_generation_prompt=True, **variables
        )
    except (TemplateError, TypeError, KeyError, AttributeError) as error:
        raise ArgumentError(f"the chat template refuses this conversation: {error}") from error
    return text
