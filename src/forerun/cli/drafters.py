"""``forerun drafters``: what there is to draft with. Imports no torch."""

from __future__ import annotations

from rich import box
from rich.table import Table
from rich.text import Text

from forerun.cli import console
from forerun.cli.options import Flag
from forerun.drafters import methods


def drafters(*, json: Flag = False) -> int:
    """List the drafters.

    Parameters
    ----------
    json
        A JSON list on stdout instead of the table.
    """
    if json:
        console.write_json(
            [
                {
                    "name": name,
                    "needs_training": entry.needs_training,
                    "lossless": entry.lossless,
                    "summary": entry.summary,
                }
                for name, entry in methods().items()
            ]
        )
        return 0
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("name", "lossless", "needs training", "summary"):
        table.add_column(title, no_wrap=title == "name")
    for name, entry in methods().items():
        lossless = Text("yes") if entry.lossless else Text("no", "red")
        table.add_row(Text(name, "bold"), lossless, "yes" if entry.needs_training else "no", entry.summary)
    console.out().print(table)
    return 0
