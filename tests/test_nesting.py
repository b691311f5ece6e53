"""Brackets are counted as a JSON parser would meet them, whatever stands in strings, and in linear time."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.nesting import nesting

VALUES = st.recursive(
    st.one_of(st.none(), st.integers(), st.text(st.sampled_from('[]{}"\\a/é')), st.booleans()),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=3), inner, max_size=4)),
)


def counted(value: object) -> tuple[int, int, int]:
    """Depth, number of containers, and number of keys, the slow way."""
    if not isinstance(value, dict | list):
        return 0, 0, 0
    inner = [counted(one) for one in (value.values() if isinstance(value, dict) else value)]
    keys = len(value) if isinstance(value, dict) else 0
    depths = [one[0] for one in inner]
    return 1 + max(depths, default=0), 1 + sum(one[1] for one in inner), keys + sum(one[2] for one in inner)


@given(value=VALUES, ascii_only=st.booleans())
def test_a_json_text_has_the_brackets_of_its_value(value: object, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert nesting(text) == nesting(text.encode()) == counted(value)


@pytest.mark.parametrize("text", ["", "]]]]", '"[[[', '"\\', '"\\"[[', "[" * 5 + "]" * 9])
def test_texts_that_are_no_json(text: str) -> None:
    assert nesting(text).depth == (5 if text.startswith("[") else 0)


@pytest.mark.parametrize("piece", ['"', '\\"', '"\\', '"a', "[", "[]", '"\\\\', '\\"["'])
def test_the_time_is_linear(piece: str) -> None:
    """Sixteen times as much takes far less than 256 times as long, which it would if it were quadratic."""

    def seconds(count: int) -> float:
        text = ('"' + piece * count).encode()
        began = time.thread_time()
        nesting(text)
        return time.thread_time() - began

    small = min(seconds(20_000) for _ in range(5))
    assert seconds(320_000) < 100 * small + 0.05
