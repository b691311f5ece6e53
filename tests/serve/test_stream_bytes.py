"""The bytes of a stream, pinned in ``golden/``: the engine is a script here, all the rest is the real server.

After a change that is meant: ``FORERUN_WRITE_GOLDEN=1 pytest tests/serve/test_stream_bytes.py``, then read the diff.
"""

import json
import os
import re
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from forerun.errors import SlowReaderError
from forerun.types import (
    OutputToken,
    RequestOutput,
    Source,
    StreamChunk,
    TokenLogprob,
)
from serve.conftest import NAME, Live, output, stream_chunk, wait_for

GOLDEN = Path(__file__).parent / "golden"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASK = [{"role": "user", "content": "hi"}]
STEPS = [["the"], [" c", "at", " s"], ["at", "!"]]
"""Texts of the tokens that each step commits: the first token, then two steps with drafts."""
SOURCES = [Source.TARGET, Source.DRAFT, Source.DRAFT, Source.RECOVERED, Source.DRAFT, Source.BONUS]


def scripted(
    live: Live, *, answers: int = 1, ends: str = "length", failure: Exception | None = None
) -> Callable[..., Any]:
    """An engine's `stream` that always says the same; with `failure` it breaks after the second step."""

    def token(text: str, place: int, step: int, wanted: int | None) -> OutputToken:
        [first, *_] = live.llm.tokenizer.encode(text)
        own = TokenLogprob(logprob=-0.125 * place, rank=1)
        best = {first: own, 5: TokenLogprob(logprob=float("-inf"), rank=2)}
        scores = {} if wanted is None else {"logprob": own}
        scores |= {"top_logprobs": dict(list(best.items())[:wanted])} if wanted else {}
        return OutputToken(id=first, text=text, source=SOURCES[place], step=step, **scores)

    def whole(tokens: list[OutputToken]) -> RequestOutput:
        counts = {"num_tokens": len(tokens), "num_prompt_passes": 1, "num_spec_steps": 2, "num_draft_tokens": 6}
        depths = {"drafted_per_depth": [2, 2, 2], "accepted_per_depth": [2, 1, 0]}
        return output(*[tokens] * answers, ended=ends, **counts, num_accepted_draft_tokens=3, **depths)

    async def stream(_prompt: Any, params: Any, **_: Any) -> AsyncGenerator[StreamChunk]:
        said = list[OutputToken]()
        for step, texts in enumerate(STEPS):
            if failure is not None and step == 2:
                raise failure
            new = [token(text, len(said) + place, step, params.logprobs) for place, text in enumerate(texts)]
            said += new
            last = step == len(STEPS) - 1
            for index in range(answers):
                done = {"finish_reason": ends, "stop_reason": "?" if ends == "stop" else None} if last else {}
                result = whole(said) if last and index == answers - 1 else None
                yield stream_chunk("".join(one.text for one in new), index=index, tokens=new, output=result, **done)

    return stream


def steady(text: str) -> str:
    """Without what differs from run to run."""
    text = re.sub(r'"id":"(chatcmpl|cmpl|resp|msg)[-_][0-9a-f]+"', r'"id":"\1-ID"', text)
    return re.sub(r'"created":\d+', '"created":0', text)


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "chat": (CHAT, {"messages": ASK}, {}),
    "chat-usage": (CHAT, {"messages": ASK, "stream_options": {"include_usage": True}}, {}),
    "chat-logprobs": (CHAT, {"messages": ASK, "logprobs": True, "top_logprobs": 2}, {}),
    "chat-two": (CHAT, {"messages": ASK, "n": 2, "stream_options": {"include_usage": True}}, {"answers": 2}),
    "chat-stop": (CHAT, {"messages": ASK, "stop": ["?"]}, {"ends": "stop"}),
    "chat-error": (CHAT, {"messages": ASK}, {"failure": RuntimeError("broken")}),
    "text": (TEXT, {"prompt": "hi"}, {}),
    "text-usage": (TEXT, {"prompt": "hi", "stream_options": {"include_usage": True}}, {}),
    "text-logprobs": (TEXT, {"prompt": "hi", "logprobs": 2}, {}),
    "text-two-echo": (TEXT, {"prompt": "hi", "n": 2, "echo": True}, {"answers": 2}),
    "text-stop": (TEXT, {"prompt": "hi", "stop": ["?"]}, {"ends": "stop"}),
    "text-error": (TEXT, {"prompt": "hi"}, {"failure": RuntimeError("broken")}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_bytes_are_the_golden_ones(live: Live, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    path, body, script = CASES[name]
    monkeypatch.setattr(live.session.engine, "stream", scripted(live, **script))
    answer = live.post(path, {"model": NAME, **body, "stream": True})
    assert answer.status_code == 200 and answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    found, file = steady(answer.content.decode("utf-8")), GOLDEN / f"{name}.txt"
    if os.environ.get("FORERUN_WRITE_GOLDEN"):
        GOLDEN.mkdir(exist_ok=True)
        file.write_text(found, encoding="utf-8")
    assert found == file.read_text(encoding="utf-8")


def test_every_golden_file_has_its_case() -> None:
    assert {file.stem for file in GOLDEN.glob("*.txt")} == set(CASES)


def events(content: bytes) -> list[Any]:
    """The events of a stream, which must be framed exactly so."""
    assert content.endswith(b"\n\n") and b"\r" not in content
    pieces = content.decode("utf-8").removesuffix("\n\n").split("\n\n")
    assert all(piece.startswith("data: ") and "\n" not in piece for piece in pieces)
    assert pieces[-1] == "data: [DONE]" and pieces.count("data: [DONE]") == 1
    return [json.loads(piece.removeprefix("data: ")) for piece in pieces[:-1]]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("more", [{}, {"n": 3}, {"stop": ["a"]}, {"logprobs": 1}, {"return_speculation_trace": True}])
def test_a_real_stream_is_well_framed(live: Live, path: str, more: dict[str, Any]) -> None:
    if path == CHAT and "logprobs" in more:
        more = {"logprobs": True}
    ask = {"messages": ASK} if path == CHAT else {"prompt": "hi\u2028\r\n\n"}
    answer = live.post(
        path, {**ask, "max_tokens": 24, "ignore_eos": True, "seed": 3, "temperature": 1.5, "stream": True, **more}
    )
    found = events(answer.content)
    assert {event["object"] for event in found} <= {"chat.completion.chunk", "text_completion"}
    ends = [choice["finish_reason"] for event in found for choice in event["choices"] if choice["finish_reason"]]
    assert len(ends) == more.get("n", 1) and len({event["id"] for event in found}) == 1


@pytest.mark.parametrize(
    ("failure", "kind", "code"),
    [
        (RuntimeError("a stack of secrets"), "server_error", "internal_error"),
        (SlowReaderError("too slow"), "invalid_request_error", None),
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_an_error_in_the_middle_is_an_event(
    live: Live, monkeypatch: pytest.MonkeyPatch, path: str, failure: Exception, kind: str, code: str | None
) -> None:
    monkeypatch.setattr(live.session.engine, "stream", scripted(live, failure=failure))
    ask = {"messages": ASK} if path == CHAT else {"prompt": "hi"}
    found = events(live.post(path, {**ask, "stream": True}).content)
    assert len(found) > 2 and all("choices" in event for event in found[:-1])
    error = found[-1]["error"]
    assert (error["type"], error["code"]) == (kind, code) and "secrets" not in error["message"]
    with pytest.raises(openai.APIError, match=r"mistake|slow"):
        list(live.client().completions.create(model=NAME, prompt="hi", stream=True))
    wait_for(lambda: live.session.in_flight == 0)  # the client may read the end before the server goes on


def test_an_error_before_the_beginning_is_a_status(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    async def stream(*_: Any, **__: Any) -> AsyncGenerator[StreamChunk]:
        raise RuntimeError("broken")
        yield

    monkeypatch.setattr(live.session.engine, "stream", stream)
    for streamed in (False, True):
        answer = live.post(TEXT, {"prompt": "hi", "stream": streamed})
        assert answer.status_code == 500 and answer.json()["error"]["code"] == "internal_error"
