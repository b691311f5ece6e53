"""``forerun speedup MODEL`` goes from a model to a measured speed-up, and says so where there is none."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.text import Text

from forerun.cli import console, session
from forerun.cli.options import LOADING, AnswerLength, Flag, Json, Model, TargetOptions, traffic_files
from forerun.errors import ArgumentError

if TYPE_CHECKING:
    from forerun import LLM

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def speedup(
    model: Model,
    /,
    *,
    budget: str = "30m",
    output: Path | None = None,
    prompts: tuple[Path, ...] = (),
    from_traffic: Path | None = None,
    kind: str | None = None,
    max_tokens: Annotated[int, AnswerLength] = 256,
    dry_run: Flag = False,
    loading: TargetOptions = LOADING,
    json: Json = False,
) -> int:
    """Make a model faster, and say how much, where, and how sure that is. Run again to go on after a stop.

    It measures the machine, lets the model complete prompts, tries what is free, trains a head where the plan expects
    it to pay, and measures on prompts that were held out. Exit code 0 also where nothing is worth it.

    Parameters
    ----------
    budget
        Time of all that: 30m, 1h30m, 8h, 1d.
    output
        Directory of the page, the head and everything in between; speedup-MODEL if not given.
    prompts
        Files of prompts like those that you serve, in any form that forerun data prepare reads. If not given, prompts
        are drawn from the model itself, and a built-in mix is held out beside them.
    from_traffic
        Instead of --prompts: what a server recorded (forerun serve --record-traffic), its directory or one key's file.
    kind
        Train a head of this kind in any case.
    max_tokens
        Most tokens of an answer that a head learns.
    dry_run
        Measure the machine, then print the stages with the minutes that each is expected to take, and end.
    """
    seconds = parse_budget(budget)
    if prompts and from_traffic is not None:
        raise ArgumentError("give either --prompts or --from-traffic, not both")
    for path in prompts:
        if not path.is_file():
            raise ArgumentError(f"there is no file {path}; --prompts names files of prompts")
    session.check(model, loading, None, max_num_seqs=1)
    from forerun.drafters.kinds import kind_named
    from forerun.speedup.run import SpeedupRun
    from forerun.speedup.settings import SETTINGS, SpeedupRequest

    if kind is not None and kind_named(kind).trains != "head":
        raise ArgumentError(f"--kind names a kind of head, and {kind} trains something else: forerun train {kind}")
    request = SpeedupRequest(
        model=model,
        output=output or Path(f"speedup-{Path(model).name}"),
        budget_s=seconds,
        prompts=prompts if from_traffic is None else tuple(traffic_files(from_traffic)),
        kind=kind,
        max_tokens=max_tokens,
        dtype=loading.dtype,
    )

    def load() -> LLM:
        how: dict[str, Any] = {"max_num_seqs": SETTINGS.rows, "enable_prefix_caching": False}
        return session.load(model, loading.handing_out_layers(), {"method": "auto"}, longest=SETTINGS.longest, **how)

    run = SpeedupRun(request, load, _Console())
    if dry_run:
        run.prepare()
        _show_plan(run.plan(), json=json)
        return 0
    result = run.run()
    if json:
        console.write_json(result)
    else:
        _show(result)
    return 0


def parse_budget(text: str) -> float:
    """Return the seconds of a time such as 30m, 90s, 1.5h, 1h30m or 1d; ArgumentError if it is none."""
    part, written = r"([0-9]+(?:\.[0-9]+)?)\s*([smhd])\s*", text.strip().casefold()
    seconds = sum(float(count) * UNITS[unit] for count, unit in re.findall(part, written))
    if not re.fullmatch(f"(?:{part})+", written) or seconds <= 0:
        raise ArgumentError(f"--budget is a time such as 90s, 30m, 1h30m or 1d, got {text!r}")
    return seconds


class _Console:
    """Shows a run on stderr."""

    def say(self, words: str) -> None:
        """Print a line that stays; what belongs to a stage is dim."""
        console.log().print(Text(words, "dim" if words.startswith(" ") else "bold"))

    def busy(self, words: str) -> AbstractContextManager[Callable[[str], None]]:
        """Show a spinner."""
        return console.telling(f"  {words}")


def _show_plan(stages: list[dict[str, Any]], *, json: bool) -> None:
    if json:
        console.write_json({"stages": stages, "minutes": round(sum(stage["minutes"] for stage in stages), 2)})
        return
    table = console.table("stage", "", "minutes", title="dry run: nothing is trained", numbers_from=2)
    for stage in stages:
        minutes = f"{stage['minutes']:.1f}" if stage["minutes"] >= 0.05 else "-"
        table.add_row(stage["what"], "done" if stage["done"] else "", minutes)
    console.out().print(table)


def _show(result: dict[str, Any]) -> None:
    out = console.out()
    out.print(Text(result["words"], "bold green" if result["worth_it"] else "bold yellow"))
    for loss in result["losses"]:
        out.print(Text(f"slower than plain decoding: {loss}", "yellow"))
    for line in result["certainty"]:
        out.print(Text(line, "dim"))
    for engine, serving in result["serve"].items():
        lines = serving["lines"] or [f"not there: {'; '.join(serving['notes'])}"]
        out.print(Text(f"{engine}: ", "bold").append("\n  ".join(lines), "default"))
    out.print(Text(f"page: {result['page']}"))
