"""The parts of the benchmarks, on paper and on tiny models; the script for a lent GPU runs without one, too."""

import copy
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from bench.conftest import lively_llama, quiet
from benchmarks import gpu, spec_bench
from benchmarks.suite import plots, report
from benchmarks.suite.arms import Run, forerun_arms, transformers_arms
from benchmarks.suite.bits import BitCount, BitPlan, compare
from benchmarks.suite.goals import bit_goals, speed_goals, step_goals, text_goals
from benchmarks.suite.speed import ArmSummary, measure, summarise
from benchmarks.suite.steps import NODES, StepCosts, linear_layers, measure_steps
from benchmarks.suite.suite import Machine, Options, Results, as_json
from benchmarks.suite.texts import TextComparison, TokenCount, compare_texts, count_tokens
from benchmarks.suite.workloads import Setting, loops
from emulation import HAS_BFLOAT16, needs_bfloat16
from forerun import LLM
from forerun.demo import contexts
from forerun.errors import ArgumentError
from forerun.model import TransformersTarget
from forerun.model.kernels.forwards import LAYERS_BY
from forerun.model.kernels.packing import pack
from forerun.types import Source, StepTrace

GREEDY = Setting(name="greedy", temperature=0.0, new_tokens=24)
SAMPLED = Setting(name="sampled", temperature=0.8, top_p=0.95, seeds=(1, 2), new_tokens=16)
PROMPTS = [list(range(3, 40)), list(range(100, 130))]


@pytest.fixture(scope="module")
def runs_and_llm(source_tied: Path, draft: Path) -> tuple[list[Run], LLM]:
    """Greedy answers of all seven arms."""
    llm = LLM(str(source_tied), tokenizer=False, max_num_seqs=1, max_model_len=96)
    arms = [*transformers_arms(source_tied, draft, chain=3, lookup=4), *forerun_arms(llm, draft, chain=3, lookup=4)]
    return measure(arms, PROMPTS, GREEDY, quiet), llm


class TestWorkloads:
    def test_loops(self) -> None:
        assert loops([7] * 60)
        assert loops([*range(100), *[1, 2, 3] * 16])
        assert loops(list(range(16)) * 3)
        assert not loops(list(range(17)) * 3)
        assert not loops(list(range(60)))
        assert not loops([7] * 47), "too short to tell"

    def test_contexts_come_from_inside_held_out_files(self) -> None:
        tokenizer = SimpleNamespace(encode=lambda text, **_: [ord(letter) for letter in text])
        pieces = contexts(tokenizer, count=40, length=300)
        assert len(pieces) == 40 and all(len(piece) == 300 for piece in pieces)
        assert len({tuple(piece) for piece in pieces}) == 40
        with pytest.raises(ArgumentError, match="were requested"):
            contexts(tokenizer, count=2, length=10_000_000)


class TestArms:
    def test_every_arm_generates_all_tokens_and_is_timed(self, runs_and_llm: tuple[list[Run], LLM]) -> None:
        runs, _ = runs_and_llm
        assert {run.arm for run in runs} == {
            *(f"transformers {name}" for name in ("plain", "prompt lookup", "assisted")),
            *(f"forerun {name}" for name in ("plain", "ngram", "draft_model", "draft_model tree")),
        }
        assert len(runs) == 7 * 2
        for run in runs:
            assert len(run.tokens) == GREEDY.new_tokens, run.arm
            assert run.first_s > 0 and run.decode_s > 0
            assert 0 < run.decode_tokens < GREEDY.new_tokens

    def test_plain_arms_count_all_but_the_first_token(self, runs_and_llm: tuple[list[Run], LLM]) -> None:
        runs, _ = runs_and_llm
        for run in runs:
            if run.arm.endswith("plain"):
                assert run.decode_tokens == GREEDY.new_tokens - 1
            if run.arm.startswith("forerun"):
                assert sum(step.emitted for step in run.trace) >= run.decode_tokens
        lines = {line.arm: line for line in summarise(runs, list(dict.fromkeys(run.arm for run in runs)))}
        assert lines["forerun plain"].tokens_per_pass == 1.0
        assert lines["forerun plain"].predicted_speedup is None
        assert lines["transformers plain"].tokens_per_pass is None

    def test_sampling_follows_the_seed(self, source_tied: Path) -> None:
        llm = LLM(str(source_tied), tokenizer=False, max_num_seqs=1, max_model_len=96)
        for arms, model in ((transformers_arms, source_tied), (forerun_arms, llm)):
            arm, *_ = arms(model, None, chain=3, lookup=4)
            one, again, other = (arm.run(0, PROMPTS[0], SAMPLED, seed).tokens for seed in (1, 1, 2))
            assert one == again != other

    def test_texts_are_compared_with_our_plain_ones(self, runs_and_llm: tuple[list[Run], LLM]) -> None:
        runs, llm = runs_and_llm
        for line in compare_texts(llm, PROMPTS, runs):
            assert line.answers == 2 and line.unexplained == 0, line
        wrong = copy.deepcopy(runs)
        broken = next(run for run in wrong if run.arm == "forerun ngram")
        broken.tokens[5] = (broken.tokens[5] + 1) % 256
        lines = {line.arm: line for line in compare_texts(llm, PROMPTS, wrong)}
        assert lines["forerun ngram"].unexplained == 1


def step(draft_ms: float, verify_ms: float, kept: int, drafter: str | None) -> StepTrace:
    said: dict[str, Any] = {"step": 0, "position": 10, "rule": "argmax_walk", "nodes": (), "kind": Source.BONUS}
    times = {"draft_ms": draft_ms, "verify_ms": verify_ms, "commit_ms": 0.0}
    return StepTrace(drafter=drafter, path=tuple(range(1, kept + 1)), next_token=1, **said, **times)


def test_promised_and_realised_speed_up() -> None:
    def run(arm: str, seconds: float, trace: list[StepTrace]) -> Run:
        counts: dict[str, Any] = {"prompt": 0, "seed": 1, "tokens": [7] * 49, "decode_tokens": 48}
        return Run(arm=arm, first_s=0.1, decode_s=seconds, trace=trace, **counts)

    plain = run("forerun plain", 4.8, [step(0, 90, 0, None)] * 48)
    fast = run("forerun ngram", 2.4, [step(10, 110, 2, "ngram")] * 16)
    lines = {line.arm: line for line in summarise([fast, plain], [plain.arm, fast.arm])}
    assert lines["forerun plain"].tokens_per_second == pytest.approx(10)
    assert lines["forerun ngram"].tokens_per_pass == pytest.approx(3)
    assert lines["forerun ngram"].predicted_speedup == pytest.approx(3 * 90 / 120)
    assert lines["forerun ngram"].realised_share == pytest.approx(2 / 2.25)
    assert lines["forerun ngram"].looping == 1.0


class TestSteps:
    def test_floor_counts_every_layer_once(self) -> None:
        model = lively_llama().to(torch.bfloat16)
        plain = linear_layers(model)
        assert len(plain) == 3 * 7 + 1
        if HAS_BFLOAT16:
            pack(model)
            assert len(linear_layers(model)) == 3 * 4 + 1

    def test_measures_and_leaves_the_row_free(self) -> None:
        target = TransformersTarget(lively_llama(), slots=96)
        costs = measure_steps(target, PROMPTS[0], repeats=2)
        assert set(costs.step_ms) == set(costs.floor_ms) == set(NODES)
        assert costs.overhead() > 1
        assert target.lengths == [0]


class TestBits:
    texts = torch.randint(3, 256, (2, 90), generator=torch.Generator().manual_seed(0)).tolist()

    @needs_bfloat16
    @pytest.mark.parametrize("batch", [1, 2])
    def test_chains_have_plain_decodings_bits(self, batch: int) -> None:
        model = lively_llama().to(torch.bfloat16)
        pack(model)
        chain, tree = compare(model, self.texts[:batch], BitPlan(context=20, positions=40))
        assert (chain.name, tree.name) == ("chain", "tree")
        assert chain.positions == tree.positions == 40
        assert chain.differing == 0
        assert tree.largest < 0.5

    def test_a_wrong_cache_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("forerun.model.cache.SlotCache.move", lambda *_: None)
        chain, tree = compare(lively_llama(), self.texts[:1], BitPlan(context=20, positions=40))
        assert tree.differing > 10 and tree.other_argmax > tree.ties
        assert chain.differing == 0, "an accepted chain lies in place already"

    def test_counting(self) -> None:
        count = BitCount(name="chain", batch=1, epsilon=0.25)
        plain = torch.tensor([[1.0, 0.0], [1.0, 0.9], [1.0, -1.0]])
        other = torch.tensor([[1.0, 0.0], [0.9, 1.0], [-1.0, 1.0]])
        count.add(plain, other)
        assert (count.positions, count.differing, count.other_argmax, count.ties) == (3, 2, 2, 1)
        assert count.largest == pytest.approx(2.0)

    def test_tokens_of_the_small_model(self, source_tied: Path) -> None:
        llm = LLM(str(source_tied), tokenizer=False, max_num_seqs=2, max_model_len=96, reproducible=True)
        drafters: dict[str, dict[str, Any]] = {"ngram": {"method": "ngram", "num_speculative_tokens": 4}}
        counts = count_tokens(llm, PROMPTS, drafters, new_tokens=30)
        assert counts == [TokenCount(drafter="ngram", tokens=60, differing=0)]


def summary(arm: str, speed: float) -> ArmSummary:
    return ArmSummary(arm=arm, tokens_per_second=speed, median_tokens_per_second=speed, first_token_ms=9.0, looping=0.5)


def machine() -> Machine:
    return Machine(processor="abacus", cores=2, threads=2, flags=(), versions="none", load=3.0)


def shown(found: Results, width: int = 300) -> str:
    """The report as text."""
    console = Console(file=io.StringIO(), record=True, width=width)
    report.show(found, console)
    return console.export_text()


def results() -> Results:
    costs = StepCosts(step_ms=dict.fromkeys(NODES, 30.0), floor_ms=dict.fromkeys(NODES, 20.0), first_pass_s=0.1)
    lines = [summary(arm, speed) for arm, speed in {"transformers plain": 10.0, "forerun plain": 20.0}.items()]
    return Results(
        machine=machine(),
        options=Options(),
        notes=["a scale model"],
        steps=costs,
        speed={"T = 0": lines},
        texts=[TextComparison(arm="forerun ngram", answers=6, identical=5, ties=1)],
        bits=[BitCount(name="chain", batch=8, positions=2000, differing=1)],
        tokens=[TokenCount(drafter="ngram", tokens=50_000, differing=0)],
    )


class TestReport:
    def test_goals_are_judged(self) -> None:
        found = {goal.what: goal for goal in results().goals}
        assert not found["one step / its linear layers"].met
        assert found["pass over 16 nodes / over one"].met
        assert found["forerun plain / transformers plain, T = 0"].measured == 2.0
        assert not found["chain logits unlike plain ones, 2000 positions, batch 8"].met
        assert not found["greedy answers of forerun ngram unlike forerun plain"].met, "no tie excuses a chain"
        assert found["differing tokens of ngram in 50000, demo model, reproducible mode"].met

    def test_a_tie_excuses_a_tree_and_transformers(self) -> None:
        arms = ("forerun draft_model tree", "transformers plain")
        lines = [TextComparison(arm=arm, answers=6, identical=5, ties=1) for arm in arms]
        assert all(goal.met for goal in text_goals(lines, []))

    def test_tables_say_what_was_measured_and_on_what(self) -> None:
        text = shown(results(), width=160)
        for expected in ("abacus", "a scale model", "forerun plain", "50%", "missed", "met", "2000"):
            assert expected in text

    def test_json_is_plain_and_complete(self) -> None:
        document = json.loads(json.dumps(as_json(results())))
        assert document["machine"]["processor"] == "abacus"
        assert document["steps"]["step_ms"]["16"] == 30.0
        assert len(document["goals"]) == len(results().goals)

    def test_plots(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        written = plots.draw(results(), tmp_path)
        assert {path.name for path in written} == {"speed-0.svg", "speed-0.png", "steps.svg", "steps.png"}
        assert all(path.stat().st_size > 1000 for path in written)

    def test_goals_without_measurements_do_not_appear(self) -> None:
        with pytest.raises(ArgumentError, match="'speed'"):
            Options(parts=("spead",))
        assert not speed_goals([], "T = 0")
        assert not bit_goals([])
        costs = results().steps
        assert costs is not None
        assert step_goals(costs)[0].goal == "<= 1.35"


def line(arm: str, category: str, question: str, *, tokens: int, seconds: float, passes: int) -> dict[str, object]:
    figures = {"tokens": tokens, "seconds": seconds, "passes": passes}
    return {"arm": arm, "category": category, "question": question, **figures}


LINES = [
    line(spec_bench.PLAIN, "math", "1", tokens=40, seconds=4.0, passes=40),
    line(spec_bench.PLAIN, "qa", "2", tokens=20, seconds=2.0, passes=20),
    line("forerun ngram", "math", "1", tokens=40, seconds=2.0, passes=20),
    line("forerun ngram", "qa", "2", tokens=20, seconds=2.5, passes=20),
    line("forerun auto", "math", "1", tokens=40, seconds=1.0, passes=10),
    line("forerun auto", "qa", "2", tokens=20, seconds=2.0, passes=20),
    line("transformers plain", "math", "1", tokens=40, seconds=16.0, passes=0),
]


def test_a_summary_has_tokens_per_pass_and_speed_by_category() -> None:
    found = spec_bench.summary(LINES)
    assert found["tokens_per_pass"]["forerun auto"] == {"all": 2.0, "math": 4.0, "qa": 1.0}
    assert found["speedup"]["forerun ngram"] == {"math": 2.0, "qa": 0.8}
    assert found["forerun auto over"]["transformers plain"] == {"math": 16.0, "mean": 16.0, "worst question": 16.0}


def test_the_board_is_markdown_with_the_fastest_drafter_first(capsys: pytest.CaptureFixture[str]) -> None:
    spec_bench.write_board(spec_bench.summary(LINES))
    assert capsys.readouterr().out.splitlines() == [
        "|  | math | qa | mean |",
        "| --- | --- | --- | --- |",
        "| `auto` | 4.00, 4.00 x | 1.00, 1.00 x | 2.00, 2.50 x |",
        "| `ngram` | 2.00, 2.00 x | 1.00, 0.80 x | 1.50, 1.40 x |",
    ]


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "gpu.jsonl").read_text().splitlines()]


def test_a_dry_run_prints_one_line_for_each_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpu.main([str(tmp_path), "ceiling", "step", "growth", "quantised", "--dry"])
    found = lines(tmp_path)
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")] == found
    assert not [line for line in found if "failed" in line or "cut_after_s" in line]
    steps = [line for line in found if line["part"] == "step"]
    assert [(line["arm"], line["temperature"]) for line in steps] == [
        (arm, temperature) for temperature in (0.0, 0.8) for arm in ("plain", "suffix", "eagle3", "draft_model")
    ]
    assert all(line["wall_ms"] > 0 and line["tokens_a_step"] >= 1 for line in steps)
    assert [line["nodes"] for line in found if line["part"] == "growth"] == [1, 16, 8]
    assert [line["format"] for line in found if line["part"] == "quantised"] == list(gpu.FORMATS)
    assert found[-1]["part"] == "done"


def test_a_part_that_fails_or_takes_too_long_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_bench: gpu.Bench) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    def cut(_bench: gpu.Bench) -> None:
        raise gpu.CutError

    apart = list[tuple[list[str], dict[str, str]]]()
    monkeypatch.setattr(gpu, "run_module", lambda _bench, parts, environment: apart.append((parts, environment)))
    monkeypatch.setattr(gpu, "PARTS", {"first": (fail, 5), "second": (cut, 7), "third": (gpu.without, 5)})
    gpu.main([str(tmp_path), "first", "second", "third", "--dry"])
    first, second, _ = lines(tmp_path)
    assert "illegal memory access" in first["failed"] and second["cut_after_s"] == 7
    assert apart == [(["step"], {LAYERS_BY: "parts"})]
    with pytest.raises(SystemExit):
        gpu.main([str(tmp_path), "steps", "--dry"])
    assert "unknown part 'steps'; there are first, second, third" in capsys.readouterr().err


def test_a_lease_takes_twelve_minutes_at_most() -> None:
    assert sum(gpu.PARTS[name][1] for name in gpu.IN_A_LEASE) <= 12 * 60
