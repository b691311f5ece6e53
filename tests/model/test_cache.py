"""Rows, slots, masks and buckets: what the families do not show."""

from typing import Any

import pytest
import torch

from forerun.core.tree import TokenTree
from forerun.errors import ArgumentError, OutOfMemoryError
from forerun.model import Buckets, TransformersTarget
from forerun.model import cache as cache_module
from forerun.model.cache import SlotCache
from forerun.model.inputs import Nodes
from forerun.model.masks import Block, MaskStyle, build
from model.families import make, plain, random_tokens
from model.test_families import trees


def chain(root: int, *tokens: int) -> list[TokenTree]:
    """One row's."""
    tree = TokenTree(root)
    tree.add_path(tokens)
    return [tree]


@pytest.fixture
def target() -> TransformersTarget:
    return TransformersTarget.load(make("llama"), rows=3, slots=40, self_check=False)


@pytest.mark.parametrize("counts", [(3, 25, 14), (25, 14, 9), (25,)], ids=str)
def test_prompts_go_in_pieces(
    monkeypatch: pytest.MonkeyPatch, target: TransformersTarget, counts: tuple[int, ...]
) -> None:
    """Also where no row ends in the first."""
    monkeypatch.setattr("forerun.model.transformers_target.PREFILL_CHUNK", 7)
    rows, chunks = [2, 0, 1][: len(counts)], [random_tokens(count, count) for count in counts]
    scored = target.prefill(rows, chunks, boundaries=frozenset({2, -1}), all_logits=True)
    assert [target.lengths[row] for row in rows] == [*counts]
    for index, tokens in enumerate(chunks):
        logits = scored.logits[index, : len(tokens)]
        assert (logits - plain(target.model, tokens)).abs().max() <= 2e-5
        assert torch.allclose(target.lm_head(scored.hidden_states[-1][index, : len(tokens)]), logits, atol=1e-5)
    target.truncate(rows, [0] * len(rows))
    last = target.prefill(rows, chunks).logits
    assert last.shape == (len(rows), 1, 99)
    for index, tokens in enumerate(chunks):
        assert torch.allclose(last[index, 0], scored.logits[index, len(tokens) - 1], atol=2e-5)


def test_a_tree_must_fit_the_slots_and_the_context(target: TransformersTarget) -> None:
    target.prefill([0], [random_tokens(38, 0)])
    target.score([0], chain(3, 4))
    with pytest.raises(ArgumentError, match="raise slots"):
        target.score([0], chain(3, 4, 5))
    short = TransformersTarget.load(make("gpt2", n_positions=16), slots=64, self_check=False)
    short.prefill([0], [random_tokens(14, 0)])
    short.score([0], chain(3, 4))
    with pytest.raises(ArgumentError, match="context of 16"):
        short.score([0], chain(3, 4, 5))


def test_wide_trees_at_the_end_of_the_context_are_bounded_by_depth_not_by_count() -> None:
    target = TransformersTarget.load(make("gpt2", n_positions=16), rows=3, slots=64, self_check=False)
    target.prefill([0, 1, 2], [random_tokens(count, 0) for count in (13, 11, 11)])
    target.buckets = Buckets(nodes=(16,))
    shapes = ([0, 0, 0, 1, 1, 1], [0, 1, 2, 1, 1, 1, 1, 1], [0, 1, 2])
    drafted = [TokenTree.of(3, [token + 3 for token in range(len(parents))], parents) for parents in shapes]
    assert target.score([0, 1, 2], drafted).logits.isfinite().all()


def test_unknown_boundaries(target: TransformersTarget) -> None:
    for boundary in (5, -2):
        with pytest.raises(ArgumentError, match=r"0\.\.4"):
            target.prefill([0], [[5]], boundaries=frozenset({boundary}))
    with pytest.raises(ArgumentError, match="start 3"):
        target.score([0], Nodes.of_trees(chain(5, 6, 7), start=3))


def test_neighbours_are_not_touched(target: TransformersTarget) -> None:
    """What happens in one row leaves the bytes of another as they were, padding included."""
    target.prefill([0, 1, 2], [random_tokens(20, row) for row in range(3)])
    before = [target.cache.read(layer, 1, 20)[0].clone() for layer in range(target.num_layers)]
    target.prefill([0, 2], [[3], random_tokens(9, 5)])
    target.score([0, 2], trees(0, [4, 5]))
    target.commit([0, 2], [(1, 3), (1, 2)])
    target.truncate([2], [0])
    after = [target.cache.read(layer, 1, 20)[0] for layer in range(target.num_layers)]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_out_of_memory_says_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: object, **_kwargs: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    cache = SlotCache(64, 2**17)
    cache.begin([0], torch.tensor([[0]]), 1)
    monkeypatch.setattr(cache_module.mmap, "mmap", full)
    with pytest.raises(OutOfMemoryError, match=r"32768 MiB more.*64 rows x 131072 slots.*Lower rows or slots"):
        cache.update(torch.ones(1, 8, 1, 128), torch.ones(1, 8, 1, 128), 0)


def test_a_mask_by_hand() -> None:
    """Two committed tokens, the root and two siblings, window 3: siblings share a position but not a view."""
    block = Block(
        lengths=torch.tensor([2]),
        sees=torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1], [0, 0, 0]]]).bool(),
        query_positions=torch.tensor([[2, 3, 3, 0]]),
        node_positions=torch.tensor([[2, 3, 3]]),
    )
    style = MaskStyle(types=("full_attention", "sliding_attention"), window=3)
    masks = build(block, style, 6, torch.float32)
    lowest = torch.finfo(torch.float32).min
    full = [[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 1, 0], [1, 0, 0, 0, 0, 0]]
    slid = [[1, 1, 1, 0, 0, 0], [0, 1, 1, 1, 0, 0], [0, 1, 1, 0, 1, 0], [1, 0, 0, 0, 0, 0]]
    for name, rows in zip(style.types, (full, slid), strict=True):
        assert torch.equal(masks[name], torch.where(torch.tensor([[rows]]).bool(), 0.0, lowest))


def test_buckets() -> None:
    buckets = Buckets(nodes=(1, 4, 16), width=128)
    assert [buckets.pad_nodes(count) for count in (1, 2, 4, 5, 17)] == [1, 4, 4, 16, 17]
    assert [buckets.pad_width(used, 700) for used in (1, 128, 129, 384, 500, 600)] == [128, 128, 384, 384, 512, 640]
    assert buckets.pad_width(299, 300) == 300
    for wrong in ({"width": 0}, {"nodes": (4, 2)}, {"nodes": (0,)}, {"nodes": (2, 2)}):
        with pytest.raises(ArgumentError, match="buckets"):
            Buckets(**wrong)


def test_width_is_a_function_of_committed_length(monkeypatch: pytest.MonkeyPatch, target: TransformersTarget) -> None:
    """Plain and speculative steps of the reproducible mode see equally many slots, also where a bucket ends."""
    widths: dict[int, set[int]] = {}
    begin = SlotCache.begin

    def spy(cache: SlotCache, rows: list[int], slot_ids: torch.Tensor, width: int, **how: Any) -> None:
        widths.setdefault(target.lengths[0], set()).add(width)
        begin(cache, rows, slot_ids, width, **how)

    target.buckets = Buckets(nodes=(4,), width=8)
    target.prefill([0], [[5, 6, 7]])
    monkeypatch.setattr(SlotCache, "begin", spy)
    for drafted in (chain(7), chain(7, 8), chain(7, 8, 9), chain(7, 8, 9, 10)) * 6:
        target.score([0], drafted)
        if drafted[0].size == 3:
            target.commit([0], [()])
    assert widths == {length: {-(-(length + 4) // 8) * 8} for length in range(3, 9)}


def test_padded_plain_and_speculative_steps_have_the_same_bits() -> None:
    """The reproducible mode: with one node bucket a chain's logits equal those of plain decoding, bit for bit."""
    model = make("llama", dtype=torch.bfloat16)
    target = TransformersTarget.load(model, rows=1, slots=256, self_check=False)
    target.buckets = Buckets(nodes=(8,), width=256)
    tokens = random_tokens(60, 4)
    target.prefill([0], [tokens[:20]])
    plain_logits = []
    for token in tokens[20:56]:
        plain_logits.append(target.score([0], chain(token)).logits[0, 0])
        target.commit([0], [()])
    target.truncate([0], [20])
    for start in range(20, 56, 6):
        logits = target.score([0], chain(*tokens[start : start + 6])).logits[0]
        target.commit([0], [(1, 2, 3, 4, 5)])
        assert torch.equal(logits, torch.stack(plain_logits[start - 20 : start - 14]))
