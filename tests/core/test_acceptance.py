"""Estimates of survival: sensible before anything was seen, right after much was."""

import random

import pytest

from forerun.core.acceptance import Acceptance, Evidence, Proposal, by_draft_prob, compare_draft
from forerun.types import Drawn

KINDS = list(Drawn)


@pytest.mark.parametrize("drawn", KINDS)
def test_first_guesses_rise_with_the_drafts_own_probability_and_fall_with_rank(drawn: Drawn) -> None:
    fresh = Acceptance()
    by_raw = [fresh.estimate(*by_draft_prob(drawn, 0, raw / 10)) for raw in range(11)]
    assert by_raw == sorted(by_raw)
    assert 0 <= by_raw[0] <= by_raw[-1] <= 1
    if drawn is not Drawn.DETERMINISTIC:
        assert fresh.estimate(*by_draft_prob(drawn, 1, 0.5)) < fresh.estimate(*by_draft_prob(drawn, 0, 0.5))


@pytest.mark.parametrize("drawn", KINDS)
def test_it_learns_what_really_happens(drawn: Drawn) -> None:
    rng, learned = random.Random(0), Acceptance()
    truth = {0.15: 0.5, 0.85: 0.3}
    for _ in range(2000):
        raw = rng.choice(list(truth))
        learned.learn(by_draft_prob(drawn, 0, raw).key, rng.random() < truth[raw])
    for raw, rate in truth.items():
        assert learned.estimate(*by_draft_prob(drawn, 0, raw)) == pytest.approx(rate, abs=0.05)
    untouched = by_draft_prob(drawn, 2, 0.15)
    assert learned.estimate(*untouched) == Acceptance().estimate(*untouched)


def test_memory_and_fading_weigh_what_is_old_less() -> None:
    lasting, fading = Acceptance(), Acceptance(memory=0.5)
    for accepted in (False, False, True):
        lasting.learn("key", accepted)
        fading.learn("key", accepted)
    assert lasting.counts("key") == (1.0, 3.0) and fading.counts("key") == (1.0, 1.75)
    fading.fade(0.1)
    assert fading.counts("key") == pytest.approx((0.1, 0.175))
    assert fading.counts("other") == (0.0, 0.0) and fading.estimate("other", 0.3) == pytest.approx(0.3)


def test_a_text_decides_on_every_node_whose_parent_it_holds() -> None:
    """Siblings 5 and 7, below the second 9 and 6, below the 9 a 4, of which the text does not tell yet."""
    tokens, parents = [2, 5, 7, 9, 6, 4, 3], [-1, 0, 0, 2, 2, 3, 1]
    assert list(compare_draft(tokens, parents, [7, 9])) == [(1, False), (2, True), (3, True), (4, False)]
    assert list(compare_draft(tokens, parents, [8])) == [(1, False), (2, False)]
    assert not list(compare_draft(tokens, parents, []))


def test_a_proposal_teaches_what_was_submitted_only() -> None:
    acceptance = Acceptance()
    evidence = {1: Evidence("first", 0.5), 3: Evidence("third", 0.5)}
    Proposal(acceptance=acceptance, tokens=[2, 5, 7, 9], parents=[-1, 0, 1, 2], evidence=evidence).learn([5, 7, 8])
    assert acceptance.counts("first") == (1.0, 1.0) and acceptance.counts("third") == (0.0, 1.0)
