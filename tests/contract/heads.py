"""Small random heads of every kind for a tiny target: mostly wrong, so that every path is walked."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaForCausalLM

from forerun.drafters.kinds import kind_named
from forerun.heads.dflash import DFlashConfig, DFlashHead
from forerun.heads.dflash2 import DFlash2Config
from forerun.heads.domino import DominoConfig
from forerun.heads.dspark import DSparkConfig
from forerun.heads.eagle import EagleConfig, EagleHead
from forerun.heads.gemma4_assistant import Gemma4AssistantConfig, Gemma4AssistantHead
from forerun.heads.hydra import HydraConfig, HydraHead
from forerun.heads.kangaroo import KangarooConfig, KangarooHead
from forerun.heads.layers import LatentConfig
from forerun.heads.medusa import MedusaConfig, MedusaHead
from forerun.heads.mlp_speculator import MlpSpeculatorConfig, MlpSpeculatorHead
from forerun.heads.mtp import ExpertsConfig, MtpConfig, MtpHead
from forerun.heads.peagle import PEagleConfig, PEagleHead
from forerun.types import LAST_HIDDEN

EXPERTS = ExpertsConfig(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
WIDE = ("markov_head", "confidence_head", "prefix_gru", "embed_proj", "candidate_selector")
"""Corrections that begin at nothing, and are made large."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Heads:
    """Heads for one target, each made once."""

    model: LlamaForCausalLM
    layers: dict[str, Any]
    """Sizes of a head with layers of its own."""
    latent: LatentConfig
    known: Sequence[int]
    """The draft vocabulary of heads that have one."""

    @property
    def size(self) -> int:
        """Tokens of the target."""
        return int(self.model.config.vocab_size)

    def _ready(self, head: Any) -> Any:
        return head.eval().to(self.model.dtype)

    @functools.cache  # noqa: B019 - as many as there are targets
    def eagle(self, generation: int = 3, latent: bool = False, **options: Any) -> EagleHead:
        """EAGLE-3's has a draft vocabulary of its own."""
        torch.manual_seed(generation + 7 * latent)
        own = generation == 3
        config = EagleConfig(
            generation=generation,
            **(self.layers | ({"num_key_value_heads": 2, "latent": self.latent} if latent else {})),
            draft_vocab_size=len(self.known) if own else self.size,
            boundaries=(0, 1, 2) if own else (LAST_HIDDEN,),
            own_lm_head=own,
            **options,
        )
        head = EagleHead(config)
        if own:
            head.set_vocabulary(torch.tensor(self.known))
        return self._ready(head)

    @functools.cache  # noqa: B019
    def medusa(self) -> MedusaHead:
        """Of three depths."""
        torch.manual_seed(5)
        sizes = {"target_hidden_size": self.layers["hidden_size"], "vocab_size": self.size}
        config = MedusaConfig(num_heads=3, draft_vocab_size=self.size, boundaries=(LAST_HIDDEN,), **sizes)
        head = MedusaHead(config)
        for weight in head.parameters():
            torch.nn.init.normal_(weight, std=0.3)
        return self._ready(head)

    @functools.cache  # noqa: B019
    def hydra(self, **options: Any) -> HydraHead:
        """Of three depths, Hydra++'s unless the options say otherwise."""
        torch.manual_seed(7)
        given = {"num_heads": 3, "num_layers": 2, "initializer_range": 0.3, **options}
        return self._ready(HydraHead(HydraConfig.for_target("hydra", self.model, options=given)))

    @functools.cache  # noqa: B019
    def mlp(self, **options: Any) -> MlpSpeculatorHead:
        """Of three depths."""
        torch.manual_seed(8)
        config = MlpSpeculatorConfig.for_target("mlp_speculator", self.model, options=options)
        return self._ready(MlpSpeculatorHead(config))

    @functools.cache  # noqa: B019
    def dflash(self, **options: Any) -> DFlashHead:
        """Of blocks of four; with a ``markov_rank`` a DSpark, with an ``emb_dim`` a Domino, with a ``selector_rank`` a
        DFlash 2 head."""
        torch.manual_seed(5)
        kinds: dict[str, Any] = {"markov_rank": DSparkConfig, "emb_dim": DominoConfig, "selector_rank": DFlash2Config}
        given = {"boundaries": (0, 1, 2), "num_hidden_layers": 2, "block_size": 4, "mask_token_id": self.size - 1}
        config = kinds.get(next(iter(options), ""), DFlashConfig)(
            **self.layers, draft_vocab_size=self.size, **given, **options
        )
        head = kind_named(config.kind).head(config)
        for name, weight in head.named_parameters():
            if name.startswith(WIDE):
                torch.nn.init.normal_(weight, std=0.5)
        return self._ready(head)

    @functools.cache  # noqa: B019
    def peagle(self, **options: Any) -> PEagleHead:
        """Of two layers, with a draft vocabulary of its own."""
        torch.manual_seed(7)
        given = {"boundaries": (0, 1, 2), "num_hidden_layers": 2, "mask_token_id": self.size - 1}
        head = PEagleHead(PEagleConfig(**self.layers, draft_vocab_size=len(self.known), **given, **options))
        head.set_vocabulary(torch.tensor(self.known))
        return self._ready(head)

    @functools.cache  # noqa: B019
    def kangaroo(self, **options: Any) -> KangarooHead:
        """An adapter after the first layer."""
        torch.manual_seed(9)
        given = {"boundaries": (1,), "initializer_range": 0.3, **options}
        return self._ready(KangarooHead(KangarooConfig.for_target("kangaroo", self.model, options=given)))

    @functools.cache  # noqa: B019
    def mtp(self, modules: int = 1, sparse: bool = False) -> MtpHead:
        """MTP layers: dense, on the state before the final norm, or as DeepSeek's."""
        torch.manual_seed(6)
        config = MtpConfig(
            **(self.layers | {"num_key_value_heads": 2 if sparse else 1}),
            draft_vocab_size=self.size,
            boundaries=(LAST_HIDDEN,) if sparse else (2,),
            num_hidden_layers=modules,
            experts=EXPERTS if sparse else None,
            latent=self.latent if sparse else None,
        )
        return self._ready(MtpHead(config))

    @functools.cache  # noqa: B019
    def assistant(self, groups: int = 0) -> Gemma4AssistantHead:
        """An assistant of two layers; with `groups` of tokens it looks at half of them."""
        torch.manual_seed(10)
        layers, config = ["full_attention"] * 2, self.model.config
        sizes = {"head_dim": config.head_dim, "global_head_dim": config.head_dim, "num_hidden_layers": 2}
        text = {"model_type": "gemma4_text", "layer_types": layers, "hidden_size": 16, "intermediate_size": 24, **sizes}
        text |= {"num_attention_heads": 2, "num_key_value_heads": config.num_key_value_heads, "vocab_size": self.size}
        text |= dict.fromkeys(("vocab_size_per_layer_input", "hidden_size_per_layer_input"), 0)
        head = Gemma4AssistantHead(
            Gemma4AssistantConfig(
                **{"target_hidden_size": config.hidden_size, "vocab_size": self.size, "draft_vocab_size": self.size},
                **{"boundaries": (LAST_HIDDEN,), "text_config": text, "num_centroids": groups},
                centroid_intermediate_top_k=max(1, groups // 2),
            )
        )
        for name, weight in head.named_parameters():
            torch.nn.init.normal_(weight, mean=float("norm" in name), std=0.3)
        if groups:
            head.token_ordering.copy_(torch.randperm(self.size))
        return self._ready(head)
