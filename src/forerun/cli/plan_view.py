"""A plan on the terminal and as JSON. Decides nothing. Imports no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from forerun.cli import console
from forerun.engine import theory
from forerun.plan.planner import MOST_BATCH, Line, Load, Plan, Verdict
from forerun.plan.roofline import FREE, Roofline

if TYPE_CHECKING:
    from forerun.plan.measured import Measured


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """All that is said about one plan."""

    plan: Plan
    load: Load
    verdict: Verdict
    notes: list[str]
    """Assumptions and limits, one sentence each."""
    roofline: Roofline | None = None
    measured: Measured | None = None
    tree: theory.TreeChoice | None = None
    ranking: list[tuple[Measured, Line]] = field(default_factory=list)
    """Candidate draft models with their best lines, the fastest first."""

    @property
    def title(self) -> str:
        """For plots and tables."""
        what = self.measured.name if self.measured is not None else f"first token kept: {self.load.survival[0]:.0%}"
        where = f", {self.roofline.tp} x {self.roofline.device.name}" if self.roofline is not None else ""
        return f"{what}, batch {self.load.rows}{where}"

    def record(self) -> dict[str, Any]:
        """As JSON knows it."""
        asked, best = self.plan.asked, self.plan.best
        depth = len(self.load.survival)
        tokens = theory.tokens_of(self.load.survival)
        return {
            "expected_tokens_per_pass": asked.tokens_per_pass,
            "k": asked.k,
            "speedup": asked.speedup,
            "alpha": theory.alpha_of(min(tokens, depth + 1), depth),
            "acceptance_per_position": theory.conditional_of(self.load.survival)[: max(asked.k, 1)],
            "batch": self.load.rows,
            "context": self.load.context,
            "best_k": best.k,
            "best_speedup": best.speedup,
            "best_tokens_per_pass": best.tokens_per_pass,
            "break_even_batch": self.plan.break_even_batch,
            "worth_it": self.verdict.worth_it,
            "method": self.verdict.method,
            "verdict": self.verdict.words,
            "assumptions": self.notes,
            "by_k": [asdict(line) for line in self.plan.lines],
            "by_batch": [{"batch": batch, "best_speedup": gain} for batch, gain in self.plan.batches],
            "tree": None if self.tree is None else asdict(self.tree),
            "roofline": None if self.roofline is None else roofline_record(self.roofline, self.load),
            "measured": None if self.measured is None else self.measured.record(),
            "ranking": [{**one.record(), "best_k": line.k, "best_speedup": line.speedup} for one, line in self.ranking],
        }


def roofline_record(line: Roofline, load: Load) -> dict[str, Any]:
    """The roofline's own figures at the load's batch and context."""
    terms = line.terms(1, load.rows, load.context)
    return {
        "device": line.device.name,
        "devices": line.tp,
        "dtype": line.dtype,
        "weights_gb": line.weights_gb(),
        "fits": line.fits(load.rows, load.context),
        "plain_pass_ms": terms.ms,
        "compute_ms": terms.compute_ms,
        "memory_ms": terms.memory_ms,
        "bound_by": "memory" if terms.memory_ms >= terms.compute_ms else "arithmetic",
        "operations_per_byte": terms.intensity,
        "balance_tokens_at_peak": line.balance,
        "free_nodes_per_row": line.free_nodes(load.rows, load.context),
    }


def show(shown: Shown) -> None:
    """Tables and the verdict on stdout, assumptions below."""
    out = console.out()
    if shown.ranking:
        out.print(_ranking_table(shown))
    out.print(_length_table(shown))
    if shown.roofline is not None:
        out.print(_roofline_text(shown.roofline, shown.load))
    if shown.tree is not None:
        out.print(_tree_text(shown.tree))
    out.print(_batch_text(shown.plan))
    style = "bold green" if shown.verdict.worth_it else "bold yellow"
    out.print(Text(shown.verdict.words, style).append(_with(shown.verdict), ""))
    for note in shown.notes:
        out.print(Text(f"  {note}", "dim"))


def _with(verdict: Verdict) -> str:
    return f"; draft with {verdict.method}" if verdict.method is not None else "; decode plainly"


def _length_table(shown: Shown) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=shown.title)
    table.title_justify = "left"
    for title in ("K", "tokens per pass", "v(K + 1)", "speed-up", ""):
        table.add_column(title, justify="right" if title else "left", no_wrap=True)
    plan = shown.plan
    chosen = {0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, plan.asked.k, plan.best.k}
    for line in plan.lines:
        if line.k in chosen:
            marks = [mark for mark, other in (("asked", plan.asked), ("best", plan.best)) if other.k == line.k]
            words = " and ".join(marks) if plan.asked.k != plan.best.k or "best" not in marks else "best"
            cells = (str(line.k), f"{line.tokens_per_pass:.3f}", f"{line.v:.2f}", f"{line.speedup:.2f}", words)
            table.add_row(*cells, style="bold" if words else "")
    return table


def _ranking_table(shown: Shown) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="candidates, the fastest first")
    table.title_justify = "left"
    for title in ("draft model", "first token kept", "tokens per pass", "c per level", "best K", "speed-up"):
        table.add_column(title, justify="left" if title == "draft model" else "right")
    for one, line in shown.ranking:
        first = one.trial.survival[0] if one.trial.survival else 0.0
        cost = one.draft.level_ms / shown.load.cost.pass_ms(1, 1, one.trial.context)
        table.add_row(
            one.model or one.method,
            f"{first:.0%}",
            f"{one.trial.tokens_per_pass:.2f}",
            f"{cost:.3f}",
            str(line.k),
            f"{line.speedup:.2f}",
        )
    return table


def _roofline_text(line: Roofline, load: Load) -> Text:
    found = roofline_record(line, load)
    return Text(
        f"plain pass {found['plain_pass_ms']:.2f} ms ({found['memory_ms']:.2f} reading, {found['compute_ms']:.2f} "
        f"computing), {found['operations_per_byte']:.1f} operations a byte; balance at {line.balance:.0f} tokens in a "
        f"pass (peak figures); up to {found['free_nodes_per_row']} nodes per row cost at most {FREE:.2f} plain passes"
    )


def _tree_text(tree: theory.TreeChoice) -> Text:
    if not tree.parents:
        return Text("no tree is faster than plain decoding")
    return Text(
        f"best tree: {len(tree.parents)} nodes, {tree.depth} levels, {tree.tokens:.3f} tokens per pass, "
        f"{tree.speedup:.2f} x; parents {list(tree.parents)}"
    )


def _batch_text(plan: Plan) -> Text:
    k = plan.asked.k or 1
    if plan.break_even_batch is None:
        return Text(f"K = {k} gains at every batch up to {MOST_BATCH}")
    if plan.break_even_batch == 0:
        return Text(f"K = {k} gains at no batch")
    return Text(f"K = {k} gains up to a batch of {plan.break_even_batch}")
