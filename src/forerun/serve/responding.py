"""``/v1/responses``: what comes back, whole or as a sequence of events. Knows no engine and no HTTP."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

from forerun.serve.completing import AnswerWriter
from forerun.serve.dialect import Dialect, reasoning_tokens
from forerun.serve.handling import Tagged
from forerun.serve.protocol import answers
from forerun.serve.protocol.responses import ResponsesRequest
from forerun.serve.tools.incoming import Kind, Piece
from forerun.types import RequestOutput

Event = dict[str, Any]
_PARTS = {Kind.CONTENT: "output_text", Kind.REASONING: "reasoning_text"}


class ResponsesWriter(AnswerWriter):
    """Writes one response.

    Args:
        body: what was asked.
        model: the served name.
        dialect: how the answer is to be read.
    """

    marks_end: ClassVar[bool] = False

    def __init__(self, body: ResponsesRequest, model: str, dialect: Dialect) -> None:
        self.body, self._model, self._dialect = body, model, dialect
        self._id, self._created = f"resp_{secrets.token_hex(16)}", int(time.time())
        self._reader, self._items = dialect.reader(), _Items(dialect.new_id)
        self._output: RequestOutput | None = None
        self._sequence = 0

    @property
    def streams(self) -> bool:
        return self.body.stream

    @property
    def begun(self) -> bool:
        return self._sequence > 0

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        [output] = outputs
        for _ in self._items.add(self._reader.whole(output.outputs[0].text)):
            pass
        for _ in self._items.close():
            pass
        return self._response(output)

    def events(self, tagged: Tagged) -> Iterator[Event]:
        if not self.begun:
            yield self._numbered({"type": "response.created", "response": self._response(None)})
            yield self._numbered({"type": "response.in_progress", "response": self._response(None)})
        pieces = self._reader.feed(tagged.chunk.text)
        yield from map(self._numbered, self._items.add(pieces))
        self._output = tagged.chunk.output or self._output

    def closing_events(self) -> Iterator[Event]:
        assert self._output is not None, "a stream ends with its output"
        yield from map(self._numbered, self._items.add(self._reader.close()))
        yield from map(self._numbered, self._items.close())
        response = self._response(self._output)
        kind = "completed" if response["status"] == "completed" else "incomplete"
        yield self._numbered({"type": f"response.{kind}", "response": response})

    def _numbered(self, event: Event) -> Event:
        self._sequence += 1
        return {**event, "sequence_number": self._sequence - 1}

    def _response(self, output: RequestOutput | None) -> dict[str, Any]:
        """The response object: finished with an `output`, else in progress."""
        body = self.body.model_dump(by_alias=True, exclude_none=True)
        kept = {name: body.get(name) for name in ("instructions", "max_output_tokens", "temperature", "top_p")}
        found = {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "model": self._model,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "output": list(self._items.done),
            **kept,
            "text": body.get("text", {"format": {"type": "text"}}),
            "tools": body.get("tools", []),
            "tool_choice": body.get("tool_choice", "auto"),
            "parallel_tool_calls": self.body.parallel_tool_calls,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "metadata": self.body.metadata or {},
            "usage": None,
        }
        return found if output is None else {**found, **self._ending(output)}

    def _ending(self, output: RequestOutput) -> dict[str, Any]:
        answer = output.outputs[0]
        prompt, completion = len(output.prompt_token_ids), len(answer.token_ids)
        reasoning = reasoning_tokens(self._dialect, answer.text, answer.tokens)
        complete = answer.finish_reason == "stop"
        why = "max_output_tokens" if answer.finish_reason == "length" else answer.finish_reason
        return {
            "status": "completed" if complete else "incomplete",
            "incomplete_details": None if complete else {"reason": why},
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": output.num_cached_tokens},
                "output_tokens": completion,
                "output_tokens_details": {"reasoning_tokens": reasoning},
                "total_tokens": prompt + completion,
            },
            "metrics": answers.metrics([output]),
        }


class _Items:
    """The output items, as they are written."""

    def __init__(self, new_call_id: Callable[[], str]) -> None:
        self._new_call_id = new_call_id
        self.done: list[dict[str, Any]] = []
        self._kind: Kind | None = None
        self._open: dict[str, Any] = {}
        self._text = ""

    def add(self, pieces: Sequence[Piece]) -> Iterator[Event]:
        """Events for these pieces."""
        for piece in pieces:
            if piece.kind is Kind.CALL:
                yield from self._begin(Kind.ARGUMENTS, name=piece.text)
            elif piece.kind is not self._kind:
                yield from self._begin(piece.kind)
            if piece.kind is not Kind.CALL:
                self._text += piece.text
                yield self._about(f"{self._name}.delta", delta=piece.text, **self._no_logprobs)

    def close(self) -> Iterator[Event]:
        """Events that end the open item, if there is one."""
        if self._kind is None:
            return
        item = self._open
        if self._kind is Kind.ARGUMENTS:
            item["arguments"] = self._text
            yield self._about(f"{self._name}.done", arguments=self._text, name=item["name"])
        else:
            part = _part(self._kind, self._text)
            item["content"] = [part]
            yield self._about(f"{self._name}.done", text=self._text, **self._no_logprobs)
            yield self._about("content_part.done", part=part)
        item["status"] = "completed"
        self.done.append(item)
        yield {"type": "response.output_item.done", "output_index": len(self.done) - 1, "item": item}
        self._kind = None

    def _begin(self, kind: Kind, name: str = "") -> Iterator[Event]:
        yield from self.close()
        self._kind, self._text = kind, ""
        if kind is Kind.ARGUMENTS:
            self._open = {"type": "function_call", "id": f"fc_{secrets.token_hex(16)}"}
            self._open |= {"call_id": self._new_call_id(), "name": name, "arguments": ""}
        elif kind is Kind.REASONING:
            self._open = {"type": "reasoning", "id": f"rs_{secrets.token_hex(16)}", "summary": [], "content": []}
        else:
            self._open = {"type": "message", "id": f"msg_{secrets.token_hex(16)}", "role": "assistant", "content": []}
        self._open["status"] = "in_progress"
        yield {"type": "response.output_item.added", "output_index": len(self.done), "item": dict(self._open)}
        if kind is not Kind.ARGUMENTS:
            yield self._about("content_part.added", part=_part(kind, ""))

    @property
    def _name(self) -> str:
        return _PARTS.get(self._kind, "function_call_arguments") if self._kind is not None else ""

    @property
    def _no_logprobs(self) -> dict[str, Any]:
        return {"logprobs": []} if self._kind is Kind.CONTENT else {}

    def _about(self, event: str, **more: Any) -> Event:
        place = {"item_id": self._open["id"], "output_index": len(self.done)}
        part = {} if self._kind is Kind.ARGUMENTS else {"content_index": 0}
        return {"type": f"response.{event}", **place, **part, **more}


def _part(kind: Kind, text: str) -> dict[str, Any]:
    more: dict[str, Any] = {"annotations": [], "logprobs": []} if kind is Kind.CONTENT else {}
    return {"type": _PARTS[kind], "text": text, **more}
