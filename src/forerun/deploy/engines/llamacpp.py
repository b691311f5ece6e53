"""llama.cpp starts as ``llama-server`` with ``--spec-type`` and the options of each type.

Flags are from ``tools/server/README.md``, which its own ``--help`` is made of, of November 2026,
and from running 0.5.0 (``tests_llama``), which is the same. It numbers builds, several a day; where
``llama-server`` is on this machine its ``--help`` is read, too. It drafts chains.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, ClassVar

from forerun.deploy.launch import (
    Command,
    Counterpart,
    Deployment,
    DeployRequest,
    EngineWriter,
    ExaminedFiles,
    is_local,
    map_options,
)
from forerun.drafters.kinds import KINDS
from forerun.errors import ArgumentError
from forerun.heads.engines import SCRIPT, conversion_arguments, engines_for

SERVER = "llama-server"
_COPIES = {  # llama.cpp's own defaults are 12, 48 and 1
    "prompt_lookup_max": "--spec-ngram-simple-size-n",
    "num_speculative_tokens": "--spec-ngram-simple-size-m",
    "min_hits": "--spec-ngram-simple-min-hits",
}

ONE_AT_A_TIME = (
    "llama.cpp 0.5.0 accepts less of an EAGLE-3 head where several requests run at once (0.27 of first tokens with "
    "four, 0.56 with one; `make test-llama`): -np 1 lets them wait; DFlash and DSpark heads lose nothing"
)

_MATCHES = (
    "llama.cpp accepts a drafted token where it is the one that it samples itself, whatever the request's sampling"
)


class LlamaCpp(EngineWriter):
    """Starts ``llama-server``."""

    title: ClassVar[str] = "llama.cpp"
    versions: ClassVar[tuple[str, ...]] = ("2026-11", "0.5.0")
    reads: ClassVar[str] = "llama.cpp"
    vocabulary_margin: ClassVar[int | None] = 128
    combines: ClassVar[tuple[str, ...]] = ("ngram",)
    ways: ClassVar[dict[str, Counterpart]] = {
        "ngram": Counterpart(name="ngram-simple", options=_COPIES, model=False),
        "draft_model": Counterpart(name="draft-simple"),
        "eagle3": Counterpart(name="draft-eagle3", note=ONE_AT_A_TIME),
        "dflash": Counterpart(name="draft-dflash"),
        "dflash2": Counterpart(name="draft-dflash"),
        "dspark": Counterpart(name="draft-dspark"),
        "mtp": Counterpart(name="draft-mtp", model=False),
    }

    def deployment(self) -> Deployment:
        request = self.request
        if request.nodes > 1:
            raise ArgumentError("llama.cpp is deployed on one machine: leave --nodes out, or take vllm or sglang")
        before = list[Command]()
        model = _gguf(request.model, None, before)
        words = [SERVER, *(["-m", model] if _is_file(model) else ["-hf", model]), "--port", str(request.port)]
        if request.tp * request.pp > 1:
            words += ["--split-mode", "tensor" if request.tp > 1 else "layer"]
            self.notes.append(
                "llama.cpp shares a model out to all devices that it sees; CUDA_VISIBLE_DEVICES says which"
            )
        words += self._speculation(before) if request.config is not None else []
        _probe(words, request)
        return Deployment(commands=(*before, Command(words=tuple(words), where="then" if before else "")))

    def _speculation(self, before: list[Command]) -> list[str]:
        draft, way, first = self.choose()
        self.notes.append(_MATCHES)
        examined, k = self.read_drafter(draft)
        self.note_chain(draft, k)
        self.schedule(k, able=False)
        copying = [each for each in (first, draft if way.name == "ngram-simple" else None) if each is not None]
        types = [*(["ngram-simple"] if first is not None else []), way.name]
        words = ["--spec-type", ",".join(types)]
        for each in copying:
            copies = map_options(each, self.ways[each.method])
            words += [str(word) for pair in copies.items() for word in pair]
        if way.name == "ngram-simple":
            return words
        if draft.model is not None:
            if draft.method in KINDS and is_local(draft.model) and not is_local(self.request.model):
                raise ArgumentError(
                    f"llama.cpp's converter reads layers of the target for a head: name the target's directory instead "
                    f"of {self.request.model}, or the GGUF file of a head that is converted"
                )
            name = _gguf(draft.model, examined, before)
            words += ["--spec-draft-model" if _is_file(name) else "--spec-draft-hf", name]
        return [*words, "--spec-draft-n-max", str(k)]


def _is_file(model: str) -> bool:
    return model.endswith(".gguf") or Path(model).is_file()  # Ollama's have no ending


def _gguf(model: str, examined: ExaminedFiles | None, before: list[Command]) -> str:
    """Return what llama.cpp opens: a file, or a hub id of GGUF files; a directory is converted
    `before`.
    """
    if not is_local(model):
        return model
    folder = Path(model).expanduser().resolve()
    launch = examined.launch if examined is not None else None
    is_head = launch is not None and "llama.cpp" in engines_for(launch.head.config.kind).destinations
    words = conversion_arguments(
        folder, target=str(Path(launch.target.name_or_path).resolve()) if launch is not None and is_head else None
    )
    before.append(
        Command(
            words=("python", SCRIPT, *words), where="once, in llama.cpp's sources", role="before", script="convert.sh"
        )
    )
    return words[-1]


def _probe(words: list[str], request: DeployRequest) -> None:
    """Refuse options that the ``llama-server`` of this machine does not have; without one nothing
    is known.
    """
    program = shutil.which(SERVER)
    if program is None or request.force:
        return
    answer: Any = subprocess.run([program, "--help"], capture_output=True, text=True, timeout=60, check=False)
    text = answer.stdout + answer.stderr
    flags = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", text))
    types = words[words.index("--spec-type") + 1].split(",") if "--spec-type" in words else []
    lost = [word for word in words if word.startswith("-") and word not in flags]
    lost += [name for name in types if name not in text]
    if lost:
        raise ArgumentError(
            f"{program} has no {', '.join(lost)}: it is older or newer than what is "
            f"known here ({LlamaCpp.versions[-1]}); install another build, or --force"
        )
