"""Following a text that is copied with changes, in the same sequence or another one, or a predicted answer."""

import gc
import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from drafters.asking import ROOMY, context, paths, propose
from drafters.test_suffix import answered, drafter
from engine.conftest import tiny_tokenizer
from forerun.core.acceptance import Evidence, by_match
from forerun.decode.drafter import Drafter, DrafterSetup
from forerun.drafters.lookup import drafts
from forerun.drafters.lookup import following as follows
from forerun.drafters.lookup.ngram import NgramConfig, NgramDrafter
from forerun.drafters.lookup.prediction import PredictionConfig, PredictionDrafter
from forerun.errors import ArgumentError

SOURCE = list(range(10, 60))
START = SOURCE[:6]


class Reader:
    """A follower that keeps its source, and is shown lists."""

    def __init__(self, source: Sequence[int], same: bool = False) -> None:
        self.source, self.same, self.follower = np.array(source, np.int32), same, follows.new_follower()

    def start(self, place: int, matched: int) -> None:
        follows.start(self.follower.place, place, matched)

    def reads(self, text: Sequence[int], at: int) -> None:
        array = np.array(text, np.int32)
        self.source = array if self.same else self.source
        follows.read(self.follower, self.source, array, at, at + 1, self.same)

    def draft(self, most: int, same: bool = False) -> drafts.Draft:
        made = drafts.Draft.of(most)
        size, _ = follows.draft(self.follower, self.source, drafts.zero_counts(), made, 0.0, same)
        return made.first(size)

    def drafts(self, most: int, same: bool = False) -> list[int]:
        return self.draft(most, same).tree(0).tokens[1:]

    @property
    def place(self) -> int | None:
        place = int(self.follower.place[follows.PLACE])
        return None if place == drafts.NONE else place

    def told(self, column: int) -> int:
        return int(self.follower.place[column])

    @property
    def agreed(self) -> int:
        return follows.count_agreed(self.follower.place)


def follower(text: Sequence[int], source: Sequence[int] = SOURCE) -> Reader:
    """That of a text that begins as its source does, token by token."""
    made = Reader(source)
    made.start(0, 0)
    for at in range(len(text)):
        made.reads(text, at)
    return made


def drafted(text: Sequence[int], source: Sequence[int] = SOURCE, most: int = 4) -> list[int]:
    return follower(text, source).drafts(most)


CHANGES = {
    "none": ([], [16, 17, 18, 19]),
    "replaced?": ([99], [17, 18, 19, 20]),
    "replaced": ([99, 17], [18, 19, 20, 21]),
    "added?": ([99, 98], [16, 17, 18, 19]),
    "added": ([99, 98, 97, 96, 16], [17, 18, 19, 20]),
    "two for three": ([99, 98, 19], [20, 21, 22, 23]),
    "left out": ([20], [21, 22, 23, 24]),
    "misled": ([20, 16], [17, 18, 19, 20]),
    "and added": ([20, 99], [16, 17, 18, 19]),
}


@pytest.mark.parametrize(("changed", "expected"), CHANGES.values(), ids=CHANGES)
def test_behind_a_change_the_source_goes_on(changed: list[int], expected: list[int]) -> None:
    assert drafted([*START, *changed]) == expected


def test_a_guess_is_known_as_one() -> None:
    made = follower([*START, 99])
    assert (made.told(follows.FOUND), made.told(follows.CHANGED), made.told(follows.PARTED)) == (0, 1, 6)
    assert evidences(made) == [by_match("guessed", made.agreed + offset) for offset in range(3)]
    made.reads([*START, 99, 17], 7)
    assert made.told(follows.FOUND) and evidences(made) == [by_match("followed", made.agreed + n) for n in range(3)]


def evidences(made: Reader) -> list[Evidence]:
    """What is known of the first three tokens of a draft."""
    nodes, confidence = made.draft(3)
    keys = {drafts.evidence(place, matched, 1.0)[0]: by_match(source, matched).key
            for place, source in enumerate(drafts.SOURCES) for matched in range(50)}  # fmt: skip
    return [Evidence(keys[int(nodes[node, drafts.NODE_KEY])], float(confidence[node])) for node in range(1, len(nodes))]


def test_the_longest_agreement_is_believed_and_of_equal_ones_the_nearest() -> None:
    source = [*START, 1, 2, 7, 3, 4, 7, 5, 7, 6]
    assert drafted([*START, 9, 7], source) == [3, 4, 7, 5]
    assert drafted([*START, 9, 4, 7], source) == [5, 7, 6]
    source = [*START, 1, 20, 21, 22, 23, 24, 1, 2, 3, 4]
    made = follower([*START, 8, 9, 20, 21, 22, 23, 24, 8, 1, 2], source)
    assert made.drafts(9) == [3, 4]


@pytest.mark.parametrize(("old", "new"), [([1], [9]), ([1, 2], [9]), ([1], [8, 9]), ([1, 2, 3], [7, 8, 9])])
def test_a_replacement_is_made_again_wherever_it_was_made_once(old: list[int], new: list[int]) -> None:
    source = [*START, *old, 20, 21, 22, 23, 24, *old, 30, 31, *old, 40]
    text = [*START, *new, 20, 21, 22, 23]
    assert drafted(text, source, 20) == [24, *new, 30, 31, *new, 40]
    made = follower([*text, 24, new[0]], source)
    assert made.drafts(20) == [*new[1:], 30, 31, *new, 40], "begun"


def test_what_agrees_counts_and_each_change_halves_it() -> None:
    assert follower(START).agreed == 12
    made = follower([*START, 99])
    assert made.agreed == 3
    assert follower([*START, 99, 17, 18]).agreed == 7
    assert follower([*START, *range(70, 75)]).agreed == 0


def test_a_text_is_let_go_that_left_its_source_for_long_or_is_at_its_end() -> None:
    assert follower([*START, *range(70, 86)]).place == 6
    made = follower([*START, *range(70, 87)])
    assert made.place is None and made.agreed == 0 and made.drafts(9) == []
    made.reads([1], 0)
    assert made.place is None
    assert drafted(SOURCE) == [] and drafted(SOURCE[:-1]) == [59]
    assert drafted([*SOURCE, 10, 11]) == []


@pytest.mark.parametrize("same", [False, True], ids=["another", "the same"])
@pytest.mark.parametrize("seed", range(20))
def test_any_text_is_followed_without_leaving_the_source(seed: int, same: bool) -> None:
    """Drafts are tokens of the source and of replacements; a text that is its own source is read only up to there."""
    rng = random.Random(seed)
    text = [rng.randrange(5) for _ in range(30)]
    source = text if same else [rng.randrange(5) for _ in range(40)]
    made = Reader(source, same)
    for at in range(10, 30):
        if made.place is None or rng.random() < 0.1:
            made.start(rng.randrange(10), rng.randrange(4))
        made.reads(text, at)
        assert made.place is None or 0 <= made.place <= len(source)
        assert all(0 <= token < 5 for token in made.drafts(50))


def test_a_text_that_repeats_itself_is_followed_beyond_its_end() -> None:
    made = Reader([9, 1, 2, 3, 1, 2, 3, 1, 2])
    made.start(6, 5)
    assert made.drafts(8, same=True) == [3, 1, 2, 3, 1, 2, 3, 1]
    assert made.drafts(8) == [3, 1, 2], "another text ends"


@pytest.mark.parametrize("seed", range(20))
def test_a_copy_that_makes_replacements_beyond_its_end_reads_what_it_has_made(seed: int) -> None:
    """Shorter and longer replacements, so that the place runs ahead of what is drafted, or behind it."""
    rng = random.Random(seed)
    text = [rng.randrange(4) for _ in range(6)]
    made = Reader(text, same=True)
    for _ in range(300):
        text.append(rng.choice(text[-5:]) if rng.random() < 0.8 else rng.randrange(4))
        if made.place is None:
            made.start(max(0, len(text) - rng.randrange(2, 9)), 1)
        made.reads(text, len(text) - 1)
        assert set(made.drafts(40, same=True)) <= {0, 1, 2, 3}


# --- as `ngram` and `suffix` use it -----------------------------------------------------------------------------------

OLD = [*range(1, 13), 50, *range(13, 18), 50, *range(18, 23)]
ASKED = [*OLD, 90, 91]
CHANGED = [*range(1, 13), 77]
METHODS: dict[str, Any] = {
    "suffix": lambda **options: drafter(**{"follow_edits": True, "max_spec_factor": 2.0, **options}),
    "ngram": lambda **options: NgramDrafter(NgramConfig(num_speculative_tokens=24, **options), None),
}
each_method = pytest.mark.parametrize("method", METHODS)


def following(method: str, *output: int, **options: Any) -> tuple[Drafter, list[int]]:
    """A drafter after an answer, token by token, to a prompt with a text in it; and the whole text."""
    made, tokens = METHODS[method](**options), [*ASKED]
    made.extend(context(ASKED, len(ASKED), prompt=len(ASKED)))
    for token in output:
        tokens.append(token)
        propose(made, tokens[:-1])
        made.extend(context(tokens, 1, prompt=len(ASKED)))
    return made, tokens


def edited(method: str, *output: int, **options: Any) -> list[int]:
    """The chain that it drafts then."""
    tree = propose(*following(method, *output, **options))
    return list(tree.tokens[1:])


@each_method
def test_a_text_is_followed_behind_what_it_has_never_held(method: str) -> None:
    assert edited(method, *CHANGED, follow_edits=False) == []
    assert edited(method, *CHANGED)[:4] == [13, 14, 15, 16]


@each_method
def test_a_replacement_is_made_again(method: str) -> None:
    output = [*CHANGED, 13, 14, 15, 16]
    assert edited(method, *output)[:9] == [17, 77, 18, 19, 20, 21, 22, 90, 91]
    assert edited(method, *output, follow_edits=False)[:2] == [17, 50]


def test_suffix_follows_a_past_answer_and_stops_at_its_end() -> None:
    made, tokens = drafter(follow_edits=True, max_spec_factor=2.0), [70]
    answered(made, [60, 61], OLD)
    answered(made, [62, 63], [20, 21, 22])
    for token in CHANGED:
        tokens.append(token)
        made.extend(context(tokens, 1, prompt=1))
    assert paths(propose(made, tokens))[0][:4] == [13, 14, 15, 16]
    for token in range(13, 17):
        tokens.append(token)
        made.extend(context(tokens, 1, prompt=1))
    assert paths(propose(made, tokens)) == [[17, 77, 18, 19, 20, 21, 22]], "and not what the next answer began with"


@each_method
def test_a_row_that_shrinks_is_followed_anew(method: str) -> None:
    made, tokens = following(method, *CHANGED)
    assert propose(made, tokens).size
    made.truncate([0], [len(ASKED) + 1])
    shorter = [*ASKED, 1, 88]
    made.extend(context(shorter, 1, prompt=len(ASKED)))
    assert propose(made, shorter).size == 0


@each_method
def test_a_loop_is_drafted_in_full(method: str) -> None:
    made, tokens = following(method, *[1, 2, 3, 4, 5] * 6)
    assert propose(made, tokens).tokens[1:] == [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2, 3, 4]


@pytest.mark.parametrize("options", [{"prompt_lookup_max": 2}, {"match": "first"}, {"match": "most_frequent"}])
def test_ngram_follows_from_its_longest_n_gram_on(options: dict[str, Any]) -> None:
    assert edited("ngram", *CHANGED, **options)[:4] == [13, 14, 15, 16]


def test_ngram_puts_the_better_of_a_tree_and_what_is_followed() -> None:
    assert edited("ngram", *CHANGED, max_branches=3)[:4] == [13, 14, 15, 16]
    tree = propose(*following("ngram", *range(1, 13), max_branches=3))
    assert tree.tokens[1:5] == [50, 13, 14, 15]


@pytest.mark.parametrize("match", ["last", "first", "most_frequent"])
@pytest.mark.parametrize("seed", range(10))
def test_how_many_tokens_a_step_brings_does_not_matter_to_ngram(seed: int, match: str) -> None:
    """A change at the end of many tokens does not hide where these were copied from."""
    rng = random.Random(seed)
    old = [rng.randrange(100, 130) for _ in range(60)]
    new = [token if rng.random() < 0.9 else rng.randrange(200, 205) for token in old if rng.random() < 0.95]
    states = []
    for most in (1, 3, 60):
        made, tokens = METHODS["ngram"](match=match), [*old, 90]
        made.extend(context(tokens, len(tokens), prompt=len(tokens)))
        while len(tokens) <= len(old) + len(new):
            propose(made, tokens)
            done = len(tokens) - len(old) - 1
            fresh = new[done : done + rng.randint(1, most)]
            tokens += fresh
            made.extend(context(tokens, len(fresh), prompt=len(old) + 1))
        propose(made, tokens)
        states.append(made.batch.followers.places[0].tolist())
    assert states[0] == states[1] == states[2]


PROMPT = [90, 91]
PREDICTED = list(range(10, 60))


def predicting_setup(tokenizer: Any = None) -> DrafterSetup:
    return DrafterSetup(target=SimpleNamespace(vocab_size=300), tokenizer=tokenizer, rows=1, slots=100)


def predicting(**options: Any) -> PredictionDrafter:
    return PredictionDrafter(PredictionConfig(**options), predicting_setup())


def after(output: Sequence[int], predicted: Sequence[int] = PREDICTED, **options: Any) -> list[int]:
    """What is drafted after an output that came token by token."""
    made, chain = predicting(**options), list[int]()
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
    made, tokens = predicting(), [*PROMPT, *text[:5], 300, *text[7000:7004]]
    made.extend(replace(context(tokens, len(tokens), prompt=len(PROMPT)), predictions=[text]))
    assert len(gc.get_objects()) - before < 100
    place = int(made._rows[0].follower.place[follows.PLACE])
    assert place >= 4 and text[place - 4 : place] == text[7000:7004]


def test_an_answer_as_predicted_is_followed_to_the_end_and_one_that_diverges_at_once_is_not() -> None:
    assert after([10]) == list(range(11, 27))
    assert after(PREDICTED[:45]) == list(range(55, 60))
    assert after(PREDICTED) == []
    assert after([70]) == [] and after([70, 71, 72, 73, 74, 75]) == []


EDITS = {
    "replaced": ([10, 11, 12, 99, 14], 15),
    "three for two": ([10, 11, 12, 99, 98, 97, 15], 16),
    "inserted": ([10, 11, 12, 99, 13], 14),
    "five inserted": ([10, 11, 12, 99, 98, 97, 96, 95, 13], 14),
    "deleted": ([10, 11, 12, 16], 17),
    "much deleted": ([10, 11, 12, 40, 41], 42),
    "before": ([99, 98, 10], 11),
    "twice": ([10, 11, 12, 11, 12], 13),
    "back": ([*range(10, 40), 99, 10, 11, 12, 13], 14),
    "misled": ([10, 11, 12, 20, 13], 14),
}


@pytest.mark.parametrize(("edited", "expected"), EDITS.values(), ids=EDITS)
def test_after_an_edit_the_place_is_found_again(edited: list[int], expected: int) -> None:
    assert after(edited)[:1] == [expected]


def test_of_equal_places_the_nearest_ahead_is_taken_and_a_common_token_far_away_is_none() -> None:
    predicted = [1, 2, 3, 7, 5, 1, 2, 3, 8, 5, 1, 2, 3, 9, 5]
    assert after([1, 2, 3, 7, 5, 0, 1, 2, 3], predicted)[:1] == [8]
    assert after([10, 11, 50]) == [13, 14], "one token replaced one, as far as is known"
    assert after([10, 11, 50, 51])[:1] == [52]


def test_drafts_are_short_after_an_edit_and_grow_with_what_agrees() -> None:
    lengths = [len(after([10, 11, 99, *range(13, 13 + agreed)])) for agreed in range(6)]
    assert lengths == [2, 6, 10, 14, 16, 16]
    assert len(after([10, 11, 99, *range(13, 30)])) == 16


def test_requests_without_a_prediction_get_the_default_one_or_no_draft() -> None:
    assert after([10, 11], []) == []
    made = predicting()
    made.extend(context([90, 10], 2))
    assert made.propose(context([90, 10], 0), ROOMY)[0].size == 0
    assert after([5], [], text=[5, 6, 7]) == [6, 7]
    assert after([10], text=[5, 6, 7])[0] == 11


def test_text_is_read_by_the_tokenizer() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode("the cat sat", add_special_tokens=False)
    made = PredictionDrafter(PredictionConfig(text="the cat sat"), predicting_setup(tokenizer))
    tokens = [*PROMPT, ids[0]]
    made.extend(context(tokens, len(tokens), prompt=len(PROMPT)))
    assert paths(*made.propose(context(tokens, 0, prompt=len(PROMPT)), ROOMY)) == [ids[1:]]


@pytest.mark.parametrize("seed", range(10))
def test_a_row_that_shrank_and_grew_stands_where_a_new_one_would(seed: int) -> None:
    rng = random.Random(seed)
    predicted = [rng.randrange(6) for _ in range(60)]
    made, text = predicting(), [*PROMPT, predicted[0]]
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
    made = predicting()
    made.extend(replace(context([9, 10], 2), predictions=[PREDICTED]))
    made.truncate([0], [0])
    here = replace(context([9, 9, 9, 9, 3], 5, prompt=4), predictions=[[3, 4, 5]])
    made.extend(here)
    assert paths(*made.propose(here, ROOMY)) == [[4, 5]]


def test_confidence_follows_how_good_predictions_were() -> None:
    def confidence(right: bool) -> float:
        made = predicting(num_speculative_tokens=4)
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


def test_a_text_that_the_target_cannot_read_is_refused() -> None:
    with pytest.raises(ArgumentError, match="token id 300"):
        predicting(text=[1, 300])
    with pytest.raises(ArgumentError, match="no tokenizer"):
        predicting(text="the cat")
