"""The part `heads`: every head in its forms at equal drafted nodes, and the goals that come of it."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from bench.heads import head
from bench.test_acceptance import line
from bench.test_parts import results, shown
from bench.test_scale import other_head
from benchmarks.suite.acceptance import NODES, Acceptance, AcceptancePlan
from benchmarks.suite.heads import HeadBoard, forms, head_goals, measure_heads
from benchmarks.suite.suite import as_json
from forerun import LLM
from forerun.cli.leaderboard import TrainedDrafter, find_trained
from forerun.drafters.kinds import kind_named
from forerun.errors import ArgumentError
from forerun.heads.files import HeadCheckpoint, TargetFacts, format_for, write_head
from trained import checkpoint_of

PLAN = AcceptancePlan(new_tokens=12, seeds=(1,))
PROMPTS = [list(range(3, 40)), list(range(100, 130))]


@pytest.fixture(scope="module")
def folder(source_tied: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random heads, each as `forerun train` leaves it; one without a checkpoint."""
    found = tmp_path_factory.mktemp("heads")
    made = {"eagle3": head(), "medusa": other_head("medusa"), "dflash": other_head("dflash", block_size=8)}
    for name, module in made.items():
        kind = format_for(module.config.kind)
        write_head(HeadCheckpoint.of(module), found / name / "head", kind, TargetFacts.read(source_tied))
        if name != "dflash":
            checkpoint_of(found / name, step=1, seconds=10.0)
    return found


@pytest.fixture(scope="module")
def board(source_tied: Path, folder: Path) -> HeadBoard:
    def engine() -> LLM:
        return LLM(str(source_tied), tokenizer=False, max_num_seqs=2, max_model_len=96)

    return measure_heads(engine, folder, PROMPTS, PLAN, lambda _: None)


def test_every_form_drafts_the_nodes_that_it_says(board: HeadBoard) -> None:
    assert [one.name for one in board.heads] == ["dflash", "eagle3", "medusa"]
    found = {(line.method, line.form, line.temperature): line for line in board.found.lines}
    assert len(found) == len(board.found.lines)
    drafted = {name: {form for other, form, _ in found if other == name} for name in ("dflash", "medusa", "eagle3")}
    assert drafted["dflash"] - drafted["medusa"] == {"longest chain"}
    assert drafted["eagle3"] - drafted["medusa"] == {f"chain of {NODES}"}
    for (name, form, temperature), own in found.items():
        most = 7 if form == "longest chain" else int(form.rpartition(" ")[2])
        fewest = 4 if name == "medusa" or form.endswith(f"chain of {NODES}") else most  # depths, tokens of an answer
        assert 0.5 * min(most, fewest) < own.nodes <= most, (name, form, temperature)


def test_the_board_is_shown_and_written(board: HeadBoard) -> None:
    found = dataclasses.replace(results(), heads=board)
    text = shown(found)
    for words in ("10 s", "drawn tree of 32", "longest chain", "best head / EAGLE-3 chain, 32 nodes, T = 1"):
        assert words in text
    document = json.loads(json.dumps(as_json(found)))
    assert {one["name"] for one in document["heads"]["heads"]} == {"dflash", "eagle3", "medusa"}
    assert board.note is not None and "10 to 10 s" in board.note, "one says nothing of its time"


def test_a_folder_without_heads_is_refused(tmp_path: Path) -> None:
    for empty in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ArgumentError, match="holds no folder with a trained head or draft model"):
            find_trained(empty)


def judged(kinds: list[str], lengths: dict[tuple[str, str], int]) -> dict[str, Any]:
    """The goals of one prompt of 100 passes at temperature 0, each head of the name of its kind."""
    heads = [TrainedDrafter(name=kind, kind=kind_named(kind), model="", parameters=1, seconds=9.0) for kind in kinds]
    lines = [line(f"{name}, {form}", name, form, 0.0, [tokens], [100]) for (name, form), tokens in lengths.items()]
    board = HeadBoard(heads=heads, found=Acceptance(head="", lines=lines))
    assert board.note is None
    return {goal.what.removeprefix("mean acceptance length, "): goal for goal in head_goals(board)}


def test_goals_compare_at_equal_nodes() -> None:
    found = judged(
        ["dspark", "dflash", "eagle3", "eagle", "medusa"],
        {
            **{("eagle3", "chain of 5"): 200, ("eagle3", "tree of 5"): 500, ("eagle3", "chain of 32"): 250},
            **{("dflash", "chain of 5"): 220, ("dflash", "longest chain"): 300, ("dflash", "tree of 32"): 320},
            **{("dspark", "chain of 5"): 210, ("dspark", "tree of 5"): 240, ("eagle", "chain of 5"): 150},
        },
    )
    best = found["best head / EAGLE-3 chain, 5 nodes, T = 0"]
    assert best.measured == pytest.approx(1.2) and best.met and "dspark, tree of 5" in best.note
    assert found["best head / EAGLE-3 chain, 32 nodes, T = 0"].measured == pytest.approx(320 / 250)
    lifted = found["tree of 32 / own chain, dflash, T = 0"]
    assert lifted.measured == pytest.approx(320 / 300) and not lifted.met, "against the longest of its chains"
    order = {what.partition(" as ")[0]: goal.met for what, goal in found.items() if " as published" in what}
    assert order == {"dspark / dflash": False, "dspark / eagle3": True, "eagle3 / eagle": True}


def test_forms_follow_from_the_kind() -> None:
    def of(kind: str, **more: Any) -> TrainedDrafter:
        return TrainedDrafter(name=kind, kind=kind_named(kind), model="x", parameters=1, **more)

    assert set(forms(of("distill"), 0.0)) == {"chain of 5"}, "a draft model has no tree of a number of nodes"
    tree = forms(of("dflash", max_depth=7), 1.0)
    assert tree["tree of 32"] == {"method": "dflash", "model": "x", "nodes": 32, "top_k": 32, "draw": "deterministic"}
    assert "draw" not in tree["drawn tree of 32"] and tree["longest chain"]["num_speculative_tokens"] == 7
    assert forms(of("eagle3"), 0.0)["tree of 5"] == {"method": "eagle3", "model": "x", "nodes": 5, "top_k": 5}
    assert forms(of("kangaroo"), 0.0)["chain of 5"]["exit_below"] == 0.0, "as many nodes as the others"
