"""The largest of many logits, found without computing with them."""

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from forerun.model import largest
from forerun.model.kernels import native

DTYPES = [torch.bfloat16, torch.float32, torch.float64]


@pytest.fixture(params=["C", "numpy"], autouse=True)
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both ways to find them on a CPU; the first takes bf16 where the machine has the instructions."""
    if request.param == "numpy":
        monkeypatch.setattr(native, "takes_states", lambda _: False)
    with torch.inference_mode():
        yield


def expected(logits: Tensor) -> list[list[int]]:
    """One number after the other: the first of the largest, -1 where there is NaN."""

    def of(row: list[float]) -> int:
        return -1 if any(map(math.isnan, row)) else row.index(max(row))

    return [[of(row) for row in rows] for rows in logits.tolist()]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_first_of_the_largest(dtype: torch.dtype) -> None:
    for vocabulary, shift in itertools.product((1, 16, 31, 700), (0.0, -50.0, 50.0)):
        noise = torch.randn(3, 5, vocabulary, generator=torch.Generator().manual_seed(1))
        logits = (4 * noise + shift).round().to(dtype)
        assert largest(logits) == expected(logits)
    part = torch.randn(2, 6, 40, generator=torch.Generator().manual_seed(2)).to(dtype)[:, :4]
    assert largest(part) == expected(part), "a part of a larger tensor"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "row",
    [
        [-0.0, 0.0, -0.0],
        [0.0, -0.0, -1.0],
        [-math.inf, -math.inf, -3.0],
        [-math.inf, -math.inf, -math.inf],
        [1.0, math.inf, math.inf],
        [-math.inf, 1e-30, -1e30],
        [-1e-40, -2.0, -1e-40],
    ],
)
def test_zeros_infinities_and_small_numbers(dtype: torch.dtype, row: list[float]) -> None:
    logits = torch.tensor([[row, [1.0, 3.0, 2.0]]], dtype=dtype)
    assert largest(logits) == expected(logits)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rest", [2.0, -2.0, math.inf, -math.inf])
def test_nan_of_either_sign_is_seen_in_its_row_alone(dtype: torch.dtype, rest: float) -> None:
    """An invalid operation yields NaN with its sign bit set on x86."""
    for sign, place in itertools.product((1.0, -1.0), (0, 2)):
        logits = torch.full((2, 2, 3), rest, dtype=dtype)
        logits[1, 0, place] = torch.copysign(torch.tensor(math.nan, dtype=dtype), torch.tensor(sign, dtype=dtype))
        assert largest(logits) == expected(logits) == [[0, 0], [-1, 0]]


def test_many_at_once() -> None:
    """More than one thread's share."""
    logits = torch.randn(3, 40, 9001, generator=torch.Generator().manual_seed(3)).bfloat16()
    assert largest(logits) == logits.float().argmax(-1).tolist()
