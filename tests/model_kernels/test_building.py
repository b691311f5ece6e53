"""Kernels are compiled once, whoever asks at the same time, and nobody else's file is ever run."""

import ctypes
import os
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from emulation import forget_kernels
from forerun import writing
from forerun.model.kernels import compiling
from forerun.writing import cache_root

pytestmark = pytest.mark.usefixtures("in_c")
NAME = "little"
SOURCE = "int forerun_says(void) { return 1; }\n"
TRAP = """
#include <fcntl.h>
__attribute__((constructor)) static void sprung(void) { close(creat(MARK, 0600)); }
int close(int);
int forerun_says(void) { return 2; }
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A kernel that compiles in no time, an empty cache folder, and temporary files of its own."""
    for folder in ("source", "cache", "temporary"):
        (tmp_path / folder).mkdir()
    (tmp_path / "source" / f"{NAME}.c").write_text(SOURCE)
    monkeypatch.setattr(compiling, "FOLDER", tmp_path / "source")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    writing._without_home.cache_clear()
    forget_kernels()
    yield tmp_path
    writing._without_home.cache_clear()
    forget_kernels()


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One entry for each time that the compiler was called."""
    seen, run = list[Any](), subprocess.run

    def noted(command: Any, **keywords: Any) -> Any:
        seen.append(command)
        return run(command, **keywords)

    monkeypatch.setattr(subprocess, "run", noted)
    return seen


def says(found: ctypes.CDLL | None) -> int | None:
    return None if found is None else found.forerun_says()


def place(root: Path) -> Path:
    return root / "cache" / "kernels" / f"{NAME}-{compiling.version()}.so"


def lay_trap(root: Path, mode: int) -> Path:
    """Stands where the kernel is looked for; whoever loads it leaves the file that is returned."""
    mark, source, path = root / "sprung", root / "trap.c", place(root)
    source.write_text(TRAP)
    path.parent.mkdir()
    subprocess.run(
        [compiling._compiler(), "-shared", "-fPIC", f'-DMARK="{mark}"', "-w", str(source), "-o", path], check=True
    )
    path.chmod(mode)
    return mark


def test_many_threads_ask_at_once(compilations: list[Any]) -> None:
    together = Barrier(8)

    def ask(_: int) -> int | None:
        together.wait()
        return says(compiling.compiled_library(NAME))

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(ask, range(8))) == [1] * 8
    assert len(compilations) == 1


def test_many_processes_compile_at_once(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As containers do that share a folder: each is process 1 of its own, and none knows of the others' locks."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    together, run = Barrier(6), subprocess.run

    def slow(command: Any, **keywords: Any) -> Any:
        together.wait(10)  # all have seen that there is none
        return run(command, **keywords)

    monkeypatch.setattr(subprocess, "run", slow)
    with ThreadPoolExecutor(6) as threads:
        loaded = list(threads.map(lambda _: compiling._loaded(NAME, ctypes.CDLL, compiling.FLAGS), range(6)))
    assert [says(found) for found in loaded] == [1] * 6
    assert list(place(elsewhere).parent.iterdir()) == [place(elsewhere)]


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o077])
def test_what_was_compiled_is_loaded_again(elsewhere: Path, compilations: list[Any], mask: int) -> None:
    """Under any umask: others may not write to it."""
    before = os.umask(mask)
    try:
        assert says(compiling.compiled_library(NAME)) == 1
    finally:
        os.umask(before)
    assert not place(elsewhere).stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    forget_kernels()
    assert says(compiling.compiled_library(NAME)) == 1 and len(compilations) == 1


ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


@pytest.mark.parametrize("how", [0o775, 0o757, 0o777, "a link", pytest.param("another owner", marks=ROOT)])
def test_a_file_that_may_be_another_users_is_not_run(elsewhere: Path, how: int | str) -> None:
    mark = lay_trap(elsewhere, how if isinstance(how, int) else 0o755)
    if how == "a link":
        place(elsewhere).rename(elsewhere / "theirs.so")
        place(elsewhere).symlink_to(elsewhere / "theirs.so")
    elif how == "another owner":
        os.chown(place(elsewhere), 12345, 12345)
    assert says(compiling.compiled_library(NAME)) == 1 and not mark.exists()


def test_whoever_exchanges_files_meanwhile_gains_nothing(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is loaded is what was looked at, though another stands there by then."""
    mark, look = lay_trap(elsewhere, 0o755), os.fstat
    place(elsewhere).rename(elsewhere / "theirs.so")
    compiling._compile(NAME, place(elsewhere), compiling.FLAGS)

    def looked(descriptor: int) -> os.stat_result:
        if (elsewhere / "theirs.so").exists():
            (elsewhere / "theirs.so").rename(place(elsewhere))
        return look(descriptor)

    monkeypatch.setattr(os, "fstat", looked)
    assert says(compiling.compiled_library(NAME)) == 1 and not mark.exists()


def test_a_file_that_is_no_library_is_compiled_anew(elsewhere: Path) -> None:
    place(elsewhere).parent.mkdir()
    place(elsewhere).write_bytes(b"\x7fELF half of it")
    place(elsewhere).chmod(0o500)
    assert says(compiling.compiled_library(NAME)) == 1


def test_a_folder_that_cannot_be_written(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a read-only image: compiled for this process alone, and nothing is left behind."""
    (elsewhere / "file").write_text("where a folder should be")
    monkeypatch.setenv("FORERUN_CACHE", str(elsewhere / "file"))
    assert says(compiling.compiled_library(NAME)) == 1
    assert not list((elsewhere / "temporary").iterdir())


def test_nobody_without_a_home(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container under a user id that no passwd file knows."""

    def unknown(user: int) -> Any:
        raise KeyError(user)

    for name in ("FORERUN_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert cache_root().is_relative_to(elsewhere / "temporary")
    assert says(compiling.compiled_library(NAME)) == 1
    assert cache_root() == cache_root() and list(cache_root().rglob("*.so"))


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_temporary_folder_of_others_is_not_taken(elsewhere: Path, monkeypatch: pytest.MonkeyPatch, mode: int) -> None:
    for name in ("FORERUN_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    first = cache_root()
    first.chmod(mode)
    writing._without_home.cache_clear()
    second = cache_root()
    assert second != first and second == cache_root()
    assert not second.stat().st_mode & 0o077
