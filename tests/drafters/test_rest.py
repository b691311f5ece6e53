"""Datastores against a plain search and every damage by name; what is drafted from them, and what is refused."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from damage import flipped
from drafters.asking import ROOMY, context
from engine.conftest import checkpoint, tiny_tokenizer
from forerun import LLM
from forerun.core.tree import TokenTree
from forerun.drafters.lookup.rest import ITEM, SEPARATOR, SORTED_TOKENS, Datastore, RestConfig, RestDrafter, merge
from forerun.errors import ArgumentError, DataError, VocabularyMismatchError
from forerun.training.data.datastore import build, sort_places, suffix_order, write
from forerun.training.data.records import BadRecords
from forerun.types import Budget
from forerun.writing import TokenizerIdentity

IDENTITY = TokenizerIdentity(name="tiny", vocab_size=9, vocabulary="abc", template="")
TOKENS = st.integers(0, 3)
DOCUMENTS = st.lists(st.lists(TOKENS, min_size=1, max_size=20), min_size=1, max_size=5)


def in_memory(documents: Sequence[Sequence[int]]) -> Datastore:
    """A datastore without files."""
    text = [SEPARATOR]
    for document in documents:
        text += [*document, SEPARATOR]
    array = np.array(text, dtype=ITEM)
    return Datastore(folder=Path(), manifest=None, tokens=array, places=sort_places(array))


def searched(documents: Sequence[Sequence[int]], text: Sequence[int], low: int, high: int) -> tuple[int, Counter[Any]]:
    """Length of the longest match and what followed it, by looking at every place of every document."""
    for length in range(min(high, len(text)), low - 1, -1):
        end = list(text[-length:])
        found = [
            tuple(document[place:])
            for document in documents
            for place in range(length, len(document))
            if list(document[place - length : place]) == end
        ]
        if found:
            return length, Counter(found)
    return 0, Counter()


@given(DOCUMENTS, st.lists(TOKENS, max_size=12), st.integers(1, 3), st.integers(0, 6))
def test_it_finds_what_a_plain_search_finds(documents: list[list[int]], text: list[int], low: int, more: int) -> None:
    store = in_memory(documents)
    length, expected = searched(documents, text, low, low + more)
    match = store.longest(text, shortest=low, longest=low + more)
    if match is None:
        assert not length
        return
    found = store.continuations(match, 25, 10**6).tolist()
    cut = Counter(tuple(row[: row.index(SEPARATOR)]) for row in found)
    assert (match.length, cut) == (length, expected)


@given(st.lists(st.integers(0, 2), max_size=60), st.sampled_from([1, 2, 8, 64]))
def test_suffixes_are_sorted_as_far_as_promised(text: list[int], depth: int) -> None:
    array = np.array([*text, SEPARATOR], dtype=ITEM)
    order = suffix_order(array, max(depth, 2)).tolist()
    values = array.tolist()
    cut = [values[place : place + depth] for place in order]
    assert sorted(order) == list(range(len(values))) and cut == sorted(cut)


def test_a_text_that_repeats_itself_longer_than_it_is_sorted_stays_in_order_of_place() -> None:
    order = suffix_order(np.zeros(300, dtype=ITEM), 64)
    assert order[:100].tolist() == sorted(order[:100].tolist())
    assert len(set(order.tolist())) == 300


def counted(continuations: Sequence[Sequence[int]], nodes: int) -> list[tuple[tuple[int, ...], int]]:
    """The trie's most frequent paths and their counts."""
    counts = Counter(tuple(row[: end + 1]) for row in continuations for end in range(len(row)))
    return sorted(counts.items(), key=lambda item: (-item[1], len(item[0]), item[0]))[:nodes]


@given(
    st.lists(st.lists(TOKENS, min_size=1, max_size=4), min_size=1, max_size=30),
    st.lists(st.integers(1, 3), min_size=30, max_size=30),
    st.integers(1, 40),
)
def test_the_trie_holds_the_most_frequent_paths_counted(
    distinct: list[list[int]], times: list[int], nodes: int
) -> None:
    rows = [row for row, count in zip(distinct, times, strict=False) for _ in range(count)]
    grid = np.array([[*row, *[SEPARATOR] * (5 - len(row))] for row in rows], dtype=ITEM)
    trie = merge(grid, nodes)
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(trie.tokens, trie.parents, strict=True):
        paths.append((*paths[parent], token))
    assert list(zip(paths[1:], trie.counts, strict=True)) == counted(rows, nodes)


def test_of_many_places_some_are_taken_evenly() -> None:
    store = in_memory([[1, 2, place] for place in range(10, 110)])
    match = store.longest([1, 2], shortest=1, longest=4)
    assert match is not None and len(match.places) == 100
    taken = store.continuations(match, 1, 10).ravel().tolist()
    every = store.continuations(match, 1, 100).ravel().tolist()
    assert taken == every[::10]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write([[1, 2, 3], [1, 2, 4, 5]], IDENTITY, tmp_path / "store")
    return tmp_path / "store"


def test_what_is_written_is_read_again(folder: Path) -> None:
    store = Datastore.open(folder)
    store.verify()
    assert store.tokens.tolist() == [SEPARATOR, 1, 2, 3, SEPARATOR, 1, 2, 4, 5, SEPARATOR]
    assert (store.manifest.documents, store.manifest.tokens, store.manifest.largest_token) == (2, 7, 5)
    assert store.manifest.tokenizer == IDENTITY and store.manifest.sorted_tokens == SORTED_TOKENS
    assert sorted(store.places.tolist()) == [2, 3, 6, 7, 8]
    assert [path.name for path in folder.parent.iterdir()] == ["store"]


@pytest.mark.parametrize("name", ["tokens.bin", "suffixes.bin"])
def test_a_file_cut_short_or_missing_is_refused(folder: Path, name: str) -> None:
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:-4])
    with pytest.raises(DataError, match=f"{name} holds {len(content) - 4} bytes where {len(content)}"):
        Datastore.open(folder)
    (folder / name).unlink()
    with pytest.raises(DataError, match=f"{name} is missing"):
        Datastore.open(folder)


def test_bits_that_changed_are_found_on_request(folder: Path) -> None:
    for path in flipped(folder):
        with pytest.raises(DataError, match=rf"{path.name} (has changed|is no JSON|does not|has format)"):
            Datastore.open(folder).verify()
    Datastore.open(folder).verify()


def test_another_tokenizer_is_refused_by_hash(folder: Path) -> None:
    manifest = Datastore.open(folder).manifest
    other = TokenizerIdentity(name="other", vocab_size=9, vocabulary="xyz", template="")
    with pytest.raises(VocabularyMismatchError, match=r"'tiny'.*'other'.*forerun datastore build"):
        manifest.check_tokenizer(other, 9, folder)
    manifest.check_tokenizer(IDENTITY, 6, folder)
    with pytest.raises(VocabularyMismatchError, match="has 5 token ids"):
        manifest.check_tokenizer(IDENTITY, 5, folder)
    with pytest.raises(VocabularyMismatchError, match="has 8 token ids"):
        manifest.check_tokenizer(None, 8, folder)
    manifest.check_tokenizer(None, 9, folder)


@pytest.mark.parametrize("documents", [[], [[]], [[1], [2]]])
def test_nothing_to_draft_from_is_refused_and_leaves_nothing(tmp_path: Path, documents: list[list[int]]) -> None:
    with pytest.raises(DataError, match="nothing to draft from"):
        write(documents, IDENTITY, tmp_path / "store")
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten(folder: Path) -> None:
    with pytest.raises(ArgumentError, match="is not empty"):
        write([[1, 2]], IDENTITY, folder)
    assert Datastore.open(folder).manifest.documents == 2


def test_files_become_documents_in_the_targets_words(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    (tmp_path / "a.txt").write_text("the cat sat on the mat")
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "the dog"}]
    lines = [{"text": "the log"}, {"messages": talk}, {"prompt": "a", "completion": "b"}, {"other": 1}]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    bad, said = BadRecords(skip=True), list[str]()
    manifest = build(
        [tmp_path / "a.txt", tmp_path / "b.jsonl"], tokenizer, tmp_path / "store", bad=bad, tell=said.append
    )
    store = Datastore.open(tmp_path / "store")
    text = tokenizer.decode([token for token in store.tokens.tolist() if token != SEPARATOR])
    assert "the cat sat on the mat" in text and "user: hi\nassistant: the dog" in text
    assert (manifest.documents, bad.count) == (4, 1)
    assert [source["path"] for source in manifest.sources] == ["a.txt", "b.jsonl"]
    assert store.manifest.tokenizer == TokenizerIdentity.of(tokenizer)
    assert any("MiB of memory" in words for words in said)


def test_a_conversation_needs_a_template(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    (tmp_path / "b.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}) + "\n")
    with pytest.raises(DataError, match="no chat template"):
        build([tmp_path / "b.jsonl"], tokenizer, tmp_path / "store")
    with pytest.raises(DataError, match="no data file"):
        build([], tokenizer, tmp_path / "store")


__all__ = ["checkpoint"]

TINY = TokenizerIdentity(name="tiny", vocab_size=12, vocabulary="abc", template="")
CORPUS = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 7], [9, 1, 2, 8], [2, 11]]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("rest") / "store"
    write(CORPUS, TINY, folder)
    return str(folder)


def drafter(store: str, **options: Any) -> RestDrafter:
    setup = SimpleNamespace(tokenizer=None, target=SimpleNamespace(vocab_size=12))
    return RestDrafter(RestConfig(datastore=store, **options), setup)


def nodes(trees: Sequence[TokenTree]) -> list[tuple[int, int]]:
    """(token, parent) of each drafted node of the only row."""
    (tree,) = trees
    return list(zip(tree.tokens[1:], tree.parents[1:], strict=True))


def test_the_longest_match_alone_counts_and_what_followed_it_most_often_comes_first(store: str) -> None:
    assert nodes(drafter(store).propose(context([0, 1, 2]), ROOMY)) == [(3, 0), (4, 1), (8, 0), (7, 1), (5, 2), (6, 2)]
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


def test_confidence_is_the_share_of_the_parents_count_until_the_text_tells_more(store: str) -> None:
    (tree,) = drafter(store).propose(context([1, 2]), ROOMY)
    assert tree.confidence == pytest.approx([1, 3 / 5, 2 / 4, 1 / 5, 1 / 4, 1 / 3, 1 / 3])
    made = drafter(store)
    for _ in range(60):
        made.propose(context([1, 2]), ROOMY)
        made.extend(context([1, 2, 8], 1))
    learned = made.propose(context([1, 2]), ROOMY)[0].confidence
    assert learned[1] < 0.1 and learned[3] > 0.85  # 3 never came, 8 always
    assert learned[2] == pytest.approx(2 / 4)  # nothing was learned behind a wrong token


def llm(checkpoint: Path, folder: Path) -> LLM:
    config = {"method": "rest", "datastore": str(folder), "adaptive": False}
    return LLM(checkpoint, speculative_config=config, dtype="float32")


def test_a_foreign_or_damaged_datastore_is_refused_before_the_first_token(checkpoint: Path, tmp_path: Path) -> None:
    write([[1, 2, 3]], TINY, tmp_path / "foreign")
    with pytest.raises(VocabularyMismatchError, match="tokenizer of 'tiny'"):
        llm(checkpoint, tmp_path / "foreign")
    with pytest.raises(DataError, match="is not a datastore"):
        llm(checkpoint, tmp_path / "none")
    (tmp_path / "foreign" / "tokens.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"tokens\.bin holds 0 bytes"):
        llm(checkpoint, tmp_path / "foreign")
