"""EAGLE (arXiv 2401.15077, 2406.16858, 2503.01840): a small decoder over hidden states of the target.

One module for EAGLE-1 and -2, which continue the target's last hidden state, and EAGLE-3 with its variants, which fuses
several; `EagleConfig` says which. EAGLE-3.1's ``fc_norm`` and ``norm_output`` follow its notes of May 2026.

EAGLE-3's objective is the training-time test (arXiv 2503.01840): the head is unrolled on its own
features for T steps.

At step t, index i reads the embedding of token i + 1 + t and its own feature of step t - 1 (at t =
0 the target's), stands at position i + t, and predicts token i + 2 + t: its distribution is pulled
towards the target's after token i + 1 + t. Only predictions of counted tokens of the same document
enter.

EAGLE-1's objective (arXiv 2401.15077) learns the target's next feature, by regression, and its
next token.

The head reads the target's own features with noise on them, as it reads its own, inexact ones when it drafts. Its
output is pulled towards the target's feature of the next token (smooth L1, mean over the entries), and through the
output head towards its probabilities. With several steps it is unrolled as in `eagle3`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss

from forerun.errors import ArgumentError, find_problem
from forerun.heads.base import Advanced, Angles, Attend, HeadConfig, SequentialHead
from forerun.heads.drafting import HeadDrafter, HeadDrafterConfig
from forerun.heads.layers import DecoderConfig, DecoderHead, HeadMLP, LatentConfig, RMSNorm, attention
from forerun.heads.start import Seen
from forerun.losses.chunked_loss import VocabularyLoss
from forerun.losses.objective import (
    DecoderObjective,
    DecoderSettings,
    FeatureBatch,
    Fraction,
    FrozenTarget,
    LossReport,
    Natural,
    NotNegative,
    chain_metrics,
    mark_counted,
    run_or_checkpoint,
    shift_left,
    shift_right,
    unrolled_weights,
)
from forerun.losses.unrolled_attention import FlexMask, Mask, blocks_of, check_device, ttt_attention
from forerun.types import LAST_HIDDEN

FEATURE_NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Variants of EAGLE-3 in how features are normed and fed back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EagleConfig(DecoderConfig):
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
    use_aux_hidden_state: bool = True
    """False: EAGLE-3's layer reads the target's last hidden state as it is, and nothing is fused
    (some of NVIDIA's).
    """
    fc_bias: bool = False  # Original EAGLE-1 heads have one; vLLM drops it without a word
    norm_before_residual: bool = False
    """True: the residual stream of the first layer is the normed feature (speculators) instead of
    the feature (EAGLE).
    """
    norm_before_fc: bool = False  # One norm over the concatenated features before they are fused (``input_norm``)
    fc_norm: bool = False  # One norm for each boundary's features before they are fused (EAGLE-3.1)
    norm_output: bool = False  # The next step reads the normed output (EAGLE-3.1), not the residual stream (EAGLE-3)
    latent: LatentConfig | None = None  # None: ordinary attention; else DeepSeek's (heads for Kimi-K2)
    next_layer_regular: bool = True
    """True: the layers above the first read the residual stream alone. False: they read the
    embedding beside it, too (DeepSpec).
    """

    @property
    def kind(self) -> str:
        return "eagle3" if self.generation == 3 else "eagle"

    @property
    def rotary_dim(self) -> int:
        return self.head_dim if self.latent is None else self.latent.qk_rope_head_dim

    def problem(self) -> str | None:
        if wrong := find_problem(
            (self.generation not in (1, 3), f"generation is 1 or 3, got {self.generation}"),
            (
                self.kind != "eagle3" and (self.latent is not None or not self.next_layer_regular),
                f"a head of the kind {self.kind} has ordinary attention, and reads the embedding in its first layer",
            ),
        ):
            return wrong
        if self.latent is not None and (wrong := self.latent.problem(self)):
            return wrong
        if self.generation == 1 and self.boundaries != (LAST_HIDDEN,):
            return f"an EAGLE-1 head reads the last hidden state alone, got boundaries {self.boundaries}"
        if not self.use_aux_hidden_state:
            wants = "reads the last hidden state alone, as wide as itself, and fuses nothing"
            fuses = self.generation == 1 or self.norm_before_fc or self.fc_norm or self.fc_bias
            if fuses or self.boundaries != (LAST_HIDDEN,) or self.hidden_size != self.target_hidden_size:
                return f"an EAGLE-3 head without use_aux_hidden_state {wants}; got boundaries {self.boundaries}"
        return find_problem(
            (
                any(boundary < 0 and boundary != LAST_HIDDEN for boundary in self.boundaries),
                f"boundaries count layers from 0, got {self.boundaries}",
            ),
            (
                self.generation == 3 and not self.own_lm_head and self.hidden_size != self.target_hidden_size,
                "a head of another hidden size than the target's needs its own lm_head",
            ),
        ) or DecoderConfig.problem(self)

    @classmethod
    def fields_for(cls, kind: str, config: Any, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields, see `HeadConfig.fields_for`; an EAGLE-1 head uses the target's output
        head unless it gets one.
        """
        fields = cls.layer_fields(config)
        norms = [name for name in FEATURE_NORMS if options.get(name)]
        if kind != "eagle3" and norms:
            raise ArgumentError(f"an EAGLE-1 head has no norms around its features; leave {', '.join(norms)} away")
        if kind != "eagle3":
            fields |= {"generation": 1, "boundaries": (LAST_HIDDEN,), "own_lm_head": False}
        elif options.get("use_aux_hidden_state") is False:
            fields["boundaries"] = (LAST_HIDDEN,)
        elif "boundaries" not in options:
            fields["boundaries"] = default_boundaries(config.num_hidden_layers)
        tuples: dict[str, Any] = {
            name: tuple(options[name]) for name in ("boundaries", "full_layers") if name in options
        }
        if options.get("latent"):
            latent = LatentConfig.of(options["latent"])
            heads = options.get("num_attention_heads", fields["num_attention_heads"])
            tuples |= {"latent": latent, "num_key_value_heads": heads, "head_dim": latent.qk_rope_head_dim}
        converted = ("boundaries", "full_layers", "latent")
        return fields | {name: value for name, value in options.items() if name not in converted} | tuples


def default_boundaries(num_layers: int) -> tuple[int, ...]:
    """Return EAGLE-3's choice for a target of at least 3 layers: after 2 layers, half, and all but
    3; distinct, in 1..n.
    """
    if num_layers < 3:
        raise ArgumentError(f"EAGLE-3 reads three boundaries; a target of {num_layers} layers has too few")
    chosen: list[int] = []
    for ideal in (2, num_layers // 2, num_layers - 3):
        free = [(abs(boundary - ideal), boundary) for boundary in range(1, num_layers + 1) if boundary not in chosen]
        chosen.append(min(free)[1])
    return tuple(sorted(chosen))


class FusedHead(DecoderHead):
    """A head with EAGLE's layers over the target's fused states, as `EagleConfig` says."""

    config: EagleConfig

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        size, eps = config.hidden_size, config.rms_norm_eps
        width = len(config.boundaries) * config.target_hidden_size
        if config.use_aux_hidden_state:
            self.fc = nn.Linear(size + width if config.generation == 1 else width, size, bias=config.fc_bias)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(width, eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(config.target_hidden_size, eps) for _ in config.boundaries)
        self.layers = nn.ModuleList(HeadLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm: nn.Module = RMSNorm(size, eps) if config.generation == 3 else nn.Identity()
        self.complete()

    def fuse(self, features: Sequence[Tensor]) -> Tensor:
        """Fuse the target's states, see `Head.fuse`. Generation 1 reads its one boundary as it is:
        its ``fc`` also wants the embedding.
        """
        if self.config.generation == 1 or not self.config.use_aux_hidden_state:
            return features[0]
        return self.fc(self.join(features))

    def join(self, features: Sequence[Tensor]) -> Tensor:
        """Return what ``fc`` reads of the target's states (B, N, Ht) each: all of them side by side, normed as the
        configuration says.
        """
        if self.config.fc_norm:
            features = [norm(feature) for norm, feature in zip(self.fc_norm, features, strict=True)]
        joined = torch.cat(list(features), dim=-1)
        return self.input_norm(joined) if self.config.norm_before_fc else joined

    def fit(self, seen: Seen) -> None:
        """Let ``fc`` start at what comes nearest to the target's last state at the token that is read beside it."""
        config = self.config
        if not config.use_aux_hidden_state or config.hidden_size != config.target_hidden_size:
            return

        def read(batch: FeatureBatch) -> Tensor:
            joined = self.join([batch.features[boundary].float() for boundary in config.boundaries])
            return joined if config.generation == 3 else torch.cat([seen.embedded(batch, 1), joined], -1)

        # Norms before ``fc`` give it inputs of one size, outliers as well: it then learns faster.
        norms: Sequence[Any] = [self.input_norm] if config.norm_before_fc else list(getattr(self, "fc_norm", ()))
        if norms:
            for norm, sizes in zip(norms, seen.sizes(read, 1).chunk(len(norms)), strict=True):
                norm.weight.div_(sizes)
        scale = self.norm.weight if isinstance(self.norm, RMSNorm) else None
        nearest = seen.nearest(read, 1, scale)
        self.fc.weight.copy_(seen.beside(nearest, self.fc.weight, read) if config.generation == 3 else nearest)

    def through(self, embeds: Tensor, states: Tensor, angles: Angles, attend: Attend) -> Tensor:
        """Run all layers: embeddings (B, N, H) beside `states` (B, N, H) -> (B, N, H), the residual
        stream after them.
        """
        for layer in self.layers:
            states = layer(embeds, states, angles, attend)
        return states


class EagleHead(FusedHead, SequentialHead):
    """An EAGLE-1, EAGLE-2 or EAGLE-3 head with its variants; see `SequentialHead`."""

    Config = EagleConfig

    def advance(self, embeds: Tensor, features: Tensor, angles: Angles, attend: Attend, depth: int = 1) -> Advanced:
        if self.config.generation == 1:
            features = self.fc(torch.cat([embeds, features], dim=-1))
        states = self.through(embeds, features, angles, attend)
        output = self.norm(states)
        return Advanced(output if self.config.norm_output else states, output)


class Eagle3Drafter(HeadDrafter):
    """Drafts with an EAGLE-3 head: chain, fixed tree or dynamic tree."""

    name = "eagle3"


class EagleDrafter(HeadDrafter):
    """Drafts with an EAGLE-1 head: chain, fixed tree or dynamic tree."""

    name = "eagle"


@dataclass(frozen=True, kw_only=True, slots=True)
class Eagle2DrafterConfig(HeadDrafterConfig):
    """Options of `eagle2`: those of the other head drafters; the dynamic tree is EAGLE-2's own
    unless its size is given.
    """

    top_k: int | None = 10  # Nodes expanded per level and children looked at per node
    nodes: int = 59  # Nodes of the dynamic tree, root not counted


class Eagle2Drafter(HeadDrafter):
    """Drafts a dynamic tree with an EAGLE-1 head."""

    name = "eagle2"
    Config = Eagle2DrafterConfig


class HeadLayer(nn.Module):
    """One decoder layer. In an EAGLE-3 head the first one, or each without `next_layer_regular`, reads the embedding
    beside the feature.
    """

    def __init__(self, config: EagleConfig, layer: int) -> None:
        super().__init__()
        self.reads_embedding = config.generation == 3 and (layer == 0 or not config.next_layer_regular)
        self.norm_before_residual = config.norm_before_residual
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = attention(config, config.latent, layer, 2 * size if self.reads_embedding else size, eps=eps)
        self.mlp = HeadMLP(config)
        normed = config.generation == 3 or layer > 0
        self.input_layernorm: nn.Module = RMSNorm(size, eps) if normed else nn.Identity()
        if self.reads_embedding:
            self.hidden_norm = RMSNorm(size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)

    def forward(self, embeds: Tensor, states: Tensor, angles: Angles, attend: Attend) -> Tensor:
        """Run the layer: `embeds` and `states` (B, N, H) -> (B, N, H), the residual stream after
        it.
        """
        if self.reads_embedding:
            normed = self.hidden_norm(states)
            inputs = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
            residual = normed if self.norm_before_residual else states
        else:
            inputs, residual = self.input_layernorm(states), states
        states = residual + self.self_attn(inputs, angles, attend)
        return states + self.mlp(self.post_attention_layernorm(states))


# What EAGLE-3 learns
@dataclass(frozen=True, kw_only=True, slots=True)
class Eagle3Settings(DecoderSettings):
    """Options of EAGLE-3's objective."""

    steps: Natural = 7
    """T, the number of times that the head is unrolled."""
    decay: Fraction = 0.8
    """Base of the steps' weights: step t weighs decay^t, normalised to sum 1."""
    flex_attention: bool = False
    """On CUDA: FlexAttention, which makes no mask of queries times keys; the figures are the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnrolledStep:
    """The output of one of the T steps of the unrolled head."""

    step: int
    output: Tensor  # (B, S, H): what the output head reads; entry i predicts token i + 2 + step
    counted: Tensor


class Eagle3Objective(DecoderObjective):
    """The loss of EAGLE-3: divergence from the target's distributions, added up over the unrolled steps."""

    kind: ClassVar[str] = "eagle3"
    Settings: ClassVar[type[Eagle3Settings]] = Eagle3Settings
    head: EagleHead
    settings: Eagle3Settings

    def __init__(self, head: EagleHead, target: FrozenTarget, settings: Eagle3Settings | None = None) -> None:
        if head.config.kind != self.kind:
            raise ArgumentError(f"this objective trains heads of the kind {self.kind}, this one is {head.config.kind}")
        super().__init__(head, target, settings)

    def __call__(self, batch: FeatureBatch) -> LossReport:
        """Return the weighted sum over all steps and counted predictions, and acceptance by step."""
        last = batch.features[LAST_HIDDEN]
        steps = list(self.unroll(batch))
        shares = self.shares(last.device)
        counts = torch.stack([step.counted for step in steps])
        vocabulary_loss = self._loss(steps, counts * shares, last)
        return LossReport(
            loss=vocabulary_loss.loss,
            weight=vocabulary_loss.weights.sum(),
            metrics=chain_metrics(counts, vocabulary_loss.agrees, vocabulary_loss.overlap),
        )

    def shares(self, device: torch.device) -> Tensor:
        """Return the weights (T, 1, 1) of the steps, summing to 1."""
        return torch.tensor(unrolled_weights(self.settings.steps, self.settings.decay), device=device).view(-1, 1, 1)

    def unroll(self, batch: FeatureBatch) -> Iterator[UnrolledStep]:
        """Yield the head's outputs, step by step."""
        tokens, past = batch.batch, list[tuple[Tensor, ...]]()
        features = self.fused(batch)
        windows = {self.head.config.window(layer) for layer in range(len(self.head.layers))}
        mask_of: Callable[..., Mask] = blocks_of
        if self.settings.flex_attention:
            check_device(tokens.documents.device)
            mask_of = FlexMask
        everything = mask_of(tokens.documents) if None in windows else ()
        for step in range(self.settings.steps):
            blocks = {size: everything if size is None else mask_of(tokens.documents, size - step) for size in windows}
            ids = shift_left(tokens.tokens, step + 1, 0)
            features, output, *cached = self._advance(ids, features, tokens.positions + step, blocks, past)
            past.append(tuple(cached))
            yield UnrolledStep(step=step, output=output, counted=mark_counted(tokens, step))

    def _advance(
        self,
        ids: Tensor,
        features: Tensor,
        positions: Tensor,
        blocks: Mapping[int | None, Mask],
        past: list[tuple[Tensor, ...]],
    ) -> tuple[Tensor, ...]:
        """Return (feature, output, key of layer 0, value of layer 0, key of layer 1, ...) of one
        step; `blocks` are by window.
        """

        def run(features: Tensor, *flat: Tensor) -> tuple[Tensor, ...]:
            cached: list[Tensor] = []
            size = 2 * len(self.head.layers)
            steps = [flat[start : start + size] for start in range(0, len(flat), size)]

            def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
                cached.extend((key, value))
                line = [(step[2 * layer], step[2 * layer + 1]) for step in steps] + [(key, value)]
                window = self.head.config.window(layer)
                near = line[1:] if window is None else line[1:][-window:]
                return ttt_attention(query, line[0][0], line[0][1], near, blocks[window])

            embeds = self.embed(ids).to(features.dtype)
            result: Advanced = self.head.advance(embeds, features, self.head.angles(positions, features), attend)
            return (result.feature, result.output, *cached)

        flat = [tensor for step in past for tensor in step]
        return run_or_checkpoint(run, features, *flat, again=self.settings.gradient_checkpointing)

    def _loss(self, steps: Sequence[UnrolledStep], weights: Tensor, last: Tensor) -> VocabularyLoss:
        """Return the loss of all steps at once, so that the output head has one gradient.

        `weights` are (T, B, S), `last` is (B, S, Ht). It is arranged by the predicted token: there
        all steps follow the same distribution of the target.
        """
        outputs = torch.stack([shift_right(step.output, step.step + 1) for step in steps], 2)
        shares = torch.stack([shift_right(weights[step.step], step.step + 1) for step in steps], 2)
        vocabulary_loss = self.divergence(outputs.flatten(0, 2), self.output_head(), shares.flatten(), last)
        entered, agrees, overlap, losses = (
            torch.stack([shift_left(part, step + 1, 0.0) for step, part in enumerate(values.view_as(shares).unbind(2))])
            for values in (
                vocabulary_loss.weights,
                vocabulary_loss.agrees,
                vocabulary_loss.overlap,
                vocabulary_loss.losses,
            )
        )
        return VocabularyLoss(loss=vocabulary_loss.loss, weights=entered, agrees=agrees, overlap=overlap, losses=losses)


# What EAGLE-1 and EAGLE-2 learn
@dataclass(frozen=True, kw_only=True, slots=True)
class EagleSettings(Eagle3Settings):
    """Options of the objective of EAGLE-1 and EAGLE-2; the defaults are the papers'."""

    steps: Natural = 1
    """Times that the head is unrolled; beyond the first on its own features."""
    regression_weight: NotNegative = 1.0
    """Weight of the distance to the target's features."""
    token_weight: NotNegative = 0.1
    """Weight of the cross-entropy, or of what `divergence` says."""
    noise: NotNegative = 0.1
    """Uniform noise on the target's states, see `DecoderSettings`."""

    def __post_init__(self) -> None:
        Eagle3Settings.__post_init__(self)
        if not self.regression_weight + self.token_weight:
            raise ArgumentError("objective: one of regression_weight and token_weight must be positive")


class EagleObjective(Eagle3Objective):
    """The loss of EAGLE-1 and EAGLE-2: distance from the target's features and divergence from its distributions, on
    features that are noisy in training mode.
    """

    kind: ClassVar[str] = "eagle"
    Settings: ClassVar[type[EagleSettings]] = EagleSettings
    settings: EagleSettings

    def _loss(self, steps: Sequence[UnrolledStep], weights: Tensor, last: Tensor) -> VocabularyLoss:
        vocabulary_loss = super()._loss(steps, weights, last)
        loss = self.settings.token_weight * vocabulary_loss.loss
        for step, weight in zip(steps, vocabulary_loss.weights, strict=True):
            # What comes around at the end of a row is not counted.
            following = torch.roll(last, -(step.step + 1), dims=1)
            distance = smooth_l1_loss(step.output.float(), following.float(), reduction="none").mean(-1)
            loss = loss + self.settings.regression_weight * (distance * weight).sum()
        return dataclasses.replace(vocabulary_loss, loss=loss)
