"""Faults that are planted in a head's files one by one: ``forerun doctor`` finds each, and says what to do."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from forerun.cli import main
from forerun.heads.eagle import EagleConfig
from forerun.heads.files import write_head
from heads.samples import FIRST, LATENT, PLAIN, TARGET, VARIANTS, change, sample

IDS = "eagle_aux_hidden_state_layer_ids"
RETRAIN, RIGHT = "train the head without it", "name the right target"
HALVES = dataclasses.replace(LATENT, latent=dataclasses.replace(LATENT.latent, rope_interleave=False))
REDUCED = VARIANTS["reduced"]
D2T = sample(REDUCED).tensors["d2t"]


def plain(**changes: Any) -> EagleConfig:
    return dataclasses.replace(PLAIN, **changes)


def planted(
    folder: Path,
    config: EagleConfig = PLAIN,
    name: str = "flat",
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Tensor | None] | None = None,
    target: Mapping[str, Any] | None = None,
) -> list[str]:
    """The doctor's words about a head that was changed so, and a target, which has a configuration alone."""
    head = change(write_head(sample(config), folder / "head", name, TARGET), tensors, **(keys or {}))
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 24, "vocab_size": 60}
    sizes |= {"num_hidden_layers": 10, "max_position_embeddings": 128, **(target or {})}
    made = LlamaConfig(**sizes, architectures=["LlamaForCausalLM"], bos_token_id=1, eos_token_id=2)
    made.save_pretrained(folder / "target")
    return ["doctor", str(head), "--target", str(folder / "target"), "--json"]


NARROW = {"config": plain(target_hidden_size=12), "target": {"hidden_size": 12, "num_attention_heads": 2}}
FOUND: list[tuple[dict[str, Any], str, str, str, str]] = [
    ({"target": {"hidden_size": 32}}, "vllm", "fails", "hidden states of 16", RIGHT),
    ({"target": {"vocab_size": 61}}, "sglang", "fails", "a vocabulary of 60", RIGHT),
    ({"target": {"num_hidden_layers": 5}}, "trtllm", "fails", "reads boundaries", RIGHT),
    ({"tensors": {"fc.weight": torch.full((16, 48), torch.nan)}}, "vllm", "fails", "NaN or infinity", "train it again"),
    (NARROW, "vllm", "fails", "no embedding of its own", "store embed_tokens.weight with the head"),
    ({"config": VARIANTS["norm_before_residual"]}, "sglang", "degrades", "norm_before_residual", RETRAIN),
    ({"config": plain(fc_bias=True)}, "vllm", "degrades", "fc.bias", RETRAIN),
    ({"config": VARIANTS["qk_norm"]}, "sglang", "fails", "qk_norm", RETRAIN),
    ({"config": plain(hidden_act="gelu")}, "vllm", "fails", "gelu", "train the head with silu"),
    ({"config": VARIANTS["two_layers"]}, "llama.cpp", "fails", "2 layers", "train one layer"),
    ({"config": VARIANTS["five"]}, "llama.cpp", "fails", "5 boundaries", "train on three"),
    ({"config": plain(boundaries=(5, 2, 7))}, "vllm", "degrades", "[5, 2, 7]", "ascending"),
    ({"config": plain(boundaries=(0, 5, 7))}, "trtllm", "fails", "boundary 0", "from 1"),
    ({"config": VARIANTS["window"]}, "trtllm", "degrades", "window of 6", "without a window"),
    ({"config": plain(fc_norm=True, norm_before_fc=True)}, "vllm", "degrades", "fc_norm together with", "one of them"),
    ({"config": plain(own_embedding=True)}, "sglang", "degrades", "an embedding of its own", "embedding frozen"),
    ({"config": HALVES}, "vllm", "degrades", "by halves", "rope_interleave true"),
    ({"config": FIRST}, "trtllm", "fails", "EAGLE-1", "train an EAGLE-3 head"),
    ({"keys": {"depth_gain": 2}}, "vllm", "check", "depth_gain", "find out what it means"),
]
"""How it is planted -> engine, severity, what is found, what to do."""
OTHER = plain(boundaries=(1, 5, 7))
OTHERWISE: list[tuple[dict[str, Any], str, str, str]] = [
    ({"config": OTHER, "keys": {"eagle_config": None}}, "sglang", "degrades", f"eagle_config.{IDS}"),
    ({"config": OTHER, "keys": {IDS: None}}, "vllm", "degrades", "layer ids only in eagle_config"),
    ({"keys": {"draft_vocab_size": None}}, "sglang", "fails", "no draft_vocab_size"),
    ({"keys": {"tie_word_embeddings": True}}, "sglang", "degrades", "tie_word_embeddings"),
    ({"keys": {"architectures": ["Qwen3ForCausalLMEagle3"]}}, "vllm", "fails", "Qwen3ForCausalLMEagle3"),
    ({"keys": {"architectures": []}}, "vllm", "fails", "architectures []"),
    ({"config": FIRST}, "vllm", "fails", "LlamaForCausalLMEagle"),
    ({"name": "speculators"}, "sglang", "fails", "speculators format"),
]
"""Files that say it otherwise than an engine wants it: what to do is to export them."""
FOUND += [(*one, f"forerun export --to {one[1]}") for one in OTHERWISE]
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"keys": {IDS: [3, 5, 7]}}, "contradicts itself about the target's layers", "correct the others"),
    ({"tensors": {"fc.weight": None}}, "missing: fc.weight", "incomplete, quantised, or of another kind"),
    ({"config": REDUCED, "tensors": {"d2t": torch.arange(24) + D2T}}, "out of range", "d2t holds offsets"),
    (
        {"config": REDUCED, "tensors": {"d2t": torch.cat([D2T[:1], D2T[:1] - 1, D2T[2:]])}},
        "to the same token",
        "d2t maps entries 0 and 1",
    ),
    (
        {"config": REDUCED, "tensors": {"t2d": torch.ones(60, dtype=torch.bool)}},
        "t2d and d2t disagree",
        "write t2d again from d2t",
    ),
    ({"keys": {"vocab_size": "60"}}, "vocab_size of config.json must be a whole number", "got '60'"),
    ({"keys": {"final_logit_softcapping": 30.0}}, "final_logit_softcapping 30.0", "Draft with the engine"),
    ({"keys": {"quantization_config": {"quant_method": "fp8"}}}, "quantization_config", "take that one"),
]
"""What is no head -> parts of the error."""


@pytest.mark.parametrize(
    ("fault", "expected"),
    [(fault, expected) for fault, *expected in FOUND],
    ids=[f"{engine}: {what}" for _, engine, _, what, _ in FOUND],
)
def test_the_doctor_finds_it_and_says_what_to_do(
    fault: dict[str, Any], expected: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, severity, what, remedy = expected
    code = main(planted(tmp_path, **fault))
    told = json.loads(capsys.readouterr().out)
    wrong = [one for one in told["findings"] if one["severity"] != "ok"]
    assert all(len(one["remedy"]) > 5 for one in wrong), "each says what to do"
    found = [one for one in wrong if one["engine"] == engine and what in one["what"]]
    assert {one["severity"] for one in found} == {severity}, wrong
    assert any(remedy in one["remedy"] for one in found), found
    assert code == ("fails" in told["engines"].values())


@pytest.mark.parametrize(("fault", "what", "remedy"), REFUSED, ids=[one[1] for one in REFUSED])
def test_what_is_no_head_is_refused(
    fault: dict[str, Any], what: str, remedy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(planted(tmp_path, **fault)) == 2
    shown = capsys.readouterr()
    assert what in shown.err and remedy in shown.err and not shown.out


def test_a_head_without_a_fault_is_served_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(planted(tmp_path)) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told["engines"].values()) == {"ok"} and not told["notes"]
