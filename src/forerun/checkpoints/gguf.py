"""Command lines of llama.cpp 0.5.0: its converter makes GGUF files of directories
(``convert_hf_to_gguf.py``, in its sources), and its server reads them.
"""

from __future__ import annotations

import shlex
from pathlib import Path

SCRIPT = "convert_hf_to_gguf.py"
OUTTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
"""The converter's name of each dtype."""


def conversion_arguments(
    directory: Path, *, target: str | None = None, outtype: str = "bf16", file: Path | None = None
) -> list[str]:
    """Return the arguments of the converter.

    Args:
        directory: of a model, or of a head, which needs `target`.
        target: directory of the model that a head drafts for: layers, vocabulary and tokenizer are read there.
        outtype: one of `OUTTYPES`' values.
        file: to write; by default beside the directory, with its name and ``.gguf``.
    """
    for_head = ["--target-model-dir", target] if target is not None else []
    return [str(directory), *for_head, "--outtype", outtype, "--outfile", str(file or f"{directory}.gguf")]


def start_lines(target: Path, file: Path, name: str, most: int, head: Path | None = None) -> str:
    """Return the lines that make the GGUF files and start the server with the drafter `name`
    (``--spec-type``) of chains of up to `most` tokens. `target` becomes `file`, and `head`, where
    it is not in the target, a file beside its directory.
    """
    of_target = conversion_arguments(target, file=file)
    lines, server = [["python", SCRIPT, *of_target]], ["llama-server", "-m", of_target[-1]]
    if head is not None:
        of_head = conversion_arguments(head, target=str(target))
        lines.append(["python", SCRIPT, *of_head])
        server += ["-md", of_head[-1]]
    lines.append([*server, "--spec-type", name, "--spec-draft-n-max", str(most)])
    return "\n".join(map(shlex.join, lines))


def start_lines_with(head: Path, target: str, name: str, most: int) -> str:
    """Return the lines of `start_lines`, with the target's file written beside the head's directory."""
    return start_lines(Path(target), head.with_name(f"{Path(target).name}.gguf"), name, most, head)


COUNTING = "`--spec-draft-n-max` counts drafted tokens. The target is a directory on this machine, not a hub id."
