"""Models and prompts that are no use: nothing is answered, no chat template; and what a server recorded, which is."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer, GenerationConfig

from forerun.writing import TokenizerIdentity
from speedup.conftest import Forerun


@pytest.fixture
def copied(deep_checkpoint: Path, tmp_path: Path) -> Path:
    """The target, to be changed."""
    return Path(shutil.copytree(deep_checkpoint, tmp_path / "copied"))


def test_a_model_that_answers_nothing(forerun: Forerun, copied: Path, questions: Path, tmp_path: Path) -> None:
    """Whatever it says first ends the answer."""
    GenerationConfig(eos_token_id=list(range(200)), pad_token_id=1).save_pretrained(copied)
    out = tmp_path / "out"
    ran = forerun("speedup", copied, "--prompts", questions, "--output", out, "-n", 6, "--json")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert not found["worth_it"] and not found["trained"] and "nothing is worth it" in found["words"]
    assert (out / "page.html").is_file()


def test_without_a_template_the_text_goes_on(forerun: Forerun, copied: Path, questions: Path, tmp_path: Path) -> None:
    (copied / "chat_template.jinja").unlink()
    ran = forerun("speedup", copied, "--prompts", questions, "--output", tmp_path / "out", "--dry-run")
    assert ran.code == 0 and "the model has no chat template: it goes on with the text of each prompt" in ran.err
    lines = (tmp_path / "out" / "prompts" / "train.jsonl").read_text().splitlines()
    assert lines and all("text" in json.loads(line) for line in lines)


def test_recorded_traffic_needs_no_answers(forerun: Forerun, deep_checkpoint: Path, tmp_path: Path) -> None:
    vocabulary = TokenizerIdentity.of(AutoTokenizer.from_pretrained(deep_checkpoint)).vocabulary
    traffic = tmp_path / "traffic"
    traffic.mkdir()
    said = [
        {"prompt_token_ids": [20 + number, 30], "token_ids": [40, 41, 42], "vocabulary": vocabulary}
        for number in range(6)
    ]
    (traffic / "unnamed.jsonl").write_text("".join(json.dumps(line) + "\n" for line in said))
    ran = forerun(
        "speedup", deep_checkpoint, "--from-traffic", traffic, "--output", tmp_path / "out", "-n", 3, "--json"
    )
    assert ran.code == 0, ran.err
    assert json.loads((tmp_path / "out" / "answers.json").read_text())["answered"] == 3
