"""The whole: answers stay the target's while weights change, what was learned is kept, gone on from, and undone."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from adaptation.conftest import pieces
from contract.harness import (
    LEVEL,
    PROMPTS,
    VARIANTS,
    as_prompts,
    draws,
    eagle_head,
    expected,
    model,
    p_value,
    relative,
    sample,
    tokens_of,
    word_tokenizer,
)
from forerun import LLM, SamplingParams
from forerun.checkpoints import HeadCheckpoint, TargetFacts, read_head, write_head
from forerun.core.tree import TokenTree
from forerun.drafters.base import DraftContext, Drafter, DrafterSetup
from forerun.drafters.heads.eagle import EagleConfig, EagleHead
from forerun.engine.adapting import AdaptConfig
from forerun.engine.adapting.adaptation import Background, Snapshots
from forerun.engine.adapting.drafter import AdaptedDrafter
from forerun.engine.adapting.learning import Learner, Throttle
from forerun.engine.adapting.replay import Collector, ReplayBuffer
from forerun.engine.config import SpeculativeConfig
from forerun.engine.costs import Nominal
from forerun.engine.drafting import DrafterPool
from forerun.model import Target
from forerun.model.kernels.packing import Weights, exchange, ready
from forerun.types import LAST_HIDDEN, Budget
from selection import slow

LAST = frozenset({LAST_HIDDEN})
WORDS = ["the cat", "the dog sat on", "a log and", "mat mat mat", "on the", "dog"]


class Fickle(AdaptedDrafter):
    """Takes other weights before every proposal."""

    other: Weights | None = None

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        assert self.other is not None
        if self.settled:
            self.offer(self.other)
        trees = super().propose(context, budget)
        assert self._former is not None
        self.other = self._former
        self.watch.rolled_back()  # nothing is watched: the weights shall go on changing
        return trees


def engine(drafts: Any, cls: type[AdaptedDrafter], *, rows: int = 8, **options: Any) -> tuple[LLM, AdaptedDrafter]:
    """The tiny target with a drafter that adapts, but for the thread."""
    config = {"method": "draft_model", "model": drafts, "num_speculative_tokens": 3, "adaptive": False, **options}
    llm = LLM(
        model(),
        tokenizer=False,
        speculative_config=config,
        max_num_seqs=rows,
        max_model_len=64,
        self_check=False,
    )
    made = list[AdaptedDrafter]()

    def around(drafter: Drafter) -> Drafter:
        collector = Collector(ReplayBuffer(2**20), boundaries=LAST, context=False, held_every=8)
        made.append(cls(drafter, collector, Throttle(1.0, threading.Event())))
        return made[0]

    llm.engine.drafting.wrap(llm.engine.drafting.ensure(llm.speculative) or "", around)
    return llm, made[0]


@pytest.mark.parametrize(
    ("label", "detect", "swaps"),
    [("tree", 0.4, 5), *slow(("chain", 0.2, 20), ("tree", 0.2, 20), ("greedy-k-tree", 0.2, 20))],
)
def test_the_distribution_holds_while_weights_change_at_every_step(label: str, detect: float, swaps: int) -> None:
    options = next(one for one in VARIANTS["draft_model"] if one.label == label).options
    mine = copy.deepcopy(relative())
    llm, drafter = engine(mine, Fickle, rows=64, **{**options, "model": mine})
    assert isinstance(drafter, Fickle)
    drafter.other = ready(mine, copy.deepcopy(relative(0.3)).state_dict())
    assert p_value(sample(llm, draws(detect)), expected()) > LEVEL
    assert drafter.swaps > swaps


def test_greedy_answers_are_equal_while_weights_change() -> None:
    mine = copy.deepcopy(relative())
    llm, drafter = engine(mine, Fickle)
    assert isinstance(drafter, Fickle)
    drafter.other = ready(mine, copy.deepcopy(relative(0.3)).state_dict())
    params = SamplingParams(temperature=0, max_tokens=40)
    plain = llm.generate(as_prompts(PROMPTS), params, speculative=False)
    assert tokens_of(llm.generate(as_prompts(PROMPTS), params)) == tokens_of(plain)
    assert drafter.swaps > 10


@pytest.mark.slow
def test_weights_that_draft_worse_go_again() -> None:
    mine = copy.deepcopy(relative())
    llm, drafter = engine(mine, AdaptedDrafter)
    before = copy.deepcopy(mine.state_dict())
    params = [SamplingParams(temperature=0.9, max_tokens=40, seed=seed) for seed in range(40)]

    def answer() -> list[list[int]]:
        return tokens_of(llm.generate(as_prompts(PROMPTS * 8), params))

    while drafter.watch._verified < 1500:
        answer()
    good = drafter.watch.acceptance
    bad = {name: torch.randn_like(value) for name, value in before.items()}
    drafter.offer(ready(mine, bad))
    answer()
    assert drafter.swaps == 1 and drafter.rollbacks == 1 and drafter.settled
    assert all(torch.equal(value, before[name]) for name, value in mine.state_dict().items())
    for _ in range(3):
        answer()
    assert drafter.watch.acceptance == pytest.approx(good, abs=0.08) and drafter.rollbacks == 1


class Prompt(AdaptedDrafter):
    """Takes what it is offered at once."""

    def offer(self, weights: Weights) -> None:
        super().offer(weights)
        self._take(weights)


def background(folder: Path, drafts: LlamaForCausalLM) -> tuple[Background, Prompt, ReplayBuffer]:
    config, ending = AdaptConfig(learning_rate=3e-3, fresh_pieces=8, round_pieces=16), threading.Event()
    buffer, throttle = ReplayBuffer(2**20), Throttle(1.0, ending)
    drafter = Prompt(Drafter(), Collector(buffer, boundaries=LAST, context=False, held_every=8), throttle)
    snapshots = Snapshots(folder, Target(model(), rows=1, slots=32), word_tokenizer(), drafts)
    made = Background(drafter, drafts, Learner(drafts, model(), config), buffer, throttle, ending, snapshots)
    return made, drafter, buffer


def test_a_round_trains_swaps_and_saves_and_a_rollback_undoes_all_of_it(
    tmp_path: Path, target: LlamaForCausalLM, draft: LlamaForCausalLM
) -> None:
    work, drafter, buffer = background(tmp_path, draft)
    original = copy.deepcopy(draft.state_dict())
    assert not work.turn(), "nothing was collected"
    for one in [*pieces(target, 7), *pieces(target, 8, seed=1, held=True)]:
        buffer.add(one)
    assert not work.turn(), "too little is new"
    buffer.add(pieces(target, 1, seed=2)[0])
    assert work.turn() and drafter.swaps == 1 and work.version == 1 and work.trial.better
    learned = copy.deepcopy(draft.state_dict())
    stored = AutoModelForCausalLM.from_pretrained(tmp_path / "latest").state_dict()
    assert all(torch.equal(stored[name], value) for name, value in learned.items())
    assert not torch.equal(learned["lm_head.weight"], original["lm_head.weight"])
    record = json.loads((tmp_path / "latest" / "adaptation.json").read_text())
    assert record["expected_acceptance"] == work.trial.candidate > record["expected_acceptance_before"]
    assert not work.turn(), "nothing is new"
    drafter._roll_back()
    assert work.turn() and work.version == 0 and not (tmp_path / "latest").exists()
    for state in (draft.state_dict(), work.learner.state()):
        assert all(torch.equal(state[name], value) for name, value in original.items())


def test_a_worse_candidate_is_thrown_away(
    tmp_path: Path, target: LlamaForCausalLM, draft: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, drafter, buffer = background(tmp_path, draft)
    before = copy.deepcopy(draft.state_dict())
    for one in [*pieces(target, 8), *pieces(target, 8, seed=1, held=True)]:
        buffer.add(one)

    def ruin(self: Learner, chosen: Sequence[object], pause: object) -> bool:
        with torch.no_grad():
            for parameter in self.twin.parameters():
                parameter.normal_()
        return True

    monkeypatch.setattr(Learner, "_train", ruin)
    assert work.turn() and work.discarded == 1 and drafter.swaps == 0 and work.version == 0
    for state in (draft.state_dict(), work.learner.state()):
        assert all(torch.equal(state[name], value) for name, value in before.items())
    assert not tmp_path.exists() or not list(tmp_path.iterdir())


def adapting(target: Path, drafts: Path | str, folder: Path, method: str = "draft_model") -> LLM:
    drafter = {"method": method, "model": str(drafts), "num_speculative_tokens": 4, "adaptive": False}
    adapt = {"share": 1.0, "learning_rate": 1e-3, "fresh_pieces": 2, "round_pieces": 8, "directory": folder}
    return LLM(str(target), dtype="float32", speculative_config=drafter, max_num_seqs=4, max_model_len=200, adapt=adapt)


@pytest.fixture
def head_checkpoint(checkpoint: Path, tmp_path: Path) -> Path:
    """An untrained EAGLE-3 head."""
    target = AutoModelForCausalLM.from_pretrained(checkpoint)
    config = EagleConfig.for_target("eagle3", target, options={"boundaries": [0, 1, 2]})
    facts = TargetFacts.of(target.config, checkpoint)
    return write_head(HeadCheckpoint.of(EagleHead.initial(target, config)), tmp_path / "head", "flat", facts)


def stored_weights(method: str, folder: Path) -> dict[str, torch.Tensor]:
    if method == "draft_model":
        return AutoModelForCausalLM.from_pretrained(folder).state_dict()  # type: ignore[no-any-return]
    return read_head(folder).build(torch.float32).state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_it_learns_while_it_serves_and_goes_on_after_a_restart(
    method: str, checkpoint: Path, draft_checkpoint: Path, head_checkpoint: Path, tmp_path: Path
) -> None:
    begun = head_checkpoint if method == "eagle3" else draft_checkpoint
    llm = adapting(checkpoint, begun, tmp_path / "kept", method)
    assert llm.adaptation is not None
    params = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)
    plain = tokens_of(llm.generate(WORDS, params, speculative=False))
    for _ in range(400):
        assert tokens_of(llm.generate(WORDS, params)) == plain
        stats = llm.adaptation.stats()
        if (stats.version >= 2 and stats.candidate_acceptance > 0) or not stats.running:
            break
    llm.adaptation.close()
    stats = llm.adaptation.stats()
    assert stats.version >= 1 and stats.swaps >= 2 and stats.examples > stats.rejected_examples > 0
    assert stats.candidate_acceptance > 0 and stats.updates > 0 and 0 < stats.share <= 1 and not stats.running
    latest = tmp_path / "kept" / "latest"
    record = json.loads((latest / "adaptation.json").read_text())
    assert tokens_of(llm.generate(WORDS, params)) == plain, "drafting goes on without it"

    again = adapting(checkpoint, begun, tmp_path / "kept", method)
    assert again.adaptation is not None and again.adaptation.drafter is not None
    assert again.adaptation.stats().version >= record["version"]
    again.adaptation.close()
    served, stored = again.adaptation.drafter.drafter.trainable.state_dict(), stored_weights(method, latest)
    assert all(torch.equal(value, stored[name]) for name, value in served.items())
    drafter = {"method": method, "model": str(latest), "num_speculative_tokens": 4}
    elsewhere = LLM(str(checkpoint), dtype="float32", speculative_config=drafter, max_model_len=200)
    assert tokens_of(elsewhere.generate(WORDS, params)) == plain


def test_it_learns_from_requests_that_allow_it_alone(
    checkpoint: Path, draft_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which share a batch with others."""
    kept, add = list[Any](), ReplayBuffer.add
    monkeypatch.setattr(
        ReplayBuffer, "add", lambda buffer, piece: (kept.append(piece.tokens.tolist()), add(buffer, piece))
    )
    llm = adapting(checkpoint, draft_checkpoint, tmp_path)
    params, begun = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True), dict[bool, list[list[int]]]()
    for adapt in (True, False):
        texts = ["the cat and the dog", "on the mat"] if adapt else ["the dog sat", "a log and a mat"]
        begun[adapt] = [llm.tokenizer.encode(text) for text in texts]  # type: ignore[union-attr]
        for text in texts:
            llm.submit(text, params, adapt=adapt)
    while llm.engine.busy:
        llm.engine.step()
    assert llm.adaptation is not None
    llm.adaptation.close()
    for tokens in kept:
        assert any(tokens[: len(prompt)] == prompt for prompt in begun[True])
    assert len(kept) >= 2


def test_an_error_ends_learning_not_serving(
    checkpoint: Path, draft_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory for a gradient")

    monkeypatch.setattr(Learner, "attempt", fails)
    llm = adapting(checkpoint, draft_checkpoint, tmp_path)
    assert llm.adaptation is not None
    params = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)
    plain = tokens_of(llm.generate(WORDS, params, speculative=False))
    for _ in range(100):
        assert tokens_of(llm.generate(WORDS, params)) == plain
        if not llm.adaptation.stats().running:
            break
    assert not llm.adaptation.stats().running and llm.adaptation.stats().swaps == 0


class Noting(Drafter):
    """Notes what it is told to forget."""

    def __init__(self) -> None:
        self.told: list[tuple[list[int], list[int]]] = []

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        self.told.append((list(rows), list(lengths)))


def test_a_reused_row_is_computed_anew_after_a_swap(draft: LlamaForCausalLM) -> None:
    inner = Noting()
    collector = Collector(ReplayBuffer(2**20), boundaries=LAST, context=False, held_every=8)
    drafter = Prompt(inner, collector, Throttle(1.0, threading.Event()))
    shown = DraftContext(
        rows=[0, 1], tokens=[[1], [2]], prompt_lengths=[1, 1], fresh=[1, 1], samplers=[], rng=[], hidden_states={}
    )
    drafter.extend(shown)
    drafter.truncate([0], [7])
    drafter.offer(ready(draft, draft.state_dict()))
    drafter.truncate([0, 1], [5, 0])
    drafter.extend(shown)
    drafter.truncate([0, 1], [4, 4])
    assert inner.told == [([0], [7]), ([0, 1], [0, 0]), ([0, 1], [4, 4])]


def test_a_prefix_that_former_weights_read_is_read_again_for_a_head() -> None:
    """It lacks the target's states of it: also where the weights changed while its answer ran."""
    mine = copy.deepcopy(eagle_head())
    other = copy.deepcopy(mine.state_dict())
    for value in filter(torch.is_floating_point, other.values()):
        value.add_(torch.randn(value.shape, generator=torch.Generator().manual_seed(0)), alpha=0.1)
    llm, drafter = engine(mine, AdaptedDrafter, rows=1, method="eagle3")
    prompt, params = as_prompts([[index % 11 for index in range(40)]]), SamplingParams(temperature=0, max_tokens=16)
    llm.generate(prompt, params)
    [reused] = llm.generate(prompt, params)
    drafter.offer(ready(mine, other))
    outputs = [llm.generate(prompt, params)[0] for _ in range(3)]
    assert drafter.swaps == 1 and reused.num_cached_tokens > 0
    assert [one.num_cached_tokens for one in outputs] == [reused.num_cached_tokens, 0, reused.num_cached_tokens]
    fresh, _ = engine(mine, AdaptedDrafter, rows=1, method="eagle3")
    [expected] = fresh.generate(prompt, params)
    for one in outputs[1:]:
        assert one.outputs[0].speculation == expected.outputs[0].speculation
        assert one.outputs[0].token_ids == expected.outputs[0].token_ids == reused.outputs[0].token_ids


def test_the_policys_drafters_adapt_inside() -> None:
    setup = DrafterSetup(target=Target(model(), rows=1, slots=64), tokenizer=None, rows=1, slots=64)
    drafting = DrafterPool(setup, costs=Nominal())
    config = SpeculativeConfig.parse({"method": "draft_model", "model": copy.deepcopy(relative())})
    key, seen = drafting.ensure(config) or "", list[Drafter]()

    def around(drafter: Drafter) -> Drafter:
        seen.append(drafter)
        return Fickle(
            drafter,
            Collector(ReplayBuffer(2**20), boundaries=LAST, context=False, held_every=8),
            Throttle(1.0, threading.Event()),
        )

    drafting.wrap(key, around)
    [arm] = drafting._active[key].policy.arms  # type: ignore[union-attr]
    assert isinstance(arm.drafter.drafter, Fickle) and seen[0].trainable is not None
    exchange(ready(seen[0].trainable, relative(0.3).state_dict()))
