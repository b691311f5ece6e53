"""``/v1/messages`` through Anthropic's official client: whole, streamed event by event, with calls, with reasoning, and
what is refused."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serve.conftest import NAME, TEMPLATE, Live, serving, with_template
from serve.test_probes import FUNCTION, SCHEMA

anthropic = pytest.importorskip("anthropic", reason="needs Anthropic's client, of the extra dev")

THINKING = TEMPLATE.replace("assistant: ", "assistant: {% if enable_thinking %}<think>{% endif %}")
ASK: Any = [{"role": "user", "content": "the cat sat on"}]
TOOL: Any = {"name": "weather", "description": "of a place", "strict": True, "input_schema": FUNCTION["parameters"]}
KINDS = (
    *("message_start", "content_block_start", "content_block_delta", "content_block_stop"),
    *("message_delta", "message_stop"),
)
GREEDY = {"temperature": 0}
"""The client has no name of its own for it."""
NAMED: Any = {"type": "tool", "name": "weather"}


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    model = with_template(checkpoint, tmp_path_factory.mktemp("messages"), TEMPLATE)
    with serving(model, api_keys=("secret",), max_tokens=150) as running:
        yield running


def official(live: Live, key: str = "secret") -> Any:
    """The client; it sends its key as ``x-api-key``."""
    return anthropic.Anthropic(base_url=live.url, api_key=key, max_retries=0, timeout=30)


@pytest.fixture
def client(server: Live) -> Iterator[Any]:
    with official(server) as found:
        yield found


def prompt_of(live: Live, text: str) -> int:
    return len(live.llm.tokenizer.encode(text))


def completed(live: Live, prompt: str, **more: Any) -> dict[str, Any]:
    """What a completion of the same prompt says."""
    body, headers = {"prompt": prompt, "temperature": 0, **more}, {"authorization": "Bearer secret"}
    return dict(live.post("/v1/completions", body, headers=headers).json())


def streamed(client: Any, **asked: Any) -> tuple[list[Any], Any]:
    """The events as they came, and the message that the client puts together from them."""
    with client.messages.stream(model=NAME, **asked) as stream:
        events = [event for event in stream if event.type in KINDS]
        return events, stream.get_final_message()


def test_a_text(server: Live, client: Any) -> None:
    asked: dict[str, Any] = {"messages": ASK, "system": "be brief", "max_tokens": 9, "extra_body": GREEDY}
    whole = client.messages.create(model=NAME, **asked)
    prompt = "system: be brief\nuser: the cat sat on\nassistant: "
    [expected] = completed(server, prompt, max_tokens=9)["choices"]
    assert [block.type for block in whole.content] == ["text"] and whole.content[0].text == expected["text"]
    assert (whole.role, whole.type, whole.model, whole.stop_reason) == ("assistant", "message", NAME, "max_tokens")
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (prompt_of(server, prompt), 9)
    events, message = streamed(client, **asked)
    assert message.content[0].text == whole.content[0].text and message.stop_reason == "max_tokens"
    assert (message.usage.input_tokens, message.usage.output_tokens) == (prompt_of(server, prompt), 9)
    deltas = [event for event in events if event.type == "content_block_delta"]
    assert len(deltas) > 2 and all(event.index == 0 and event.delta.type == "text_delta" for event in deltas)
    others = [event.type for event in events if event not in deltas]
    assert others == [kind for kind in KINDS if kind != "content_block_delta"]
    assert events[0].message.usage.input_tokens == prompt_of(server, prompt)


def test_where_it_stops(client: Any) -> None:
    asked: dict[str, Any] = {"messages": ASK, "max_tokens": 30, "extra_body": GREEDY}
    text = client.messages.create(model=NAME, **asked).content[0].text
    stop = text[7:10]
    whole = client.messages.create(model=NAME, stop_sequences=[stop], **asked)
    for found in (whole, streamed(client, stop_sequences=[stop], **asked)[1]):
        assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", stop)
        assert found.content[0].text == text[: text.index(stop)]
    nothing = client.messages.create(model=NAME, **{**asked, "max_tokens": 0})
    assert nothing.content == [] and nothing.usage.output_tokens == 0 and nothing.stop_reason == "max_tokens"


@pytest.mark.parametrize("choice", [NAMED, {"type": "any"}, {"type": "any", "disable_parallel_tool_use": True}])
def test_a_call_and_what_it_brought(server: Live, client: Any, choice: Any) -> None:
    asked: dict[str, Any] = {"messages": ASK, "tools": [TOOL], "tool_choice": choice, "max_tokens": 140}
    first = client.messages.create(model=NAME, extra_body=GREEDY, **asked)
    calls = [block for block in first.content if block.type == "tool_use"]
    assert calls and all(call.name == "weather" and call.input["unit"] in ("C", "F") for call in calls[:1])
    if choice.get("type") == "tool" or choice.get("disable_parallel_tool_use"):
        assert len(calls) == 1 and first.stop_reason == "tool_use"
    events, message = streamed(client, extra_body=GREEDY, **asked)
    both = [[(block.type, getattr(block, "input", None)) for block in one.content] for one in (message, first)]
    assert both[0] == both[1]
    assert any(event.type == "content_block_delta" and event.delta.type == "input_json_delta" for event in events)
    call = calls[0]
    turns = [
        *ASK,
        {"role": "assistant", "content": [*first.content[: first.content.index(call)], call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "9"}]},
    ]
    again = client.messages.create(model=NAME, messages=turns, tools=[TOOL], max_tokens=2, extra_body=GREEDY)
    said = "".join(block.text for block in first.content[: first.content.index(call)])
    prompt = f"weather user: the cat sat on\nassistant: {said}weather{call.input['unit']}\ntool: 9\nassistant: "
    assert again.usage.input_tokens == prompt_of(server, prompt)


def test_the_conversation_as_the_model_reads_it(server: Live, client: Any) -> None:
    """Blocks, turns that follow each other, results beside text, errors, reasoning, hints about caches; and counted."""
    hint = {"cache_control": {"type": "ephemeral"}}
    use = {"type": "tool_use", "id": "a", "name": "weather", "input": {"unit": "C"}, **hint}
    failed = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "no"}], "is_error": True}
    turns: Any = [
        {"role": "user", "content": [{"type": "text", "text": "the ", **hint}, {"type": "text", "text": "cat"}]},
        {"role": "user", "content": " sat"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, use]},
        {"role": "user", "content": [failed, {"type": "text", "text": "and?"}]},
    ]
    system: Any = [{"type": "text", "text": "be "}, {"type": "text", "text": "brief", **hint}]
    asked: dict[str, Any] = {"model": NAME, "messages": turns, "system": system, "tools": [TOOL]}
    counted = client.messages.count_tokens(**asked)
    prompt = (
        "weather system: be brief\nuser: the cat sat\nassistant: (hm)weatherC\ntool: Error: no\nuser: and?\nassistant: "
    )
    assert counted.input_tokens == prompt_of(server, prompt)
    assert client.messages.create(max_tokens=1, **asked).usage.input_tokens == counted.input_tokens


def test_the_answer_goes_on_with_an_assistants_message(server: Live, client: Any) -> None:
    messages = [*ASK, {"role": "assistant", "content": "the mat"}]
    found = client.messages.create(model=NAME, messages=messages, max_tokens=6, extra_body=GREEDY)
    [expected] = completed(server, "user: the cat sat on\nassistant: the mat", max_tokens=6)["choices"]
    assert found.content[0].text == expected["text"]


def test_a_form(client: Any) -> None:
    config: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    found = client.messages.create(model=NAME, messages=ASK, max_tokens=60, extra_body=GREEDY, output_config=config)
    assert found.stop_reason == "max_tokens" or json.loads(found.content[0].text)["a"] in (1, 2)


def test_reasoning(checkpoint: Path, tmp_path: Path) -> None:
    """It comes in a block of its own, can be sent back, and is switched by `thinking`."""
    with (
        serving(with_template(checkpoint, tmp_path, THINKING), reasoning_parser="<think> e") as live,
        official(live) as client,
    ):
        asked: dict[str, Any] = {"messages": ASK, "max_tokens": 60, "extra_body": {"temperature": 1.0}}
        enabled: Any = {"type": "enabled", "budget_tokens": 1024}
        whole = (client.messages.create(model=NAME, thinking={"type": "adaptive"}, **asked) for _ in range(50))
        parts = (streamed(client, thinking=enabled, **asked)[1] for _ in range(50))
        for answers in (whole, parts):  # the model is random: now and then it thinks nothing, or of nothing else
            thought = next(found for found in answers if len(found.content) == 2)
            assert [block.type for block in thought.content] == ["thinking", "text"]
            assert "e" not in thought.content[0].thinking and thought.content[0].signature == ""
        back = [*ASK, {"role": "assistant", "content": thought.content}, {"role": "user", "content": "and"}]
        plain = client.messages.create(model=NAME, messages=back, thinking={"type": "disabled"}, max_tokens=3)
        assert plain.content[0].type == "text"


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"frobnicate": 1}, "frobnicate"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "no image"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]},
            "tool_use",
        ),
        ({"messages": [*ASK, {"role": "assistant", "content": []}]}, "assistant"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "got 'web_search_20250305'"),
        ({"tools": [{"name": "a", "input_schema": {"properties": 3}}]}, "tools.0.input_schema"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "nobody"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "reasoning cannot be enabled"),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display"),
        ({"output_config": {"effort": "some"}}, "output_config.effort"),
        ({"container": "a"}, "container"),
        ({"mcp_servers": []}, "mcp_servers"),
        ({"stop_sequences": [""]}, "stop_sequences"),
    ],
)
def test_refused_by_name(client: Any, more: dict[str, Any], name: str) -> None:
    asked: dict[str, Any] = {"model": NAME, "messages": ASK, "max_tokens": 2}
    for stream in (False, True):
        with pytest.raises(anthropic.BadRequestError) as caught:
            client.messages.create(**asked, extra_body={**more, "stream": stream})
        error = caught.value.body
        assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
        assert name in error["error"]["message"], error


@pytest.mark.parametrize(
    "more",
    [
        {"thinking": {"type": "disabled"}},
        {"thinking": None, "system": None, "tools": None, "tool_choice": None, "metadata": None, "top_k": None},
        {"metadata": {"user_id": "u"}},
        {"service_tier": "standard_only"},
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
        {"output_config": {"effort": "low"}},
        {"tools": []},
        {"tools": [{**TOOL, "type": "custom", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]},
        {"tools": [TOOL], "tool_choice": {"type": "none"}},
        {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        {"top_k": 5, "top_p": 0.9},
        {"speculative": {"drafter": "ngram"}},
        {"cache_control": {"type": "ephemeral"}},
    ],
)
def test_answered(client: Any, more: dict[str, Any]) -> None:
    assert client.messages.create(model=NAME, messages=ASK, max_tokens=2, extra_body=more).usage.output_tokens == 2


def test_other_errors_in_anthropics_envelope(server: Live) -> None:
    asked: dict[str, Any] = {"messages": ASK, "max_tokens": 2}
    with official(server, "wrong") as stranger, pytest.raises(anthropic.AuthenticationError) as caught:
        stranger.messages.create(model=NAME, **asked)
    assert caught.value.body["error"]["type"] == "authentication_error"
    with official(server) as client:
        with pytest.raises(anthropic.NotFoundError) as missing:
            client.messages.create(model="gpt-9", **asked)
        assert missing.value.body["error"]["type"] == "not_found_error"
        with pytest.raises(anthropic.APIStatusError) as large:
            client.messages.create(model=NAME, max_tokens=2, messages=[{"role": "user", "content": "x" * 5_000_000}])
        assert large.value.status_code == 413 and large.value.body["error"]["type"] == "request_too_large"
        assert [model.id for model in client.models.list()] == [NAME] == [client.models.retrieve(NAME).display_name]


def test_an_error_in_the_middle_is_an_event(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = server.session.engine.stream

    async def broken(*args: Any, **keywords: Any) -> Any:
        async for chunk in stream(*args, **keywords):
            yield chunk
            raise RuntimeError("a stack of secrets")

    monkeypatch.setattr(server.session.engine, "stream", broken)
    with official(server) as client, pytest.raises(anthropic.APIStatusError) as caught:
        streamed(client, messages=ASK, max_tokens=9)
    assert caught.value.body["error"]["type"] == "api_error" and "secrets" not in str(caught.value)
