"""Real speculative decoding with a head that is being trained: acceptance on held-out prompts.

Mean acceptance lengths are pooled over all steps of all prompts and include the bonus token. Knows no trainer.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from forerun.drafters.heads.base import Head
from forerun.types import SamplingParams, SpeculationStats


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationSettings:
    """What is decoded."""

    max_tokens: int = 64
    """Of each answer."""
    num_speculative_tokens: int = 5
    """Length of the chain, and depth of the tree; no more than the head drafts."""
    top_k: int = 4
    """Of the dynamic tree."""
    nodes: int = 32
    """Of the dynamic tree, root not counted."""
    seed: int = 0
    """Of the sampled answers."""
    rows: int = 4
    """Prompts at once."""


class Evaluation:
    """Decodes the same prompts again and again with whatever the head has become."""

    def __init__(
        self, model: Any, prompts: Sequence[Sequence[int]], settings: EvaluationSettings | None = None
    ) -> None:
        """`model` is the target, a transformers causal LM; `prompts` are token ids."""
        self.model, self.prompts = model, [list(prompt) for prompt in prompts]
        self.settings = settings or EvaluationSettings()

    def __call__(self, head: Head) -> Mapping[str, float]:
        """``chain_t0``, ``tree_t0``, ``chain_t1``, ``tree_t1``: mean acceptance lengths, bonus included.

        Also ``acceptance_0`` ...: how often the chain at temperature 0 got that far.
        """
        from forerun import LLM

        drafting = copy.deepcopy(head).to(self.model.device, self.model.dtype).eval()
        longest = max(map(len, self.prompts)) + self.settings.max_tokens
        llm = LLM(self.model, tokenizer=False, max_num_seqs=self.settings.rows, max_model_len=longest, self_check=False)
        depth = min(self.settings.num_speculative_tokens, head.config.max_depth or self.settings.num_speculative_tokens)
        base = {"method": head.config.kind, "model": drafting, "num_speculative_tokens": depth}
        tree = {"top_k": self.settings.top_k, "nodes": self.settings.nodes}
        shapes = {"chain": {**base, "shape": (1,) * depth}, "tree": {**base, **tree}}
        found: dict[str, float] = {}
        for temperature in (0, 1):
            for name, config in shapes.items():
                stats = self._stats(llm, config, float(temperature))
                found[f"{name}_t{temperature}"] = stats.mean_acceptance_length
                if name == "chain" and temperature == 0:
                    found.update({f"acceptance_{d}": rate for d, rate in enumerate(stats.acceptance_per_depth)})
        return found

    def _stats(self, llm: Any, config: Mapping[str, Any], temperature: float) -> SpeculationStats:
        params = SamplingParams(
            temperature=temperature,
            top_p=1.0,
            top_k=0,
            repetition_penalty=1.0,
            max_tokens=self.settings.max_tokens,
            seed=self.settings.seed,
            detokenize=False,
        )
        total = SpeculationStats()
        with torch.random.fork_rng(devices=[]):
            prompts = [{"prompt_token_ids": prompt} for prompt in self.prompts]
            for output in llm.generate(prompts, params, speculative=config):
                total.add(output.outputs[0].speculation)
        return total
