"""`forerun train eagle3` from prepared data to a head that drafts."""

from __future__ import annotations

import json
import os
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
from forerun.training.loop import Parallel
from forerun.training.recipe import read_recipe
from forerun.training.target import load_target
from ports import free_ports
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
        ("target_parallel=pp", "'fsdp' or 'tp'"),
        ("steps", "key=value"),
        ("windows.length=long", "windows.length"),
        ("training.steps=0", "steps"),
        ("training.steps.more=1", "training.steps must be int"),
    ],
)
def test_a_wrong_word_is_refused_by_name(word: str, named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        read_recipe(None, [word], {"target": "a", "data": "b", "output": "c"})


SPREADS = {
    "ddp": [],
    "fsdp": ["target_parallel=fsdp", "--parallel", "fsdp"],
    "tp": ["target_parallel=tp"],
    "tp-fsdp": ["target_parallel=tp", "--parallel", "fsdp"],
}
"""How two processes share the head and the target."""


def lines_of(target: Path, prepared: Path, output: Path, rows: int, *more: str) -> list[str]:
    return [*words(target, prepared, output, 5), f"windows.rows={rows}", "training.log_every_steps=1", *more]


@pytest.fixture(scope="module")
def trained(target: Path, prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process trains, in ``one``, and what two do, in a directory for each of `SPREADS`."""
    folder = tmp_path_factory.mktemp("spread")
    assert main(lines_of(target, prepared, folder / "one", 4)) == 0
    runs = [lines_of(target, prepared, folder / name, 2, *more) for name, more in SPREADS.items()]
    ports = free_ports(len(runs))
    worker = Path(__file__).with_name("two_processes.py")
    shared = {"PYTHONPATH": str(worker.parents[1]), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
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
        for process in processes:
            errors = process.communicate(timeout=400)[1]
            assert process.returncode == 0, errors[-3000:]
    finally:
        for process in processes:
            process.kill()
    return folder


def logged(output: Path, name: str) -> list[float]:
    lines = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


@pytest.mark.parametrize("spread", SPREADS)
def test_two_processes_train_the_head_that_one_trains(trained: Path, spread: str) -> None:
    """In float32: losses and norms of the gradient to 1e-5, weights to 2e-5 (they moved by 1e-2)."""
    one, other = (load_file(trained / name / "head" / "model.safetensors") for name in ("one", spread))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, atol=2e-5, rtol=1e-4, msg=name)
    for value in ("loss", "gradient_norm", "acceptance_0", "tokens"):
        found = logged(trained / spread, value)
        assert len(found) == 5
        assert found == pytest.approx(logged(trained / "one", value), rel=1e-5)
    assert logged(trained / spread, "eval/chain_t0") == logged(trained / "one", "eval/chain_t0")


def test_a_target_whose_heads_cannot_be_split_is_refused(target: Path) -> None:
    with pytest.raises(ArgumentError, match="3 processes as many key-value heads, but the target has 2"):
        load_target(str(target), "float32", "tp", Parallel(world=3))
