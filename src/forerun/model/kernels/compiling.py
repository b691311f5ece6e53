"""Compiling the kernels in C: once, by the machine's compiler, into the cache folder.

Any number of threads, processes and containers may share the folder; nobody else's file is ever loaded from it.
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
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from forerun.writing import cache_root, replace_file

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
COMPILERS = ("cc", "gcc", "clang")  # Tried in this order unless ``$CC`` names one
AVX512: tuple[str, ...] = ("-O3", "-std=gnu11", "-fopenmp", "-shared", "-fPIC", "-mavx512f", "-mavx512bw", "-mavx512vl")
AVX512 += ("-mfma",)
FLAGS: tuple[str, ...] = (*AVX512, "-mavx512bf16")
AMX = ("-mamx-tile", "-mamx-bf16")
FLOAT32 = "-DFLOAT32_ELEMENTS"
_COMPILE_TIMEOUT_S = 300.0  # A compiler takes seconds, on a busy machine minutes
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ONE_BUILDS = threading.Lock()
Loader = Callable[[str], ctypes.CDLL]


def version(flags: Sequence[str] | None = None) -> str:
    """Return a hash of all kernel sources and the flags."""
    sources = b"".join(path.read_bytes() for path in sorted(FOLDER.glob("*.[ch]")))
    return hashlib.sha256(sources + "\0".join(FLAGS if flags is None else flags).encode()).hexdigest()[:16]


def compiled_library(
    name: str, loader: Loader = ctypes.CDLL, *, flags: Sequence[str] | None = None
) -> ctypes.CDLL | None:
    """Compile ``<name>.c`` and load it; None where this machine cannot, which is logged. The
    `loader` ``ctypes.PyDLL`` keeps the interpreter's lock during a call, which is better where a
    call is shorter than waiting for the lock. A caller that passes `flags` of its own knows that
    the processor supports them; the default `FLAGS` need AVX-512 BF16.
    """
    if sys.platform != "linux" or (flags is None and not torch.cpu._is_avx512_bf16_supported()):
        return None
    try:
        with _ONE_BUILDS:
            return _loaded(name, loader, FLAGS if flags is None else flags)
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        log.warning("%s runs in torch, which is slower: the kernel in C could not be compiled: %s", name, reason)
        return None


def _loaded(name: str, loader: Loader, flags: Sequence[str]) -> ctypes.CDLL:
    """Load the kernel from the cache, and compile it first if need be. Raises OSError without a
    compiler, SubprocessError if it fails.
    """
    path = cache_root() / "kernels" / f"{name}-{version(flags)}.so"
    try:
        return _open(path, loader)
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            log.warning("%s is not used: %s; compiling it anew", path, error)
    try:
        with replace_file(path) as fresh:
            _compile(name, fresh, flags)
        return _open(path, loader)
    except OSError as error:
        log.warning("the kernel in C cannot be kept in the cache (%s); it is compiled for this process alone", error)
    with tempfile.TemporaryDirectory(prefix="forerun-") as folder:
        _compile(name, Path(folder) / path.name, flags)
        return _open(Path(folder) / path.name, loader)


def _open(path: Path, loader: Loader) -> ctypes.CDLL:
    """Load a library from a file that nobody else can write to, since it runs with our rights.
    Raises OSError if there is none.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & _OTHERS_WRITE:
        os.close(descriptor)
        raise PermissionError("it belongs to somebody else, or others may write to it")
    # Not by its name, under which another file may stand by now. Left open: the loader takes a name for what it knew by
    # that name, and a closed descriptor's number comes again.
    return loader(f"/proc/self/fd/{descriptor}")


def _compile(name: str, to: Path, flags: Sequence[str]) -> None:
    command = [_compiler(), *flags, str(FOLDER / f"{name}.c"), "-lm", "-o", str(to)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S)
    to.chmod(stat.S_IRUSR | stat.S_IXUSR)  # whatever the umask says


def _compiler() -> str:
    names = (os.environ["CC"],) if os.environ.get("CC") else COMPILERS
    if (found := next(filter(None, map(shutil.which, names)), None)) is None:
        raise FileNotFoundError(f"no C compiler ({', '.join(names)})")
    return found
