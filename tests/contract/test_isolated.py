"""One isolation domain's text changes nothing that is drafted for another: over the real engine.

A draft shows what its drafter has read, to whoever reads traces, counts accepted tokens or takes the time. So a domain
is drafted for as on an engine that never saw another: the same tokens, drawn alike, with the same confidence.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from contract.harness import (
    PROMPT,
    PROMPTS,
    SAMPLED,
    VOCABULARY,
    Variant,
    as_prompts,
    each_way_to_draft,
    installed,
    llm,
)
from forerun import SamplingParams
from forerun.core.tree import TokenTree
from forerun.decode.drafter import DraftContext, Drafter, DrafterSetup, PerDomain
from forerun.drafters import drafter_class
from forerun.drafters.lookup.ngram import NgramConfig
from forerun.drafters.lookup.suffix import SuffixDrafter
from forerun.types import Budget
from selection import slow

GREEDY = SamplingParams(temperature=0, max_tokens=14)
CASES = [GREEDY, *slow(replace(SAMPLED, seed=5, max_tokens=24))]
OWN = [[1, 5, 7, 2, 1, 5, 3, 1, 5], [4, 9, 4, 9, 4]]
"""What the domain under test asks, one after the other: it learns from its own."""
_DEPTH = 8
"""No variant drafts deeper."""
Node = tuple[int, int, int, float]


def drafted(
    variant: Variant,
    params: SamplingParams,
    others: Sequence[str | None],
    *,
    beside: bool = False,
    planted: type[Drafter] | None = None,
) -> list[list[Node]]:
    """What is drafted for domain "own", step by step, after `others` got the same answers and many more.

    Steps near the end of an answer are left out: there a row is drafted for as deeply as the one beside it that may
    still get most tokens.

    Args:
        beside: they get them again while "own" is being answered, in the rows next to it.
        planted: drafts in place of the variant's drafter.
    """
    found: dict[str | None, list[list[Node]]] = defaultdict(list)
    cls, deepest, inside = planted or drafter_class(variant.method), 0, 0

    class Spy(cls):
        def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
            nonlocal deepest, inside
            inside += 1
            trees: list[TokenTree] = super().propose(context, budget)
            inside -= 1
            if inside:  # a cascade within a cascade
                return trees
            deepest = max(deepest, *budget.depth)
            for index, (tree, depth) in enumerate(zip(trees, budget.depth, strict=True)):
                if depth >= min(deepest, _DEPTH):
                    nodes = zip(tree.tokens, tree.parents, map(int, tree.drawn), tree.confidence, strict=True)
                    found[context.salt(index)].append(list(nodes)[1:])
            return trees

    with installed(variant.method, Spy):
        engine = llm(variant, rows=4)
        for salt in others:
            engine.generate(as_prompts([*PROMPTS[:2], *OWN]), params, cache_salt=salt)
        for prompt in OWN:
            ids = [
                engine.submit({"prompt_token_ids": list(other)}, params, cache_salt=salt)
                for salt in (others if beside else ())
                for other in OWN
            ]
            engine.generate(as_prompts([prompt]), params, cache_salt="own")
            for request_id in ids:
                engine.abort(request_id)
    return found["own"]


def same(one: Sequence[Sequence[Node]], other: Sequence[Sequence[Node]], within: float = 1e-3) -> bool:
    """Every node but for its confidence, and that within a bound: its last bits move with the shape of a batch."""
    if [[node[:3] for node in step] for step in one] != [[node[:3] for node in step] for step in other]:
        return False
    pairs = zip([node[3] for step in one for node in step], [node[3] for step in other for node in step], strict=True)
    return all(abs(left - right) < within for left, right in pairs)


@pytest.mark.parametrize("params", CASES, ids=["greedy", "sampled"])
@pytest.mark.parametrize("variant", each_way_to_draft(2), ids=str)
def test_a_domain_is_drafted_for_as_if_it_were_alone(variant: Variant, params: SamplingParams) -> None:
    alone = drafted(variant, params, [])
    assert any(alone), "something must be drafted"
    assert same(drafted(variant, params, [None]), alone)
    # Beside others a confidence at the edge of a bin may be counted in the next one.
    assert same(drafted(variant, params, ["other"], beside=True), alone, within=0.1)


@pytest.mark.parametrize("method", ["suffix", "recycling", "lookahead"])
def test_a_domain_learns_from_its_own_past(method: str) -> None:
    """Else the test above would be passed by forgetting everything."""
    options = {"shared_pool": True, "window": 3, "level": 3, "guesses": 3} if method == "lookahead" else {}
    variant = Variant(method, options=options)
    alone, again = drafted(variant, GREEDY, []), drafted(variant, GREEDY, ["own"])
    assert not same(again[-len(alone) :], alone)


class Leaking(Drafter):
    """Remembers, of every row whatever its domain, what followed each token."""

    name, Config = "leaking", NgramConfig

    def __init__(self, config: NgramConfig, setup: DrafterSetup) -> None:
        self._after = dict[int, int]()

    def extend(self, context: DraftContext) -> None:
        for tokens in context.tokens:
            self._after.update(pairwise(tokens))

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        trees = context.trees()
        for tree, nodes in zip(trees, budget.nodes, strict=True):
            if nodes and tree.tokens[0] in self._after:
                tree.add(self._after[tree.tokens[0]], 0, confidence=0.5)
        return trees


class Telling(Leaking):
    """Drafts from the row alone, but its confidence tells how many tokens all domains have had."""

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        trees = context.trees()
        for tree, nodes in zip(trees, budget.nodes, strict=True):
            if nodes:
                tree.add(tree.tokens[0], 0, confidence=len(self._after) / VOCABULARY)
        return trees


class OneStore(SuffixDrafter):
    """`suffix` as it was: one store for all."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        one = self._domains.of(None)
        self._domains.of = lambda salt: one


@pytest.mark.parametrize("cls", [Leaking, Telling, OneStore])
def test_a_planted_leak_is_seen(cls: type[Drafter]) -> None:
    options = {"num_speculative_tokens": 3, "max_spec_offset": 1} if cls is OneStore else {}
    variant = Variant("planted", options=options)
    alone = drafted(variant, GREEDY, [], planted=cls)
    assert any(alone) and not same(drafted(variant, GREEDY, ["other"], planted=cls), alone)


def test_the_least_recently_used_domains_are_forgotten() -> None:
    kept = PerDomain(list[int], most=3, size=len, most_size=10)
    for salt in ("a", "b", "c"):
        kept.of(salt).append(1)
    kept.of("a")
    kept.of("d")
    assert len(list(kept.all())) == 3 and [kept.of("a"), kept.of("c"), kept.of("d")] == [[1], [1], []]
    kept.of("d").extend(range(9))
    kept.trim()
    assert len(list(kept.all())) == 2 and kept.of("c") == [1], "together at most ten"
    kept.of("c").extend(range(99))
    kept.trim()
    assert len(list(kept.all())) == 1 and len(kept.of("c")) == 100, "the last one used stays"


def test_many_domains_take_no_more_memory_than_four_full_stores() -> None:
    options = {"max_cached_tokens": 64}
    engine = llm(Variant("suffix", options=options))
    [active] = engine.engine.drafting._active.values()
    [(_, guarded)] = active.drafters
    for number in range(60):
        engine.generate(as_prompts([PROMPT]), GREEDY, cache_salt=f"domain-{number}")
        held = sum(memory.store.held for memory in guarded.drafter._domains.all())
        assert held <= 4 * 64
    assert held > 64
