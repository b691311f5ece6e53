"""The modes beside EAGLE's: Medusa, DFlash and the checkpoint's own MTP layers, trained, saved, loaded and exported."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from forerun import modelopt
from forerun.errors import ArgumentError, CheckpointError
from forerun.heads.dflash import DFlashObjective, DFlashSettings
from forerun.heads.files import read_head
from forerun.heads.medusa import MedusaObjective
from forerun.heads.mtp import MtpObjective
from forerun.heads.mtp_files import read_target
from forerun.losses.objective import FrozenTarget
from forerun.training.convert.modes import MODES, read_mode
from mtp_targets import Checkpoint
from training.convert.converted import base, learned, text
from training.ttt import batch_of

CONFIGS: dict[str, dict[str, Any]] = {
    "medusa": {"medusa_num_heads": 3},
    "dflash": {
        **{"dflash_block_size": 4, "dflash_num_anchors": 16, "dflash_mask_token_id": 39},
        "dflash_architecture_config": {"num_hidden_layers": 2, "initializer_range": 0.2},
    },
    "mtp": {"mtp_steps": 2},
}
ARCHITECTURE = "dflash_architecture_config"


def converted(name: str, folder: Path) -> Any:
    """A model of that mode, its head unlike any fresh one."""
    if name == "mtp":
        Checkpoint("glm", folder / "target")
        model: Any = AutoModelForCausalLM.from_pretrained(folder / "target")
    else:
        model = base()
    assert modelopt.convert(model, [(name, CONFIGS[name])]) is model
    torch.manual_seed(11)
    with torch.no_grad():
        for weight in head_of(model).parameters():
            weight.add_(torch.randn_like(weight) * 0.02)
    return model


def head_of(model: Any) -> Any:
    (found,) = [child for name, child in model.named_children() if name in {mode.child for mode in MODES.values()}]
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_only_the_head_learns_and_the_loss_falls(name: str, tmp_path: Path) -> None:
    model = converted(name, tmp_path)
    child, prompt = MODES[name].child, text(4, 16)
    before = model.eval()(prompt).logits
    losses = learned(model, 29, 3e-3, prompt)
    losses.append(model(input_ids=prompt, labels=prompt).loss)
    losses[-1].backward()
    learning = {part for part, weight in model.named_parameters() if weight.grad is not None}
    assert learning and all(part.startswith(f"{child}.") for part in learning)
    assert losses[-1] < 0.9 * losses[0], losses
    assert torch.equal(model.eval()(prompt).logits, before)
    assert len(model(prompt, labels=prompt).train_acc) == {"medusa": 3, "dflash": 3, "mtp": 2}[name]


def test_the_losses_are_the_objectives_means(tmp_path: Path) -> None:
    documents = text(1, 12)
    medusa, dflash = converted("medusa", tmp_path), converted("dflash", tmp_path)
    head = head_of(medusa)
    report = MedusaObjective(head, FrozenTarget.of(medusa))(batch_of([documents[0].tolist()], head.config.boundaries))
    torch.testing.assert_close(medusa(documents, labels=documents).loss, report.loss / report.weight)
    head = head_of(dflash)
    settings = DFlashSettings(anchors=16)
    batch = batch_of([documents[0].tolist()], head.config.boundaries)
    report = DFlashObjective(head, FrozenTarget.of(dflash), settings)(batch)
    torch.testing.assert_close(dflash(documents, labels=documents).loss, report.loss / report.weight)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_saved_comes_back(name: str, tmp_path: Path) -> None:
    model, output = converted(name, tmp_path), tmp_path / "saved"
    model.save_pretrained(output)
    assert (output / f"{name}_head").is_dir()
    back = type(model).from_pretrained(output)
    ours, theirs = model.state_dict(), back.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    ids = text()
    assert back(ids, labels=ids).loss == model(ids, labels=ids).loss
    with torch.no_grad():
        for weight in head_of(back).parameters():
            weight.zero_()
    back.load_head(output)
    assert all(torch.equal(ours[key], tensor) for key, tensor in back.state_dict().items())


@pytest.mark.parametrize(("name", "to"), [("medusa", "hf"), ("dflash", "vllm"), ("dflash", "hf"), ("mtp", "hf")])
def test_the_head_is_exported(name: str, to: str, tmp_path: Path) -> None:
    model, output = converted(name, tmp_path), tmp_path / "exported"
    model.export_head(output, to)
    found, head = read_head(output), head_of(model)
    assert found.config.kind == name
    dtype = torch.bfloat16 if name == "dflash" else torch.float32
    for key, tensor in head.state_dict().items():
        assert torch.equal(found.tensors[key], tensor.to(dtype if tensor.is_floating_point() else None)), key


def test_an_engine_that_reads_no_such_head_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"cannot export to 'llama\.cpp'.*Heads of the kind medusa go to"):
        converted("medusa", tmp_path).export_head(tmp_path / "out", "llama.cpp")


def test_mtp_begins_with_the_checkpoints_layers(tmp_path: Path) -> None:
    Checkpoint("glm", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    modelopt.convert(model, [("mtp", {})])
    stored = read_target(str(tmp_path)).tensors
    assert all(torch.equal(of, stored[key].float()) for key, of in head_of(model).state_dict().items() if key != "d2t")
    objective = model._convert_objective(checkpointing=False)
    assert isinstance(objective, MtpObjective) and (objective.settings.steps, objective.settings.decay) == (3, 0.6)
    with pytest.raises(CheckpointError, match="brings no MTP layers"):
        plain = base()
        plain.save_pretrained(tmp_path / "plain")
        modelopt.convert(AutoModelForCausalLM.from_pretrained(tmp_path / "plain"), [("mtp", {})])


def test_what_a_dflash_configuration_means() -> None:
    def shape(architecture: dict[str, Any] | None = None, **options: Any) -> Any:
        return read_mode([("dflash", {ARCHITECTURE: architecture or {}, **options})]).shape(base())

    plain = shape()
    assert (plain.block_size, plain.num_hidden_layers, plain.is_causal, plain.sliding_window) == (8, 4, False, None)
    assert plain.qk_norm and not plain.own_lm_head and plain.hidden_size == 32
    made = shape({"num_hidden_layers": 1, "rope_theta": 5e5}, dflash_draft_attention="causal", dflash_swa_window_size=9)
    assert (made.num_hidden_layers, made.rope_theta, made.is_causal, made.sliding_window) == (1, 5e5, True, 9)
    mode = read_mode([("dflash", {"dflash_dpace_alpha": 0.3})])
    assert mode.settings() == {"anchors": 512, "smoothing": 0.3}
    decay = read_mode([("dflash", {"dflash_loss_objective": "decay", "dflash_loss_decay_factor": 4.0})])
    assert decay.settings() == {"anchors": 512, "gamma": 4.0}


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        (("medusa", {"medusa_num_head": 2}), "unknown key medusa_num_head. Did you mean 'medusa_num_heads'"),
        (("medusa", {"medusa_num_heads": "2"}), "medusa_num_heads must be of the type int"),
        (("dflash", {ARCHITECTURE: {"projector_type": "dspark"}}), "forerun train dspark"),
        (("dflash", {ARCHITECTURE: {"projector_type": "domino"}}), "train a Domino head with `forerun train domino`"),
        (("dflash", {ARCHITECTURE: {"torch_dtype": "int8"}}), "torch_dtype must be one of"),
        (("dflash", {"dflash_attention_sink": True}), "no sinks"),
        (("dflash", {"dflash_init_checkpoint": "x"}), "load_head"),
        (("dflash", {"dflash_loss_objective": "edr"}), "must be dpace or decay"),
        (("dflash", {"dflash_confidence_head_alpha": 1.0}), "forerun train dspark"),
        (("mtp", {"mtp_steps": 2.5}), "mtp_steps must be of the type int"),
        (("hydra", {}), "there is no mode 'hydra'. There are eagle, medusa, dflash, mtp.*forerun train"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(mode: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        read_mode([mode])


def test_a_mode_that_does_not_fit_leaves_the_model_as_it_was() -> None:
    for mode in (("medusa", {"medusa_num_heads": 0}), ("dflash", {"dflash_block_size": 1}), ("mtp", {})):
        model = base()
        with pytest.raises(ArgumentError):
            modelopt.convert(model, [mode])
        assert type(model).__name__ == "LlamaForCausalLM" and all(p.requires_grad for p in model.parameters())
