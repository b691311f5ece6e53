"""The planner turns acceptance and costs into speed-up by draft length, the best length, break-even
batch and a verdict.

This module draws cost models and plans. Needs matplotlib.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from forerun.control.costs import CostModel, DraftCost, PassCost
from forerun.core.acceptance import RankAcceptance
from forerun.drafters import DRAFTERS
from forerun.errors import ArgumentError
from forerun.plan import theory
from forerun.plan.assumptions import TEXTS
from forerun.plots import COLOURS, pyplot, save

MOST_K = 16  # Draft lengths that are looked at; more where the user wants more
MOST_BATCH = 1024
WORTH_IT, A_LITTLE = 1.3, 1.05
"""These predicted speed-ups separate worth it, and a small gain within the error of predictions,
from no gain.
"""

DraftAt = Callable[[int], DraftCost]  # The drafter's cost for a batch of that many rows


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanLoad:
    """The load that is planned for: acceptance, costs, batch."""

    survival: Sequence[float]  # By depth; beyond the last, its conditional acceptance goes on
    cost: PassCost
    draft: DraftAt
    rows: int = 1  # Batch: sequences that are decoded together
    context: int = 0  # Committed tokens of each row
    coverage: float = 1.0  # Share of the steps in which something is drafted
    nodes_per_level: float = 1.0  # Drafted nodes over the K that was allowed; below 1 where a drafter finds less to say
    filled: float = 1.0  # Mean depth of a draft over the K that was allowed

    def __post_init__(self) -> None:
        if self.rows < 1 or self.context < 0:
            raise ArgumentError(f"--batch must be at least 1 and --context at least 0, got {self.rows}, {self.context}")

    def predict(self, k: int, rows: int | None = None) -> theory.SpeedPrediction:
        """Predict what a draft of `k` levels brings; 0 is plain decoding."""
        rows = rows or self.rows
        return theory.predict(
            self.cost,
            acceptance_per_depth=theory.stretch(self.survival, k),
            draft=self.draft(rows) if k else DraftCost(fixed_ms=0.0, level_ms=0.0),
            depth=k * self.filled,
            nodes=k * self.nodes_per_level,
            rows=rows,
            context=self.context,
            coverage=self.coverage,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanLine:
    """The prediction for one draft length."""

    k: int
    tokens_per_pass: float
    speedup: float
    v: float  # Cost of the pass over all nodes, in plain passes
    step_ms: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The predictions by draft length and by batch, and the best of them."""

    lines: tuple[PlanLine, ...]  # By draft length, from 0
    requested: PlanLine  # The length that was requested, else the best
    best: PlanLine
    break_even_batch: int | None  # Largest batch where `requested` (or K = 1) gains 2 %; None: beyond `MOST_BATCH`
    batches: tuple[tuple[int, float], ...]  # (batch, speed-up of the best length there)
    unbounded: bool  # Neither drafting nor verifying costs anything on paper, so more is always better


def plan(load: PlanLoad, *, k: int | None = None) -> Plan:
    """Predict every draft length and every batch; ArgumentError if `k` is below 1."""
    if k is not None and k < 1:
        raise ArgumentError(f"at least one token must be drafted: -k must be 1 or more, got {k}")
    lines = [_line(load, length) for length in range(max(MOST_K, k or 0) + 1)]
    best = max(lines, key=lambda line: line.speedup)
    requested = best if k is None else lines[k]
    powers = [1 << power for power in range(MOST_BATCH.bit_length())]
    gains = [max(load.predict(length, rows).speedup for length in range(MOST_K + 1)) for rows in powers]
    last = theory.break_even_batch(lambda rows: load.predict(requested.k or 1, rows).speedup, most=MOST_BATCH)
    return Plan(
        lines=tuple(lines),
        requested=requested,
        best=best,
        break_even_batch=last,
        batches=tuple(zip(powers, gains, strict=True)),
        unbounded=best.k == lines[-1].k and lines[-1].v == 1.0 and load.draft(load.rows).level_ms == 0,
    )


def _line(load: PlanLoad, k: int) -> PlanLine:
    found = load.predict(k)
    nodes = 1 + round(k * load.nodes_per_level)
    verify = load.cost.pass_ms(nodes, load.rows, load.context) / load.cost.pass_ms(1, load.rows, load.context)
    return PlanLine(k=k, tokens_per_pass=found.tokens_per_pass, speedup=found.speedup, v=verify, step_ms=found.step_ms)


def plan_tree(load: PlanLoad, acceptance: RankAcceptance, *, nodes: int, depth: int) -> theory.TreeChoice:
    """Return the fastest tree of at most `nodes` nodes and `depth` levels for acceptance by depth
    and rank.
    """
    plain, draft = load.cost.pass_ms(1, load.rows, load.context), load.draft(load.rows)
    return theory.best_tree_size(
        acceptance,
        fixed_cost=draft.fixed_ms / plain,
        level_cost=draft.level_ms / plain,
        verify=lambda count: load.cost.pass_ms(count, load.rows, load.context),
        nodes=nodes,
        depth=depth,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanVerdict:
    """The verdict whether speculation is worth it, and with which drafter."""

    worth_it: bool | None  # None where nothing says what drafting or verifying costs
    method: str | None  # A drafter of `forerun drafters`; None where plain decoding is best
    words: str
    notes: list[str] = field(default_factory=list)


def decide(
    plan: Plan, load: PlanLoad, *, drafter: str | None, text: str | None, uncosted: Sequence[str] = ()
) -> PlanVerdict:
    """Return the verdict for the measured `drafter`, or for the one that published figures favour
    for a kind of `text`.

    `uncosted` names drafting, verifying or both, where nothing says what they cost. The gain is
    then an upper bound, which can rule speculation out but not promise a gain.
    """
    best = plan.best
    gain = f"{best.speedup:.2f} x plain decoding with K = {best.k}"
    free = "the longest draft considered, because a longer one costs nothing more here"
    gain += f", {free}" if plan.unbounded else f" at batch {load.rows}"
    if plan.requested.k != best.k:
        gain += f" (K = {plan.requested.k}: {plan.requested.speedup:.2f} x)"
    if best.k == 0:
        gain = f"no draft of up to {plan.lines[-1].k} tokens is faster than plain decoding at batch {load.rows}"
    if best.speedup < A_LITTLE:
        return PlanVerdict(worth_it=False, method=None, words=f"not worth it: {gain}", notes=_why_not(plan, load))
    method, notes = (drafter, list[str]()) if drafter is not None else _method(text, load.rows)
    if uncosted:
        words = f"no verdict: nothing says what {' and '.join(uncosted)} cost"
        if len(uncosted) == 1:
            words = f"upper bound, {uncosted[0]} assumed free: at most {gain}"
        return PlanVerdict(worth_it=None, method=None, words=words, notes=[] if text is None else notes)
    how = "worth it" if best.speedup >= WORTH_IT else "a small gain, measure before you rely on it"
    return PlanVerdict(worth_it=True, method=method, words=f"{how}: {gain}", notes=notes)


def _why_not(plan: Plan, load: PlanLoad) -> list[str]:
    line = plan.lines[1]
    plain = load.cost.pass_ms(1, load.rows, load.context)
    level = load.draft(load.rows).ms(1) / plain
    accepted = line.tokens_per_pass - 1
    if accepted <= level:
        return [f"drafting a token costs {level:.2f} plain passes and wins {accepted:.2f} tokens"]
    if line.v - 1 > accepted - level:
        return [f"verifying one more token costs {line.v - 1:.2f} plain passes: the batch fills the device already"]
    return ["what drafting wins is about what drafting and verifying cost"]


def _method(text: str | None, rows: int) -> tuple[str | None, list[str]]:
    kind = TEXTS.get(text.lower()) if text is not None else None
    if kind is None or kind.trained is None or kind.untrained is None:
        return None, [
            "a head trained for the target (eagle3) where there is one; ngram or suffix where completions repeat their "
            "prompt (edits, summaries)"
        ]
    options = [option for option in (kind.trained, kind.untrained) if option[0] in DRAFTERS]
    name = max(options or [kind.trained], key=lambda option: option[1])[0]
    without, trained = (f"{method} {gain:.2f} x" for method, gain in (kind.untrained, kind.trained))
    notes = [f"Spec-Bench, {text}, Vicuna-7B on an A100, batch 1, T = 0: without training {without}, trained {trained}"]
    if rows > 1:
        notes.append(f"published at batch 1; here the batch is {rows}")
    return name, notes


def draw_cost(cost: CostModel, path: Path, title: str) -> None:
    """Draw v(n) by nodes, with a line for each row count and a panel for each context."""
    figure, panels = pyplot().subplots(
        1, len(cost.contexts), figsize=(4.5 * len(cost.contexts), 3.6), sharey=True, squeeze=False
    )
    for axes, context in zip(panels[0], cost.contexts, strict=True):
        for index, rows in enumerate(cost.rows):
            values = [cost.v(nodes, rows, context) for nodes in cost.nodes]
            axes.plot(
                cost.nodes,
                values,
                "o-",
                color=COLOURS[index % len(COLOURS)],
                label="1 row" if rows == 1 else f"{rows} rows",
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(cost.nodes, [str(nodes) for nodes in cost.nodes])
        axes.set_title(f"behind {context} tokens", loc="left")
        axes.set_xlabel("scored nodes per row")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set(ylim=(0, None), ylabel="v(n), passes over one node")
    panels[0][0].legend(frameon=False)
    figure.suptitle(title)
    save(figure, path)


def draw_plan(plan: Plan, path: Path, title: str, *, costed: bool = True, batches: bool = True) -> None:
    """Draw the speed-up by draft length, and that of the best length by batch.

    Unless it is known what drafting and verifying cost (`costed`) tokens per pass are drawn
    instead, and without what a batch costs there are no `batches`.
    """
    batches = batches and costed
    figure, panels = pyplot().subplots(1, 1 + batches, figsize=(4.5 * (1 + batches), 3.6), squeeze=False)
    left = panels[0][0]
    heights = [line.speedup if costed else line.tokens_per_pass for line in plan.lines]
    left.plot([line.k for line in plan.lines], heights, "o-", color=COLOURS[0])
    left.set(xlabel="K, drafted tokens per pass", ylabel=SPEEDUP if costed else "tokens per pass; costs are not known")
    left.set_xticks(range(0, plan.lines[-1].k + 1, 2))
    if costed:
        left.plot([plan.best.k], [plan.best.speedup], "o", color=COLOURS[1], label=f"best: K = {plan.best.k}")
        left.legend(frameon=False)
    if batches:
        right = panels[0][1]
        right.plot([rows for rows, _ in plan.batches], [gain for _, gain in plan.batches], "o-", color=COLOURS[0])
        right.set_xscale("log", base=2)
        right.set_xticks([rows for rows, _ in plan.batches], [str(rows) for rows, _ in plan.batches])
        right.set(xlabel="batch, each with its best K", ylabel=SPEEDUP)
    for axes in panels[0]:
        axes.axhline(1.0, color=COLOURS[2], linestyle="--", linewidth=1)
        axes.set_ylim(0, None)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    save(figure, path)


SPEEDUP = "speed-up over plain decoding"
