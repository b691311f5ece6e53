"""Sampled answers follow the target's distribution exactly, whoever drafts and whichever lossless rule judges."""

from dataclasses import replace

import pytest

from contract.harness import (
    LEVEL,
    PROMPTS,
    SAMPLED,
    Variant,
    as_prompts,
    draws,
    each_family,
    each_way_to_draft,
    expected,
    kind_for,
    kind_of,
    llm,
    p_value,
    sample,
    tokens_of,
    trees_of,
    variants,
)
from selection import slow

SAMPLING = [variant for variant in variants() if kind_for(variant, replace(SAMPLED, seed=None)).sampled]


def test_the_outcomes_are_all_there() -> None:
    for weary in (True, False):
        assert 200 < len(expected(weary=weary)) < 2000 and draws() < 1000
        assert sum(expected(weary=weary).values()) == pytest.approx(1, abs=1e-6)


def test_plain_sampling_follows_the_distribution() -> None:
    assert p_value(sample(llm(None, rows=64), draws()), expected()) > LEVEL


@pytest.mark.parametrize("variant", each_way_to_draft(2), ids=str)
def test_drafts_are_of_the_kind_that_their_drafter_declares(variant: Variant) -> None:
    for params in (SAMPLED, replace(SAMPLED, temperature=0.0)):
        declared = kind_for(variant, params)
        for kind in map(kind_of, trees_of(variant, params)):
            assert declared.sampled or not kind.sampled
            assert kind.chain or not declared.chain
            assert kind.multipath or not declared.multipath


QUICK = [(variant, 0.4, False) for variant in SAMPLING if str(variant) in ("draft_model-tree", "eagle3-dynamic")]


@pytest.mark.parametrize(
    ("variant", "detect", "weary"),
    [*QUICK, *slow(*((variant, 0.1, weary) for variant in SAMPLING for weary in (False, True)))],
    ids=str,
)
def test_the_default_rule_keeps_the_distribution(variant: Variant, detect: float, weary: bool) -> None:
    """What runs is what `test_exact_steps` enumerates for every drafter."""
    found = sample(llm(variant, rows=64, check=False), draws(detect), weary=weary)
    assert p_value(found, expected(weary=weary)) > LEVEL


@pytest.mark.parametrize("variant", each_family(5), ids=str)
def test_a_walk_gives_the_very_text_of_plain_decoding(variant: Variant) -> None:
    params = [replace(SAMPLED, max_tokens=14, seed=seed) for seed in range(2 * len(PROMPTS))]
    prompts = as_prompts(PROMPTS * 2)
    engine = llm(variant, rule="sample_walk", rows=len(prompts))
    walked = engine.generate(prompts, params)
    assert tokens_of(walked) == tokens_of(engine.generate(prompts, params, speculative=False))
    assert sum(output.outputs[0].speculation.num_draft_tokens for output in walked) > 0


@pytest.mark.parametrize("variant", each_family(8), ids=str)
def test_a_seed_gives_the_same_text_alone_and_in_company(variant: Variant) -> None:
    params = [replace(SAMPLED, max_tokens=14, seed=seed) for seed in range(len(PROMPTS))]
    together = tokens_of(llm(variant).generate(as_prompts(PROMPTS), params))
    engine = llm(variant)
    alone = [tokens_of(engine.generate(as_prompts([one]), own))[0] for one, own in zip(PROMPTS, params, strict=True)]
    assert together == alone
