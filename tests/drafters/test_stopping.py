"""Early stopping: what each rule says of a distribution, that the text keeps its distribution, and that taking back a
token would not."""

import math
from dataclasses import replace

import pytest
import torch

from contract.harness import PROMPT, PROMPTS, Variant, as_prompts, llm, plain_greedy, relative, tokens_of
from contract.test_greedy import NEUTRAL
from forerun.drafters.draft_models.draft_model import DraftModelConfig, Ending, Stop, goes_on
from forerun.drafters.drawing import Children

TARGET, DRAFT = (0.7, 0.3), (0.5, 0.5)
RULES = [("confidence", 0.45), ("svip", 1.0), ("adaedl", 0.5)]


def kept_or_replaced(token: int, kept: bool) -> dict[int, float]:
    """Distribution of the emitted token: a submitted draft goes through token rejection, a withdrawn one is drawn
    afresh."""
    if not kept:
        return dict(enumerate(TARGET))
    accepted = min(1.0, TARGET[token] / DRAFT[token])
    residual = [max(0.0, target - draft) for target, draft in zip(TARGET, DRAFT, strict=True)]
    probs = {other: (1 - accepted) * part / sum(residual) for other, part in enumerate(residual)}
    probs[token] += accepted
    return probs


def emitted(submits: list[bool]) -> list[float]:
    """Exact distribution of the emitted token where a drafted token x is submitted if ``submits[x]``."""
    probs = [0.0, 0.0]
    for token, draft in enumerate(DRAFT):
        for outcome, probability in kept_or_replaced(token, submits[token]).items():
            probs[outcome] += draft * probability
    return probs


def test_taking_back_a_token_for_its_value_biases_the_text() -> None:
    """DSpark's counterexample: the second token is withdrawn after it was drawn."""
    assert emitted([True, False]) == pytest.approx([0.85, 0.15])


@pytest.mark.parametrize("rule", [stop for stop in Stop if stop is not Stop.NEVER])
def test_our_stop_submits_whatever_was_drawn(rule: Stop) -> None:
    """The same step: whether a node is submitted is the same for every value, so the distribution is the target's."""
    logits = torch.tensor([[DRAFT]]).log()
    children = dict[int, bool]()
    for token in (0, 1):
        threshold = 0.0 if rule is Stop.SVIP else 1.0
        config = DraftModelConfig(model="demo-draft", stop=rule.value, stop_threshold=threshold)
        ending = Ending(config, [range(1), range(1, 2)], [1])
        ending.look(logits)
        grown = Children(
            tokens=torch.tensor([[[token]]]),
            drawn=torch.ones(1, 1, 1, dtype=torch.uint8),
            confidence=torch.full((1, 1, 1), 0.5),
            valid=None,
            probs={},
        )
        assert ending.enough(0, grown)
        children[token] = ending.nodes == [1]
    assert children == {0: True, 1: True}
    assert emitted([children[0], children[1]]) == pytest.approx(TARGET)


@pytest.mark.parametrize(("stop", "threshold"), RULES)
def test_some_drafts_end_early_and_the_text_stays(stop: str, threshold: float) -> None:
    """That sampled text keeps its distribution, too: tests/contract/test_exact_steps.py."""
    for shape in (None, (2, 2)):
        options = {"model": relative(), "num_speculative_tokens": 3, "shape": shape}
        variant = Variant("draft_model", stop, {**options, "stop": stop, "stop_threshold": threshold})
        outputs = llm(variant).generate(as_prompts(PROMPTS), NEUTRAL, trace=True)
        assert tokens_of(outputs) == [plain_greedy(prompt, NEUTRAL) for prompt in PROMPTS]
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


def test_a_sharp_draft_is_not_ended() -> None:
    lengths = []
    for threshold in (0.0, 1.0):
        options = {"model": relative(), "num_speculative_tokens": 4, "stop": "confidence", "stop_threshold": threshold}
        outputs = llm(Variant("draft_model", "x", options)).generate(
            as_prompts([PROMPT]), replace(NEUTRAL, max_tokens=12), trace=True
        )
        lengths.append(max(len(trace.nodes) for trace in outputs[0].outputs[0].trace))
    assert lengths == [4, 1]
