"""64 requests of all kinds at once, in an engine that is too small for them: each is answered as if it were alone."""

import random
from pathlib import Path
from typing import Any

from engine.loads import TEXT, drafter, engine, greedy, run, streamed
from engine.test_scheduling import Clock
from forerun import LLM
from forerun.engine import core
from forerun.types import RequestOutput


def wishes(draft_checkpoint: Path) -> list[Any]:
    """Drafters of several kinds and lengths, and none."""
    head, small = drafter("eagle3", draft_checkpoint), drafter("draft_model", draft_checkpoint)
    lookup = {"method": "ngram", "num_speculative_tokens": 6}
    return [False, lookup, {**lookup, "num_speculative_tokens": 2}, small, {**small, "num_speculative_tokens": 2}, head]


def prompts(rng: random.Random) -> list[str]:
    """Of all lengths; half of them begin alike."""
    starts = [TEXT[:50], TEXT[40:90], "", ""]
    ends = [TEXT[begin : begin + rng.randrange(4, 60)] for begin in rng.choices(range(60), k=64)]
    return [starts[index % 4] + end for index, end in enumerate(ends)]


def test_each_answer_is_that_of_the_request_alone(checkpoint: Path, draft_checkpoint: Path, monkeypatch: Any) -> None:
    clock, rng = Clock(), random.Random(0)
    monkeypatch.setattr(core, "time", clock)
    texts, kinds = prompts(rng), wishes(draft_checkpoint)
    lengths = [rng.randrange(3, 40) for _ in texts]
    llm = engine(checkpoint, max_num_seqs=6, kv_cache_tokens=360, max_num_batched_tokens=16)
    outputs, steps, ids = dict[str, RequestOutput](), list[Any](), list[str]()
    for index, text in enumerate(texts):
        timeout = 3.0 if index % 9 == 5 else None
        ids.append(llm.submit(text, greedy(lengths[index]), speculative=kinds[index % 6], timeout_s=timeout))
        if index % 3 == 0:
            advance(llm, clock, outputs, steps)
        if index % 11 == 7:
            llm.abort(ids[index - 3])
    for _ in range(20):
        advance(llm, clock, outputs, steps)
    rest, more = run(llm)
    outputs, steps = {**outputs, **rest}, steps + more
    assert llm.engine.preemptions > 0 and llm.engine.prefix_hits > 0
    check(checkpoint, ids, texts, lengths, outputs, steps)


def advance(llm: LLM, clock: Clock, outputs: dict[str, RequestOutput], steps: list[Any]) -> None:
    clock.now += 0.1
    steps.append(llm.engine.step())
    outputs.update({chunk.request_id: chunk.output for chunk in steps[-1] if chunk.output is not None})


def check(checkpoint: Path, ids: Any, texts: Any, lengths: Any, outputs: Any, steps: Any) -> None:
    """Against plain decoding, one request after the other, nothing reused."""
    alone = engine(checkpoint, max_num_seqs=1, enable_prefix_caching=False)
    ends = {"length": 0, "abort": 0, "left": 0}
    for request_id, text, length in zip(ids, texts, lengths, strict=True):
        expected = alone.generate(text, greedy(length))[0].outputs[0]
        tokens, piece = streamed(steps, request_id)
        if request_id not in outputs:
            ends["left"] += 1
            assert tokens == expected.token_ids[: len(tokens)]
            continue
        found = outputs[request_id].outputs[0]
        ends[found.finish_reason] += 1
        assert (tokens, piece) == (found.token_ids, found.text) and not found.speculation.drafter_errors
        if found.finish_reason == "length":
            assert (found.token_ids, found.text) == (expected.token_ids, expected.text)
        else:
            assert found.token_ids == expected.token_ids[: len(found.token_ids)]
    assert min(ends.values()) > 1 and ends["length"] > 40, ends
