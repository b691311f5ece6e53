"""What a refusal tells (envelope, parameter, method, content) and what it never does: paths, places in code, panics."""

import itertools
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from forerun import LLM, SamplingParams
from forerun.engine.prompts import PromptReader
from forerun.errors import ArgumentError, CheckpointError, EngineError
from forerun.params import StructuredOutputs
from forerun.serve import logs
from forerun.serve.logs import RequestRecord
from forerun.serve.protocol.errors import OTHER_NAMES, ApiError, clean_message
from forerun.serve.protocol.requests import ChatRequest, CompletionRequest
from serve.conftest import Live, counters, sent, serving, with_template
from serve.test_logs import Kept, kept, named

__all__ = ["kept"]

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
ASK = [{"role": "user", "content": "hi"}]
WRONG = {"type": "nonsense"}  # A schema of no type that there is
KEYED = {"authorization": "Bearer secret"}
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
TOOL = {"type": "function", "function": {"name": "f"}}
EITHER = "expected a text or a list"


@pytest.fixture(scope="module")
def locked(checkpoint: Path) -> Iterator[Live]:
    """A server with a key that takes 2,000 bytes."""
    with serving(checkpoint, api_keys=("secret",), max_body_bytes=2_000) as live:
        yield live


def routes(live: Live, status: int) -> dict[str, float]:
    """How often each route answered with this status."""
    found = counters(live)
    return {key.split('"')[1]: value for key, value in found.items() if f'status="{status}"' in key and "_total" in key}


def said(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def schema(**named: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def chosen(**choice: Any) -> dict[str, Any]:
    return {"tools": [TOOL], "tool_choice": choice}


def alone(path: str, **fields: Any) -> list[tuple[str, dict[str, Any], str | None, str]]:
    """Each of the fields in a request of its own, which its refusal names."""
    return [(path, {name: value}, name, "") for name, value in fields.items()]


REFUSED: list[tuple[str, dict[str, Any], str | None, str]] = [
    *alone(CHAT, messages=[], temperature="hot", n=4, max_tokens=10_000, top_logprobs=2),
    *alone(TEXT, prompt="", prediction={"content": "x " * 900}, stop_token_ids=[10**6], allowed_token_ids=[-5]),
    *alone(TEXT, logit_bias={"1000000": 1}, guided_regex="(", guided_choice=[], guided_json=WRONG),
    *((TEXT, {"prompt": prompt}, "prompt", "") for prompt in ([], "x " * 900, [5] * 900, [10**6])),
    *alone(TEXT, structured_outputs={"regex": "("}),
    *alone(TEXT, structured_outputs={"regex": "a", "choice": ["a"]}),
    *alone(TEXT, structured_outputs={}),
    *alone(RESPONSES, input=[], temperature=3),
    *alone(RESPONSES, input="x " * 900),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format", "needs a schema"),
    (RESPONSES, {"text": {"format": {"type": "json_object", "schema": {}}}}, "text.format", "takes schema"),
    (RESPONSES, {"text": {"format": {"type": "text", "strict": True}}}, "text.format", "takes strict"),
    (RESPONSES, {"text": {"format": {"type": "text", "name": "x"}}}, "text.format", "takes name"),
    (CHAT, {"messages": ["x"]}, "messages.0", "an object"),
    (CHAT, said(5), "messages.0.content", EITHER),
    (
        CHAT,
        said([IMAGE]),
        "messages.0.content.0.type",
        "only 'text' is supported, got 'image_url': this server reads text",
    ),
    (CHAT, {"foo": 1, "temprature": 2, "bar": 3}, "foo", "parameters 'foo', 'temprature', 'bar' are not supported"),
    (CHAT, {"functions": [TOOL]}, "functions", "did you mean 'tools'?"),
    (
        RESPONSES,
        {"tools": [{"type": "web_search", "filters": {}}]},
        "tools.0.type",
        "only 'function' is supported, got",
    ),
    (RESPONSES, {"tools": [{"type": "mcp", "server_url": "x"}]}, "tools.0.type", "got 'mcp'"),
    (CHAT, said([{"type": "text", "text": 3}]), "messages.0.content.0.text", ""),
    (CHAT, said("x " * 900), "messages", ""),
    (CHAT, {"temperature": -1}, "temperature", ""),
    (CHAT, {"Temperature": 1}, "Temperature", "not supported"),
    (CHAT, {"stop": ["x"] * 17}, "stop", "at most 16 items"),
    (CHAT, {"stop": [1]}, "stop.0", "expected a text"),
    (CHAT, {"stop": 5}, "stop", EITHER),
    (CHAT, {"stop": ""}, "stop", "1 to 256 characters"),
    (CHAT, {"logit_bias": {"cat": 1}}, "logit_bias", "keys are token ids"),
    (CHAT, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1, got 0"),
    (CHAT, {"truncate_prompt_tokens": "x"}, "truncate_prompt_tokens", "a whole number or -1"),
    (CHAT, {"tools": [TOOL], "tool_choice": "bogus"}, "tool_choice", "only 'none', 'auto' or 'required'"),
    (CHAT, {"tools": [TOOL], "tool_choice": 5}, "tool_choice", "'required' or an object"),
    (CHAT, chosen(type="function"), "tool_choice.function", "missing"),
    (CHAT, chosen(type="function", function={}), "tool_choice.function.name", ""),
    (CHAT, chosen(type="allowed_tools", allowed_tools={"mode": "auto"}), "tool_choice.allowed_tools.tools", "missing"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format", "needs json_schema"),
    (CHAT, schema(), "response_format.json_schema.name", ""),
    (CHAT, schema(name="x"), "response_format.json_schema.schema", ""),
    (CHAT, schema(name="x", schema=WRONG), "response_format", ""),
    (CHAT, {"guided_json": 5}, "guided_json", "an object or a text"),
    (CHAT, {"metadata": {"Run": 5}}, "metadata.Run", "expected a text"),
    (CHAT, {"metadata": {"x" * 65: "y"}}, f"metadata.{'x' * 65}", "at most 64"),
    (CHAT, {"prediction": {"type": "content", "content": 3}}, "prediction.content", ""),
    (CHAT, {"speculative": {"num_speculative_tokens": 99}}, "speculative.num_speculative_tokens", ""),
    (CHAT, {"speculative": {"drafter": "eagle3"}}, "speculative.drafter", ""),
    (CHAT, {"speculative": {"drafter": "os:path"}}, "speculative.drafter", ""),
    (CHAT, {"speculative": {"model": "/etc/passwd"}}, "speculative.model", ""),
    (TEXT, {"prompt": 5}, "prompt", EITHER),
    (TEXT, {"prompt": ["a", 1]}, "prompt.1", "expected a text"),
    (TEXT, {"prompt": [1, "a"]}, "prompt.1", "expected a whole number"),
    (TEXT, {"prompt": [[1], ["a"]]}, "prompt.1.0", "expected a whole number"),
    (TEXT, {"speculative": {"rule": "nonsense"}}, None, "nonsense"),
    (TEXT, {"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least 1 item"),
    (RESPONSES, {"input": 5}, "input", EITHER),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type", "'function_call'"),
    (RESPONSES, {"input": [{"type": "function_call", "call_id": "1"}]}, "input.0.name", "missing"),
    (RESPONSES, {"input": [{"role": "user", "content": [IMAGE]}]}, "input.0.content.0.type", "'input_text'"),
    ("/tokenize", {"prompt": "x" * 500_000}, "prompt", ""),
    ("/tokenize", said("x" * 500_000), "messages", ""),
    ("/tokenize", {}, "prompt", ""),
    ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt", "belongs to messages"),
    ("/detokenize", {"tokens": [10**9]}, "tokens", ""),
]


@pytest.mark.parametrize(("path", "body", "param", "words"), REFUSED, ids=lambda value: str(value)[:60])
def test_refusals_name_a_parameter(live: Live, path: str, body: dict[str, Any], param: str | None, words: str) -> None:
    """Streamed or not; of a union, the branch that is meant."""
    whole = {CHAT: {"messages": ASK}, TEXT: {"prompt": "x"}, RESPONSES: {"input": "x"}}.get(path, {}) | body
    for more in [{}, {"stream": True}] if path.startswith("/v1") else [{}]:
        answer = live.post(path, whole | more)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (400, "invalid_request_error"), error
        assert error["message"] and words in error["message"] and param in (None, error["param"]), error


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
    answer = live.post("/v1/messages", {"max_tokens": 1, **said([block])})
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(words)


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "continue_final_message", "self"])
def test_parameters_are_no_variables_of_the_template(live: Live, name: str) -> None:
    for value in (False, []):
        answer = live.post(CHAT, {"messages": ASK, "chat_template_kwargs": {name: value}})
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == "chat_template_kwargs"
        assert error["message"].startswith(f"{name}: not a variable") and "()" not in error["message"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"prompt": "x",\n  "n": 1,\n}', "(line 3, column 1)"),
        ('{"prompt" "x"}', "(line 1, column 11)"),
        ('{"prompt": NaN}', "no NaN in JSON"),
    ],
)
def test_what_is_no_json_is_told_where(live: Live, text: str, words: str) -> None:
    answer = httpx.post(live.url + TEXT, content=text, headers={"content-type": "application/json"}, timeout=30)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text


def test_a_body_without_a_type_is_refused_and_no_body_needs_one(live: Live) -> None:
    for content in (b'{"prompt": "x"}', iter([b'{"prompt": "x"}'])):
        answer = httpx.post(live.url + TEXT, content=content, timeout=30)
        assert answer.status_code == 415 and "send Content-Type: application/json" in answer.text
    assert httpx.post(live.url + TEXT, timeout=30).status_code == 400, "which says that the body is missing"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/chat/completions", "a client's base URL ends with one /v1: this is '/v1/chat/completions'"),
        ("/v1/v1/completions", "this is '/v1/completions'"),
        ("/v1/chat/completion", "the nearest is '/v1/chat/completions'"),
        ("/v1/embeddings", "no embeddings"),
        ("/rerank", "does not rank"),
        ("/v1/images/generations", "no images"),
        ("/v1/audio/speech", "no audio"),
        ("/api/chat", "not Ollama's: the client's base URL is http://HOST:PORT/v1"),
        ("/v1/responses/resp_1", "keeps no responses"),
        ("/docs", "/openapi.json"),
        ("/v1/nothing", "'/v1/nothing': there is no such path here"),
    ],
)
def test_a_path_that_is_not_served(live: Live, path: str, words: str) -> None:
    for answer in (live.post(path, {}), live.get(path)):
        error = answer.json()["error"]
        assert answer.status_code == 404 and words in error["message"] and error["code"] == "not_found", error


def test_a_body_that_is_too_large_announced_or_not(checkpoint: Path) -> None:
    def pieces() -> Iterator[bytes]:
        yield from (b'{"prompt": "', *[b"x" * 100] * 20, b'"}')

    with serving(checkpoint, max_body_bytes=500) as small:
        assert small.post(TEXT, {"prompt": "x" * 1000}).status_code == 413
        answer = httpx.post(small.url + TEXT, content=pieces(), headers={"content-type": "application/json"})
        assert answer.status_code == 413


@pytest.mark.parametrize(
    ("origins", "origin", "let_in"), [((), "http://x", None), (("http://page",), "http://page", "http://page")]
)
def test_pages_of_other_origins_are_let_in_where_the_operator_says_so(
    checkpoint: Path, origins: tuple[str, ...], origin: str, let_in: str | None
) -> None:
    with serving(checkpoint, allowed_origins=origins) as live:
        headers = {"origin": origin, "access-control-request-method": "POST"}
        answer = httpx.options(live.url + CHAT, headers=headers, timeout=30)
        assert answer.headers.get("access-control-allow-origin") == let_in


def test_request_ids_come_back(live: Live) -> None:
    assert live.get("/health", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    made = live.get("/health", headers={"x-request-id": "bad id\twith blanks"}).headers["x-request-id"]
    assert made.startswith("req-")


def test_a_request_may_name_its_answer(live: Live) -> None:
    """As in vLLM; whole and streamed, in every event."""
    for path, body, prefix in ((TEXT, {"prompt": "x"}, "cmpl"), (CHAT, {"messages": ASK}, "chatcmpl")):
        asked = {**body, "max_tokens": 2, "request_id": "mine:1"}
        assert live.post(path, asked).json()["id"] == f"{prefix}-mine:1"
        assert {event["id"] for event in sent(live.post(path, {**asked, "stream": True}).text)} == {f"{prefix}-mine:1"}
        for wrong in ("", "a" * 129, "a\nb", "\u00e9", 5):
            refused = live.post(path, {**asked, "request_id": wrong})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "request_id")


@pytest.mark.parametrize(
    ("regex", "words"), [("(the|cat)", "every token is banned"), ("ab", "min_tokens (a complete structured output")]
)
def test_a_wish_that_leaves_no_token_is_refused_alone(live: Live, regex: str, words: str) -> None:
    """Behind its last letter the grammar allows the end alone, which `min_tokens` forbids."""
    body = {"prompt": "the", "max_tokens": 20, "min_tokens": 15, "structured_outputs": {"regex": regex}}
    answer = live.post(TEXT, body)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]
    assert words in live.post(TEXT, body | {"stream": True}).text
    assert live.post(TEXT, {"prompt": "the", "max_tokens": 4}).status_code == 200


@pytest.mark.parametrize("name", [*OTHER_NAMES, "max_token", "temprature", "top-p", "seeds"])
def test_a_foreign_name_is_told_ours(live: Live, name: str) -> None:
    for path, kind, body in ((TEXT, CompletionRequest, {"prompt": "x"}), (CHAT, ChatRequest, {"messages": ASK})):
        error = live.post(path, {**body, name: 3}).json()["error"]
        assert error["param"] == name
        ours = error["message"].partition("did you mean '")[2].rstrip("'?")
        assert ours.partition(".")[0] in kind.model_fields if ours else OTHER_NAMES.get(name) not in kind.model_fields
    assert "leave it out" in live.post(TEXT, {"prompt": "x", "frobnicate": 1}).text


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"drafter": "ngram"}, "did you mean 'speculative.drafter'?"),
        ({"use_beam_search": True}, "of 'use_beam_search' only false is taken"),
        ({"best_of": 2, "suffix": "end"}, "did you mean 'n' in place of 'best_of'?; of 'suffix' only \"\" is taken"),
        ({"stop": ["a"] * 99}, "stop: expected at most 16 items"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice: expected at least 1 item"),
    ],
)
def test_a_refusal_says_what_to_send(live: Live, more: dict[str, Any], words: str) -> None:
    assert str(live.post(TEXT, {"prompt": "x", **more}).json()["error"]["message"]).endswith(words)


def test_a_wrong_method_is_told_the_right_ones(locked: Live) -> None:
    wanted = {TEXT: "POST", "/v1/models": "GET", "/health": "GET", "/ping": "GET, POST"}
    for path, methods in wanted.items():
        answer = httpx.request("DELETE", locked.url + path, headers=KEYED, timeout=30)
        assert answer.status_code == 405 and answer.headers["allow"] == methods and methods in answer.text
    assert set(routes(locked, 405)) == set(wanted)
    assert locked.get("/v1/nothing", headers=KEYED).json()["error"]["code"] == "not_found"


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


@pytest.mark.parametrize(("route", "status", "shown"), [("/health", 503, 0), ("/health", 500, 1), (TEXT, 503, 1)])
def test_probes_while_it_loads_are_no_news(
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


TELLING = re.compile(r"site-packages|\.rs\b|\.py\b|panick|/root|/home|/tmp|/usr|/srv|\.cargo|Traceback|0x[0-9a-f]{6}")
SECRET = "/srv/models/very-private"


FORMS: dict[str, list[Any]] = {
    "regex": [
        *("(", "[", "a{9999999999}", "(?<=x)y", "\\p{Nonsense}", "(?P<n>x)(?P=n)", "a" * 9000),
        *("(" * 200, "a{1,100000}b{1,100000}", "[" + "\\u0000-" * 5),
    ],
    "grammar": [
        *("", "start", "start: x", "start: start", "start: /(/", "start: <[999999]>", "%import x.y\nstart: y"),
        *("start: %json {", "start: %llguidance {}", "start: " + "(" * 200 + '"x"' + ")" * 200, "start: " + "(" * 3000),
    ],
    "json": [
        *({"$ref": "#"}, {"$ref": "#/nowhere"}, {"$ref": "file:///etc/passwd"}, {"$ref": "https://example.org/x"}),
        *({"type": "nonsense"}, {"type": 7}, {"enum": []}, {"minimum": 3, "maximum": 2, "type": "integer"}, '{"a'),
        *({"pattern": "(", "type": "string"}, {"pattern": "(?<=x)y", "type": "string"}),
        *({"minItems": 10**9, "type": "array"}, {"properties": {"a": {"$ref": "#/properties/b"}}, "type": "object"}),
        {"properties": {"x": {"$ref": "#/properties/x"}}, "type": "object"},
    ],
    "choice": [[], [""], ["\u0000", "\U0010ffff"]],
}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    *(
        (TEXT, {"prompt": "x", "max_tokens": 4, "structured_outputs": {kind: form}})
        for kind, forms in FORMS.items()
        for form in forms
    ),
    (CHAT, {"messages": ASK, "chat_template_kwargs": {"tokenize": True}}),
    (CHAT, {"messages": ASK, "chat_template_kwargs": {"messages": 3}}),
    (CHAT, {"messages": [{"role": "user", "content": "fail"}]}),
    (TEXT, {"prompt": "x", "speculative": {"drafter": "rest"}}),
    (TEXT, {"prompt": "x", "speculative": {"drafter": "draft_model"}}),
    (TEXT, {"prompt": "x", "speculative": {"drafter": "eagle3"}}),
    (TEXT, {"prompt": "x", "speculative": {"drafter": "ngram", "rule": "nonsense"}}),
    (TEXT, {"prompt": "x", "bad_words": [""]}),
    ("/tokenize", {"prompt": "\x00" * 9}),
    ("/detokenize", {"tokens": [-1]}),
]


@pytest.fixture(scope="module")
def offering(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server whose operator offers what it cannot have, with a template that names files."""
    refused = "{{ raise_exception('no /srv/models/very-private/x.jinja') }}"
    template = "{% if messages[0].content == 'fail' %}" + refused + "{% endif %}hi"
    folder = with_template(checkpoint, tmp_path_factory.mktemp("templated"), template)
    with serving(folder, client_drafters=("ngram", "recycling")) as live:
        yield live


@pytest.mark.parametrize(("path", "body"), REQUESTS, ids=lambda value: str(value)[-60:])
def test_no_answer_tells_of_the_machine(offering: Live, path: str, body: dict[str, Any]) -> None:
    """Streamed or not, and whatever no engine of grammars takes: it is answered or refused, and never long."""
    for more in ({}, {"stream": True}) if path.startswith("/v1") else ({},):
        answer = offering.post(path, body | more)
        assert answer.status_code in (200, 400) and "server_error" not in answer.text, answer.text
        assert not TELLING.search(answer.text) and len(answer.text) < 4000, answer.text


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (FileNotFoundError(2, "No such file or directory", f"{SECRET}/config.json"), 500),
        (RuntimeError(f"{SECRET}/x.py:3 failed"), 500),
        (ValueError(f"cannot read {SECRET}/x"), 400),
        (UnicodeEncodeError("utf-8", f"{SECRET}", 0, 1, "no"), 400),
        (CheckpointError(f"there is no directory {SECRET}/head: expected a checkpoint"), 400),
        (ArgumentError(f"panicked at src/earley/parser.rs:12:3: {SECRET}/a"), 400),
        (EngineError(f"a step failed: {SECRET}/a"), 500),
    ],
)
def test_nor_does_the_engines_error(live: Live, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    steps: list[tuple[type, str]] = [(PromptReader, "request"), (LLM, "chat_prompt")]
    for (owner, broken), stream in itertools.product(steps, [False, True]):
        with monkeypatch.context() as one:
            one.setattr(owner, broken, fail)
            answer = live.post(CHAT, {"messages": ASK, "max_tokens": 3, "stream": stream})
        assert answer.status_code == status, answer.text
        assert not TELLING.search(answer.text) and "private" not in answer.text


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("cannot open /data/models/x/config.json: no", "cannot open (a file): no"),
        ("cannot open '/data/models/x', line 3", "cannot open '(a file)', line 3"),
        ("at ~/models/x and ../a/b and file:///a/b", "at (a file) and (a file) and (a file)"),
        ("at src/earley/lexer.rs:12:3 it", "at (a file) it"),
        ("the schema: $ref #/definitions/a is unknown", "the schema: $ref #/definitions/a is unknown"),
        ("see https://example.org/a/b", "see https://example.org/a/b"),
        ("'a/b/c' is no model; n is 1/2; and/or", "'a/b/c' is no model; n is 1/2; and/or"),
        ("the parameter 'panic' is unknown", "the parameter 'panic' is unknown"),
        ("x" * 5000, "x" * 1000 + "..."),
    ],
)
def test_what_is_left_of_a_message(message: str, shown: str) -> None:
    assert clean_message(message) == shown == str(ApiError(400, message))


def test_a_failing_step_is_written_once_and_the_next_request_is_answered(
    checkpoint: Path, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(checkpoint, log_prompts=True) as live:

        def fail() -> Any:
            raise ValueError("begins " + "x" * 50_000 + " ends")

        with monkeypatch.context() as broken:
            broken.setattr(live.llm.engine, "step", fail)
            answer = live.post(TEXT, {"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 4}, **named("many"))
        assert answer.status_code == 500
        error = kept.of("many", "a request failed")
        assert live.post(TEXT, {"prompt": "the cat", "max_tokens": 4}).status_code == 200
    assert error["error"] == "ValueError" and error["where"].startswith("fail (")
    assert "begins" in error["message"] and "ends" in error["message"]
    assert all(len(line) < 10_000 for line in kept.lines)
    assert len([one for one in kept.entries() if one["level"] == "error" and one["event"] != "request"]) == 1
