"""`forerun bench`: what is asked, when, what is counted, what is said of it; against servers that answer by script."""

import asyncio
import json
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from bench.scripted import Script, said, scripted
from forerun.bench.client import (
    BenchAnswer,
    RequestOptions,
    Server,
    SpeculationCounts,
    diff_counts,
    parse,
    read_counts,
    sum_counts,
)
from forerun.bench.load import BenchLoad, LoadResult, find_worse, measure, parse_objectives, summarise
from forerun.bench.workloads import Task, draw_tasks, read_workload
from forerun.cli import main
from forerun.endpoints import ServerError
from forerun.errors import ArgumentError, DataError


def user(text: str) -> tuple[dict[str, str], ...]:
    """A question."""
    return ({"role": "user", "content": text},)


TASKS = [Task(id=str(number), category="ab"[number % 2], questions=(user(f"say {number}"),)) for number in range(6)]


def run(url: str, tasks: Sequence[Task], load: BenchLoad, **asking: Any) -> LoadResult:
    async def measured() -> LoadResult:
        async with Server(url) as server:
            return await measure(server, tasks, load, RequestOptions(max_tokens=8, **asking))

    return asyncio.run(measured())


def bench(*words: object) -> int:
    return main(["bench", *map(str, words)])


def answer(ttft: float, seconds: float, tokens: int, **more: Any) -> BenchAnswer:
    given = {"task": "t", "category": "c", "sent_s": 0.0, "gaps_s": (0.5,), "prompt_tokens": 10, **more}
    return BenchAnswer(ttft_s=ttft, seconds=seconds, tokens=tokens, **given)


def brief(**more: Any) -> Script:
    """A server that says little."""
    return Script(lambda body: said("a", tokens=2), **more)


def one_answer(script: Script, task: Task = TASKS[0], **asking: Any) -> BenchAnswer:
    with scripted(script) as url:
        (found,) = run(url, [task], BenchLoad(concurrency=1), **asking).answers
    return found


def written(path: Path, *prompts: str) -> Path:
    """A workload of these prompts."""
    path.write_text("".join(json.dumps({"id": str(at), "prompt": text}) + "\n" for at, text in enumerate(prompts)))
    return path


class TestSummary:
    def test_figures_are_those_of_vllm_bench(self) -> None:
        answers = [answer(0.1 * n, 0.1 * n + 0.02 * (n + 1), n + 2) for n in range(1, 6)]
        answers.append(answer(0.0, 9.0, 0, error="no answer for 9 s"))
        found = summarise(LoadResult(load=BenchLoad(concurrency=2), answers=answers, seconds=4.0, speculation=None))
        assert (found["completed"], found["failed"], found["failures"]) == (5, 1, {"no answer for 9 s": 1})
        assert found["output_throughput"] == pytest.approx(sum(n + 2 for n in range(1, 6)) / 4)
        assert found["request_throughput"] == pytest.approx(5 / 4)
        assert found["total_input_tokens"] == 50
        times = [100.0 * n for n in range(1, 6)]
        assert found["median_ttft_ms"] == pytest.approx(300)
        assert found["p99_ttft_ms"] == pytest.approx(np.percentile(times, 99))
        assert found["std_ttft_ms"] == pytest.approx(np.std(times))
        assert found["mean_tpot_ms"] == pytest.approx(20), "time behind the first token, by the tokens behind it"
        assert found["median_itl_ms"] == 500
        assert "categories" not in found

    def test_a_good_request_keeps_every_limit(self) -> None:
        answers = [answer(0.1, 1.1, 11), answer(0.3, 1.3, 11), answer(0.1, 2.1, 11)]  # 100 ms, 100 ms, 200 ms a token
        measured = LoadResult(load=BenchLoad(rate=1.0), answers=answers, seconds=2.0, speculation=None)
        assert summarise(measured, {"ttft": 200.0, "tpot": 150.0})["request_goodput"] == 0.5
        assert summarise(measured, {"e2el": 1e4})["request_goodput"] == 1.5
        with pytest.raises(ArgumentError) as refused:
            parse_objectives(["itl:5"])
        assert "Did you mean" not in str(refused.value), "gaps between chunks are no objective"

    def test_a_category_has_figures_of_its_own(self) -> None:
        own = SpeculationCounts(drafts=2, draft_tokens=6, accepted_tokens=3, accepted_per_position=(2, 1, 0))
        answers = [answer(0.1, 1.1, 11, category="x", speculation=own), answer(0.2, 1.3, 11, category="y")]
        found = summarise(LoadResult(load=BenchLoad(concurrency=1), answers=answers, seconds=2.0, speculation=None))
        assert found["categories"]["x"]["spec_decode_acceptance_length"] == 2.5
        assert found["categories"]["x"]["spec_decode_per_position_acceptance_rates"] == [1.0, 0.5, 0.0]
        assert "spec_decode_acceptance_length" not in found["categories"]["y"]

    def test_only_what_is_worse_by_more_than_the_tolerance_is_said(self) -> None:
        old = {"load": "1 user", "output_throughput": 100.0, "median_tpot_ms": 10.0, "median_ttft_ms": 50.0}
        new = {**old, "output_throughput": 94.0, "median_tpot_ms": 10.4, "median_ttft_ms": 20.0}
        (said_,) = find_worse({"loads": [new]}, {"loads": [old]}, 0.05)
        assert "output_throughput 100 -> 94 (-6.0%)" in said_
        assert find_worse({"loads": [new]}, {"loads": [old]}, 0.07) == []
        assert find_worse({"loads": [old]}, {"loads": [{**old, "output_throughput": 0.0}]}, 0.05) == []
        with pytest.raises(ArgumentError, match=r"1 user.*2 users"):
            find_worse({"loads": [{**new, "load": "2 users"}]}, {"loads": [old]}, 0.05)

    @pytest.mark.parametrize(
        ("was", "now", "words"),
        [
            ({"output_throughput": 100.0}, {"output_throughput": 0.0}, "output_throughput 100 -> 0 (-100.0%)"),
            ({"spec_decode_acceptance_length": 3.0}, {}, "spec_decode_acceptance_length 3 -> none"),
            ({"median_ttft_ms": 50.0}, {"median_ttft_ms": None}, "median_ttft_ms 50 -> none"),
            ({"failed": 0}, {"failed": 1}, "failed 0 -> 1"),
            ({"failed": 100}, {"failed": 101}, "failed 100 -> 101 (+1.0%)"),
            ({"failed": 3}, {"failed": 3}, ""),
            ({"failed": 3}, {"failed": 0}, ""),
            ({}, {"failed": 3, "output_throughput": 1.0}, ""),
        ],
    )
    def test_what_fell_to_nothing_is_worse(self, was: dict[str, Any], now: dict[str, Any], words: str) -> None:
        loads = [{"loads": [{"load": "1 user", **figures}]} for figures in (now, was)]
        assert find_worse(*loads, 0.05) == ([f"1 user: {words}"] if words else [])


VLLM_PAGE = """\
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{{engine="0"}} {}
# TYPE vllm:spec_decode_num_draft_tokens counter
vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {}
# TYPE vllm:spec_decode_num_accepted_tokens counter
vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {}
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="1"}} {}
"""
SGLANG_PAGE = """\
# TYPE sglang:spec_verify_calls_total counter
sglang:spec_verify_calls_total {}
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total {}
# TYPE sglang:num_requests_total counter
sglang:num_requests_total {}
# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length 9.9
"""


class TestCounters:
    def test_vllm(self) -> None:
        before, after = parse(VLLM_PAGE.format(5, 10, 4, 3, 1)), parse(VLLM_PAGE.format(15, 30, 16, 11, 5))
        found = diff_counts(before, after)
        assert (found.drafts, found.draft_tokens, found.accepted_tokens) == (10, 20, 12)
        assert (found.acceptance_length, found.acceptance_rate) == (2.2, 0.6)
        assert found.record()["spec_decode_per_position_acceptance_rates"] == [0.8, 0.4]
        assert found.record()["spec_decode_acceptance_rate"] == 60.0, "in percent, as vLLM has it"
        assert diff_counts({}, after) is not None, "a counter that was not there before began at 0"

    def test_sglang_counts_each_requests_first_token_and_we_do_not(self) -> None:
        """Four requests of 25 tokens in 40 passes: 24 of each are from passes, so 96 / 40, not 100 / 40."""
        found = diff_counts(parse(SGLANG_PAGE.format(0, 0, 0)), parse(SGLANG_PAGE.format(40, 100, 4)))
        assert found.acceptance_length == pytest.approx(96 / 40)
        assert found.acceptance_rate is None and "first token" in found.source

    def test_llama_cpp_counts_as_vllm_does(self) -> None:
        page = VLLM_PAGE.replace("vllm:", "llamacpp:").format
        found = diff_counts(parse(page(5, 10, 4, 3, 1)), parse(page(9, 18, 9, 6, 3)))
        assert found.source == "the server's llamacpp:spec_decode counters"
        assert (found.drafts, found.draft_tokens, found.accepted_tokens) == (4, 8, 5)
        assert found.accepted_per_position == (3, 2)

    def test_llama_cpp_tells_in_the_answer(self) -> None:
        """21 tokens, 12 of them accepted drafts: the first is the prompt's, so 8 passes wrote 20."""
        found = read_counts({"timings": {"predicted_n": 21, "draft_n": 16, "draft_n_accepted": 12}}, 21)
        assert (found.drafts, found.acceptance_length, found.acceptance_rate) == (8, 2.5, 0.75)
        assert read_counts({"timings": {"predicted_n": 21}}, 21) is None, "no draft, nothing to tell"

    def test_vllms_and_our_answers_tell_too_and_add_up(self) -> None:
        counts = {"num_spec_steps": 4, "num_draft_tokens": 8, "num_accepted_draft_tokens": 5}
        one = read_counts({"metrics": {"speculative_decoding": {**counts, "acceptance_histogram": [1, 1, 2]}}}, 9)
        assert one.accepted_per_position == (3, 2)
        both = sum_counts([one, None, one])
        assert (both.drafts, both.accepted_tokens, both.accepted_per_position) == (8, 10, (6, 4))
        assert sum_counts([None]) is None

    def test_a_server_without_speculation_tells_nothing(self) -> None:
        assert diff_counts(parse("# TYPE up gauge\nup 1\n"), parse("# TYPE up gauge\nup 1\n")) is None
        with pytest.raises(ValueError):
            parse("<html>not found</html>")


class TestLoad:
    def test_users_at_a_time(self) -> None:
        together = threading.Barrier(2, timeout=30)
        script = Script(lambda body: [0.2, *said("a", tokens=3 if together.wait() >= 0 else 0)])
        with scripted(script) as url:
            found = run(url, TASKS, BenchLoad(concurrency=2))
        assert not any(one.error for one in found.answers), "always two, or the barrier breaks"
        assert script.most == 2 and len(found.answers) == 6, "and no third in the time that both are held"
        assert {one.task for one in found.answers} == {task.id for task in TASKS}

    def test_arrivals_do_not_wait_for_answers(self) -> None:
        all_here = threading.Barrier(len(TASKS), timeout=30)
        script = Script(lambda body: said("a", tokens=3 if all_here.wait() >= 0 else 0))
        with scripted(script) as url:
            found = run(url, TASKS, BenchLoad(rate=200.0))
        assert script.most == len(TASKS) and not any(one.error for one in found.answers)

    def test_arrivals_have_the_rate_and_the_burstiness_and_repeat(self) -> None:
        for burstiness in (0.25, 1.0, 16.0):
            load = BenchLoad(rate=5.0, burstiness=burstiness)
            gaps = np.diff(load.arrivals(4000, seed=1))
            assert gaps.mean() == pytest.approx(1 / 5, rel=0.12)
            assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.1)
            assert load.arrivals(9, seed=1) == load.arrivals(9, seed=1) != load.arrivals(9, seed=2)
        assert BenchLoad(concurrency=3).arrivals(2, seed=0) == [0.0, 0.0]

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            ({}, "either"),
            ({"concurrency": 1, "rate": 1.0}, "either"),
            ({"concurrency": 0}, "at least 1"),
            ({"rate": 0.0}, "above 0"),
            ({"rate": float("inf")}, "above 0"),
            ({"rate": 1.0, "burstiness": 0.0}, "burstiness"),
        ],
    )
    def test_a_load_that_is_none_is_refused(self, given: dict[str, Any], words: str) -> None:
        with pytest.raises(ArgumentError, match=words):
            BenchLoad(**given)


NO_CHUNKS = (
    *(b"null", b"7", b"[]", b'"error"', b"[null]", b"true"),
    *(b'{"choices": %s}' % bad for bad in (b"7", b'"abc"', b"[null]", b"[7]", b'{"a": 1}')),
    *(b'{"choices": [{"delta": %s}]}' % bad for bad in (b"7", b'"a"', b"[1]")),
    *(b'{"choices": [{"delta": {"content": %s}}]}' % bad for bad in (b"7", b'["a"]')),
    *(b'{"usage": %s}' % bad for bad in (b"7", b"[1]")),
    *(b'{"usage": {"completion_tokens": %s}}' % bad for bad in (b'"x"', b"Infinity")),
    *(b'{"metrics": %s}' % bad for bad in (b"7", b'{"speculative_decoding": {"num_spec_steps": 3}}')),
    b'{"timings": {"draft_n": []}}',
)
"""What is JSON, and no chunk of a stream."""


class TestClient:
    def test_times_and_tokens_are_the_servers(self) -> None:
        script = Script(lambda body: [0.1, *said("a b", " c", tokens=9)[:1], 0.1, *said(" c", tokens=9)])
        found = one_answer(script)
        assert (found.text, found.tokens, found.prompt_tokens, found.counted) == ("a b c", 9, 7, True)
        assert found.ttft_s is not None and 0.1 <= found.ttft_s < found.seconds
        assert len(found.gaps_s) == 1
        (body,) = script.bodies
        assert body["stream"] and body["stream_options"] == {"include_usage": True} and body["max_tokens"] == 8

    def test_chunks_are_counted_where_the_server_does_not(self) -> None:
        found = one_answer(Script(lambda body: said("a", "b", "c")))
        assert (found.tokens, found.counted) == (3, False)

    def test_a_conversation_goes_on_behind_the_servers_own_answers(self) -> None:
        script = Script(lambda body: said(f"answer {len(body['messages'])}", tokens=2))
        task = Task(id="x", category="c", questions=(user("one"), user("two")))
        with scripted(script) as url:
            found = run(url, [task], BenchLoad(concurrency=1))
        assert [one.text for one in found.answers] == ["answer 1", "answer 3"]
        answered = {"role": "assistant", "content": "answer 1"}
        assert script.bodies[1]["messages"] == [*user("one"), answered, *user("two")]

    @pytest.mark.parametrize(
        ("answered", "words"),
        [
            ((500, '{"error": {"message": "out of memory"}}'), "status 500: out of memory"),
            ((503, "busy"), "status 503: busy"),
            (said("a")[:1], "ended before"),
            ([b'data: {"error": {"message": "preempted"}}\n\n'], "preempted"),
            ([b"data: {broken\n\n"], "no JSON"),
            ([b"data: " + b"[" * 100_000 + b"\n\n"], "no JSON"),
            *[([b"data: %s\n\n" % chunk, *said("a", tokens=2)], "not as OpenAI") for chunk in NO_CHUNKS],
            ([3.0, *said("a")], "not answered within 1.5 s"),
            ([*[b": still there\n\n", 0.3] * 10, *said("a")], "not answered within 1.5 s"),
        ],
    )
    def test_a_failing_request_is_counted_by_itself_and_the_others_go_on(self, answered: Any, words: str) -> None:
        fails = TASKS[2].questions[0]
        script = Script(lambda body: answered if body["messages"] == list(fails) else said("a", tokens=2))
        with scripted(script) as url:
            found = run(url, TASKS, BenchLoad(concurrency=2), timeout_s=1.5)
        errors = {one.task: one.error for one in found.answers if one.error}
        assert list(errors) == ["2"] and words in str(errors["2"])

    def test_a_delta_without_text_says_nothing(self) -> None:
        empty = [{"choices": [{"delta": None}]}, {"choices": None}, {"choices": [{"delta": {"role": "assistant"}}]}]
        found = one_answer(Script(lambda body: [*empty, *said("a", tokens=2)]))
        assert (found.text, found.tokens, found.error, found.gaps_s) == ("a", 2, None, ())

    def test_lines_end_with_a_line_feed_and_no_error_is_none(self) -> None:
        text = "a\u2028b\u0085c\x0bd\re"
        raw = f'data: {{"error": null, "choices": [{{"delta": {{"content": "{text[:5]}"}}}}]}}\n\n'.encode()
        found = one_answer(Script(lambda body: [raw[:40], raw[40:], *said(text, tokens=2)]))
        assert (found.text, found.error) == (text[:5] + text, None)

    def test_a_text_is_continued(self) -> None:
        script = Script(lambda body: [{"choices": [{"text": "x"}]}, b"data: [DONE]\n\n"])
        found = one_answer(script, Task(id="t", category="c", questions=(), text="def f"))
        one_answer(script, endpoint="completions")
        assert found.text == "x"
        assert [body["prompt"] for body in script.bodies] == ["def f", "say 0"]


class TestWorkloads:
    def test_what_ships_has_every_kind_of_edit(self) -> None:
        tasks = read_workload(["demo"])
        assert {"rename", "constant", "parameter"} <= {task.category for task in tasks}

    def test_each_load_asks_what_was_not_asked_before(self) -> None:
        """Neither by the warm-up nor by another load, and the same when loads are added later."""
        tasks = read_workload(["demo"])
        asked = draw_tasks(tasks, loads=3, warmup=2, count=14, seed=1)
        ids = [task.id for part in (asked.warmup, *asked.loads) for task in part]
        assert asked.apart and len(ids) == len(set(ids)) == 2 + 3 * 14 == len(tasks)
        assert draw_tasks(tasks, loads=1, warmup=2, count=14, seed=1).loads == [asked.loads[0]]
        assert draw_tasks(tasks, loads=3, warmup=2, count=14, seed=2).loads != asked.loads

    @pytest.mark.parametrize(("warmup", "left"), [(0, 44), (2, 42), (22, 22), (23, 44)])
    def test_one_load_asks_all_that_the_warm_up_does_not(self, warmup: int, left: int) -> None:
        tasks = read_workload(["demo"])
        asked = draw_tasks(tasks, loads=1, warmup=warmup)
        (load,) = asked.loads
        assert (len(asked.warmup), len(load)) == (warmup, left)
        assert asked.apart == (warmup < 23) == all(task not in load for task in asked.warmup)

    def test_where_there_are_too_few_all_loads_ask_the_same(self) -> None:
        tasks = read_workload(["demo"])
        for count in (15, 43, 44, None):
            asked = draw_tasks(tasks, loads=3, warmup=2, count=count)
            assert not asked.apart and asked.loads[0] == asked.loads[1] == asked.loads[2]
            assert len(asked.warmup) == 2 and len(asked.loads[0]) == (count or len(tasks))
            assert sum(task in asked.loads[0] for task in asked.warmup) == 2 - min(2, len(tasks) - len(asked.loads[0]))

    def test_answers_of_a_file_are_left_to_the_server(self, tmp_path: Path) -> None:
        turns = [("system", "be brief"), ("user", "one"), ("assistant", "1"), ("user", "two"), ("assistant", "2")]
        entry = {"messages": [{"role": role, "content": text} for role, text in turns], "category": "talk"}
        (tmp_path / "a.jsonl").write_text(json.dumps(entry) + "\n" + json.dumps({"text": "once"}) + "\n")
        chat, text = read_workload([str(tmp_path / "a.jsonl")])
        assert [[m["content"] for m in question] for question in chat.questions] == [["be brief", "one"], ["two"]]
        assert (chat.category, text.category, text.prompt()) == ("talk", "a", "once")
        with pytest.raises(DataError, match="conversation"):
            chat.prompt()

    @pytest.mark.parametrize(
        ("lines", "words"),
        [
            ('{"turns": ["a"]}\n{"turns": [}\n', "line 2: broken JSON"),
            ('{"answer": "a"}\n', "line 1: no usable key"),
            ('{"messages": [{"role": "assistant", "content": "a"}]}\n', "line 1: there is no prompt"),
        ],
    )
    def test_a_broken_line_is_named(self, tmp_path: Path, lines: str, words: str) -> None:
        (tmp_path / "a.jsonl").write_text(lines)
        with pytest.raises(DataError, match=words):
            read_workload([str(tmp_path / "a.jsonl")])

    def test_a_file_that_is_not_there_is_not_sought_on_the_hub(self) -> None:
        for name in ("nowhere/questions.jsonl", "/nowhere.jsonl", "nowhere"):
            with pytest.raises(DataError, match="does not exist"):
                read_workload([name])


NO_ADDRESSES = [("--server", f"http{rest}") for rest in ("://localhost:port", "://[::1", "s://[zz]:8", "://a:99999")]
NO_ADDRESSES += [("--server", f"http:{rest}") for rest in ("//a:-1", "//", "///v1", "//:80", "//a\nb", "//a/\x00")]
NO_ADDRESSES += [("--server", url) for url in ("nonsense", "ftp://a", "")]
NO_ADDRESSES += [(option, "http://localhost:port") for option in ("--baseline-server", "--metrics-url")]


class TestCommand:
    def test_a_server_beside_a_baseline(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        def same(_: Any) -> Any:
            return said("same", tokens=4)

        plain, fast = Script(same), Script(same, metrics=lambda n: VLLM_PAGE.format(2 * n, 4 * n, 3 * n, n, n))
        out, page, plot = tmp_path / "r.json", tmp_path / "r.html", tmp_path / "r.svg"
        with scripted(plain) as base, scripted(fast) as url:
            words = ("--server", url, "--baseline-server", base, "--num-prompts", 4, "--warmup", 1, "-t", 0)
            assert bench(*words, "--out", out, "--report", page, "--plot", plot, "--json") == 0
        (load,) = json.loads(capsys.readouterr().out)["loads"]
        ratio = load["output_throughput"] / load["baseline"]["output_throughput"]
        assert load["speedup"] == pytest.approx(ratio) and load["identical_answers"] == load["completed"] == 4
        assert load["spec_decode_acceptance_length"] == 2.5 and load["spec_decode_num_drafts"] == 8, "not the warm-up's"
        assert len(fast.bodies) == len(plain.bodies) == 5
        assert {body["temperature"] for body in fast.bodies} == {0}
        assert json.loads(out.read_text())["loads"] == [load]
        assert "1 user" in page.read_text() and page.read_text().count("<svg") == 2 and "<svg" in plot.read_text()

    def test_it_goes_on_behind_what_is_done(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        script = brief()
        out = tmp_path / "r.json"
        with scripted(script) as url:
            words = ("--server", url, "--num-prompts", 3, "--warmup", 0, "--out", out)
            assert bench(*words, "--concurrency", 1) == 0
            assert bench(*words, "--concurrency", 1, 2) == 0
            assert len(script.bodies) == 6, "the first load was not measured again"
            assert [load["load"] for load in json.loads(out.read_text())["loads"]] == ["1 user", "2 users"]
            capsys.readouterr()
            assert bench(*words, "--concurrency", 1, 2) == 0 and len(script.bodies) == 6
            assert "nothing was measured" in capsys.readouterr().err
            stopping = ("--stop", "x", "--goodput", "ttft:90", "--extra-body", '{"a": [1]}')
            stopping += ("--out", tmp_path / "s.json")
            for _ in range(2):
                assert bench("--server", url, "--num-prompts", 1, "--warmup", 0, *stopping) == 0
            assert "nothing was measured" in capsys.readouterr().err
            for other in (("--max-tokens", 9), ("--split", "train"), ("--subset", "x")):
                assert bench(*words, "--concurrency", 1, *other) == 2
                assert "another measurement" in capsys.readouterr().err

    def test_loads_that_ask_the_same_are_said_to(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        workload = written(tmp_path / "a.jsonl", *(f"say {number}" for number in range(9)))
        words = ("--workload", workload, "--concurrency", 4, 8, "--warmup", 1)
        with scripted(brief()) as url:
            assert bench("--server", url, *words, "--num-prompts", 5) == 0
            told = capsys.readouterr()
            assert "5 of 10 prompts repeat" in told.err and "--num-prompts 4" in told.err
            assert "other ones for each load" not in told.out
            assert bench("--server", url, *words, "--num-prompts", 4) == 0
            told = capsys.readouterr()
            assert "may inflate" not in told.err
            assert f"4 tasks of {workload}, other ones for each load" in told.out.replace("\n", " ")

    def test_the_edits_that_ship_are_called_what_they_are(self, capsys: pytest.CaptureFixture[str]) -> None:
        with scripted(brief()) as url:
            assert bench("--server", url, "--num-prompts", 40, "--warmup", 0) == 0
        told = capsys.readouterr().out.replace("\n", " ")
        assert "40 edits of code that ship with forerun (drafting's best case; --workload takes yours)" in told
        assert "1 user, by category" in told and "kind of edit" in told

    @pytest.mark.parametrize(
        ("words", "said_"),
        [
            ((), ""),
            (("--warmup", 3), "3 of 4 prompts repeat"),
            (("--num-prompts", 4), "2 of 4 prompts repeat"),
            (("--num-prompts", 3), "1 of 3 prompts repeats"),
            (("--num-prompts", 2), ""),
            (("--warmup", 0), ""),
        ],
    )
    def test_a_warm_up_that_asks_the_loads_tasks_is_said(
        self, words: tuple[object, ...], said_: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        script, workload = brief(), written(tmp_path / "a.jsonl", *(f"say {number}" for number in range(4)))
        with scripted(script) as url:
            assert bench("--server", url, "--workload", workload, *words) == 0
        told = capsys.readouterr().err
        asked = [body["messages"][0]["content"] for body in script.bodies]
        assert (len(set(asked)) < len(asked)) == bool(said_) == ("may inflate" in told)
        assert said_ in told and ("--num-prompts" in told) == bool(said_)

    def test_a_workload_that_repeats_itself_is_said(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """Under other ids, too: what counts is what is asked."""
        workload = written(tmp_path / "a.jsonl", *["say 0", "say 1"] * 3)
        with scripted(brief()) as url:
            assert bench("--server", url, "--workload", workload, "--warmup", 0, "--json") == 0
        shown = capsys.readouterr()
        assert "4 of 6 prompts repeat" in shown.err and "the workload itself repeats them" in shown.err
        assert json.loads(shown.out)["repeated_prompts"] == 4

    def test_a_server_without_metrics_is_said_once(self, capsys: pytest.CaptureFixture[str]) -> None:
        words = ("--num-prompts", 2, "--warmup", 0, "--concurrency", 1, 2)
        pages = (("", "an empty page"), ("<html>", "not of Prometheus"), ("up 1\n", ""))
        for page, why in pages:
            with scripted(brief(metrics=lambda n, page=page: page)) as url:
                assert bench("--server", url, *words) == 0
                told = capsys.readouterr().err
                assert told.count("has no metrics at") == bool(why) and why in told
                assert bench("--server", url, *words, "--metrics-url", f"{url}/metrics") == (2 if why else 0)
                told = capsys.readouterr().err
                assert ("no metrics at" in told) == ("--metrics-url" in told) == bool(why) and why in told

    def test_metrics_that_were_named_and_do_not_answer_are_an_error(self, capsys: pytest.CaptureFixture[str]) -> None:
        script = brief()
        with scripted(script) as url:
            assert bench("--server", url, "--metrics-url", "http://127.0.0.1:9/metrics") == 2
        assert "no metrics at http://127.0.0.1:9/metrics" in capsys.readouterr().err and not script.bodies

    def test_a_page_that_fails_once_counts_nothing(self) -> None:
        """Or all that was counted before would be this load's."""
        pages = {"begin": iter(["up 1", "", VLLM_PAGE.format(90, 90, 90, 90, 90)])}
        pages["end"] = iter(["up 1", VLLM_PAGE.format(90, 90, 90, 90, 90), ""])
        for missing in pages.values():
            script = brief(metrics=lambda n, missing=missing: next(missing))
            with scripted(script) as url:
                assert run(url, TASKS[:1], BenchLoad(concurrency=1)).speculation is None

    @pytest.mark.parametrize("missing", ["httpx", "prometheus_client"])
    def test_what_is_not_installed_is_named(
        self, missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setitem(sys.modules, missing, None)
        for name in [name for name in sys.modules if name.startswith(f"{missing}.")]:
            monkeypatch.delitem(sys.modules, name)
        assert bench("--server", "http://127.0.0.1:9") == 2
        told = capsys.readouterr().err
        assert f"needs {missing}" in told and "pip install 'forerun[bench]'" in told

    @pytest.mark.parametrize(("option", "url"), NO_ADDRESSES)
    def test_what_is_no_address_is_refused(self, option: str, url: str, capsys: pytest.CaptureFixture[str]) -> None:
        given = {"--server": "http://127.0.0.1:9"} | {option: url}
        assert bench(*(word for pair in given.items() for word in pair)) == 2
        told = capsys.readouterr().err
        assert "http://HOST:PORT" in told and f"got {url!r}" in told and "no server answers" not in told

    def test_it_ends_with_1_where_it_became_worse(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        old = {"loads": [{"load": "1 user", "output_throughput": 1e9}]}
        (tmp_path / "old.json").write_text(json.dumps(old))
        with scripted(brief()) as url:
            words = ("--server", url, "--num-prompts", 2, "--compare", tmp_path / "old.json")
            assert bench(*words) == 1
            assert "worse than before: 1 user: output_throughput" in capsys.readouterr().err
            assert bench(*words, "--tolerance", 1.0) == 0
            old["about"] = {"max_tokens": 7, "tasks": 2}
            (tmp_path / "old.json").write_text(json.dumps(old))
            assert bench(*words, "--tolerance", 1.0) == 0
            said_ = capsys.readouterr().err
            assert "another max_tokens: 7, now" in said_ and "another tasks" not in said_

    def test_a_result_with_other_loads_is_refused_at_once(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "old.json").write_text(json.dumps({"loads": [{"load": "1 user"}]}))
        script = brief()
        with scripted(script) as url:
            assert bench("--server", url, "--concurrency", 8, "--compare", tmp_path / "old.json") == 2
        assert "it holds 1 user, requested is 8 users" in capsys.readouterr().err and not script.bodies

    @pytest.mark.parametrize("loads", [None, {}, [5], [None], [{}], [{"load": "1 user", "output_throughput": "fast"}]])
    def test_a_file_that_is_no_result_is_refused(
        self, loads: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "old.json").write_text(json.dumps({"loads": loads}))
        assert bench("--server", "http://127.0.0.1:9", "--compare", tmp_path / "old.json") == 2
        assert "old.json is no result of forerun bench" in capsys.readouterr().err

    def test_failures_are_said(self, capsys: pytest.CaptureFixture[str]) -> None:
        def moody(body: dict[str, Any]) -> Any:
            return said("a", tokens=2) if len(script.bodies) % 2 else (429, '{"error": {"message": "slow down"}}')

        script = Script(moody)
        with scripted(script) as url:
            assert bench("--server", url, "--num-prompts", 4, "--warmup", 0) == 0
        assert "2 failed: status 429: slow down" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("words", "said_"),
        [
            (["--concurrency", "1", "--request-rate", "2"], "not both"),
            (["--goodput", "tft:3"], "ttft:MS"),
            *[(["--goodput", f"ttft:{bad}"], "milliseconds above 0") for bad in ("fast", "nan", "inf", "-1", "0", "")],
            (["--extra-body", "[1]"], "JSON object"),
            (["--model", "other"], "serves m, not other"),
            (["--plot", "a.txt"], "ends in"),
            (["--compare", "nothing.json"], "nothing.json"),
            (["--timeout", "0"], "--timeout"),
            *[(["--tolerance", bad], "share from 0 to 1") for bad in ("5", "nan", "-0.1")],
            (["--burstiness", "2"], "--request-rate"),
            (["--request-rate", "1", "--burstiness", "inf"], "--burstiness"),
            (["--api-key", "ключ"], "ASCII"),
            (["--extra-body", '{"n": NaN}'], "not JSON"),
            (["--extra-body", "[" * 100_000], "not JSON"),
            *[([flag, "."], f"{flag} . is a directory") for flag in ("--out", "--plot", "--report")],
            (["--num-prompts", "0"], "--num-prompts must be at least 1"),
            (["--num-prompts", "-1"], "--num-prompts must be at least 1"),
        ],
    )
    def test_bad_input_is_refused_at_once(
        self, words: list[str], said_: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        script = brief()
        with scripted(script) as url:
            assert bench("--server", url, *words) == 2
        assert said_ in capsys.readouterr().err and not script.bodies

    def test_a_server_that_is_none_is_said(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert bench("--server", "http://127.0.0.1:9") == 2
        told = capsys.readouterr().err
        assert "no server answers" in told and "repeat" not in told, "nothing is said of prompts that nobody is sent"
        assert bench("--server", "localhost:9") == 2
        assert "http://" in capsys.readouterr().err
        with scripted(Script(lambda body: (500, "down"), models=("a", "b"))) as url:
            assert bench("--server", url) == 2
            assert "a, b; say which with --model" in capsys.readouterr().err
            assert bench("--server", url, "--model", "a", "--num-prompts", 2) == 2
            assert "all 2 requests" in capsys.readouterr().err


def test_a_server_that_wants_a_key_is_said_so() -> None:
    server = Server("http://simulated")
    server.http = httpx.AsyncClient(transport=httpx.MockTransport(lambda _: httpx.Response(401, text="no key")))

    async def opened() -> None:
        async with server:
            pass

    with pytest.raises(ServerError, match="answered 401: no key; name its key with --api-key or OPENAI_API_KEY"):
        asyncio.run(opened())
