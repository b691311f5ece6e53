"""The benchmark's results as tables for a terminal. Knows no measuring."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from benchmarks.suite.acceptance import CHAIN, Acceptance, ratio
from benchmarks.suite.bits import BitCount
from benchmarks.suite.burden import Burden
from benchmarks.suite.contest import Contest
from benchmarks.suite.goals import Goal
from benchmarks.suite.heads import BASE, TEMPERATURES, HeadBoard
from benchmarks.suite.speed import ArmSummary
from benchmarks.suite.steps import NODES, StepCosts
from benchmarks.suite.suite import Results


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
    if results.acceptance is not None:
        for temperature in (0.0, 1.0):
            console.print(_acceptance(results.acceptance, temperature))
        console.print(_roots(results.acceptance))
    if results.heads is not None:
        for temperature in TEMPERATURES:
            console.print(_heads(results.heads, temperature))
    if results.contest is not None:
        for workload in results.contest.workloads:
            console.print(_contest(workload, results.contest))
    if results.burdens:
        console.print(_burdens(results.burdens))
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


def _acceptance(found: Acceptance, temperature: float) -> Table:
    table = Table(title=f"Mean acceptance length with {found.head}, T = {temperature:g}", title_justify="left")
    names = (
        "draft",
        "length",
        "95 % interval",
        "over eagle3 chain",
        "95 % interval",
        "nodes",
        "kept at depth 1, 2, ...",
    )
    for name in (*names, "loops"):
        table.add_column(name, justify="left" if name == "draft" else "right")
    chain = found.best("eagle3", "chain", temperature)
    for line in found.lines:
        if line.temperature != temperature:
            continue
        over = ("", "")
        if chain is not None:
            quotient = ratio(line, chain)
            over = (f"{quotient.value:.2f}", f"{quotient.low:.2f} - {quotient.high:.2f}")
        depths = " ".join(f"{share:.0%}" for share in line.depths[:8])
        interval = f"{line.low:.2f} - {line.high:.2f}"
        values = (f"{line.length:.2f}", interval, *over, f"{line.nodes:.1f}", depths, f"{line.looping:.0%}")
        table.add_row(line.label, *values)
    table.caption = "tokens per pass, bonus included, pooled over all steps; loops: answers that end in circles"
    return table


def _heads(board: HeadBoard, temperature: float) -> Table:
    table = Table(title=f"Heads in {board.found.head}, T = {temperature:g}", title_justify="left")
    names = ("head", "drafts", "size", "trained", "nodes", "length", "95 % interval", "over EAGLE-3's chain", "loops")
    for name in names:
        table.add_column(name, justify="left" if name in ("head", "drafts") else "right")
    chain, heads = board.best(BASE, f"chain of {CHAIN}", temperature), {head.name: head for head in board.heads}
    for line in sorted(board.found.lines, key=lambda one: -one.length):
        if line.temperature == temperature:
            head = heads[line.method]
            trained = "" if head.seconds is None else f"{head.seconds:.0f} s"
            figures = (f"{line.nodes:.1f}", f"{line.length:.2f}", f"{line.low:.2f} - {line.high:.2f}")
            over = "" if chain is None else f"{ratio(line, chain).value:.2f}"
            size = f"{head.parameters / 1e6:.1f} M"
            table.add_row(head.name, line.form, size, trained, *figures, over, f"{line.looping:.0%}")
    table.caption = "tokens per pass, bonus included; trees are the likeliest paths unless they are drawn"
    return table


def _roots(found: Acceptance) -> Table:
    title = f"Chance that the next token is among k drafted children, {found.root_count} roots met at T = 1"
    table = Table(title=title, title_justify="left")
    table.add_column("k", justify="right")
    for name in ("deterministic", "greedy-k", "distinct, rejection", "distinct, bound", "iid, rejection", "iid, bound"):
        table.add_column(name, justify="right")
    for line in found.roots:
        chances = (line.deterministic, line.greedy_k, line.distinct, line.distinct_bound, line.iid, line.iid_bound)
        table.add_row(str(line.children), *(f"{chance:.3f}" for chance in chances))
    table.caption = "bound: optimal transport (arXiv 2502.18779); given and greedy-k reach theirs; distinct: all leaves"
    return table


def _contest(workload: str, contest: Contest) -> Table:
    table = Table(title=f"Drafters: {workload}", title_justify="left")
    table.add_column("arm")
    for name in (
        "tokens/s",
        "over plain",
        "planned",
        "tokens/pass",
        "draft ms",
        "verify ms",
        "outside passes",
        "loops",
    ):
        table.add_column(name, justify="right")
    for line in contest.of(workload):
        arm = line.summary
        table.add_row(
            arm.arm,
            f"{arm.tokens_per_second:.1f}",
            f"{line.speedup:.2f}",
            _number(line.predicted, 2),
            _number(arm.tokens_per_pass, 2),
            _number(arm.draft_ms, 2),
            _number(arm.verify_ms, 1),
            "" if line.host_share is None else f"{line.host_share:.1%}",
            f"{arm.looping:.0%}",
        )
    unlike = sum(count for key, count in contest.unlike.items() if key.startswith(f"{workload}: forerun"))
    table.caption = f"answers of forerun's arms unlike plain decoding's: {unlike}" if "0.8" not in workload else None
    return table


def _burdens(burdens: list[Burden]) -> Table:
    table = Table(
        title="What speculation costs where it brings nothing, speed over plain decoding", title_justify="left"
    )
    for name in ("drafter", "batch", "pairs", "mean", "lower bound"):
        table.add_column(name, justify="left" if name == "drafter" else "right")
    for one in burdens:
        table.add_row(one.drafter, str(one.batch), str(len(one.ratios)), f"{one.mean:.3f}", f"{one.low:.3f}")
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
