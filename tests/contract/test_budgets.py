"""A draft keeps to its budget, and with a smaller one a chain is the beginning of what it would have been."""

from dataclasses import replace

import pytest

from contract.harness import PROMPTS, SAMPLED, Variant, as_prompts, each_way_to_draft, installed, llm
from forerun import SamplingParams
from forerun.core.tree import TokenTree
from forerun.decode.drafter import DraftContext
from forerun.drafters import drafter_class
from forerun.types import Budget

GREEDY = SamplingParams(temperature=0.0, max_tokens=10)
LIMITS = [(0, 9), (9, 0), (1, 9), (3, 9), (9, 2)]
"""Most nodes and most depth."""
OTHERWISE = ("first_of", "merge", "cascade", "jacobi")
"""With less room another member may draft; `jacobi` guesses anew at each proposal."""


def proposals(variant: Variant) -> list[tuple[Budget, TokenTree, TokenTree, bool]]:
    """The limit, what was drafted within it and without it, and whether that is a chain, for every row and step."""
    cls, found = drafter_class(variant.method), list[tuple[Budget, TokenTree, TokenTree, bool]]()

    class Limited(cls):
        def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
            limited = {}
            for nodes, depth in LIMITS:
                least = Budget(nodes=[min(nodes, n) for n in budget.nodes], depth=[min(depth, n) for n in budget.depth])
                limited[nodes, depth] = least, [tree.copy() for tree in super().propose(context, least)]
            trees: list[TokenTree] = super().propose(context, budget)
            for least, drafted in limited.values():
                for row, (tree, whole) in enumerate(zip(drafted, trees, strict=True)):
                    own = Budget(nodes=[least.nodes[row]], depth=[least.depth[row]])
                    found.append((own, tree, whole.copy(), self.kind(context.samplers[row]).chain))
            return trees

    with installed(variant.method, Limited):
        params = [GREEDY if row else replace(SAMPLED, seed=3, max_tokens=10) for row in range(len(PROMPTS))]
        outputs = llm(variant).generate(as_prompts(PROMPTS), params)
        assert not any(output.outputs[0].speculation.drafter_errors for output in outputs)
    return found


@pytest.mark.parametrize("variant", each_way_to_draft(3), ids=str)
def test_a_draft_keeps_to_its_budget(variant: Variant) -> None:
    found = proposals(variant)
    for budget, tree, whole, chain in found:
        assert tree.size <= budget.nodes[0] and max(tree.depths) <= budget.depth[0]
        if chain and variant.method not in OTHERWISE:
            assert tree.size == min(whole.size, budget.nodes[0], budget.depth[0])
            assert list(tree.tokens) == list(whole.tokens)[: tree.size + 1]
    assert any(tree.size for _, tree, _, _ in found)
