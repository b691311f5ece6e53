"""GGUF files that Ollama and LM Studio keep, by the names that these have for them: ``ollama:NAME[:TAG]`` and
``lmstudio:PUBLISHER/REPO[/FILE]``. Their folders are read and never written to. Imports no torch.

Ollama has a manifest for each model, ``manifests/HOST/NAMESPACE/NAME/TAG``: JSON with layers, of which one is the GGUF
file, kept in ``blobs`` by its digest.
"""

from __future__ import annotations

import logging
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

from forerun.errors import CheckpointError, list_some, nearest, refuse
from forerun.writing import parse_json

_log = logging.getLogger(__name__)

OLLAMA, LM_STUDIO = "ollama:", "lmstudio:"
_HOST, _SPACE, _TAG = "registry.ollama.ai", "library", "latest"  # What a name of Ollama leaves out
_LAYER = "application/vnd.ollama.image."  # Begins the media types of layers
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_LISTED = 8  # Models that a message lists


def find_kept(name: str | Path) -> Path | None:
    """Return the GGUF file, or the directory with GGUF files, that another application keeps under a name that begins
    with ``ollama:`` or ``lmstudio:``; None for any other name. Raises CheckpointError if it keeps no such model, or
    something that is more than a GGUF file.
    """
    text = str(name)
    if text.startswith(OLLAMA):
        return _in_ollama(text.removeprefix(OLLAMA))
    if text.startswith(LM_STUDIO):
        return _in_lm_studio(text.removeprefix(LM_STUDIO))
    return None


def _in_ollama(name: str) -> Path:
    chosen = os.environ.get("OLLAMA_MODELS")
    folders = [Path(chosen)] if chosen else [Path("~/.ollama/models"), Path("/usr/share/ollama/.ollama/models")]
    manifests = dict[str, Path]()
    for folder in reversed(folders):
        for manifest in _files(folder.expanduser() / "manifests", "*/*/*/*"):
            host, space, model, tag = manifest.parts[-4:]
            manifests["/".join((*_shortened(host, space), f"{model}:{tag}"))] = manifest
    tagged = name if ":" in name.rpartition("/")[2] else f"{name}:{_TAG}"
    manifest = manifests[_known(tagged, list(manifests), "Ollama", folders)]
    layers = _layers(manifest)
    blobs = manifest.parents[4] / "blobs"
    files = [blobs / f"sha256-{match[1]}" for digest in layers.get("model", []) if (match := _DIGEST.fullmatch(digest))]
    refuse(
        (
            "adapter" in layers,
            f"{OLLAMA}{name} is a model with an adapter (LoRA) on top, which forerun would leave out: merge it into "
            "the model, or name the model that it was made from",
        ),
        (
            len(files) != 1,
            f"{OLLAMA}{name} is kept as {len(files)} GGUF files ({manifest}): pull a version of it that is one",
        ),
        (
            len(files) == 1 and not files[0].is_file(),
            f"{OLLAMA}{name} is not here as a whole, for {files[0] if files else blobs} is missing: ollama pull {name}",
        ),
        error=CheckpointError,
    )
    _tell_unused(name, tuple(sorted(layers)))
    return files[0]


def _in_lm_studio(name: str) -> Path:
    folders = [Path("~/.lmstudio/models"), Path("~/.cache/lm-studio/models")]
    paths = dict[str, Path]()
    for folder in reversed(folders):
        for file in _files(folder.expanduser(), "*/*/*.gguf"):
            paths["/".join(file.parts[-3:-1])] = file.parent
            paths["/".join(file.parts[-3:])] = file
    whole = name if name.count("/") < 2 or name.endswith(".gguf") else f"{name}.gguf"
    return paths[_known(whole, list(paths), "LM Studio", folders)]


def _files(folder: Path, pattern: str) -> list[Path]:
    """Return the files below a folder that match; none where it is not there, or may not be read."""
    try:
        return sorted(path for path in folder.glob(pattern) if path.is_file())
    except OSError as error:
        _log.debug("%s: %s", folder, error)
        return []


def _shortened(host: str, space: str) -> tuple[str, ...]:
    """Return the host and the namespace as far as Ollama says them."""
    if host != _HOST:
        return host, space
    return () if space == _SPACE else (space,)


def _known(name: str, names: list[str], app: str, folders: list[Path]) -> str:
    """Return the name as it is kept, capitals aside, or raise CheckpointError."""
    exact = next((candidate for candidate in names if candidate.casefold() == name.casefold()), None)
    if exact is None:
        where = " or ".join(str(folder) for folder in folders)
        there = f"there are {list_some(names, _LISTED)}" if names else f"no model is in {where}, or it may not be read"
        raise CheckpointError(f"{app} keeps no model {name!r} here: {there}.{nearest(name, names)}")
    return exact


def _layers(manifest: Path) -> dict[str, list[str]]:
    """Return the digests of a manifest's layers by what they hold: model, template, params, ..."""
    digests = dict[str, list[str]]()
    try:
        content: Any = parse_json(manifest.read_text(encoding="utf-8"))
        for layer in content["layers"]:
            kind = str(layer["mediaType"]).removeprefix(_LAYER).partition(";")[0]
            digests.setdefault(kind, []).append(str(layer["digest"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{manifest} is no manifest of Ollama ({type(error).__name__}: {error})") from error
    return digests


@cache
def _tell_unused(name: str, layers: tuple[str, ...]) -> None:
    """Say once what Ollama adds to the file and forerun does not use."""
    unused = [kind for kind in ("template", "params", "system", "messages", "projector") if kind in layers]
    if unused:
        _log.warning(
            "%s%s: the chat template in the file itself is used; Ollama's own %s %s not",
            OLLAMA,
            name,
            ", ".join(unused),
            "are" if len(unused) > 1 else "is",
        )
