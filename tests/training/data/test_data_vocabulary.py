"""The draft vocabulary: counted tokens only, the most frequent, ties and padding by id, sorted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forerun.errors import ArgumentError
from forerun.training.data import store as prepared
from forerun.training.data.store import coverage, draft_vocabulary, token_counts
from training.data.conftest import store


def test_only_counted_tokens_are_counted_whatever_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = store(tmp_path / "data", [([7, 7, 3, 3], [False, True, True, True]), ([7, 5], [False, True])])
    expected = torch.zeros(10, dtype=torch.int64)
    expected[[3, 5, 7]] = torch.tensor([2, 1, 1])
    assert torch.equal(token_counts(data, 10), expected)
    monkeypatch.setattr(prepared, "_BLOCK", 1)
    assert torch.equal(token_counts(data, 10), expected)
    with pytest.raises(ArgumentError, match="token id 7"):
        token_counts(data, 7)


@pytest.mark.parametrize(
    ("counts", "size", "expected"),
    [
        ([0, 5, 1, 9], 2, [1, 3]),
        ([2, 7, 2, 2], 2, [0, 1]),
        ([0, 0, 0, 4, 0], 3, [0, 1, 3]),
        ([1, 1], 2, [0, 1]),
    ],
)
def test_the_most_frequent_then_the_lowest_ids(counts: list[int], size: int, expected: list[int]) -> None:
    ids = draft_vocabulary(torch.tensor(counts), size)
    assert ids.tolist() == expected and ids.dtype == torch.int64


@pytest.mark.parametrize("size", [0, 5])
def test_a_size_out_of_range_is_refused(size: int) -> None:
    with pytest.raises(ArgumentError, match="1 to 4"):
        draft_vocabulary(torch.ones(4, dtype=torch.int64), size)


def test_coverage_is_the_share_that_can_be_said() -> None:
    counts = torch.tensor([6, 0, 3, 1])
    assert coverage(counts, torch.tensor([0, 2])) == pytest.approx(0.9)
    assert coverage(torch.zeros(4), torch.tensor([0])) == 1.0
