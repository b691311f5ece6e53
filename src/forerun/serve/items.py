"""These writers open and close items (texts, reasoning, calls) one after the other: OpenAI's
``/v1/responses`` and Anthropic's ``/v1/messages``, whole or as events.
"""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property
from itertools import chain
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from forerun.drafters.draft_models.token_bytes import token_to_bytes
from forerun.serve.completing import Event, speculation_metrics, write_logprobs
from forerun.serve.handling import ChatFormat, Tagged, reasoning_tokens, was_cut
from forerun.serve.protocol.anthropic import MessagesRequest
from forerun.serve.protocol.responses import ResponsesRequest
from forerun.serve.tools.incoming import Kind, Piece
from forerun.types import OutputToken, RequestOutput, StreamChunk


class ItemWriter(ABC):
    """Puts the pieces of one completion together to items."""

    prefix: ClassVar[str]  # Prefix of the response's id

    def __init__(self, body: Any, model: str, chat_format: ChatFormat) -> None:
        self.body, self._model, self._chat_format = body, model, chat_format
        self._id = _new_id(self.prefix)
        self._created = int(time.time())
        self._reader = chat_format.reader()
        self._done: list[dict[str, Any]] = []  # Items that are closed
        self._kind: Kind | None = None  # Kind of the open item; None where none is open
        self._item: dict[str, Any] = {}  # The open item
        self._text = ""  # Text of the open item so far, or of a call's arguments
        self._begun = False
        self._output: RequestOutput | None = None

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the response to a request that is not streamed."""
        [output] = outputs
        answer = output.outputs[0]
        pieces = self._reader.whole(answer.text, cut=was_cut(answer))
        list(chain(self._add(pieces), self._close(output)))  # makes the items
        return self._finish(output)

    def events(self, tagged: Tagged) -> Iterator[Event]:
        """Yield the events of one chunk."""
        if not self._begun:
            self._begun = True
            yield from self._start(tagged.chunk)
        yield from self._add(self._reader.feed(tagged.chunk.text))
        self._output = tagged.chunk.output or self._output

    def closing_events(self) -> Iterator[Event]:
        """Yield the events behind the last chunk."""
        assert self._output is not None, "a stream ends with its output"
        yield from self._add(self._reader.close(cut=was_cut(self._output.outputs[0])))
        yield from self._close(self._output)
        yield from self._end(self._output)

    def _add(self, pieces: Sequence[Piece]) -> Iterator[Event]:
        for piece in pieces:
            kind = Kind.ARGUMENTS if piece.kind is Kind.CALL else piece.kind
            if kind is not self._kind or piece.kind is Kind.CALL:
                yield from self._close()
                self._kind = kind
                self._text = ""
                yield from self._open_item(kind, piece.text)
            if piece.kind is not Kind.CALL:
                self._text += piece.text
                yield self._delta(piece)

    def _close(self, output: RequestOutput | None = None) -> Iterator[Event]:
        """Close the open item.

        `output` is that of the completion, where it has ended; it may have been cut off within the
        item.
        """
        if self._kind is not None:
            yield from self._close_item(
                self._kind, complete=output is None or output.outputs[0].finish_reason == "stop"
            )
            self._done.append(self._item)
            self._kind = None

    @abstractmethod
    def _finish(self, output: RequestOutput) -> dict[str, Any]:
        """Return the whole answer."""

    @abstractmethod
    def _start(self, chunk: StreamChunk) -> Iterator[Event]:
        """Yield the events before the first item."""

    @abstractmethod
    def _end(self, output: RequestOutput) -> Iterator[Event]:
        """Yield the events behind the last item."""

    @abstractmethod
    def _open_item(self, kind: Kind, name: str) -> Iterator[Event]:
        """Make the `_item`, and yield the events that open it; `name` is the function's, where it
        is a call.
        """

    @abstractmethod
    def _delta(self, piece: Piece) -> Event:
        """Return the event for more of the open item's text."""

    @abstractmethod
    def _close_item(self, kind: Kind, *, complete: bool) -> Iterator[Event]:
        """Fill the `_item`, and yield the events that close it; not `complete`: the completion was cut
        off within it.
        """


_EVENTS = {Kind.CONTENT: "output_text", Kind.REASONING: "reasoning_text", Kind.ARGUMENTS: "function_call_arguments"}
"""These names are those of the events about a text, and of the parts that hold it."""


class ResponsesWriter(ItemWriter):
    """Writes a response of ``/v1/responses``."""

    prefix = "resp"
    body: ResponsesRequest
    _sequence = 0  # Events so far

    def __init__(
        self, body: ResponsesRequest, model: str, tokenizer: PreTrainedTokenizerBase, chat_format: ChatFormat
    ) -> None:
        super().__init__(body, model, chat_format)
        self._tokenizer = tokenizer
        self._length = 0  # Characters of the completion's tokens so far
        self._unsaid = deque[tuple[int, OutputToken]]()  # Where tokens begin whose log-probabilities are to be sent
        self._logprobs: list[Event] = []  # Those of the open item's text

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        self._take(outputs[0].outputs[0].tokens)
        return super().whole(outputs)

    def events(self, tagged: Tagged) -> Iterator[Event]:
        self._take(tagged.chunk.tokens)
        return map(self._number, super().events(tagged))

    def closing_events(self) -> Iterator[Event]:
        return map(self._number, super().closing_events())

    def _take(self, tokens: Sequence[OutputToken]) -> None:
        for token in tokens if self.body.wants_logprobs else ():
            self._unsaid.append((self._length, token))
            self._length += len(token.text)

    def _score(self, piece: Piece) -> list[Event]:
        """Return the log-probabilities of the tokens whose text begins in a piece of the content, or reaches into it;
        those before it are of reasoning, calls and marks.
        """
        tokens = list[OutputToken]()
        while self._unsaid and self._unsaid[0][0] < piece.end:
            start, token = self._unsaid.popleft()
            if max(start, start + len(token.text) - 1) >= piece.start:
                tokens.append(token)
        return write_logprobs(tokens, self._name, self._bytes)

    @cached_property
    def _name(self) -> Callable[[int], str]:
        return cache(lambda token: str(self._tokenizer.decode([token])))

    @cached_property
    def _bytes(self) -> Callable[[int], bytes]:
        return cache(token_to_bytes(self._tokenizer))

    def _number(self, event: Event) -> Event:
        self._sequence += 1
        return {**event, "sequence_number": self._sequence - 1}

    def _start(self, chunk: StreamChunk) -> Iterator[Event]:
        yield {"type": "response.created", "response": self._response()}
        yield {"type": "response.in_progress", "response": self._response()}

    def _end(self, output: RequestOutput) -> Iterator[Event]:
        response = self._finish(output)
        yield {"type": f"response.{response['status']}", "response": response}

    def _response(self) -> dict[str, Any]:
        body = self.body.model_dump(by_alias=True, exclude_none=True, exclude={"input"})
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "model": self._model,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "output": list(self._done),
            **{name: body.get(name) for name in ("instructions", "max_output_tokens", "temperature", "top_p")},
            "top_logprobs": self.body.top_logprobs,
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

    def _finish(self, output: RequestOutput) -> dict[str, Any]:
        answer = output.outputs[0]
        prompt, completion = len(output.prompt_token_ids), len(answer.token_ids)
        reasoning = reasoning_tokens(self._reader, answer)
        complete = answer.finish_reason == "stop"
        why = "max_output_tokens" if answer.finish_reason == "length" else answer.finish_reason
        return {
            **self._response(),
            "status": "completed" if complete else "incomplete",
            "incomplete_details": None if complete else {"reason": why},
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": output.num_cached_tokens or 0},
                "output_tokens": completion,
                "output_tokens_details": {"reasoning_tokens": reasoning},
                "total_tokens": prompt + completion,
            },
            "metrics": speculation_metrics([output]),
        }

    def _open_item(self, kind: Kind, name: str) -> Iterator[Event]:
        if kind is Kind.ARGUMENTS:
            called = {"call_id": self._chat_format.new_id(), "name": name, "arguments": ""}
            item: Event = {"type": "function_call", "id": _new_id("fc"), **called}
        elif kind is Kind.REASONING:
            item = {"type": "reasoning", "id": _new_id("rs"), "summary": [], "content": []}
        else:
            item = {"type": "message", "id": _new_id("msg"), "role": "assistant", "content": []}
        self._item, self._logprobs = {**item, "status": "in_progress"}, []
        yield {"type": "response.output_item.added", "output_index": len(self._done), "item": dict(self._item)}
        if kind is not Kind.ARGUMENTS:
            yield self._about(kind, "content_part.added", part=_part(kind, "", []))

    def _delta(self, piece: Piece) -> Event:
        scores = self._score(piece) if piece.kind is Kind.CONTENT else []
        self._logprobs += scores
        return self._about(piece.kind, f"{_EVENTS[piece.kind]}.delta", delta=piece.text, **_scored(piece.kind, scores))

    def _close_item(self, kind: Kind, *, complete: bool) -> Iterator[Event]:
        if kind is Kind.ARGUMENTS:
            self._item["arguments"] = self._text
            yield self._about(kind, f"{_EVENTS[kind]}.done", arguments=self._text, name=self._item["name"])
        else:
            part = _part(kind, self._text, self._logprobs)
            self._item["content"] = [part]
            yield self._about(kind, f"{_EVENTS[kind]}.done", text=self._text, **_scored(kind, self._logprobs))
            yield self._about(kind, "content_part.done", part=part)
        self._item["status"] = "completed" if complete else "incomplete"
        yield {"type": "response.output_item.done", "output_index": len(self._done), "item": self._item}

    def _about(self, kind: Kind, event: str, **more: Any) -> Event:
        part = {} if kind is Kind.ARGUMENTS else {"content_index": 0}
        item = {"item_id": self._item["id"], "output_index": len(self._done)}
        return {"type": f"response.{event}", **item, **part, **more}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"


def _scored(kind: Kind, logprobs: list[Event]) -> dict[str, Any]:
    """Return the log-probabilities of a text; an empty list where none are requested, because clients expect one."""
    return {"logprobs": logprobs} if kind is Kind.CONTENT else {}


def _part(kind: Kind, text: str, logprobs: list[Event]) -> dict[str, Any]:
    annotations: dict[str, Any] = {"annotations": []} if kind is Kind.CONTENT else {}
    return {"type": _EVENTS[kind], "text": text, **annotations, **_scored(kind, logprobs)}


_BLOCKS = {Kind.CONTENT: "text", Kind.REASONING: "thinking", Kind.ARGUMENTS: "tool_use"}
_DELTAS = {Kind.CONTENT: ("text_delta", "text"), Kind.REASONING: ("thinking_delta", "thinking")}
_REASONS = {"length": "max_tokens", "abort": "pause_turn"}
"""The engine's finish reasons map to Anthropic's stop reasons.

A turn whose time was up can be sent back, and goes on.
"""


class MessagesWriter(ItemWriter):
    """Writes a message of ``/v1/messages``, whose items are content blocks."""

    prefix = "msg"
    body: MessagesRequest

    def _finish(self, output: RequestOutput) -> dict[str, Any]:
        return {**self._message(), **self._ending(output), **_counts(output)}

    def _start(self, chunk: StreamChunk) -> Iterator[Event]:
        yield {
            "type": "message_start",
            "message": {**self._message(), "usage": _usage(chunk.prompt_token_ids or (), ())},
        }

    def _end(self, output: RequestOutput) -> Iterator[Event]:
        yield {"type": "message_delta", "delta": self._ending(output), **_counts(output)}
        yield {"type": "message_stop"}

    def _message(self) -> dict[str, Any]:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._model}
        return {**head, "content": list(self._done), "stop_reason": None, "stop_sequence": None}

    def _ending(self, output: RequestOutput) -> dict[str, Any]:
        answer = output.outputs[0]
        sequence = answer.stop_reason if isinstance(answer.stop_reason, str) else None
        called = any(block["type"] == "tool_use" for block in self._done)
        ended = "stop_sequence" if sequence is not None else "tool_use" if called else "end_turn"
        return {"stop_reason": _REASONS.get(answer.finish_reason or "", ended), "stop_sequence": sequence}

    def _open_item(self, kind: Kind, name: str) -> Iterator[Event]:
        block = _BLOCKS[kind]
        if kind is Kind.ARGUMENTS:
            self._item = {"type": block, "id": self._chat_format.new_id(), "name": name, "input": {}}
        else:
            self._item = {"type": block, block: ""} | ({"signature": ""} if kind is Kind.REASONING else {})
        yield {"type": "content_block_start", "index": len(self._done), "content_block": dict(self._item)}

    def _delta(self, piece: Piece) -> Event:
        kind, key = _DELTAS.get(piece.kind, ("input_json_delta", "partial_json"))
        return {"type": "content_block_delta", "index": len(self._done), "delta": {"type": kind, key: piece.text}}

    def _close_item(self, kind: Kind, *, complete: bool) -> Iterator[Event]:
        if kind is Kind.ARGUMENTS:
            self._item["input"] = _arguments(self._text)
        else:
            self._item[_BLOCKS[kind]] = self._text
        yield {"type": "content_block_stop", "index": len(self._done)}


def _arguments(text: str) -> dict[str, Any]:
    """Return a call's arguments as an object; text that is no object, such as one cut off, stands
    under Anthropic's key for it.
    """
    try:
        found = json.loads(text or "{}")
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"INVALID_JSON": text}


def _counts(output: RequestOutput) -> dict[str, Any]:
    return {
        "usage": _usage(output.prompt_token_ids, output.outputs[0].token_ids),
        "metrics": speculation_metrics([output]),
    }


def _usage(prompt: Sequence[int], answer: Sequence[int]) -> dict[str, int]:
    """Count the usage in tokens; those that were in the cache are not told apart."""
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": len(prompt), **cached, "output_tokens": len(answer)}
