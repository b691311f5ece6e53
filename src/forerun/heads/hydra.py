"""Hydra (arXiv 2402.05109): Medusa's output heads, each of which also reads the tokens drafted above it.

Depth k reads the state of the token before the root beside the embeddings of the k + 1 tokens since. In Hydra++ that
state has passed a decoder layer of the head's own, which sees all that is committed.

The objective of recurrent heads (Hydra, MLP speculator) trains each depth after the tokens that really came above it.
From the state of token i, depth k reads the tokens i + 1 .. i + 1 + k and predicts token i + 2 + k: its distribution is
pulled towards the target's there. That is Hydra++'s teacher loss (arXiv 2402.05109); the MLP speculator's second stage
(arXiv 2404.19124) learns tokens that the target sampled, of which this is the mean.

Hydra's own format (zankner/Hydra, ``hydra_model.py``, ``hydra_heads/``): keys ``hydra_*`` in
``config.json``, and in ``hydra_lm_head.safetensors`` tensors ``hydra_mlp.DEPTH.*``,
``hydra_lm_head.DEPTH.*`` and ``prefix_embeding_layer.*``.

Its loader takes the prefix layer's shape from the target's configuration; here the same keys stand in the file. The
published ``hydra_lm_head.pt`` is a pickle and is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from forerun.errors import CheckpointError, find_problem, refuse
from forerun.heads import decoders
from forerun.heads.base import Attend, HeadConfig, RecurrentHead, Stepped, leave_away
from forerun.heads.drafting import HeadDrafter
from forerun.heads.engines import DRAFT_HERE, EVERY, NO_SUCH_DRAFTER, Engines, Trait, always
from forerun.heads.files import Config, Format, HeadCheckpoint, TargetFacts, Tensors, Written
from forerun.heads.keys import Keys
from forerun.heads.layers import DecoderConfig, DecoderHead, DecoderLayer, RMSNorm
from forerun.heads.medusa import ResBlock
from forerun.heads.start import Seen
from forerun.losses.chunked_loss import soft_loss
from forerun.losses.objective import (
    DistanceSettings,
    FeatureBatch,
    HeadObjective,
    LossReport,
    chain_metrics,
    mark_counted,
    run_or_checkpoint,
    shift_left,
)
from forerun.losses.unrolled_attention import attend_documents
from forerun.types import LAST_HIDDEN


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentSettings(DistanceSettings):
    """The divergence of the objective; all depths weigh the same."""


class RecurrentObjective(HeadObjective):
    """The loss of a recurrent head on a batch of features."""

    Settings: ClassVar[type[RecurrentSettings]] = RecurrentSettings
    head: RecurrentHead
    settings: RecurrentSettings

    def __call__(self, batch: FeatureBatch) -> LossReport:
        """Return the sum over all depths and counted predictions, and how often a chain got to each
        depth.
        """
        tokens, last, losses, weights = batch.batch, batch.features[LAST_HIDDEN], list[Tensor](), list[Tensor]()
        counts, agrees, overlap = list[Tensor](), list[Tensor](), list[Tensor]()
        for depth, states in enumerate(self.outputs(batch)):
            seen = mark_counted(tokens, depth)
            output = states
            weight, bias = self.head.output_head(depth)
            if bias is not None:  # as one more entry of every state, which is 1
                output = torch.cat([states, torch.ones_like(states[..., :1])], -1)
                weight = torch.cat([weight, bias.unsqueeze(1)], 1)
            vocabulary_loss = soft_loss(
                output.flatten(0, 1),
                weight,
                seen.flatten().float(),
                self.target.teacher(shift_left(last, depth + 1, 0.0), None),
                self.settings.divergence,
                self.settings.lk_decay,
                mix=self.settings.mix,
            )
            losses.append(vocabulary_loss.loss)
            weights.append(vocabulary_loss.weights.sum())
            counts.append(seen)
            agrees.append(vocabulary_loss.agrees.view_as(seen))
            overlap.append(vocabulary_loss.overlap.view_as(seen))
        return LossReport(
            loss=torch.stack(losses).sum(),
            weight=torch.stack(weights).sum(),
            metrics=chain_metrics(torch.stack(counts), torch.stack(agrees), torch.stack(overlap)),
        )

    def outputs(self, batch: FeatureBatch) -> tuple[Tensor, ...]:
        """Return what the output head reads by depth, (B, S, H) each; entry i predicts token i + 2
        + depth.
        """
        tokens, depths = batch.batch, self.head.config.max_depth
        assert depths is not None, "a recurrent head has weights for so many depths"
        attend = attend_documents(tokens.documents, self.head.windows)

        def run(features: Tensor) -> tuple[Tensor, ...]:
            memory = self.head.prefix(features, tokens.positions, attend)
            depth_outputs = list[Tensor]()
            for depth in range(depths):
                embeds = self.embed(shift_left(tokens.tokens, depth + 1, 0), depth).to(features.dtype)
                stepped = self.head.step(depth, embeds, memory)
                memory = stepped.memory
                depth_outputs.append(stepped.output)
            return tuple(depth_outputs)

        return run_or_checkpoint(run, self.fused(batch), again=self.settings.gradient_checkpointing)


@dataclass(frozen=True, kw_only=True, slots=True)
class HydraConfig(DecoderConfig):
    """Shape of a Hydra head; the defaults are those of Hydra++."""

    kind: ClassVar[str] = "hydra"
    FROM_TARGET: ClassVar[frozenset[str]] = HeadConfig.FROM_TARGET | {"hidden_size", "own_embedding", "own_lm_head"}

    LEAST: ClassVar[Mapping[str, int]] = {**DecoderConfig.LEAST, "num_hidden_layers": 0}

    num_hidden_layers: int = 1  # Layers of the prefix: 1 is Hydra++, 0 Hydra
    num_heads: int = 4  # Tokens drafted beyond the target's own, each by an output head of its own
    num_layers: int = 4  # Residual blocks before each output head; those after the first share their weights
    own_lm_head: bool = False

    @property
    def max_depth(self) -> int | None:
        return self.num_heads

    def problem(self) -> str | None:
        away = leave_away(
            draft__vocab_size=self.reduced_vocabulary,
            boundaries=self.boundaries != (LAST_HIDDEN,),
            hidden_size=self.hidden_size != self.target_hidden_size,
        )
        return find_problem(
            (
                self.num_heads < 1 or self.num_layers < 1,
                f"num_heads and num_layers must be at least 1, got {self.num_heads} and {self.num_layers}",
            ),
            (
                self.num_hidden_layers not in (0, 1),
                f"num_hidden_layers is 1 (Hydra++) or 0 (Hydra), got {self.num_hidden_layers}",
            ),
            (
                bool(away),
                f"it proposes all of the target's tokens and reads its last hidden state and its embeddings; {away}",
            ),
        ) or DecoderConfig.problem(self)

    @classmethod
    def fields_for(cls, kind: str, config: Any, options: Mapping[str, Any]) -> dict[str, Any]:
        found = cls.layer_fields(config) | {"boundaries": (LAST_HIDDEN,), **options}
        return found | {"full_layers": tuple(found.get("full_layers", ()))}


class HydraHead(DecoderHead, RecurrentHead):
    """A Hydra head, see `RecurrentHead`."""

    Config = HydraConfig
    config: HydraConfig

    def __init__(self, config: HydraConfig) -> None:
        super().__init__(config)
        size, layers = config.hidden_size, config.num_hidden_layers
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(layers))
        self.norm: nn.Module = RMSNorm(size, config.rms_norm_eps) if layers else nn.Identity()
        self.heads = nn.ModuleList(HydraBlocks(config, depth) for depth in range(config.num_heads))
        self.lm_heads = nn.ModuleList(nn.Linear(size, config.vocab_size) for _ in range(config.num_heads))
        self.complete()

    @property
    def weight(self) -> Tensor:
        return self.output_head(0)[0]

    def start_as(self, model: Any, token_ids: Tensor | None) -> None:
        """Let each depth predict at first what the target's own output head predicts from the
        prefix.
        """
        target = model.get_output_embeddings()
        for blocks, lm_head in zip(self.heads, self.lm_heads, strict=True):
            lm_head.weight.copy_(target.weight.float())  # type: ignore[operator]
            if getattr(target, "bias", None) is not None:
                lm_head.bias.copy_(target.bias.float())  # type: ignore[operator]
            blocks.start()  # type: ignore[operator]

    def fit(self, seen: Seen) -> None:
        """Let each depth start at what comes nearest to the target's last state after the tokens above it."""

        def read(batch: FeatureBatch, depth: int) -> Tensor:
            above = [seen.embedded(batch, ahead) for ahead in range(1, depth + 2)]
            return torch.cat([self.norm(batch.features[LAST_HIDDEN].float()), *above], -1)

        for depth, blocks in enumerate(self.heads):
            nearest = seen.nearest(partial(read, depth=depth), depth + 1)
            blocks.first.res_connection.weight.copy_(nearest)  # type: ignore[union-attr, operator]

    def scales(self) -> Sequence[nn.Parameter]:
        return [weight for lm_head in self.lm_heads for weight in lm_head.parameters()]

    def prefix(self, features: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        states = features
        if self.config.num_hidden_layers:
            angles = self.angles(positions, features)
            for layer in self.layers:
                states = layer(states, angles, attend)
        return self.norm(states)

    def step(self, depth: int, embeds: Tensor, memory: Tensor) -> Stepped:
        joined = torch.cat([memory, embeds], -1)
        return Stepped(memory=joined, output=self.heads[depth](joined))

    def logits(self, output: Tensor, depth: int = 0) -> Tensor:
        return self.lm_heads[depth](output)

    def output_head(self, depth: int) -> tuple[Tensor, Tensor | None]:
        lm_head: Any = self.lm_heads[depth]
        return lm_head.weight, lm_head.bias


class HydraBlocks(nn.Module):
    """The residual blocks of a depth: one that maps state and embeddings to the width of one state,
    then one block that is applied again and again, as in the published code.
    """

    def __init__(self, config: HydraConfig, depth: int) -> None:
        super().__init__()
        size, self.more = config.hidden_size, config.num_layers - 1
        self.first = JoiningBlock((depth + 2) * size, size)
        if self.more:
            self.rest = ResBlock(size)

    def start(self) -> None:
        """Initialise the blocks to pass the prefix on."""
        nn.init.eye_(self.first.res_connection.weight)
        nn.init.zeros_(self.first.linear.weight)
        if self.more:
            nn.init.zeros_(self.rest.linear.weight)

    def forward(self, joined: Tensor) -> Tensor:
        """Apply the blocks: (.., (depth + 2) * H) -> (.., H)."""
        states: Tensor = self.first(joined)
        for _ in range(self.more):
            states = self.rest(states)
        return states


class JoiningBlock(nn.Module):
    """Computes ``R x + c + SiLU(W x + b)``, narrower than its input."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, size)
        self.res_connection = nn.Linear(width, size)

    def forward(self, joined: Tensor) -> Tensor:
        """Apply the block: (.., width) -> (.., size)."""
        return self.res_connection(joined) + silu(self.linear(joined))


class HydraDrafter(HeadDrafter):
    """Drafts with a Hydra head: chain, fixed tree or dynamic tree."""

    name = "hydra"


# Its files
HEADS, LAYERS, ARCHITECTURE = "hydra_num_heads", "hydra_num_layers", "hydra_head_arch"
TARGET = "base_model_name_or_path"
OURS = (HEADS, LAYERS, ARCHITECTURE, TARGET, "grounded_heads", "hidden_state_offset")
MLP, PREFIX_MLP = "mlp", "prefix-mlp"
PREFIX = "prefix_embeding_layer."  # The prefix as it is spelled there
UNREAD = re.compile(re.escape(PREFIX) + r"(embed_tokens\.weight|.*rotary_emb\.inv_freq)")
"""Matches tensors that Hydra's code stores and never reads, or recomputes."""
BLOCK = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.((?:linear|res_connection)\.(?:weight|bias))")
OUTPUT = re.compile(r"hydra_lm_head\.(\d+)\.(?:1\.)?(weight|bias)")


class HydraFormat(Format):
    """Heads of zankner/Hydra, as safetensors."""

    name = "hydra"
    weights = "hydra_lm_head.safetensors"

    def recognises(self, config: Config) -> bool:
        return HEADS in config

    def read(self, config: Config, tensors: Tensors, *, num_layers: int | None = None) -> HeadCheckpoint:
        keys = Keys(config)
        heads, layers, kind = keys.integer(HEADS), keys.integer(LAYERS, 1), keys.text(ARCHITECTURE, MLP)
        target = keys.get(TARGET)  # said again when written
        refuse(
            (
                kind not in (MLP, PREFIX_MLP),
                f"{ARCHITECTURE} is {kind!r}; heads of the kinds {MLP} and {PREFIX_MLP} are read",
            ),
            (
                not keys.flag("grounded_heads") or keys.integer("hidden_state_offset", 0),
                "grounded_heads must be true and hidden_state_offset 0: other heads read no drafted tokens, or another "
                f"state than the last; got {config.get('grounded_heads')!r}, {config.get('hidden_state_offset')!r}",
            ),
            (
                kind == PREFIX_MLP and config.get("num_attention_heads") is None,
                "config.json does not say the shape of the prefix layer, which is that of a layer of the target: copy "
                "num_attention_heads, num_key_value_heads, rms_norm_eps, rope_theta, rope_scaling and "
                f"max_position_embeddings into it from the config.json of {target}",
            ),
            error=CheckpointError,
        )
        canonical = _canonical(tensors, kind)
        output, gate = canonical.get("lm_heads.0.weight"), canonical.get("layers.0.mlp.gate_proj.weight")
        if output is None or output.dim() != 2:
            raise CheckpointError(f"there is no output head hydra_lm_head.0 of a head of the kind {kind}")
        sizes = {
            "hidden_size": output.shape[1],
            "vocab_size": output.shape[0],
            "intermediate_size": output.shape[1] if gate is None else gate.shape[0],
            "num_hidden_layers": int(kind == PREFIX_MLP),
            "num_attention_heads": 1,  # Used if there is no layer
        }
        shape = Keys(
            {**sizes, **{name: value for name, value in config.items() if value is not None and name not in OURS}}
        )
        shape.pass_over("architectures", "tie_word_embeddings")
        fields = decoders.read_layers(shape)
        return decoders.make_head(
            HydraConfig,
            canonical,
            **fields,
            qk_norm=False,
            num_heads=heads,
            num_layers=layers,
            target_hidden_size=fields["hidden_size"],
            draft_vocab_size=fields["vocab_size"],
            boundaries=(LAST_HIDDEN,),
            extra=shape.rest(),
        )

    def write(self, checkpoint: HeadCheckpoint, target: TargetFacts) -> Written:
        config = checkpoint.config
        kind = PREFIX_MLP if config.num_hidden_layers else MLP
        keys = {TARGET: target.name_or_path, HEADS: config.num_heads, LAYERS: config.num_layers, ARCHITECTURE: kind}
        layer = {name: value for name, value in decoders.write_layers(config).items() if name != "model_type"}
        tensors = dict(_to_file(checkpoint, kind))
        return {**config.extra, **layer, **keys, "grounded_heads": True, "hidden_state_offset": 0}, tensors


def _place(kind: str, block: int) -> int:
    """Return the index of a block in its depth's sequence; in a ``prefix-mlp`` head a dropout comes
    before each.
    """
    return 2 * block + 1 if kind == PREFIX_MLP else block


def _canonical(tensors: Tensors, kind: str) -> dict[str, Tensor]:
    """Return a file's tensors under our names. Raises CheckpointError for others, or if copies of
    one block differ.
    """
    canonical: dict[str, Tensor] = {}
    for stored, tensor in tensors.items():
        if UNREAD.fullmatch(stored):
            continue
        name = stored.removeprefix(PREFIX)
        if block := BLOCK.fullmatch(stored):
            place = int(block[2])
            name = f"heads.{block[1]}.{'first' if place == _place(kind, 0) else 'rest'}.{block[3]}"
        elif head := OUTPUT.fullmatch(stored):
            name = f"lm_heads.{head[1]}.{head[2]}"
        elif name == stored:
            raise CheckpointError(
                f"the tensor {stored} is none of a Hydra head; expected hydra_mlp.DEPTH.* and the like"
            )
        if not torch.equal(canonical.setdefault(name, tensor), tensor):
            raise CheckpointError(
                f"{stored} is not what another block of its depth is: Hydra's code has one block behind the first and "
                "applies it again and again, so that its loader would keep the last alone"
            )
    return canonical


def _to_file(checkpoint: HeadCheckpoint, kind: str) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors as stored; a block that is applied several times is stored as often."""
    for name, tensor in checkpoint.tensors.items():
        part, *rest = name.split(".")
        if part == "heads":
            depth, which, end = rest[0], rest[1], ".".join(rest[2:])
            blocks = range(1) if which == "first" else range(1, checkpoint.config.num_layers)
            for block in blocks:
                yield f"hydra_mlp.{depth}.{_place(kind, block)}.{end}", tensor.clone()
        elif part == "lm_heads":
            yield f"hydra_lm_head.{rest[0]}.{'1.' if kind == PREFIX_MLP else ''}{rest[1]}", tensor
        elif part != "d2t":
            yield PREFIX + name, tensor


# What serving engines make of it
ENGINE_FACTS = Engines(
    traits=(Trait(always, "a Hydra head", [("fails", EVERY, NO_SUCH_DRAFTER)], DRAFT_HERE),),
)
