"""``forerun heads [TARGET]``: public EAGLE-3 heads that others have reported. Imports no torch."""

from __future__ import annotations

from dataclasses import asdict

from rich.text import Text

from forerun.cli import console
from forerun.cli.options import Json
from forerun.drafters.heads.catalogue import known_heads, suggest


def heads(target: str | None = None, /, *, json: Json = False) -> int:
    """List known public EAGLE-3 heads, as others reported them.

    Parameters
    ----------
    target
        Hub id, directory or part of the name of a target; all targets if not given.
    """
    found = list(known_heads())
    if target is not None:
        part = target.rsplit("/", 1)[-1].casefold()
        found = suggest(target) or [head for head in found if part in head.target.casefold()]
    if json:
        console.write_json([asdict(head) for head in found])
        return 0
    if not found:
        console.warn(f"no public EAGLE-3 head is known for {target}. All that are: forerun heads")
        return 0
    table = console.table("target", "head", "format", "boundaries", "accepted", "reported by")
    for head in found:
        length = "" if head.acceptance_length is None else f"{head.acceptance_length:.2f} ({head.conditions})"
        # A name without a hub id is shown paler: it cannot be passed on.
        name = Text(head.named, "" if head.model else "dim")
        facts = (head.format or "", ",".join(map(str, head.boundaries or ())), length, head.collection)
        table.add_row(Text(head.target, "bold"), name, *map(Text, facts))
    console.out().print(table)
    loadable = next((head for head in found if head.model), None)
    if target is not None and loadable is not None:
        console.out().print(f"--drafter {loadable.drafter} --drafter-model {loadable.model}")
    return 0
