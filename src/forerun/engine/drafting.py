"""The drafters of an engine: built when first asked for, fed in groups, watched for acceptance at the level of chance.

Knows configurations and groups; does not know requests' text or scheduling.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from forerun.drafters import build
from forerun.drafters.base import Drafter, DrafterSetup
from forerun.engine.config import MAX_SPECULATIVE_TOKENS, SpeculativeConfig
from forerun.step import Group, Row, context_for, warn_drafter
from forerun.types import Signal, SpeculationStats
from forerun.verify import rule_named

log = logging.getLogger(__name__)

_CHANCE_STEPS = 200
_CHANCE_RATE = 0.02


@dataclass(kw_only=True, slots=True)
class _Active:
    config: SpeculativeConfig
    drafter: Drafter
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    warned: bool = False


class Drafting:
    """All drafters in use, by the key of their configuration."""

    def __init__(self, setup: DrafterSetup, *, nodes: int = 64) -> None:
        """`nodes`: most drafted nodes of a row in one step."""
        self._setup, self._nodes = setup, nodes
        self._active: dict[str, _Active] = {}

    def ensure(self, config: SpeculativeConfig | None) -> str | None:
        """The key of a drafter with this configuration, built if there is none yet; None for None.

        Raises:
            ArgumentError: an unknown rule, drafter or option.
        """
        if config is None:
            return None
        if config.rule is not None:
            rule_named(config.rule)
        if config.key not in self._active:
            drafter = build(config.method, config.drafter_options, self._setup)
            self._active[config.key] = _Active(config=config, drafter=drafter)
        return config.key

    def requires(self, key: str | None) -> frozenset[Signal]:
        """The hidden states that the drafter reads."""
        return self._active[key].drafter.requires if key is not None else frozenset()

    def groups(self, keys: Sequence[str | None], depths: Sequence[int | None]) -> list[Group]:
        """Who drafts for whom: `keys` and per-request depth limits (None = the drafter's own) of the step's rows."""
        groups = []
        for key in dict.fromkeys(key for key in keys if key is not None):
            active = self._active[key]
            members = [index for index, other in enumerate(keys) if other == key]
            limit = active.config.num_speculative_tokens or MAX_SPECULATIVE_TOKENS
            chosen = [depths[index] for index in members]
            groups.append(
                Group(
                    name=active.config.method,
                    drafter=active.drafter,
                    members=members,
                    depths=[limit if depth is None else min(depth, limit) for depth in chosen],
                    nodes=self._nodes,
                )
            )
        return groups

    def introduce(self, key: str, rows: Sequence[Row], signals: Mapping[Signal, Tensor]) -> None:
        """Show a drafter the prompts (and first tokens) of rows that are new to it."""
        context = context_for(rows, range(len(rows)), [len(row.tokens) for row in rows], signals)
        try:
            self._active[key].drafter.extend(context)
        except Exception as error:
            warn_drafter(self._active[key].config.method, "to read the prompt", repr(error))

    def forget(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Rows shrank to these lengths, 0 for those that are free."""
        for active in self._active.values():
            active.drafter.truncate(rows, lengths)

    def watch(self, key: str, stats: SpeculationStats) -> None:
        """Add a finished answer's counts; warn once where acceptance is at the level of chance."""
        active = self._active[key]
        active.stats.add(stats)
        if not active.warned and active.stats.num_spec_steps >= _CHANCE_STEPS:
            rate = active.stats.acceptance_per_depth[0]
            if rate < _CHANCE_RATE:
                active.warned = True
                log.warning(
                    "drafter %r is at the level of chance: %.1f %% of its first drafted tokens were kept in %d steps. "
                    "Was it trained for this target and tokenizer? The output is right, but plain decoding is faster.",
                    active.config.method,
                    100 * rate,
                    active.stats.num_spec_steps,
                )

    def memory_bytes(self) -> int:
        """Bytes held by all drafters."""
        return sum(active.drafter.memory_bytes() for active in self._active.values())

    def totals(self) -> Iterable[tuple[str, SpeculationStats]]:
        """Method name and counts over all finished answers, per drafter."""
        return [(active.config.method, active.stats) for active in self._active.values()]
