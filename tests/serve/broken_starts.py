"""Starts of the server that must fail: what is wrong, the words of the command, and what the message has to name.

    python tests/serve/broken_starts.py [NAME ...]

runs each as a real process and prints its exit code, its seconds and the last line that it wrote.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

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

    def copy(self, **files: str | bytes | None) -> str:
        """A copy of the model in which files say something else; None: without them. ``__`` stands for a dot."""
        model = self.folder / "model"
        shutil.copytree(self.model, model)
        for name, content in files.items():
            path = model / name.replace("__", ".")
            if content is None:
                path.unlink()
            else:
                path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(model)

    def config(self, **values: object) -> str:
        """A copy of the model whose config.json says something else."""
        stored = json.loads((self.model / "config.json").read_text())
        return self.copy(config__json=json.dumps(stored | values))

    def file(self, name: str, content: str) -> str:
        """A file of that content."""
        path = self.folder / name
        path.write_text(content)
        return str(path)

    def weights(self) -> bytes:
        """Of the model."""
        return (self.model / "model.safetensors").read_bytes()

    def head(self) -> str:
        """A head for another target."""
        head = self.folder / "head"
        shutil.copytree(self.draft, head)
        return str(head)

    def misfit(self) -> str:
        """A draft model with another tokenizer."""
        from forerun.shipped import resolve

        return str(resolve("demo-draft"))


def _template(text: str) -> Callable[[Scene], list[str]]:
    return lambda scene: [scene.copy(chat_template__jinja=text)]


def _with(*words: str) -> Callable[[Scene], list[str]]:
    return lambda scene: [str(scene.model), *words]


def _hard_limit() -> str:
    """One connection more than open files are allowed."""
    import resource

    return str(resource.getrlimit(resource.RLIMIT_NOFILE)[1])


@contextmanager
def taken(words: list[str]) -> Iterator[list[str]]:
    """The words, with a port that somebody listens on in place of ``TAKEN``, and any free one where none is named."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        named = words if "--port" in words else ["--port", "0", *words]
        yield [str(other.getsockname()[1]) if word == "TAKEN" else word for word in named]


STARTS: dict[str, tuple[Callable[[Scene], list[str]], str]] = {
    "no such folder": (lambda scene: [str(scene.folder / "nothing")], "there is no directory"),
    "no such model on the hub": (lambda _: ["forerun-no-such-model"], "forerun-no-such-model"),
    "an empty folder": (lambda scene: [str(scene.folder)], "holds no config.json"),
    "a file for a folder": (lambda scene: [str(scene.model / "config.json")], "config.json"),
    "config.json is no JSON": (lambda scene: [scene.copy(config__json="{")], "config.json"),
    "config.json is empty": (lambda scene: [scene.copy(config__json="")], "config.json"),
    "config.json is a list": (lambda scene: [scene.copy(config__json="[]")], "model"),
    "config.json without a kind": (lambda scene: [scene.copy(config__json="{}")], "model"),
    "an unknown kind": (lambda scene: [scene.config(model_type="nonsense")], "nonsense"),
    "a kind that is not served": (lambda scene: [scene.config(model_type="mamba")], "mamba"),
    "-1 layers": (lambda scene: [scene.config(num_hidden_layers=-1)], "num_hidden_layers"),
    "a layer too many": (lambda scene: [scene.config(num_hidden_layers=3)], "missing: model.layers.2"),
    "no attention heads": (lambda scene: [scene.config(num_attention_heads=0)], "cannot open"),
    "a size that is no number": (lambda scene: [scene.config(hidden_size="many")], "hidden_size"),
    "another vocabulary": (lambda scene: [scene.config(vocab_size=99)], "of the wrong shape"),
    "no weights": (lambda scene: [scene.copy(model__safetensors=None)], "model.safetensors"),
    "truncated weights": (lambda scene: [scene.copy(model__safetensors=scene.weights()[:-64])], "model.safetensors"),
    "weights that are none": (lambda scene: [scene.copy(model__safetensors=b"x" * 999)], "model.safetensors"),
    "a broken tokenizer": (lambda scene: [scene.copy(tokenizer__json="{")], "tokenizer"),
    "no tokenizer": (lambda scene: [scene.copy(tokenizer__json=None, tokenizer_config__json=None)], "tokenizer"),
    "generation_config.json is no JSON": (lambda scene: [scene.copy(generation_config__json="{")], "generation_config"),
    "generation_config.json out of range": (
        lambda scene: [scene.copy(generation_config__json='{"temperature": -3, "do_sample": true}')],
        "temperature",
    ),
    "generation_config.json of another type": (
        lambda scene: [scene.copy(generation_config__json='{"top_p": "much", "do_sample": true}')],
        "generation_config",
    ),
    "a template that cannot be read": (_template("{% for m in messages %}{{ m.content }"), "chat template"),
    "a template that refuses everybody": (_template("{{ raise_exception('not today') }}"), "not today"),
    "a template that fails": (_template("{{ 1 // 0 }}"), "chat template"),
    "a port in use": (_with("--port", "TAKEN"), "choose another"),
    "no such port": (_with("--port", "99999"), "99999"),
    "no such address": (_with("--host", "192.0.2.1"), "192.0.2.1"),
    "a host without a name": (_with("--host", "no host"), "no host"),
    "no certificate": (_with("--ssl-certfile", "/nonexistent.pem"), "/nonexistent.pem"),
    "a certificate that is none": (
        lambda scene: [
            str(scene.model),
            "--ssl-certfile",
            scene.file("a.pem", "x"),
            "--ssl-keyfile",
            scene.file("b", "x"),
        ],
        "HTTPS",
    ),
    "an unknown drafter": (_with("--drafter", "nonsense"), "nonsense"),
    "a drafter without its model": (_with("--drafter", "eagle3"), "model"),
    "a missing head": (_with("--drafter", "eagle3", "--drafter-model", "/nonexistent/head"), "/nonexistent/head"),
    "a model for a head": (lambda s: [str(s.model), "--drafter", "eagle3", "--drafter-model", s.head()], "head"),
    "a missing draft model": (_with("--drafter", "draft_model", "--drafter-model", "/nonexistent"), "/nonexistent"),
    "a draft model of others": (
        lambda scene: [str(scene.model), "--drafter", "draft_model", "--drafter-model", scene.misfit()],
        "token",
    ),
    "an unknown option of a drafter": (_with("--drafter", "ngram", "--drafter-option", "wrong=1"), "wrong"),
    "an unknown drafter for requests": (_with("--client-drafters", "nonsense"), "nonsense"),
    "a drafter for requests that needs a model": (_with("--client-drafters", "draft_model"), "draft_model"),
    "an unknown rule": (_with("--drafter", "ngram", "--rule", "wrong"), "wrong"),
    "a missing datastore": (_with("--drafter", "rest", "--drafter-option", "datastore=/nonexistent"), "/nonexistent"),
    "a context that is too long": (_with("--max-model-len", "100000"), "max_model_len"),
    "a context of one": (_with("--max-model-len", "1"), "max_model_len"),
    "no rows": (_with("--max-num-seqs", "0"), "max_num_seqs"),
    "too little memory": (_with("--max-num-seqs", "1000000000"), "GiB are needed"),
    "a cache that holds nothing": (_with("--kv-cache-tokens", "0"), "kv_cache_tokens"),
    "too many connections": (_with("--max-connections", _hard_limit()), "--max-connections"),
    "a missing certificate": (_with("--ssl-certfile", "/nonexistent.pem"), "/nonexistent.pem"),
    "a key without a certificate": (_with("--ssl-keyfile", "/nonexistent.pem"), "--ssl-certfile"),
    "a path without a slash": (_with("--root-path", "llm"), "--root-path"),
    "an unknown option": (_with("--wrong"), "--wrong"),
    "a queue of none": (_with("--max-queue", "0"), "--max-queue"),
    "an unknown parser": (_with("--tool-call-parser", "wrong"), "wrong"),
    "no such device": (_with("--device", "cuda:77"), "cuda:77"),
    "an unknown dtype": (_with("--dtype", "float33"), "float33"),
    "an options file that is not there": (_with("--config", "/nonexistent.yaml"), "/nonexistent.yaml"),
    "an options file that cannot be read": (lambda s: ["--config", s.file("a.yaml", "model: [")], "a.yaml"),
    "an options file of others": (lambda s: ["--config", s.file("a.yaml", "modle: demo")], "modle"),
    "an options file that is a folder": (lambda scene: ["--config", str(scene.folder)], "cannot read"),
}
"""Name -> the words behind ``forerun serve``, and a part of the message."""


def run_all(names: list[str]) -> None:
    """Print what becomes of each start."""
    from engine.conftest import _write

    with tempfile.TemporaryDirectory() as folder:
        model = _write(_made(Path(folder) / "good"), seed=0, layers=2)
        draft = _write(_made(Path(folder) / "draft"), seed=1, layers=2)
        failed = 0
        for number, name in enumerate(names):
            scene = Scene(folder=_made(Path(folder) / str(number)), model=model, draft=draft)
            code, seconds, written = run_one(name, scene)
            failed += code not in (0, None)
            print(f"{name:40} {'up' if code is None else code:>4} {seconds:5.1f} s  {written[-150:]!r}", flush=True)  # noqa: T201
        print(f"{failed} of {len(names)} ended with an exit code that is not 0")  # noqa: T201


def run_one(name: str, scene: Scene) -> tuple[int | None, float, str]:
    """Exit code (None: it did not end), seconds, and what it wrote."""
    words, _ = STARTS[name]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    began = time.monotonic()
    with taken(words(scene)) as command:
        process = subprocess.Popen(
            [sys.executable, "-m", "forerun.cli", "serve", *command],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        try:
            written = process.communicate(timeout=SECONDS)[1]
            code: int | None = process.returncode
        except subprocess.TimeoutExpired:
            process.kill()
            written, code = process.communicate()[1], None
    return code, time.monotonic() - began, written.strip()


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Print what becomes of starts that must fail.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="of a start; all of them if none is given")
    run_all(parser.parse_args().names or list(STARTS))
