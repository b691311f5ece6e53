"""The public formats of Medusa, P-EAGLE, Hydra, MLP speculators, Kangaroo and PARD: read as written, or refused."""

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from forerun.cli import main
from forerun.errors import ArgumentError, CheckpointError
from forerun.heads.engines import ENGINES, diagnose, export_head, worst
from forerun.heads.files import HeadCheckpoint, TargetFacts, differences, read_head, write_head
from forerun.heads.pard_files import PardModel, export_pard
from forerun.types import LAST_HIDDEN
from heads.samples import FACTS, PLAIN, TARGET, change, keys_of, sample
from llamas import tiny_llama
from training.ttt import HIDDEN, VOCABULARY, hydra, kangaroo, medusa, mlp_speculator, peagle

SAFE = "medusa_lm_head.safetensors"
SIX = dataclasses.replace(FACTS, num_layers=6)


def peagle_head(**options: Any) -> HeadCheckpoint:
    return HeadCheckpoint.of(peagle(**{"own_embedding": True, "num_hidden_layers": 4, **options}))


FILES = {"medusa": SAFE, "hydra": "hydra_lm_head.safetensors"}
"""Those of the others are model.safetensors."""
MAKE: dict[str, Any] = {"medusa": medusa, "hydra": hydra, "mlp_speculator": mlp_speculator, "kangaroo": kangaroo}
LAYER = [
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    *("input_layernorm.weight", "post_attention_layernorm.weight"),
]


def written(kind: str, folder: Path, **options: Any) -> tuple[HeadCheckpoint, dict[str, torch.Tensor], dict[str, Any]]:
    """A head, and the tensors and keys of its files."""
    before = peagle_head(**options) if kind == "peagle" else HeadCheckpoint.of(MAKE[kind](**options))
    write_head(before, folder, kind, SIX if kind == "peagle" else FACTS)
    after = read_head(folder)
    assert differences(before, after) == [] and after.config.kind == kind and not after.unknown
    return before, load_file(folder / FILES.get(kind, "model.safetensors")), keys_of(folder)


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_medusas_file(layers: int, tmp_path: Path) -> None:
    before, stored, keys = written("medusa", tmp_path / "head", num_layers=layers)
    assert keys == {
        **{"base_model_name_or_path": "owner/target", "medusa_num_heads": 3, "medusa_num_layers": layers},
        # vLLM's MedusaConfig: without the last it drops the biases, without the sizes it takes a Llama's of 7 B.
        **{"model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": HIDDEN, "vocab_size": VOCABULARY},
        "medusa_fc_bias": True,
    }
    blocks = {f"{k}.{n}.linear.{part}" for k in range(3) for n in range(layers) for part in ("weight", "bias")}
    assert set(stored) == blocks | {f"{k}.{layers}.weight" for k in range(3)}
    write_head(before, tmp_path / "head", "medusa", FACTS)  # a former head is replaced
    save_file({f"medusa_head.{name}": tensor for name, tensor in stored.items()}, tmp_path / "head" / SAFE)
    assert differences(before, read_head(tmp_path / "head")) == []


def test_medusas_pickle_is_never_opened(tmp_path: Path) -> None:
    folder = write_head(HeadCheckpoint.of(medusa()), tmp_path / "head", "medusa", FACTS)
    torch.save(load_file(folder / SAFE), folder / "medusa_lm_head.pt")
    assert read_head(folder).config.num_heads == 3
    (folder / SAFE).unlink()
    with pytest.raises(CheckpointError, match=r"head\.pt: a pickle can run any code.* to medusa_lm_head\.safetensors"):
        read_head(folder)
    (folder / "medusa_lm_head.pt").unlink()
    with pytest.raises(CheckpointError, match=r"holds no medusa_lm_head\.safetensors"):
        read_head(folder)


def test_medusas_published_file_names_no_sizes(tmp_path: Path) -> None:
    before = HeadCheckpoint.of(medusa())
    folder = write_head(before, tmp_path / "head", "medusa", FACTS)
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 3, "medusa_num_layers": 1}))
    assert differences(before, read_head(folder)) == []


def test_medusa_is_exported_for_forerun_and_the_vllm_that_still_drafts_with_it(tmp_path: Path) -> None:
    before = HeadCheckpoint.of(medusa())
    folder = write_head(before, tmp_path / "head", "medusa", FACTS)
    exported = export_head(folder, FACTS, "hf", tmp_path / "out")
    assert exported.format_name == "medusa" and "--drafter medusa" in exported.command
    assert differences(before, read_head(tmp_path / "out")) == []
    assert "# Medusa-1 head for owner/target" in (tmp_path / "out" / "README.md").read_text()
    with pytest.raises(ArgumentError, match="Heads of the kind medusa go to vllm, hf"):
        export_head(folder, FACTS, "sglang", tmp_path / "sglang")
    exported = export_head(folder, FACTS, "vllm", tmp_path / "vllm")
    assert differences(before, read_head(tmp_path / "vllm")) == []
    speculation = {"method": "medusa", "model": str(tmp_path / "vllm"), "num_speculative_tokens": 3}
    assert json.loads(shlex.split(exported.command)[-1]) == speculation
    with pytest.raises(ArgumentError, match="vLLM takes a path with 'eagle3' in it for a head of that kind"):
        export_head(folder, FACTS, "vllm", tmp_path / "not-eagle3")
    assert not (tmp_path / "not-eagle3").exists()
    findings = {finding.engine: finding for finding in diagnose(before, FACTS)}
    assert findings.keys() == set(ENGINES) and all(finding.remedy for finding in findings.values())
    assert {engine for engine, finding in findings.items() if finding.severity != "fails"} == {"vllm", "modelopt"}
    assert findings["vllm"].severity == "check" and "up to 0.32" in findings["vllm"].why


@pytest.mark.parametrize("name", ["peagle", "speculators"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_hidden_layers": 1, "own_embedding": False},
        {"norm_before_residual": True, "norm_before_fc": True},
        {"draft_vocab_size": VOCABULARY, "sliding_window": 8, "full_layers": (1,)},
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "boundaries": (1, 2)},
    ],
    ids=str,
)
def test_peagles_files(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    before = peagle_head(**options)
    folder = write_head(before, tmp_path / "head", name, SIX)
    after = read_head(folder)
    assert differences(before, after) == [] and after.config.kind == "peagle"
    stored, config = load_file(folder / "model.safetensors"), before.config
    first = "midlayer" if name == "peagle" and config.num_hidden_layers == 1 else "layers.0"
    layers = [first, *(f"layers.{layer}" for layer in range(1, config.num_hidden_layers))]
    assert stored.keys() == {
        *(f"{layer}.{tensor}" for layer in layers for tensor in [*LAYER, "hidden_norm.weight"]),
        *("fc.weight", "norm.weight", "lm_head.weight", "mask_hidden"),
        *(["embed_tokens.weight"] if config.own_embedding else []),
        *(["input_norm.weight"] if config.norm_before_fc else []),
        *(["d2t", "t2d"] if config.reduced_vocabulary else []),
    }
    assert stored["mask_hidden"].shape == (1, 1, len(config.boundaries) * HIDDEN)


def test_peagles_mask_token_is_said_as_each_format_does(tmp_path: Path) -> None:
    keys = keys_of(write_head(peagle_head(), tmp_path / "a", "peagle", SIX))
    assert keys["architectures"] == ["LlamaForCausalLMEagle3"] and keys["ptd_token_id"] == VOCABULARY - 1
    assert keys["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3] and keys["num_hidden_layers"] == 4
    keys = keys_of(write_head(peagle_head(), tmp_path / "b", "speculators", SIX))
    assert keys["speculators_model_type"] == "peagle" and keys["architectures"] == ["PEagleSpeculator"]
    assert keys["mask_token_id"] == VOCABULARY - 1 and keys["norm_before_residual"] is False
    assert keys["speculators_config"]["algorithm"] == "peagle"
    with pytest.raises(CheckpointError, match="fc_norm of a P-EAGLE head in this format; use peagle"):
        write_head(peagle_head(fc_norm=True), tmp_path / "c", "speculators", SIX)


@pytest.mark.parametrize(
    "keys",
    [
        {"ptd_token_id": 0},
        {"ptd_token_id": None, "pard_token": 0},
        {"ptd_token_id": None, "mask_token_id": 0, "architectures": ["PEagleDraftModel"], "parallel_drafting": True},
    ],
    ids=str,
)
def test_every_publishers_name_of_the_mask_token_is_read(keys: dict[str, Any], tmp_path: Path) -> None:
    """A token of 0 is a token; ``mask_hidden`` may be a row, as in vLLM."""
    before = peagle_head()
    folder = change(write_head(before, tmp_path / "head", "peagle", SIX), **keys)
    found = read_head(change(folder, {"mask_hidden": before.tensors["mask_hidden"].view(1, -1).clone()}))
    assert found.config.mask_token_id == 0 and found.unknown == []
    assert differences(before, found) == ["config.mask_token_id"]


def test_without_its_mask_it_is_no_peagle_head(tmp_path: Path) -> None:
    folder = change(write_head(peagle_head(), tmp_path / "a", "peagle", SIX), {"mask_hidden": None})
    with pytest.raises(CheckpointError, match="ptd_token_id 39, which changes what a head computes"):
        read_head(folder)
    with pytest.raises(CheckpointError, match="unknown: mask_hidden"):
        read_head(change(write_head(peagle_head(), tmp_path / "b", "peagle", SIX), ptd_token_id=None))
    folder = change(write_head(peagle_head(), tmp_path / "c", "speculators", SIX), {"mask_hidden": None})
    with pytest.raises(CheckpointError, match="has no mask_hidden"):
        read_head(folder)


@pytest.mark.parametrize("to", ["vllm", "speculators", "hf"])
def test_a_peagle_export_is_served_by_vllm(to: str, tmp_path: Path) -> None:
    head = peagle_head()
    done = export_head(write_head(head, tmp_path / "head", "peagle", SIX), SIX, to, tmp_path / "out")
    assert differences(head, read_head(tmp_path / "out")) == []
    if to == "vllm":
        speculation = {"method": "eagle3", "model": str(tmp_path / "out"), "num_speculative_tokens": 5}
        assert json.loads(shlex.split(done.command)[-1]) == speculation | {"parallel_drafting": True}
    if to == "hf":
        assert "--drafter peagle" in done.command


def test_other_engines_say_by_name_that_they_do_not_read_peagle(tmp_path: Path) -> None:
    head = peagle_head()
    findings = diagnose(head, SIX)
    assert {engine: worst(findings, engine) for engine in ENGINES} == {
        engine: "ok" if engine == "vllm" else "fails" for engine in ENGINES
    }
    assert all("mask_hidden" in finding.why for finding in findings if finding.severity == "fails")
    folder = write_head(head, tmp_path / "head", "peagle", SIX)
    for engine in ("sglang", "trtllm"):
        with pytest.raises(ArgumentError, match=f"cannot export to '{engine}'.*Heads of the kind peagle go to vllm"):
            export_head(folder, SIX, engine, tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "judged"),
    [
        ({"boundaries": (1, 2)}, "ok"),
        ({"qk_norm": True}, "ok"),
        ({"boundaries": (2, 1, 4)}, "degrades"),
        ({"use_aux_hidden_state": False, "boundaries": (LAST_HIDDEN,)}, "fails"),
    ],
    ids=str,
)
def test_doctor_knows_what_vllm_does_not_read_of_peagle(options: dict[str, Any], judged: str) -> None:
    assert worst(diagnose(peagle_head(**options), SIX), "vllm") == judged


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
        **{"base_model_name_or_path": "owner/target", "hydra_num_heads": 3, "hydra_num_layers": layers},
        **{"hydra_head_arch": "prefix-mlp", "grounded_heads": True, "hidden_state_offset": 0},
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
    change(tmp_path / "head", **{name: None for name in keys if not name.startswith(theirs)})
    after = read_head(tmp_path / "head")  # as published: no sizes but the tensors'
    assert after.config.hidden_size == HIDDEN and after.config.vocab_size == VOCABULARY
    assert all(torch.equal(tensor, after.tensors[name]) for name, tensor in before.tensors.items())


def test_what_hydras_code_stores_and_never_reads_is_left_out(tmp_path: Path) -> None:
    before, _, _ = written("hydra", tmp_path / "head")
    unread = {
        "prefix_embeding_layer.embed_tokens.weight": torch.ones(VOCABULARY, HIDDEN),
        "prefix_embeding_layer.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
    }
    assert differences(before, read_head(change(tmp_path / "head", unread))) == []


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
        **{"model_type": "mlp_speculator", "architectures": ["MLPSpeculatorPreTrainedModel"]},
        **{"torch_dtype": "float32", "vocab_size": VOCABULARY, "emb_dim": HIDDEN, "inner_dim": inner},
        **{"n_predict": depths, "tie_weights": options.get("tie_weights", False)},
        **{"scale_input": options.get("scale_input", False), "top_k_tokens_per_head": [5, 4, 3, 2][:depths]},
        "n_candidates": 5,
    }
    bare = {name.removeprefix("speculator."): tensor for name, tensor in stored.items()}
    if "tie_weights" in options:  # as transformers stores tied weights: once
        bare = {name: own for name, own in bare.items() if name.startswith(("proj.1.", "proj.0.")) or ".0." in name}
    save_file(bare, tmp_path / "head" / "model.safetensors")
    assert differences(before, read_head(tmp_path / "head")) == []


def test_a_width_of_0_is_the_targets_and_the_tree_is_kept(tmp_path: Path) -> None:
    before, _, _ = written("mlp_speculator", tmp_path / "head", inner_dim=HIDDEN)
    keys = {"inner_dim": 0, "n_candidates": 3, "top_k_tokens_per_head": [4, 3, 2], "transformers_version": "4.38"}
    after = read_head(change(tmp_path / "head", **keys))
    assert after.config.inner_dim == HIDDEN and not after.unknown
    assert all(torch.equal(tensor, after.tensors[name]) for name, tensor in before.tensors.items())
    write_head(after, tmp_path / "again", "mlp_speculator", FACTS)
    stored = keys_of(tmp_path / "again")
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
    after = read_head(change(tmp_path / "head", frequencies, **published))
    assert not after.unknown and after.config.extra == published
    assert all(torch.equal(tensor, after.tensors[name]) for name, tensor in before.tensors.items())


def test_kangaroos_published_files_are_told_apart_by_what_they_lack(tmp_path: Path) -> None:
    """They do not say where the adapter stands, and are pickled."""
    written("kangaroo", tmp_path / "head")
    change(tmp_path / "head", exit_layer=None)
    with pytest.raises(CheckpointError, match=r'a Kangaroo adapter, .* config\.json, as "exit_layer": 2'):
        read_head(tmp_path / "head", num_layers=4)
    (tmp_path / "head" / "model.safetensors").rename(tmp_path / "head" / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: a pickle can run any code"):
        read_head(tmp_path / "head", num_layers=4)


OTHER = torch.ones(HIDDEN, HIDDEN)


@pytest.mark.parametrize(
    ("kind", "keys", "tensors", "message"),
    [
        ("medusa", {"medusa_num_heads": 4}, {}, r"missing: heads\.3\.0\.linear\.bias"),
        ("medusa", {"medusa_num_layers": 2}, {}, r"no output head 0\.2\.weight"),
        ("medusa", {"medusa_num_heads": 0}, {}, "num_heads must be at least 1"),
        ("medusa", {}, {"1.1.weight": torch.ones(3, HIDDEN)}, r"of the wrong shape: heads\.1\.1\.weight \(3, 32\)"),
        ("medusa", {}, {"token_map": torch.ones(3)}, "the tensor token_map is none of a Medusa head"),
        ("peagle", {"pard_token": 3}, {}, "contradicts itself about the mask token: ptd_token_id 39, pard_token 3"),
        ("peagle", {"ptd_token_id": VOCABULARY}, {}, "mask_token_id must be one of the target's 40 tokens, got 40"),
        ("peagle", {"ptd_token_id": "39"}, {}, "ptd_token_id of config.json must be a whole number"),
        ("peagle", {"ptd_token_id": None, "architectures": ["PEagleDraftModel"]}, {}, "has no ptd_token_id"),
        ("peagle", {"parallel_drafting": False}, {}, "parallel_drafting is false"),
        ("peagle", {"markov_rank": 16}, {}, "markov_rank 16, which changes what a head computes"),
        ("peagle", {"architectures": ["LlamaForCausalLMEagle"]}, {}, "its layers are EAGLE-3's; got generation 1"),
        ("peagle", {"target_hidden_size": 48}, {}, r"wrong shape: .*mask_hidden \(1, 1, 96\), expected \(1, 1, 144\)"),
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
        read_head(change(tmp_path / "head", tensors, **keys))


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
    modules = {"torch": torch, "safetensors": safetensors}
    exec(code.replace("'hydra_lm_head.safetensors'", repr(str(tmp_path / "head" / FILES["hydra"]))), modules)
    assert set(load_file(tmp_path / "head" / FILES["hydra"])) == set(stored)


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


WORDS = 40
PUBLIC = {"pard_token": 39, "spd_type": "pard"}
"""What AMD's config.json holds beside the model's own keys."""


def facts(vocabulary: int = WORDS) -> TargetFacts:
    return dataclasses.replace(FACTS, name_or_path="some/target", vocab_size=vocabulary)


def saved(folder: Path, **keys: Any) -> PardModel:
    made = tiny_llama(WORDS)
    for key, value in {**PUBLIC, **keys}.items():
        setattr(made.config, key, value)
    made.save_pretrained(folder)
    (folder / "warp_model.bin").write_bytes(b"never opened")
    return PardModel.at(folder)


def verdicts(model: PardModel, vocabulary: int = WORDS) -> dict[str, str]:
    found = list(model.findings(facts(vocabulary)))
    return {engine: worst(found, engine) for engine in ENGINES}


def test_two_engines_draft_from_masks_and_the_others_do_not(tmp_path: Path) -> None:
    model = saved(tmp_path)
    assert verdicts(model) == {
        **dict.fromkeys(("vllm", "trtllm"), "ok"),
        **dict.fromkeys(("sglang", "llama.cpp"), "degrades"),
        **dict.fromkeys(("lmdeploy", "modelopt"), "fails"),
    }
    assert verdicts(model, 44)["vllm"] == "fails" and verdicts(model, 44)["trtllm"] == "ok"
    assert verdicts(saved(tmp_path / "odd", pard_token=WORDS))["trtllm"] == "fails"
    second = saved(tmp_path / "second", spd_type="pard2", pard2=True)
    assert verdicts(second)["vllm"] == "check"


def test_a_head_with_a_pard_token_is_no_pard_model(tmp_path: Path) -> None:
    folder = write_head(sample(PLAIN), tmp_path / "head", "flat", TARGET)
    assert PardModel.at(change(folder, pard_token=3)) is None
    tiny_llama(WORDS).save_pretrained(tmp_path / "plain")
    assert PardModel.at(tmp_path / "plain") is None


def test_an_export_is_a_copy_bit_for_bit_and_leaves_the_pickle(tmp_path: Path) -> None:
    model, out = saved(tmp_path / "model"), tmp_path / "out"
    done = export_pard(model, facts(), "vllm", out)
    flag, given = done.command.split("--speculative-config ")
    assert flag == "vllm serve some/target " and json.loads(given.strip("'")) == {
        **{"method": "draft_model", "model": str(out), "num_speculative_tokens": 8, "parallel_drafting": True},
    }
    kept = {file.name for file in out.iterdir()}
    assert kept == {"config.json", "generation_config.json", "model.safetensors", "README.md"}
    assert done.command in (out / "README.md").read_text()
    read = AutoModelForCausalLM.from_pretrained(out)
    assert read.config.pard_token == 39 and read.config.spd_type == "pard"
    ours = tiny_llama(WORDS).state_dict()
    assert all(torch.equal(tensor, ours[name]) for name, tensor in read.state_dict().items())


def test_tensorrt_llm_is_told_the_mask_token(tmp_path: Path) -> None:
    done = export_pard(saved(tmp_path / "model"), facts(), "trtllm", tmp_path / "out")
    assert done.command == f"trtllm-serve some/target --config {tmp_path}/out/trtllm.yaml"
    assert (tmp_path / "out/trtllm.yaml").read_text() == (
        "speculative_config:\n  decoding_type: PARD\n  max_draft_len: 8\n"
        f'  speculative_model: "{tmp_path}/out"\n  mask_token_id: 39\n'
    )


def test_what_cannot_be_served_is_refused_by_name(tmp_path: Path) -> None:
    model, out = saved(tmp_path / "model"), tmp_path / "out"
    with pytest.raises(ArgumentError, match=r"cannot export to 'sglang'.*PARD draft models go to vllm, trtllm, hf"):
        export_pard(model, facts(), "sglang", out)
    with pytest.raises(CheckpointError, match=r"a vocabulary of 40: vllm wants both .* the target has 44"):
        export_pard(model, facts(44), "vllm", out)
    assert not out.exists()
    assert export_pard(model, facts(44), "vllm", out, force=True).directory == out
    with pytest.raises(ArgumentError, match="holds something, which would be deleted"):
        export_pard(model, facts(), "vllm", out)


def test_the_command_line_knows_such_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path / "model")
    tiny_llama(WORDS, num_hidden_layers=4).save_pretrained(tmp_path / "target")
    where = [str(tmp_path / "model"), "--target", str(tmp_path / "target")]
    assert main(["doctor", *where, "--json", "--engine", "vllm"]) == 0
    assert json.loads(capsys.readouterr().out)["engines"] == {"vllm": "ok"}
    assert main(["doctor", *where]) == 1 and "degrades" in capsys.readouterr().out
    assert main(["export", *where, "--to", "vllm", "--output", str(tmp_path / "out")]) == 0
    assert '"parallel_drafting": true' in capsys.readouterr().out
