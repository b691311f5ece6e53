"""What transformers itself says: the target's logits without our cache, kernels or engine, and its own processors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forerun.errors import ArgumentError

if TYPE_CHECKING:
    from forerun import LLM
    from forerun.types import SamplingParams


class Reference:
    """The same checkpoint as transformers loads and runs it.

    Args:
        model: a `PreTrainedModel` that nothing of ours has touched.
    """

    def __init__(self, model: Any) -> None:
        self.model = model.eval()

    @classmethod
    def of(cls, llm: LLM) -> Reference:
        """Load the target once more, in the engine's dtype and on its device.

        Raises:
            ArgumentError: the engine was built from a model in memory, which has no checkpoint to load again.
        """
        from transformers import AutoModelForCausalLM

        if not llm.target.name_or_path:
            raise ArgumentError(
                "certify compares with the checkpoint as transformers loads it; this engine was built from a model in "
                "memory: pass certify(..., reference=Reference(MODEL)) with a copy made before"
            )
        model = AutoModelForCausalLM.from_pretrained(llm.target.name_or_path, dtype=llm.target.dtype)
        return cls(model.to(llm.target.device))

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], last: int) -> Tensor:
        """(last, V) float32: raw logits after each of the `last` tokens of a text, from one pass over it."""
        ids = torch.tensor([list(tokens)], device=self.model.device)
        found: Tensor = self.model(input_ids=ids, use_cache=False).logits[0, -last:].float()
        return found

    def probs(self, tokens: Sequence[int], params: SamplingParams) -> Tensor:
        """(V,) float64: distribution of the next token under temperature, top-k, top-p and min-p, as transformers
        applies them."""
        from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

        scores, ids = self.logits(tokens, 1), torch.zeros(1, 0, dtype=torch.int64)
        scores = TemperatureLogitsWarper(float(params.temperature or 1.0))(ids, scores)
        if params.top_k:
            scores = TopKLogitsWarper(params.top_k)(ids, scores)
        if params.top_p is not None and params.top_p < 1:
            scores = TopPLogitsWarper(params.top_p)(ids, scores)
        if params.min_p:
            scores = MinPLogitsWarper(params.min_p)(ids, scores)
        found: Tensor = scores[0].double().softmax(-1).cpu()
        return found
