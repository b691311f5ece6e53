"""Draw docs/demo.svg, the README's picture: a real run of `forerun demo` in a terminal. `make docs` runs this."""

from __future__ import annotations

import argparse
import io
import re
import sys
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from forerun.cli import console
from forerun.cli.demo import demo

WITHOUT_WEB_FONT = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
"""Rich's frame of a terminal, with the reader's own monospaced font: pictures in a README may load nothing."""


def main() -> int:
    """Run the demo, write the picture, and return the demo's exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "demo.svg")
    parser.add_argument("--width", type=int, default=100, help="columns of the terminal")
    parser.add_argument("--prompt-name", default="edit", help="the question; all three make a long picture")
    parser.add_argument("--max-tokens", type=int, help="instead of the demo's own number")
    asked = parser.parse_args()
    terminal = Console(
        record=True,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        width=asked.width,
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    console.out = lambda: terminal
    code = demo(prompt_name=asked.prompt_name, max_tokens=asked.max_tokens)
    terminal.save_svg(str(asked.output), title="forerun demo", code_format=WITHOUT_WEB_FONT, unique_id="forerun-demo")
    return code


if __name__ == "__main__":
    sys.exit(main())
