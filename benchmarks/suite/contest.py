"""Every drafter on the same work: continuing a file, similar requests in a row, an edited file replayed.

The texts come from files held out of training. Knows the workloads and what is summed up; no goals and no printing.
"""

from __future__ import annotations

import keyword
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from benchmarks.suite.arms import Arm, ForerunArm, Run, TransformersArm
from benchmarks.suite.planned import planned_speedup
from benchmarks.suite.speed import ArmSummary, Progress, summarise, take_turns, warm_up
from benchmarks.suite.workloads import Setting, settings
from forerun import LLM
from forerun.core.tree import TokenTree
from forerun.demo import CONTEXT, contexts
from forerun.demo import prompts as shipped_files
from forerun.engine.costs import CostModel, DraftCost
from forerun.model import Scored, Target
from forerun.model.inputs import Nodes

# Replay: the target is made to say a given text, position by position, while everything else stays as it is.
#
# Passes, drafts, verification and commits are real, and so is their cost; only what the target answers is given.
# Greedy decoding alone, one sequence at a time. Knows no workload.


_LEAD = 20.0
"""How far, in logits, the given token stands above the others."""


@contextmanager
def replaying(target: Target, text: Sequence[int]) -> Iterator[None]:
    """While open, the token that `target` likes best at place i of any sequence is ``text[i]``.

    Args:
        text: prompt and answer; behind its end the target says what it likes.
    """
    score, prefill = target.score, target.prefill

    def forced_score(rows: Sequence[int], trees: Sequence[TokenTree] | Nodes, **more: Any) -> Scored:
        nodes = trees if isinstance(trees, Nodes) else Nodes.of_trees(trees)
        scored = score(rows, nodes, **more)
        for index, row in enumerate(rows):
            for node, depth in enumerate(nodes.depths[index, nodes.start :].tolist()):
                _force(scored.logits[index, node], text, target.lengths[row] + depth + 1)
        return scored

    def forced_prefill(rows: Sequence[int], tokens: Sequence[Sequence[int]], **more: Any) -> Scored:
        scored = prefill(rows, tokens, **more)
        logits = scored.logits.clone()
        for index, row in enumerate(rows):
            _force(logits[index, -1], text, target.lengths[row])
        return replace(scored, logits=logits)

    target.score, target.prefill = forced_score, forced_prefill  # type: ignore[method-assign]
    try:
        yield
    finally:
        del target.score, target.prefill


class ReplayProcessor:
    """The same for transformers' ``generate(logits_processor=[...])``."""

    def __init__(self, text: Sequence[int]) -> None:
        self._text = text

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        for row in scores:
            _force(row, self._text, input_ids.shape[1])
        return scores


def _force(logits: Tensor, text: Sequence[int], place: int) -> None:
    if place < len(text):
        logits[text[place]] = logits.max() + _LEAD


# Small edits of a piece of source code: what an answer to "change this file" looks like. Knows no model.
#
# The demo model cannot follow an instruction, so the edited text is not generated but replayed
# (`benchmarks.suite.contest`).


_NAME = re.compile(r"\b[a-z_][a-z0-9_]{3,}\b")
_NUMBER = re.compile(r"(?<![\w.])\d+(?![\w.])")


def edited(text: str, seed: int) -> str:
    """`text` with one name changed everywhere, one line dropped, one line added and one number changed.

    A change for which the text has no place is left out. The same seed gives the same edit.
    """
    chance = random.Random(seed)
    changes: tuple[Callable[[str, random.Random], str], ...] = (_rename, _drop_line, _add_line, _change_number)
    for change in changes:
        text = change(text, chance)
    return text


def _rename(text: str, chance: random.Random) -> str:
    counts = Counter(name for name in _NAME.findall(text) if not keyword.iskeyword(name))
    often = sorted(name for name, count in counts.items() if 3 <= count <= 8)
    if not often:
        return text
    name = chance.choice(often)
    return re.sub(rf"\b{re.escape(name)}\b", f"new_{name}", text)


def _drop_line(text: str, chance: random.Random) -> str:
    lines = text.splitlines(keepends=True)
    full = [index for index, line in enumerate(lines) if line.strip()]
    if len(full) > 4:
        del lines[chance.choice(full[1:-1])]
    return "".join(lines)


def _add_line(text: str, chance: random.Random) -> str:
    lines = text.splitlines(keepends=True)
    full = [index for index, line in enumerate(lines) if line.strip()]
    if len(full) > 4:
        place = chance.choice(full[1:-1])
        indent = lines[place][: len(lines[place]) - len(lines[place].lstrip())]
        lines.insert(place, f"{indent}# Checked by hand, see the report of last week.\n")
    return "".join(lines)


def _change_number(text: str, chance: random.Random) -> str:
    numbers = list(_NUMBER.finditer(text))
    if not numbers:
        return text
    found = chance.choice(numbers)
    return f"{text[: found.start()]}{int(found.group()) + 1}{text[found.end() :]}"


FAMILY = 4
"""Similar requests in a row."""
SHIFT = 12
"""Tokens by which the next of them starts later in the same file."""
EDITED_CHARACTERS = 1100
"""Of a file, edited: some 300 tokens."""
PLAIN = "forerun plain"


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Requests that every arm answers in this order."""

    name: str
    setting: Setting
    prompts: Sequence[Sequence[int]]
    answers: Sequence[Sequence[int]] | None = None
    """What the target is made to say; None: it answers by itself."""
    predictions: Sequence[Sequence[int]] | None = None
    """What a client would send along as predicted output."""

    @property
    def label(self) -> str:
        """For tables."""
        return f"{self.name}, {'replayed' if self.answers is not None else self.setting.label}"


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
    """A piece of a file as the prompt, the same piece with small changes as the answer."""
    prompts, answers = list[list[int]](), list[list[int]]()
    for number, file in enumerate(shipped_files()[:count]):
        start = file.text.find("\n", len(file.text) // 8) + 1
        piece = file.text[start : start + EDITED_CHARACTERS]
        piece = piece[: piece.rfind("\n") + 1]
        prompts.append(tokenizer.encode(piece, add_special_tokens=False))
        answers.append(tokenizer.encode(edited(piece, seed=number), add_special_tokens=False))
    shortest = min(map(len, answers))
    setting = Setting(name="edit", temperature=0.0, new_tokens=shortest)
    return Workload(name="edit", setting=setting, prompts=prompts, answers=answers, predictions=prompts)


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
        said = None if self._work.answers is None else [*prompt, *self._work.answers[index]]
        with nullcontext() if said is None else replaying(self._target, said), self._timed():
            return self._arm.run(index, prompt, setting, seed)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        target, inner = self._target, self._target.score
        replayed = "score" in vars(target)

        def score(*positional: Any, **named: Any) -> Any:
            began = time.perf_counter()
            result = inner(*positional, **named)
            self.pass_s += time.perf_counter() - began
            return result

        target.score = score  # type: ignore[method-assign]
        try:
            yield
        finally:
            if replayed:
                target.score = inner  # type: ignore[method-assign]
            else:
                del target.score


class TransformersContestant:
    """transformers' own decoding, replayed where the workload is."""

    def __init__(self, name: str, model: Any, options: Mapping[str, Any], work: Workload) -> None:
        self.name, self._model, self._options, self._work = name, model, options, work

    def run(self, index: int, prompt: Sequence[int], setting: Setting, seed: int) -> Run:
        """Answer prompt number `index`."""
        options = dict(self._options)
        if self._work.answers is not None:
            options["logits_processor"] = [ReplayProcessor([*prompt, *self._work.answers[index]])]
        return TransformersArm(self.name, self._model, options).run(index, prompt, setting, seed)


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
