"""LayerSkip: the loss written out, dropped layers, curricula, and a target whose early exits draft better."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from forerun import LLM, SamplingParams
from forerun.errors import ArgumentError
from forerun.losses.objective import FrozenTarget
from forerun.training.features.online import OnlineFeatures
from forerun.training.layerskip import LayerSkipObjective, LayerSkipSettings, dropout_chances, exit_weights
from forerun.training.recipe import read_recipe
from forerun.training.run import TrainingRun
from llamas import tiny_llama
from training.conftest import Trainer, evaluated
from training.test_distill import batch, windows
from training.ttt import VOCABULARY, model


def learner() -> Any:
    """Another model of the target's shape, trainable."""
    sizes = {"num_hidden_layers": 4, "max_position_embeddings": 128, "initializer_range": 0.2}
    return tiny_llama(VOCABULARY, 5, **sizes).requires_grad_(True).train()


def objective(lm: Any, **settings: Any) -> LayerSkipObjective:
    return LayerSkipObjective(lm, FrozenTarget.of(model()), LayerSkipSettings(**settings))


@pytest.mark.parametrize("learn_from", ["target", "data"])
def test_loss_and_gradient_equal_a_written_out_reference(learn_from: str) -> None:
    """Documents one by one through transformers' own forward, its hidden states through its norm and head."""
    lm, tokens = learner(), windows()
    report = objective(lm, learn_from=learn_from, curriculum="all", dropout=0.0, exit_scale=0.5)(batch())
    report.loss.backward()
    ours = {name: weight.grad.clone() for name, weight in lm.named_parameters()}
    lm.zero_grad()
    raw = {1: 0.0, 2: 0.5, 3: 1.5, 4: 3 + 1.5}  # e(l) of the paper, layers counted from 1
    total, count = torch.zeros(()), 0
    for row, numbers in enumerate(tokens.documents):
        for number in range(int(numbers.max()) + 1):
            where = (numbers == number).nonzero().flatten().tolist()
            ids = tokens.tokens[row, where].unsqueeze(0)
            states = lm(ids, output_hidden_states=True).hidden_states
            wanted = model()(ids).logits[0].detach().softmax(-1)
            for index, column in enumerate(where[1:], 1):
                if not tokens.loss_mask[row, column]:
                    continue
                count += 1
                for place, weight in raw.items():
                    normed = states[place][0, index - 1] if place == 4 else lm.model.norm(states[place][0, index - 1])
                    logs = lm.lm_head(normed).log_softmax(-1)
                    one = -logs[ids[0, index]] if learn_from == "data" else -(wanted[index - 1] * logs).sum()
                    total = total + weight / sum(raw.values()) * one
    total.backward()
    assert report.weight == count
    torch.testing.assert_close(report.loss, total, atol=1e-4, rtol=1e-4)
    for name, weight in lm.named_parameters():
        torch.testing.assert_close(ours[name], weight.grad, atol=1e-5, rtol=1e-3, msg=name)


def test_a_dropped_layer_gives_its_input_on_and_evaluation_drops_none(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, found = learner(), batch()
    skipping = objective(lm, dropout=0.5, exit_scale=0.0, curriculum="gradual")
    draws = iter([torch.ones(2), torch.ones(2), torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0])])
    monkeypatch.setattr(torch, "rand", lambda _rows: next(draws))
    loss = skipping(found).loss
    monkeypatch.undo()
    expected = []
    for row, gone in enumerate((2, 3)):
        shorter = copy.deepcopy(lm)
        del shorter.model.layers[gone]
        for index, layer in enumerate(shorter.model.layers):
            layer.self_attn.layer_idx = index
        shorter.config.num_hidden_layers = 3
        part = OnlineFeatures(model(), ()).features(_row(windows(), row))
        expected.append(objective(shorter, dropout=0.0, exit_scale=0.0)(part).loss)
    torch.testing.assert_close(loss, torch.stack(expected).sum(), atol=1e-4, rtol=1e-4)
    lm.eval()
    torch.testing.assert_close(
        objective(lm, dropout=0.9)(found).loss, objective(lm, dropout=0.0)(found).loss, atol=0, rtol=0
    )


def _row(tokens: Any, row: int) -> Any:
    return type(tokens)(**{name: getattr(tokens, name)[row : row + 1] for name in tokens.__slots__})


def test_weights_chances_and_curricula_are_the_papers() -> None:
    assert exit_weights([], 4, 0.2) == {4: 1.0}
    weights = exit_weights([1, 2, 3], 4, 1.0)
    assert weights == pytest.approx({1: 0.0, 2: 0.1, 3: 0.3, 4: 0.6})
    assert dropout_chances(4, 0.2) == pytest.approx([0.0, 0.2 * (2 ** (1 / 3) - 1), 0.2 * (2 ** (2 / 3) - 1), 0.2])
    assert dropout_chances(1, 0.2) == [0.0]
    rotating = objective(learner(), curriculum="rotational", every=2)
    assert [rotating.exits(number) for number in range(3)] == [[2], [1, 3], [2]]
    gradual = objective(learner(), curriculum="gradual", gradual_batches=30)
    assert [gradual.exits(number) for number in (0, 1, 11, 21, 30, 99)] == [
        *([], [3], [2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3])
    ]


@pytest.mark.slow
def test_early_exits_draft_better_after_training_and_losslessly(train: Trainer) -> None:
    """In 60 steps the exit after half of the layers overlaps by 0.1 more with the target, which stays as it was by two
    percent of its loss; the best weights are those of the last evaluation."""
    more = ["training.learning_rate=3e-3", "training.log_every_steps=1", "training.eval_every_steps=30"]
    more += ["objective={curriculum: all, exit_scale: 1.0}", *evaluated(train.prepared, "max_tokens: 16")]
    trained, layers = train(train.line("layerskip", 60, *more))["model"], LLM(str(train.target)).target.num_layers
    half, last = train.log(f"overlap_{layers // 2}"), train.log("last_layer_loss")
    assert sum(half[-5:]) / 5 > sum(half[:3]) / 3 + 0.1
    assert sum(last[-5:]) / 5 < last[0] * 1.02, "dropped layers included, the last layer's loss falls or stays"
    acceptance = ("acceptance_tree_t1_1", "acceptance_chain_three_quarters_t0_1")
    for name in ("chain_half_t0", "chain_t1", "tree_t0", *acceptance):
        assert train.log(f"eval/{name}"), name
    assert AutoModelForCausalLM.from_pretrained(trained).config.num_hidden_layers == layers
    config = {"method": "early_exit", "exit_layer": layers // 2, "num_speculative_tokens": 3, "adaptive": False}
    llm, prompt = LLM(trained, speculative_config=config), {"prompt_token_ids": [3]}
    params = SamplingParams(temperature=0, max_tokens=24, detokenize=False)
    drafted, plain = (llm.generate(prompt, params, speculative=on)[0].outputs[0] for on in (None, False))
    assert drafted.token_ids == plain.token_ids


@pytest.mark.parametrize("word", ["draft.vocab_size=20", "draft.options={layers: 2}", "target_parallel=fsdp"])
def test_what_does_not_fit_the_target_is_refused(target: Path, prepared: Path, tmp_path: Path, word: str) -> None:
    flags = {"target": str(target), "data": str(prepared), "output": str(tmp_path)}
    with pytest.raises(ArgumentError, match="the target"):
        TrainingRun(read_recipe("layerskip", None, [word], flags), None)
