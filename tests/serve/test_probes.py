"""What clients of OpenAI, vLLM and llama-server send, field by field, with the official client: each value is answered,
or refused with the field's name. Nothing else is an answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError, OpenAI

from serve.conftest import NAME, Live, serving, with_template

CHAT, TEXT, RESPONSES = "chat", "text", "responses"
TEMPLATE = (
    "{% if reasoning_effort %}{{ 'effort ' + reasoning_effort + '\n' }}{% endif %}"
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{# <tool_call> #}"
    "{% for m in messages %}{{ m.role + ': ' + m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}{% endfor %}{{ '' if loop.last and not add_generation_prompt else '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
ASK = [{"role": "user", "content": "the cat sat on"}]
ARGUMENTS = {"properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"], "additionalProperties": False}
FUNCTION = {"name": "weather", "parameters": {"type": "object", **ARGUMENTS}}
TOOL = {"type": "function", "function": FUNCTION}
OTHER = {"type": "function", "function": {"name": "time"}}
FLAT = {"type": "function", **FUNCTION}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"unit": "C"}'}}
NAMED = {"type": "function", "function": {"name": "weather"}}
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
    *(
        "service_tier",
        "reasoning_effort",
        "modalities",
        "audio",
        "prediction",
        "functions",
        "function_call",
        "verbosity",
    ),
    *("web_search_options", "prompt_cache_key", "safety_identifier", "skip_special_tokens", "ignore_eos", "min_tokens"),
    *("chat_template_kwargs", "priority", "prompt_logprobs", "truncate_prompt_tokens", "guided_json", "best_of"),
)
NULLS_OF_TEXT = ("max_tokens", "logprobs", "echo", "suffix", "best_of", "n", "stream", "seed", "logit_bias", "user")

ANSWERED: list[tuple[str, dict[str, Any]]] = [
    *((CHAT, {name: None}) for name in NULLS_OF_CHAT),
    *((TEXT, {name: None}) for name in NULLS_OF_TEXT),
    (CHAT, {"messages": [{**ASK[0], "name": None}, dumped(), *ASK]}),
    (CHAT, {"messages": [*ASK, dumped(annotations=[]), *ASK]}),
    (
        CHAT,
        {
            "messages": [
                *ASK,
                dumped(content=None, tool_calls=[{**CALL, "index": 0}]),
                {"role": "tool", "content": "9", "tool_call_id": "call_1"},
            ]
        },
    ),
    (CHAT, {"messages": [*ASK, dumped(reasoning_content="hm", reasoning="hm"), *ASK]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "the cat"}]}]}),
    (CHAT, {"response_format": {"type": "text", "json_schema": None}}),
    (
        CHAT,
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": SCHEMA, "description": None, "strict": None},
            }
        },
    ),
    (CHAT, {"stream": True, "stream_options": {"include_usage": None, "include_obfuscation": None}}),
    (CHAT, {"tools": [{"type": "function", "function": {**FUNCTION, "description": None, "strict": None}}]}),
    (CHAT, {"store": False}),
    (CHAT, {"metadata": {"run": "7"}}),
    (CHAT, {"service_tier": "auto"}),
    (CHAT, {"service_tier": "default"}),
    (CHAT, {"modalities": ["text"]}),
    (CHAT, {"prompt_cache_key": "a"}),
    (CHAT, {"safety_identifier": "a"}),
    (CHAT, {"verbosity": "medium"}),
    (CHAT, {"functions": []}),
    (CHAT, {"function_call": "none"}),
    (CHAT, {"tools": []}),
    (CHAT, {"tools": [], "tool_choice": "auto"}),
    (CHAT, {"tool_choice": "none"}),
    (CHAT, {"tool_choice": "auto"}),
    (CHAT, {"top_logprobs": 0}),
    (CHAT, {"logprobs": True, "top_logprobs": 3}),
    (CHAT, {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}}),
    (CHAT, {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    (CHAT, {"stream": False, "stream_options": None}),
    (CHAT, {"tools": [TOOL], "tool_choice": NAMED}),
    (CHAT, {"tools": [TOOL], "tool_choice": "required"}),
    (CHAT, {"tools": [TOOL, OTHER], "tool_choice": allowed("auto", "weather")}),
    (CHAT, {"tools": [TOOL, OTHER], "tool_choice": allowed("required", "time")}),
    (CHAT, {"reasoning_effort": "low"}),
    (CHAT, {"chat_template_kwargs": {"reasoning_effort": "low"}}),
    (CHAT, {"prompt_logprobs": 2}),
    (CHAT, {"return_token_ids": True}),
    (CHAT, {"return_tokens_as_token_ids": True, "logprobs": True}),
    (CHAT, {"truncate_prompt_tokens": 4}),
    (
        CHAT,
        {
            "messages": [*ASK, {"role": "assistant", "content": "the mat"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
    ),
    (CHAT, {"add_generation_prompt": True}),
    (CHAT, {"include_stop_str_in_output": True, "stop": ["e"]}),
    (CHAT, {"ignore_eos": True}),
    (CHAT, {"priority": 3}),
    (CHAT, {"priority": -3}),
    (CHAT, {"guided_json": SCHEMA}),
    (CHAT, {"guided_regex": "(a|b)"}),
    (CHAT, {"guided_choice": ["the", "cat"]}),
    (CHAT, {"guided_grammar": 'start: "a" | "b"'}),
    (CHAT, {"structured_outputs": {"choice": ["the", "cat"], "json": None}}),
    (CHAT, {"add_special_tokens": False}),
    (CHAT, {"include_reasoning": True}),
    (CHAT, {"spaces_between_special_tokens": True}),
    (CHAT, {"use_beam_search": False}),
    (CHAT, {"length_penalty": 1.0}),
    (CHAT, {"cache_prompt": True}),
    (CHAT, {"typical_p": 1.0}),
    (CHAT, {"mirostat": 0}),
    (CHAT, {"max_tokens": 0}),
    (TEXT, {"best_of": 1}),
    (TEXT, {"suffix": ""}),
    (TEXT, {"echo": True, "logprobs": 1}),
    (TEXT, {"echo": True, "logprobs": 1, "stream": True}),
    (TEXT, {"echo": True, "logprobs": 1, "max_tokens": 0}),
    (TEXT, {"echo": True, "max_tokens": 0}),
    (TEXT, {"max_tokens": 0}),
    (TEXT, {"prompt_logprobs": 0}),
    (TEXT, {"return_token_ids": True}),
    (TEXT, {"return_tokens_as_token_ids": True, "logprobs": 1}),
    (TEXT, {"truncate_prompt_tokens": 2}),
    (TEXT, {"truncate_prompt_tokens": -1}),
    (TEXT, {"prompt": "the cat " * 200, "truncate_prompt_tokens": -1, "max_tokens": 5}),
    (TEXT, {"add_special_tokens": True}),
    (TEXT, {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    (TEXT, {"priority": 1}),
    (TEXT, {"guided_choice": ["the", "cat"]}),
    (RESPONSES, {"store": False}),
    (RESPONSES, {"background": False}),
    (RESPONSES, {"truncation": "disabled"}),
    (RESPONSES, {"include": []}),
    (RESPONSES, {"service_tier": "auto"}),
    (RESPONSES, {"tools": []}),
    (RESPONSES, {"reasoning": {"effort": "low", "summary": None}}),
    (RESPONSES, {"reasoning": None, "previous_response_id": None, "conversation": None, "max_tool_calls": None}),
    (RESPONSES, {"text": {"format": {"type": "text"}, "verbosity": "medium"}}),
    (
        RESPONSES,
        {
            "tools": [FLAT],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "weather"}],
            },
        },
    ),
    (RESPONSES, {"top_logprobs": 0}),
    (RESPONSES, {"prompt_cache_key": "a", "safety_identifier": "b"}),
]

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"frobnicate": 1}, "frobnicate"),
    (CHAT, {"messages": None}, "messages"),
    (CHAT, {"store": True}, "store"),
    (CHAT, {"service_tier": "priority"}, "service_tier"),
    (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
    (CHAT, {"audio": {"voice": "alloy", "format": "wav"}}, "audio"),
    (CHAT, {"functions": [FUNCTION]}, "functions"),
    (CHAT, {"function_call": {"name": "weather"}}, "function_call"),
    (CHAT, {"verbosity": "low"}, "verbosity"),
    (CHAT, {"web_search_options": {}}, "web_search_options"),
    (CHAT, {"metadata": {"run": 7}}, "metadata"),
    (CHAT, {"tool_choice": "required"}, "tool_choice"),
    (CHAT, {"tools": [TOOL], "tool_choice": allowed("auto", "nobody")}, "tool_choice"),
    (CHAT, {"tools": [TOOL], "tool_choice": allowed("auto")}, "tool_choice"),
    (CHAT, {"tools": [{"type": "web_search"}]}, "tools"),
    (CHAT, {"reasoning_effort": 3}, "reasoning_effort"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"prompt_logprobs": 999}, "prompt_logprobs"),
    (TEXT, {"prompt": ["0123456789" * 16] * 160, "prompt_logprobs": 20}, "prompt_logprobs"),
    (TEXT, {"prompt": ["0123456789" * 16] * 160, "echo": True, "logprobs": 20}, "prompt_logprobs"),
    (CHAT, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    (CHAT, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    (CHAT, {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    (CHAT, {"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex"),
    (CHAT, {"guided_json": SCHEMA, "response_format": {"type": "json_object"}}, "guided_json"),
    (CHAT, {"guided_decoding_backend": "outlines"}, "guided_decoding_backend"),
    (CHAT, {"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    (CHAT, {"add_special_tokens": True}, "add_special_tokens"),
    (CHAT, {"include_reasoning": False}, "include_reasoning"),
    (CHAT, {"use_beam_search": True}, "use_beam_search"),
    (CHAT, {"length_penalty": 2.0}, "length_penalty"),
    (CHAT, {"cache_prompt": False}, "cache_prompt"),
    (CHAT, {"typical_p": 0.5}, "typical_p"),
    (CHAT, {"mirostat": 2}, "mirostat"),
    (CHAT, {"dry_multiplier": 0.8}, "dry_multiplier"),
    (CHAT, {"grammar": 'root ::= "a"'}, "grammar"),
    (CHAT, {"documents": [{"title": "a"}]}, "documents"),
    (CHAT, {"chat_template": "{{ messages }}"}, "chat_template"),
    (CHAT, {"logits_processors": ["a"]}, "logits_processors"),
    (CHAT, {"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
    (CHAT, {"echo": True}, "echo"),
    (CHAT, {"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    (CHAT, {"messages": [dumped(audio={"id": "a"}), *ASK]}, "messages.0.audio"),
    (CHAT, {"messages": [dumped(function_call={"name": "a", "arguments": ""}), *ASK]}, "messages.0.function_call"),
    (CHAT, {"messages": [dumped(refusal="no"), *ASK]}, "messages.0.refusal"),
    (CHAT, {"messages": [dumped(content=None), *ASK]}, "messages.0"),
    (TEXT, {"best_of": 2}, "best_of"),
    (TEXT, {"suffix": "end"}, "suffix"),
    (TEXT, {"logprobs": 99}, "logprobs"),
    (TEXT, {"max_tokens": -1}, "max_tokens"),
    (TEXT, {"prompt_logprobs": -1}, "prompt_logprobs"),
    (TEXT, {"add_special_tokens": False}, "add_special_tokens"),
    (TEXT, {"prompt_embeds": "aGk="}, "prompt_embeds"),
    (TEXT, {"tools": [TOOL]}, "tools"),
    (RESPONSES, {"store": True}, "store"),
    (RESPONSES, {"background": True}, "background"),
    (RESPONSES, {"truncation": "auto"}, "truncation"),
    (RESPONSES, {"include": ["message.output_text.logprobs"]}, "include"),
    (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id"),
    (RESPONSES, {"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    (RESPONSES, {"tools": [{"type": "web_search"}]}, "tools"),
    (RESPONSES, {"top_logprobs": 5}, "top_logprobs"),
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


@pytest.fixture(scope="module")
def probed(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    model = with_template(checkpoint, tmp_path_factory.mktemp("probed"), TEMPLATE)
    with serving(model, max_tokens=64) as running, running.client() as client:
        yield client


@pytest.mark.parametrize("probe", ANSWERED, ids=named)
def test_answered(probed: OpenAI, probe: tuple[str, dict[str, Any]]) -> None:
    assert outcome(probed, *probe) == ("answered", "")


@pytest.mark.parametrize("probe", REFUSED, ids=named)
def test_refused_by_name(probed: OpenAI, probe: tuple[str, dict[str, Any], str]) -> None:
    endpoint, more, name = probe
    found, param = outcome(probed, endpoint, more)
    assert found == "refused" and param.startswith(name), param


def test_a_template_without_the_variable(live: Live) -> None:
    found, param = outcome(live.client(), CHAT, {"reasoning_effort": "low"})
    assert (found, param) == ("refused", "reasoning_effort")
