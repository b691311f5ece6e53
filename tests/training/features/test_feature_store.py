"""The store gives back what went in, resumes, and refuses what does not belong together."""

import errno
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from damage import flipped
from forerun.errors import ArgumentError, CheckpointError, DataError, NumericError
from forerun.losses.objective import FeatureBatch, TokenBatch
from forerun.model.load import read_header
from forerun.training.features import store as stores
from forerun.training.features.online import OnlineFeatures
from forerun.training.features.store import (
    FeatureManifest,
    FeatureStore,
    FeatureWriter,
    check_lengths,
    check_room,
    checkpoint_directory,
    describe,
    extract,
    passes,
    target_hash,
)
from forerun.training.run import RunBatches
from forerun.types import LAST_HIDDEN
from model.families import make
from training.features.conftest import LENGTHS, Documents, Segment, Windows, manifest_of

SHARD = 20 * 64 * 4 * 3
"""Twenty tokens of float32."""


def states_of(document: int, length: int, dtype: torch.dtype = torch.float32) -> dict[int, Tensor]:
    generator = torch.Generator().manual_seed(document)
    sizes = {1: 1.0, 3: 300.0, LAST_HIDDEN: 5.0}
    return {s: (torch.randn(length, 64, generator=generator) * size).to(dtype) for s, size in sizes.items()}


def fill(directory: Path, documents: Mapping[int, Mapping[int, Tensor]], manifest: FeatureManifest) -> None:
    with FeatureWriter(directory, manifest, shard_bytes=SHARD) as writer:
        for document, states in documents.items():
            if document not in writer.done:
                writer.append(document, states)


def everything(dtype: torch.dtype = torch.float32) -> dict[int, dict[int, Tensor]]:
    """Not in the order of the documents."""
    return {document: states_of(document, LENGTHS[document], dtype) for document in (4, 1, 0, 6, 5, 2, 3)}


@pytest.fixture
def store(tmp_path: Path) -> FeatureStore:
    fill(tmp_path, everything(), manifest_of(Documents()))
    return FeatureStore(tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_goes_in_comes_out_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    manifest = manifest_of(Documents(), dtype=dtype)
    given = everything(getattr(torch, dtype))
    fill(tmp_path, given, manifest)
    store = FeatureStore(tmp_path, manifest)
    assert len(store) == 7 and len(list(tmp_path.glob("shard-*.bin"))) > 1
    assert sum(path.stat().st_size for path in tmp_path.glob("shard-*.bin")) == manifest.tokens * manifest.record_bytes
    for document, states in given.items():
        assert len(store.read(document)[LAST_HIDDEN]) == LENGTHS[document]
        for boundary, values in store.read(document).items():
            assert torch.equal(values, states[boundary])
    part = store.read(4, 5, 7)
    assert all(torch.equal(part[boundary], given[4][boundary][5:12]) for boundary in part)


def test_float8_keeps_three_bits_of_every_state_and_takes_half_the_bytes(tmp_path: Path) -> None:
    manifest = manifest_of(Documents(), dtype="float8_e4m3fn")
    given = everything() | {1: {boundary: torch.zeros(3, 64) for boundary in (1, 3, LAST_HIDDEN)}}
    fill(tmp_path, given, manifest)
    store = FeatureStore(tmp_path)
    assert (
        sum(path.stat().st_size for path in tmp_path.glob("shard-*.bin"))
        == manifest.tokens * manifest.record_bytes
        == manifest.tokens * 3 * (64 + 4)
    )
    assert store.read(0)[1].dtype == torch.bfloat16
    for document, states in given.items():
        for boundary, values in store.read(document).items():
            step = states[boundary].abs().amax(-1, keepdim=True) / 448 * 2**-10
            rounding = 2**-4 + 2**-8  # of float8, and of the bfloat16 that is read
            assert ((values.float() - states[boundary]).abs() <= states[boundary].abs() * rounding + step).all()


def test_a_killed_run_goes_on_after_its_last_finished_shard(tmp_path: Path) -> None:
    data, given = Documents(), everything()
    killed = FeatureWriter(tmp_path / "killed", manifest_of(data), shard_bytes=SHARD)
    for document in (4, 1, 0):
        killed.append(document, given[document])
    assert len(list(killed.directory.glob("shard-*.json"))) == 1 and len(killed.done) == 3
    # What the buffer held may have reached the disk or not; here it has.
    killed._file.close()
    assert list((tmp_path / "killed").glob("*.partial"))
    with pytest.raises(DataError, match="unfinished: it holds 1 of 7 documents"):
        FeatureStore(tmp_path / "killed")
    writer = FeatureWriter(tmp_path / "killed", manifest_of(data), shard_bytes=SHARD)
    assert writer.done == {4} and writer.tokens == 24 and not list((tmp_path / "killed").glob("*.partial"))
    fill(tmp_path / "killed", given, manifest_of(data))
    fill(tmp_path / "whole", given, manifest_of(data))
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "killed" / path.name).read_bytes() == path.read_bytes()


def test_ctrl_c_keeps_every_whole_document(tmp_path: Path) -> None:
    data, given = Documents(), everything()
    with pytest.raises(KeyboardInterrupt), FeatureWriter(tmp_path, manifest_of(data)) as writer:
        for document in (4, 1, 0):
            writer.append(document, given[document])
        writer._file.write(b"half a document")
        raise KeyboardInterrupt
    again = FeatureWriter(tmp_path, manifest_of(data))
    assert again.done == {4, 1, 0} and again.tokens == 24 + 3 + 11


def test_a_full_disk_loses_nothing_that_was_finished(tmp_path: Path) -> None:
    data, given = Documents(), everything()

    class Full:
        def write(self, _data: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self) -> None:
            pass

    def run() -> None:
        with FeatureWriter(tmp_path, manifest_of(data), shard_bytes=SHARD) as writer:
            writer.append(4, given[4])
            writer._file = Full()
            writer.append(1, given[1])

    with pytest.raises(DataError, match=r"disk is full: shard 1.*The 1 finished shards are safe"):
        run()
    fill(tmp_path, given, manifest_of(data))
    assert torch.equal(FeatureStore(tmp_path).read(1)[3], given[1][3])


CHANGED: dict[str, Any] = {
    **{"target_hash": "9" * 8, "boundaries": (2, 3), "hidden_size": 32, "tokenizer_hash": "8" * 8},
    **{"template_hash": "7" * 8, "data_hash": "6" * 8, "documents": 8, "tokens": 99},
}


@pytest.mark.parametrize("field", CHANGED)
def test_features_of_something_else_are_refused_with_both_values(store: FeatureStore, field: str) -> None:
    wanted = manifest_of(Documents(), **{field: CHANGED[field]})

    def shown(value: Any) -> str:
        return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)

    stored = shown(getattr(store.manifest, field))
    expected = rf"{field}: stored {stored}, wanted {shown(CHANGED[field])}"
    with pytest.raises(DataError, match=expected):
        FeatureStore(store.directory, wanted)
    with pytest.raises(DataError, match=expected):
        FeatureWriter(store.directory, wanted)


def test_another_name_dtype_or_source_may_be_read_but_not_resumed(store: FeatureStore) -> None:
    FeatureStore(store.directory, manifest_of(Documents(), target="moved", dtype="bfloat16", source="vllm"))
    FeatureWriter(store.directory, manifest_of(Documents(), target="moved"))
    for change in ({"dtype": "bfloat16"}, {"source": "vllm"}):
        with pytest.raises(DataError, match=next(iter(change))):
            FeatureWriter(store.directory, manifest_of(Documents(), **change))


def test_a_changed_byte_anywhere_is_found_before_anybody_trains_on_it(store: FeatureStore) -> None:
    tried = 0
    for path in flipped(store.directory):
        named = rf"{path.name} (has changed|is no JSON|does not|has format)"
        with pytest.raises(DataError, match=named):
            everywhere(FeatureStore(store.directory, manifest_of(Documents())))
        tried += 1
    assert tried > 900
    everywhere(FeatureStore(store.directory))


def everywhere(store: FeatureStore) -> None:
    """Read all there is."""
    for document in range(len(LENGTHS)):
        store.read(document)


def test_a_document_is_compared_when_it_is_read_and_a_deleted_shard_made_anew(store: FeatureStore) -> None:
    path, given = store.directory / "shard-00001.bin", everything()
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    opened = FeatureStore(store.directory)
    hurt = json.loads(path.with_suffix(".json").read_text())["documents"][-1]
    for document in sorted(set(given) - {hurt}):
        opened.read(document)
    with pytest.raises(DataError, match=rf"document {hurt} in .*shard-00001\.bin has changed.*delete shard-00001\.bin"):
        opened.read(hurt, 0, 1)
    path.unlink(), path.with_suffix(".json").unlink()
    with pytest.raises(DataError, match=r"unfinished: it holds \d of 7 documents"):
        FeatureStore(store.directory)
    fill(store.directory, given, store.manifest)
    assert path.read_bytes() == good
    assert all(torch.equal(FeatureStore(store.directory).read(d)[3], given[d][3]) for d in given)


def test_a_shard_cut_short_or_missing_is_refused_by_name_and_size(store: FeatureStore) -> None:
    path = store.directory / "shard-00001.bin"
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size - 1)
    with pytest.raises(DataError, match=rf"shard-00001\.bin is cut short.*: {size - 1} bytes, expected {size}"):
        FeatureStore(store.directory)
    path.unlink()
    with pytest.raises(DataError, match=rf"shard-00001\.bin.*: 0 bytes, expected {size}"):
        FeatureStore(store.directory)
    path.with_suffix(".json").unlink()
    with pytest.raises(DataError, match=r"unfinished: it holds \d of 7 documents"):
        FeatureStore(store.directory)


def test_a_strange_directory_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(DataError, match="not empty"):
        FeatureWriter(tmp_path, manifest_of(Documents()))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_start_that_stored_nothing_may_be_made_anew_with_other_boundaries(tmp_path: Path) -> None:
    FeatureWriter(tmp_path, manifest_of(Documents()))
    FeatureWriter(tmp_path, manifest_of(Documents(), boundaries=(2, 3)))
    assert FeatureManifest.read(tmp_path).boundaries == (2, 3)


def test_states_that_do_not_fit_or_are_no_numbers_are_refused(tmp_path: Path) -> None:
    good = states_of(0, 11)
    with FeatureWriter(tmp_path, manifest_of(Documents(), dtype="float16")) as writer:
        with pytest.raises(DataError, match="document 0, boundary 3: expected states"):
            writer.append(0, {1: good[1], LAST_HIDDEN: good[LAST_HIDDEN]})
        with pytest.raises(DataError, match=r"boundary 1: expected states \(11, 64\), got \(11, 63\)"):
            writer.append(0, {LAST_HIDDEN: good[LAST_HIDDEN], 1: good[1][:, 1:], 3: good[3]})
        for value in (float("nan"), 1e5):
            odd = good[3].clone()
            odd[2, 2] = value
            with pytest.raises(NumericError, match="document 0, boundary 3: NaN or infinite"):
                writer.append(0, {**good, 3: odd})
        writer.append(0, good)
        with pytest.raises(DataError, match=r"document 0 is in .* already"):
            writer.append(0, good)
    assert writer.done == {0}


def test_reading_beyond_a_document_or_another_one_is_refused(store: FeatureStore) -> None:
    with pytest.raises(DataError, match=r"document 1 has 3 tokens of features, tokens 1\.\.4"):
        store.read(1, 1, 3)
    with pytest.raises(DataError, match="holds no document 7"):
        store.read(7)


def test_the_size_is_known_beforehand_and_compared_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = {"hidden_size": 4096, "boundaries": (1, 2, 3)}
    assert manifest_of(Documents(), dtype="bfloat16", **wide).record_bytes == 32 * 1024
    assert manifest_of(Documents(), dtype="float8_e4m3fn", **wide).record_bytes == 16 * 1024 + 16
    usage = shutil.disk_usage(tmp_path)._replace(free=5 * 1024)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert check_room(tmp_path / "not" / "yet", 5 * 1024) == 5 * 1024
    with pytest.raises(DataError, match=r"still need 2\.0 MiB, but .* has 5\.0 KiB free"):
        check_room(tmp_path, 2 << 20)
    with pytest.raises(ArgumentError, match="not 'int4'"):
        stores.parse_dtype("int4")


def test_passes_cover_every_missing_document_once_and_stay_in_their_budget() -> None:
    lengths = [5, 90, 7, 40, 41, 3, 200]
    groups = list(passes(lengths, {2}, 100))
    assert sorted(index for group in groups for index in group) == [0, 1, 3, 4, 5, 6]
    assert all(len(group) == 1 or len(group) * max(lengths[i] for i in group) <= 100 for group in groups)
    assert len(groups) < 6
    with pytest.raises(DataError, match=r"document 6 has 200 tokens, but the target takes 1\.\.128"):
        check_lengths(lengths, 128)


def test_stored_features_of_packed_windows_equal_those_made_online(tmp_path: Path) -> None:
    data, online = Documents(), OnlineFeatures(make("gemma2"), (1, 3))
    manifest = manifest_of(data)
    counted: list[int] = []
    with FeatureWriter(tmp_path, manifest, shard_bytes=SHARD) as writer:
        extract(online.documents, data, writer, batch_tokens=40, progress=lambda *, advance: counted.append(advance))
    assert sum(counted) == manifest.tokens
    segments = [
        Segment(row=0, column=0, document=2, offset=0, length=17),
        Segment(row=0, column=17, document=1, offset=0, length=3),
        Segment(row=1, column=0, document=4, offset=0, length=20),
        Segment(row=1, column=20, document=5, offset=0, length=1),
    ]
    windows = Windows(data, segments, (2, 22))
    offline = FeatureStore(tmp_path, manifest)
    stored, made = offline.features(windows, 3), online.features(windows.batch(3, 0, 1))
    real = stored.batch.documents >= 0
    assert set(stored.features) == {*online.boundaries, LAST_HIDDEN} == set(made.features)
    for boundary, states in stored.features.items():
        torch.testing.assert_close(states[real], made.features[boundary][real], atol=2e-4, rtol=2e-4)
        assert not states[~real].any()


def test_a_piece_within_a_document_gets_the_states_of_the_whole_document(store: FeatureStore) -> None:
    data = Documents()
    windows = Windows(data, [Segment(row=0, column=2, document=4, offset=10, length=6)], (1, 9))
    found = store.features(windows, 0).features
    assert torch.equal(found[3][0, 2:8], states_of(4, 24)[3][10:16])
    longer = Windows(Documents((11, 4)), [Segment(row=0, column=0, document=1, offset=0, length=4)], (1, 9))
    with pytest.raises(DataError, match="document 1 has 3 tokens"):
        store.features(longer, 0)


def test_the_targets_hash_tells_weights_and_configuration_apart_but_not_places(tmp_path: Path) -> None:
    model = make("llama")
    model.save_pretrained(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    first = target_hash(tmp_path / "a")
    assert target_hash(tmp_path / "b") == first
    path = tmp_path / "b" / "model.safetensors"
    header = read_header(path)
    assert len(header) > 5
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.01)
    model.save_pretrained(tmp_path / "c")
    config = tmp_path / "b" / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    assert len({first, target_hash(tmp_path / "b"), target_hash(tmp_path / "c")}) == 3


def test_the_description_of_a_run_names_what_it_depends_on(tmp_path: Path) -> None:
    from engine.conftest import tiny_tokenizer

    make("llama").save_pretrained(tmp_path)
    tokenizer = tiny_tokenizer()
    data = Documents()
    plain = describe(tmp_path, "a/b", tokenizer, data, (1, 3), hidden_size=64, dtype="float8")
    assert (plain.target, plain.dtype, plain.documents, plain.tokens) == ("a/b", "float8_e4m3fn", 7, sum(LENGTHS))
    directory = checkpoint_directory(tmp_path)
    wanted = describe(directory, "moved", tokenizer, data, (1, 3, LAST_HIDDEN), hidden_size=64)
    plain.refuse_other(wanted, tmp_path, reading=True)
    other = describe(directory, "moved", tokenizer, data, (3, 1), hidden_size=64)
    with pytest.raises(DataError, match=r"boundaries: stored 1,3, wanted 3,1"):
        plain.refuse_other(other, tmp_path, reading=True)
    with pytest.raises(CheckpointError, match="there is no directory"):
        checkpoint_directory(tmp_path / "gone")
    tokenizer.chat_template = "{{ other }}"
    other = describe(tmp_path, "a/b", tokenizer, Documents((3, 4)), (1, 3), hidden_size=64)
    assert other.template_hash != plain.template_hash and other.tokenizer_hash == plain.tokenizer_hash
    assert other.data_hash != plain.data_hash
    with pytest.raises(DataError, match="no documents"):
        describe(tmp_path, "a/b", tokenizer, Documents(()), (1,), hidden_size=64)


def test_a_hub_id_is_fetched_without_weights_in_other_layouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    wanted = ["config.json", "model-00001-of-00002.safetensors", "tokenizer.model", "chat_template.jinja"]
    others = ["original/model.safetensors", "metal/model.safetensors", "consolidated.safetensors", "model.bin"]

    def download(name: str, **patterns: Any) -> str:
        assert sorted(filter_repo_objects(wanted + others, **patterns)) == sorted(wanted)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr("forerun.model.checks.check_on_hub", lambda *_, **__: None)
    assert checkpoint_directory("owner/target") == tmp_path


def test_the_next_batch_is_read_while_this_one_trains(store: FeatureStore) -> None:
    """By the step that follows; whatever is asked for instead is read then, and damage is told of when it is."""
    windows = cast(Any, SimpleNamespace(steps_per_epoch=lambda world: 10))
    batches, asked, features = RunBatches(windows, store, None, device=torch.device("cpu"), world=1), [], store.features
    empty = torch.zeros(1, 1, dtype=torch.int64)
    tokens = TokenBatch(tokens=empty, loss_mask=empty.bool(), documents=empty, positions=empty)

    def read(windows: object, step: int, rank: int, world: int) -> FeatureBatch:
        asked.append(step)
        if step == 4:
            raise DataError("a flipped byte")
        return FeatureBatch(batch=tokens, features={0: torch.full((1, 1, 2), float(step))})

    store.features = read
    for step in (0, 1, 3):
        found = batches.batch(step, 0, 1)
        assert found.number == step and float(found.features[0][0, 0, 0]) == step
        batches._reader.submit(int).result()  # all that was begun is done
    assert asked == [0, 1, 2, 3, 4]
    with pytest.raises(DataError, match="a flipped byte"):
        batches.batch(4, 0, 1)
    batches.close()
    store.features = features
