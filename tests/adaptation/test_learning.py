"""The loss and the expected acceptance written out by hand; candidates kept, discarded, rolled back."""

from __future__ import annotations

import copy
import threading
from dataclasses import replace

import pytest
import torch
from transformers import LlamaForCausalLM

from adaptation.conftest import distribution_of, piece, pieces
from contract.harness import VARIANTS, Variant, as_prompts, llm, tokens_of
from forerun import SamplingParams, demo
from forerun.drafters.base import Drafter
from forerun.drafters.heads.kinds import KINDS
from forerun.engine.adapting import AdaptConfig
from forerun.engine.adapting.drafter import AdaptedDrafter
from forerun.engine.adapting.learning import CandidateTrial, Learner, Throttle, plain_twin
from forerun.engine.adapting.replay import AnswerPiece, Collector, ReplayBuffer
from forerun.errors import UnsupportedModelError
from forerun.model import Target
from forerun.model.kernels.packing import ready
from forerun.training.objectives.base import FrozenTarget
from forerun.training.objectives.distill import DistillObjective
from selection import one_in

TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
CONFIG = AdaptConfig(learning_rate=3e-3, round_pieces=16, batch_pieces=2)


def never() -> bool:
    return False


def test_the_loss_is_that_of_distillation_over_rejected_positions_and_a_share_of_the_others(
    target: LlamaForCausalLM, draft: LlamaForCausalLM
) -> None:
    one, own = piece(target, TEXT, [2, 5, 8]), distribution_of(draft, TEXT).log()
    wanted = -(distribution_of(target, TEXT) * own).sum(1)
    for share, counted in ((1.0, [2, 5, 8]), (0.0, [2, 8])):
        report = Learner(draft, target, AdaptConfig(accepted_share=share)).loss(one)
        assert float(report.weight) == len(counted)
        assert float(report.loss.detach()) == pytest.approx(float(wanted[counted].sum()), rel=1e-4)
    weights = [float(Learner(draft, target, AdaptConfig()).loss(one).weight) for _ in range(3)]
    assert weights == [weights[0]] * 3, "what is drawn follows a seed"
    learner = Learner(draft, target, AdaptConfig(accepted_share=1.0))
    objective = DistillObjective(learner.twin, FrozenTarget.of(target))
    trained = objective(one.batch(one.counted, 12, torch.device("cpu")))
    assert float(trained.loss.detach()) == pytest.approx(float(learner.loss(one).loss.detach()), rel=1e-6)
    learner.loss(one).loss.backward()
    assert all(parameter.grad is not None for parameter in learner.twin.parameters())


@pytest.mark.parametrize("temperature", [0.0, 0.4, 1.7])
def test_both_distributions_are_those_of_the_requests_temperature(
    temperature: float, target: LlamaForCausalLM, draft: LlamaForCausalLM
) -> None:
    """At 0, where one token has it all, the law at 1 is learned."""
    at = temperature or 1.0
    wanted = -(distribution_of(target, TEXT, at) * distribution_of(draft, TEXT, at).log()).sum(1)[[2, 5, 8]].sum()
    learner, one = Learner(draft, target, AdaptConfig(accepted_share=1.0)), piece(target, TEXT, [2, 5, 8])
    learner.loss(one)
    found = learner.loss(replace(one, temperature=temperature)).loss.detach()
    assert float(found) == pytest.approx(float(wanted), rel=1e-4)


@pytest.mark.parametrize("temperature", [0.4, 1.0])
def test_expected_acceptance_is_the_overlap_of_the_distributions(
    temperature: float, target: LlamaForCausalLM, draft: LlamaForCausalLM
) -> None:
    learner = Learner(draft, target, replace(CONFIG, accepted_share=1.0))
    both = torch.minimum(distribution_of(target, TEXT, temperature), distribution_of(draft, TEXT, temperature))
    wanted, one = float(both[[2, 5, 8]].sum(1).mean()), piece(target, TEXT, [2, 5, 8], temperature=temperature)
    found = learner.measured([one], never)
    assert found is not None and found[0] == pytest.approx(wanted, abs=1e-4)
    assert found[1] == pytest.approx(float(learner.loss(one).loss.detach()) / 3, rel=1e-4)
    agreed = (
        (distribution_of(target, TEXT).argmax(1) == distribution_of(draft, TEXT).argmax(1))[[2, 5, 8]].float().mean()
    )
    greedy = piece(target, TEXT, [2, 5, 8], temperature=0)
    assert (learner.measured([greedy], never) or [0])[0] == pytest.approx(float(agreed))


@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_training_makes_held_back_acceptance_grow(
    temperature: float, target: LlamaForCausalLM, draft: LlamaForCausalLM
) -> None:
    learner = Learner(draft, target, CONFIG)
    train, held = (pieces(target, count, temperature=temperature, seed=count) for count in (64, 16))
    assert grown(learner, train, held, 6) > 0.02
    assert learner.updates == 6 * 8


def grown(learner: Learner, train: list[AnswerPiece], held: list[AnswerPiece], rounds: int) -> float:
    """How much the acceptance on held back pieces rises."""
    trials = []
    for _ in range(rounds):
        trial = learner.attempt(train, len(train), held, never)
        assert trial is not None
        trials.append(trial)
        learner.keep() if trial.better else learner.discard()
    return max(trial.candidate for trial in trials) - trials[0].served


HEADS = [one for name, kind in KINDS.items() if kind.trains == "head" for one in VARIANTS[name][:1]]


@pytest.mark.parametrize("variant", one_in(8, HEADS), ids=lambda variant: variant.method)
def test_a_head_of_every_kind_learns_from_what_its_steps_left(variant: Variant, target: LlamaForCausalLM) -> None:
    """By the objective of its training; acceptance on held back answers rises, and what was learned serves."""
    buffer = ReplayBuffer(2**24)
    mine = replace(variant, options={**variant.options, "model": copy.deepcopy(variant.options["model"])})
    engine = llm(mine, rows=4)
    made = list[AdaptedDrafter]()

    def around(drafter: Drafter) -> Drafter:
        learner = Learner(drafter.trainable, engine.target.model, CONFIG)
        collector = Collector(buffer, boundaries=learner.boundaries, context=learner.context, held_every=4)
        made.append(AdaptedDrafter(drafter, collector, Throttle(1.0, threading.Event())))
        return made[0]

    engine.engine.drafting.wrap(engine.engine.drafting.ensure(engine.speculative) or "", around)
    prompts = [[first, second] for first in range(12) for second in (3, 7)]
    params = SamplingParams(temperature=0, max_tokens=24)
    before = tokens_of(engine.generate(as_prompts(prompts[:8]), params))
    heat = 0 if variant.method in ("medusa", "mtp") else 1  # these know no overlap, and so no fine measure of it
    drawn = [SamplingParams(temperature=heat, max_tokens=24, seed=seed) for seed in range(len(prompts))]
    engine.generate(as_prompts(prompts), drawn)
    assert not made[0].failed and buffer.rejected > 20
    served = made[0].drafter.trainable
    learner = Learner(served, engine.target.model, CONFIG)
    held = buffer.held(32)
    assert grown(learner, buffer.training(), held, 6) > 0.01
    with torch.inference_mode():
        made[0].offer(ready(served, learner.state()))
        assert tokens_of(engine.generate(as_prompts(prompts[:8]), params)) == before
    assert made[0].swaps == 1 and learner.measured(held, never) is not None
    former = {name: value.clone() for name, value in served.state_dict().items()}
    assert all(torch.equal(value, learner.twin.state_dict()[name]) for name, value in former.items())


def test_discarded_and_rolled_back_weights_are_the_served_ones_to_the_bit(
    target: LlamaForCausalLM, draft: LlamaForCausalLM
) -> None:
    learner = Learner(draft, target, CONFIG)
    train, states = pieces(target, 16), [learner.state()]
    assert learner.attempt(train, 16, train[:2], never) is not None
    assert not same(learner.state(), states[0])
    learner.discard()
    assert same(learner.state(), states[0])
    learner.attempt(train, 16, train[:2], never)
    learner.keep()
    states.append(learner.state())
    assert not same(states[1], states[0])
    learner.attempt(train, 16, train[:2], never)
    learner.discard()
    assert same(learner.state(), states[1])
    learner.roll_back()
    assert same(learner.state(), states[0])


def test_a_candidate_that_is_as_good_or_not_a_number_is_not_better() -> None:
    assert (
        not CandidateTrial(served=0.5, candidate=float("nan")).better
        and not CandidateTrial(served=0.0, candidate=0.0).better
    )
    assert (
        not CandidateTrial(served=0.5, candidate=0.5).better
        and CandidateTrial(served=0.5, candidate=0.51, gain=-1.0).better
    )
    assert (
        CandidateTrial(candidate=0.0, gain=0.1).better and not CandidateTrial(candidate=0.0, gain=float("nan")).better
    )


def test_it_gives_up_between_two_pieces(target: LlamaForCausalLM, draft: LlamaForCausalLM) -> None:
    learner, asked = Learner(draft, target, CONFIG), list[int]()

    def third() -> bool:
        asked.append(1)
        return len(asked) == 3

    assert learner.attempt(pieces(target, 8), 8, pieces(target, 2), third) is None
    assert len(asked) == 3 and learner.updates == 0


def test_new_pieces_are_trained_on_first(target: LlamaForCausalLM, draft: LlamaForCausalLM) -> None:
    learner, made = Learner(draft, target, AdaptConfig(round_pieces=6)), pieces(target, 20)
    assert len(learner._chosen(made[:10], 10)) == 6
    second = learner._chosen(made[:14], 14)
    assert {id(one) for one in made[10:14]} <= {id(one) for one in second} and len(second) == 6


def test_the_twin_of_a_packed_model_has_its_weights() -> None:
    served = Target.load(str(demo.resolve("demo-draft")), rows=1, slots=64)
    twin = plain_twin(served.model)
    with torch.no_grad():
        logits = twin(torch.tensor([TEXT])).logits
    expected = served.prefill([0], [TEXT], all_logits=True).logits
    assert torch.allclose(logits, expected.float(), atol=0.15)
    assert twin.lm_head.weight is twin.model.embed_tokens.weight
    assert all(parameter.dtype == torch.float32 for parameter in twin.parameters())


def test_quantised_weights_are_refused(target: LlamaForCausalLM, draft: LlamaForCausalLM) -> None:
    draft.is_quantized = True
    with pytest.raises(UnsupportedModelError, match="no plain weights"):
        Learner(draft, target, CONFIG)
    draft.is_quantized = False
    target.hf_device_map = {"model": 0, "lm_head": 1}
    try:
        with pytest.raises(UnsupportedModelError, match="the target is spread over devices"):
            Learner(draft, target, CONFIG)
    finally:
        del target.hf_device_map


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())
