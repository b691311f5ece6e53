"""A converted model: the same model in eval mode, a head's loss in train mode."""

import copy
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint as _torch_checkpoint
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from forerun import modelopt
from forerun.errors import ArgumentError
from forerun.heads.eagle import Eagle3Objective, Eagle3Settings
from forerun.losses.objective import FrozenTarget
from forerun.modelopt import EAGLE3_DEFAULT_CFG
from forerun.training.convert.batches import token_batch
from forerun.training.convert.settings import EAGLE1_DEFAULT_CFG
from training.convert.converted import SMALL, base, config, eagle, learned, text
from training.ttt import batch_of


@pytest.fixture
def converted() -> Any:
    return eagle()


def test_modelopts_tutorial_runs_with_its_imports_changed(tmp_path: Any) -> None:
    base().save_pretrained(tmp_path)
    preset = copy.deepcopy(EAGLE3_DEFAULT_CFG)

    # --- the tutorial; `mtsp` was modelopt.torch.speculative
    mtsp = modelopt
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    cfg = EAGLE3_DEFAULT_CFG["config"].copy()
    cfg["eagle_architecture_config"].update(
        {
            "hidden_size": model.config.hidden_size,
            "vocab_size": model.config.vocab_size,
            "draft_vocab_size": model.config.vocab_size,
            "max_position_embeddings": model.config.max_position_embeddings,
        }
    )
    mtsp.convert(model, [("eagle", cfg)])
    # ---

    EAGLE3_DEFAULT_CFG["config"] = preset["config"]
    losses = learned(model, 5, 1e-3, text())
    assert losses[-1] < losses[0] - 0.1


def test_it_is_the_same_object_and_still_a_llama(converted: Any) -> None:
    model = base()
    assert modelopt.convert(model, {"algorithm": "eagle", "config": config()}) is model
    assert isinstance(converted, LlamaForCausalLM)
    assert type(converted).__name__ == "LlamaForCausalLM"
    assert type(model) is type(converted)
    assert not converted.training and not converted.eagle_module.training


def test_generate_and_logits_are_the_base_models(converted: Any) -> None:
    plain, prompt = base(), text(2, 6)
    expected = plain.generate(prompt, max_new_tokens=8, do_sample=False)
    assert torch.equal(converted.generate(prompt, max_new_tokens=8, do_sample=False), expected)
    assert torch.equal(converted(prompt).logits, plain(prompt).logits)
    assert torch.equal(converted(prompt, torch.ones_like(prompt), use_cache=False)[0], plain(prompt).logits)
    converted.train()
    assert torch.equal(converted.generate(prompt, max_new_tokens=8, do_sample=False), expected)


def test_the_loss_is_the_objectives_mean(converted: Any) -> None:
    documents = text(1, 12)
    head = converted.eagle_module
    batch = batch_of([documents[0].tolist()], head.config.boundaries)
    report = Eagle3Objective(head, FrozenTarget.of(converted), Eagle3Settings(steps=3, decay=0.9))(batch)
    found = converted(documents, labels=documents)
    torch.testing.assert_close(found.loss, report.loss / report.weight)
    expected = [report.metrics[f"acceptance_{step}"] for step in range(3)]
    assert found.train_acc == pytest.approx([(hits / count).item() for hits, count in expected])
    assert converted(documents, labels=documents, return_dict=False)[0] == found.loss


def test_labels_and_loss_mask_say_the_same(converted: Any) -> None:
    ids = text()
    mask = torch.ones_like(ids)
    mask[:, :7] = 0
    by_mask = converted(ids, loss_mask=mask).loss
    assert by_mask == converted(ids, labels=ids.masked_fill(mask == 0, -100)).loss
    assert by_mask != converted(ids, labels=ids).loss


@pytest.mark.parametrize("side", ["left", "right", "inside"])
def test_padding_changes_nothing_wherever_it_is(converted: Any, side: str) -> None:
    ids = text(1, 8)
    places = {"left": range(3, 11), "right": range(8), "inside": [0, 1, 2, 6, 7, 8, 9, 10]}[side]
    padded, mask = torch.full((1, 11), 3), torch.zeros(1, 11, dtype=torch.int64)
    padded[0, list(places)], mask[0, list(places)] = ids[0], 1
    found = converted(padded, attention_mask=mask, labels=padded)
    torch.testing.assert_close(found.loss, converted(ids, labels=ids).loss)


def test_documents_packed_by_their_positions_do_not_see_each_other(converted: Any) -> None:
    first, second = text(1, 6, seed=1), text(1, 6, seed=2)
    joined, places = torch.cat([first, second], 1), torch.arange(6).repeat(2).unsqueeze(0)
    found = converted(joined, labels=joined, position_ids=places).loss
    apart = (converted(first, labels=first).loss + converted(second, labels=second).loss) / 2
    torch.testing.assert_close(found, apart)
    assert not torch.isclose(found, converted(joined, labels=joined).loss, atol=1e-4)


def test_nothing_counted_is_a_loss_of_zero_with_gradients(converted: Any) -> None:
    converted.train()
    loss = converted(text(), labels=torch.full_like(text(), -100)).loss
    loss.backward()
    assert loss == 0
    assert all(weight.grad is not None for weight in converted.eagle_module.parameters())


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
def test_gradient_checkpointing_reaches_the_head(converted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*arguments: Any, **keywords: Any) -> Any:
        calls.append(arguments)
        return _torch_checkpoint(*arguments, **keywords)

    monkeypatch.setattr("forerun.losses.objective.checkpoint", counted)
    converted.train()
    plain = converted(text()).loss
    assert not calls
    converted.gradient_checkpointing_enable()
    assert converted(text()).loss == plain
    assert len(calls) == 3


def test_a_half_precision_base_trains_a_float32_head() -> None:
    model = base().bfloat16()
    modelopt.convert(model, [("eagle", config())])
    model.train()
    found = model(text())
    found.loss.backward()
    assert found.loss.dtype == torch.float32
    assert {weight.dtype for weight in model.eagle_module.parameters()} == {torch.float32}
    assert {weight.dtype for weight in model.model.parameters()} == {torch.bfloat16}


def test_a_deep_copy_is_a_model_of_its_own(converted: Any) -> None:
    other = copy.deepcopy(converted)
    with torch.no_grad():
        other.eagle_module.fc.weight.zero_()
    assert other(text(), labels=text()).loss != converted(text(), labels=text()).loss


def test_a_reduced_vocabulary_must_be_known_first() -> None:
    model = eagle({"draft_vocab_size": 20})
    with pytest.raises(ArgumentError, match="set_draft_vocabulary"):
        model(text(), labels=text())
    for ids, says in ((range(19), "20 tokens"), ([1, *range(19)], "are distinct"), (range(21, 41), r"0\.\.39")):
        with pytest.raises(ArgumentError, match=says):
            model.set_draft_vocabulary(ids)
    model.set_draft_vocabulary(range(39, 19, -1))
    assert model.eagle_module.token_ids.tolist() == list(range(20, 40))
    assert torch.equal(model.eagle_module.lm_head.weight, model.lm_head.weight[20:])
    assert model(text(), labels=text()).loss > 0
    with pytest.raises(ArgumentError, match="already"):
        model.set_draft_vocabulary(range(20))


def test_what_cannot_be_converted_stays_as_it_was(converted: Any) -> None:
    with pytest.raises(ArgumentError, match="already"):
        modelopt.convert(converted, [("eagle", config())])
    with pytest.raises(ArgumentError, match="causal LM"):
        modelopt.convert(torch.nn.Linear(1, 1), [("eagle", config())])
    for wrong in (
        config({"eagle_aux_hidden_state_layer_ids": [1, 4]}),
        config({"draft_vocab_size": 20}, eagle_draft_vocab_ids=[1]),
        config(eagle_draft_vocab_ids=[1]),
    ):
        model = base()
        with pytest.raises(ArgumentError):
            modelopt.convert(model, [("eagle", wrong)])
        assert type(model) is LlamaForCausalLM
        assert all(weight.requires_grad for weight in model.parameters())
    model = base()
    model.forward = model.forward
    with pytest.raises(ArgumentError, match="before"):
        modelopt.convert(model, [("eagle", config())])


def test_inputs_of_another_shape_are_refused(converted: Any) -> None:
    with pytest.raises(ArgumentError, match=r"labels must be shaped like input_ids \(2, 12\)"):
        converted(text(), labels=text(2, 11))
    with pytest.raises(ArgumentError, match="input_ids"):
        converted(inputs_embeds=torch.zeros(1, 4, 32), labels=text(1, 4))


def test_batches_of_collators() -> None:
    ids = torch.tensor([[9, 9, 5, 6, 7]])
    batch = token_batch(ids, torch.tensor([[0, 0, 1, 1, 1]]), labels=torch.tensor([[-100, 9, -100, 6, 7]]))
    assert batch.tokens.tolist() == [[5, 6, 7, 0, 0]]
    assert batch.loss_mask.tolist() == [[False, True, True, False, False]]
    assert batch.documents.tolist() == [[0, 0, 0, -1, -1]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 0]]
    packed = token_batch(ids, position_ids=torch.tensor([[0, 1, 0, 1, 2]]))
    assert packed.documents.tolist() == [[0, 0, 1, 1, 1]]
    assert packed.loss_mask.all()


def first_eagle(regression: bool, **more: Any) -> Any:
    shape = EAGLE1_DEFAULT_CFG["config"]["eagle_architecture_config"] | SMALL
    cfg = {"eagle_architecture_config": shape, "eagle_hidden_state_distillation": regression, **more}
    model = base()
    torch.manual_seed(3)
    modelopt.convert(model, [("eagle", cfg)])
    return model


def test_regression_of_an_exact_head_costs_nothing_but_tokens() -> None:
    """A head whose features are the target's own has no distance to pay for, only a tenth of the tokens' loss."""
    model = first_eagle(True, eagle_ttt_steps=1)
    # The target's last state is made the same everywhere; the head is made to hand it on.
    ids, constant = text(1, 10), torch.randn(32, generator=torch.Generator().manual_seed(1))
    handle = model.model.norm.register_forward_hook(lambda *call: constant.expand_as(call[-1]))
    with torch.no_grad():
        for layer in model.eagle_module.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.eagle_module.fc.weight.zero_()
        model.eagle_module.fc.weight[:, 32:] = torch.eye(32)
    found = model(ids, labels=ids).loss
    handle.remove()
    probs = torch.log_softmax(constant @ model.lm_head.weight.T, -1)
    torch.testing.assert_close(found, -0.1 * (probs.exp() * probs).sum())
