"""``forerun calibrate MODEL`` measures what a pass over n nodes, and a level of each drafter, cost
on this machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from forerun.cli import console, session
from forerun.cli.options import LOADING, SPECULATION, Flag, Json, Model, SpeculationOptions, TargetOptions
from forerun.errors import ArgumentError
from forerun.plan.planner import draw_cost
from forerun.plots import check_plot

if TYPE_CHECKING:
    from forerun import LLM
    from forerun.control.config import SpeculativeConfig
    from forerun.control.costs import CostModel

TEXT_TOKENS = 300  # Length of the text that a drafter is timed on


def calibrate(
    model: Model,
    /,
    *,
    rows: tuple[int, ...] = (1,),
    nodes: tuple[int, ...] = (),
    contexts: tuple[int, ...] = (),
    seconds: float = 10.0,
    force: Flag = False,
    plot: Path | None = None,
    json: Json = False,
    speculation: SpeculationOptions = SPECULATION,
    loading: TargetOptions = LOADING,
) -> int:
    """Measure what passes of the model cost on this machine, and a drafter's proposals; keep it for later.

    Parameters
    ----------
    rows
        Rows of a pass, one or more numbers: --rows 1 4 16.
    nodes
        Scored nodes of a row; by default twelve sizes from 1 to 64.
    contexts
        Committed tokens of each row; by default 64, 512 and 2048, as far as they fit.
    seconds
        Time budget for the passes; large ones that would break it are extrapolated.
    force
        Measure although a cost model is saved.
    plot
        Write v(n) as a picture (png, svg or pdf).
    """
    if not rows or min(rows) < 1 or not seconds > 0:
        raise ArgumentError("--rows must be at least 1 and --seconds above 0")
    check_plot(plot)
    requested = speculation.config()
    from forerun.control.config import SpeculativeConfig
    from forerun.control.measuring import file_of, load_or_measure
    from forerun.devices import device_name

    config = SpeculativeConfig.parse(requested)
    llm = session.load(model, loading, None, max_num_seqs=max(rows))
    sizes: dict[str, Any] = {"rows": rows} | ({"nodes": nodes} if nodes else {})
    sizes |= {"contexts": contexts} if contexts else {}
    with console.telling("calibrating") as tell:
        cost = load_or_measure(llm.target, seconds=seconds, force=force, tell=tell, **sizes)
        if config is not None and (force or config.key not in cost.drafts):
            cost = _drafter(llm, cost, config, tell)
    where = f"{model}, {llm.target.runs_as} ({device_name(llm.target.device)})"
    path = file_of(llm.target)
    if plot is not None:
        draw_cost(cost, plot, where)
    if json:
        record = {"model": model, "device": device_name(llm.target.device), "runs_as": llm.target.runs_as}
        table_of_v = [
            {"context": context, "rows": rows, "v": [cost.v(nodes, rows, context) for nodes in cost.nodes]}
            for context in cost.contexts
            for rows in cost.rows
        ]
        console.write_json({**record, "file": str(path), **asdict(cost), "v": table_of_v})
        return 0
    show_cost(cost, where, config)
    console.log().print(Text(f"saved in {path}", style="dim"))
    return 0


def _drafter(llm: LLM, cost: CostModel, config: SpeculativeConfig, tell: Callable[[str], None]) -> CostModel:
    from forerun import demo
    from forerun.plan.measured import build_beside, depth_of, measure_draft, save_draft_cost

    tell(f"drafts of {config.method}")
    drafter = build_beside(llm, config.method, config.drafter_options)
    if llm.tokenizer is None:
        raise ArgumentError("a drafter is timed on a text, for which the model's tokenizer is missing")
    source = "\n".join(prompt.text[:4000] for prompt in demo.prompts()[:1])
    longest = min(TEXT_TOKENS, llm.max_model_len // 2)
    ids = llm.tokenizer.encode(source, add_special_tokens=False)[:longest]
    return save_draft_cost(llm, cost, config, measure_draft(llm.target, drafter, ids, depth=depth_of(config)))


def show_cost(cost: CostModel, where: str, config: SpeculativeConfig | None) -> None:
    """Print all tables on stdout: T(n) and v(n) behind each context by nodes and rows, and the
    drafters' costs.
    """
    out = console.out()
    out.print(Text(where, "bold"))
    for context in cost.contexts:
        titles = [title for rows in cost.rows for title in ("1 row, ms" if rows == 1 else f"{rows} rows, ms", "v(n)")]
        table = console.table("nodes", *titles, title=f"passes behind {context} tokens", numbers_from=0)
        for nodes in cost.nodes:
            figures = [of(nodes, rows, context) for rows in cost.rows for of in (cost.pass_ms, cost.v)]
            table.add_row(str(nodes), *(f"{figure:.2f}" for figure in figures))
        out.print(table)
    chosen = {key: draft for key, draft in cost.drafts.items() if config is None or key == config.key}
    titles = ["drafter", "fixed, ms", "per level, ms", "c = level / T(1)"]
    table = console.table(*titles, title="drafters, per proposal for one row", numbers_from=1)
    table.columns[0].no_wrap = False
    for key, draft in chosen.items():
        share = draft.level_ms / cost.pass_ms(1)
        table.add_row(key, f"{draft.fixed_ms:.2f}", f"{draft.level_ms:.3f}", f"{share:.3f}")
    if chosen:
        out.print(table)
