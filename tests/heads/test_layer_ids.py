"""Which states of the target a file of an EAGLE-3 head means: every publisher's list of layers, in its own counting."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from torch import Tensor

from forerun.control.config import method_of
from forerun.errors import CheckpointError
from forerun.heads.catalogue import known_heads
from forerun.heads.engines import diagnose_files, worst
from forerun.heads.files import (
    HeadCheckpoint,
    differences,
    format_named,
    format_of,
    parse,
    read_files,
    read_head,
    write_head,
)
from heads.samples import PLAIN, TARGET, sample

IDS, THEIRS = "eagle_aux_hidden_state_layer_ids", "target_layer_ids"
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


def read(keys: dict[str, Any], tensors: dict[str, Tensor], num_layers: int | None = None) -> HeadCheckpoint:
    return format_of(keys).read(keys, tensors, num_layers=num_layers)


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
        with pytest.raises(
            CheckpointError, match=rf"next_layer_regular is {str(other).lower()}, but the second layer's"
        ):
            read(keys, tensors)
    with pytest.raises(CheckpointError, match="the first layer alone reads the embedding; use flat"):
        format_named("speculators").write(sample(config), TARGET)
