"""The objects that clients are sent, built from the engine's tokens and counts.

Shapes are OpenAI's; ``metrics.speculative_decoding`` is vLLM's and marked experimental there, so it is built in one
place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from forerun.engine.completion import Detokenizer
from forerun.types import CompletionOutput, OutputToken, RequestOutput, SpeculationStats, StepTrace, TokenLogprob

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not know."""

PromptLogprobs = Sequence[Mapping[int, TokenLogprob] | None]
"""As the engine gives them: None for the first token."""


def usage(outputs: Sequence[RequestOutput], *, predicted: bool, reasoning: int | None = None) -> dict[str, Any]:
    """Token counts; those of the client's prediction where it sent one, and of reasoning where the model does any."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
    counts: dict[str, Any] = {
        **counted(prompt, completion),
    }
    cached = [output.num_cached_tokens for output in outputs if output.num_cached_tokens is not None]
    if len(cached) == len(outputs):
        counts["prompt_tokens_details"] = {"cached_tokens": sum(cached)}
    details = {} if reasoning is None else {"reasoning_tokens": reasoning}
    if predicted:
        stats = pooled(outputs)
        details["accepted_prediction_tokens"] = stats.num_accepted_draft_tokens
        details["rejected_prediction_tokens"] = stats.num_draft_tokens - stats.num_accepted_draft_tokens
    if details:
        counts["completion_tokens_details"] = details
    return counts


def counted(prompt: int, completion: int) -> dict[str, int]:
    """The counts alone, in tokens."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


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


class ScoredToken(NamedTuple):
    """A token of a prompt or an answer, as log-probabilities are written of it."""

    id: int
    text: str
    """What it adds to the text."""
    logprob: TokenLogprob | None
    """None for the first one of a prompt."""
    best: Mapping[int, TokenLogprob]


def scored_answer(tokens: Sequence[OutputToken]) -> list[ScoredToken]:
    """The tokens of an answer whose log-probabilities were asked for."""
    return [ScoredToken(token.id, token.text, token.logprob, token.top_logprobs or {}) for token in tokens]


def scored_prompt(
    ids: Sequence[int], logprobs: PromptLogprobs, tokenizer: PreTrainedTokenizerBase, top: int
) -> list[ScoredToken]:
    """The tokens of a prompt whose log-probabilities were asked for, with the `top` likeliest in their places."""
    texts = Detokenizer(tokenizer, (), skip_special=True)
    found = []
    for token, entry in zip(ids, logprobs, strict=True):
        best = {other: value for other, value in (entry or {}).items() if value.rank <= top}
        found.append(ScoredToken(token, texts.add(token), None if entry is None else entry[token], best))
    return found


def prompt_logprobs(
    ids: Sequence[int], logprobs: PromptLogprobs, tokenizer: PreTrainedTokenizerBase, top: int
) -> list[dict[str, Any] | None]:
    """vLLM's ``prompt_logprobs``: by token id, of each token and of the `top` likeliest in its place."""
    return [
        {
            str(other): {"logprob": _finite(value), "rank": value.rank, "decoded_token": tokenizer.decode([other])}
            for other, value in entry.items()
            if other == token or value.rank <= top
        }
        if entry is not None
        else None
        for token, entry in zip(ids, logprobs, strict=True)
    ]


def token_namer(tokenizer: PreTrainedTokenizerBase, *, by_id: bool) -> Callable[[int], str]:
    """How log-probabilities name a token: by its text, or by its id, which is never that of two."""
    return (lambda token: f"token_id:{token}") if by_id else (lambda token: str(tokenizer.decode([token])))


def chat_logprobs(tokens: Sequence[OutputToken], name: Callable[[int], str]) -> dict[str, Any]:
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
