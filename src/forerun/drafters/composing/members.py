"""Drafters as members of another: built from their own configurations, taught together, each one's failure its own.

Knows the drafters' protocol and the registry. Knows no method and no rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from forerun import tree as trees
from forerun.drafters import build, entry_named
from forerun.drafters.base import DraftContext, Drafter, DrafterSetup
from forerun.drafters.composing.seeds import Seeds
from forerun.errors import ArgumentError
from forerun.step import warn_drafter
from forerun.types import Budget, Draft, Signal, Verdict, empty_draft

if TYPE_CHECKING:
    from forerun.step import Scores

Spec = Mapping[str, Any]
"""``{"method": name, option: value, ...}``: a member's configuration."""


def check_spec(owner: str, spec: object) -> None:
    """Refuse what is no member's configuration.

    Raises:
        ArgumentError: saying what was expected; an unknown method is named with the nearest known one.
    """
    if not isinstance(spec, Mapping) or not isinstance(spec.get("method"), str):
        raise ArgumentError(
            f'{owner}: a drafter is given as {{"method": "ngram", ...}} with its own options, got {spec!r}'
        )
    entry_named(spec["method"])


def check_specs(owner: str, specs: object) -> None:
    """Refuse what is no list of at least two members; errors as `check_spec`."""
    if isinstance(specs, str | Mapping) or not isinstance(specs, Sequence) or len(specs) < 2:
        raise ArgumentError(
            f'{owner}: drafters must be a list of at least two, for example [{{"method": "ngram"}}, '
            f'{{"method": "draft_model", "model": "demo-draft"}}], got {specs!r}'
        )
    for spec in specs:
        check_spec(owner, spec)


@dataclass(frozen=True, slots=True)
class Member:
    """A drafter inside another. One that raises loses its own drafts, as in a step."""

    name: str
    drafter: Drafter
    vocabulary: int
    """Of the model that it drafts for."""

    @classmethod
    def of(cls, spec: Spec, setup: DrafterSetup) -> Member:
        """Built from its configuration; errors as `forerun.drafters.build`."""
        options = {name: value for name, value in spec.items() if name != "method"}
        return cls(spec["method"], build(spec["method"], options, setup), setup.target.vocab_size)

    def propose(self, context: DraftContext, budget: Budget) -> Draft:
        """The member's own draft, empty if it failed."""
        try:
            draft = self.drafter.propose(context, budget)
            trees.check(draft, self.vocabulary)
        except Exception as error:
            warn_drafter(self.name, "to propose; others draft for its rows", repr(error))
            return empty_draft(len(context.rows))
        return draft

    def extend(self, context: DraftContext) -> None:
        """Show it committed tokens, with the signals that it asked for and no others."""
        try:
            self.drafter.extend(self._narrowed(context))
        except Exception as error:
            warn_drafter(self.name, "to read committed tokens", repr(error))

    def observe(self, context: DraftContext, verdicts: Sequence[Verdict], scores: Scores) -> None:
        """Let it learn from a step, whoever drafted in it."""
        try:
            self.drafter.observe(self._narrowed(context), verdicts, scores)
        except Exception as error:
            warn_drafter(self.name, "to learn from a step", repr(error))

    def _narrowed(self, context: DraftContext) -> DraftContext:
        return replace(context, signals={signal: context.signals[signal] for signal in self.drafter.requires})


class Composed(Drafter):
    """The base of drafters that choose among the proposals of others, or join them."""

    def __init__(self, specs: Sequence[Spec], setup: DrafterSetup, *, reproducible: bool) -> None:
        """`reproducible`: what is drafted for sampled requests that have a seed is deterministic, see `Seeds`."""
        self.members = [Member.of(spec, setup) for spec in specs]
        self._seeds = Seeds(hide=reproducible)

    @property
    def requires(self) -> frozenset[Signal]:
        return frozenset[Signal]().union(*(member.drafter.requires for member in self.members))

    def extend(self, context: DraftContext) -> None:
        for member in self.members:
            member.extend(context)

    def observe(self, context: DraftContext, verdicts: Sequence[Verdict], scores: Scores) -> None:
        for member in self.members:
            member.observe(context, verdicts, scores)

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        self._seeds.forget([row for row, length in zip(rows, lengths, strict=True) if length == 0])
        for member in self.members:
            member.drafter.truncate(rows, lengths)

    def memory_bytes(self) -> int:
        return sum(member.drafter.memory_bytes() for member in self.members)

    def for_members(self, context: DraftContext) -> DraftContext:
        """The context as members see it: rows that are to be reproducible look as if they were greedy."""
        return self._seeds.hidden(context)


def some_rows(context: DraftContext, places: Sequence[int]) -> DraftContext:
    """The context of some of its rows, for a proposal: without signals."""

    def pick(values: Sequence[Any]) -> Sequence[Any]:
        return [values[place] for place in places] if values else values

    return replace(
        context,
        rows=pick(context.rows),
        tokens=pick(context.tokens),
        prompt_lengths=pick(context.prompt_lengths),
        fresh=pick(context.fresh),
        samplers=pick(context.samplers),
        coins=pick(context.coins),
        predictions=pick(context.predictions),
        signals={},
    )


def some_drafts(draft: Draft, places: Sequence[int]) -> Draft:
    """A draft for some of its rows, as (B', ...) tensors."""
    if list(places) == list(range(len(draft.counts))):
        return draft
    index = list(places)

    def pick(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[index]

    begun = draft.resume
    if begun is not None:
        counts, stamps = [begun.counts[place] for place in index], [begun.stamps[place] for place in index]
        begun = replace(begun, states=begun.states[index], counts=counts, stamps=stamps)
    return Draft(
        tokens=draft.tokens[index],
        parents=draft.parents[index],
        counts=draft.counts[index],
        drawn=draft.drawn[index],
        laws=pick(draft.laws),
        law_ids=draft.law_ids,
        confidence=pick(draft.confidence),
        scouts=pick(draft.scouts),
        resume=begun,
    )
