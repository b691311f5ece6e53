"""Retrieval: the drafted tree, its budget, its confidence, and what is refused before the first token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.conftest import checkpoint, tiny_tokenizer
from forerun import LLM, SamplingParams
from forerun.core.tree import TokenTree
from forerun.decode.drafter import DraftContext
from forerun.drafters.lookup.rest import RestConfig, RestDrafter
from forerun.errors import ArgumentError, DataError, VocabularyMismatchError
from forerun.manifests import TokenizerIdentity
from forerun.training.data.datastore import build, write
from forerun.types import Budget

__all__ = ["checkpoint"]

IDENTITY = TokenizerIdentity(name="tiny", vocab_size=12, vocabulary="abc", template="")
CORPUS = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 7], [9, 1, 2, 8], [2, 11]]
ROOMY = Budget(nodes=[64], depth=[64])


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("rest") / "store"
    write(CORPUS, IDENTITY, folder)
    return str(folder)


def drafter(store: str, **options: Any) -> RestDrafter:
    setup = SimpleNamespace(tokenizer=None, target=SimpleNamespace(vocab_size=12))
    return RestDrafter(RestConfig(datastore=store, **options), setup)  # type: ignore[arg-type]


def context(tokens: Sequence[int], fresh: int = 0, row: int = 0) -> DraftContext:
    return DraftContext(
        rows=[row], tokens=[tokens], prompt_lengths=[1], fresh=[fresh], samplers=[], rng=[], hidden_states={}
    )


def nodes(trees: Sequence[TokenTree]) -> list[tuple[int, int]]:
    """(token, parent) of each drafted node of the only row."""
    (tree,) = trees
    return list(zip(tree.tokens[1:], tree.parents[1:], strict=True))


def test_what_followed_most_often_comes_first(store: str) -> None:
    assert nodes(drafter(store).propose(context([0, 1, 2]), ROOMY)) == [(3, 0), (4, 1), (8, 0), (7, 1), (5, 2), (6, 2)]


def test_the_longest_match_alone_counts(store: str) -> None:
    assert nodes(drafter(store).propose(context([9, 1, 2]), ROOMY)) == [(8, 0)]
    assert (8, 0) in nodes(drafter(store, max_match=2).propose(context([9, 1, 2]), ROOMY))
    assert len(nodes(drafter(store, max_match=2).propose(context([9, 1, 2]), ROOMY))) == 6


@pytest.mark.parametrize("text", [[2], [5, 6], [4, 5], [2, 11]])
def test_no_match_of_two_tokens_or_nothing_behind_it_is_an_empty_draft(store: str, text: list[int]) -> None:
    (tree,) = drafter(store).propose(context(text), ROOMY)
    assert (tree.tokens, tree.size) == (text[-1:], 0)


def test_no_match_crosses_from_one_document_into_the_next(store: str) -> None:
    assert nodes(drafter(store).propose(context([5, 1, 2]), ROOMY))[0] == (3, 0)
    assert nodes(drafter(store, min_match=3).propose(context([5, 1, 2]), ROOMY)) == []
    assert nodes(drafter(store).propose(context([9, 1, 2]), ROOMY)) == [(8, 0)]  # not [(8, 0), (2, 1)]


@pytest.mark.parametrize(
    ("options", "budget", "expected"),
    [
        ({}, (2, 64), [(3, 0), (4, 1)]),
        ({}, (64, 1), [(3, 0), (8, 0)]),
        ({}, (0, 9), []),
        ({}, (9, 0), []),
        ({"nodes": 1}, (64, 64), [(3, 0)]),
        ({"num_speculative_tokens": 2}, (64, 64), [(3, 0), (4, 1), (8, 0), (7, 1)]),
        ({"max_hits": 1}, (64, 64), [(8, 0)]),  # places stand in the order of the tokens before: 9 is the smallest
    ],
)
def test_budget_and_options_are_kept(
    store: str, options: dict[str, int], budget: tuple[int, int], expected: list[tuple[int, int]]
) -> None:
    trees = drafter(store, **options).propose(context([1, 2]), Budget(nodes=[budget[0]], depth=[budget[1]]))
    assert nodes(trees) == expected


def test_confidence_is_the_share_of_the_parents_count_before_anything_is_known(store: str) -> None:
    (tree,) = drafter(store).propose(context([1, 2]), ROOMY)
    assert tree.confidence == pytest.approx([1, 3 / 5, 2 / 4, 1 / 5, 1 / 4, 1 / 3, 1 / 3])


def test_confidence_follows_what_the_text_really_did(store: str) -> None:
    made = drafter(store)
    for _ in range(60):
        made.propose(context([1, 2]), ROOMY)
        made.extend(context([1, 2, 8], 1))
    learned = made.propose(context([1, 2]), ROOMY)[0].confidence
    assert learned[1] < 0.1 and learned[3] > 0.85  # 3 never came, 8 always
    assert learned[2] == pytest.approx(2 / 4)  # nothing was learned behind a wrong token


def test_a_freed_row_remembers_no_draft(store: str) -> None:
    made = drafter(store)
    made.propose(context([1, 2]), ROOMY)
    made.truncate([0], [0])
    made.extend(context([1, 2, 8], 3))
    (fresh,), (later,) = (one.propose(context([1, 2]), ROOMY) for one in (drafter(store), made))
    assert fresh.size and fresh.confidence == later.confidence


@pytest.mark.parametrize(
    "options",
    [{"num_speculative_tokens": 0}, {"min_match": 0}, {"max_match": 1}, {"max_match": 65}, {"max_hits": 0}],
)
def test_senseless_options_are_refused(store: str, options: dict[str, int]) -> None:
    with pytest.raises(ArgumentError, match="rest: "):
        drafter(store, **options)


def llm(checkpoint: Path, folder: Path) -> LLM:
    config = {"method": "rest", "datastore": str(folder), "adaptive": False}
    return LLM(checkpoint, speculative_config=config, dtype="float32")


def test_a_foreign_or_damaged_datastore_is_refused_before_the_first_token(checkpoint: Path, tmp_path: Path) -> None:
    write([[1, 2, 3]], IDENTITY, tmp_path / "foreign")
    with pytest.raises(VocabularyMismatchError, match="tokenizer of 'tiny'"):
        llm(checkpoint, tmp_path / "foreign")
    with pytest.raises(DataError, match="is not a datastore"):
        llm(checkpoint, tmp_path / "none")
    (tmp_path / "foreign" / "tokens.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"tokens\.bin holds 0 bytes"):
        llm(checkpoint, tmp_path / "foreign")


def test_the_text_of_the_corpus_is_accepted_whole(checkpoint: Path, tmp_path: Path) -> None:
    plain = LLM(checkpoint, dtype="float32")
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    answer = plain.generate(["the cat sat"], greedy)[0].outputs[0]
    (tmp_path / "a.txt").write_text("the cat sat" + answer.text)
    build([tmp_path / "a.txt"], tiny_tokenizer(), tmp_path / "store")
    copied = llm(checkpoint, tmp_path / "store").generate(["the cat sat"], greedy)[0].outputs[0]
    assert copied.token_ids == answer.token_ids
    assert copied.speculation.num_accepted_draft_tokens > 0
