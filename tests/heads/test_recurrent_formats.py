"""The public formats of Hydra heads, MLP speculators and Kangaroo's adapters: written and read bit for bit, others
refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun.errors import ArgumentError, CheckpointError
from forerun.heads.engines import ENGINES, diagnose, export_head
from forerun.heads.files import HeadCheckpoint, TargetFacts, differences
from forerun.heads.formats import read_head, write_head
from training.ttt import HIDDEN, VOCABULARY, hydra, kangaroo, mlp_speculator

FILES = {
    "hydra": "hydra_lm_head.safetensors",
    "mlp_speculator": "model.safetensors",
    "kangaroo": "model.safetensors",
}
MAKE: dict[str, Any] = {"hydra": hydra, "mlp_speculator": mlp_speculator, "kangaroo": kangaroo}
FACTS = TargetFacts(
    name_or_path="owner/target",
    architectures=("LlamaForCausalLM",),
    num_layers=4,
    hidden_size=HIDDEN,
    vocab_size=VOCABULARY,
    max_position_embeddings=128,
)
LAYER = [
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    *("input_layernorm.weight", "post_attention_layernorm.weight"),
]


def written(kind: str, folder: Path, **options: Any) -> tuple[HeadCheckpoint, dict[str, torch.Tensor], dict[str, Any]]:
    """A head, and the tensors and keys of its files."""
    before = HeadCheckpoint.of(MAKE[kind](**options))
    write_head(before, folder, kind, FACTS)
    after = read_head(folder)
    assert differences(before, after) == [] and after.config.kind == kind and not after.unknown
    return before, load_file(folder / FILES[kind]), json.loads((folder / "config.json").read_text())


def change(folder: Path, kind: str, keys: dict[str, Any], tensors: dict[str, torch.Tensor | None]) -> Path:
    """With other keys and tensors; None: without."""
    file, config = folder / FILES[kind], folder / "config.json"
    whole = json.loads(config.read_text()) | keys
    config.write_text(json.dumps({name: value for name, value in whole.items() if value is not None}))
    stored = load_file(file) | tensors
    save_file({name: tensor for name, tensor in stored.items() if tensor is not None}, file)
    return folder


@pytest.mark.parametrize(
    "options",
    [{}, {"num_layers": 1}, {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}],
    ids=str,
)
def test_hydras_prefix_heads(options: dict[str, Any], tmp_path: Path) -> None:
    """By ``HydraPrefixMLP``: a dropout stands before each block and output head, so every other place is empty."""
    _, stored, keys = written("hydra", tmp_path / "head", **options)
    layers = options.get("num_layers", 3)
    blocks = {(depth, 2 * block + 1): block for depth in range(3) for block in range(layers)}
    parts = {place: ("linear", "res_connection") if not block else ("linear",) for place, block in blocks.items()}
    assert set(stored) == {
        *(f"hydra_mlp.{k}.{n}.{part}.{end}" for (k, n) in blocks for part in parts[k, n] for end in ("weight", "bias")),
        *(f"hydra_lm_head.{depth}.1.{end}" for depth in range(3) for end in ("weight", "bias")),
        *(f"prefix_embeding_layer.layers.0.{name}" for name in LAYER),
        "prefix_embeding_layer.norm.weight",
    }
    assert {name: keys[name] for name in keys if name.startswith(("hydra_", "base_", "grounded_", "hidden_state"))} == {
        "base_model_name_or_path": "owner/target",
        "hydra_num_heads": 3,
        "hydra_num_layers": layers,
        "hydra_head_arch": "prefix-mlp",
        "grounded_heads": True,
        "hidden_state_offset": 0,
    }
    for depth in range(3):
        assert stored[f"hydra_mlp.{depth}.1.linear.weight"].shape == (HIDDEN, (depth + 2) * HIDDEN)
        if layers == 3:
            assert torch.equal(*(stored[f"hydra_mlp.{depth}.{place}.linear.weight"] for place in (3, 5)))


def test_hydras_heads_without_a_prefix(tmp_path: Path) -> None:
    before, stored, keys = written("hydra", tmp_path / "head", num_hidden_layers=0, num_layers=2)
    assert keys["hydra_head_arch"] == "mlp" and "hydra_mlp.2.1.linear.bias" in stored
    assert "hydra_lm_head.2.bias" in stored and not any("prefix" in name for name in stored)
    theirs = ("hydra_", "base_", "grounded_", "hidden_state")
    change(tmp_path / "head", "hydra", {name: None for name in keys if not name.startswith(theirs)}, {})
    after = read_head(tmp_path / "head")  # as published: no sizes but the tensors'
    assert after.config.hidden_size == HIDDEN and after.config.vocab_size == VOCABULARY
    assert all(torch.equal(tensor, after.tensors[name]) for name, tensor in before.tensors.items())


def test_what_hydras_code_stores_and_never_reads_is_left_out(tmp_path: Path) -> None:
    before, _, _ = written("hydra", tmp_path / "head")
    unread = {
        "prefix_embeding_layer.embed_tokens.weight": torch.ones(VOCABULARY, HIDDEN),
        "prefix_embeding_layer.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
    }
    assert differences(before, read_head(change(tmp_path / "head", "hydra", {}, unread))) == []


@pytest.mark.parametrize(
    "options",
    [{}, {"inner_dim": HIDDEN, "scale_input": True}, {"tie_weights": True, "n_predict": 4}, {"n_predict": 1}],
    ids=str,
)
def test_mlp_speculators(options: dict[str, Any], tmp_path: Path) -> None:
    """By vLLM's ``MLPSpeculator`` and ``MLPSpeculatorConfig``."""
    before, stored, keys = written("mlp_speculator", tmp_path / "head", **options)
    depths, inner = options.get("n_predict", 3), options.get("inner_dim", 24)
    parts = ("emb.{}.weight", "proj.{}.weight", "head.{}.weight", "ln.{}.weight", "ln.{}.bias")
    assert set(stored) == {f"speculator.{part.format(depth)}" for depth in range(depths) for part in parts}
    assert stored["speculator.emb.0.weight"].shape == (VOCABULARY, inner)
    assert stored["speculator.proj.0.weight"].shape == (inner, HIDDEN)
    assert keys == {
        "model_type": "mlp_speculator",
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "torch_dtype": "float32",
        "vocab_size": VOCABULARY,
        "emb_dim": HIDDEN,
        "inner_dim": inner,
        "n_predict": depths,
        "tie_weights": options.get("tie_weights", False),
        "scale_input": options.get("scale_input", False),
        "top_k_tokens_per_head": [5, 4, 3, 2][:depths],
        "n_candidates": 5,
    }
    bare = {name.removeprefix("speculator."): tensor for name, tensor in stored.items()}
    if "tie_weights" in options:  # as transformers stores tied weights: once
        bare = {
            name: tensor for name, tensor in bare.items() if name.startswith(("proj.1.", "proj.0.")) or ".0." in name
        }
    save_file(bare, tmp_path / "head" / FILES["mlp_speculator"])
    assert differences(before, read_head(tmp_path / "head")) == []


def test_a_width_of_0_is_the_targets_and_the_tree_is_kept(tmp_path: Path) -> None:
    before, _, _ = written("mlp_speculator", tmp_path / "head", inner_dim=HIDDEN)
    keys = {"inner_dim": 0, "n_candidates": 3, "top_k_tokens_per_head": [4, 3, 2], "transformers_version": "4.38"}
    after = read_head(change(tmp_path / "head", "mlp_speculator", keys, {}))
    assert after.config.inner_dim == HIDDEN and not after.unknown
    assert all(torch.equal(tensor, after.tensors[name]) for name, tensor in before.tensors.items())
    write_head(after, tmp_path / "again", "mlp_speculator", FACTS)
    stored = json.loads((tmp_path / "again" / "config.json").read_text())
    assert {name: stored[name] for name in keys} == keys | {"inner_dim": HIDDEN}


@pytest.mark.parametrize("options", [{}, {"boundaries": [3], "rope_theta": 5e5}], ids=str)
def test_kangaroos_adapters(options: dict[str, Any], tmp_path: Path) -> None:
    """By ``AdapterModel`` and ``data/vicuna_7B_config.json``."""
    before, stored, keys = written("kangaroo", tmp_path / "head", **options)
    attention = [f"layers.0.self_attn.{name}_proj.weight" for name in "qkvo"]
    assert set(stored) == {"norm.weight", "layers.0.input_layernorm.weight", *attention}
    assert keys["architectures"] == ["LlamaForCausalLM"] and keys["model_type"] == "llama"
    assert (keys["num_hidden_layers"], keys["hidden_size"], keys["vocab_size"]) == (1, HIDDEN, VOCABULARY)
    assert keys["exit_layer"] == options.get("boundaries", [2])[0]
    published = {"bos_token_id": 1, "pad_token_id": 0, "use_cache": True, "transformers_version": "4.28.1"}
    frequencies = {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    after = read_head(change(tmp_path / "head", "kangaroo", published, frequencies))
    assert not after.unknown and after.config.extra == published
    assert all(torch.equal(tensor, after.tensors[name]) for name, tensor in before.tensors.items())


def test_kangaroos_published_files_are_told_apart_by_what_they_lack(tmp_path: Path) -> None:
    """They do not say where the adapter stands, and are pickled."""
    written("kangaroo", tmp_path / "head")
    change(tmp_path / "head", "kangaroo", {"exit_layer": None}, {})
    with pytest.raises(CheckpointError, match=r'a Kangaroo adapter, .* config\.json, as "exit_layer": 2'):
        read_head(tmp_path / "head", num_layers=4)
    (tmp_path / "head" / "model.safetensors").rename(tmp_path / "head" / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: a pickle can run any code"):
        read_head(tmp_path / "head", num_layers=4)


OTHER = torch.ones(HIDDEN, HIDDEN)


@pytest.mark.parametrize(
    ("kind", "keys", "tensors", "message"),
    [
        ("hydra", {"hydra_head_arch": "eagle-attn"}, {}, "hydra_head_arch is 'eagle-attn'; heads of the kinds mlp and"),
        ("hydra", {"grounded_heads": False}, {}, "grounded_heads must be true"),
        ("hydra", {"hidden_state_offset": 1}, {}, "hidden_state_offset 0"),
        ("hydra", {"num_attention_heads": None}, {}, r"copy num_attention_heads, .* of owner/target"),
        ("hydra", {"hydra_num_heads": 4}, {}, r"missing: heads\.3\.first"),
        ("hydra", {"hydra_num_heads": 0}, {}, "num_heads and num_layers must be at least 1"),
        ("hydra", {"logit_scale": 2.0}, {}, "logit_scale 2.0, which changes what a head computes"),
        ("hydra", {"hidden_size": 16}, {}, "of the wrong shape"),
        ("hydra", {}, {"hydra_mlp.0.5.linear.weight": OTHER}, r"0\.5\.linear\.weight is not what another block"),
        ("hydra", {}, {"medusa_head.0.weight": OTHER}, "the tensor medusa_head.0.weight is none of a Hydra head"),
        ("hydra", {}, {"hydra_lm_head.0.1.weight": None}, r"no output head hydra_lm_head\.0"),
        ("kangaroo", {"num_hidden_layers": 2}, {}, "an adapter has one layer, got num_hidden_layers 2"),
        ("kangaroo", {"exit_layer": 0}, {}, r"boundaries is the one after the layers that draft, .* got \(0,\)"),
        ("kangaroo", {"exit_layer": "2"}, {}, "exit_layer of config.json must be a whole number"),
        ("kangaroo", {"logit_scale": 2.0}, {}, "logit_scale 2.0, which changes what a head computes"),
        ("kangaroo", {}, {"norm.weight": None}, r"missing: norm\.weight"),
        ("kangaroo", {}, {"layers.0.mlp.up_proj.weight": OTHER}, r"unknown: layers\.0\.mlp\.up_proj\.weight"),
        ("mlp_speculator", {"n_predict": 4, "top_k_tokens_per_head": None}, {}, r"missing: emb\.3\.weight"),
        ("mlp_speculator", {"n_predict": 0}, {}, "n_predict must be at least 1"),
        ("mlp_speculator", {"num_lookahead_tokens": 5}, {}, "num_lookahead_tokens of config.json must be n_predict, 3"),
        ("mlp_speculator", {"tie_weights": True}, {}, "tie_weights is true, but .* is not what another depth has"),
        ("mlp_speculator", {"emb_dim": 16}, {}, r"of the wrong shape: proj\.0\.weight \(24, 32\), expected \(24, 16\)"),
        ("mlp_speculator", {}, {"speculator.ln0.weight": OTHER}, "speculator.ln0.weight is none of an MLP speculator"),
    ],
)
def test_what_is_incomplete_or_another_method_is_refused(
    kind: str, keys: dict[str, Any], tensors: dict[str, torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    written(kind, tmp_path / "head")
    with pytest.raises(CheckpointError, match=message):
        read_head(change(tmp_path / "head", kind, keys, tensors))


def test_hydras_pickle_is_never_opened(tmp_path: Path) -> None:
    """What the message says works, although Hydra's pickles hold one tensor under several names."""
    _, stored, _ = written("hydra", tmp_path / "head")
    shared = stored | {"hydra_mlp.0.5.linear.weight": stored["hydra_mlp.0.3.linear.weight"]}
    torch.save(shared, tmp_path / "head" / "hydra_lm_head.pt")
    (tmp_path / "head" / FILES["hydra"]).unlink()
    with pytest.raises(CheckpointError, match=r"hydra_lm_head\.pt: a pickle can run any code") as refused:
        read_head(tmp_path / "head")
    said = str(refused.value).rsplit("where you trust it: ", 1)[1]
    code = said.replace("file,", repr(str(tmp_path / "head" / "hydra_lm_head.pt")) + ",")
    exec(code.replace("'hydra_lm_head.safetensors'", repr(str(tmp_path / "head" / FILES["hydra"]))), _modules())
    assert set(load_file(tmp_path / "head" / FILES["hydra"])) == set(stored)


def _modules() -> dict[str, Any]:
    import safetensors.torch

    return {"torch": torch, "safetensors": safetensors}


@pytest.mark.parametrize(
    ("kind", "title"), [("hydra", "Hydra"), ("mlp_speculator", "MLP speculator"), ("kangaroo", "Kangaroo")]
)
def test_no_engine_loads_one_and_doctor_says_so_of_each(kind: str, title: str, tmp_path: Path) -> None:
    before, _, _ = written(kind, tmp_path / "head")
    findings = diagnose(before, FACTS)
    assert {finding.engine for finding in findings} == set(ENGINES)
    assert {finding.severity for finding in findings} == {"fails"} and len(findings) == len(ENGINES)
    exported = export_head(tmp_path / "head", FACTS, "hf", tmp_path / "out")
    assert exported.format_name == kind and f"--drafter {kind}" in exported.command
    assert f"# {title} head for owner/target" in (tmp_path / "out" / "README.md").read_text()
    if kind == "kangaroo":
        with pytest.raises(CheckpointError, match=r"exit_layer of config.json is 2: expected 1\.\.1 for a target of 2"):
            read_head(tmp_path / "head", num_layers=2)
    with pytest.raises(ArgumentError, match=f"Heads of the kind {kind} go to hf"):
        export_head(tmp_path / "head", FACTS, "vllm", tmp_path / "vllm")
