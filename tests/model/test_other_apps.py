"""Models that Ollama and LM Studio keep, by their names."""

import hashlib
import json
from pathlib import Path

import pytest

from forerun.cli import main
from forerun.errors import CheckpointError
from forerun.model.checks import check
from forerun.model.names import gguf_file
from forerun.model.other_apps import find_kept
from model.ggufs import write_tiny


class Ollama:
    """A folder as Ollama has it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, name: str, *, layers: tuple[str, ...] = ("model", "template", "params"), host: str = "") -> Path:
        """Keep a model; of its layers each `model` is a GGUF file. Returns the file of the last one."""
        (blobs := self.folder / "blobs").mkdir(parents=True, exist_ok=True)
        listed, file = [], blobs
        for index, kind in enumerate(layers):
            digest = hashlib.sha256(f"{name} {index}".encode()).hexdigest()
            if kind == "model":
                file = write_tiny(blobs / f"sha256-{digest}")
            listed.append({"mediaType": f"application/vnd.ollama.image.{kind}", "digest": f"sha256:{digest}"})
        manifest = self.folder / "manifests" / (host or "registry.ollama.ai/library") / name.replace(":", "/")
        manifest.parent.mkdir(parents=True)
        manifest.write_text(json.dumps({"schemaVersion": 2, "layers": listed}))
        return file


@pytest.fixture
def ollama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ollama:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    return Ollama(tmp_path / "ollama")


def test_ollamas_models_by_their_names(ollama: Ollama, caplog: pytest.LogCaptureFixture) -> None:
    small, one = ollama.add("smollm2:latest"), ollama.add("Qwen3:0.6b", layers=("model",))
    foreign = ollama.add("Tiny-GGUF:Q4_K_M", host="hf.co/someone")
    own = ollama.add("mine:latest", host="registry.ollama.ai/me")
    assert find_kept("ollama:smollm2") == find_kept("ollama:smollm2:latest") == gguf_file("ollama:smollm2") == small
    assert find_kept("ollama:qwen3:0.6B") == one
    assert find_kept("ollama:hf.co/someone/Tiny-GGUF:q4_k_m") == foreign and find_kept("ollama:me/mine") == own
    check("ollama:smollm2", "auto")
    [line] = [record.getMessage() for record in caplog.records if "ollama:smollm2:" in record.getMessage()][:1]
    assert "template, params are not" in line


def test_llama_cpp_is_deployed_for_what_ollama_keeps(ollama: Ollama, capsys: pytest.CaptureFixture[str]) -> None:
    large, small = ollama.add("large:latest"), ollama.add("small:latest", layers=("model",))
    words = ["deploy", "llamacpp", "ollama:large", "--drafter", "draft_model", "--drafter-model", "ollama:small"]
    assert main(words) == 0
    line = "".join(capsys.readouterr().out.split())
    assert f"-m{large}" in line and f"--spec-draft-model{small}" in line
    assert main(["deploy", "llamacpp", "ollama:larg"]) != 0
    assert "Ollama keeps no model 'larg:latest' here: there are" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        (("model", "adapter"), "with an adapter"),
        (("tensor", "tensor"), "0 GGUF files"),
        (("model", "model"), "2 GGUF files"),
        ((), "0 GGUF files"),
    ],
)
def test_what_ollama_keeps_and_is_no_gguf_file(ollama: Ollama, layers: tuple[str, ...], words: str) -> None:
    ollama.add("odd:latest", layers=layers)
    with pytest.raises(CheckpointError, match=words):
        gguf_file("ollama:odd")


def test_models_that_are_not_there(ollama: Ollama, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no model is in .*ollama"):
        check("ollama:smollm2", "auto")
    file = ollama.add("smollm2:135m")
    with pytest.raises(CheckpointError, match=r"there are smollm2:135m\. Did you mean 'smollm2:135m'"):
        check("ollama:smollm2", "auto")
    file.unlink()
    with pytest.raises(CheckpointError, match="ollama pull smollm2:135m"):
        check("ollama:smollm2:135m", "auto")
    (ollama.folder / "manifests/registry.ollama.ai/library/smollm2/135m").write_text("[]")
    with pytest.raises(CheckpointError, match="no manifest of Ollama"):
        check("ollama:smollm2:135m", "auto")


def test_lm_studios_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (folder := tmp_path / ".lmstudio/models/someone/Tiny-GGUF").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="no model is in"):
        find_kept("lmstudio:someone/Tiny-GGUF")
    file = write_tiny(folder / "Tiny-Q4_0.gguf")
    assert gguf_file("lmstudio:someone/tiny-gguf") == file
    assert find_kept("lmstudio:someone/Tiny-GGUF/Tiny-Q4_0") == find_kept("lmstudio:someone/Tiny-GGUF/Tiny-Q4_0.gguf")
    check("lmstudio:someone/Tiny-GGUF", "auto")
    write_tiny(folder / "Tiny-Q8_0.gguf")
    with pytest.raises(CheckpointError, match="2 GGUF models"):
        gguf_file("lmstudio:someone/Tiny-GGUF")
    with pytest.raises(CheckpointError, match="Did you mean 'someone/Tiny-GGUF"):
        check("lmstudio:someone/Tiny", "auto")
