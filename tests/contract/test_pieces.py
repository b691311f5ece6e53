"""A drafter that is shown a prompt piece by piece drafts what it drafts of a prompt that it was shown at once."""

from collections.abc import Sequence
from typing import Any

import pytest

from contract.harness import PROMPTS, Variant, as_prompts, each_way_to_draft, llm, tokens_of
from forerun import LLM, SamplingParams
from forerun.core.tree import TokenTree
from forerun.decode.drafter import DraftContext
from forerun.drafters.guarded import Guarded
from forerun.engine.drafting import DrafterPool, NewSequence
from forerun.types import Budget

GREEDY = SamplingParams(temperature=0, max_tokens=9)
PIECE = 3
TEXTS = [prompt for prompt in PROMPTS if len(prompt) > PIECE]


def drafted(engine: LLM, monkeypatch: pytest.MonkeyPatch) -> tuple[list[list[int]], list[Any], int]:
    """Answers one after the other, the tokens and parents of all drafts, and the longest piece that was shown."""
    trees, pieces = list[Any](), list[int]()
    propose, introduce = Guarded.propose, DrafterPool.read

    def proposing(self: Guarded, context: DraftContext, budget: Budget) -> list[TokenTree]:
        found = propose(self, context, budget)
        trees.extend((list(tree.tokens), list(tree.parents)) for tree in found)
        return found

    def introducing(self: DrafterPool, key: str, found: Sequence[NewSequence]) -> None:
        pieces.extend(new.length - new.known for new in found)
        introduce(self, key, found)

    with monkeypatch.context() as patch:
        patch.setattr(Guarded, "propose", proposing)
        patch.setattr(DrafterPool, "read", introducing)
        answers = [tokens_of(engine.generate(as_prompts([text]), GREEDY))[0] for text in TEXTS]
    return answers, trees, max(pieces)


@pytest.mark.parametrize("variant", each_way_to_draft(1), ids=str)
def test_drafts_are_those_of_a_prompt_shown_at_once(variant: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, pieces = (drafted(llm(variant, chunk=chunk), monkeypatch) for chunk in (64, PIECE))
    assert whole[:2] == pieces[:2]
    assert any(len(tokens) > 1 for tokens, _ in whole[1])
    assert whole[2] == max(map(len, TEXTS)) + 1 and pieces[2] <= PIECE + 1, "the first token comes with the last piece"
