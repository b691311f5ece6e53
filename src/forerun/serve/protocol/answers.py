"""The objects that clients are sent, built from the engine's tokens and counts.

Shapes are OpenAI's; ``metrics.speculative_decoding`` is vLLM's and marked experimental there, so it is built in one
place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from transformers import PreTrainedTokenizerBase

from forerun.types import CompletionOutput, OutputToken, RequestOutput, SpeculationStats, StepTrace, TokenLogprob

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not know."""


def usage(outputs: Sequence[RequestOutput], *, predicted: bool, reasoning: int | None = None) -> dict[str, Any]:
    """Token counts; those of the client's prediction where it sent one, and of reasoning where the model does any."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
    counts: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
    }
    details = {} if reasoning is None else {"reasoning_tokens": reasoning}
    if predicted:
        stats = pooled(outputs)
        details["accepted_prediction_tokens"] = stats.num_accepted_draft_tokens
        details["rejected_prediction_tokens"] = stats.num_draft_tokens - stats.num_accepted_draft_tokens
    if details:
        counts["completion_tokens_details"] = details
    return counts


def pooled(outputs: Iterable[RequestOutput]) -> SpeculationStats:
    """The counts of all answers together."""
    total = SpeculationStats()
    for output in outputs:
        for answer in output.outputs:
            total.add(answer.speculation)
    return total


def metrics(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """vLLM's per-request statistics, as NVIDIA AIPerf and ``vllm bench`` read them."""
    stats = pooled(outputs)
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


def chat_logprobs(tokens: Sequence[OutputToken], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """``logprobs`` of a chat choice."""

    def named(token: int, value: TokenLogprob) -> dict[str, Any]:
        text = tokenizer.decode([token])
        return {"token": text, "logprob": _finite(value), "bytes": list(text.encode("utf-8"))}

    content = []
    for token in tokens:
        assert token.logprob is not None, "asked for"
        best = [named(other, value) for other, value in (token.top_logprobs or {}).items()]
        content.append({**named(token.id, token.logprob), "top_logprobs": best})
    return {"content": content}


def completion_logprobs(
    tokens: Sequence[OutputToken], tokenizer: PreTrainedTokenizerBase, offset: int
) -> dict[str, Any]:
    """``logprobs`` of a completion choice; `offset`: characters of the answer before the first token."""
    found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token in tokens:
        assert token.logprob is not None, "asked for"
        text = tokenizer.decode([token.id])
        found["tokens"].append(text)
        found["token_logprobs"].append(_finite(token.logprob))
        best: Mapping[int, TokenLogprob] = token.top_logprobs or {}
        found["top_logprobs"].append({tokenizer.decode([other]): _finite(value) for other, value in best.items()})
        found["text_offset"].append(offset)
        offset += len(token.text)
    return found


def traced(output: RequestOutput, answer: CompletionOutput, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """One answer step by step: its tokens with their sources, and what was drafted, kept and spent in each step."""
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
