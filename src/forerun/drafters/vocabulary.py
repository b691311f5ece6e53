"""Finds the tokenizers of target and draft model, and checks whether they agree."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.errors import ArgumentError, VocabularyMismatchError
from forerun.model.names import tokenizer_beside

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from forerun.decode.drafter import DrafterSetup


_REMEDY = (
    "A draft model needs the target's own tokenizer: take a smaller model of the same family, let this one draft in "
    "its own tokens (the drafters tli and slem), or take a drafter that has no vocabulary of its own (ngram)."
)


def check_vocabulary(setup: DrafterSetup, model: Any, size: int) -> None:
    """Raise VocabularyMismatchError if the `size` token ids of a draft model stand for other tokens than the target's;
    if a tokenizer is missing, if their numbers differ.
    """
    theirs = tokenizer_beside(model) if isinstance(model, str | Path) else None
    if setup.tokenizer is None or theirs is None:
        if setup.target.vocab_size == size:
            return
        raise VocabularyMismatchError(
            f"the target has {setup.target.vocab_size} token ids and the draft model {size}; without both tokenizers "
            f"they cannot be compared. {_REMEDY} Or keep tokenizer files beside both models."
        )
    check_tokenizers(setup.tokenizer, theirs)


def check_tokenizers(own: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase) -> None:
    """Raise VocabularyMismatchError unless the target's and the draft model's tokenizers have the same vocabulary."""
    target, draft = own.get_vocab(), theirs.get_vocab()
    if target != draft:
        differing = sorted(token for token in target.keys() | draft.keys() if target.get(token) != draft.get(token))
        token = differing[0]
        raise VocabularyMismatchError(
            f"the vocabularies of target ({len(target)} tokens) and draft model ({len(draft)} tokens) differ in "
            f"{len(differing)} tokens, for example {token!r}: id {target.get(token)} and {draft.get(token)}. {_REMEDY}"
        )
    specials, draft_specials = set(own.all_special_ids), set(theirs.all_special_ids)
    if specials != draft_specials:
        raise VocabularyMismatchError(
            f"the special tokens of target {sorted(specials)} and draft model {sorted(draft_specials)} differ. "
            f"{_REMEDY}"
        )


def tokenizers(method: str, config: Any, setup: DrafterSetup) -> list[PreTrainedTokenizerBase]:
    """Return the tokenizers of target and draft model: the options `target_tokenizer` and
    `tokenizer` (a directory, a hub id or an object), else the engine's and the one beside the
    model. Raises ArgumentError if there is none.
    """
    given, own, model = config.target_tokenizer, config.tokenizer, config.model
    target = setup.tokenizer if given is None else _load(given)
    if target is None:
        where = "the engine has none" if given is None else f"there is none in {str(given)!r}"
        raise ArgumentError(f"{method} needs the target's tokenizer, and {where}; pass target_tokenizer=DIRECTORY")
    beside = model if isinstance(model, str | Path) else getattr(model, "name_or_path", "")
    source = beside if own is None else own
    draft = _load(source)
    if draft is None:
        where = f"no tokenizer was found for the draft model in {str(source)!r}"
        raise ArgumentError(f"{method}: {where}; pass tokenizer=DIRECTORY, a hub id or an object")
    return [target, draft]


def _load(source: Any) -> PreTrainedTokenizerBase | None:
    if not isinstance(source, str | Path):
        return source
    return tokenizer_beside(source) if str(source) else None


def spare_token(config: Any) -> int:
    """Return a token of the target's vocabulary that texts rarely contain: the padding token, or else the last one."""
    padding = getattr(config, "pad_token_id", None)
    return int(config.vocab_size - 1 if padding is None else padding)
