"""Resolves the name of a model to its directory and its tokenizer. Imports no torch."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.errors import ArgumentError, CheckpointError, first_line
from forerun.model.checks import TOKENIZER, check_file, check_on_hub
from forerun.model.other_apps import find_kept
from forerun.model.templates import check_fits

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)

_TOKENIZERS = ("tokenizer*", "vocab*", "merges*", "*.model", "*.tiktoken", "tekken*")
"""Name patterns of the files that tokenizers consist of."""
_PROJECTOR = "mmproj"  # Part of the names of files that stand beside a multimodal model's own


def resolve(name: str | Path) -> str | Path:
    """Return the directory of the model that a name means; a hub id, and the path of a directory, unchanged. That of a
    GGUF file has all but the weights, which `load.open_model` reads from the file.

    Args:
        name: a directory, a hub id, a GGUF file or any part of a split one, a directory with one, a name of Ollama's or
            LM Studio's (`other_apps`), or a shipped model's (`forerun.demo`).

    Raises:
        CheckpointError: a file that is no GGUF file or cannot be converted, or a directory with several models.
        UnsupportedModelError: a GGUF file's architecture is not read.
    """
    from forerun import shipped

    file = gguf_file(name)
    if file is None:
        return find_kept(name) or shipped.resolve(name)
    from forerun.model.gguf import checkpoint_of

    return checkpoint_of(file)


def gguf_file(name: str | Path) -> Path | None:
    """Return the GGUF file that a name means, of a split model any part; None for a directory of another kind and a
    hub id. CheckpointError: a file that is no GGUF file, or a directory with several models.
    """
    from forerun import shipped

    path = find_kept(name) or Path(shipped.resolve(name)).expanduser()
    file = _only_file(path) if path.is_dir() else path
    if file is None or not (file.is_file() or file.suffix == ".gguf"):
        return None
    check_file(file)
    return file


def _only_file(folder: Path) -> Path | None:
    """Return the GGUF file of a directory that holds no checkpoint (the first part of a split one),
    or None. Raises CheckpointError if it holds several models.
    """
    if (folder / "config.json").is_file():
        return None
    files = sorted(file for file in folder.glob("*.gguf") if file.is_file())
    if len(files) < 2:
        return files[0] if files else None
    from forerun.model.gguf_files import parts_of

    models = sorted({parts_of(file)[0] for file in files if _PROJECTOR not in file.name.lower()} or set(files))
    if len(models) > 1:
        raise CheckpointError(
            f"{folder} holds {len(models)} GGUF models ({', '.join(file.name for file in models[:8])}): name one of "
            "them"
        )
    return models[0]


def warn_of_more_tokens(tokenizer: Any, rows: int) -> None:
    """Warn of a tokenizer with more tokens than a model's head has `rows`. Some published models
    have a few more that their texts never hold, so it is no error; whatever prompt holds one is
    refused.
    """
    if isinstance(tokenizer, Sized) and len(tokenizer) > rows:
        _log.warning(
            "the tokenizer has %d tokens and the model only %d: prompts that hold one of the others are refused, all "
            "of them if it is another model's tokenizer",
            len(tokenizer),
            rows,
        )


def tokenizer_beside(source: str | Path) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer in a checkpoint's directory, or of a hub id; None where there is none, or it is broken."""
    try:
        return _open_tokenizer(source)
    except Exception as error:  # whoever needs it is told that there is none
        _log.debug("%s: no tokenizer: %s", source, error)
        return None


def tokenizer_source(name: str | Path) -> str | Path:
    """Return the directory, or the hub id, that a model's tokenizer is loaded from. That of a GGUF file is converted
    once.
    """
    file = gguf_file(name)
    if file is None:
        return resolve(name)
    from forerun.model.gguf import folder_of

    return folder_of(file)


def _holds_tokenizer(folder: Path) -> bool:
    """Return whether a directory holds files of a tokenizer."""
    return any(file.is_file() for pattern in _TOKENIZERS for file in folder.glob(pattern))


def _without_tokenizer(name: str | Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"no tokenizer could be loaded from {str(name)!r} ({why}); copy the tokenizer's files there, or, in Python, "
        "pass tokenizer=DIRECTORY, or False to work on token ids"
    )


def load_tokenizer(model: Any, tokenizer: Any, template: str | None = None) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer asked for, or the model's own; None for False, or where an object's model
    brings none. With a chat `template` it has that one; an object is copied for it.
    """
    loaded = _load_tokenizer(model, tokenizer)
    if template is None:
        return loaded
    if loaded is None:
        raise ArgumentError("a chat_template needs a tokenizer, and there is none: leave it out, or name a tokenizer")
    check_fits(template, loaded)
    loaded = copy.copy(loaded)
    loaded.chat_template = template
    return loaded


def _load_tokenizer(model: Any, tokenizer: Any) -> PreTrainedTokenizerBase | None:
    if tokenizer is False:
        return None
    if tokenizer is not None and not isinstance(tokenizer, str | Path):
        return tokenizer
    source = tokenizer if tokenizer is not None else model
    if not isinstance(source, str | Path):
        source = getattr(source, "name_or_path", "") or None
        if source is None:
            return None
    return _open_tokenizer(source)


def _open_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a directory, a GGUF file or a hub id. Raises CheckpointError if there is none."""
    from transformers import AutoTokenizer

    folder = tokenizer_source(source)
    if not Path(folder).is_dir():
        check_on_hub(str(folder), TOKENIZER)
    elif not _holds_tokenizer(Path(folder)):
        raise _without_tokenizer(source, "it holds no tokenizer.json or the like")
    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:
        raise _without_tokenizer(source, f"{type(error).__name__}: {first_line(error)}") from error
