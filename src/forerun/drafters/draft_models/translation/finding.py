"""Which two tokenizers a drafter translates between. Knows where tokenizers lie; does not look into them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.drafters.vocabulary import resolved, tokenizer_beside
from forerun.errors import ArgumentError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from forerun.drafters.base import DrafterSetup


def draft_tokenizer(method: str, option: Any, model: Any) -> PreTrainedTokenizerBase:
    """The draft model's tokenizer: the option (a directory, a hub id or an object), else what lies beside the model.

    Raises:
        ArgumentError: there is none.
    """
    source = option if option is not None else model
    if option is None and not isinstance(model, str | Path):
        source = getattr(model, "name_or_path", "")
    found = _loaded(source)
    if found is None:
        raise ArgumentError(
            f"{method}: no tokenizer was found for the draft model in {str(source)!r}; pass tokenizer=DIRECTORY, a hub "
            "id or a tokenizer object"
        )
    return found


def target_tokenizer(method: str, option: Any, setup: DrafterSetup) -> PreTrainedTokenizerBase:
    """The target's tokenizer: the option, else the engine's.

    Raises:
        ArgumentError: the engine works on token ids alone and the option is missing, or no tokenizer lies there.
    """
    found = setup.tokenizer if option is None else _loaded(option)
    if found is None:
        where = "the engine has none" if option is None else f"there is none in {str(option)!r}"
        raise ArgumentError(f"{method} needs the target's tokenizer, and {where}; pass target_tokenizer=DIRECTORY")
    return found


def _loaded(source: Any) -> PreTrainedTokenizerBase | None:
    if not isinstance(source, str | Path):
        tokenizer: PreTrainedTokenizerBase = source
        return tokenizer
    return tokenizer_beside(resolved(source)) if str(source) else None
