"""Modules that had another place before 0.2 are found under their old names, with a warning that names the new one."""

import importlib
import sys
import warnings
from pathlib import Path

import pytest

from forerun.moved import NOW, place_now
from test_imports import imported, modules

PLUG_IN = """
from dataclasses import dataclass
from forerun.core.tree import TokenTree
from forerun.drafters.base import DraftContext, Drafter, DrafterSetup, check_least

@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    length: int = 3

class Echo(Drafter):
    name = "echo"
    Config = Options

    def __init__(self, config, setup):
        self.config = config
"""


def forget(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for known in [known for known in sys.modules if known == name or known.startswith(f"{name}.")]:
        monkeypatch.delitem(sys.modules, known)


@pytest.mark.parametrize("old", NOW)
def test_every_line_names_a_module_that_is_there(old: str) -> None:
    assert importlib.util.find_spec(f"forerun.{NOW[old]}") is not None
    package = Path(importlib.import_module("forerun").__file__ or "").parent
    gone = package / old.replace(".", "/")
    assert not gone.with_suffix(".py").exists(), "the old module is still there: nobody asks for this line"


def test_a_plug_in_of_before_runs_and_is_told_the_new_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from forerun.decode.drafter import Drafter
    from forerun.drafters import drafter_class

    (tmp_path / "of_before.py").write_text(PLUG_IN)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    forget("forerun.drafters.base", monkeypatch)
    monkeypatch.delitem(sys.modules, "of_before", raising=False)
    with pytest.warns(FutureWarning, match=r"forerun\.drafters\.base is forerun\.decode\.drafter since") as said:
        found = drafter_class("of_before:Echo")
    assert issubclass(found, Drafter) and len(said) == 1
    assert said[0].filename == str(tmp_path / "of_before.py"), "the warning points at the line to change"


@pytest.mark.parametrize(
    ("old", "name", "new"),
    [
        ("forerun.checkpoints", "read_head", "forerun.heads"),
        ("forerun.checkpoints.medusa", "MedusaFormat", "forerun.heads.medusa"),
        ("forerun.checkpoints.flat", "FlatFormat", "forerun.heads.eagle_files"),
        ("forerun.drafters.heads.eagle", "EagleHead", "forerun.heads.eagle"),
        ("forerun.engine.config", "SpeculativeConfig", "forerun.control.config"),
        ("forerun.engine.policy.policy", "Policy", "forerun.control.policy"),
        ("forerun.training.objectives.medusa", "MedusaObjective", "forerun.heads.medusa"),
    ],
)
def test_packages_and_what_lay_in_them(old: str, name: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forget(old, monkeypatch)
    with warnings.catch_warnings(record=True) as said:  # a package of before says where it is, too
        warnings.simplefilter("always")
        found = importlib.import_module(old)
    assert any(str(one.message).startswith(f"{old} is {new} since") for one in said)
    assert found is importlib.import_module(new) and hasattr(found, name)
    assert found.__name__ == new and found.__spec__ is not None and found.__spec__.name == new


@pytest.mark.parametrize("name", ["forerun.nowhere", "forerun.drafters.heads.nowhere", "forerun.engine.nowhere"])
def test_what_never_was_is_not_found(name: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=name):
        importlib.import_module(name)
    assert place_now("json.decoder") is None


def test_engines_find_their_plug_ins_where_they_were() -> None:
    """Users have these two in files: vLLM's configuration, and SGLang's entry point."""
    package = Path(importlib.import_module("forerun").__file__ or "").parent / "deploy"
    assert "class ForerunProposer" in (package / "vllm.py").read_text(encoding="utf-8")
    assert "def register" in (package / "sglang.py").read_text(encoding="utf-8")


def test_nothing_of_forerun_asks_for_an_old_name() -> None:
    """Every import of the package goes to where a module is: `forerun` itself never warns."""
    asked = {name for tree in modules().values() for name in imported(tree)}
    assert not {name for name in asked if place_now(name) is not None}
