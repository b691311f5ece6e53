"""forerun's plug-in on SGLang's own registry, worker and tree links; no kernel runs, a table stands for the target."""

from __future__ import annotations

import copy
import random
from array import array
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt import plugins
from sglang.srt.arg_groups.overrides import record_foreign_defaults
from sglang.srt.speculative import ngram_worker
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from forerun.core.tree import TokenTree
from forerun.deploy.engines.sglang import VARIABLE
from forerun.deploy.sglang import ForerunAlgorithm
from forerun.deploy.sglang_worker import ForerunWorker, NoCorpus, pad_tree
from forerun.errors import ArgumentError

NODES, VOCABULARY = 8, 40


@pytest.fixture(scope="module")
def algorithm() -> ForerunAlgorithm:
    """Found as SGLang finds it: by the entry point of the installed package."""
    plugins.load_plugins()
    found = SpeculativeAlgorithm.from_string("forerun")
    assert isinstance(found, ForerunAlgorithm)
    return found


class TestAlgorithm:
    def test_it_answers_whatever_sglang_asks_of_its_own(self, algorithm: ForerunAlgorithm) -> None:
        own = [name for name, value in vars(SpeculativeAlgorithm).items() if callable(value) and name[0] != "_"]
        missing = [name for name in own if not hasattr(algorithm, name)]
        assert {"is_ngram", "create_future_map", "need_topk"} <= set(own) and not missing

    def test_it_is_ngram_in_every_predicate(self, algorithm: ForerunAlgorithm) -> None:
        for name in vars(SpeculativeAlgorithm):
            if name.startswith(("is_", "supports_", "has_", "need_", "carries_")):
                assert getattr(algorithm, name)() == getattr(SpeculativeAlgorithm.NGRAM, name)(), name

    def test_a_copy_is_itself(self, algorithm: ForerunAlgorithm) -> None:
        for one in (copy.copy(algorithm), copy.deepcopy(algorithm)):
            assert isinstance(one, ForerunAlgorithm) and one.name == "FORERUN"

    def test_its_worker_is_sglangs_with_other_drafts(self, algorithm: ForerunAlgorithm) -> None:
        worker = algorithm.create_worker(SimpleNamespace(disable_overlap_schedule=False))
        assert worker is ForerunWorker and issubclass(worker, ngram_worker.NGRAMWorker)

    def arguments(self, **given: Any) -> SimpleNamespace:
        options = {"max_running_requests": None, "enable_mixed_chunk": True, "speculative_num_draft_tokens": None}
        options |= {"speculative_eagle_topk": None, "speculative_num_steps": None, "page_size": 1, "device": "cuda"}
        options |= {"attention_backend": "fa3", "disable_overlap_schedule": False, "enable_dp_attention": False}
        return SimpleNamespace(**options | given)

    def test_what_is_left_open_is_filled_in(self, algorithm: ForerunAlgorithm) -> None:
        arguments = self.arguments()
        record_foreign_defaults(arguments, "test", algorithm.handle_server_args)
        assert arguments.speculative_num_draft_tokens == 16 and arguments.max_running_requests == 48
        assert not arguments.enable_mixed_chunk and not arguments.disable_overlap_schedule
        chosen = self.arguments(speculative_num_draft_tokens=5, max_running_requests=3, device="cpu")
        algorithm.handle_server_args(chosen)
        assert (chosen.speculative_num_draft_tokens, chosen.max_running_requests) == (5, 3)
        assert chosen.disable_overlap_schedule

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            ({"speculative_num_draft_tokens": 1}, "counts the root"),
            ({"page_size": 64}, "--speculative-eagle-topk 1"),
            ({"enable_dp_attention": True}, "enable-dp-attention"),
        ],
    )
    def test_a_server_that_would_draft_wrongly_is_refused(
        self, algorithm: ForerunAlgorithm, given: dict[str, Any], words: str
    ) -> None:
        with pytest.raises(ArgumentError, match=words):
            algorithm.handle_server_args(self.arguments(**given))

    @pytest.mark.parametrize(
        ("config", "words"),
        [
            ('{"method": "eagle3"}', "eagle3 needs the target's states"),
            (
                '{"method": "merge", "drafters": ["suffix", {"method": "draft_model", "model": "x"}]}',
                "draft_model needs",
            ),
            ('{"method": "nonsense"}', "nonsense"),
            ('{"method": "ngram", "frobnicate": 1}', "no option 'frobnicate'"),
            ('{"method": "merge", "drafters": ["suffix", {"method": "ngram", "min_hits": 0}]}', "min_hits"),
            ('{"method": "rest"}', "needs datastore"),
            ('{"method": "auto"}', "name a lookup drafter"),
            ('{"method": "suffix", "adaptive": true}', "leave adaptive out"),
            ('{"method": "suffix"', "is no JSON"),
        ],
    )
    def test_a_configuration_that_nobody_drafts_by_is_refused_before_anything_is_loaded(
        self, algorithm: ForerunAlgorithm, config: str, words: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(VARIABLE, config)
        with pytest.raises(ArgumentError, match=words):
            algorithm.handle_server_args(self.arguments())

    def test_a_configuration_may_say_that_it_is_not_adaptive(
        self, algorithm: ForerunAlgorithm, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(VARIABLE, '{"method": "suffix", "adaptive": false}')
        algorithm.handle_server_args(self.arguments())

    def test_chains_run_on_larger_pages(self, algorithm: ForerunAlgorithm) -> None:
        algorithm.handle_server_args(self.arguments(page_size=64, speculative_eagle_topk=1))


def worker(monkeypatch: pytest.MonkeyPatch, config: str, *, overlap: bool, width: int = 8) -> Any:
    """A worker as SGLang makes one, short of its target and memory pools."""
    monkeypatch.setenv(VARIABLE, config)
    monkeypatch.setattr(ngram_worker.NGRAMWorker, "__init__", lambda self: None)
    monkeypatch.setattr(ngram_worker.NGRAMWorker, "alloc_memory_pool", lambda self: None)
    made: Any = ForerunWorker()
    made.enable_overlap, made.draft_token_num, made.topk, made.max_batch_size = overlap, NODES, width, 4
    made.model_runner = SimpleNamespace(model_config=SimpleNamespace(vocab_size=VOCABULARY, context_len=4096))
    made._target_worker = SimpleNamespace()
    made.ngram_corpus, made._prev_decode_rids = NoCorpus(), set()
    made.alloc_memory_pool()
    return made


class Request:
    """One that SGLang runs, and what the target says to it: a walk through few states, so that much repeats."""

    def __init__(self, number: int, chance: random.Random) -> None:
        self.rid, self.said = str(number), [chance.randrange(6) for _ in range(120)]
        self.said[60:100] = self.said[10:50]
        self.origin_input_ids_unpadded = array("q", [chance.randrange(6) for _ in range(9)])
        self.output_ids = array("q", self.said[:1])
        self.late: list[int] = []  # Accepted in the step before, where results are taken in a step late

    def next_token(self, answered: int) -> int:
        """What the target says after so many tokens of the answer."""
        return self.said[answered] if answered < len(self.said) else VOCABULARY - 1


def accepted(
    tokens: Sequence[int], links: tuple[Sequence[int], Sequence[int]], request: Request, done: int
) -> list[int]:
    """SGLang's greedy walk through a tree by its links: what it accepts, and the target's own token behind that."""
    following, sibling = links
    node, found = 0, list[int]()
    while True:
        wanted = request.next_token(done + len(found))
        child = following[node]
        while child != -1 and tokens[child] != wanted:
            child = sibling[child]
        found.append(wanted)
        if child == -1:
            return found
        node = child


def run(made: Any, requests: list[Request], *, overlap: bool) -> Iterator[tuple[int, int]]:
    """Steps of a batch until all answers are whole: (tokens accepted, requests), step by step."""
    running = list(requests)
    while running:
        stride = np.zeros((len(running), NODES), np.int64)
        for row, request in zip(stride, running, strict=True):
            row[: len(request.late)] = request.late
        spec = SimpleNamespace(
            accept_tokens=torch.from_numpy(stride.reshape(-1)),
            accept_lens=torch.tensor([len(request.late) for request in running], dtype=torch.int32),
        )
        batch = SimpleNamespace(reqs=running, spec_info=spec, grammar_needs_sync=lambda: False)
        tokens, mask = made._prepare_draft_tokens(batch)
        assert tokens.shape == (len(running) * NODES,) and mask.shape == (len(running) * NODES**2,)
        following, sibling = ngram_worker._derive_tree_links(mask, len(running), NODES)
        gained = 0
        for index, request in enumerate(running):
            own = tokens.reshape(-1, NODES)[index].tolist()
            done = len(request.output_ids) + len(request.late)
            whole = [*request.output_ids, *request.late]
            assert own[0] == whole[-1], "the root is the last token"
            found = accepted(own, (following[index].tolist(), sibling[index].tolist()), request, done)
            request.output_ids.extend(request.late)
            request.late = found if overlap else []
            request.output_ids.extend([] if overlap else found)
            gained += len(found)
        yield gained, len(running)
        running = [one for one in running if len(one.output_ids) + len(one.late) < len(one.said)]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "config", ['{"method": "suffix"}', '{"method": "merge", "drafters": ["suffix", "ngram"]}', '{"method": "ngram"}']
)
def test_answers_are_the_targets_and_much_of_them_is_drafted(
    monkeypatch: pytest.MonkeyPatch, config: str, overlap: bool
) -> None:
    chance = random.Random(3)
    requests = [Request(number, chance) for number in range(4)]
    made = worker(monkeypatch, config, overlap=overlap)
    steps = list(run(made, requests, overlap=overlap))
    for request in requests:
        whole = [*request.output_ids, *request.late]
        assert whole[: len(request.said)] == request.said
    tokens, rows = (sum(column) for column in zip(*steps, strict=True))
    assert tokens / rows > 1.5, "what repeats is drafted"


def test_both_schedules_draft_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for overlap in (False, True):
        made = worker(monkeypatch, '{"method": "suffix"}', overlap=overlap)
        chance = random.Random(5)
        found.append([one for one, _ in run(made, [Request(number, chance) for number in range(3)], overlap=overlap)])
    assert found[0] == found[1]


def test_chains_where_only_chains_are_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    made = worker(monkeypatch, '{"method": "merge", "drafters": ["suffix", "ngram"]}', overlap=False, width=1)
    for text in ([1, 2, 3, 1, 2, 4, 1, 2], [7, 8, 7, 8]):
        (tree,) = made.sequences.trees(np.array([text], np.int32), np.array([len(text)]), np.array([NODES - 1]))
        assert list(tree.parents) == list(range(-1, tree.size)) and tree.size


@pytest.mark.parametrize("seed", range(20))
def test_a_padded_tree_has_its_own_paths(seed: int) -> None:
    chance, tree = random.Random(seed), TokenTree(7)
    for token in range(10, 10 + seed % NODES):
        tree.add(token, chance.randrange(len(tree.tokens)))
    tokens, mask = pad_tree(tree, NODES)
    for node in range(tree.size + 1):
        assert np.flatnonzero(mask.reshape(NODES, NODES)[node]).tolist() == [0, *tree.path(node)]
    assert tokens[: tree.size + 1].tolist() == list(tree.tokens) and set(tokens[tree.size + 1 :].tolist()) <= {7}


def test_a_flushed_cache_and_a_corpus_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    made = worker(monkeypatch, '{"method": "suffix"}', overlap=False)
    made.sequences.trees(np.array([[1, 2, 1, 2]], np.int32), np.array([4]), np.array([3]))
    made.clear_cache_pool()
    assert not made.sequences._rows and not made.sequences.drafters[0].drafter._texts
    with pytest.raises(ArgumentError, match="datastore build"):
        made.add_external_corpus("mine", [[1, 2]])
