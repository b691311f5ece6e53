"""A drafter behind an engine that moves rows about and tells no ids: the same drafts as if each request were alone."""

import importlib
import itertools
import json
import random
import sys
from collections.abc import Iterator, Sequence
from statistics import fmean
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from examples.stand_ins import llama_cpp
from forerun.core.tree import TokenTree
from forerun.deploy import COPYING, vllm
from forerun.deploy.sequences import Sequences
from forerun.drafters import DRAFTERS
from forerun.errors import ArgumentError

PLAIN = {"follow_edits": False, "min_token_prob": 0.0}  # Then drafts are the same whatever was drafted before
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False, **PLAIN}
MERGED = {"method": "merge", "drafters": ["suffix", "ngram"]}
OWN = {"method": "deploy.own_drafter:Periodic"}
SLOTS = 400


def sequences(config: dict[str, Any] | None = None, rows: int = 6, **options: Any) -> Sequences:
    given = {"vocab_size": 50, "rows": rows, "slots": SLOTS, "nodes": 8} | options
    return Sequences(NGRAM if config is None else config, **given)


def treed(made: Sequences, texts: Sequence[NDArray[np.int32]], most: Sequence[int]) -> list[TokenTree]:
    """Drafts for rows of an engine's table."""
    return made.trees(*table_of(texts), np.array(most, np.int64))


def chained(made: Sequences, texts: Sequence[NDArray[np.int32]], most: Sequence[int]) -> list[list[int]]:
    return made.chains(*table_of(texts), np.array(most, np.int64))


def table_of(texts: Sequence[NDArray[np.int32]]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    table = np.full((len(texts), 4000), 49, np.int32)
    for row, text in zip(table, texts, strict=True):
        row[: len(text)] = text
    return table, array([len(text) for text in texts])


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


ALONE = [
    NGRAM,
    {**NGRAM, "match": "most_frequent", "max_branches": 3},  # a tree, whose best path is taken
    {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False},
    {"method": "suffix", "max_cached_requests": 0, "adaptive": False},
    {"method": "first_of", "drafters": ["ngram", {"method": "suffix", "max_cached_requests": 0}], "adaptive": False},
]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("config", ALONE, ids=["ngram", "branches", "following", "suffix", "first of"])
def test_drafts_are_those_of_each_request_alone(config: dict[str, Any], seed: int) -> None:
    """As trees, and as chains, for which two of these have compiled code that sees to all rows at once."""
    engine = Engine(5, random.Random(seed))
    in_trees, in_chains = sequences(config, rows=5), sequences(config, rows=5)
    drafted = moved = 0
    for _ in range(150):
        engine.step()
        texts, most = engine.texts(), [engine.chance.choice((0, 2, 4, 4)) for _ in engine.running]
        found = zip(texts, most, treed(in_trees, texts, most), chained(in_chains, texts, most), strict=True)
        for text, limit, tree, chain in found:
            assert chain == list(tree.tokens[1:]) and len(chain) <= limit
            if config.get("follow_edits") is False:  # The others go by what they learned before, too
                (expected,) = treed(sequences(config, rows=1), [text], [limit])
                assert (tree.tokens, tree.parents) == (expected.tokens, expected.parents)
            drafted += len(chain)
        moved += bool(engine.preempted)
        if max(map(len, engine.running), default=0) > SLOTS - 10:
            break
    assert drafted > 200 and moved


@pytest.mark.parametrize("method", ["ngram", "suffix"])
@pytest.mark.parametrize("failing", ["begin", "_step", "_new_text"])
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_whatever_fails_costs_drafts_and_no_more(
    method: str, failing: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, rows = sequences({"method": method, "adaptive": False}), [[1, 2, 3, 4, 1, 2], [5, 6, 7, 5, 6]]
    assert chained(made, [array(rows[0])], [2]) == [[3, 4]]

    def broken(*_: object) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(made.drafters[0].drafter, failing, broken)
        if error is MemoryError:
            assert chained(made, [array(row) for row in rows], [2, 2]) == [[], []]
        else:
            with pytest.raises(KeyboardInterrupt):
                chained(made, [array(row) for row in rows], [2, 2])
    assert chained(made, [array([*row, row[2]]) for row in rows], [1, 1]) == [[4], [5]], "all is read again"


@pytest.mark.parametrize("config", [{"method": "suffix"}, MERGED, {**MERGED, "adaptive": False}, OWN], ids=str)
@pytest.mark.parametrize("failing", ["_recognise_rows", "_draft_trees", "_learn"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_whatever_fails_in_a_step_of_trees_costs_drafts_and_no_more(
    config: dict[str, Any], failing: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody in the other engine expects a drafter to raise: it would end all of its requests."""
    now, text = [0.0], [index % 7 for index in range(30)]
    made = sequences(config, clock=lambda: now[0])

    def drafted(steps: int) -> int:
        found = 0
        for _ in range(steps):
            now[0] += 10e-3
            (tree,) = treed(made, [array(text)], [6])
            assert tree.tokens[0] == text[-1]
            right = [(text[-1] + 1 + index) % 7 for index in range(tree.size)]
            assert list(tree.tokens[1:]) == right
            text.extend([*right, (text[-1] + 1 + len(right)) % 7])
            found += tree.size
        return found

    def broken(*_: object) -> None:
        raise error

    assert drafted(12) > 0
    with monkeypatch.context() as patched:
        patched.setattr(made, failing, broken)
        if error is ValueError:
            assert drafted(2) == 0 or failing == "_learn"
        elif failing != "_learn" or config.get("adaptive", True):
            with pytest.raises(KeyboardInterrupt):
                drafted(1)
    assert drafted(12) > 0


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_what_is_no_token_is_not_drafted(method: str) -> None:
    """vLLM has placeholders for pictures among the tokens; its vocabulary has 50 here."""
    made = sequences({"method": method, "adaptive": False})
    assert chained(made, [array([1, 2, 3, -1, 4, 1, 2]), array([1, 2, 50, 4, 1, 2])], [4, 4]) == [[3], []]


def test_other_numbers_and_layouts_are_taken() -> None:
    made, table = sequences(), np.asfortranarray([[1, 2, 3, 4, 1, 2, 0], [5, 6, 5, 0, 0, 0, 0]], np.int64)
    table.setflags(write=False)
    assert made.chains(table, np.array([6, 0, 3, 0])[::2], np.array([2, 2])) == [[3, 4], [6, 5]]


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_an_engine_may_change_between_trees_and_chains(method: str) -> None:
    made, text = sequences({"method": method, "adaptive": False}), [1, 2, 3, 4, 1, 2]
    for ask in (chained, treed, chained, treed):
        (found,) = ask(made, [array(text)], [2])
        tokens = list(found) if isinstance(found, list) else list(found.tokens[1:])
        assert tokens == [3, 4]
        text += [3, 4, 1, 2]
    made.clear()
    assert not made.drafters[0].drafter._texts


def test_only_what_is_new_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    shared, read = sequences(), list[tuple[int, int]]()
    extend = shared.drafters[0].extend

    def noted(context: Any) -> None:
        read.extend(zip(context.rows, context.fresh, strict=True))
        extend(context)

    monkeypatch.setattr(shared.drafters[0], "extend", noted)
    one, two = [1, 2, 3, 1, 2], [4, 4, 4]
    treed(shared, [array(one), array(two)], [1, 1])
    rows = [row for row, _ in read]
    assert [fresh for _, fresh in read] == [5, 3]
    read.clear()
    treed(shared, [array([*two, 4]), array([*one, 3, 1])], [1, 1])
    assert read == [(rows[1], 1), (rows[0], 2)], "swapped, and still themselves"
    read.clear()
    treed(shared, [array([*one, 3, 1])], [1])
    assert read == [], "the other one ended, and nothing is new"
    treed(shared, [array([*one, 3, 1]), array([*two, 4])], [1, 1])
    assert [fresh for _, fresh in read] == [4], "whoever comes back is read again"


def test_what_ended_is_forgotten() -> None:
    shared = sequences(rows=2)
    for number in range(50):
        treed(shared, [array([number % 50, 1, 2]), array([number % 50, 1, 2])], [2, 2])
    assert len(shared.drafters[0].drafter._texts) == 2
    treed(shared, [], [])
    assert not shared.drafters[0].drafter._texts


def test_suffix_remembers_answers_that_ended() -> None:
    shared = sequences({"method": "suffix", "adaptive": False})
    answer = [7, 8, 9, 10, 11, 12]
    for length in range(3, 3 + len(answer)):
        treed(shared, [array([1, 2, 3, *answer][: length + 1])], [0])
    treed(shared, [], [])
    (tree,) = treed(shared, [array([4, 5, 7, 8])], [3])
    assert tree.tokens[1:3] == (9, 10)


def test_a_row_that_asks_for_nothing_gets_nothing() -> None:
    trees = treed(sequences(), [array([1, 2, 1, 2, 1]), array([1, 2, 1, 2, 1])], [0, 3])
    assert [tree.size for tree in trees] == [0, 3]


@pytest.mark.parametrize("seed", range(5))
def test_the_best_path_has_the_largest_sum_of_survivals(seed: int) -> None:
    chance, tree = random.Random(seed), TokenTree(0)
    for token in range(1, 12):
        tree.add(token, chance.randrange(len(tree.tokens)), confidence=chance.random())
    survival = tree.survival()
    paths = [tree.path(leaf) for leaf in range(len(tree.tokens))]
    best = max(sum(survival[node] for node in path) for path in paths)
    found = tree.best_path()
    assert found in paths and sum(survival[node] for node in found) == pytest.approx(best)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"method": "eagle3", "model": "x"}, "states"),
        ({"method": "recycling"}, "states"),
        ({"method": "merge", "drafters": ["suffix", {"method": "draft_model", "model": "x"}]}, "draft_model"),
        ({"method": "ngram", "frobnicate": 1}, "frobnicate"),
        ({"method": "merge", "drafters": ["suffix", {"method": "ngram", "frobnicate": 1}]}, "frobnicate"),
        ({"method": "auto", "drafters": [{"method": "ngram", "frobnicate": 1}]}, "frobnicate"),
        ({"method": "deploy.own_drafter:Learning"}, "Learning needs.*states"),
        ({"method": "merge", "drafters": ["suffix", "deploy.own_drafter:Reading"]}, "Reading needs.*states"),
        ({"method": "deploy.own_drafter:Nothing"}, "cannot be imported"),
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
            (tree,) = treed(sequences({"method": method, **given.get(method, {})}), [array([1, 2, 3, 1, 2])], [3])
            assert tree.size <= 3


def by_chance(symbols: int, seed: int) -> Iterator[int]:
    chance = random.Random(seed)
    while True:
        yield chance.randrange(symbols)


class TestAdaptive:
    """How much is drafted follows from what the steps take, seen from outside."""

    EVERY: ClassVar[list[dict[str, Any]]] = [
        {"method": "ngram"},
        {"method": "suffix"},
        {"method": "prediction", "text": list(range(7)) * 200},
        MERGED,
        {"method": "first_of", "drafters": ["suffix", "ngram"]},
        OWN,
        {"method": "merge", "drafters": ["ngram", OWN]},
        {"method": "auto"},
        {"method": "auto", "drafters": ["deploy.own_drafter:Periodic"]},
    ]

    @staticmethod
    def late(node_ms: float, text: Iterator[int], config: dict[str, Any] | None = None) -> tuple[float, float]:
        """Tokens drafted and accepted a step, after some, where a pass takes 10 ms and `node_ms` for each more."""
        now, sizes, gains = [0.0], list[int](), list[int]()
        made = sequences(config or {"method": "suffix"}, slots=4000, clock=lambda: now[0])
        known = [next(text) for _ in range(40)]
        for _ in range(150):
            (tree,) = treed(made, [array(known)], [8])
            draft, accepted = list(tree.tokens[1:]), 0
            now[0] += 1e-3 * (10 + node_ms * len(draft))
            known.append(next(text))
            for token in draft:
                if token != known[-1]:
                    break
                accepted += 1
                known.append(next(text))
            sizes.append(len(draft))
            gains.append(accepted)
        return sum(sizes[50:]) / 100, sum(gains[50:]) / 100

    @pytest.mark.parametrize("config", EVERY, ids=str)
    def test_what_repeats_is_drafted_where_that_is_cheap(self, config: dict[str, Any]) -> None:
        drafted, accepted = self.late(0.2, itertools.cycle(range(7)), config)
        assert drafted > 7 and accepted == drafted

    @pytest.mark.parametrize("config", EVERY, ids=str)
    def test_nothing_is_drafted_where_a_node_costs_a_pass(self, config: dict[str, Any]) -> None:
        drafted, _ = self.late(11.0, itertools.cycle(range(7)), config)
        assert drafted < 0.5

    def test_nothing_is_drafted_where_nothing_repeats_for_long(self) -> None:
        for symbols in (16, 64):
            drafted, _ = self.late(3.0, by_chance(symbols, 1))
            assert drafted < 0.2

    @pytest.mark.parametrize("node_ms", [1.0, 2.0, 3.0, 6.0])
    def test_what_repeats_by_chance_costs_little(self, node_ms: float) -> None:
        """One token in four is right: a node of 2.5 ms would repay itself."""
        found = [self.late(node_ms, by_chance(4, seed)) for seed in range(8)]
        gains = [10 * (1 + accepted) / (10 + node_ms * drafted) for drafted, accepted in found]
        assert fmean(gains) > (1.08 if node_ms == 1.0 else 0.93) and min(gains) > 0.85

    def test_auto_asks_what_copies_and_ngram_where_it_is_named(self) -> None:
        assert [one.method for one in sequences({"method": "auto"}).drafters] == ["suffix", "prediction"]
        named = sequences({"method": "auto", "drafters": ["ngram"]})
        assert [one.method for one in named.drafters] == ["suffix", "prediction", "ngram"]

    @pytest.mark.parametrize(
        ("given", "words"),
        [({"drafters": [{"method": "draft_model", "model": "x"}]}, "draft_model needs"), ({"model": "x"}, "a model")],
    )
    def test_auto_with_a_model_is_refused(self, given: dict[str, Any], words: str) -> None:
        with pytest.raises(ArgumentError, match=words):
            sequences({"method": "auto", **given})

    def test_several_drafters_make_one_chain(self) -> None:
        made = sequences({"method": "merge", "drafters": ["suffix", "ngram"]})
        for _ in range(4):  # the first steps are plain, which is what the others are held against
            (tree,) = treed(made, [array([1, 2, 3, 4, 1, 2, 5, 1, 2])], [8])
        assert list(tree.parents) == list(range(-1, tree.size))

    @pytest.mark.parametrize("config", EVERY, ids=str)
    def test_rows_come_and_go(self, config: dict[str, Any]) -> None:
        now, engine, drafted = [0.0], Engine(5, random.Random(7)), 0
        shared = sequences(config, rows=5, clock=lambda: now[0])
        for _ in range(250):
            now[0] += 10e-3
            engine.step()
            texts = engine.texts()
            trees = treed(shared, texts, [engine.chance.choice((0, 3, 6)) for _ in texts])
            assert [tree.tokens[0] for tree in trees] == [text[-1] for text in texts]
            drafted += sum(tree.size for tree in trees)
            if max(map(len, engine.running), default=0) > SLOTS - 10:
                break
        assert drafted > 50


def test_a_draft_model_for_llama_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own classes; what llama-cpp-python makes of it `make test-llama` tells."""
    for name, module in llama_cpp().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "forerun.deploy.llama_cpp", raising=False)
    module = importlib.import_module("forerun.deploy.llama_cpp")
    monkeypatch.setitem(sys.modules, "forerun.deploy.llama_cpp", module)
    draft = module.ForerunDraft({"method": "ngram", "num_speculative_tokens": 3, "adaptive": False})
    text = np.array([1, 2, 3, 4, 1, 2], np.intc)
    assert draft(text).tolist() == [3, 4, 1] and draft(text).dtype == np.intc
    assert draft(np.array([9, 8, 7], np.intc)).tolist() == [], "another text, which holds nothing twice"
    assert module.ForerunDraft().most == 16 and module.ForerunDraft('{"method": "auto"}').sequences
    members = [{"method": "ngram", "num_speculative_tokens": 16, "min_token_prob": 0}] * 2
    for own in ({"method": "ngram", "min_token_prob": 0}, {"method": "first_of", "drafters": members}):
        assert len(module.ForerunDraft({"adaptive": False, **own})(np.array([5] * 40, np.intc))) == 16
    with pytest.raises(ArgumentError, match="which a plug-in is not given"):
        module.ForerunDraft({"method": "eagle3", "model": "x"})


@pytest.mark.parametrize("asked", ["chains", "trees"])
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_what_is_cleared_is_forgotten_however_it_was_asked(method: str, asked: str) -> None:
    made = Sequences({"method": method, "adaptive": False}, vocab_size=50, rows=2, slots=50, nodes=4)
    getattr(made, asked)(np.array([[1, 2, 1, 2]], np.int32), np.array([4], np.int32), np.array([3]))
    made.clear()
    assert not made._rows and not made.drafters[0].drafter._texts


def test_llama_cpp_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("llama_cpp", "llama_cpp.llama_speculative"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "forerun.deploy.llama_cpp", raising=False)
    with pytest.raises(ArgumentError, match="pip install llama-cpp-python"):
        importlib.import_module("forerun.deploy.llama_cpp")


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
    """Drafts for requests without hints."""
    return Runner(made, {str(row): (text, None) for row, text in enumerate(texts)}).ask(sampled)


class Runner:
    """Requests with texts and `extra_args`, for which drafts are asked for as vLLM's model runner does."""

    def __init__(self, made: vllm.ForerunProposer, requests: dict[str, tuple[Sequence[int], Any]]) -> None:
        self.made, self.texts = made, [text for text, _ in requests.values()]
        self.input_batch = SimpleNamespace(req_ids=[*requests])
        params = {name: SimpleNamespace(extra_args=given) for name, (_, given) in requests.items()}
        self.requests = {name: SimpleNamespace(sampling_params=one) for name, one in params.items()}

    def ask(self, sampled: Sequence[Sequence[int]]) -> list[list[int]]:
        table = np.full((4, 40), 49, np.int32)
        for row, text in enumerate(self.texts):
            table[row, : len(text)] = text
        lengths = array([len(text) for text in self.texts] + [0] * (4 - len(self.texts)))

        def wrapped() -> list[list[int]]:  # As by a decorator
            return self.made.propose(sampled, lengths, table)

        return wrapped()


def told(made: vllm.ForerunProposer, requests: dict[str, tuple[Sequence[int], Any]]) -> list[list[int]]:
    return Runner(made, requests).ask([[text[-1]] for text, _ in requests.values()])


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
        assert made.tokens_at(100) == 0, "beyond a range as in it, as in vLLM's own table"
        assert proposer(monkeypatch, '{"schedule": [[1, 2, 3], [5, 6, 2]]}').tokens_at(4) == 3
        waiting = proposed(made, [self.REPEATS] * 3, [[1], [], []])
        assert [len(one) for one in waiting] == [3, 0, 0], "prompts that are being read are no part of the batch"

    @pytest.mark.parametrize("method", ["ngram", "suffix", "merge", "first_of"])
    def test_its_own_limit_of_tokens_holds(self, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
        made_of = {"drafters": ["suffix", "ngram"]} if method in ("merge", "first_of") else {}
        made = proposer(monkeypatch, json.dumps({"method": method, "num_speculative_tokens": 2, **made_of}))
        assert [len(one) for one in proposed(made, [self.REPEATS], [[1]])] == [2]

    def test_the_configuration_is_json_or_a_file(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
        (tmp_path / "c.json").write_text('{"method": "merge", "drafters": ["suffix", "ngram"]}')
        assert proposer(monkeypatch).sequences.drafters[0].method == "suffix"
        assert proposer(monkeypatch, str(tmp_path / "c.json")).sequences.drafters[0].method == "merge"

    def test_a_policy_decides_for_auto_and_where_it_is_asked_to(self, monkeypatch: pytest.MonkeyPatch) -> None:
        many = proposer(monkeypatch, '{"method": "auto"}')
        assert [one.method for one in many.sequences.drafters] == ["suffix", "prediction"]
        one = proposer(monkeypatch, '{"method": "ngram", "adaptive": true}')
        for made in (many, one):
            (draft,) = proposed(made, [self.REPEATS], [[1]])
            assert draft in ([], [2], [2, 3], [2, 3, 1], [2, 3, 1, 2])

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            ("[1]", "neither"),
            ("{broken", "no JSON"),
            ("/nowhere.json", "neither a JSON object nor a file"),
            ('{"method": "eagle3"}', "eagle3 needs the target's states"),
            ('{"method": "suffix", "typo": 1}', "typo"),
            ('{"schedule": [[1, 2]]}', "whole numbers"),
            ('{"schedule": 3}', "whole numbers"),
            *[
                (f'{{"schedule": {table}}}', "begin at 1, go up and do not overlap")
                for table in ("[[0, 3, 1]]", "[[2, 3, 1]]", "[[1, 4, 1], [4, 5, 1]]", "[[1, 4, 1], [6, 5, 1]]")
            ],
            ('{"method": "suffix", "rule": "block"}', "its own rule"),
            *[
                (f'{{"method": "merge", "drafters": {bad}}}', "list of names")
                for bad in ("[1, 2]", "5", "null", '"ngram"')
            ],
        ],
    )
    def test_what_cannot_be_meant_is_refused(self, monkeypatch: pytest.MonkeyPatch, given: str, words: str) -> None:
        with pytest.raises(ArgumentError, match=words):
            proposer(monkeypatch, given)

    def test_asynchronous_scheduling_is_refused_with_what_to_do(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ArgumentError, match="--no-async-scheduling"):
            proposer(monkeypatch, async_scheduling=True)


class TestHintsOfRequests:
    """What `extra_args` say in vLLM: predictions, and groups that learn from each other."""

    PREDICTED = '{"method": "prediction", "adaptive": false}'
    TEXT = (7, 8, 9)

    def test_each_has_its_own_prediction(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made = proposer(monkeypatch, self.PREDICTED)
        asked = {
            "a": ((*self.TEXT, 1), {"prediction": [1, 2, 3, 4]}),
            "b": ((*self.TEXT, 1), {"prediction": [1, 5, 6]}),
        }
        asked["c"] = ((*self.TEXT, 1), None)
        assert told(made, asked) == [[2, 3, 4], [5, 6], []]
        moved = {name: asked[name] for name in ("c", "b", "a")}
        assert told(made, moved) == [[], [5, 6], [2, 3, 4]], "the rows hold the same text, and are other requests'"
        assert told(made, {"b": ((*self.TEXT, 1, 5), asked["b"][1])}) == [[6]]
        assert list(made._hints) == ["b"], "the hints of the others went with them"

    @pytest.mark.parametrize("adaptive", ["true", "false"])
    def test_groups_learn_from_their_own(self, monkeypatch: pytest.MonkeyPatch, adaptive: str) -> None:
        made = proposer(monkeypatch, f'{{"method": "suffix", "adaptive": {adaptive}}}')
        answer = (*self.TEXT, 11, 12, 13, 14, 15, 16, 17)
        for end in range(4, len(answer) + 1):
            told(made, {"a": (answer[:end], {"group": "g"})})
        told(made, {"x": ((3,), None)})
        ask = (5, 11, 12, 13)
        for group, learned in (("g", True), ("h", False), (None, False), ("g", True)):
            drafts = told(made, {f"{group}": (ask, {"group": group} if group else None)})
            told(made, {"x": ((3,), None)})
            assert (drafts[0][:2] == [14, 15]) == learned or (adaptive == "true" and not drafts[0])

    @pytest.mark.parametrize("wrong", [{"prediction": [1, 50]}, {"prediction": "text"}, {"prediction": 3}])
    def test_what_cannot_be_read_is_left_out(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wrong: dict[str, Any]
    ) -> None:
        """Raised here, an error would end all requests of the engine."""
        made = proposer(monkeypatch, self.PREDICTED)
        right = ((*self.TEXT, 1), {"prediction": [1, 2, 3]})
        for _ in range(2):
            assert told(made, {"a": ((*self.TEXT, 1), wrong), "b": right}) == [[], [2, 3]]
        assert len([one for one in caplog.records if "is left out" in one.message]) == 1

    def test_nothing_is_drafted_where_the_requests_are_not_found(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Nobody would know which group a text belongs to."""
        made = proposer(monkeypatch, '{"method": "ngram"}')
        repeats = np.array([[1, 2, 1, 2]], np.int32)
        for _ in range(2):
            assert made.propose([[1]], array([4]), repeats) == [[]]
        monkeypatch.setattr(vllm.ForerunProposer, "_read_hints", lambda *_: {}["moved"])
        assert told(made, {"a": (TestVllm.REPEATS, {"group": "g"})}) == [[]]
        (warning,) = [record.message for record in caplog.records if "nothing is drafted" in record.message]
        assert "no caller has an input_batch" in warning
