"""Command lines of llama.cpp 0.5.0: its converter makes GGUF files of directories (``convert_hf_to_gguf.py``, in its
sources), its server reads them."""

from __future__ import annotations

import shlex
from pathlib import Path

SCRIPT = "convert_hf_to_gguf.py"
OUTTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
"""A dtype -> the converter's name of it."""


def conversion(
    directory: Path, *, target: str | None = None, outtype: str = "bf16", file: Path | None = None
) -> list[str]:
    """Its arguments.

    Args:
        directory: of a model, or of a head, which needs `target`.
        target: directory of the model that a head drafts for: layers, vocabulary and tokenizer are read there.
        outtype: one of `OUTTYPES`' values.
        file: to write; by default beside the directory, with its name and ``.gguf``.
    """
    for_head = ["--target-model-dir", target] if target is not None else []
    return [str(directory), *for_head, "--outtype", outtype, "--outfile", str(file or f"{directory}.gguf")]


def started(directory: Path, target: str, name: str, most: int) -> str:
    """Three lines: both conversions, and the server with a head as the drafter `name` (``--spec-type``) of chains of up
    to `most` tokens. The target's file is written beside the head's directory."""
    of_target = conversion(Path(target), file=directory.with_name(f"{Path(target).name}.gguf"))
    of_head = conversion(directory, target=target)
    server = ["llama-server", "-m", of_target[-1], "-md", of_head[-1], "--spec-type", name]
    lines = (["python", SCRIPT, *of_target], ["python", SCRIPT, *of_head], [*server, "--spec-draft-n-max", str(most)])
    return "\n".join(map(shlex.join, lines))


COUNTING = "`--spec-draft-n-max` counts drafted tokens. The target is a directory on this machine, not a hub id."
