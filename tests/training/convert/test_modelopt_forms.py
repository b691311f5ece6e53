"""Every call form of ModelOpt's pages runs here with its imports changed, or is refused with what to do instead."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.device_mesh
import torch.distributed.tensor.experimental
from torch import Tensor
from transformers import LlamaForCausalLM

from forerun import modelopt
from forerun.errors import ArgumentError, CheckpointError, DataError
from forerun.heads.files import read_head
from forerun.heads.peagle import PEagleObjective
from forerun.modelopt import (
    DFLASH_DEFAULT_CFG,
    EAGLE1_DEFAULT_CFG,
    EAGLE3_DEFAULT_CFG,
    EAGLE_MTP_DEFAULT_CFG,
    DFlashConfig,
    EagleConfig,
    MedusaConfig,
)
from forerun.training.recipe import read_recipe
from training.convert.converted import SMALL, base, config, eagle, learned, text

ARCHITECTURE = "eagle_architecture_config"
KIMI = {
    **{"kv_lora_rank": 8, "q_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
    **{"num_attention_heads": 2, "intermediate_size": 48, "initializer_range": 0.2, "n_routed_experts": 384},
}
LORA = {"eagle_base_lora": True, "eagle_base_lora_rank": 2, "eagle_base_lora_target_modules": ["q_proj", "v_proj"]}


def first_eagle() -> dict[str, Any]:
    made = copy.deepcopy(EAGLE1_DEFAULT_CFG)
    made["config"][ARCHITECTURE].update(SMALL)
    return made


FORMS: dict[str, tuple[Callable[[], Any], str]] = {
    "the bare name eagle": (lambda: "eagle", "eagle3"),
    "the bare name medusa": (lambda: "medusa", "medusa"),
    "a name in a list": (lambda: ["dflash"], "dflash"),
    "a pair in a list": (lambda: [("eagle", config())], "eagle3"),
    "a preset": (lambda: {"algorithm": "eagle", "config": config()}, "eagle3"),
    "a name and its keys": (lambda: {"medusa": {"medusa_num_heads": 3}}, "medusa"),
    "EagleConfig": (lambda: [("eagle", EagleConfig(eagle_ttt_steps=2, eagle_architecture_config=SMALL))], "eagle3"),
    "MedusaConfig": (lambda: [("medusa", MedusaConfig(medusa_num_heads=3, medusa_num_layers=2))], "medusa"),
    "DFlashConfig": (lambda: [("dflash", DFlashConfig(dflash_block_size=4))], "dflash"),
    "EAGLE1_DEFAULT_CFG": (first_eagle, "eagle"),
    "EAGLE3_DEFAULT_CFG": (lambda: EAGLE3_DEFAULT_CFG, "eagle3"),
    "DFLASH_DEFAULT_CFG": (lambda: DFLASH_DEFAULT_CFG, "dflash"),
    "kimik2": (lambda: [("eagle", {"eagle_decoder_type": "kimik2", ARCHITECTURE: KIMI})], "eagle3"),
    "parallel_draft_step": (lambda: [("eagle", config({"parallel_draft_step": 3}))], "peagle"),
    "eagle_freeze_base_model": (lambda: [("eagle", config(eagle_freeze_base_model=False))], "eagle3"),
    "eagle_base_lora": (lambda: [("eagle", config(**LORA))], "eagle3"),
}
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "EAGLE_MTP_DEFAULT_CFG": (lambda: EAGLE_MTP_DEFAULT_CFG, r"eagle_reuse_base_decoder.*\[\('mtp', \{\}\)\]"),
    "use_mtp_layernorm": (lambda: [("eagle", {ARCHITECTURE: {"use_mtp_layernorm": True}})], r"\[\('mtp', \{\}\)\]"),
    "eagle_mix_hidden_states": (lambda: [("eagle", {"eagle_mix_hidden_states": True})], "smaller eagle_ttt_steps"),
    "eagle_enable_nvtx": (lambda: [("eagle", {"eagle_enable_nvtx": True})], "torch.profiler"),
    "another decoder": (lambda: [("eagle", {"eagle_decoder_type": "kimi"})], "'kimi'. Did you mean 'kimik2'"),
    "MoE": (lambda: [("eagle", {"eagle_decoder_type": "kimik2", ARCHITECTURE: {"num_hidden_layers": 2}})], "experts"),
    "parallel heads of layers": (
        lambda: [("eagle", {ARCHITECTURE: {"parallel_draft_heads_num_layers": 2}})],
        "num_hidden_layers",
    ),
    "EAGLE-1 in parallel": (
        lambda: [("eagle", {ARCHITECTURE: first_eagle()["config"][ARCHITECTURE] | {"parallel_draft_step": 2}})],
        "P-EAGLE",
    ),
    "LoRA via teacher": (lambda: [("eagle", config(**LORA, eagle_base_lora_logits_detach_prob=0.5))], "must be 1.0"),
    "LoRA of late layers of any kind": (
        lambda: [("eagle", {"eagle_base_lora": True, "eagle_base_lora_start_layer": 2})],
        "target_modules",
    ),
    "LoRA of no module": (
        lambda: [("eagle", config(**{**LORA, "eagle_base_lora_target_modules": ["query"]}))],
        "target_modules",
    ),
    "an offline base that learns": (
        lambda: [("eagle", {"eagle_offline": True, "eagle_freeze_base_model": False})],
        "at their defaults",
    ),
}


def converted(mode: Any) -> Any:
    torch.manual_seed(3)
    return modelopt.convert(base(), mode)


@pytest.mark.parametrize("form", FORMS)
def test_a_form_trains_and_comes_back(form: str, tmp_path: Path) -> None:
    mode, kind = FORMS[form]
    model, ids = converted(mode()), text(2, 10)
    assert model._convert_head.config.kind == kind
    model.train()
    model(input_ids=ids, labels=ids).loss.backward()
    learning = {name for name, weight in model.named_parameters() if weight.grad is not None}
    assert learning == {name for name, weight in model.named_parameters() if weight.requires_grad}
    modelopt.save(model.eval(), tmp_path / "saved")
    back = modelopt.restore(base(), tmp_path / "saved")
    torch.manual_seed(1)
    expected = model(input_ids=ids, labels=ids).loss
    torch.manual_seed(1)
    assert back(input_ids=ids, labels=ids).loss == expected
    exported = modelopt.export_speculative_decoding(model, export_dir=tmp_path / "out", dtype=torch.float16)
    found = read_head(tmp_path / "out")
    assert found.config.kind == kind
    assert {tensor.dtype for tensor in found.tensors.values() if tensor.is_floating_point()} == {torch.float16}
    assert exported.format_name == {"eagle3": "modelopt"}.get(kind, exported.format_name)


@pytest.mark.parametrize("form", REFUSED)
def test_a_form_is_refused_by_name_and_the_model_stays(form: str) -> None:
    mode, message = REFUSED[form]
    model = base()
    with pytest.raises(ArgumentError, match=message):
        modelopt.convert(model, mode())
    assert type(model) is LlamaForCausalLM and "eagle_module" not in dict(model.named_children())


def test_a_bare_name_is_a_head_of_the_models_sizes() -> None:
    head, own = converted("eagle").eagle_module.config, base().config
    assert (head.intermediate_size, head.num_attention_heads) == (own.intermediate_size, own.num_attention_heads)
    assert not head.own_lm_head


def test_configurations_are_checked_and_have_attributes() -> None:
    made = EagleConfig(eagle_ttt_steps=2)
    assert (made.eagle_ttt_steps, made["eagle_loss_decay_factor"]) == (2, 0.9)
    made.eagle_ttt_steps = 4
    assert made.model_dump()["eagle_ttt_steps"] == 4 and copy.deepcopy(made) == made
    with pytest.raises(ArgumentError, match="Did you mean 'eagle_ttt_steps'"):
        EagleConfig(eagle_tt_steps=2)
    with pytest.raises(ArgumentError, match="of the type int"):
        made.eagle_ttt_steps = "4"
    with pytest.raises(AttributeError, match="eagle_ttt_steps"):
        _ = made.eagle_ttt_step


def test_kimi_k2_has_latent_attention() -> None:
    head = converted(FORMS["kimik2"][0]()).eagle_module.config
    assert head.latent.kv_lora_rank == 8 and head.latent.q_lora_rank == 12
    assert (head.rope_theta, head.rope_scaling["rope_type"], head.rope_scaling["factor"]) == (50_000.0, "yarn", 64.0)


def test_parallel_draft_step_is_p_eagle() -> None:
    model = converted(FORMS["parallel_draft_step"][0]())
    objective = model._convert_objective(checkpointing=False)
    assert isinstance(objective, PEagleObjective) and objective.settings.depths == 3
    losses = learned(model, 8, 3e-3, text())
    assert losses[-1] < losses[0]


def test_an_unfrozen_base_learns_the_text_beside_its_head(tmp_path: Path) -> None:
    model, ids = eagle(eagle_freeze_base_model=False), text(4, 16)
    before, plain = copy.deepcopy(model.model.state_dict()), base()(ids, labels=ids).loss
    found = model.train()(input_ids=ids, labels=ids)
    torch.testing.assert_close(found.base_loss, plain, rtol=1e-4, atol=1e-4)
    (found.loss - found.base_loss).backward(retain_graph=True)
    assert all(not bool(weight.grad.any()) for weight in model.model.parameters() if weight.grad is not None)
    assert not torch.equal(found.loss, found.base_loss)
    model.zero_grad()
    learned(model, 10, 3e-3, ids)
    assert not torch.equal(model.model.layers[0].mlp.up_proj.weight, before["layers.0.mlp.up_proj.weight"])
    assert model.eval()(input_ids=ids, labels=ids).base_loss is None
    assert "TARGET" in model.export_head(tmp_path / "out", "hf").command
    model.save_pretrained(tmp_path / "saved")
    assert LlamaForCausalLM.from_pretrained(tmp_path / "saved")(ids, labels=ids).loss < plain


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_adapters_learn_with_the_head_and_keep_the_answers(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from peft import PeftModel

    model, ids = eagle(**LORA, eagle_base_lora_start_layer=1, eagle_base_lora_warmup_steps=2), text(4, 16)
    named = {name for name, weight in model.named_parameters() if weight.requires_grad and "lora_" in name}
    assert named and all("layers.0." not in name for name in named)
    first = model.train()(input_ids=ids, labels=ids)
    assert first.base_loss is None
    learned(model, 12, 1e-2, ids)
    found = model(input_ids=ids, labels=ids)
    entropy = -(base()(ids).logits.log_softmax(-1) * base()(ids).logits.softmax(-1)).sum(-1)[:, :-1].mean()
    assert 0.1 * entropy < found.base_loss < 0.1 * (entropy + 1)
    modelopt.save(model.eval(), tmp_path / "saved")
    assert torch.equal(LlamaForCausalLM.from_pretrained(tmp_path / "saved")(ids).logits, base()(ids).logits)
    expected = model(ids).logits
    assert not torch.equal(expected, base()(ids).logits)
    prompt = ids[:1, :6]
    answer, _ = modelopt.HFARValidation(model, Words()).validate(8, input_ids=prompt)
    assert torch.equal(answer, model.generate(prompt, max_new_tokens=8, do_sample=False))
    torch.testing.assert_close(modelopt.restore(base(), tmp_path / "saved")(ids).logits, expected)
    modelopt.export_speculative_decoding(model, export_dir=tmp_path / "out")
    adapted: Any = PeftModel.from_pretrained(base(), tmp_path / "out" / "base_lora")
    torch.testing.assert_close(adapted(ids).logits, expected)


def stored(model: Any, rows: Tensor) -> dict[str, Tensor]:
    """What ModelOpt's scripts keep of a model, computed by transformers itself."""
    states = base()(rows, output_hidden_states=True).hidden_states
    read = model._convert_head.config.boundaries
    return {"hidden_states": states[-1], "aux_hidden_states": torch.cat([states[boundary] for boundary in read], -1)}


def test_stored_states_train_the_same_head(tmp_path: Path) -> None:
    online, offline = eagle(), eagle(eagle_offline=True)
    offline.load_state_dict(online.state_dict())
    lengths = (7, 12)
    for number, length in enumerate(lengths):
        row = text(1, length, seed=number)
        states = {name: values[0] for name, values in stored(online, row).items()}
        torch.save({"input_ids": row[0], **states}, tmp_path / f"{number}.pt")
    dataset = modelopt.OfflineStates(tmp_path)
    batch = dataset.collate([dataset[index] for index in range(len(dataset))])
    found = offline.train()(**batch)
    plain = {name: values for name, values in batch.items() if name != "base_model_outputs"}
    torch.testing.assert_close(found.loss, online.train()(**plain).loss)
    found.loss.backward()
    with pytest.raises(ArgumentError, match=r"base_model_outputs\['base_model_hidden_states'\], \(batch, tokens, 32\)"):
        offline(**plain)
    with pytest.raises(ArgumentError, match="converted with eagle_offline"):
        online(**batch)
    with pytest.raises(DataError, match="forerun features"):
        modelopt.OfflineStates(tmp_path / "none")


def test_stored_states_may_be_padded_anywhere_and_lack_the_final_norm() -> None:
    model, row = eagle(eagle_offline=True), text(1, 8)
    states = stored(model, row)
    outputs = {"base_model_hidden_states": states["hidden_states"], "aux_hidden_states": states["aux_hidden_states"]}
    expected = model(row, labels=row, base_model_outputs=outputs).loss
    padded, mask = torch.nn.functional.pad(row, (3, 0)), torch.nn.functional.pad(torch.ones_like(row), (3, 0))
    moved = {name: torch.nn.functional.pad(values, (0, 0, 3, 0), value=9.0) for name, values in outputs.items()}
    torch.testing.assert_close(
        model(padded, attention_mask=mask, labels=padded, base_model_outputs=moved).loss, expected
    )
    raw: list[Tensor] = []
    with torch.no_grad(), model.model.norm.register_forward_pre_hook(lambda _module, given: raw.append(given[0])):
        base_outputs = model.model(row)
    outputs |= {"base_model_hidden_states": raw[0], "base_hidden_prenorm": True}
    torch.testing.assert_close(model(row, labels=row, base_model_outputs=outputs).loss, expected)
    assert base_outputs is not None


class Words:
    """A tokenizer of words that are numbers."""

    def apply_chat_template(self, messages: Any, **_options: Any) -> str:
        return " ".join(message["content"] for message in messages)

    def __call__(self, words: str, **_options: Any) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in words.split()]}


def test_a_draft_vocabulary_is_calibrated_kept_and_set(tmp_path: Path) -> None:
    talk = [[{"role": "user", "content": "7 7 7 3 3"}], [{"role": "assistant", "content": "9 9 3 11"}]]
    offsets = modelopt.calibrate_frequent_vocab(Words(), talk, 3, tmp_path / "d2t.pt")
    assert offsets.tolist() == [3, 6, 7]
    assert torch.equal(modelopt.calibrate_frequent_vocab(Words(), ["7 7 7 3 3 3", "9 9 11"], 3), offsets)
    ids = modelopt.read_draft_vocabulary(tmp_path / "d2t.pt")
    assert ids.tolist() == [3, 7, 9]
    model = eagle({"draft_vocab_size": 3})
    model.set_draft_vocabulary(ids)
    assert model.eagle_module.token_ids.tolist() == [3, 7, 9]
    with pytest.raises(ArgumentError, match="4 different tokens"):
        modelopt.calibrate_frequent_vocab(Words(), talk, 5)
    torch.save({"d2t": offsets}, tmp_path / "other.pt")
    (tmp_path / "text.pt").write_text("no tensors")
    for name in ("other.pt", "text.pt", "missing.pt"):
        with pytest.raises(CheckpointError, match=name):
            modelopt.read_draft_vocabulary(tmp_path / name)


def test_acceptance_is_measured_by_decoding() -> None:
    model = eagle()
    plain = base().generate(text(1, 6), max_new_tokens=12, do_sample=False)
    ids, rate = modelopt.HFARValidation(model, Words()).validate(12, input_ids=text(1, 6), steps=2)
    assert torch.equal(ids, plain) and 1.0 <= rate <= 3.0
    words = [{"role": "user", "content": " ".join(map(str, text(1, 6)[0].tolist()))}]
    assert torch.equal(modelopt.HFARValidation(model, Words()).validate(12, words)[0], plain)


def test_what_is_not_converted_is_not_saved_and_what_is_none_is_not_restored(tmp_path: Path) -> None:
    for call in (modelopt.save, modelopt.export_hf_checkpoint):
        with pytest.raises(ArgumentError, match="convert it first"):
            call(base(), tmp_path)
    with pytest.raises(ArgumentError, match="export_dir"):
        modelopt.export_hf_checkpoint(eagle())
    with pytest.raises(CheckpointError, match=r"forerun\.modelopt\.save"):
        modelopt.restore(base(), tmp_path)
    with pytest.raises(ArgumentError, match="load_head"):
        modelopt.restore(eagle(), tmp_path)
    (tmp_path / "file.pth").touch()
    with pytest.raises(ArgumentError, match="in a directory"):
        modelopt.save(eagle(), tmp_path / "file.pth")


def test_medusas_arguments_of_a_call_are_refused_with_what_trains_both() -> None:
    with pytest.raises(ArgumentError, match=r"freeze_base_model.*forerun train medusa2"):
        converted("medusa")(text(), labels=text(), freeze_base_model=False)


@pytest.mark.filterwarnings("ignore::UserWarning:torch.*", "ignore::FutureWarning")
def test_context_parallelism_is_refused_with_what_to_use(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        ids = text(2, 8)
        with (
            torch.distributed.tensor.experimental.context_parallel(mesh, buffers=[ids], buffer_seq_dims=[1]),
            pytest.raises(ArgumentError, match=r"cp_size above 1.*gradient_checkpointing_enable.*dp_shard_size"),
        ):
            eagle()(ids, labels=ids)
    finally:
        torch.distributed.destroy_process_group()


RECIPE = """
metadata: {recipe_type: speculative_eagle, description: bundled}
model: {model_name_or_path: some/model, trust_remote_code: false, use_fake_base_for_offline: false}
data: {mode: , data_path: prepared, offline_data_path: , draft_vocab_cache: , vlm_img_dir: , vlm_processor: }
training:
  output_dir: runs/head
  num_train_epochs: 1
  per_device_train_batch_size: 1
  learning_rate: 1.0e-4
  warmup_steps: 1000
  training_seq_len: 2048
  logging_steps: 100
  save_steps: 8192
  cp_size: 1
  disable_tqdm: false
  estimate_ar: false
  ar_validate_steps: -1
  answer_only_loss: false
  do_eval: false
  lr_scheduler_type: linear
  save_strategy: steps
  weight_decay: 0.0
  dataloader_drop_last: true
  bf16: true
  tf32: true
  remove_unused_columns: false
eagle:
  eagle_decoder_type: llama
  eagle_ttt_steps: 4
  eagle_export_rope_scaling: {rope_type: yarn, factor: 32.0, original_max_position_embeddings: 2048}
  eagle_architecture_config: {num_hidden_layers: 2, rope_theta: 5.0e+5, eagle_aux_hidden_state_layer_ids: [1, 13, 26]}
"""


def test_modelopts_recipe_is_read_as_ours(tmp_path: Path) -> None:
    (tmp_path / "eagle3.yaml").write_text(RECIPE)
    found = read_recipe("eagle3", tmp_path / "eagle3.yaml", ["training.steps=7", "draft.options.qk_norm=true"])
    assert (found.target, found.data, found.output, found.mode) == ("some/model", "prepared", "runs/head", "online")
    assert (found.objective.steps, found.objective.decay) == (4, 0.9)
    assert (found.windows.length, found.windows.rows) == (2048, 1)
    training = found.training
    assert (training.steps, training.learning_rate) == (7, 1e-4)
    assert (training.warmup_steps, training.schedule) == (1000, "linear")
    expected = {"num_hidden_layers": 2, "rope_theta": 5e5, "rope_scaling": None, "boundaries": [2, 14, 27]}
    assert found.draft.options == {**expected, "qk_norm": True}
    (tmp_path / "eagle3.yaml").write_text(RECIPE.replace("offline_data_path: ,", "offline_data_path: states,"))
    stored = read_recipe("eagle3", tmp_path / "eagle3.yaml")
    assert (stored.mode, stored.features) == ("offline", "states")


def test_other_recipes_of_modelopts_are_read_by_their_kind(tmp_path: Path) -> None:
    head = "model: {model_name_or_path: m}\ndata: {data_path: d}\ntraining: {output_dir: o}\n"
    kinds = {
        "medusa": "metadata: {recipe_type: speculative_medusa}\nmedusa: {medusa_num_heads: 4}",
        "dflash": "metadata: {recipe_type: speculative_dflash}\ndflash: {dflash_block_size: 4}",
        "peagle": "metadata: {recipe_type: speculative_eagle}\n"
        "eagle: {eagle_architecture_config: {parallel_draft_step: 5}}",
    }
    for kind, more in kinds.items():
        (tmp_path / f"{kind}.yaml").write_text(head + more)
        assert read_recipe(kind, tmp_path / f"{kind}.yaml").kind == kind
    with pytest.raises(ArgumentError, match="forerun train peagle"):
        read_recipe("eagle3", tmp_path / "peagle.yaml")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("cp_size: 1", "cp_size: 2", "training.cp_size is 2.*gradient_checkpointing.*target_parallel=tp"),
        ("draft_vocab_cache: ", "draft_vocab_cache: d2t.pt", "draft.vocab_size=N"),
        ("data_path: prepared", "streaming_server_url: http", "--source vllm"),
        ("weight_decay", "weight_decai", "Did you mean 'training.weight_decay'"),
        ("\neagle:", "\neagles:", "no section 'eagles'"),
        ("speculative_eagle", "ptq", "recipe_type.*'ptq'"),
        ("eagle_ttt_steps: 4", "eagle_freeze_base_model: false", r"forerun\.modelopt\.convert"),
        ("eagle_ttt_steps: 4", "eagle_ttt_step: 4", "Did you mean 'eagle_ttt_steps'"),
    ],
)
def test_what_a_recipe_of_modelopts_cannot_have_is_refused(old: str, new: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "eagle3.yaml").write_text(RECIPE.replace(old, new))
    with pytest.raises(ArgumentError, match=message):
        read_recipe("eagle3", tmp_path / "eagle3.yaml")
