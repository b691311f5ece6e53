"""EAGLE-3 (arXiv 2503.01840) and 3.1: a small head drafts from fused hidden states of several target layers.

Knows no more than its name: the head is in `heads.eagle`, the drafting in `heads.drafting`.
"""

from __future__ import annotations

from forerun.drafters.heads.drafting import HeadDrafter


class Eagle3Drafter(HeadDrafter):
    """Drafts with an EAGLE-3 head: chain, fixed tree or dynamic tree."""

    name = "eagle3"
    generation = 3
