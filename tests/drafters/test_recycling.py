"""Token Recycling: the matrix against a naive loop, the tree against brute force, the file against everything."""

import gc
import itertools
import logging
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafters.asking import ROOMY, context
from drafters.test_rest import nodes
from engine.conftest import checkpoint, tiny_tokenizer
from forerun.decode.scores import top_ids
from forerun.drafters.lookup.recycling import (
    PairTable,
    RecyclingConfig,
    RecyclingDrafter,
    SuccessorMatrix,
    count_paying,
    measured_rates,
)
from forerun.errors import ArgumentError, DataError, VocabularyMismatchError
from forerun.types import Budget

__all__ = ["checkpoint"]

SIZE = 12


def drafter(**options: Any) -> RecyclingDrafter:
    tokenizer = options.pop("tokenizer", None)
    target = SimpleNamespace(vocab_size=options.pop("size", SIZE))
    setup = SimpleNamespace(tokenizer=tokenizer, target=target, pass_ms=None)
    return RecyclingDrafter(RecyclingConfig(**{"top_k": 3, **options}), setup)


def scores_of(logits, trees) -> SimpleNamespace:
    """As much of `Scores` as the drafter asks for."""
    held = [SimpleNamespace(tokens=tuple(tree), parents=range(-1, len(tree) - 1)) for tree in trees]
    return SimpleNamespace(trees=held, top_ids=lambda k: top_ids(logits, k).numpy())


def shown(made: RecyclingDrafter, trees: Sequence[Sequence[int]], logits: torch.Tensor) -> None:
    """The target scored some trees, of which it kept nothing."""
    scores, alone = scores_of(logits, trees), context([0] * 3, 1)
    rows = len(trees)
    made.observe(replace(alone, rows=[0] * rows, tokens=[*alone.tokens] * rows, fresh=[1] * rows), [], scores)


@pytest.mark.parametrize("size", [SIZE, 128 * 12, 128 * 12 + 5])
def test_the_largest_logits_are_those_of_a_full_sort(size: int) -> None:
    logits = torch.randn(2, 4, size, generator=torch.Generator().manual_seed(0))
    logits[..., -1] += 3 * torch.arange(8).view(2, 4) % 5
    expected = logits.argsort(-1, descending=True)[..., :3]
    assert top_ids(logits, 3).tolist() == expected.tolist()
    short = logits.bfloat16()  # In which many are equal
    assert top_ids(short, 3).tolist() == top_ids(short.float(), 3).tolist()
    assert short.gather(-1, top_ids(short, 3)).equal(short.topk(3).values)


def test_every_scored_node_updates_its_row_and_the_last_of_equal_tokens_wins() -> None:
    made = drafter()
    naive = made.matrix.successors.copy()
    generator = torch.Generator().manual_seed(0)
    rng = random.Random(0)
    for _ in range(20):
        trees = [[rng.randrange(SIZE) for _ in range(rng.randrange(1, 6))] for _ in range(3)]
        logits = torch.randn(3, 7, SIZE, generator=generator)
        shown(made, trees, logits)
        for row, tree in enumerate(trees):
            for node, token in enumerate(tree):
                naive[token] = logits[row, node].topk(3).indices.numpy()
        assert made.matrix.successors.tolist() == naive.tolist()


@given(st.lists(st.integers(0, 4), min_size=2, max_size=40), st.lists(st.integers(0, 4), min_size=2, max_size=9))
def test_text_alone_puts_the_latest_successors_first(first: list[int], second: list[int]) -> None:
    matrix = SuccessorMatrix(np.full((5, 3), -1, np.int32), None, None)
    naive: list[list[int]] = [[] for _ in range(5)]
    for text in (first, second):
        matrix.read(np.array(text))
        for token, successor in itertools.pairwise(text):
            naive[token] = [successor, *(other for other in naive[token] if other != successor)]
        # What a long text pushes out of a row never comes back, but what stays is in order.
        naive = [row[:3] for row in naive]
        assert matrix.successors.tolist() == [row + [-1] * (3 - len(row)) for row in naive]


def test_a_prompt_is_read_once_and_what_the_target_scored_is_not_overwritten_by_text() -> None:
    made, text = drafter(), [1, 2, 3, 1]
    made.extend(context(text, 4))
    assert made.matrix.successors[:4].tolist() == [[-1] * 3, [2, -1, -1], [3, -1, -1], [1, -1, -1]]
    logits = torch.zeros(1, 1, SIZE)
    logits[..., [7, 8, 9]] = torch.tensor([3.0, 2.0, 1.0])
    text += [4]
    scores = scores_of(logits, [[1]])
    made.observe(context(text, 1), [], scores)
    made.extend(context(text, 1))
    assert made.matrix.successors[1].tolist() == [7, 8, 9]
    text += [5, 6]  # tokens that were committed without this drafter
    made.extend(context(text, 2))
    assert made.matrix.successors[[4, 5, 6], 0].tolist() == [5, 6, -1]


def taught(**options: Any) -> RecyclingDrafter:
    """After 1 come 2, 3, 4; after 2 comes 5; after 5 comes 1."""
    made = drafter(**options)
    for token, successors in {1: [2, 3, 4], 2: [5], 5: [1]}.items():
        made.matrix.successors[token, : len(successors)] = successors
    return made


def test_the_draft_walks_the_matrix_and_stops_where_nothing_is_known() -> None:
    drawn = nodes(taught(num_speculative_tokens=3).propose(context([0, 1]), ROOMY))
    paths = [()]
    for token, parent in drawn:
        paths.append((*paths[parent], token))
    assert sorted(paths[1:]) == [(2,), (2, 5), (2, 5, 1), (3,), (4,)]
    assert all(parent <= place for place, (_, parent) in enumerate(drawn))
    assert nodes(taught().propose(context([0, 9]), ROOMY)) == []


def test_rates_beyond_those_measured_fall() -> None:
    rates, known = np.array(measured_rates(9, 12)), np.array(measured_rates(9, 8))
    assert rates.shape == (9, 12) and np.all(np.diff(rates, axis=1) <= 0)
    assert np.allclose(rates[:, :8].sum(1), known.sum(1)) and rates.sum(1).max() < 1


def fed(made: RecyclingDrafter, steps: int) -> None:
    """The third successor of token 1 is always the right one."""
    for _ in range(steps):
        made.propose(context([0, 1]), ROOMY)
        made.extend(context([0, 1, 4], 1))
        made._steps += 1
        made.truncate([0], [0])
        made.matrix.successors[1] = [2, 3, 4]


def test_confidence_follows_what_the_text_really_did() -> None:
    made = taught()
    (before,) = made.propose(context([0, 1]), ROOMY)
    fed(made, 200)
    (after,) = made.propose(context([0, 1]), ROOMY)
    known, learned = ({one.tokens[node]: one.confidence[node] for node in one.children[0]} for one in (before, after))
    assert learned[4] > 0.8 > known[4]
    assert learned[2] < 0.1
    assert after.confidence[after.tokens.index(5)] == before.confidence[before.tokens.index(5)]


def test_an_adaptive_tree_learns_which_rank_is_right() -> None:
    fixed, adaptive = taught(nodes=1, adaptive_tree=False), taught(nodes=1)
    for made in (fixed, adaptive):
        for _ in range(300):
            for rank in range(3):
                made._shared.acceptance.learn(((False, True), rank), rank == 2)
    assert nodes(fixed.propose(context([0, 1]), ROOMY)) == [(2, 0)]
    assert nodes(adaptive.propose(context([0, 1]), ROOMY)) == [(4, 0)]


def test_successors_of_a_pair_are_drafted_before_those_of_its_last_token_alone() -> None:
    """The pairs of a scored tree are its edges, and the root behind the text's last token but one."""
    made, logits = taught(num_speculative_tokens=2), torch.zeros(1, 2, SIZE)
    logits[0, 0, [6, 7, 8]] = logits[0, 1, [8, 7, 6]] = torch.tensor([3.0, 2.0, 1.0])
    # Behind the text 0, 1 the target scored 1 and below it 2; then it went on with 4.
    made.observe(context([0, 1, 4], 1), [], scores_of(logits, [[1, 2]]))
    made.matrix.successors[1, :3] = [2, 3, 4]
    assert nodes(made.propose(context([0, 1]), Budget(nodes=[3], depth=[1]))) == [(6, 0), (7, 0), (8, 0)]
    assert nodes(made.propose(context([5, 1]), Budget(nodes=[3], depth=[1]))) == [(2, 0), (3, 0), (4, 0)]
    assert nodes(made.propose(context([1, 2]), Budget(nodes=[3], depth=[1]))) == [(8, 0), (7, 0), (6, 0)]


@given(st.lists(st.tuples(st.integers(0, 2**18), st.integers(0, 2**18)), min_size=1, max_size=50))
def test_a_pair_is_found_where_it_was_put_or_not_at_all(pairs: list[tuple[int, int]]) -> None:
    table, before, tokens = PairTable(1), [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    table.put(before, tokens, np.arange(len(pairs))[:, None])
    known = {pair: index for index, pair in enumerate(pairs)}
    found = {pair: table.get(*pair) for pair in pairs}
    assert all(one in (None, [known[pair]]) for pair, one in found.items())
    assert found[pairs[-1]] == [known[pairs[-1]]]


@pytest.mark.parametrize("options", [{"top_k": 13}, {"path": "/none/here"}])
def test_more_successors_than_tokens_and_a_folder_that_is_missing_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="recycling: "):
        drafter(**options)


def learned(path: Path | str, text: Sequence[int] = (1, 2), **options: Any) -> RecyclingDrafter:
    """A drafter that has read a text, and will keep what it learned there."""
    made = drafter(path=str(path), **options)
    made.extend(context(text, len(text)))
    return made


def test_what_was_learned_is_kept(tmp_path: Path) -> None:
    made = learned(tmp_path / "matrix", [1, 2, 3, 1, 4], tokenizer=tiny_tokenizer())
    made.matrix.save()
    again = drafter(path=str(tmp_path / "matrix"), tokenizer=tiny_tokenizer())
    assert again.matrix.successors.tolist() == made.matrix.successors.tolist()
    again.extend(context([1, 9], 2))
    assert again.matrix.successors[1].tolist() == [9, 4, 2]
    assert [file.name for file in tmp_path.iterdir()] == ["matrix"]


def test_the_file_is_written_at_the_end_of_a_row_and_at_the_end_of_the_drafter(tmp_path: Path) -> None:
    path = tmp_path / "matrix"
    made = learned(path)
    made.truncate([0], [0])
    assert not path.exists()  # too soon: writing must not cost a busy server anything
    made._steps = 256
    made.truncate([0], [1])
    assert not path.exists()
    made.truncate([0], [0])
    assert path.exists()
    path.unlink()
    made.extend(context([1, 3], 2))
    del made
    gc.collect()
    assert drafter(path=str(path)).matrix.successors[1].tolist() == [3, 2, -1]


def test_a_relative_path_is_that_of_the_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    made = learned("matrix")
    monkeypatch.chdir(tmp_path / "elsewhere")
    made.matrix.save()
    assert (tmp_path / "matrix").exists() and not list((tmp_path / "elsewhere").iterdir())


def test_a_file_that_cannot_be_written_costs_no_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    made = learned(folder / "matrix")
    folder.rmdir()
    folder.write_text("a file where the folder was")
    made._steps = 256
    with caplog.at_level(logging.WARNING):
        made.truncate([0], [0])
    assert "could not be kept" in caplog.text and "gone" in caplog.text and made.matrix.changed


def test_a_file_of_another_target_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    path, other = tmp_path / "matrix", tiny_tokenizer()
    other.add_tokens(["new"])
    learned(path, tokenizer=tiny_tokenizer()).matrix.save()
    for options, error, says in (
        ({"tokenizer": other}, VocabularyMismatchError, "name another file"),
        ({"size": 13}, VocabularyMismatchError, "13"),
        ({"top_k": 4}, ArgumentError, "holds 3 successors"),
    ):
        with pytest.raises(error, match=says):
            drafter(path=str(path), **options)
    good = path.read_bytes()
    for damage in (b"", b"\0" * 100, good[:-8]):
        path.write_bytes(damage)
        with pytest.raises(DataError, match="damaged"):
            drafter(path=str(path))
    path.unlink()
    wrong = learned(path)
    wrong.matrix.successors[1, 0] = SIZE
    wrong.matrix.save()
    with pytest.raises(DataError, match="outside"):
        drafter(path=str(path))


def test_the_default_size_follows_the_measured_cost_of_a_pass() -> None:
    """Where nodes are free there are as many as the paper has; where each costs half a pass there is one."""
    rates = measured_rates(6, 8)
    sizes = [count_paying(rates, lambda count, slope=slope: 10.0 + slope * count, 80) for slope in (0.0, 0.3, 1.0, 5.0)]
    assert sizes[0] == 80 and sizes[-1] == 1 and sizes == sorted(sizes, reverse=True)
    for slope, size in zip((0.3, 1.0), sizes[1:3], strict=True):
        speed = [tokens / (10.0 + slope * count) for count, tokens in enumerate(_worths(np.array(rates)))]
        assert size == speed.index(max(speed))


def _worths(rates: np.ndarray) -> list[float]:
    """Entry n: expected tokens of a pass with the n likeliest paths, one by one."""
    paths = {(): 1.0}
    for _ in range(len(rates)):
        paths |= {
            (*path, rank): alive * rates[len(path), rank]
            for path, alive in list(paths.items())
            if len(path) < len(rates)
            for rank in range(rates.shape[1] if len(path) < 2 else 3)
        }
    likely = sorted((alive for path, alive in paths.items() if path), reverse=True)
    return [1.0 + sum(likely[:count]) for count in range(81)]
