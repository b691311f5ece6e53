"""The divergences of training, written out."""

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.losses.chunked_loss import Divergence


def divergence_of(probs: Tensor, logs: Tensor, ids: Sequence[int], divergence: Divergence) -> Tensor:
    """(..,) of the target's probabilities (.., V) from a draft's log-probabilities (.., V), which are -inf outside
    `ids`; KL and cross-entropy do not look there."""
    draft, known = logs.exp(), logs[..., ids]
    named = probs[..., ids] / probs[..., ids].sum(-1, keepdim=True)
    overlap = torch.minimum(probs, draft).sum(-1)
    cross = -(named * known).sum(-1)
    if divergence is Divergence.CROSS_ENTROPY:
        return cross
    if divergence is Divergence.LK_LOG:
        return -overlap.log()
    if divergence is Divergence.REVERSE_KL:
        return (known.exp() * (known - probs[..., ids].log())).sum(-1)
    if divergence is Divergence.JENSEN_SHANNON:
        middle = (probs + draft) / 2
        reverse = (known.exp() * (known - middle[..., ids].log())).sum(-1)
        return ((probs * (probs.log() - middle.log())).sum(-1) + reverse) / 2
    if divergence is Divergence.TOTAL_VARIATION:
        return (probs - draft).abs().sum(-1) / 2
    mixed = divergence is Divergence.MIXED
    share = torch.full_like(overlap, 0.1) if mixed else torch.exp(-3.0 * overlap).detach()
    return share * (cross + (named * named.log()).sum(-1)) + (1 - share) * (1 - overlap)
