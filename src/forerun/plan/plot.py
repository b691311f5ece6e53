"""This module draws cost models and plans. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path

from forerun.engine.costs import CostModel
from forerun.plan.planner import Plan
from forerun.plots import COLOURS, pyplot, save


def draw_cost(cost: CostModel, path: Path, title: str) -> None:
    """Draw v(n) by nodes, with a line for each row count and a panel for each context."""
    figure, panels = pyplot().subplots(
        1, len(cost.contexts), figsize=(4.5 * len(cost.contexts), 3.6), sharey=True, squeeze=False
    )
    for axes, context in zip(panels[0], cost.contexts, strict=True):
        for index, rows in enumerate(cost.rows):
            values = [cost.v(nodes, rows, context) for nodes in cost.nodes]
            label = "1 row" if rows == 1 else f"{rows} rows"
            axes.plot(cost.nodes, values, "o-", color=COLOURS[index % len(COLOURS)], label=label)
        axes.set_xscale("log", base=2)
        axes.set_xticks(cost.nodes, [str(nodes) for nodes in cost.nodes])
        axes.set_title(f"behind {context} tokens", loc="left")
        axes.set_xlabel("scored nodes per row")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set(ylim=(0, None), ylabel="v(n), passes over one node")
    panels[0][0].legend(frameon=False)
    figure.suptitle(title)
    save(figure, path)


def draw_plan(found: Plan, path: Path, title: str, *, costed: bool = True, batches: bool = True) -> None:
    """Draw the speed-up by draft length, and that of the best length by batch.

    Unless it is known what drafting and verifying cost (`costed`) tokens per pass are drawn
    instead, and without what a batch costs there are no `batches`.
    """
    batches = batches and costed
    figure, panels = pyplot().subplots(1, 1 + batches, figsize=(4.5 * (1 + batches), 3.6), squeeze=False)
    left = panels[0][0]
    heights = [line.speedup if costed else line.tokens_per_pass for line in found.lines]
    left.plot([line.k for line in found.lines], heights, "o-", color=COLOURS[0])
    left.set(xlabel="K, drafted tokens per pass", ylabel=SPEEDUP if costed else "tokens per pass; costs are not known")
    left.set_xticks(range(0, found.lines[-1].k + 1, 2))
    if costed:
        left.plot([found.best.k], [found.best.speedup], "o", color=COLOURS[1], label=f"best: K = {found.best.k}")
        left.legend(frameon=False)
    if batches:
        right = panels[0][1]
        right.plot([rows for rows, _ in found.batches], [gain for _, gain in found.batches], "o-", color=COLOURS[0])
        right.set_xscale("log", base=2)
        right.set_xticks([rows for rows, _ in found.batches], [str(rows) for rows, _ in found.batches])
        right.set(xlabel="batch, each with its best K", ylabel=SPEEDUP)
    for axes in panels[0]:
        axes.axhline(1.0, color=COLOURS[2], linestyle="--", linewidth=1)
        axes.set_ylim(0, None)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    save(figure, path)


SPEEDUP = "speed-up over plain decoding"
