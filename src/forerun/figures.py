"""These two figures say what speculation brings; nothing else computes them. Imports no torch."""

from __future__ import annotations


def tokens_per_pass(tokens: int, passes: int) -> float:
    """Return all tokens over all passes of the target, those without a draft and the prompt's included.

    Plain decoding has 1.0, and so has an answer of no pass.
    """
    return tokens / passes if passes else 1.0


def mean_acceptance_length(accepted: int, drafts: int) -> float:
    """Return vLLM's figure, 1 + accepted drafted tokens over passes that verified a draft; 1.0 where there was none.

    It leaves the passes without a draft out, so it tells how good drafts were and not what they brought.
    """
    return 1 + accepted / drafts if drafts else 1.0
