"""EAGLE (arXiv 2401.15077, 2406.16858, 2503.01840): a small decoder over hidden states of the target.

One module for EAGLE-1 and -2, which continue the target's last hidden state, and EAGLE-3 with its variants, which fuses
several; `EagleConfig` says which. EAGLE-3.1's ``fc_norm`` and ``norm_output`` follow its notes of May 2026. Parameter
names are those on disk. How a layer attends is the caller's business: over a cache, or over unrolled steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from forerun.drafters.heads.base import Advanced, Angles, Attend, HeadConfig, SequentialHead
from forerun.drafters.heads.drafting import HeadDrafter, HeadDrafterConfig
from forerun.errors import ArgumentError
from forerun.model.layers import base_of
from forerun.types import LAST_HIDDEN

FEATURE_NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Variants of EAGLE-3 in how features are normed and fed back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EagleConfig(HeadConfig):
    """Shape and variant of an EAGLE head; the defaults are those of the first EAGLE-3 checkpoints.

    ``generation`` 3 fuses several boundaries and predicts tokens (arXiv 2503.01840); 1 continues the target's last
    hidden state and reads its output head (EAGLE-1 and EAGLE-2, arXiv 2401.15077 and 2406.16858).
    """

    FROM_TARGET: ClassVar[frozenset[str]] = HeadConfig.FROM_TARGET - {"boundaries"} | {
        "generation",
        "hidden_size",
        "fc_bias",
    }

    generation: int = 3
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_hidden_layers: int = 1
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: Mapping[str, Any] | None = None  # As in transformers (``rope_type`` and its parameters), no theta
    max_position_embeddings: int = 2048  # Most positions of a sequence
    hidden_act: str = "silu"
    sliding_window: int | None = None  # Positions that a layer looks back, itself included; None: to the beginning
    full_layers: tuple[int, ...] = ()  # Layers, counted from 0, that look back to the beginning in spite of the window
    attention_bias: bool = False
    mlp_bias: bool = False
    fc_bias: bool = False  # Original EAGLE-1 heads have one; vLLM drops it without a word
    qk_norm: bool = False  # Normalise queries and keys per head (Qwen3-style layers)
    norm_before_residual: bool = False
    """The residual stream of the first layer is the normed feature (speculators) instead of the feature (EAGLE)."""
    norm_before_fc: bool = False  # One norm over the concatenated features before they are fused (``input_norm``)
    fc_norm: bool = False  # One norm for each boundary's features before they are fused (EAGLE-3.1)
    norm_output: bool = False  # The next step reads the normed output (EAGLE-3.1), not the residual stream (EAGLE-3)
    own_embedding: bool = False  # The checkpoint brings an embedding table; otherwise the target's is used
    own_lm_head: bool = True  # The checkpoint brings an output head; otherwise the target's is used
    initializer_range: float = 0.02  # Standard deviation of fresh weights

    def __post_init__(self) -> None:
        if problem := _problem(self):
            raise ArgumentError(f"EAGLE head: {problem}")

    @property
    def kind(self) -> str:
        return "eagle3" if self.generation == 3 else "eagle"

    @property
    def obstacle(self) -> str | None:
        if self.own_embedding or self.hidden_size == self.target_hidden_size:
            return None
        return f"a head of hidden size {self.hidden_size} needs an embedding of its own"

    def window(self, layer: int) -> int | None:
        """Positions that this layer looks back, itself included; None: to the beginning."""
        return None if layer in self.full_layers else self.sliding_window

    @classmethod
    def fields_for(cls, kind: str, config: Any, options: Mapping[str, Any]) -> dict[str, Any]:
        """See `HeadConfig.fields_for`; an EAGLE-1 head reads the target's output head unless it gets one."""
        rope = dict(getattr(config, "rope_parameters", None) or {})
        theta = rope.pop("rope_theta", 10_000.0)
        heads = config.num_attention_heads
        found: dict[str, Any] = {
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
            "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
            "rms_norm_eps": getattr(config, "rms_norm_eps", None) or 1e-5,
            "rope_theta": theta,
            "rope_scaling": None if rope.get("rope_type", "default") == "default" else rope,
            "max_position_embeddings": config.max_position_embeddings,
        }
        norms = [name for name in FEATURE_NORMS if options.get(name)]
        if kind != "eagle3" and norms:
            raise ArgumentError(f"an EAGLE-1 head has no norms around its features; leave {', '.join(norms)} away")
        if kind != "eagle3":
            found |= {"generation": 1, "boundaries": (LAST_HIDDEN,), "own_lm_head": False}
        elif not options.get("boundaries"):
            found["boundaries"] = default_boundaries(config.num_hidden_layers)
        lists = ("boundaries", "full_layers")
        found |= {name: tuple(options[name]) for name in lists if options.get(name)}
        return found | {name: value for name, value in options.items() if name not in lists}


def default_boundaries(num_layers: int) -> tuple[int, ...]:
    """EAGLE-3's choice for a target of at least 3 layers: after 2 layers, half, and all but 3; distinct, in 1..n."""
    if num_layers < 3:
        raise ArgumentError(f"EAGLE-3 reads three boundaries; a target of {num_layers} layers has too few")
    chosen: list[int] = []
    for wanted in (2, num_layers // 2, num_layers - 3):
        free = [(abs(boundary - wanted), boundary) for boundary in range(1, num_layers + 1) if boundary not in chosen]
        chosen.append(min(free)[1])
    return tuple(sorted(chosen))


def _problem(config: EagleConfig) -> str | None:
    if config.generation not in (1, 3):
        return f"generation is 1 or 3, got {config.generation}"
    if not 1 <= config.draft_vocab_size <= config.vocab_size:
        return f"draft_vocab_size must be in 1..{config.vocab_size}, the target's; got {config.draft_vocab_size}"
    if config.num_attention_heads % config.num_key_value_heads:
        return f"{config.num_attention_heads} query heads cannot share {config.num_key_value_heads} key-value heads"
    if not config.boundaries or len(set(config.boundaries)) != len(config.boundaries):
        return f"boundaries must be distinct and at least one, got {config.boundaries}"
    if config.generation == 1 and config.boundaries != (LAST_HIDDEN,):
        return f"an EAGLE-1 head reads the last hidden state alone, got boundaries {config.boundaries}"
    if any(boundary < 0 and boundary != LAST_HIDDEN for boundary in config.boundaries):
        return f"boundaries count layers from 0, got {config.boundaries}"
    if config.sliding_window is not None and config.sliding_window < 1:
        return f"sliding_window must be at least 1 position, got {config.sliding_window}"
    if config.full_layers and not (
        config.sliding_window is not None
        and list(config.full_layers) == sorted(set(config.full_layers) & set(range(config.num_hidden_layers)))
        and len(config.full_layers) < config.num_hidden_layers
    ):
        return (
            f"full_layers are some, not all, of the {config.num_hidden_layers} layers of a head with a sliding_window, "
            f"in order and counted from 0; got {config.full_layers} with the window {config.sliding_window}"
        )
    if not config.own_lm_head and config.reduced_vocabulary:
        return "a reduced draft vocabulary needs its own lm_head"
    if config.generation == 3 and not config.own_lm_head and config.hidden_size != config.target_hidden_size:
        return "a head of another hidden size than the target's needs its own lm_head"
    return None


class EagleHead(SequentialHead):
    """EAGLE-1 and -2 or EAGLE-3 with its variants, as `EagleConfig` says; see `SequentialHead`."""

    Config = EagleConfig
    config: EagleConfig
    d2t: Tensor

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        size, eps = config.hidden_size, config.rms_norm_eps
        width = len(config.boundaries) * config.target_hidden_size
        self.fc = nn.Linear(size + width if config.generation == 1 else width, size, bias=config.fc_bias)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(width, eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(config.target_hidden_size, eps) for _ in config.boundaries)
        self.layers = nn.ModuleList(HeadLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm: nn.Module = RMSNorm(size, eps) if config.generation == 3 else nn.Identity()
        if config.own_lm_head:
            self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.rotary = Rotary(config)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=config.initializer_range)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    @property
    def token_ids(self) -> Tensor:
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self.fc.weight
        return weight

    @property
    def feature_size(self) -> int:
        return self.config.hidden_size

    @property
    def recordable(self) -> bool:
        # The frequencies of these depend on the largest position, which transformers reads on the host.
        return self.rotary.rope_type not in ("dynamic", "longrope")

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(self.config.window(layer) for layer in range(self.config.num_hidden_layers))

    @torch.no_grad()
    def set_vocabulary(self, token_ids: Tensor) -> None:
        """Let entry j of the output head mean ``token_ids[j]`` (Vd,) of the target."""
        self.d2t.copy_(token_ids - torch.arange(len(token_ids), device=token_ids.device))

    def fuse(self, features: Sequence[Tensor]) -> Tensor:
        """See `Head.fuse`. Generation 1 reads its one boundary as it is: its ``fc`` also wants the embedding."""
        if self.config.generation == 1:
            return features[0]
        if self.config.fc_norm:
            features = [norm(feature) for norm, feature in zip(self.fc_norm, features, strict=True)]
        joined = torch.cat(list(features), dim=-1)
        if self.config.norm_before_fc:
            joined = self.input_norm(joined)
        fused: Tensor = self.fc(joined)
        return fused

    def angles(self, positions: Tensor, like: Tensor) -> Angles:
        cosine, sine = self.rotary(like, positions)
        return cosine, sine

    def advance(self, embeds: Tensor, features: Tensor, angles: Angles, attend: Attend) -> Advanced:
        states = features
        if self.config.generation == 1:
            states = self.fc(torch.cat([embeds, features], dim=-1))
        for layer in self.layers:
            states = layer(embeds, states, angles, attend)
        output = self.norm(states)
        return Advanced(output if self.config.norm_output else states, output)

    def embed(self, tokens: Tensor) -> Tensor | None:
        return self.embed_tokens(tokens) if self.config.own_embedding else None

    def logits(self, output: Tensor) -> Tensor | None:
        return self.lm_head(output) if self.config.own_lm_head else None

    def start_as(self, model: Any, token_ids: Tensor | None) -> None:
        """Output head and embedding of its own, and EAGLE-3's norm, where it is as wide as the target's final one."""
        if token_ids is not None:
            self.set_vocabulary(token_ids)
        if self.config.own_lm_head:
            rows = slice(None) if token_ids is None else token_ids
            self.lm_head.weight.copy_(model.get_output_embeddings().weight[rows].float())
        if self.config.own_embedding:
            self.embed_tokens.weight.copy_(model.get_input_embeddings().weight.float())
        # The target's final norm where it is a plain RMS norm called ``norm``; Gemma's is off by one.
        gemma = "gemma" in model.config.model_type
        norm: Any = None if gemma else getattr(getattr(base_of(model), "norm", None), "weight", None)
        if self.config.generation == 3 and norm is not None and norm.shape == (self.config.hidden_size,):
            self.norm.load_state_dict({"weight": norm.float()})


class Eagle3Drafter(HeadDrafter):
    """Drafts with an EAGLE-3 head: chain, fixed tree or dynamic tree."""

    name = "eagle3"


class EagleDrafter(HeadDrafter):
    """Drafts with an EAGLE-1 head: chain, fixed tree or dynamic tree."""

    name = "eagle"


@dataclass(frozen=True, kw_only=True, slots=True)
class Eagle2DrafterConfig(HeadDrafterConfig):
    """As of the other drafters with a head; the dynamic tree is EAGLE-2's own unless its size is given."""

    top_k: int | None = 10  # Nodes expanded per level and children looked at per node
    nodes: int = 59  # Nodes of the dynamic tree, root not counted


class Eagle2Drafter(HeadDrafter):
    """Drafts a dynamic tree with an EAGLE-1 head."""

    name = "eagle2"
    Config = Eagle2DrafterConfig


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, states: Tensor) -> Tensor:
        """(.., size) -> (.., size) in the dtype of `states`."""
        return rms_norm(states, self.weight, self.eps)


class HeadAttention(nn.Module):
    """Projections around an attention that somebody else computes."""

    def __init__(self, config: EagleConfig, layer: int, width: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(width, queries, bias=config.attention_bias)
        self.k_proj = nn.Linear(width, keys, bias=config.attention_bias)
        self.v_proj = nn.Linear(width, keys, bias=config.attention_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.attention_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, states: Tensor, angles: Angles, attend: Attend) -> Tensor:
        """(B, N, width) -> (B, N, H)."""
        shape = (*states.shape[:-1], -1, self.head_dim)
        query = self.q_norm(self.q_proj(states).view(shape)).transpose(1, 2)
        key = self.k_norm(self.k_proj(states).view(shape)).transpose(1, 2)
        value = self.v_proj(states).view(shape).transpose(1, 2)
        attended = attend(self.layer, rotate(query, angles), rotate(key, angles), value)
        projected: Tensor = self.o_proj(attended.flatten(2))
        return projected


class HeadMLP(nn.Module):
    """Gated feed-forward part."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.activation: Any = ACT2FN[config.hidden_act]

    def forward(self, states: Tensor) -> Tensor:
        """(.., H) -> (.., H)."""
        result: Tensor = self.down_proj(gated(self.activation, self.gate_proj(states), self.up_proj(states)))
        return result


class HeadLayer(nn.Module):
    """One decoder layer. The first of an EAGLE-3 head reads token embeddings beside the feature."""

    def __init__(self, config: EagleConfig, layer: int) -> None:
        super().__init__()
        self.reads_embedding = config.generation == 3 and layer == 0
        self.norm_before_residual = config.norm_before_residual
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = HeadAttention(config, layer, 2 * size if self.reads_embedding else size)
        self.mlp = HeadMLP(config)
        normed = config.generation == 3 or layer > 0
        self.input_layernorm: nn.Module = RMSNorm(size, eps) if normed else nn.Identity()
        if self.reads_embedding:
            self.hidden_norm = RMSNorm(size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)

    def forward(self, embeds: Tensor, states: Tensor, angles: Angles, attend: Attend) -> Tensor:
        """`embeds` and `states` (B, N, H) -> (B, N, H), the residual stream after the layer."""
        if self.reads_embedding:
            normed = self.hidden_norm(states)
            inputs = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
            residual = normed if self.norm_before_residual else states
        else:
            inputs, residual = self.input_layernorm(states), states
        states = residual + self.self_attn(inputs, angles, attend)
        mixed: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return mixed


class Rotary(LlamaRotaryEmbedding):  # type: ignore[misc]
    """Llama's rotary embedding in float32 whatever the head is turned into: in bfloat16 far positions fall together.
    Raises KeyError, TypeError or ValueError where a parameter of `EagleConfig.rope_scaling` makes no sense."""

    def __init__(self, config: EagleConfig) -> None:
        rope = {"rope_type": "default", **(config.rope_scaling or {}), "rope_theta": config.rope_theta}
        sizes = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings")
        super().__init__(LlamaConfig(**{name: getattr(config, name) for name in sizes}, rope_parameters=rope))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rotary:
        moved: Rotary = super()._apply(lambda tensor: tensor.to(fn(tensor).device), recurse)
        return moved


# The element-wise parts of a layer keep only their inputs for the backward pass: autograd would keep every value in
# between, in float32 for the norms: unrolled seven times, twice what the layer's products keep.
Activation = Callable[[Tensor], Tensor]


def rms_norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm of (.., size), computed in float32; in the dtype of `states`."""
    if _tracked(states, weight):
        normed: Tensor = _Norm.apply(states, weight, eps)  # type: ignore[no-untyped-call]
        return normed
    return _normed(states, weight, eps)[0]


def gated(activation: Activation, gate: Tensor, up: Tensor) -> Tensor:
    """``activation(gate) * up``."""
    if _tracked(gate, up):
        product: Tensor = _Gated.apply(activation, gate, up)  # type: ignore[no-untyped-call]
        return product
    return activation(gate) * up


def rotate(states: Tensor, angles: Angles) -> Tensor:
    """Rotary position embedding of (B, heads, N, D), halves paired as in Llama."""
    cosine, sine = (part.unsqueeze(1) for part in angles)
    if _tracked(states, cosine, sine):
        rotated: Tensor = _Rotation.apply(states, cosine, sine)  # type: ignore[no-untyped-call]
        return rotated
    return _rotated(states, cosine, sine)


def _tracked(*tensors: Tensor) -> bool:
    """Whether a backward pass may follow. What was made in inference mode may not be kept for one."""
    return torch.is_grad_enabled() and not any(tensor.is_inference() for tensor in tensors)


def _normed(states: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = states.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight * (wide * inverse).to(states.dtype)).to(states.dtype), inverse


class _Norm(torch.autograd.Function):
    """`rms_norm`; keeps the states and one number for each of them."""

    @staticmethod
    def forward(context: Any, states: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed, inverse = _normed(states, weight, eps)
        context.save_for_backward(states, weight, inverse)
        return normed

    @staticmethod
    def backward(context: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, inverse = context.saved_tensors
        normed, flow = states.float() * inverse, upstream[0].float()
        weight_grad = (flow * normed).flatten(0, -2).sum(0).to(weight.dtype)
        pull = flow * weight.float()
        along = (pull * normed).mean(-1, keepdim=True)
        return pull.sub_(normed.mul_(along)).mul_(inverse).to(states.dtype), weight_grad, None


class _Gated(torch.autograd.Function):
    """`gated`; the backward pass computes the activation once more."""

    @staticmethod
    def forward(context: Any, activation: Activation, gate: Tensor, up: Tensor) -> Tensor:
        context.activation = activation
        context.save_for_backward(gate, up)
        return activation(gate) * up

    @staticmethod
    def backward(context: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = context.saved_tensors
        with torch.enable_grad():
            gate = gate.detach().requires_grad_()
            active = context.activation(gate)
        (gate_grad,) = torch.autograd.grad(active, gate, upstream[0] * up)
        return None, gate_grad, upstream[0] * active.detach()


def _rotated(states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = states.chunk(2, dim=-1)
    return states * cosine + torch.cat([-second, first], dim=-1) * sine


class _Rotation(torch.autograd.Function):
    """`rotate`: linear in the states, so the angles alone are kept."""

    @staticmethod
    def forward(context: Any, states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        context.save_for_backward(cosine, sine)
        return _rotated(states, cosine, sine)

    @staticmethod
    def backward(context: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        cosine, sine = context.saved_tensors
        first, second = (upstream[0] * sine).chunk(2, dim=-1)
        return upstream[0] * cosine + torch.cat([second, -first], dim=-1), None, None
