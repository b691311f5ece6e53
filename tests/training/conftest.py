"""A tiny target on disk, what it writes, and the words that train a head for it."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from forerun import LLM, SamplingParams
from forerun.cli import main
from forerun.training.data.store import write_prepared
from forerun.types import SpeculationStats
from forerun.writing import TokenizerIdentity
from ports import free_ports
from training.ttt import VOCABULARY, model


def save_with_words(made: Any, folder: Path) -> Path:
    """Write a model as a checkpoint, with a tokenizer of one word per token."""
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(made.config.vocab_size)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    made.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as a checkpoint, with a tokenizer of one word per token."""
    return save_with_words(model(), tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def prepared(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the target writes by itself, so that a head can learn it."""
    folder = tmp_path_factory.mktemp("data") / "prepared"
    tokenizer = PreTrainedTokenizerFast.from_pretrained(target)
    llm = LLM(model(), tokenizer=False)
    prompts = [{"prompt_token_ids": [first]} for first in range(VOCABULARY)]
    params = SamplingParams(temperature=0, max_tokens=40, detokenize=False)
    answered = zip(prompts, llm.generate(prompts, params), strict=True)
    texts = [[*prompt["prompt_token_ids"], *output.outputs[0].token_ids] for prompt, output in answered]
    documents = [(tokens, [False] + [True] * (len(tokens) - 1)) for tokens in texts]
    write_prepared(folder, documents, TokenizerIdentity.of(tokenizer))
    return folder


def line_of(kind: str, target: Path, data: Path, output: Path, steps: int, *more: str) -> list[str]:
    """The words that train a kind in float32."""
    return [
        *("train", kind, "--json", "--target", str(target), "--data", str(data), "--output", str(output)),
        *(f"training.steps={steps}", "training.learning_rate=1e-2", "training.dtype=float32", "target_dtype=float32"),
        *("windows.length=64", "windows.rows=4", *more),
    ]


def evaluated(prepared: Path, settings: str = "max_tokens: 16, top_k: 2, nodes: 6") -> list[str]:
    return [
        *(f"evaluation.prompts={prepared}", "evaluation.count=3", "evaluation.prompt_tokens=4"),
        f"evaluation.settings={{{settings}}}",
    ]


def words(target: Path, prepared: Path, output: Path, steps: int) -> list[str]:
    """The words that train an EAGLE-3 head."""
    shape = "draft.options={fc_norm: true, norm_output: true, boundaries: [1, 2, 3]}"
    more = ("objective.steps=3", "draft.vocab_size=32", shape, *evaluated(prepared))
    return line_of("eagle3", target, prepared, output, steps, *more)


class Trainer:
    """`forerun train` on the tiny target and what it wrote, into folders of a test."""

    def __init__(self, target: Path, prepared: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.target, self.prepared, self.folder, self.capsys = target, prepared, folder, capsys

    def line(self, kind: str, steps: int, *more: str, into: str = "run") -> list[str]:
        """The words that train a kind."""
        return line_of(kind, self.target, self.prepared, self.folder / into, steps, *more)

    def eagle3(self, steps: int, *more: str, into: str = "run") -> list[str]:
        """The words that train an EAGLE-3 head, which is evaluated."""
        return [*words(self.target, self.prepared, self.folder / into, steps), *more]

    def __call__(self, line: list[str]) -> Any:
        """Run a command line that succeeds; what it prints, read as JSON."""
        self.capsys.readouterr()
        assert main(line) == 0
        return json.loads(self.capsys.readouterr().out)

    def refused(self, line: list[str]) -> str:
        """What is said of a command line that is refused."""
        self.capsys.readouterr()
        assert main(line) == 2
        return " ".join(self.capsys.readouterr().err.split())

    def log(self, name: str, into: str = "run") -> list[float]:
        """What a run's log says of a figure."""
        return logged(self.folder / into, name)


@pytest.fixture
def train(target: Path, prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Trainer:
    """Trains into folders of the test."""
    return Trainer(target, prepared, tmp_path, capsys)


def logged(output: Path, name: str) -> list[float]:
    """What a run's log says of a figure, line by line."""
    lines = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


def drafts(target: Path | str, method: str, model: Path | str, **options: Any) -> float:
    """Mean acceptance length of greedy drafts, over several prompts; the text is plain decoding's."""
    config = {"method": method, "model": str(model), "adaptive": False, **options}
    llm, total = LLM(str(target), speculative_config=config), SpeculationStats()
    prompts = [{"prompt_token_ids": [first]} for first in range(0, VOCABULARY, 8)]
    params = SamplingParams(temperature=0, max_tokens=24, detokenize=False)
    drafted, plain = (llm.generate(prompts, params, speculative=on) for on in (None, False))
    assert [one.outputs[0].token_ids for one in drafted] == [one.outputs[0].token_ids for one in plain]
    for one in drafted:
        total.add(one.outputs[0].speculation)
    return total.mean_acceptance_length


def same_weights(one: Path, other: Path) -> bool:
    """Whether two files hold the same tensors, bit for bit."""
    left, right = load_file(one), load_file(other)
    return left.keys() == right.keys() and all(torch.equal(tensor, right[name]) for name, tensor in left.items())


def goes_on(train: Trainer, line: Callable[[str], list[str]]) -> tuple[Path, Path]:
    """Six steps in one run, and three of them in another that goes on from its checkpoint: the same losses."""
    more = ["training.save_every_steps=3", "training.keep_checkpoints=0"]
    one, two = (train.folder / into for into in ("one", "two"))
    train([*line("one"), *more])
    for name in ("checkpoint-3", "written"):
        shutil.copytree(one / name, two / name)
    train([*line("two"), *more])
    assert logged(two, "loss") == logged(one, "loss")[3:]
    return one, two


def run_twice(worker: Path, argument: str, **environment: str) -> list[str]:
    """What two processes of a test print that run the same script, each with its rank."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    shared = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    shared |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", **environment}
    processes = [
        subprocess.Popen(
            [sys.executable, str(worker), argument],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=400) for process in processes]
        for process, (_, errors) in zip(processes, said, strict=True):
            assert process.returncode == 0, errors[-3000:]
    finally:
        for process in processes:
            process.kill()
    return [out for out, _ in said]


def in_two_processes(runs: Sequence[Sequence[str]]) -> str:
    """Run command lines of forerun one after the other, each on two processes; what the first process says."""
    lines = json.dumps(list(zip(free_ports(len(runs)), runs, strict=True)))
    return run_twice(Path(__file__).with_name("two_processes.py"), lines)[0]
