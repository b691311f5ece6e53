"""The public namespace is complete and sorted, and what must be cheap to import is."""

from __future__ import annotations

import subprocess
import sys

import pytest

import forerun


def test_all_is_complete_sorted_and_resolvable() -> None:
    assert list(forerun.__all__) == sorted(forerun.__all__)
    for name in forerun.__all__:
        assert getattr(forerun, name) is not None
    assert set(forerun.__all__) <= set(dir(forerun))


def test_every_error_is_public() -> None:
    from forerun import errors

    kinds = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.ForerunError)
    }
    assert kinds <= set(forerun.__all__)


@pytest.mark.parametrize(
    "program",
    [
        "import forerun",
        "import forerun.demo; forerun.demo.resolve('demo'); forerun.demo.prompts()",
        "from forerun.cli import main; main(['--help'])",
        "from forerun.cli import main; main(['generate', '--help'])",
        "from forerun.cli import main; main(['demo', '--help'])",
        "from forerun.cli import main; main(['drafters', '--json'])",
    ],
)
def test_imports_no_torch(program: str) -> None:
    check = f"{program}\nimport sys\nassert 'torch' not in sys.modules, 'torch was imported'"
    finished = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
