"""From a configuration to its controller: drafters are built, what they and the target cost is found out."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Protocol

from forerun.drafters import entry_named
from forerun.drafters.base import Drafter, DrafterSetup
from forerun.drafters.guarded import Guarded
from forerun.engine.config import SpeculativeConfig
from forerun.engine.controller.arm import Arm, Sizes
from forerun.engine.controller.auto import arms_of, repeats
from forerun.engine.controller.controller import Controller
from forerun.engine.controller.costs import COPY, Nominal, StepCosts
from forerun.engine.controller.deferred import Deferred
from forerun.engine.controller.filling import Packed, Padded
from forerun.engine.cost import DraftCost, PassCost, load_or_measure
from forerun.errors import ArgumentError
from forerun.target import Target

log = logging.getLogger(__name__)

_UNKNOWN_LIMIT = 8
"""Most tokens on a path of a drafter that does not say."""
_LEAST_SHARE = 0.02
"""Of a plain pass: the least that a level of a drafter with a model is assumed to cost before it was seen."""


class Costs(PassCost, Protocol):
    """What `CostModel` is: costs of passes and of drafters."""

    @property
    def drafts(self) -> Mapping[str, DraftCost]:
        """By `SpeculativeConfig.key`."""
        ...


def controller_for(
    config: SpeculativeConfig, setup: DrafterSetup, *, nodes: int, costs: Costs | None = None
) -> Controller:
    """The controller of a configuration.

    Args:
        config: of a drafter, or of `auto`.
        setup: what drafters are built from.
        nodes: most drafted nodes of a row.
        costs: known costs, which steps then do not correct; None reads or measures the target's and lets steps correct
            them.

    Raises:
        ForerunError: whatever keeps a drafter from being built.
    """
    setup = dataclasses.replace(setup, pass_ms=None)  # the controller itself chooses how much is drafted
    arms = [_arm(own, setup, nodes, reproducible=repeats(config)) for own in arms_of(config)]
    passes = costs if costs is not None else measured(setup.target)
    filling = Padded() if setup.target.computes_padding else Packed()
    step_costs = StepCosts(passes, getattr(passes, "drafts", None), filling)
    for arm in arms:
        step_costs.expect(arm.key, COPY if arm.copies else _guess(arm.drafter, setup.target, passes))
    return Controller(arms, step_costs, nodes=nodes, measure=costs is None)


def _arm(config: SpeculativeConfig, setup: DrafterSetup, nodes: int, *, reproducible: bool) -> Arm:
    drafter = Guarded.built(config.method, config.drafter_options, setup)
    own = getattr(drafter.drafter, "config", None)
    shape = getattr(own, "shape", None)
    named = len(shape) if shape else getattr(own, "num_speculative_tokens", None)
    default = drafter.depth or named or _UNKNOWN_LIMIT
    return Arm(
        name=config.method,
        key=config.key,
        drafter=Deferred(drafter, reproducible=reproducible),
        copies=entry_named(config.method).copies,
        limit=default,
        sizes=Sizes(nodes),
    )


def measured(target: Target) -> PassCost:
    """From disk or by measuring on free rows; where none are free, a nominal figure that steps will correct."""
    try:
        return load_or_measure(target)
    except ArgumentError:
        free = sum(length == 0 for length in target.lengths)
        log.info("%d rows are free to measure what a pass costs", free)
        return load_or_measure(target, rows=(free,)) if free else Nominal()


def _guess(drafter: Drafter, target: Target, passes: PassCost) -> DraftCost:
    """A level reads the drafter's memory once, as a pass reads the target's."""
    share = drafter.memory_bytes() / max(1, target.memory_bytes())
    return DraftCost(fixed_ms=0.0, level_ms=min(1.0, max(_LEAST_SHARE, share)) * passes.pass_ms(1))
