"""Predicted Outputs: who drafts for a request that brings a prediction, and what its usage counts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forerun.control.config import SpeculativeConfig
from forerun.serve.protocol.errors import ApiError
from forerun.serve.protocol.requests import Speculation
from serve.conftest import Live, serving

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
