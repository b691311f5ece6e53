"""``forerun plan``, ``calibrate`` and ``tune``: figures, JSON, refusals, and no torch on paper."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from cli.conftest import Forerun, Ran
from engine.conftest import byte_llama, tiny_tokenizer
from forerun import LLM
from forerun.control import measuring
from forerun.control.config import SpeculativeConfig
from forerun.control.costs import DraftCost
from forerun.drafters.kinds import kind_named
from forerun.drafters.self_drafting.tuning import Probe
from forerun.errors import ArgumentError
from forerun.heads.files import HeadCheckpoint, TargetFacts, write_head
from forerun.plan import measured as trial
from forerun.plan.measured import EncodedPrompts
from forerun.plan.prompts import read_prompts
from selection import slow

PROMPTS = ["the cat sat on the mat and the cat sat on the", "the dog sat on the log and the dog"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def instant(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Passes take made-up times; the list is who was timed."""
    timed: list[tuple[int, int, int]] = []

    def run(_target: object, _rows: object, point: tuple[int, int, int]) -> float:
        timed.append(point)
        return 0.010 + 0.0005 * point[1] * point[2]

    monkeypatch.setattr(measuring, "_time", run)
    return timed


def record(ran: Ran) -> dict[str, Any]:
    assert ran.code == 0, ran.err
    found: dict[str, Any] = json.loads(ran.out)
    return found


@pytest.fixture
def measured_on(checkpoint: Path, tmp_path: Path, instant: list[Any]) -> Callable[[int], tuple[Any, ...]]:
    """The words that measure on `PROMPTS`, with answers of so many tokens."""
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    common = ("plan", checkpoint, "--prompts", tmp_path / "prompts.txt", "-t", 0, "--json")
    return lambda tokens: (*common, "--max-tokens", tokens)


def test_tokens_per_pass_without_a_model(forerun: Forerun) -> None:
    found = record(forerun("plan", "--alpha", 0.7, "-k", 5, "--json"))
    assert found["expected_tokens_per_pass"] == pytest.approx(2.941, abs=1e-3) and found["k"] == 5
    assert found["alpha"] == pytest.approx(0.7) and found["assumptions"]


def test_there_is_no_verdict_without_costs(forerun: Forerun) -> None:
    """Neither a speed-up, if nothing is known; a bound, which can refute and not promise, if one of both is."""
    nothing = record(forerun("plan", "--alpha", 0.7, "-k", 5, "--json"))
    assert [nothing[key] for key in ("worth_it", "speedup", "best_k", "best_speedup", "break_even_batch")] == [None] * 5
    said = forerun("plan", "--alpha", 0.7, "-k", 5).out
    assert "no verdict: nothing says what drafting and verifying cost" in said and " x" not in said.replace("  x", "")
    device = ("--params", "8e9", "--device", "h100")
    for one in (("--draft-cost", 0.1), device):
        bound = record(forerun("plan", "--alpha", 0.7, *one, "--json"))
        assert bound["worth_it"] is None and bound["speedup"] > 1 and "assumed free: at most" in bound["verdict"]
    both = record(forerun("plan", "--alpha", 0.7, "--draft-cost", 0.1, *device, "--json"))
    assert both["worth_it"] is True and both["method"] is None, "acceptance alone names no drafter"
    assert record(forerun("plan", "--alpha", 0.1, "--draft-cost", 0.9, "--json"))["worth_it"] is False


def test_a_roofline(forerun: Forerun) -> None:
    arguments = ("plan", "--alpha", 0.8, "--params", "70e9", "--device", "h100", "--tp", 8, "--draft-cost", 0.05)
    one, many = (record(forerun(*arguments, "--batch", batch, "--json")) for batch in (1, 256))
    assert (one["best_k"], one["best_speedup"]) == (8, pytest.approx(3.09, abs=0.01)), "far below the balance v is 1"
    assert many["best_speedup"] < 1.1 and 1 < one["break_even_batch"] < 256
    assert one["roofline"]["balance_tokens_at_peak"] == pytest.approx(295, abs=1)
    assert one["roofline"]["bound_by"] == "memory" and many["roofline"]["bound_by"] == "arithmetic"
    assert one["roofline"]["weights_gb"] == 140 and one["roofline"]["fits"]
    assert forerun(*arguments).out.count("\n") > 15


def test_positions_and_ranks(forerun: Forerun) -> None:
    rates = record(forerun("plan", "--acceptance", "0.9,0.5,0.8", "-k", 3, "--json"))
    assert rates["expected_tokens_per_pass"] == pytest.approx(1 + 0.9 + 0.45 + 0.36)
    tree = record(
        forerun("plan", "--rank-acceptance", "0.6,0.2;0.5,0.3", "--tree-nodes", 4, "--draft-cost", 0.01, "--json")
    )["tree"]
    assert len(tree["parents"]) == 4 and tree["tokens"] == pytest.approx(1 + 0.6 + 0.2 + 0.3 + 0.18)


def test_text_and_temperature_are_assumptions_with_sources(forerun: Forerun) -> None:
    cold = record(forerun("plan", "--text", "chat", "--json"))
    hot = record(forerun("plan", "--text", "chat", "-t", 1, "--json"))
    assert cold["alpha"] > hot["alpha"] and any("MT-Bench" in note for note in cold["assumptions"])
    assert "MT-Bench" in forerun("plan", "--text", "chat").out


def test_a_measured_drafter(forerun: Forerun, measured_on: Any, draft_checkpoint: Path, instant: list[Any]) -> None:
    drafter = ("--drafter", "draft_model", "--drafter-model", draft_checkpoint, "-k", 3)
    found = record(forerun(*measured_on(16), *drafter))
    measured = found["measured"]
    assert found["k"] == 3 and len(found["acceptance_per_position"]) == 3 and measured["drafter"] == "draft_model"
    assert found["expected_tokens_per_pass"] == pytest.approx(measured["tokens_per_pass"])
    assert 1 < measured["tokens_per_pass"] <= 4 and measured["level_ms"] > 0
    assert measured["drafting_steps"] > 0.8, "whatever that costs: what is measured drafts at every step"
    count = len(instant)
    again = record(forerun(*measured_on(16), "--drafter", "ngram"))
    assert len(instant) == count > 0, "passes are measured once"
    assert again["measured"]["drafter"] == "ngram" and again["tree"] is None


def test_every_command_asks_a_prompt_in_the_same_way(forerun: Forerun, checkpoint: Path, tmp_path: Path) -> None:
    """As a user's message where there is a chat template, unless --raw; what a message costs shows in the context."""
    (tmp_path / "a.jsonl").write_text('{"prompt": "the cat sat on the mat"}\n')
    (tmp_path / "b.jsonl").write_text('{"messages": [{"role": "user", "content": "the cat sat on the mat"}]}\n')
    llm = LLM(checkpoint)
    how: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4, "limit": 1}
    [[text], [chat]] = (read_prompts(tmp_path / name) for name in ("a.jsonl", "b.jsonl"))
    message, raw = (trial.EncodedPrompts.of(llm, [text], raw=raw, **how) for raw in (False, True))
    assert message.prompts == trial.EncodedPrompts.of(llm, [chat], **how).prompts
    assert message.prompts == [llm.chat_prompt(chat)["prompt_token_ids"]]
    assert raw.prompts == [llm.encode(text)] and (message.asked, raw.asked) == (
        "the prompt is a user's message in the chat template (--raw: as it stands)",
        "the prompt is continued as it stands",
    )
    common = ("plan", checkpoint, "--prompts", tmp_path / "a.jsonl", "-t", 0, "--json", "--drafter", "ngram")
    assert message.asked in record(forerun(*common, "--max-tokens", 8))["assumptions"]
    assert raw.asked in record(forerun(*common, "--max-tokens", 8, "--raw"))["assumptions"]
    ended = EncodedPrompts(
        prompts=raw.prompts, params=raw.params, stop_ids=frozenset(range(llm.target.vocab_size)), asked=raw.asked
    )
    config = SpeculativeConfig.parse("ngram")
    assert config is not None
    with pytest.raises(ArgumentError, match=f"as they are asked .{raw.asked}"):
        trial.measure_drafter(llm, config, ended, lambda _: None)


def test_the_best_tree_for_a_drafter_as_measured(
    forerun: Forerun, measured_on: Any, draft_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From how often the children of each rank were accepted, for a draft model whose levels take a tenth of a pass;
    what is printed can be drafted."""
    monkeypatch.setattr(trial, "fit", lambda *_, **__: DraftCost(fixed_ms=0.0, level_ms=1.0))
    drafter = (*measured_on(48), "--drafter", "draft_model", "--drafter-model", draft_checkpoint, "--drafter-option")
    found = record(forerun(*drafter, "shape=[3,2]", "--tree-nodes", 5))
    ranks = found["measured"]["rank_acceptance"]
    assert [len(line) for line in ranks] == [3, 2]
    first = found["acceptance_per_position"][0]
    assert first - 0.1 < sum(ranks[0]) < first + 1e-6, "a rank that did better than the one before counts as that"
    assert all(line == sorted(line, reverse=True) for line in ranks) and ranks[0][1] > 0
    parents = found["tree"]["parents"]
    assert 1 <= len(parents) <= 5 and found["tree"]["depth"] <= 2
    again = record(forerun(*drafter, f"tree={parents}"))
    assert again["measured"]["drafted_nodes"] == pytest.approx(len(parents), abs=0.5)


@pytest.mark.parametrize(("kind", "options"), [("medusa", {"num_heads": 4}), *slow(("kangaroo", {}))], ids=str)
def test_the_best_tree_for_a_head_as_measured(
    kind: str, options: dict[str, Any], forerun: Forerun, measured_on: Any, checkpoint: Path, tmp_path: Path
) -> None:
    """Of a fresh head the ranks of Medusa's product tree are measured; the tree that is planned from them, for a head
    that costs next to nothing, and the published one are drafted."""
    lm = AutoModelForCausalLM.from_pretrained(checkpoint)
    made = kind_named(kind).head
    head = made.initial(lm, made.Config.for_target(kind, lm, options=options))
    write_head(HeadCheckpoint.of(head), tmp_path / "head", kind, TargetFacts.of(lm.config, checkpoint))
    whole = ("--drafter-option", "exit_below=0") if kind == "kangaroo" else ()
    drafter = (*measured_on(32), "--drafter", kind, "--drafter-model", tmp_path / "head", *whole, "--drafter-option")
    found = record(forerun(*drafter, "shape=[3,2]", "--tree-nodes", 5))
    ranks = found["measured"]["rank_acceptance"]
    assert len(ranks[0]) == 3 and ranks[0] == sorted(ranks[0], reverse=True)
    accuracies = ";".join(",".join(f"{max(rate, 0.01):.3f}" for rate in line) for line in ranks)
    paper = ("plan", "--rank-acceptance", accuracies, "--tree-nodes", 5, "--draft-cost", 0.0001, "--json")
    parents = record(forerun(*paper))["tree"]["parents"]
    assert 1 <= len(parents) <= 5
    planned = record(forerun(*drafter, f"tree={parents}"))
    assert planned["measured"]["drafted_nodes"] == pytest.approx(len(parents), abs=0.5)
    published = record(forerun(*drafter, "tree=mc_sim_7b_63"))
    assert 50 < published["measured"]["drafted_nodes"] <= 63, "fewer at the end of an answer"


def test_candidates_are_ranked_and_those_that_cannot_draft_are_named(
    forerun: Forerun, measured_on: Any, checkpoint: Path, draft_checkpoint: Path, tmp_path: Path
) -> None:
    missing, common = tmp_path / "missing", (*measured_on(12), "-k", 2, "--choose-draft")
    found = record(forerun(*common, draft_checkpoint, checkpoint, missing))
    first = {entry["model"]: entry["acceptance_per_depth"][0] for entry in found["ranking"]}
    assert set(first) == {str(draft_checkpoint), str(checkpoint)}
    assert first[str(checkpoint)] > first[str(draft_checkpoint)]
    gains = [entry["best_speedup"] for entry in found["ranking"]]
    assert gains == sorted(gains, reverse=True) and any(str(missing) in note for note in found["assumptions"])
    ran = forerun(*common, missing)
    assert ran.code == 2 and "none of the candidates" in ran.err


def test_given_acceptance_on_measured_passes(forerun: Forerun, checkpoint: Path, instant: list[Any]) -> None:
    found = record(forerun("plan", checkpoint, "--alpha", 0.8, "--draft-cost", 0.1, "--json"))
    line = found["by_k"][3]
    assert line["v"] == pytest.approx((10 + 0.5 * 4) / 10.5)
    assert line["speedup"] == pytest.approx(2.952 / (0.3 + line["v"]))


@pytest.mark.parametrize("given", [("--alpha", 0.8), ("--acceptance", "0.8,0.7"), ("--rank-acceptance", "0.8,0.1")])
def test_what_changes_nothing_is_noted(forerun: Forerun, given: tuple[Any, ...]) -> None:
    notes = " ".join(record(forerun("plan", *given, "-t", 1, "--context", 99, "--json"))["assumptions"])
    assert "at this temperature" in notes and "context change nothing" in notes


def test_calibrate(
    forerun: Forerun, checkpoint: Path, draft_checkpoint: Path, tmp_path: Path, instant: list[Any]
) -> None:
    arguments = ("calibrate", checkpoint, "--rows", 1, 2, "--nodes", 1, 2, 8, "--contexts", 16)
    drafter = ("--drafter", "draft_model", "--drafter-model", draft_checkpoint, "-k", 2)
    found = record(forerun(*arguments, *drafter, "--json"))
    assert (found["rows"], found["nodes"], found["contexts"]) == ([1, 2], [1, 2, 8], [16])
    assert found["v"][1]["v"][2] == pytest.approx((10 + 8) / 11) and Path(found["file"]).is_file()
    assert [key.split(":")[0] for key in found["drafts"]] == ["draft_model"]
    assert found["runs_as"] == "float32 on CPU", "as certify and demo say it, which name a file's quantisation so"
    count = len(instant)
    ran = forerun(*arguments, *drafter)
    assert len(instant) == count and "v(n)" in ran.out and "draft_model" in ran.out and found["file"] in ran.err
    forerun(*arguments, "--force", "--json")
    assert len(instant) > count


def test_plots(forerun: Forerun, checkpoint: Path, tmp_path: Path, instant: list[Any]) -> None:
    pytest.importorskip("matplotlib")
    forerun("plan", "--alpha", 0.7, "--plot", tmp_path / "plan.png")
    forerun("calibrate", checkpoint, "--nodes", 1, 2, 4, "--contexts", 16, "--plot", tmp_path / "deep" / "v.svg")
    assert (tmp_path / "plan.png").stat().st_size > 1000 and "<svg" in (tmp_path / "deep" / "v.svg").read_text()


@pytest.mark.parametrize(
    ("costs", "shown", "hidden"),
    [
        ((), ["tokens per pass; costs are not known"], ["speed-up", "best: K", "batch, each"]),
        (("--draft-cost", 0.05), ["speed-up over plain decoding", "best: K"], ["batch, each"]),
        (("--draft-cost", 0.05, "--params", "8e9", "--device", "h100"), ["best: K", "batch, each with"], []),
    ],
)
def test_a_plot_shows_no_gain_that_nobody_knows(
    forerun: Forerun, tmp_path: Path, costs: tuple[Any, ...], shown: list[str], hidden: list[str]
) -> None:
    pytest.importorskip("matplotlib").rcParams["svg.fonttype"] = "none"  # Text stays text
    assert forerun("plan", "--alpha", 0.7, *costs, "--plot", tmp_path / "plan.svg").code == 0
    drawn = (tmp_path / "plan.svg").read_text()
    assert [words for words in shown if words not in drawn] == [words for words in hidden if words in drawn] == []


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


def test_another_model_refuses_it(forerun: Callable[..., Any], checkpoint: Path, prompts: Path, tmp_path: Path) -> None:
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


def test_its_time_ends_the_search(forerun: Callable[..., Any], checkpoint: Path, prompts: Path, tmp_path: Path) -> None:
    output = tmp_path / "skip.json"
    ran = forerun(
        "tune", "skip-layers", checkpoint, "--prompts", prompts, "--output", output, "--budget-s", 1e-9, *SMALL
    )
    assert ran.code == 0 and len(json.loads(output.read_text())["trace"]) == 1


def test_a_directory_is_no_output(forerun: Callable[..., Any], tmp_path: Path) -> None:
    ran = forerun("tune", "skip-layers", "demo", "--output", tmp_path)
    assert ran.code == 2 and "name a file in it" in ran.err
