"""The last stage of the demo recipe, on a tiny model: an ordinary checkpoint, complete or not at all."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from llamas import tiny_llama

FUNCTION = """\
def total(values, start=10):
    found = start
    for value in values:
        if value is None:
            continue
        if value == "skip":
            continue
        found += value
    return found
"""
RECIPE = Path(__file__).parents[2] / "recipes" / "demo"


@pytest.fixture
def ship(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(RECIPE))
    import corpus
    import ship

    files = [
        corpus.SourceFile(name="sched.py", text="def run(self):\n    return self\n" * 8),
        corpus.SourceFile(name="xml/sax/x.py", text="import os\n" * 30 + FUNCTION),
    ]
    monkeypatch.setattr(corpus, "read_standard_library", lambda: files)
    monkeypatch.setattr(corpus, "split", lambda files: (files[:1], files[1:]))
    monkeypatch.setattr(corpus, "is_prompt", lambda file: True)
    yield ship
    for script in RECIPE.glob("*.py"):
        sys.modules.pop(script.stem, None)


@pytest.fixture
def work(ship: ModuleType, tmp_path: Path) -> Path:
    import corpus
    import tokenizer

    demo_tokenizer = tokenizer.train_tokenizer([file.text for file in corpus.read_standard_library()], 1024)
    demo_tokenizer.save_pretrained(tmp_path / "tokenizer")
    for seed, role in enumerate(("target", "draft")):
        keys = {"tie_word_embeddings": True, "max_position_embeddings": 1024, "eos_token_id": [0, 1]}
        tiny_llama(len(demo_tokenizer), seed, **keys).save_pretrained(tmp_path / role)
        demo_tokenizer.save_pretrained(tmp_path / role)
        (tmp_path / f"{role}-training-1").mkdir()
        lines = [json.dumps({"step": step, "tokens": 4096 * step, "loss": 3.0}) for step in range(101)]
        (tmp_path / f"{role}-training-1" / "log.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_writes_ordinary_checkpoints_cards_and_prompts(ship: ModuleType, work: Path, tmp_path: Path) -> None:
    package = tmp_path / "package"
    (package / "target").mkdir(parents=True)
    (package / "target" / "stale.bin").touch()
    ship.ship(work, package, "3.11.7", loss_goal=100.0, edit_goal=0.0)

    for role in ("target", "draft"):
        model = AutoModelForCausalLM.from_pretrained(package / role)
        assert model.dtype == torch.bfloat16 and model.generation_config.eos_token_id == [0, 1]
        trained = LlamaForCausalLM.from_pretrained(work / role).to(torch.bfloat16)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), trained.parameters(), strict=True))
        tokenizer = AutoTokenizer.from_pretrained(package / role)
        assert tokenizer.decode(tokenizer("import os")["input_ids"]) == "import os"
        assert "<|assistant|>" in tokenizer.chat_template
        card = (package / role / "README.md").read_text()
        assert (
            "0.4 M tokens" in card
            and "exactly right at T = 0: " in card
            and "nats per token" in card
            and "{" not in card
        )
    assert (package / "prompts" / "xml--sax--x.py.txt").read_text() == "import os\n" * 30 + FUNCTION
    [edit] = map(json.loads, (package / "prompts" / "edits.jsonl").read_text().splitlines())
    assert [message["role"] for message in edit["messages"]] == ["user", "assistant"]
    assert "PSF" in (package / "prompts" / "README.md").read_text()
    assert not list(package.glob(".*")) and not (package / "target" / "stale.bin").exists()


def test_a_target_that_misses_its_goal_is_not_shipped(ship: ModuleType, work: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="held-out loss"):
        ship.ship(work, tmp_path / "package", "3.11.7", loss_goal=0.5)
    assert not (tmp_path / "package" / "target").exists()


def test_a_target_that_edits_wrongly_is_not_shipped(ship: ModuleType, work: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(work / "tokenizer")
    found = ship.held_out_edits(tokenizer, ship.corpus.read_standard_library()[1:])
    assert found and {edit.kind for edit in found} <= {"rename", "constant"}
    with pytest.raises(ValueError, match="edits are right too seldom"):
        ship.ship(work, tmp_path / "package", "3.11.7", loss_goal=100.0)
    assert not (tmp_path / "package" / "target").exists()


def test_the_heads_card_takes_its_figures_from_the_log(ship: ModuleType, tmp_path: Path) -> None:
    lines = [
        {"step": 10, "loss": 3.0, "tokens": 20_000},
        {"step": 10, "eval/chain_t0": 1.5},
        {"step": 20, "tokens": 40_000},
        {"step": 20, "eval/chain_t0": 2.25, "eval/acceptance_0": 0.5, "eval/tree_t0": 3.0},
    ]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = ship.read_head_log(tmp_path / "log.jsonl")
    assert found == {"steps": 20, "tokens": 0.04, "evaluation": "chain at T = 0 2.25, tree at T = 0 3.00"}
    card = ship.HEAD_CARD.format(parameters=1.0, boundaries="2, 4, 7", **found)
    assert "0.0 M" in card and "2.25" in card and "{" not in card
