"""Gemma 4's assistants (``google/gemma-4-*-it-assistant``): small layers that have no keys and values of their own and
read those which the target keeps.

A node reads the token above it, as the target embeds it, beside the state above it: at first the target's last one,
then what the assistant made. ``h' = layers(pre_projection([e; h]))``; the output head reads h', and
``post_projection(h')`` is the state that the next depth reads. Layers with full attention see the keys and values of
the target's last such layer that has its own, those with a window those of its last layer with one: what is committed
before the root, from the root's position, at every depth. So a node sees no other node.

The output head of the small ones looks only at the tokens of the likeliest groups (``masked_embedding``): the others
are not drafted.

Files are those of transformers' ``gemma4_assistant``, whose layers these are; assistants are not trained here: their
features are the target's keys and values, which no features of a data set hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from forerun.errors import ArgumentError, CheckpointError
from forerun.heads.base import HeadConfig, Kept, SharingHead, Stepped
from forerun.heads.drafting import HeadDrafter
from forerun.heads.files import Config, Format, HeadCheckpoint, TargetFacts, Tensors, Written, make_config, read_head
from forerun.heads.keys import architectures
from forerun.model.masks import SLIDING
from forerun.types import LAST_HIDDEN

NOT_MADE = "Gemma 4's assistants are taken as they are published and not made anew; train a head of another kind"
STORED, OURS = "model.embed_tokens.weight", "lm_head.weight"
"""The output head's name in files, which tie it to an embedding that nothing reads, and in the module."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gemma4AssistantConfig(HeadConfig):
    """Shape of an assistant."""

    kind: ClassVar[str] = "gemma4_assistant"
    text_config: Mapping[str, Any]  # Of its layers, as transformers' ``gemma4_text`` has it
    num_centroids: int = 0  # Groups of tokens; 0: the output head looks at every token
    centroid_intermediate_top_k: int = 32  # Groups that the output head looks at

    @classmethod
    def fields_for(cls, kind: str, config: Any, options: Mapping[str, Any]) -> dict[str, Any]:
        raise ArgumentError(NOT_MADE)


class Gemma4AssistantHead(SharingHead):
    """An assistant; see `SharingHead`."""

    Config = Gemma4AssistantConfig
    config: Gemma4AssistantConfig
    token_ordering: Tensor

    def __init__(self, config: Gemma4AssistantConfig) -> None:
        super().__init__(config)
        from transformers import AutoConfig, AutoModel

        text = AutoConfig.for_model(**config.text_config)
        text.num_kv_shared_layers = text.num_hidden_layers
        size, wide = text.hidden_size, config.target_hidden_size
        self.model = AutoModel.from_config(text, attn_implementation="sdpa")
        self.model.embed_tokens = None  # It reads the target's
        # Of an output head that looks at some tokens the rows are looked up.
        shape = (config.vocab_size, size)
        self.lm_head = nn.Embedding(*shape) if config.num_centroids else nn.Linear(*shape[::-1], bias=False)
        self.pre_projection = nn.Linear(2 * wide, size, bias=False)
        self.post_projection = nn.Linear(size, wide, bias=False)
        if config.num_centroids:
            self.centroids = nn.Linear(size, config.num_centroids, bias=False)
            self.register_buffer("token_ordering", torch.zeros(config.vocab_size, dtype=torch.int64))

    @property
    def weight(self) -> Tensor:
        return next(self.parameters())

    @property
    def windows(self) -> Mapping[str, int | None]:
        text = self.model.config
        return {kind: text.sliding_window if kind == SLIDING else None for kind in text.layer_types}

    def start_as(self, model: Any, token_ids: Tensor | None) -> None:
        """Raise ArgumentError: an assistant is not made anew."""
        raise ArgumentError(NOT_MADE)

    def step(
        self, embeds: Tensor, memory: Tensor, positions: Tensor, kept: Kept, masks: Mapping[str, Tensor]
    ) -> Stepped:
        states = self.pre_projection(torch.cat([embeds, memory], -1))
        outputs = self.model(
            inputs_embeds=states,
            position_ids=positions,
            attention_mask=dict(masks),
            shared_kv_states=dict(kept),
            use_cache=False,
            logits_to_keep=None,  # With an integer transformers slices per-layer inputs, which are absent
        ).last_hidden_state
        return Stepped(memory=self.post_projection(outputs), output=outputs)

    def logits(self, output: Tensor) -> Tensor:
        if not self.config.num_centroids:
            return self.lm_head(output)
        likeliest = self.centroids(output).topk(self.config.centroid_intermediate_top_k, dim=-1).indices
        tokens = self.token_ordering.view(self.config.num_centroids, -1)[likeliest].flatten(2)
        scores = (self.lm_head(tokens) @ output.unsqueeze(-1)).squeeze(-1)
        lowest = torch.finfo(scores.dtype).min
        return scores.new_full((*scores.shape[:-1], self.config.vocab_size), lowest).scatter(-1, tokens, scores)


class Gemma4AssistantDrafter(HeadDrafter):
    """Drafts with an assistant of Gemma 4: chain, fixed tree or dynamic tree."""

    name = "gemma4_assistant"


# Its files
class Gemma4AssistantFormat(Format):
    """Assistants as Google publishes them."""

    name = "gemma4_assistant"

    def recognises(self, config: Config) -> bool:
        return "Gemma4" in "".join(architectures(config)) and "Assistant" in "".join(architectures(config))

    def read(self, config: Config, tensors: Tensors, *, num_layers: int | None = None) -> HeadCheckpoint:
        text, size = config.get("text_config"), config.get("backbone_hidden_size")
        if not isinstance(text, Mapping) or not isinstance(size, int):
            raise CheckpointError(
                "config.json of an assistant has a text_config and backbone_hidden_size; this has not"
            )
        keys_read = {"text_config", "backbone_hidden_size", "num_centroids", "centroid_intermediate_top_k"}
        head = make_config(
            Gemma4AssistantConfig,
            target_hidden_size=size,
            vocab_size=text.get("vocab_size"),
            draft_vocab_size=text.get("vocab_size"),
            boundaries=(LAST_HIDDEN,),
            text_config=text,
            num_centroids=config.get("num_centroids", 2048) if config.get("use_ordered_embeddings") else 0,
            centroid_intermediate_top_k=config.get("centroid_intermediate_top_k", 32),
            extra={name: value for name, value in config.items() if name not in keys_read},
        )
        renamed = {name.removeprefix("masked_embedding."): tensor for name, tensor in tensors.items()}
        if STORED in renamed:
            embedding = renamed.pop(STORED)
            renamed.setdefault(OURS, embedding)
        return HeadCheckpoint(config=head, tensors=renamed)

    def write(self, checkpoint: HeadCheckpoint, target: TargetFacts) -> Written:
        config = checkpoint.config
        keys = {
            "text_config": dict(config.text_config),
            "backbone_hidden_size": config.target_hidden_size,
            "num_centroids": config.num_centroids or 2048,
            "centroid_intermediate_top_k": config.centroid_intermediate_top_k,
        }
        names = {OURS: STORED, **{name: f"masked_embedding.{name}" for name in ("centroids.weight", "token_ordering")}}
        return {**config.extra, **keys}, {names.get(name, name): one for name, one in checkpoint.tensors.items()}


def read_assistant(target: str | Path) -> HeadCheckpoint:
    """Read the assistant that is published beside a target: under the target's name and ``-assistant``."""
    return read_head(f"{str(target).rstrip('/')}-assistant")
