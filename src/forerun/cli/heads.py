"""``forerun heads [TARGET]`` lists public heads that others have reported. Imports no torch."""

from __future__ import annotations

from dataclasses import asdict

from rich.text import Text

from forerun.cli import console
from forerun.cli.options import Json
from forerun.heads.catalogue import known_heads, suggest


def heads(target: str | None = None, *, json: Json = False) -> int:
    """List known public heads of every kind, as others reported them.

    Parameters
    ----------
    target
        Hub id, directory or part of the name of a target; all targets if not given.
    """
    listed = list(known_heads())
    if target is not None:
        part = target.rsplit("/", 1)[-1].casefold()
        listed = suggest(target) or [head for head in listed if part in head.target.casefold()]
    if json:
        console.write_json([asdict(head) for head in listed])
        return 0
    if not listed:
        console.warn(f"no public head is known for {target}. All that are: forerun heads")
        return 0
    table = console.table("kind", "head, by target", "accepted")
    table.columns[1].overflow = "fold"  # an id that is cut is of no use
    before = None
    for head in listed:
        if head.target != before:
            table.add_row("", Text(head.target, "bold"))
        before = head.target
        length = "" if head.acceptance_length is None else f"{head.acceptance_length:.2f}"
        # Heads that cannot be loaded (a pickle, an unknown kind) are shown paler.
        table.add_row(head.drafter, Text(head.model, "" if head.loadable else "dim"), length)
    console.out().print(table)
    console.out().print(Text("accepted: mean acceptance length, as reported; by whom, on what: --json", "dim"))
    first = {head.drafter: head for head in reversed(listed) if head.loadable}
    for head in [] if target is None else sorted(first.values(), key=listed.index):
        console.out().print(f"--drafter {head.drafter} --drafter-model {head.model}")
    return 0
