"""What a request may cost is bounded before it reaches the engine, and what is large keeps nobody waiting."""

import asyncio
import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from forerun import AsyncLLM, SamplingParams
from forerun.drafters import default_length
from forerun.engine.drafting import DrafterPool
from forerun.engine.prompts import LARGE, PromptReader
from forerun.errors import ArgumentError
from forerun.nesting import MAX_DEPTH
from forerun.serve import guards, handling
from forerun.serve.completing import CompletionWriter
from forerun.serve.guards import MAX_BRACKETS, MAX_KEYS, Client
from forerun.serve.protocol.anthropic import CountRequest, MessagesRequest
from forerun.serve.protocol.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from forerun.serve.protocol.responses import ResponsesRequest
from forerun.serve.server import MAX_PIECES
from forerun.serve.settings import ServeSettings
from serve.conftest import NAME, Live, serving
from serve.test_connections import connected, everything

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = "/v1/messages"
ASK = [{"role": "user", "content": "hi"}]
BODIES: list[type[BaseModel]] = [
    *(ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest, CountRequest),
    *(TokenizeRequest, DetokenizeRequest),
]
BOUNDED_BY_THE_BODY = {"prompt", "logprobs"}
"""Lists of token ids, and what comes back to us unread: a megabyte of them costs milliseconds."""


@pytest.fixture(scope="module")
def own(checkpoint: Path, draft_checkpoint: Path) -> Iterator[Live]:
    drafter = {"method": "draft_model", "model": str(draft_checkpoint), "num_speculative_tokens": 3}
    limits = {"max_tokens": 8, "max_queue": 40, "allow_traces": True}
    with serving(checkpoint, speculative=drafter, client_drafters=("ngram", "lookahead"), **limits) as live:
        yield live


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


def called(arguments: str) -> list[dict[str, Any]]:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        *ASK,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_call_id": "call_1"},
    ]


def parts(count: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": ""}] * count}]


def tools(parameters: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_a_list_of_what_it_cannot_hold_is_refused_at_its_first_item(body: type[BaseModel]) -> None:
    """Not at each of them: millions of complaints take minutes and gigabytes."""
    whole = {"messages": ASK, "prompt": "x", "input": "x", "tokens": [1], "model": NAME, "max_tokens": 1}
    required = {name: value for name, value in whole.items() if name in body.model_fields}
    for item, count in itertools.product([1, "x", None, {}, [], [[]], {"type": "text"}, {"a": {}}], [100, 20_000]):
        many = [item] * count
        for name, value in itertools.product(
            body.model_fields, (many, {"type": "content", "content": many}, {"choice": many})
        ):
            try:
                body.model_validate({**required, name.rstrip("_"): value})
            except ValidationError as error:
                assert error.error_count() < 40, (name, item)


def lists(schema: dict[str, Any], name: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every list in a JSON schema, under the parameter's name."""
    if schema.get("type") == "array":
        yield name, schema
    for key, value in schema.items():
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, dict):
                yield from lists(inner, name if key in ("anyOf", "items", "properties", "$defs") else key)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_every_list_has_a_limit_that_the_description_tells(body: type[BaseModel]) -> None:
    for name, schema in lists(body.model_json_schema()):
        assert "maxItems" in schema or name in BOUNDED_BY_THE_BODY, (name, schema)


TOO_MUCH: dict[str, tuple[str, dict[str, Any], str]] = {
    "prompts": (TEXT, {"prompt": ["x"] * 5000}, "prompt"),
    "prompts for the queue": (TEXT, {"prompt": ["x"] * 31}, "prompt"),
    "prompts with n for the queue": (TEXT, {"prompt": ["x"] * 5, "n": 16}, "prompt"),
    "messages": (CHAT, {"messages": ASK * 5000}, "messages"),
    "items": (RESPONSES, {"input": ASK * 5000}, "input"),
    "parts": (CHAT, {"messages": parts(2000)}, "messages"),
    "tools": (CHAT, {"messages": ASK, "tools": tools({}) * 200}, "tools"),
    "bad words": (TEXT, {"prompt": "x", "bad_words": ["a"] * 2000}, "bad_words"),
    "a bad word": (TEXT, {"prompt": "x", "bad_words": ["a" * 2000]}, "bad_words"),
    "stops": (TEXT, {"prompt": "x", "stop": ["a"] * 17}, "stop"),
    "stop ids": (TEXT, {"prompt": "x", "stop_token_ids": [1] * 20_000}, "stop_token_ids"),
    "allowed ids": (TEXT, {"prompt": "x", "allowed_token_ids": [1] * 20_000}, "allowed_token_ids"),
    "biases": (TEXT, {"prompt": "x", "logit_bias": {str(k): 1 for k in range(MAX_KEYS + 1)}}, ""),
    "a bias in another spelling": (TEXT, {"prompt": "x", "logit_bias": {"0" * 500 + "5": 1}}, "logit_bias"),
    "choices": (TEXT, {"prompt": "x", "structured_outputs": {"choice": ["a"] * 9000}}, "structured_outputs"),
    "a name": (TEXT, {"prompt": "x", "user": "a" * 1000}, "user"),
    "a seed": (TEXT, {"prompt": "x", "seed": 10**400}, "seed"),
    "tokens": (TEXT, {"prompt": "x", "max_tokens": 10**400}, "max_tokens"),
    "a penalty": (TEXT, {"prompt": "x", "repetition_penalty": 1e30}, "repetition_penalty"),
    "metadata": (RESPONSES, {"input": "x", "metadata": {str(k): "x" for k in range(100)}}, "metadata"),
    "unknown parameters": (TEXT, {f"x{k}": 1 for k in range(MAX_KEYS + 1)}, ""),
    "lists": (TEXT, {"prompt": [[]] * (MAX_BRACKETS + 1)}, ""),
    "template variables": (CHAT, {"messages": ASK, "chat_template_kwargs": {"x": nested(900)}}, ""),
    "parameters": (CHAT, {"messages": ASK, "tools": tools(nested(MAX_DEPTH))}, ""),
    "arguments": (CHAT, {"messages": called(json.dumps(nested(900)))}, "messages"),
    "arguments that are no JSON": (CHAT, {"messages": called('{"a":' * 50_000)}, "messages"),
    "blocks": (MESSAGES, {"max_tokens": 1, "messages": parts(2000)}, ""),
    "turns": (MESSAGES, {"max_tokens": 1, "messages": ASK * 5000}, ""),
    "a schema": (TEXT, {"prompt": "x", "structured_outputs": {"json": '{"not":' * 50_000}}, ""),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_too_much_is_refused_by_name(own: Live, name: str) -> None:
    path, body, param = TOO_MUCH[name]
    answer = own.post(path, body)
    assert answer.status_code == 400, answer.text[:500]
    error = answer.json()["error"]
    assert (error.get("param") or "").startswith(param) and len(error["message"]) < 1000


def test_a_tool_may_nest_as_deep_as_a_body(own: Live) -> None:
    messages = called(json.dumps(nested(MAX_DEPTH - 1)))
    assert own.post("/tokenize", {"messages": messages}).status_code == 200


def noted_threads(monkeypatch: pytest.MonkeyPatch, place: Any, name: str) -> list[str]:
    """The names of the threads that call a function from now on."""
    threads, function = list[str](), getattr(place, name)

    def noted(*args: Any) -> Any:
        threads.append(threading.current_thread().name)
        return function(*args)

    monkeypatch.setattr(place, name, noted)
    return threads


def test_large_bodies_are_read_in_a_thread_of_their_own(own: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = noted_threads(monkeypatch, guards, "read_json")
    for path, field in ((TEXT, "prompt"), (RESPONSES, "input"), ("/tokenize", "prompt")):
        small, large = own.post(path, {field: "x"}), own.post(path, {field: "the cat " * LARGE})
        assert small.status_code == 200 and large.status_code == 400
    assert [("large" in name) for name in threads] == [False, True] * 3


def test_many_log_probabilities_are_written_in_another_thread(own: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = noted_threads(monkeypatch, CompletionWriter, "_logprobs_of_prompt")
    for stream, count in itertools.product((False, True), (5, 150)):
        asked = {"prompt": list(range(20, 20 + count)), "echo": True, "logprobs": 10, "stream": stream}
        assert own.post(TEXT, {**asked, "max_tokens": 1}).status_code == 200
    assert [("large" in name) for name in threads] == [False, True] * 2


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokens(own: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, read = type(own.llm.tokenizer), list[int]()
    encode = kind.encode

    def seen(self: Any, text: str, *args: Any, **keywords: Any) -> Any:
        read.append(len(text))
        return encode(self, text, *args, **keywords)

    monkeypatch.setattr(kind, "encode", seen)
    large = "the cat " * LARGE
    for path, body in (
        (TEXT, {"prompt": large}),
        (TEXT, {"prompt": ["x", large]}),
        (TEXT, {"prompt": "x", "prediction": {"type": "content", "content": large}}),
        (CHAT, {"messages": [{"role": "user", "content": large}]}),
        (RESPONSES, {"input": large}),
    ):
        answer = own.post(path, body)
        assert answer.status_code == 400 and "characters" in answer.json()["error"]["message"]
    assert max(read, default=0) < LARGE


def test_log_probabilities_of_prompts_are_counted_by_tokens(own: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "the cat sat on the mat and the dog"
    ids = own.post("/tokenize", {"prompt": text}).json()["tokens"]
    assert len(ids) < len(text)
    monkeypatch.setattr(handling, "MAX_SCORED", 2 * len(ids))
    asked = {"echo": True, "logprobs": 1, "max_tokens": 1}
    for prompt in (text, ids):
        assert own.post(TEXT, {"prompt": prompt, **asked}).status_code == 200
        refused = own.post(TEXT, {"prompt": [prompt, prompt], **asked})
        message = refused.json()["error"]["message"]
        assert refused.status_code == 400 and message.startswith(f"{4 * len(ids)} log-probabilities")
    cut = {"prompt": text * 3, "truncate_prompt_tokens": 5, **asked}
    assert own.post(TEXT, cut).json()["usage"]["prompt_tokens"] == 5


def test_no_request_builds_a_drafter_and_drafts_are_as_long_as_asked(
    own: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is there from the start, built for the longest drafts that may be asked for."""
    built, build = list[Any](), DrafterPool._built
    monkeypatch.setattr(DrafterPool, "_built", lambda self, config: (built.append(config), build(self, config))[1])
    card = own.get("/v1/models").json()["data"][0]["speculation"]
    assert card["max_speculative_tokens"] == {"draft_model": 3, "ngram": 16, "lookahead": 16}
    body = {"prompt": "the cat sat on the cat sat on the cat sat on", "max_tokens": 8, "temperature": 0}
    body |= {"ignore_eos": True, "return_speculation_trace": True}
    for name, most in card["max_speculative_tokens"].items():
        for length in (None, *range(1, most + 1)):
            chosen = {"drafter": name} | ({} if length is None else {"num_speculative_tokens": length})
            [trace] = own.post(TEXT, {**body, "speculative": chosen}).json()["speculation_trace"]
            for step in trace["steps"]:
                depths = [0]
                for node in step["nodes"]:
                    depths.append(depths[node["parent"]] + 1)
                    assert depths[-1] <= (length or most) or node["probe"]
        answer = own.post(TEXT, {"prompt": "x", "speculative": {"drafter": name, "num_speculative_tokens": most + 1}})
        assert answer.status_code == 400 and f"at most {most}" in answer.json()["error"]["message"]
    assert own.post(TEXT, {"prompt": "the cat"}).status_code == 200
    assert not built and default_length("ngram") == 8


def test_a_part_of_the_queue_is_left_to_those_who_ask_for_little(own: Live) -> None:
    guards.CLIENT.set(Client(name="somebody", domain=None))
    with own.session.admitted(20), own.session.admitted(10):
        assert own.post(TEXT, {"prompt": ["x", "y"]}).status_code == 429
        assert own.post(TEXT, {"prompt": "x"}).status_code == 200
    assert own.post(TEXT, {"prompt": ["x", "y"]}).status_code == 200
    assert ServeSettings(max_queue=1).queue_for(1) == 1


async def test_what_is_small_does_not_wait_for_what_is_large(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with AsyncLLM(str(checkpoint), dtype="float32", max_num_seqs=2) as llm:
        request, release, threads = PromptReader.request, threading.Event(), list[str]()

        def slow(reader: PromptReader, number: int, prompt: Any, *args: Any, **keywords: Any) -> Any:
            threads.append(threading.current_thread().name)
            if len(prompt) > LARGE:
                release.wait(20)
            return request(reader, number, prompt, *args, **keywords)

        monkeypatch.setattr(PromptReader, "request", slow)
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        large = asyncio.create_task(llm.generate("the cat " * LARGE, params))
        await asyncio.sleep(0.05)
        [output] = await llm.generate("the cat", params)
        assert len(output.outputs[0].token_ids) == 2 and not large.done()
        release.set()
        with pytest.raises(ArgumentError, match="characters"):
            await large
        assert [name.rsplit("_", 1)[0] for name in threads] == ["forerun-prepare-large", "forerun-prepare-small"]


def test_one_address_has_so_many_requests_that_arrive_slowly(checkpoint: Path) -> None:
    """Further ones have a second: the others may go on."""
    with serving(checkpoint, max_arriving=2) as live:
        with connected(live) as first, connected(live) as second:
            for one in (first, second):
                one.sendall(b"GET /health HTTP/1.1\r\n")
            with connected(live) as third:
                third.sendall(b"GET /health HTTP/1.1\r\n")
                status, _, body = everything(third)
            assert status == 408 and "within 1" in body["error"]["message"]
            for one in (first, second):
                one.sendall(b"Host: x\r\nConnection: close\r\n\r\n")
                assert everything(one)[0] == 200
        with connected(live) as later:
            later.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert everything(later)[0] == 200


def test_a_body_in_countless_pieces_is_refused(own: Live) -> None:
    """Each takes longer than a byte."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    for count in (MAX_PIECES // 2, 2 * MAX_PIECES):
        with connected(own) as one:
            one.sendall(head + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n")
            one.sendall(b"1\r\n1\r\n" * count + b"0\r\n\r\n")
            found, _, body = everything(one)
        assert found == 400 and (body["error"]["code"] == "invalid_http") == (count > MAX_PIECES)
