"""The page is served whole, needs nothing from elsewhere, and gets from the server what it reads."""

import re

import pytest

from serve.conftest import Live, sent


def test_the_page_is_complete_and_self_contained(live: Live) -> None:
    page = live.get("/")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    for name in re.findall(r'(?:src|href)="((?!data:)[^"]+)"', page.text):
        file = live.get(f"/{name}")
        assert file.status_code == 200 and not re.search(r"https?://(?!www\.w3\.org)", file.text)
    ids = set(re.findall(r'id="([^"]+)"', page.text))
    used = set(re.findall(r'\bat\("([^"]+)"\)', live.get("/playground.js").text))
    assert used and used <= ids


def test_what_the_page_reads_is_there(live: Live) -> None:
    model = live.get("/v1/models").json()["data"][0]
    card = model["speculation"]
    assert card["drafters"] == ["draft_model", "auto", "ngram"]
    assert card["max_speculative_tokens"] == {"draft_model": 4, "auto": 16, "ngram": 16}, "its own was built for 4"
    assert card["traces"] and model["chat"]
    body = {"prompt": "the cat", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = live.post("/v1/completions", {**body, "return_speculation_trace": True}).json()
    [trace] = answer["speculation_trace"]
    assert trace["first_token_ms"] > 0 and len(trace["tokens"]) == 8
    assert answer["choices"][0]["text"].startswith("".join(token["text"] for token in trace["tokens"]))
    numbers = {step["step"] for step in trace["steps"]}
    assert [token["step"] in numbers for token in trace["tokens"]] == [False] + [True] * 7
    for step in trace["steps"]:
        assert {"nodes", "path", "kind", "draft_ms", "verify_ms"} <= step.keys()
        assert len(step["path"]) == sum(node["accepted"] for node in step["nodes"])
        assert step["lossless"], "no rule is lossy unless it is asked for"
        assert all(0 < node["draft_prob"] <= 1 and node["text"] and not node["probe"] for node in step["nodes"])


def test_a_message_is_answered_with_the_same_fields(live: Live) -> None:
    asked = {"messages": [{"role": "user", "content": "the cat"}], "max_tokens": 8, "return_speculation_trace": True}
    answer = live.post("/v1/chat/completions", {**asked, "speculative": {"enabled": False}}).json()
    assert answer["choices"][0]["message"]["content"] and "speculative_decoding" in answer["metrics"]
    assert len(answer["speculation_trace"][0]["tokens"]) == answer["usage"]["completion_tokens"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_stream_brings_the_trace_step_by_step(live: Live, path: str) -> None:
    """The parts of a stream are the whole trace, each with what its step brought."""
    ask = {"messages": [{"role": "user", "content": "the cat"}]} if "chat" in path else {"prompt": "the cat"}
    body = {**ask, "max_tokens": 20, "temperature": 0, "ignore_eos": True, "return_speculation_trace": True}
    events = sent(live.post(path, {**body, "stream": True}).text)
    choices = [choice for event in events for choice in event["choices"]]
    parts = [choice["speculation_trace"] for choice in choices if "speculation_trace" in choice]
    [whole] = events[-1]["speculation_trace"]
    assert whole["first_token_ms"] > 0 and len(parts) == 1 + len(whole["steps"]) > 2
    assert [token for part in parts for token in part["tokens"]] == whole["tokens"]
    assert [step for part in parts for step in part["steps"]] == whole["steps"]
    assert all(len(part["steps"]) == 1 and part["tokens"] for part in parts[1:])
