"""Deadlines, cached tokens and the scheduler's counters, as a client and an operator see them."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from forerun import AsyncLLM
from forerun.engine.completion import Request
from forerun.errors import ArgumentError
from forerun.serve.settings import ServeSettings
from serve.conftest import NAME, Live, sent, serving

LONG = {
    "prompt": "the cat sat on the mat; pack my box with five dozen liquor jugs",
    "temperature": 0,
    "ignore_eos": True,
}


def test_an_answer_ends_when_its_time_is_up(live: Live) -> None:
    whole = live.post("/v1/completions", {**LONG, "max_tokens": 64}).json()["choices"][0]
    answer = live.post("/v1/completions", {**LONG, "max_tokens": 64, "timeout_s": 1e-6}).json()
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "abort" and whole["text"].startswith(choice["text"])
    assert answer["usage"]["completion_tokens"] < 64 and live.session.in_flight == 0


def test_a_stream_that_never_began_tells_of_its_prompt(checkpoint: Path) -> None:
    with serving(checkpoint, request_timeout_s=1e-6) as live:
        ids = live.post("/tokenize", {"prompt": LONG["prompt"]}).json()["tokens"]
        body = {**LONG, "prompt": ids, "echo": True, "logprobs": 1, "stream": True, "return_token_ids": True}
        first, *_ = sent(live.post("/v1/completions", body).text)
        [choice] = first["choices"]
        assert choice["text"] == LONG["prompt"] and choice["prompt_token_ids"] == ids
        assert choice["logprobs"]["tokens"] == [], "no numbers: it was not read"
        asked = {"model": NAME, "messages": [{"role": "user", "content": "the cat"}], "max_tokens": 5, "stream": True}
        begun, *_ = sent(live.post("/v1/messages", asked).text)
        assert begun["message"]["usage"]["input_tokens"] > 0


ECHO = {"echo": True, "logprobs": 2}


@pytest.mark.parametrize("asked", [ECHO, {**ECHO, "stream": True}, {"prompt_logprobs": 1}])
def test_no_numbers_are_given_of_a_prompt_that_was_read_in_part(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]
) -> None:
    monkeypatch.setattr(Request, "late", lambda request, _: request.prompt_logprobs is not None)
    small = partial(AsyncLLM, str(checkpoint), dtype="float32", max_num_batched_tokens=4)
    with serving(small) as live:
        answer = live.post("/v1/completions", {**LONG, **asked})
        assert answer.status_code == 200
        events = sent(answer.text) if "stream" in asked else [answer.json()]
        choices = [choice for event in events for choice in event["choices"]]
        assert choices[-1]["finish_reason"] == "abort" and choices[0].get("prompt_logprobs") is None
        assert not any(choice["logprobs"] and choice["logprobs"]["tokens"] for choice in choices)


def test_the_operator_sets_the_limit(checkpoint: Path) -> None:
    with serving(checkpoint, request_timeout_s=1e-6) as live:
        refused = live.post("/v1/completions", {**LONG, "timeout_s": 3})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "timeout_s"
        answer = live.post("/v1/completions", {**LONG, "max_tokens": 64}).json()
        assert answer["choices"][0]["finish_reason"] == "abort"
    with pytest.raises(ArgumentError, match="request-timeout"):
        ServeSettings(model_names=("tiny",), request_timeout_s=0.0)
