"""The suffix automaton against brute force: every string, every count, every most frequent continuation."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.drafters.lookup.automaton import NONE, ROOT, SEPARATOR, SuffixAutomaton

TEXTS = st.lists(st.sampled_from([0, 1, 2, 7, SEPARATOR]), max_size=40) | st.lists(st.integers(0, 1), max_size=40)
DEPTHS = st.integers(2, 9)


def made(text: Sequence[int], depth: int) -> SuffixAutomaton:
    automaton = SuffixAutomaton(depth)
    automaton.extend(text)
    return automaton


def found(automaton: SuffixAutomaton, string: Sequence[int]) -> int:
    """The state of a string, NONE if it does not occur."""
    state = ROOT
    for token in string:
        state = automaton.step(state, token)
        if state == NONE:
            break
    return state


def occurrences(text: Sequence[int], string: Sequence[int]) -> int:
    size = len(string)
    return sum(list(text[place : place + size]) == list(string) for place in range(len(text) - size + 1))


def strings(text: Sequence[int]) -> set[tuple[int, ...]]:
    return {tuple(text[low:high]) for low in range(len(text)) for high in range(low + 1, len(text) + 1)}


@settings(max_examples=150)
@given(TEXTS, DEPTHS)
def test_exactly_the_substrings_are_found_and_those_up_to_the_depth_are_counted(text: list[int], depth: int) -> None:
    automaton, known = made(text, depth), strings(text)
    for string in known:
        state = found(automaton, string)
        assert state != NONE and automaton.token(state) == string[-1]
        if len(string) <= depth:
            assert automaton.count(state) == occurrences(text, string)
        for token in (0, 1, 2, 7, 8):
            assert (automaton.step(state, token) != NONE) == ((*string, token) in known)
    assert automaton.count(ROOT) == len(text)


@settings(max_examples=150)
@given(TEXTS, DEPTHS)
def test_the_likeliest_token_is_the_most_frequent_and_of_equals_the_most_recent(text: list[int], depth: int) -> None:
    automaton = made(text, depth)
    for string in {(), *strings(text)}:
        state, size = found(automaton, string), len(string)
        likeliest = automaton.likeliest(state)
        assert likeliest == NONE or automaton.step(state, automaton.token(likeliest)) == likeliest
        assert automaton.counted(state) or size >= depth
        if not automaton.counted(state):
            continue
        places = [end for end in range(size, len(text)) if tuple(text[end - size : end]) == string]
        followers = Counter(text[end] for end in places if text[end] != SEPARATOR)
        latest = {text[end]: end for end in places}
        best = max(followers, key=lambda token: (followers[token], latest[token]), default=None)
        assert (None if likeliest == NONE else automaton.token(likeliest)) == best
        following = automaton.following(state, 99)
        assert {automaton.token(target): automaton.count(target) for target in following} == followers


@settings(max_examples=100)
@given(TEXTS, DEPTHS)
def test_the_ends_of_the_text_are_the_strings_that_once_go_on_with_nothing(text: list[int], depth: int) -> None:
    automaton = made(text, depth)
    ends = automaton.suffixes()
    for string in strings(text):
        if len(string) <= depth:
            assert (found(automaton, string) in ends) == (tuple(text[-len(string) :]) == string)


@settings(max_examples=150)
@given(TEXTS, DEPTHS)
def test_the_longest_repeated_end_is_found_after_every_token(text: list[int], depth: int) -> None:
    automaton = SuffixAutomaton(depth)
    for size in range(1, len(text) + 1):
        automaton.extend(text[size - 1 : size])
        state, matched = automaton.repeated()
        sizes = [n for n in range(size) if occurrences(text[:size], text[size - n : size]) > 1]
        assert matched == max(sizes) and state == found(automaton, text[size - matched : size])


@settings(max_examples=100)
@given(TEXTS, st.lists(st.sampled_from([0, 1, 2, 7, 8]), max_size=30))
def test_another_text_is_followed_through_its_longest_match(text: list[int], other: list[int]) -> None:
    automaton, known = made(text, 5), strings(text)
    state, matched = ROOT, 0
    for end, token in enumerate(other, start=1):
        state, matched = automaton.advance(state, matched, token)
        assert matched == max(n for n in range(end + 1) if n == 0 or tuple(other[end - n : end]) in known)
        assert state == found(automaton, other[end - matched : end])


@pytest.mark.parametrize("text", [[3] * 3000, [1, 2] * 1500, list(range(3000))], ids=["one", "two", "all"])
def test_the_work_and_the_memory_are_linear(text: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Look-ups of transitions and links per token stay below fixed numbers, also for the nastiest texts."""
    calls = Counter[str]()
    step = SuffixAutomaton.step

    def counting(self: SuffixAutomaton, state: int, token: int) -> int:
        calls["step"] += 1
        return step(self, state, token)

    class Links(array):  # type: ignore[type-arg]
        def __getitem__(self, place: Any) -> Any:
            calls["link"] += 1
            return super().__getitem__(place)

    monkeypatch.setattr(SuffixAutomaton, "step", counting)
    automaton = SuffixAutomaton(16)
    automaton._link = Links("i", automaton._link)
    automaton.extend(text)
    assert calls["step"] <= 6 * len(text)
    assert len(text) <= calls["link"] <= 7 * 16 * len(text)
    assert automaton.memory_bytes() <= 450 * len(text)
