"""Tokens per pass is one figure wherever it is told; what a prediction's usage counts, and who drafts for it."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forerun import LLM, SamplingParams
from forerun.bench.client import diff_counts, parse, read_counts
from forerun.cli import main
from forerun.control.config import SpeculativeConfig
from forerun.engine import core
from forerun.serve.protocol.errors import ApiError
from forerun.serve.protocol.requests import Speculation
from forerun.types import Source, SpeculationStats
from serve.conftest import Live, counters, serving
from serve.test_logs import Kept, kept, named

__all__ = ["kept"]

ENTRIES = [
    {"turns": ["x y x y x", "y x"], "category": "turns"},
    {"text": "a b a b a b", "category": "text"},
    {"prompt": "b a b a", "category": "prompt"},
]


def test_a_benchmark_says_what_was_counted(
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
def test_answer_log_metrics_bench_say_what_was_counted(live: Live, kept: Kept, passes: Passes, drafting: bool) -> None:
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


TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
MEMBERS = {"drafters": ["ngram", {"method": "prediction"}]}


@pytest.fixture(scope="module")
def choosing(checkpoint: Path) -> Iterator[Live]:
    """A server whose own drafter has `prediction` among its members."""
    with serving(checkpoint, speculative={"method": "auto"}) as running:
        yield running


@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize("speculative", [None, {}, {"enabled": True}, {"drafter": "prediction"}, {"rule": "block"}])
def test_the_prediction_is_copied_and_counted(live: Live, path: str, speculative: dict[str, Any] | None) -> None:
    asked = {"prompt": "the cat"} if path == TEXT else {"messages": [{"role": "user", "content": "the cat"}]}
    asked |= {"temperature": 1, "seed": 1, "max_tokens": 40, "ignore_eos": True, "return_speculation_trace": True}
    answer = live.post(path, {**asked, "prediction": {"content": "the cat sat"}, "speculative": speculative}).json()
    [trace], details = answer["speculation_trace"], answer["usage"]["completion_tokens_details"]
    assert {step["drafter"] for step in trace["steps"]} <= {None, "prediction"}
    counts = answer["metrics"]["speculative_decoding"]
    assert details["accepted_prediction_tokens"] == counts["num_accepted_draft_tokens"]
    both = details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"]
    assert both == counts["num_draft_tokens"]


def test_switched_off_nothing_is_counted(live: Live) -> None:
    asked = {"prompt": "the cat", "prediction": {"content": "the cat"}, "speculative": {"enabled": False}}
    answer = live.post(TEXT, asked).json()
    details = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    assert answer["usage"]["completion_tokens_details"] == details


@pytest.mark.parametrize("name", ["ngram", "draft_model"])
def test_a_drafter_that_cannot_use_it_is_refused(live: Live, name: str) -> None:
    asked = {"prompt": "the cat", "prediction": {"content": "the cat"}, "speculative": {"drafter": name}}
    answer = live.post(TEXT, asked)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "speculative.drafter"
    assert "cannot use a prediction; leave out" in error["message"]


def test_who_chooses_stays_in_charge_and_nobody_counts(choosing: Live) -> None:
    asked = {"prompt": "the cat", "prediction": {"content": "the cat"}, "max_tokens": 8}
    for speculative in (None, {"drafter": "auto"}):
        usage = choosing.post(TEXT, {**asked, "speculative": speculative}).json()["usage"]
        assert "completion_tokens_details" not in usage


@pytest.mark.parametrize(
    ("own", "request_", "method"),
    [
        (None, None, "prediction"),
        ({"method": "ngram"}, None, "prediction"),
        ({"method": "prediction", "text": "so"}, None, "prediction"),
        ({"method": "first_of", **MEMBERS}, None, "first_of"),
        ({"method": "merge", "drafters": ["suffix", {"method": "first_of", **MEMBERS}]}, {}, "merge"),
        ({"method": "merge", "drafters": ["suffix", "ngram"]}, {}, "prediction"),
        ({"method": "auto"}, None, "auto"),
        ({"method": "auto"}, {"drafter": "prediction"}, "prediction"),
        ({"method": "merge", "drafters": ["suffix", "ngram"]}, {"drafter": "merge"}, None),
    ],
)
def test_who_drafts(
    live: Live, monkeypatch: pytest.MonkeyPatch, own: Any, request_: dict[str, Any] | None, method: str | None
) -> None:
    session = live.session
    monkeypatch.setattr(session.engine.llm, "speculative", SpeculativeConfig.parse(own))
    request = None if request_ is None else Speculation(**request_)
    if method is None:
        with pytest.raises(ApiError, match="cannot use a prediction"):
            session.speculation(request, predicted=True)
        return
    found: Any = session.speculation(request, predicted=True)
    parsed = SpeculativeConfig.parse(found)
    assert parsed is not None and parsed.method == method
    if own is not None and own["method"] == method:
        assert parsed == SpeculativeConfig.parse(own)


def test_the_process_is_measured_and_no_counter_has_a_gauge_beside_it(live: Live) -> None:
    text = live.get("/metrics").text
    assert "\nprocess_cpu_seconds_total " in text and "\nprocess_resident_memory_bytes " in text
    assert "_created" not in text
