"""This module writes the responses of the two completion endpoints, whole or in chunks, and the
counts of all endpoints.

Shapes are OpenAI's; ``metrics.speculative_decoding`` is vLLM's and experimental there, so it is built in one place.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache, cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from forerun.core.rules import rule_named
from forerun.drafters.draft_models.token_bytes import token_to_bytes
from forerun.engine.completion import Detokenizer
from forerun.serve.handling import ChatFormat, Tagged, reasoning_tokens, was_cut
from forerun.serve.protocol.requests import ChatRequest, CompletionRequest
from forerun.serve.tools.incoming import Kind, Piece, PieceReader
from forerun.types import (
    CompletionOutput,
    OutputToken,
    RequestOutput,
    Source,
    SpeculationStats,
    StepTrace,
    StreamChunk,
    TokenLogprob,
)

Event = dict[str, Any]
PromptLogprobs = Sequence[Mapping[int, TokenLogprob] | None]  # The engine's form: None for the first token

LEAST_LOGPROB = -9999.0  # Stands for minus infinity, which JSON does not know


class Writer(ABC):
    """Writes the choices of a completion; the tokenizer names tokens in
    log-probabilities.

    `predicted` says whether everything drafted is the client's prediction.
    """

    prefix: str
    kind: str
    chunk_kind: str
    one_prompt: bool  # All choices complete the same prompt, so what is said of it stands beside them; else in each

    def __init__(
        self,
        body: ChatRequest | CompletionRequest,
        model: str,
        tokenizer: PreTrainedTokenizerBase,
        *,
        predicted: bool = False,
    ) -> None:
        self.body, self.tokenizer, self._predicted = body, tokenizer, predicted
        self.wants_logprobs = body.logprobs is not None and body.logprobs is not False
        traced = body.return_speculation_trace
        self.wants_tokens = self.wants_logprobs or body.return_token_ids or traced  # Something is said of each token
        self._text = cache(lambda token: str(tokenizer.decode([token])))  # Text of one token
        self._id = f"{self.prefix}-{body.request_id or secrets.token_hex(12)}"
        self._created = int(time.time())
        self._model = model
        self._sent = Counter[int]()  # Choice -> characters of its tokens so far, behind those of the echoed prompt
        self._counts: dict[int, list[int]] = {}  # Choice -> tokens of its prompt, and of its completion so far
        self._outputs: dict[int, RequestOutput] = {}

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the response to a request that is not streamed."""
        choices = [
            self.choice(job * self.body.n + answer.index, output, answer)
            for job, output in enumerate(outputs)
            for answer in output.outputs
        ]
        shared = self.about_prompt(outputs[0].prompt_token_ids, outputs[0].prompt_logprobs) if self.one_prompt else {}
        return {**self._head(self.kind), "choices": choices, **shared, **self._closing(outputs)}

    def events(self, tagged: Tagged) -> Iterator[Event]:
        """Yield the events of one chunk."""
        chunk = tagged.chunk
        index = tagged.job * self.body.n + tagged.chunk.index
        if index not in self._counts:
            ids = chunk.prompt_token_ids or []
            self._counts[index] = [len(ids), 0]
            about = self.about_prompt(ids, None) if self.one_prompt else {}
            yield from self._event(self.opening(index, chunk), index, **about)
        if chunk.output is not None:
            self._outputs[tagged.job] = chunk.output
        self._counts[index][1] += len(chunk.tokens)
        if chunk.text or chunk.finish_reason is not None or (self.wants_tokens and chunk.tokens):
            yield from self._event(self.delta(index, chunk), index)

    def closing_events(self) -> Iterator[Event]:
        """Yield a chunk without choices but with counts behind the last, if requested, because not
        every client expects one.
        """
        wanted = self.body.stream_options is not None and self.body.stream_options.include_usage
        if wanted or self.body.return_speculation_trace:
            outputs = [self._outputs[job] for job in sorted(self._outputs)]
            yield {**self._head(self.chunk_kind), "choices": [], **self._closing(outputs)}

    @abstractmethod
    def choice(self, index: int, output: RequestOutput, answer: CompletionOutput) -> dict[str, Any]:
        """Return one whole choice."""

    @abstractmethod
    def opening(self, index: int, chunk: StreamChunk) -> dict[str, Any] | None:
        """Return what is sent of a choice before its first token; None sends nothing."""

    @abstractmethod
    def delta(self, index: int, chunk: StreamChunk) -> dict[str, Any] | None:
        """Return what is sent of a choice for a chunk; None sends nothing."""

    def about_prompt(self, ids: Sequence[int], logprobs: PromptLogprobs | None) -> dict[str, Any]:
        """Return ``prompt_token_ids``, and vLLM's ``prompt_logprobs`` with the likeliest, where
        they are requested.
        """
        about: dict[str, Any] = {"prompt_token_ids": list(ids)} if self.body.return_token_ids else {}
        top = self.body.prompt_logprobs
        if top is None or logprobs is None:
            return about

        def told(other: int, value: TokenLogprob) -> dict[str, Any]:
            return {"logprob": _finite(value), "rank": value.rank, "decoded_token": self._text(other)}

        about["prompt_logprobs"] = [
            entry and {str(it): told(it, value) for it, value in entry.items() if it == token or value.rank <= top}
            for token, entry in zip(ids, logprobs, strict=True)
        ]
        return about

    def token_ids(self, tokens: Sequence[OutputToken]) -> dict[str, Any]:
        """Return ``token_ids``, where they were requested."""
        return {"token_ids": [token.id for token in tokens]} if self.body.return_token_ids else {}

    def part_of_trace(self, chunk: StreamChunk) -> dict[str, Any]:
        """Return what one step adds to ``speculation_trace``, where that was requested."""
        if not self.body.return_speculation_trace:
            return {}
        return {"speculation_trace": self._trace(chunk.tokens, [] if chunk.trace is None else [chunk.trace])}

    def stop_reason(self, ended: CompletionOutput | StreamChunk) -> int | str | None:
        """Return the stop string or id that ended a completion; None for the model's own end, whether
        or not it was named.
        """
        own = not self.body.ignore_eos and ended.stop_reason == self.tokenizer.eos_token_id
        return None if own else ended.stop_reason

    def last(self, chunk: StreamChunk) -> dict[str, Any]:
        """Return the fields that only the last chunk of a choice has."""
        return {} if chunk.finish_reason is None else {"stop_reason": self.stop_reason(chunk)}

    def reasoning(self, outputs: Sequence[RequestOutput]) -> int | None:
        """Count the tokens that are reasoning; None where the model does none."""
        return None

    def _name(self, token: int) -> str:
        """Return the name of a token in log-probabilities: its text, or its id, which is never that
        of two.
        """
        return f"token_id:{token}" if self.body.return_tokens_as_token_ids else self._text(token)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _event(self, choice: dict[str, Any] | None, index: int, **more: Any) -> Iterator[Event]:
        options = self.body.stream_options
        if options is not None and options.continuous_usage_stats:
            more["usage"] = _usage(*self._counts[index])
        if choice is not None:
            yield {**self._head(self.chunk_kind), "choices": [choice], **more}

    def _closing(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the counts, those of the client's prediction and of reasoning where there is any,
        and what else was requested.
        """
        prompt = sum(len(output.prompt_token_ids) for output in outputs)
        usage = _usage(prompt, sum(len(answer.token_ids) for answer in _answers(outputs)))
        cached = [output.num_cached_tokens for output in outputs if output.num_cached_tokens is not None]
        if len(cached) == len(outputs):
            usage["prompt_tokens_details"] = {"cached_tokens": sum(cached)}
        reasoning = self.reasoning(outputs)
        details = {} if reasoning is None else {"reasoning_tokens": reasoning}
        if self.body.prediction is not None and self._predicted:
            stats = _sum_stats(outputs)
            details["accepted_prediction_tokens"] = stats.num_accepted_draft_tokens
            details["rejected_prediction_tokens"] = stats.num_draft_tokens - stats.num_accepted_draft_tokens
        if details:
            usage["completion_tokens_details"] = details
        closing: dict[str, Any] = {"usage": usage, "metrics": speculation_metrics(outputs)}
        if self.body.return_speculation_trace:
            closing["speculation_trace"] = [
                {
                    "first_token_ms": 1e3 * (output.time_to_first_token_s or 0.0),
                    **self._trace(answer.tokens, answer.trace),
                }
                for output in outputs
                for answer in output.outputs
            ]
        return closing

    def _trace(self, tokens: Sequence[OutputToken], trace: Sequence[StepTrace]) -> dict[str, Any]:
        """Describe the tokens with their sources, and what was drafted, accepted and spent in each
        step.
        """
        steps = []
        for step in trace:
            steps.append(
                {
                    **asdict(step),
                    "nodes": [{**asdict(node), "text": self._text(node.token)} for node in step.nodes],
                    "lossless": rule_named(step.rule).lossless,
                }
            )
        described = [
            {"id": token.id, "text": token.text, "source": token.source, "step": token.step} for token in tokens
        ]
        return {"tokens": described, "steps": steps}


class ChatWriter(Writer):
    """Writes ``chat.completion`` and ``chat.completion.chunk``."""

    prefix, kind, chunk_kind, one_prompt = "chatcmpl", "chat.completion", "chat.completion.chunk", True
    body: ChatRequest

    def __init__(
        self,
        body: ChatRequest,
        model: str,
        tokenizer: PreTrainedTokenizerBase,
        chat_format: ChatFormat,
        *,
        predicted: bool = False,
    ) -> None:
        super().__init__(body, model, tokenizer, predicted=predicted)
        self._chat_format = chat_format
        self._readers = defaultdict[int, tuple[PieceReader, MessageWriter]](self._reading)

    def choice(self, index: int, output: RequestOutput, answer: CompletionOutput) -> dict[str, Any]:
        reader, message = self._readers[index]
        return {
            "index": index,
            "message": message.message(self._shown(reader.whole(answer.text, cut=was_cut(answer)))),
            "logprobs": self._logprobs(answer.tokens),
            "finish_reason": self._finish_reason(message, answer),
            "stop_reason": self.stop_reason(answer),
            **self.token_ids(answer.tokens),
        }

    def opening(self, index: int, chunk: StreamChunk) -> dict[str, Any]:
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def delta(self, index: int, chunk: StreamChunk) -> dict[str, Any] | None:
        reader, message = self._readers[index]
        pieces = reader.feed(chunk.text)
        if chunk.finish_reason is not None:
            pieces += reader.close(cut=was_cut(chunk))
        pieces = self._shown(pieces)
        delta = message.delta(pieces)
        reason = self._finish_reason(message, chunk)
        if not pieces and not self.wants_tokens and reason is None:
            return None
        more = {**self.last(chunk), **self.token_ids(chunk.tokens), **self.part_of_trace(chunk)}
        return {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(chunk.tokens),
            "finish_reason": reason,
            **more,
        }

    def reasoning(self, outputs: Sequence[RequestOutput]) -> int | None:
        if self._chat_format.marks is None:
            return None
        return sum(reasoning_tokens(self._readers[answer.index][0], answer) for answer in _answers(outputs))

    def _finish_reason(self, message: MessageWriter, ended: CompletionOutput | StreamChunk) -> str | None:
        """Return the engine's reason, or ``tool_calls`` where the model waits for the results of
        its calls.

        It does not wait where a stop string cut the calls off.
        """
        waits = message.calls and ended.finish_reason == "stop" and self.stop_reason(ended) is None
        return "tool_calls" if waits else ended.finish_reason

    def _shown(self, pieces: list[Piece]) -> list[Piece]:
        """Leave the reasoning out where the client does not want to see it."""
        return [one for one in pieces if self.body.include_reasoning or one.kind is not Kind.REASONING]

    @cached_property
    def _bytes(self) -> Callable[[int], bytes]:
        """Return a function that gives the bytes of one token."""
        return cache(token_to_bytes(self.tokenizer))

    def _reading(self) -> tuple[PieceReader, MessageWriter]:
        return self._chat_format.reader(), MessageWriter(self._chat_format.new_id)

    def _logprobs(self, tokens: Sequence[OutputToken]) -> dict[str, Any] | None:
        if not self.wants_logprobs:
            return None
        return {"content": write_logprobs(tokens, self._name, self._bytes)}


class CompletionWriter(Writer):
    """Writes ``text_completion``, streamed or whole."""

    prefix, kind, chunk_kind, one_prompt = "cmpl", "text_completion", "text_completion", False
    body: CompletionRequest

    def choice(self, index: int, output: RequestOutput, answer: CompletionOutput) -> dict[str, Any]:
        ids, prompt_logprobs = output.prompt_token_ids, output.prompt_logprobs
        echoed = self._echo(index, ids)
        logprobs = self._logprobs(answer.tokens, len(echoed))
        prompt_part = self._logprobs_of_prompt(echoed, ids, prompt_logprobs) if self.body.echo else None
        if logprobs is not None and prompt_part is not None:
            logprobs = {name: [*prompt_part[name], *values] for name, values in logprobs.items()}
        return {
            "index": index,
            "text": echoed + answer.text,
            "logprobs": logprobs,
            "finish_reason": answer.finish_reason,
            "stop_reason": self.stop_reason(answer),
            **self.token_ids(answer.tokens),
            **self.about_prompt(ids, prompt_logprobs),
        }

    def opening(self, index: int, chunk: StreamChunk) -> dict[str, Any] | None:
        ids = chunk.prompt_token_ids or []
        echoed = self._echo(index, ids)
        if not echoed and not self.body.return_token_ids:
            return None
        self._sent[index] = len(echoed)
        opened = {
            "index": index,
            "text": echoed,
            "logprobs": self._logprobs_of_prompt(echoed, ids, chunk.prompt_logprobs) if echoed else None,
            "finish_reason": None,
        }
        return {**opened, **self.about_prompt(ids, None)}

    def delta(self, index: int, chunk: StreamChunk) -> dict[str, Any]:
        logprobs = self._logprobs(chunk.tokens, self._sent[index])
        reason = chunk.finish_reason
        self._sent[index] += sum(len(token.text) for token in chunk.tokens)
        more = {**self.last(chunk), **self.token_ids(chunk.tokens), **self.part_of_trace(chunk)}
        return {"index": index, "text": chunk.text, "logprobs": logprobs, "finish_reason": reason, **more}

    def _echo(self, index: int, ids: Sequence[int]) -> str:
        """Return the prompt in front of its completion: as it was sent, or what was read of it."""
        if not self.body.echo:
            return ""
        prompt = self.body.prompts[index // self.body.n]
        if isinstance(prompt, str) and self.body.truncate_prompt_tokens is None:
            return prompt
        return str(self.tokenizer.decode(list(ids)))

    def _logprobs_of_prompt(
        self, echoed: str, ids: Sequence[int], logprobs: PromptLogprobs | None
    ) -> dict[str, Any] | None:
        """Return the prompt's log-probabilities, with the likeliest tokens in each place.

        They are without numbers where the completion ended before its prompt was read.
        """
        texts = Detokenizer(self.tokenizer, (), skip_special=False)
        top = self.body.logprobs or 0
        tokens = []
        for token, entry in zip(ids, logprobs, strict=True) if logprobs is not None else ():
            numbers: dict[str, Any] = {
                "logprob": None if entry is None else entry[token],
                "top_logprobs": {other: value for other, value in (entry or {}).items() if value.rank <= top},
            }
            tokens.append(OutputToken(id=token, text=texts.add(token), source=Source.TARGET, step=0, **numbers))
        before = "".join(token.text for token in tokens).find(
            echoed
        )  # Tokens that the tokenizer puts in front were not echoed
        return self._logprobs(tokens, -max(0, before))

    def _logprobs(self, tokens: Sequence[OutputToken], offset: int) -> dict[str, Any] | None:
        """Return ``logprobs`` where they were requested; `offset` counts the characters of the text
        before the first token.

        Of the likeliest tokens with the same text, such as parts of characters, the likeliest is
        reported.
        """
        if not self.wants_logprobs:
            return None
        columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token in tokens:
            best: dict[str, float] = {}
            if token.logprob is not None:
                likeliest = {**(token.top_logprobs or {}), token.id: token.logprob}
                for other, value in sorted(likeliest.items(), key=lambda pair: pair[1].rank):
                    best.setdefault(self._name(other), _finite(value))
            columns["tokens"].append(self._name(token.id))
            columns["token_logprobs"].append(None if token.logprob is None else _finite(token.logprob))
            columns["top_logprobs"].append(None if token.logprob is None else best)
            columns["text_offset"].append(max(0, offset))
            offset += len(token.text)
        return columns


class MessageWriter:
    """Writes an assistant's message in OpenAI's shape, whole or as deltas, from
    the pieces of its text.

    Reasoning goes by two names, vLLM's older ``reasoning_content`` and its newer ``reasoning``:
    clients read either.
    """

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self.calls = 0  # Calls begun

    def delta(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return what these pieces add to the message."""
        message: dict[str, Any] = {}
        if content := "".join(piece.text for piece in pieces if piece.kind is Kind.CONTENT):
            message["content"] = content
        if reasoning := "".join(piece.text for piece in pieces if piece.kind is Kind.REASONING):
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        calls: list[dict[str, Any]] = []
        for piece in pieces:
            if piece.kind is Kind.CALL:
                calls.append(
                    {
                        "index": self.calls,
                        "id": self._new_id(),
                        "type": "function",
                        "function": {"name": piece.text, "arguments": ""},
                    }
                )
                self.calls += 1
            elif piece.kind is Kind.ARGUMENTS:
                if not calls:
                    calls.append({"index": self.calls - 1, "function": {"arguments": ""}})
                calls[-1]["function"]["arguments"] += piece.text
        return message | ({"tool_calls": calls} if calls else {})

    def message(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return the whole message."""
        delta = self.delta(pieces)
        calls = [{key: value for key, value in call.items() if key != "index"} for call in delta.pop("tool_calls", [])]
        content = delta.pop("content", None if calls else "")
        message = {"role": "assistant", "content": content, "refusal": None, **delta}
        return message | ({"tool_calls": calls} if calls else {})


def write_logprobs(
    tokens: Sequence[OutputToken], name: Callable[[int], str], bytes_of: Callable[[int], bytes]
) -> list[dict[str, Any]]:
    """Return the log-probabilities of tokens as chat completions and Responses have them."""

    def named(token: int, value: TokenLogprob) -> dict[str, Any]:
        return {"token": name(token), "logprob": _finite(value), "bytes": list(bytes_of(token))}

    content = []
    for token in tokens:
        assert token.logprob is not None, "requested"
        best = [named(other, value) for other, value in (token.top_logprobs or {}).items()]
        content.append({**named(token.id, token.logprob), "top_logprobs": best})
    return content


def size_of(tokens: Sequence[OutputToken], prompt: PromptLogprobs | None) -> int:
    """Estimate the bytes in JSON of the log-probabilities of tokens, and of their prompt."""
    numbers = sum(len(entry or ()) for entry in prompt or ())
    numbers += sum(1 + len(token.top_logprobs or ()) for token in tokens if token.logprob is not None)
    return 50 * numbers


def _answers(outputs: Sequence[RequestOutput]) -> list[CompletionOutput]:
    return [answer for output in outputs for answer in output.outputs]


def _sum_stats(outputs: Sequence[RequestOutput]) -> SpeculationStats:
    return SpeculationStats.sum(answer.speculation for answer in _answers(outputs))


def _usage(prompt: int, completion: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def speculation_metrics(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Return vLLM's per-request statistics, as NVIDIA AIPerf and ``vllm bench`` read them, behind
    two figures of ours.
    """
    stats = _sum_stats(outputs)
    reached = [stats.num_spec_steps, *stats.accepted_per_depth]
    histogram = [steps - deeper for steps, deeper in zip(reached, [*reached[1:], 0], strict=True)]
    return {
        "speculative_decoding": {
            "tokens_per_pass": stats.tokens_per_pass,
            "num_passes": stats.num_passes,
            "mean_acceptance_length": stats.mean_acceptance_length,
            "draft_acceptance_rate": stats.draft_acceptance_rate,
            "acceptance_histogram": histogram,
            "num_spec_steps": stats.num_spec_steps,
            "num_accepted_draft_tokens": stats.num_accepted_draft_tokens,
            "num_draft_tokens": stats.num_draft_tokens,
            "num_spec_tokens": len(stats.drafted_per_depth),
        }
    }


def _finite(value: TokenLogprob) -> float:
    return max(value.logprob, LEAST_LOGPROB)
