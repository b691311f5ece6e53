"""Objectives share these: settings, the frozen target, and the shifts between a state and the token
it predicts.

Conditional drop (COD) lets a drafter that drafts all depths in one pass learn deeper ones from
fewer entries.

Otherwise eight depths would be eight times the text (PARD, arXiv 2504.18583; P-EAGLE, 2602.01469).

All entries of a row are at depth 0. At depth d a row keeps the share max(keep^d, floor) of its
entries, random ones of those that it kept at d - 1: an entry's mask stands d positions behind it,
and sees the entries up to it and its own masks up to d. All go through the layers in one pass.
Every prediction weighs the same, so that early depths count more.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from forerun.errors import ArgumentError, nearest
from forerun.losses.chunked_loss import (
    Divergence,
    DraftPaths,
    Teacher,
    VocabularyLoss,
    chunk_elements,
    soft_loss,
    working_dtype,
)
from forerun.types import Boundary


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBatch:
    """Packed windows: B rows of S tokens.

    A row may hold several documents and end in padding.
    """

    tokens: Tensor  # (B, S) int64
    loss_mask: Tensor  # (B, S) bool: the assistant wrote the token, so predicting it counts; False for padding
    documents: Tensor  # (B, S) int64: the document's number in the row, from 0; -1: padding. Attention stays inside one
    positions: Tensor  # (B, S) int64: position within the document, from 0

    def to(self, device: torch.device | str) -> TokenBatch:
        return TokenBatch(**{item.name: getattr(self, item.name).to(device) for item in fields(self)})


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureBatch:
    """A `TokenBatch` with the target's hidden states."""

    batch: TokenBatch
    features: Mapping[Boundary, Tensor]  # boundary -> (B, S, Ht); `LAST_HIDDEN` is the state after the final norm
    number: int = 0  # Number of the batch in its run, from 0
    done: float = 0.0  # Share of the run that lies before its step, in [0, 1); the training loop says it

    def to(self, device: torch.device | str) -> FeatureBatch:
        """Return the same on another device."""
        return replace(
            self,
            batch=self.batch.to(device),
            features={boundary: states.to(device) for boundary, states in self.features.items()},
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LossReport:
    """The losses of one micro-batch, as sums.

    Sums can be added over micro-batches and processes, means cannot.
    """

    loss: Tensor
    """The sum over the counted predictions, () float32, nats, with graph.

    It must reach every trainable parameter, also when nothing counts: other processes wait for the
    gradient.
    """
    weight: Tensor  # () float32: counted predictions. A step's loss is (sum of losses) / (sum of weights) of all ranks
    metrics: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """name -> (sum, count), both () without graph; the same names on every process and in every micro-batch."""


class Objective(Protocol):
    """A loss over a batch.

    Those that a recipe names are made from ``(head, target, settings)`` and have `Settings`.
    """

    def parameters_module(self) -> nn.Module:
        """Return the module that is trained, saved, and distributed over processes.

        Frozen parts that others own (the target) stay outside.
        """

    def __call__(self, batch: FeatureBatch) -> LossReport:
        """Return the loss of a micro-batch; read parameters from the module each time, never from a
        stored tensor.
        """

    def rates(self, done: float) -> Mapping[str, float]:
        """Map prefixes of parameter names to factors on their learning rate in one step.

        `done` is the share of the run that lies before the step. Other parameters have the factor
        1. The prefixes are always the same, and none is a prefix of another.
        """
        return {}


class Batches(Protocol):
    """Data addressed by position, so that a run can be resumed by a number only."""

    steps_per_epoch: int  # Batches in one pass over the data; `batch` continues beyond it (next epoch, another order)

    def batch(self, step: int, rank: int, world: int) -> FeatureBatch:
        """Return the share of process `rank` of `world` in batch number `step`, from 0.

        It is a function of its arguments and, if the trained model generates the text, of its weights at that time. The
        shares of all ranks together are the same batch for every `world`.
        """


Share = Annotated[float, Field(ge=0, le=1)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Natural = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
STRICT = ConfigDict(strict=True, allow_inf_nan=False)


@cache
def _adapters(settings: Any) -> dict[str, tuple[Any, TypeAdapter[Any]]]:
    hints = typing.get_type_hints(settings, include_extras=True)
    return {name: (hint, TypeAdapter(hint, config=STRICT)) for name, hint in hints.items()}


def check_fields(settings: Any, where: str = "") -> None:
    """Raise ArgumentError for a field of another type or range than it is declared with."""
    kind: Any = type(settings)
    for name, (hint, adapter) in _adapters(kind).items():
        try:
            adapter.validate_python(getattr(settings, name))
        except ValidationError as error:
            raise ArgumentError(where + complaint(error.errors()[0], name, hint)) from None


def complaint(found: Mapping[str, Any], key: str, hint: Any) -> str:
    """Return what one error of pydantic says of a setting, with the nearest of its choices."""
    value, choices = found["input"], found.get("ctx", {}).get("expected", "").split("'")[1::2]
    wanted = found["msg"].replace("Input should be", "must be").replace("Field required", "lacks a value")
    none = ", or none" if type(None) in typing.get_args(hint) else ""
    return f"{key} {wanted}{none}, got {value!r}.{nearest(str(value), choices)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveSettings:
    """The settings of every objective; a kind of head adds its own."""

    gradient_checkpointing: bool = False
    """Compute the layers' activations again in the backward pass instead of keeping them."""
    writer: Literal["data", "draft", "target"] = "data"
    """Writer of the answers: `data` leaves them; the `target` writes other ones while it is drafted
    for; a `draft` model writes alone.
    """
    written: Share = 1.0
    """Share of the documents that `writer` writes anew; the others stay as they are."""
    reuse: Natural = 1
    """Times that a written batch is trained on before the next ones are written."""
    at_once: Natural = 16
    """Windows, of all processes, whose answers are generated together: a pass over many rows costs little more time
    than one over a few, but more memory.
    """
    accepted: Share = 1.0
    """Share of the written tokens with an accepted draft, or none, that count; those with a rejected one all do."""
    temperature: NotNegative = 1.0
    """Temperature at which `writer` draws; 0 takes the likeliest tokens."""
    prompt_tokens: Natural = 16
    """Fewest tokens of a document that `writer` leaves as its prompt: plain text has no other one."""

    def __post_init__(self) -> None:
        check_fields(self, "objective: ")


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenTarget:
    """The parts that an objective needs of the target besides its features; they are
    never trained.
    """

    embedding: nn.Module  # Token ids -> (.., H), as the target embeds them
    lm_head: Tensor  # (V, Ht) weight of the output head
    bias: Tensor | None = None  # (V,) of the output head
    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0  # At which a head or draft model is to draw as the target does; of both distributions

    @classmethod
    def of(cls, model: Any) -> FrozenTarget:
        """Read it from a transformers causal LM."""
        config = model.config.get_text_config()
        scale = getattr(config, "logit_scale", None) or 1.0
        scaling = getattr(config, "logits_scaling", None) or 1.0
        return cls(
            embedding=model.get_input_embeddings(),
            lm_head=model.get_output_embeddings().weight,
            bias=getattr(model.get_output_embeddings(), "bias", None),
            scale=scale / scaling,
            softcap=getattr(config, "final_logit_softcapping", None),
        )

    def linear(self, states: Tensor, vocabulary: int | None = None) -> tuple[Tensor, Tensor]:
        """Return states (R, H') and weight (V', H') whose product are the logits after `states`
        (.., H).

        They are those of the first `vocabulary` tokens at most; a scale and a bias have become a
        part of them. A soft cap is not in it.
        """
        states, weight = states.flatten(0, -2) * self.scale, self.lm_head[:vocabulary]
        if self.bias is None:
            return states, weight
        ones = states.new_full((len(states), 1), self.scale)
        return torch.cat([states, ones], 1), torch.cat([weight, self.bias[:vocabulary, None]], 1)

    def teacher(self, states: Tensor, token_ids: Tensor | None) -> Teacher:
        """Return the teacher of the target's probabilities after `states` (.., Ht) at `token_ids`
        (Vd,); None: all tokens.
        """
        return Teacher(
            hidden=states.flatten(0, -2),
            weight=self.lm_head.detach(),
            tokens=token_ids,
            bias=None if self.bias is None else self.bias.detach(),
            scale=self.scale,
            softcap=self.softcap,
            temperature=self.temperature,
        )

    @torch.no_grad()
    def chances(self, states: Tensor, ids: Tensor) -> Tensor:
        """Return the target's probability of `ids` (..) after `states` (.., Ht), as (..,) float32."""
        teacher, flat = self.teacher(states, None), ids.flatten().unsqueeze(1)
        size = max(1, chunk_elements(flat.device) // len(self.lm_head))
        rows = torch.split(torch.arange(len(flat), device=flat.device), size)
        chances = [teacher.probs(teacher.logits(some)).full.gather(1, flat[some]) for some in rows]
        return torch.cat(chances).view(ids.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class DistanceSettings(ObjectiveSettings):
    """How the distance of a head from the target's distribution is measured."""

    divergence: Annotated[Divergence, Field(strict=False)] = Divergence.CROSS_ENTROPY
    lk_decay: NotNegative = 3.0
    mix: Share = 0.1
    """Share of the cross-entropy in `divergence` mixed; the rest is total variation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderSettings(DistanceSettings):
    """The settings of the objectives of heads that are made of decoder layers."""

    skip_unreachable: bool = True
    """Leave out predictions whose likeliest target token is not in the draft vocabulary."""
    noise: NotNegative = 0.0
    """Uniform noise on the target's states that the head reads while it trains, at most so much to
    either side.
    """


class HeadObjective(Objective):
    """The base of the objectives of all heads: the head and what it reads of
    the frozen target.
    """

    Settings: ClassVar[type[ObjectiveSettings]]
    head: Any
    settings: Any
    noise: float = 0.0

    def __init__(self, head: Any, target: FrozenTarget, settings: Any = None) -> None:
        self.head, self.target, self.settings = head, target, settings or self.Settings()

    def parameters_module(self) -> nn.Module:
        return self.head

    def fit(self, batches: Sequence[FeatureBatch]) -> None:
        """Fit what only a pass of the head shows to the first batches of a run, see `heads.start`; mostly nothing."""

    def embed(self, ids: Tensor, depth: int = 0) -> Tensor:
        """Embed token ids by the head's own table, or the target's, which is not trained."""
        embeds: Tensor | None = self.head.embed(ids, depth)
        if embeds is not None:
            return embeds
        with torch.no_grad():
            return self.target.embedding(ids)

    def fused(self, batch: FeatureBatch) -> Tensor:
        """Return what the head reads of the target's states, (B, S, H), with uniform `noise` on
        them while the head is in training mode.
        """
        # A target, a store and a head have each a dtype of their own.
        states = [batch.features[boundary] for boundary in self.head.config.boundaries]
        dtype = working_dtype(states[0].device, self.head.weight.dtype)
        if self.head.training and self.noise:
            draws = [2 * torch.rand_like(state, dtype=torch.float32) - 1 for state in states]
            states = [state + draw.to(state.dtype) * self.noise for state, draw in zip(states, draws, strict=True)]
        return self.head.fuse([state.to(dtype) for state in states])


class DecoderObjective(HeadObjective):
    """The base of the objectives of heads of decoder layers: output head, and the distance to
    the target.
    """

    Settings: ClassVar[type[DecoderSettings]]

    def __init__(self, head: Any, target: FrozenTarget, settings: Any = None) -> None:
        super().__init__(head, target, settings)
        self.noise = self.settings.noise
        if target.bias is not None and not head.config.own_lm_head:
            raise ArgumentError("the target's output head has a bias: give the head an lm_head of its own")

    def output_head(self) -> Tensor:
        """Return the weight (Vd, H) of what reads the head's outputs."""
        return self.head.lm_head.weight if self.head.config.own_lm_head else self.target.lm_head.detach()

    def divergence(
        self, outputs: Tensor, weight: Tensor, shares: Tensor, states: Tensor, paths: DraftPaths | None = None
    ) -> VocabularyLoss:
        """Return the `soft_loss` of `outputs` (R, H) through `weight` (Vd, H), from the target's
        distributions after `states`.
        """
        return soft_loss(
            outputs,
            weight,
            shares,
            self.target.teacher(states, self.head.token_ids if self.head.config.reduced_vocabulary else None),
            self.settings.divergence,
            self.settings.lk_decay,
            mix=self.settings.mix,
            skip_unknown=self.settings.skip_unreachable,
            paths=paths,
        )


def run_or_checkpoint(run: Callable[..., Any], *given: Tensor, again: bool) -> Any:
    """Run a function; with `again` its activations are computed again in the backward pass, instead
    of kept.
    """
    return checkpoint(run, *given, use_reentrant=False) if again else run(*given)


def chain_metrics(counts: Tensor, agrees: Tensor, overlap: Tensor | None = None) -> dict[str, tuple[Tensor, Tensor]]:
    """Return ``acceptance_D``, how often a chain of the likeliest tokens got to depth D, and
    ``overlap_D``.

    ``overlap_D`` is the chance that a token drawn there is accepted. The arguments, (D, ..), are
    what counts, agrees and overlaps at each depth.
    """
    # A chain that begins before the answer has depths that do not count: no such chain is drafted.
    drafted = counts.cummin(0).values
    survives, metrics = agrees.cumprod(0) * drafted, {}
    for depth, seen in enumerate(counts):
        metrics[f"acceptance_{depth}"] = (survives[depth].sum(), drafted[depth].sum().float())
        if overlap is not None:
            metrics[f"overlap_{depth}"] = ((overlap[depth] * seen).sum(), seen.sum().float())
    return metrics


def unrolled_weights(steps: int, decay: float) -> list[float]:
    """Return the weights (steps,) of the unrolled steps: step t weighs decay^t, normalised to sum
    1.
    """
    raw = [decay**step for step in range(steps)]
    return [weight / sum(raw) for weight in raw]


def shift_left(values: Tensor, steps: int, fill: float) -> Tensor:
    """Move (B, S, ..) `steps` to the left; what is missing on the right is `fill`."""
    moved = torch.full_like(values, fill)
    if steps < values.shape[1]:
        moved[:, : values.shape[1] - steps] = values[:, steps:]
    return moved


def shift_right(values: Tensor, steps: int) -> Tensor:
    """Move (B, S, ..) `steps` to the right; what is missing on the left is 0."""
    kept = values[:, : max(0, values.shape[1] - steps)]
    return torch.cat([torch.zeros_like(values[:, : values.shape[1] - kept.shape[1]]), kept], 1)


def mark_counted(batch: TokenBatch, step: int) -> Tensor:
    """Return (B, S) bool: token i + 2 + step exists in the same document and counts."""
    wanted = shift_left(batch.loss_mask, step + 2, False)
    return wanted & (shift_left(batch.documents, step + 2, -1) == batch.documents) & (batch.documents >= 0)


def order_evenly(usable: Tensor, random: bool) -> Tensor:
    """Return an order (B, S) float of what is `usable` (B, S), every prefix of which covers the row
    evenly.

    It is a `random` one, or always the same.
    """
    if random:
        return torch.rand(usable.shape, device=usable.device)
    golden = (5**0.5 - 1) / 2  # Van der Corput's sequence: every beginning of it is spread evenly
    return (usable.cumsum(1) * golden).frac().to(torch.float32)


def pick_counted(
    rejected: npt.NDArray[np.bool_], chance: npt.NDArray[np.float64], share: float
) -> npt.NDArray[np.bool_]:
    """Return which tokens count: all whose draft was `rejected`, and a `share` of the others.

    Of the others those count whose number in [0, 1), `chance`, is below `share`.
    """
    return rejected | (chance < share)


Metrics = dict[str, tuple[Tensor, Tensor]]


class DropSettings(Protocol):
    """The settings of an objective with conditional drop."""

    @property
    def depths(self) -> int:
        """Return the most tokens that an entry learns to predict."""

    @property
    def keep(self) -> float:
        """Return the share of the entries at a depth that is kept at the next one."""

    @property
    def floor(self) -> float:
        """Return the least share of a row's entries at any depth."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Masked:
    """The entries of a batch that are computed at all depths, N in a row: depth 0 first, of every
    entry, then depth by depth.
    """

    entries: Tensor  # (B, N) int64: the entry that each belongs to
    depths: Tensor  # (N,) int64
    counted: Tensor  # (B, N) bool: the row has kept it, and what it predicts counts
    positions: Tensor  # (B, N) int64, within the document
    ahead: int  # Entry i predicts token i + 1 + `ahead` at depth 0, and token i + 1 + `ahead` + d at depth d

    @classmethod
    def of(cls, tokens: TokenBatch, settings: DropSettings, ahead: int, *, random: bool) -> Self:
        """Choose what is computed of a batch.

        Of the entries whose next prediction counts a depth has `random` ones, or always the same
        ones, which cover the row evenly.
        """
        usable = mark_counted(tokens, ahead)
        order = order_evenly(usable, random).masked_fill(~usable, -1.0).argsort(1, descending=True)
        index = torch.arange(usable.shape[1], device=usable.device)
        entries, depths, kept = [index.expand_as(order)], [torch.zeros_like(index)], [torch.ones_like(usable)]
        counts = usable.sum(1, keepdim=True)
        for depth in range(1, settings.depths):
            share = max(settings.keep**depth, settings.floor)
            most = math.ceil(share * int(counts.max()))
            entries.append(order[:, :most])
            depths.append(torch.full_like(index[:most], depth))
            kept.append(index[:most] < (share * counts).ceil())
        which, depth_of = torch.cat(entries, 1), torch.cat(depths)
        counts_at = torch.stack([mark_counted(tokens, depth + ahead - 1) for depth in range(settings.depths)], 1)
        return cls(
            entries=which,
            depths=depth_of,
            counted=torch.cat(kept, 1) & _pick(counts_at, depth_of, which),
            positions=tokens.positions.gather(1, which) + depth_of,
            ahead=ahead,
        )

    def pick(self, values: Tensor) -> Tensor:
        """Pick (B, N) from values (B, depths, S) by depth and entry."""
        return _pick(values, self.depths, self.entries)

    def following(self, values: Tensor) -> Tensor:
        """Pick (B, N, ..) from (B, S, ..): the state that the target's distribution of each
        prediction comes from.
        """
        index = (self.entries + self.depths + self.ahead).clamp_max(values.shape[1] - 1)
        return values[torch.arange(len(values), device=values.device).unsqueeze(1), index]

    def sees(self, tokens: TokenBatch) -> Tensor:
        """Return (B, N, N) bool: what each sees of all, but for windows."""
        documents = tokens.documents.gather(1, self.entries)
        entries = self.entries
        depths = self.depths
        same = documents.unsqueeze(2) == documents.unsqueeze(1)
        before = (depths == 0) & (entries.unsqueeze(1) <= entries.unsqueeze(2))
        above = (entries.unsqueeze(1) == entries.unsqueeze(2)) & (depths.unsqueeze(0) <= depths.unsqueeze(1))
        return same & (before | above)

    def metrics(self, agrees: Tensor, overlap: Tensor, settings: DropSettings) -> Metrics:
        """Return ``acceptance_D``, how often a chain of the likeliest tokens got to depth D, and
        ``overlap_D``.

        ``overlap_D`` is the chance that a token drawn there is accepted. Both come from the
        agreement and the overlap of each, (B, N).
        """
        drafted = torch.ones_like(self.counted[:, self.depths == 0])
        survives, metrics = drafted.float(), Metrics()
        for depth in range(settings.depths):
            here = self.depths == depth
            entries, seen = self.entries[:, here], self.counted[:, here]
            drafted = torch.zeros_like(drafted).scatter(1, entries, drafted.gather(1, entries) & seen)
            survives = torch.zeros_like(survives).scatter(1, entries, survives.gather(1, entries) * agrees[:, here])
            metrics[f"acceptance_{depth}"] = ((survives * drafted).sum(), drafted.sum().float())
            metrics[f"overlap_{depth}"] = ((overlap[:, here] * seen).sum(), seen.sum().float())
        return metrics


def _pick(values: Tensor, depths: Tensor, entries: Tensor) -> Tensor:
    """Pick (B, N) from (B, depths, S) at `depths` (N,) and `entries` (B, N)."""
    return values[torch.arange(len(values), device=values.device).unsqueeze(1), depths, entries]
