from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LogitsProcessorList

from benchmarks.suite.contest import ReplayProcessor, edited, replaying
from forerun import LLM, SamplingParams

SOURCE = '''def total(values, start):
    """Sum of the values."""
    result = start
    for value in values:
        result = result + value
    if result > 10:
        return result
    return 0
'''


class TestEdits:
    def test_an_edit_is_small_and_the_same_for_the_same_seed(self) -> None:
        first = edited(SOURCE, 1)
        assert first == edited(SOURCE, 1) and first != SOURCE
        assert any(edited(SOURCE, seed) != first for seed in range(2, 6))
        assert "Checked by hand" in first and "new_" in first
        kept = set(SOURCE.splitlines()) & set(first.splitlines())
        assert len(kept) >= 2

    def test_a_text_without_a_place_for_a_change_stays(self) -> None:
        assert edited("", 0) == "" and edited("a\n", 0) == "a\n"


class TestReplay:
    def test_every_drafter_says_the_given_text(self, source_tied: Path) -> None:
        llm = LLM(str(source_tied), tokenizer=False, max_num_seqs=1, max_model_len=96)
        prompt, answer = [5, 6, 7, 8, 9] * 4, [5, 6, 7, 8, 9, 30, 31, 7, 8, 9, 5, 6, 99, 7, 8]
        params = SamplingParams(temperature=0.0, max_tokens=len(answer), ignore_eos=True)
        steps = {}
        for method in (False, {"method": "ngram", "max_branches": 2}):
            with replaying(llm.target, [*prompt, *answer]):
                output = llm.generate([{"prompt_token_ids": prompt}], params, speculative=method)[0].outputs[0]
            assert output.token_ids == answer
            steps[bool(method)] = output.speculation.num_spec_steps + output.speculation.num_plain_steps
        assert steps[True] < steps[False]
        assert llm.generate([{"prompt_token_ids": prompt}], params)[0].outputs[0].token_ids != answer

    def test_transformers_says_it_too(self, source_tied: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(source_tied).eval()
        prompt, answer = [5, 6, 7, 8, 9] * 4, [5, 6, 7, 8, 9, 30, 31, 7, 8, 9]
        for options in ({}, {"prompt_lookup_num_tokens": 4}):
            ids = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=len(answer),
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                logits_processor=LogitsProcessorList([ReplayProcessor([*prompt, *answer])]),
                **options,
            )
            assert ids[0, len(prompt) :].tolist() == answer
