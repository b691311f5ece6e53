"""Drafters that break their contract in every place that there is to break: verbs, properties, drafts, what they read.

Each `Misbehaviour` is a steady drafter that does one thing wrong, and notes that it did.
"""

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from contract.harness import VOCABULARY
from forerun import SamplingParams
from forerun.core.tree import Resume, TokenTree
from forerun.decode.drafter import DraftContext, Drafter, DrafterSetup
from forerun.types import Budget, DraftKind, Drawn

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

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        trees = context.trees()
        for tree, tokens, n, d in zip(trees, context.tokens, budget.nodes, budget.depth, strict=True):
            self.chain(tree, list(tokens[-min(3, n, d) :]) if min(n, d) else [])
        return trees

    def chain(self, tree: TokenTree, tokens: list[int]) -> TokenTree:
        """These tokens one below the other."""
        parent = 0
        for token in tokens:
            if self.sampled:
                tree.set_probs(parent, torch.full((VOCABULARY,), 1 / VOCABULARY))
            parent = tree.add(token, parent, drawn=Drawn.IID if self.sampled else Drawn.DETERMINISTIC, confidence=0.9)
        return tree

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
    texts = [tokens[0] for tokens in asked.tokens] if isinstance(asked, DraftContext) else asked  # Prompts differ there
    self.first = texts[0] if self.first is None else self.first
    return any(text != self.first for text in texts)


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


def spoiling(spoil: Callable[[list[TokenTree]], Any], *, sampled: bool = False) -> type[Steady]:
    """Proposes trees that something was done to."""

    def propose(self: Steady, context: DraftContext, budget: Budget) -> Any:
        trees = Steady.propose(self, context, budget)
        if max(tree.size for tree in trees) < 2:
            return trees
        self.note()
        return spoil(trees)

    return type("Spoiling", (Steady,), {"propose": propose, "sampled": sampled})


def writing(verb: str, write: Callable[..., Any]) -> type[Steady]:
    """Writes to what it is handed."""

    def wrong(self: Steady, context: DraftContext, *arguments: Any) -> Any:
        if verb != "propose" or min(arguments[0].depth):
            self.note()
            write(context, *arguments)
        return getattr(Steady, verb)(self, context, *arguments)

    return type("Writing", (Steady,), {verb: wrong})


Spoil = Callable[[list[TokenTree]], Any]


def each(spoil: Callable[[TokenTree], Any]) -> Spoil:
    """Something is done to every tree that has a node."""

    def spoiled(trees: list[TokenTree]) -> list[TokenTree]:
        for tree in trees:
            if tree.size:
                spoil(tree)
        return trees

    return spoiled


def to(column: str, value: Any) -> Spoil:
    """The first node's entry of a column is another."""
    return each(lambda tree: operator.setitem(getattr(tree, column), 1, value))


def as_a_whole(name: str, value: Callable[[TokenTree], Any]) -> Spoil:
    """A column, or the like, is replaced."""
    return each(lambda tree: setattr(tree, name, value(tree)))


def _star(tree: TokenTree) -> None:
    for token in range(VOCABULARY):
        for other in range(VOCABULARY):
            tree.add(other, tree.add(token, 0))


def begun(**changes: Any) -> Spoil:
    right = {"boundary": 1, "states": torch.zeros(2, 32), "stamp": 10**6}
    return as_a_whole("resume", lambda _: Resume(**{**right, **changes}))


NAN = float("nan")
DRAFTS: dict[str, Spoil] = {
    "none": lambda _: None,
    "lists": lambda trees: [tree.tokens for tree in trees],
    "tree": lambda trees: trees[0],
    "overlong": each(lambda tree: tree.add_path([1] * 70)),
    "over-budget": each(_star),
    "too-many-rows": lambda trees: trees * 2,
    "other-root": each(lambda tree: operator.setitem(tree.tokens, 0, (tree.tokens[0] + 1) % VOCABULARY)),
    "token-alien": to("tokens", VOCABULARY),
    "token-none": to("tokens", None),
    "tokens-none": as_a_whole("tokens", lambda _: None),
    "tokens-empty": as_a_whole("tokens", lambda _: []),
    "parent-later": to("parents", 2),
    "parents-short": as_a_whole("parents", lambda tree: tree.parents[:-1]),
    "drawn-without-probs": to("drawn", Drawn.IID),
    "confidence-nan": to("confidence", NAN),
    "probes-alien": as_a_whole("probes", lambda _: {99}),
    "masses-none": as_a_whole("masses", lambda _: None),
    "resume-misshapen": begun(states=torch.zeros(2, 31)),
    "resume-too-deep": begun(boundary=7),
}
"""One of each sort; every flaw of a tree: tests/drafters/test_guarded.py."""
HARMLESS_DRAFTS: dict[str, Spoil] = {
    "tuple": tuple,
    "confidence-zero": as_a_whole("confidence", lambda tree: [0.0] * len(tree.tokens)),
    "parent-of-the-root": each(lambda tree: operator.setitem(tree.parents, 0, 7)),
    "depths-none": as_a_whole("depths", lambda _: None),
    "probs-that-nobody-needs": each(lambda tree: tree.set_probs(99, torch.ones(1))),
    "resume-of-nothing": begun(),
}
SAMPLED_DRAFTS: dict[str, Spoil] = {
    "probs-missing": each(lambda tree: tree.draft_probs.clear()),
    "probs-none": as_a_whole("draft_probs", lambda _: None),
    "probs-wide": each(lambda tree: tree.set_probs(0, torch.ones(VOCABULARY + 1))),
    "probs-list": each(lambda tree: tree.set_probs(0, [1.0])),
    "sampled-probes": as_a_whole("probes", lambda tree: set(range(1, len(tree.tokens)))),
}
LISTS: dict[str, Callable[[Any], Any]] = {
    "append": lambda values: values.append(1),
    "pop": lambda values: values.pop(),
    "sort": lambda values: values.sort(),
    "set": lambda values: operator.setitem(values, -1, 1),
    "delete": lambda values: operator.delitem(values, 0),
    "add": lambda values: operator.iadd(values, [1]),
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
    "sampler-prompt": lambda context: context.samplers[0].prompt.append(3),
    "sampler-words": lambda context: context.samplers[0].bad_words.append([3]),
    "params-field": lambda context: setattr(context.samplers[0].params, "temperature", 9.0),
    "params-bias": lambda context: operator.setitem(context.samplers[0].params.logit_bias, 3, 99.0),
    "params-allowed": lambda context: context.samplers[0].params.allowed_token_ids.pop(),
    "prediction": lambda context: context.predictions[0].append(3),
}
HARMLESS_WRITES: dict[str, Callable[[DraftContext], Any]] = {
    "rng": lambda context: setattr(context.rng[0], "position", 0),
    "hidden_states": lambda context: context.hidden_states.clear(),
    "states": lambda context: [states.fill_(NAN) for states in context.hidden_states.values()],
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
            harmless = name == "memory_bytes" and value == -1  # It counts as nothing
            yield f"{name}-is-{value}", Misbehaviour(cls=telling(name, lambda value=value: value), harmless=harmless)


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
    for name, write in {
        "trees": lambda _, scores: scores.trees.clear(),
        "tokens": lambda _, scores: operator.setitem(scores.trees[0].tokens, 0, 1),
        "node": lambda _, scores: scores.trees[0].add(1, 0),
        "probe": lambda _, scores: scores.trees[0].probes.add(1),
        "column": lambda _, scores: setattr(scores.trees[0], "tokens", ()),
    }.items():
        yield f"observe-writes-{name}", Misbehaviour(cls=_observed(write))
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
