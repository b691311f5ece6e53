"""MLP speculator (arXiv 2404.19124): a small recurrent network that starts from the target's last hidden state.

Depth k, from 0: ``s_k = GELU(LN_k(w_s P_k s_(k-1) + w_e E_k[token above]))``, logits ``H_k s_k``, where s_(-1) is the
target's state. Parameter names are those on disk.

The format of IBM's MLP speculators (fms-extras, ``modeling_mlp_speculator.py``; vLLM, ``MLPSpeculatorConfig``):
``model_type`` mlp_speculator, tensors ``speculator.{emb,proj,ln,head}.DEPTH.*``.

Of tied depths a file holds one copy or several, which are the same.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from forerun.errors import CheckpointError, refuse
from forerun.heads.base import Attend, HeadConfig, RecurrentHead, Stepped, leave_away
from forerun.heads.drafting import HeadDrafter
from forerun.heads.engines import DRAFT_HERE, EVERY, NO_SUCH_DRAFTER, Engines, Trait, always
from forerun.heads.files import Config, Format, HeadCheckpoint, TargetFacts, Tensors, Written, make_config
from forerun.heads.keys import Keys
from forerun.heads.layers import rms_norm
from forerun.types import LAST_HIDDEN

EPS = 1e-6  # Epsilon of the norms: no file says another


@dataclass(frozen=True, kw_only=True, slots=True)
class MlpSpeculatorConfig(HeadConfig):
    """Shape of an MLP speculator, named as in its ``config.json``."""

    kind: ClassVar[str] = "mlp_speculator"
    n_predict: int = 3  # Depths: tokens drafted beyond the target's own
    inner_dim: int  # Width of the states; the target's hidden size unless said otherwise
    tie_weights: bool = False  # All depths share their weights, but the first has a projection of its own
    scale_input: bool = False  # Normalise the target's state, which is then worth half

    def __post_init__(self) -> None:
        least = 2 if self.tie_weights else 1
        away = leave_away(draft__vocab_size=self.reduced_vocabulary, boundaries=self.boundaries != (LAST_HIDDEN,))
        refuse(
            (
                self.n_predict < least or self.inner_dim < 1,
                f"MLP speculator: n_predict must be at least {least} and inner_dim at least 1, got {self.n_predict} "
                f"and {self.inner_dim}",
            ),
            (
                bool(away),
                f"MLP speculator: it proposes all of the target's tokens and reads its last hidden state; {away}",
            ),
        )

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
        super().__init__(config)
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
        return self.emb[0].weight  # type: ignore[return-value]

    def start_as(self, model: Any, token_ids: Tensor | None) -> None:
        """Copy nothing: the states are the speculator's own."""

    def scales(self) -> Sequence[nn.Parameter]:
        return [weight for output in self.head for weight in output.parameters()]

    def prefix(self, features: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        if not self.config.scale_input:
            return features
        return rms_norm(features, torch.ones_like(features[0, 0]), EPS).mul(0.5**0.5)

    def embed(self, tokens: Tensor, depth: int = 0) -> Tensor:
        return _of(self.emb, depth)(tokens)

    def step(self, depth: int, embeds: Tensor, memory: Tensor) -> Stepped:
        mixed = self.config.state_weight * _of(self.proj, depth)(memory) + self.config.emb_weight * embeds
        state = gelu(_of(self.ln, depth)(mixed))
        return Stepped(memory=state, output=state)

    def logits(self, output: Tensor, depth: int = 0) -> Tensor:
        return _of(self.head, depth)(output)

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


# Its files
MODEL_TYPE, ARCHITECTURE = "mlp_speculator", "MLPSpeculatorPreTrainedModel"
NAME = re.compile(r"(?:speculator\.)?(emb|proj|ln|head)\.(\d+)\.(weight|bias)")
TREE = ("top_k_tokens_per_head", "n_candidates")
"""Keys of the tree that IBM's server drafts; vLLM reads their number and nothing else."""


class MlpSpeculatorFormat(Format):
    """Heads of IBM (``ibm-fms``, ``ibm-granite``, ``ibm-ai-platform``)."""

    name = "mlp_speculator"

    def recognises(self, config: Config) -> bool:
        return config.get("model_type") == MODEL_TYPE

    def read(self, config: Config, tensors: Tensors, *, num_layers: int | None = None) -> HeadCheckpoint:
        keys = Keys(config)
        keys.pass_over("model_type", "architectures", "torch_dtype", "dtype")
        size, vocab_size, depths = keys.integer("emb_dim"), keys.integer("vocab_size"), keys.integer("n_predict")
        if keys.integer("num_lookahead_tokens", depths) != depths:
            raise CheckpointError(f"num_lookahead_tokens of config.json must be n_predict, {depths}")
        tied = keys.flag("tie_weights")
        drafts = {name: keys.get(name) for name in TREE}
        kept = {name: value for name, value in drafts.items() if value not in (None, _tree(depths)[name])}
        head = make_config(
            MlpSpeculatorConfig,
            n_predict=depths,
            inner_dim=keys.integer("inner_dim", 0) or size,
            tie_weights=tied,
            scale_input=keys.flag("scale_input"),
            target_hidden_size=size,
            vocab_size=vocab_size,
            draft_vocab_size=vocab_size,
            boundaries=(LAST_HIDDEN,),
            extra=keys.rest() | kept,
        )
        return HeadCheckpoint(config=head, tensors=_canonical(tensors, tied))

    def write(self, checkpoint: HeadCheckpoint, target: TargetFacts) -> Written:
        config = checkpoint.config
        dtype = str(checkpoint.tensors["head.0.weight"].dtype).removeprefix("torch.")
        keys = {
            "model_type": MODEL_TYPE,
            "architectures": [ARCHITECTURE],
            "torch_dtype": dtype,
            "emb_dim": config.target_hidden_size,
            **{name: getattr(config, name) for name in ("vocab_size", "n_predict", "inner_dim")},
            **{name: getattr(config, name) for name in ("tie_weights", "scale_input")},
        }
        tensors = {}
        for name, tensor in checkpoint.tensors.items():
            part, depth, end = name.split(".")
            last = config.n_predict if config.tie_weights and (part != "proj" or depth == "1") else int(depth) + 1
            for copy in range(int(depth), last):
                tensors[f"speculator.{part}.{copy}.{end}"] = tensor.clone()
        return {**_tree(config.n_predict), **config.extra, **keys}, tensors


def _tree(depths: int) -> dict[str, object]:
    """Return the tree's default values; vLLM wants an entry for each depth."""
    return {"top_k_tokens_per_head": [max(1, 5 - depth) for depth in range(depths)], "n_candidates": 5}


def _canonical(tensors: Tensors, tied: bool) -> dict[str, Tensor]:
    """Return a file's tensors under our names. Raises CheckpointError for others, or if tied ones
    differ.
    """
    canonical: dict[str, Tensor] = {}
    for stored, tensor in tensors.items():
        name = NAME.fullmatch(stored)
        if name is None:
            raise CheckpointError(f"the tensor {stored} is none of an MLP speculator; expected emb, proj, ln and head")
        part, depth, end = name[1], int(name[2]), name[3]
        shared = min(depth, 1 if part == "proj" else 0) if tied else depth
        if not torch.equal(canonical.setdefault(f"{part}.{shared}.{end}", tensor), tensor):
            raise CheckpointError(f"tie_weights is true, but {stored} is not what another depth has")
    return canonical


# What serving engines make of it
ENGINE_FACTS = Engines(
    traits=(
        Trait(
            always,
            "an MLP speculator",
            [("fails", "vllm", "has the format, and no drafter for it since its V1 engine (vLLM #47825)")],
            f"{DRAFT_HERE}, or in a vLLM that still has its V0 engine",
        ),
        Trait(always, "an MLP speculator", [("fails", EVERY.replace("vllm ", ""), NO_SUCH_DRAFTER)], DRAFT_HERE),
    ),
)
