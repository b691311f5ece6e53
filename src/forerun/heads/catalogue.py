"""A catalogue of public heads and PARD draft models, by target, as their publishers' pages, papers
and pull requests report them (``catalogue.json``). Nothing here was downloaded or measured by
forerun. Imports no torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from forerun import shipped
from forerun.drafters.kinds import KINDS, HeadKind
from forerun.errors import ArgumentError


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownHead:
    """One published head."""

    drafter: str = "eagle3"  # Its kind, as in `drafters.kinds` where forerun has such heads
    target: str  # Name of the target without its owner, as the report writes it
    model: str  # Hub id
    publisher: str
    collection: str  # Source of the report: SpecBundle, a paper, a project
    format: str | None = None
    """The file format: eagle (flat, SpecForge and SGLang), speculators, modelopt, dflash,
    transformers (a whole draft model), or pickle, which is never opened; None where it is not
    stated.
    """
    boundaries: tuple[int, ...] | None = None  # Layers after which it reads the target, where it is said
    acceptance_length: float | None = None  # Mean acceptance length as reported, under `conditions` alone
    conditions: str = ""
    url: str = ""  # Page that names the id

    @property
    def loadable(self) -> bool:
        """True if its hub id can be passed to a drafter here, as far as the report says."""
        return self.drafter in KINDS and self.format != "pickle"

    def __post_init__(self) -> None:
        object.__setattr__(self, "boundaries", tuple(self.boundaries) if self.boundaries else None)


SHIPPED = KnownHead(
    target="demo",
    model="demo-eagle3",
    publisher="forerun",
    collection="the demo models",
    format="eagle",
)
"""The head of the demo model, which no hub has."""


@cache
def known_heads() -> tuple[KnownHead, ...]:
    """Return the whole catalogue, by target."""
    text = resources.files(__package__ or __name__).joinpath("catalogue.json").read_text(encoding="utf-8")
    heads = [KnownHead(**entry) for entry in json.loads(text)]
    return tuple(sorted(heads, key=lambda head: head.target.casefold()))


def suggest(target_name: str) -> list[KnownHead]:
    """Return heads for a target (hub id, or a directory named like it). ``X`` also finds heads for
    ``X-Instruct`` and the reverse, after the exact ones: reports are not always precise.
    """
    if shipped.is_target(target_name):
        return [SHIPPED]
    short = _short(target_name)
    loose = short.removesuffix("-instruct")
    matching = [head for head in known_heads() if _short(head.target).removesuffix("-instruct") == loose]
    return sorted(matching, key=lambda head: _short(head.target) != short)


def check_head_named(kind: HeadKind, head: Any, target_name: str) -> None:
    """Raise ArgumentError if a drafter of that kind was given no head (None), and targets bring none themselves."""
    if head is not None or kind.in_target is not None:
        return
    suggestions = ", ".join(
        suggested.model
        for suggested in suggest(target_name)
        if suggested.loadable and suggested.drafter == kind.stored_as
    )
    raise ArgumentError(
        f"{kind.name} needs a head: name its directory or hub id with --drafter-model (in Python: model). Known for "
        f"{target_name}: {suggestions or 'none'}. To train one: forerun train {kind.stored_as} --help"
    )


def _short(name: str) -> str:
    return name.rstrip("/").rsplit("/", 1)[-1].casefold().removeprefix("meta-")
