"""`recipes/grpo/train.py` by TRL's own trainer, on the shipped model: skipped where TRL is not installed."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

RECIPE = Path(__file__).parents[2] / "recipes" / "grpo"
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(RECIPE))
    import train

    yield train
    for name in ("train", "tasks"):
        sys.modules.pop(name)


def run(train: Any, capsys: pytest.CaptureFixture[str], output: Path, *more: str) -> Any:
    pytest.importorskip("trl", reason="pip install 'trl==1.16.*'")
    words = ["demo", "--output", str(output), "--samples", "4", "--max-tokens", "12", "--save-steps", "2", "--json"]
    words += ["--speculative-config", '{"method": "suffix", "adaptive": false, "num_speculative_tokens": 3}']
    train.main([*words, *more])
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.slow
def test_all_is_the_same_with_drafts(train: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(train, capsys, tmp_path, "--steps", "2")
    assert found["steps"] == found["same_text_and_gradient"] == 2
    plain, drafts = found["curves"]["plain"], found["curves"]["drafts"]
    assert [step["reward"] for step in plain] == [step["reward"] for step in drafts]
    assert sum(step["accepted"] for step in drafts) > 0 == sum(step["drafted"] for step in plain)


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on(train: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    only = ("--arms", "drafts")
    run(train, capsys, tmp_path / "stopped", "--steps", "2", *only)
    found = run(train, capsys, tmp_path / "stopped", "--steps", "4", *only)
    whole = run(train, capsys, tmp_path / "whole", "--steps", "4", *only)
    texts, expected = ([step["text"] for step in one["curves"]["drafts"]] for one in (found, whole))
    assert texts == expected


def test_questions_of_a_file(train: Any, tmp_path: Path) -> None:
    file = tmp_path / "gsm8k.jsonl"
    file.write_text('{"question": "How many?", "answer": "600 * 2 = 1,200\\n#### 1,200"}\n')
    [question] = train.tasks.read_questions(file)
    assert question["answer"] == 1200
    texts = [[{"role": "assistant", "content": text}] for text in ("It is 1,200.", "1200, not 7", "many")]
    assert train.tasks.reward_last_number(texts, [1200] * 3) == [1.0, 0.0, 0.0]
    file.write_text('{"question": "How many?", "answer": "many"}\n')
    with pytest.raises(ValueError, match="line 1: expected"):
        train.tasks.read_questions(file)
