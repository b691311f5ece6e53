"""P-EAGLE's public formats: written and read bit for bit, contradictions refused by name; what engines make of them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun.errors import ArgumentError, CheckpointError
from forerun.heads.engines import ENGINES, diagnose, export_head, worst
from forerun.heads.files import HeadCheckpoint, TargetFacts, differences
from forerun.heads.formats import read_head, write_head
from forerun.types import LAST_HIDDEN
from training.ttt import HIDDEN, VOCABULARY, peagle

FACTS = TargetFacts(
    name_or_path="owner/target",
    architectures=("LlamaForCausalLM",),
    num_layers=6,
    hidden_size=HIDDEN,
    vocab_size=VOCABULARY,
    max_position_embeddings=128,
)
LAYER = [
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    *("input_layernorm.weight", "hidden_norm.weight", "post_attention_layernorm.weight"),
]
"""Tensors of a layer, by vLLM's loader and, above the first, SGLang's."""


def made(**options: Any) -> HeadCheckpoint:
    return HeadCheckpoint.of(peagle(**{"own_embedding": True, "num_hidden_layers": 4, **options}))


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
def test_the_public_formats_are_written_and_read(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    before = made(**options)
    folder = write_head(before, tmp_path / "head", name, FACTS)
    after = read_head(folder)
    assert differences(before, after) == [] and after.config.kind == "peagle"
    stored, config = load_file(folder / "model.safetensors"), before.config
    first = "midlayer" if name == "peagle" and config.num_hidden_layers == 1 else "layers.0"
    layers = [first, *(f"layers.{layer}" for layer in range(1, config.num_hidden_layers))]
    assert stored.keys() == {
        *(f"{layer}.{tensor}" for layer in layers for tensor in LAYER),
        *("fc.weight", "norm.weight", "lm_head.weight", "mask_hidden"),
        *(["embed_tokens.weight"] if config.own_embedding else []),
        *(["input_norm.weight"] if config.norm_before_fc else []),
        *(["d2t", "t2d"] if config.reduced_vocabulary else []),
    }
    assert stored["mask_hidden"].shape == (1, 1, len(config.boundaries) * HIDDEN)


def keys_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def change(folder: Path, **keys: Any) -> Path:
    whole = keys_of(folder) | keys
    kept = {name: value for name, value in whole.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def retensor(folder: Path, **tensors: torch.Tensor | None) -> Path:
    whole = {**load_file(folder / "model.safetensors"), **tensors}
    save_file({name: tensor for name, tensor in whole.items() if tensor is not None}, folder / "model.safetensors")
    return folder


def test_the_mask_token_is_said_as_each_format_does(tmp_path: Path) -> None:
    keys = keys_of(write_head(made(), tmp_path / "a", "peagle", FACTS))
    assert keys["architectures"] == ["LlamaForCausalLMEagle3"] and keys["ptd_token_id"] == VOCABULARY - 1
    assert keys["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3] and keys["num_hidden_layers"] == 4
    keys = keys_of(write_head(made(), tmp_path / "b", "speculators", FACTS))
    assert keys["speculators_model_type"] == "peagle" and keys["architectures"] == ["PEagleSpeculator"]
    assert keys["mask_token_id"] == VOCABULARY - 1 and keys["norm_before_residual"] is False
    assert keys["speculators_config"]["algorithm"] == "peagle"
    with pytest.raises(CheckpointError, match="fc_norm of a P-EAGLE head in this format; use peagle"):
        write_head(made(fc_norm=True), tmp_path / "c", "speculators", FACTS)


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
    before = made()
    folder = change(write_head(before, tmp_path / "head", "peagle", FACTS), **keys)
    found = read_head(retensor(folder, mask_hidden=before.tensors["mask_hidden"].view(1, -1).clone()))
    assert found.config.mask_token_id == 0 and found.unknown == []
    assert differences(before, found) == ["config.mask_token_id"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"pard_token": 3}, "contradicts itself about the mask token: ptd_token_id 39, pard_token 3"),
        ({"ptd_token_id": VOCABULARY}, "mask_token_id must be one of the target's 40 tokens, got 40"),
        ({"ptd_token_id": "39"}, "ptd_token_id of config.json must be a whole number"),
        ({"ptd_token_id": None, "architectures": ["PEagleDraftModel"]}, "has no ptd_token_id"),
        ({"parallel_drafting": False}, "parallel_drafting is false"),
        ({"markov_rank": 16}, "markov_rank 16, which changes what a head computes"),
        ({"architectures": ["LlamaForCausalLMEagle"]}, "its layers are EAGLE-3's; got generation 1"),
        ({"target_hidden_size": 48}, r"of the wrong shape: .*mask_hidden \(1, 1, 96\), expected \(1, 1, 144\)"),
    ],
)
def test_what_contradicts_itself_or_is_another_method_is_refused(
    keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = write_head(made(), tmp_path / "head", "peagle", FACTS)
    with pytest.raises(CheckpointError, match=message):
        read_head(change(folder, **keys))


def test_without_its_mask_it_is_no_such_head(tmp_path: Path) -> None:
    folder = retensor(write_head(made(), tmp_path / "a", "peagle", FACTS), mask_hidden=None)
    with pytest.raises(CheckpointError, match="ptd_token_id 39, which changes what a head computes"):
        read_head(folder)
    with pytest.raises(CheckpointError, match="unknown: mask_hidden"):
        read_head(change(write_head(made(), tmp_path / "b", "peagle", FACTS), ptd_token_id=None))
    folder = retensor(write_head(made(), tmp_path / "c", "speculators", FACTS), mask_hidden=None)
    with pytest.raises(CheckpointError, match="has no mask_hidden"):
        read_head(folder)


@pytest.mark.parametrize("to", ["vllm", "speculators", "hf"])
def test_an_export_is_served_by_vllm(to: str, tmp_path: Path) -> None:
    head = made()
    done = export_head(write_head(head, tmp_path / "head", "peagle", FACTS), FACTS, to, tmp_path / "out")
    assert differences(head, read_head(tmp_path / "out")) == []
    if to == "vllm":
        speculation = {"method": "eagle3", "model": str(tmp_path / "out"), "num_speculative_tokens": 5}
        assert json.loads(shlex.split(done.command)[-1]) == speculation | {"parallel_drafting": True}
    if to == "hf":
        assert "--drafter peagle" in done.command


def test_others_say_by_name_that_they_do_not_read_it(tmp_path: Path) -> None:
    head = made()
    findings = diagnose(head, FACTS)
    assert {engine: worst(findings, engine) for engine in ENGINES} == {
        engine: "ok" if engine == "vllm" else "fails" for engine in ENGINES
    }
    assert all("mask_hidden" in finding.why for finding in findings if finding.severity == "fails")
    folder = write_head(head, tmp_path / "head", "peagle", FACTS)
    for engine in ("sglang", "trtllm"):
        with pytest.raises(ArgumentError, match=f"cannot export to '{engine}'.*Heads of the kind peagle go to vllm"):
            export_head(folder, FACTS, engine, tmp_path / "out")


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
def test_doctor_knows_what_vllm_does_not_read(options: dict[str, Any], judged: str) -> None:
    assert worst(diagnose(made(**options), FACTS), "vllm") == judged
