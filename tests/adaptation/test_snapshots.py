"""What is on disk can be drafted with as it stands, whatever happens; kill -9 while it is written included."""

from __future__ import annotations

import copy
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from contract.harness import VARIANTS, VOCABULARY, model, relative, word_tokenizer
from forerun.checkpoints import read_head
from forerun.drafters.heads.kinds import KINDS
from forerun.engine.adapting.adaptation import Snapshots, differing_fields, fingerprint
from forerun.errors import CheckpointError
from forerun.model import Target
from forerun.model.kernels.packing import exchange, ready
from llamas import tiny_llama

KILLS = 6


def snapshots(
    folder: Path, target: LlamaForCausalLM | None = None, served: LlamaForCausalLM | None = None
) -> Snapshots:
    held = Target(target or model(), rows=1, slots=32)
    return Snapshots(folder, held, word_tokenizer(), served or copy.deepcopy(relative()).bfloat16())


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_an_ordinary_checkpoint_and_what_it_came_from(
    tmp_path: Path, draft: LlamaForCausalLM, capfd: pytest.CaptureFixture[str]
) -> None:
    kept = snapshots(tmp_path)
    capfd.readouterr()
    kept.save(draft, 3, {"updates": 7, "expected_acceptance": 0.5})
    assert capfd.readouterr() == ("", ""), "a server's log is no place for transformers' bar"
    stored = AutoModelForCausalLM.from_pretrained(tmp_path / "latest")
    assert stored.dtype == torch.bfloat16 and draft.dtype == torch.float32
    for name, value in stored.state_dict().items():
        assert torch.equal(value, draft.state_dict()[name].bfloat16())
    assert AutoTokenizer.from_pretrained(tmp_path / "latest").get_vocab() == word_tokenizer().get_vocab()
    record = json.loads((tmp_path / "latest" / "adaptation.json").read_text())
    assert record["version"] == 3 and record["updates"] == 7 and record["expected_acceptance"] == 0.5
    assert record["target"] == fingerprint(Target(model(), rows=1, slots=32)) and record["tokenizer"]["vocabulary"]


@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if kind.trains == "head"])
def test_a_head_is_kept_in_its_public_format(tmp_path: Path, kind: str) -> None:
    head = VARIANTS[kind][0].options["model"]
    held = Target(model(), rows=1, slots=32)
    if kind == "mtp":  # MiMo's reads the state before the final norm
        head = copy.deepcopy(head)
        head.config = replace(head.config, boundaries=(held.num_layers,))
    kept = Snapshots(tmp_path, held, word_tokenizer(), head)
    if kind == "mtp":  # written under the names of the target's family
        kept._facts = replace(kept._facts, architectures=("MiMoForCausalLM",))
    kept.save(head, 1, {"updates": 2})
    stored, found = read_head(tmp_path / "latest", num_layers=held.num_layers), kept.resume()
    assert stored.config.kind == head.config.kind and found is not None and found.version == 1
    assert differing_fields(stored.config, head.config) == []
    assert all(torch.equal(value, found.state[name]) for name, value in head.state_dict().items())
    exchange(ready(head, found.state))


def test_the_last_two_are_kept_and_a_start_goes_on_from_the_newest(tmp_path: Path, draft: LlamaForCausalLM) -> None:
    assert snapshots(tmp_path / "new").resume() is None
    kept = snapshots(tmp_path)
    for version in (1, 2, 3):
        kept.save(draft, version, {})
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-3", "latest"]
    found = snapshots(tmp_path).resume()
    assert found is not None and found.version == 3
    assert torch.equal(found.state["lm_head.weight"], draft.lm_head.weight.bfloat16().float())


def test_what_was_rolled_back_is_not_gone_on_from(tmp_path: Path, draft: LlamaForCausalLM) -> None:
    kept = snapshots(tmp_path)
    kept.save(draft, 1, {})
    kept.save(draft, 2, {})
    kept.withdraw(2)
    found = kept.resume()
    assert found is not None and found.version == 1 and names(tmp_path) == ["checkpoint-1", "latest"]
    kept.withdraw(1)
    assert kept.resume() is None and names(tmp_path) == []
    kept.withdraw(1)


def test_another_targets_drafter_is_refused(tmp_path: Path, draft: LlamaForCausalLM) -> None:
    snapshots(tmp_path).save(draft, 1, {})
    with pytest.raises(CheckpointError, match="another target"):
        snapshots(tmp_path, relative()).resume()


def test_another_drafters_weights_are_refused(tmp_path: Path, draft: LlamaForCausalLM) -> None:
    """Known by what it began with, in whatever dtype it is served; its own latest ones may be served, too."""
    snapshots(tmp_path).save(draft, 1, {})
    for served in (relative(), draft):
        found = snapshots(tmp_path, served=served).resume()
        assert found is not None and found.version == 1
    with pytest.raises(CheckpointError, match="began with other weights; serve the drafter that it began with"):
        snapshots(tmp_path, served=relative(0.02)).resume()
    again = snapshots(tmp_path, served=draft)
    again.resume()
    again.save(relative(0.02), 2, {})
    assert snapshots(tmp_path).resume() is not None, "what it began with is handed on"


def older(folder: Path) -> None:
    """As an earlier forerun wrote it."""
    path = folder / "latest" / "adaptation.json"
    record = json.loads(path.read_text())
    del record["start"], record["weights"]
    path.write_text(json.dumps(record))


def test_of_an_older_directory_configuration_and_shapes_are_compared(tmp_path: Path, draft: LlamaForCausalLM) -> None:
    snapshots(tmp_path / "model").save(draft, 1, {})
    older(tmp_path / "model")
    assert snapshots(tmp_path / "model", served=relative(0.02)).resume() is not None
    with pytest.raises(CheckpointError, match=r"has other tensors \(.*layers.*\) than the one that is served"):
        snapshots(tmp_path / "model", served=tiny_llama(VOCABULARY, num_hidden_layers=1)).resume()

    held, head = Target(model(), rows=1, slots=32), VARIANTS["eagle3"][0].options["model"]
    Snapshots(tmp_path / "head", held, word_tokenizer(), head).save(head, 1, {})
    older(tmp_path / "head")
    other = copy.deepcopy(head)
    other.config = replace(head.config, norm_output=not head.config.norm_output)
    with pytest.raises(CheckpointError, match=r"is configured otherwise \(norm_output\) than the one that is served"):
        Snapshots(tmp_path / "head", held, word_tokenizer(), other).resume()
    medusa = VARIANTS["medusa"][0].options["model"]
    with pytest.raises(CheckpointError, match=r"is configured otherwise \(kind\)"):
        Snapshots(tmp_path / "head", held, word_tokenizer(), medusa).resume()


def test_a_foreign_or_broken_directory_is_refused(tmp_path: Path, draft: LlamaForCausalLM) -> None:
    folder = tmp_path / "checkpoint-4"
    draft.save_pretrained(folder)
    with pytest.raises(CheckpointError, match=r"adaptation.json cannot be read"):
        snapshots(tmp_path).resume()
    (folder / "adaptation.json").write_text(json.dumps({"version": 4, "target": fingerprint(Target(model()))}))
    (folder / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        snapshots(tmp_path).resume()


def test_a_full_disk_leaves_what_was_there(
    tmp_path: Path, draft: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = snapshots(tmp_path)
    kept.save(draft, 1, {})

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", full)
    with pytest.raises(CheckpointError, match="No space left"):
        kept.save(draft, 2, {})
    found = kept.resume()
    assert found is not None and found.version == 1 and names(tmp_path) == ["checkpoint-1", "latest"]


@pytest.mark.slow
def test_killed_while_it_saves(tmp_path: Path) -> None:
    tests = Path(__file__).parents[1]
    path = os.pathsep.join([str(tests), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "adaptation.saving_forever", str(tmp_path)]
    rng, kept = random.Random(0), snapshots(tmp_path)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        said = 0
        for _ in range(KILLS):
            parent.stdin.write("go\n")
            parent.stdin.flush()
            child = int(parent.stdout.readline())
            said = int(parent.stdout.readline())
            time.sleep(0.03 * rng.random())
            os.kill(child, signal.SIGKILL)
            while (line := parent.stdout.readline()) != "dead\n":
                said = int(line)
            stored = AutoModelForCausalLM.from_pretrained(tmp_path / "latest", dtype=torch.float32)
            found = kept.resume()
            assert found is not None and found.version >= said
            # Every weight of a version is its number: nothing of another one is mixed in.
            assert all(bool((value == found.version).all()) for value in stored.parameters())
            assert all(bool((value == found.version).all()) for value in found.state.values())
            assert not [name for name in names(tmp_path) if name.startswith(".")]
        parent.stdin.close()
