"""Sampled answers follow the target's law exactly, whoever drafts and whichever lossless rule judges."""

from __future__ import annotations

from dataclasses import replace

import pytest

from contract.harness import (
    LEVEL,
    PROMPTS,
    SAMPLED,
    Variant,
    as_prompts,
    expected,
    llm,
    p_value,
    rules_for,
    sample,
    tokens_of,
    variants,
)

OTHERS = [(variant, rule) for variant in variants() for rule in rules_for(variant)[1:] if rule != "sample_walk"]


def test_the_outcomes_are_all_there() -> None:
    assert 50 < len(expected()) < 1000
    assert sum(expected().values()) == pytest.approx(1, abs=1e-6)


def test_plain_sampling_follows_the_law() -> None:
    assert p_value(sample(llm(None, rows=64), 1000), expected()) > LEVEL


@pytest.mark.parametrize("variant", variants(), ids=str)
def test_the_default_rule_keeps_the_law(variant: Variant) -> None:
    assert p_value(sample(llm(variant, rows=64, check=False), 1000), expected()) > LEVEL


@pytest.mark.parametrize(("variant", "rule"), OTHERS, ids=str)
def test_every_rule_that_accepts_the_draft_keeps_the_law(variant: Variant, rule: str) -> None:
    assert p_value(sample(llm(variant, rule=rule, rows=64), 200), expected()) > LEVEL


@pytest.mark.parametrize("variant", variants(), ids=str)
def test_a_walk_gives_the_very_text_of_plain_decoding(variant: Variant) -> None:
    params = [replace(SAMPLED, max_tokens=14, seed=seed) for seed in range(4 * len(PROMPTS))]
    prompts = as_prompts(PROMPTS * 4)
    engine = llm(variant, rule="sample_walk")
    walked = engine.generate(prompts, params)
    assert tokens_of(walked) == tokens_of(engine.generate(prompts, params, speculative=False))
    assert sum(output.outputs[0].speculation.num_draft_tokens for output in walked) > 0


@pytest.mark.parametrize("variant", variants(), ids=str)
def test_a_seed_gives_the_same_text_alone_and_in_company(variant: Variant) -> None:
    params = [replace(SAMPLED, max_tokens=14, seed=seed) for seed in range(len(PROMPTS))]
    together = tokens_of(llm(variant).generate(as_prompts(PROMPTS), params))
    engine = llm(variant)
    alone = [
        tokens_of(engine.generate(as_prompts([prompt]), own))[0] for prompt, own in zip(PROMPTS, params, strict=True)
    ]
    assert together == alone
