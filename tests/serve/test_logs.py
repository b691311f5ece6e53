"""One line a request, and nothing in it that a client wrote."""

import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from forerun.engine.prompts import PromptReader
from forerun.serve import logs
from forerun.serve.settings import ServeSettings
from serve.conftest import Live, serving, wait_for

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
SECRET = "zanzibar"


class Kept(logging.Handler):
    """Every line, in both formats."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith(("httpx", "httpcore")):
            return  # the client, who shares the process in this test
        self.lines += [logs.Lines("json").format(record), logs.Lines("text").format(record)]

    def entries(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines[::2]]

    def of(self, request_id: str, event: str = "request") -> dict[str, Any]:
        """The one line of that request, which is written after its answer."""
        found = list[dict[str, Any]]()

        def there() -> bool:
            found[:] = [one for one in self.entries() if (one.get("request_id"), one["event"]) == (request_id, event)]
            return bool(found)

        wait_for(there)
        [only] = found
        return only


@pytest.fixture
def kept() -> Iterator[Kept]:
    """At the least important level that there is."""
    root, handler = logging.getLogger(), Kept()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield handler
    root.setLevel(level)
    root.removeHandler(handler)


def named(name: str, **more: str) -> dict[str, Any]:
    return {"headers": {"x-request-id": name, **more}}


@pytest.mark.parametrize("stream", [False, True])
def test_a_line_says_what_the_answer_says(live: Live, kept: Kept, stream: bool) -> None:
    body = {"prompt": ["the cat", "a"], "max_tokens": 9, "temperature": 0, "ignore_eos": True, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    answer = live.post(TEXT, body, **named("mine"))
    said = json.loads(answer.text.split("data: ")[-2]) if stream else answer.json()
    line = kept.of("mine")
    assert (line["route"], line["method"], line["status"], line["stream"]) == (TEXT, "POST", 200, stream)
    assert line["prompt_tokens"] == said["usage"]["prompt_tokens"] and line["completion_tokens"] == 18
    assert line["drafter"] == "draft_model" and line["finish_reasons"] == ["length", "length"]
    expected = said["metrics"]["speculative_decoding"]["tokens_per_pass"]
    assert line["tokens_per_pass"] == pytest.approx(expected, abs=1e-5) and expected > 1
    assert 0 < line["ttft_s"] < line["duration_s"] and "client" not in line and line["level"] == "info"


def test_other_drafters_and_none(live: Live, kept: Kept) -> None:
    body: dict[str, Any] = {"prompt": "the", "max_tokens": 2}
    live.post(TEXT, {**body, "speculative": {"enabled": False}}, **named("off"))
    live.post(TEXT, {**body, "speculative": {"drafter": "ngram"}}, **named("other"))
    live.post(TEXT, {**body, "prediction": {"content": "cat"}}, **named("predicted"))
    assert [kept.of(name)["drafter"] for name in ("off", "other", "predicted")] == ["none", "ngram", "prediction"]


def test_what_is_refused_has_its_code(live: Live, kept: Kept) -> None:
    live.post(TEXT, {"prompt": "x", "model": SECRET}, **named("model"))
    live.get("/somewhere/else", **named("path"))
    live.post(TEXT, {"prompt": "x", "n": 99}, **named("n"))
    assert (kept.of("model")["status"], kept.of("model")["code"]) == (404, "model_not_found")
    assert (kept.of("path")["status"], kept.of("path")["route"]) == (404, "unmatched")
    assert kept.of("n")["status"] == 400


def test_who_leaves_is_written_down_as_gone(live: Live, kept: Kept) -> None:
    body = {"prompt": "the", "max_tokens": 64, "ignore_eos": True, "n": 2}
    with httpx.stream("POST", live.url + TEXT, json={**body, "stream": True}, timeout=30, **named("left")) as answer:
        next(answer.iter_lines())
    assert kept.of("left")["finish_reasons"] == ["abort", "abort"]


def ask_everything(live: Live, key: str) -> None:
    """Requests of every kind with the secret wherever a client can put it."""
    headers = {"authorization": f"Bearer {key}", "x-request-id": f"a {SECRET}", "x-other": SECRET}
    bodies: list[dict[str, Any]] = [
        {"prompt": SECRET, "stop": SECRET, "user": SECRET, "max_tokens": 3},
        {"prompt": SECRET, "stream": True, "max_tokens": 3},
        {"prompt": SECRET, "prediction": {"content": SECRET}, "max_tokens": 3},
        {"prompt": SECRET, "structured_outputs": {"choice": [SECRET]}},
        {"prompt": SECRET, "structured_outputs": {"regex": f"({SECRET}"}},
        {"prompt": SECRET * 400},
        {"prompt": SECRET, SECRET: 1},
        {"prompt": SECRET, "temperature": SECRET},
        {"prompt": SECRET, "logit_bias": {SECRET: 1}},
        {"prompt": SECRET, "model": SECRET},
        {"prompt": SECRET, "speculative": {"drafter": SECRET}},
    ]
    for body in bodies:
        live.post(TEXT, body, headers=headers)
    for message in ({"role": "user", "content": SECRET}, {"role": SECRET, "content": "x"}):
        live.post(CHAT, {"messages": [message], "max_tokens": 3}, headers=headers)
    live.post("/tokenize", {"prompt": SECRET}, headers=headers)
    live.get(f"/v1/{SECRET}?{SECRET}", headers=headers)
    live.post(TEXT, {"prompt": SECRET}, headers={"authorization": f"Bearer {SECRET}"})
    httpx.post(live.url + TEXT, content=f"{{{SECRET}".encode(), headers=headers)


def break_engine(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its errors quote the prompt."""

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"cannot read {SECRET}")

    monkeypatch.setattr(PromptReader, "request", fail)
    monkeypatch.setattr(live.llm, "chat_prompt", fail)


@pytest.mark.parametrize("shown", [False, True])
def test_neither_prompts_nor_keys_are_written(
    checkpoint: Any, kept: Kept, monkeypatch: pytest.MonkeyPatch, shown: bool
) -> None:
    key = "very-private-key"
    with serving(checkpoint, api_keys=(key,), log_prompts=shown) as locked:
        ask_everything(locked, key)
        break_engine(locked, monkeypatch)
        with_key = {"authorization": f"Bearer {key}"}
        for path, body in ((TEXT, {"prompt": SECRET}), (CHAT, {"messages": [{"role": "user", "content": SECRET}]})):
            answer = locked.post(path, body, **named(f"broken-{path.count('/')}", **with_key))
            assert answer.status_code == 500 and answer.headers["x-request-id"].startswith("broken")
            assert SECRET not in answer.text
    for name in ("broken-2", "broken-3"):
        assert kept.of(name)["status"] == 500 and kept.of(name)["level"] == "error"
        error = kept.of(name, "a request failed")
        assert error["error"] == "RuntimeError" and "fail (" in error["where"]
    everything = "\n".join(kept.lines)
    assert len(kept.entries()) > 20 and key not in everything
    assert (SECRET in everything) == shown


def test_probes_are_no_news(live: Live, kept: Kept) -> None:
    live.get("/health", **named("probe"))
    assert kept.of("probe")["level"] == "debug"


def test_a_value_cannot_end_its_line_or_pass_for_another() -> None:
    record = logging.makeLogRecord({"msg": "request", "levelname": "INFO", "fields": {"a": "x\nERROR b=1", "c": "d"}})
    [line] = logs.Lines("text").format(record).splitlines()
    assert line.endswith('INFO request a="x\\nERROR b=1" c=d')
    assert json.loads(logs.Lines("json").format(record))["a"] == "x\nERROR b=1"


def test_the_format_is_the_operators(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        logs.configure_logging(ServeSettings(log_format="json", log_level="warning"))
        logging.getLogger("x").info("unseen")
        logging.getLogger("x").warning("seen")
    finally:
        for handler in root.handlers[:]:
            root.removeHandler(handler)
        for handler in before:
            root.addHandler(handler)
        root.setLevel(level)
    [line] = capsys.readouterr().err.splitlines()
    assert json.loads(line)["event"] == "seen"
