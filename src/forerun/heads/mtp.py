"""Mixture of experts of DeepSeek-V3's kind, as GLM-4-MoE has it too: sigmoid routing in groups, shared experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.activations import ACT2FN

from forerun.drafters.heads.layers import DecoderConfig, HeadMLP

GATHERED = 1 << 28  # Weights of experts copied at once on an accelerator: 512 MB in bfloat16


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsConfig:
    """Routing and sizes of the experts, named as in transformers' DeepSeek-V3."""

    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    n_shared_experts: int = 1
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0

    def problem(self) -> str | None:
        """Describe what contradicts itself; None: nothing."""
        if min(self.n_routed_experts, self.num_experts_per_tok, self.n_group, self.topk_group) < 1:
            return "experts, experts a token and groups must be at least 1"
        inside = self.n_routed_experts // self.n_group
        if self.n_routed_experts % self.n_group or inside < 2 or self.topk_group > self.n_group:
            return f"{self.n_routed_experts} experts in {self.n_group} groups, of which {self.topk_group} are taken"
        if self.num_experts_per_tok > self.topk_group * inside:
            return f"{self.num_experts_per_tok} experts a token from {self.topk_group} groups of {inside}"
        return None


class MixtureOfExperts(nn.Module):
    """Routed experts, stored side by side, and one that all tokens share."""

    def __init__(self, config: DecoderConfig, experts: ExpertsConfig) -> None:
        super().__init__()
        self.config = experts
        self.gate = Router(config.hidden_size, experts)
        self.experts = Experts(config, experts)
        self.shared_experts = HeadMLP(config, experts.moe_intermediate_size * experts.n_shared_experts)

    def forward(self, states: Tensor) -> Tensor:
        """Mix the experts of each token: (.., H) -> (.., H)."""
        flat = states.flatten(0, -2)
        mixed = self.experts(flat, *self.gate(flat)).view_as(states)
        result: Tensor = mixed + self.shared_experts(states)
        return result


class Router(nn.Module):
    """Chooses the experts of a token. The correction bias decides who is chosen, not how much an
    expert weighs.
    """

    e_score_correction_bias: Tensor

    def __init__(self, size: int, config: ExpertsConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, size))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts))

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Route (T, H) -> experts (T, k) int64 and their weights (T, k) float32."""
        config = self.config
        scores = linear(states.float(), self.weight.float()).sigmoid()
        ranked = scores.detach() + self.e_score_correction_bias.float()
        if config.topk_group < config.n_group:
            groups = ranked.view(len(ranked), config.n_group, -1)
            best = groups.topk(2, dim=-1).values.sum(-1).topk(config.topk_group, dim=-1, sorted=False).indices
            chosen = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter_(1, best, True)
            ranked = groups.masked_fill(~chosen.unsqueeze(-1), -torch.inf).flatten(1)
        experts = ranked.topk(config.num_experts_per_tok, dim=-1, sorted=False).indices
        weights = scores.gather(1, experts)
        if config.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return experts, weights * config.routed_scaling_factor


class Experts(nn.Module):
    """The gated feed-forward parts of E experts."""

    def __init__(self, config: DecoderConfig, experts: ExpertsConfig) -> None:
        super().__init__()
        count, inside, size = experts.n_routed_experts, experts.moe_intermediate_size, config.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * inside, size))
        self.down_proj = nn.Parameter(torch.empty(count, size, inside))
        self.activation: Any = ACT2FN[config.hidden_act]

    def forward(self, states: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Apply to (T, H) the chosen experts (T, k) with their weights (T, k) -> (T, H)."""
        if states.device.type == "cpu" or torch.is_grad_enabled():
            return self._by_expert(states, experts, weights)
        # No number of tokens is known on the host: every token gets copies of its experts' weights.
        size = max(1, GATHERED // (experts.shape[1] * self.gate_up_proj[0].numel()))
        parts = zip(*(torch.split(part, size) for part in (states, experts, weights)), strict=True)
        return torch.cat([self._gathered(*part) for part in parts])

    def _by_expert(self, states: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Run each expert once, over its tokens, which the host counts."""
        chosen, order = experts.flatten().sort(stable=True)
        tokens = order // experts.shape[1]
        counts = torch.bincount(chosen, minlength=len(self.down_proj)).tolist()
        parts = []
        for expert, part in enumerate(torch.split(states[tokens], counts)):
            if len(part):
                parts.append(linear(self._gated(linear(part, self.gate_up_proj[expert])), self.down_proj[expert]))
        scaled = torch.cat(parts) * weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(states).index_add(0, tokens, scaled.to(states.dtype))

    def _gathered(self, states: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        first, second = self.gate_up_proj[experts], self.down_proj[experts]
        inside = self._gated((first @ states[:, None, :, None]).squeeze(-1))
        mixed: Tensor = ((second @ inside.unsqueeze(-1)).squeeze(-1) * weights.unsqueeze(-1)).sum(1)
        return mixed.to(states.dtype)

    def _gated(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, dim=-1)
        product: Tensor = self.activation(gate) * up
        return product
