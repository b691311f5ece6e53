"""The members of a combined drafter: built from their own configurations, isolated from each
other's failures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forerun.core.sampling import Sampler
from forerun.drafters import entry_named
from forerun.drafters.base import DraftContext, Drafter, DrafterSetup, make_repeatable
from forerun.drafters.guarded import Guarded
from forerun.errors import ArgumentError
from forerun.types import Boundary, DraftKind, Verdict

if TYPE_CHECKING:
    from forerun.core.scores import Scores

Spec = Mapping[str, Any] | str  # A member: ``{"method": name, option: value, ...}``, or a name alone


def options_of(owner: str, given: object) -> tuple[str, dict[str, Any]]:
    """Split a member's specification into its method and options. Raises ArgumentError that says
    what was expected.
    """
    spec = {"method": given} if isinstance(given, str) else given
    if not isinstance(spec, Mapping) or not isinstance(spec.get("method"), str):
        raise ArgumentError(f'{owner}: a drafter is a name, or {{"method": "ngram", ...}} with options, got {given!r}')
    entry_named(spec["method"])
    return spec["method"], {name: value for name, value in spec.items() if name != "method"}


def check_specs(owner: str, given: object) -> None:
    """Raise ArgumentError unless `given` is a list of at least two members; other errors as
    `options_of`.
    """
    if isinstance(given, str | Mapping) or not isinstance(given, Sequence) or len(given) < 2:
        raise ArgumentError(f'{owner}: drafters are two or more, like ["ngram", {{"method": "suffix"}}], got {given!r}')
    for spec in given:
        options_of(owner, spec)


@dataclass(frozen=True, kw_only=True, slots=True)
class ComposedConfig:
    """Options that combined drafters share."""

    drafters: Sequence[Spec] = ("suffix", "recycling")  # The members, each a name or ``{"method": name, ...}``
    reproducible: bool = True
    """Let members draft deterministically for sampled requests with a seed, so that the text is
    plain decoding's. False lets them sample there too: more is accepted, and the text depends on
    what was learned from other requests.
    """


class Composed(Drafter):
    """The base of drafters that choose among the proposals of others, or join them."""

    def __init__(self, config: ComposedConfig, setup: DrafterSetup) -> None:
        self.config = config
        self.members = [Guarded.build(*options_of("member", spec), setup) for spec in config.drafters]

    def kind(self, sampler: Sampler) -> DraftKind:
        """Return the kind of trees: which member drafts a row, and what stands beside its nodes, is
        decided in each step.
        """
        seen = make_repeatable(sampler) if self.config.reproducible else sampler
        return DraftKind(sampled=any(member.kind(seen).sampled for member in self.members))

    @property
    def requires(self) -> frozenset[Boundary]:
        return frozenset[Boundary]().union(*(member.requires for member in self.members))

    @property
    def top_ids(self) -> int:
        return max(member.top_ids for member in self.members)

    def extend(self, context: DraftContext) -> None:
        for member in self.members:
            member.extend(context)

    def observe(self, context: DraftContext, verdicts: Sequence[Verdict], scores: Scores) -> None:
        for member in self.members:
            member.observe(context, verdicts, scores)

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        for member in self.members:
            member.truncate(rows, lengths)

    def memory_bytes(self) -> int:
        return sum(member.memory_bytes() for member in self.members)

    def for_members(self, context: DraftContext) -> DraftContext:
        """Return the context as members see it."""
        return context.repeatable() if self.config.reproducible else context
