"""``/v1/responses`` through the official client: whole, streamed event by event, with calls, and what is refused."""

import json
from pathlib import Path
from typing import Any

from openai import OpenAI

from contract.harness import word_tokenizer
from forerun.serve.handling import ChatFormat, Tagged
from forerun.serve.items import ResponsesWriter
from forerun.serve.protocol.responses import ResponsesRequest
from forerun.serve.reasoning import Marks
from forerun.serve.tools.base import NO_PARAMETERS, Function
from forerun.serve.tools.formats import FORMATS
from forerun.types import OutputToken, Source, TokenLogprob
from serve.conftest import NAME, TEMPLATE, output, serving, stream_chunk, with_template
from serve.test_probes import FLAT

TOOL: Any = {**FLAT, "strict": True}


def streamed(client: OpenAI, **asked: Any) -> tuple[list[Any], Any]:
    """All events and the response of the last one; numbers and order are checked."""
    events = list(client.responses.create(model=NAME, stream=True, **asked))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    return events, events[-1].response


def test_a_text(official: OpenAI) -> None:
    asked: dict[str, Any] = {"input": "the cat", "instructions": "sat", "max_output_tokens": 9, "temperature": 0}
    whole = official.responses.create(model=NAME, **asked)
    prompt = [{"role": "system", "content": "sat"}, {"role": "user", "content": "the cat"}]
    chat = official.chat.completions.create(model=NAME, messages=prompt, temperature=0, max_tokens=9)
    assert whole.output_text == chat.choices[0].message.content and chat.usage and whole.usage
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (chat.usage.prompt_tokens, 9)
    assert whole.status == "incomplete" and whole.incomplete_details and whole.instructions == "sat"
    assert whole.incomplete_details.reason == "max_output_tokens"
    events, response = streamed(official, **asked)
    assert response.output_text == whole.output_text and events[-1].type == "response.incomplete"
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == whole.output_text and len(deltas) > 1
    others = [event.type.removeprefix("response.") for event in events if event not in deltas]
    ends = ["output_text.done", "content_part.done", "output_item.done"]
    assert others[2:-1] == ["output_item.added", "content_part.added", *ends]


def test_a_call_and_what_it_brought(official: OpenAI) -> None:
    asked: dict[str, Any] = {"tools": [TOOL], "parallel_tool_calls": False, "max_output_tokens": 100}
    choice = {"tool_choice": {"type": "function", "name": "weather"}}
    first = official.responses.create(model=NAME, input="the cat", **choice, **asked)
    [call] = first.output
    assert call.type == "function_call" and json.loads(call.arguments)["unit"] in ("C", "F")
    assert first.status == "completed" and first.output_text == ""
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "20"}
    conversation: Any = [{"role": "user", "content": "the cat"}, *first.output, result]
    second = official.responses.create(model=NAME, input=conversation, tools=[TOOL], max_output_tokens=3)
    assert second.usage is not None and second.usage.output_tokens == 3
    events, response = streamed(official, input="the cat", tool_choice="required", **asked)
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    [done] = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert done.arguments == "".join(pieces) == response.output[0].arguments
    assert events[-1].type == "response.completed" and json.loads(done.arguments)["unit"] in ("C", "F")


def test_what_was_cut_off_is_incomplete(official: OpenAI) -> None:
    """The response, and of its items the last: a client must not make a call of half of its arguments."""
    asked: dict[str, Any] = {"input": "the cat", "tools": [TOOL], "tool_choice": "required", "temperature": 0}
    asked["parallel_tool_calls"] = False
    whole = official.responses.create(model=NAME, max_output_tokens=100, **asked)
    [call] = whole.output
    assert (whole.status, call.type, call.status) == ("completed", "function_call", "completed") and whole.usage
    most = whole.usage.output_tokens - len('"}}\n</tool_call>')
    cut = official.responses.create(model=NAME, max_output_tokens=most, **asked)
    events, response = streamed(official, max_output_tokens=most, **asked)
    [done] = [event.item for event in events if event.type == "response.output_item.done"]
    for item in (*cut.output, *response.output, done):
        assert (item.type, item.status) == ("function_call", "incomplete")
        assert call.arguments.startswith(item.arguments) and item.arguments
    text = official.responses.create(model=NAME, input="the cat", max_output_tokens=4)
    assert [item.status for item in text.output] == ["incomplete"]


def test_reasoning_is_an_item_of_its_own(checkpoint: Path, tmp_path: Path) -> None:
    folder = with_template(checkpoint, tmp_path, TEMPLATE + "<think>")
    with serving(folder) as running, running.client() as client:
        events, response = streamed(client, input="the cat", max_output_tokens=6, temperature=0)
    [item] = response.output
    text = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
    assert item.type == "reasoning" and item.content[0].text == text
    assert response.usage.output_tokens_details.reasoning_tokens == response.usage.output_tokens > 0


def test_log_probabilities_are_those_of_a_chat(official: OpenAI) -> None:
    wanted: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    asked: dict[str, Any] = {"input": "the cat", "max_output_tokens": 9, "temperature": 0, **wanted}
    chat = official.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": "the cat"}],
        temperature=0,
        max_tokens=9,
        logprobs=True,
        top_logprobs=2,
    )
    expected = [one.model_dump() for one in chat.choices[0].logprobs.content]
    [item] = official.responses.create(model=NAME, **asked).output
    assert [one.model_dump() for one in item.content[0].logprobs] == expected and len(expected) == 9
    events, response = streamed(official, **asked)
    [done] = [event for event in events if event.type == "response.output_text.done"]
    deltas = [one for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
    for found in (done.logprobs, deltas, response.output[0].content[0].logprobs):
        assert [one.model_dump() for one in found] == expected


def test_log_probabilities_are_of_the_text_alone() -> None:
    """Not of the reasoning, nor of a call; a token that reaches into the text is of it, however it was streamed."""
    texts = ["hm", "</think>ye", "", "s ", "<tool_call>", '{"name": "f", "arguments": {}}', "</tool_call>"]
    score = TokenLogprob(logprob=-1.0, rank=1)
    tokens = [
        OutputToken(id=index, text=text, source=Source.TARGET, step=index, logprob=score)
        for index, text in enumerate(texts)
    ]
    body = ResponsesRequest.model_validate({"input": "x", "include": ["message.output_text.logprobs"]})
    calls, marks = FORMATS["hermes"]("", [Function("f", NO_PARAMETERS)]), Marks("<think>", "</think>")
    chat_format = ChatFormat(prompt={}, format=calls, marks=marks, forced=False, inside=True)
    named = {index: f"t{index}" for index in range(len(texts))}
    written = []
    for streaming in (False, True):
        writer = ResponsesWriter(body, NAME, word_tokenizer(), chat_format)
        writer._name, writer._bytes = named.__getitem__, lambda token: b""
        if streaming:
            for token in tokens:
                list(writer.events(Tagged(0, stream_chunk(token.text, tokens=[token], prompt_token_ids=[1]))))
            list(writer.events(Tagged(0, stream_chunk(output=output(tokens)))))
            response = list(writer.closing_events())[-1]["response"]
        else:
            response = writer.whole([output(tokens)])
        [message] = [item for item in response["output"] if item["type"] == "message"]
        written.append([one["token"] for one in message["content"][0]["logprobs"]])
    assert written == [["t1", "t2", "t3"]] * 2


def test_the_form_of_the_text(official: OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": {"enum": ["so"]}, "strict": True}}
    answer = official.responses.create(model=NAME, input="the cat", text=form, max_output_tokens=60)
    assert json.loads(answer.output_text) == "so" and answer.status == "completed"


def test_an_earlier_response_becomes_one_message() -> None:
    parts = [{"type": "output_text", "text": "Hm", "annotations": []}]
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "why"}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": parts},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": '{"x": 1}'},
        {"type": "function_call_output", "call_id": "1", "output": "one"},
    ]
    user, assistant, tool = ResponsesRequest.model_validate({"input": items}).chat().messages
    assert user.plain() == {"role": "user", "content": "ab"}
    assert assistant.plain() == {
        **{"role": "assistant", "content": "Hm", "reasoning_content": "why"},
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
            {"id": "2", "type": "function", "function": {"name": "g", "arguments": '{"x": 1}'}},
        ],
    }
    assert tool.plain() == {"role": "tool", "content": "one", "tool_call_id": "1"}
