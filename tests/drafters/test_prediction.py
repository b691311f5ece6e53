"""Predicted outputs: where the answer stands after every kind of edit, and what a wrong prediction costs."""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from drafters.test_ngram import ROOMY, context, paths
from engine.conftest import tiny_tokenizer
from forerun.decode.drafter import DrafterSetup
from forerun.drafters.lookup.prediction import PredictionConfig, PredictionDrafter
from forerun.errors import ArgumentError
from forerun.types import Budget

PROMPT = [90, 91]
PREDICTED = list(range(10, 60))


def setup(tokenizer: Any = None) -> DrafterSetup:
    return DrafterSetup(
        target=SimpleNamespace(vocab_size=300),  # type: ignore[arg-type]
        tokenizer=tokenizer,
        rows=1,
        slots=100,
    )


def drafter(**options: Any) -> PredictionDrafter:
    return PredictionDrafter(PredictionConfig(**options), setup())


def after(output: Sequence[int], predicted: Sequence[int] = PREDICTED, **options: Any) -> list[int]:
    """What is drafted after an output that came token by token."""
    made, chain = drafter(**options), list[int]()
    for size in range(1, len(output) + 1):
        tokens = [*PROMPT, *output[:size]]
        fresh = len(tokens) if size == 1 else 1
        here = replace(context(tokens, fresh, prompt=len(PROMPT)), predictions=[predicted])
        made.extend(here)
        found = paths(*made.propose(replace(here, fresh=[0]), ROOMY))
        chain = found[0] if found else []
    return chain


def test_a_long_prediction_is_no_object_for_each_of_its_strings() -> None:
    """An index of them held the engine up for a quarter of a second where a file of 64,000 tokens was predicted."""
    after([1, 2])  # Compiling makes objects, too
    text = [token % 997 * 31 % 101 for token in range(20_000)]
    before = len(gc.get_objects())
    made, tokens = drafter(), [*PROMPT, *text[:5], 300, *text[7000:7004]]
    made.extend(replace(context(tokens, len(tokens), prompt=len(PROMPT)), predictions=[text]))
    assert len(gc.get_objects()) - before < 100
    place = made._rows[0].follower.place
    assert place is not None and text[place - 4 : place] == text[7000:7004]


def test_an_answer_as_predicted_is_followed_to_the_end() -> None:
    assert after([10]) == list(range(11, 27))
    assert after(PREDICTED[:45]) == list(range(55, 60))
    assert after(PREDICTED) == []


@pytest.mark.parametrize(
    ("edited", "expected"),
    [
        ([10, 11, 12, 99, 14], 15),
        ([10, 11, 12, 99, 98, 97, 15], 16),
        ([10, 11, 12, 99, 13], 14),
        ([10, 11, 12, 99, 98, 97, 96, 95, 13], 14),
        ([10, 11, 12, 16], 17),
        ([10, 11, 12, 40, 41], 42),
        ([99, 98, 10], 11),
        ([10, 11, 12, 11, 12], 13),
        ([*range(10, 40), 99, 10, 11, 12, 13], 14),
        ([10, 11, 12, 20, 13], 14),
    ],
    ids=[
        "replaced",
        "three for two",
        "inserted",
        "five inserted",
        "deleted",
        "much deleted",
        "before",
        "twice",
        "back",
        "misled",
    ],
)
def test_after_an_edit_the_place_is_found_again(edited: list[int], expected: int) -> None:
    assert after(edited)[:1] == [expected]


def test_of_equal_places_the_nearest_ahead_is_taken() -> None:
    predicted = [1, 2, 3, 7, 5, 1, 2, 3, 8, 5, 1, 2, 3, 9, 5]
    assert after([1, 2, 3, 7, 5, 0, 1, 2, 3], predicted)[:1] == [8]


def test_a_common_token_far_away_is_no_place() -> None:
    assert after([10, 11, 50]) == [13, 14], "one token replaced one, as far as is known"
    assert after([10, 11, 50, 51])[:1] == [52]


def test_drafts_are_short_after_an_edit_and_grow_with_what_agrees() -> None:
    lengths = [len(after([10, 11, 99, *range(13, 13 + agreed)])) for agreed in range(6)]
    assert lengths == [2, 6, 10, 14, 16, 16]
    assert len(after([10, 11, 99, *range(13, 30)])) == 16


def test_a_prediction_that_diverges_at_once_drafts_nothing_from_then_on() -> None:
    assert after([70]) == [] and after([70, 71, 72, 73, 74, 75]) == []


def test_without_a_prediction_nothing_is_drafted() -> None:
    assert after([10, 11], []) == []
    made = drafter()
    made.extend(context([90, 10], 2))
    assert made.propose(context([90, 10], 0), ROOMY)[0].size == 0


def test_the_default_prediction_serves_requests_without_one() -> None:
    assert after([5], [], text=[5, 6, 7]) == [6, 7]
    assert after([10], text=[5, 6, 7])[0] == 11


def test_text_is_read_by_the_tokenizer() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode("the cat sat", add_special_tokens=False)
    made = PredictionDrafter(PredictionConfig(text="the cat sat"), setup(tokenizer))
    tokens = [*PROMPT, ids[0]]
    made.extend(context(tokens, len(tokens), prompt=len(PROMPT)))
    assert paths(*made.propose(context(tokens, 0, prompt=len(PROMPT)), ROOMY)) == [ids[1:]]


@pytest.mark.parametrize(("nodes", "depth"), [(0, 5), (3, 5), (5, 2), (5, 0)])
def test_the_budget_is_kept(nodes: int, depth: int) -> None:
    made = drafter(text=PREDICTED)
    made.extend(context([9, 10], 2))
    (tree,) = made.propose(context([9, 10], 0), Budget(nodes=[nodes], depth=[depth]))
    assert tree.size == min(nodes, depth)


@pytest.mark.parametrize("seed", range(10))
def test_a_row_that_shrank_and_grew_stands_where_a_new_one_would(seed: int) -> None:
    rng = random.Random(seed)
    predicted = [rng.randrange(6) for _ in range(60)]
    made, text = drafter(), [*PROMPT, predicted[0]]
    made.extend(replace(context(text, len(text), prompt=2), predictions=[predicted]))
    for _ in range(30):
        if rng.random() < 0.3 and len(text) > 4:
            keep = rng.randrange(3, len(text))
            del text[keep:]
            made.truncate([0], [keep])
        at = rng.randrange(50)
        fresh = predicted[at : at + rng.randrange(1, 6)]
        text += fresh
        here = replace(context(text, len(fresh), prompt=2), predictions=[predicted])
        made.extend(here)
        found = paths(*made.propose(here, ROOMY))
        assert (found[0] if found else []) == after(text[2:], predicted)


def test_a_freed_row_takes_the_prediction_of_its_next_request() -> None:
    made = drafter()
    made.extend(replace(context([9, 10], 2), predictions=[PREDICTED]))
    made.truncate([0], [0])
    here = replace(context([9, 9, 9, 9, 3], 5, prompt=4), predictions=[[3, 4, 5]])
    made.extend(here)
    assert paths(*made.propose(here, ROOMY)) == [[4, 5]]


def test_confidence_follows_how_good_predictions_were() -> None:
    def confidence(right: bool) -> float:
        made = drafter(num_speculative_tokens=4)
        text = [9, 10]
        made.extend(replace(context(text, 2), predictions=[PREDICTED]))
        for _ in range(30):
            here = replace(context([9, 10], 2), predictions=[PREDICTED])
            made.truncate([0], [0])
            made.extend(here)
            made.propose(here, ROOMY)
            made.extend(replace(context([9, 10, 11 if right else 80], 1), predictions=[PREDICTED]))
        made.truncate([0], [0])
        made.extend(here)
        return made.propose(here, ROOMY)[0].confidence[1]

    assert confidence(True) > 0.8 and confidence(False) < 0.2


def test_bad_options_are_refused() -> None:
    with pytest.raises(ArgumentError, match="num_speculative_tokens"):
        drafter(num_speculative_tokens=0)
    with pytest.raises(ArgumentError, match="token id 300"):
        drafter(text=[1, 300])
    with pytest.raises(ArgumentError, match="no tokenizer"):
        drafter(text="the cat")
