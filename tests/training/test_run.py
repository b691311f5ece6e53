"""`forerun train eagle3` from prepared data to a head that drafts."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from forerun import LLM, SamplingParams
from forerun.cli import main
from forerun.errors import ArgumentError
from forerun.training.data.identity import TokenizerIdentity
from forerun.training.data.store import PreparedWriter
from forerun.training.recipe import read_recipe
from training.ttt import VOCABULARY, model


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as a checkpoint, with a tokenizer of one word per token."""
    folder = tmp_path_factory.mktemp("target")
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    model().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def prepared(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the target writes by itself, so that a head can learn it."""
    folder = tmp_path_factory.mktemp("data") / "prepared"
    tokenizer = PreTrainedTokenizerFast.from_pretrained(target)
    llm = LLM(model(), tokenizer=False)
    prompts = [{"prompt_token_ids": [first]} for first in range(VOCABULARY)]
    params = SamplingParams(temperature=0, max_tokens=40, detokenize=False)
    with PreparedWriter(folder) as writer:
        for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
            tokens = [*prompt["prompt_token_ids"], *output.outputs[0].token_ids]
            writer.add(tokens, [False] + [True] * (len(tokens) - 1))
        writer.finish(TokenizerIdentity.of(tokenizer), {})
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


def test_training_makes_a_head_that_drafts_and_resumes(
    target: Path, prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    assert main(words(target, prepared, output, 2)) == 0
    early = json.loads(capsys.readouterr().out)
    assert main(words(target, prepared, output, 40)) == 0
    late = json.loads(capsys.readouterr().out)
    assert late["steps"] == 40
    assert late["loss"] < early["loss"] - 0.2
    assert late["best"] > 1.5
    log = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    assert any("eval/tree_t1" in line for line in log)

    llm = LLM(str(target), speculative_config={"method": "eagle3", "model": late["head"], "top_k": 2, "nodes": 6})
    params = SamplingParams(temperature=0, max_tokens=24, detokenize=False)
    prompt = {"prompt_token_ids": [3, 7]}
    drafted = llm.generate(prompt, params)[0].outputs[0]
    plain = llm.generate(prompt, params, speculative=False)[0].outputs[0]
    assert drafted.token_ids == plain.token_ids
    assert drafted.speculation.mean_acceptance_length > 1.2


def test_a_dry_run_trains_nothing(
    target: Path, prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    assert main([*words(target, prepared, output, 7), "--dry-run"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["steps"] == 7
    assert plan["tokens_per_step"] == 256
    assert plan["recipe"]["draft"]["vocab_size"] == 32
    assert not output.exists()


def test_a_recipe_file_yields_to_flags_and_words(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("target: a\ndata: b\noutput: c\ntraining: {learning_rate: 1e-3, steps: 5}\n")
    recipe = read_recipe(file, ["training.steps=9", "objective.divergence=lk"], {"target": "z", "features": None})
    assert (recipe.target, recipe.data, recipe.training.steps) == ("z", "b", 9)
    assert recipe.training.learning_rate == 1e-3
    assert recipe.objective.divergence.value == "lk"


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("training.learning_rat=1", "learning_rate"),
        ("objective.divergence=kl", "cross_entropy"),
        ("mode=ofline", "offline"),
        ("steps", "key=value"),
        ("windows.length=long", "windows.length"),
        ("training.steps=0", "steps"),
        ("training.steps.more=1", "training.steps must be int"),
    ],
)
def test_a_wrong_word_is_refused_by_name(word: str, named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        read_recipe(None, [word], {"target": "a", "data": "b", "output": "c"})


def lines_of(target: Path, prepared: Path, output: Path, rows: int, *more: str) -> list[str]:
    return [*words(target, prepared, output, 5), f"windows.rows={rows}", "evaluation.prompts=null", *more]


def test_two_processes_train_the_head_that_one_trains(target: Path, prepared: Path, tmp_path: Path) -> None:
    assert main(lines_of(target, prepared, tmp_path / "one", 4)) == 0
    spread = [
        lines_of(target, prepared, tmp_path / "ddp", 2),
        lines_of(target, prepared, tmp_path / "fsdp", 2, "target_parallel=fsdp", "--parallel", "fsdp"),
    ]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    worker = Path(__file__).with_name("two_processes.py")
    shared = {"PYTHONPATH": str(worker.parents[1]), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    shared |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        subprocess.Popen(
            [sys.executable, str(worker), json.dumps(spread)],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in processes:
        errors = process.communicate(timeout=400)[1]
        assert process.returncode == 0, errors[-3000:]
    one, *others = (load_file(tmp_path / name / "head" / "model.safetensors") for name in ("one", "ddp", "fsdp"))
    for other in others:
        assert one.keys() == other.keys()
        for name, tensor in one.items():
            torch.testing.assert_close(other[name], tensor, atol=2e-5, rtol=1e-4, msg=name)
