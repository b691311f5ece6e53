"""Every tuned constant of the policy and of its costs, with its unit and the measurement behind it.
Imports nothing.

Unless it says otherwise: two cores of an AMD EPYC, target of 0.4 B parameters in bfloat16, a plain pass of 25 to 35 ms,
November 2026 (docs/findings.md). "Simulated": chosen so that the properties in ``tests/control`` hold, not
measured on a machine. A share or ratio has no unit; "plain steps" are steps in which nothing is drafted.
"""

from __future__ import annotations

from dataclasses import dataclass


def half_life(steps: float) -> float:
    """Return the factor per step with which half of an observation is left after `steps` steps."""
    return float(0.5 ** (1 / steps))


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicySettings:
    """The tuned constants."""

    # --- the acceptance estimate and goodput -------------------------------------------------------------------------
    first_guess: float = 0.7
    """Probability that a token of a drafter nobody has seen is accepted: high enough to be tried at
    once. Simulated.
    """
    weight: float = 12.0
    """Observations that an estimate's prior is worth: a drafter's word to what all rows showed,
    that to a row, a depth to the next one. Simulated.
    """
    carried: float = 0.8  # Share of a row's surprise at one depth that is expected at the next. Simulated.
    long_memory: float = half_life(4096)
    """Decay per step of a drafter's long run, towards which estimates fade: fading towards the
    first guess read every prompt again after 256 steps, at 45 ms each.
    """
    shared_memory: float = half_life(256)
    """Decay per step of what all rows showed. Unfaded, one that became good was not taken up in 6
    of 12 simulated runs.
    """
    row_memory: float = half_life(96)  # Per observation of a row. Simulated
    idle_memory: float = half_life(400)
    """Decay per step of what a row showed: a drafter that is not asked for a row is tried again.
    With 256 rows that draft in vain stayed on, with 1024 a drafter that became the best was not
    found in 1 of 3 simulated runs.
    """
    node_memory: float = half_life(1024)  # Per node of the same stated confidence, of all rows. Simulated.
    row_node_memory: float = half_life(128)  # Per node of the same stated confidence, of a row. Simulated.
    latest: float = 1 / 8  # Weight of one step in running averages: nodes by depth, share of offers taken. Simulated.
    goodput_memory: float = half_life(16)
    """Decay per step of tokens and time. Short: time is worth what it yields in the passage at
    hand. Simulated.
    """
    unknown_limit: int = 8  # Most tokens on a path of a drafter that does not say. Chosen.
    most_arms: int = 4
    """Most drafters with a forward pass that are also weighed in combination, 16 at most; of more
    one at a time. Chosen.
    """
    dearest_pass: float = 8.0
    """Most plain passes that a pass may cost for copies of its size to be asked for. With 4,
    `suffix` had 0.95 of the speed on *edit* and 0.87 on *complete* in float32 on a CPU without
    AVX-512, where 16 tokens cost 7 plain passes.
    """
    trial_tokens: float = 100.0
    """Tokens added to what a row on trial is offered: more than a draft brings, so a trial is not put off."""

    # --- exploration: when something that is off is tried again ------------------------------------------------------
    exploration: float = 0.5
    """Standard errors added to a mean per square root of the log of steps. Half of it: 0.82 instead of 0.86 of the best
    single drafter on *repeat*."""
    shared_evidence: float = 48.0
    """Most steps of other rows behind a row's figures. With 12 the bound added 0.3 tokens anew for every request, and
    models drafted in 30 % of the steps at 50 ms where copies gave more tokens at 37."""
    pays: float = 1.02  # Times plain decoding that a drafter must yield: two engines over equal weights differ by 2 %.
    off_after: int = 32  # Steps that a copying drafter is asked before it may be put off. Simulated.
    interval: int = 64  # Steps until the first trial of what is off; what became good is back within 500. Simulated.
    longest: int = 4  # Intervals up to which the wait doubles while trials fail: their time fell from 1.5 % to 0.4 %.
    rest: int = 4
    """Steps after one that plain decoding won until models make an offer again: to weigh one takes 0.07 ms, and what
    they offer changes slowly."""
    trial_share: float = 0.01
    """Most share of the time that trials take; dearer ones are waited for longer. To read one text takes 45 ms."""
    trial_rows: int = 8
    """Rows that are tried for all. Asking copies for 64 rows took 37 ms of the host, a model read 64 texts in 1.0 to
    1.6 s: with 8, `auto` at batch 64 went from 0.973 to 1.002 of plain decoding, and the trial to 0.27 s."""
    trial_steps: tuple[int, int] = (2, 6)  # Steps of a trial that fails, and of one that passes. Simulated.
    lookup_steps: int = 8  # Steps in which a copying drafter is asked again before it can be off again. Simulated.
    cheap: float = 0.01  # Share of a plain step that asking a copying drafter may always take. Chosen.
    least_taken: int = 8
    """Nodes that a row is at least thought to take of copies, which are asked for twice what was taken of late."""
    taken_memory: float = 0.95  # Decay per step of the most nodes that a row took. Simulated.
    returns: float = 1.25
    """Times over that reading a text must repay itself: at 1.0 it paid on average before it paid for one row more (35
    ms gained for 48 ms of reading at 16 rows)."""
    first_tokens: int = 8
    """Tokens that an answer goes without a drafter that has yet to read it while others wait for their first one: 16 at
    once had theirs 1.14 times as late as with plain decoding, then 1.08."""
    plain_steps: int = 3
    """Plain steps seen of each number of rows, within `stale`: without them nodes that cost 121 -> 264 ms a step at
    batch 64 only seemed to say that the machine was slow."""

    # --- costs -------------------------------------------------------------------------------------------------------
    pace_window: int = 24
    """Latest times over what was predicted, whose median is the machine's pace: it moves by a third within an hour.
    With 8, what ran beside `auto` for some 15 steps at a time looked like the price of nodes: 1.38 of plain decoding's
    speed, then 1.44; undisturbed 1.52 both (SmolLM2-135M, 60 prompts, replayed)."""
    window: int = 24  # Latest figures kept of a size or kind, whose median counts. Simulated.
    stale: int = 1024
    """Figures after which one no longer counts: plain steps, not seen for long, had kept the price of a slower hour."""
    new: int = 3  # Figures of a size before it has a say in the pace; first seen, it tells nothing of it
    doubted: int = 16
    """Figures of others after which the first few of passes with nodes are believed no more, so that these are tried
    again: with 64 an accident in the first draft cost 7 % of the first 400 steps. Simulated."""
    accident: float = 2.0  # Times its neighbours' correction that few figures of a size are believed. Simulated.
    quicker: float = 0.5
    """Least time of a pass with nodes, as a share of a plain pass's: below it plain ones are seen
    anew. With 0.7 what plain passes take was forgotten again and again where something ran beside
    `auto`: 1.44, then 1.49 (as `pace_window`).
    """
    reading: int = 32
    """Tokens from which showing a drafter a row's text is reading it, and timed apart: booked as drafting, 45 ms a
    prompt kept heads from drafting at 16 rows (0.95 of plain decoding, then 1.09)."""
    lookup_overhead: float = 2.0
    """Factor of what asking copies adds to a step, over the time that they take themselves, until
    it was seen: up to 4 was.
    """
    copy_ms: float = 0.02  # ms that a proposal of a copying drafter takes, until it was seen. Chosen.
    least_level: float = 0.02
    """Plain passes that a level of a drafter with a model is at least assumed to cost, until it was seen. Chosen."""


SETTINGS = PolicySettings()  # The constants in use
