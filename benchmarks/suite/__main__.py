"""``python -m benchmarks.suite``: the measured figures beside their goals. Tables on stdout, progress on stderr."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Annotated

import torch
import transformers
from cyclopts import App, Parameter
from rich.console import Console

from benchmarks.suite import plots, report
from benchmarks.suite.suite import Options, Results, as_json, run
from forerun.cli.console import telling
from forerun.errors import ForerunError

app = App(
    name="benchmarks.suite", help="Measure forerun beside transformers on scale models, and print goals beside figures."
)


@app.default
def main(
    *,
    options: Annotated[Options, Parameter(name="*")] = Options(),  # noqa: B008 - frozen
    json_only: Annotated[bool, Parameter(name="--json")] = False,
    out: Path = Path("benchmarks/results"),
    plot: bool = True,
    threads: int | None = None,
) -> int:
    """Run the benchmark; about 12 minutes on two quiet cores, 3 with --quick.

    Parameters
    ----------
    options
        What to measure.
    json_only
        Print one JSON object instead of tables.
    out
        Folder for results.json (PART.json for a part alone) and the plots.
    plot
        Draw plots (needs matplotlib).
    threads
        Processor threads; all cores by default.
    """
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if threads is not None:
        torch.set_num_threads(threads)
    errors = Console(stderr=True)
    out.mkdir(parents=True, exist_ok=True)

    def save(results: Results) -> None:
        # A part that is measured alone leaves the others' results in place.
        name = f"{options.parts[0]}.json" if len(options.parts) == 1 else "results.json"
        (out / name).write_text(json.dumps(as_json(results), indent=2) + "\n")

    try:
        with telling("measuring") as tell:
            results = run(options, tell, save)
        if plot:
            plots.draw(results, out)
    except ForerunError as error:
        errors.print(f"[red]error[/] {error}", highlight=False)
        return 2
    except KeyboardInterrupt:
        return 130
    if json_only:
        sys.stdout.write(json.dumps(as_json(results)) + "\n")
    else:
        report.show(results, Console(width=max(120, Console().width)))
    return 0


if __name__ == "__main__":
    sys.exit(app())
