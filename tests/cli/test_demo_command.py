"""``forerun demo``: both arms, honest figures, the right exit code."""

import io
import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cli.conftest import Forerun
from forerun import LLM, SamplingParams, shipped
from forerun.cli import demo, leaderboard
from forerun.core.probs import NodeProbs
from forerun.core.rng import Rng
from forerun.core.rules import ArgmaxWalk
from forerun.core.tree import TokenTree
from forerun.demo import Edit, scale
from forerun.heads.files import HeadCheckpoint, TargetFacts, write_head
from forerun.types import Source, SpeculationStats, Verdict
from llamas import tiny_eagle
from trained import checkpoint_of

FILE = ("--prompt-name", "chunk.py")


@pytest.fixture(autouse=True)
def short_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "PROMPT_CHARACTERS", 120)


def arguments(checkpoint: Path, draft: Path, temperature: float = 0) -> list[object]:
    drafting = ["--drafter", "draft_model", "--drafter-model", draft, "-k", 3, "--no-adaptive"]
    return ["demo", checkpoint, *FILE, *drafting, "-t", temperature, "-n", 16, "--repeats", 1]


def test_json(forerun: Forerun, checkpoint: Path, draft_checkpoint: Path) -> None:
    ran = forerun(*arguments(checkpoint, draft_checkpoint), "--json")
    found = json.loads(ran.out)
    assert ran.code == 0 and found["identical"] is True and found["drafter"] == "draft_model"
    assert found["speedup"] == pytest.approx(
        found["speculative_tokens_per_second"] / found["plain_tokens_per_second"], rel=1e-3
    )
    assert found["mean_acceptance_length"] > 1 and found["tokens"] == 16 and found["runs_as"] == "float32 on CPU"


def test_sampled_text_is_the_same_with_deterministic_drafts_or_by_their_rule(
    forerun: Forerun, checkpoint: Path, draft_checkpoint: Path
) -> None:
    asked = arguments(checkpoint, draft_checkpoint, 0.8)
    deterministic = forerun(*asked, "--drafter-option", "draw=deterministic", "--json")
    by_rule = forerun(*asked, "--rule", "sample_walk", "--json")
    other_seed = forerun(*asked, "--rule", "sample_walk", "--seed", 8, "--json")
    assert [json.loads(ran.out)["identical"] for ran in (deterministic, by_rule, other_seed)] == [True] * 3
    texts = [json.loads(ran.out)["text"] for ran in (deterministic, by_rule, other_seed)]
    assert texts[0] == texts[1] != texts[2]


def test_it_says_that_sampled_drafts_give_another_text(
    forerun: Forerun, checkpoint: Path, draft_checkpoint: Path
) -> None:
    ran = forerun(*arguments(checkpoint, draft_checkpoint, 0.8))
    assert ran.code == 0 and "identical: no" in ran.out and "--rule sample_walk" in ran.out


def test_no_run_copies_an_earlier_one(checkpoint: Path) -> None:
    config = {"method": "suffix", "adaptive": False}
    llm = LLM(checkpoint, speculative_config=config, dtype="float32", max_num_seqs=1)
    params = SamplingParams(temperature=1.0, max_tokens=32, ignore_eos=True, seed=0)
    found = demo.race(llm, "the cat", params, repeats=2)
    drafted = [run.outputs[0].speculation.num_accepted_draft_tokens for run in found.runs["speculative"]]
    assert found.identical and drafted == [drafted[0]] * 3
    again = [llm.generate(["the cat"], params, cache_salt="one")[0].outputs[0] for _ in range(2)]
    assert again[1].speculation.num_accepted_draft_tokens > drafted[0]


@pytest.mark.parametrize("width", [80, 140])
def test_the_report_is_as_wide_as_the_terminal(
    forerun: Forerun, checkpoint: Path, draft_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    ran = forerun(*arguments(checkpoint, draft_checkpoint))
    assert ran.code == 0 and "\x1b" not in ran.out
    for words in ("plain", "speculative", "tokens/s", "speed-up", "identical: yes"):
        assert words in ran.out, words
    lines = ran.out.splitlines()
    [titles] = [line for line in lines if "tokens per pass" in line]
    [rule] = [line for line in lines if line.startswith(" plain") and "─" in line]
    assert len(titles.rstrip()) == len(rule) == width


def test_a_wrong_token_is_seen(
    forerun: Forerun, checkpoint: Path, draft_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_in(self: ArgmaxWalk, tree: TokenTree, target: NodeProbs, rng: Rng) -> Verdict:
        kept = tuple(range(1, tree.size + 1))
        return Verdict(path=kept, next_token=target.argmax(tree.size), kind=Source.BONUS if kept else Source.TARGET)

    monkeypatch.setattr(ArgmaxWalk, "verify", all_in)
    ran = forerun(*arguments(checkpoint, draft_checkpoint), "--drafter-option", "temperature=1.0", "--json")
    found = json.loads(ran.out)
    assert ran.code == 1 and found["identical"] is False and found["numeric_tie"] is False
    assert found["first_difference"] >= 0


@pytest.fixture(scope="module")
def head(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random EAGLE-3 head for the tiny target."""
    facts = TargetFacts.read(checkpoint)
    made = HeadCheckpoint.of(tiny_eagle(facts.vocab_size, seed=3))
    return write_head(made, tmp_path_factory.mktemp("head") / "it", "flat", facts)


@pytest.mark.parametrize("place", ["itself", "auto", "first_of", "within"])
def test_a_head_grows_with_its_target_wherever_it_is_named(
    forerun: Forerun, checkpoint: Path, head: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str
) -> None:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    eagle: dict[str, Any] = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    both = {"method": "first_of", "drafters": [{"method": "ngram"}, eagle]}
    configs: dict[str, dict[str, Any]] = {
        "itself": eagle,
        "auto": {"method": "auto", "model": str(head)},
        "first_of": both,
        "within": {"method": "merge", "drafters": [{"method": "suffix"}, both]},
    }
    asked = ["--scale", 0.001, "-t", 0, "-n", 12, "--repeats", 1, "--dtype", "float32", "--json"]
    ran = forerun("demo", checkpoint, *FILE, *asked, "--speculative-config", json.dumps(configs[place]))
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert found["identical"] is True and found["speculative_config"] == configs[place]
    assert "enlarged" in found["scale_note"]


def test_what_drafts_unless_told_otherwise_fits_any_target(forerun: Forerun, checkpoint: Path) -> None:
    ran = forerun("demo", checkpoint, *FILE, "-n", 12, "--repeats", 1, "--json")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert found["identical"] is True and found["right"] is None and found["prompt"] == "chunk.py"


def test_an_edit_is_asked_for_and_checked(forerun: Forerun, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit = Edit(name="rename-1", request="Rename a to b:\n\ndef f(a):\n    return a", answer="def f(b):\n    return b")
    monkeypatch.setattr(demo.demo_texts, "edits", lambda: [edit])
    asked = ("demo", checkpoint, "--prompt-name", "rename-1", "-n", 12, "--repeats", 1)
    ran = forerun(*asked)
    assert ran.code == 0, ran.err
    for words in ("Rename a to b", "def f(a):", "what it changed", "wrong: a script made this", "identical: yes"):
        assert words in ran.out
    assert ran.out.rstrip("\n").endswith("- def f(a):\n+ def f(b):\n-     return a\n+     return b")
    found = json.loads(forerun(*asked, "--json").out)
    assert found["right"] is False and found["prompt"] == "rename-1" and found["temperature"] == 0
    monkeypatch.setattr(demo.demo_texts, "edits", lambda: [replace(edit, answer=found["text"])])
    right = forerun(*asked).out
    assert "right: exactly what a script made" in right and "wrong" not in right


def test_what_an_edit_changed_is_marked_word_by_word(capsys: pytest.CaptureFixture[str]) -> None:
    before = "def f(old):\n    x = old + 1\n    return x\n"
    after = "def f(new):\n    x = new + 1\n    return x\n    # done here"
    shown = demo.mark_changes(before, after)
    lines = ["- def f(old):", "+ def f(new):", "-     x = old + 1", "+     x = new + 1", "+     # done here"]
    assert shown.plain.splitlines() == lines
    marked = [shown.plain[span.start : span.end] for span in shown.spans if "reverse" in str(span.style)]
    assert marked == ["old", "new", "old", "new"], "a line that is new stands for itself"
    assert demo.mark_changes(before, before).plain == "nothing\n"
    assert all("bold" in str(span.style) for span in demo.mark_changes(before, after, plain=True).spans)
    demo._print_changes("", "\n".join(map(str, range(30))))
    printed = capsys.readouterr().out.splitlines()
    assert printed[:2] == ["- ", "+ 0"] and printed[-1] == "... and 7 lines more"
    fewer = demo.mark_changes("a = 1\nb = [2]\n", "a = [1, 2]").plain
    assert fewer.splitlines() == ["- a = 1", "- b = [2]", "+ a = [1, 2]"]


def test_repetition_counts_runs_that_came_before() -> None:
    assert demo._repetition(list(range(40))) == 0.0
    assert demo._repetition([7] * 40) == pytest.approx(32 / 33)
    assert demo._repetition([1, 2, 3]) == 0.0


@pytest.mark.slow
def test_all_drafters_answer_in_one_table(forerun: Forerun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(leaderboard, "FILES", 1)
    monkeypatch.setattr(leaderboard, "EDITS", 1)
    monkeypatch.setattr(leaderboard, "COPYING", {"suffix": {"method": "suffix"}})
    (tmp_path / "mine").mkdir()
    shutil.copytree(shipped.resolve("demo-eagle3"), tmp_path / "mine" / "head")
    checkpoint_of(tmp_path / "mine", step=2, seconds=5.0)
    shutil.copytree(tmp_path / "mine" / "head", tmp_path / "together" / "head")
    (tmp_path / "together" / "model").mkdir()  # which this head drafts for
    for name, kind in (("masks", "pard"), ("small", "distill")):
        shutil.copytree(shipped.resolve("demo-draft"), tmp_path / name / "draft")
        (tmp_path / name / "run.json").write_text(json.dumps({"recipe": {"kind": kind}}))
    config = tmp_path / "masks" / "draft" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"pard_token": 7}))
    ran = forerun("demo", "--all", "--heads", tmp_path, "-n", 16, "--json")
    assert ran.code == 0, ran.err
    found = {line["drafter"]: line for line in json.loads(ran.out)["drafters"]}
    ours = ("suffix", "demo-draft, chain", "demo-eagle3, chain", "demo-eagle3, tree")
    assert list(found) == [*ours, "masks, chain", "masks, tree", "mine, chain", "mine, tree", "small, chain"]
    assert "together is left out: its head drafts for the target that was trained with it" in ran.err
    assert found["mine, tree"]["trained_seconds"] == pytest.approx(5.0)
    assert found["mine, tree"]["parameters"] == found["demo-eagle3, chain"]["parameters"] > 1e6
    assert found["small, chain"]["parameters"] == found["demo-draft, chain"]["parameters"] > 1e6
    for line in found.values():
        assert line["greedy_answers_unlike_plain"] == 0 and line["lossless"] is True and line["rules"]
        assert set(line["tokens_per_pass"]) == set(line["speedup"]) == set(line["drafted_nodes"]) == {"0", "1"}
    for temperature in ("0", "1"):
        chain, tree = (found[f"mine, {shape}"] for shape in ("chain", "tree"))
        assert chain["drafted_nodes"][temperature] <= 5 and 20 < tree["drafted_nodes"][temperature] <= 32
        assert found["small, chain"]["drafted_nodes"][temperature] <= 5
    assert found["mine, tree"]["tokens_per_pass"]["0"] > found["mine, chain"]["tokens_per_pass"]["0"] > 1
    monkeypatch.setenv("COLUMNS", "100")
    shown = forerun("demo", "--all", "-n", 8)
    assert shown.code == 0 and all(words in shown.out for words in ("tokens/", "nodes", "T = 1", "lossless"))
    assert "--all" in forerun("demo", "--heads", tmp_path).err


def test_a_head_that_cannot_be_enlarged_is_left_out_and_named(
    checkpoint: Path, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    monkeypatch.setattr(scale, "ENLARGED", ("medusa",))
    configs = {"mine": {"method": "eagle3", "model": str(head)}, "suffix": {"method": "suffix"}}
    board = [leaderboard.BoardLine(name=name, config=config) for name, config in configs.items()]
    kept = [entry.name for entry in demo._fitting(board, scale.ScaledModel(checkpoint, billions=0.001))]
    assert kept == ["suffix"]
    assert "mine is left out: heads of the kind eagle3 are not enlarged, only medusa" in capsys.readouterr().err


@pytest.mark.parametrize("width", [80, 100])
def test_the_table_fits_and_says_what_is_not_lossless(width: int) -> None:
    def entry(name: str, rule: str) -> leaderboard.BoardLine:
        made = leaderboard.BoardLine(name=name, config={}, parameters=123_456_789, trained_s=7200.0)
        for temperature in leaderboard.TEMPERATURES:
            counts = {"num_tokens": 45, "num_spec_steps": 10, "num_draft_tokens": 320}
            counted = SpeculationStats(**counts, steps_per_rule=Counter({rule: 10}))
            made.stats[temperature], made.tokens[temperature], made.seconds[temperature] = counted, 45, 0.5
        return made

    board = [entry("mlp_speculator, chain", "block"), entry("medusa typical, tree", "typical")]
    out = Console(file=io.StringIO(), record=True, width=width)
    out.print(leaderboard.table(entry("plain", "block"), board, width))
    text = out.export_text()
    assert max(map(len, text.splitlines())) <= width and "…" not in text
    [mlp], [typical] = ([line for line in text.splitlines() if line.startswith(name)] for name in ("mlp", "medusa"))
    assert mlp.split()[2:7] == ["123.5", "M", "7200", "s", "yes"] and " no " in typical
    nodes = ["32"] if width == 100 else []
    assert mlp.split()[7:] == [*nodes, "4.50", "1.00"] * 2
    found = {line["drafter"]: line["lossless"] for line in leaderboard.records(entry("plain", "block"), board)}
    assert found == {"mlp_speculator, chain": True, "medusa typical, tree": False}


def test_time_of_training_is_that_of_the_newest_checkpoint(tmp_path: Path) -> None:
    assert leaderboard.trained_seconds(tmp_path) is None
    checkpoint_of(tmp_path, step=2, seconds=4.0)
    checkpoint_of(tmp_path, step=3, seconds=6.0)
    assert leaderboard.trained_seconds(tmp_path) == 6.0
