"""PARD draft models for engines: what ``forerun doctor`` and ``forerun export`` say, copy and refuse."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from forerun.cli import main
from forerun.errors import ArgumentError, CheckpointError
from forerun.heads.engines import ENGINES, worst
from forerun.heads.files import TargetFacts, write_head
from forerun.heads.pard_files import PardModel, export_pard
from heads.samples import FACTS, PLAIN, TARGET, change, sample
from llamas import tiny_llama

VOCABULARY = 40
PUBLIC = {"pard_token": 39, "spd_type": "pard"}
"""What AMD's config.json holds beside the model's own keys."""


def facts(vocabulary: int = VOCABULARY) -> TargetFacts:
    return dataclasses.replace(FACTS, name_or_path="some/target", vocab_size=vocabulary)


def saved(folder: Path, **keys: Any) -> PardModel:
    made = tiny_llama(VOCABULARY)
    for key, value in {**PUBLIC, **keys}.items():
        setattr(made.config, key, value)
    made.save_pretrained(folder)
    (folder / "warp_model.bin").write_bytes(b"never opened")
    return PardModel.at(folder)


def verdicts(model: PardModel, vocabulary: int = VOCABULARY) -> dict[str, str]:
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
    assert verdicts(saved(tmp_path / "odd", pard_token=VOCABULARY))["trtllm"] == "fails"
    second = saved(tmp_path / "second", spd_type="pard2", pard2=True)
    assert verdicts(second)["vllm"] == "check"


def test_a_head_with_a_pard_token_is_no_pard_model(tmp_path: Path) -> None:
    folder = write_head(sample(PLAIN), tmp_path / "head", "flat", TARGET)
    assert PardModel.at(change(folder, pard_token=3)) is None
    tiny_llama(VOCABULARY).save_pretrained(tmp_path / "plain")
    assert PardModel.at(tmp_path / "plain") is None


def test_an_export_is_a_copy_bit_for_bit_and_leaves_the_pickle(tmp_path: Path) -> None:
    model, out = saved(tmp_path / "model"), tmp_path / "out"
    done = export_pard(model, facts(), "vllm", out)
    flag, given = done.command.split("--speculative-config ")
    assert flag == "vllm serve some/target " and json.loads(given.strip("'")) == {
        "method": "draft_model",
        "model": str(out),
        "num_speculative_tokens": 8,
        "parallel_drafting": True,
    }
    kept = {file.name for file in out.iterdir()}
    assert kept == {"config.json", "generation_config.json", "model.safetensors", "README.md"}
    assert done.command in (out / "README.md").read_text()
    read = AutoModelForCausalLM.from_pretrained(out)
    assert read.config.pard_token == 39 and read.config.spd_type == "pard"
    ours = tiny_llama(VOCABULARY).state_dict()
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
    tiny_llama(VOCABULARY, num_hidden_layers=4).save_pretrained(tmp_path / "target")
    where = [str(tmp_path / "model"), "--target", str(tmp_path / "target")]
    assert main(["doctor", *where, "--json", "--engine", "vllm"]) == 0
    assert json.loads(capsys.readouterr().out)["engines"] == {"vllm": "ok"}
    assert main(["doctor", *where]) == 1 and "degrades" in capsys.readouterr().out
    assert main(["export", *where, "--to", "vllm", "--output", str(tmp_path / "out")]) == 0
    assert '"parallel_drafting": true' in capsys.readouterr().out
