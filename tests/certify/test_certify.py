"""The whole report on a tiny model, and that planted bugs make it fail."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from forerun import LLM
from forerun.certify import CertifyPlan, Check, Report, checks, reference
from forerun.certify.checks import certify
from forerun.certify.enumeration import Drawing, World, check_rule
from forerun.cli import main
from forerun.control.config import SpeculativeConfig
from forerun.core.probs import NodeProbs
from forerun.core.rng import Rng
from forerun.core.rules import ArgmaxWalk
from forerun.core.tree import TokenTree
from forerun.errors import ArgumentError
from forerun.model import llama_context
from forerun.types import Source, Verdict
from model.ggufs import needs_llama_cpp, tiny, write_tiny

TEXTS = ["the cat sat on the mat and the cat sat on the mat", "the dog sat on the log and the dog sat on"]
LONGER = "each token of longer completions"
KINDS = ["no seed", "seeded", "top-k 8", "top-p 0.7", "min-p 0.1", "penalties", "logit bias", "grammar", LONGER]
SMALL = CertifyPlan(prompts=2, prompt_tokens=40, max_tokens=24, detect=0.8, cells=6)
GREEDY = replace(SMALL, temperatures=(0.0,))


@pytest.fixture(autouse=True)
def few_cases_and_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """The full enumeration has tests of its own (tests/core); here one case stands for it."""

    def one(names: list[str]) -> list[object]:
        world = World.GREEDY_TARGET if names == ["argmax_walk"] else World.RANDOM
        cases = (check_rule(checks.rule_named(names[0]), "chain of 1", drawing, world) for drawing in Drawing)
        return [case for case in cases if case is not None][:1]

    monkeypatch.setattr(checks, "check_rules", one)
    monkeypatch.setattr(checks, "_TRIED", 8)


@pytest.fixture
def one_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampled answers are asked for in one way, where a test is about something else."""
    whole = checks.settings_for
    monkeypatch.setattr(checks, "settings_for", lambda run, temperature: whole(run, temperature)[:1])


def drafting(checkpoint: Path, draft: Path, **options: object) -> LLM:
    config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3, **options}
    return LLM(checkpoint, speculative_config=config, max_num_seqs=32)


def test_drafts_are_free_for_a_drafter_that_the_first_request_builds(checkpoint: Path) -> None:
    """A policy with costs may draft nothing in completions as short as these, and nothing would be tested."""
    pool = LLM(checkpoint, max_num_seqs=1).engine.drafting
    with pool.free_of_charge():
        key = pool.ensure(SpeculativeConfig.parse("ngram"))
        free = pool._active[key].policy
        assert not free.measure
    assert pool._active[key].policy is not free and pool._active[key].policy.measure


def test_what_is_right_is_certified(checkpoint: Path, draft_checkpoint: Path) -> None:
    report = certify(drafting(checkpoint, draft_checkpoint), TEXTS, SMALL)
    assert report.passed, report.checks
    names = [check.name for check in report.checks]
    assert names[0].startswith("rule ") and {"greedy equality", "log-probabilities"} <= set(names)
    sampled = [check for check in report.checks if check.name.startswith("sampled distribution")]
    assert [check.name.rpartition(", ")[2] for check in sampled] == KINDS
    assert all(check.figures["depth"] == 3 for check in sampled)
    keys = ("unseeded", "seeded", "top_k", "top_p", "min_p", "penalties", "logit_bias", "grammar", "tokens")
    assert [check.id for check in sampled] == [f"sampled_{key}_t0.7" for key in keys]
    assert all("completions detect" in check.summary for check in sampled[:-1])
    ids = [check.id for check in report.checks]
    assert len(set(ids)) == len(ids) and {"greedy", "logprobs"} < {*ids}
    assert json.loads(json.dumps(report.record()))["passed"] is True


@pytest.mark.usefixtures("one_setting")
def test_a_tree_of_siblings_without_replacement_is_certified(checkpoint: Path, draft_checkpoint: Path) -> None:
    report = certify(drafting(checkpoint, draft_checkpoint, shape=(2, 1), draw="without_replacement"), TEXTS, SMALL)
    assert report.passed, report.checks
    sampled = [check for check in report.checks if check.name.startswith("sampled distribution")]
    assert sampled and all(check.figures["depth"] == 2 for check in sampled)


@pytest.mark.usefixtures("one_setting")
def test_same_seed_same_text_for_deterministic_drafts(checkpoint: Path) -> None:
    llm = LLM(checkpoint, speculative_config={"method": "ngram"}, max_num_seqs=32)
    report = certify(llm, TEXTS, SMALL)
    check = next(check for check in report.checks if check.name.startswith("same seed"))
    assert check.passed and check.figures["equal"] == 2


@pytest.mark.usefixtures("one_setting")
def test_auto_drafts_where_it_is_certified(checkpoint: Path) -> None:
    """Its policy may rightly draft nothing in five tokens; then nothing would be proved."""
    llm = LLM(checkpoint, speculative_config={"method": "auto"}, max_num_seqs=32)
    [active] = llm.engine.drafting._active.values()
    policy = active.policy
    report = certify(llm, TEXTS, SMALL)
    assert report.passed, report.checks
    sampled = [check for check in report.checks if check.name.startswith("sampled distribution")]
    assert all(check.figures["drafted"] > 0 for check in sampled)
    for what in ("no seed", LONGER):
        assert any(check.name.endswith(f"{what}, drafted by early_exit, which samples") for check in sampled)
    assert active.policy is policy


@pytest.mark.usefixtures("one_setting")
def test_another_drafts_where_there_is_nothing_to_copy(checkpoint: Path) -> None:
    config = {"method": "ngram", "prompt_lookup_min": 20, "prompt_lookup_max": 20}
    llm = LLM(checkpoint, speculative_config=config, max_num_seqs=32)
    reference_of = reference.Reference.of(llm)
    run = checks.Run(llm=llm, reference=reference_of, prompts=[list(range(60, 80))], plan=SMALL)
    found = list(checks._distribution_checks(run))
    assert all(check.passed and check.name.endswith("drafted by early_exit, which samples") for check in found), found
    assert found and "block" in run.rules


@needs_llama_cpp
@pytest.mark.usefixtures("one_setting")
@pytest.mark.parametrize("faulty", [False, True])
def test_a_gguf_file_is_compared_with_llama_cpp(tmp_path: Path, faulty: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    file = write_tiny(tmp_path / "tiny.gguf", model=tiny(initializer_range=0.4))
    llm = LLM(file, speculative_config={"method": "recycling"}, max_num_seqs=8, max_model_len=80, backend="llama.cpp")
    if faulty:
        run = llama_context.Context.run
        monkeypatch.setattr(llama_context.Context, "run", lambda self, batch: run(self, batch).roll(1, 0))
    report = certify(llm, TEXTS, GREEDY if faulty else SMALL)
    found = {check.name: check for check in report.checks}
    assert report.passed != faulty, report.checks
    assert found["greedy equality"].passed != faulty and "llama.cpp's own" in found["greedy equality"].summary
    assert report.runs_as == "F32 on llama.cpp, CPU"


@pytest.mark.usefixtures("one_setting")
def test_a_wrong_token_is_no_tie(checkpoint: Path, draft_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def all_in(self: ArgmaxWalk, tree: TokenTree, target: NodeProbs, rng: Rng) -> Verdict:
        kept = tuple(range(1, tree.size + 1))
        return Verdict(path=kept, next_token=target.argmax(tree.size), kind=Source.BONUS if kept else Source.TARGET)

    monkeypatch.setattr(ArgmaxWalk, "verify", all_in)
    report = certify(drafting(checkpoint, draft_checkpoint, temperature=3.0), TEXTS, GREEDY)
    check = next(check for check in report.checks if check.name == "greedy equality")
    assert not report.passed and not check.passed and check.figures["bugs"] > 0
    plain, drafted = (check.figures["differences"][0][name] for name in ("plain", "speculative"))
    tokenizer = drafting(checkpoint, draft_checkpoint).tokenizer
    assert f": {tokenizer.decode([plain])!r} or {tokenizer.decode([drafted])!r}, gap" in check.summary
    assert "NOT a tie" in check.summary and check.figures["differences"][0]["position"] >= 1


@pytest.mark.usefixtures("one_setting")
def test_a_lossy_rule_is_not_certified(checkpoint: Path) -> None:
    config = {"method": "ngram", "rule": "typical"}
    report = certify(LLM(checkpoint, speculative_config=config, max_num_seqs=32), TEXTS, SMALL)
    assert not report.passed and any("not lossless" in check.summary for check in report.checks)


def test_nothing_to_certify(checkpoint: Path) -> None:
    with pytest.raises(ArgumentError, match="without a drafter"):
        certify(LLM(checkpoint), TEXTS, SMALL)
    with pytest.raises(ArgumentError, match="prompt"):
        certify(LLM(checkpoint, speculative_config={"method": "ngram"}), [], SMALL)


@pytest.mark.parametrize(
    ("one", "other", "expected"), [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [4], 0)]
)
def test_first_difference(one: list[int], other: list[int], expected: int | None) -> None:
    assert reference.first_difference(one, other) == expected


def test_a_tie_is_measured_and_only_low_precision_is_excused(checkpoint: Path) -> None:
    for dtype, forgiving in (("float32", False), ("bfloat16", True)):
        llm = LLM(checkpoint, dtype=dtype, max_num_seqs=1)
        distribution = torch.full((llm.target.vocab_size,), -10.0)
        distribution[5], distribution[9], distribution[2] = 1.0, 0.9, 0.0

        llm.target.model.lm_head.forward = lambda hidden, distribution=distribution: distribution.expand(
            *hidden.shape[:-1], -1
        ).clone()
        near = reference.difference(llm, [1, 2, 3], [5], [9])
        far = reference.difference(llm, [1, 2, 3], [5], [2])
        assert near is not None and near.gap == pytest.approx(0.1, abs=0.01) and near.tie is forgiving
        assert far is not None and far.gap == pytest.approx(1.0, abs=0.01) and not far.tie


def test_prompts_are_read_as_plan_and_bench_read_them(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They were lines of text, whatever the file's form."""
    talk = [("system", "Be brief."), ("user", "the cat"), ("assistant", "sat")]
    entries = [{"prompt": "one"}, {"messages": [{"role": role, "content": words} for role, words in talk]}]
    seen = list[str]()

    def examine(_: LLM, texts: Sequence[str], *__: object, **___: object) -> NoReturn:
        seen.extend(texts)
        raise ArgumentError("enough")

    monkeypatch.setattr("forerun.certify.checks.certify", examine)
    words = ["certify", str(checkpoint), "--drafter", "ngram", "--prompt-file", str(tmp_path / "prompts.jsonl")]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, entries)))
    assert main(words) == 2 and seen == ["one", "Be brief.\n\nthe cat"]
    (tmp_path / "prompts.jsonl").write_text('{"token_ids": [3], "prompt_token_ids": [1], "vocabulary": "x"}')
    assert main(words) == 2 and "certify reads texts" in capsys.readouterr().err


@pytest.mark.usefixtures("one_setting")
def test_the_command(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(TEXTS))
    common = ["certify", str(checkpoint), "--drafter", "ngram", "--prompt-file", str(prompts)]
    sizes = ["--max-tokens", "24", "--detect", "0.8", "--temperature", "0", "--temperature", "0.7"]
    assert main([*common, *sizes, "--json"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    told = printed.err.splitlines()
    stages = [line.partition(":")[0] for line in told if line.startswith("stage")]
    assert stages == [f"stage {number} of 4" for number in range(1, 5)]
    assert sum(line.startswith("  pass  ") for line in told) == len(found["checks"])
    assert any("at the pace of the first, about" in line for line in told)
    assert found["dtype"] == "float32"
    assert found["passed"] is True and all({"id", "name", "passed"} <= set(check) for check in found["checks"])
    assert main([*common, *sizes, "--quick", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["quick"] and not found["quick"]
    quick = report["checks"]
    sampled = [check for check in quick if check["name"].startswith("sampled distribution")]
    assert len(sampled) == 2 and {check["power"] for check in sampled} == {0.99}
    assert main([*common, *sizes, "--quick"]) == 0
    apart = max(check["detects_total_variation"] for check in sampled)
    assert f"quick look passed: ngram on {checkpoint}, float32" in (said := capsys.readouterr().out.replace("\n", " "))
    assert f"2 greedy completions and would have seen sampled text at a total variation of {apart:.2g} or more" in said
    assert main([*common, *sizes, "--rule", "typical", "--quick"]) == 1
    assert "not certified" in capsys.readouterr().out


@pytest.mark.parametrize(("asked", "slots"), [((), 192 + 24 + 1), (("--max-model-len", "200"), 200)])
def test_rows_are_as_long_as_prompts_and_answers(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, asked: tuple[str, ...], slots: int
) -> None:
    """32 rows of the whole context are gigabytes that nobody uses."""
    loaded = []

    def load(*_: object, max_model_len: int, **__: object) -> None:
        loaded.append(max_model_len)
        raise ArgumentError("that is enough")

    monkeypatch.setattr("forerun.LLM", load)
    main(["certify", str(checkpoint), "--drafter", "ngram", "--max-tokens", "24", *asked])
    assert loaded == [slots]


def test_no_check_is_no_proof() -> None:
    report = Report(model="m", drafter="ngram", dtype="float32", device="cpu", runs_as="", checks=[])
    assert not report.passed and report.record()["passed"] is False
    assert replace(report, checks=[Check(id="one", name="one", passed=True, summary="")]).passed
    assert not replace(report, checks=[Check(id="one", name="one", passed=False, summary="")]).passed
