"""MTP layers in targets' checkpoints: read where they lie, written by themselves, stitched back bit for bit."""

import dataclasses
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun import LLM, SamplingParams
from forerun.cli import main
from forerun.errors import ArgumentError, CheckpointError
from forerun.heads.engines import diagnose, export_head
from forerun.heads.files import HeadCheckpoint, TargetFacts, differences, read_head, write_head
from forerun.heads.layers import query_scaling
from forerun.heads.mtp_files import MtpFormat, read_target, stitch
from heads.samples import change
from model.quantised import fp8
from mtp_targets import FAMILIES, HIDDEN, HYBRIDS, LAYERS, SINGLE, Checkpoint

DENSE = ["input_layernorm", "post_attention_layernorm", *(f"mlp.{name}_proj" for name in ("gate", "up", "down"))]
MIMO = ["token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"]


def rewrite(folder: Path, how: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    how(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def same(first: Tensor, second: Tensor) -> bool:
    bits = [tensor.contiguous().view(torch.uint8) for tensor in (first, second)]
    return first.dtype == second.dtype and torch.equal(*bits)


@pytest.mark.parametrize(
    ("family", "modules"),
    [(family, modules) for family in FAMILIES for modules in (1, 2) if modules == 1 or family not in SINGLE],
)
def test_the_layers_go_to_a_directory_of_their_own_and_back(family: str, modules: int, tmp_path: Path) -> None:
    """Every tensor under the name and with the bits that it had; the target's own copies are left out."""
    checkpoint = Checkpoint(family, tmp_path / "target", modules, torch.bfloat16)
    head = read_target(checkpoint.folder)
    assert head.unknown == [] and head.config.num_hidden_layers == modules
    alone = write_head(head, tmp_path / "head", "mtp", TargetFacts.read(checkpoint.folder))
    assert differences(head, read_head(alone)) == []
    whole, own = load_file(checkpoint.folder / "model.safetensors"), load_file(alone / "model.safetensors")
    if family == "qwen3_5_moe":  # by themselves, experts are not side by side
        assert [name for name in own if name not in whole] == [name for name in own if ".experts." in name]
        own = {name: tensor for name, tensor in own.items() if name in whole}
        whole = {name: tensor for name, tensor in whole.items() if ".experts." not in name}
    assert all(same(tensor, whole[name]) for name, tensor in own.items())
    if family in HYBRIDS:
        assert set(own) == {name for name in whole if name.startswith("mtp.")}
        return
    if family == "ernie":  # which shares the target's last norm
        assert set(own) == {name for name in whole if ".mtp_" in name} | {"model.norm.weight"}
        return
    places = {"mimo": (0, "mtp_layers"), "mimo_v2": (0, "mtp.layers"), "glm_ocr": (LAYERS, "language_model.layers")}
    first, layers = places.get(family, (LAYERS, "layers"))
    where = [f"model.{layers}.{first + number}." for number in range(modules)]
    mine = {name for name in whole if name.startswith(tuple(where))}
    assert set(own) == {name for name in mine if "embed_tokens" not in name and "shared_head.head" not in name}
    if family == "mimo":
        names = [*DENSE, *MIMO, *(f"self_attn.{name}_proj" for name in "qkvo")]
        biases = [f"self_attn.{name}_proj.bias" for name in "qkv"]
        expected = [*(f"{name}.weight" for name in names), *biases]
        assert set(own) == {prefix + name for prefix in where for name in expected}


@pytest.mark.parametrize("family", FAMILIES)
def test_other_layers_are_stitched_into_a_copy(family: str, tmp_path: Path) -> None:
    """In shards, of which one holds none of them; trained in float32, stored as the target is."""
    checkpoint = Checkpoint(family, tmp_path / "target", dtype=torch.bfloat16)
    tensors = load_file(checkpoint.folder / "model.safetensors")
    (checkpoint.folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[: len(names) // 3], "b.safetensors": names[len(names) // 3 :]}
    for name, inside in shards.items():
        save_file({one: tensors[one] for one in inside}, checkpoint.folder / name, {"format": "pt"})
    index = {"weight_map": {one: name for name, inside in shards.items() for one in inside}}
    (checkpoint.folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (checkpoint.folder / "more").mkdir()
    (checkpoint.folder / "more" / "note.txt").write_text("kept")
    head = read_target(checkpoint.folder)
    trained = {
        name: tensor if name == "d2t" else tensor.float() + torch.randn(tensor.shape) * 0.1
        for name, tensor in head.tensors.items()
    }
    after = dataclasses.replace(head, tensors=trained)
    done = stitch(after, checkpoint.folder, tmp_path / "out")
    stored = {name: tensor for file in shards for name, tensor in load_file(done / file).items()}
    changed = {name for name, tensor in stored.items() if not same(tensor, tensors[name])}
    assert stored.keys() == tensors.keys()
    alone = write_head(after, tmp_path / "head", "mtp", TargetFacts.read(checkpoint.folder))
    assert changed == (
        {name for name in tensors if name.startswith("mtp.")}
        if family in HYBRIDS
        else set(load_file(alone / "model.safetensors")) - {"model.norm.weight"}  # which is the target's, too
    )
    kept = {"d2t", *(["layers.0.shared_head.norm.weight"] if family == "ernie" else [])}
    rounded = {name: head.tensors[name] if name in kept else one.bfloat16() for name, one in trained.items()}
    assert differences(read_target(done), dataclasses.replace(head, tensors=rounded)) == []
    for file in checkpoint.folder.rglob("*"):
        if file.is_file() and file.suffix != ".safetensors":
            assert (done / file.relative_to(checkpoint.folder)).read_bytes() == file.read_bytes()
    with pytest.raises(ArgumentError, match="out exists; name a new directory"):
        stitch(after, checkpoint.folder, done)


def test_layers_of_another_target_are_not_stitched(tmp_path: Path) -> None:
    head = read_target(Checkpoint("glm", tmp_path / "two", modules=2).folder)
    one = Checkpoint("glm", tmp_path / "one").folder
    with pytest.raises(CheckpointError, match=r"it lacks model\.layers\.3\.eh_proj\.weight"):
        stitch(head, one, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ["vllm", "sglang", "hf"])
def test_an_export_is_the_target_with_its_layers(to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = Checkpoint("deepseek", tmp_path / "target").folder
    facts = TargetFacts.read(target)
    head = write_head(read_target(target), tmp_path / "head", "mtp", facts)
    words = ("export", str(head), "--to", to, "--target", str(target), "--output", str(tmp_path / "out"), "--json")
    assert main(list(words)) == 0
    command = json.loads(capsys.readouterr().out)["command"]
    assert differences(read_head(head), read_head(tmp_path / "out")) == [] or to != "hf"
    stored = set(load_file(tmp_path / "out" / "model.safetensors"))
    assert ("model.layers.0.input_layernorm.weight" in stored) == (to != "hf")
    if to == "vllm":
        assert shlex.split(command)[2] == str(tmp_path / "out")
        assert json.loads(shlex.split(command)[-1]) == {"method": "mtp", "num_speculative_tokens": 3}
    if to == "sglang":
        assert "--speculative-algorithm NEXTN" in command and command.endswith("--speculative-num-draft-tokens 4")
    with pytest.raises(ArgumentError, match=r"Heads of the kind mtp go to vllm, sglang, llama\.cpp, hf"):
        export_head(head, facts, "trtllm", tmp_path / "more")


def test_llama_cpp_reads_glms_layers_and_drops_deepseeks(tmp_path: Path) -> None:
    for family in ("glm", "deepseek"):
        target = Checkpoint(family, tmp_path / family).folder
        facts, out = TargetFacts.read(target), tmp_path / f"{family}-out"
        head = write_head(read_target(target), tmp_path / f"{family}-head", "mtp", facts)
        if family == "glm":
            lines = export_head(head, facts, "llama.cpp", out).command.splitlines()
            assert lines[0] == f"python convert_hf_to_gguf.py {out} --outtype bf16 --outfile {out}.gguf"
            assert lines[1] == f"llama-server -m {out}.gguf --spec-type draft-mtp --spec-draft-n-max 3"
        else:
            with pytest.raises(CheckpointError, match="has a converter that drops them"):
                export_head(head, facts, "llama.cpp", out)


def test_doctor_says_what_engines_do_otherwise(tmp_path: Path) -> None:
    def said(head: HeadCheckpoint, folder: Path) -> set[str]:
        found = diagnose(head, TargetFacts.read(folder))
        return {finding.what for finding in found if finding.engine == "vllm" and finding.severity == "check"}

    for name, family, modules, expected in (
        ("one", "deepseek", 1, set()),
        ("two", "glm", 2, {"2 modules", "several tokens from GLM's module"}),
        ("mimo", "mimo", 1, {"several tokens from MiMo's module"}),
    ):
        folder = Checkpoint(family, tmp_path / name, modules).folder
        assert said(read_target(folder), folder) == expected


NO_MORE = {"num_nextn_predict_layers": None}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"architectures": ["MiniMaxM2ForCausalLM"]}, "MiniMaxM2ForCausalLM cannot be read here; those of Deep"),
        ({"architectures": ["BailingMoeV2ForCausalLM"], "mtp_num_layers": 1} | NO_MORE, "BailingMoeV2"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ({"use_sliding_window": True}, "sliding windows"),
        ({"num_nextn_predict_layers": 2}, r"missing: layers\.1\."),
        ({"n_group": 3}, "8 experts in 3 groups"),
        ({"attention_multiplier": 2.0}, "attention_multiplier 2.0, which changes what a head computes"),
        ({"hidden_size": 64}, "of the wrong shape"),
        ({"v_head_dim": None}, "has kv_lora_rank, but no v_head_dim"),
    ],
    ids=str,
)
def test_what_cannot_be_drafted_with_is_refused_by_name(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = Checkpoint("deepseek", tmp_path).folder
    change(folder, **keys)
    with pytest.raises(CheckpointError, match=message):
        read_target(folder)


def test_a_module_of_exaone_that_attends_to_everything_is_refused(tmp_path: Path) -> None:
    """Its class would not rotate; engines do."""
    folder = Checkpoint("exaone_moe", tmp_path).folder
    assert read_target(folder).config.target_layers == ("sliding_attention",)
    change(folder, mtp_layer_types=["full_attention"])
    with pytest.raises(CheckpointError, match=r"^[^:]*: the MTP module has full_attention; beside windows"):
        read_target(folder)


def test_broken_and_quantised_layers_are_refused(tmp_path: Path) -> None:
    folder, where = Checkpoint("glm", tmp_path).folder, f"model.layers.{LAYERS}.mlp.experts.3.up_proj.weight"

    def quantise(tensors: dict[str, Tensor]) -> None:
        tensors[f"{where}_scale_inv"] = torch.ones(1)

    def lose(tensors: dict[str, Tensor]) -> None:
        del tensors[f"{where}_scale_inv"], tensors[where]

    def grow(tensors: dict[str, Tensor]) -> None:
        tensors[f"model.layers.{LAYERS}.self_attn.indexer.weight"] = torch.ones(HIDDEN)
        tensors[where] = torch.zeros(24, HIDDEN)

    def drop(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if f".{LAYERS}." in name]:
            del tensors[name]

    for how, message in (
        (quantise, "quantised .*weight_scale_inv.* bfloat16"),
        (lose, r"mlp\.experts\.3\.up_proj\.weight is missing"),
        (grow, r"unknown: layers\.0\.self_attn\.indexer"),
        (drop, "transformers leaves them out when it saves"),
    ):
        rewrite(folder, how)
        with pytest.raises(CheckpointError, match=message):
            read_target(folder)


@pytest.mark.parametrize("quantised", [True, False])
def test_layers_of_a_target_in_fp8_are_read_and_draft(quantised: bool, tmp_path: Path) -> None:
    """They are in FP8 themselves, or plain beside a target that is."""
    folder = Checkpoint("glm", tmp_path, dtype=torch.bfloat16).folder
    stored = dict[str, Tensor]()

    def to_fp8(tensors: dict[str, Tensor]) -> None:
        for name, weight in list(tensors.items()):
            stored[name] = weight
            if name.endswith("_proj.weight") and (quantised or f".{LAYERS}." not in name):
                parts, values = fp8(weight, block=4)
                stored.update({f"{name.removesuffix('weight')}{part}": one for part, one in parts.items()})
                tensors[name] = values.bfloat16()

    rewrite(folder, to_fp8)
    expected = read_target(folder)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [4, 4]}
    (folder / "config.json").write_text(json.dumps(config))
    assert differences(read_target(folder), expected) == []
    llm = LLM(str(folder), tokenizer=False, self_check=False, max_num_seqs=1, speculative_config={"method": "mtp"})
    answer = llm.generate({"prompt_token_ids": [3, 9, 5, 3, 9]}, SamplingParams(temperature=0.0, max_tokens=6))[0]
    assert not answer.outputs[0].speculation.drafter_errors


def test_only_the_layers_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target may be a thousand times larger."""
    from forerun.heads import files

    checkpoint, read, opened = Checkpoint("glm", tmp_path), list[str](), files.safe_open

    class Noted:
        def __init__(self, *given: Any) -> None:
            self.inner = opened(*given)

        def __enter__(self) -> "Noted":
            self.file = self.inner.__enter__()
            return self

        def __exit__(self, *given: Any) -> None:
            self.inner.__exit__(*given)

        def metadata(self) -> dict[str, str] | None:
            return dict(self.file.metadata() or {})

        def keys(self) -> list[str]:
            return list(self.file.keys())

        def get_tensor(self, name: str) -> Tensor:
            read.append(name)
            return self.file.get_tensor(name)

    monkeypatch.setattr(files, "safe_open", Noted)
    read_target(checkpoint.folder)
    assert read and all(name.startswith(f"model.layers.{LAYERS}.") for name in read)
    assert not any("embed_tokens" in name or "shared_head.head" in name for name in read)


Shapes = dict[str, tuple[int, ...]]


def weights(*names: str, of: tuple[int, ...]) -> Shapes:
    """Weights of one shape."""
    return {f"{name}.weight": of for name in names}


def mlps(*names: str, hidden: int, inside: int) -> Shapes:
    """Gated MLPs and experts of one size."""
    up = weights(*(f"mlp.{name}{part}_proj" for name in names for part in ("gate", "up")), of=(inside, hidden))
    return up | weights(*(f"mlp.{name}down_proj" for name in names), of=(hidden, inside))


def experts(count: int, shared: str = "shared_experts") -> list[str]:
    return [f"{shared}.", *(f"experts.{number}." for number in range(count))]


class Published(NamedTuple):
    """A publisher's configuration and the tensors of an MTP layer, as model cards describe them, and what they mean."""

    config: dict[str, Any]
    prefix: str
    shapes: Shapes
    expected: dict[str, Any]
    window: int | None = None
    modules: int = 1
    scaling: float = 1.0


DEEPSEEK_V3: dict[str, Any] = {
    **{"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "aux_loss_alpha": 0.001, "ep_size": 1},
    **{"first_k_dense_replace": 3, "moe_layer_freq": 1, "n_group": 8, "topk_group": 4, "norm_topk_prob": True},
    **{"n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "routed_scaling_factor": 2.5},
    **{"hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "vocab_size": 129280},
    **{"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "seq_aux": True},
    **{"v_head_dim": 128, "num_attention_heads": 128, "num_key_value_heads": 128, "num_hidden_layers": 61},
    **{"num_nextn_predict_layers": 1, "rms_norm_eps": 1e-6, "rope_theta": 10000, "scoring_func": "sigmoid"},
    **{"topk_method": "noaux_tc", "max_position_embeddings": 163840, "tie_word_embeddings": False, "pretraining_tp": 1},
    "rope_scaling": {
        **{"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "type": "yarn"},
        "original_max_position_embeddings": 4096,
    },
}
GLM: dict[str, Any] = {
    **{"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "attention_bias": True, "use_qk_norm": False},
    **{"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "head_dim": 128},
    **{"n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "routed_scaling_factor": 1.0},
    **{"hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408, "vocab_size": 151552},
    **{"num_attention_heads": 96, "num_key_value_heads": 8, "num_hidden_layers": 46, "rms_norm_eps": 1e-5},
    **{"num_nextn_predict_layers": 1, "rope_theta": 1000000, "rope_scaling": None, "tie_word_embeddings": False},
    **{"max_position_embeddings": 131072, "partial_rotary_factor": 0.5},
}
MIMO_7B: dict[str, Any] = {
    **{"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "attention_dropout": 0.0, "head_dim": 128},
    **{"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 8},
    **{"num_hidden_layers": 36, "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-5, "rope_theta": 640000},
    **{"sliding_window": None, "use_sliding_window": False, "max_window_layers": 32, "vocab_size": 151680},
    **{"max_position_embeddings": 32768, "tie_word_embeddings": False, "rope_scaling": None, "hidden_act": "silu"},
    "use_mrope": False,
}
QWEN3_NEXT: dict[str, Any] = {
    **{"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "attention_bias": False},
    **{"head_dim": 256, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 5120, "vocab_size": 151936},
    **{"linear_num_value_heads": 32, "max_position_embeddings": 262144, "mlp_only_layers": [], "num_experts": 512},
    **{"moe_intermediate_size": 512, "num_attention_heads": 16, "num_experts_per_tok": 10, "num_hidden_layers": 48},
    **{"num_key_value_heads": 2, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-6, "rope_theta": 10000000},
    **{"rope_scaling": None, "shared_expert_intermediate_size": 512, "tie_word_embeddings": False},
    **{"decoder_sparse_step": 1, "full_attention_interval": 4},
}
MIMO_V2: dict[str, Any] = {
    **{"architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash", "hidden_size": 4096},
    **{"num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128},
    **{"swa_num_attention_heads": 64, "swa_num_key_value_heads": 8, "swa_head_dim": 192, "swa_v_head_dim": 128},
    **{"sliding_window": 128, "sliding_window_size": 128, "add_swa_attention_sink_bias": True},
    **{"partial_rotary_factor": 0.334, "rope_theta": 5000000, "swa_rope_theta": 10000, "vocab_size": 152576},
    **{"hybrid_layer_pattern": [0, 1, 1, 1, 1, 0] * 8, "moe_layer_freq": [0] + [1] * 47, "n_routed_experts": 256},
    **{"moe_intermediate_size": 2048, "num_experts_per_tok": 8, "layernorm_epsilon": 1e-05, "hidden_act": "silu"},
    **{"attention_bias": False, "attention_value_scale": 0.707, "max_position_embeddings": 262144},
    **{"intermediate_size": 16384, "num_hidden_layers": 48},
}
NORMS = ("input_layernorm", "post_attention_layernorm")
OF_V3: Shapes = {
    **weights("eh_proj", of=(7168, 14336)),
    **weights("enorm", "hnorm", "shared_head.norm", *NORMS, of=(7168,)),
    **weights("self_attn.q_a_proj", of=(1536, 7168)) | weights("self_attn.q_a_layernorm", of=(1536,)),
    **weights("self_attn.q_b_proj", of=(24576, 1536)) | weights("self_attn.kv_a_proj_with_mqa", of=(576, 7168)),
    **weights("self_attn.kv_a_layernorm", of=(512,)) | weights("self_attn.kv_b_proj", of=(32768, 512)),
    **weights("self_attn.o_proj", of=(7168, 16384)) | weights("mlp.gate", of=(256, 7168)),
    "mlp.gate.e_score_correction_bias": (256,),
    **mlps(*experts(256), hidden=7168, inside=2048),
}
OF_GLM: Shapes = {
    **weights("eh_proj", of=(4096, 8192)) | weights("enorm", "hnorm", "shared_head.norm", *NORMS, of=(4096,)),
    **weights("self_attn.q_proj", of=(12288, 4096)) | weights("self_attn.k_proj", "self_attn.v_proj", of=(1024, 4096)),
    **{"self_attn.q_proj.bias": (12288,), "self_attn.k_proj.bias": (1024,), "self_attn.v_proj.bias": (1024,)},
    **weights("self_attn.o_proj", of=(4096, 12288)) | weights("mlp.gate", of=(128, 4096)),
    "mlp.gate.e_score_correction_bias": (128,),
    **mlps(*experts(128), hidden=4096, inside=1408),
}
OF_MIMO: Shapes = {
    **weights("input_proj", of=(4096, 8192)),
    **weights("token_layernorm", "hidden_layernorm", "final_layernorm", *NORMS, of=(4096,)),
    **weights("self_attn.q_proj", "self_attn.o_proj", of=(4096, 4096)),
    **weights("self_attn.k_proj", "self_attn.v_proj", of=(1024, 4096)),
    **{"self_attn.q_proj.bias": (4096,), "self_attn.k_proj.bias": (1024,), "self_attn.v_proj.bias": (1024,)},
    **mlps("", hidden=4096, inside=11008),
}
INSIDE: Shapes = {
    **weights(*NORMS, of=(2048,)) | weights("self_attn.q_proj", of=(8192, 2048)),
    **weights("self_attn.k_proj", "self_attn.v_proj", of=(512, 2048)) | weights("self_attn.o_proj", of=(2048, 4096)),
    **weights("self_attn.q_norm", "self_attn.k_norm", of=(256,)),
    **weights("mlp.gate", of=(512, 2048)) | weights("mlp.shared_expert_gate", of=(1, 2048)),
    **mlps(*experts(512, "shared_expert"), hidden=2048, inside=512),
}
OF_QWEN: Shapes = {
    **weights("fc", of=(2048, 4096)),
    **weights("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden", of=(2048,)),
    **{f"layers.0.{name}": shape for name, shape in INSIDE.items()},
}
OF_MIMO_V2: Shapes = {
    **weights("eh_proj", of=(4096, 8192)),
    **weights("enorm", "hnorm", "input_layernorm", "pre_mlp_layernorm", "final_layernorm", of=(4096,)),
    **weights("self_attn.q_proj", of=(12288, 4096)) | weights("self_attn.k_proj", of=(1536, 4096)),
    **weights("self_attn.v_proj", of=(1024, 4096)) | weights("self_attn.o_proj", of=(4096, 8192)),
    "self_attn.attention_sink_bias": (64,),
    **mlps("", hidden=4096, inside=16384),
}
V32 = {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "index_head_dim": 128}
INDEX = weights("wq_b", of=(8192, 1536)) | weights("wk", of=(128, 7168)) | weights("weights_proj", of=(64, 7168))
INDEX |= {"k_norm.weight": (128,), "k_norm.bias": (128,)}
PUBLISHED = {
    "DeepSeek-V3": Published(
        *(DEEPSEEK_V3, "model.layers.61.", OF_V3, {"rotary_dim": 64, "boundaries": (-1,)}), scaling=1.8739
    ),
    "DeepSeek-V3.2": Published(
        DEEPSEEK_V3 | V32 | {"index_n_heads": 64, "index_topk": 2048},
        "model.layers.61.",
        OF_V3 | {f"self_attn.indexer.{name}": shape for name, shape in INDEX.items()},
        {"rotary_dim": 64, "target_layers": ("indexed_attention",)},
        scaling=1.8739,
    ),
    "GLM-4.5-Air": Published(GLM, "model.layers.46.", OF_GLM, {"rotary_dim": 64, "boundaries": (-1,)}),
    "MiMo-7B": Published(MIMO_7B, "model.mtp_layers.0.", OF_MIMO, {"rotary_dim": 128, "boundaries": (36,)}),
    # Announced by nothing in their configurations.
    "Qwen3-Next": Published(QWEN3_NEXT, "mtp.", OF_QWEN, {"rotary_dim": 64, "rope_theta": 10_000_000}),
    "MiMo-V2-Flash": Published(
        *(MIMO_V2, "model.mtp.layers.{}.", OF_MIMO_V2, {"rotary_dim": 64, "rope_theta": 10_000}), window=129, modules=3
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes_are_understood(name: str) -> None:
    """Shapes alone: no published weights were loaded."""
    config, prefix, shapes, expected, window, modules, scaling = PUBLISHED[name]
    tensors = {
        prefix.format(module) + key: torch.empty(shape, dtype=torch.bfloat16, device="meta")
        for module in range(modules)
        for key, shape in shapes.items()
    }
    others = ["model.embed_tokens.weight", "model.layers.0.input_layernorm.weight", "model.norm.weight"]
    others += [f"{prefix}shared_head.head.weight"] if "shared_head.norm.weight" in shapes else []
    known = MtpFormat()
    assert known.recognises(config)
    assert [key for key in [*tensors, *others] if known.keeps(config, key)] == list(tensors)
    head = known.read(config, tensors)
    assert head.unknown == [] and head.config.num_hidden_layers == modules and head.config.window(0) == window
    assert {key: getattr(head.config, key) for key in expected} == expected
    assert query_scaling(head.config.rope_scaling) == pytest.approx(scaling, abs=1e-4)
