"""Decoder layers of draft heads: their configuration, norms, attention, feed-forward part and
rotary embedding.

Parameter names are those on disk. How a layer attends is the caller's business: over a cache, or
over unrolled steps.

One kind of attention is multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), of MTP layers
and EAGLE-3's for Kimi-K2. Parameter names are DeepSeek's on disk. Of queries and keys the last
dimensions are rotated, in pairs that lie side by side; that part of a key is one for all heads.
Keys and values are kept as each head reads them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from forerun.errors import ArgumentError, find_problem
from forerun.heads.base import Angles, Attend, AttendingHead, HeadConfig, check_types
from forerun.model.layers import base_of

ROPE_KINDS = ("default", *ROPE_INIT_FUNCTIONS)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig(HeadConfig):
    """Configuration of a head that is made of decoder layers, named as in transformers."""

    LEAST: ClassVar[Mapping[str, int]] = {
        **dict.fromkeys(("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"), 1),
        **dict.fromkeys(("head_dim", "num_hidden_layers", "max_position_embeddings"), 1),
        **dict.fromkeys(("rms_norm_eps", "initializer_range"), 0),
    }
    """Least value of each field."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_hidden_layers: int = 1
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: Mapping[str, Any] | None = None  # As transformers has it (``rope_type``, its parameters), no theta
    max_position_embeddings: int = 2048  # Most positions of a sequence
    hidden_act: str = "silu"
    sliding_window: int | None = None  # Positions that a layer looks back, itself included; None: to the beginning
    full_layers: tuple[int, ...] = ()  # Layers, counted from 0, that look back to the beginning in spite of the window
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # Normalise queries and keys per head (Qwen3-style layers)
    own_embedding: bool = False  # The checkpoint brings an embedding table; otherwise the target's is used
    own_lm_head: bool = True  # The checkpoint brings an output head; otherwise the target's is used
    initializer_range: float = 0.02  # Standard deviation of fresh weights

    def __post_init__(self) -> None:
        low = (
            f"{name} must be at least {least}, got {getattr(self, name)}"
            for name, least in self.LEAST.items()
            if getattr(self, name) < least
        )
        if problem := next(low, None) or self.problem():
            raise ArgumentError(f"{self.kind} head: {problem}")

    @property
    def obstacle(self) -> str | None:
        if self.own_embedding or self.hidden_size == self.target_hidden_size:
            return None
        return f"a head of hidden size {self.hidden_size} needs an embedding of its own"

    def window(self, layer: int) -> int | None:
        """Return the positions that this layer looks back, itself included; None: to the beginning."""
        return None if layer in self.full_layers else self.sliding_window

    @property
    def rotary_dim(self) -> int:
        """Dimensions of an attention head that are rotated, from the first on."""
        return self.head_dim

    @property
    def output_bias(self) -> bool:
        """True if attention's last projection has a bias, too."""
        return self.attention_bias

    def problem(self) -> str | None:
        """Describe what contradicts itself; None: nothing."""
        if wrong := self._unknown():
            return wrong
        if wrong := find_problem(
            (
                not 1 <= self.draft_vocab_size <= self.vocab_size,
                f"draft_vocab_size must be in 1..{self.vocab_size}, the target's; got {self.draft_vocab_size}",
            ),
            (
                self.num_attention_heads % self.num_key_value_heads,
                f"{self.num_attention_heads} query heads cannot share {self.num_key_value_heads} key-value heads",
            ),
            (
                not self.boundaries or len(set(self.boundaries)) != len(self.boundaries),
                f"boundaries must be distinct and at least one, got {self.boundaries}",
            ),
            (
                self.sliding_window is not None and self.sliding_window < 1,
                f"sliding_window must be at least 1 position, got {self.sliding_window}",
            ),
        ):
            return wrong
        layers = self.num_hidden_layers
        return find_problem(
            (
                self.full_layers
                and not (
                    self.sliding_window is not None
                    and list(self.full_layers) == sorted(set(self.full_layers) & set(range(layers)))
                    and len(self.full_layers) < layers
                ),
                f"full_layers are some, not all, of the {layers} layers of a head with a sliding_window, in order and "
                f"counted from 0; got {self.full_layers} with the window {self.sliding_window}",
            ),
            (
                not self.own_lm_head and self.reduced_vocabulary,
                "a reduced draft vocabulary needs its own lm_head (in a recipe draft.options.own_lm_head=true)",
            ),
        )

    def _unknown(self) -> str | None:
        """Describe an activation or a position embedding that nothing can compute; None: all is
        known.
        """
        if wrong := find_problem(
            (not self.rope_theta > 0, f"rope_theta must be above 0, got {self.rope_theta}"),
            (self.rotary_dim % 2, f"head_dim must be even, pairs of its dimensions are rotated; got {self.rotary_dim}"),
            (self.hidden_act not in ACT2FN, f"hidden_act must be one of {', '.join(ACT2FN)}, got {self.hidden_act!r}"),
            (
                self.rope_scaling is not None and self.rope_scaling.get("rope_type") not in ROPE_KINDS,
                f"rope_scaling must have a rope_type of {', '.join(ROPE_KINDS)}, got {dict(self.rope_scaling or {})}",
            ),
        ):
            return wrong
        try:
            Rotary(self)
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            return f"rope_scaling is {self.rope_scaling}, of which no embedding can be made: {error}"
        return None

    @classmethod
    def layer_fields(cls, config: Any) -> dict[str, Any]:
        """Return the fields of layers like those of the target with this configuration."""
        rope = dict(getattr(config, "rope_parameters", None) or {})
        theta = rope.pop("rope_theta", 10_000.0)
        heads = config.num_attention_heads
        return {
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


class DecoderHead(AttendingHead):
    """The base of heads made of decoder layers: rotary embedding, and an output head and an
    embedding of their own if any. A kind makes its ``layers`` and ``norm``, then calls `complete`.
    """

    config: DecoderConfig
    norm: nn.Module
    d2t: Tensor

    def complete(self) -> None:
        """Make the remaining parts, and draw fresh weights: normal, biases zero."""
        config = self.config
        if config.own_lm_head:
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
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
        return next(self.parameters())  # of a norm, where all linear layers are repacked

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

    def embed(self, tokens: Tensor, depth: int = 0) -> Tensor | None:
        return self.embed_tokens(tokens) if self.config.own_embedding else None

    def logits(self, output: Tensor, depth: int = 0) -> Tensor | None:
        return self.lm_head(output) if self.config.own_lm_head else None

    def angles(self, positions: Tensor, like: Tensor) -> Angles:
        cosine, sine = self.rotary(like, positions)
        return cosine, sine

    @torch.no_grad()
    def set_vocabulary(self, token_ids: Tensor) -> None:
        """Let entry j of the output head mean ``token_ids[j]`` (Vd,) of the target."""
        self.d2t.copy_(token_ids - torch.arange(len(token_ids), device=token_ids.device))

    def start_as(self, model: Any, token_ids: Tensor | None) -> None:
        """Copy the target's weights to the head's own output head and embedding, and to the final
        norm where it is as wide as the target's.
        """
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
        if isinstance(self.norm, RMSNorm) and norm is not None and norm.shape == self.norm.weight.shape:
            self.norm.load_state_dict({"weight": norm.float()})

    def scales(self) -> Sequence[nn.Parameter]:
        return (self.norm.weight,) if isinstance(self.norm, RMSNorm) else ()


class RMSNorm(nn.Module):
    """A root-mean-square norm, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, states: Tensor) -> Tensor:
        """Normalise (.., size) -> (.., size) in the dtype of `states`."""
        return rms_norm(states, self.weight, self.eps)


class HeadAttention(nn.Module):
    """The projections around an attention that the caller computes; `width` is that of their input,
    H if it is None.
    """

    def __init__(self, config: DecoderConfig, layer: int, width: int | None = None) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        width = config.hidden_size if width is None else width
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(width, queries, bias=config.attention_bias)
        self.k_proj = nn.Linear(width, keys, bias=config.attention_bias)
        self.v_proj = nn.Linear(width, keys, bias=config.attention_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.output_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, states: Tensor, angles: Angles, attend: Attend) -> Tensor:
        """Attend: (B, N, width) -> (B, N, H)."""
        query = rotate(self.q_norm(self._split(self.q_proj(states))).transpose(1, 2), angles)
        attended = attend(self.layer, query, *self.entries(states, angles))
        return self.o_proj(attended.flatten(2))

    def entries(self, states: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """Return keys, rotated, and values of (B, N, width), (B, groups, N, D) each."""
        key = rotate(self.k_norm(self._split(self.k_proj(states))).transpose(1, 2), angles)
        return key, self._split(self.v_proj(states)).transpose(1, 2)

    def _split(self, states: Tensor) -> Tensor:
        return states.view(*states.shape[:-1], -1, self.head_dim)


class HeadMLP(nn.Module):
    """A gated feed-forward part; of the configuration's intermediate size if none is given."""

    def __init__(self, config: DecoderConfig, intermediate_size: int | None = None) -> None:
        super().__init__()
        inside = config.intermediate_size if intermediate_size is None else intermediate_size
        self.gate_proj = nn.Linear(config.hidden_size, inside, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, inside, bias=config.mlp_bias)
        self.down_proj = nn.Linear(inside, config.hidden_size, bias=config.mlp_bias)
        self.activation: Any = ACT2FN[config.hidden_act]

    def forward(self, states: Tensor) -> Tensor:
        """Apply the feed-forward part: (.., H) -> (.., H)."""
        return self.down_proj(gate_and_multiply(self.activation, self.gate_proj(states), self.up_proj(states)))


class DecoderLayer(nn.Module):
    """A decoder layer as in Llama, with norms of queries and keys as in Qwen3."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = HeadAttention(config, layer)
        self.mlp = HeadMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, states: Tensor, angles: Angles, attend: Attend) -> Tensor:
        """Run the layer: (B, N, H) -> (B, N, H), the residual stream after it."""
        states = states + self.self_attn(self.input_layernorm(states), angles, attend)
        return states + self.mlp(self.post_attention_layernorm(states))


class Rotary(LlamaRotaryEmbedding):  # type: ignore[misc]
    """Llama's rotary embedding, in float32 whatever dtype the head gets: in bfloat16 far positions
    fall together. Raises KeyError, TypeError or ValueError if a parameter of
    `DecoderConfig.rope_scaling` makes no sense.
    """

    def __init__(self, config: DecoderConfig) -> None:
        rope = {"rope_type": "default", **(config.rope_scaling or {}), "rope_theta": config.rope_theta}
        # It is declared as one head of its size: a Llama's hidden size must be a multiple of its heads, a GLM's is not.
        size = dict.fromkeys(("hidden_size", "head_dim"), config.rotary_dim)
        heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
        longest = config.max_position_embeddings
        super().__init__(LlamaConfig(**size, **heads, max_position_embeddings=longest, rope_parameters=rope))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rotary:
        return super()._apply(lambda tensor: tensor.to(fn(tensor).device), recurse)


# The element-wise parts of a layer keep only their inputs for the backward pass: autograd would keep every value in
# between, in float32 for the norms: unrolled seven times, twice what the layer's products keep.
Activation = Callable[[Tensor], Tensor]


def rms_norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute the root-mean-square norm of (.., size) in float32; the result has the dtype of
    `states`.
    """
    if _needs_grad(states, weight):
        return _Norm.apply(states, weight, eps)  # type: ignore[no-untyped-call]
    return _norm(states, weight, eps)[0]


def gate_and_multiply(activation: Activation, gate: Tensor, up: Tensor) -> Tensor:
    """Compute ``activation(gate) * up``."""
    if _needs_grad(gate, up):
        return _Gated.apply(activation, gate, up)  # type: ignore[no-untyped-call]
    return activation(gate) * up


def rotate(states: Tensor, angles: Angles) -> Tensor:
    """Apply the rotary position embedding to (B, heads, N, D), halves paired as in Llama: to the
    first dimensions, as many as there are `angles`.
    """
    cosine, sine = (part.unsqueeze(1) for part in angles)
    if (turned := cosine.shape[-1]) < states.shape[-1]:
        return torch.cat([rotate(states[..., :turned], angles), states[..., turned:]], dim=-1)
    if _needs_grad(states, cosine, sine):
        return _Rotation.apply(states, cosine, sine)  # type: ignore[no-untyped-call]
    return _rotate(states, cosine, sine)


def _needs_grad(*tensors: Tensor) -> bool:
    """Return whether a backward pass may follow. Tensors made in inference mode may not be kept for
    one.
    """
    return torch.is_grad_enabled() and not any(tensor.is_inference() for tensor in tensors)


def _norm(states: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = states.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight * (wide * inverse).to(states.dtype)).to(states.dtype), inverse


class _Norm(torch.autograd.Function):
    """Autograd function of `rms_norm`; it keeps the states and one number for each of them."""

    @staticmethod
    def forward(context: Any, states: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed, inverse = _norm(states, weight, eps)
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
    """Autograd function of `gate_and_multiply`; the backward pass computes the activation once more."""

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


def _rotate(states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = states.chunk(2, dim=-1)
    return states * cosine + torch.cat([-second, first], dim=-1) * sine


class _Rotation(torch.autograd.Function):
    """Autograd function of `rotate`: linear in the states, so only the angles are kept."""

    @staticmethod
    def forward(context: Any, states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        context.save_for_backward(cosine, sine)
        return _rotate(states, cosine, sine)

    @staticmethod
    def backward(context: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        cosine, sine = context.saved_tensors
        first, second = (upstream[0] * sine).chunk(2, dim=-1)
        return upstream[0] * cosine + torch.cat([second, -first], dim=-1), None, None


LATENT_EPS = 1e-6  # Epsilon of the norms inside, in DeepSeek's own layers, whatever the other norms have


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentConfig:
    """Sizes of latent attention, named as in transformers' DeepSeek-V3."""

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    rope_interleave: bool = True

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Build the sizes from a recipe's keys. Raises ArgumentError, naming them, for those that
        are unknown or missing.
        """
        names = [one.name for one in fields(cls)]
        wrong = sorted(options.keys() - set(names)) + sorted(set(names[:4]) - options.keys())
        if wrong:
            raise ArgumentError(f"draft head: latent has {', '.join(names)}; see {', '.join(wrong)}")
        check_types(cls, options, "draft head: latent")
        return cls(**options)

    def problem(self, config: DecoderConfig) -> str | None:
        """Describe which setting of the layers does not go with it; None: all do."""
        if wrong := find_problem(
            (
                min(self.kv_lora_rank, self.qk_nope_head_dim, self.v_head_dim) < 1 or self.qk_rope_head_dim < 2,
                f"latent attention has positive sizes; got {self}",
            ),
            (
                self.v_head_dim > self.qk_nope_head_dim + self.qk_rope_head_dim,
                f"values of latent attention are at most as wide as keys; got {self}",
            ),
        ):
            return wrong
        if config.num_key_value_heads != config.num_attention_heads:
            heads = f"{config.num_attention_heads} heads and {config.num_key_value_heads} key-value heads"
            return f"latent attention has keys for every head; got {heads}"
        odd = [name for name in ("attention_bias", "qk_norm", "sliding_window") if getattr(config, name)]
        return f"latent attention has no {', '.join(odd)}" if odd else None


def attention(
    config: DecoderConfig, latent: LatentConfig | None, layer: int, width: int | None = None, *, eps: float
) -> nn.Module:
    """Build the attention of a layer that reads (B, N, width), H if it is None: ordinary without
    `latent`; `eps` is that of the norms inside.
    """
    if latent is None:
        return HeadAttention(config, layer, width)
    return LatentAttention(config, latent, layer, config.hidden_size if width is None else width, eps)


class LatentAttention(nn.Module):
    """Multi-head latent attention. The values are padded to the width of the keys."""

    def __init__(self, config: DecoderConfig, latent: LatentConfig, layer: int, width: int, eps: float) -> None:
        super().__init__()
        self.layer, self.latent, self.heads = layer, latent, config.num_attention_heads
        self.scaling = query_scaling(config.rope_scaling)
        wide = latent.qk_nope_head_dim + latent.qk_rope_head_dim
        if latent.q_lora_rank is None:
            self.q_proj = nn.Linear(width, self.heads * wide, bias=False)
        else:
            self.q_a_proj = nn.Linear(width, latent.q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(latent.q_lora_rank, eps)
            self.q_b_proj = nn.Linear(latent.q_lora_rank, self.heads * wide, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(width, latent.kv_lora_rank + latent.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(latent.kv_lora_rank, eps)
        inside = latent.qk_nope_head_dim + latent.v_head_dim
        self.kv_b_proj = nn.Linear(latent.kv_lora_rank, self.heads * inside, bias=False)
        self.o_proj = nn.Linear(self.heads * latent.v_head_dim, config.hidden_size, bias=False)

    def forward(self, states: Tensor, angles: Angles, attend: Attend) -> Tensor:
        """Attend: (B, N, width) -> (B, N, H)."""
        latent = self.latent
        if latent.q_lora_rank is None:
            asked = self.q_proj(states)
        else:
            asked = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(states)))
        nope, rope = self._split(asked, latent.qk_nope_head_dim, latent.qk_rope_head_dim)
        query = torch.cat([nope, self._rotate(rope, angles)], -1) * self.scaling
        compressed, shared = self.kv_a_proj_with_mqa(states).split([latent.kv_lora_rank, latent.qk_rope_head_dim], -1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(compressed))
        key, value = self._split(expanded, latent.qk_nope_head_dim, latent.v_head_dim)
        shared = self._rotate(shared.unsqueeze(1), angles).expand(-1, self.heads, -1, -1)
        key = torch.cat([key, shared], -1)
        attended = attend(self.layer, query, key, pad(value, (0, key.shape[-1] - value.shape[-1])))
        return self.o_proj(attended[..., : latent.v_head_dim].flatten(2))

    def _split(self, states: Tensor, *sizes: int) -> tuple[Tensor, ...]:
        """Split (B, N, heads * D) -> (B, heads, N, size) for each of the `sizes`."""
        heads = states.view(*states.shape[:-1], self.heads, -1).transpose(1, 2)
        return torch.split(heads, list(sizes), -1)

    def _rotate(self, states: Tensor, angles: Angles) -> Tensor:
        if self.latent.rope_interleave:  # pairs lie side by side
            states = states.reshape(*states.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)
        return rotate(states, angles)


def query_scaling(rope: Mapping[str, Any] | None) -> float:
    """Return the factor of the queries besides one over the root of their size: DeepSeek's YaRN
    scales attention, too.
    """
    factor, all_dims = (rope or {}).get("factor") or 1.0, (rope or {}).get("mscale_all_dim") or 0.0
    return float((0.1 * all_dims * math.log(factor) + 1.0) ** 2) if factor > 1 else 1.0
