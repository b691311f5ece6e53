"""Drafters on the tiny target and engines under a load: what the tests of the scheduler share."""

from pathlib import Path
from typing import Any

from engine.conftest import tiny_tokenizer
from forerun import LLM, SamplingParams
from forerun.heads.eagle import EagleHead
from forerun.types import CompletionOutput, RequestOutput, StreamChunk
from llamas import tiny_eagle

TEXT = "the cat sat; pack my box with five dozen liquor jugs, the dog sat. how vexingly quick daft zebras jump! the cat"
DRAFTERS = ("ngram", "draft_model", "eagle3")


def eagle_head() -> EagleHead:
    """A random head for the tiny target: mostly wrong, but what is sampled depends on what it drafts all the same."""
    return tiny_eagle(len(tiny_tokenizer()), seed=5)


def drafter(name: str, draft_checkpoint: Path) -> dict[str, Any]:
    """A `speculative_config` that drafts the same at every step."""
    options: dict[str, dict[str, Any]] = {
        "ngram": {"follow_edits": False, "min_token_prob": 0.0},  # Else it goes by what it drafted before
        "draft_model": {"model": str(draft_checkpoint)},
        "eagle3": {"model": eagle_head()},
    }
    return {"method": name, "num_speculative_tokens": 3, "adaptive": False, **options[name]}


def engine(checkpoint: Path, config: dict[str, Any] | None = None, **more: Any) -> LLM:
    """In float32, with debug checks."""
    return LLM(str(checkpoint), dtype="float32", speculative_config=config, check=True, **more)


def greedy(tokens: int = 20, **more: Any) -> SamplingParams:
    """Exactly so many tokens at temperature 0."""
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, **more)


def sampled(tokens: int = 20, *, seed: int = 1, **more: Any) -> SamplingParams:
    """Exactly so many tokens at temperature 1."""
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=tokens, ignore_eos=True, **more)


def holds(llm: LLM) -> int:
    """Tokens in the cache, prefixes kept for reuse included."""
    return sum(llm.target.lengths) + llm.engine._prefixes.held


def run(llm: LLM) -> tuple[dict[str, RequestOutput], list[list[StreamChunk]]]:
    """Step until nothing is left to do: outputs by request, and the chunks of each step."""
    outputs, steps = dict[str, RequestOutput](), list[list[StreamChunk]]()
    most = llm.engine.scheduling.kv_cache_tokens
    while llm.engine.busy:
        steps.append(llm.engine.step())
        assert most is None or holds(llm) <= most
        outputs.update({chunk.request_id: chunk.output for chunk in steps[-1] if chunk.output is not None})
        assert len(steps) < 5000, "the engine makes no progress"
    assert llm.target.lengths == [0] * llm.target.rows
    return outputs, steps


def streamed(steps: list[list[StreamChunk]], request_id: str, index: int = 0) -> tuple[list[int], str]:
    """The tokens and the text that a reader of the stream got."""
    chunks = [chunk for step in steps for chunk in step if (chunk.request_id, chunk.index) == (request_id, index)]
    return [token.id for chunk in chunks for token in chunk.tokens], "".join(chunk.text for chunk in chunks)


def alike(found: CompletionOutput, expected: CompletionOutput) -> None:
    """The same answer, to the last log-probability."""
    assert found.token_ids == expected.token_ids and found.text == expected.text
    assert (found.finish_reason, found.stop_reason) == (expected.finish_reason, expected.stop_reason)
    for one, other in zip(found.tokens, expected.tokens, strict=True):
        assert (one.text, one.source, one.step) == (other.text, other.source, other.step)
        assert (one.logprob is None) == (other.logprob is None)
        if one.logprob is not None and other.logprob is not None:
            assert abs(one.logprob.logprob - other.logprob.logprob) < 1e-4
            assert (one.top_logprobs or {}).keys() == (other.top_logprobs or {}).keys()
