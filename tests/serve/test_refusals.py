"""What a refusal tells: which parameter, which method, which key, which content, and in which route it is counted."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from forerun import LLM, SamplingParams
from forerun.errors import ArgumentError
from forerun.params import StructuredOutputs
from forerun.serve import logs
from forerun.serve.logs import RequestRecord
from forerun.serve.protocol.errors import OTHER_NAMES
from forerun.serve.protocol.requests import ChatRequest, CompletionRequest
from serve.conftest import Live, counters, serving

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
ASK = [{"role": "user", "content": "hi"}]
WRONG = {"type": "nonsense"}  # A schema of no type that there is
KEYED = {"authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def locked(checkpoint: Path) -> Iterator[Live]:
    """A server with a key that takes 2,000 bytes."""
    with serving(checkpoint, api_keys=("secret",), max_body_bytes=2_000) as live:
        yield live


def routes(live: Live, status: int) -> dict[str, float]:
    """How often each route answered with this status."""
    found = counters(live)
    return {key.split('"')[1]: value for key, value in found.items() if f'status="{status}"' in key and "_total" in key}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TEXT, {"prompt": ""}, "prompt"),
        (TEXT, {"prompt": []}, "prompt"),
        (TEXT, {"prompt": "x " * 900}, "prompt"),
        (TEXT, {"prompt": [5] * 900}, "prompt"),
        (TEXT, {"prompt": [10**6]}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "x " * 900}]}, "messages"),
        (RESPONSES, {"input": "x " * 900}, "input"),
        ("/tokenize", {"prompt": "x" * 500_000}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * 500_000}]}, "messages"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
        (TEXT, {"prompt": "x", "prediction": {"content": "x " * 900}}, "prediction"),
        (TEXT, {"prompt": "x", "stop_token_ids": [10**6]}, "stop_token_ids"),
        (TEXT, {"prompt": "x", "allowed_token_ids": [-5]}, "allowed_token_ids"),
        (TEXT, {"prompt": "x", "logit_bias": {"1000000": 1}}, "logit_bias"),
        (TEXT, {"prompt": "x", "guided_regex": "("}, "guided_regex"),
        (TEXT, {"prompt": "x", "structured_outputs": {"regex": "("}}, "structured_outputs"),
        (TEXT, {"prompt": "x", "structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        (TEXT, {"prompt": "x", "structured_outputs": {}}, "structured_outputs"),
        (TEXT, {"prompt": "x", "structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        (TEXT, {"prompt": "x", "guided_choice": []}, "guided_choice"),
        (TEXT, {"prompt": "x", "guided_json": {"type": "nonsense"}}, "guided_json"),
        (
            CHAT,
            {
                "messages": ASK,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "nonsense"}},
                },
            },
            "response_format",
        ),
        (CHAT, {"messages": ASK, "prediction": {"type": "content", "content": 3}}, "prediction.content"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}, "messages.0.content.0.text"),
    ],
)
def test_every_refusal_names_its_parameter(live: Live, path: str, body: dict[str, Any], param: str) -> None:
    for more in [{}] if path == "/tokenize" else [{}, {"stream": True}]:
        answer = live.post(path, {**body, **more})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), error
        assert body.get("structured_outputs") != {"choice": []} or "at least 1 item" in error["message"]


@pytest.mark.parametrize("name", [*OTHER_NAMES, "max_token", "temprature", "top-p", "seeds"])
def test_a_foreign_name_is_told_ours(live: Live, name: str) -> None:
    for path, kind, body in ((TEXT, CompletionRequest, {"prompt": "x"}), (CHAT, ChatRequest, {"messages": ASK})):
        error = live.post(path, {**body, name: 3}).json()["error"]
        assert error["param"] == name
        ours = error["message"].partition("did you mean '")[2].rstrip("'?")
        assert ours in kind.model_fields if ours else OTHER_NAMES.get(name) not in kind.model_fields
    assert "leave it out" in live.post(TEXT, {"prompt": "x", "frobnicate": 1}).text


def test_a_wrong_method_is_told_the_right_ones(locked: Live) -> None:
    wanted = {TEXT: "POST", "/v1/models": "GET", "/health": "GET", "/ping": "GET, POST"}
    for path, methods in wanted.items():
        answer = httpx.request("DELETE", locked.url + path, headers=KEYED, timeout=30)
        assert answer.status_code == 405 and answer.headers["allow"] == methods and methods in answer.text
    assert set(routes(locked, 405)) == set(wanted)


def test_without_a_key_one_is_told_how_to_send_it(locked: Live) -> None:
    answer = locked.post(TEXT, {"prompt": "x"})
    assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
    assert "www-authenticate" not in locked.post(TEXT, {"prompt": 5}, headers=KEYED).headers


def test_what_is_refused_at_the_door_is_counted_by_its_route(locked: Live) -> None:
    for path in (TEXT, CHAT, "/v1/models/x"):
        locked.post(path, {"prompt": "x"})
        locked.post(path, {"prompt": "x" * 3_000}, headers=KEYED)
        locked.post(path, {"prompt": "x"}, headers={**KEYED, "content-type": "text/plain"})
    assert locked.get("/made/up").status_code == 401
    for status in (401, 413, 415):
        found = routes(locked, status)
        assert found.keys() >= {TEXT, CHAT, "/v1/models/{name:path}"}
        assert found.get("unmatched", 0) == (status == 401)


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 200),
        ("Application/JSON; charset=utf-8", 200),
        ("application/vnd.api+json", 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
    ],
)
def test_a_body_says_that_it_is_json(live: Live, kind: str, status: int) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 1})
    answer = httpx.post(live.url + TEXT, content=body, headers={"content-type": kind}, timeout=30)
    assert answer.status_code == status and (status == 200 or "application/json" in answer.json()["error"]["message"])


@pytest.mark.parametrize(("route", "status", "shown"), [("/health", 503, 0), ("/health", 500, 1), (TEXT, 503, 1)])
def test_probes_while_the_model_is_loaded_are_no_news(
    caplog: pytest.LogCaptureFixture, route: str, status: int, shown: int
) -> None:
    with caplog.at_level(logging.INFO, logger=logs.__name__):
        record = RequestRecord(request_id="x", method="GET", route=route, status=status)
        logs.write(record, routine=route == "/health")
    assert len(caplog.records) == shown


@pytest.mark.parametrize("ids", [[True, 3], [3, False], (True,)])
def test_booleans_are_no_token_ids(checkpoint: Path, live: Live, ids: Any) -> None:
    llm = LLM(str(checkpoint), dtype="float32", max_num_seqs=1)
    for prompt in (ids, {"prompt_token_ids": ids}, {"prompt": "x", "prediction": ids}):
        with pytest.raises(ArgumentError, match="token ids"):
            llm.submit(prompt, SamplingParams())
    for name in ("stop_token_ids", "allowed_token_ids"):
        with pytest.raises(ArgumentError, match=name):
            SamplingParams(**{name: ids})
    for path, body in ((TEXT, {"prompt": list(ids)}), ("/detokenize", {"tokens": list(ids)})):
        assert live.post(path, body).status_code == 400


def test_an_empty_choice_is_no_choice() -> None:
    with pytest.raises(ArgumentError, match="choice is empty"):
        StructuredOutputs(choice=[])
