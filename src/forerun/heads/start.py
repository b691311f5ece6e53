"""A fresh head is fitted to what the first batches of a run show of its target.

Real targets have outliers: a few dimensions hold half of the energy of all states, and the states of attention sinks,
the first tokens of texts, are a hundred times as long as others. What is drawn at random over them points nearly the
same way for every token, and the target's final norm makes a confident prediction of that: the first loss is far worse
than a guess. So layers that read the target's states start as the linear map that comes nearest to what is to be
predicted, and the logits start at the scale that the loss asks for. Both are values of weights that every format has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from forerun.losses.chunked_loss import Divergence
from forerun.losses.objective import FeatureBatch, TokenBatch, mark_counted, shift_left
from forerun.types import LAST_HIDDEN

SEEN_TOKENS = 8192  # Tokens of the first batches to which a run fits its head
SHOWN = 512  # Tokens on which scales are compared
PLACES = 4096  # Most positions that a map is fitted to: a matrix of at most this many rows and columns is solved
FITTED = 4  # Batches to which the last layer is fitted
RIDGE = 0.3  # Pull towards zero, as a multiple of the mean square of an input, which is scaled to 1
FACTORS = [2.0 * 0.75**step for step in range(18)]  # Scales of the logits that are tried, falling
BESIDE = 0.4  # Size of what a drawn layer adds to a fitted one, as a share of that one's
LEAST = 1e-3  # Size of a dimension that is as good as constant
SLACK = 0.1  # Nats above the least loss that are as good: of such scales the largest learns fastest


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """The target's states in the first batches of a run."""

    batches: Sequence[FeatureBatch]
    embed: Callable[[Tensor], Tensor]
    """Embeds token ids (..) -> (.., H), as the head reads them."""

    def places(self, values: Callable[[FeatureBatch], Tensor], ahead: int) -> Tensor:
        """Return `values` (B, S, W) of each batch at the places (N, W) whose prediction, after `ahead` more tokens,
        counts. The first token of a text is none: it may be an attention sink.
        """
        found = list[Tensor]()
        for batch in self.batches:
            chosen = mark_counted(batch.batch, ahead - 1) & (batch.batch.positions > 0)
            found.append(values(batch)[chosen].float())
        return thinned(torch.cat(found))

    def embedded(self, batch: FeatureBatch, ahead: int) -> Tensor:
        """Return the embeddings (B, S, H) of the tokens that follow after `ahead` places."""
        return self.embed(shift_left(batch.batch.tokens, ahead, 0)).float()

    def sizes(self, read: Callable[[FeatureBatch], Tensor], ahead: int) -> Tensor:
        """Return the root mean square (W,) of each dimension of the states that `read` returns, (B, S, W)."""
        return root_mean_squares(self.places(read, ahead))

    def evened(self, weight: Tensor, read: Callable[[FeatureBatch], Tensor]) -> Tensor:
        """Return the random `weight` (H, W) of a layer that reads the states `read` returns, (B, S, W), normalised so
        that all dimensions have the same scale and the mean state maps to zero.
        """
        inputs = self.places(read, 1)
        spread = inputs.std(0, correction=0).clamp_min(LEAST)
        mean = inputs.mean(0) / spread
        return (weight - torch.outer(weight @ mean, mean) / mean.square().sum().clamp_min(LEAST)) / spread

    def beside(self, nearest: Tensor, drawn: Tensor, read: Callable[[FeatureBatch], Tensor]) -> Tensor:
        """Return the fitted weight (H, W) plus a part of the random one, `drawn`, normalised by `evened`, so that
        training can also use the parts of the states (B, S, W) that the fit ignores.
        """
        inputs, drawn = self.places(read, 1), self.evened(drawn, read)
        size, own = ((inputs @ weight.T).square().mean().sqrt() for weight in (nearest, drawn))
        return nearest + BESIDE * size / own * drawn

    def nearest(self, read: Callable[[FeatureBatch], Tensor], ahead: int, scale: Tensor | None = None) -> Tensor:
        """Return the weight (Ht, W) of the linear map from the states that `read` returns, (B, S, W), which is the best
        fit to the target's last state `ahead` tokens later, divided by `scale` (Ht,), that of a norm after the map.
        """
        inputs = self.places(read, ahead)
        wanted = self.places(lambda batch: shift_left(batch.features[LAST_HIDDEN], ahead, 0.0), ahead)
        return nearest_map(inputs, unscaled(wanted, scale))


def root_mean_squares(rows: Tensor) -> Tensor:
    """Return the root mean square (W,) of each dimension of the rows (N, W), `LEAST` at least."""
    return (rows.square().sum(0) / max(1, len(rows))).sqrt().clamp_min(LEAST)


def nearest_map(inputs: Tensor, wanted: Tensor) -> Tensor:
    """Return the weight (H, W) of the linear map from `inputs` (N, W) that is the best fit to `wanted` (N, H)."""
    sizes = root_mean_squares(inputs)
    inputs = inputs / sizes
    narrow = inputs.shape[1] < len(inputs)  # The same map from the smaller of two systems
    products = inputs.T @ inputs if narrow else inputs @ inputs.T
    products.diagonal().add_(RIDGE * len(inputs))
    if narrow:
        return torch.linalg.solve(products, inputs.T @ wanted).T / sizes
    return (inputs.T @ torch.linalg.solve(products, wanted)).T / sizes


def thinned(rows: Tensor) -> Tensor:
    """Return at most `PLACES` of the rows (N, W), evenly spread."""
    return rows[:: -(-len(rows) // PLACES) or 1]


@contextmanager
def watched(module: nn.Module) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Keep what goes into a module and what comes out, call by call."""
    calls = list[tuple[Tensor, Tensor]]()
    hook = module.register_forward_hook(lambda _, given, made: calls.append((given[0], made)))
    try:
        yield calls
    finally:
        hook.remove()


@dataclass(frozen=True, slots=True)
class Fitting:
    """A pass of a head over a batch: which of its places predict, and what the target's state is there."""

    pick: Callable[[Tensor], Tensor]
    """Picks (R, W), what counts, from the states (B, N, W) of all places."""
    wanted: Tensor  # (R, Ht): the target's last state from which each of these tokens is predicted


def fit_last(
    part: nn.Linear, norm: nn.Module, batches: Sequence[FeatureBatch], run: Callable[[FeatureBatch], Fitting]
) -> None:
    """Let the last layer that writes to a head's stream, before its final norm, start at what comes nearest to what the
    stream lacks there of the target's own state.
    """
    scale: Tensor | None = getattr(norm, "weight", None)
    inside, missing = list[Tensor](), list[Tensor]()
    for batch in batches[:FITTED]:
        with watched(part) as parts, watched(norm) as norms:
            made = run(batch)
        inside.append(made.pick(parts[0][0]).float())
        missing.append(unscaled(made.wanted.float(), scale) - made.pick(norms[0][0] - parts[0][1]).float())
    rows, wanted = thinned(torch.cat(inside)), thinned(torch.cat(missing))
    if len(rows) and wanted.shape[1] == len(part.weight):
        part.weight.copy_(nearest_map(rows, wanted))


def unscaled(states: Tensor, scale: Tensor | None) -> Tensor:
    """Divide states (N, H) by the weights (H,) of a norm that they come out of, those near 0 left alone."""
    return states if scale is None else states / torch.where(scale.abs() < 0.1, 1.0, scale)


@torch.no_grad()
def scale_logits(weights: Sequence[nn.Parameter], loss: Callable[[], float]) -> None:
    """Multiply `weights`, which the logits are proportional to, by the largest of `FACTORS` with about the least
    `loss`.
    """
    whole, losses = [weight.clone() for weight in weights], list[float]()

    def scale(factor: float) -> None:
        for weight, original in zip(weights, whole, strict=True):
            weight.copy_(original * factor)

    for factor in FACTORS:
        scale(factor)
        losses.append(loss())
        if losses[-1] > min(losses) + SLACK:
            break
    scale(next(factor for factor, one in zip(FACTORS, losses, strict=False) if one <= min(losses) + SLACK))


ALONE = {
    "divergence": Divergence.CROSS_ENTROPY,
    **{"token_weight": 1.0, "regression_weight": 0.0, "confidence_weight": 0.0, "selector_weight": 0.0},
}
"""Values of settings under which an objective is the cross-entropy of its predictions alone, which can be compared
with that of a guess."""


def cross_entropy(objective: Any, batch: FeatureBatch) -> float:
    """Return the mean cross-entropy of an objective's predictions on a batch, in nats, whatever else it learns."""
    known = {one.name for one in fields(objective.settings)}
    settings = replace(objective.settings, **{name: value for name, value in ALONE.items() if name in known})
    report = type(objective)(objective.head, objective.target, settings)(batch)
    return float(report.loss.detach() / report.weight.clamp_min(1e-9))


def beginning(batch: FeatureBatch, length: int) -> FeatureBatch:
    """Return the first `length` tokens of a batch's first row."""
    tokens = {one.name: getattr(batch.batch, one.name)[:1, :length] for one in fields(batch.batch)}
    features = {boundary: states[:1, :length] for boundary, states in batch.features.items()}
    return replace(batch, batch=TokenBatch(**tokens), features=features)


@torch.no_grad()
def fit(objective: Any, batches: Sequence[FeatureBatch], *, halves: bool) -> None:
    """Fit the fresh head of an objective to all but the last of the `batches`, and its logits' scale to the last; its
    activations are then in bfloat16 with `halves`.
    """
    head, seen = objective.head, Seen(batches=batches[:-1], embed=objective.embed)
    if not len(seen.places(lambda batch: batch.features[LAST_HIDDEN], 1)):
        return
    training = head.training
    head.eval()
    head.fit(seen)
    objective.fit(seen.batches)
    if weights := head.scales():
        shown = beginning(batches[-1], SHOWN)
        with torch.autocast(head.weight.device.type, torch.bfloat16, enabled=halves):
            scale_logits(weights, lambda: cross_entropy(objective, shown))
    head.train(training)
