"""The benchmark's results as tables for a terminal. Knows no measuring."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from forerun.bench.bits import BitCount
from forerun.bench.goals import Goal
from forerun.bench.speed import ArmSummary
from forerun.bench.steps import NODES, StepCosts
from forerun.bench.suite import Results


def show(results: Results, console: Console) -> None:
    """Print everything, the goals last."""
    console.print(f"\n[bold]{results.machine}[/]")
    for note in results.notes:
        console.print(f"[yellow]note[/] {note}", highlight=False)
    if results.steps is not None:
        console.print(_steps(results.steps))
    for label, lines in results.speed.items():
        console.print(_speed(label, lines))
    if results.bits:
        console.print(_bits("Logits beside plain decoding's, reproducible mode", results.bits))
    if results.free_bits:
        console.print(_bits("The same without padding (measured here, not promised)", results.free_bits))
    console.print(_goals(results.goals))
    took = ", ".join(f"{part} {seconds:.0f} s" for part, seconds in results.seconds.items())
    console.print(f"took {took}", highlight=False)


def _steps(costs: StepCosts) -> Table:
    table = Table(title="One pass of the target, ms (median)", title_justify="left")
    table.add_column("nodes")
    for nodes in NODES:
        table.add_column(str(nodes), justify="right")
    table.add_row("whole pass", *(f"{costs.step_ms[nodes]:.1f}" for nodes in NODES))
    table.add_row("linear layers alone", *(f"{costs.floor_ms[nodes]:.1f}" for nodes in NODES))
    table.add_row("pass / pass over one", *(f"{costs.flatness(nodes):.2f}" for nodes in NODES))
    table.add_row("linear layers / over one", *(f"{costs.floor_flatness(nodes):.2f}" for nodes in NODES))
    return table


def _speed(label: str, lines: list[ArmSummary]) -> Table:
    table = Table(title=f"Decoding alone, {label}", title_justify="left")
    table.add_column("arm")
    for name in ("tokens/s", "tokens/pass", "draft ms", "verify ms", "first token ms", "speed-up promised", "loops"):
        table.add_column(name, justify="right")
    for line in lines:
        table.add_row(
            line.arm,
            f"{line.tokens_per_second:.1f}",
            _number(line.tokens_per_pass, 2),
            _number(line.draft_ms, 1),
            _number(line.verify_ms, 1),
            f"{line.first_token_ms:.0f}",
            _number(line.predicted_speedup, 2),
            f"{line.looping:.0%}",
        )
    table.caption = "loops: answers whose last 48 tokens repeat themselves within 16 tokens; copying drafters profit"
    return table


def _bits(title: str, counts: list[BitCount]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in (
        "draft",
        "batch",
        "positions",
        "unlike in a bit",
        "largest difference",
        "other choice",
        "of these ties",
    ):
        table.add_column(name, justify="left" if name == "draft" else "right")
    for count in counts:
        values = (count.batch, count.positions, count.differing, f"{count.largest:.3g}", count.other_argmax, count.ties)
        table.add_row(count.name, *map(str, values))
    return table


def _goals(lines: list[Goal]) -> Table:
    table = Table(title="Goals", title_justify="left")
    for name in ("", "what", "goal", "measured", ""):
        table.add_column(name, justify="right" if name in ("goal", "measured") else "left")
    for line in lines:
        mark = "[green]met[/]" if line.met else "[red]missed[/]"
        measured = f"{line.measured:.0f}" if float(line.measured).is_integer() else f"{line.measured:.2f}"
        table.add_row(mark, line.what, line.goal, measured, line.note)
    return table


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
