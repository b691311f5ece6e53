"""The draft vocabulary: which tokens the drafter may say, chosen by how often the assistant said them.

Knows token counts, no text and no model.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from forerun.errors import ArgumentError
from forerun.training.data.store import PreparedData

_BLOCK = 1 << 22
"""Tokens counted at once."""


def token_counts(data: PreparedData, vocab_size: int) -> Tensor:
    """(V,) int64: how often each token counts, prompts and templates left out.

    Args:
        data: prepared with the target's tokenizer.
        vocab_size: V, the rows of the target's head (it may be larger than the tokenizer's vocabulary).

    Raises:
        ArgumentError: the data holds a token id of V or more.
    """
    counts = np.zeros(vocab_size, np.int64)
    for start in range(0, data.num_tokens, _BLOCK):
        tokens = data.tokens[start : start + _BLOCK]
        counted = tokens[data.mask[start : start + _BLOCK] != 0]
        if counted.size and int(counted.max()) >= vocab_size:
            raise ArgumentError(
                f"{data.folder} holds token id {int(counted.max())}, outside the target's vocabulary of {vocab_size}; "
                f"it was prepared with the tokenizer of {data.tokenizer.name!r}"
            )
        counts += np.bincount(counted, minlength=vocab_size)
    return torch.from_numpy(counts)


def draft_vocabulary(counts: Tensor, size: int) -> Tensor:
    """(size,) int64, ascending: the ids of the most frequent tokens.

    Of equally frequent tokens the lower id comes first; with fewer different tokens than `size`, the lowest unused ids
    fill up.

    Args:
        counts: (V,) int64, from `token_counts`.
        size: of the draft vocabulary.

    Raises:
        ArgumentError: `size` is below 1 or above V.
    """
    if not 1 <= size <= len(counts):
        raise ArgumentError(f"the draft vocabulary must have 1 to {len(counts)} tokens (the target's), got {size}")
    # A stable sort keeps equals in ascending order of id, and tokens that never occur are equals, too.
    order = torch.sort(counts, descending=True, stable=True).indices
    return order[:size].sort().values


def coverage(counts: Tensor, ids: Tensor) -> float:
    """The share of counted tokens, in [0, 1], that a draft vocabulary can say; 1 where nothing was counted."""
    total = int(counts.sum())
    return int(counts[ids].sum()) / total if total else 1.0
