"""How far a copied token may be trusted: by how many tokens before it are the same here and there."""

from __future__ import annotations

from forerun.core.acceptance import Evidence

_PRIOR = (0.2, 0.35, 0.5, 0.6, 0.68, 0.74, 0.78, 0.8, 0.82, 0.84, 0.87, 0.9)
"""First guess that a copied token is accepted after 0, 1, ... 8, from 9, from 16 and from 32 matching tokens."""
SHARES = 10  # Bins of the share of continuations


def by_match(source: str, matched: int, share: float = 1.0) -> Evidence:
    """Evidence of a token copied from `source`, before which `matched` tokens are the same here and there, those
    drafted above it included; of the positions with these tokens before, the `share` in 0..1 goes on with it."""
    bucket = matched if matched <= 8 else 9 if matched < 16 else 10 if matched < 32 else 11
    return Evidence((source, bucket, min(int(share * SHARES), SHARES - 1)), _PRIOR[bucket] * share)
