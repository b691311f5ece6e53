"""The same targets, heads and prompts in both engines, greedy, in float32, and what became of every draft.

In float32 only a fault should part two texts (in bfloat16 the two engines' rounding would, at every near tie), so
drafts are compared on the same text.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

import heads
from forerun import LLM
from forerun.demo import prompts
from forerun.deploy.engines.vllm import PLUG_IN, VARIABLE
from forerun.deploy.trials.trial import (
    ROWS,
    ComparedSteps,
    Position,
    TrialAnswer,
    answer_prompts,
    compare_steps,
    count_positions,
    mean_length,
)
from forerun.deploy.trials.try_vllm import ask_vllm
from forerun.shipped import FOLDER

SOURCE = Path(__file__).parents[1] / "src"
CONTEXT, MAX_MODEL_LEN, LENGTH = 300, 1024, 5
"""Tokens of a prompt; most tokens of prompt and answer in vLLM; tokens of a draft."""
LEARNED = 64
"""Tokens of each prompt before the answer that heads are trained on: the target's own to these prompts, so that they
guess some tokens right after seconds."""
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2", "PYTHONPATH": f"{SOURCE}{os.pathsep}{SOURCE.parent}"}
"""Of vLLM's processes, besides what `forerun.deploy.trials.try_vllm` gives them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One way to draft. Without `kind`, `vllm` says it all, and `forerun` where it differs."""

    kind: str | None = None
    target: str = "demo"  # Or a family of `targets.FAMILIES`
    steps: int = 0  # Of training; see `heads.made`
    rate: float = 5e-3  # Of learning
    options: Mapping[str, Any] = field(default_factory=dict)  # Of the head's shape
    length: int = LENGTH  # Tokens of a draft
    vllm: Mapping[str, Any] | None = None
    plugged: Mapping[str, Any] | None = None  # Forerun's configuration, if its own drafter runs inside vLLM
    forerun: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)  # Of `vllm.LLM`
    compared: str = "steps"
    """``steps``: both run the same network, so each step accepts the same; ``rates``: both accept as much at each
    position; ``first``: at the first; ``loads``: nothing is compared."""
    refused: str = ""  # What vLLM says, a regular expression; empty: it drafts
    doctor: str = ""  # What `forerun doctor` says then, or of what is not the same

    @property
    def plain(self) -> bool:
        """Whether nothing is drafted."""
        return self.kind is None and self.vllm is None and self.plugged is None


@dataclass(kw_only=True, slots=True)
class Row:
    """A line of the table."""

    name: str
    length: int
    refused: str = ""
    texts: bool | None = None
    ours: Sequence[TrialAnswer] = ()
    theirs: Sequence[TrialAnswer] = ()

    @property
    def lines(self) -> list[Position]:
        return count_positions(self.name, self.ours, self.theirs, self.length)

    @property
    def steps(self) -> ComparedSteps:
        return compare_steps(self.ours, self.theirs, self.length)

    def cells(self) -> list[str]:
        """The line itself, by `COLUMNS`."""
        loads = self.refused.splitlines()[0] if self.refused else "drafts"
        if self.texts is None or not self.length:
            return [self.name, loads, "-" if self.texts is None else _yes(self.texts), "-", "-", "-"]
        first = self.lines[0]
        rates = [f"{kept / max(1, tried):.2f}" for kept, tried in zip(first.accepted, first.drafted, strict=True)]
        lengths = [f"{mean_length(answers):.2f}" for answers in (self.theirs, self.ours)]
        same = f"{self.steps.same} / {self.steps.compared}"
        return [self.name, loads, _yes(self.texts), " / ".join(rates[::-1]), " / ".join(lengths), same]

    def as_json(self) -> dict[str, Any]:
        """The line, and the counts behind it, ours first."""
        lines = [{"accepted": line.accepted, "drafted": line.drafted} for line in self.lines]
        return {**dict(zip(COLUMNS, self.cells(), strict=True)), "positions": lines}


COLUMNS = (
    "kind",
    "vLLM",
    "same text",
    "first token accepted, vLLM / forerun",
    "mean acceptance length, vLLM / forerun",
    "steps that accept the same",
)


class Lab:
    """Both engines' answers, arm by arm."""

    def __init__(self, *, work: Path, python: Path, prompts: int, tokens: int) -> None:
        self.work, self.python, self.count, self.tokens = work.absolute(), python, prompts, tokens
        self.rows: dict[str, Row] = {}
        self.heads: dict[str, heads.Made] = {}
        self.plain: dict[str, list[TrialAnswer]] = {}  # By target
        self.found: dict[str, dict[str, Any]] = {}
        self.prompts: list[list[int]] = []

    def run(self, arms: Mapping[str, Arm]) -> None:
        """Make the heads, and let both engines answer."""
        self.work.mkdir(parents=True, exist_ok=True)
        llm = LLM(FOLDER / "target", dtype="float32", max_num_seqs=ROWS, max_model_len=MAX_MODEL_LEN)
        texts = [llm.tokenizer.encode(one.text, add_special_tokens=False, verbose=False) for one in prompts()]
        self.prompts = [text[:CONTEXT] for text in texts[: self.count]]
        plain = self.plain["demo"] = self._answers(llm, False)
        learned = [prompt[-LEARNED:] + one.token_ids for prompt, one in zip(self.prompts, plain, strict=True)]
        heads.prepare(self.work, [(llm.tokenizer.decode(text), LEARNED) for text in learned])
        for name, arm in arms.items():
            if arm.kind is not None:
                shape = {"target": arm.target, "steps": arm.steps, "rate": arm.rate, "options": arm.options}
                self.heads[name] = heads.made(arm.kind, self.work, **shape)
        for target in sorted({arm.target for arm in arms.values()}, key=lambda one: one != "demo"):
            chosen = {name: arm for name, arm in arms.items() if arm.target == target}
            if target != "demo":
                folder = next(self.heads[name].target for name in chosen)
                llm = LLM(folder, dtype="float32", max_num_seqs=ROWS, max_model_len=MAX_MODEL_LEN)
                self.plain[target] = self._answers(llm, False)
            self._forerun(llm, target, chosen)
        self._vllm(arms)

    def _answers(self, llm: LLM, speculative: Any, salt: str | None = None) -> list[TrialAnswer]:
        return answer_prompts(llm, self.prompts, self.tokens, speculative, salt)

    def _forerun(self, llm: LLM, target: str, arms: Mapping[str, Arm]) -> None:
        """Our answers with each drafter that vLLM does not refuse."""
        for name, arm in arms.items():
            self.rows[name] = row = Row(name=name, length=0 if arm.plain else arm.length)
            if arm.plain:
                row.ours = self.plain[target]
            elif not arm.refused:
                row.ours = self._answers(llm, self._speculative(name, arm), name)  # No arm knows another's answers

    def _speculative(self, name: str, arm: Arm) -> dict[str, Any]:
        """What forerun is told: a chain as vLLM drafts it, the same at every step."""
        fixed = {"num_speculative_tokens": arm.length, "adaptive": False}
        if "drafters" in (arm.plugged or {}):
            del fixed["num_speculative_tokens"]  # its members have it
        if arm.kind is None:
            return {**(arm.vllm or arm.plugged or {}), **arm.forerun, **fixed}
        return {"method": arm.kind, "model": str(self.heads[name].directory), **arm.forerun, **fixed}

    def _vllm(self, arms: Mapping[str, Arm]) -> None:
        """What `vllm_answers.py` found; everything vLLM says goes to logs. AssertionError: a process of it died."""
        plan: dict[str, Any] = {"dtype": "float32", "max_tokens": self.tokens, "rows": ROWS}
        plan |= {"prompts": self.prompts, "arms": {}}
        for name, arm in arms.items():
            made = self.heads.get(name)
            target, speculation = FOLDER / "target" if made is None else made.target, None
            if not arm.plain:
                speculation = {**(arm.vllm or {}), **(made.speculation if made else {})}
                speculation["num_speculative_tokens"] = arm.length
            environment = {}
            if arm.plugged is not None:
                environment = {VARIABLE: json.dumps(arm.plugged), "VLLM_USE_V2_MODEL_RUNNER": "0"}
                speculation |= {"method": "custom_class", "model": PLUG_IN}
            engine = {"max_model_len": MAX_MODEL_LEN, **arm.engine}
            plan["arms"][name] = {
                "target": str(target), "vllm": speculation, "environment": environment, "engine": engine
            }  # fmt: skip
            (self.work / f"{name}.json").unlink(missing_ok=True)
        ask_vllm(plan, self.work, self.python, ENVIRONMENT)
        for name in arms:
            file = self.work / f"{name}.json"
            if not file.exists():
                continue
            found = self.found[name] = json.loads(file.read_text(encoding="utf-8"))
            self.rows[name].refused = found.get("refused", "")
            self.rows[name].theirs = [TrialAnswer(**answer) for answer in found.get("answers", ())]


def counters(row: Row, found: Mapping[str, Any]) -> str:
    """Empty where vLLM's metrics tell what its outputs tell; otherwise one of them was misread."""
    told = [sum(kept > index for answer in row.theirs for kept in answer.accepted) for index in range(row.length)]
    metric = found["counters"].get("vllm:spec_decode_num_accepted_tokens_per_pos")
    steps = sum(len(answer.accepted) for answer in row.theirs), found["counters"].get("vllm:spec_decode_num_drafts")
    if told == metric and steps[0] == steps[1] and steps[0] > 0:
        return ""
    return f"vLLM's metrics say {metric} of {steps[1]} drafts, its outputs {told} of {steps[0]}"


def table(lab: Lab) -> Table:
    versions = sorted({f"{found['version']}, model runner {found.get('runner', '-')}" for found in lab.found.values()})
    made = Table(title=f"vLLM {'; '.join(versions)}; greedy, float32, CPU", title_justify="left")
    for column in COLUMNS:
        made.add_column(column, overflow="fold")
    for row in lab.rows.values():
        made.add_row(*row.cells())
    return made


def _yes(truth: bool) -> str:
    return "yes" if truth else "no"
