"""transformers' own Trainer trains a converted model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

import forerun
from forerun.heads.formats import read_head
from training.convert.converted import base, config, text

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.*", "ignore::FutureWarning")


def trainer(model: Any, output: Path, **options: Any) -> Trainer:
    rows = [{"input_ids": row, "labels": row, "loss_mask": torch.ones_like(row)} for row in text(4, 10)]
    given = {
        "output_dir": str(output),
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_strategy": "no",
        "seed": 0,
        **options,
    }
    return Trainer(model=model, args=TrainingArguments(**given), train_dataset=rows, eval_dataset=rows)


def test_trainer_trains_the_head_alone_and_saves_it(tmp_path: Path) -> None:
    model = base()
    forerun.convert(model, [("eagle", config())])
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


def test_trainer_resumes_after_load_head_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    def fresh() -> Any:
        model = base()
        torch.manual_seed(1)
        forerun.convert(model, [("eagle", config())])
        return model

    whole, cut, resumed = fresh(), fresh(), fresh()
    trainer(whole, tmp_path / "whole", max_steps=3).train()
    trainer(cut, tmp_path / "cut", max_steps=2, save_strategy="steps", save_steps=2).train()
    checkpoint = tmp_path / "cut" / "checkpoint-2"
    again = trainer(resumed, tmp_path / "resumed", max_steps=3)
    with pytest.raises(forerun.ForerunError, match="load_head"):
        again.train(resume_from_checkpoint=str(checkpoint))
    resumed.load_head(checkpoint)
    again.train(resume_from_checkpoint=str(checkpoint))
    torch.testing.assert_close(resumed.eagle_module.fc.weight, whole.eagle_module.fc.weight)
