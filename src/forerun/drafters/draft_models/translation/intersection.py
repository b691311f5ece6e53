"""The tokens that two vocabularies share (arXiv 2502.05202, token-level intersection). Knows spellings, no model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.drafters.draft_models.translation.spelling import Spelling
from forerun.errors import VocabularyMismatchError


@dataclass(frozen=True, kw_only=True, slots=True)
class Intersection:
    """Pairs of token ids that stand for the same bytes, and special tokens that mean the same; each id once."""

    target_ids: Tensor
    """(V',) int64, ascending."""
    draft_ids: Tensor
    """(V',) int64, the draft model's id of each."""

    def __len__(self) -> int:
        return len(self.target_ids)

    @classmethod
    def of(cls, target: Spelling, draft: Spelling, target_size: int, draft_size: int) -> Intersection:
        """What both spell.

        Args:
            target_size: token ids of the target's embedding; a tokenizer may hold more.
            draft_size: the same of the draft model.
        """
        pairs = {ours: draft.ordinary[piece] for piece, ours in target.ordinary.items() if piece in draft.ordinary}
        taken = set[int]()
        for ours, theirs in target.counterparts(draft).items():
            if theirs not in taken:
                pairs[ours] = theirs
                taken.add(theirs)
        kept = sorted((o, t) for o, t in pairs.items() if o < target_size and t < draft_size)
        ids = torch.tensor(kept, dtype=torch.int64).view(-1, 2)
        return cls(target_ids=ids[:, 0].contiguous(), draft_ids=ids[:, 1].contiguous())


def require(shared: Intersection, least: float, target: Spelling, draft: Spelling) -> None:
    """Refuse vocabularies that have too little in common.

    Args:
        least: below 1 a share of the smaller vocabulary, else a number of tokens.

    Raises:
        VocabularyMismatchError: naming both tokenizers, what they share and what was asked for.
    """
    smaller = min(len(target), len(draft))
    needed = max(1, round(least * smaller) if least < 1 else round(least))
    if len(shared) >= needed:
        return
    found = "no common tokens" if not len(shared) else f"{len(shared)} common tokens, fewer than {needed}"
    remedy = "take --drafter slem, which compares text" + ("" if not len(shared) else ", or lower min_shared")
    raise VocabularyMismatchError(
        f"the tokenizers of target, {target!r}, and draft model, {draft!r}, have {found}; {remedy}"
    )
