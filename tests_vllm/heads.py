"""The heads that vLLM is to load: the shipped one, else one that `forerun train` makes in seconds, else a random one
where vLLM refuses the kind anyway. Each is exported for vLLM, and started as the export says. Knows no engine."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import targets
import torch
from transformers import AutoModelForCausalLM

from forerun.cli import main as forerun
from forerun.drafters.kinds import kind_named
from forerun.heads.engines import diagnose, engines_for, export_head
from forerun.heads.files import HeadCheckpoint, TargetFacts, format_for, read_head, write_head
from forerun.shipped import FOLDER

SHIPPED = FOLDER / "eagle3"
TRAINING = (*("training.dtype=float32", "target_dtype=float32", "windows.length=256", "training.log_every_steps=8"),)


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """A head for a target."""

    directory: Path  # As exported for vLLM, or for forerun where nothing is
    facts: TargetFacts
    speculation: Mapping[str, Any]  # What the export's line gives vLLM
    target: Path  # That vLLM loads

    def findings(self) -> list[str]:
        """What the doctor says of vLLM and this head, but that all is well."""
        head = read_head(self.directory, num_layers=self.facts.num_layers)
        found = (one for one in diagnose(head, self.facts) if one.engine == "vllm" and one.severity != "ok")
        return [f"{one.severity}: {one.what}: {one.why}" for one in found]


def made(kind: str, work: Path, *, target: str, steps: int, rate: float, options: Mapping[str, Any]) -> Made:
    """The head of a kind, trained for so many steps; 0: the shipped one of EAGLE-3, else a random one. What `work`
    holds already is taken as it is."""
    base = FOLDER / "target"
    if target != "demo":
        base = work / "targets" / target
        if not base.exists():
            targets.FAMILIES[target](base)
    facts = TargetFacts.read(base)
    name = kind if target == "demo" else f"{kind}-{target}"
    if steps:
        settings = [f"training.steps={steps}", f"training.learning_rate={rate}", *TRAINING]
        settings += [f"draft.options={json.dumps(dict(options))}"] if options else []
        source = _trained(kind, work / "runs" / f"{name}-{steps}", base, settings)
    elif kind == "eagle3":
        source = SHIPPED
    elif kind == "mtp":
        return Made(directory=base, facts=facts, speculation={"method": "mtp"}, target=base)
    else:
        source = _random(kind, base, work / "random" / kind, facts, options)
    if "vllm" not in engines_for(kind).destinations:
        return Made(directory=source, facts=facts, speculation={"method": kind, "model": str(source)}, target=base)
    shutil.rmtree(work / "exported" / name, ignore_errors=True)
    done = export_head(source, facts, "vllm", work / "exported" / name)
    words = shlex.split(done.command)
    return Made(directory=done.directory, facts=facts, speculation=json.loads(words[-1]), target=Path(words[2]))


def prepare(work: Path, texts: Sequence[tuple[str, int]]) -> None:
    """Make training data of these texts and the number of tokens at the beginning of each that do not count."""
    data = work / "prepared"
    if not data.exists():
        lines = [json.dumps({"text": text, "prompt_tokens": tokens}) + "\n" for text, tokens in texts]
        (work / "texts.jsonl").write_text("".join(lines), encoding="utf-8")
        words = ["data", "prepare", str(work / "texts.jsonl"), "--target", "demo", "--output", str(data)]
        if forerun(words) != 0:
            raise SystemExit("forerun data prepare failed")


def _trained(kind: str, run: Path, target: Path, settings: Sequence[str]) -> Path:
    if not (run / "head").exists():
        words = ["train", kind, "--target", str(target), "--data", str(run.parents[1] / "prepared")]
        words += ["--output", str(run), "--json", *settings]
        if forerun(words) != 0:
            raise SystemExit(f"forerun {shlex.join(words)} failed")
    return run / "head"


def _random(kind: str, target: Path, folder: Path, facts: TargetFacts, options: Mapping[str, Any]) -> Path:
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    made_of = kind_named(kind).head
    torch.manual_seed(0)
    head = made_of.initial(model, made_of.Config.for_target(kind, model, None, options))
    return write_head(HeadCheckpoint.of(head), folder, format_for(kind), facts)
