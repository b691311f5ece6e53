"""A tiny target on disk, what it writes, and the words that train a head for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from forerun import LLM, SamplingParams
from forerun.manifests import TokenizerIdentity
from forerun.training.data.store import write_prepared
from ports import free_ports
from training.ttt import VOCABULARY, model


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as a checkpoint, with a tokenizer of one word per token."""
    folder = tmp_path_factory.mktemp("target")
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    model().save_pretrained(folder)
    return folder


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


def words(target: Path, prepared: Path, output: Path, steps: int) -> list[str]:
    return [
        *("train", "eagle3", "--json", "--target", str(target), "--data", str(prepared), "--output", str(output)),
        *(f"training.steps={steps}", "training.learning_rate=1e-2", "training.dtype=float32"),
        *("target_dtype=float32", "windows.length=64", "windows.rows=4", "objective.steps=3", "draft.vocab_size=32"),
        *("draft.options={fc_norm: true, norm_output: true, boundaries: [1, 2, 3]}",),
        *(f"evaluation.prompts={prepared}", "evaluation.count=3", "evaluation.prompt_tokens=4"),
        *("evaluation.settings={max_tokens: 16, top_k: 2, nodes: 6}",),
    ]


def in_two_processes(runs: Sequence[Sequence[str]]) -> str:
    """Run command lines of forerun one after the other, each on two processes; what the first process says."""
    ports = free_ports(len(runs))
    worker = Path(__file__).with_name("two_processes.py")
    path = os.pathsep.join([str(worker.parents[1]), *sys.path])
    shared = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    shared |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(worker), json.dumps(list(zip(ports, runs, strict=True)))],
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
    return said[0][0]
