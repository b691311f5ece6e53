"""Whatever is sent, the answer is one that the OpenAPI description names, in OpenAI's envelope, and never a 500."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forerun.serve.protocol.anthropic import MessagesRequest
from forerun.serve.protocol.requests import ChatRequest, CompletionRequest
from forerun.serve.protocol.responses import ResponsesRequest
from selection import slow
from serve.conftest import NAME, Live, counters, serving, wait_for

schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis, of the extra dev")

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
BOUNDED = settings(derandomize=True, database=None, max_examples=40, suppress_health_check=list(HealthCheck))
OFTEN = settings(BOUNDED, max_examples=120)


@pytest.fixture(scope="module")
def small(checkpoint: Path, draft_checkpoint: Path) -> Iterator[Live]:
    """Answers shortly, so that many can be asked for."""
    drafter = {"method": "draft_model", "model": str(draft_checkpoint), "num_speculative_tokens": 2}
    limits = {"max_tokens": 3, "max_n": 2, "max_body_bytes": 20_000, "receive_timeout_s": 5.0}
    with serving(checkpoint, speculative=drafter, **limits) as running:
        yield running
        assert running.session.state.value == "ready"
        wait_for(lambda: running.session.in_flight == 0 and not running.llm.engine.busy)
        found = counters(running)
        ended = sum(value for name, value in found.items() if name.startswith("vllm:request_success_total"))
        assert found["forerun:answers_admitted_total{}"] == ended + found["forerun:answers_refused_total{}"]
        assert "error" not in {name.split('"')[1] for name in found if name.startswith("vllm:request_success_total")}


@pytest.fixture(scope="module")
def described(small: Live) -> Any:
    return schemathesis.openapi.from_dict(small.get("/openapi.json").json())


def routes(live: Live) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = live.get("/openapi.json").json()["paths"]
    return found


def test_the_description_is_honest(live: Live, checkpoint: Path) -> None:
    assert {path for path, methods in routes(live).items() if "post" in methods} == set(POSTS)
    for path, methods in routes(live).items():
        for method, operation in methods.items():
            expected = {"200", "400", "401", "404", "408", "413", "415", "429", "500", "503"}
            assert method == "get" or set(operation["responses"]) == expected, path
            assert "422" not in operation["responses"] and "security" not in operation
    with serving(checkpoint, api_keys=("secret",)) as locked:
        schema = locked.get("/openapi.json", headers={"authorization": "Bearer secret"}).json()
    assert schema["components"]["securitySchemes"]["key"] == {"type": "http", "scheme": "bearer"}
    for path, methods in schema["paths"].items():
        for operation in methods.values():
            assert ("security" in operation) == path.startswith(("/v1", "/tokenize", "/detokenize", "/load")), path


POSTS = (CHAT, TEXT, RESPONSES, MESSAGES, f"{MESSAGES}/count_tokens", "/tokenize", "/detokenize")


@pytest.mark.parametrize("examples", [12, *slow(150)])
@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode), ids=str)
@pytest.mark.parametrize("path", POSTS)
def test_requests_made_from_the_description(small: Live, described: Any, path: str, mode: Any, examples: int) -> None:
    from schemathesis.specs.openapi import checks

    kept = ("status_code", "content_type", "response_headers", "response_schema")
    conform = [getattr(checks, f"{name}_conformance") for name in kept]

    @settings(BOUNDED, max_examples=examples)
    @given(case=described[path]["POST"].as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        case.call_and_validate(
            base_url=small.url, timeout=60, checks=[schemathesis.checks.not_a_server_error, *conform]
        )

    ask()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES, MESSAGES])
def test_what_is_not_odd_is_answered(small: Live, path: str, stream: bool) -> None:
    """Otherwise the tests below would prove nothing."""
    assert small.post(path, {**PLAIN[path], "stream": stream}).status_code == 200


def check_envelope(answer: httpx.Response) -> None:
    """OpenAI's, or Anthropic's on its paths."""
    body, anthropic = answer.json(), answer.request.url.path.startswith(MESSAGES)
    assert set(body) == ({"type", "error"} if anthropic else {"error"}), answer.text
    assert set(body["error"]) == {"message", "type"} | (set() if anthropic else {"param", "code"}), answer.text
    assert body["error"]["message"]


def check(answer: httpx.Response) -> None:
    """No 500, and errors in their envelope."""
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        check_envelope(answer)
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert "server_error" not in answer.text, answer.text


def send(live: Live, path: str, content: Any, **headers: str) -> httpx.Response:
    headers = {"content-type": "application/json", **{key.replace("_", "-"): value for key, value in headers.items()}}
    return httpx.post(live.url + path, content=content, headers=headers, timeout=60)


ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=12)
"""Half surrogate pairs and zero bytes, too."""
NUMBERS = st.one_of(
    st.integers(),
    st.sampled_from([10**30, -(10**30), 2**31, 2**63, 2**64, -(2**63) - 1, 10**4000]),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([1e308, 5e-324, -0.0]),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, ANY_TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(ANY_TEXT, inner, max_size=3)),
    max_leaves=6,
)


@OFTEN
@given(path=st.sampled_from(POSTS), content=st.binary(max_size=200))
def test_bytes(small: Live, path: str, content: bytes) -> None:
    answer = send(small, path, content)
    check(answer)
    assert answer.status_code == 400


@OFTEN
@given(path=st.sampled_from(POSTS), value=VALUES)
def test_json(small: Live, path: str, value: Any) -> None:
    check(send(small, path, json.dumps(value)))


PLAIN: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "the cat"}]},
    TEXT: {"prompt": "the cat"},
    RESPONSES: {"input": "the cat"},
    MESSAGES: {"messages": [{"role": "user", "content": "the cat"}], "max_tokens": 3},
}
FIELDS = {
    CHAT: sorted(ChatRequest.model_fields),
    TEXT: sorted(CompletionRequest.model_fields),
    RESPONSES: sorted(ResponsesRequest.model_fields),
    MESSAGES: sorted(MessagesRequest.model_fields),
}


@settings(OFTEN, max_examples=200)
@given(data=st.data(), path=st.sampled_from((CHAT, TEXT, RESPONSES, MESSAGES)), stream=st.booleans())
def test_one_parameter_is_odd(small: Live, data: st.DataObject, path: str, stream: bool) -> None:
    body = {**PLAIN[path], "model": NAME, "stream": stream}
    for name in data.draw(st.lists(st.sampled_from(FIELDS[path]), min_size=1, max_size=2, unique=True)):
        body[name.rstrip("_")] = data.draw(VALUES)
    check(send(small, path, json.dumps(body)))


REFUSED = [
    b'{"prompt": "x", "prompt": "y"}',
    b'{"prompt": "x", "speculative": {"enabled": true, "enabled": false}}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "x", "stop": ["\\udfff"]}',
    b'{"\\ud800": 1}',
    b'{"prompt": "x", "temperature": Infinity}',
    b'{"prompt": "x", "temperature": 1e999}',
    b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
    b"[" * 15_000,
    b'{"prompt": ' + b"[" * 9_000 + b"]" * 9_000 + b"}",
    b"\xff\xfe{\x00}\x00",
    b'{"prompt": "\xed\xa0\x80"}',
    b'{"prompt": "x"}{"prompt": "y"}',
    b"\xef\xbb\xbf{}",
    *(b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"", b'{"prompt": NaN}'),
]


@pytest.mark.parametrize("content", REFUSED, ids=lambda content: repr(content[:40]))
def test_json_that_is_refused(small: Live, content: bytes) -> None:
    answer = send(small, TEXT, content)
    check_envelope(answer)
    assert answer.status_code == 400


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        *[("application/json", 200), ("Application/JSON; charset=utf-8", 200), ("application/vnd.api+json", 200)],
        *[("text/plain", 415), ("application/x-www-form-urlencoded", 415), ("multipart/form-data; boundary=x", 415)],
        *[("application/xml", 415), ("x", 415), ("a/b;;=", 415), ("", 415)],
    ],
)
def test_a_body_says_that_it_is_json(small: Live, kind: str, status: int) -> None:
    answer = send(small, TEXT, b'{"prompt": "x", "max_tokens": 1}', content_type=kind)
    check(answer)
    assert answer.status_code == status
    assert status != 415 or "application/json" in answer.json()["error"]["message"]


@pytest.mark.parametrize("coding", ["gzip", "br", "deflate, gzip", "nonsense"])
def test_compressed_bodies(small: Live, coding: str) -> None:
    answer = send(small, TEXT, b'{"prompt": "x"}', content_encoding=coding)
    check(answer)
    assert answer.status_code == 415 and answer.json()["error"]["code"] == "unsupported_media_type"


@BOUNDED
@given(pieces=st.lists(st.binary(min_size=1, max_size=4000), max_size=12))
def test_bodies_in_chunks(small: Live, pieces: list[bytes]) -> None:
    answer = send(small, TEXT, iter([b'{"prompt": "', *pieces, b'"}']))
    check(answer)
    assert answer.status_code == (413 if sum(map(len, pieces)) + 14 > 20_000 else answer.status_code)


def quoted(path: str) -> str:
    return "/" + quote(path, safe="")


HEADERS = st.dictionaries(
    st.sampled_from(
        ["authorization", "x-request-id", "accept", "origin", "range", "te", "cookie", "expect", "upgrade"]
    ),
    st.text(st.characters(min_codepoint=33, max_codepoint=255, exclude_characters="\x7f"), max_size=30),
    max_size=3,
)


@BOUNDED
@given(
    headers=HEADERS,
    method=st.sampled_from(["GET", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE"]),
    path=st.one_of(st.sampled_from([*POSTS, "/", "/health", "/v1/models"]), st.text(max_size=20).map(quoted)),
)
def test_other_methods_paths_and_headers(small: Live, headers: dict[str, str], method: str, path: str) -> None:
    raw = [(key.encode(), value.encode("latin-1")) for key, value in headers.items()]
    answer = httpx.request(method, small.url + path, headers=raw, timeout=60)
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400 and method != "HEAD":
        check_envelope(answer)
