"""Prepared data comes back as written or is refused; windows hold every document once; the draft vocabulary."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from damage import flipped
from forerun.errors import ArgumentError, DataError, VocabularyMismatchError
from forerun.training.data import store as prepared
from forerun.training.data.prepare import prepare
from forerun.training.data.store import (
    DraftCoverage,
    PackedWindows,
    PreparedData,
    Segment,
    coverage,
    draft_coverage,
    draft_vocabulary,
    token_counts,
)
from training.data.conftest import CHAT, MARKED, PLAIN, byte_tokenizer, random_documents, store, write_lines

DOCUMENTS = [([1, 2, 3], [False, True, True]), ([4, 5], [False, True])]


def test_documents_come_back_as_views_of_what_was_written(tmp_path: Path) -> None:
    data = store(tmp_path / "data", DOCUMENTS)
    assert (len(data), data.num_tokens, data.lengths.tolist()) == (2, 5, [3, 2])
    for number, (tokens, mask) in enumerate(DOCUMENTS):
        found, counts = data.document(number)
        assert found.tolist() == tokens and counts.astype(bool).tolist() == mask
        assert (found.dtype, counts.dtype) == (np.int32, np.uint8) and found.base is not None
    with pytest.raises(IndexError):
        data.document(2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data"]


def test_the_hash_names_the_content(tmp_path: Path) -> None:
    same = store(tmp_path / "a", DOCUMENTS), store(tmp_path / "b", DOCUMENTS)
    other = store(tmp_path / "c", [([1, 2, 3], [False, True, False]), DOCUMENTS[1]])
    assert same[0].hash == same[1].hash != other.hash and len(other.hash) == 64


def test_a_changed_byte_anywhere_is_found_when_the_data_are_opened(tmp_path: Path) -> None:
    store(tmp_path / "data", DOCUMENTS)
    tried = 0
    for path in flipped(tmp_path / "data"):
        with pytest.raises(DataError, match=rf"{path.name} (has changed|is no JSON|does not|has format)"):
            PreparedData(tmp_path / "data")
        tried += 1
    assert tried >= 200
    PreparedData(tmp_path / "data")


@pytest.mark.parametrize("name", ["tokens.bin", "mask.bin", "offsets.bin"])
def test_a_file_cut_short_or_missing_is_refused_by_name(tmp_path: Path, name: str) -> None:
    store(tmp_path / "data", DOCUMENTS)
    path = tmp_path / "data" / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=name):
        PreparedData(tmp_path / "data")
    path.unlink()
    with pytest.raises(DataError, match=f"{name} is missing"):
        PreparedData(tmp_path / "data")


def test_another_tokenizer_or_template_is_refused_by_name(tmp_path: Path) -> None:
    own = byte_tokenizer(PLAIN)
    chat = write_lines(tmp_path / "chat.jsonl", [{"messages": CHAT}])
    text = write_lines(tmp_path / "text.jsonl", [{"text": "no template needed"}])
    prepare([chat], own, tmp_path / "chat", name="org/target")
    prepare([text], own, tmp_path / "text", name="org/target")
    assert len(PreparedData(tmp_path / "chat", tokenizer=own)) == 1
    with pytest.raises(VocabularyMismatchError, match=r"org/target.*not\s+that of 'unnamed'"):
        PreparedData(tmp_path / "chat", tokenizer=byte_tokenizer(PLAIN, extra=["xy"]))
    with pytest.raises(VocabularyMismatchError, match="chat template"):
        PreparedData(tmp_path / "chat", tokenizer=byte_tokenizer(MARKED))
    assert len(PreparedData(tmp_path / "text", tokenizer=byte_tokenizer(MARKED))) == 1


def test_nothing_is_overwritten_and_a_failure_leaves_nothing(tmp_path: Path) -> None:
    store(tmp_path / "data", DOCUMENTS)
    with pytest.raises(ArgumentError, match="exists"):
        store(tmp_path / "data", DOCUMENTS)

    def breaking() -> Iterator[tuple[list[int], list[bool]]]:
        yield DOCUMENTS[0]
        raise RuntimeError

    with pytest.raises(RuntimeError):
        store(tmp_path / "broken", breaking())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data"]


def test_the_manifest_says_what_went_in(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"messages": CHAT}, {"text": "abc"}, {"wrong": 1}])
    done = prepare([path], byte_tokenizer(), tmp_path / "data", skip_bad=True)
    manifest = done.data.manifest
    assert manifest["counts"] == {
        "documents": 2, "tokens": done.data.num_tokens, "counted_tokens": 9, "records": 2, "conversations": 1,
        "skipped": 1, "dropped": 0, "cut": 0, "unwritten": 0, "empty": 0,
    }  # fmt: skip
    assert manifest["sources"][0]["records"] == 2 and len(manifest["sources"][0]["sha256"]) == 64
    assert len(done.complaints) == 1 and "wrong" in done.complaints[0]


def test_long_documents_are_cut_or_split_and_dropped_without_a_counted_token(tmp_path: Path) -> None:
    entries = [{"text": "abcdefgh", "prompt_tokens": 5}, {"text": "abc"}]
    path = write_lines(tmp_path / "a.jsonl", entries)
    tokenizer = byte_tokenizer()
    cut = prepare([path], tokenizer, tmp_path / "cut", max_length=4).data
    assert [tokenizer.decode(cut.document(i)[0].tolist()) for i in range(len(cut))] == ["abc"]
    assert (cut.manifest["counts"]["cut"], cut.manifest["counts"]["dropped"]) == (1, 1)
    split = prepare([path], tokenizer, tmp_path / "split", max_length=4, split_long=True).data
    assert [tokenizer.decode(split.document(i)[0].tolist()) for i in range(len(split))] == ["efgh", "abc"]
    assert split.document(0)[1].tolist() == [0, 1, 1, 1]
    path = write_lines(tmp_path / "b.jsonl", [{"text": "all prompt", "prompt_tokens": 10}, {"text": "abc"}])
    assert prepare([path], tokenizer, tmp_path / "unanswered").data.manifest["counts"]["dropped"] == 1


def test_errors_name_the_place(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"messages": CHAT}, {"messages": CHAT[:2]}])
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: no assistant turn"):
        prepare([path], byte_tokenizer(), tmp_path / "data")
    only = write_lines(tmp_path / "b.jsonl", [{"messages": CHAT[:2]}])
    with pytest.raises(DataError, match=r"nothing to learn.*no assistant turn"):
        prepare([only], byte_tokenizer(), tmp_path / "data", skip_bad=True)
    with pytest.raises(DataError, match="named twice"):
        prepare([only, only], byte_tokenizer(), tmp_path / "data")
    with pytest.raises(ArgumentError, match="max_length"):
        prepare([path], byte_tokenizer(), tmp_path / "short", max_length=1)
    assert not (tmp_path / "data").exists()


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
    [([0, 5, 1, 9], 2, [1, 3]), ([2, 7, 2, 2], 2, [0, 1]), ([0, 0, 0, 4, 0], 3, [0, 1, 3]), ([1, 1], 2, [0, 1])],
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


def test_coverage_is_also_told_of_documents_that_the_vocabulary_was_not_chosen_from(tmp_path: Path) -> None:
    documents = [([number, number], [False, True]) for number in (1, 2, 3, 4, 9)]
    data, alone = store(tmp_path / "data", documents), store(tmp_path / "one", documents[:1])
    assert draft_coverage(data, 100, [5]) == [DraftCoverage(size=5, coverage=1.0, held_out_coverage=0.0)]
    assert draft_coverage(alone, 100, [5]) == [DraftCoverage(size=5, coverage=1.0, held_out_coverage=None)]
