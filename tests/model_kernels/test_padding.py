from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forerun.core.tree import TokenTree
from forerun.decode.scores import Scores
from forerun.model import TransformersTarget
from forerun.model.inputs import Buckets, Flat
from forerun.model.kernels import native as native_kernel
from forerun.model.kernels import products as products_in_c
from forerun.model.kernels.accelerate import accelerate
from forerun.model.kernels.packing import PackedWeight, PanelWeight
from model_kernels.conftest import build

pytestmark = pytest.mark.usefixtures("in_c", "packed")


def chains(roots: Sequence[int], counts: dict[int, int]) -> list[TokenTree]:
    """For each of these rows a chain of so many nodes."""
    made = [TokenTree(root) for root in roots]
    for tree, (row, count) in zip(made, counts.items(), strict=True):
        tree.add_path((7 * row + 3 * step + 1) % 100 for step in range(count))
    return made


def target(rows: int, buckets: Buckets | None = None) -> TransformersTarget:
    model = build("llama", head_dim=32)  # wide enough for the kernel
    accelerate(model)
    for layer in model.model.layers:
        layer.__dict__.pop("forward", None)  # their products are seen nowhere
    return TransformersTarget(model, rows=rows, slots=64, buckets=buckets)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens in each product of a packed linear."""
    seen, kind = list[int](), PanelWeight if products_in_c.ready(torch.bfloat16) else PackedWeight
    before = kind._product

    def counted(self: PackedWeight, rows: torch.Tensor) -> torch.Tensor:
        seen.append(len(rows))
        return before(self, rows)

    monkeypatch.setattr(kind, "_product", counted)
    return seen


def test_padding_is_not_multiplied_and_changes_nothing(products: list[int]) -> None:
    counts = {0: 9, 1: 0, 2: 2, 3: 0}
    made, alone = target(4), target(4)
    for each in (made, alone):
        each.prefill(range(4), [[row + 1, row + 2, row + 3] for row in range(4)])
    products.clear()
    whole = made.score(range(4), chains([5, 6, 7, 8], counts)).logits
    assert set(products) == {sum(counts.values()) + 4}
    for row, count in counts.items():
        single = alone.score([row], chains([5 + row], {row: count})).logits
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
    made.score(range(4), chains([5, 6, 7, 8], {0: 9, 1: 0, 2: 0, 3: 0}))
    assert set(products) == {40}


def test_real_tokens_are_taken_out_and_put_back() -> None:
    real = torch.ones(2, 16, dtype=torch.bool)
    assert Flat.of(real) is None
    real[1] = False
    flat = Flat.of(real)
    assert flat is not None and flat.starts.tolist() == [0, 16, 16]
    values = torch.arange(1.0, 33).view(2, 16, 1)
    assert flat.flatten(values).equal(values[:1])
    assert flat.restore(flat.flatten(values)).equal(values * real.unsqueeze(2))


@pytest.mark.parametrize("native", [True, False])
def test_scattered_rows_are_read_where_they_stand(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows 0, 2, 3 of four, drafts of unequal length, with the kernel and with torch: as each row alone."""
    if not native:
        monkeypatch.setattr("forerun.model.kernels.native.attention_kernel", lambda: None)
    made = target(4)
    made.prefill(range(4), [[row + 1, row + 2, row + 3] for row in range(4)])
    rows, counts = [3, 0, 2], {3: 9, 0: 0, 2: 2}
    together = made.score(rows, chains([8, 5, 7], counts), boundaries={1}).hidden_states[1]
    for place, (row, count) in enumerate(counts.items()):
        alone = made.score([row], chains([row + 5], {row: count}), boundaries={1}).hidden_states[1]
        torch.testing.assert_close(alone[0], together[place, : count + 1], rtol=2e-2, atol=2e-2)


def test_layers_are_handed_no_copy_of_scattered_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    made = target(4)
    made.prefill(range(4), [[1, 2]] * 4)
    store = made.cache.read(0, 0, 1)[0].untyped_storage().data_ptr()
    seen, before = list[int](), native_kernel.attend

    def noted(query: torch.Tensor, key: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
        seen.append(key.untyped_storage().data_ptr())
        return before(query, key, *others, **named)

    monkeypatch.setattr(native_kernel, "attend", noted)
    made.score([0, 3], chains([5, 6], {0: 1, 3: 1}))
    assert store in seen or native_kernel.attention_kernel() is None


def test_scores_of_real_nodes_alone_are_those_of_all() -> None:
    """Their argmax, likeliest ids and logits, for all rows and for some of them in another order."""
    counts = {0: 9, 1: 0, 2: 2, 3: 1}
    drafts = chains([5, 6, 7, 8], counts)
    made = target(4)
    made.prefill(range(4), [[row + 1, row + 2, row + 3] for row in range(4)])
    whole, some = (made.score(range(4), drafts, padded=padded) for padded in (True, False))
    assert whole.flat is None and some.flat is not None
    assert some.logits.shape == (1, sum(counts.values()) + 4, whole.logits.shape[-1])
    rows = [SimpleNamespace(tokens=[row], prompt_length=1) for row in range(4)]
    both = [Scores(one.logits, rows, drafts, ["argmax_walk"] * 4, flat=one.flat) for one in (whole, some)]
    both += [one.of([3, 0, 2]) for one in both]
    for expected, found in (both[:2], both[2:]):
        for index, tree in enumerate(found.trees):
            for node in range(tree.size + 1):
                assert found.raw_argmax(index, node) == expected.raw_argmax(index, node)
                assert torch.equal(found.logits_at(index, node), expected.logits_at(index, node))
                assert (found.top_ids(4)[index, node] == expected.top_ids(4)[index, node]).all()
