"""DFlash 2's objective is DFlash's for the block, and the selector's cross-entropy over the
candidates.

z-lab publishes no training; NeMo AutoModel and speculators train the selector on the data's token. Here it learns the
target's distribution among the candidates, after the token that really came above, with the block's weights.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from forerun.drafters.heads.dflash2 import DFlash2Head
from forerun.errors import ArgumentError
from forerun.training.batch import FeatureBatch
from forerun.training.chunked_loss import VocabularyLoss, chunk_elements
from forerun.training.objectives.dflash import BlockOutputs, DFlashObjective, DFlashSettings
from forerun.types import LAST_HIDDEN


@dataclass(frozen=True, kw_only=True, slots=True)
class DFlash2Settings(DFlashSettings):
    """`DFlash2Settings` are anchors, weights and divergence of the block, and the weight of the
    selector.
    """

    selector_weight: float = 1.0
    """Weight of the selector's loss."""

    def __post_init__(self) -> None:
        DFlashSettings.__post_init__(self)
        if self.selector_weight < 0:
            raise ArgumentError(f"objective: selector_weight must not be negative, got {self.selector_weight}")


class DFlash2Objective(DFlashObjective):
    """A `DFlash2Objective` is the loss of a DFlash 2 head on a batch of features; its metrics are
    of what the selector drafts.
    """

    Settings: ClassVar[type[DFlash2Settings]] = DFlash2Settings
    head: DFlash2Head
    settings: DFlash2Settings

    def _loss(self, blocks: BlockOutputs, weights: Tensor, batch: FeatureBatch) -> VocabularyLoss:
        found = super()._loss(blocks, weights, batch)
        losses, agrees, overlap = self._selected(blocks, found.weights, batch)
        loss = found.loss + self.settings.selector_weight * (losses * found.weights).sum()
        return dataclasses.replace(found, loss=loss, agrees=agrees, overlap=overlap)

    def _selected(self, blocks: BlockOutputs, weights: Tensor, batch: FeatureBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Return, (R,) each, the selector's cross-entropy, whether its likeliest token is the
        target's, and its acceptance.

        They are of all blocks and depths, 0 where `weights` (R,) are.
        """
        output, above, weight = blocks.output.flatten(0, 2), self.above(blocks, batch).flatten(), self.output_head()
        last = batch.features[LAST_HIDDEN]
        reduced = self.head.config.reduced_vocabulary
        teacher = self.target.teacher(self.behind(blocks, last), self.head.token_ids if reduced else None)
        rows = weights.nonzero().squeeze(1)
        rows = rows if len(rows) else rows.new_zeros(1)  # the loss reaches the selector where nothing counts, too
        figures = []
        for chosen in torch.split(rows, max(1, chunk_elements(rows.device) // max(len(weight), len(teacher.weight)))):
            with torch.no_grad():
                ids = (output[chosen] @ weight.T.to(output.dtype)).topk(self.head.config.selector_top_k, -1).indices
                probs = teacher.probs(teacher.logits(chosen))
            read = output[chosen], ids, above[chosen], probs.full.gather(-1, ids), probs.best
            figures.append(checkpoint(self._scored, *read, use_reentrant=False))
        found = [torch.zeros_like(weights).index_put((rows,), torch.cat(parts)) for parts in zip(*figures, strict=True)]
        return found[0], found[1].detach(), found[2].detach()

    def _scored(self, output: Tensor, ids: Tensor, above: Tensor, probs: Tensor, best: Tensor) -> tuple[Tensor, ...]:
        """Return, (r,) each, loss, agreement, acceptance of candidates `ids` (r, k) with the
        target's `probs` (r, k).
        """
        logits = (self.output_head()[ids].to(output.dtype) @ output.unsqueeze(-1)).squeeze(-1)
        scores = self.head.candidate_selector(
            logits.unsqueeze(1), ids.unsqueeze(1), output.unsqueeze(1), above.unsqueeze(1)
        ).squeeze(1)
        logs = (scores.float() / self.target.temperature).log_softmax(-1)
        wanted = probs / probs.sum(-1, keepdim=True).clamp_min(torch.finfo(probs.dtype).tiny)
        drafted = self.head.token_ids[ids.gather(-1, scores.argmax(-1, keepdim=True)).squeeze(-1)]
        return -(wanted * logs).sum(-1), drafted.eq(best).float(), torch.minimum(logs.exp(), probs).sum(-1)
