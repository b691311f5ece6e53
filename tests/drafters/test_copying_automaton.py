"""The suffix automaton against brute force: every string, every count, every most frequent continuation."""

from __future__ import annotations

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

from forerun.drafters.lookup import suffixes
from forerun.drafters.lookup.drafts import NONE, SEPARATOR
from forerun.drafters.lookup.suffix import SuffixAutomaton
from forerun.drafters.lookup.suffixes import ROOT, Arrays

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
    assert spec is not None and spec.loader is not None
    plain = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plain)
    calls = Counter[str]()
    step = plain.step

    def counting(*args: Any) -> int:
        calls["step"] += 1
        return int(step(*args))

    class Links(np.ndarray):  # type: ignore[type-arg]
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
