"""Tokens per pass is one figure wherever it is told: the passes are counted here independently, where they are run."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forerun import LLM, SamplingParams
from forerun.bench.client import diff_counts, parse, read_counts
from forerun.cli import main
from forerun.engine import core
from forerun.types import Source, SpeculationStats
from serve.conftest import Live, counters, serving
from serve.test_logs import Kept, kept, named

ENTRIES = [
    {"turns": ["x y x y x", "y x"], "category": "turns"},
    {"text": "a b a b a b", "category": "text"},
    {"prompt": "b a b a", "category": "prompt"},
]


def test_a_measurement_says_what_the_server_counted(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "asked.jsonl").write_text("\n".join(map(json.dumps, ENTRIES)))
    drafter = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
    with serving(checkpoint, speculative=drafter, api_keys=("secret",)) as live:
        words = ["bench", "--server", live.url, "--workload", str(tmp_path / "asked.jsonl"), "--concurrency", "2"]
        assert main([*words, "--api-key", "wrong"]) == 2
        assert "401" in capsys.readouterr().err
        words += ["--api-key", "secret", "-n", "24", "-t", "0", "--warmup", "0", "--extra-body", '{"ignore_eos": true}']
        assert main([*words, "--json"]) == 0
        (found,) = json.loads(capsys.readouterr().out)["loads"]
        counted = counters(live)
    assert (found["completed"], found["failed"], found["tokens_counted_by_server"]) == (4, 0, True)
    assert found["total_output_tokens"] == 4 * 24
    assert found["spec_decode_source"].startswith("the server's")
    drafts, accepted = found["spec_decode_num_drafts"], found["spec_decode_accepted_tokens"]
    assert drafts == counted["vllm:spec_decode_num_drafts_total{}"] > 0
    assert accepted == counted["vllm:spec_decode_num_accepted_tokens_total{}"]
    parts = found["categories"].values()
    assert sum(part["spec_decode_num_drafts"] for part in parts) == drafts, "each answer tells its own"
    assert sum(part["spec_decode_accepted_tokens"] for part in parts) == accepted
    positions = found["spec_decode_per_position_acceptance_rates"]
    assert sum(positions) == pytest.approx(accepted / drafts, abs=1e-3)


__all__ = ["kept"]
PROMPT = "the cat sat on the mat. the cat sat on the"
ASKED: dict[str, Any] = {"max_tokens": 25, "temperature": 0, "ignore_eos": True}


class Passes:
    """Counts the passes that gave tokens: one over the prompt, and one in each step of the engine."""

    def __init__(self) -> None:
        self.steps = 0

    def take(self) -> int:
        counted, self.steps = 1 + self.steps, 0
        return counted


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Passes]:
    counting, step = Passes(), core.step

    def counted(*arguments: Any, **more: Any) -> Any:
        counting.steps += 1
        return step(*arguments, **more)

    monkeypatch.setattr(core, "step", counted)
    yield counting


def test_the_command_says_what_was_counted(
    checkpoint: Path, draft_checkpoint: Path, passes: Passes, capsys: pytest.CaptureFixture[str]
) -> None:
    """`ngram` drafts in some passes and not in others: where the mean acceptance length would be another figure."""
    words = ["generate", str(checkpoint), "--raw", "-p", PROMPT, "-t", "0", "-n", "25", "--drafter", "ngram"]
    words += ["--no-adaptive"]
    main([*words, "--json"])
    record, true = json.loads(capsys.readouterr().out), passes.take()
    found = record["speculation"]
    assert found["passes"] == true and 0 < found["steps"] < true - 1, "passes of both kinds"
    expected = len(record["token_ids"]) / true
    assert found["tokens_per_pass"] == pytest.approx(expected, abs=1e-4)
    assert found["mean_acceptance_length"] == pytest.approx(1 + found["accepted"] / found["steps"], abs=1e-4)
    assert found["mean_acceptance_length"] != pytest.approx(expected, abs=1e-3)
    main(words)
    line = capsys.readouterr().err
    assert passes.take() == true and re.findall(r"([\d.]+) tokens per pass", line) == [f"{expected:.2f}"]


@pytest.mark.parametrize("drafting", [True, False])
def test_answer_log_metrics_and_bench_say_what_was_counted(
    live: Live, kept: Kept, passes: Passes, drafting: bool
) -> None:
    before = parse(live.get("/metrics").text)
    body = {**ASKED, "prompt": PROMPT, "speculative": {"enabled": drafting}}
    answer = live.post("/v1/completions", body, **named(f"figures-{drafting}")).json()
    true, tokens = passes.take(), answer["usage"]["completion_tokens"]
    counts = answer["metrics"]["speculative_decoding"]
    assert counts["num_passes"] == true and counts["tokens_per_pass"] == tokens / true
    assert kept.of(f"figures-{drafting}")["tokens_per_pass"] == pytest.approx(tokens / true, abs=1e-5)
    assert (counts["num_spec_steps"] > 0) == drafting and (tokens > true) == drafting
    for figures in (diff_counts(before, parse(live.get("/metrics").text)), read_counts(answer, tokens)):
        assert figures is not None and figures.tokens_per_pass == tokens / true


def test_other_engines_passes_are_inferred() -> None:
    """vLLM counts no passes: each gave one token of its own and what it accepted."""
    counts = {"num_spec_steps": 5, "num_draft_tokens": 15, "num_accepted_draft_tokens": 7}
    figures = read_counts({"metrics": {"speculative_decoding": counts}}, 48)
    assert figures is not None and figures.tokens_per_pass == 48 / 41 and figures.acceptance_length == 1 + 7 / 5


def test_nothing_and_plain_decoding_have_one_token_per_pass() -> None:
    stats = SpeculationStats()
    assert (stats.tokens_per_pass, stats.mean_acceptance_length) == (1.0, 1.0)
    stats.begin(1)
    stats.record(tokens=1, drafted=0, depth=0, accepted=0)
    assert (stats.tokens_per_pass, stats.mean_acceptance_length) == (1.0, 1.0)


def test_an_end_within_a_draft_is_accepted_and_counted_once(checkpoint: Path) -> None:
    """The client's prediction holds the end mark: it is drafted, accepted, and nothing behind it is."""
    llm = LLM(checkpoint, speculative_config={"method": "prediction", "adaptive": False}, dtype="float32")
    plain = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=12), speculative=False)[0].outputs[0]
    ends = plain.token_ids[8]
    params = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[ends], ignore_eos=True)
    first = plain.token_ids.index(ends)
    [output] = llm.generate([{"prompt": PROMPT, "prediction": plain.token_ids}], params, trace=True)
    answer = output.outputs[0]
    assert answer.token_ids == plain.token_ids[: first + 1] and answer.tokens[-1].source is Source.DRAFT
    for step in answer.trace:
        kept = [node.token for node in step.nodes if node.accepted]
        emitted = [token.id for token in answer.tokens if token.step == step.step and token.source is Source.DRAFT]
        assert kept == emitted, "what the trace calls accepted is what came out of the draft"
    assert answer.speculation.num_tokens == len(answer.token_ids)
    assert answer.speculation.num_accepted_draft_tokens == sum(one.source is Source.DRAFT for one in answer.tokens)
