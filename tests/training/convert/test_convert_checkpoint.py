"""Saving and loading a converted model, the base for everybody and the head beside it; transformers' own Trainer."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModel, AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel, Trainer, TrainingArguments

from forerun import modelopt
from forerun.errors import ArgumentError, CheckpointError, ForerunError
from forerun.heads.files import read_head
from forerun.model.identity import fingerprint
from forerun.training.convert.model import ConvertedModel
from training.convert.converted import base, eagle, text


@pytest.fixture
def enabled(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The hook, until the test ends; what was there before."""
    before = PreTrainedModel.__dict__["from_pretrained"]
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", before)
    modelopt.enable_huggingface_checkpointing()
    return before


def converted(**options: Any) -> Any:
    """With weights that no fresh head would have."""
    torch.manual_seed(11)
    model = eagle({"draft_vocab_size": 20}, eagle_draft_vocab_ids=list(range(0, 40, 2)), **options)
    with torch.no_grad():
        for weight in model.eagle_module.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    return model


def test_without_the_hook_the_base_is_an_ordinary_checkpoint(tmp_path: Path) -> None:
    model = converted()
    model.save_pretrained(tmp_path)
    model.export_head(tmp_path / "head", "hf", target=str(tmp_path))
    assert read_head(tmp_path / "head").target == fingerprint(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as stored:
        assert set(stored.keys()) == set(base().state_dict())
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["architectures"] == ["LlamaForCausalLM"]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(plain) is LlamaForCausalLM
    assert torch.equal(plain(text()).logits, base()(text()).logits)
    head = read_head(tmp_path / "eagle_head")
    assert {tensor.dtype for name, tensor in head.tensors.items() if name != "d2t"} == {torch.float32}
    back = type(model).from_pretrained(tmp_path)
    assert back(text(), labels=text()).loss == model(text(), labels=text()).loss


@pytest.mark.usefixtures("enabled")
def test_with_the_hook_the_converted_model_comes_back(tmp_path: Path) -> None:
    model = converted(eagle_ttt_steps=2, eagle_report_acc=False)
    model.save_pretrained(tmp_path)
    back = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(back, ConvertedModel)
    assert not back.training
    ours, theirs = model.state_dict(), back.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert back(text(), labels=text()).loss == model(text(), labels=text()).loss
    assert back(text(), labels=text()).train_acc is None
    assert {name for name, weight in back.named_parameters() if weight.requires_grad} == {
        name for name, weight in model.named_parameters() if weight.requires_grad
    }
    back.save_pretrained(tmp_path)  # over itself
    again, _ = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert again(text(), labels=text()).loss == model(text(), labels=text()).loss
    assert not isinstance(AutoModel.from_pretrained(tmp_path), ConvertedModel)


def test_the_hook_can_be_set_twice(enabled: Any) -> None:
    once = PreTrainedModel.__dict__["from_pretrained"]
    modelopt.enable_huggingface_checkpointing()
    assert PreTrainedModel.__dict__["from_pretrained"] is once is not enabled


@pytest.mark.usefixtures("enabled")
def test_other_models_load_as_ever(tmp_path: Path) -> None:
    base().save_pretrained(tmp_path)
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is LlamaForCausalLM


@pytest.mark.usefixtures("enabled")
def test_a_broken_head_is_refused(tmp_path: Path) -> None:
    converted().save_pretrained(tmp_path)
    (tmp_path / "eagle_head" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_what_would_lose_the_head_is_refused(tmp_path: Path) -> None:
    model = converted()
    with pytest.raises(ArgumentError, match="upload"):
        model.save_pretrained(tmp_path, push_to_hub=True)
    model.save_pretrained(tmp_path)
    weights = base().state_dict()
    with pytest.raises(ArgumentError, match="load_head"):
        model.load_state_dict(weights, strict=False)
    expected = model.eagle_module.fc.weight.clone()
    with torch.no_grad():
        model.eagle_module.fc.weight.zero_()
    model.load_head(tmp_path)
    assert torch.equal(model.eagle_module.fc.weight, expected)
    assert model.load_state_dict(weights, strict=False).missing_keys
    model.train()
    model(text())
    with pytest.raises(ArgumentError, match="load_head"):
        model.load_state_dict(weights, strict=False)


def test_a_head_of_another_shape_is_not_put_in(tmp_path: Path) -> None:
    converted().save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="another shape"):
        eagle().load_head(tmp_path)


def test_an_unknown_vocabulary_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="set_draft_vocabulary"):
        eagle({"draft_vocab_size": 20}).save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_trainers_state_dict_is_what_is_saved(tmp_path: Path) -> None:
    model = converted()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state["eagle_module.fc.weight"] += 1
    model.save_pretrained(tmp_path, state_dict=state)
    stored = read_head(tmp_path / "eagle_head").tensors["fc.weight"]
    assert torch.equal(stored, state["eagle_module.fc.weight"])


@pytest.mark.parametrize("to", ["vllm", "hf"])
def test_the_head_is_exported_for_an_engine(tmp_path: Path, to: str) -> None:
    model = eagle()
    exported = model.export_head(tmp_path / "head", to=to, target="some/model", force=True)
    assert "some/model" in exported.command
    head = read_head(tmp_path / "head")
    assert head.tensors["lm_head.weight"].dtype == torch.bfloat16
    assert torch.equal(head.tensors["lm_head.weight"], model.lm_head.weight.bfloat16())
    assert head.config.boundaries == model.eagle_module.config.boundaries


def test_the_exported_rope_is_the_trained_one_unless_asked(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64}
    plain, scaled = converted(), converted(eagle_export_rope_scaling=yarn)
    plain.export_head(tmp_path / "plain", to="hf")
    scaled.export_head(tmp_path / "scaled", to="hf")
    assert read_head(tmp_path / "plain").config.rope_scaling is None
    assert read_head(tmp_path / "scaled").config.rope_scaling == yarn


by_trainer = pytest.mark.filterwarnings("ignore::UserWarning:torch.*", "ignore::FutureWarning")


def trainer(model: Any, output: Path, **options: Any) -> Trainer:
    rows = [{"input_ids": row, "labels": row, "loss_mask": torch.ones_like(row)} for row in text(4, 10)]
    given = {
        **{"output_dir": str(output), "max_steps": 2, "per_device_train_batch_size": 2},
        **{"per_device_eval_batch_size": 2, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "report_to": []},
        **{"use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "logging_strategy": "no", "seed": 0},
        **options,
    }
    return Trainer(model=model, args=TrainingArguments(**given), train_dataset=rows, eval_dataset=rows)


@by_trainer
def test_trainer_trains_the_head_alone_and_saves_it(tmp_path: Path) -> None:
    model = eagle()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    running = trainer(model, tmp_path, save_strategy="steps", save_steps=2)
    first = running.evaluate()["eval_loss"]
    running.train()
    assert running.evaluate()["eval_loss"] < first
    after = model.state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and all(name.startswith("eagle_module.") for name in moved)
    optimised = {id(weight) for group in running.optimizer.param_groups for weight in group["params"]}
    assert optimised == {id(weight) for weight in model.eagle_module.parameters()}
    stored = read_head(tmp_path / "checkpoint-2" / "eagle_head")
    assert torch.equal(stored.tensors["fc.weight"], after["eagle_module.fc.weight"])


@by_trainer
def test_trainer_resumes_after_load_head_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    def fresh() -> Any:
        torch.manual_seed(1)
        return eagle()

    whole, cut, resumed = fresh(), fresh(), fresh()
    trainer(whole, tmp_path / "whole", max_steps=3).train()
    trainer(cut, tmp_path / "cut", max_steps=2, save_strategy="steps", save_steps=2).train()
    checkpoint = tmp_path / "cut" / "checkpoint-2"
    again = trainer(resumed, tmp_path / "resumed", max_steps=3)
    with pytest.raises(ForerunError, match="load_head"):
        again.train(resume_from_checkpoint=str(checkpoint))
    resumed.load_head(checkpoint)
    again.train(resume_from_checkpoint=str(checkpoint))
    torch.testing.assert_close(resumed.eagle_module.fc.weight, whole.eagle_module.fc.weight)
