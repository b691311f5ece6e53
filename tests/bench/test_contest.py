from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.conftest import quiet
from bench.test_parts import summary
from benchmarks.suite.arms import load_transformers
from benchmarks.suite.burden import Burden, measure_burden
from benchmarks.suite.contest import (
    FAMILY,
    PLAIN,
    SHIFT,
    Contest,
    Contestant,
    ContestLine,
    TransformersContestant,
    Workload,
    compete,
    workloads,
)
from benchmarks.suite.suite import burden_goals, contest_goals
from benchmarks.suite.workloads import Setting
from forerun import LLM


def test_pairs_are_measured_for_a_whole_batch(source_tied: Path) -> None:
    llm = LLM(str(source_tied), tokenizer=False, max_num_seqs=3, max_model_len=96)
    twin = LLM(llm.target.model, tokenizer=False, max_num_seqs=3, max_model_len=96)
    seen = list[str]()
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    found = measure_burden(
        (llm, twin), "ngram", {"method": "ngram"}, prompts, pairs=2, new_tokens=6, progress=seen.append
    )
    assert found.batch == 3 and len(found.ratios) == 2 and min(found.ratios) > 0
    assert len(seen) == 4 + 2 and not llm.engine.busy and not twin.engine.busy


def test_the_lower_bound_lies_below_the_mean_and_falls_with_the_scatter() -> None:
    steady, wild = (Burden(drafter="x", batch=1, ratios=of) for of in ([0.98, 1.0, 1.02] * 7, [0.8, 1.0, 1.2] * 7))
    assert abs(steady.mean - wild.mean) < 1e-9
    assert wild.low < steady.low < steady.mean


class Letters:
    """Every letter is a token."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(letter) % 128 for letter in text]

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return "".join(message["content"] for message in messages)


class TestWorkloads:
    def test_there_are_four_and_requests_that_follow_each_other_overlap(self) -> None:
        found = {work.label: work for work in workloads(Letters(), quick=True)}
        assert list(found) == ["complete, T = 0.8, top-p 0.95, 1 seeds", "complete, T = 0", *list(found)[2:]]
        repeat = next(work for work in found.values() if work.name == "repeat")
        assert len(repeat.prompts) == FAMILY
        assert list(repeat.prompts[0][SHIFT:]) == list(repeat.prompts[1][:-SHIFT])

    def test_an_edit_is_asked_for_in_a_chat_and_answered_in_full(self) -> None:
        edit = workloads(Letters(), quick=True)[-1]
        assert edit.label == "edit, T = 0" and edit.lengths is not None and edit.predictions is not None
        for prompt, shown, length in zip(edit.prompts, edit.predictions, edit.lengths, strict=True):
            assert list(prompt)[-len(shown) :] == list(shown) and 0.5 < length / len(shown) < 2
        short = replace(edit.setting, new_tokens=12)
        assert edit.asked(1, edit.setting).new_tokens == edit.lengths[1] and edit.asked(1, short).new_tokens == 12


class TestContest:
    @pytest.fixture
    def work(self) -> Workload:
        prompts = [[5, 6, 7, 8, 9, 10, 11] * 4, [20, 21, 22, 23] * 6]
        setting = Setting(name="edit", temperature=0.0, new_tokens=12)
        return Workload(name="edit", setting=setting, prompts=prompts, lengths=[12, 9])

    def test_every_arm_writes_as_much_and_is_held_against_plain(self, source_tied: Path, work: Workload) -> None:
        llm = LLM(str(source_tied), tokenizer=False, max_num_seqs=1, max_model_len=96)
        theirs = load_transformers(source_tied)
        arms: Sequence[Any] = [
            Contestant(PLAIN, llm, False, work),
            Contestant("forerun ngram", llm, {"method": "ngram", "adaptive": False}, work),
            TransformersContestant("transformers prompt lookup", theirs, {"prompt_lookup_num_tokens": 4}, work),
        ]
        contest = Contest()
        compete(arms, work, contest, quiet)
        lines = {line.summary.arm: line for line in contest.of("edit, T = 0")}
        assert list(lines) == [PLAIN, "forerun ngram", "transformers prompt lookup"]
        assert lines[PLAIN].speedup == pytest.approx(1.0)
        assert set(contest.unlike.values()) == {0}
        length = lines["forerun ngram"].summary.tokens_per_pass
        assert length is not None and length > 1.2
        host = [lines[name].host_share for name in (PLAIN, "forerun ngram")]
        assert all(share is not None and 0 < share < 1 for share in host)
        assert lines["transformers prompt lookup"].host_share is None
        assert "score" not in vars(llm.target)


def line(workload: str, arm: str, speedup: float, **more: Any) -> ContestLine:
    found = summary(arm, 10 * speedup)
    return ContestLine(workload=workload, summary=found, speedup=speedup, seconds=10 / speedup, **more)


class TestGoals:
    def test_auto_is_held_against_the_best_of_each_workload(self) -> None:
        contest = Contest(
            lines=[
                line("edit, T = 0", "transformers prompt lookup", 2.0),
                line("edit, T = 0", "forerun plain", 1.0),
                line("edit, T = 0", "forerun suffix", 4.0, host_share=0.02, predicted=4.2),
                line("edit, T = 0", "forerun auto", 3.0),
                line("complete, T = 0", "forerun ngram", 1.2, host_share=0.05, predicted=1.2),
                line("complete, T = 0", "forerun eagle3", 2.0),
                line("complete, T = 0", "forerun auto", 2.0),
            ]
        )
        goals = {goal.what: goal for goal in contest_goals(contest)}
        assert goals["copying / plain, edit, T = 0"].met
        assert goals["copying / transformers prompt lookup, edit, T = 0"].measured == pytest.approx(2.0)
        assert goals["auto / best single drafter, edit, T = 0"].measured == pytest.approx(0.75)
        assert goals["auto / best single drafter, complete, T = 0"].met
        assert not goals["training-free / plain, complete, T = 0"].met
        mix = goals["auto / best drafter of each workload, over the mix"]
        assert mix.measured == pytest.approx((10 / 4 + 10 / 2) / (10 / 3 + 10 / 2))
        hosts = [goal for what, goal in goals.items() if what.startswith("time outside")]
        assert sorted(goal.met for goal in hosts) == [False, True]
        assert goals["plan's speed-up beside the measured one, median error"].measured == pytest.approx(0.025)

    def test_a_burden_is_judged_by_its_lower_bound(self) -> None:
        ratios = {1: [0.99, 1.0, 0.98] * 7, 64: [0.9] * 20}
        [good, bad] = burden_goals([Burden(drafter="auto", batch=batch, ratios=own) for batch, own in ratios.items()])
        assert good.met and not bad.met
