"""Options from a file: flags win over the environment, and that over the file; nothing in it is ignored."""

from pathlib import Path
from typing import Any, get_type_hints

import pytest
from cyclopts import CycloptsError

from forerun.cli import build_app, main
from forerun.cli.options import SPECULATION
from forerun.errors import ArgumentError
from forerun.serve.settings import ServeSettings

YAML = """
model: some/model
port: 9001
host: 0.0.0.0
api-key: [one, two]
max_queue: 7
--drain-s: 5
log-format: json
log_prompts: true
max-tokens: null
speculative-config: {method: eagle3, model: HEAD, num_speculative_tokens: 5}
"""
TOML = """
model = "some/model"
port = 9001
client-drafters = ["ngram", "suffix"]
"""


def parsed(*words: str) -> dict[str, Any]:
    """The arguments that `serve` would be called with."""
    _, bound, _ = build_app().parse_args(["serve", *words], exit_on_error=False, print_error=False)
    bound.apply_defaults()
    return {"model": bound.arguments["model"], **bound.arguments}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("FORERUN_API_KEY", raising=False)
    path = tmp_path / "server.yaml"
    path.write_text(YAML)
    return path


def test_a_file_gives_what_flags_would(file: Path) -> None:
    found = parsed("--config", str(file))
    settings: ServeSettings = found["settings"]
    assert (found["model"], found["port"], found["host"]) == ("some/model", 9001, "0.0.0.0")
    assert settings.api_keys == ("one", "two") and settings.max_queue == 7 and settings.drain_s == 5
    assert settings.log_format == "json" and settings.log_prompts and settings.max_tokens is None
    assert found["speculation"].config() == {"method": "eagle3", "model": "HEAD", "num_speculative_tokens": 5}


def test_flags_win_over_the_environment_and_that_over_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parsed("other/model", "--config", str(file), "--port", "1")["port"] == 1
    assert parsed("other/model", "--config", str(file))["model"] == "other/model"
    monkeypatch.setenv("FORERUN_API_KEY", "from-environment")
    assert parsed("--config", str(file))["settings"].api_keys == ("from-environment",)
    assert parsed("--config", str(file), "--api-key", "flag")["settings"].api_keys == ("flag",)
    monkeypatch.setenv("FORERUN_API_KEY", "")
    assert parsed()["settings"].api_keys == (), "deploy/compose.yaml passes an empty variable on"


def test_the_example_is_understood() -> None:
    found = parsed("--config", str(Path(__file__).parents[2] / "deploy" / "server.yaml"))
    assert found["settings"].log_format == "json" and found["speculation"].config() == {"method": "suffix"}


def test_toml(tmp_path: Path) -> None:
    path = tmp_path / "server.toml"
    path.write_text(TOML)
    found = parsed("--config", str(path))
    assert found["port"] == 9001 and found["settings"].client_drafters == ("ngram", "suffix")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("max_qeue: 3", "--max-queue"),
        ("port: many", "port"),
        ("- a\n- b", "(?i)mapping|options"),
        ("a: [", "server.yaml"),
        ("config: other.yaml", "names another file"),
        ("max_queue: 0", "max-queue must be at least 1"),
        ("log-format: xml", "(?i)log-format"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(file: Path, text: str, match: str) -> None:
    file.write_text(text)
    with pytest.raises((CycloptsError, ArgumentError), match=match):
        parsed("--config", str(file))


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--config", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml" in capsys.readouterr().err


def test_defaults_are_the_settings_own() -> None:
    assert parsed()["settings"] == ServeSettings() and parsed()["speculation"] == SPECULATION


def test_every_setting_is_a_flag(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")  # wide enough for every name to stand on one line
    main(["serve", "--help"])
    shown = capsys.readouterr().out
    for name, hint in get_type_hints(ServeSettings, include_extras=True).items():
        own = next((note.name for note in getattr(hint, "__metadata__", ()) if note.name), ())
        assert f"--{name.replace('_', '-')}" in shown or any(flag in shown for flag in own), name
