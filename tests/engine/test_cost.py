"""The cost model: arithmetic on its grid, what measuring leaves behind, what is kept on disk, drafters on trial.

No test here depends on how long anything takes: clocks are replaced where a time matters.
"""

import copy
import gc
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from contract import harness
from forerun import LLM, SamplingParams
from forerun.control import measuring
from forerun.control.costs import CostModel, DraftCost, Nominal
from forerun.control.measuring import Point, load_or_measure, make_rising
from forerun.core.tree import TokenTree
from forerun.decode.drafter import Drafter, DrafterSetup
from forerun.drafters import build
from forerun.errors import ArgumentError
from forerun.model import Buckets, TransformersTarget
from forerun.plan.measured import Trial, TrialStep, fit, measure_draft, try_drafter
from forerun.writing import hash_json

PLANE = ((10.0, 11.0, 14.0), (12.0, 16.0, 30.0))


def model_of(**changes: Any) -> CostModel:
    values: dict[str, Any] = {
        **{"nodes": (1, 2, 4), "rows": (1, 4), "contexts": (0, 100)},
        "pass_times_ms": (PLANE, tuple(tuple(2 * time for time in line) for line in PLANE)),
    }
    return CostModel(**{**values, **changes})


def target_of(rows: int = 1, **more: Any) -> TransformersTarget:
    return TransformersTarget(harness.model(), rows=rows, slots=harness.SLOTS, **more)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    return tmp_path / "cost"


@pytest.fixture
def instant(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Point]]:
    """Passes take the time that `worth` says, on a clock that only they advance; the list is who was timed."""
    timed: list[Point] = []
    clock = [0.0]

    def run(_target: TransformersTarget, _rows: object, point: Point) -> float:
        timed.append(point)
        clock[0] += worth(point)
        return worth(point)

    monkeypatch.setattr(measuring, "_time", run)
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: clock[0])
    yield timed


def worth(point: Point) -> float:
    """Seconds: weights, arithmetic, attention."""
    context, rows, nodes = point
    return 0.010 + 0.001 * rows * nodes + 1e-6 * rows * context * (nodes + 5)


class TestCostModel:
    @pytest.mark.parametrize(
        ("nodes", "rows", "context", "expected"),
        [
            *[(2, 1, 0, 11.0), (4, 4, 0, 30.0), (1, 1, 100, 20.0)],
            pytest.param(3, 1, 0, 14.0, id="padded sizes are a staircase"),
            pytest.param(1, 2, 0, 10 + 2 / 3, id="rows are interpolated"),
            pytest.param(1, 1, 50, 15.0, id="contexts, too"),
            pytest.param(6, 1, 0, 17.0, id="beyond the last size the line goes on"),
            *[(1, 7, 0, 14.0), (1, 1, 300, 40.0)],
        ],
    )
    def test_what_a_pass_takes(self, nodes: int, rows: int, context: int, expected: float) -> None:
        assert model_of().pass_ms(nodes, rows, context) == pytest.approx(expected)

    def test_passes_are_told_in_units_of_a_plain_one_and_one_row_count_speaks_for_all(self) -> None:
        assert model_of().v(4) == 1.4 and model_of().v(4, 4, 100) == 2.5
        assert model_of(stairs=False).pass_ms(3) == pytest.approx(12.5)
        alone = CostModel(nodes=(1, 4, 8), rows=(1,), contexts=(0,), pass_times_ms=(((10.0, 13.0, 17.0),),))
        assert alone.pass_ms(2, rows=4) == 17.0
        assert alone.v(1, rows=64) == 1.0

    def test_survives_json(self) -> None:
        cost = model_of(stairs=False).with_draft("ngram:{}", DraftCost(fixed_ms=0.5, level_ms=0.25))
        assert TypeAdapter(CostModel).validate_python(json.loads(json.dumps(asdict(cost)))) == cost

    def test_impossible_passes_and_drafts_are_refused(self) -> None:
        for arguments in ((0, 1, 0), (1, 0, 0), (1, 1, -1)):
            with pytest.raises(ArgumentError):
                model_of().pass_ms(*arguments)
        assert DraftCost(fixed_ms=2.0, level_ms=0.5).ms(4) == 4.0
        with pytest.raises(ArgumentError):
            DraftCost(fixed_ms=-0.1, level_ms=0.0)


class TestMeasure:
    def test_other_rows_stay_as_they_were(self) -> None:
        target = target_of(rows=3)
        target.prefill([1], [harness.PROMPT[:-1]])
        before = target.score([1], [TokenTree(harness.PROMPT[-1])]).logits
        cost = load_or_measure(target, rows=(1, 2), nodes=(1, 2, 4), contexts=(8, 60), repeats=2, seconds=60)
        assert target.lengths == [0, len(harness.PROMPT) - 1, 0]
        after = target.score([1], [TokenTree(harness.PROMPT[-1])]).logits
        assert torch.equal(before, after)
        assert (cost.nodes, cost.rows, cost.contexts) == ((1, 2, 4), (1, 2), (8, 60)) and not cost.stairs

    def test_rows_that_are_needed_must_be_free_and_are_again_if_a_pass_fails(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        target = target_of(rows=2)
        target.prefill([0], [[1, 2]])
        with pytest.raises(ArgumentError, match="2 free rows are needed"):
            load_or_measure(target, rows=(2,), nodes=(1, 2))
        with pytest.raises(ArgumentError, match=r"rows must be in 1\.\.2"):
            load_or_measure(target, rows=(3,))
        target = target_of()
        monkeypatch.setattr(target, "score", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            load_or_measure(target, nodes=(1, 2))
        assert target.lengths == [0]

    def test_sizes_are_cut_to_what_fits_and_padded_targets_have_stairs(self, instant: list[Point]) -> None:
        cost = load_or_measure(target_of(), nodes=(1, 2, 64, 1000), contexts=(0, 5000))
        assert cost.nodes == (1, 2, 64) and cost.contexts == (0, harness.SLOTS - 64)
        assert load_or_measure(target_of(buckets=Buckets(nodes=(4, 16)))).stairs

    def test_finds_the_costs_there_are(self, instant: list[Point]) -> None:
        cost = load_or_measure(target_of(rows=4), rows=(1, 4), contexts=(0, 50), seconds=1e9)
        for context in cost.contexts:
            for rows in cost.rows:
                for nodes in cost.nodes:
                    assert cost.pass_ms(nodes, rows, context) == pytest.approx(1e3 * worth((context, rows, nodes)))
        dense = {point for point in instant if point[0] == 0}
        assert len(dense) == 2 * len(cost.nodes) and len(set(instant)) < 2 * len(dense), "further contexts are sparse"

    def test_the_budget_leaves_out_the_large_passes(self, instant: list[Point]) -> None:
        cost = load_or_measure(target_of(rows=4), rows=(1, 4), contexts=(0, 50), seconds=0.1)
        assert sum(worth(point) for point in instant) < 0.2
        assert max(point[1] * point[2] for point in instant) < 64
        assert cost.nodes[-1] < 64 and cost.pass_ms(64) == pytest.approx(1e3 * worth((0, 1, 64))), "extrapolated"

    def test_no_budget_still_measures_a_line(self, instant: list[Point]) -> None:
        cost = load_or_measure(target_of(rows=4), rows=(1, 4), contexts=(0, 50), seconds=0)
        assert set(instant) == {(0, 1, 1), (0, 1, 2)} and cost.rows == (1,) and cost.contexts == (0,)

    def test_noise_is_smoothed(self) -> None:
        assert make_rising([3.0, 1.0, 2.0, 5.0, 4.0]) == [2.0, 2.0, 2.0, 4.5, 4.5]
        assert make_rising([1.0, 2.0, 3.0]) == [1.0, 2.0, 3.0]


class TestStore:
    def test_is_measured_once_unless_it_is_forced(self, instant: list[Point], cache: Path) -> None:
        first = measuring.load_or_measure(target_of())
        count = len(instant)
        assert measuring.load_or_measure(target_of()) == first and len(instant) == count > 0
        assert [path.suffix for path in cache.iterdir()] == [".json"]
        measuring.load_or_measure(target_of(), force=True)
        assert len(instant) == 2 * count

    def test_more_sizes_are_measured_together_with_those_that_are_kept(self, instant: list[Point], cache: Path) -> None:
        one = measuring.load_or_measure(target_of(), nodes=(1, 2))
        measuring.save(target_of(), one.with_draft("ngram:{}", DraftCost(fixed_ms=1.0, level_ms=0.0)))
        more = measuring.load_or_measure(target_of(rows=4), rows=(1, 4), nodes=(1, 8))
        assert more.nodes == (1, 2, 8) and more.rows == (1, 4) and "ngram:{}" in more.drafts
        count = len(instant)
        assert measuring.load_or_measure(target_of(), nodes=(1, 2)) == more and len(instant) == count
        assert len(list(cache.iterdir())) == 1

    def test_a_file_of_a_target_with_more_slots_serves_one_with_fewer(self, instant: list[Point]) -> None:
        """What lies behind the end of its rows is left out, whatever else is measured beside it."""
        large, small = (TransformersTarget(harness.model(), rows=2, slots=slots) for slots in (harness.SLOTS, 24))
        measuring.load_or_measure(large, rows=(1,))
        kept = measuring.load_or_measure(small, rows=(1, 2))
        assert instant and all(context + nodes <= 24 for context, _, nodes in instant[-3:])
        assert kept.pass_ms(1, 1) > 0

    @pytest.mark.parametrize("damage", ["cut", "changed", "no JSON", "another format", "another target", "a list"])
    def test_a_file_that_cannot_be_trusted_is_measured_anew(
        self, instant: list[Point], cache: Path, damage: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        good = measuring.load_or_measure(target_of())
        [path] = cache.iterdir()
        text = path.read_text()
        kept = json.loads(text)
        kept["format" if damage == "another format" else "identity"] = 0
        kept["checksum"] = hash_json({key: kept[key] for key in ("format", "identity", "grid", "cost")})
        damaged = {
            "cut": text[: len(text) // 2],
            "changed": text.replace('"stairs": false', '"stairs": true'),
            "no JSON": "\x00",
            "a list": "[]",
        }
        assert damaged["changed"] != text
        path.write_text(damaged.get(damage, json.dumps(kept)))
        count = len(instant)
        with caplog.at_level(logging.WARNING):
            assert measuring.load_or_measure(target_of()) == good
        assert len(instant) > count and "measuring anew" in caplog.text
        assert json.loads(path.read_text()) == json.loads(text)

    def test_a_folder_that_cannot_be_written_is_no_failure(
        self, instant: list[Point], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "file"))
        with caplog.at_level(logging.WARNING):
            assert measuring.load_or_measure(target_of()).nodes[0] == 1
        assert "could not be kept" in caplog.text

    def test_a_few_sizes_are_timed_once_before_the_first_token(self, instant: list[Point], checkpoint: Path) -> None:
        """At the first start of a model on this machine, whoever drafts and whatever is asked for."""
        counts = list[int]()
        for method in ("auto", "recycling"):
            for more in ({}, {"max_model_len": 64, "max_num_seqs": 2}):
                llm = LLM(checkpoint, speculative_config={"method": method}, tokenizer=False, **more)
                llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8))
                counts.append(len(instant))
        assert 0 < counts[0] <= 6 * 4 and set(counts) == {counts[0]}
        assert {(rows, nodes) for _, rows, nodes in instant} == {(1, 2**power) for power in range(6)}

    @pytest.mark.parametrize("seconds", [lambda nodes: 0.2 * nodes, lambda nodes: 0.1 if nodes == 8 else 0.002])
    def test_a_first_measurement_in_a_bad_moment_is_not_believed(
        self, cache: Path, monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int], float]
    ) -> None:
        """A slow machine has no time for more than two sizes, and beside other work one may look dear."""

        def wait(_target: object, _rows: object, point: Point) -> float:
            clock.append(clock[-1] + seconds(point[2]))
            return seconds(point[2])

        clock = [0.0]
        monkeypatch.setattr(measuring, "_time", wait)
        monkeypatch.setattr(measuring.time, "perf_counter", lambda: clock[-1])
        assert isinstance(measuring.known_or_nominal(target_of()), Nominal) and not cache.exists()

    def test_what_looks_alike_beside_others_is_not_believed(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(measuring, "_time", lambda *_: 0.02)
        known = measuring.known_or_nominal(target_of())
        assert [known.pass_ms(nodes) for nodes in (1, 8, 32)] == pytest.approx([20, 20 * 1.28, 20 * 2.24])
        assert not cache.exists(), "the next start may be quieter"

    def test_nothing_is_measured_that_would_wait(self, instant: list[Point], monkeypatch: pytest.MonkeyPatch) -> None:
        busy, accelerator = target_of(), target_of()
        busy.lengths[:] = [3] * busy.rows
        monkeypatch.setattr(accelerator, "device", torch.device("mps"))
        for target in (busy, accelerator):
            assert isinstance(measuring.known_or_nominal(target), Nominal)
        assert not instant

    def test_sizes_are_compared_within_a_context(self, cache: Path) -> None:
        """Here wide drafts come behind long texts alone, whose passes take twice the time."""
        short, long = [(1, 10.0), (2, 11.0), (4, 12.0)], [(1, 20.0), (9, 40.0)]
        seen = {(0, nodes): [ms] * 9 for nodes, ms in short} | {(768, nodes): [ms] * 3 for nodes, ms in long}
        measuring.keep_steps(target_of(), seen)
        known = measuring.known_or_nominal(target_of())
        assert [known.pass_ms(nodes) for nodes in (1, 2, 4, 9)] == pytest.approx([10, 11, 12, 20])

    def test_what_steps_took_serves_the_next_process(self, cache: Path) -> None:
        sizes = [(1, 10.0), (2, 11.0), (4, 12.0), (9, 20.0)]
        seen = {(256, nodes): [9 * ms, ms, ms, ms] for nodes, ms in sizes} | {(0, 5): [1.0]}
        measuring.keep_steps(target_of(), {point: times for point, times in seen.items() if point[1] < 9})
        assert not cache.exists(), "three sizes tell little"
        measuring.keep_steps(target_of(), seen)
        for rows in (1, 4):
            known = measuring.known_or_nominal(target_of(rows=rows))
            assert [known.pass_ms(nodes, 1, 0) for nodes, _ in sizes] == pytest.approx([ms for _, ms in sizes])
        at_twice_the_pace = {(0, nodes): [ms] * 24 for nodes, ms in [(1, 5), (2, 6), (3, 7), (4, 8)]}
        measuring.keep_steps(target_of(), at_twice_the_pace)
        known = measuring.known_or_nominal(target_of())
        found = [known.pass_ms(nodes) for nodes in (1, 3, 4, 9)]
        assert found == pytest.approx([5, (5.75 + 7) / 2, (6 + 8) / 2, 10]), "old and new count alike, at the new pace"
        price = (10 - (7 + 0.5 * 3 / 5)) / 4.5  # of a node in the upper half of the sizes
        assert known.pass_ms(18) == pytest.approx(10 + 9 * price)

    def test_a_slow_moment_of_a_rare_size_hardly_counts(self, cache: Path) -> None:
        """A size that looks dear is drafted no more, so that nothing would correct it."""
        often = {(0, nodes): [ms] * 24 for nodes, ms in [(1, 5.0), (2, 5.5), (4, 6.0), (9, 10.0), (17, 18.0)]}
        measuring.keep_steps(target_of(), often)
        measuring.keep_steps(target_of(), often | {(0, nodes): [3 * often[0, nodes][0]] * 3 for nodes in (9, 17)})
        known = measuring.known_or_nominal(target_of())
        assert known.pass_ms(9) < 1.25 * 10 and known.pass_ms(17) < 1.25 * 18 and known.pass_ms(34) < 2.5 * 18

    def test_what_no_step_has_shown_is_not_free(self, cache: Path) -> None:
        """Where the largest passes that were seen lie on one stair, one beyond them costs more."""
        measuring.keep_steps(target_of(rows=4), {(0, nodes): [5.0] * 3 for nodes in (1, 2, 3, 4)})
        known = measuring.known_or_nominal(target_of(rows=4))
        for rows in (1, 4):
            further = [known.pass_ms(nodes, rows) - 5 for nodes in (4, 6, 8, 16)]
            assert further == pytest.approx([5 * Nominal().slope * (rows * nodes - 4) for nodes in (4, 6, 8, 16)])

    def test_steps_of_a_batch_tell_of_every_number_of_rows(self, cache: Path) -> None:
        """A few sizes of few rows once said that 16 rows with 90 nodes take less than without."""
        seen = {(0, 16 + nodes): [20.0 + nodes] * 3 for nodes in (0, 8, 16, 48)}
        measuring.keep_steps(target_of(), seen | {(0, 2): [10.0] * 3, (0, 6): [9.0] * 3})
        known = measuring.known_or_nominal(target_of())
        assert [known.pass_ms(1 + nodes / 16, 16) for nodes in (0, 8, 16, 48)] == pytest.approx([20, 28, 36, 68])
        assert known.pass_ms(1) == pytest.approx(known.pass_ms(2)) == pytest.approx(29 / 3)
        for rows in (1, 2, 4, 8, 16):
            times = [known.pass_ms(nodes, rows) for nodes in range(1, 30)]
            assert times == sorted(times) and times[-1] > 1.5 * times[0]

    def test_a_calibration_knows_better_than_steps(self, instant: list[Point]) -> None:
        measuring.keep_steps(target_of(), {(0, nodes): [1.0] * 3 for nodes in (1, 2, 3, 4)})
        known = measuring.load_or_measure(target_of())
        assert instant and known.pass_ms(1) == pytest.approx(1e3 * worth((known.contexts[0], 1, 1)))
        measuring.keep_steps(target_of(), {(0, nodes): [1.0] * 3 for nodes in (1, 2, 3, 4)})
        assert measuring.known_or_nominal(target_of()) == known

    def test_an_engine_keeps_its_times(self, checkpoint: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(measuring, "_SIZES_SEEN", 1)
        llm = LLM(checkpoint, speculative_config={"method": "auto"}, tokenizer=False, max_num_seqs=1)
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=32, ignore_eos=True))
        shutil.rmtree(cache, ignore_errors=True)  # What was timed at the start
        del llm
        gc.collect()
        [path] = cache.iterdir()
        assert json.loads(path.read_text())["cost"]["rows"] == [1]

    def test_what_a_pass_costs_depends_on(self) -> None:
        names = {
            "itself": measuring.file_of(target_of()),
            "padding": measuring.file_of(target_of(buckets=Buckets(nodes=(16,)))),
            "dtype": measuring.file_of(TransformersTarget(copy.deepcopy(harness.model()).bfloat16(), slots=64)),
        }
        threads = torch.get_num_threads()
        torch.set_num_threads(threads + 1)
        try:
            names["threads"] = measuring.file_of(target_of())
        finally:
            torch.set_num_threads(threads)
        assert len(set(names.values())) == len(names)
        assert measuring.file_of(target_of(rows=4)) == names["itself"], "rows and slots are in the grid"

    def test_drafters_that_are_objects_are_not_kept(self, instant: list[Point]) -> None:
        target, free = target_of(), DraftCost(fixed_ms=0.0, level_ms=0.0)
        cost = measuring.load_or_measure(target)
        kept = measuring.save(
            target, cost.with_draft('a:{"model": "LlamaForCausalLM@1402"}', free).with_draft("b:{}", free)
        )
        assert list(json.loads(kept.read_text())["cost"]["drafts"]) == ["b:{}"]

    def test_where_it_is_kept(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        target = target_of()
        assert measuring.file_of(target).parent == tmp_path / "cost"
        monkeypatch.delenv("FORERUN_CACHE")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        assert measuring.file_of(target).parent == tmp_path / "xdg" / "forerun" / "cost"
        monkeypatch.delenv("XDG_CACHE_HOME")
        assert measuring.file_of(target).parent == Path.home() / ".cache" / "forerun" / "cost"


def drafter_for(target: TransformersTarget, method: str, **options: Any) -> Drafter:
    setup = DrafterSetup(target=target, tokenizer=None, rows=target.rows, slots=target.slots)
    return build(method, options, setup)


GREEDY = SamplingParams(
    temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, max_tokens=20, ignore_eos=True
)


class TestTrial:
    def test_counts_what_the_engine_counts(self) -> None:
        target = target_of(rows=2)
        variant = harness.Variant("ngram", "chain", {"num_speculative_tokens": 3})
        trial = try_drafter(target, drafter_for(target, "ngram"), harness.PROMPTS, GREEDY, depths=(3,))
        outputs = harness.llm(variant).generate(harness.as_prompts(harness.PROMPTS), GREEDY)
        stats = [output.outputs[0].speculation for output in outputs]
        assert trial.stats.num_accepted_draft_tokens == sum(one.num_accepted_draft_tokens for one in stats) > 0
        assert trial.stats.num_draft_tokens == sum(one.num_draft_tokens for one in stats)
        assert len(trial.steps) == sum(one.num_spec_steps + one.num_plain_steps for one in stats)
        assert 0 < trial.coverage < 1 and target.lengths == [0, 0]

    def test_the_target_as_its_own_draft_model_is_always_right(self) -> None:
        target = target_of()
        drafter = drafter_for(target, "draft_model", model=harness.model(), num_speculative_tokens=3)
        trial = try_drafter(target, drafter, [harness.PROMPT], GREEDY, depths=(3, 1))
        assert all(done.accepted == done.depth for done in trial.steps)
        assert all(done.drafted for done in trial.steps[:-1]), "only the last step has no room for a draft"
        assert {done.depth for done in trial.steps[:4]} == {3, 1}
        assert trial.tokens_per_pass == pytest.approx(19 / len(trial.steps))

    def test_a_stop_token_ends_an_answer(self) -> None:
        plain = try_drafter(target_of(), None, [harness.PROMPT], GREEDY, depths=(1,))
        answer = harness.plain_greedy(harness.PROMPT, GREEDY)
        cut = try_drafter(target_of(), None, [harness.PROMPT], GREEDY, depths=(1,), stop_ids=frozenset({answer[4]}))
        assert len(plain.steps) == 19 and len(cut.steps) == answer.index(answer[4])

    def test_the_row_is_free_again_when_a_prompt_does_not_fit(self) -> None:
        target = target_of()
        with pytest.raises(ArgumentError):
            try_drafter(target, drafter_for(target, "ngram"), [[1] * harness.SLOTS], GREEDY, depths=(3,))
        assert target.lengths == [0]


def steps_of(costs_by_depth: dict[int, float], *, first: float = 99.0) -> Trial:
    def one(depth: int, ms: float, *, begins: bool = False) -> TrialStep:
        return TrialStep(drafted=depth, depth=depth, accepted=0, context=5, ms=ms + 0.5, first=begins)

    steps = [one(3, first, begins=True)]
    steps += [one(depth, ms) for _ in range(3) for depth, ms in costs_by_depth.items()]
    return Trial(steps=tuple(steps))


def test_acceptance_by_rank_is_of_the_nodes_with_all_children() -> None:
    """Written out: of 10 roots of three children and 2 of one; the depth below was seen too seldom."""

    def one(*siblings: tuple[int, int | None]) -> TrialStep:
        return TrialStep(drafted=3, depth=2, accepted=0, context=5, ms=1.0, first=False, siblings=siblings)

    steps = [one((3, 0), (2, 1))] * 4 + [one((3, 1))] + [one((3, 2))] * 2 + [one((3, None))] * 3 + [one((1, 0))] * 2
    assert Trial(steps=tuple(steps)).rank_acceptance == [[0.4, 0.1, 0.1]]
    assert Trial(steps=tuple(steps * 2)).rank_acceptance == [[0.4, 0.1, 0.1], [0.0, 0.0]]


class TestDrafts:
    @pytest.mark.parametrize(
        ("costs", "fixed", "level"),
        [
            pytest.param({1: 3.0, 3: 7.0, 5: 11.0}, 1.0, 2.0, id="a line without the first step and the target"),
            pytest.param({4: 3.0}, 3.0, 0.0, id="one depth has no slope"),
            pytest.param({0: 0.25}, 0.25, 0.0, id="nothing found costs the looking"),
            pytest.param({1: 3.0, 5: 2.0}, 2.5, 0.0, id="a falling line is flat"),
            pytest.param({2: 1.0, 4: 9.0}, 0.0, 5 / 3, id="a steep one begins at zero"),
        ],
    )
    def test_what_drafting_costs(self, costs: dict[int, float], fixed: float, level: float) -> None:
        found = fit(steps_of(costs), besides_ms=0.5)
        assert (found.fixed_ms, found.level_ms) == (pytest.approx(fixed), pytest.approx(level))

    def test_real_proposals_leave_the_row_free(self) -> None:
        target = target_of()
        drafter = drafter_for(target, "draft_model", model=harness.relative(), num_speculative_tokens=3)
        found = measure_draft(target, drafter, harness.PROMPT, depth=3, steps=6)
        assert found.fixed_ms + found.level_ms > 0 and target.lengths == [0]

    @pytest.mark.parametrize(
        ("text", "depth", "steps"), [([1], 0, 8), ([1], 3, 2), ([], 3, 8), ([1] * harness.SLOTS, 3, 8)]
    )
    def test_nonsense_is_refused(self, text: list[int], depth: int, steps: int) -> None:
        target = target_of()
        with pytest.raises(ArgumentError):
            measure_draft(target, drafter_for(target, "ngram"), text, depth=depth, steps=steps)
