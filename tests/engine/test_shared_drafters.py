"""A request that wants fewer drafted tokens is served by the drafter there is, not by another copy of its model."""

from __future__ import annotations

from pathlib import Path

from forerun import LLM, SamplingParams


def test_fewer_tokens_need_no_drafter_of_their_own(checkpoint: Path, draft_checkpoint: Path) -> None:
    config = {"method": "draft_model", "model": str(draft_checkpoint), "num_speculative_tokens": 4, "adaptive": False}
    llm = LLM(str(checkpoint), dtype="float32", speculative_config=config)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    texts, depths = set(), []
    for count in (4, 2, 1):
        chosen = {**config, "num_speculative_tokens": count}
        [output] = llm.generate(["the cat sat"], params, speculative=chosen)
        texts.add(output.outputs[0].text)
        depths.append(len(output.outputs[0].speculation.drafted_per_depth))
    assert depths == [4, 2, 1] and len(texts) == 1
    assert len(llm.engine.drafting._active) == 1
    llm.generate(["the cat sat"], params, speculative={**config, "num_speculative_tokens": 6})
    assert len(llm.engine.drafting._active) == 2
