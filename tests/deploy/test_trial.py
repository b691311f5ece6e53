"""A head in its engine beside forerun: what the comparison says of a vLLM that answers well, badly, or not at all."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import fisher_exact

from forerun.deploy import trial
from forerun.deploy.compare import Answer, fisher
from forerun.errors import ArgumentError, ForerunError

Change = Callable[[Answer], Answer]
K = 3


def test_fisher_is_scipys() -> None:
    for one, other in product((1, 7, 40), (1, 12, 55)):
        for right in product({0, one // 3, one}, {0, other // 2, other}):
            table = [[right[0], one - right[0]], [right[1], other - right[1]]]
            expected = float(fisher_exact(table).pvalue)
            assert fisher(right, (one, other)) == pytest.approx(expected, rel=1e-6), table
    assert fisher((0, 0), (0, 5)) == 1.0


def tried(monkeypatch: pytest.MonkeyPatch, change: Change | None, told: Mapping[str, Any] | None = None) -> trial.Trial:
    """The shipped head, before a vLLM that drafts as we do but for `change`, or says `told`; None: it dies."""
    ours, asked, own = list[Answer](), dict[str, Any](), trial.answers

    def answers(*arguments: Any) -> list[Answer]:
        ours[:] = own(*arguments)
        return list(ours)

    def ask(plan: Mapping[str, Any], folder: Path, python: Path) -> None:
        asked.update(plan)
        (folder / "vllm.log").write_text("Segmentation fault\n")
        if change is not None or told is not None:
            found = told or {"answers": [asdict(change(one)) for one in ours] if change else []}
            (folder / "eagle3.json").write_text(json.dumps(found))

    monkeypatch.setattr(trial, "answers", answers)
    monkeypatch.setattr(trial, "ask_vllm", ask)
    monkeypatch.setattr(trial, "vllm_version", lambda _: "0.32.0")
    from forerun.demo import FOLDER, prompts

    texts = [one.text[:600] for one in prompts()[:4]]
    head, target = str(FOLDER / "eagle3"), str(FOLDER / "target")
    how: dict[str, Any] = {"python": Path("x"), "k": K, "prompts": texts, "tokens": 24, "dtype": "float32"}
    found = trial.in_vllm(head, "eagle3", target, **how)
    (arm,) = asked["arms"].values()
    assert arm["target"] == target and arm["vllm"]["method"] == "eagle3" and arm["vllm"]["num_speculative_tokens"] == K
    assert [len(one) for one in asked["prompts"]] and asked["dtype"] == "float32"
    return found


def test_an_engine_that_accepts_the_same_is_good(monkeypatch: pytest.MonkeyPatch) -> None:
    found = tried(monkeypatch, lambda one: one)
    assert found.good and not found.parted and found.lengths[0] == found.lengths[1] > 1.2
    assert len(found.positions) == K and found.positions[0].drafted[0] > 20
    assert json.loads(json.dumps(found.as_json()))["good"] is True


def test_an_engine_that_accepts_nothing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    found = tried(monkeypatch, lambda one: replace(one, accepted=[0] * len(one.accepted)))
    assert not found.good and found.worse[0].index == 0 and found.lengths[1] == 1.0
    better = tried(monkeypatch, lambda one: replace(one, accepted=list(one.drafted)))
    assert better.good, "more is no fault of the head"


def test_texts_that_part_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    found = tried(monkeypatch, lambda one: replace(one, token_ids=[*one.token_ids[:-1], 9]))
    assert found.parted == 4 and found.good


def test_what_vllm_refuses_and_a_vllm_that_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    found = tried(monkeypatch, None, {"refused": "ValueError: no such head", "version": "0.32.0"})
    assert not found.good and "no such head" in found.refused and not found.positions
    with pytest.raises(ForerunError, match=r"died:\nSegmentation fault"):
        tried(monkeypatch, None)


def test_a_python_without_vllm() -> None:
    with pytest.raises(ArgumentError, match="has no vLLM; name the Python"):
        trial.vllm_version(Path(sys.executable))
    with pytest.raises(ArgumentError, match="cannot be run: No such file"):
        trial.vllm_version(Path("/nowhere/python"))


def test_what_the_doctor_shows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from forerun.cli import main

    asked = ["doctor", "demo-eagle3", "--target", "demo", "--run"]
    assert main([*asked, "--engine", "sglang"]) == 2 and "runs a head in vLLM" in capsys.readouterr().err
    assert main(["doctor", "--run"]) == 2
    assert main(asked) == 2 and "has no vLLM" in capsys.readouterr().err
    made = tried(monkeypatch, lambda one: replace(one, accepted=[0] * len(one.accepted)))
    monkeypatch.setattr(trial, "in_vllm", lambda *_, **__: made)
    assert main(asked) == 1
    shown = capsys.readouterr()
    assert "tokens a step" in shown.out and "accepts less" in shown.err
    assert main([*asked, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["run"]["worse"] == [one.index for one in made.worse]
    monkeypatch.setattr(trial, "in_vllm", lambda *_, **__: replace(made, refused="ValueError: no", positions=()))
    assert main(asked) == 1 and "does not draft with it: ValueError: no" in capsys.readouterr().err
