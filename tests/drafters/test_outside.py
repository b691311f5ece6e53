"""A drafter outside of forerun, named ``module:Class``, is one like any other; what is none says so."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.conftest import checkpoint
from forerun import LLM, SamplingParams
from forerun.cli import main
from forerun.drafters import check_options, drafter_class
from forerun.errors import ArgumentError

__all__ = ["checkpoint"]

OWN = '''
from dataclasses import dataclass
from forerun.drafters import Drafter

@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    length: int = 3

class Echo(Drafter):
    """The last token again."""
    name = "echo"
    Config = Options

    def __init__(self, config, setup):
        self.config = config

    def propose(self, context, budget):
        trees = context.trees()
        for tree, nodes, depth in zip(trees, budget.nodes, budget.depth, strict=True):
            tree.add_path([tree.tokens[0]] * min(self.config.length, nodes, depth), confidence=0.9)
        return trees

class WithoutOptions(Drafter):
    name = "options"

def function(config, setup):
    return Echo(config, setup)
'''


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder that one works in has such a module."""
    (tmp_path / "my_own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "my_own", raising=False)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere:Echo", "cannot be imported.*nowhere.*PYTHONPATH"),
        ("my_own:Ecko", "cannot be imported.*Ecko"),
        ("my_own:", "cannot be imported"),
        (":Echo", "cannot be imported"),
        ("my_own:function", "no drafter.*subclass"),
        ("my_own:WithoutOptions", "no drafter.*Config"),
        ("my_own:dataclass", "no drafter"),
        ("my_own.Echo", "unknown drafter.*module:Class"),
        ("ollama:smollm2", "unknown drafter.*--drafter-model"),
        ("lmstudio:some/one", "unknown drafter.*--drafter-model"),
    ],
)
def test_what_is_none_says_so(name: str, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        drafter_class(name)


def test_its_options_are_checked() -> None:
    assert check_options("my_own:Echo", {"length": 2}).length == 2
    with pytest.raises(ArgumentError, match=r"no option 'lenght'.*Did you mean 'length'"):
        check_options("my_own:Echo", {"lenght": 2})


@pytest.mark.parametrize(
    "config",
    [
        {"method": "my_own:Echo", "adaptive": False},
        {"method": "my_own:Echo"},
        {"method": "first_of", "drafters": [{"method": "my_own:Echo", "length": 2}, "ngram"], "adaptive": False},
        {"method": "auto", "drafters": ["my_own:Echo"]},
    ],
    ids=lambda config: f"{config['method']}-{config.get('adaptive', True)}",
)
def test_it_drafts_wherever_a_drafter_is_named(config: dict[str, Any], checkpoint: Path) -> None:
    llm, params = LLM(checkpoint, speculative_config=config), SamplingParams(temperature=0, max_tokens=24)
    plain, drafted = (llm.generate("the cat", params, speculative=on)[0].outputs[0] for on in (False, None))
    assert drafted.token_ids == plain.token_ids and drafted.speculation.drafter_errors == 0
    if not config.get("adaptive", True):
        assert drafted.speculation.num_draft_tokens > 0


def test_the_command_line_finds_it_in_the_folder_it_runs_in(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", sys.path[:-1])
    options = ["--prompt", "the cat", "--drafter", "my_own:Echo", "--no-adaptive", "--max-tokens", "8", "--json"]
    assert main(["generate", str(checkpoint), *options]) == 0
    assert json.loads(capsys.readouterr().out)["speculation"]["drafted"] > 0
    assert main(["generate", str(checkpoint), "--prompt", "the cat", "--drafter", "nowhere:Echo"]) == 2
    assert "PYTHONPATH" in capsys.readouterr().err


def test_the_command_line_works_in_a_folder_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["drafters", "--json"]) == 0
