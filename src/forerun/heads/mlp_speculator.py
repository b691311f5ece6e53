"""MLP speculator (arXiv 2404.19124): a small recurrent network that starts from the target's last hidden state.

Depth k, from 0: ``s_k = GELU(LN_k(w_s P_k s_(k-1) + w_e E_k[token above]))``, logits ``H_k s_k``, where s_(-1) is the
target's state. Parameter names are those on disk (`checkpoints.mlp_speculator`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from forerun.drafters.heads.base import Attend, HeadConfig, RecurrentHead, Stepped
from forerun.drafters.heads.drafting import HeadDrafter
from forerun.drafters.heads.layers import rms_norm
from forerun.errors import ArgumentError
from forerun.types import LAST_HIDDEN

EPS = 1e-6  # Epsilon of the norms: no file says another


@dataclass(frozen=True, kw_only=True, slots=True)
class MlpSpeculatorConfig(HeadConfig):
    """Shape of an MLP speculator, named as in its ``config.json``."""

    n_predict: int = 3  # Depths: tokens drafted beyond the target's own
    inner_dim: int  # Width of the states; the target's hidden size unless said otherwise
    tie_weights: bool = False  # All depths share their weights, but the first has a projection of its own
    scale_input: bool = False  # Normalise the target's state, which is then worth half

    def __post_init__(self) -> None:
        least = 2 if self.tie_weights else 1
        if self.n_predict < least or self.inner_dim < 1:
            got = f"{self.n_predict} and {self.inner_dim}"
            raise ArgumentError(
                f"MLP speculator: n_predict must be at least {least} and inner_dim at least 1, got {got}"
            )
        if self.reduced_vocabulary or self.boundaries != (LAST_HIDDEN,):
            raise ArgumentError(
                "MLP speculator: it proposes all of the target's tokens and reads its last hidden state; leave "
                "draft.vocab_size and boundaries away"
            )

    @property
    def kind(self) -> str:
        return "mlp_speculator"

    @property
    def max_depth(self) -> int | None:
        return self.n_predict

    @classmethod
    def fields_for(cls, kind: str, config: Any, options: Mapping[str, Any]) -> dict[str, Any]:
        return {"boundaries": (LAST_HIDDEN,), "inner_dim": config.hidden_size, **options}

    @property
    def state_weight(self) -> float:
        """Weight w_s of the state: after all depths the target's state weighs half."""
        return math.pow(0.5, 0.5 / self.n_predict)

    @property
    def emb_weight(self) -> float:
        """Weight w_e of embeddings whose entries are of the size 1 / sqrt(inner_dim)."""
        return math.sqrt((1 - self.state_weight**2) * self.inner_dim / 2)


class MlpSpeculatorHead(RecurrentHead):
    """An MLP speculator, see `RecurrentHead`."""

    Config = MlpSpeculatorConfig
    config: MlpSpeculatorConfig

    def __init__(self, config: MlpSpeculatorConfig) -> None:
        super().__init__()
        self.config = config
        inner, vocab, first = config.inner_dim, config.vocab_size, config.target_hidden_size
        depths, projections = (1, 2) if config.tie_weights else (config.n_predict, config.n_predict)
        self.emb = nn.ModuleList(nn.Embedding(vocab, inner) for _ in range(depths))
        self.proj = nn.ModuleList(
            nn.Linear(inner if depth else first, inner, bias=False) for depth in range(projections)
        )
        self.head = nn.ModuleList(nn.Linear(inner, vocab, bias=False) for _ in range(depths))
        self.ln = nn.ModuleList(ShiftedNorm(inner) for _ in range(depths))
        for module in (*self.emb, *self.proj, *self.head):
            nn.init.trunc_normal_(module.weight, std=inner**-0.5)

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self.emb[0].weight  # type: ignore[assignment]
        return weight

    def start_as(self, model: Any, token_ids: Tensor | None) -> None:
        """Copy nothing: the states are the speculator's own."""

    def fuse(self, features: Sequence[Tensor]) -> Tensor:
        return features[0]

    def prefix(self, features: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        if not self.config.scale_input:
            return features
        return rms_norm(features, torch.ones_like(features[0, 0]), EPS).mul(0.5**0.5)

    def embed(self, tokens: Tensor, depth: int = 0) -> Tensor:
        found: Tensor = _of(self.emb, depth)(tokens)
        return found

    def step(self, depth: int, embeds: Tensor, memory: Tensor) -> Stepped:
        mixed = self.config.state_weight * _of(self.proj, depth)(memory) + self.config.emb_weight * embeds
        state = gelu(_of(self.ln, depth)(mixed))
        return Stepped(memory=state, output=state)

    def logits(self, output: Tensor, depth: int = 0) -> Tensor:
        found: Tensor = _of(self.head, depth)(output)
        return found

    def output_head(self, depth: int) -> tuple[Tensor, Tensor | None]:
        return _of(self.head, depth).weight, None


class ShiftedNorm(nn.Module):
    """A root-mean-square norm with a bias, computed in float32."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, states: Tensor) -> Tensor:
        """Normalise (.., size) -> (.., size) in the dtype of `states`."""
        return (rms_norm(states, self.weight, EPS) + self.bias).to(states.dtype)


def _of(modules: nn.ModuleList, depth: int) -> Any:
    """Return the module of a depth; tied ones are the last that there is."""
    return modules[min(depth, len(modules) - 1)]


class MlpSpeculatorDrafter(HeadDrafter):
    """Drafts with an MLP speculator: chain, fixed tree or dynamic tree."""

    name = "mlp_speculator"
