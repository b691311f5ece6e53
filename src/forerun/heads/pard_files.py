"""PARD draft models for serving engines: a transformers directory with ``pard_token``, which is no head's.

What engines make of it is from vLLM's and TensorRT-LLM's sources and documents; no engine was run with one. vLLM reads
``pard_token`` of the draft model's ``config.json`` and drafts from masks with ``parallel_drafting``; TensorRT-LLM has a
`decoding_type` of its own. To others it is an ordinary causal LM, which drafts token by token.
"""

from __future__ import annotations

import filecmp
import shlex
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.drafters.draft_models.pard import KEY
from forerun.errors import CheckpointError, choices, refuse
from forerun.heads.engines import Exported, Finding, check, degrades, fails, ok, trtllm_file, trtllm_line, vllm_line
from forerun.heads.files import CONFIG, README, TargetFacts, folder_of
from forerun.heads.keys import Keys, architectures
from forerun.model.load import weight_files
from forerun.writing import read_object, replace_folder

TOKENS = 8  # Per step in the launch lines: what the public recipe trains for
HEAD_KEY = "draft_vocab_size"  # A key of heads alone
KEPT = (".json", ".safetensors", ".txt", ".model", ".jinja")  # Suffixes of what a model's directory is made of


@dataclass(frozen=True, kw_only=True, slots=True)
class PardModel:
    """A PARD draft model on disk."""

    directory: Path
    config: dict[str, Any]

    @classmethod
    def at(cls, path: str | Path) -> PardModel | None:
        """Open a PARD model in a directory or under a hub id; None if it holds something else.
        Raises as `read_head` does.
        """
        directory = folder_of(path)
        if not (directory / CONFIG).is_file():
            return None
        config = read_object(directory / CONFIG, "expected a model's configuration", CheckpointError)
        names = [name.lower() for name in architectures(config)]
        whole = any(name.endswith("forcausallm") and "eagle" not in name for name in names)
        Keys(config).integer("vocab_size", 0)  # A CheckpointError where it is none
        # P-EAGLE heads may have the key, too.
        return cls(directory=directory, config=config) if KEY in config and whole and HEAD_KEY not in config else None

    def findings(self, target: TargetFacts) -> Iterator[Finding]:
        """Yield how engines treat the model."""
        what, mask, size = "a PARD draft model", self.config[KEY], self.config.get("vocab_size")
        yield from ok("vllm trtllm", what, "drafts all depths in one pass, from masks")
        yield from degrades(
            "sglang llama.cpp", what, f"does not read {KEY}: it drafts token by token", "use vLLM or TensorRT-LLM"
        )
        yield from fails("lmdeploy modelopt", what, "has no draft models", "use vLLM or TensorRT-LLM")
        if type(mask) is not int or mask < 0 or (size is not None and mask >= size):
            why = "there is no such token" if size is None else f"there is no such token among its {size}"
            yield from fails("vllm trtllm", f"{KEY} {mask!r}", why, "train it again, or correct config.json")
        if size is not None and size != target.vocab_size:
            why = f"wants both vocabularies equally large; the target has {target.vocab_size}"
            yield from fails("vllm", f"a vocabulary of {size}", why, "draft here, or take a target of this size")
        if self.config.get("pard2"):
            why = "may want warp_model.bin, which mixes in the target's states; it is a pickle and is not exported"
            yield from check("vllm trtllm", "a PARD-2 model", why, "without it such a model drafts as PARD does")


COMMANDS: dict[str, Callable[[Path, str], str]] = {
    "vllm": lambda directory, target: vllm_line(
        target, method="draft_model", model=str(directory), num_speculative_tokens=TOKENS, parallel_drafting=True
    ),
    "trtllm": lambda directory, target: trtllm_line(target, directory),
    "hf": lambda directory, target: shlex.join(
        ["forerun", "generate", target, "--drafter", "pard", "--drafter-model", str(directory), "--prompt", "def "]
    ),
}


def export_pard(model: PardModel, target: TargetFacts, to: str, output: str | Path, *, force: bool = False) -> Exported:
    """Copy a PARD model to `output`, a new or empty directory, with what the engine `to` needs
    beside it, and compare.

    ArgumentError: `to` reads no such models, or `output` holds something. CheckpointError: the engine would not serve
    it and not `force`, or the copy is not what was to be written.
    """
    directory = Path(output).expanduser().absolute()
    refuse(
        (to not in COMMANDS, f"cannot export to {to!r}.{choices(to, COMMANDS, 'PARD draft models go to')}"),
        (
            directory.exists() and (not directory.is_dir() or any(directory.iterdir())),
            f"{directory} holds something, which would be deleted; name a new or empty directory",
        ),
    )
    findings = [finding for finding in model.findings(target) if finding.engine == to]
    wrong = [f"{one.what}: {to} {one.why} ({one.remedy})" for one in findings if one.severity in ("degrades", "fails")]
    if wrong and not force:
        raise CheckpointError(
            f"{to} would not serve this model as it was trained. {'; '.join(wrong)}. To write it nevertheless: "
            "--force (force=True)"
        )
    weight_files(model.directory)  # raises where there are none
    command = COMMANDS[to](directory, target.name_or_path)
    texts = {README: f"# PARD draft model for {target.name_or_path}\n\nWritten by forerun.\n\n```\n{command}\n```\n"}
    if to == "trtllm":
        texts |= trtllm_file("PARD", TOKENS, directory, {"mask_token_id": model.config[KEY]})
    files = sorted(file for file in model.directory.iterdir() if file.suffix in KEPT and file.is_file())
    with replace_folder(directory) as folder:
        for file in files:
            shutil.copyfile(file, folder / file.name)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    lost = [file.name for file in files if not filecmp.cmp(file, directory / file.name, shallow=False)]
    if lost:
        raise CheckpointError(f"{directory} does not hold what was to be written: {', '.join(lost)}; is the disk full?")
    return Exported(
        directory=directory, format_name="transformers", findings=tuple(findings), command=command, notes=()
    )
