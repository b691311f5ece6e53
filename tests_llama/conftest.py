"""llama.cpp's sources with its server, and heads of every kind that it drafts with, trained here in seconds."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from forerun.cli import main as forerun
from forerun.deploy.trials.trial import EngineTrial, HeadDrafting, run_trial
from forerun.deploy.trials.try_llama_cpp import InLlamaCpp
from forerun.drafters.kinds import kind_named
from forerun.heads.engines import export_head
from forerun.heads.files import HeadCheckpoint, TargetFacts, format_for, write_head
from forerun.shipped import FOLDER
from tests_vllm.targets import FAMILIES

ROOT = Path(__file__).parents[1]
TARGET = FOLDER / "target"
PROMPT, TOKENS, TEXTS = 1200, 48, 6
"""Characters of a prompt, tokens of an answer, and how many there are."""
TRIALS = pytest.StashKey[dict[str, EngineTrial]]()
SETTINGS = ("training.dtype=float32", "target_dtype=float32", "windows.length=256", "training.log_every_steps=8")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A head of a kind."""

    kind: str
    target: str = "demo"  # Or a family of `tests_vllm.targets.FAMILIES`, which brings an MTP layer
    steps: int = 24  # Of training; 0: random
    rate: float = 5e-3  # Of learning
    options: Mapping[str, Any] = field(default_factory=dict)
    k: int = 5
    rows: int = 1  # Answers of llama.cpp at once
    refused: str = ""  # What llama.cpp says of it, a regular expression


BLOCK = {"num_hidden_layers": 2, "block_size": 6}
DFLASH = Case(kind="dflash", steps=240, rate=2e-3, options=BLOCK)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--llama-cpp", type=Path, required=True, help="llama.cpp's sources, built")
    parser.addoption("--work", type=Path, default=ROOT / "build/llama", help="where data, heads and exports go")


@pytest.fixture(scope="session")
def sources(request: pytest.FixtureRequest) -> Path:
    found: Path = request.config.getoption("--llama-cpp")
    return found.absolute()


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    from forerun import demo

    return [one.text[:PROMPT] for one in demo.prompts()[:TEXTS]]


@pytest.fixture(scope="session")
def work(request: pytest.FixtureRequest, prompts: Sequence[str]) -> Path:
    """Has training data: what the target says to these very prompts, so that heads guess some of it after seconds."""
    from forerun import LLM, SamplingParams

    folder: Path = request.config.getoption("--work")
    data = folder.absolute() / "prepared"
    if not data.exists():
        folder.mkdir(parents=True, exist_ok=True)
        made = LLM("demo", dtype="float32").generate(prompts, SamplingParams(temperature=0, max_tokens=TOKENS))
        lines = [{"text": text[-400:] + one.outputs[0].text} for text, one in zip(prompts, made, strict=True)]
        texts = folder / "texts.jsonl"
        texts.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        assert forerun(["data", "prepare", str(texts), "--target", "demo", "--output", str(data)]) == 0
    return folder.absolute()


@pytest.fixture(scope="session")
def trials(request: pytest.FixtureRequest) -> Iterator[dict[str, EngineTrial]]:
    """What llama.cpp and forerun made of each case."""
    yield request.config.stash.setdefault(TRIALS, {})


def head_of(case: Case, work: Path) -> Path:
    """Its directory, as it is trained; kept between runs."""
    name = re.sub(r"\W+", "-", f"{case.kind} {dict(case.options)} {case.steps}").strip("-").lower()
    run = work / "runs" / name
    if case.kind == "draft_model":
        return FOLDER / "draft"
    if case.kind == "mtp":
        return target_of(case, work)
    if not case.steps:
        return _random(case, work / "random" / name)
    if not (run / "head").exists():
        words = ["train", case.kind, "--target", str(TARGET), "--data", str(work / "prepared"), "--output", str(run)]
        words += ["--json", f"training.steps={case.steps}", f"training.learning_rate={case.rate}", *SETTINGS]
        words += [f"draft.options={json.dumps(dict(case.options))}"] if case.options else []
        assert forerun(words) == 0
    return run / "head"


def target_of(case: Case, work: Path) -> Path:
    """Of the case."""
    folder = TARGET if case.target == "demo" else work / "targets" / case.target
    return folder if folder.exists() else FAMILIES[case.target](folder)


def _random(case: Case, folder: Path) -> Path:
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    made_of = kind_named(case.kind).head
    torch.manual_seed(0)
    head = made_of.initial(model, made_of.Config.for_target(case.kind, model, None, case.options))
    return write_head(HeadCheckpoint.of(head), folder, format_for(case.kind), TargetFacts.read(TARGET))


def in_llama_cpp(case: Case, name: str, work: Path, sources: Path, prompts: Sequence[str]) -> EngineTrial:
    """Drafts in both engines, as `forerun export` writes it for llama.cpp; a head that is refused as it is."""
    head, target = head_of(case, work), target_of(case, work)
    if case.kind not in ("draft_model", "mtp") and not case.refused:
        facts = TargetFacts.read(TARGET)
        head = export_head(head, facts, "llama.cpp", work / "exported" / name).directory
    drafting = HeadDrafting(head=str(head), kind=case.kind, target=str(target), k=case.k)
    engine = InLlamaCpp(drafting, sources, Path(sys.executable), case.rows)
    return run_trial(engine, prompts=prompts, tokens=TOKENS, dtype="float32")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The table of all that was tried."""
    found = config.stash.get(TRIALS, {})
    if not found:
        return
    columns = ("kind", "llama.cpp", "first token accepted, llama.cpp / forerun", "mean acceptance length", "same steps")
    table = Table(*columns, title=f"llama.cpp {next(iter(found.values())).version} beside forerun")
    for name, one in found.items():
        if one.refused:
            table.add_row(name, one.refused, "", "", "")
            continue
        rates, lengths = one.positions[0].rates, one.lengths
        shown = f"{rates[1]:.2f} / {rates[0]:.2f}", f"{lengths[1]:.2f} / {lengths[0]:.2f}"
        table.add_row(name, "drafts", *shown, f"{one.steps.same} of {one.steps.compared}")
    Console(width=140).print(table)
