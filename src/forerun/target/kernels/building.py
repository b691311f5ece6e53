"""The kernels in C beside this file: compiled once by the compiler of the machine, then kept in the cache folder.

Any number of threads, processes and containers may share that folder. Without a compiler, on a processor without
AVX-512 BF16, or on another system than Linux, torch does what they do. Knows no tensor and no model.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from forerun.caching import cache_root
from forerun.writing import written

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
COMPILERS = ("cc", "gcc", "clang")
"""Tried in this order unless ``$CC`` names one."""
FLAGS = (
    *("-O3", "-std=gnu11", "-fopenmp", "-shared", "-fPIC"),
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512bf16", "-mfma"),
)
_PATIENCE_S = 60.0
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ONE_BUILDS = threading.Lock()
Loader = Callable[[str], ctypes.CDLL]


def version() -> str:
    """Changes with any kernel's source and with the flags."""
    sources = b"".join(path.read_bytes() for path in sorted(FOLDER.glob("*.[ch]")))
    return hashlib.sha256(sources + "\0".join(FLAGS).encode()).hexdigest()[:16]


def library(name: str, loader: Loader = ctypes.CDLL) -> ctypes.CDLL | None:
    """What ``<name>.c`` compiles to; None where this machine cannot have it, which is logged once.

    Args:
        loader: ``ctypes.PyDLL`` keeps the interpreter's lock during a call: waiting for it may last longer than it.
    """
    with _ONE_BUILDS:
        return _known(name, loader)


@cache
def _known(name: str, loader: Loader) -> ctypes.CDLL | None:
    if sys.platform != "linux" or not torch.cpu._is_avx512_bf16_supported():
        return None
    try:
        return _loaded(name, loader)
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        log.warning("%s runs in torch, which is slower: the kernel in C could not be compiled: %s", name, reason)
        return None


def _loaded(name: str, loader: Loader) -> ctypes.CDLL:
    """The kernel from the cache, compiled first where it is not there yet.

    Raises:
        OSError: no compiler, or nothing can be written.
        subprocess.SubprocessError: the compiler failed.
    """
    path = cache_root() / "kernels" / f"{name}-{version()}.so"
    try:
        return _open(path, loader)
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("%s is not used: %s; compiling it anew", path, error)
    try:
        with written(path) as fresh:
            _compile(name, fresh)
        return _open(path, loader)
    except OSError as error:
        log.warning("the kernel in C cannot be kept in the cache (%s); it is compiled for this process alone", error)
    with tempfile.TemporaryDirectory(prefix="forerun-") as folder:
        _compile(name, Path(folder) / path.name)
        return _open(Path(folder) / path.name, loader)


def _open(path: Path, loader: Loader) -> ctypes.CDLL:
    """The library in a file of ours that nobody else can write to: code that others wrote would run as us.

    Raises:
        OSError: there is none, or somebody else's.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & _OTHERS_WRITE:
        os.close(descriptor)
        raise PermissionError("it belongs to somebody else, or others may write to it")
    # Not by its name, under which another file may stand by now. Left open: the loader takes a name for what it knew by
    # that name, and a closed descriptor's number comes again.
    return loader(f"/proc/self/fd/{descriptor}")


def _compile(name: str, to: Path) -> None:
    command = [_compiler(), *FLAGS, str(FOLDER / f"{name}.c"), "-lm", "-o", str(to)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=_PATIENCE_S)
    to.chmod(stat.S_IRUSR | stat.S_IXUSR)  # whatever the umask says


def _compiler() -> str:
    names = (os.environ["CC"],) if os.environ.get("CC") else COMPILERS
    found = next((path for path in map(shutil.which, names) if path is not None), None)
    if found is None:
        raise FileNotFoundError(f"no C compiler ({', '.join(names)})")
    return found
