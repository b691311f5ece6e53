"""Anthropic's ``/v1/messages``: what comes back, whole or as a sequence of events. Knows no engine and no HTTP."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from forerun.serve.chat_format import ChatFormat
from forerun.serve.completing import AnswerWriter
from forerun.serve.handling import Tagged
from forerun.serve.items import Event, ItemWriter
from forerun.serve.protocol import answers
from forerun.serve.protocol.anthropic import MessagesRequest
from forerun.serve.protocol.errors import ApiError
from forerun.serve.tools.incoming import Kind, Piece
from forerun.types import RequestOutput

_TYPES = {Kind.CONTENT: "text", Kind.REASONING: "thinking", Kind.ARGUMENTS: "tool_use"}
_DELTAS = {Kind.CONTENT: ("text_delta", "text"), Kind.REASONING: ("thinking_delta", "thinking")}
_REASONS = {"length": "max_tokens", "abort": "pause_turn"}
"""The engine's word -> Anthropic's; a turn whose time was up can be sent back, and goes on."""


class MessagesWriter(AnswerWriter):
    """Writes one message.

    Args:
        body: what was asked.
        model: the served name.
        chat_format: how the answer is to be read.
    """

    marks_end: ClassVar[bool] = False

    def __init__(self, body: MessagesRequest, model: str, chat_format: ChatFormat) -> None:
        self.body, self._model = body, model
        self._id = f"msg_{secrets.token_hex(12)}"
        self._reader, self._blocks = chat_format.reader(), _Blocks(chat_format.new_id)
        self._output: RequestOutput | None = None
        self._begun = False

    @property
    def streams(self) -> bool:
        return self.body.stream

    @property
    def begun(self) -> bool:
        return self._begun

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        [output] = outputs
        for _ in self._blocks.add(self._reader.whole(output.outputs[0].text)):
            pass
        for _ in self._blocks.close():
            pass
        return {
            **self._message(),
            **self._ending(output),
            "usage": _usage(output),
            "metrics": answers.metrics([output]),
        }

    def events(self, tagged: Tagged) -> Iterator[Event]:
        chunk = tagged.chunk
        if not self._begun:
            self._begun = True
            usage = _counts(len(chunk.prompt_token_ids or ()), 0)
            yield {"type": "message_start", "message": {**self._message(), "usage": usage}}
        yield from self._blocks.add(self._reader.feed(chunk.text))
        self._output = chunk.output or self._output

    def closing_events(self) -> Iterator[Event]:
        assert self._output is not None, "a stream ends with its output"
        yield from self._blocks.add(self._reader.close())
        yield from self._blocks.close()
        metrics = answers.metrics([self._output])
        ending, usage = self._ending(self._output), _usage(self._output)
        yield {"type": "message_delta", "delta": ending, "usage": usage, "metrics": metrics}
        yield {"type": "message_stop"}

    def error_event(self, error: ApiError) -> Event:
        return error.anthropic_body()

    def _message(self) -> dict[str, Any]:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._model}
        return {**head, "content": list(self._blocks.done), "stop_reason": None, "stop_sequence": None}

    def _ending(self, output: RequestOutput) -> dict[str, Any]:
        answer = output.outputs[0]
        sequence = answer.stop_reason if isinstance(answer.stop_reason, str) else None
        called = any(block["type"] == "tool_use" for block in self._blocks.done)
        ended = "stop_sequence" if sequence is not None else "tool_use" if called else "end_turn"
        return {"stop_reason": _REASONS.get(answer.finish_reason or "", ended), "stop_sequence": sequence}


class _Blocks(ItemWriter):
    """The content blocks, as they are written."""

    def opening(self, kind: Kind, name: str) -> Iterator[Event]:
        block = _TYPES[kind]
        if kind is Kind.ARGUMENTS:
            self.item = {"type": block, "id": self.new_call_id(), "name": name, "input": {}}
        else:
            self.item = {"type": block, block: ""}
        if kind is Kind.REASONING:
            self.item["signature"] = ""
        yield {"type": "content_block_start", "index": len(self.done), "content_block": dict(self.item)}

    def delta(self, piece: Piece) -> Event:
        kind, key = _DELTAS.get(piece.kind, ("input_json_delta", "partial_json"))
        delta = {"type": kind, key: piece.text}
        return {"type": "content_block_delta", "index": len(self.done), "delta": delta}

    def closing(self, kind: Kind) -> Iterator[Event]:
        if kind is Kind.ARGUMENTS:
            self.item["input"] = _arguments(self.text)
        else:
            self.item[_TYPES[kind]] = self.text
        yield {"type": "content_block_stop", "index": len(self.done)}


def _arguments(text: str) -> dict[str, Any]:
    """The object that a call's arguments are; text that is none, such as one cut off, under Anthropic's key for it."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"INVALID_JSON": text}


def _usage(output: RequestOutput) -> dict[str, int]:
    return _counts(len(output.prompt_token_ids), len(output.outputs[0].token_ids))


def _counts(prompt: int, completion: int) -> dict[str, int]:
    """In tokens; those that were in the cache are not told apart."""
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": prompt, **cached, "output_tokens": completion}
