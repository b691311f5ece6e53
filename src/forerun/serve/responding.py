"""``/v1/responses``: what comes back, whole or as a sequence of events. Knows no engine and no HTTP."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from forerun.serve.completing import AnswerWriter
from forerun.serve.dialect import Dialect, reasoning_tokens
from forerun.serve.handling import Tagged
from forerun.serve.items import Event, ItemWriter
from forerun.serve.protocol import answers
from forerun.serve.protocol.responses import ResponsesRequest
from forerun.serve.tools.incoming import Kind, Piece
from forerun.types import RequestOutput

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
        body = self.body.model_dump(by_alias=True, exclude_none=True, exclude={"input"})
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
                "input_tokens_details": {"cached_tokens": output.num_cached_tokens or 0},
                "output_tokens": completion,
                "output_tokens_details": {"reasoning_tokens": reasoning},
                "total_tokens": prompt + completion,
            },
            "metrics": answers.metrics([output]),
        }


class _Items(ItemWriter):
    """The output items, as they are written."""

    def opening(self, kind: Kind, name: str) -> Iterator[Event]:
        if kind is Kind.ARGUMENTS:
            self.item = {"type": "function_call", "id": f"fc_{secrets.token_hex(16)}"}
            self.item |= {"call_id": self.new_call_id(), "name": name, "arguments": ""}
        elif kind is Kind.REASONING:
            self.item = {"type": "reasoning", "id": f"rs_{secrets.token_hex(16)}", "summary": [], "content": []}
        else:
            self.item = {"type": "message", "id": f"msg_{secrets.token_hex(16)}", "role": "assistant", "content": []}
        self.item["status"] = "in_progress"
        yield {"type": "response.output_item.added", "output_index": len(self.done), "item": dict(self.item)}
        if kind is not Kind.ARGUMENTS:
            yield self._about("content_part.added", part=_part(kind, ""))

    def delta(self, piece: Piece) -> Event:
        return self._about(f"{self._name}.delta", delta=piece.text, **self._no_logprobs)

    def closing(self, kind: Kind) -> Iterator[Event]:
        if kind is Kind.ARGUMENTS:
            self.item["arguments"] = self.text
            yield self._about(f"{self._name}.done", arguments=self.text, name=self.item["name"])
        else:
            part = _part(kind, self.text)
            self.item["content"] = [part]
            yield self._about(f"{self._name}.done", text=self.text, **self._no_logprobs)
            yield self._about("content_part.done", part=part)
        self.item["status"] = "completed"
        yield {"type": "response.output_item.done", "output_index": len(self.done), "item": self.item}

    @property
    def _name(self) -> str:
        return _PARTS.get(self.kind, "function_call_arguments") if self.kind is not None else ""

    @property
    def _no_logprobs(self) -> dict[str, Any]:
        return {"logprobs": []} if self.kind is Kind.CONTENT else {}

    def _about(self, event: str, **more: Any) -> Event:
        place = {"item_id": self.item["id"], "output_index": len(self.done)}
        part = {} if self.kind is Kind.ARGUMENTS else {"content_index": 0}
        return {"type": f"response.{event}", **place, **part, **more}


def _part(kind: Kind, text: str) -> dict[str, Any]:
    more: dict[str, Any] = {"annotations": [], "logprobs": []} if kind is Kind.CONTENT else {}
    return {"type": _PARTS[kind], "text": text, **more}
