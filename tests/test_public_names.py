"""The public namespace is complete and sorted, and what must be cheap to import is."""

import ast
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import forerun
from forerun import drafters, modelopt
from forerun.moved import NOW_IN_MODELOPT


def order(name: str) -> tuple[bool, bool, str]:
    """Constants, then classes, then functions, each by name: ruff's order."""
    return not name.isupper(), not name[0].isupper(), name


def test_all_is_complete_sorted_and_resolvable() -> None:
    assert list(forerun.__all__) == sorted(forerun.__all__, key=order)
    assert list(modelopt.__all__) == sorted(modelopt.__all__, key=order)
    assert list(drafters.__all__) == sorted(drafters.__all__, key=order)
    for module in (forerun, drafters):
        for name in module.__all__:
            assert getattr(module, name) is not None
    assert set(forerun.__all__) <= set(dir(forerun))


@pytest.mark.parametrize("public", [forerun, drafters])
def test_what_type_checkers_see_is_what_there_is(public: ModuleType) -> None:
    module = ast.parse(Path(str(public.__file__)).read_text(encoding="utf-8"))
    [checked] = [node for node in module.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    seen = {alias.name for node in checked.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == set(public.__all__)


@pytest.mark.parametrize("name", sorted(NOW_IN_MODELOPT))
def test_a_name_of_modelopt_is_still_found_here_with_a_warning(name: str) -> None:
    with pytest.warns(FutureWarning, match=f"forerun.{name} is forerun.modelopt.{name} since") as said:
        found = getattr(forerun, name)
    assert found is getattr(modelopt, name) and name not in forerun.__all__
    assert [one.filename for one in said] == [__file__], "the warning points at the line to change"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="LLLM"):
        _ = forerun.LLLM
    with pytest.raises(AttributeError, match="Draftr"):
        _ = drafters.Draftr


@pytest.mark.parametrize(
    "program",
    [
        "import forerun, forerun.drafters",
        "import forerun.demo; forerun.shipped.resolve('demo'); forerun.demo.prompts()",
    ],
)
def test_imports_no_torch(program: str) -> None:
    check = f"{program}\nimport sys\nassert 'torch' not in sys.modules, 'torch was imported'"
    finished = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
