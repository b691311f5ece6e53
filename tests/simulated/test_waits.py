"""`make waits` counts what happens, for every arm, and what its last line says can be read."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from contract.harness import PROMPTS, Variant, as_prompts, model
from forerun import LLM
from forerun.model import TransformersTarget
from forerun.model.inputs import Scored
from selection import slow
from simulated import waits
from simulated.arms import MOST_LAUNCHES, MOST_READS
from simulated.device import Counts, Kind, SimulatedDevice, moved
from simulated.steps import EVERY, SETTINGS, drafters, on_device


@pytest.fixture(autouse=True)
def nothing_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    monkeypatch.setattr(waits, "WARM_UP", 1)
    monkeypatch.setattr(waits, "PARAMS", {name: replace(params, max_tokens=20) for name, params in PARAMS.items()})


PARAMS = waits.PARAMS
QUICK = ("plain", "eagle3")
ARMS = [arm if arm in QUICK else slow(arm)[0] for arm in waits.ARMS if arm != "auto"]


@pytest.mark.parametrize("arm", ARMS)
def test_a_step_waits_as_often_as_its_drafter_runs_a_model_whatever_the_rows(arm: str) -> None:
    """Once for the verdicts, once for a draft that a model made; with top-p, penalties and log-probabilities, too.

    `auto` is left out: a step in which two drafters are compared fetches two drafts.
    """
    for rows in (1, 8) if arm not in QUICK else (2,):
        for found in waits.measured(arm, rows):
            assert found.per_step(Kind.READ) <= MOST_READS.get(arm, 2), found.setting
            assert found.per_step(Kind.BLOCKING_WRITE) == 0, found.setting
            assert found.launches <= MOST_LAUNCHES.get(arm, 800), found.setting
            assert not found.drafter_errors


IN_ONE = {
    **{"eagle3-chain": 6, "eagle3-dynamic": 9, "mtp-chain": 6, "draft_model-chain": 6, "dflash-chain": 6},
    **{"dspark-chain": 6, "peagle-chain": 6, "medusa-best-first": 9},
}
"""Drafters that run a model, and the most operations that a greedy draft of each launches beside its recording."""
DRAFTS = [variant for variant in EVERY if str(variant) in IN_ONE]
SWIFT = ("eagle3-chain", "mtp-chain", "draft_model-chain", "dflash-chain")


@pytest.mark.parametrize("variant", [one if str(one) in SWIFT else slow(one)[0] for one in DRAFTS], ids=str)
def test_a_whole_draft_is_one_replay_and_one_read(variant: Variant) -> None:
    """Chains of K levels, trees and blocks: vocabulary, top-k and draws stay on the device, nothing waits inside."""
    prompts, device, found = as_prompts(PROMPTS[:1]), SimulatedDevice(), list[Counts]()
    with device, waits.recording(device):
        config = {"adaptive": False, **on_device(variant.config(), moved)}
        settings: dict[str, Any] = {"max_num_seqs": 1, "max_model_len": 64, "self_check": False}
        llm = LLM(moved(model()), tokenizer=False, speculative_config=config, **settings)
        for _ in range(3):
            llm.generate(prompts, SETTINGS["greedy"])
        [drafter] = drafters(llm)
        propose = drafter.propose

        def counted(*given: Any) -> Any:
            with device.counting() as counts:
                trees = propose(*given)
            found.append(counts)
            return trees

        drafter.propose = counted
        llm.generate(prompts, SETTINGS["greedy"])
    assert len(found) > 1
    for counts in found:
        assert counts.replays == 1 and counts.of(Kind.READ) == 1 and counts.of(Kind.BLOCKING_WRITE) == 0
        assert counts.launches <= IN_ONE[str(variant)]


def test_the_last_line_is_as_the_table_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["waits.py", "plain", "ngram", "--rows", "2", "--sites"])
    settings = {name: replace(PARAMS[name], max_tokens=8) for name in ("T=0", "penalties")}
    monkeypatch.setattr(waits, "PARAMS", settings)
    waits.main()
    *table, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert list(found) == ["plain", "ngram"]
    for arm, figures in found.items():
        assert figures["reads"] >= 1, "somebody has to learn the token"
        assert figures["reads"] == max(own["reads"] for own in figures["settings"].values())
        assert figures["blocking_writes"] == max(own["blocking_writes"] for own in figures["settings"].values())
        assert list(figures["settings"]) == [f"{name}, rows=2" for name in settings]
        assert sum(line.startswith(f"{arm} ") for line in table) == len(settings)
    assert any(" read " in line and ".py:" in line for line in table), "with the lines of code"


def test_a_hidden_read_and_a_hidden_write_in_each_step_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "PARAMS", {"T=0": PARAMS["T=0"]})
    [before] = waits.measured("ngram", 1)
    score = TransformersTarget.score

    def hiding(self: TransformersTarget, *args: Any, **keywords: Any) -> Scored:
        scored = score(self, *args, **keywords)
        if scored.logits[0, 0, 0] > torch.tensor([1e30], device=self.device):
            raise AssertionError
        return scored

    monkeypatch.setattr(TransformersTarget, "score", hiding)
    [after] = waits.measured("ngram", 1)
    assert after.per_step(Kind.READ) == pytest.approx(before.per_step(Kind.READ) + 1)
    assert after.per_step(Kind.BLOCKING_WRITE) == pytest.approx(before.per_step(Kind.BLOCKING_WRITE) + 1)


def test_an_unknown_arm_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["waits.py", "plane"])
    with pytest.raises(SystemExit):
        waits.main()
    assert "unknown arm 'plane'; there are plain, ngram" in capsys.readouterr().err
