"""``forerun tune skip-layers``: what it writes, what reads it, how it ends."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.conftest import byte_llama, tiny_tokenizer
from forerun.drafters.self_drafting.tuning import Probe

SMALL = ("--limit", 2, "--tokens", 6, "-k", 2, "--prompt-tokens", 12)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    conversation = [{"role": "user", "content": "the dog"}, {"role": "assistant", "content": "sat"}]
    lines = [{"text": "the cat sat on the mat and the dog sat on the log"}, {"messages": conversation}, {"text": "a"}]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def test_what_is_written_drafts(forerun: Callable[..., Any], checkpoint: Path, prompts: Path, tmp_path: Path) -> None:
    output = tmp_path / "new" / "skip.json"
    ran = forerun(
        "tune", "skip-layers", checkpoint, "--prompts", prompts, "--output", output, "--iterations", 3, "--json", *SMALL
    )
    assert ran.code == 0, ran.err
    said, body = json.loads(ran.out), json.loads(output.read_text())
    assert said["skip"] == body["skip"] and said["measured"] == body["measured"]
    assert (body["num_layers"], body["measured"]["prompts"], body["measured"]["sets"]) == (2, 2, 3)
    assert len(body["trace"]) == 3
    cheapest = min(body["trace"], key=lambda trial: trial["ms_per_token"])
    assert body["skip"] == cheapest["skip"]
    assert [path.name for path in output.parent.iterdir()] == ["skip.json"]
    common = ("generate", checkpoint, "--prompt", "the cat", "-n", 12, "-t", 0, "--dtype", "float32", "--json")
    plain = json.loads(forerun(*common).out)
    drafted = forerun(*common, "--drafter", "skip_layers", "--drafter-option", f"skip={output}", "--no-adaptive")
    answer = json.loads(drafted.out)
    assert answer["token_ids"] == plain["token_ids"]
    assert answer["speculation"]["drafted"] > 0


def test_another_model_refuses_the_file(
    forerun: Callable[..., Any], checkpoint: Path, prompts: Path, tmp_path: Path
) -> None:
    output, other = tmp_path / "skip.json", tmp_path / "other"
    tune = ("tune", "skip-layers", checkpoint, "--prompts", prompts, "--output", output, "--iterations", 1, *SMALL)
    assert forerun(*tune).code == 0
    byte_llama(0, tiny_tokenizer(), layers=3).save_pretrained(other)
    tiny_tokenizer().save_pretrained(other)
    ran = forerun("generate", other, "--prompt", "a", "--drafter", "skip_layers", "--drafter-option", f"skip={output}")
    assert ran.code == 2 and "2 layers; this model has 3" in ran.err


def test_ctrl_c_keeps_the_best_so_far(
    forerun: Callable[..., Any], checkpoint: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, calls = Probe.accepted, list[object]()

    def interrupted(self: Probe, skip: Any) -> list[int]:
        calls.append(skip)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return measure(self, skip)

    monkeypatch.setattr(Probe, "accepted", interrupted)
    output = tmp_path / "skip.json"
    ran = forerun("tune", "skip-layers", checkpoint, "--prompts", prompts, "--output", output, *SMALL)
    body = json.loads(output.read_text())
    assert ran.code == 130 and "stopped after 2 sets" in ran.err
    assert body["measured"]["interrupted"] and len(body["trace"]) == 2


def test_a_time_budget_ends_the_search(
    forerun: Callable[..., Any], checkpoint: Path, prompts: Path, tmp_path: Path
) -> None:
    output = tmp_path / "skip.json"
    ran = forerun(
        "tune", "skip-layers", checkpoint, "--prompts", prompts, "--output", output, "--budget-s", 1e-9, *SMALL
    )
    assert ran.code == 0 and len(json.loads(output.read_text())["trace"]) == 1


def test_a_directory_is_no_output(forerun: Callable[..., Any], tmp_path: Path) -> None:
    ran = forerun("tune", "skip-layers", "demo", "--output", tmp_path)
    assert ran.code == 2 and "name a file in it" in ran.err
