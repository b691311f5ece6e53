"""P-EAGLE (arXiv 2602.01469): EAGLE-3's layers, which draft all depths in one pass.

The entry of the root predicts the token after it, as in EAGLE-3. Behind it stands a mask for each further depth: the
embedding of ``mask_token_id`` beside a learned ``mask_hidden`` in the place of the target's states, which is fused as
they are. A mask sees what is committed and the masks before it. Parameter names are those on disk.

P-EAGLE's objective (arXiv 2602.01469) trains all depths of all entries in one pass, deeper ones
of fewer entries.

Entry i, at depth 0, reads as in EAGLE-3 the embedding of token i + 1 beside the target's state of token i, and predicts
token i + 2. Its mask of depth d stands at position i + d, sees the entries up to i of its document and its own masks up
to d, and predicts token i + 2 + d: `conditional_drop`.

The format of AWS's P-EAGLE heads, which vLLM reads: EAGLE's flat one with ``ptd_token_id`` and
the tensor ``mask_hidden``.

After vLLM's llama_eagle3.py, which takes ``mask_hidden`` of any shape as [1, n x Ht], and its proposer, which looks for
``pard_token`` and then ``ptd_token_id``; speculators' models/peagle keeps it as [1, 1, n x Ht], as here.

How serving engines treat P-EAGLE heads, from vLLM's sources; vLLM 0.32 was run with one
(``tests_vllm``).

vLLM alone drafts with them, from 0.16 on, as EAGLE-3 with ``parallel_drafting`` and its model runner V1. The others'
loaders of EAGLE-3 heads drop ``mask_hidden`` or stop at it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from forerun.drafters.vocabulary import spare_token
from forerun.errors import CheckpointError, find_problem, refuse
from forerun.heads.base import Angles, Attend, BlockHead
from forerun.heads.dflash import BlockDrafterConfig
from forerun.heads.drafting import BestFirstDrafter
from forerun.heads.eagle import EagleConfig, FusedHead
from forerun.heads.eagle_engines import DESTINATIONS, EagleEngines
from forerun.heads.eagle_files import LLAMA, FlatFormat, is_eagle_head, read_flat
from forerun.heads.engines import TOKENS, Finding, fails, vllm_line
from forerun.heads.files import Config, Format, HeadCheckpoint, StoredFiles, TargetFacts, Tensors, Written
from forerun.heads.keys import Keys, architectures
from forerun.heads.start import Fitting, Seen, fit_last
from forerun.losses.objective import (
    DecoderObjective,
    DecoderSettings,
    FeatureBatch,
    Fraction,
    LossReport,
    Masked,
    Natural,
    Share,
    run_or_checkpoint,
    shift_left,
)
from forerun.types import LAST_HIDDEN


@dataclass(frozen=True, kw_only=True, slots=True)
class PEagleConfig(EagleConfig):
    """Shape and variant of a P-EAGLE head; the defaults are those of AWS's checkpoints."""

    kind: ClassVar[str] = "peagle"
    FROM_TARGET: ClassVar[frozenset[str]] = EagleConfig.FROM_TARGET | {"norm_output"}

    mask_token_id: int  # Stands for what is not known yet (``ptd_token_id``); one of the target's tokens
    num_hidden_layers: int = 4
    own_embedding: bool = True  # The embedding is trained, that of the mask with it

    def problem(self) -> str | None:
        return find_problem(
            (self.generation != 3, f"its layers are EAGLE-3's; got generation {self.generation}"),
            (
                not 0 <= self.mask_token_id < self.vocab_size,
                f"mask_token_id must be one of the target's {self.vocab_size} tokens, got {self.mask_token_id}",
            ),
        ) or EagleConfig.problem(self)

    @classmethod
    def fields_for(cls, kind: str, config: Any, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields, see `HeadConfig.fields_for`. Without a mask token it is the padding
        token, or the last one.
        """
        return {"mask_token_id": spare_token(config)} | EagleConfig.fields_for("eagle3", config, options)


class PEagleHead(FusedHead, BlockHead):
    """A P-EAGLE head, see `BlockHead`; its block has no place for the root."""

    Config = PEagleConfig
    config: PEagleConfig

    def __init__(self, config: PEagleConfig) -> None:
        super().__init__(config)
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, len(config.boundaries) * config.target_hidden_size))

    def fit(self, seen: Seen) -> None:
        """Let a mask, besides, read at first the mean of what stands in its place elsewhere."""
        super().fit(seen)

        def read(batch: FeatureBatch) -> Tensor:
            return torch.cat([batch.features[boundary] for boundary in self.config.boundaries], -1)

        self.mask_hidden.copy_(seen.places(read, 1).mean(0).view_as(self.mask_hidden))

    @property
    def places(self) -> None:
        return None

    @property
    def first(self) -> int:
        return 0

    def causal(self, layer: int) -> bool:
        return True

    def masked(self) -> Tensor:
        """Return (1, 1, H), what a mask reads in the place of a feature from `fuse`."""
        return self.fuse(self.mask_hidden.chunk(len(self.config.boundaries), -1))

    def read(self, embeds: Tensor, features: Tensor, angles: Angles, attend: Attend) -> Tensor:
        return self.norm(self.through(embeds, features, angles, attend))

    def block(self, embeds: Tensor, angles: Angles, attend: Attend) -> Tensor:
        return self.read(embeds, self.masked().to(embeds.dtype).expand_as(embeds), angles, attend)


@dataclass(frozen=True, kw_only=True, slots=True)
class PEagleDrafterConfig(BlockDrafterConfig):
    """Options of `peagle`: those of the other drafters of blocks."""

    num_speculative_tokens: int = 8  # Most tokens on one path; trained for 8 to 10 in public checkpoints


class PEagleDrafter(BestFirstDrafter):
    """Drafts with a P-EAGLE head."""

    name = "peagle"
    Config = PEagleDrafterConfig


# What it learns
@dataclass(frozen=True, kw_only=True, slots=True)
class PEagleSettings(DecoderSettings):
    """Depths, conditional drop and divergence of the objective."""

    depths: Natural = 8
    """Tokens that an entry learns to predict, at most."""
    keep: Fraction = 0.8
    """Share of the entries at a depth that goes on to the next one."""
    floor: Share = 0.2
    """Least share of a row's entries at any depth."""


class PEagleObjective(DecoderObjective):
    """The loss of a P-EAGLE head on a batch of features."""

    Settings: ClassVar[type[PEagleSettings]] = PEagleSettings
    head: PEagleHead
    settings: PEagleSettings

    def __call__(self, batch: FeatureBatch) -> LossReport:
        """Return the sum over all counted predictions, and how often a chain got to each depth."""
        masked, output = self.masked(batch)
        states = masked.following(batch.features[LAST_HIDDEN])
        vocabulary_loss = self.divergence(
            output.flatten(0, 1), self.output_head(), masked.counted.flatten().float(), states
        )
        agrees, overlap = (
            part.view(masked.counted.shape) for part in (vocabulary_loss.agrees, vocabulary_loss.overlap)
        )
        return LossReport(
            loss=vocabulary_loss.loss,
            weight=vocabulary_loss.weights.sum(),
            metrics=masked.metrics(agrees, overlap, self.settings),
        )

    def fit(self, batches: Sequence[FeatureBatch]) -> None:
        """Fit the last feed-forward part, at all depths together."""

        def run(batch: FeatureBatch) -> Fitting:
            masked, _ = self.masked(batch)
            following = masked.following(batch.features[LAST_HIDDEN])
            return Fitting(lambda states: states[masked.counted], following[masked.counted])

        fit_last(self.head.layers[-1].mlp.down_proj, self.head.norm, batches, run)  # type: ignore[union-attr, arg-type]

    def masked(self, batch: FeatureBatch) -> tuple[Masked, Tensor]:
        """Return what is computed, and the head's outputs (B, N, H), which the output head reads."""
        tokens, config = batch.batch, self.head.config
        masked = Masked.of(tokens, self.settings, 1, random=self.head.training)
        fused = self.fused(batch)
        rows, behind = len(fused), masked.entries.shape[1] - fused.shape[1]
        ids = torch.cat(
            [shift_left(tokens.tokens, 1, 0), masked.entries.new_full((rows, behind), config.mask_token_id)], 1
        )
        positions, every = masked.positions, masked.sees(tokens)
        apart = positions.unsqueeze(2) - positions.unsqueeze(1)
        seen = {window: every if window is None else every & (apart < window) for window in set(self.head.windows)}

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            mask = seen[self.head.windows[layer]].unsqueeze(1)
            query, key = query.to(value.dtype), key.to(value.dtype)
            return scaled_dot_product_attention(query, key, value, mask, enable_gqa=True).transpose(1, 2)

        def run(embeds: Tensor, fused: Tensor) -> Tensor:
            masks = self.head.masked().to(fused.dtype).expand(rows, behind, -1)
            features = torch.cat([fused, masks], 1)
            return self.head.read(embeds, features, self.head.angles(positions, embeds), attend)

        embeds = self.embed(ids).to(fused.dtype)
        return masked, run_or_checkpoint(run, embeds, fused, again=self.settings.gradient_checkpointing)


# Its files
MASK = "mask_hidden"
TOKEN = "ptd_token_id"
MASK_TOKENS = (TOKEN, "pard_token", "mask_token_id")
"""Names of the mask token, by publisher."""


class PEagleFormat(Format):
    """Heads of AWS, and of others who write the same format."""

    name = "peagle"

    def recognises(self, config: Config) -> bool:
        return any(config.get(name) is not None for name in MASK_TOKENS[:2]) or "PEagle" in _names(config)

    def is_head(self, config: Config, names: Collection[str]) -> bool:
        return is_eagle_head(config, names)

    def read(self, config: Config, tensors: Tensors, *, num_layers: int | None = None) -> HeadCheckpoint:
        if MASK not in tensors:
            return FlatFormat().read(config, tensors, num_layers=num_layers)  # which refuses the key by its name
        keys = Keys(config)
        stated = {name: keys.integer(name) for name in MASK_TOKENS if keys.get(name) is not None}
        if len(set(stated.values())) > 1:
            listed = ", ".join(f"{name} {token}" for name, token in stated.items())
            raise CheckpointError(
                f"config.json contradicts itself about the mask token: {listed}; remove the wrong one"
            )
        refuse(
            (not stated, f"config.json has no {TOKEN}; a P-EAGLE head's configuration needs it"),
            (
                not keys.flag("parallel_drafting", True),
                f"config.json contradicts itself: {MASK} is stored, but parallel_drafting is false",
            ),
            error=CheckpointError,
        )
        plain = {name: value for name, value in config.items() if name not in (*MASK_TOKENS, "parallel_drafting")}
        if "PEagle" in _names(config):
            plain["architectures"] = [LLAMA]
        return read_flat(plain, with_mask(tensors), num_layers, PEagleConfig, mask_token_id=next(iter(stated.values())))

    def write(self, checkpoint: HeadCheckpoint, target: TargetFacts) -> Written:
        keys, tensors = FlatFormat().write(checkpoint, target)
        return {**keys, TOKEN: checkpoint.config.mask_token_id}, tensors


def with_mask(tensors: Tensors) -> dict[str, Tensor]:
    """Return the tensors with the learned state as [1, 1, n x Ht]. Raises CheckpointError if there
    is none.
    """
    if MASK not in tensors:
        raise CheckpointError(f"the file has no {MASK}, what a P-EAGLE head reads in the place of a hidden state")
    return {**tensors, MASK: tensors[MASK].reshape(1, 1, -1)}


def _names(config: Config) -> str:
    return " ".join(architectures(config))


# What serving engines make of it
class PEagleEngines(EagleEngines):
    """Known facts about engines and P-EAGLE heads; what vLLM does with EAGLE-3's layers holds for
    these.
    """

    def adapt(self, head: HeadCheckpoint, engine: str | None) -> tuple[HeadCheckpoint, dict[str, Any]]:
        return head, {}

    def findings(self, head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
        yield from (finding for finding in super().findings(head, target) if finding.engine == "vllm")
        config, what = head.config, "a P-EAGLE head"
        yield from fails(
            "sglang trtllm llama.cpp lmdeploy modelopt",
            what,
            "does not read mask_hidden: it has no such head",
            "use vLLM",
        )
        if config.latent is not None or not (config.use_aux_hidden_state or config.qk_norm):
            shape = "one target state" if config.latent is None else "latent attention"
            yield from fails(
                "vllm",
                f"{what} with {shape}",
                "has no mask_hidden in such a head, and stops",
                "train it on boundaries, with ordinary attention",
            )

    def file_findings(self, stored: StoredFiles, head: HeadCheckpoint, target: TargetFacts) -> Iterable[Finding]:
        return (finding for finding in super().file_findings(stored, head, target) if finding.engine == "vllm")


ENGINE_FACTS = PEagleEngines(
    destinations={
        "vllm": dataclasses.replace(
            DESTINATIONS["vllm"],
            command=lambda launch: vllm_line(
                launch.target.name_or_path,
                method="eagle3",
                model=str(launch.directory),
                num_speculative_tokens=TOKENS,
                parallel_drafting=True,
            ),
        ),
        "speculators": DESTINATIONS["speculators"],
    }
)
