"""Files that are whole or not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.writing import written


def test_a_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file"
    with written(path) as fresh:
        fresh.write_text("new")
        assert not path.exists()
    assert path.read_text() == "new" and list(path.parent.iterdir()) == [path]


def test_what_was_there_outlives_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(OSError, match="full"), written(path) as fresh:
        fresh.write_text("half")
        raise OSError("the disk is full")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
