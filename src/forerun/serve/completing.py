"""Answers of the two completion endpoints, whole or in chunks, and the counts in answers of all.

Shapes are OpenAI's; ``metrics.speculative_decoding`` is vLLM's and marked experimental there, so it is built in one
place. Knows no engine and no HTTP.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar, NamedTuple

from transformers import PreTrainedTokenizerBase

from forerun.engine.completion import Detokenizer
from forerun.serve.chat_format import AnswerReader, ChatFormat, reasoning_tokens
from forerun.serve.handling import Tagged
from forerun.serve.protocol.errors import ApiError
from forerun.serve.protocol.requests import ChatRequest, CompletionRequest, Sampling
from forerun.serve.tools.incoming import Kind, Piece
from forerun.types import (
    CompletionOutput,
    OutputToken,
    RequestOutput,
    SpeculationStats,
    StepTrace,
    StreamChunk,
    TokenLogprob,
)

Event = dict[str, Any]

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not know."""

PromptLogprobs = Sequence[Mapping[int, TokenLogprob] | None]
"""As the engine gives them: None for the first token."""


def _usage(outputs: Sequence[RequestOutput], *, predicted: bool, reasoning: int | None = None) -> dict[str, Any]:
    """Token counts; those of the client's prediction where it sent one, and of reasoning where the model does any."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
    counts: dict[str, Any] = {**_counted(prompt, completion)}
    cached = [output.num_cached_tokens for output in outputs if output.num_cached_tokens is not None]
    if len(cached) == len(outputs):
        counts["prompt_tokens_details"] = {"cached_tokens": sum(cached)}
    details = {} if reasoning is None else {"reasoning_tokens": reasoning}
    if predicted:
        stats = _pooled(outputs)
        details["accepted_prediction_tokens"] = stats.num_accepted_draft_tokens
        details["rejected_prediction_tokens"] = stats.num_draft_tokens - stats.num_accepted_draft_tokens
    if details:
        counts["completion_tokens_details"] = details
    return counts


def _counted(prompt: int, completion: int) -> dict[str, int]:
    """The counts alone, in tokens."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _pooled(outputs: Iterable[RequestOutput]) -> SpeculationStats:
    """The counts of all answers together."""
    total = SpeculationStats()
    for output in outputs:
        for answer in output.outputs:
            total.add(answer.speculation)
    return total


def speculation_metrics(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """vLLM's per-request statistics, as NVIDIA AIPerf and ``vllm bench`` read them."""
    stats = _pooled(outputs)
    reached = [stats.num_spec_steps, *stats.accepted_per_depth]
    histogram = [steps - deeper for steps, deeper in zip(reached, [*reached[1:], 0], strict=True)]
    return {
        "speculative_decoding": {
            "mean_acceptance_length": stats.mean_acceptance_length,
            "draft_acceptance_rate": stats.draft_acceptance_rate,
            "acceptance_histogram": histogram,
            "num_spec_steps": stats.num_spec_steps,
            "num_accepted_draft_tokens": stats.num_accepted_draft_tokens,
            "num_draft_tokens": stats.num_draft_tokens,
            "num_spec_tokens": len(stats.drafted_per_depth),
        }
    }


class ScoredToken(NamedTuple):
    """A token of a prompt or an answer, as log-probabilities are written of it."""

    id: int
    text: str
    """What it adds to the text."""
    logprob: TokenLogprob | None
    """None for the first one of a prompt."""
    best: Mapping[int, TokenLogprob]


def _scored_answer(tokens: Sequence[OutputToken]) -> list[ScoredToken]:
    """The tokens of an answer whose log-probabilities were asked for."""
    return [ScoredToken(token.id, token.text, token.logprob, token.top_logprobs or {}) for token in tokens]


def _scored_prompt(
    ids: Sequence[int], logprobs: PromptLogprobs, tokenizer: PreTrainedTokenizerBase, top: int
) -> list[ScoredToken]:
    """The tokens of a prompt whose log-probabilities were asked for, with the `top` likeliest in their places."""
    texts = Detokenizer(tokenizer, (), skip_special=True)
    found = []
    for token, entry in zip(ids, logprobs, strict=True):
        best = {other: value for other, value in (entry or {}).items() if value.rank <= top}
        found.append(ScoredToken(token, texts.add(token), None if entry is None else entry[token], best))
    return found


def _chat_logprobs(tokens: Sequence[OutputToken], name: Callable[[int], str]) -> dict[str, Any]:
    """``logprobs`` of a chat choice."""

    def named(token: int, value: TokenLogprob) -> dict[str, Any]:
        text = name(token)
        return {"token": text, "logprob": _finite(value), "bytes": list(text.encode("utf-8"))}

    content = []
    for token in tokens:
        assert token.logprob is not None, "asked for"
        best = [named(other, value) for other, value in (token.top_logprobs or {}).items()]
        content.append({**named(token.id, token.logprob), "top_logprobs": best})
    return {"content": content}


def completion_logprobs(tokens: Sequence[ScoredToken], name: Callable[[int], str], offset: int) -> dict[str, Any]:
    """``logprobs`` of a completion choice; `offset`: characters of its text before the first token."""
    found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token in tokens:
        found["tokens"].append(name(token.id))
        found["token_logprobs"].append(None if token.logprob is None else _finite(token.logprob))
        found["top_logprobs"].append(None if token.logprob is None else _named_best(token, name))
        found["text_offset"].append(offset)
        offset += len(token.text)
    return found


def _named_best(token: ScoredToken, name: Callable[[int], str]) -> dict[str, float]:
    """The likeliest and the token itself. Of those with the same text, such as parts of characters, the likeliest."""
    assert token.logprob is not None
    found: dict[str, float] = {}
    for other, value in sorted({**token.best, token.id: token.logprob}.items(), key=lambda pair: pair[1].rank):
        found.setdefault(name(other), _finite(value))
    return found


def _traced(output: RequestOutput, answer: CompletionOutput, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """One answer step by step: its tokens with their sources, and what was drafted, accepted and spent in each step."""
    return {
        "first_token_ms": 1e3 * (output.time_to_first_token_s or 0.0),
        "tokens": [
            {"id": token.id, "text": token.text, "source": token.source.value, "step": token.step}
            for token in answer.tokens
        ],
        "steps": [_step(step, tokenizer) for step in answer.trace],
    }


def _step(step: StepTrace, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    nodes = [{**asdict(node), "text": tokenizer.decode([node.token])} for node in step.nodes]
    return {**asdict(step), "nodes": nodes, "kind": step.kind.value}


def _finite(value: TokenLogprob) -> float:
    return max(value.logprob, LEAST_LOGPROB)


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

    def finish_reason(self, reason: str | None) -> str | None:
        """The engine's reason, or that the model waits for what its calls bring."""
        return "tool_calls" if reason == "stop" and self.calls else reason

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

    body: Any

    @property
    def streams(self) -> bool:
        """Whether a stream was asked for."""
        return bool(self.body.stream)

    @abstractmethod
    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The answer of a request that is not streamed."""

    @abstractmethod
    def events(self, tagged: Tagged) -> Iterator[Event]:
        """What is sent for one chunk."""

    @abstractmethod
    def closing_events(self) -> Iterator[Event]:
        """What is sent behind the last chunk."""

    def error_event(self, error: ApiError) -> Event:
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

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        choices = [
            self.choice(job * self.body.n + answer.index, output, answer)
            for job, output in enumerate(outputs)
            for answer in output.outputs
        ]
        about_prompt = self.about_prompt(outputs[0].prompt_token_ids, outputs[0].prompt_logprobs)
        return {**self._head(self.kind), "choices": choices, **about_prompt, **self._closing(outputs)}

    def events(self, tagged: Tagged) -> Iterator[Event]:
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

    def closing_events(self) -> Iterator[Event]:
        """A chunk without choices but with counts, where it was asked for: not every client expects one."""
        wanted = self.body.stream_options is not None and self.body.stream_options.include_usage
        if wanted or self.body.return_speculation_trace:
            outputs = [self._outputs[job] for job in sorted(self._outputs)]
            yield {**self._head(self.chunk_kind), "choices": [], **self._closing(outputs)}

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
        """vLLM's ``prompt_logprobs``, where they were asked for: each token's and the likeliest in its place."""
        top, decode = self.body.prompt_logprobs, self.tokenizer.decode
        if top is None or logprobs is None:
            return {}

        def named(token: int, entry: Mapping[int, TokenLogprob]) -> dict[str, Any]:
            shown = {other: value for other, value in entry.items() if other == token or value.rank <= top}
            return {
                str(other): {"logprob": _finite(value), "rank": value.rank, "decoded_token": decode([other])}
                for other, value in shown.items()
            }

        pairs = zip(ids, logprobs, strict=True)
        return {"prompt_logprobs": [None if entry is None else named(token, entry) for token, entry in pairs]}

    def prompt_ids(self, ids: Sequence[int]) -> dict[str, Any]:
        """``prompt_token_ids``, where they were asked for."""
        return {"prompt_token_ids": list(ids)} if self.body.return_token_ids else {}

    def token_ids(self, tokens: Sequence[OutputToken]) -> dict[str, Any]:
        """``token_ids``, where they were asked for."""
        return {"token_ids": [token.id for token in tokens]} if self.body.return_token_ids else {}

    def reasoning(self, outputs: Sequence[RequestOutput]) -> int | None:
        """Tokens that are reasoning; None where the model does none."""
        return None

    def _name(self, token: int) -> str:
        """How log-probabilities name a token: by its text, or by its id, which is never that of two."""
        return f"token_id:{token}" if self.body.return_tokens_as_token_ids else str(self.tokenizer.decode([token]))

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _events_of(self, choices: Sequence[dict[str, Any]], index: int, **more: Any) -> Iterator[Event]:
        options = self.body.stream_options
        if options is not None and options.continuous_usage_stats:
            more["usage"] = _counted(*self._counts[index])
        for choice in choices:
            yield {**self._head(self.chunk_kind), "choices": [choice], **more}

    def _closing(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        found: dict[str, Any] = {
            "usage": _usage(outputs, predicted=self.body.prediction is not None, reasoning=self.reasoning(outputs)),
            "metrics": speculation_metrics(outputs),
        }
        if self.body.return_speculation_trace:
            found["speculation_trace"] = [
                _traced(output, answer, self.tokenizer) for output in outputs for answer in output.outputs
            ]
        return found


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
        self._streams = defaultdict[int, tuple[AnswerReader, MessageWriter]](self._stream)

    @property
    def wants_logprobs(self) -> bool:
        return self.body.logprobs

    def choice(self, index: int, output: RequestOutput, answer: CompletionOutput) -> dict[str, Any]:
        reader, message = self._stream()
        return {
            "index": index,
            "message": message.message(reader.whole(answer.text)),
            "logprobs": self._logprobs(answer.tokens),
            "finish_reason": message.finish_reason(answer.finish_reason),
            **self.token_ids(answer.tokens),
        }

    def opening(self, index: int, chunk: StreamChunk) -> tuple[list[dict[str, Any]], int]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}], 0

    def delta(self, index: int, chunk: StreamChunk, offset: int) -> list[dict[str, Any]]:
        reader, message = self._streams[index]
        pieces = reader.feed(chunk.text)
        if chunk.finish_reason is not None:
            pieces += reader.close()
        delta, reason = message.delta(pieces), message.finish_reason(chunk.finish_reason)
        if not pieces and not self.wants_tokens and reason is None:
            return []
        logprobs, ids = self._logprobs(chunk.tokens), self.token_ids(chunk.tokens)
        return [{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason, **ids}]

    def about_prompt(self, ids: Sequence[int], logprobs: PromptLogprobs | None) -> dict[str, Any]:
        return {**self.prompt_ids(ids), **self.prompt_logprobs(ids, logprobs)}

    def reasoning(self, outputs: Sequence[RequestOutput]) -> int | None:
        if self._chat_format.marks is None:
            return None
        answered = [answer for output in outputs for answer in output.outputs]
        return sum(reasoning_tokens(self._chat_format, answer.text, answer.tokens) for answer in answered)

    def _stream(self) -> tuple[AnswerReader, MessageWriter]:
        return self._chat_format.reader(), MessageWriter(self._chat_format.new_id)

    def _logprobs(self, tokens: Sequence[OutputToken]) -> dict[str, Any] | None:
        return _chat_logprobs(tokens, self._name) if self.wants_logprobs else None


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
        logprobs = self._logprobs(_scored_answer(answer.tokens), len(echoed))
        if logprobs is not None and self.body.echo:
            own = self._logprobs_of_prompt(ids, prompt_logprobs)
            logprobs = {name: [*own[name], *values] for name, values in logprobs.items()}
        return {
            "index": index,
            "text": echoed + answer.text,
            "logprobs": logprobs,
            "finish_reason": answer.finish_reason,
            **self.token_ids(answer.tokens),
            **self.prompt_ids(ids),
            **self.prompt_logprobs(ids, prompt_logprobs),
        }

    def opening(self, index: int, chunk: StreamChunk) -> tuple[list[dict[str, Any]], int]:
        ids = chunk.prompt_token_ids or []
        echoed = self._echoed(index, ids)
        if not echoed and not self.body.return_token_ids:
            return [], 0
        logprobs = self._logprobs_of_prompt(ids, chunk.prompt_logprobs) if echoed and self.wants_logprobs else None
        opened = {"index": index, "text": echoed, "logprobs": logprobs, "finish_reason": None}
        return [{**opened, **self.prompt_ids(ids)}], len(echoed)

    def delta(self, index: int, chunk: StreamChunk, offset: int) -> list[dict[str, Any]]:
        logprobs = self._logprobs(_scored_answer(chunk.tokens), offset)
        ids = self.token_ids(chunk.tokens)
        return [{"index": index, "text": chunk.text, "logprobs": logprobs, "finish_reason": chunk.finish_reason, **ids}]

    def about_prompt(self, ids: Sequence[int], logprobs: PromptLogprobs | None) -> dict[str, Any]:
        """Nothing: each choice may have a prompt of its own, and says it itself."""
        return {}

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
            return completion_logprobs([], self._name, 0)
        top = self.body.logprobs or 0
        return completion_logprobs(_scored_prompt(ids, logprobs, self.tokenizer, top), self._name, 0)

    def _logprobs(self, tokens: Sequence[ScoredToken], offset: int) -> dict[str, Any] | None:
        return completion_logprobs(tokens, self._name, offset) if self.wants_logprobs else None
