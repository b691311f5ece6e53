"""From acceptance and costs to a plan and a verdict; prompts files."""

import json
from pathlib import Path
from typing import Any

import pytest

from forerun.control.costs import CostModel, DraftCost
from forerun.errors import ArgumentError, DataError
from forerun.plan import planner, theory
from forerun.plan.assumptions import DEVICES, FreeVerification, Roofline, Size
from forerun.plan.planner import PlanLoad, decide, plan, plan_tree
from forerun.plan.prompts import UserPrompt, read_prompts

MEASURED = CostModel(
    nodes=(1, 2, 4, 8, 16), rows=(1,), contexts=(0,), pass_times_ms=(((20.0, 21.0, 22.0, 30.0, 60.0),),), stairs=True
)


def load(alpha: float = 0.7, *, level: float = 1.0, **more: Any) -> PlanLoad:
    values: dict[str, Any] = {"cost": MEASURED, "draft": lambda rows: DraftCost(fixed_ms=0.5, level_ms=level)}
    return PlanLoad(survival=theory.geometric(alpha, 4), **{**values, **more})


def test_every_line_is_the_formula() -> None:
    found = plan(load(), k=3)
    for line in found.lines[1:]:
        verify = MEASURED.pass_ms(line.k + 1)
        expected = theory.expected_tokens_per_pass(0.7, line.k) * 20 / (0.5 + line.k * 1.0 + verify)
        assert line.speedup == pytest.approx(expected) and line.v == pytest.approx(verify / 20)
    assert found.requested is found.lines[3] and found.lines[0].speedup == 1.0
    assert found.best.speedup == max(line.speedup for line in found.lines)


def test_a_tree_that_is_a_chain_has_the_speed_up_of_the_chain() -> None:
    """What a draft costs whatever its length is in both."""
    dear = load(draft=lambda rows: DraftCost(fixed_ms=6.0, level_ms=0.1))
    tree = plan_tree(dear, [[0.7]], nodes=4, depth=4)
    assert tree.parents == (0, 1, 2) and tree.speedup == pytest.approx(plan(dear, k=3).requested.speedup)


def test_the_best_draft_fills_a_step_of_the_staircase() -> None:
    assert plan(load(0.8, level=0.1)).best.k + 1 in MEASURED.nodes


def test_with_free_passes_it_is_leviathans_list() -> None:
    free = load(0.8, cost=FreeVerification(), draft=lambda rows: DraftCost(fixed_ms=0.0, level_ms=0.1))
    found = plan(free)
    assert (found.best.k, found.best.speedup) == (6, pytest.approx(2.47, abs=5e-3))
    assert found.break_even_batch is None and not found.unbounded


def test_free_drafts_and_passes_have_no_best_length() -> None:
    found = plan(load(cost=FreeVerification(), draft=lambda rows: DraftCost(fixed_ms=0.0, level_ms=0.0)))
    assert found.unbounded and found.best.k == planner.MOST_K


def test_a_batch_fills_the_device_and_ends_the_gain() -> None:
    roofline = Roofline(device=DEVICES["3090"], size=Size(params=8e9))
    at = load(cost=roofline, draft=lambda rows: DraftCost(fixed_ms=0.0, level_ms=0.02 * roofline.pass_ms(1, rows)))
    found = plan(at, k=5)
    limit = found.break_even_batch
    assert limit is not None and 1 < limit < 100
    assert at.predict(5, limit).speedup >= theory.WORTH > at.predict(5, limit + 1).speedup
    gains = dict(found.batches)
    assert gains[1] > 2.5 > gains[64] and gains[1024] == 1.0


def test_a_longer_k_than_usual_is_looked_at() -> None:
    assert plan(load(), k=40).requested.k == 40
    with pytest.raises(ArgumentError, match="-k must be 1 or more"):
        plan(load(), k=0)


def test_drafts_that_are_rare_and_short_cost_less() -> None:
    rare = load(coverage=0.5, nodes_per_level=0.5, filled=0.5)
    found = rare.predict(2)
    assert found.tokens_per_pass == pytest.approx(1 + 0.5 * (0.7 + 0.49))
    assert found.step_ms == pytest.approx(0.5 * (21 + 1) + 0.5 * 20 + 0.5)


def test_a_tree_is_sized_by_the_measured_staircase() -> None:
    tree = plan_tree(load(level=0.2), [[0.6, 0.2, 0.1]], nodes=12, depth=4)
    assert len(tree.parents) + 1 in MEASURED.nodes and tree.speedup > plan(load(0.6, level=0.2)).best.speedup


@pytest.mark.parametrize("wrong", [{"rows": 0}, {"context": -1}])
def test_nonsense_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ArgumentError):
        load(**wrong)


FULL = CostModel(nodes=(1, 2, 4), rows=(1,), contexts=(0,), pass_times_ms=(((10.0, 20.0, 40.0),),))


@pytest.mark.parametrize(
    ("at", "drafter", "text", "method", "words", "note"),
    [
        (load(0.8), "ngram", None, "ngram", "worth it: ", ""),
        (load(0.8), None, "summary", "ngram", "worth it: ", "2.66"),
        (load(0.8), None, "qa", "eagle", "worth it: ", ""),
        (load(0.3, level=1.0), "ngram", None, "ngram", "a small gain, measure before", ""),
        (load(0.3, level=15.0), "draft_model", None, None, "not worth it: ", "drafting a token costs"),
        (load(0.7, cost=FULL), None, None, None, "not worth it: ", "fills the device"),
    ],
    ids=["worth it", "by published figures", "for questions", "a small gain", "dear drafts", "a full device"],
)
def test_the_verdict_and_its_reason(
    at: PlanLoad, drafter: str | None, text: str | None, method: str | None, words: str, note: str
) -> None:
    found = decide(plan(at), at, drafter=drafter, text=text)
    assert found.method == method and found.worth_it == (method is not None)
    assert found.words.startswith(words) and note in "".join(found.notes[:1])


class TestPrompts:
    def test_lines_and_json(self, tmp_path: Path) -> None:
        plain, records = tmp_path / "a.txt", tmp_path / "a.jsonl"
        plain.write_text("one\n\ntwo {\n")
        turn = {"role": "user", "content": "hello"}
        records.write_text(
            '{"prompt": "one"}\n{"messages": [{"role": "user", "content": "hello"}, '
            '{"role": "assistant", "content": "x"}]}\n'
        )
        assert read_prompts(plain) == ["one", "two {"]
        assert read_prompts(records) == ["one", [turn]]

    @pytest.mark.parametrize(
        ("entry", "prompt"),
        [
            ({"turns": ["one", "two"], "question_id": 81, "category": "writing"}, "one"),
            ({"question": "one", "answer": "two"}, "one"),
            ({"prompt": "one", "completion": "two"}, "one"),
            ({"text": "one"}, "one"),
            ({"conversations": [{"from": "human", "value": "one"}]}, [{"role": "user", "content": "one"}]),
            ({"token_ids": [3], "prompt_token_ids": [1, 2], "vocabulary": "x"}, {"prompt_token_ids": [1, 2]}),
        ],
        ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
    )
    def test_layouts_of_bench_and_training(self, tmp_path: Path, entry: dict[str, Any], prompt: UserPrompt) -> None:
        (tmp_path / "a.jsonl").write_text(json.dumps(entry))
        assert read_prompts(tmp_path / "a.jsonl") == [prompt]

    @pytest.mark.parametrize(
        ("name", "text", "message"),
        [
            ("a.txt", "\n \n", "holds no prompts"),
            ("a.jsonl", "{", "a.jsonl, line 1: broken JSON"),
            ("a.jsonl", '{"prompt": "x"}\n{"text": 3}', "a.jsonl, line 2: 'text' must be a string"),
            ("a.jsonl", '{"prompt": " "}', "a.jsonl, line 1: a prompt, a message of the user, is blank"),
            ("a.jsonl", '{"messages": [{"role": "assistant", "content": "x"}]}', "line 1: there is no prompt"),
        ],
    )
    def test_bad_files(self, tmp_path: Path, name: str, text: str, message: str) -> None:
        (tmp_path / name).write_text(text)
        with pytest.raises(DataError, match=message):
            read_prompts(tmp_path / name)
        with pytest.raises(DataError, match="cannot read prompts"):
            read_prompts(tmp_path / "missing.txt")
