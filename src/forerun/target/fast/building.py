"""The kernels in C beside this file: compiled once by the compiler of the machine, then kept in the cache folder.

Without a compiler, or on a processor without AVX-512 BF16, torch does what they do. Knows no tensor and no model.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
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


def version() -> str:
    """Changes with any kernel's source and with the flags."""
    sources = b"".join(path.read_bytes() for path in sorted(FOLDER.glob("*.[ch]")))
    return hashlib.sha256(sources + "\0".join(FLAGS).encode()).hexdigest()[:16]


@cache
def library(name: str, loader: Callable[[str], ctypes.CDLL] = ctypes.CDLL) -> ctypes.CDLL | None:
    """What ``<name>.c`` compiles to; None where this machine cannot have it, which is logged once.

    Args:
        loader: ``ctypes.PyDLL`` keeps the interpreter's lock during a call: waiting for it may last longer than it.
    """
    if not torch.cpu._is_avx512_bf16_supported():
        return None
    try:
        return loader(str(_built(name)))
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        log.warning("%s runs in torch, which is slower: the kernel in C could not be compiled: %s", name, reason)
        return None


def _built(name: str) -> Path:
    """The shared library, compiled where it is not in the cache yet.

    Raises:
        OSError: no compiler, or nothing can be written.
        subprocess.SubprocessError: the compiler failed.
    """
    path = cache_root() / "kernels" / f"{name}-{version()}.so"
    if not path.exists():
        with written(path) as fresh:  # several processes may do it at once
            command = [_compiler(), *FLAGS, str(FOLDER / f"{name}.c"), "-lm", "-o", str(fresh)]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_PATIENCE_S)
    return path


def _compiler() -> str:
    names = (os.environ["CC"],) if os.environ.get("CC") else COMPILERS
    found = next((path for path in map(shutil.which, names) if path is not None), None)
    if found is None:
        raise FileNotFoundError(f"no C compiler ({', '.join(names)})")
    return found
