"""What the target gives back and what it can be told about layers. Knows no model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from forerun.errors import ArgumentError
from forerun.types import Signal


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """What one forward pass said."""

    logits: Tensor
    """(B, N, V) raw logits in the model's dtype; N is 1 after a prefill without ``all_logits``."""
    signals: Mapping[Signal, Tensor] = field(default_factory=dict)
    """boundary -> (B, N, H) hidden states of the tokens that were run, left aligned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Which layers to run: from boundary `start` to boundary `stop`, without the sublayers in `skip`."""

    start: int = 0
    """Boundary whose states go in; 0 runs from the embeddings."""
    stop: int
    """Boundary whose states come out: the residual stream after this many layers, before the final norm."""
    skip: frozenset[tuple[int, str]] = frozenset()
    """(layer, "attn" | "mlp"): sublayers that add nothing to the residual stream."""

    def check(self, layers: int) -> None:
        """Raise ArgumentError unless the plan fits a model of that many layers."""
        if not 0 <= self.start < self.stop <= layers:
            raise ArgumentError(
                f"a plan needs 0 <= start < stop <= {layers} layers, got start {self.start}, stop {self.stop}"
            )
        for layer, part in self.skip:
            if part not in ("attn", "mlp") or not self.start <= layer < self.stop:
                raise ArgumentError(
                    f"cannot skip {(layer, part)!r}: expected (layer, 'attn' or 'mlp') with a layer in "
                    f"{self.start}..{self.stop - 1}"
                )
