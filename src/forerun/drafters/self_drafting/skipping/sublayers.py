"""Which attention and MLP sub-layers a draft pass leaves out, and how such a set is written. Knows no model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from forerun.errors import ArgumentError, nearest

Sublayer = tuple[int, str]
"""(layer, "attn" | "mlp")"""
SkipSet = frozenset[Sublayer]

PARTS = ("attn", "mlp")


def every(layers: int) -> tuple[Sublayer, ...]:
    """All sub-layers of a model, in the order in which they run."""
    return tuple((layer, part) for layer in range(layers) for part in PARTS)


def names(skip: Iterable[Sublayer]) -> list[str]:
    """``["3.attn", "3.mlp"]``, in the order in which they run."""
    return [f"{layer}.{part}" for layer, part in sorted(skip)]


def parse(given: Iterable[str], layers: int) -> SkipSet:
    """The set behind names such as ``"3.attn"``.

    Raises:
        ArgumentError: a name means no sub-layer of a model with so many layers, or nothing or everything is named.
    """
    known = {name: sublayer for sublayer in every(layers) for name in names([sublayer])}
    chosen = list(given)
    for name in chosen:
        if name not in known:
            raise ArgumentError(
                f"skip_layers: there is no sub-layer {name!r}; the model's are 0.attn, 0.mlp, ..., {layers - 1}.attn, "
                f"{layers - 1}.mlp.{nearest(str(name), known)}"
            )
    skip = frozenset(known[name] for name in chosen)
    if not skip:
        raise ArgumentError("skip_layers: nothing is skipped, so a draft would cost what the target costs")
    if len(skip) == len(known):
        raise ArgumentError(f"skip_layers: all {len(known)} sub-layers are skipped; leave at least one to draft with")
    return skip


def evenly(allowed: Sequence[Sublayer], count: int) -> SkipSet:
    """`count` of the allowed sub-layers, half of them attention, at even distances: where a search may begin."""
    chosen = list[Sublayer]()
    for part, share in zip(PARTS, ((count + 1) // 2, count // 2), strict=True):
        own = [sublayer for sublayer in allowed if sublayer[1] == part]
        chosen += (own[(2 * place + 1) * len(own) // (2 * share)] for place in range(share))
    return frozenset(chosen)
