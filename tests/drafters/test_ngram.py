"""Prompt lookup: what is found, in which order, and that no stale place is ever copied from."""

import gc
import random
from collections.abc import Sequence
from typing import Any

import pytest

from drafters.asking import context, paths, propose
from forerun.drafters.lookup.ngram import NgramConfig, NgramDrafter


def drafter(**options: Any) -> NgramDrafter:
    return NgramDrafter(NgramConfig(**options), setup=None)


def fed(tokens: Sequence[int], **options: Any) -> NgramDrafter:
    made = drafter(**options)
    made.extend(context(tokens, len(tokens), prompt=len(tokens)))
    return made


def reference(tokens: Sequence[int], length: int, largest: int, smallest: int) -> list[int]:
    """Prompt lookup by plain search over the whole text."""
    for size in range(largest, smallest - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if size < len(tokens) and list(tokens[end - size : end]) == list(tokens[-size:]):
                text = list(tokens)
                for offset in range(length):
                    text.append(text[end + offset])
                return text[len(tokens) :]
    return []


def test_several_continuations_share_their_common_beginning() -> None:
    text = [1, 2, 5, 6, 0, 1, 2, 5, 7, 0, 1, 2]
    tree = propose(fed(text, num_speculative_tokens=2, max_branches=2), text)
    assert sorted(paths(tree)) == [[5, 6], [5, 7]]
    assert tree.size == 3


@pytest.mark.parametrize(("match", "expected"), [("last", 7), ("first", 5), ("most_frequent", 6)])
def test_which_place_is_copied_from_is_an_option(match: str, expected: int) -> None:
    text = [1, 2, 5, 0, 1, 2, 6, 0, 1, 2, 6, 0, 1, 2, 7, 0, 1, 2]
    options = {"num_speculative_tokens": 1, "prompt_lookup_max": 2, "match": match}
    assert paths(propose(fed(text, **options), text)) == [[expected]]


def test_the_most_frequent_continuation_is_voted_for_token_after_token_and_of_equals_the_most_recent_wins() -> None:
    text = [1, 5, 6, 0, 1, 5, 7, 0, 1, 5, 6, 0, 1, 9, 9, 0, 1]
    options = {"num_speculative_tokens": 2, "match": "most_frequent", "prompt_lookup_max": 1}
    assert paths(propose(fed(text, **options), text)) == [[5, 6]]
    assert sorted(paths(propose(fed(text, max_branches=3, **options), text))) == [[5, 6], [5, 7], [9, 9]]
    text = [1, 5, 0, 1, 6, 0, 1]
    options = {"num_speculative_tokens": 1, "match": "most_frequent", "prompt_lookup_max": 1}
    assert paths(propose(fed(text, **options), text)) == [[6]]


@pytest.mark.parametrize(("hits", "expected"), [(1, [[8]]), (2, [[7]]), (3, [[7]]), (4, [])])
def test_an_n_gram_that_was_met_too_rarely_is_not_copied_from(hits: int, expected: list[list[int]]) -> None:
    text = [3, 2, 8, 0, 2, 7, 0, 2, 7, 0, 3, 2]
    options = {"num_speculative_tokens": 1, "prompt_lookup_max": 2, "match": "most_frequent", "min_hits": hits}
    assert paths(propose(fed(text, **options), text)) == expected


@pytest.mark.parametrize(("match", "expected"), [("last", 6), ("first", 5), ("most_frequent", 6)])
def test_of_many_places_those_at_the_preferred_end_are_looked_at(match: str, expected: int) -> None:
    """5 follows more often, but of the last 32 places less often than 6."""
    text = [*[1, 5] * 40, *[1, 6] * 17, 1]
    options = {"num_speculative_tokens": 1, "prompt_lookup_max": 1, "match": match}
    assert paths(propose(fed(text, **options), text)) == [[expected]]
    assert paths(propose(fed(text, min_hits=57, **options), text)) == [[expected]]
    assert paths(propose(fed(text, min_hits=58, **options), text)) == []


@pytest.mark.parametrize("text", [[4], [4, 4]])
def test_a_history_shorter_than_the_n_gram_drafts_nothing(text: list[int]) -> None:
    assert propose(fed(text, prompt_lookup_min=3), text).size == 0


@pytest.mark.parametrize("seed", range(20))
def test_any_history_of_growing_and_shrinking_drafts_what_a_fresh_search_finds(seed: int) -> None:
    rng = random.Random(seed)
    plain = {"follow_edits": False, "min_token_prob": 0.0}
    made, text = drafter(num_speculative_tokens=6, prompt_lookup_max=3, **plain), list[int]()
    for _ in range(60):
        if text and rng.random() < 0.3:
            keep = rng.randrange(len(text) + 1)
            del text[keep:]
            made.truncate([0], [keep])
            expected = reference(text, 6, 3, 1)
            assert not text or paths(propose(made, text)) == ([expected] if expected else [])
        fresh = [rng.randrange(4) for _ in range(rng.randrange(1, 5))]
        text += fresh
        made.extend(context(text, len(fresh)))
        expected = reference(text, 6, 3, 1)
        assert paths(propose(made, text)) == ([expected] if expected else [])


def test_a_long_text_leaves_the_garbage_collector_nothing_to_walk_through() -> None:
    """An object for each n-gram once made a full collection of a long prompt take as long as several steps."""
    text = [token % 997 * 31 % 101 for token in range(5000)]
    made = fed(text[:100])
    before = len(gc.get_objects())
    made.extend(context(text, 4900))
    assert len(gc.get_objects()) - before < 100
    assert 4 <= made.memory_bytes() / len(text) < 12


def test_confidence_follows_what_the_text_really_did() -> None:
    made, text = drafter(num_speculative_tokens=1), [1, 2]
    made.extend(context(text, 2))
    for _ in range(40):
        text += [1, 2]
        made.extend(context(text[:-1], 1))
        propose(made, text[:-1])
        made.extend(context(text, 1))
        propose(made, text)
    assert propose(made, text).confidence[1] > 0.85


def test_what_has_become_improbable_is_not_drafted() -> None:
    """One token has been followed by another one each time; what follows it is tried once more, and no further."""
    sizes = []
    for least in (0.0, 0.01, 0.1):
        made, text = drafter(prompt_lookup_max=1, min_token_prob=least, follow_edits=False), [7, 1, 2, 3]
        for token in range(20, 60):
            text += [7, token]
            made.extend(context(text[:-1], 1))
            propose(made, text[:-1])
            made.extend(context(text, 1))
        text.append(7)
        made.extend(context(text, 1))
        sizes.append(propose(made, text).size)
    assert sizes[0] == 8 > sizes[1] > sizes[2] == 1
