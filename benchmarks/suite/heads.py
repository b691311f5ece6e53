"""Trained heads beside each other: tokens per pass at equal drafted nodes, and the goals that heads are held against.

The small target is decoded for real, as in `acceptance`; time plays no part but that which the heads were trained for.
Knows the engine and the folder of heads; no printing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.suite.acceptance import (
    CHAIN,
    NODES,
    Acceptance,
    AcceptanceLine,
    AcceptancePlan,
    Way,
    measure_way,
    ratio,
)
from benchmarks.suite.goals import Goal, at_least
from benchmarks.suite.speed import Progress
from forerun import LLM
from forerun.cli.leaderboard import TrainedDrafter, find_trained
from forerun.demo import contexts, edits

TEMPERATURES = (0.0, 1.0)
BASE = "eagle3"
"""The kind of head whose chain is the measure."""
ORDER = (("dspark", "dflash"), ("dspark", BASE), ("hydra", "medusa"), (BASE, "eagle"))
"""Kinds of heads of which the first one is better as published."""
ALIKE = 1.05
"""Longest over shortest time of training that still is one budget."""


@dataclass(kw_only=True, slots=True)
class HeadBoard:
    """Everything that was found of a folder of heads."""

    heads: list[TrainedDrafter]
    found: Acceptance
    """A line's ``method`` is the name of a head, its ``form`` one of `forms`."""

    def best(self, kind: str, form: str, temperature: float) -> AcceptanceLine | None:
        """The longest line of a kind of head; None where none was measured."""
        lines = [self.found.best(head.name, form, temperature) for head in self.heads if head.kind.name == kind]
        return _longest(lines)

    @property
    def note(self) -> str | None:
        """What stands against comparing them."""
        seconds = [head.seconds for head in self.heads if head.seconds is not None]
        if len(seconds) < len(self.heads) or max(seconds) > ALIKE * min(seconds):
            said = f"{min(seconds):.0f} to {max(seconds):.0f} s" if seconds else "an unknown time"
            return f"the heads were trained for {said}: that is no single budget, see goals with care"
        return None


def forms(head: TrainedDrafter, temperature: float) -> dict[str, dict[str, Any]]:
    """How a head drafts: chains and trees by what is drafted. Trees are the likeliest paths; above temperature 0 also
    the drawn one that is drafted by default."""
    found = {f"chain of {CHAIN}": head.chain(CHAIN)}
    if head.max_depth is not None and head.max_depth > CHAIN:
        found["longest chain"] = head.chain(head.max_depth)
    if head.kind.name == BASE:
        found[f"chain of {NODES}"] = head.chain(NODES)
    for nodes in (CHAIN, NODES):
        if (tree := head.tree(nodes)) is not None:
            found[f"tree of {nodes}"] = {**tree, "draw": "deterministic"} if temperature else tree
    if temperature and (tree := head.tree(NODES)) is not None:
        found[f"drawn tree of {NODES}"] = tree
    whole = {"exit_below": 0.0} if head.kind.drafts == "adapter" else {}  # else a chain ends where the head is unsure
    return {form: {**config, **whole} for form, config in found.items()}


def ways(head: TrainedDrafter) -> Iterator[Way]:
    """A head in all its forms, temperature 0 first."""
    for temperature in TEMPERATURES:
        for form, config in forms(head, temperature).items():
            label, fixed = f"{head.name}, {form}", {**config, "adaptive": False}
            yield Way(label=label, method=head.name, form=form, temperature=temperature, config=fixed)


def held_out(llm: LLM, files: int, asked: int) -> list[list[int]]:
    """Prompts: excerpts of held-out files, and the longest of the shipped edits in chat form."""
    longest = sorted(edits(), key=lambda edit: len(edit.answer))[-asked:]
    chats = [llm.chat_prompt(edit.messages)["prompt_token_ids"] for edit in longest]
    return [*contexts(llm.tokenizer, count=files), *chats]


def measure_heads(
    engine: Callable[[], LLM], folder: Path, prompts: Sequence[Sequence[int]], plan: AcceptancePlan, progress: Progress
) -> HeadBoard:
    """Every head in `folder` on the same prompts, each in an `engine` of its own, for an engine keeps what has drafted.
    ArgumentError: there is no head."""
    board = HeadBoard(heads=find_trained(folder), found=Acceptance(head=str(folder)))
    for head in board.heads:
        llm = engine()
        board.found.lines += [measure_way(llm, way, prompts, plan, progress) for way in ways(head)]
    return board


def head_goals(board: HeadBoard) -> list[Goal]:
    """The best head against EAGLE-3's chain, trees against chains of parallel heads, and the published order."""
    goals = []
    for temperature in TEMPERATURES:
        at = f"T = {temperature:g}"
        for nodes in (CHAIN, NODES):
            chain = board.best(BASE, f"chain of {nodes}", temperature)
            fits = (f"chain of {nodes}", f"tree of {nodes}", f"drawn tree of {nodes}")
            others = [head.name for head in board.heads if head.kind.name != BASE]
            best = _longest([board.found.best(name, form, temperature) for name in others for form in fits])
            goals += _ratio(f"best head / EAGLE-3 chain, {nodes} nodes, {at}", 1.15, best, chain)
        for head in board.heads:
            if head.parallel:
                # At T = 1 a deterministic tree loses (docs/findings.md), so the drawn one may take its place.
                trees, chains = (f"tree of {NODES}", f"drawn tree of {NODES}"), (f"chain of {CHAIN}", "longest chain")
                tree, chain = (
                    _longest([board.found.best(head.name, form, temperature) for form in of]) for of in (trees, chains)
                )
                goals += _ratio(f"tree of {NODES} / own chain, {head.name}, {at}", 1.10, tree, chain)
        for better, other in ORDER:
            pair = [board.best(kind, f"chain of {CHAIN}", temperature) for kind in (better, other)]
            goals += _ratio(f"{better} / {other} as published, chains of {CHAIN}, {at}", 1.0, *pair)
    return goals


def _ratio(what: str, goal: float, one: AcceptanceLine | None, other: AcceptanceLine | None) -> list[Goal]:
    if one is None or other is None:
        return []
    found = ratio(one, other)
    lengths = f"{one.length:.2f} ({one.label}) over {other.length:.2f} ({other.label})"
    note = f"{lengths}; 95 % interval {found.low:.2f} to {found.high:.2f}"
    return [at_least(f"mean acceptance length, {what}", goal, found.value, note)]


def _longest(lines: Sequence[AcceptanceLine | None]) -> AcceptanceLine | None:
    return max((line for line in lines if line is not None), key=lambda line: line.length, default=None)
