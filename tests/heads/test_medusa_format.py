"""Medusa's public format: written and read bit for bit, broken files and pickles refused by name."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun.errors import ArgumentError, CheckpointError
from forerun.heads.engines import ENGINES, diagnose, export_head
from forerun.heads.files import HeadCheckpoint, TargetFacts, differences
from forerun.heads.formats import read_head, write_head
from training.ttt import HIDDEN, VOCABULARY, medusa

SAFE = "medusa_lm_head.safetensors"
FACTS = TargetFacts(
    name_or_path="owner/target",
    architectures=("LlamaForCausalLM",),
    num_layers=4,
    hidden_size=HIDDEN,
    vocab_size=VOCABULARY,
    max_position_embeddings=128,
)


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_the_public_format_is_written_and_read(layers: int, tmp_path: Path) -> None:
    before = HeadCheckpoint.of(medusa(num_layers=layers))
    write_head(before, tmp_path / "head", "medusa", FACTS)
    keys = json.loads((tmp_path / "head" / "config.json").read_text())
    assert keys == {
        **{"base_model_name_or_path": "owner/target", "medusa_num_heads": 3, "medusa_num_layers": layers},
        # vLLM's MedusaConfig: without the last it drops the biases, without the sizes it takes a Llama's of 7 B.
        **{"model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": HIDDEN, "vocab_size": VOCABULARY},
        "medusa_fc_bias": True,
    }
    stored = load_file(tmp_path / "head" / "medusa_lm_head.safetensors")
    blocks = {f"{k}.{n}.linear.{part}" for k in range(3) for n in range(layers) for part in ("weight", "bias")}
    assert set(stored) == blocks | {f"{k}.{layers}.weight" for k in range(3)}
    after = read_head(tmp_path / "head")
    assert differences(before, after) == [] and after.config.kind == "medusa"
    write_head(before, tmp_path / "head", "medusa", FACTS)  # a former head is replaced
    save_file({f"medusa_head.{name}": tensor for name, tensor in stored.items()}, tmp_path / "head" / SAFE)
    assert differences(before, read_head(tmp_path / "head")) == []


@pytest.mark.parametrize(
    ("keys", "changes", "message"),
    [
        ({"medusa_num_heads": 4}, {}, r"missing: heads\.3\.0\.linear\.bias"),
        ({"medusa_num_layers": 2}, {}, r"no output head 0\.2\.weight"),
        ({"medusa_num_heads": 0}, {}, "num_heads must be at least 1"),
        ({}, {"1.1.weight": torch.ones(3, HIDDEN)}, r"of the wrong shape: heads\.1\.1\.weight \(3, 32\)"),
        ({}, {"token_map": torch.ones(3)}, "the tensor token_map is none of a Medusa head"),
    ],
)
def test_broken_checkpoints_are_refused(
    keys: dict[str, int], changes: dict[str, torch.Tensor], message: str, tmp_path: Path
) -> None:
    folder = write_head(HeadCheckpoint.of(medusa()), tmp_path / "head", "medusa", FACTS)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))
    save_file(load_file(folder / SAFE) | changes, folder / SAFE)
    with pytest.raises(CheckpointError, match=message):
        read_head(folder)


def test_a_pickle_is_never_opened(tmp_path: Path) -> None:
    folder = write_head(HeadCheckpoint.of(medusa()), tmp_path / "head", "medusa", FACTS)
    torch.save(load_file(folder / SAFE), folder / "medusa_lm_head.pt")
    assert read_head(folder).config.num_heads == 3
    (folder / SAFE).unlink()
    with pytest.raises(CheckpointError, match=r"head\.pt: a pickle can run any code.* to medusa_lm_head\.safetensors"):
        read_head(folder)
    (folder / "medusa_lm_head.pt").unlink()
    with pytest.raises(CheckpointError, match=r"holds no medusa_lm_head\.safetensors"):
        read_head(folder)


def test_a_published_file_names_no_sizes(tmp_path: Path) -> None:
    before = HeadCheckpoint.of(medusa())
    folder = write_head(before, tmp_path / "head", "medusa", FACTS)
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 3, "medusa_num_layers": 1}))
    assert differences(before, read_head(folder)) == []


def test_it_is_exported_for_forerun_and_the_vllm_that_still_drafts_with_it(tmp_path: Path) -> None:
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
