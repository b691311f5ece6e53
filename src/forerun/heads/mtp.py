"""Native MTP (DeepSeek-V3, arXiv 2412.19437): the layers that a target was pretrained with to
predict tokens further ahead, drafted with as they ship; GLM-4-MoE's and MiMo's too.

Module k reads the next token's embedding beside a state, both normed, and is one decoder layer of
the target's own make: ``h' = layer(eh_proj([enorm(e); hnorm(h)]))``; ``shared_head.norm``, then the
target's output head. Parameter names are DeepSeek's on disk; see `heads.mtp_files`.

Every token has an entry of its own in each module, which reads what the module before made of the
token before it. So one pass over what is committed runs all modules, and the nodes at depth k run
those that predict from there on: module k for the logits, the later ones for their keys. Beyond the
last module that one goes on alone, on its own states.

FastMTP's objective (arXiv 2509.18362) trains one MTP module, which drafts several tokens, on its
own states.

The module is unrolled K times as in `eagle3`; at depth k, from 0, entry i predicts token i + 2 + k
of the data, which the target itself should have written (``forerun data regenerate``). The loss is
the cross-entropy, depth k weighing beta^k, normalised to sum 1. Embedding and output head are the
target's and stay as they are.

Layers may hold a mixture of experts of DeepSeek-V3's kind, as GLM-4-MoE has it too: sigmoid routing
in groups, shared experts. Families differ in their norms, in a
gate on attention's output, in how experts are chosen, in sinks and indices: a head whose layers are those of another
target takes transformers' own class, which is right by construction, and gives it an attention function that hands
queries, keys and values to the caller of the head (`build_layers`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from transformers.activations import ACT2FN

from forerun.errors import ArgumentError, find_problem, refuse
from forerun.heads.base import Advanced, Angles, Attend, SequentialHead
from forerun.heads.drafting import HeadDrafter, HeadDrafterConfig
from forerun.heads.eagle import Eagle3Objective
from forerun.heads.layers import LATENT_EPS, DecoderConfig, DecoderHead, HeadMLP, LatentConfig, RMSNorm, attention
from forerun.losses.chunked_loss import hard_loss
from forerun.losses.objective import (
    FeatureBatch,
    Fraction,
    FrozenTarget,
    LossReport,
    Natural,
    NotNegative,
    ObjectiveSettings,
    chain_metrics,
    shift_left,
)
from forerun.model.masks import FULL, SLIDING
from forerun.types import LAST_HIDDEN

NAME = "forerun_head"
"""Name of `attend_outside` among transformers' attention functions."""
SMALLEST: dict[str, Any] = {"vocab_size": 1, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
"""Keys of a model of which only the layers are used."""
INDEXED = "indexed_attention"
ATTENDS = frozenset({FULL, SLIDING, INDEXED})
KINDS = ATTENDS | {"moe", "mlp"}
"""Kinds of a target's layers that a module may consist of, as transformers names them."""


def attend_outside(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    *,
    attend: Any,
    number: int,
    scaling: float,
    s_aux: Tensor | None = None,
    indices: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend as the head's caller does, in the layer `number` of the head: its scale is one over the root of a query's
    size, and values are as wide as keys.
    """
    factor = scaling * math.sqrt(query.shape[-1])
    if not math.isclose(factor, 1.0):
        query = query * factor
    sinks = {} if s_aux is None else {"sinks": s_aux}
    if indices is not None and keeps_index(attend):
        sinks["chosen"] = indices
    wide = pad(value, (0, key.shape[-1] - value.shape[-1]))
    return attend(number, query, key, wide, **sinks)[..., : value.shape[-1]], None


def config_of_layers(target: Mapping[str, Any], kinds: Sequence[str], mlp_kinds: Sequence[str] = ()) -> Any:
    """Return a transformers configuration of decoder layers of these `kinds` for the `target` with these keys of one.
    `mlp_kinds` say which have experts ("sparse") and which none ("dense"); empty: the target has no such list.
    """
    from transformers import AutoConfig

    sizes: dict[str, Any] = {"num_hidden_layers": len(kinds), "layer_types": list(kinds)}
    if mlp_kinds:
        sizes["mlp_layer_types"] = list(mlp_kinds)
    return AutoConfig.for_model(**{**target, **SMALLEST, **sizes})


def build_layers(config: Any) -> nn.ModuleList:
    """Build the decoder layers that `config_of_layers` describes."""
    import transformers

    transformers.AttentionInterface.register(NAME, attend_outside)
    # The class of a text model inside a larger one is in no table of transformers.
    model_class = getattr(transformers, f"{type(config).__name__.removesuffix('Config')}Model")
    layers: nn.ModuleList = model_class._from_config(config, attn_implementation=NAME).layers
    return layers


def norm_class(layers: nn.Module) -> type[nn.Module]:
    """Return the class of the norms in these layers."""
    return next(type(part) for name, part in layers.named_modules() if "norm" in name)


def keeps_index(attend: Any) -> bool:
    """Return whether the caller of a head keeps keys of an index; training does not and attends to everything."""
    return hasattr(attend, "cache")


class IndexCache:
    """Stands in for a layer's cache: the keys of its index go to the caller of the head, keys and values are handed to
    its attention.
    """

    def __init__(self, attend: Any, number: int) -> None:
        self.attend, self.number = attend, number
        self.keeps = keeps_index(attend)

    def update(self, keys: Tensor, values: Tensor, *_args: object, **_kwargs: object) -> tuple[Tensor, Tensor]:
        """Return the keys and values of this pass alone."""
        return keys, values

    def update_indexer(self, keys: Tensor, _layer: int) -> Tensor:
        """Return the keys (B, M, D) that the index chooses from."""
        return self.attend.cache.update_indexer(keys, self.number) if self.keeps else keys[:, :1]

    def mask(self, like: Tensor) -> Tensor:
        """Return the mask (B, 1, N, M) of these keys."""
        return self.attend.masks[self.number] if self.keeps else like.new_zeros(1, 1, 1, 1)


def run_layers(
    layers: nn.ModuleList, states: Tensor, angles: tuple[Tensor, Tensor], attend: Attend, number: int, indexed: bool
) -> Tensor:
    """Run the layers of `build_layers` as the layer `number` of a head: (B, N, H) -> (B, N, H), the residual stream
    after them.
    """
    more: dict[str, Any] = {"attention_mask": None}
    if indexed:
        cache = IndexCache(attend, number)
        more = {"attention_mask": cache.mask(states), "cache": cache}
    for layer in layers:
        output = layer(states, position_embeddings=angles, attend=attend, number=number, **more)
        states = output[0] if isinstance(output, tuple) else output
    return states


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
        return find_problem(
            (
                self.n_routed_experts % self.n_group or inside < 2 or self.topk_group > self.n_group,
                f"{self.n_routed_experts} experts in {self.n_group} groups, of which {self.topk_group} are taken",
            ),
            (
                self.num_experts_per_tok > self.topk_group * inside,
                f"{self.num_experts_per_tok} experts a token from {self.topk_group} groups of {inside}",
            ),
        )


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
        return mixed + self.shared_experts(states)


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
                parts.append(linear(self._gate(linear(part, self.gate_up_proj[expert])), self.down_proj[expert]))
        scaled = torch.cat(parts) * weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(states).index_add(0, tokens, scaled.to(states.dtype))

    def _gathered(self, states: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        first, second = self.gate_up_proj[experts], self.down_proj[experts]
        inside = self._gate((first @ states[:, None, :, None]).squeeze(-1))
        mixed: Tensor = ((second @ inside.unsqueeze(-1)).squeeze(-1) * weights.unsqueeze(-1)).sum(1)
        return mixed.to(states.dtype)

    def _gate(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, dim=-1)
        return self.activation(gate) * up


@dataclass(frozen=True, kw_only=True, slots=True)
class MtpConfig(DecoderConfig):
    """Shape of a target's MTP layers; ``num_hidden_layers`` is the number of modules, each with one
    decoder layer.
    """

    kind: ClassVar[str] = "mtp"
    own_lm_head: bool = False
    experts: ExpertsConfig | None = None  # None: a dense feed-forward part
    latent: LatentConfig | None = None  # None: ordinary attention
    partial_rotary_factor: float = 1.0  # Share of a head's dimensions, from the first on, that is rotated
    target_keys: Mapping[str, Any] | None = None
    """Keys of the target's configuration in transformers, whose own classes of decoder layers the modules hold; None:
    the layers are those of this file.
    """
    target_layers: tuple[str, ...] = (FULL,)
    """Kinds of a module's layers, as transformers names them; one of them attends."""
    target_mlps: tuple[str, ...] = ()  # Which of a module's layers have experts ("sparse"), which none ("dense")
    output_heads: bool = False  # Each module has an output head of its own
    shared_norm: bool = False  # The norm after the layers is the target's, and stays as it is
    angle_pairs: bool = False  # The target's layers take the angle of each pair of dimensions twice in a row

    @property
    def norm_output(self) -> bool:
        """True if a module hands its normed output on: then it reads the target's state after the
        final norm, too.
        """
        return self.boundaries == (LAST_HIDDEN,)

    @property
    def rotary_dim(self) -> int:
        if self.latent is not None:
            return self.latent.qk_rope_head_dim
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def output_bias(self) -> bool:
        return False

    def problem(self) -> str | None:
        if wrong := find_problem(
            (
                len(self.boundaries) != 1 or self.hidden_size != self.target_hidden_size,
                f"it reads one state of the target, as wide as itself; got boundaries {self.boundaries}",
            ),
            (self.num_hidden_layers < 1, "the target has no MTP layers"),
            (
                sum(kind in ATTENDS for kind in self.target_layers) != 1 or not KINDS.issuperset(self.target_layers),
                f"one layer that attends beside feed-forward layers is known here, got {self.target_layers}",
            ),
        ):
            return wrong
        if self.experts is not None and (wrong := self.experts.problem()):
            return wrong
        if self.latent is not None and (wrong := self.latent.problem(self)):
            return wrong
        return DecoderConfig.problem(self)

    @classmethod
    def fields_for(cls, kind: str, config: Any, options: Mapping[str, Any]) -> dict[str, Any]:
        raise ArgumentError(
            "MTP layers come from a target's own checkpoint and are not made anew; name one with draft.start, or train "
            "a head of another kind"
        )


class MtpHead(DecoderHead, SequentialHead):
    """The MTP modules of a target; see `SequentialHead`. A feature is the outputs of all modules,
    side by side.
    """

    Config = MtpConfig
    config: MtpConfig

    def __init__(self, config: MtpConfig) -> None:
        super().__init__(config)
        make: Callable[[MtpConfig, int], MtpModule] = OwnModule if config.target_keys is None else TargetModule
        self.layers = nn.ModuleList(make(config, layer) for layer in range(config.num_hidden_layers))
        heads = config.num_hidden_layers if config.output_heads else 0
        self.output_heads = nn.ModuleList(
            nn.Linear(config.hidden_size, config.vocab_size, bias=False) for _ in range(heads)
        )
        self.complete()
        for module in self.modules():
            for weight in module.parameters(recurse=False) if isinstance(module, Experts | Router) else ():
                nn.init.normal_(weight, std=config.initializer_range)

    @property
    def recordable(self) -> bool:
        if self.config.target_keys is None:
            return super().recordable
        # transformers' experts may read on the host which of them have tokens.
        return super().recordable and not any(name.endswith(".experts") for name, _ in self.named_modules())

    @property
    def feature_size(self) -> int:
        return self.config.num_hidden_layers * self.config.hidden_size

    @property
    def output_size(self) -> int:
        return self.config.hidden_size

    @property
    def unseen(self) -> tuple[int, ...]:
        return tuple(range(self.config.num_hidden_layers))  # the texts that module k learned begin k tokens later

    def angles(self, positions: Tensor, like: Tensor) -> Angles:
        cosine, sine = super().angles(positions, like)
        if not self.config.angle_pairs:
            return cosine, sine
        return cosine.chunk(2, -1)[0].repeat_interleave(2, -1), sine.chunk(2, -1)[0].repeat_interleave(2, -1)

    def logits(self, output: Tensor, depth: int = 0) -> Tensor | None:
        return self.output_heads[min(depth, len(self.layers) - 1)](output) if self.config.output_heads else None

    def read(self, embeds: Tensor, features: Tensor, before: Tensor, angles: Angles, attend: Attend) -> Advanced:
        levels, states = list[Advanced](), features
        for module, earlier in zip(self.layers, before.chunk(len(self.layers), -1), strict=True):
            levels.append(module(embeds, states, angles, attend))
            states = torch.cat([earlier, levels[-1].feature[:, :-1]], 1)
        return Advanced(torch.cat([one.feature for one in levels], -1), levels[0].output)

    def advance(self, embeds: Tensor, features: Tensor, angles: Angles, attend: Attend, depth: int = 1) -> Advanced:
        parts, last = list(features.chunk(len(self.layers), -1)), len(self.layers) - 1
        for layer in range(last, min(depth, last) - 1, -1):  # from the last on: each reads what its parent's entry made
            states = parts[layer - 1] if layer >= depth else parts[layer]
            level: Advanced = self.layers[layer](embeds, states, angles, attend)
            parts[layer] = level.feature
        return Advanced(torch.cat(parts, -1), level.output)


class MtpModule(nn.Module, ABC):
    """One MTP module: combines its inputs for a decoder layer, and runs it."""

    def __init__(self, config: MtpConfig, norm: Any) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.norm_output = config.norm_output
        self.enorm, self.hnorm = norm(size, eps), norm(size, eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.shared_head = nn.ModuleDict({"norm": norm(size, eps)}).requires_grad_(not config.shared_norm)

    def forward(self, embeds: Tensor, states: Tensor, angles: Angles, attend: Attend) -> Advanced:
        """Run the module on `embeds` and `states` (B, N, H)."""
        states = self.eh_proj(torch.cat([self.enorm(embeds), self.hnorm(states)], -1))
        states = self.decode(states, angles, attend)
        output = self.shared_head["norm"](states)
        return Advanced(output if self.norm_output else states, output)

    @abstractmethod
    def decode(self, states: Tensor, angles: Angles, attend: Attend) -> Tensor:
        """Run the decoder layer: (B, N, H) -> (B, N, H)."""


class OwnModule(MtpModule):
    """An MTP module with a decoder layer of this file."""

    def __init__(self, config: MtpConfig, layer: int) -> None:
        super().__init__(config, RMSNorm)
        size, eps, experts = config.hidden_size, config.rms_norm_eps, config.experts
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.self_attn = attention(config, config.latent, layer, eps=LATENT_EPS)
        self.mlp = HeadMLP(config) if experts is None else MixtureOfExperts(config, experts)

    def decode(self, states: Tensor, angles: Angles, attend: Attend) -> Tensor:
        states = states + self.self_attn(self.input_layernorm(states), angles, attend)
        return states + self.mlp(self.post_attention_layernorm(states))


class TargetModule(MtpModule):
    """An MTP module with decoder layers of the target's classes in transformers."""

    def __init__(self, config: MtpConfig, layer: int) -> None:
        block = build_layers(config_of_layers(config.target_keys or {}, config.target_layers, config.target_mlps))
        super().__init__(config, norm_class(block))
        self.block, self.number, self.indexed = block, layer, INDEXED in config.target_layers
        for name, weight in block.named_parameters():
            weight.requires_grad_(".indexer." not in name)  # What it chooses has no gradient

    def decode(self, states: Tensor, angles: Angles, attend: Attend) -> Tensor:
        return run_layers(self.block, states, angles, attend, self.number, self.indexed)


@dataclass(frozen=True, kw_only=True, slots=True)
class MtpDrafterConfig(HeadDrafterConfig):
    """Options of `mtp`: those of the other head drafters; without `model` the layers of the
    target's own checkpoint draft.
    """

    num_speculative_tokens: int = 3  # May exceed the number of modules: the last one goes on


class MtpDrafter(HeadDrafter):
    """Drafts with the MTP layers of a checkpoint: chain, fixed tree or dynamic tree."""

    name = "mtp"
    Config = MtpDrafterConfig


# What it learns
@dataclass(frozen=True, kw_only=True, slots=True)
class MtpSettings(ObjectiveSettings):
    """Depths and their weights; the defaults are the paper's."""

    steps: Natural = 3
    """K, the number of times that the module is unrolled."""
    decay: Fraction = 0.6
    """Base of the depths' weights, beta: depth k weighs beta^k, normalised to sum 1."""
    flex_attention: bool = False
    """On CUDA: FlexAttention, see `Eagle3Settings`."""
    noise: NotNegative = 0.0
    """Uniform noise on the target's states, see `DecoderSettings`."""


class MtpObjective(Eagle3Objective):
    """The loss of a target's only MTP module on a batch of features."""

    kind: ClassVar[str] = "mtp"
    Settings: ClassVar[type[Any]] = MtpSettings
    settings: Any

    def __init__(self, head: Any, target: FrozenTarget, settings: MtpSettings | None = None) -> None:
        super().__init__(head, target, settings)  # type: ignore[arg-type]
        refuse(
            (
                (count := head.config.num_hidden_layers) > 1,
                f"one MTP module is trained to draft several tokens, this target brings {count}, one for each; keep "
                "them as they are, or start from a checkpoint with num_nextn_predict_layers 1",
            ),
            (
                head.config.output_heads or any(name.endswith(".sinks") for name, _ in head.named_parameters()),
                "the target's MTP layers have attention sinks or output heads of their own; they are not trained here",
            ),
            (
                target.softcap is not None or target.scale != 1.0 or target.bias is not None,
                "the target scales, caps or shifts its logits, which this objective does not",
            ),
        )

    def __call__(self, batch: FeatureBatch) -> LossReport:
        """Return the weighted sum over all depths and counted tokens, and how often a chain got to
        each depth.
        """
        steps, tokens = list(self.unroll(batch)), batch.batch.tokens
        following = torch.stack([shift_left(tokens, step.step + 2, 0) for step in steps])
        counts = torch.stack([step.counted for step in steps])
        shares = counts * self.shares(tokens.device)
        outputs = torch.stack([step.output for step in steps])
        vocabulary_loss = hard_loss(
            outputs.flatten(0, 2),
            self.output_head(),
            shares.flatten(),
            following.flatten(),
            temperature=self.target.temperature,
        )
        return LossReport(
            loss=vocabulary_loss.loss,
            weight=vocabulary_loss.weights.sum(),
            metrics=chain_metrics(counts, vocabulary_loss.agrees.view_as(shares)),
        )
