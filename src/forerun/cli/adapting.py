"""``--adapt`` and what belongs to it, and their translation into `LLM`'s argument. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from forerun.engine.adapting.settings import AdaptConfig, adapt_config
from forerun.engine.config import SpeculativeConfig
from forerun.errors import ArgumentError

_DEFAULTS = AdaptConfig()


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptOptions:
    """Whether and how the drafter learns while it serves."""

    adapt: Annotated[bool, Parameter(negative="")] = False
    """Let the drafter learn from what the target says; answers stay the target's."""
    adapt_share: float = _DEFAULTS.share
    """Most seconds of learning per second of wall time, above 0 and at most 1."""
    adapt_dir: Path | None = _DEFAULTS.directory
    """Keeps what was learned, and goes on from there; if not given it ends with the server."""
    adapt_learning_rate: float = _DEFAULTS.learning_rate
    """Of AdamW, per step."""

    def wish(self, speculative: Mapping[str, Any] | None) -> AdaptConfig | None:
        """As `LLM` takes it, None where nothing was asked for.

        Raises:
            ArgumentError: a value is out of range, the drafter cannot learn, or ``--adapt`` itself is missing.
        """
        if not self.adapt:
            if self != ADAPTING:
                raise ArgumentError("--adapt-... options without --adapt; add --adapt")
            return None
        values = {"share": self.adapt_share, "directory": self.adapt_dir, "learning_rate": self.adapt_learning_rate}
        return adapt_config(values, SpeculativeConfig.parse(speculative))


ADAPTING = AdaptOptions()
"""Nothing asked for."""
