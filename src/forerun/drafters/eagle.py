"""EAGLE-1 and EAGLE-2 (arXiv 2401.15077, 2406.16858): a head continues the target's last hidden state.

EAGLE-2 is the same head with the dynamic tree (``top_k``). Knows no more than its name: see `heads.drafting`.
"""

from __future__ import annotations

from forerun.drafters.heads.drafting import HeadDrafter


class EagleDrafter(HeadDrafter):
    """Drafts with an EAGLE-1 head: chain, fixed tree or dynamic tree (EAGLE-2)."""

    name = "eagle"
    generation = 1
