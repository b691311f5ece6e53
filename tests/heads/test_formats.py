"""Every format gives back what it was given, speaks the public keys, and refuses what it cannot mean."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from forerun.control.config import method_of
from forerun.errors import ArgumentError, CheckpointError
from forerun.heads.catalogue import known_heads
from forerun.heads.eagle import EagleConfig, EagleHead
from forerun.heads.engines import diagnose_files, worst
from forerun.heads.files import (
    HeadCheckpoint,
    differences,
    expected_shapes,
    format_named,
    format_of,
    parse,
    read_files,
    read_head,
    write_head,
)
from forerun.types import LAST_HIDDEN
from heads.samples import FIRST, FORMATS, PLAIN, TARGET, VARIANTS, logits, sample, written, written_as

IDS = "eagle_aux_hidden_state_layer_ids"
CASES = [(name, variant) for name in FORMATS for variant in written_as(name)]


def read(keys: dict[str, Any], tensors: dict[str, Tensor], num_layers: int | None = None) -> HeadCheckpoint:
    return format_of(keys).read(keys, tensors, num_layers=num_layers)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_table_of_tensors_is_the_modules(variant: str) -> None:
    head = EagleHead(VARIANTS[variant])
    assert expected_shapes(VARIANTS[variant]) == {name: tuple(t.shape) for name, t in head.state_dict().items()}


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_written_and_read_back_is_the_same_head(name: str, variant: str, tmp_path: Path) -> None:
    before = sample(VARIANTS[variant])
    write_head(before, tmp_path / "head", name, TARGET)
    after = read_head(tmp_path / "head")
    assert differences(before, after) == []
    assert torch.equal(logits(before.build()), logits(after.build()))
    assert (FEEDBACK in " ".join(after.notes)) == (VARIANTS[variant].norm_output and name != "speculators")


FEEDBACK = "SpecForge"


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_recognises_its_own_files_and_no_others(name: str) -> None:
    assert format_of(written(name=name)[0]).name == name == format_named(name).name


def test_unknown_formats_are_refused_with_the_nearest() -> None:
    with pytest.raises(ArgumentError, match="'speculators'"):
        format_named("speculator")
    with pytest.raises(CheckpointError, match="no head's"):
        format_of({"vision_config": {}, "num_channels": 8})


def test_bf16_weights_keep_their_bits_and_rotary_frequencies_stay_exact(tmp_path: Path) -> None:
    before = sample(PLAIN, dtype=torch.bfloat16)
    write_head(before, tmp_path / "head", "flat", TARGET)
    assert json.loads((tmp_path / "head/config.json").read_text())["torch_dtype"] == "bfloat16"
    head = read_head(tmp_path / "head").build()
    assert head.fc.weight.dtype == torch.bfloat16 and head.rotary.inv_freq.dtype == torch.float32
    assert head.fc.weight.requires_grad
    assert before.build(torch.float32).fc.weight.dtype == torch.float32


def test_building_disturbs_nobody() -> None:
    made = sample(PLAIN)
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    head = made.build()
    assert torch.equal(torch.rand(1), expected)
    head.fc.weight.data.zero_()
    assert made.tensors["fc.weight"].any(), "the module has copies"


# What is on the wire


def test_flat_keys_are_those_of_the_public_template() -> None:
    """serving-engines.md 2.2: a head of Llama-3.1-8B's shape, its target's 32 layers read after 2, 16 and 29."""
    config = EagleConfig(
        **{"hidden_size": 32, "target_hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 40, "draft_vocab_size": 20},
        **{"boundaries": (2, 16, 29), "rope_theta": 500000.0, "max_position_embeddings": 2048},
    )
    keys, tensors = format_named("flat").write(sample(config, dtype=torch.bfloat16), TARGET)
    assert keys == {
        **{"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "torch_dtype": "bfloat16"},
        **{"hidden_size": 32, "target_hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "hidden_act": "silu"},
        **{"rms_norm_eps": 1e-5, "initializer_range": 0.02, "vocab_size": 40, "draft_vocab_size": 20},
        **{"tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "norm_before_residual": False},
        **{"norm_before_fc": False, "fc_norm": False, "norm_output": False, "num_aux_hidden_states": 3},
        "eagle_aux_hidden_state_layer_ids": [2, 16, 29],
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 15, 28]},
        **{"rope_theta": 500000.0, "rope_scaling": None, "max_position_embeddings": 2048},
    }
    layer = ["input_layernorm", "hidden_norm", "post_attention_layernorm"]
    layer += [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    names = {f"midlayer.{name}.weight" for name in layer} | {"fc.weight", "norm.weight", "lm_head.weight"}
    assert set(tensors) == names | {"d2t", "t2d"}
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (32, 64)


def test_speculators_keys_name_the_verifier_and_the_residual() -> None:
    keys, tensors = written(VARIANTS["five"], "speculators")
    assert keys["speculators_model_type"] == "eagle3" and keys["norm_before_residual"] is False
    assert keys[IDS] == [1, 3, 5, 7, 10] and keys["transformer_layer_config"]["num_aux_hidden_states"] == 5
    assert keys["speculators_config"]["verifier"] == {
        "name_or_path": "owner/target",
        "architectures": ["LlamaForCausalLM"],
    }
    assert keys["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    assert "num_aux_hidden_states" not in written(name="speculators")[0]["transformer_layer_config"]
    assert keys["transformer_layer_config"]["tie_word_embeddings"] is False
    assert any(name.startswith("layers.0.") for name in tensors)


def test_modelopt_counts_layers_from_0() -> None:
    keys, tensors = written(VARIANTS["reduced"], "modelopt")
    assert keys["eagle_config"][IDS] == [1, 4, 6] and keys[IDS] == [2, 5, 7]
    assert keys["eagle_config"]["use_last_layernorm"] is True
    assert "d2t" in tensors and "t2d" not in tensors and any(name.startswith("layers.0.") for name in tensors)


def test_the_first_generation_is_flat_and_needs_no_layer_ids() -> None:
    keys, tensors = written(FIRST)
    assert keys["bias"] is False and IDS not in keys and "eagle_config" not in keys
    assert {"fc.weight", "layers.0.post_attention_layernorm.weight"} < set(tensors)
    assert not {"layers.0.input_layernorm.weight", "norm.weight", "lm_head.weight", "d2t"} & set(tensors)
    original = {**keys, "architectures": ["LlamaForCausalLM"]}
    assert read(original, tensors).config.boundaries == (LAST_HIDDEN,), "as in SafeAILab's own files"
    for name in ("modelopt", "speculators"):
        with pytest.raises(CheckpointError, match="use flat"):
            format_named(name).write(sample(FIRST), TARGET)


# Layer ids


def ids_case(top: list[int] | None, nested: list[int] | None, **more: Any) -> tuple[int, ...]:
    keys, tensors = written()
    del keys[IDS], keys["eagle_config"], keys["num_aux_hidden_states"]
    keys |= {} if top is None else {IDS: top}
    keys |= {} if nested is None else {"eagle_config": {IDS: nested}}
    return read(keys | more, tensors, num_layers=more.pop("layers", None)).config.boundaries


def test_each_list_of_layer_ids_has_its_own_convention_and_contradictions_are_refused_by_name() -> None:
    assert ids_case([2, 5, 7], None) == ids_case(None, [1, 4, 6]) == ids_case([2, 5, 7], [1, 4, 6]) == (2, 5, 7)
    assert ids_case([0, 5, 10], [-1, 4, 9]) == (0, 5, 10)
    with pytest.raises(CheckpointError, match=rf"{IDS} \[2, 5, 7\].*eagle_config\.{IDS} \[2, 5, 7\].*\[3, 6, 8\]"):
        ids_case([2, 5, 7], [2, 5, 7])
    with pytest.raises(CheckpointError, match="num_aux_hidden_states is 4"):
        ids_case([2, 5, 7], None, num_aux_hidden_states=4)


def test_ids_that_some_count_otherwise_are_noted() -> None:
    keys, tensors = written()
    assert read(keys, tensors).notes == ()
    del keys[IDS]
    assert "read as layers counted from 0" in read(keys, tensors).notes[0]


def test_without_ids_the_default_needs_the_targets_layers() -> None:
    keys, tensors = written()
    del keys[IDS]
    keys["eagle_config"] = {IDS: []}
    assert read(keys, tensors, num_layers=10).config.boundaries == (2, 5, 7)
    assert read(keys, tensors, num_layers=32).config.boundaries == (2, 16, 29)
    with pytest.raises(CheckpointError, match="number of layers: name the target"):
        read(keys, tensors)


def test_the_state_after_the_final_norm_has_no_id() -> None:
    config = dataclasses.replace(PLAIN, boundaries=(2, 5, LAST_HIDDEN))
    for name in FORMATS:
        with pytest.raises(CheckpointError, match="final norm"):
            format_named(name).write(sample(config), TARGET)


# Names and spellings


def test_other_spellings_of_names_are_understood() -> None:
    keys, tensors = written(VARIANTS["eagle-3.1"])
    before = read(keys, tensors)
    spelled = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    for index, where in enumerate(("low", "mid", "high")):
        spelled[f"aux_norm_{where}.weight"] = spelled.pop(f"fc_norm.{index}.weight")
    spelled["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    keys["use_aux_norm"], keys["return_hidden_post_norm"] = keys.pop("fc_norm"), keys.pop("norm_output")
    assert differences(before, read(keys, spelled)) == []


def test_both_spellings_of_rope_are_understood() -> None:
    keys, tensors = written(VARIANTS["scaled_rope"])
    before = read(keys, tensors)
    theta, scaling = keys.pop("rope_theta"), keys.pop("rope_scaling")
    assert differences(before, read(keys | {"rope_parameters": {"rope_theta": theta, **scaling}}, tensors)) == []
    older = {"type" if name == "rope_type" else name: value for name, value in scaling.items()}
    assert differences(before, read(keys | {"rope_theta": theta, "rope_scaling": older}, tensors)) == []


def test_norms_above_the_first_layer_are_written_under_both_names() -> None:
    keys, tensors = written(VARIANTS["two_layers"])
    ours, theirs = "layers.1.input_layernorm.weight", "layers.1.hidden_norm.weight"
    assert torch.equal(tensors[ours], tensors[theirs])
    before = read(keys, tensors)
    for dropped in (ours, theirs):
        alone = {name: tensor for name, tensor in tensors.items() if name != dropped}
        assert differences(before, read(keys, alone)) == []
    with pytest.raises(CheckpointError, match=rf"{ours} and {theirs} differ"):
        read(keys, tensors | {theirs: tensors[ours] + 1})


def test_nested_norm_before_fc_wins() -> None:
    keys, tensors = written(VARIANTS["norm_before_fc"])
    keys["norm_before_fc"] = False
    assert read(keys, tensors).config.norm_before_fc


def test_a_tied_head_is_read_as_its_own_and_written_untied() -> None:
    keys, tensors = written()
    head = read(keys | {"tie_word_embeddings": True}, tensors)
    assert "tie_word_embeddings" in head.notes[0]
    assert format_named("flat").write(head, TARGET)[0]["tie_word_embeddings"] is False


def test_absent_norm_before_residual_of_speculators_is_false_and_noted() -> None:
    keys, tensors = written(name="speculators")
    del keys["norm_before_residual"]
    head = read(keys, tensors)
    assert not head.config.norm_before_residual and "vLLM would assume true" in head.notes[0]


# Vocabulary


def test_an_unsorted_vocabulary_is_valid() -> None:
    head = sample(VARIANTS["reduced"])
    ids = head.build().token_ids
    assert ids.tolist() != sorted(ids.tolist())
    tensors = written(VARIANTS["reduced"])[1]
    assert tensors["t2d"].nonzero().flatten().tolist() == sorted(ids.tolist())


def test_t2d_must_agree_with_d2t() -> None:
    keys, tensors = written(VARIANTS["reduced"])
    with pytest.raises(CheckpointError, match="t2d and d2t disagree about 60 tokens, first about token 0"):
        read(keys, tensors | {"t2d": ~tensors["t2d"]})
    with pytest.raises(CheckpointError, match=r"t2d \(59,\) is of the wrong shape, expected \(60,\)"):
        read(keys, tensors | {"t2d": tensors["t2d"][1:]})


# Refusals, by name


def without(*names: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in written(VARIANTS["reduced"])[1].items() if name not in names}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (without("fc.weight"), "missing: fc.weight"),
        (without("midlayer.hidden_norm.weight"), "missing: layers.0.hidden_norm.weight"),
        (without("d2t", "t2d"), "missing: d2t"),
        (without("lm_head.weight"), "needs its own lm_head"),
        (without() | {"midlayer.extra": torch.ones(2)}, "unknown: layers.0.extra"),
        (without() | {"mask_hidden": torch.ones(1, 48)}, "unknown: mask_hidden"),
        (without() | {"norm.weight": torch.ones(5)}, r"norm.weight \(5,\), expected \(16,\)"),
        (without() | {"fc.weight": torch.ones(16, 80)}, r"fc.weight \(16, 80\), expected \(16, 48\)"),
        (without() | {"fc.weight": torch.ones(16, 48, dtype=torch.uint8)}, r"of the wrong dtype: fc.weight \(uint8\)"),
        (without() | {"layers.0.hidden_norm.weight": torch.ones(16)}, "layers.0.hidden_norm.weight is stored twice"),
    ],
)
def test_tensors_are_refused_by_name(tensors: dict[str, Tensor], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(written(VARIANTS["reduced"])[0], tensors)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "no hidden_size"),
        ({"vocab_size": "many"}, "vocab_size of config.json must be a whole number, got 'many'"),
        ({"fc_norm": 1}, "fc_norm of config.json must be true or false"),
        ({IDS: "2,5,7"}, f"{IDS} of config.json must be a list"),
        ({"eagle_config": []}, "eagle_config of config.json must be an object"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps of config.json must be a number"),
        ({"hidden_act": 3}, "hidden_act of config.json must be a string"),
        ({"num_attention_heads": 0}, "num_attention_heads must be at least 1"),
        ({"draft_vocab_size": 61}, r"draft_vocab_size must be in 1\.\.60"),
        ({"architectures": ["PEagleDraftModel"]}, "PEagleDraftModel"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "unknown: fc.weight"),
        ({"quantization_config": {"quant_method": "fp8"}}, "only heads in floating point"),
        ({"bias": True}, "missing: fc.bias"),
        ({"fc_norm": True}, "missing: fc_norm.0.weight"),
    ],
)
def test_configurations_are_refused_by_key(changes: dict[str, Any], message: str) -> None:
    keys, tensors = written()
    with pytest.raises(CheckpointError, match=message):
        read(keys | changes, tensors)


def test_other_kinds_of_heads_are_refused() -> None:
    keys, tensors = written(name="modelopt")
    keys["eagle_config"]["use_mtp_layernorm"] = True
    with pytest.raises(CheckpointError, match="use_mtp_layernorm True"):
        read(keys, tensors)
    keys, tensors = written(name="speculators")
    with pytest.raises(CheckpointError, match="'xpress'"):
        read(keys | {"speculators_model_type": "xpress"}, tensors)
    both = dataclasses.replace(PLAIN, norm_before_fc=True, fc_norm=True)
    with pytest.raises(CheckpointError, match="forbids norm_before_fc together with fc_norm"):
        written(both, "speculators")


THEIRS = "target_layer_ids"
FIVE = dataclasses.replace(PLAIN, boundaries=(2, 4, 5, 7, 9), qk_norm=True, own_embedding=True)

DEEPSPEC = "Qwen3Eagle3Model"  # DeepSpec's name of a Qwen3 layer


def deepspec(**changes: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A file as DeepSpec's trainer writes it: the target's Qwen3 configuration with what its config.py sets; null
    removes a key."""
    keys, tensors = format_named("flat").write(sample(FIVE), TARGET)
    kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    kept += ("head_dim", "hidden_act", "rms_norm_eps", "vocab_size", "max_position_embeddings", "attention_bias")
    written = {
        **{name: keys[name] for name in (*kept, "rope_theta", "rope_scaling", "initializer_range")},
        **{"architectures": [DEEPSPEC], "model_type": "qwen3", "torch_dtype": "bfloat16", "tie_word_embeddings": False},
        **{"num_target_layers": 10, "layer_types": ["full_attention"], "sliding_window": None, "max_window_layers": 36},
        **{"use_sliding_window": False, "target_model_name_or_path": "Qwen/Qwen3-8B", "attention_dropout": 0.0},
        **{THEIRS: [1, 3, 4, 6, 8], "ttt_length": 7, "step_loss_decay": 0.8, "draft_num_hidden_layers": 1},
        **changes,
    }
    names = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    return {name: value for name, value in written.items() if value is not None}, names


def on_disk(folder: Path, keys: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    head = write_head(sample(PLAIN), folder / "head", "flat", TARGET)
    (head / "config.json").write_text(json.dumps(keys))
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, head / "model.safetensors")
    return head


@pytest.mark.parametrize("num_layers", [None, 10])
def test_deepspecs_five_layers_are_the_outputs_of_these_layers(num_layers: int | None) -> None:
    """deepspec/modeling/eagle3/common.py concatenates ``hidden_states[i + 1]``; vLLM adds one, too."""
    head = read(*deepspec(), num_layers=num_layers)
    assert head.config.boundaries == (2, 4, 5, 7, 9) and head.unknown == [] and head.notes == ()
    assert (head.config.qk_norm, head.config.own_embedding, head.config.sliding_window) == (True, True, None)
    assert {name: tuple(tensor.shape) for name, tensor in head.tensors.items()}["fc.weight"] == (16, 80)
    again = read(*format_named("flat").write(head, TARGET))
    assert differences(head, again) == [], "and an export says so in the words of all engines"


def test_a_file_with_every_list_must_agree_with_itself() -> None:
    keys, tensors = deepspec()
    agreeing = {IDS: [2, 4, 5, 7, 9], "eagle_config": {IDS: [1, 3, 4, 6, 8], THEIRS: [1, 3, 4, 6, 8]}}
    assert read(keys | agreeing, tensors).config.boundaries == (2, 4, 5, 7, 9)
    for wrong in ({IDS: [1, 3, 4, 6, 8]}, {"eagle_config": {IDS: [2, 4, 5, 7, 9]}}, {"eagle_config": {THEIRS: [2]}}):
        with pytest.raises(CheckpointError, match=rf"contradicts itself.*{THEIRS} \[1, 3, 4, 6, 8\] counts layers"):
            read(keys | wrong, tensors)
    with pytest.raises(CheckpointError, match="num_aux_hidden_states is 3"):
        read(keys | {"num_aux_hidden_states": 3}, tensors)


def test_the_targets_layers_that_a_file_names_are_checked_and_used() -> None:
    keys, tensors = deepspec()
    with pytest.raises(CheckpointError, match=r"made for a target of 10 layers .* this one has 12"):
        read(keys, tensors, num_layers=12)
    plain, weights = format_named("flat").write(sample(PLAIN), TARGET)
    bare = {name: value for name, value in plain.items() if name not in (IDS, "eagle_config", "num_aux_hidden_states")}
    assert read(bare | {"num_target_layers": 10}, weights).config.boundaries == (2, 5, 7), "the default for ten layers"


@pytest.mark.parametrize(("counting", "expected"), [("vllm", (2, 5, 7)), (None, (2, 5, 7)), ("sglang", (3, 6, 8))])
def test_vllms_key_says_how_the_ids_at_the_top_count(counting: str | None, expected: tuple[int, ...]) -> None:
    keys, tensors = format_named("flat").write(sample(PLAIN), TARGET)
    del keys["eagle_config"]
    head = read(keys | {"eagle_aux_layer_semantics": counting}, tensors)
    assert head.config.boundaries == expected and head.unknown == []
    assert "eagle_aux_layer_semantics" not in format_named("flat").write(head, TARGET)[0]
    with pytest.raises(CheckpointError, match=r"eagle_aux_layer_semantics of config.json must be vllm or sglang"):
        read(keys | {"eagle_aux_layer_semantics": "hf"}, tensors)


def test_inner_ids_that_no_layer_has_are_boundaries() -> None:
    """NVIDIA's third head of gpt-oss-120b names [24, 30, 36] of 36 layers (SGLang's pull request 32334)."""
    keys, tensors = format_named("flat").write(sample(PLAIN), TARGET)
    del keys[IDS]
    keys["eagle_config"][IDS] = [4, 7, 10]
    assert read(keys, tensors, num_layers=10).config.boundaries == (4, 7, 10)
    assert read(keys, tensors, num_layers=12).config.boundaries == (5, 8, 11)


def test_engines_that_do_not_look_for_deepspecs_list_are_named(tmp_path: Path) -> None:
    stored = read_files(on_disk(tmp_path, *deepspec()))
    found = diagnose_files(stored, parse(stored), TARGET)
    assert {engine: worst(found, engine) for engine in ("vllm", "sglang", "trtllm")} == {
        "vllm": "fails",
        "sglang": "fails",
        "trtllm": "degrades",
    }
    assert any(f"layer ids only in {THEIRS}" in finding.what for finding in found)


def test_a_head_is_known_for_one_by_its_directory(tmp_path: Path) -> None:
    """Also where the file says for how many layers it was made."""
    assert method_of(on_disk(tmp_path, *deepspec())) == "eagle3"
    assert read_head(tmp_path / "head", num_layers=10).config.boundaries == (2, 4, 5, 7, 9)


def test_the_catalogue_counts_boundaries() -> None:
    """DeepSpec's configurations name the layers 1, 9, 17, 25, 33 of Qwen3-8B and 1, 10, 19, 28, 37 of Qwen3-14B."""
    said = {head.target: head.boundaries for head in known_heads() if head.collection == "DeepSpec, Table 1"}
    assert said["Qwen3-8B"] == said["Qwen3-4B"] == (2, 10, 18, 26, 34) and said["Qwen3-14B"] == (2, 11, 20, 29, 38)


def test_deepspecs_further_layers_read_the_embedding_too() -> None:
    """deepspec/modeling/eagle3/qwen3/modeling.py; TensorRT-LLM says so by a key, DeepSpec's files by their widths."""
    config = dataclasses.replace(FIVE, num_hidden_layers=2, next_layer_regular=False)
    keys, tensors = format_named("flat").write(sample(config), TARGET)
    assert tensors["layers.1.self_attn.q_proj.weight"].shape == (32, 32) and "layers.1.hidden_norm.weight" in tensors
    theirs = deepspec(num_hidden_layers=2, draft_num_hidden_layers=2, layer_types=["full_attention"] * 2)[0]
    for read_from in (keys, theirs):
        head = read(read_from, tensors)
        assert not head.config.next_layer_regular and differences(sample(config), head) in ([], ["config.extra"])
        assert format_named("flat").write(head, TARGET)[0]["eagle_config"]["next_layer_regular"] is False
    regular = dataclasses.replace(config, next_layer_regular=True)
    for other, narrow in ((False, sample(regular)), (True, sample(config))):
        keys, tensors = format_named("flat").write(narrow, TARGET)
        keys["eagle_config"]["next_layer_regular"] = other
        with pytest.raises(CheckpointError, match=rf"next_layer_regular is {str(other).lower()}, but the second"):
            read(keys, tensors)
    with pytest.raises(CheckpointError, match="the first layer alone reads the embedding; use flat"):
        format_named("speculators").write(sample(config), TARGET)
