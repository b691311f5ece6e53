"""What a drafter records is what it drew from, and whether a node is submitted never depends on its own value."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from contract.harness import PROMPTS, SAMPLED, Variant, as_prompts, installed, kind_for, llm, trees_of, variants
from forerun.core.rng import Rng
from forerun.core.tree import TokenTree
from forerun.decode.drafter import DraftContext
from forerun.drafters import drafter_class
from forerun.types import Budget, Drawn
from selection import one_of_each

PARAMS = replace(SAMPLED, max_tokens=8, seed=3)
ALTERED = 8
"""Draws of a proposal that are made to come out differently, one at a time."""


@dataclass(frozen=True, eq=False)
class Drawing:
    """One draw as the rng saw it."""

    probs: Tensor
    token: int


class LoggedRng(Rng):
    """An rng that remembers every draw of a drafter, and can make one of them come out differently."""

    def __init__(self, rng: Rng, altered: int | None = None) -> None:
        super().__init__(rng.seed, rng.position, rng.draft_stream)
        self.log: list[Drawing] = []
        self._altered = altered

    def drafted(self, probs: Tensor, node: int, index: int = 0) -> int:
        token = super().drafted(probs, node, index)
        if len(self.log) == self._altered:
            others = [other for other in torch.nonzero(probs).flatten().tolist() if other != token]
            token = others[-1] if others else token
        self.log.append(Drawing(probs.clone(), token))
        return token


def conditional_distributions(tree: TokenTree) -> Iterator[tuple[int, Tensor]]:
    """(token, recorded distribution given the elder siblings) of every sampled node."""
    rest: dict[int, Tensor] = {}
    for token, parent, kind in zip(tree.tokens, tree.parents, tree.drawn, strict=True):
        if kind is Drawn.DETERMINISTIC:
            continue
        probs = rest.setdefault(parent, tree.draft_probs[parent].clone())
        yield token, probs.clone()
        if kind is Drawn.WITHOUT_REPLACEMENT:
            probs[token] = 0
            probs /= probs.sum().clamp_min(1e-30)


def check_recorded(trees: Sequence[TokenTree], rng: list[LoggedRng]) -> int:
    """Assert that every sampled node was drawn from its recorded distribution; how many there were."""
    count = 0
    for row, (tree, own) in enumerate(zip(trees, rng, strict=True)):
        unused = list(own.log)
        for token, probs in conditional_distributions(tree):
            match = [d for d in unused if d.token == token and torch.allclose(d.probs, probs, atol=1e-5)]
            assert match, f"row {row}: token {token} was not drawn from the distribution that was recorded for it"
            unused.remove(match[0])
            count += 1
    return count


def check_not_anticipating(base: TokenTree, altered: TokenTree) -> None:
    """Assert that the first node whose value changed stands where it stood, with the confidence that it had."""
    width = min(base.size, altered.size)
    differing = [node for node in range(1, width + 1) if base.tokens[node] != altered.tokens[node]]
    if not differing:
        assert base.size == altered.size, "a drawn value decided whether a node is submitted"
        return
    first = differing[0]
    for name in ("parents", "drawn", "confidence"):
        before, after = getattr(base, name)[: first + 1], getattr(altered, name)[: first + 1]
        assert before == pytest.approx(after, abs=1e-4), f"{name} of a node changed with its own value"


@dataclass
class Watched:
    """What came of watching a drafter's proposals. The step silences a drafter that raises, so failures are kept."""

    checked: int = 0
    problems: list[str] = field(default_factory=list)


def watch(variant: Variant) -> Watched:
    """Run `variant`, checking every proposal, and each with one of the first row's draws changed."""
    cls = drafter_class(variant.method)
    watched = Watched()

    class Spy(cls):
        def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
            rng = [LoggedRng(own) for own in context.rng]
            trees: list[TokenTree] = super().propose(replace(context, rng=rng), budget)
            try:
                watched.checked += check_recorded(trees, rng)
                for place in range(min(len(rng[0].log), ALTERED)):
                    other = [LoggedRng(context.rng[0], altered=place), *map(LoggedRng, context.rng[1:])]
                    check_not_anticipating(trees[0], super().propose(replace(context, rng=other), budget)[0])
            except (AssertionError, RuntimeError, ValueError) as error:
                watched.problems.append(str(error))
            return trees

    with installed(variant.method, Spy):
        llm(variant).generate(as_prompts(PROMPTS[:2]), PARAMS)
    return watched


def draws_anything(variant: Variant) -> bool:
    """Whether any of its nodes is sampled."""
    return any(kind is not Drawn.DETERMINISTIC for tree in trees_of(variant) for kind in tree.drawn)


EACH = one_of_each(variants(), lambda variant: (variant.method, kind_for(variant, PARAMS).sampled), 1)
"""One way to sample of each drafter, and one that does not."""


@pytest.mark.parametrize("variant", EACH, ids=str)
def test_what_is_recorded_was_drawn_from_and_no_node_is_submitted_for_its_own_value(variant: Variant) -> None:
    watched = watch(variant)
    assert not watched.problems
    assert (watched.checked > 0) == draws_anything(variant)
