"""The two completion endpoints: what a chunk and a whole answer look like in each. Knows no engine and no HTTP."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from forerun.serve.dialect import Dialect, reasoning_tokens
from forerun.serve.handling import Tagged
from forerun.serve.protocol import answers
from forerun.serve.protocol.common import Sampling
from forerun.serve.protocol.messages import MessageWriter
from forerun.serve.protocol.requests import ChatRequest, CompletionRequest
from forerun.types import CompletionOutput, OutputToken, RequestOutput, StreamChunk


class AnswerWriter(ABC):
    """Writes one request's answer, as a stream or as a whole."""

    marks_end: ClassVar[bool] = True
    """A stream ends with OpenAI's ``[DONE]``."""

    @property
    @abstractmethod
    def streams(self) -> bool:
        """Whether a stream was asked for."""

    @property
    @abstractmethod
    def begun(self) -> bool:
        """Whether anything has been written."""

    @abstractmethod
    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The answer of a request that is not streamed."""

    @abstractmethod
    def events(self, tagged: Tagged) -> Iterator[dict[str, Any]]:
        """What is sent for one chunk."""

    @abstractmethod
    def closing_events(self) -> Iterator[dict[str, Any]]:
        """What is sent behind the last chunk."""


class Writer(AnswerWriter):
    """Writes the choices of a completion.

    Args:
        body: what was asked.
        model: the served name.
        tokenizer: names tokens in log-probabilities.
    """

    prefix: str
    kind: str
    chunk_kind: str

    def __init__(self, body: Sampling, model: str, tokenizer: PreTrainedTokenizerBase) -> None:
        self.body, self.tokenizer = body, tokenizer
        self._id, self._created, self._model = f"{self.prefix}-{secrets.token_hex(12)}", int(time.time()), model
        self._begun: dict[int, int] = {}
        """Choice -> characters sent."""
        self._outputs: dict[int, RequestOutput] = {}

    @property
    def streams(self) -> bool:
        return self.body.stream

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        choices = [
            self.choice(job * self.body.n + answer.index, output, answer)
            for job, output in enumerate(outputs)
            for answer in output.outputs
        ]
        return {**self._head(self.kind), "choices": choices, **self._closing(outputs)}

    def events(self, tagged: Tagged) -> Iterator[dict[str, Any]]:
        chunk, index = tagged.chunk, tagged.job * self.body.n + tagged.chunk.index
        if index not in self._begun:
            self._begun[index] = 0
            yield from self._events_of(self.opening(index))
        if chunk.output is not None:
            self._outputs[tagged.job] = chunk.output
        if chunk.text or chunk.finish_reason is not None or (self.wants_logprobs and chunk.tokens):
            yield from self._events_of(self.delta(index, chunk, self._begun[index]))
            self._begun[index] += len(chunk.text)

    def closing_events(self) -> Iterator[dict[str, Any]]:
        """A chunk without choices but with counts, where it was asked for: not every client expects one."""
        wanted = self.body.stream_options is not None and self.body.stream_options.include_usage
        if wanted or self.body.return_speculation_trace:
            outputs = [self._outputs[job] for job in sorted(self._outputs)]
            yield {**self._head(self.chunk_kind), "choices": [], **self._closing(outputs)}

    @property
    def begun(self) -> bool:
        return bool(self._begun)

    @property
    @abstractmethod
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities are to be sent."""

    @abstractmethod
    def choice(self, index: int, output: RequestOutput, answer: CompletionOutput) -> dict[str, Any]:
        """One whole choice."""

    @abstractmethod
    def opening(self, index: int) -> list[dict[str, Any]]:
        """Deltas before the first token of a choice."""

    @abstractmethod
    def delta(self, index: int, chunk: StreamChunk, offset: int) -> list[dict[str, Any]]:
        """A chunk of a choice, one delta or none; `offset`: characters of it before this chunk."""

    def reasoning(self, outputs: Sequence[RequestOutput]) -> int | None:
        """Tokens that are reasoning; None where the model does none."""
        return None

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _events_of(self, choices: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for choice in choices:
            yield {**self._head(self.chunk_kind), "choices": [choice]}

    def _closing(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        found: dict[str, Any] = {
            "usage": answers.usage(
                outputs, predicted=self.body.prediction is not None, reasoning=self.reasoning(outputs)
            ),
            "metrics": answers.metrics(outputs),
        }
        if self.body.return_speculation_trace:
            found["speculation_trace"] = [
                answers.traced(output, answer, self.tokenizer) for output in outputs for answer in output.outputs
            ]
        return found


class _Stream:
    """One choice of a chat: its reader and the message that comes out of it."""

    def __init__(self, dialect: Dialect) -> None:
        self.reader = dialect.reader()
        self.message = MessageWriter(dialect.new_id)

    def finish_reason(self, reason: str | None) -> str | None:
        """The engine's reason, or that the model waits for what its calls bring."""
        return "tool_calls" if reason == "stop" and self.message.calls else reason


class ChatWriter(Writer):
    """``chat.completion`` and ``chat.completion.chunk``.

    Args:
        dialect: how the answers are to be read.
    """

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"
    body: ChatRequest

    def __init__(self, body: ChatRequest, model: str, tokenizer: PreTrainedTokenizerBase, dialect: Dialect) -> None:
        super().__init__(body, model, tokenizer)
        self._dialect = dialect
        self._streams = defaultdict[int, _Stream](lambda: _Stream(dialect))

    @property
    def wants_logprobs(self) -> bool:
        return self.body.logprobs

    def choice(self, index: int, output: RequestOutput, answer: CompletionOutput) -> dict[str, Any]:
        stream = _Stream(self._dialect)
        return {
            "index": index,
            "message": stream.message.message(stream.reader.whole(answer.text)),
            "logprobs": self._logprobs(answer.tokens),
            "finish_reason": stream.finish_reason(answer.finish_reason),
        }

    def opening(self, index: int) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def delta(self, index: int, chunk: StreamChunk, offset: int) -> list[dict[str, Any]]:
        stream = self._streams[index]
        pieces = stream.reader.feed(chunk.text)
        if chunk.finish_reason is not None:
            pieces += stream.reader.close()
        logprobs, reason = self._logprobs(chunk.tokens), stream.finish_reason(chunk.finish_reason)
        if not pieces and logprobs is None and reason is None:
            return []
        delta = stream.message.delta(pieces)
        return [{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}]

    def reasoning(self, outputs: Sequence[RequestOutput]) -> int | None:
        if self._dialect.marks is None:
            return None
        answered = [answer for output in outputs for answer in output.outputs]
        return sum(reasoning_tokens(self._dialect, answer.text, answer.tokens) for answer in answered)

    def _logprobs(self, tokens: Sequence[OutputToken]) -> dict[str, Any] | None:
        return answers.chat_logprobs(tokens, self.tokenizer) if self.wants_logprobs else None


class CompletionWriter(Writer):
    """``text_completion``, streamed or whole."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"
    body: CompletionRequest

    @property
    def wants_logprobs(self) -> bool:
        return self.body.logprobs is not None

    def choice(self, index: int, output: RequestOutput, answer: CompletionOutput) -> dict[str, Any]:
        text = self._echoed(index) + answer.text
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(answer.tokens, 0),
            "finish_reason": answer.finish_reason,
        }

    def opening(self, index: int) -> list[dict[str, Any]]:
        echoed = self._echoed(index)
        return [{"index": index, "text": echoed, "logprobs": None, "finish_reason": None}] if echoed else []

    def delta(self, index: int, chunk: StreamChunk, offset: int) -> list[dict[str, Any]]:
        logprobs = self._logprobs(chunk.tokens, offset)
        return [{"index": index, "text": chunk.text, "logprobs": logprobs, "finish_reason": chunk.finish_reason}]

    def _echoed(self, index: int) -> str:
        if not self.body.echo:
            return ""
        prompt = self.body.prompts[index // self.body.n]
        return prompt if isinstance(prompt, str) else str(self.tokenizer.decode(prompt))

    def _logprobs(self, tokens: Sequence[OutputToken], offset: int) -> dict[str, Any] | None:
        return answers.completion_logprobs(tokens, self.tokenizer, offset) if self.wants_logprobs else None
