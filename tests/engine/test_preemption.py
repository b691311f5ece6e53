"""An answer that gives its row back and goes on later says the same as one that never had to."""

from pathlib import Path
from typing import Any

import pytest

from engine.loads import TEXT, alike, drafter, engine, greedy, run, sampled, streamed
from forerun import SamplingParams
from forerun.errors import ArgumentError
from forerun.types import StructuredOutputs

PROMPTS = [TEXT[:40], TEXT[20:75], TEXT[50:80], TEXT[9:60]]
TIGHT = {"max_num_seqs": 4, "kv_cache_tokens": 130}


def compare(checkpoint: Path, config: Any, jobs: list[tuple[Any, SamplingParams]], **limits: Any) -> None:
    """The jobs in an engine that has to preempt, and in one that has not."""
    roomy, tight = engine(checkpoint, config, max_num_seqs=4), engine(checkpoint, config, **limits)
    expected = [roomy.generate(prompt, params)[0] for prompt, params in jobs]
    ids = [tight.submit(prompt, params) for prompt, params in jobs]
    outputs, steps = run(tight)
    assert tight.engine.preemptions > 0 and roomy.engine.preemptions == 0
    for request_id, wanted in zip(ids, expected, strict=True):
        for found, other in zip(outputs[request_id].outputs, wanted.outputs, strict=True):
            alike(found, other)
            assert found.speculation == other.speculation
            assert streamed(steps, request_id, found.index) == (other.token_ids, other.text)


@pytest.mark.parametrize(("name", "make"), [(None, sampled), ("eagle3", sampled), ("draft_model", greedy)])
def test_the_output_is_as_with_room_enough(
    checkpoint: Path, draft_checkpoint: Path, name: str | None, make: Any
) -> None:
    config = None if name is None else drafter(name, draft_checkpoint)
    compare(checkpoint, config, [(prompt, make(30)) for prompt in PROMPTS], **TIGHT)


@pytest.mark.parametrize("name", ["ngram", "draft_model"])
def test_whatever_shapes_the_answer_goes_on_where_it_stood(checkpoint: Path, draft_checkpoint: Path, name: str) -> None:
    plain = engine(checkpoint).generate(PROMPTS[1], sampled(40, seed=4))[0].outputs[0].text
    jobs = [
        (PROMPTS[0], sampled(30, repetition_penalty=1.3, frequency_penalty=0.5, logprobs=3)),
        (PROMPTS[1], sampled(40, seed=4, stop=[plain[12:14], plain[25:28]], min_tokens=15)),
        (PROMPTS[2], sampled(25, seed=2, n=2, top_p=0.9, presence_penalty=0.4)),
        (PROMPTS[3], sampled(40, seed=3, structured_outputs=StructuredOutputs(regex="[a-f]{25}"))),
        (PROMPTS[0], greedy(20, prompt_logprobs=1)),
    ]
    compare(checkpoint, drafter(name, draft_checkpoint), jobs, **{**TIGHT, "kv_cache_tokens": 140})


def test_a_prompt_that_is_still_being_read_gives_way_too(checkpoint: Path, draft_checkpoint: Path) -> None:
    jobs = [(PROMPTS[2], greedy(60)), (PROMPTS[3], greedy(10)), (TEXT, greedy(8, prompt_logprobs=1))]
    config = drafter("eagle3", draft_checkpoint)
    compare(checkpoint, config, jobs, max_num_seqs=4, kv_cache_tokens=150, max_num_batched_tokens=4)


def test_kept_prefixes_go_first(checkpoint: Path) -> None:
    llm = engine(checkpoint, **TIGHT)
    llm.generate(PROMPTS[0], greedy(10))
    kept = llm.engine._prefixes.held
    assert kept > 16
    llm.submit(PROMPTS[1], greedy(60))
    run(llm)
    assert llm.engine.preemptions == 0 and llm.engine._prefixes.held <= 130


def test_what_can_never_fit_is_refused(checkpoint: Path) -> None:
    llm = engine(checkpoint, max_num_seqs=2, kv_cache_tokens=30)
    assert llm.max_model_len == 30
    with pytest.raises(ArgumentError, match="shorten the prompt"):
        llm.generate(TEXT, greedy(4))
    assert len(llm.generate("the cat", greedy(100))[0].outputs[0].token_ids) < 30
    request = llm.reader.request(100, "the cat", greedy(), speculative=False)
    request.completions[0].row.tokens_left = 60
    with pytest.raises(ArgumentError, match="raise kv_cache_tokens"):
        llm.engine.add(request)
    assert not llm.engine.busy
    with pytest.raises(ArgumentError, match="cannot hold one request"):
        engine(checkpoint, max_model_len=64, kv_cache_tokens=63)
    with pytest.raises(ArgumentError, match="at least 2"):
        engine(checkpoint, kv_cache_tokens=1)
