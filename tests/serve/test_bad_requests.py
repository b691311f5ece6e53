"""What is refused, and how: OpenAI's envelope, the parameter by name, never a 500."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from serve.conftest import NAME, Live, serving

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASK = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": ASK, "frobnicate": 1}, "frobnicate"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {}, "messages"),
        (CHAT, {"messages": ASK, "temperature": "hot"}, "temperature"),
        (CHAT, {"messages": ASK, "temperature": -1}, "temperature"),
        (CHAT, {"messages": ASK, "n": 4}, "n"),
        (CHAT, {"messages": ASK, "stop": ["x"] * 17}, "stop"),
        (CHAT, {"messages": ASK, "logit_bias": {"cat": 1}}, "logit_bias"),
        (CHAT, {"messages": ASK, "max_tokens": 10_000}, "max_tokens"),
        (CHAT, {"messages": ASK, "response_format": {"type": "json_schema"}}, "response_format"),
        (
            CHAT,
            {"messages": ASK, "response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        (CHAT, {"messages": ASK, "speculative": {"num_speculative_tokens": 99}}, "speculative.num_speculative_tokens"),
        (CHAT, {"messages": ASK, "speculative": {"drafter": "eagle3"}}, "speculative.drafter"),
        (CHAT, {"messages": ASK, "speculative": {"drafter": "os:path"}}, "speculative.drafter"),
        (CHAT, {"messages": ASK, "speculative": {"model": "/etc/passwd"}}, "speculative.model"),
        (TEXT, {"prompt": "x", "best_of": 3}, "best_of"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
    ],
)
def test_the_parameter_is_named(live: Live, path: str, body: dict[str, Any], param: str) -> None:
    answer = live.post(path, body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "invalid_request_error"
    assert (error["param"] or "").startswith(param) and error["message"]


IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        (CHAT, {"stop": ["x"] * 17}, "stop", "at most 16 items"),
        (CHAT, {"stop": [1]}, "stop.0", "valid string"),
        (CHAT, {"stop": 5}, "stop", "a valid string or a valid list"),
        (CHAT, {"stop": ""}, "stop", "1 to 256 characters"),
        (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0.type", "only 'text'"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "a valid string or a valid list"),
        (CHAT, {"messages": ["x"]}, "messages.0", "an object"),
        (CHAT, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "greater than or equal to 1"),
        (CHAT, {"truncate_prompt_tokens": "x"}, "truncate_prompt_tokens", "a valid integer or -1"),
        (CHAT, {"tools": [TOOL], "tool_choice": "bogus"}, "tool_choice", "only 'none', 'auto' or 'required'"),
        (CHAT, {"tools": [TOOL], "tool_choice": 5}, "tool_choice", "'required' or an object"),
        (CHAT, {"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function", "missing"),
        (CHAT, {"tools": [TOOL], "tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name", ""),
        (
            CHAT,
            {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}},
            "tool_choice.allowed_tools.tools",
            "missing",
        ),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name", ""),
        (CHAT, {"guided_json": 5}, "guided_json", "an object or a valid string"),
        (CHAT, {"Temperature": 1}, "Temperature", "not supported"),
        (CHAT, {"metadata": {"Run": 5}}, "metadata.Run", "valid string"),
        (CHAT, {"metadata": {"x" * 65: "y"}}, f"metadata.{'x' * 65}", "at most 64"),
        (TEXT, {"prompt": 5}, "prompt", "a valid string or a valid list"),
        (TEXT, {"prompt": ["a", 1]}, "prompt.1", "valid string"),
        (TEXT, {"prompt": [1, "a"]}, "prompt.1", "valid integer"),
        (TEXT, {"prompt": [[1], ["a"]]}, "prompt.1.0", "valid integer"),
        ("/v1/responses", {"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type", "'function_call'"),
        ("/v1/responses", {"input": [{"type": "function_call", "call_id": "1"}]}, "input.0.name", "missing"),
        ("/v1/responses", {"input": [{"role": "user", "content": [IMAGE]}]}, "input.0.content.0.type", "'input_text'"),
        ("/v1/responses", {"input": 5}, "input", "a valid string or a valid list"),
    ],
)
def test_of_a_union_the_branch_that_is_meant_is_named(
    live: Live, path: str, body: dict[str, Any], param: str, words: str
) -> None:
    answer = live.post(path, {"messages": ASK, **body} if path == CHAT else body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and words in error["message"]


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"type": "text", "text": 5}, "messages.0.content.0.text: "),
        ({"type": "text", "text": "x", "citations": [1]}, "messages.0.content.0.citations: "),
        ({"type": "tool_result", "tool_use_id": "x", "content": 5}, "messages.0.content.0.content: "),
        ({"type": "image"}, "messages.0.content.0: "),
    ],
)
def test_of_blocks_the_one_that_is_meant_is_named(live: Live, block: dict[str, Any], words: str) -> None:
    answer = live.post("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [block]}]})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["message"].startswith(words)


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "continue_final_message", "self"])
@pytest.mark.parametrize("value", [False, []])
def test_parameters_are_no_variables_of_the_template(live: Live, name: str, value: Any) -> None:
    answer = live.post(CHAT, {"messages": ASK, "chat_template_kwargs": {name: value}})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "chat_template_kwargs"
    assert error["message"].startswith(f"{name}: not a variable") and "()" not in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT, {"prompt": "the " * 500}),
        (TEXT, {"prompt": ""}),
        (TEXT, {"prompt": []}),
        (TEXT, {"prompt": [10**9]}),
        (TEXT, {"prompt": "x", "logit_bias": {"99999999": 1}}),
        (TEXT, {"prompt": "x", "speculative": {"rule": "nonsense"}}),
        (TEXT, {"prompt": "x", "stream_options": {"include_usage": True}}),
        (CHAT, {"messages": ASK, "top_logprobs": 2}),
        ("/tokenize", {"model": NAME}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses_is_a_400_streamed_or_not(
    live: Live, path: str, body: dict[str, Any], stream: bool
) -> None:
    answer = live.post(
        path, {**body, "stream": True} if stream and path.startswith("/v1") and "stream_options" not in body else body
    )
    assert answer.status_code == 400 and answer.json()["error"]["message"]


@pytest.mark.parametrize("body", [b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"", b'{"prompt": NaN}'])
def test_a_body_that_is_no_request(live: Live, body: bytes) -> None:
    answer = httpx.post(live.url + TEXT, content=body, headers={"content-type": "application/json"}, timeout=30)
    assert answer.status_code == 400 and set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_unknown_paths_and_methods(live: Live) -> None:
    assert live.get("/v1/nothing").json()["error"]["code"] == "not_found"
    assert live.get(CHAT).status_code == 405


def test_a_body_that_is_too_large_announced_or_not(checkpoint: Path) -> None:
    with serving(checkpoint, max_body_bytes=500) as small:
        body = {"prompt": "x" * 1000}
        assert small.post(TEXT, body).status_code == 413

        def pieces() -> Any:
            yield b'{"prompt": "'
            for _ in range(20):
                yield b"x" * 100
            yield b'"}'

        answer = httpx.post(small.url + TEXT, content=pieces(), headers={"content-type": "application/json"})
        assert answer.status_code == 413


def test_keys(checkpoint: Path) -> None:
    with serving(checkpoint, api_keys=("secret",), allowed_origins=("http://page",)) as locked:
        assert locked.get("/health").status_code == 200
        answer = locked.get("/v1/models")
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        assert locked.get("/v1/models", headers={"authorization": "Bearer wrong"}).status_code == 401
        assert [model.id for model in locked.client("secret").models.list()] == [NAME]
        preflight = httpx.options(
            locked.url + CHAT, headers={"origin": "http://page", "access-control-request-method": "POST"}
        )
        assert preflight.headers["access-control-allow-origin"] == "http://page"


def test_pages_of_other_origins_are_not_let_in_unless_asked(live: Live) -> None:
    answer = httpx.options(live.url + CHAT, headers={"origin": "http://x", "access-control-request-method": "POST"})
    assert "access-control-allow-origin" not in answer.headers


def test_request_ids_come_back(live: Live) -> None:
    assert live.get("/health", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    made = live.get("/health", headers={"x-request-id": "bad id\twith blanks"}).headers["x-request-id"]
    assert made.startswith("req-")


def test_a_form_that_ends_before_min_tokens_is_refused(live: Live) -> None:
    answer = live.post(TEXT, {"prompt": "the cat", "structured_outputs": {"regex": "ab"}, "min_tokens": 9})
    assert answer.status_code == 400 and "min_tokens (an answer whose form" in answer.json()["error"]["message"]


def test_a_wish_that_leaves_no_token_is_refused_alone(live: Live) -> None:
    """Behind its last letter the grammar allows the end alone, which `min_tokens` forbids."""
    body = {"prompt": "the", "max_tokens": 20, "min_tokens": 15, "structured_outputs": {"regex": "(the|cat)"}}
    answer = live.post(TEXT, body)
    assert answer.status_code == 400 and "every token is banned" in answer.json()["error"]["message"]
    streamed = live.post(TEXT, body | {"stream": True})
    assert "every token is banned" in streamed.text
    assert live.post(TEXT, {"prompt": "the", "max_tokens": 4}).status_code == 200
