"""What clients of OpenAI, vLLM and llama-server send, field by field, with the official client: each value is answered,
or refused with the field's name. Nothing else is an answer."""

import logging
from typing import Any

import pytest
from openai import APIStatusError, OpenAI

from serve.conftest import NAME, Live

CHAT, TEXT, RESPONSES = "chat", "text", "responses"
ASK = [{"role": "user", "content": "the cat sat on"}]
ARGUMENTS = {"properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"], "additionalProperties": False}
FUNCTION = {"name": "weather", "parameters": {"type": "object", **ARGUMENTS}}
TOOL = {"type": "function", "function": FUNCTION}
OTHER = {"type": "function", "function": {"name": "time"}}
FLAT = {"type": "function", **FUNCTION}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"unit": "C"}'}}
RESULT = {"role": "tool", "content": "9", "tool_call_id": "call_1"}
BEGUN = [*ASK, {"role": "assistant", "content": "the mat"}]
NAMED = {"type": "function", "function": {"name": "weather"}}
NAMED_FLAT = {"type": "function", "name": "weather"}
NOTHING = {"description": None, "strict": None}
COUNTS = {"continuous_usage_stats": True}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}


def dumped(**more: Any) -> dict[str, Any]:
    """An answer's message as ``model_dump()`` of the official client gives it."""
    nothing = {"refusal": None, "annotations": None, "audio": None, "function_call": None, "tool_calls": None}
    return {"role": "assistant", "content": "the dog", **nothing, **more}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


NULLS_OF_CHAT = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "logprobs", "top_logprobs", "max_tokens", "max_completion_tokens", "n", "seed", "stop", "stream"),
    *("stream_options", "tools", "tool_choice", "parallel_tool_calls", "response_format", "user", "store", "metadata"),
    *("service_tier", "reasoning_effort", "modalities", "audio", "prediction", "functions", "function_call"),
    *("verbosity", "web_search_options", "prompt_cache_key", "safety_identifier", "skip_special_tokens", "ignore_eos"),
    *("min_tokens", "chat_template_kwargs", "priority", "prompt_logprobs", "truncate_prompt_tokens", "guided_json"),
    "best_of",
)
NULLS_OF_TEXT = ("max_tokens", "logprobs", "echo", "suffix", "best_of", "n", "stream", "seed", "logit_bias", "user")


def each(endpoint: str, **fields: Any) -> list[tuple[str, dict[str, Any]]]:
    """One request for each of the fields, with nothing else beside it."""
    return [(endpoint, {name: value}) for name, value in fields.items()]


ANSWERED: list[tuple[str, dict[str, Any]]] = [
    *each(CHAT, **dict.fromkeys(NULLS_OF_CHAT)),
    *each(TEXT, **dict.fromkeys(NULLS_OF_TEXT)),
    *each(CHAT, store=False, metadata={"run": "7"}, service_tier="auto", modalities=["text"], prompt_cache_key="a"),
    *each(CHAT, safety_identifier="a", verbosity="medium", functions=[], function_call="none", tools=[]),
    *each(CHAT, top_logprobs=0, reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "low"}),
    *each(CHAT, prompt_logprobs=2, return_token_ids=True, truncate_prompt_tokens=4, add_generation_prompt=True),
    *each(CHAT, ignore_eos=True, priority=-3, guided_json=SCHEMA, guided_regex="(a|b)", guided_choice=["the", "cat"]),
    *each(CHAT, guided_grammar='start: "a" | "b"', structured_outputs={"choice": ["the", "cat"], "json": None}),
    *each(CHAT, add_special_tokens=False, include_reasoning=True, spaces_between_special_tokens=True, max_tokens=0),
    *each(CHAT, use_beam_search=False, length_penalty=1.0, cache_prompt=True, typical_p=1.0, mirostat=0),
    (CHAT, {"messages": [{**ASK[0], "name": None}, dumped(), *ASK]}),
    (CHAT, {"messages": [*ASK, dumped(annotations=[]), *ASK]}),
    (CHAT, {"messages": [*ASK, dumped(content=None, tool_calls=[{**CALL, "index": 0}]), RESULT]}),
    (CHAT, {"messages": [*ASK, dumped(reasoning_content="hm", reasoning="hm"), *ASK]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "the cat"}]}]}),
    (CHAT, {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": False}),
    (CHAT, {"response_format": {"type": "text", "json_schema": None}}),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, **NOTHING}}}),
    (CHAT, {"service_tier": "default"}),
    (CHAT, {"priority": 3}),
    (CHAT, {"logprobs": True, "top_logprobs": 3}),
    (CHAT, {"return_tokens_as_token_ids": True, "logprobs": True}),
    (CHAT, {"include_stop_str_in_output": True, "stop": ["e"]}),
    (CHAT, {"stream": False, "stream_options": None}),
    (CHAT, {"stream": True, "stream_options": {"include_usage": None, "include_obfuscation": None}}),
    (CHAT, {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}}),
    (CHAT, {"stream": True, "stream_options": {"include_usage": True, **COUNTS}}),
    (CHAT, {"tools": [{"type": "function", "function": {**FUNCTION, **NOTHING}}]}),
    (CHAT, {"tool_choice": "none"}),
    (CHAT, {"tool_choice": "auto"}),
    (CHAT, {"tools": [], "tool_choice": "auto"}),
    (CHAT, {"tools": [TOOL], "tool_choice": NAMED}),
    (CHAT, {"tools": [TOOL], "tool_choice": "required"}),
    (CHAT, {"tools": [TOOL, OTHER], "tool_choice": allowed("auto", "weather")}),
    (CHAT, {"tools": [TOOL, OTHER], "tool_choice": allowed("required", "time")}),
    *each(TEXT, best_of=1, suffix="", max_tokens=0, prompt_logprobs=0, return_token_ids=True, add_special_tokens=True),
    *each(TEXT, truncate_prompt_tokens=2, priority=1, guided_choice=["the", "cat"]),
    (TEXT, {"echo": True, "max_tokens": 0}),
    *((TEXT, {"echo": True, "logprobs": 1, **more}) for more in ({}, {"stream": True}, {"max_tokens": 0})),
    (TEXT, {"return_tokens_as_token_ids": True, "logprobs": 1}),
    (TEXT, {"truncate_prompt_tokens": -1}),
    (TEXT, {"prompt": "the cat " * 200, "truncate_prompt_tokens": -1, "max_tokens": 5}),
    (TEXT, {"stream": True, "stream_options": {"include_usage": True, **COUNTS}}),
    *each(RESPONSES, store=False, background=False, truncation="disabled", include=[], service_tier="auto", tools=[]),
    *each(RESPONSES, reasoning={"effort": "low", "summary": None}, top_logprobs=0),
    (RESPONSES, {"include": ["reasoning.encrypted_content", "message.output_text.logprobs"], "top_logprobs": 2}),
    (RESPONSES, {"reasoning": None, "previous_response_id": None, "conversation": None, "max_tool_calls": None}),
    (RESPONSES, {"text": {"format": {"type": "text"}, "verbosity": "medium"}}),
    (RESPONSES, {"tools": [FLAT], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [NAMED_FLAT]}}),
    (RESPONSES, {"prompt_cache_key": "a", "safety_identifier": "b"}),
    (RESPONSES, {"include": ["reasoning.encrypted_content"], "reasoning": {"effort": "low", "summary": "auto"}}),
    (RESPONSES, {"text": {"verbosity": "low"}, "store": True, "prompt_cache_retention": "24h"}),
    *each(CHAT, store=True, service_tier="priority", verbosity="low", include_reasoning=False, max_tokens=-1),
    (CHAT, {"stream": True, "stream_options": {"include_obfuscation": True}}),
    (CHAT, {"max_completion_tokens": -1}),
    *each(TEXT, max_tokens=-1),
]


def wrong(endpoint: str, **fields: Any) -> list[tuple[str, dict[str, Any], str]]:
    """Each of the fields alone, which its refusal names."""
    return [(endpoint, {name: value}, name) for name, value in fields.items()]


LONG_PROMPTS = ["0123456789" * 16] * 160
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *wrong(CHAT, frobnicate=1, messages=None, modalities=["text", "audio"]),
    *wrong(CHAT, audio={"voice": "alloy", "format": "wav"}, functions=[FUNCTION], function_call={"name": "weather"}),
    *wrong(CHAT, web_search_options={}, metadata={"run": 7}, tool_choice="required"),
    *wrong(CHAT, tools=[{"type": "web_search"}], reasoning_effort=3, prompt_logprobs=999),
    *wrong(CHAT, guided_decoding_backend="outlines", guided_whitespace_pattern=" ", add_special_tokens=True),
    *wrong(CHAT, max_tokens=-2, use_beam_search=True, length_penalty=2.0, cache_prompt=False, typical_p=0.5),
    *wrong(CHAT, mirostat=2, dry_multiplier=0.8, grammar='root ::= "a"', documents=[{"title": "a"}], echo=True),
    *wrong(CHAT, chat_template="{{ messages }}", logits_processors=["a"], kv_transfer_params={"a": 1}),
    (CHAT, {"tools": [TOOL], "tool_choice": allowed("auto", "nobody")}, "tool_choice"),
    (CHAT, {"tools": [TOOL], "tool_choice": allowed("auto")}, "tool_choice"),
    (CHAT, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    (CHAT, {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    (CHAT, {"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex"),
    (CHAT, {"guided_json": SCHEMA, "response_format": {"type": "json_object"}}, "guided_json"),
    (CHAT, {"messages": [dumped(audio={"id": "a"}), *ASK]}, "messages.0.audio"),
    (CHAT, {"messages": [dumped(function_call={"name": "a", "arguments": ""}), *ASK]}, "messages.0.function_call"),
    (CHAT, {"messages": [dumped(refusal="no"), *ASK]}, "messages.0.refusal"),
    (CHAT, {"messages": [dumped(content=None), *ASK]}, "messages.0"),
    *wrong(TEXT, best_of=2, suffix="end", logprobs=99, max_tokens=-2, prompt_logprobs=-1, add_special_tokens=False),
    *wrong(TEXT, prompt_embeds="aGk=", tools=[TOOL]),
    (TEXT, {"prompt": LONG_PROMPTS, "prompt_logprobs": 20}, "prompt_logprobs"),
    (TEXT, {"prompt": LONG_PROMPTS, "echo": True, "logprobs": 20}, "prompt_logprobs"),
    *wrong(RESPONSES, background=True, truncation="auto", include=["message.output_text.images"]),
    *wrong(RESPONSES, previous_response_id="resp_1", tools=[{"type": "web_search"}], top_logprobs=5),
    (RESPONSES, {"include": ["reasoning.encrypted_content", "nothing"]}, "include"),
    (RESPONSES, {"include": ["message.output_text.logprobs"], "top_logprobs": 21}, "top_logprobs"),
    (RESPONSES, {"max_output_tokens": 9999}, "max_output_tokens"),
    (RESPONSES, {"tools": [FLAT], "tool_choice": {"type": "function", "name": "nobody"}}, "tool_choice"),
    (CHAT, {"max_completion_tokens": 9999}, "max_completion_tokens"),
]


def named(probe: tuple[Any, ...]) -> str:
    return f"{probe[0]}-{'+'.join(probe[1])}-{str(next(iter(probe[1].values())))[:24]}"


def ask(client: OpenAI, endpoint: str, more: dict[str, Any]) -> Any:
    """What the official client makes of one request; streams are read to their end."""
    common: dict[str, Any] = {"model": NAME, "extra_body": more, **({"stream": True} if more.get("stream") else {})}
    if endpoint == CHAT:
        asked: Any = client.chat.completions.create(messages=ASK, max_tokens=4, **common)
    elif endpoint == TEXT:
        asked = client.completions.create(prompt="the cat sat on", max_tokens=4, **common)
    else:
        asked = client.responses.create(input="the cat sat on", max_output_tokens=4, **common)
    return list(asked) if more.get("stream") else asked


def outcome(client: OpenAI, endpoint: str, more: dict[str, Any]) -> tuple[str, str]:
    """``answered``, or ``refused`` with the parameter that the refusal names, or ``failed``."""
    try:
        ask(client, endpoint, more)
    except APIStatusError as error:
        body = error.body if isinstance(error.body, dict) else {}
        if error.status_code != 400 or not body.get("message"):
            return "failed", f"{error.status_code} {error.body}"
        return "refused", str(body.get("param"))
    return "answered", ""


@pytest.mark.parametrize("probe", ANSWERED, ids=named)
def test_answered(official: OpenAI, probe: tuple[str, dict[str, Any]]) -> None:
    assert outcome(official, *probe) == ("answered", "")


@pytest.mark.parametrize("probe", REFUSED, ids=named)
def test_refused_by_name(official: OpenAI, probe: tuple[str, dict[str, Any], str]) -> None:
    endpoint, more, name = probe
    found, param = outcome(official, endpoint, more)
    assert found == "refused" and param.startswith(name), param


def test_hints_are_told_once(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    """A template without the variable changes nothing either; a null sets nothing, and is no hint."""
    unset = {"store": None, "functions": None, "service_tier": None, "reasoning_effort": None}
    with caplog.at_level(logging.INFO, logger="forerun.serve.protocol.hints"):
        assert outcome(live.client(), CHAT, unset)[0] == "answered" and not caplog.records
        for _ in range(2):
            assert outcome(live.client(), CHAT, {"reasoning_effort": "low", "store": True})[0] == "answered"
    told = [record.getMessage() for record in caplog.records]
    assert [line.split(",")[0] for line in told] == ["requests send store", "requests send reasoning_effort"]
