"""``forerun drafters`` lists what there is to draft with, and checks the contract of a drafter of
one's own. Imports no torch.
"""

from __future__ import annotations

from cyclopts import App
from rich.text import Text

from forerun.cli import CHECK_FAILED, OK, console
from forerun.cli.options import Json, key_value
from forerun.drafters import entry_named, methods

drafters = App(name="drafters", help="List what there is to draft with, or check a drafter of your own.")


@drafters.default
def list_drafters(*, json: Json = False) -> int:
    """List the drafters."""
    if json:
        fields = ("needs_training", "lossless", "summary")
        entries = methods().items()
        console.write_json([{"name": name, **{key: getattr(entry, key) for key in fields}} for name, entry in entries])
        return 0
    table = console.table("name", "needs training", "summary")
    for name, entry in methods().items():
        table.add_row(Text(name, "bold"), "yes" if entry.needs_training else "no", entry.summary)
    console.out().print(table)
    return 0


@drafters.command
def check(
    drafter: str,
    /,
    *,
    drafter_option: tuple[str, ...] = (),
    json: Json = False,
) -> int:
    """Check that a drafter keeps its contract, on a tiny random model. Exit code 1 if it does not.

    Parameters
    ----------
    drafter
        module:Class of your own, found in the folder that this runs in or in PYTHONPATH; or a name of forerun's.
    drafter_option
        key=value, options of the drafter.
    """
    entry_named(drafter)
    from forerun.certify.contract import check_drafter
    from forerun.cli.certify import show_checks

    config = {"method": drafter, **dict(key_value(pair) for pair in drafter_option)}
    with console.telling("checking") as tell:
        checks = check_drafter(config, tell)
    failed = sum(not each.passed for each in checks)
    if json:
        records = [each.record() for each in checks]
        console.write_json({"drafter": drafter, "passed": not failed, "checks": records})
    else:
        show_checks(checks)
        if failed:
            console.out().print(
                Text(f"{drafter} breaks its contract: {failed} of {len(checks)} checks failed", "bold red")
            )
        else:
            console.out().print(Text(f"{drafter} keeps its contract", "bold green"))
    return CHECK_FAILED if failed else OK
