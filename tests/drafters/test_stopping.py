"""Early stopping: what each rule says of a distribution, and that the text stays."""

import math
from dataclasses import replace

import pytest
import torch

from contract.harness import PROMPTS, Variant, as_prompts, llm, plain_greedy, relative, tokens_of
from contract.test_greedy import NEUTRAL
from forerun.drafters.draft_models.draft_model import Stop, goes_on

LONG = replace(NEUTRAL, max_tokens=40)
RULES = [("confidence", 0.45), ("svip", 1.0), ("adaedl", 0.5)]


@pytest.mark.parametrize(("stop", "threshold"), RULES)
def test_some_drafts_end_early_and_the_text_stays(stop: str, threshold: float) -> None:
    """That sampled text keeps its distribution, too: tests/contract/test_exact_steps.py."""
    for shape in (None, (2, 2)):
        options = {"model": relative(), "num_speculative_tokens": 3, "shape": shape}
        variant = Variant("draft_model", stop, {**options, "stop": stop, "stop_threshold": threshold})
        outputs = llm(variant).generate(as_prompts(PROMPTS), LONG, trace=True)
        assert tokens_of(outputs) == [plain_greedy(prompt, LONG) for prompt in PROMPTS]
        sizes = {len(trace.nodes) for output in outputs for trace in output.outputs[0].trace}
        assert len(sizes) >= 2 and min(sizes - {0}) < max(sizes), "some drafts were to end early, and some not"


def test_the_rules_are_the_published_ones() -> None:
    probs = torch.tensor([[0.5, 0.5], [0.9, 0.1], [1.0, 0.0]])
    entropy = [math.log(2), -(0.9 * math.log(0.9) + 0.1 * math.log(0.1)), 0.0]
    for threshold in (0.0, 0.3, 0.6, 0.7, 0.95):
        svip = [math.sqrt(value) <= threshold for value in entropy]
        adaedl = [1 - math.sqrt(0.2 * value) >= threshold for value in entropy]
        assert goes_on(Stop.SVIP, probs, threshold).tolist() == svip
        assert goes_on(Stop.ADAEDL, probs, threshold).tolist() == adaedl
    assert goes_on(Stop.CONFIDENCE, probs, 0.6).tolist() == [False, True, True]
    assert goes_on(Stop.CONFIDENCE, torch.tensor([[0.4, 0.3, 0.3]])).tolist() == [True]
