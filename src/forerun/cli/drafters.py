"""``forerun drafters``: what there is to draft with. Imports no torch."""

from __future__ import annotations

from rich.text import Text

from forerun.cli import console
from forerun.cli.options import Json
from forerun.drafters import methods


def drafters(*, json: Json = False) -> int:
    """List the drafters."""
    if json:
        told = ("needs_training", "lossless", "summary")
        entries = methods().items()
        console.write_json([{"name": name, **{key: getattr(entry, key) for key in told}} for name, entry in entries])
        return 0
    table = console.table("name", "lossless", "needs training", "summary")
    for name, entry in methods().items():
        lossless = Text("yes") if entry.lossless else Text("no", "red")
        table.add_row(Text(name, "bold"), lossless, "yes" if entry.needs_training else "no", entry.summary)
    console.out().print(table)
    return 0
