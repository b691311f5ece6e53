"""The registry of formats, and head checkpoints as directories in any of them: `read_head`, `write_head`.

Safetensors and ``config.json`` in, a complete new directory or nothing out. No pickle is ever loaded.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from forerun.drafters.kinds import KINDS, import_named
from forerun.errors import ArgumentError, CheckpointError, choices, refuse
from forerun.heads.files import HeadCheckpoint, StoredFiles, TargetFacts
from forerun.manifests import read_object
from forerun.model.load import INDEX, SINGLE, read_header, weight_files
from forerun.writing import written_folder

if TYPE_CHECKING:
    from forerun.heads.files import Format


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatEntry:
    """One line of the registry."""

    path: str  # ``module:Class``, imported when the format is used
    kinds: tuple[str, ...]


FORMATS: dict[str, FormatEntry] = {
    "speculators": FormatEntry(
        path="forerun.heads.speculators_files:SpeculatorsFormat", kinds=("eagle3", "peagle", "dflash", "dspark")
    ),
    "modelopt": FormatEntry(path="forerun.heads.eagle_files:ModelOptFormat", kinds=("eagle3",)),
    **{kind.name: FormatEntry(path=kind.format, kinds=(kind.name,)) for kind in KINDS.values() if kind.format},
    "dflash": FormatEntry(
        path="forerun.heads.block_files:DFlashFormat", kinds=("dflash", "dspark", "domino", "dflash2")
    ),
    "flat": FormatEntry(path="forerun.heads.eagle_files:FlatFormat", kinds=("eagle3", "eagle")),
}
"""The first format that recognises a configuration reads it, so the most particular come first."""


def format_named(name: str) -> Format:
    """Return the format behind a registered name. Raises ArgumentError, naming the nearest, if
    there is none.
    """
    if name not in FORMATS:
        raise ArgumentError(f"unknown format {name!r}.{choices(name, FORMATS)}")
    return import_named(FORMATS[name].path)()


def format_for(kind: str) -> str:
    """Return the name of the format in which heads of a kind are written: the least particular,
    which most engines read.
    """
    found = [name for name, entry in FORMATS.items() if kind in entry.kinds]
    if not found:
        raise ArgumentError(f"no checkpoint format carries heads of the kind {kind}")
    return found[-1]


OTHERS: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "vLLM's own layout of a Medusa head (model_type medusa, tensors blocks.0.layers.0.weight)": lambda config: (
        config.get("model_type") == "medusa" and "medusa_num_heads" not in config
    ),
    "vLLM's own layout of an EAGLE head (model_type eagle, the layers' keys inside model)": lambda config: (
        config.get("model_type") == "eagle" and isinstance(config.get("model"), Mapping)
    ),
    "TensorRT-LLM's converted checkpoint (architecture, mapping, tensors of each rank)": lambda config: (
        isinstance(config.get("architecture"), str) and "mapping" in config
    ),
    "Google's assistant for Gemma 4, which reads the target's own cache": lambda config: (
        "Gemma4Assistant" in str(config.get("architectures"))
    ),
}
"""Descriptions of heads that no format here reads, and how to tell them by their ``config.json``.
"""


def format_of(config: Mapping[str, Any]) -> Format:
    """Return the format that a ``config.json`` is written in. Raises CheckpointError if it is none
    of ours.
    """
    if whose := next((whose for whose, tells in OTHERS.items() if tells(config)), None):
        raise CheckpointError(
            f"config.json is {whose}, which is not supported; take the head as its "
            f"authors published it, in one of the formats {', '.join(FORMATS)}"
        )
    for name in FORMATS:
        candidate = format_named(name)
        if candidate.recognises(config):
            return candidate
    raise CheckpointError(
        f"config.json is no head's in any known format ({', '.join(FORMATS)}); it has the keys "
        f"{', '.join(sorted(config)[:12]) or 'none'}"
    )


def is_head(config: Mapping[str, Any]) -> bool:
    """Return whether a ``config.json`` describes a head and no whole model, which some formats
    recognise too. It must have the format's mark, mention EAGLE or have a draft vocabulary, as
    others' heads in EAGLE's format do.
    """
    try:
        mark = format_of(config).mark
    except CheckpointError:
        return False
    text = json.dumps(config).lower()
    return any(word in text for word in (mark, "eagle", "draft_vocab_size"))


log = logging.getLogger(__name__)
CONFIG, README = "config.json", "README.md"
OURS = {CONFIG, INDEX, README, "trtllm.yaml", ".gitattributes"}
"""Files that a directory may hold, beside weights, to be replaced by a new export."""
UNKNOWN_NOTE = (
    "Nothing is known of these keys of config.json, so the head is drafted with as if they were not there: {}. They "
    "are written back; if they change what the head computes, its drafts are worse than they could be."
)
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def read_head(path: str | Path, *, num_layers: int | None = None) -> HeadCheckpoint:
    """Read the head in a directory or under a hub id (``owner/name``), in any format of `FORMATS`.

    `num_layers` of the target is needed where the file does not say which layers the head reads. CheckpointError for
    what is missing, truncated, pickled, incomplete, contradictory, or no head that we know.
    """
    found = parse(read_files(path), num_layers=num_layers)
    if found.unknown:
        log.warning("%s: %s", path, found.notes[-1])
    return found


def parse(stored: StoredFiles, *, num_layers: int | None = None) -> HeadCheckpoint:
    """Parse the head that the files hold; doubts are in its notes. Raises as `read_head` does,
    naming the directory.
    """
    try:
        _refuse_quantised(stored)
        found = format_of(stored.config).read(stored.config, stored.tensors, num_layers=num_layers)
    except Exception as error:
        raise locate_error(stored.directory, error) from error
    told = (UNKNOWN_NOTE.format(", ".join(found.unknown)),) if found.unknown else ()
    return dataclasses.replace(found, notes=(*found.notes, *told))


def locate_error(directory: Path, error: Exception) -> CheckpointError:
    """Turn an error while a configuration was read into one that names the directory. Any other
    than a `CheckpointError` comes from a value that no reader foresaw.
    """
    if isinstance(error, CheckpointError):
        return CheckpointError(f"{directory}: {error}")
    said = " ".join(str(error).split())[:200]
    return CheckpointError(
        f"{directory}: a value of config.json is of another type or size than its format has ({type(error).__name__}: "
        f"{said}); compare it with the publisher's config.json"
    )


def _refuse_quantised(stored: StoredFiles) -> None:
    """Raise CheckpointError for weights in eight bits or fewer: scales would be taken for tensors
    of another head.
    """
    few = [name for name, one in stored.tensors.items() if one.dtype.itemsize == 1 and name not in ("d2t", "t2d")]
    what = "config.json has a quantization_config" if stored.config.get("quantization_config") else ""
    if few:
        what = f"the tensor {few[0]} is stored as {str(stored.tensors[few[0]].dtype).removeprefix('torch.')}"
    if what:
        raise CheckpointError(f"{what}; only heads in floating point of 16 or 32 bits are supported: take that one")


def read_files(path: str | Path) -> StoredFiles:
    """Read the configuration and tensors of a directory or hub id, as stored. Raises as `read_head`
    does.
    """
    directory = folder_of(path)
    if not (directory / CONFIG).is_file():
        raise CheckpointError(f"{directory} holds no {CONFIG}: expected a head's directory")
    config = read_object(directory / CONFIG, "expected a head's configuration", CheckpointError)
    try:
        chosen = format_of(config)
    except Exception as error:
        raise locate_error(directory, error) from error
    weights = chosen.weights
    pickles = sorted(file.name for file in directory.iterdir() if file.suffix in PICKLES)
    refuse(
        (
            pickles and not any((directory / name).is_file() for name in (weights, INDEX)),
            f"{directory} holds {', '.join(pickles)}: a pickle can run any code when it is opened, so forerun never "
            f"does. Convert it to {weights} where you trust it: tensors = torch.load(file, weights_only=True); "
            f"safetensors.torch.save_file({{name: tensor.clone() for name, tensor in tensors.items()}}, '{weights}')",
        ),
        (
            weights != SINGLE and not (directory / weights).is_file(),
            f"{directory} holds no {weights}, where its config.json says that the weights are",
        ),
        error=CheckpointError,
    )
    tensors: dict[str, Tensor] = {}
    for file in weight_files(directory) if weights == SINGLE else [directory / weights]:
        twice = sorted(tensors.keys() & read_header(file).keys())
        if twice:
            raise CheckpointError(f"{directory}: {', '.join(twice)} is stored in two shards, once in {file.name}")
        with safe_open(file, "pt") as stored:
            tensors |= {name: stored.get_tensor(name) for name in stored.keys() if chosen.keeps(config, name)}  # noqa: SIM118
    return StoredFiles(directory=directory, config=config, tensors=tensors)


def write_head(
    checkpoint: HeadCheckpoint,
    directory: str | Path,
    format_name: str,
    target: TargetFacts,
    *,
    overrides: Mapping[str, Any] | None = None,
    texts: Mapping[str, str] | None = None,
) -> Path:
    """Write a head in one of the `FORMATS`, readable by everybody; a reader never sees half of it.

    A former head in `directory` is replaced. `overrides` take the place of the format's own keys in ``config.json``;
    `texts` are further files, name -> content. ArgumentError for no such format, or if `directory` holds other things;
    CheckpointError if the format has no words for this head.
    """
    final, chosen = Path(directory).expanduser().absolute(), format_named(format_name)
    _refuse_foreign(final)
    config, tensors = chosen.write(checkpoint, target)
    with written_folder(final) as folder:
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(whole, folder / chosen.weights, {"format": "pt"})
        written = {CONFIG: json.dumps({**config, **(overrides or {})}, indent=2) + "\n", **(texts or {})}
        for name, text in written.items():
            (folder / name).write_text(text, encoding="utf-8")
        for file in folder.iterdir():
            file.chmod(0o644)  # safetensors writes files that only their owner may read
    return final


def folder_of(path: str | Path) -> Path:
    """Return the directory of that name, or download the one of a hub id."""
    directory = Path(path).expanduser()
    if directory.is_dir():
        return directory
    if isinstance(path, Path) or path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise CheckpointError(
            f"there is no directory {directory}: expected a head's directory or a hub id (owner/name)"
        )
    from huggingface_hub import snapshot_download

    from forerun.model.checks import explain_load_error

    try:
        return Path(snapshot_download(path, allow_patterns=["*.json", "*.safetensors"], ignore_patterns=["*/*"]))
    except Exception as error:
        raise explain_load_error(path, error) from error


def _refuse_foreign(directory: Path) -> None:
    """Raise ArgumentError if replacing `directory` would delete anything that is not a head's."""
    if not directory.exists():
        return
    if not directory.is_dir():
        raise ArgumentError(f"{directory} is a file; name a directory for the head")
    config, formats = directory / CONFIG, [format_named(name) for name in FORMATS]
    text = config.read_text(encoding="utf-8", errors="replace").lower() if config.is_file() else None
    if text is not None and not any(known.mark in text for known in formats):
        raise ArgumentError(f"{directory} holds another model, which would be deleted; name a new or empty directory")
    ours = OURS | {known.weights for known in formats}
    foreign = sorted(file.name for file in directory.iterdir() if file.name not in ours)
    if foreign:
        raise ArgumentError(
            f"{directory} holds {', '.join(foreign[:4])}, which would be deleted; name a new or empty directory"
        )
