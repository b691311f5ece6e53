"""Are captured features really the target's hidden states? Compares them with the model's own, whatever the source.

A layer id that is off by one still trains and still drafts, only worse; nothing but numbers shows it. Knows no file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from forerun.errors import DataError
from forerun.target.layers import base_of, device_of, layers_of
from forerun.target.support import text_config
from forerun.types import LAST_HIDDEN, Signal

COSINE = 0.999
"""Mean cosine over the tokens that features must exceed."""
SCALE = 0.05
"""Most that their length may differ; a norm with weights near one changes lengths and leaves directions."""

Capture = Callable[[Sequence[Sequence[int]]], Sequence[Mapping[Signal, Tensor]]]
"""Documents -> their states (L, Ht) by boundary; the ``documents`` method of every source."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundaryCheck:
    """One boundary's features beside the target's own states."""

    boundary: Signal
    cosine: float
    """Mean over the tokens."""
    lowest: float
    """Cosine of the worst token; told, not judged."""
    scale: float
    """Length of the features over the length of the target's states, mean over the tokens."""
    nearest: Signal
    """The boundary whose states they resemble most."""

    @property
    def passed(self) -> bool:
        """Whether they are the same states up to rounding."""
        # `not >` instead of `<=`: NaN fails.
        return self.cosine > COSINE and abs(self.scale - 1) <= SCALE and self.nearest == self.boundary

    @property
    def summary(self) -> str:
        """What was measured, and what went wrong if anything did."""
        words = f"boundary {name_of(self.boundary)}: cosine {self.cosine:.5f}, length x {self.scale:.3f}"
        if self.passed:
            return words
        words += f" (expected cosine > {COSINE}, length within {SCALE:.0%})"
        if self.nearest != self.boundary:
            gap = self.nearest - self.boundary
            near = LAST_HIDDEN not in (self.nearest, self.boundary) and abs(gap) == 1
            words += f"; nearest is boundary {name_of(self.nearest)}" + (": layer ids are off by one" if near else "")
        return words


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeReport:
    """The comparison for every boundary."""

    checks: tuple[BoundaryCheck, ...]
    tokens: int
    """Compared."""

    @property
    def passed(self) -> bool:
        """Whether every boundary passed."""
        return all(check.passed for check in self.checks)

    def require(self) -> ProbeReport:
        """Itself.

        Raises:
            DataError: features differ from the target's hidden states; names each boundary.
        """
        failed = [check.summary for check in self.checks if not check.passed]
        if failed:
            raise DataError(
                "the captured features are not the target's hidden states: "
                + "; ".join(failed)
                + ". Check the layer numbering and the final norm of the source; do not train on these."
            )
        return self


def probe(model: Any, capture: Capture, documents: Sequence[Sequence[int]]) -> ProbeReport:
    """Compare what `capture` gives for `documents` with the states that `model` reports itself.

    Args:
        model: the target as a transformers causal LM, in evaluation mode.
        capture: the source under test.
        documents: token ids; a few dozen tokens are enough.

    Raises:
        DataError: a boundary is missing in what was captured, or has another shape.
    """
    return compare(capture(documents), [reference_states(model, document) for document in documents])


@torch.no_grad()
def reference_states(model: Any, tokens: Sequence[int]) -> dict[Signal, Tensor]:
    """Boundary 0 .. layers and `LAST_HIDDEN` -> (L, Ht) on the CPU, from ``output_hidden_states``.

    transformers' last entry is the state after the final norm; the raw one before it comes from a hook.
    """
    config = text_config(model)
    layers = layers_of(base_of(model), config.num_hidden_layers)[1]
    raw: list[Tensor] = []

    def keep(_module: nn.Module, _args: Any, output: Any) -> None:
        raw.append(output[0] if isinstance(output, tuple) else output)

    handle = layers[-1].register_forward_hook(keep)
    try:
        ids = torch.as_tensor(tokens, dtype=torch.int64, device=device_of(model.get_input_embeddings())).view(1, -1)
        states = model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    finally:
        handle.remove()
    found = {boundary: states[boundary] for boundary in range(config.num_hidden_layers)}
    found |= {config.num_hidden_layers: raw[0], LAST_HIDDEN: states[-1]}
    return {boundary: value[0].cpu() for boundary, value in found.items()}


def compare(captured: Sequence[Mapping[Signal, Tensor]], references: Sequence[Mapping[Signal, Tensor]]) -> ProbeReport:
    """The report on `captured`; every boundary in it must be among those of `references`.

    Raises:
        DataError: other boundaries or shapes than the target has.
    """
    signals = list(captured[0])
    own = {signal: torch.cat([reference[signal].float() for reference in references]) for signal in references[0]}
    checks = []
    for signal in signals:
        states = torch.cat([document[signal].float().cpu() for document in captured])
        if signal not in own or states.shape != own[signal].shape:
            expected = tuple(own[signal].shape) if signal in own else "none"
            raise DataError(f"boundary {name_of(signal)}: features {tuple(states.shape)}, the target has {expected}")
        checks.append(_check(signal, states, own))
    return ProbeReport(checks=tuple(checks), tokens=len(next(iter(own.values()))))


def name_of(signal: Signal) -> str:
    """The boundary's number, or LAST_HIDDEN."""
    return "LAST_HIDDEN" if signal == LAST_HIDDEN else str(signal)


def _check(signal: Signal, states: Tensor, own: Mapping[Signal, Tensor]) -> BoundaryCheck:
    cosines = cosine_similarity(states, own[signal], dim=-1)
    errors = {other: float((states - reference).norm()) for other, reference in own.items()}
    # With NaN every comparison is false; the boundary itself comes first, and its cosine fails it.
    nearest = min([signal, *errors], key=lambda other: errors[other])
    return BoundaryCheck(
        boundary=signal,
        cosine=float(cosines.mean()),
        lowest=float(cosines.min()),
        scale=float((states.norm(dim=-1) / own[signal].norm(dim=-1)).mean()),
        nearest=nearest,
    )
