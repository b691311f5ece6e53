"""certify on composites that sample, as users get them: they pass, and a rule chosen by the drawn tree fails."""

import copy

import pytest
import torch

from contract.exact import toy
from contract.test_exact_steps import NAMED, by_the_drawn_tree
from forerun import LLM, SamplingParams
from forerun.certify import CertifyPlan, Check, checks
from forerun.certify.reference import TransformersReference
from forerun.decode import step as stepping

PROMPT = [2, 1, 0, 0, 2, 1]
"""Behind it the rule that was once chosen by the drawn tree was 5.3 % off, by exact enumeration."""
PARAMS = SamplingParams(temperature=0.8, top_p=0.8, top_k=0, min_p=0.0, repetition_penalty=1.0)


def certified(name: str) -> tuple[Check, set[str]]:
    """The check of one composite without seeds."""
    llm = LLM(
        toy(),
        **{"tokenizer": False, "speculative_config": NAMED[name].config(), "max_num_seqs": 64, "max_model_len": 32},
        self_check=False,
    )
    setting = checks.Setting(params=PARAMS, seeded=False)
    reference = TransformersReference(copy.deepcopy(toy()))
    run = checks.Run(llm=llm, reference=reference, prompts=[PROMPT], plan=CertifyPlan(detect=0.05))
    return checks.chi_square_check(run, checks.uncertain(run, setting, 0, tests=4)), run.rules


@pytest.mark.slow
@pytest.mark.parametrize("name", ["merge-path-beside-2", "cascade-tail", "draft_model-greedy-k"])
def test_composites_are_certified_and_the_old_choice_of_rule_is_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    check, rules = certified(name)
    assert check.passed and len(rules) == 1, check.summary
    monkeypatch.setattr(stepping, "verify", by_the_drawn_tree(stepping.verify))
    check, rules = certified(name)
    assert not check.passed and len(rules) == 2, check.summary
    assert max(check.figures["p_value"], check.figures["first_p_value"]) < check.figures["level"]
