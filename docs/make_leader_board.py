"""Write the leader board of docs/benchmarks.md from what `forerun demo --all --json` prints, read from stdin."""

from __future__ import annotations

import argparse
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

FIRST, LAST = "<!-- leader board -->\n", "<!-- end of the leader board -->\n"
TITLES = ("drafter", "lossless", "parameters", "trained")
COLUMNS = ("drafted_nodes", "nodes"), ("tokens_per_pass", "tokens per pass"), ("speedup", "speed-up")


def table(found: dict[str, Any]) -> str:
    """The fastest first, as Markdown, and the line that says what was measured."""
    temperatures, lines = list(found["plain_tokens_per_second"]), found["drafters"]
    titles = [*TITLES, *(f"T = {t}: {title}" for t in temperatures for _, title in COLUMNS)]
    rows = [titles, ["---"] * len(titles)]
    for line in sorted(lines, key=lambda one: -sum(one["speedup"].values())):
        unlike, seconds = line["greedy_answers_unlike_plain"], line["trained_seconds"]
        lossless = f"**{unlike} greedy answers differ**" if unlike else "yes" if line["lossless"] else "**no**"
        size = f"{line['parameters'] / 1e6:.1f} M" if line["parameters"] else ""
        cells = [f"`{line['drafter']}`", lossless, size, "" if seconds is None else f"{seconds:.0f} s"]
        for t in temperatures:
            cells += [f"{line[key][t]:.{0 if key == 'drafted_nodes' else 2}f}" for key, _ in COLUMNS]
        rows.append(cells)
    plain = " and ".join(f"{speed:.1f} tokens/s at T = {t}" for t, speed in found["plain_tokens_per_second"].items())
    said = f"{found['scale_note'] or 'The model as it ships'}. Plain decoding: {plain}; {found['dtype']} on "
    said += f"{found['device']} ({datetime.now(UTC):%d %B %Y})."
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows) + f"\n\n{said}\n"


def main() -> None:
    """Replace what stands between the two marks of the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path, default=Path(__file__).parent / "benchmarks.md")
    page = parser.parse_args().page
    before, marked, rest = page.read_text(encoding="utf-8").partition(FIRST)
    _, ended, after = rest.partition(LAST)
    if not marked or not ended:
        sys.exit(f"{page} lacks the lines {FIRST.strip()} and {LAST.strip()}, between which the table stands")
    page.write_text(before + FIRST + "\n" + table(json.load(sys.stdin)) + "\n" + LAST + after, encoding="utf-8")


if __name__ == "__main__":
    main()
