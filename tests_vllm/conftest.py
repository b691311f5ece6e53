"""What vLLM and forerun answer, for all kinds that are tested: vLLM runs once, in an environment of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from both import Lab, table
from rich.console import Console

ROOT = Path(__file__).parents[1]
LAB = pytest.StashKey[Lab]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--prompts", type=int, default=6, help="how many of the shipped prompts vLLM answers")
    parser.addoption("--tokens", type=int, default=40, help="new tokens per prompt")
    parser.addoption("--work", type=Path, default=ROOT / "build/vllm", help="where heads, exports, answers and logs go")
    parser.addoption("--vllm", type=Path, default=ROOT / ".venv-vllm/bin/python", help="Python of vLLM's environment")


@pytest.fixture(scope="session")
def lab(request: pytest.FixtureRequest) -> Lab:
    """Both engines' answers with the kinds that were chosen."""
    chosen = [item for item in request.session.items if isinstance(item, pytest.Function) and hasattr(item, "callspec")]
    arms = {item.callspec.params["name"]: item.module.ARMS[item.callspec.params["name"]] for item in chosen}
    option = request.config.getoption
    made = Lab(work=option("--work"), python=option("--vllm"), prompts=option("--prompts"), tokens=option("--tokens"))
    request.config.stash[LAB] = made
    if arms:
        made.run(arms)
    return made


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The table, on the terminal and in the work folder's results.json."""
    found = config.stash.get(LAB, None)
    if found is None or not found.rows:
        return
    Console(width=140).print(table(found))
    rows = [row.as_json() for row in found.rows.values()]
    (found.work / "results.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
