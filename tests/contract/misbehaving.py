"""Drafters that break their contract in every place that there is to break: verbs, properties, drafts, what they read.

Each `Misbehaviour` is a steady drafter that does one thing wrong, and notes that it did.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from contract.harness import VOCABULARY
from forerun import SamplingParams
from forerun.drafters.base import DraftContext, Drafter, DrafterSetup
from forerun.target import Resume
from forerun.tree import TreeBuilder, stack
from forerun.types import Budget, Draft, DraftKind, Drawn

VERBS = ("extend", "propose", "observe", "truncate")
PROPERTIES = ("requires", "watches", "remembers", "kind", "memory_bytes")
BOUNDARY = 1
"""Whose hidden states a steady drafter reads."""
done = set[str]()
"""Names of those who did it since this was last cleared."""


class Planned(RuntimeError):
    """What drafters raise here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Of a drafter that misbehaves."""

    how: str
    """Name of the misbehaviour."""


class Steady(Drafter):
    """Copies the last three tokens; reads states and watches, so that all there is is asked of it."""

    name = "steady"
    Config = Options
    sampled = False

    def __init__(self, config: Options, setup: DrafterSetup) -> None:
        self.how, self.rows, self.calls = config.how, setup.rows, 0
        self.first: int | None = None

    @property
    def requires(self) -> frozenset[int]:
        return frozenset({BOUNDARY})

    @property
    def watches(self) -> bool:
        return True

    @property
    def remembers(self) -> bool:
        return False

    def kind(self, sampler: Any) -> DraftKind:
        return DraftKind(sampled=self.sampled, chain=True)

    def propose(self, context: DraftContext, budget: Budget) -> Draft:
        limits = zip(context.tokens, budget.nodes, budget.depth, strict=True)
        return stack([self.chain(list(tokens[-min(3, n, d) :]) if min(n, d) else []) for tokens, n, d in limits])

    def chain(self, tokens: list[int]) -> TreeBuilder:
        """These tokens one below the other."""
        builder, parent = TreeBuilder(), 0
        for token in tokens:
            if self.sampled:
                builder.set_law(parent, torch.full((VOCABULARY,), 1 / VOCABULARY))
            parent = builder.add(
                token, parent, drawn=Drawn.IID if self.sampled else Drawn.DETERMINISTIC, confidence=0.9
            )
        return builder

    def note(self) -> None:
        """It is about to happen."""
        done.add(self.how)


@dataclass(frozen=True, kw_only=True)
class Misbehaviour:
    """One way to be wrong."""

    cls: type[Steady]
    harmless: bool = False
    """It breaks nothing, so nothing has to be counted."""


def raising(verb: str, when: Callable[[Steady, Any], bool], *, late: bool = False) -> type[Steady]:
    """Raises in a verb; `late`: after the work is done."""

    def wrong(self: Steady, *arguments: Any) -> Any:
        self.calls += 1
        result = getattr(Steady, verb)(self, *arguments) if late else None
        if when(self, arguments[0]):
            self.note()
            raise Planned(verb)
        return getattr(Steady, verb)(self, *arguments) if not late else result

    return type("Raising", (Steady,), {verb: wrong})


def _always(_self: Steady, _asked: Any) -> bool:
    return True


def _later(self: Steady, _asked: Any) -> bool:
    return self.calls >= 2


def _once(self: Steady, _asked: Any) -> bool:
    return self.calls == 2


def _other_row(self: Steady, asked: Any) -> bool:
    rows = asked.rows if isinstance(asked, DraftContext) else asked
    self.first = rows[0] if self.first is None else self.first
    return any(row != self.first for row in rows)


def telling(name: str, wrong: Callable[[], Any], *, after: int = 0) -> type[Steady]:
    """Says something wrong of itself, or raises, from the time on that it was asked so often."""

    def told(self: Steady, *arguments: Any) -> Any:
        self.calls += 1
        if self.calls > after:
            self.note()
            return wrong()
        right = getattr(Steady, name)
        return right.fget(self) if isinstance(right, property) else right(self, *arguments)

    called = name in ("kind", "memory_bytes")
    return type("Telling", (Steady,), {name: told if called else property(told)})


def _raise() -> Any:
    raise Planned("asked")


def spoiling(spoil: Callable[[Draft], Any], *, sampled: bool = False) -> type[Steady]:
    """Proposes a draft that something was done to."""

    def propose(self: Steady, context: DraftContext, budget: Budget) -> Any:
        draft = Steady.propose(self, context, budget)
        if draft.size < 2:
            return draft
        self.note()
        return spoil(draft)

    return type("Spoiling", (Steady,), {"propose": propose, "sampled": sampled})


def writing(verb: str, write: Callable[..., Any]) -> type[Steady]:
    """Writes to what it is handed."""

    def wrong(self: Steady, context: DraftContext, *arguments: Any) -> Any:
        if verb != "propose" or min(arguments[0].depth):
            self.note()
            write(context, *arguments)
        return getattr(Steady, verb)(self, context, *arguments)

    return type("Writing", (Steady,), {verb: wrong})


def _overlong(draft: Draft) -> Draft:
    return stack([Steady.chain(_PLAIN, [1] * 70) for _ in draft.counts])


def _star(draft: Draft) -> Draft:
    builder = TreeBuilder()
    for token in range(VOCABULARY):
        for other in range(VOCABULARY):
            builder.add(other, builder.add(token, 0))
    return stack([builder for _ in draft.counts])


_PLAIN = Steady.__new__(Steady)


def _set(draft: Draft, name: str, value: Any, *where: Any) -> Draft:
    """The draft with an entry of one of its tensors changed, in another tensor."""
    changed = getattr(draft, name).clone()
    changed[where] = value
    return replace(draft, **{name: changed})


def _resumed(draft: Draft, **changes: Any) -> Draft:
    batch = len(draft.counts)
    right = Resume(boundary=1, states=torch.zeros(batch, 2, 32), counts=[2] * batch, stamps=[10**6] * batch)
    return replace(draft, resume=replace(right, **changes))


def _tampered(draft: Draft) -> Draft:
    draft.tokens[:, 0] = (draft.tokens[:, 0] + 1) % VOCABULARY  # after it was stacked
    return draft


def _padded(draft: Draft, name: str, value: int) -> Draft:
    wide = torch.nn.functional.pad(getattr(draft, name), (0, 3), value=value)
    others = {
        other: torch.nn.functional.pad(getattr(draft, other), (0, 3))
        for other in ("tokens", "parents", "drawn", "confidence")
        if other != name
    }
    return replace(draft, **{name: wide}, **others)


def _twice(draft: Draft) -> Draft:
    return stack([Steady.chain(_PLAIN, [1, 2]) for _ in range(2 * len(draft.counts))])


NAN, INF = float("nan"), float("inf")
DRAFTS: dict[str, Callable[[Draft], Any]] = {
    "none": lambda _: None,
    "list": lambda draft: draft.tokens.tolist(),
    "builder": lambda _: TreeBuilder(),
    "overlong": _overlong,
    "over-budget": _star,
    "too-many-rows": _twice,
    "too-few-rows": lambda _: stack([]),
    "meta-tensors": lambda draft: replace(draft, tokens=draft.tokens.to("meta")),
    "token-alien": lambda draft: _set(draft, "tokens", VOCABULARY, ..., 0),
    "token-negative": lambda draft: _set(draft, "tokens", -1, ..., 0),
    "tokens-float": lambda draft: replace(draft, tokens=draft.tokens.float()),
    "tokens-flat": lambda draft: replace(draft, tokens=draft.tokens.flatten()),
    "tokens-none": lambda draft: replace(draft, tokens=None),
    "parent-itself": lambda draft: _set(draft, "parents", 1, ..., 0),
    "parent-later": lambda draft: _set(draft, "parents", 2, ..., 0),
    "parent-negative": lambda draft: _set(draft, "parents", -1, ..., 0),
    "parents-narrow": lambda draft: replace(draft, parents=draft.parents[:, :-1]),
    "counts-large": lambda draft: replace(draft, counts=draft.counts + draft.size),
    "counts-negative": lambda draft: replace(draft, counts=-1 - draft.counts),
    "counts-float": lambda draft: replace(draft, counts=draft.counts.float()),
    "counts-short": lambda draft: replace(draft, counts=draft.counts[:0]),
    "drawn-unknown": lambda draft: _set(draft, "drawn", 9, ..., 0),
    "drawn-without-law": lambda draft: _set(draft, "drawn", 1, ..., 0),
    "drawn-wide": lambda draft: replace(draft, drawn=draft.drawn.long()),
    "confidence-nan": lambda draft: _set(draft, "confidence", NAN, ..., 0),
    "confidence-infinite": lambda draft: _set(draft, "confidence", INF, ..., 0),
    "confidence-negative": lambda draft: _set(draft, "confidence", -0.5, ..., 0),
    "confidence-above-1": lambda draft: _set(draft, "confidence", 1.5, ..., 0),
    "confidence-flat": lambda draft: replace(draft, confidence=draft.confidence.flatten()),  # type: ignore[union-attr]
    "probes-flat": lambda draft: replace(draft, probes=torch.ones(3, dtype=torch.bool)),
    "probes-numbers": lambda draft: replace(draft, probes=torch.ones_like(draft.tokens)),
    "resume-misshapen": lambda draft: _resumed(draft, states=torch.zeros(len(draft.counts), 2, 31)),
    "resume-other-type": lambda draft: _resumed(draft, states=torch.zeros(len(draft.counts), 2, 32).double()),
    "resume-nowhere": lambda draft: _resumed(draft, boundary=0),
    "resume-too-deep": lambda draft: _resumed(draft, boundary=7),
    "resume-miscounted": lambda draft: _resumed(draft, counts=[3] * len(draft.counts)),
    "resume-short": lambda draft: _resumed(draft, stamps=[]),
}
HARMLESS_DRAFTS: dict[str, Callable[[Draft], Any]] = {
    "confidence-zero": lambda draft: replace(draft, confidence=torch.zeros_like(draft.tokens, dtype=torch.float32)),
    "confidence-unknown": lambda draft: replace(draft, confidence=None),
    "tampered": _tampered,
    "padding-alien": lambda draft: _padded(draft, "tokens", 10**6),
    "padding-negative": lambda draft: _padded(draft, "tokens", -5),
    "padding-later": lambda draft: _padded(draft, "parents", 99),
    "padding-wide": lambda draft: replace(
        draft,
        **{
            name: torch.nn.functional.pad(getattr(draft, name), (0, 4000))
            for name in ("tokens", "parents", "drawn", "confidence")
        },
    ),
    "resume-of-nothing": _resumed,
}
SAMPLED_DRAFTS: dict[str, Callable[[Draft], Any]] = {
    "laws-missing": lambda draft: replace(draft, laws=None),
    "laws-narrow": lambda draft: replace(draft, laws=draft.laws[:, :1]),  # type: ignore[index]
    "laws-wide": lambda draft: replace(draft, laws=torch.ones(len(draft.counts), draft.size + 1, VOCABULARY + 1)),
    "laws-whole-numbers": lambda draft: replace(draft, laws=draft.laws.long()),  # type: ignore[union-attr]
    "law-ids-alien": lambda draft: replace(draft, law_ids=torch.arange(1, VOCABULARY + 1)),
    "law-ids-short": lambda draft: replace(draft, law_ids=torch.arange(3)),
    "sampled-probes": lambda draft: replace(draft, probes=torch.ones_like(draft.tokens, dtype=torch.bool)),
}
LISTS: dict[str, Callable[[Any], Any]] = {
    "append": lambda values: values.append(1),
    "extend": lambda values: values.extend([1]),
    "insert": lambda values: values.insert(0, 1),
    "remove": lambda values: values.remove(values[0]),
    "pop": lambda values: values.pop(),
    "clear": lambda values: values.clear(),
    "sort": lambda values: values.sort(),
    "reverse": lambda values: values.reverse(),
    "set": lambda values: operator.setitem(values, -1, 1),
    "delete": lambda values: operator.delitem(values, 0),
    "slice": lambda values: operator.setitem(values, slice(0, 1), []),
    "add": lambda values: operator.iadd(values, [1]),
    "multiply": lambda values: operator.imul(values, 2),
}
WRITES: dict[str, Callable[[DraftContext], Any]] = {
    **{f"tokens-{name}": lambda context, write=write: write(context.tokens[0]) for name, write in LISTS.items()},
    **{
        f"{name}-set": lambda context, name=name: operator.setitem(getattr(context, name), 0, getattr(context, name)[0])
        for name in ("rows", "tokens", "prompt_lengths", "fresh", "samplers", "rng", "predictions")
    },
    "field": lambda context: setattr(context, "rows", ()),
    "sampler-params": lambda context: setattr(context.samplers[0], "params", SamplingParams(temperature=1.0)),
    "sampler-neutral": lambda context: setattr(context.samplers[0], "neutral", True),
    "sampler-prompt": lambda context: context.samplers[0].prompt.append(3),  # type: ignore[attr-defined]
    "sampler-words": lambda context: context.samplers[0].bad_words.append([3]),  # type: ignore[attr-defined]
    "params-field": lambda context: setattr(context.samplers[0].params, "temperature", 9.0),
    "params-bias": lambda context: operator.setitem(context.samplers[0].params.logit_bias, 3, 99.0),  # type: ignore[arg-type]
    "params-allowed": lambda context: context.samplers[0].params.allowed_token_ids.pop(),  # type: ignore[union-attr]
    "prediction": lambda context: context.predictions[0].append(3),  # type: ignore[attr-defined]
}
HARMLESS_WRITES: dict[str, Callable[[DraftContext], Any]] = {
    "rng": lambda context: setattr(context.rng[0], "position", 0),
    "signals": lambda context: context.signals.clear(),  # type: ignore[attr-defined]
    "states": lambda context: [states.fill_(NAN) for states in context.signals.values()],
}


def _observed(write: Callable[[list[Any], Any], Any]) -> type[Steady]:
    return writing("observe", lambda _context, verdicts, scores: write(verdicts, scores))


def _verbs() -> Iterator[tuple[str, Misbehaviour]]:
    for verb in VERBS:
        for label, when in {"always": _always, "later": _later, "once": _once, "other-row": _other_row}.items():
            yield f"{verb}-raises-{label}", Misbehaviour(cls=raising(verb, when))
            yield f"{verb}-raises-{label}-late", Misbehaviour(cls=raising(verb, when, late=True))


def _properties() -> Iterator[tuple[str, Misbehaviour]]:
    wrong: dict[str, list[Any]] = {
        "requires": [None, 3, ["one"], [99], [-7], [[1]]],
        "watches": [None, "yes", []],
        "remembers": [None, "yes", []],
        "kind": [None, "chain", True],
        "memory_bytes": [None, -1, NAN, "much"],
    }
    for name in PROPERTIES:
        yield f"{name}-raises", Misbehaviour(cls=telling(name, _raise))
        yield f"{name}-raises-later", Misbehaviour(cls=telling(name, _raise, after=2))
        for value in wrong[name]:
            yield f"{name}-is-{value}", Misbehaviour(cls=telling(name, lambda value=value: value))


def _all() -> Iterator[tuple[str, Misbehaviour]]:
    yield from _verbs()
    yield from _properties()
    for name, spoil in DRAFTS.items():
        yield f"draft-{name}", Misbehaviour(cls=spoiling(spoil))
    for name, spoil in SAMPLED_DRAFTS.items():
        yield f"draft-{name}", Misbehaviour(cls=spoiling(spoil, sampled=True))
    for name, spoil in HARMLESS_DRAFTS.items():
        yield f"draft-{name}", Misbehaviour(cls=spoiling(spoil), harmless=True)
    for verb in VERBS[:3]:
        for name, write in WRITES.items():
            yield f"{verb}-writes-{name}", Misbehaviour(cls=writing(verb, lambda seen, *_, write=write: write(seen)))
        for name, write in HARMLESS_WRITES.items():
            made = writing(verb, lambda seen, *_, write=write: write(seen))
            yield f"{verb}-writes-{name}", Misbehaviour(cls=made, harmless=True)
    yield "propose-writes-budget", Misbehaviour(cls=writing("propose", lambda _, budget: budget.nodes.append(9)))
    yield "observe-writes-trees", Misbehaviour(cls=_observed(lambda _, scores: scores.trees.clear()))
    for name, write in {
        "logits": lambda _, scores: scores.logits.fill_(NAN),
        "other-trees": lambda _, scores: setattr(scores, "trees", ()),
        "other-logits": lambda _, scores: setattr(scores, "logits", None),
        "verdicts": lambda verdicts, _: verdicts.clear(),
    }.items():
        yield f"observe-writes-{name}", Misbehaviour(cls=_observed(write), harmless=True)


MISBEHAVIOURS: dict[str, Misbehaviour] = dict(_all())


class Misbehaving(Drafter):
    """Stands in the registry for all of them."""

    name = "misbehaving"
    Config = Options

    def __new__(cls, config: Options, setup: DrafterSetup) -> Any:
        return MISBEHAVIOURS[config.how].cls(config, setup)
