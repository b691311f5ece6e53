"""Every tuned constant of the policy and of its costs, with its unit and the measurement behind it.
Imports nothing.

Unless it says otherwise: two cores of an AMD EPYC, target of 0.4 B parameters in bfloat16, a plain pass of 25 to 35 ms,
November 2026 (docs/findings.md). "Simulated": chosen so that the properties in ``tests/control`` hold. A share or ratio
has no unit; "plain steps" are steps in which nothing is drafted.
"""

from __future__ import annotations

from dataclasses import dataclass


def half_life(steps: float) -> float:
    """Return the factor per step with which half of an observation is left after `steps` steps."""
    return float(0.5 ** (1 / steps))


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicySettings:
    """The tuned constants."""

    # --- what is expected of a draft ---------------------------------------------------------------------------------
    first_guess: float = 0.7
    """Probability that a token of a drafter nobody has seen is accepted: high enough to be tried at
    once. Simulated.
    """
    weight: float = 12.0
    """Observations that an estimate's prior is worth: a drafter's word to what all rows showed,
    that to a row, a depth to the next one. Simulated.
    """
    carried: float = 0.9  # Share of a row's surprise at one depth that is expected at the next. Simulated
    long_memory: float = half_life(4096)
    """Decay per step of a drafter's long run, towards which estimates fade, and per node of what stated confidences
    are worth. Fading towards the first guess read every prompt again after 256 steps, at 45 ms each.
    """
    memory: float = half_life(320)
    """Decay per step of what all rows showed, and a row that is not asked for. Unfaded, one that became good was not
    taken up in 6 of 12 simulated runs; with 1024 one that became the best was not found in 1 of 3.
    """
    row_memory: float = half_life(128)  # Per observation of a row: steps, nodes. Simulated
    quick_memory: float = half_life(12)
    """Decay per step of goodput, and of how much of drafts was taken: time is worth what it yields in the passage at
    hand. Simulated.
    """

    # --- when what is off is tried again -----------------------------------------------------------------------------
    exploration: float = 0.5
    """Standard errors added to a mean per square root of the log of steps. Half of it: 0.82 instead of 0.86 of the best
    single drafter on *repeat*."""
    pays: float = 1.02  # Times plain decoding that a drafter must yield: two engines over equal weights differ by 2 %.
    interval: int = 64  # Steps until what is off is tried again; what became good is back within 500. Simulated.
    trial_share: float = 0.01
    """Most share of the time that trials take; dearer ones are waited for longer. To read one text takes 45 ms."""
    few: int = 8
    """Rows that are tried for all, steps of a trial, tokens of an answer before a drafter reads a text while others
    wait, least nodes that copies are asked for. Asking copies for 64 rows took 37 ms of the host, a model read 64 texts
    in 1.0 to 1.6 s: with 8 rows `auto` at batch 64 went from 0.973 to 1.002 of plain decoding."""
    returns: float = 1.25
    """Times over that reading a text must repay itself: at 1.0 it paid on average before it paid for one row more (35
    ms gained for 48 ms of reading at 16 rows)."""

    # --- costs -------------------------------------------------------------------------------------------------------
    window: int = 24
    """Latest times of a size or kind, of which the lower quartile counts: what else ran beside `auto` for some 15 steps
    at a time looked like the price of nodes with 8 (SmolLM2-135M, 60 prompts, replayed)."""


SETTINGS = PolicySettings()  # The constants in use
