"""Faults that are planted in a head's files one by one: ``forerun doctor`` finds each, and says what to do."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from forerun.cli import main
from forerun.heads.eagle import EagleConfig
from forerun.heads.formats import write_head
from heads.samples import FIRST, LATENT, PLAIN, TARGET, VARIANTS, sample

IDS = "eagle_aux_hidden_state_layer_ids"
Tensors = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A fault, and what the doctor shall say of it."""

    engine: str
    severity: str  # ``refused``: the doctor ends with it as an error
    what: str  # A part of the finding, or of the error
    remedy: str  # A part of what to do
    config: EagleConfig = PLAIN
    keys: dict[str, Any] = field(default_factory=dict)  # Of config.json; None removes one
    tensors: Callable[[Tensors], Any] = lambda tensors: None
    target: dict[str, Any] = field(default_factory=dict)
    written_in: str = "flat"


def plain(**changes: Any) -> EagleConfig:
    return dataclasses.replace(PLAIN, **changes)


def to_nan(tensors: Tensors) -> None:
    tensors["fc.weight"][0, 0] = float("nan")


def ids_for_offsets(tensors: Tensors) -> None:
    tensors["d2t"] = torch.arange(24) + tensors["d2t"]


def twice_the_same(tensors: Tensors) -> None:
    tensors["d2t"][1] = tensors["d2t"][0] - 1


def another_mask(tensors: Tensors) -> None:
    tensors["t2d"] = ~tensors["t2d"]


STORE, RETRAIN, RIGHT = "store embed_tokens.weight with the head", "train the head without it", "name the right target"
REDUCED = VARIANTS["reduced"]
FAULTS: dict[str, Planted] = {
    "the target's width": Planted(
        engine="vllm", severity="fails", what="hidden states of 16", remedy=RIGHT, target={"hidden_size": 32}
    ),
    "the target's vocabulary": Planted(
        engine="sglang", severity="fails", what="a vocabulary of 60", remedy=RIGHT, target={"vocab_size": 61}
    ),
    "too few layers": Planted(
        engine="trtllm", severity="fails", what="reads boundaries", remedy=RIGHT, target={"num_hidden_layers": 5}
    ),
    "NaN": Planted(engine="vllm", severity="fails", what="NaN or infinity", remedy="train it again", tensors=to_nan),
    "no embedding": Planted(
        engine="vllm",
        severity="fails",
        what="no embedding of its own",
        remedy=STORE,
        config=plain(target_hidden_size=12),
        target={"hidden_size": 12, "num_attention_heads": 2},
    ),
    "norm_before_residual": Planted(
        engine="sglang",
        severity="degrades",
        what="norm_before_residual",
        remedy=RETRAIN,
        config=VARIANTS["norm_before_residual"],
    ),
    "a bias behind fc": Planted(
        engine="vllm", severity="degrades", what="fc.bias", remedy=RETRAIN, config=plain(fc_bias=True)
    ),
    "norms of queries and keys": Planted(
        engine="sglang", severity="fails", what="qk_norm", remedy=RETRAIN, config=VARIANTS["qk_norm"]
    ),
    "another activation": Planted(
        engine="vllm", severity="fails", what="gelu", remedy="train the head with silu", config=plain(hidden_act="gelu")
    ),
    "two layers": Planted(
        engine="llama.cpp", severity="fails", what="2 layers", remedy="train one layer", config=VARIANTS["two_layers"]
    ),
    "five states": Planted(
        engine="llama.cpp", severity="fails", what="5 boundaries", remedy="train on three", config=VARIANTS["five"]
    ),
    "states in another order": Planted(
        engine="vllm",
        severity="degrades",
        what="[5, 2, 7]",
        remedy="ascending",
        config=plain(boundaries=(5, 2, 7)),
    ),
    "embeddings as a state": Planted(
        engine="trtllm", severity="fails", what="boundary 0", remedy="from 1", config=plain(boundaries=(0, 5, 7))
    ),
    "a window": Planted(
        engine="trtllm", severity="degrades", what="window of 6", remedy="without a window", config=VARIANTS["window"]
    ),
    "both norms": Planted(
        engine="vllm",
        severity="degrades",
        what="fc_norm together with",
        remedy="train with one of them",
        config=plain(fc_norm=True, norm_before_fc=True),
    ),
    "an embedding as wide as the target's": Planted(
        engine="sglang",
        severity="degrades",
        what="an embedding of its own",
        remedy="embedding frozen",
        config=plain(own_embedding=True),
    ),
    "latent attention by halves": Planted(
        engine="vllm",
        severity="degrades",
        what="by halves",
        remedy="rope_interleave true",
        config=dataclasses.replace(LATENT, latent=dataclasses.replace(LATENT.latent, rope_interleave=False)),
    ),
    "EAGLE-1": Planted(
        engine="trtllm", severity="fails", what="EAGLE-1", remedy="train an EAGLE-3 head", config=FIRST
    ),
    "an unknown key": Planted(
        engine="vllm", severity="check", what="depth_gain", remedy="find out what it means", keys={"depth_gain": 2}
    ),
    # Files that say it otherwise than an engine wants it
    "layer ids at the top only": Planted(
        engine="sglang",
        severity="degrades",
        what=f"eagle_config.{IDS}",
        remedy="forerun export --to sglang",
        config=plain(boundaries=(1, 5, 7)),
        keys={"eagle_config": None},
    ),
    "layer ids inside only": Planted(
        engine="vllm",
        severity="degrades",
        what="layer ids only in eagle_config",
        remedy="forerun export --to vllm",
        config=plain(boundaries=(1, 5, 7)),
        keys={IDS: None},
    ),
    "no draft_vocab_size": Planted(
        engine="sglang",
        severity="fails",
        what="no draft_vocab_size",
        remedy="forerun export --to sglang",
        keys={"draft_vocab_size": None},
    ),
    "tied embeddings": Planted(
        engine="sglang",
        severity="degrades",
        what="tie_word_embeddings",
        remedy="forerun export --to sglang",
        keys={"tie_word_embeddings": True},
    ),
    "an architecture that nobody has": Planted(
        engine="vllm",
        severity="fails",
        what="Qwen3ForCausalLMEagle3",
        remedy="forerun export --to vllm",
        keys={"architectures": ["Qwen3ForCausalLMEagle3"]},
    ),
    "no architecture": Planted(
        engine="vllm",
        severity="fails",
        what="architectures []",
        remedy="forerun export --to vllm",
        keys={"architectures": []},
    ),
    "EAGLE-1 under EAGLE's own name": Planted(
        engine="vllm", severity="fails", what="LlamaForCausalLMEagle", remedy="forerun export --to vllm", config=FIRST
    ),
    "a format of vLLM's alone": Planted(
        engine="sglang",
        severity="fails",
        what="speculators format",
        remedy="forerun export --to sglang",
        written_in="speculators",
    ),
    # What is no head
    "ids that contradict each other": Planted(
        engine="", severity="refused", what="contradicts itself about the target's layers", remedy="correct the others",
        keys={IDS: [3, 5, 7]},
    ),
    "a tensor that is lost": Planted(
        engine="",
        severity="refused",
        what="missing: fc.weight",
        remedy="incomplete, quantised, or of another kind",
        tensors=lambda tensors: tensors.pop("fc.weight"),
    ),
    "d2t with ids": Planted(
        engine="", severity="refused", what="out of range", remedy="d2t holds offsets", config=REDUCED,
        tensors=ids_for_offsets,
    ),
    "d2t with a token twice": Planted(
        engine="", severity="refused", what="to the same token", remedy="d2t maps entries 0 and 1", config=REDUCED,
        tensors=twice_the_same,
    ),
    "t2d of another vocabulary": Planted(
        engine="", severity="refused", what="t2d and d2t disagree", remedy="write t2d again from d2t", config=REDUCED,
        tensors=another_mask,
    ),
    "a size in quotes": Planted(
        engine="", severity="refused", what="vocab_size of config.json must be a whole number", remedy="got '60'",
        keys={"vocab_size": "60"},
    ),
    "what changes the computation": Planted(
        engine="", severity="refused", what="final_logit_softcapping 30.0", remedy="Draft with the engine",
        keys={"final_logit_softcapping": 30.0},
    ),
    "a quantised head": Planted(
        engine="", severity="refused", what="quantization_config", remedy="take that one",
        keys={"quantization_config": {"quant_method": "fp8"}},
    ),
}  # fmt: skip


def targeted(folder: Path, changes: dict[str, Any]) -> Path:
    """A target's directory, without weights: the doctor reads the configuration alone."""
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 24, "vocab_size": 60}
    sizes |= {"num_hidden_layers": 10, "max_position_embeddings": 128, **changes}
    LlamaConfig(**sizes, architectures=["LlamaForCausalLM"], bos_token_id=1, eos_token_id=2).save_pretrained(folder)
    return folder


def planted(folder: Path, fault: Planted) -> Path:
    """A head's directory with the fault."""
    head = write_head(sample(fault.config), folder, fault.written_in, TARGET)
    file, weights = head / "config.json", head / "model.safetensors"
    keys = json.loads(file.read_text()) | fault.keys
    file.write_text(json.dumps({key: value for key, value in keys.items() if value is not None}))
    tensors = load_file(weights)
    fault.tensors(tensors)
    save_file(tensors, weights)
    return head


@pytest.mark.parametrize("name", FAULTS)
def test_the_doctor_finds_it_and_says_what_to_do(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fault = FAULTS[name]
    head, target = planted(tmp_path / "head", fault), targeted(tmp_path / "target", fault.target)
    code = main(["doctor", str(head), "--target", str(target), "--json"])
    shown = capsys.readouterr()
    if fault.severity == "refused":
        assert code == 2 and fault.what in shown.err and fault.remedy in shown.err and not shown.out
        return
    told = json.loads(shown.out)
    wrong = [one for one in told["findings"] if one["severity"] != "ok"]
    assert all(len(one["remedy"]) > 5 for one in wrong), "each says what to do"
    found = [one for one in wrong if one["engine"] == fault.engine and fault.what in one["what"]]
    assert {one["severity"] for one in found} == {fault.severity}, wrong
    assert any(fault.remedy in one["remedy"] for one in found), found
    assert code == ("fails" in told["engines"].values())


def test_there_are_enough_of_them() -> None:
    assert len(FAULTS) >= 25
    assert sum(fault.severity != "refused" for fault in FAULTS.values()) >= 25


def test_a_head_without_a_fault_is_served_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = planted(tmp_path / "head", Planted(engine="", severity="ok", what="", remedy=""))
    assert main(["doctor", str(head), "--target", str(targeted(tmp_path / "target", {})), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told["engines"].values()) == {"ok"} and not told["notes"]
