"""Windows: every document whole and once, the same for any number of processes, a new order every epoch."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from forerun.errors import ArgumentError, DataError
from forerun.training.data import store as prepared
from forerun.training.data.store import PackedWindows, PreparedData, Segment
from training.data.conftest import random_documents, store

LENGTH = 16


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    return store(tmp_path_factory.mktemp("packing") / "data", random_documents(0, 60, 40))


def windows(data: PreparedData, *, rows: int = 2, seed: int = 3, **more: int) -> PackedWindows:
    return PackedWindows(data, length=LENGTH, rows=rows, seed=seed, **more)


def one_epoch(packed: PackedWindows, epoch: int = 0) -> list[tuple[int, int, int]]:
    steps = packed.steps_per_epoch()
    segments = [segment for step in range(epoch * steps, (epoch + 1) * steps) for segment in packed.segments(step)]
    return [(segment.document, segment.offset, segment.length) for segment in segments]


def test_a_batch_is_what_its_pieces_say(data: PreparedData) -> None:
    packed = windows(data)
    for step in range(packed.steps_per_epoch()):
        batch = packed.batch(step)
        used = torch.zeros_like(batch.loss_mask)
        numbers = [0, 0]
        for segment in packed.segments(step):
            tokens, mask = data.document(segment.document)
            place = (segment.row, slice(segment.column, segment.column + segment.length))
            source = slice(segment.offset, segment.offset + segment.length)
            assert batch.tokens[place].tolist() == tokens[source].tolist()
            assert batch.loss_mask[place].tolist() == [False, *mask[source].astype(bool).tolist()[1:]]
            assert batch.positions[place].tolist() == list(range(segment.length))
            assert set(batch.documents[place].tolist()) == {numbers[segment.row]}
            assert not used[place].any()
            used[place] = True
            numbers[segment.row] += 1
        assert torch.equal(used, batch.documents >= 0) and not batch.loss_mask[~used].any()
        assert batch.tokens.dtype == batch.documents.dtype == batch.positions.dtype == torch.int64


def test_every_piece_is_seen_in_every_epoch_and_long_documents_are_cut_in_order(data: PreparedData) -> None:
    packed = windows(data, rows=1)
    expected = Counter(
        (document, offset, min(LENGTH, tokens - offset))
        for document, tokens in enumerate(data.lengths.tolist())
        for offset in range(0, tokens, LENGTH)
        if data.document(document)[1][offset + 1 : offset + LENGTH].any()
    )
    assert any(offset for _, offset, _ in expected)
    assert Counter(one_epoch(packed)) == Counter(one_epoch(packed, 1)) == expected
    assert one_epoch(packed) != one_epoch(packed, 1)


@pytest.mark.parametrize("world", [2, 3])
def test_any_number_of_processes_sees_the_same_rows(data: PreparedData, world: int) -> None:
    alone, shared = windows(data, rows=2 * world), windows(data, rows=2)
    assert alone.steps_per_epoch() == shared.steps_per_epoch(world)
    for step in (0, 1, alone.steps_per_epoch() - 1, alone.steps_per_epoch() + 1):
        whole = alone.batch(step)
        parts = [shared.batch(step, rank, world) for rank in range(world)]
        for name in ("tokens", "loss_mask", "documents", "positions"):
            assert torch.equal(getattr(whole, name), torch.cat([getattr(part, name) for part in parts]))


def test_a_batch_depends_on_the_step_alone(data: PreparedData) -> None:
    forwards, jumping = windows(data), windows(data)
    last = 2 * forwards.steps_per_epoch() + 1
    seen = [forwards.batch(step).tokens for step in range(last + 1)]
    for step in (last, 0, 5, last - 3):
        assert torch.equal(jumping.batch(step).tokens, seen[step])
    assert not torch.equal(windows(data, seed=4).batch(0).tokens, seen[0])


def test_fewer_windows_than_a_batch_are_repeated(tmp_path: Path) -> None:
    data = store(tmp_path / "data", [([1, 2, 3], [False, True, True])])
    packed = windows(data, rows=3)
    assert packed.steps_per_epoch() == 1 and len(packed) == 1
    assert packed.batch(0).tokens[:, :4].tolist() == [[1, 2, 3, 0]] * 3
    assert packed.segments(0)[2] == Segment(row=2, column=0, document=0, offset=0, length=3)


def test_windows_are_well_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = store(tmp_path / "data", random_documents(1, 400, LENGTH))
    assert data.num_tokens > 0.97 * len(windows(data)) * LENGTH
    monkeypatch.setattr(prepared, "BUCKET", 1)
    alone = windows(data)
    assert len(alone) == 400


def test_min_tokens_leaves_out_what_teaches_little(tmp_path: Path) -> None:
    documents = [([1, 2, 3], [False, False, True]), ([4, 5, 6], [True, True, True])]
    data = store(tmp_path / "data", documents)
    assert {segment.document for segment in windows(data, min_tokens=2).segments(0)} == {1}
    with pytest.raises(DataError, match="min_tokens"):
        windows(data, min_tokens=3)


def test_arguments_out_of_range_are_refused(data: PreparedData) -> None:
    with pytest.raises(ArgumentError, match="rows >= 1"):
        windows(data, rows=0)
    with pytest.raises(ArgumentError, match="rank"):
        windows(data).batch(0, 2, 2)
    with pytest.raises(ArgumentError, match="step"):
        windows(data).batch(-1)
