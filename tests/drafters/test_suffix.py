"""Suffix decoding: the automaton against brute force; what is drafted, how much, and what is kept of past answers."""

import importlib.util
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.asking import ROOMY, context, paths, propose
from forerun.control.config import SpeculativeConfig
from forerun.drafters.lookup import suffixes
from forerun.drafters.lookup.drafts import NONE, SEPARATOR
from forerun.drafters.lookup.suffix import OutputStore, SuffixAutomaton, SuffixConfig, SuffixDrafter
from forerun.drafters.lookup.suffixes import ROOT, Arrays
from forerun.types import Budget

TEXTS = st.lists(st.sampled_from([0, 1, 2, 7, SEPARATOR]), max_size=40) | st.lists(st.integers(0, 1), max_size=40)
DEPTHS = st.integers(2, 9)


def made(text: Sequence[int], depth: int) -> Arrays:
    """The automaton of a text, its ends marked."""
    automaton = SuffixAutomaton(depth)
    automaton.extend(text)
    suffixes._mark_ends(automaton.arrays)
    return automaton.arrays


def found(arrays: Arrays, string: Sequence[int]) -> int:
    """The state of a string, NONE if it does not occur."""
    state = ROOT
    for token in string:
        state = suffixes.step(arrays, state, token)
        if state == NONE:
            break
    return state


def count(arrays: Arrays, state: int) -> int:
    return int(arrays.states[state, suffixes.COUNT])


def occurrences(text: Sequence[int], string: Sequence[int]) -> int:
    size = len(string)
    return sum(list(text[place : place + size]) == list(string) for place in range(len(text) - size + 1))


def strings(text: Sequence[int]) -> set[tuple[int, ...]]:
    return {tuple(text[low:high]) for low in range(len(text)) for high in range(low + 1, len(text) + 1)}


@settings(max_examples=150)
@given(TEXTS, DEPTHS)
def test_exactly_the_substrings_are_found_and_those_up_to_the_depth_are_counted(text: list[int], depth: int) -> None:
    arrays, known = made(text, depth), strings(text)
    for string in known:
        state = found(arrays, string)
        assert state != NONE and suffixes.token_of(arrays, state) == string[-1]
        if len(string) <= depth:
            assert count(arrays, state) == occurrences(text, string)
        for token in (0, 1, 2, 7, 8):
            assert (suffixes.step(arrays, state, token) != NONE) == ((*string, token) in known)
    assert count(arrays, ROOT) == len(text)


@settings(max_examples=150)
@given(TEXTS, DEPTHS)
def test_the_likeliest_token_is_the_most_frequent_and_of_equals_the_most_recent(text: list[int], depth: int) -> None:
    arrays, ways = made(text, depth), np.empty(33, np.int32)
    for string in {(), *strings(text)}:
        state, size = found(arrays, string), len(string)
        likeliest = arrays.states[state, suffixes.BEST]
        token = None if likeliest == NONE else suffixes.token_of(arrays, likeliest)
        assert token is None or suffixes.step(arrays, state, token) == likeliest
        assert suffixes.is_counted(arrays, state) or size >= depth
        if not suffixes.is_counted(arrays, state):
            continue
        places = [end for end in range(size, len(text)) if tuple(text[end - size : end]) == string]
        followers = Counter(text[end] for end in places if text[end] != SEPARATOR)
        latest = {text[end]: end for end in places}
        assert token == max(followers, key=lambda token: (followers[token], latest[token]), default=None)
        if token is not None:
            following = ways[: suffixes._ways(arrays, state, True, ways)]
            assert {suffixes.token_of(arrays, way): count(arrays, way) for way in following} == followers
            assert [count(arrays, way) for way in following] == sorted(followers.values(), reverse=True)
            assert following[0] == likeliest


@settings(max_examples=100)
@given(TEXTS, DEPTHS)
def test_the_ends_of_the_text_are_the_strings_that_once_go_on_with_nothing(text: list[int], depth: int) -> None:
    arrays = made(text, depth)
    for string in strings(text):
        if len(string) <= depth:
            state, end = found(arrays, string), tuple(text[-len(string) :]) == string
            assert suffixes.occurrences(arrays, state) == count(arrays, state) - end


@settings(max_examples=150)
@given(TEXTS, DEPTHS)
def test_the_longest_repeated_end_is_found_after_every_token(text: list[int], depth: int) -> None:
    automaton = SuffixAutomaton(depth)
    for size in range(1, len(text) + 1):
        automaton.extend(text[size - 1 : size])
        state, matched = suffixes.longest_repeat(automaton.arrays)
        sizes = [n for n in range(size) if occurrences(text[:size], text[size - n : size]) > 1]
        assert matched == max(sizes) and state == found(automaton.arrays, text[size - matched : size])


@settings(max_examples=100)
@given(TEXTS, st.lists(st.sampled_from([0, 1, 2, 7, 8]), max_size=30))
def test_another_text_is_followed_through_its_longest_match(text: list[int], other: list[int]) -> None:
    arrays, known = made(text, 5), strings(text)
    state, matched = ROOT, 0
    for end, token in enumerate(other, start=1):
        state, matched = suffixes.advance(arrays, state, matched, token)
        assert matched == max(n for n in range(end + 1) if n == 0 or tuple(other[end - n : end]) in known)
        assert state == found(arrays, other[end - matched : end])


@pytest.mark.parametrize("tokens", [2, 5, 1000])
def test_a_text_that_comes_in_pieces_is_the_same_and_keeps_to_its_room(tokens: int) -> None:
    """Also where the arrays have grown in between: nothing in compiled code looks at their ends."""
    rng = random.Random(tokens)
    text = [rng.randrange(tokens) if rng.random() < 0.95 else SEPARATOR for _ in range(3000)]
    whole, pieces = SuffixAutomaton(8), SuffixAutomaton(8)
    whole.extend(text)
    while len(pieces) < len(text):
        pieces.extend(text[len(pieces) : len(pieces) + rng.randrange(1, 60)])
        head, arrays = pieces.arrays.head, pieces.arrays
        assert head[suffixes.STATES] <= 2 * len(pieces) <= len(arrays.states)
        assert head[suffixes.USED] <= len(pieces) <= len(arrays.edges) <= len(arrays.slots) // 2
    assert (
        suffixes.longest_repeat(pieces.arrays) == suffixes.longest_repeat(whole.arrays)
        and (pieces.tokens == whole.tokens).all()
    )
    states, edges = (int(whole.arrays.head[place]) for place in (suffixes.STATES, suffixes.USED))
    assert (pieces.arrays.head[: suffixes.ROOM] == whole.arrays.head[: suffixes.ROOM]).all()
    assert (pieces.arrays.states[:states] == whole.arrays.states[:states]).all()
    assert (pieces.arrays.edges[:edges] == whole.arrays.edges[:edges]).all()


@pytest.mark.parametrize("text", [[3] * 3000, [1, 2] * 1500, list(range(3000))], ids=["one", "two", "all"])
def test_the_work_and_the_memory_are_linear(text: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Look-ups of transitions and links per token stay below fixed numbers, also for the nastiest texts. Counted in the
    same functions as Python runs them."""
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    spec = importlib.util.spec_from_file_location("uncompiled", suffixes.__file__)
    plain = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plain)
    calls = Counter[str]()
    step = plain.step

    def counting(*args: Any) -> int:
        calls["step"] += 1
        return int(step(*args))

    class Links(np.ndarray):
        def __getitem__(self, place: Any) -> Any:
            calls["link"] += isinstance(place, tuple) and place[1] == suffixes.LINK
            return super().__getitem__(place)

    monkeypatch.setattr(plain, "step", counting)
    automaton = SuffixAutomaton(16)
    automaton.extend(text)
    memory, states = automaton.whole.nbytes, automaton.arrays.states.copy()
    arrays = automaton.arrays._replace(states=automaton.arrays.states.view(Links))
    plain.start(arrays, 16)
    with np.errstate(over="ignore"):
        plain.extend(arrays, np.array(text, np.int32))
    used = int(arrays.head[suffixes.STATES])
    assert (np.asarray(arrays.states)[:used] == states[:used]).all(), "the compiled functions do the same"
    assert len(text) <= calls["step"] <= 6 * len(text)
    assert len(text) <= calls["link"] <= 7 * 16 * len(text)
    assert memory <= 190 * len(text)


def drafter(**options: Any) -> SuffixDrafter:
    """By default one token for each that matches, and no text is followed: drafts are written out for that here."""
    given = {"max_spec_factor": 1.0, "follow_edits": False, **options}
    return SuffixDrafter(SuffixConfig(**given), setup=None)


def fed(tokens: Sequence[int], **options: Any) -> SuffixDrafter:
    made = drafter(**options)
    made.extend(context(tokens, len(tokens)))
    return made


def drafted(tokens: Sequence[int], **options: Any) -> list[list[int]]:
    return paths(propose(fed(tokens, **options), tokens))


def answered(made: SuffixDrafter, prompt: list[int], output: list[int], row: int = 0) -> None:
    """A whole request on one row."""
    made.extend(context([*prompt, *output[:1]], len(prompt) + 1, row, prompt=len(prompt)))
    made.extend(context([*prompt, *output], len(output) - 1, row, prompt=len(prompt)))
    made.truncate([row], [0])


def reference(text: Sequence[int], longest: int) -> list[int]:
    """The chain by plain search: after the longest match, token for token the most frequent way on."""
    text = list(text)

    def ends(string: Sequence[int]) -> list[int]:
        size = len(string)
        return [end for end in range(size, len(text)) if text[end - size : end] == list(string)]

    size = max((n for n in range(1, len(text)) if ends(text[-n:])), default=0)
    string, chain = text[len(text) - size :], list[int]()
    while len(chain) < min(size, longest):
        while string and not ends(string):
            string = string[1:]
        if not string:
            break
        following = [text[end] for end in ends(string)]
        token = max(following, key=lambda t: (following.count(t), max(e for e in ends(string) if text[e] == t)))
        chain.append(token)
        string = [*string, token]
    return chain


def test_factor_offset_and_budget_bound_the_length() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 2]
    assert drafted(text, max_spec_factor=SuffixConfig().max_spec_factor) == [[3, 4, 5, 6, 7, 8, 0, 1]], "four for one"
    assert drafted(text, max_spec_factor=3.0) == [[3, 4, 5, 6, 7, 8]]
    assert drafted(text, max_spec_factor=0.5, max_spec_offset=2.0) == [[3, 4, 5]]
    assert drafted(text, max_spec_factor=9.0, num_speculative_tokens=2) == [[3, 4]]
    assert paths(propose(fed(text), text, Budget(nodes=[1], depth=[9]))) == [[3]]
    assert paths(propose(fed(text), text, Budget(nodes=[9], depth=[1]))) == [[3]]
    assert propose(fed(text), text, Budget(nodes=[9], depth=[0])).size == 0


def test_a_tree_holds_the_continuations_by_their_counts() -> None:
    text = [1, 2, 5, 0, 1, 2, 5, 0, 1, 2, 6, 0, 9, 1, 2]
    tree = propose(fed(text, nodes=3), text)
    assert sorted(paths(tree)) == [[5, 0], [6]]
    confidence = dict(zip(tree.tokens[1:], tree.confidence[1:], strict=True))
    assert confidence[5] > confidence[6]


def test_a_repetition_is_continued_beyond_its_end_and_an_improbable_path_is_not_drafted() -> None:
    assert drafted([4, 1, 2, 1, 2, 1, 2], max_spec_factor=2.0, num_speculative_tokens=5) == [[1, 2, 1, 2, 1]]
    text = [token for other in range(10, 30) for token in (1, 2, other)] + [1, 2]
    assert drafted(text, min_token_prob=0.0)[0][0] == 29
    assert drafted(text, min_token_prob=0.1) == []


@pytest.mark.parametrize("seed", range(12))
def test_any_history_of_growing_and_shrinking_drafts_what_a_plain_search_finds(seed: int) -> None:
    rng = random.Random(seed)
    made, text = drafter(min_token_prob=0.0, max_tree_depth=64, num_speculative_tokens=6), list[int]()
    for _ in range(40):
        if text and rng.random() < 0.3:
            keep = rng.randrange(1, len(text) + 1)
            del text[keep:]
            made.truncate([0], [keep])
        fresh = [rng.randrange(3) for _ in range(rng.randrange(1, 5))]
        text += fresh
        made.extend(context(text, len(fresh)))
        expected = reference(text, 6)
        assert paths(propose(made, text)) == ([expected] if expected else [])


def test_tokens_that_were_never_shown_are_read_when_they_are_met() -> None:
    made = fed([1, 2, 3])
    made.extend(context([1, 2, 3, 4, 1, 2], 1))
    assert paths(propose(made, [1, 2, 3, 4, 1, 2])) == [[3, 4]]
    assert paths(propose(made, [1, 2, 3, 4, 1, 2, 9, 4, 1])) == [[2, 9]]


def test_a_past_answer_is_copied_and_its_prompt_where_that_was_asked_for() -> None:
    made = drafter()
    answered(made, [30, 31, 32, 33], [1, 2, 3, 4, 5])
    made.extend(context([9, 1, 2], 3))
    assert paths(propose(made, [9, 1, 2])) == [[3, 4]]
    made.extend(context([9, 1, 2, 30, 31], 2))
    assert paths(propose(made, [9, 1, 2, 30, 31])) == []
    made = drafter(cache_prompts=True)
    answered(made, [30, 31, 32, 33], [1, 2, 3])
    made.extend(context([30, 31], 2))
    assert paths(propose(made, [30, 31])) == [[32, 33]]
    made = drafter(max_cached_requests=0)
    answered(made, [8], [1, 2, 3, 4])
    made.extend(context([1, 2], 2))
    assert paths(propose(made, [1, 2])) == []


def test_a_row_that_is_kept_for_another_prompt_has_that_ones_length() -> None:
    """As the engine does where a drafter beside this one keeps what it knows of the beginning."""
    made = drafter()
    made.extend(context([30, 31, 40], 3, prompt=3))
    made.truncate([0], [2])
    made.extend(context([30, 31, 50, 51, 52, 53], 4, prompt=5))
    made.truncate([0], [0])
    made.extend(context([50, 51], 2))
    assert paths(propose(made, [50, 51])) == [], "the prompt was not kept"


@pytest.mark.parametrize("nodes", [1, 2, 5])
def test_a_text_is_followed_further_than_a_tree_has_nodes(nodes: int) -> None:
    made, text = drafter(follow_edits=True, nodes=nodes, max_spec_factor=4.0), [*range(30), *range(8)]
    made.extend(context([0], 1, row=1))
    made.extend(context(text, len(text)))
    [path] = paths(propose(made, text))
    assert len(path) > nodes and path == list(range(8, 8 + len(path)))
    assert paths(*made.propose(context([0], 0, row=1), ROOMY)) == []


@pytest.mark.parametrize("options", [{"max_spec_factor": 1e30}, {"max_spec_offset": 1e19}])
def test_a_factor_beyond_all_numbers_drafts_all_that_may_be(options: dict[str, Any]) -> None:
    assert drafted([*range(30), 0, 1], num_speculative_tokens=6, **options) == [[2, 3, 4, 5, 6, 7]]


def test_no_draft_reaches_over_the_end_of_an_answer() -> None:
    made = drafter(max_spec_factor=4.0)
    answered(made, [8], [1, 2, 3])
    answered(made, [8], [4, 5, 6])
    made.extend(context([2, 3], 2))
    assert paths(propose(made, [2, 3])) == []
    made.extend(context([2, 3, 1, 2], 2))
    assert SEPARATOR not in paths(propose(made, [2, 3, 1, 2]))[0]


def test_the_source_that_promises_more_is_taken() -> None:
    made = drafter()
    answered(made, [8], [1, 2, 3, 4, 5, 6])
    text = [3, 7, 0, 1, 2, 3]
    made.extend(context(text, len(text)))
    assert paths(propose(made, text)) == [[4, 5, 6]], "a match of three in the store, of one in the request"


def test_a_match_of_running_rows_is_found_in_what_was_stored_meanwhile() -> None:
    made = drafter()
    made.extend(context([9, 1, 2], 3, row=1))
    answered(made, [8], [1, 2, 3, 4], row=0)
    made.extend(context([5, 5], 2, row=2))
    assert paths(*made.propose(context([9, 1, 2], 0, row=1), ROOMY)) == [[3, 4]]


def test_the_store_stays_within_its_bounds_and_keeps_the_latest_of_a_long_output_the_end() -> None:
    store = OutputStore(depth=8, tokens=100, requests=10)
    rng = random.Random(0)
    for number in range(60):
        output = [1000 + number, *(rng.randrange(4) for _ in range(rng.randrange(1, 70))), 2000 + number]
        store.add(output)
        texts = [list(generation.tokens) for generation in store.generations]
        assert sum(map(len, texts)) <= 100
        assert sum(text.count(SEPARATOR) for text in texts) <= 10
        assert any(2000 + number in text for text in texts)
    assert not any(2000 in text for text in texts)
    store = OutputStore(depth=8, tokens=100, requests=10)
    store.add(range(300))
    assert store.generations[0].tokens.tolist() == [*range(251, 300), SEPARATOR] and store.held == 50


def test_a_running_row_is_looked_for_anew_where_the_store_has_grown() -> None:
    made = drafter(max_tree_depth=8)
    answered(made, [900], list(range(40)))
    text = [901, 30, 31]
    made.extend(context(text, 3, row=1))
    assert paths(*made.propose(context(text, 0, row=1), ROOMY)) == [[32, 33]]
    text.append(50)
    made.extend(context(text, 1, row=1))
    assert paths(*made.propose(context(text, 0, row=1), ROOMY)) == []
    answered(made, [900], [31, 50, 60, 61])
    assert paths(*made.propose(context(text, 0, row=1), ROOMY)) == [[60, 61]]


def test_confidence_tells_what_was_copied_rightly_from_what_was_not() -> None:
    """A string that goes on alike every time, and one that goes on at random."""
    rng = random.Random(1)
    made, text = drafter(), list[int]()
    for _ in range(250):
        for token in (1, 2, 3, 20 + rng.randrange(9), 20 + rng.randrange(9), 0):
            text.append(token)
            made.extend(context(text, 1))
            propose(made, text)
    assert first_confidence(made, [*text, 1, 2]) > 0.9
    assert first_confidence(made, [*text, 1, 2, 3]) < 0.5


def first_confidence(made: SuffixDrafter, text: list[int]) -> float:
    """Of the first token drafted after `text`, which the drafter has read up to a few tokens; 0 without a draft."""
    tree = propose(made, text)
    made.truncate([0], [len(text) - 3])
    return tree.confidence[1] if tree.size else 0.0


def test_memory_is_told_and_freed() -> None:
    made = fed(list(range(1000)), max_cached_requests=0)
    held = made.memory_bytes()
    made.truncate([0], [0])
    assert held > 30_000 > made.memory_bytes()


def test_vllms_names_are_understood() -> None:
    given = {"max_tree_depth": 32, "max_cached_requests": 50, "max_spec_factor": 2.0, "min_token_prob": 0.2}
    parsed = SpeculativeConfig.parse({"method": "suffix", **{f"suffix_decoding_{k}": v for k, v in given.items()}})
    assert parsed is not None and SuffixConfig(**parsed.drafter_options) == SuffixConfig(**given)
