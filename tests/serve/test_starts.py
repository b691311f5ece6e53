"""How a server starts: options from a file, the environment, flags; what cannot start ends with one clear message."""

import json
import os
import re
import resource
import shlex
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import huggingface_hub.constants
import pytest
from cyclopts import CycloptsError

from conftest import loggers_restored
from forerun.cli import build_app, main
from forerun.cli.options import SPECULATION
from forerun.errors import ArgumentError
from forerun.serve.session import Session
from forerun.serve.settings import ServeSettings
from forerun.shipped import resolve

MOST_FILES = str(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
SECONDS = 60.0
"""In which a start must have failed; loading torch takes some of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """Where a start is tried."""

    folder: Path
    """Empty."""
    model: Path
    """A good checkpoint."""
    draft: Path
    """A draft model of it."""

    def copy(self, **files: str) -> str:
        """A copy of the model in which files say something else; ``__`` stands for a dot."""
        model = shutil.copytree(self.model, self.folder / "model")
        for name, content in files.items():
            (model / name.replace("__", ".")).write_text(content)
        return str(model)

    def config(self, **values: object) -> str:
        """A copy of the model whose config.json says something else."""
        stored = json.loads((self.model / "config.json").read_text())
        return self.copy(config__json=json.dumps(stored | values))

    def options(self, content: str) -> list[str]:
        """A file of options."""
        (self.folder / "a.yaml").write_text(content)
        return ["--config", str(self.folder / "a.yaml")]

    def head(self) -> str:
        """A head for another target."""
        return str(shutil.copytree(self.draft, self.folder / "head"))

    def words(self, start: "str | Callable[[Scene], list[str]]") -> list[str]:
        """Behind ``forerun serve``; in a text capitals stand for paths, and for a port in use."""
        if callable(start):
            return start(self)
        places = {"MODEL": self.model, "FOLDER": self.folder, "OTHERS": resolve("demo-draft"), "MOST_FILES": MOST_FILES}
        places |= {"HEAD": self.head()} if "HEAD" in start else {}
        return [re.sub(r"^[A-Z_]+", lambda m: str(places.get(m[0], m[0])), word) for word in shlex.split(start)]


def _config(**values: object) -> Callable[[Scene], list[str]]:
    return lambda scene: [scene.config(**values)]


def _copy(**files: str) -> Callable[[Scene], list[str]]:
    return lambda scene: [scene.copy(**files)]


@contextmanager
def taken(words: list[str]) -> Iterator[list[str]]:
    """The words, with a port that somebody listens on in place of ``TAKEN``, and any free one where none is named."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        named = words if "--port" in words else ["--port", "0", *words]
        yield [str(other.getsockname()[1]) if word == "TAKEN" else word for word in named]


# Other wrong models: `tests/model/test_load.py`, and `tests/model/test_wrong_models.py` through every door.
STARTS: dict[str, tuple[str | Callable[[Scene], list[str]], str]] = {
    "no such model on the hub": ("forerun-no-such-model", "forerun-no-such-model"),
    "a file for a folder": ("MODEL/config.json", "config.json"),
    "a kind that is not served": (_config(model_type="rwkv"), "rwkv"),
    "-1 layers": (_config(num_hidden_layers=-1), "num_hidden_layers"),
    "no attention heads": (_config(num_attention_heads=0), "cannot open"),
    "a size that is no number": (_config(hidden_size="many"), "hidden_size"),
    "a broken tokenizer": (_copy(tokenizer__json="{"), "tokenizer"),
    "generation_config.json is no JSON": (_copy(generation_config__json="{"), "generation_config"),
    "settings out of range": (_copy(generation_config__json='{"temperature": -3, "do_sample": true}'), "temperature"),
    "generation_config.json of another type": (
        _copy(generation_config__json='{"top_p": "much", "do_sample": true}'),
        "generation_config",
    ),
    "an unreadable template": (_copy(chat_template__jinja="{% for m in messages %}{{ m.content }"), "chat template"),
    "a template that refuses all": (_copy(chat_template__jinja="{{ raise_exception('not today') }}"), "not today"),
    "a template that fails": (_copy(chat_template__jinja="{{ 1 // 0 }}"), "chat template"),
    "a template that is not there": ("MODEL --chat-template /nonexistent.jinja", "/nonexistent.jinja"),
    "a port in use": ("MODEL --port TAKEN", "choose another"),
    "no such port": ("MODEL --port 99999", "99999"),
    "no such address": ("MODEL --host 192.0.2.1", "192.0.2.1"),
    "a host without a name": ("MODEL --host 'no host'", "no host"),
    "no certificate": ("MODEL --ssl-certfile /nonexistent.pem", "/nonexistent.pem"),
    "a certificate that is none": ("MODEL --ssl-certfile MODEL/config.json --ssl-keyfile MODEL/config.json", "HTTPS"),
    "an unknown drafter": ("MODEL --drafter nonsense", "nonsense"),
    "a drafter without its model": ("MODEL --drafter eagle3", "model"),
    "a missing head": ("MODEL --drafter eagle3 --drafter-model /nonexistent/head", "/nonexistent/head"),
    "a model for a head": ("MODEL --drafter eagle3 --drafter-model HEAD", "head"),
    "a missing draft model": ("MODEL --drafter draft_model --drafter-model /nonexistent", "/nonexistent"),
    "a draft model of others": ("MODEL --drafter draft_model --drafter-model OTHERS", "token"),
    "an unknown option of a drafter": ("MODEL --drafter ngram --drafter-option wrong=1", "wrong"),
    "an unknown drafter for requests": ("MODEL --client-drafters nonsense", "nonsense"),
    "a drafter for requests that needs a model": ("MODEL --client-drafters draft_model", "draft_model"),
    "an unknown rule": ("MODEL --drafter ngram --rule wrong", "wrong"),
    "a missing datastore": ("MODEL --drafter rest --drafter-option datastore=/nonexistent", "/nonexistent"),
    "a context that is too long": ("MODEL --max-model-len 100000", "exceeds the model's context of 256"),
    "a context that no memory holds": ("MODEL --max-model-len 100000000000", "exceeds the model's context of 256"),
    "a context of one": ("MODEL --max-model-len 1", "max_model_len"),
    "no rows": ("MODEL --max-num-seqs 0", "max_num_seqs"),
    "too little memory": ("MODEL --max-num-seqs 1000000000", "GiB are needed"),
    "a cache that holds nothing": ("MODEL --kv-cache-tokens 0", "kv_cache_tokens"),
    "too many connections": ("MODEL --max-connections MOST_FILES", "--max-connections"),
    "a key without a certificate": ("MODEL --ssl-keyfile /nonexistent.pem", "--ssl-certfile"),
    "a path without a slash": ("MODEL --root-path llm", "--root-path"),
    "an unknown option": ("MODEL --wrong", "--wrong"),
    "a queue of none": ("MODEL --max-queue 0", "--max-queue"),
    "an unknown parser": ("MODEL --tool-call-parser wrong", "wrong"),
    "no such device": ("MODEL --device cuda:77", "cuda:77"),
    "a device that torch has no code for": ("MODEL --device xpu", "there is no device xpu"),
    "an unknown dtype": ("MODEL --dtype float33", "float33"),
    "an options file that is not there": ("MODEL --config /nonexistent.yaml", "/nonexistent.yaml"),
    "an options file that cannot be read": (lambda scene: scene.options("model: ["), "a.yaml"),
    "an options file of others": (lambda scene: scene.options("modle: demo"), "modle"),
    "an options file that is a folder": ("--config FOLDER", "cannot read"),
}
"""Name -> `Scene.words`, and a part of the message."""


def run(words: list[str]) -> tuple[int | None, str]:
    """Exit code of the process (None: it did not end), and what it wrote."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    command = [sys.executable, "-m", "forerun.cli", "serve", *words]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        return None, str(error.stderr)
    return ran.returncode, ran.stderr


UNEXPECTED = {"-1 layers"}
"""What breaks inside of transformers: its traceback is in the log."""


@pytest.fixture
def scene(tmp_path: Path, checkpoint: Path, draft_checkpoint: Path) -> Scene:
    return Scene(folder=tmp_path, model=checkpoint, draft=draft_checkpoint)


def started(words: list[str]) -> int:
    """Exit code of ``forerun serve``; in a thread, for a server that came up would never end."""
    codes = list[int]()
    thread = threading.Thread(target=lambda: codes.append(main(["serve", *words])), daemon=True)
    with loggers_restored():
        thread.start()
        thread.join(SECONDS)
    assert codes, "the server runs"
    return codes[0]


@pytest.mark.parametrize("name", STARTS)
def test_the_command_ends_with_a_message(
    name: str, scene: Scene, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    words, expected = STARTS[name]
    with taken(scene.words(words)) as command:
        code = started(command)
    check(name, code, capsys.readouterr().err, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", STARTS)
def test_and_so_does_the_process(name: str, scene: Scene) -> None:
    words, expected = STARTS[name]
    with taken(scene.words(words)) as command:
        check(name, *run(command), expected)


def check(name: str, code: int | None, written: str, expected: str) -> None:
    """Of what a start came to."""
    assert code == (1 if name in UNEXPECTED else 2), written
    assert expected in written
    assert ("Traceback" in written) == (name in UNEXPECTED)
    errors = [line for line in written.splitlines() if " ERROR " in line or line.startswith("error: ")]
    assert len(errors) == 1 and len(written) < 8000, written
    *_, last = written.removesuffix("Try: forerun serve --help\n").splitlines()
    assert last == errors[0] or name in UNEXPECTED, "nothing of the web server's follows"


def test_a_long_error_is_cut(scene: Scene, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it says, and from however deep it comes."""

    def deep(depth: int) -> Any:
        if depth:
            return deep(depth - 1)
        raise RuntimeError("first " + "x" * 100_000 + " last")

    monkeypatch.setattr("forerun.cli.serve._load", lambda *_: deep(200))
    assert started([str(scene.model), "--port", "0"]) == 1
    written = capsys.readouterr().err
    assert written.count("Traceback") == 1 and "characters left out" in written and " last" in written
    assert len(written) < 6000


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


def test_a_gguf_file_answers_to_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its ending and without; the model that is downloaded, too. One name is listed, or each that is chosen."""
    file = tmp_path / "small.Q4_1.gguf"
    file.touch()
    found = list[Session]()
    monkeypatch.setattr("forerun.cli.session.check", lambda *_, **__: None)
    monkeypatch.setattr("forerun.serve.server.run", lambda session, **_: found.append(session) or 0)
    chosen = ("--served-model-name", "a", "--served-model-name", "b")
    with loggers_restored():
        for words in ([str(file)], ["smollm2"], [str(file), *chosen]):
            assert main(["serve", *words, "--port", "0"]) == 0
    own = ("small.Q4_1", "small.Q4_1.gguf", str(file))
    assert [session.names for session in found] == [
        own,
        ("smollm2", "SmolLM2-135M-Instruct.Q4_1", "SmolLM2-135M-Instruct.Q4_1.gguf"),
        ("a", "b", *own),
    ]
    assert [session.settings.model_names for session in found] == [own[:1], ("smollm2",), ("a", "b")]


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
