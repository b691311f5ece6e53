"""A drafter behind an engine that moves rows about and tells no ids: the same drafts as if each request were alone."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from forerun.core.tree import TokenTree
from forerun.deploy import COPYING, vllm
from forerun.deploy.sequences import Sequences, best_path
from forerun.drafters import DRAFTERS
from forerun.errors import ArgumentError

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
SLOTS = 400


def sequences(config: dict[str, Any] | None = None, rows: int = 6) -> Sequences:
    return Sequences(NGRAM if config is None else config, vocab_size=50, rows=rows, slots=SLOTS)


def array(tokens: Sequence[int]) -> NDArray[np.int32]:
    return np.array(tokens, np.int32)


class Engine:
    """Requests whose texts grow, in rows that are swapped, filled up and emptied."""

    def __init__(self, rows: int, chance: random.Random) -> None:
        self.chance, self.rows = chance, rows
        self.running: list[list[int]] = []
        self.preempted: list[list[int]] = []
        self.table = np.zeros((rows, SLOTS), np.int32)

    def step(self) -> None:
        """One of everything that a scheduler does."""
        chance = self.chance
        for text in self.running:
            text += [chance.randrange(5) for _ in range(chance.choice((0, 1, 1, 2, 5)))]
        if len(self.running) > 1 and chance.random() < 0.4:
            one, other = chance.sample(range(len(self.running)), 2)
            self.running[one], self.running[other] = self.running[other], self.running[one]
        if self.running and chance.random() < 0.2:
            gone = self.running.pop(chance.randrange(len(self.running)))
            if chance.random() < 0.5:
                self.preempted.append(gone)
        if self.preempted and len(self.running) < self.rows and chance.random() < 0.5:
            self.running.insert(0, self.preempted.pop())
        if len(self.running) < self.rows and chance.random() < 0.5:
            prompt = [1, 2, 3, 1, 2] if chance.random() < 0.5 else [chance.randrange(5) for _ in range(7)]
            self.running.append(prompt)

    def texts(self) -> list[NDArray[np.int32]]:
        """Views into one table, as vLLM hands them over: what is behind a text belongs to who was there before."""
        for row, text in enumerate(self.running):
            self.table[row, : len(text)] = text
        return [self.table[row, : len(text)] for row, text in enumerate(self.running)]


@pytest.mark.parametrize("seed", range(4))
def test_drafts_are_those_of_each_request_alone(seed: int) -> None:
    engine, shared = Engine(5, random.Random(seed)), sequences(rows=5)
    drafted = moved = 0
    for _ in range(300):
        engine.step()
        texts = engine.texts()
        trees = shared.draft(texts, [4] * len(texts))
        for text, tree in zip(texts, trees, strict=True):
            alone = sequences(rows=1)
            (expected,) = alone.draft([text], [4])
            assert (tree.tokens, tree.parents) == (expected.tokens, expected.parents)
            drafted += tree.size
        moved += bool(engine.preempted)
        if max(map(len, engine.running), default=0) > SLOTS - 10:
            break
    assert drafted > 500 and moved


def test_only_what_is_new_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    shared, read = sequences(), list[tuple[int, int]]()
    extend = shared.drafter.extend
    monkeypatch.setattr(
        shared.drafter,
        "extend",
        lambda context: (read.extend(zip(context.rows, context.fresh, strict=True)), extend(context)),
    )
    one, two = [1, 2, 3, 1, 2], [4, 4, 4]
    shared.draft([array(one), array(two)], [1, 1])
    rows = [row for row, _ in read]
    assert [fresh for _, fresh in read] == [5, 3]
    read.clear()
    shared.draft([array([*two, 4]), array([*one, 3, 1])], [1, 1])
    assert read == [(rows[1], 1), (rows[0], 2)], "swapped, and still themselves"
    read.clear()
    shared.draft([array([*one, 3, 1])], [1])
    assert read == [], "the other one ended, and nothing is new"
    shared.draft([array([*one, 3, 1]), array([*two, 4])], [1, 1])
    assert [fresh for _, fresh in read] == [4], "whoever comes back is read again"


def test_what_ended_is_forgotten() -> None:
    shared = sequences(rows=2)
    for number in range(50):
        shared.draft([array([number % 50, 1, 2]), array([number % 50, 1, 2])], [2, 2])
    assert len(shared.drafter.drafter._rows) == 2  # type: ignore[attr-defined]
    shared.draft([], [])
    assert not shared.drafter.drafter._rows  # type: ignore[attr-defined]


def test_suffix_remembers_answers_that_ended() -> None:
    shared = sequences({"method": "suffix"})
    answer = [7, 8, 9, 10, 11, 12]
    for length in range(3, 3 + len(answer)):
        shared.draft([array([1, 2, 3, *answer][: length + 1])], [0])
    shared.draft([], [])
    (tree,) = shared.draft([array([4, 5, 7, 8])], [3])
    assert best_path(tree)[:2] == [9, 10]


def test_a_row_that_asks_for_nothing_gets_nothing() -> None:
    trees = sequences().draft([array([1, 2, 1, 2, 1]), array([1, 2, 1, 2, 1])], [0, 3])
    assert [tree.size for tree in trees] == [0, 3]


@pytest.mark.parametrize("seed", range(5))
def test_the_best_path_has_the_largest_sum_of_survivals(seed: int) -> None:
    chance, tree = random.Random(seed), TokenTree(0)
    for token in range(1, 12):
        tree.add(token, chance.randrange(len(tree.tokens)), confidence=chance.random())
    survival = tree.survival()
    paths = [[node for node in tree.path(leaf) if node] for leaf in range(len(tree.tokens))]
    best = max(sum(survival[node] for node in path) for path in paths)
    found = [tree.tokens.index(token) for token in best_path(tree)]
    assert found in paths and sum(survival[node] for node in found) == pytest.approx(best)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"method": "eagle3", "model": "x"}, "states"),
        ({"method": "recycling"}, "states"),
        ({"method": "merge", "drafters": ["suffix", {"method": "draft_model", "model": "x"}]}, "draft_model"),
        ({"method": "ngram", "frobnicate": 1}, "frobnicate"),
    ],
)
def test_a_drafter_that_needs_the_target_is_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        sequences(config)


def test_every_drafter_that_copies_can_be_asked_for() -> None:
    assert set(COPYING) < set(DRAFTERS)
    given = {"prediction": {"text": [1, 2, 3]}, "first_of": {"drafters": ["suffix", "ngram"]}}
    given["merge"] = given["first_of"]
    for method in COPYING:
        if method != "rest":  # which wants a corpus
            (tree,) = sequences({"method": method, **given.get(method, {})}).draft([array([1, 2, 3, 1, 2])], [3])
            assert tree.size <= 3


def proposer(
    monkeypatch: pytest.MonkeyPatch, given: str | None = None, tokens: int = 4, **scheduler: Any
) -> vllm.ForerunProposer:
    monkeypatch.setattr(vllm, "_tokenizer", lambda _: None)
    monkeypatch.delenv(vllm.VARIABLE, raising=False)
    if given is not None:
        monkeypatch.setenv(vllm.VARIABLE, given)
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=tokens),
        scheduler_config=SimpleNamespace(max_num_seqs=4, **scheduler),
        model_config=SimpleNamespace(max_model_len=12, get_vocab_size=lambda: 50),
    )
    return vllm.ForerunProposer(config)


def proposed(
    made: vllm.ForerunProposer, texts: Sequence[Sequence[int]], sampled: Sequence[Sequence[int]]
) -> list[list[int]]:
    table = np.full((4, 12), 49, np.int32)
    for row, text in enumerate(texts):
        table[row, : len(text)] = text
    return made.propose(sampled, array([len(text) for text in texts] + [0] * (4 - len(texts))), table)


class TestVllm:
    REPEATS = (1, 2, 3, 1, 2, 3, 1)

    def test_rows_align_and_a_prompt_that_is_not_read_gets_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made = proposer(monkeypatch, '{"method": "ngram"}')
        made.load_model(object())
        assert proposed(made, [self.REPEATS, self.REPEATS, (9, 8)], [[1], [], [8]]) == [[2, 3, 1, 2], [], []]

    def test_drafts_end_where_the_context_does(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made = proposer(monkeypatch, '{"method": "ngram"}')
        long = list(itertools.islice(itertools.cycle((1, 2, 3)), 10))
        assert [len(one) for one in proposed(made, [long, [*long, 2, 3]], [[1], [3]])] == [2, 0]

    def test_the_schedule_says_how_much_at_which_batch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made = proposer(monkeypatch, '{"method": "ngram", "schedule": [[1, 1, 3], [2, 2, 1], [3, 64, 0]]}')
        for rows, most in ((1, 3), (2, 1), (3, 0)):
            drafts = proposed(made, [self.REPEATS] * rows, [[1]] * rows)
            assert [len(one) for one in drafts] == [most] * rows
        assert made.tokens_at(100) == 4, "beyond the table the configuration's own"
        waiting = proposed(made, [self.REPEATS] * 3, [[1], [], []])
        assert [len(one) for one in waiting] == [3, 0, 0], "prompts that are being read are no part of the batch"

    def test_the_configuration_is_json_or_a_file(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
        (tmp_path / "c.json").write_text('{"method": "merge", "drafters": ["suffix", "ngram"]}')
        assert proposer(monkeypatch).sequences.drafter.method == "suffix"
        assert proposer(monkeypatch, str(tmp_path / "c.json")).sequences.drafter.method == "merge"

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            ("[1]", "neither"),
            ("{broken", "no JSON"),
            ("/nowhere.json", "neither a JSON object nor a file"),
            ('{"method": "eagle3"}', "not 'eagle3'"),
            ('{"method": "suffix", "typo": 1}', "typo"),
            ('{"schedule": [[1, 2]]}', "whole numbers"),
            ('{"schedule": 3}', "whole numbers"),
        ],
    )
    def test_what_cannot_be_meant_is_refused(self, monkeypatch: pytest.MonkeyPatch, given: str, words: str) -> None:
        with pytest.raises(ArgumentError, match=words):
            proposer(monkeypatch, given)

    def test_asynchronous_scheduling_is_refused_with_what_to_do(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ArgumentError, match="--no-async-scheduling"):
            proposer(monkeypatch, async_scheduling=True)
