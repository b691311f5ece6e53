"""Files and folders that are whole or not there."""

import subprocess
import sys
from pathlib import Path

import pytest

from forerun.errors import DataError
from forerun.writing import ManifestKind, alone, remove_folder, replace_file, replace_folder, tidy


def test_a_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file"
    with replace_file(path) as fresh:
        fresh.write_text("new")
        assert not path.exists()
    assert path.read_text() == "new" and list(path.parent.iterdir()) == [path]


def test_what_was_there_outlives_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(OSError, match="full"), replace_file(path) as fresh:
        fresh.write_text("half")
        raise OSError("the disk is full")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_folder_takes_the_place_of_the_former_one(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "one"
    for text in ("former", "new"):
        with replace_folder(folder) as fresh:
            (fresh / text).write_text(text)
        assert [path.name for path in folder.iterdir()] == [text]
    assert list(folder.parent.iterdir()) == [folder]


def test_every_file_of_a_folder_is_durable_before_it_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    durable = set[str]()
    monkeypatch.setattr("forerun.writing._make_durable", lambda path: durable.add(path.name))
    with replace_folder(tmp_path / "one") as fresh:
        (fresh / "inner").mkdir()
        (fresh / "inner" / "file").write_text("deep")
    assert durable >= {"inner", "file"}


def test_a_former_folder_outlives_a_failure(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    with replace_folder(folder) as fresh:
        (fresh / "file").write_text("former")
    with pytest.raises(OSError, match="full"), replace_folder(folder) as fresh:
        (fresh / "file").write_text("half")
        raise OSError("the disk is full")
    assert (folder / "file").read_text() == "former" and list(tmp_path.iterdir()) == [folder]


def test_a_folder_that_cannot_be_renamed_leaves_the_former_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, rename = tmp_path / "one", Path.rename
    folder.mkdir()
    (folder / "file").write_text("former")

    def refused(self: Path, to: Path) -> Path:
        if self.name.endswith(".partial"):
            raise OSError("no permission")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(OSError, match="permission"), replace_folder(folder) as fresh:
        (fresh / "file").write_text("new")
    assert (folder / "file").read_text() == "former" and list(tmp_path.iterdir()) == [folder]


def test_a_folder_is_removed_at_once(tmp_path: Path) -> None:
    (tmp_path / "one" / "two").mkdir(parents=True)
    remove_folder(tmp_path / "one")
    assert not list(tmp_path.iterdir())


def test_what_killed_processes_left_is_put_right(tmp_path: Path) -> None:
    """One was killed after the former folder was moved aside, before the new one took its place."""
    (tmp_path / ".best.77.old").mkdir()
    (tmp_path / ".best.77.old" / "weights").write_bytes(b"former")
    (tmp_path / ".other.5.old").mkdir()
    for name in ("other", ".best.77.partial", ".checkpoint-1.8.gone", ".kept", "best.partial"):
        (tmp_path / name).mkdir()
    (tmp_path / ".file.77.partial").write_bytes(b"half")
    (tmp_path / ".latest.77.partial").symlink_to("other")
    tidy(tmp_path)
    assert (tmp_path / "best" / "weights").read_bytes() == b"former"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".kept", "best", "best.partial", "other"]
    tidy(tmp_path / "nowhere")


def test_several_may_write_the_same_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of one process, and containers that share a volume: each is process 1 of its own."""
    monkeypatch.setattr("os.getpid", lambda: 1)
    with replace_file(tmp_path / "file") as first:
        with replace_file(tmp_path / "file") as second:
            first.write_text("first")
            second.write_text("second")
        assert (tmp_path / "file").read_text() == "second"
    assert (tmp_path / "file").read_text() == "first"
    with replace_folder(tmp_path / "one") as first:
        (first / "name").write_text("first")
        with replace_folder(tmp_path / "one") as second:
            (second / "name").write_text("second")
        assert (tmp_path / "one" / "name").read_text() == "second"
    assert (tmp_path / "one" / "name").read_text() == "first"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "one"]


def test_one_is_alone_in_a_folder_until_it_ends(tmp_path: Path) -> None:
    """Within a process, and between processes, whose end by a signal counts."""
    with alone(tmp_path / "run") as first, alone(tmp_path / "run") as second, alone(tmp_path / "other") as third:
        assert (first, second, third) == (True, False, True)
    code = (
        "import pathlib, sys, time; from forerun.writing import alone\n"
        "with alone(pathlib.Path(sys.argv[1])) as found: print(found, flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "True\n"
        with alone(tmp_path / "run") as found:
            assert not found
        process.kill()
        process.wait()
        with alone(tmp_path / "run") as found:
            assert found
    (tmp_path / "file").write_text("")
    with alone(tmp_path / "file") as found:
        assert found, "what cannot be written is told of by whoever writes"


KIND = ManifestKind(format="boxes", version=3, what="a box", remedy="make it anew")
"""Of directories as datastores, prepared data and features are, whose own tests change every byte of them."""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"format": "x", "version": 3}', "does not describe a box"),
        ('{"format": "boxes", "version": 99}', "format version 99, this forerun reads 3: another version of forer"),
        ('{"format": "boxes", "version": 3, "holds": 1}', "has changed since it was written"),
        ('{"format": "boxes", "version": 3, "holds": 1, "checksum": null}', "has changed since it was written"),
        ("{", "is no JSON"),
        ("[]", "holds no JSON object"),
        (None, "is not a box, it has no manifest.json"),
    ],
)
def test_a_manifest_of_something_else_is_refused(content: str | None, message: str, tmp_path: Path) -> None:
    KIND.write(tmp_path, {"holds": 1})
    assert KIND.read(tmp_path) == {"holds": 1}
    if content is None:
        (tmp_path / "manifest.json").unlink()
    else:
        (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(DataError, match=f"{message}.*make it anew"):
        KIND.read(tmp_path)
