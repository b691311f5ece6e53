from __future__ import annotations

from pathlib import Path

from benchmarks.suite.burden import Burden, measure_burden
from forerun import LLM


def test_pairs_are_measured_for_a_whole_batch(source_tied: Path) -> None:
    llm = LLM(str(source_tied), tokenizer=False, max_num_seqs=3, max_model_len=96)
    twin = LLM(llm.target.model, tokenizer=False, max_num_seqs=3, max_model_len=96)
    seen = list[str]()
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    found = measure_burden(
        (llm, twin), "ngram", {"method": "ngram"}, prompts, pairs=2, new_tokens=6, progress=seen.append
    )
    assert found.batch == 3 and len(found.ratios) == 2 and min(found.ratios) > 0
    assert len(seen) == 4 + 2 and not llm.engine.busy and not twin.engine.busy


def test_the_lower_bound_lies_below_the_mean_and_falls_with_the_scatter() -> None:
    steady, wild = (
        Burden(drafter="x", batch=1, ratios=ratios) for ratios in ([0.98, 1.0, 1.02] * 7, [0.8, 1.0, 1.2] * 7)
    )
    assert abs(steady.mean - wild.mean) < 1e-9
    assert wild.low < steady.low < steady.mean
