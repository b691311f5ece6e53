"""Base classes of draft heads and of their configurations. Training and drafting run the same module."""

from __future__ import annotations

import json
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn

from forerun.errors import ArgumentError, VocabularyMismatchError, refuse, refuse_unknown
from forerun.heads.start import Seen
from forerun.types import Boundary

Angles = tuple[Tensor, Tensor]  # Cosines and sines (B, N, D) of the positions
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Attends, called with (layer, query (B, heads, N, D), key and value (B, groups, N, D)) -> (B, N,
heads, D). Keys are already rotated.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadConfig(ABC):
    """Configuration of a head; a kind of head adds its own fields."""

    FROM_TARGET: ClassVar[frozenset[str]] = frozenset(
        {"target_hidden_size", "vocab_size", "draft_vocab_size", "boundaries", "extra"}
    )
    """Fields that follow from the target, or are settled elsewhere; a recipe may choose the others.
    """

    target_hidden_size: int
    vocab_size: int  # The target's
    draft_vocab_size: int  # Tokens that the head can propose; the same as `vocab_size` where it is not reduced
    boundaries: tuple[Boundary, ...]
    """Layer boundaries at which the target's hidden states are read: after this many layers, or
    `LAST_HIDDEN`, after the final norm.
    """
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the source file that mean nothing to drafting (names, versions) or are unknown; they
    are written back.
    """

    @property
    @abstractmethod
    def kind(self) -> str:
        """Name of the kind in `drafters.kinds`."""

    @property
    def reduced_vocabulary(self) -> bool:
        """True if token ids of the head differ from the target's."""
        return self.draft_vocab_size != self.vocab_size

    @property
    def max_depth(self) -> int | None:
        """Most tokens that the head drafts on one path; None: no limit."""
        return None

    @property
    def obstacle(self) -> str | None:
        """The reason why such a head cannot draft although it can be read; None: it can."""
        return None

    def check_target(self, model: Any) -> None:
        """Raise UnsupportedModelError if a head of this shape could not draft for a transformers causal LM, before it
        is trained; most kinds draft for all that are served.
        """
        return

    @classmethod
    def option_names(cls) -> list[str]:
        """Return the fields that a recipe may choose."""
        return [field.name for field in fields(cls) if field.name not in cls.FROM_TARGET]

    @classmethod
    def for_target(
        cls, kind: str, model: Any, draft_vocab_size: int | None = None, options: Mapping[str, Any] | None = None
    ) -> Self:
        """Return the shape of a head for a transformers causal LM `model`, with `options` (of
        `option_names`) instead of what follows from it. Raises ArgumentError for an unknown option
        (naming the nearest), or one that does not fit the target.
        """
        config = model.config.get_text_config()
        options_given = dict(options or {})
        known = cls.option_names()
        for name in options_given:
            refuse_unknown(f"a head of the kind {kind} has no option", name, known, "It has")
        check_types(cls, options_given, f"a head of the kind {kind}")
        shape = {
            "target_hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "draft_vocab_size": config.vocab_size if draft_vocab_size is None else draft_vocab_size,
            **cls.fields_for(kind, config, options_given),
        }
        made = cls(**shape)
        if max(made.boundaries) > config.num_hidden_layers:
            raise ArgumentError(
                f"boundary {max(made.boundaries)} does not exist: the target has {config.num_hidden_layers} layers"
            )
        return made

    @classmethod
    @abstractmethod
    def fields_for(cls, kind: str, config: Any, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of this kind: `options`, and what follows from the target's
        configuration.
        """


def leave_away(**given: bool) -> str:
    """Return the advice to leave away what was given and is not to be, by names in which `__` stands for a dot; empty
    where nothing was.
    """
    names = [name.replace("__", ".") for name, there in given.items() if there]
    return f"leave {' and '.join(names)} away" if names else ""


def check_types(made: type, options: Mapping[str, Any], what: str) -> None:
    """Raise ArgumentError for options that are not of the types of the dataclass `made`, whose name
    is `what`: all of them at once. A field that becomes a dataclass itself is a mapping here.
    """
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    strict, wrong = ConfigDict(strict=True, allow_inf_nan=False), list[str]()
    for name, hint in typing.get_type_hints(made).items():
        nested = any(map(is_dataclass, typing.get_args(hint)))
        wanted: Any = Mapping[str, Any] | None if nested else hint
        try:
            if name in options:  # as JSON, where a list is a tuple, too
                TypeAdapter(wanted, config=strict).validate_json(json.dumps(options[name], default=str))
        except ValidationError as error:
            said = error.errors()[0]["msg"].replace("Input should be", "must be")
            wrong.append(f"{name} {said}, got {options[name]!r}")
    if wrong:
        raise ArgumentError(f"{what}: {'; '.join(wrong)}")


def check_fits(config: HeadConfig, target: Fitted, what: str) -> None:
    """Raise an error, in the name of `what`, if a head was made for another target than this one."""
    if config.target_hidden_size != target.hidden_size:
        sizes = f"{config.target_hidden_size}, the target's have {target.hidden_size}"
        raise ArgumentError(f"{what}: the head reads hidden states of size {sizes}; it is another model's")
    if config.vocab_size != target.vocab_size:
        sizes = f"{config.vocab_size} tokens, the target has {target.vocab_size}"
        raise VocabularyMismatchError(f"{what}: the head's vocabulary has {sizes}; it is another model's")
    refuse(
        (config.obstacle is not None, f"{what}: {config.obstacle}"),
        (
            (deepest := max(config.boundaries)) > target.num_layers,
            f"{what}: the head reads boundary {deepest}, the target has {target.num_layers} layers",
        ),
    )


class Fitted(Protocol):
    """The properties of a target that a head must fit."""

    @property
    def hidden_size(self) -> int:
        """Size of the hidden states that the head reads."""

    @property
    def vocab_size(self) -> int:
        """Size of the target's vocabulary."""

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""


class Head(nn.Module, ABC):
    """A draft head; see `SequentialHead`, `RecurrentHead`, `ParallelHead`, `BlockHead` and
    `AdapterHead`.
    """

    Config: ClassVar[type[HeadConfig]]
    config: HeadConfig

    def __init__(self, config: Any = None) -> None:
        """Keep the configuration, unless a head does so itself."""
        super().__init__()
        self.config = config

    @classmethod
    @torch.no_grad()
    def initial(cls, model: Any, config: Any, token_ids: Tensor | None = None, *, seed: int = 0) -> Self:
        """Return an untrained head in float32, with those weights of the target's, a transformers
        causal LM, that it starts with. `config` is from `HeadConfig.for_target`; `token_ids` (Vd,)
        are needed if the vocabulary is reduced.
        """
        if config.reduced_vocabulary and token_ids is None:
            raise ArgumentError(f"a draft vocabulary of {config.draft_vocab_size} tokens needs to know which ones")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            head = cls(config).float()
        head.start_as(model, token_ids)
        return head

    @abstractmethod
    def start_as(self, model: Any, token_ids: Tensor | None) -> None:
        """Copy the weights that start as the target's, without gradients. The arguments are those
        of `initial`.
        """

    def fit(self, seen: Seen) -> None:
        """Let layers that read the target's states start at what comes nearest to its next last state, without
        gradients. The default leaves them as they are.
        """

    def scales(self) -> Sequence[nn.Parameter]:
        """Return the weights that the logits are proportional to; none if there are no such weights."""
        return ()

    def fuse(self, features: Sequence[Tensor]) -> Tensor:
        """Combine the target's states at the boundaries, (B, N, Ht) each, into the feature (B, N,
        H) that the head reads. The default is for heads that read one boundary as it is.
        """
        return features[0]

    @property
    @abstractmethod
    def weight(self) -> Tensor:
        """Any weight: it has the head's dtype and device."""

    @property
    def feature_size(self) -> int:
        """Size H of the features from `fuse`."""
        return self.config.target_hidden_size

    @property
    def token_ids(self) -> Tensor:
        """(Vd,) the target's id of each token that the head can propose."""
        return torch.arange(self.config.draft_vocab_size, device=self.weight.device)

    @property
    def recordable(self) -> bool:
        """True if a pass reads no value on the host, so that a device can record it."""
        return True

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the parameters by name, without a frozen copy of the target's embedding."""
        return {name: weight for name, weight in self.named_parameters() if weight.requires_grad}


@dataclass(frozen=True, slots=True)
class Advanced:
    """The outputs of one pass of a sequential head for each position."""

    feature: Tensor  # (B, N, H): what the next step reads in place of the target's feature
    output: Tensor  # (B, N, H): what the output head reads


class AttendingHead(Head):
    """A head whose layers keep keys and values of what was committed."""

    @property
    @abstractmethod
    def windows(self) -> tuple[int | None, ...]:
        """Positions that each layer looks back, itself included; None: to the beginning."""

    @property
    def unseen(self) -> tuple[int, ...]:
        """Number of first entries of a text that each layer does not see; mostly none."""
        return (0,) * len(self.windows)

    @abstractmethod
    def embed(self, tokens: Tensor, depth: int = 0) -> Tensor | None:
        """Embed (..) -> (.., H) with the head's own table, a depth's where each has one; None: it
        reads the target's.
        """

    @abstractmethod
    def logits(self, output: Tensor, depth: int = 0) -> Tensor | None:
        """Return raw logits (.., Vd) of (.., H) by the head's own output head, a depth's where each
        has one; None: it uses the target's.
        """

    def angles(self, positions: Tensor, like: Tensor) -> Angles:
        """Return cosines and sines (B, N, D) of `positions` (B, N), in the dtype of `like`."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Above:
    """The tokens drafted above the nodes of one depth of a block, and the state they left."""

    tokens: Tensor  # (B, F) int64, the target's ids: those right above
    depth: int  # Depth of the nodes, from 0: below the root
    memory: Tensor | None  # (B, F, M) of the path, as the last depth left it; None at depth 0
    embed: Callable[[Tensor], Tensor]
    """Embeds token ids (..) -> (.., H), by the head's own table or the target's."""


@dataclass(frozen=True, slots=True)
class Followed:
    """One depth of a block head after the tokens drafted above it."""

    logits: Tensor  # (B, F, Vd), or (B, 1, Vd) where they are alike
    memory: Tensor | None  # (B, F, M) of the path up to here, where the head keeps one
    acceptance: Tensor | None = None  # (B, F) float: the chance that a token drawn here is accepted, if the head says


class SequentialHead(AttendingHead):
    """Drafts depth by depth: each depth reads the features of the one before. Entry i reads the embedding
    of token i + 1 and the feature of token i at position i, and predicts token i + 2.
    """

    @property
    def output_size(self) -> int:
        """Width of what the output head reads."""
        return self.feature_size

    def read(self, embeds: Tensor, features: Tensor, before: Tensor, angles: Angles, attend: Attend) -> Advanced:
        """Run one pass over committed tokens: embeddings (B, N, H) of the next tokens together with the target's
        features from `fuse`. `before` (B, 1, F) is the feature of the entry before them.
        """
        return self.advance(embeds, features, angles, attend)

    @abstractmethod
    def advance(self, embeds: Tensor, features: Tensor, angles: Angles, attend: Attend, depth: int = 1) -> Advanced:
        """Run one pass over the nodes at a `depth`, from 1 on: embeddings (B, N, H) together with their parents'
        features.
        """


@dataclass(frozen=True, slots=True)
class Stepped:
    """One depth of a recurrent head."""

    memory: Tensor  # (B, N, M): what the next depth reads of the path up to here
    output: Tensor  # (B, N, H): what the depth's output head reads


class RecurrentHead(AttendingHead):
    """Drafts depth by depth, with separate weights for each depth, from one state of the committed tokens and the
    drafted tokens. A memory that each depth passes to the next one represents these tokens. Depth k, from 0 on, reads
    the embedding of token i + 1 + k and predicts token i + 2 + k; token i + 1 is the target's own.
    """

    @property
    def windows(self) -> tuple[int | None, ...]:
        return ()

    @abstractmethod
    def prefix(self, features: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Compute the memory that depth 0 reads: features (B, N, H) from `fuse` at `positions` (B, N) -> (B, N, H)."""

    @abstractmethod
    def step(self, depth: int, embeds: Tensor, memory: Tensor) -> Stepped:
        """Run one depth: embeddings (B, N, E) of the tokens above it beside what the depth before
        left (B, N, M).
        """

    @abstractmethod
    def output_head(self, depth: int) -> tuple[Tensor, Tensor | None]:
        """Return weight (V, H) and bias (V,), if any, of the output head of a depth."""


Kept = Mapping[str, tuple[Tensor, Tensor]]
"""Keys and values (B, groups, W, D) that the target keeps of what is committed, by the kind of layer."""


class SharingHead(Head):
    """Drafts depth by depth from the target's keys and values of the committed tokens; nodes have none. Depth k, from 0
    on, reads the state of the depth before, at first the target's of token i, and the embedding of token i + 1 + k, and
    predicts token i + 2 + k.
    """

    @property
    @abstractmethod
    def windows(self) -> Mapping[str, int | None]:
        """Kinds of the target's layers that it reads, and how many places it looks back there; None: all."""

    @abstractmethod
    def step(
        self, embeds: Tensor, memory: Tensor, positions: Tensor, kept: Kept, masks: Mapping[str, Tensor]
    ) -> Stepped:
        """Run one depth: embeddings (B, N, H) beside what the depth before left (B, N, H), at the root's `positions`
        (B, N), under masks (B, 1, N, W) by the kind of layer.
        """

    @abstractmethod
    def logits(self, output: Tensor) -> Tensor:
        """Return raw logits (.., V) of (.., H')."""

    @property
    def recordable(self) -> bool:
        return False


class BlockHead(AttendingHead):
    """Drafts all depths in one pass over a block after the committed tokens: the root, then mask tokens for the tokens
    to predict. For committed tokens before the root, entry i is the feature of token i at position i.
    """

    config: Any

    @property
    @abstractmethod
    def places(self) -> int | None:
        """Tokens of a block, root included. None: committed tokens run through the layers (`read`), the root's entry
        predicts the token after it, and a block has a mask for each further depth.
        """

    @property
    @abstractmethod
    def first(self) -> int:
        """Index in the block, the root's being 0, of the output that predicts the token after the
        root.
        """

    @property
    def mask_token(self) -> int:
        """The mask token after the root."""
        return int(self.config.mask_token_id)

    @abstractmethod
    def causal(self, layer: int) -> bool:
        """Return whether a position of the block sees none behind it."""

    def context(self, features: Tensor, angles: Angles) -> Sequence[tuple[Tensor, Tensor]]:
        """Return what each layer keeps of features (B, N, H) from `fuse`: keys, rotated, and
        values, (B, groups, N, D).
        """
        raise NotImplementedError

    def read(self, embeds: Tensor, features: Tensor, angles: Angles, attend: Attend) -> Tensor:
        """Run one pass over what is committed, in place of `context`, if a block has no place for
        the root: embeddings (B, N, H) of the next tokens beside features from `fuse` -> (B, N, H),
        what the output head reads.
        """
        raise NotImplementedError

    @abstractmethod
    def block(self, embeds: Tensor, angles: Angles, attend: Attend) -> Tensor:
        """Run the layers over a block: (B, N, H) of its tokens -> (B, N, H), what the output head
        reads.
        """

    def follow(self, logits: Tensor, states: Tensor, above: Above) -> Followed:
        """Correct the `logits` (B, 1, Vd) of a depth by the tokens above it. The default changes
        nothing, so that they are alike for all F nodes. `states` (B, 1, H) are the block's outputs.
        """
        return Followed(logits, above.memory)


class AdapterHead(AttendingHead):
    """Drafts level by level: every node runs through the target's layers up to the head's one
    boundary, and the head goes on from there. Entry i is the target's state of token i at position
    i, drafted or not, and predicts token i + 1: there is nothing of the head's own for the target's
    state to replace.
    """

    @abstractmethod
    def context(self, features: Tensor, angles: Angles) -> Sequence[tuple[Tensor, Tensor]]:
        """Return what each layer keeps of features (B, N, H) from `fuse`: keys, rotated, and
        values, (B, groups, N, D).
        """

    @abstractmethod
    def adapt(self, features: Tensor, angles: Angles, attend: Attend) -> Tensor:
        """Run one pass over features (B, N, H) from `fuse` -> (B, N, H), what the output head
        reads.
        """


class ParallelHead(Head):
    """Drafts all depths from one state; a depth's logits do not depend on the tokens drafted above
    it. From the state of token i, depth k (from 0) predicts token i + 2 + k: token i + 1 is the
    target's own.
    """

    @abstractmethod
    def states(self, features: Tensor, depths: int) -> Tensor:
        """Compute what the output heads of the first depths read: (.., H) from `fuse` -> (..,
        depths, H).
        """

    @abstractmethod
    def logits(self, states: Tensor) -> Tensor:
        """Return raw logits (.., depths, Vd) of (.., depths, H), each depth by its own output head."""
