"""However wrong the distributions are that a drafter draws from, answers stay what they were."""

import pytest

from contract.harness import LEVEL, PROMPTS, Variant, as_prompts, expected, installed, llm, p_value, sample, tokens_of
from contract.test_greedy import NEUTRAL, reference
from contract.wrong import WRONG

pytestmark = pytest.mark.parametrize("name", WRONG)


def test_the_distribution_stays(name: str) -> None:
    with installed("wrong", WRONG[name]):
        assert p_value(sample(llm(Variant("wrong"), rows=64, check=False), 200), expected()) > LEVEL


def test_greedy_output_stays(name: str) -> None:
    with installed("wrong", WRONG[name]):
        outputs = llm(Variant("wrong"), rows=3, check=False).generate(as_prompts(PROMPTS), NEUTRAL)
    assert tokens_of(outputs) == reference(NEUTRAL)
