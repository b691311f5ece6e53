"""The tuned constants of the policy and of its costs, each with its unit and the measurement behind it.

Where nothing else is said, they were measured on two cores of an AMD EPYC in November 2026, with a target of 0.4 B
parameters in bfloat16 whose plain pass takes 25 to 35 ms (docs/findings.md). "Simulated" means: chosen so that the
properties in ``tests/control`` hold. Shares and ratios have no unit; in a plain step nothing is drafted. The module
imports nothing of forerun.
"""

from __future__ import annotations

from dataclasses import dataclass


def half_life(steps: float) -> float:
    """Return the factor per step with which half of an observation is left after `steps` steps."""
    return float(0.5 ** (1 / steps))


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicySettings:
    """The tuned constants."""

    # --- expected acceptance of a draft ------------------------------------------------------------------------------
    first_guess: float = 0.7
    """Assumed acceptance of a token of a drafter that has not drafted yet: high enough that it is tried at once.
    Simulated.
    """
    weight: float = 12.0
    """Observations that the prior of an acceptance estimate counts for. Simulated."""
    carried: float = 0.9
    """Share of the difference between a row and all rows at one depth that is expected at the next depth. Simulated."""
    long_memory: float = half_life(4096)
    """Decay per step of a drafter's long-run acceptance, towards which its estimates fade, and per node of the
    calibration of stated confidences. When estimates faded towards the first guess, every prompt was read again after
    256 steps, at 45 ms each.
    """
    memory: float = half_life(320)
    """Decay per step of the counts of all rows, and of a row that is not drafted for. Without it a drafter that became
    good was not chosen in 6 of 12 simulated runs; with a half-life of 1024 the one that became the best was not found
    in 1 of 3.
    """
    row_memory: float = half_life(128)  # Decay of a row's counts per observation: a step or a node. Simulated
    quick_memory: float = half_life(12)
    """Decay per step of goodput and of a proposal's expected nodes: the price of time is what it yields in
    the current passage of the text. Simulated.
    """

    # --- when a drafter that is off is tried again -------------------------------------------------------------------
    exploration: float = 0.5
    """Standard errors added to a mean per square root of the log of steps. With half of it `auto` reached 0.82 of the
    best single drafter on *repeat*, instead of 0.86."""
    min_speedup: float = 1.02
    """Least expected speed-up over plain decoding at which a drafter drafts: two engines over equal weights differ by
    2 %."""
    interval: int = 64
    """Steps until a drafter that is off is tried again; one that became good drafts again within 500. Simulated."""
    trial_share: float = 0.01
    """Largest share of the time that trials take: after a slow one the next is later. Reading one text takes 45 ms."""
    trial_rows: int = 8
    """Most rows of a trial, from which all rows learn. Querying lookup drafters for 64 rows took 37 ms of the host, and
    a model read 64 texts in 1.0 to 1.6 s: with 8 rows `auto` at batch 64 went from 0.973 to 1.002 of plain decoding."""
    trial_steps: int = 8  # Steps after which a trial passes or a lookup drafter is judged; a bad trial ends after 2
    reading_payback: float = 1.25
    """Factor by which reading a text must repay itself: with 1.0, 35 ms were gained for 48 ms of reading at 16 rows."""

    # --- costs -------------------------------------------------------------------------------------------------------
    window: int = 24
    """Number of latest times of a size, of which the lower quartile counts. With 8, other processes that ran for some
    15 steps looked like a cost of nodes (SmolLM2-135M, 60 prompts, replayed)."""


SETTINGS = PolicySettings()  # The constants in use
