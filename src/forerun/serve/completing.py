"""The two completion endpoints: what a chunk and a whole answer look like in each. Knows no engine and no HTTP."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from forerun.serve.chat_format import ChatFormat, reasoning_tokens
from forerun.serve.handling import Tagged
from forerun.serve.protocol import answers
from forerun.serve.protocol.answers import PromptLogprobs
from forerun.serve.protocol.common import Sampling
from forerun.serve.protocol.errors import ApiError
from forerun.serve.protocol.requests import ChatRequest, CompletionRequest
from forerun.serve.tools.incoming import Kind, Piece
from forerun.types import CompletionOutput, OutputToken, RequestOutput, StreamChunk

# An assistant's message in OpenAI's shape, whole or as deltas, out of the pieces of its text.
#
# Reasoning goes by two names, vLLM's older ``reasoning_content`` and its newer ``reasoning``: clients read either.


class MessageWriter:
    """Writes one message.

    Args:
        new_id: makes an id for a call.
    """

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self.calls = 0
        """Calls begun."""

    def delta(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """What these pieces add to the message."""
        found: dict[str, Any] = {}
        content = "".join(piece.text for piece in pieces if piece.kind is Kind.CONTENT)
        reasoning = "".join(piece.text for piece in pieces if piece.kind is Kind.REASONING)
        if content:
            found["content"] = content
        if reasoning:
            found |= {"reasoning_content": reasoning, "reasoning": reasoning}
        calls = self._calls(pieces)
        return found | ({"tool_calls": calls} if calls else {})

    def message(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The whole message."""
        found = self.delta(pieces)
        calls = [{key: value for key, value in call.items() if key != "index"} for call in found.pop("tool_calls", [])]
        content = found.pop("content", None if calls else "")
        message = {"role": "assistant", "content": content, "refusal": None, **found}
        return message | ({"tool_calls": calls} if calls else {})

    def _calls(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for piece in pieces:
            if piece.kind is Kind.CALL:
                function = {"name": piece.text, "arguments": ""}
                found.append({"index": self.calls, "id": self._new_id(), "type": "function", "function": function})
                self.calls += 1
            elif piece.kind is Kind.ARGUMENTS:
                if not found:
                    found.append({"index": self.calls - 1, "function": {"arguments": ""}})
                found[-1]["function"]["arguments"] += piece.text
        return found


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

    def error_event(self, error: ApiError) -> dict[str, Any]:
        """What is sent where a stream breaks off."""
        return error.body()


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
        self._counts: dict[int, list[int]] = {}
        """Choice -> tokens of its prompt, and of its answer so far."""
        self._outputs: dict[int, RequestOutput] = {}
        self._name = answers.token_namer(tokenizer, by_id=body.return_tokens_as_token_ids)

    @property
    def streams(self) -> bool:
        return self.body.stream

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        choices = [
            self.choice(job * self.body.n + answer.index, output, answer)
            for job, output in enumerate(outputs)
            for answer in output.outputs
        ]
        about_prompt = self.about_prompt(outputs[0].prompt_token_ids, outputs[0].prompt_logprobs)
        return {**self._head(self.kind), "choices": choices, **about_prompt, **self._closing(outputs)}

    def events(self, tagged: Tagged) -> Iterator[dict[str, Any]]:
        chunk, index = tagged.chunk, tagged.job * self.body.n + tagged.chunk.index
        if index not in self._begun:
            opened, self._begun[index] = self.opening(index, chunk)
            self._counts[index] = [len(chunk.prompt_token_ids or ()), 0]
            yield from self._events_of(opened, index, **self.about_prompt(chunk.prompt_token_ids or (), None))
        if chunk.output is not None:
            self._outputs[tagged.job] = chunk.output
        self._counts[index][1] += len(chunk.tokens)
        if chunk.text or chunk.finish_reason is not None or (self.wants_tokens and chunk.tokens):
            yield from self._events_of(self.delta(index, chunk, self._begun[index]), index)
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

    @property
    def wants_tokens(self) -> bool:
        """Whether something is to be said of each token, and not of the text alone."""
        return self.wants_logprobs or self.body.return_token_ids

    @abstractmethod
    def opening(self, index: int, chunk: StreamChunk) -> tuple[list[dict[str, Any]], int]:
        """Deltas before the first token of a choice, and the characters that they hold."""

    @abstractmethod
    def delta(self, index: int, chunk: StreamChunk, offset: int) -> list[dict[str, Any]]:
        """A chunk of a choice, one delta or none; `offset`: characters of it before this chunk."""

    @abstractmethod
    def about_prompt(self, ids: Sequence[int], logprobs: PromptLogprobs | None) -> dict[str, Any]:
        """What is said beside the choices about the prompt of all of them."""

    def prompt_logprobs(self, ids: Sequence[int], logprobs: PromptLogprobs | None) -> dict[str, Any]:
        """``prompt_logprobs``, where they were asked for."""
        top = self.body.prompt_logprobs
        if top is None or logprobs is None:
            return {}
        return {"prompt_logprobs": answers.prompt_logprobs(ids, logprobs, self.tokenizer, top)}

    def token_ids(self, tokens: Sequence[OutputToken]) -> dict[str, Any]:
        """``token_ids``, where they were asked for."""
        return {"token_ids": [token.id for token in tokens]} if self.body.return_token_ids else {}

    def reasoning(self, outputs: Sequence[RequestOutput]) -> int | None:
        """Tokens that are reasoning; None where the model does none."""
        return None

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _events_of(self, choices: Sequence[dict[str, Any]], index: int, **more: Any) -> Iterator[dict[str, Any]]:
        options = self.body.stream_options
        if options is not None and options.continuous_usage_stats:
            more["usage"] = answers.counted(*self._counts[index])
        for choice in choices:
            yield {**self._head(self.chunk_kind), "choices": [choice], **more}

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

    def __init__(self, chat_format: ChatFormat) -> None:
        self.reader = chat_format.reader()
        self.message = MessageWriter(chat_format.new_id)

    def finish_reason(self, reason: str | None) -> str | None:
        """The engine's reason, or that the model waits for what its calls bring."""
        return "tool_calls" if reason == "stop" and self.message.calls else reason


class ChatWriter(Writer):
    """``chat.completion`` and ``chat.completion.chunk``.

    Args:
        chat_format: how the answers are to be read.
    """

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"
    body: ChatRequest

    def __init__(
        self, body: ChatRequest, model: str, tokenizer: PreTrainedTokenizerBase, chat_format: ChatFormat
    ) -> None:
        super().__init__(body, model, tokenizer)
        self._chat_format = chat_format
        self._streams = defaultdict[int, _Stream](lambda: _Stream(chat_format))

    @property
    def wants_logprobs(self) -> bool:
        return self.body.logprobs

    def choice(self, index: int, output: RequestOutput, answer: CompletionOutput) -> dict[str, Any]:
        stream = _Stream(self._chat_format)
        return {
            "index": index,
            "message": stream.message.message(stream.reader.whole(answer.text)),
            "logprobs": self._logprobs(answer.tokens),
            "finish_reason": stream.finish_reason(answer.finish_reason),
            **self.token_ids(answer.tokens),
        }

    def opening(self, index: int, chunk: StreamChunk) -> tuple[list[dict[str, Any]], int]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}], 0

    def delta(self, index: int, chunk: StreamChunk, offset: int) -> list[dict[str, Any]]:
        stream = self._streams[index]
        pieces = stream.reader.feed(chunk.text)
        if chunk.finish_reason is not None:
            pieces += stream.reader.close()
        logprobs, reason = self._logprobs(chunk.tokens), stream.finish_reason(chunk.finish_reason)
        if not pieces and not self.wants_tokens and reason is None:
            return []
        delta = stream.message.delta(pieces)
        ids = self.token_ids(chunk.tokens)
        return [{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason, **ids}]

    def about_prompt(self, ids: Sequence[int], logprobs: PromptLogprobs | None) -> dict[str, Any]:
        found = {"prompt_token_ids": list(ids)} if self.body.return_token_ids else {}
        return {**found, **self.prompt_logprobs(ids, logprobs)}

    def reasoning(self, outputs: Sequence[RequestOutput]) -> int | None:
        if self._chat_format.marks is None:
            return None
        answered = [answer for output in outputs for answer in output.outputs]
        return sum(reasoning_tokens(self._chat_format, answer.text, answer.tokens) for answer in answered)

    def _logprobs(self, tokens: Sequence[OutputToken]) -> dict[str, Any] | None:
        return answers.chat_logprobs(tokens, self._name) if self.wants_logprobs else None


class CompletionWriter(Writer):
    """``text_completion``, streamed or whole."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"
    body: CompletionRequest

    @property
    def wants_logprobs(self) -> bool:
        return self.body.logprobs is not None

    def choice(self, index: int, output: RequestOutput, answer: CompletionOutput) -> dict[str, Any]:
        ids, prompt_logprobs = output.prompt_token_ids, output.prompt_logprobs
        echoed = self._echoed(index, ids)
        logprobs = self._logprobs(answers.scored_answer(answer.tokens), len(echoed))
        if logprobs is not None and self.body.echo:
            own = self._logprobs_of_prompt(ids, prompt_logprobs)
            logprobs = {name: [*own[name], *values] for name, values in logprobs.items()}
        return {
            "index": index,
            "text": echoed + answer.text,
            "logprobs": logprobs,
            "finish_reason": answer.finish_reason,
            **self.token_ids(answer.tokens),
            **self._prompt_ids(ids),
            **self.prompt_logprobs(ids, prompt_logprobs),
        }

    def opening(self, index: int, chunk: StreamChunk) -> tuple[list[dict[str, Any]], int]:
        ids = chunk.prompt_token_ids or []
        echoed = self._echoed(index, ids)
        if not echoed and not self.body.return_token_ids:
            return [], 0
        logprobs = self._logprobs_of_prompt(ids, chunk.prompt_logprobs) if echoed and self.wants_logprobs else None
        opened = {"index": index, "text": echoed, "logprobs": logprobs, "finish_reason": None}
        return [{**opened, **self._prompt_ids(ids)}], len(echoed)

    def delta(self, index: int, chunk: StreamChunk, offset: int) -> list[dict[str, Any]]:
        logprobs = self._logprobs(answers.scored_answer(chunk.tokens), offset)
        ids = self.token_ids(chunk.tokens)
        return [{"index": index, "text": chunk.text, "logprobs": logprobs, "finish_reason": chunk.finish_reason, **ids}]

    def about_prompt(self, ids: Sequence[int], logprobs: PromptLogprobs | None) -> dict[str, Any]:
        """Nothing: each choice may have a prompt of its own, and says it itself."""
        return {}

    def _prompt_ids(self, ids: Sequence[int]) -> dict[str, Any]:
        return {"prompt_token_ids": list(ids)} if self.body.return_token_ids else {}

    def _echoed(self, index: int, ids: Sequence[int]) -> str:
        """The prompt in front of its answer: as it was sent, or what was read of it."""
        if not self.body.echo:
            return ""
        prompt = self.body.prompts[index // self.body.n]
        if isinstance(prompt, str) and self.body.truncate_prompt_tokens is None:
            return prompt
        return str(self.tokenizer.decode(list(ids)))

    def _logprobs_of_prompt(self, ids: Sequence[int], logprobs: PromptLogprobs | None) -> dict[str, Any]:
        """Without numbers where the answer ended before its prompt was read."""
        if logprobs is None:
            return answers.completion_logprobs([], self._name, 0)
        top = self.body.logprobs or 0
        return answers.completion_logprobs(answers.scored_prompt(ids, logprobs, self.tokenizer, top), self._name, 0)

    def _logprobs(self, tokens: Sequence[answers.ScoredToken], offset: int) -> dict[str, Any] | None:
        return answers.completion_logprobs(tokens, self._name, offset) if self.wants_logprobs else None
