"""Every drafter on the same work: continuing a file, similar requests in a row, functions to be edited.

The texts come from files held out of training. Knows the workloads and what is summed up; no goals and no printing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.suite.arms import Arm, ForerunArm, Run, TransformersArm
from benchmarks.suite.planned import planned_speedup
from benchmarks.suite.speed import ArmSummary, Progress, summarise, take_turns, warm_up
from benchmarks.suite.workloads import Setting, settings
from forerun import LLM
from forerun.control.costs import CostModel, DraftCost
from forerun.demo import CONTEXT, contexts, edits

FAMILY = 4
"""Similar requests in a row."""
SHIFT = 12
"""Tokens by which the next of them starts later in the same file."""
PLAIN = "forerun plain"


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Requests that every arm answers in this order."""

    name: str
    setting: Setting
    prompts: Sequence[Sequence[int]]
    lengths: Sequence[int] | None = None
    """Tokens that each answer has, where they differ."""
    predictions: Sequence[Sequence[int]] | None = None
    """What a client would send along as predicted output."""

    @property
    def label(self) -> str:
        """For tables."""
        return f"{self.name}, {self.setting.label}"

    def asked(self, index: int, setting: Setting) -> Setting:
        """How prompt number `index` is answered."""
        length = setting.new_tokens if self.lengths is None else self.lengths[index]
        return replace(setting, new_tokens=min(length, setting.new_tokens))


@dataclass(frozen=True, kw_only=True, slots=True)
class ContestLine:
    """One arm on one workload."""

    workload: str
    summary: ArmSummary
    speedup: float
    """Over forerun's plain decoding on the same requests."""
    seconds: float
    """Decoding time of all its answers."""
    host_share: float | None = None
    """Share of that time in which no pass of the target ran; None where the arm does not tell."""
    predicted: float | None = None
    """What `forerun plan` says beforehand, from acceptance per depth and measured costs."""


@dataclass(kw_only=True, slots=True)
class Contest:
    """What was found."""

    lines: list[ContestLine] = field(default_factory=list)
    unlike: dict[str, int] = field(default_factory=dict)
    """Workload and arm -> answers that differ from plain decoding's, greedy workloads only."""

    def of(self, workload: str) -> list[ContestLine]:
        """The lines of one workload."""
        return [line for line in self.lines if line.workload == workload]

    @property
    def workloads(self) -> list[str]:
        """In the order in which they ran."""
        return list(dict.fromkeys(line.workload for line in self.lines))


def workloads(tokenizer: Any, *, quick: bool) -> list[Workload]:
    """*complete* (sampled and greedy), *repeat* and *edit*."""
    count = 2 if quick else 6
    pieces = contexts(tokenizer, count=count)
    found = [Workload(name="complete", setting=setting, prompts=pieces) for setting in settings(quick=quick)]
    longer = contexts(tokenizer, count=max(1, count // 2), length=CONTEXT + SHIFT * FAMILY)
    repeated = [piece[SHIFT * turn :][:CONTEXT] for piece in longer for turn in range(FAMILY)]
    sampled = Setting(name="sampled", temperature=0.8, top_p=0.95, new_tokens=48 if quick else 96)
    return [*found, Workload(name="repeat", setting=sampled, prompts=repeated), _edits(tokenizer, count)]


def _edits(tokenizer: Any, count: int) -> Workload:
    """The longest of the shipped edits, asked for in a chat: most of an answer is the function that was shown."""
    chosen = sorted(edits(), key=lambda edit: -len(edit.answer))[:count]
    chats = [tokenizer.apply_chat_template(one.messages, add_generation_prompt=True, tokenize=False) for one in chosen]
    prompts = [tokenizer.encode(chat, add_special_tokens=False) for chat in chats]
    lengths = [len(tokenizer.encode(one.answer, add_special_tokens=False)) + 1 for one in chosen]  # and its end
    shown = [tokenizer.encode(one.function, add_special_tokens=False) for one in chosen]
    setting = Setting(name="edit", temperature=0.0, new_tokens=max(lengths))
    return Workload(name="edit", setting=setting, prompts=prompts, lengths=lengths, predictions=shown)


class Contestant:
    """A drafter in the engine, with a clock around the target's passes."""

    def __init__(
        self,
        name: str,
        llm: LLM,
        speculative: Mapping[str, Any] | bool,
        work: Workload,
        *,
        cost: DraftCost | None = None,
    ) -> None:
        """`cost`: of the drafter, measured apart; None where nothing is to be predicted."""
        self.name, self.cost, self._work = name, cost, work
        self._arm = ForerunArm(name, llm, speculative, predictions=work.predictions)
        self._target = llm.target
        self.pass_s = 0.0
        """Time in the target's passes so far, the prompts' left out."""

    def run(self, index: int, prompt: Sequence[int], setting: Setting, seed: int) -> Run:
        """Answer prompt number `index`."""
        with self._timed():
            return self._arm.run(index, prompt, self._work.asked(index, setting), seed)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        target, inner = self._target, self._target.score

        def score(*positional: Any, **named: Any) -> Any:
            began = time.perf_counter()
            result = inner(*positional, **named)
            self.pass_s += time.perf_counter() - began
            return result

        target.score = score  # type: ignore[method-assign]
        try:
            yield
        finally:
            del target.score


class TransformersContestant:
    """transformers' own decoding."""

    def __init__(self, name: str, model: Any, options: Mapping[str, Any], work: Workload) -> None:
        self.name, self._model, self._options, self._work = name, model, options, work

    def run(self, index: int, prompt: Sequence[int], setting: Setting, seed: int) -> Run:
        """Answer prompt number `index`."""
        arm = TransformersArm(self.name, self._model, self._options)
        return arm.run(index, prompt, self._work.asked(index, setting), seed)


def compete(
    arms: Sequence[Arm], work: Workload, contest: Contest, progress: Progress, cost: CostModel | None = None
) -> None:
    """Run one workload, the arms taking turns request by request, and add its lines to `contest`.

    Args:
        cost: of the target's passes, to predict speed-ups from.
    """
    clocks = [arm for arm in arms if isinstance(arm, Contestant)]

    def report(text: str) -> None:
        progress(f"{work.name}: {text}")

    warm_up(arms, work.prompts, work.setting, report)
    for arm in clocks:
        arm.pass_s = 0.0
    runs = take_turns(arms, work.prompts, work.setting, report)
    seconds = {arm.name: sum(run.decode_s for run in runs if run.arm == arm.name) for arm in arms}
    known = {arm.name: arm for arm in clocks}
    lines = {line.arm: line for line in summarise(runs, [arm.name for arm in arms], PLAIN)}
    base = lines[PLAIN].tokens_per_second
    for name, line in lines.items():
        clock = known.get(name)
        steps = [step for run in runs if run.arm == name for step in run.trace]
        predicted = None
        if cost is not None and clock is not None and clock.cost is not None:
            predicted = planned_speedup(cost, clock.cost, steps)
        contest.lines.append(
            ContestLine(
                workload=work.label,
                summary=line,
                speedup=line.tokens_per_second / base,
                seconds=seconds[name],
                host_share=None if clock is None else 1 - clock.pass_s / seconds[name],
                predicted=predicted,
            )
        )
    if work.setting.temperature == 0:
        plain = {run.prompt: run.tokens for run in runs if run.arm == PLAIN}
        for run in runs:
            key = f"{work.label}: {run.arm}"
            contest.unlike[key] = contest.unlike.get(key, 0) + (run.tokens != plain[run.prompt])
