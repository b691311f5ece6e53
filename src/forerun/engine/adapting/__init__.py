"""Online adaptation: a drafter learns from what the target says while it serves (arXiv 2310.07177).

Whatever it learns, answers keep the target's distribution: a rule verifies what was drafted against the distribution
that it was drawn from and does not ask whose weights that came from. Stands beside the policy: knows drafters, targets
and steps; the engine knows it as something that is put around a drafter. Here are its settings and figures, without
torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.drafters import AUTO, DRAFTERS, entry_named
from forerun.engine.config import SpeculativeConfig, arms_of
from forerun.errors import ArgumentError, choices


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptConfig:
    """Settings of a drafter that learns from its own use (Online Speculative Decoding, arXiv
    2310.07177). Raises ArgumentError for a value out of range; the message names it and what is
    allowed.
    """

    share: float = 0.1  # Most seconds of work (collecting, training, comparing, saving) per second of wall time
    directory: Path | None = None
    """Directory in which accepted weights are kept, and from which a later start continues; None:
    they end with the process.
    """
    learning_rate: float = 1.0e-4  # AdamW's, per step. A worse candidate halves it, accepted ones let it recover
    memory_bytes: int = 256 * 2**20  # Most bytes of collected states, oldest dropped; weights, optimizer on top
    accepted_share: float = 0.3  # Share that is trained on of the positions where no draft was rejected
    held_every: int = 8  # One of so many answers is held back: not trained on, candidates are compared on it
    round_pieces: int = 32  # Pieces of answers, of at most `PIECE` positions, that a candidate is trained on
    fresh_pieces: int = 8  # New pieces that must have come in before a candidate is trained
    batch_pieces: int = 4  # Pieces per step of the optimizer

    def __post_init__(self) -> None:
        if isinstance(self.directory, str):
            object.__setattr__(self, "directory", Path(self.directory))
        least = {"memory_bytes": 2**20, "held_every": 2}
        least |= dict.fromkeys(("round_pieces", "fresh_pieces", "batch_pieces"), 1)
        allowed = {name: (getattr(self, name) >= low, f"at least {low}") for name, low in least.items()}
        allowed["share"] = 0 < self.share <= 1, "above 0 and at most 1"
        allowed["learning_rate"] = 0 < self.learning_rate < math.inf, "above 0"
        allowed["accepted_share"] = 0 <= self.accepted_share <= 1, "from 0 to 1"
        for name, (fits, wanted) in allowed.items():
            if not fits:
                raise ArgumentError(f"adapt: {name} must be {wanted}, got {getattr(self, name)!r}")

    @classmethod
    def parse(cls, given: AdaptConfig | Mapping[str, Any] | bool | None) -> AdaptConfig | None:
        """Build the settings from a mapping of their fields; True takes every default, None and
        False mean off. Raises ArgumentError for an unknown field (the message names the nearest) or
        a value out of range.
        """
        if given is None or given is False:
            return None
        if isinstance(given, cls):
            return given
        values = {} if given is True else dict(given)  # type: ignore[arg-type]
        known = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            if name not in known:
                raise ArgumentError(f"adapt has no field {name!r}.{choices(name, known, 'It has')}")
        try:
            return cls(**values)
        except TypeError as error:
            raise ArgumentError(f"adapt: a value has the wrong type ({error}); given {values}") from error


def adapt_config(
    given: AdaptConfig | Mapping[str, Any] | bool | None, speculative: SpeculativeConfig | None
) -> AdaptConfig | None:
    """Return the settings that were asked for, or None. Raises ArgumentError for an unknown or
    impossible value, or if no configured drafter has weights that can be trained while it serves.
    """
    config = AdaptConfig.parse(given)
    if config is None:
        return None
    advice = f"drafters that can adapt: {', '.join(name for name, entry in DRAFTERS.items() if entry.adapts)}"
    if speculative is None:
        raise ArgumentError(f"adaptation needs a drafter to adapt, and none is configured; {advice}")
    if any(entry_named(arm.method).adapts for arm in arms_of(speculative)):
        return config
    method = speculative.method
    if method == AUTO:
        raise ArgumentError(f"{AUTO} has no drafter here that can adapt; give it one as its model. {advice}")
    raise ArgumentError(f"drafter {method!r} has nothing that could be trained while it serves; {advice}")


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptationStats:
    """Figures of online adaptation since the start of the process."""

    examples: int  # Positions collected
    rejected_examples: int  # Positions where a draft was rejected
    stored_bytes: int  # Bytes of collected positions in memory
    updates: int  # Steps of the optimizer
    swaps: int  # Candidates that came to serve
    discarded: int  # Candidates that were not better than what serves
    rollbacks: int
    version: int  # Version of the weights that serve; 0 are those of the checkpoint that was given
    expected_acceptance: float
    """Expected acceptance of the weights that served when the last candidate was compared, on held
    back positions; 0 before the first.
    """
    candidate_acceptance: float  # The same figure of that candidate
    acceptance: float  # Share of verified drafted tokens that were accepted, since the last swap, over the last 2000
    share: float  # Seconds of work per second of wall time
    running: bool  # False once an error has ended it
