from __future__ import annotations

import pytest
import torch

from forerun import tree as trees
from forerun.target import Target
from forerun.target.buckets import Buckets
from forerun.target.fast import accelerate
from forerun.target.fast.packing import PackedWeight, cpu_packs
from forerun.target.fast.padding import PADDING, WORTH
from forerun.tree import TreeBuilder
from forerun.types import Draft
from target_fast.conftest import build

pytestmark = pytest.mark.skipif(not cpu_packs(torch.bfloat16), reason="no bf16 kernels on this processor")


def chains(counts: dict[int, int]) -> Draft:
    """For each of these rows a chain of so many nodes."""
    builders = []
    for row, count in counts.items():
        made, last = TreeBuilder(), 0
        for step in range(count):
            last = made.add((7 * row + 3 * step + 1) % 100, last)
        builders.append(made)
    return trees.stack(builders)


def target(rows: int, buckets: Buckets | None = None) -> Target:
    model = build("llama")
    accelerate(model)
    return Target(model, rows=rows, slots=64, buckets=buckets)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens in each product of a packed linear."""
    seen, before = list[int](), PackedWeight._product

    def counted(self: PackedWeight, rows: torch.Tensor) -> torch.Tensor:
        seen.append(len(rows))
        return before(self, rows)

    monkeypatch.setattr(PackedWeight, "_product", counted)
    return seen


def test_padding_is_not_multiplied_and_changes_nothing(products: list[int]) -> None:
    counts = {0: 9, 1: 0, 2: 2, 3: 0}
    made, alone = target(4), target(4)
    for each in (made, alone):
        each.prefill(range(4), [[row + 1, row + 2, row + 3] for row in range(4)])
    products.clear()
    whole = made.score(range(4), [5, 6, 7, 8], chains(counts)).logits
    assert set(products) == {sum(counts.values()) + 4}
    for row, count in counts.items():
        single = alone.score([row], [5 + row], chains({row: count})).logits
        torch.testing.assert_close(single[0], whole[row, : count + 1], rtol=2e-2, atol=2e-2)


def test_prompts_of_unequal_length(products: list[int]) -> None:
    made, alone = target(2), target(2)
    prompts = [list(range(1, 31)), [5, 6]]
    both = made.prefill([0, 1], prompts).logits
    assert 32 in products and 60 not in products
    for row in range(2):
        torch.testing.assert_close(alone.prefill([row], [prompts[row]]).logits[0], both[row], rtol=2e-2, atol=2e-2)


def test_the_reproducible_mode_multiplies_everything(products: list[int]) -> None:
    made = target(4, Buckets(nodes=(10,)))
    made.prefill(range(4), [[1, 2]] * 4)
    products.clear()
    made.score(range(4), [5, 6, 7, 8], chains({0: 9, 1: 0, 2: 0, 3: 0}))
    assert set(products) == {40}


def test_little_padding_and_other_shapes_are_left_alone() -> None:
    rows = torch.arange(2.0 * WORTH).unsqueeze(1)
    real = torch.ones(2, WORTH, dtype=torch.bool)
    real[1, 1:] = False
    with PADDING.of(real):
        assert PADDING.without(rows, lambda given: given + 1).flatten().tolist() == (rows + 1).flatten().tolist()
    real[1] = False
    with PADDING.of(real):
        found = PADDING.without(rows, lambda given: given + 1)
        assert found[:WORTH].equal(rows[:WORTH] + 1) and not found[WORTH:].any()
        assert PADDING.without(rows[:3], lambda given: given + 1).equal(rows[:3] + 1)
    assert PADDING.without(rows, lambda given: given + 1).equal(rows + 1)
