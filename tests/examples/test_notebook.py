"""The tutorial notebook is stored clean and runs from top to bottom. Its sizes follow FORERUN_EXAMPLE_STEPS."""

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "eagle3.ipynb"
STEPS = 4
SECONDS = 600
"""Longest a cell may take, on a busy machine; the whole takes well under a minute on two quiet cores."""


@pytest.fixture(scope="module")
def stored() -> Any:
    return nbformat.read(NOTEBOOK, as_version=4)


def test_it_is_stored_without_outputs(stored: Any) -> None:
    nbformat.validate(stored)
    code = [cell for cell in stored.cells if cell.cell_type == "code"]
    assert len(code) > 8
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)


@pytest.mark.slow
# Third parties' warnings, of sockets and paths, are not ours to fix.
@pytest.mark.filterwarnings("ignore")
def test_it_trains_a_head_that_changes_no_answer_and_exports_it(
    stored: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORERUN_EXAMPLE_STEPS", str(STEPS))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    client = NotebookClient(stored, timeout=SECONDS, kernel_name="python3", resources={"metadata": {"path": tmp_path}})
    client.execute()

    shown = {cell.source: "".join(map(_shown, cell.outputs)) for cell in stored.cells if cell.cell_type == "code"}
    assert "'identical': True" in _under(shown, '"identical"')
    assert f"'steps': {STEPS}" in _under(shown, "outcome = run.train")
    assert "image/png" in _under(shown, "plt.subplots")
    assert _under(shown, "exported.command").startswith("'vllm serve ")
    assert "'vllm', 'ok'" in _under(shown, "diagnose(")
    assert "'the same text': True" in _under(shown, '"the same text"')


def _under(shown: dict[str, str], words: str) -> str:
    """What the cell that holds these words displayed; the last one, if several do."""
    return [output for source, output in shown.items() if words in source][-1]


def _shown(output: Any) -> str:
    data = output.get("data", {})
    return "image/png" if "image/png" in data else data.get("text/plain", "")
