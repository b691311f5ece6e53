"""Prepared data comes back as it was written, or is refused: cut short, another version, another tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from damage import flipped
from forerun.errors import ArgumentError, DataError, VocabularyMismatchError
from forerun.manifests import MANIFEST
from forerun.training.data.prepare import prepare
from forerun.training.data.store import PreparedData
from training.data.conftest import CHAT, MARKED, PLAIN, byte_tokenizer, store, write_lines

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


def test_another_version_and_other_directories_are_refused(tmp_path: Path) -> None:
    store(tmp_path / "data", DOCUMENTS)
    path = tmp_path / "data" / MANIFEST
    manifest = json.loads(path.read_text())
    for content, message in (
        (json.dumps(manifest | {"version": 99}), "version 99"),
        (json.dumps(manifest | {"format": "x"}), "does not describe"),
        (json.dumps(manifest | {"version": 1}), "older forerun wrote it, without.*forerun data prepare"),
        (json.dumps({key: manifest[key] for key in ("format", "version")}), "has changed since it was written"),
        ("{", "no JSON"),
    ):
        path.write_text(content)
        with pytest.raises(DataError, match=message):
            PreparedData(tmp_path / "data")
    with pytest.raises(DataError, match="is not prepared data"):
        PreparedData(tmp_path)


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
        "skipped": 1, "dropped": 0, "cut": 0, "unwritten": 0,
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
