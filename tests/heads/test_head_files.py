"""Directories: what is read, what is refused, and that nobody's data is ever replaced."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun.control.config import method_of
from forerun.errors import ArgumentError, CheckpointError
from forerun.heads.base import Head
from forerun.heads.files import HeadCheckpoint, TargetFacts, differences, read_head, write_head
from forerun.types import LAST_HIDDEN
from heads.samples import PLAIN, TARGET, VARIANTS, replaced, sample
from llamas import tiny_llama
from training.ttt import head as ttt_head
from training.ttt import hydra, medusa, mlp_speculator


@pytest.fixture
def head(tmp_path: Path) -> Path:
    return write_head(sample(PLAIN), tmp_path / "head", "flat", TARGET)


def test_files_are_readable_by_all_and_nothing_else_is_left(head: Path) -> None:
    assert sorted(file.name for file in head.parent.iterdir()) == ["head"]
    assert {file.name: file.stat().st_mode & 0o777 for file in head.iterdir()} == {
        "config.json": 0o644,
        "model.safetensors": 0o644,
    }


def test_a_former_head_is_replaced(head: Path) -> None:
    later = sample(VARIANTS["eagle-3.1"], seed=5)
    write_head(later, head, "flat", TARGET, overrides={"note": 1}, texts={"README.md": "words"})
    assert (head / "README.md").read_text() == "words"
    read = read_head(head)
    assert read.config.extra == {"note": 1} and differences(later, read) == ["config.extra"]
    assert sorted(file.name for file in head.parent.iterdir()) == ["head"]


def test_a_directory_with_other_things_is_left_alone(head: Path, tmp_path: Path) -> None:
    (head / "thesis.tex").write_text("years of work")
    with pytest.raises(ArgumentError, match=r"thesis\.tex, which would be deleted"):
        write_head(sample(PLAIN), head, "flat", TARGET)
    (head / "thesis.tex").rename(head.parent / "thesis.tex")
    (head / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ArgumentError, match="another model, which would be deleted"):
        write_head(sample(PLAIN), head, "flat", TARGET)
    with pytest.raises(ArgumentError, match="is a file"):
        write_head(sample(PLAIN), head / "config.json", "flat", TARGET)
    assert load_file(head / "model.safetensors") and (head.parent / "thesis.tex").exists()


def test_a_whole_model_is_no_head_whatever_its_configuration_mentions(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny_llama(100).save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    before, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    for keys in ({"_name_or_path": "/data/eagle-project/llama"}, {"draft_vocab_size": 100}, {"exit_layer": 1}):
        (folder / "config.json").write_text(json.dumps(config | keys))
        assert method_of(folder) == "draft_model"
        with pytest.raises(ArgumentError, match="another model, which would be deleted"):
            write_head(sample(PLAIN), folder, "medusa" if "_name_or_path" in keys else "flat", TARGET)
    (folder / "config.json").unlink()
    with pytest.raises(ArgumentError, match=r"model\.safetensors, which would be deleted"):
        write_head(sample(PLAIN), folder, "flat", TARGET)
    assert load_file(folder / "model.safetensors").keys() == before.keys()


def test_a_failed_write_leaves_the_former_head(head: Path) -> None:
    before = (head / "config.json").read_text()
    broken = sample(dataclasses.replace(PLAIN, extra={"set": {1, 2}}))  # JSON has no sets
    with pytest.raises(TypeError):
        write_head(broken, head, "flat", TARGET)
    with pytest.raises(CheckpointError):
        write_head(replaced(sample(PLAIN), boundaries=(2, 5, LAST_HIDDEN)), head, "flat", TARGET)
    assert (head / "config.json").read_text() == before
    assert sorted(file.name for file in head.parent.iterdir()) == ["head"]


def sharded(head: Path) -> None:
    tensors = load_file(head / "model.safetensors")
    (head / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"model-00001.safetensors": names[:5], "model-00002.safetensors": names[5:]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, head / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (head / "model.safetensors.index.json").write_text(json.dumps(index))


def test_shards_are_read(head: Path) -> None:
    sharded(head)
    assert differences(sample(PLAIN), read_head(head)) == []
    first = head / "model-00001.safetensors"
    save_file(load_file(first), first, {"forerun.target": "its fingerprint"})
    assert read_head(head).target == "its fingerprint"
    (head / "model-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002\.safetensors"):
        read_head(head)


def test_a_tensor_in_two_shards_is_refused(head: Path) -> None:
    sharded(head)
    tensors = load_file(head / "model-00002.safetensors")
    first = next(iter(load_file(head / "model-00001.safetensors")))
    save_file(tensors | {first: torch.ones(1)}, head / "model-00002.safetensors")
    with pytest.raises(CheckpointError, match=f"{first} is stored in two shards"):
        read_head(head)


def test_pickles_are_never_opened(head: Path) -> None:
    (head / "model.safetensors").unlink()
    (head / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: a pickle.*Convert it to model\.safetensors"):
        read_head(head)


def spoil(head: Path, how: str) -> None:
    config, weights = head / "config.json", head / "model.safetensors"
    if how == "truncated":
        weights.write_bytes(weights.read_bytes()[:-9])
    elif how == "no weights":
        weights.unlink()
    elif how == "no config":
        config.unlink()
    else:
        config.write_text({"broken": "{", "list": "[]", "other": '{"model_type": "gpt2"}'}[how])


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("truncated", "corrupt"),
        ("no weights", r"no model\.safetensors"),
        ("no config", r"no config\.json"),
        ("broken", r"config\.json is no JSON"),
        ("list", "holds no JSON object"),
        ("other", "no head's in any known format"),
    ],
)
def test_spoiled_directories_are_refused(head: Path, how: str, message: str) -> None:
    spoil(head, how)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_head(head)
    assert str(head) in str(caught.value)


@pytest.mark.parametrize("name", ["./nowhere", "/no/where", "nowhere", Path("owner/nowhere")])
def test_a_missing_directory_is_no_hub_id(name: Any) -> None:
    with pytest.raises(CheckpointError, match="there is no directory"):
        read_head(name)


def test_a_hub_id_is_downloaded_without_pickles(head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def download(name: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append((name, allow_patterns, ignore_patterns))
        return str(head)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert differences(sample(PLAIN), read_head("owner/head")) == []
    assert asked == [("owner/head", ["*.json", "*.safetensors"], ["*/*"])]


def test_differences_are_named_and_counted_in_bits() -> None:
    head = sample(PLAIN)
    assert differences(head, sample(PLAIN)) == []
    zero = {**head.tensors, "norm.weight": torch.zeros(16)}
    minus = {**head.tensors, "norm.weight": -torch.zeros(16)}
    first, second = (dataclasses.replace(head, tensors=tensors) for tensors in (zero, minus))
    assert differences(first, second) == ["norm.weight"], "0.0 and -0.0 are equal, but not the same"
    assert differences(head, replaced(head, norm_output=True)) == ["config.norm_output"]


def test_test_facts_of_a_target_are_those_of_its_configuration_or_of_its_text_part() -> None:
    facts = TargetFacts.read("demo")
    assert (facts.num_layers, facts.hidden_size, facts.vocab_size) == (8, 384, 8192)
    assert facts.architectures == ("LlamaForCausalLM",) and facts.max_position_embeddings == 2048
    facts = TargetFacts.of(MultimodalConfig(), "owner/seeing")
    assert (facts.name_or_path, facts.num_layers, facts.max_position_embeddings) == ("owner/seeing", 6, 2048)


class MultimodalConfig:
    """A transformers configuration with a text part inside."""

    architectures = ("SeeingForConditionalGeneration",)
    num_hidden_layers, hidden_size, vocab_size = 6, 32, 100

    def get_text_config(self, decoder: bool) -> "MultimodalConfig":
        return self


@pytest.mark.parametrize(
    ("made", "name"),
    [(medusa, "medusa"), (hydra, "hydra"), (mlp_speculator, "mlp_speculator"), (ttt_head, "speculators")],
    ids=["medusa", "hydra", "mlp_speculator", "speculators"],
)
def test_a_quantised_head_is_refused_whatever_says_so(made: Callable[[], Head], name: str, tmp_path: Path) -> None:
    folder = write_head(HeadCheckpoint.of(made()), tmp_path / "head", name, TARGET)
    file, config = next(folder.glob("*.safetensors")), folder / "config.json"
    keys, tensors = json.loads(config.read_text()), load_file(file)
    config.write_text(json.dumps({**keys, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(CheckpointError, match="has a quantization_config; only heads in floating point"):
        read_head(folder)
    config.write_text(json.dumps(keys))
    first = next(name for name, tensor in tensors.items() if tensor.dim() == 2)
    save_file({**tensors, first: tensors[first].to(torch.float8_e4m3fn)}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"the tensor {re.escape(first)} is stored as float8_e4m3fn; only heads"):
        read_head(folder)
