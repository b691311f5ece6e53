"""What is no model, through every door: one line that names what was typed, and the exit code of bad input."""

import json
import shutil
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import gguf
import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import loggers_restored
from engine.conftest import _write
from forerun import LLM
from forerun.cli import BAD_INPUT, main
from forerun.errors import ForerunError
from forerun.heads.files import TargetFacts
from forerun.training.features.store import checkpoint_directory
from model.ggufs import TOKENS, tiny, write_tiny
from selection import in_turn

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _write(tmp_path_factory.mktemp("good"), seed=0, layers=2)


class Folder:
    """An empty folder, and a good checkpoint to make bad ones of."""

    def __init__(self, path: Path, good: Path) -> None:
        self.path, self.good = path, good

    def copy(self, *without: str) -> Path:
        shutil.copytree(self.good, self.path / "model", ignore=shutil.ignore_patterns(*without))
        return self.path / "model"

    def holding(self, **files: str) -> Path:
        """The folder with such files; ``__`` stands for a dot."""
        for name, content in files.items():
            (self.path / name.replace("__", ".")).write_text(content)
        return self.path

    def broken(self) -> Path:
        """A checkpoint in which one number of one weight is none."""
        model = self.copy()
        weights = load_file(model / WEIGHTS)
        weights["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
        save_file(weights, model / WEIGHTS, metadata={"format": "pt"})
        return model

    def configured(self, **values: object) -> Path:
        model = self.copy()
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | values))
        return model

    def cached(self) -> Path:
        """As the hub's cache keeps a model."""
        (folder := self.path / "models--owner--name").mkdir()
        shutil.copytree(self.good, folder / "snapshots" / "0a1b")
        return folder

    def nan(self) -> Path:
        """A GGUF file with a number that is none."""
        model = tiny()
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight[3, 5] = torch.nan
        return write_tiny(self.path / "nan.gguf", model=model)


def _gguf(folder: Folder) -> Path:
    return write_tiny(folder.path / "tiny.gguf")


def _cut(folder: Folder, size: int = 40000) -> Path:
    _gguf(folder).write_bytes(_gguf(folder).read_bytes()[:size])
    return folder.path / "tiny.gguf"


def _newer(folder: Folder) -> Path:
    content = bytearray(_gguf(folder).read_bytes())
    content[4:8] = (4).to_bytes(4, "little")
    (folder.path / "tiny.gguf").write_bytes(content)
    return folder.path / "tiny.gguf"


def _two(folder: Folder) -> Path:
    write_tiny(folder.path / "one-Q8_0.gguf")
    write_tiny(folder.path / "other.gguf")
    write_tiny(folder.path / "mmproj-one.gguf")
    return folder.path


def _told(folder: Folder, more: Callable[[gguf.GGUFWriter], None]) -> Path:
    """A GGUF file that says something more of itself."""
    return write_tiny(folder.path / "tiny.gguf", more=more)


def _tongue(folder: Folder) -> Path:
    """A GGUF file with a tokenizer of a kind that nobody has heard of."""

    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("pigeon")
        writer.add_token_list(TOKENS)

    return write_tiny(folder.path / "tiny.gguf", tokens=None, more=more)


WRONG: dict[str, tuple[Callable[[Folder], str | Path], str]] = {
    "nothing of the name": (lambda at: at.path / "nothing", "there is no directory"),
    "our model misspelt": (lambda _: "smolm2", "Did you mean 'smollm2'?"),
    "an empty folder": (lambda at: at.path, "holds no config.json"),
    "a folder of models": (lambda at: at.copy().parent, "Such are in it: model."),
    "a folder of the hub's cache": (Folder.cached, "It is a folder of the hub's cache: name owner/name."),
    "the weights in place of their folder": (lambda at: at.copy() / WEIGHTS, "name the directory that it lies in"),
    "an adapter": (lambda at: at.holding(adapter_config__json="{}"), "It holds a PEFT adapter: pass it as adapter="),
    "a configuration that is no JSON": (lambda at: at.holding(config__json="{"), "config.json"),
    "an empty configuration": (lambda at: at.holding(config__json=""), "config.json"),
    "a configuration that is a list": (lambda at: at.holding(config__json="[]"), "model"),
    "a configuration without a kind": (lambda at: at.holding(config__json="{}"), "model"),
    "a configuration of another kind": (lambda at: at.configured(model_type="bert"), "not those of its config.json"),
    "a configuration of a diffusion model": (lambda at: at.holding(model_index__json="{}"), "holds no config.json"),
    "no weights": (lambda at: at.copy(WEIGHTS), f"holds no {WEIGHTS}"),
    "no tokenizer": (lambda at: at.copy("tokenizer*"), "holds no tokenizer.json or the like"),
    "a number that is none": (Folder.broken, "model.layers.1.mlp.up_proj.weight is not finite"),
    "a GGUF file with a number that is none": (Folder.nan, "weight is not finite"),
    "a GGUF file that is cut": (_cut, "is cut short"),
    "a GGUF file that is cut in its header": (partial(_cut, size=900), "is cut short"),
    "a GGUF file of a newer version": (_newer, "has GGUF version 4; 2 and 3 are read"),
    "a GGUF file with an unknown tokenizer": (_tongue, "pigeon"),
    "a projector": (lambda at: _told(at, lambda writer: writer.add_type("mmproj")), "the projector of a multimodal"),
    "an adapter in a GGUF file": (lambda at: _told(at, lambda writer: writer.add_type("adapter")), "no language model"),
    "a model for embeddings": (
        lambda at: _told(at, lambda writer: writer.add_pooling_type(gguf.PoolingType.MEAN)),
        "generates no text",
    ),
    "two GGUF models": (_two, "holds 2 GGUF models (one-Q8_0.gguf, other.gguf): name one of them"),
}
"""What it is -> what is typed, and words of the message."""


DOORS = (["generate", "--prompt", "x"], ["serve", "--port", "0"])


@pytest.fixture
def folder(tmp_path: Path, good: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "folder").mkdir()
    return Folder(tmp_path / "folder", good)


@pytest.mark.parametrize(
    ("name", "door"), in_turn(WRONG, DOORS), ids=lambda value: value if isinstance(value, str) else value[0]
)
def test_every_door_says_one_line(
    name: str, door: list[str], folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    make, words = WRONG[name]
    typed = str(make(folder))
    with pytest.raises(ForerunError) as caught:
        LLM(typed, max_num_seqs=1, device="cpu")
    message = str(caught.value)
    assert words in message and Path(typed).name in message and "/cache/" not in message, message
    assert "\n" not in message and len(message) < 700, message
    with loggers_restored():
        assert main([door[0], typed, "--device", "cpu", *door[1:]]) == BAD_INPUT
    written = capsys.readouterr()
    said = " ".join(written.err.split())
    assert said.count(" ".join(message.split())) == 1 and "dequantised in memory" not in said, written.err
    assert "unpack" not in said
    assert not written.out and "Traceback" not in written.err


MISTYPED = "no/such"
OPENS: dict[str, Callable[[Path, LLM], object]] = {
    "a model": lambda model, llm: LLM(MISTYPED),
    "a model misspelt": lambda model, llm: LLM("smolm2"),
    "a draft model": lambda model, llm: LLM(model, speculative_config={"method": "draft_model", "model": MISTYPED}),
    "a request's draft model": lambda model, llm: llm.generate(
        "x", speculative={"method": "draft_model", "model": MISTYPED}
    ),
    "a request's head": lambda model, llm: llm.generate("x", speculative={"method": "eagle3", "model": MISTYPED}),
    "a request's model with other tokens": lambda model, llm: llm.generate(
        "x", speculative={"method": "tli", "model": MISTYPED}
    ),
    "an adapter": lambda model, llm: LLM(model, adapter=MISTYPED),
    "a tokenizer": lambda model, llm: LLM(model, tokenizer=MISTYPED),
    "a target to train for": lambda model, llm: checkpoint_directory(MISTYPED),
    "a target's shape": lambda model, llm: TargetFacts.read(MISTYPED),
}


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The hosts that were looked up; there is no network, and no attempt is waited for."""
    asked: list[object] = []

    def look_up(host: object, *_: object, **__: object) -> None:
        asked.append(host)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    return asked


@pytest.mark.parametrize("name", OPENS)
def test_a_mistyped_name_is_asked_for_once(name: str, good: Path, lookups: list[object]) -> None:
    """Without a network: what opens it would ask for several files, each six times, with seconds in between."""
    with LLM(good, max_num_seqs=1, device="cpu") as llm, pytest.raises(ForerunError, match="cannot be reached"):
        OPENS[name](good, llm)
    assert len(lookups) <= 2  # The hub's library asks something of its own once in a process


def test_an_adapters_folder_is_looked_at_first(good: Path, tmp_path: Path, lookups: list[object]) -> None:
    with pytest.raises(ForerunError, match=r"holds no adapter_config\.json"):
        LLM(good, adapter=tmp_path)
    assert main(["generate", str(good), "-p", "x", "--adapter", str(tmp_path)]) == BAD_INPUT
    assert not lookups
