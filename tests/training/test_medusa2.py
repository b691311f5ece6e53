"""Medusa-2: the loss of both stages written out, the stages' learning rates, and a target that stays what it was."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from forerun import LLM, SamplingParams
from forerun.errors import ArgumentError
from forerun.losses.objective import FrozenTarget
from forerun.training.loop.distributed import Parallel
from forerun.training.medusa2 import Medusa2Objective, Medusa2Settings, TargetAndHead
from forerun.training.recipe import read_recipe
from forerun.training.run import TrainingRun
from llamas import tiny_llama
from training.conftest import Trainer, drafts, evaluated, same_weights
from training.test_distill import batch, windows
from training.ttt import VOCABULARY, medusa, model


def learner() -> TargetAndHead:
    """Another model of the target's shape, and a head of three depths; trainable."""
    sizes = {"num_hidden_layers": 4, "max_position_embeddings": 128, "initializer_range": 0.2}
    return TargetAndHead(tiny_llama(VOCABULARY, 5, **sizes), medusa()).requires_grad_(True).train()


def objective(module: TargetAndHead, **settings: Any) -> Medusa2Objective:
    return Medusa2Objective(module, FrozenTarget.of(model()), Medusa2Settings(**settings))


def reference(module: TargetAndHead, *, joint: float | None, learn_from: str) -> tuple[torch.Tensor, int]:
    """``L_LM + joint * 0.2 * sum_k 0.8^k L_k`` as a sum over tokens, and how many count: documents one by one through
    transformers' own forward. Where the target has not joined in, the heads read it as it was."""
    tokens, total, count = windows(), torch.zeros(()), 0
    for row, numbers in enumerate(tokens.documents):
        for number in range(int(numbers.max()) + 1):
            where = (numbers == number).nonzero().flatten().tolist()
            ids, mask = tokens.tokens[row, where], tokens.loss_mask[row, where]
            read = model() if joint is None else module.model
            states = read.model(ids.unsqueeze(0)).last_hidden_state[0]
            wanted = model()(ids.unsqueeze(0)).logits[0].detach().softmax(-1)
            for index in range(len(ids) - 1):
                if mask[index + 1]:
                    count += 1
                    if joint is not None:
                        logs = module.model.lm_head(states[index]).log_softmax(-1)
                        soft = learn_from == "target"
                        total = total - ((wanted[index] * logs).sum() if soft else logs[ids[index + 1]])
                for depth in range(3):
                    if index + 2 + depth < len(ids) and mask[index + 2 + depth]:
                        state = states[index].detach() if joint is None else states[index]
                        logs = module.head.heads[depth](state).log_softmax(-1)
                        weight = 0.2 * 0.8**depth * (1.0 if joint is None else joint)
                        total = total - weight * logs[ids[index + 2 + depth]]
    return total, count


@pytest.mark.parametrize("learn_from", ["target", "data"])
@pytest.mark.parametrize(("done", "joint"), [(0.2, None), (0.6, 0.5), (0.9, 1.0)])
def test_loss_and_gradient_equal_a_written_out_reference(done: float, joint: float | None, learn_from: str) -> None:
    module = learner()
    report = objective(module, learn_from=learn_from, heads_first=0.5, warmup=0.2)(replace(batch(), done=done))
    report.loss.backward()
    ours = {name: weight.grad for name, weight in module.named_parameters()}
    assert all(gradient is not None for gradient in ours.values()), "every parameter has one, in both stages"
    moved = {name.partition(".")[0] for name, gradient in ours.items() if gradient.abs().sum() > 0}
    assert moved == ({"head"} if joint is None else {"head", "model"})
    module.zero_grad(set_to_none=True)
    total, count = reference(module, joint=joint, learn_from=learn_from)
    total.backward()
    assert report.weight == count
    torch.testing.assert_close(report.loss, total, atol=1e-4, rtol=1e-4)
    for name, weight in module.named_parameters():
        if weight.grad is not None:
            torch.testing.assert_close(ours[name], weight.grad, atol=1e-5, rtol=1e-3, msg=name)


def test_the_stages_and_their_learning_rates() -> None:
    of = objective(learner(), heads_first=0.5, warmup=0.2)
    found = [(of.rates(done)["model."], of.rates(done)["head."]) for done in (0.0, 0.49, 0.5, 0.6, 0.8)]
    assert found == [(0.0, 4.0), (0.0, 4.0), (0.0, 4.0), (pytest.approx(0.5), 4.0), (1.0, 4.0)]
    together = objective(learner(), heads_first=0.0, warmup=0.0)
    assert together.joint(0.0) == 1.0
    with pytest.raises(ArgumentError, match=r"objective\.heads_first"):
        read_recipe("medusa2", None, ["objective.heads_first=2"], {"target": "a", "data": "b", "output": "c"})


def words(train: Trainer, steps: int, *more: str, into: str = "run") -> list[str]:
    own = ("training.learning_rate=1e-3", "training.log_every_steps=1", "draft.options={num_heads: 3}")
    return train.line("medusa2", steps, *own, *more, into=into)


def test_the_target_stands_still_until_the_heads_have_learnt_and_a_run_goes_on_to_the_bit(
    train: Trainer,
) -> None:
    more = ("training.save_every_steps=2", "training.keep_checkpoints=0", "training.weight_decay=0.5")
    whole, on = (train.folder / into for into in ("whole", "on"))
    train(words(train, 6, *more, "objective.warmup=0", into="whole"))
    before = load_file(train.target / "model.safetensors")
    stages = [load_file(whole / f"checkpoint-{step}" / "model.safetensors") for step in (2, 4, 6)]

    def same(stage: dict[str, torch.Tensor]) -> set[bool]:
        return {torch.equal(stage[f"model.{name}"], tensor) for name, tensor in before.items()}

    assert [same(stage) for stage in stages] == [{True}, {False}, {False}]
    assert not torch.equal(stages[0]["head.heads.0.0.linear.weight"], stages[1]["head.heads.0.0.linear.weight"])
    shutil.copytree(whole / "checkpoint-2", on / "checkpoint-2")
    train(words(train, 6, *more, "objective.warmup=0", into="on"))
    assert same_weights(*(folder / "checkpoint-6" / "model.safetensors" for folder in (on, whole)))


@torch.no_grad()
def held_out_loss(folder: Path | str, texts: list[list[int]]) -> float:
    """Nats per token of texts that the untrained target would write at temperature 1."""
    lm = AutoModelForCausalLM.from_pretrained(folder)
    losses = [lm(torch.tensor([text]), labels=torch.tensor([text])).loss for text in texts]
    return float(torch.stack(losses).mean())


@pytest.mark.slow
def test_more_is_accepted_than_of_heads_alone_and_the_target_stays_what_it_was(train: Trainer) -> None:
    """In 160 steps the first depth is right more often by 0.1, and by 0.03 more often than that of heads which learnt
    alone as long; the target's loss on texts of its own that are not in the data is within five percent. Both
    checkpoints are read by others, and draft losslessly."""
    rate = "training.learning_rate=3e-3"
    outcome = train(words(train, 160, rate, *evaluated(train.prepared, "max_tokens: 16, nodes: 6")))
    train(words(train, 160, rate, "objective.heads_first=1", into="alone"))
    together, alone = (train.log("acceptance_0", into) for into in ("run", "alone"))
    assert sum(together[-12:]) / 12 > sum(together[:6]) / 6 + 0.1
    assert sum(together[-12:]) / 12 > sum(alone[-12:]) / 12 + 0.03
    joined = train.log("target_overlap")
    assert len(joined) == 80 and joined[0] > 0.999 and not train.log("target_overlap", "alone")
    params = SamplingParams(temperature=1, max_tokens=40, seed=3, detokenize=False)
    prompts = [{"prompt_token_ids": [first, 7]} for first in range(0, VOCABULARY, 4)]
    written = LLM(str(train.target)).generate(prompts, params)
    texts = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in written]
    assert held_out_loss(outcome["model"], texts) < 1.05 * held_out_loss(train.target, texts)
    stored = json.loads((Path(outcome["head"]) / "config.json").read_text())
    assert stored["base_model_name_or_path"] == outcome["model"] and stored["medusa_num_heads"] == 3
    assert outcome["best"] > 1.2 and drafts(outcome["model"], "medusa", outcome["head"], shape=(1, 1, 1)) > 1.2


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("target_parallel=fsdp", "the target is trained from its whole weights"),
        ("draft.options={heads: 3}", r"kind medusa2 has no option 'heads'.*num_heads"),
        ("draft.vocab_size=20", "it proposes all of the target's tokens"),
    ],
)
def test_what_does_not_fit_is_refused(target: Path, prepared: Path, tmp_path: Path, word: str, message: str) -> None:
    flags = {"target": str(target), "data": str(prepared), "output": str(tmp_path)}
    with pytest.raises(ArgumentError, match=message):
        TrainingRun(read_recipe("medusa2", None, [word], flags), Parallel())
