"""Acceptance of a head by shape of the draft, its goals and its report; the head's arms in the speed part."""

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.conftest import quiet
from bench.heads import head
from bench.test_parts import machine, shown, summary
from benchmarks.suite import plots, suite
from benchmarks.suite.acceptance import (
    Acceptance,
    AcceptanceLine,
    AcceptancePlan,
    RootReach,
    compare_roots,
    ratio,
    root_distributions,
)
from benchmarks.suite.arms import TREE_NODES, forerun_arms
from benchmarks.suite.goals import acceptance_goals, speed_goals
from benchmarks.suite.speed import measure, summarise
from benchmarks.suite.suite import Options, Results, as_json
from benchmarks.suite.workloads import Setting
from forerun import LLM
from forerun.heads.files import HeadCheckpoint, TargetFacts, write_head

PROMPTS = [list(range(3, 40)), list(range(100, 130)), list(range(60, 95))]
PLAN = AcceptancePlan(new_tokens=20, seeds=(1,), top_k=(4,), depths=(3, 5), roots=6, children=(1, 2))


def engine(folder: Path, rows: int = 3) -> LLM:
    return LLM(str(folder), tokenizer=False, max_num_seqs=rows, max_model_len=96)


class TestRoots:
    def test_a_drafter_that_is_the_target_has_its_distributions_at_every_root(self, source_tied: Path) -> None:
        llm = engine(source_tied)
        config = {"method": "draft_model", "model": str(source_tied), "shape": (3, 1), "draw": "without_replacement"}
        target, draft = root_distributions(llm.target, config, PROMPTS, steps=4, most=7)
        assert target.shape == draft.shape == (7, 256)
        torch.testing.assert_close(target, draft, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(target.sum(1), torch.ones(7))
        assert (target[0] - target[1]).abs().max() > 0.01, "roots of different texts"
        (line,) = compare_roots(target, draft, (1,))
        assert line.distinct_bound == pytest.approx(1, abs=1e-3) and line.deterministic < 0.99

    def test_the_rows_are_free_afterwards(self, source_tied: Path) -> None:
        llm = engine(source_tied)
        config = {"method": "eagle3", "model": head(), "shape": (2, 1), "draw": "without_replacement"}
        root_distributions(llm.target, config, PROMPTS[:2], steps=2, most=2)
        assert llm.target.lengths == [0, 0, 0]


def line(label: str, method: str, form: str, temperature: float, emitted: list[int], passes: list[int]) -> Any:
    length = sum(emitted) / sum(passes)
    found: dict[str, Any] = {"length": length, "low": length, "high": length, "emitted": emitted, "passes": passes}
    found |= {"nodes": 5.0, "depths": [0.5, 0.25], "looping": 0.5}
    return AcceptanceLine(label=label, method=method, form=form, temperature=temperature, **found)


def sample() -> Acceptance:
    reach = RootReach(
        children=2, deterministic=0.5, greedy_k=0.6, distinct=0.7, distinct_bound=0.8125, iid=0.65, iid_bound=0.75
    )
    return Acceptance(
        head="a head",
        lines=[
            line("draft_model chain of 5", "draft_model", "chain", 0.0, [20, 30], [10, 15]),
            line("eagle3 chain of 5", "eagle3", "chain", 0.0, [30, 45], [10, 15]),
            line("eagle3 small tree", "eagle3", "dynamic", 0.0, [30, 45], [10, 15]),
            line("eagle3 large tree", "eagle3", "dynamic", 0.0, [32, 48], [10, 15]),
            line("eagle3 chain of 5", "eagle3", "chain", 1.0, [21, 30], [10, 15]),
        ],
        roots=[reach],
        root_count=99,
    )


class TestReport:
    def test_ratio_resamples_both_lines_alike(self) -> None:
        one = line("a", "eagle3", "chain", 0.0, [20, 90], [10, 15])
        same = ratio(one, one)
        assert (same.value, same.low, same.high) == (1.0, 1.0, 1.0)
        twice = dataclasses.replace(one, length=2 * one.length, emitted=[40, 180])
        double = ratio(twice, one)
        assert (double.value, double.low, double.high) == pytest.approx((2.0, 2.0, 2.0))
        other = line("b", "eagle3", "chain", 0.0, [40, 60], [10, 15])
        apart = ratio(one, other)
        assert apart.low == pytest.approx(0.5) and apart.high == pytest.approx(1.5)

    def test_goals_are_judged_on_greedy_lengths(self) -> None:
        chain, tree = acceptance_goals(sample())
        assert chain.met and chain.measured == pytest.approx(1.5) and chain.goal == ">= 1.3"
        assert not tree.met and tree.measured == pytest.approx(32 / 30) and "large tree" in tree.note
        assert not acceptance_goals(Acceptance(head="none"))

    def test_tables_json_and_plots_show_it(self, tmp_path: Path) -> None:
        results = Results(machine=machine(), options=Options(parts=("acceptance",)), acceptance=sample())
        text = shown(results, width=180)
        for expected in ("eagle3 large tree", "50% 25%", "99 roots", "0.812", "missed", "met", "T = 1"):
            assert expected in text, expected
        document = json.loads(json.dumps(as_json(results)))
        assert document["acceptance"]["lines"][1]["passes"] == [10, 15]
        assert len(document["goals"]) == 2
        pytest.importorskip("matplotlib")
        assert {path.name for path in plots.draw(results, tmp_path)} == {"acceptance.svg", "acceptance.png"}


class TestSuite:
    options = partial(Options, parts=("acceptance",), quick=True, draft_scale=0)

    def test_without_a_head_the_part_is_left_out_and_said_so(
        self, source_tied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(suite, "FOLDER", tmp_path)
        results = suite.run(self.options(target=str(source_tied)), quiet, lambda _: None)
        assert results.acceptance is None and not results.goals
        assert any("--head" in note for note in results.notes)

    def test_a_named_head_is_measured(
        self, source_tied: Path, draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        facts = TargetFacts.read(source_tied)
        folder = write_head(HeadCheckpoint.of(head()), tmp_path / "head", "flat", facts)
        monkeypatch.setattr(suite, "LLM", lambda path, **_: engine(Path(path), rows=2))
        monkeypatch.setattr(suite, "contexts", lambda _, count: PROMPTS[:1])
        brief = dataclasses.replace(PLAN, new_tokens=8, roots=2)
        monkeypatch.setattr(suite, "AcceptancePlan", lambda **_: brief)
        options = self.options(target=str(source_tied), draft=str(draft), head=str(folder))
        saved: list[Results] = []
        results = suite.run(options, quiet, saved.append)
        assert results.acceptance is not None and results.acceptance.head == str(folder)
        assert len(results.goals) == 2 and saved
        assert not any("enlarged" in note for note in results.notes)


class TestSpeed:
    def test_the_heads_arms_give_plain_text(self, source_tied: Path) -> None:
        llm = engine(source_tied, rows=1)
        arms = forerun_arms(llm, None, chain=3, lookup=4, head=head())
        setting = Setting(name="greedy", temperature=0.0, new_tokens=16)
        runs = measure(arms, PROMPTS[:1], setting, quiet)
        named = [f"forerun {name}" for name in ("plain", "ngram", "eagle3", "eagle3 tree")]
        assert [line.arm for line in summarise(runs, [arm.name for arm in arms])] == named
        assert len({tuple(run.tokens) for run in runs}) == 1
        sizes = {run.arm: max(len(step.nodes) for step in run.trace) for run in runs}
        assert sizes["forerun eagle3"] == 3 < sizes["forerun eagle3 tree"] <= TREE_NODES

    def test_the_faster_arm_is_held_against_plain_and_draft_model(self) -> None:
        speeds = {"plain": 10.0, "draft_model": 18.0, "draft_model tree": 22.0, "eagle3": 21.0, "eagle3 tree": 20.0}
        lines = [summary(f"forerun {arm}", speed) for arm, speed in speeds.items()]
        plain, draft = speed_goals(lines, "T = 0")
        assert plain.what == "forerun eagle3 / forerun plain, T = 0" and plain.met
        assert draft.what == "forerun eagle3 / forerun draft_model tree, T = 0" and not draft.met
        assert not speed_goals(lines, "T = 0.8")
        assert not speed_goals(lines[:3], "T = 0"), "no head, no goal"
