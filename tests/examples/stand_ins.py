"""What takes the place of what a document cannot know: the reader's models and files, and an hour of time.

The one table for `test_printed_commands`: a command is run with these, or is named here with the reason why not.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

import forerun
from forerun import LLM, SamplingParams
from forerun.serve.traffic import owner_of
from forerun.shipped import resolve
from model.ggufs import tiny, write_tiny
from mtp_targets import with_fresh_layers

HEAD = str(resolve("demo-eagle3"))
WORDS = {
    # What other applications keep; tests/model/test_other_apps.py finds it.
    **dict.fromkeys(("ollama:smollm2:135m", "lmstudio:bartowski/SmolLM2-135M-Instruct-GGUF"), "demo"),
    **dict.fromkeys(("MODEL", "TARGET", "smollm2"), "demo"),  # smollm2 is downloaded; tests/real asks it
    **dict.fromkeys(("SMALL_MODEL", "SMALL-1", "SMALL-2", "SMALL-3"), "demo-draft"),
    **dict.fromkeys(("HEAD", "SOMEBODY/HEAD", "RedHatAI/SOME-HEAD"), HEAD),
    "DIR": "exported",
    "path/to/your/model": "demo",
    "MTP_MODEL": "mtp-model",
    "--drafter X": "--drafter ngram",
    **dict.fromkeys(("http://localhost:8000/v1", "http://localhost:8000", "http://localhost:8001"), "{endpoint}"),
    # A run of its own for each line that trains by the same recipe.
    "eagle3 recipe.yaml": "eagle3 recipe.yaml output=runs/{line}",
    # What costs minutes at the printed size, or has no room in the demo model.
    "--scale 0.4": "--scale 0.1",
    "--all --scale 8": "--all",
    "draft.vocab_size=32000": "draft.vocab_size=400",
    "--draft-vocab-size 4096": "--draft-vocab-size 400",
    "[:600]": "[:3]",
    "1_000_000": "5_000",
    "training.seconds=3300": "training.steps=1",
}
"""What is printed -> what it is run with."""

QUICK: dict[str, dict[str, str]] = {
    "generate": {"--max-tokens -n": "8"},
    "demo": {"--max-tokens -n": "8", "--repeats": "1"},
    "bench": {"--num-prompts": "2"},
    "certify": {"--prompts": "1", "--max-tokens": "8", "--detect": "0.9", "--temperature": "0"},
    "calibrate": {"--seconds": "0.5", "--contexts": "64"},
    "plan demo": {"--max-tokens": "8"},
    "data regenerate": {"--max-tokens -n": "8"},
    "data draw-prompts": {"--count": "3"},
    "train": {"training.steps=": "1", "windows.length=": "64", "training.optimizer=": "adamw"},
    "train eagle3": {"objective.steps=": "2"},
    "tune skip-layers": {"--iterations": "1", "--tokens": "4", "--limit": "1", "--prompt-tokens": "16"},
}
"""Verb -> options that keep it short: in place of what is printed, or beside it."""

ONLY_PARSED = {
    r"^docker run ": "needs Docker; behind the image's name stand options of forerun serve",
    r"python -m benchmarks\.suite": "measures for an hour; tests/bench runs its parts",
    r"python -m benchmarks\.gpu|--device cuda": "needs a GPU",
    r"^(\S+/)?python \S+\.py": "measures or trains for minutes to hours",
    r"^(\S+/)?forerun demo( --prompt-name edit -t 0)?\s*(#|$)": "downloads a real model; tests/real runs it",
    r"^forerun speedup ": "takes its whole budget of time; tests/speedup runs it",
    r"^forerun certify --server ": "asks a server hundreds of times; tests/certify runs it",
    r"^forerun serve .* --chat-template hermes": "the demo model has no such marks; tests/serve has",
    r"^forerun doctor .* --run ": "runs vLLM; tests/deploy/test_trial.py stands in for it",
}
"""Pattern of a command -> why it is given to its parser and to nobody else."""

NOT_OURS = {
    r"^pip install ": "sets up an environment, as `make` has done for these tests",
    r"^docker build ": "needs Docker",
    r"^forerun VERB ": "says what a command looks like",
    r"-m pytest\b": "these very tests",
    r"convert_hf_to_gguf\.py ": "llama.cpp's converter",
    r" vllm serve ": "vLLM; `make test-vllm` drafts in it",
    r"sglang\.launch_server ": "SGLang; `make test-sglang` tries the plug-in on its classes",
    r"^(vllm bench|aiperf|guidellm) ": "other people's clients",
    r"^lm_eval ": "needs lm-evaluation-harness and a data set; tests/serve/test_client_features.py asks as it does",
    r"bin/(ruff|mypy|zensical)\b": "other people's tools",
}
"""Pattern of a command -> why there is nothing to try in it."""


def talk(question: str, answer: str) -> str:
    """A line of a JSONL file of conversations."""
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": messages}) + "\n"


CODE = "import os\n\n\ndef add(a, b):\n    return a + b\n" * 12
TALKS = talk("Write f.", "import os\nprint(os.sep)\n" * 8) + talk("Write g.", CODE)
TEXTS = {
    **{
        f"{name}.jsonl": TALKS
        for name in ("prompts", "train_prompts", "held-out", "completions", "chats", "corpus", "mt_bench")
    },
    **dict.fromkeys(("notes.txt", "question.txt", "task.txt", "old.py"), CODE),
    "yesterday.json": json.dumps({"loads": [{"load": "1 user"}]}),
    "recipe.yaml": "target: demo\ndata: data/train\noutput: runs/recipe\n",
}
"""A file that a command reads and none before it on its page has written -> what is in it."""

Run = Callable[[list[str]], None]


def _prepared(folder: Path, run: Run) -> None:
    source = folder.with_suffix(".jsonl")
    source.write_text(TALKS)
    run(["data", "prepare", str(source), "--target", "demo", "--output", str(folder)])


def _recorded(folder: Path, _run: Run) -> None:
    folder.mkdir()
    (folder / f"{owner_of('KEY')}.jsonl").touch()


FOLDERS: dict[str, Callable[[Path, Run], object]] = {
    "data/train": _prepared,
    "runs/first/head": lambda folder, run: shutil.copytree(HEAD, folder),
    "mtp-model": lambda folder, run: with_fresh_layers(Path(resolve("demo")), folder),
    "build/demo/heads": lambda folder, run: shutil.copytree(HEAD, folder / "eagle3" / "head"),
    "model.gguf": lambda file, run: write_tiny(file, model=tiny(seed=1)),
    "small.gguf": lambda file, run: write_tiny(file),
    "traffic": _recorded,
}
"""The same for folders -> what makes it."""


def _transformers() -> Mapping[str, Any]:
    folder = resolve("demo")
    inputs = AutoTokenizer.from_pretrained(folder)("import os", return_tensors="pt")
    return {"forerun": forerun, "model": AutoModelForCausalLM.from_pretrained(folder), "inputs": inputs}


def _files() -> Mapping[str, Any]:
    messages = [{"role": "user", "content": "Write f."}]
    params = SamplingParams(temperature=0, max_tokens=8)
    return {"LLM": LLM, "model": "demo", "task": CODE, "old_file": CODE, "messages": messages, "params": params}


def llama_cpp() -> Mapping[str, ModuleType]:
    """In place of llama-cpp-python, which is built from source: `make test-llama` runs it."""
    package, speculative = ModuleType("llama_cpp"), ModuleType("llama_cpp.llama_speculative")
    package.Llama = lambda file, **options: options["draft_model"]
    speculative.LlamaDraftModel = object
    return {"llama_cpp": package, "llama_cpp.llama_speculative": speculative}


MODULES: dict[str, Callable[[], Mapping[str, ModuleType]]] = {"docs/deploy.md": llama_cpp}
"""Page -> modules that its Python imports and that are not here."""
NAMES: dict[str, Callable[[], Mapping[str, Any]]] = {
    "README.md": _transformers,
    "docs/copying.md": _files,
    "docs/control.md": lambda: {"LLM": LLM},
}
"""Page -> what the Python on it takes for granted."""
