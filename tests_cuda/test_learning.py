"""Training and adaptation on the device: losses, FlexAttention, checkpoints, weights that change meanwhile."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from place import CUDA, DEVICE, DRAFTING, given, greedy, moved, shipped, tokens_of
from safetensors.torch import load_file

from forerun import LLM, demo
from forerun.cli import main
from forerun.heads.eagle import Eagle3Objective, Eagle3Settings
from forerun.losses.objective import FrozenTarget
from forerun.shipped import resolve
from forerun.training.loop.checkpoint import capture_random, restore_random
from forerun.training.loop.distributed import Parallel
from forerun.training.recipe import read_recipe
from forerun.training.run import TrainingRun
from training.conftest import evaluated, line_of, words
from training.test_kinds import SMALL
from training.ttt import batch_of, head, model, tokens

KINDS = ("eagle", "medusa", "hydra", "mlp_speculator", "kangaroo", "dflash", "dspark", "peagle")
DRAWS = {"dflash", "dspark", "peagle"}
"""Kinds that draw on the device what is learned from, which is another draw there."""


def trained(line: list[str], device: str, *, allow_changes: bool = False) -> dict[str, Any]:
    """What `forerun train` with these words comes to on the device."""
    kind, options = line[1], iter(line[3:])
    flags, given = dict[str, Any](), list[str]()
    for word in options:
        if word.startswith("--"):
            flags[word[2:]] = next(options)
        else:
            given.append(word)
    place = torch.device(device if ":" in device or device == "cpu" else f"{device}:0")
    return TrainingRun(read_recipe(kind, None, given, flags), Parallel(device=place)).train(allow_changes=allow_changes)


def losses(output: Path) -> list[float]:
    lines = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.parametrize("options", [{}, {"sliding_window": 20, "num_hidden_layers": 2}], ids=["plain", "windows"])
def test_losses_and_gradients_are_those_of_the_cpu(options: dict[str, Any]) -> None:
    made = head(**options)
    batch = batch_of([tokens(90), tokens(60, seed=4)], made.config.boundaries, padding=3)
    found = []
    for there in (False, True):
        own, target = (moved(made), moved(model())) if there else (made, model())
        report = Eagle3Objective(own, FrozenTarget.of(target), Eagle3Settings(steps=3))(
            batch.to(torch.device(DEVICE)) if there else batch
        )
        gradients = torch.autograd.grad(report.loss, list(own.parameters()), allow_unused=True)
        found.append((report.loss.detach().cpu(), [None if one is None else one.cpu() for one in gradients]))
    torch.testing.assert_close(found[1][0], found[0][0], atol=1e-3, rtol=1e-5)
    for there, here in zip(found[1][1], found[0][1], strict=True):
        torch.testing.assert_close(there, here, atol=2e-3, rtol=2e-3)


@pytest.mark.cuda_alone
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
def test_flex_attention_compiled_trains_as_the_blockwise_one(autocast: bool) -> None:
    """Forward and backward, of two documents in more than a block."""
    made = moved(head(num_attention_heads=2, num_key_value_heads=1, sliding_window=90 if autocast else None))
    batch = batch_of([tokens(128), tokens(120, seed=4)], made.config.boundaries, padding=3).to(torch.device(DEVICE))
    found, target = [], FrozenTarget.of(moved(model()))
    for switched in (False, True):
        began = time.perf_counter()
        settings = Eagle3Settings(steps=2, flex_attention=switched)
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            report = Eagle3Objective(made, target, settings)(batch)
        gradients = torch.autograd.grad(report.loss, list(made.parameters()), allow_unused=True)
        found.append((report.loss.detach(), gradients))
        print(f"flex={switched}, autocast={autocast}: {float(report.loss):.4f}, {time.perf_counter() - began:.1f} s")  # noqa: T201
    near = {"atol": 2e-2, "rtol": 2e-2} if autocast else {"atol": 1e-3, "rtol": 1e-3}
    torch.testing.assert_close(found[1][0], found[0][0], rtol=near["rtol"], atol=1e-2)
    for one, other in zip(found[1][1], found[0][1], strict=True):
        if one is not None and other is not None:
            scale = float(other.abs().max()) or 1.0
            torch.testing.assert_close(one / scale, other / scale, **near)


def test_a_run_trains_stops_and_goes_on(target: Path, prepared: Path, tmp_path: Path) -> None:
    """Twelve steps at once, and six and six, give the same weights but for rounding."""
    same = ["training.schedule=constant", "training.warmup_steps=0", "training.log_every_steps=1"]
    for name, counts in (("whole", (12,)), ("halves", (6, 12))):
        for count in counts:
            line = [*words(target, prepared, tmp_path / name, count), *same]
            said = trained(line, DEVICE, allow_changes=count != counts[0])
    found = losses(tmp_path / "whole")
    assert found[-1] < found[0] - 0.1, found
    assert losses(tmp_path / "halves") == pytest.approx(found, abs=2e-3)
    one, other = (load_file(tmp_path / name / "head" / "model.safetensors") for name in ("whole", "halves"))
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, atol=2e-3, rtol=1e-2)
    config = {"method": "eagle3", "model": said["head"], "top_k": 2, "nodes": 6, "adaptive": False}
    llm = LLM(str(target), speculative_config=config, device=DEVICE)
    params, prompt = greedy(24, detokenize=False), {"prompt_token_ids": [3, 7]}
    drafted = llm.generate(prompt, params)[0].outputs[0]
    assert drafted.token_ids == llm.generate(prompt, params, speculative=False)[0].outputs[0].token_ids
    trained([*words(target, prepared, tmp_path / "cpu", 12), *same], "cpu")
    assert found == pytest.approx(losses(tmp_path / "cpu"), rel=2e-2), "as on the CPU"


@pytest.mark.parametrize("given_dtype", ["float32", "bfloat16"])
def test_it_trains_in_bfloat16(given_dtype: str, target: Path, prepared: Path, tmp_path: Path) -> None:
    found = []
    for dtype in ("float32", "bfloat16"):
        line = words(target, prepared, tmp_path / dtype, 8)
        more = [f"training.dtype={dtype}", f"target_dtype={given_dtype}", "training.log_every_steps=1"]
        trained([*line, *more, "evaluation.prompts=null"], DEVICE)
        found.append(losses(tmp_path / dtype))
    assert found[1] == pytest.approx(found[0], rel=5e-2) and found[1] != found[0]


@pytest.mark.parametrize("kind", KINDS)
def test_two_steps_of_other_kinds(kind: str, target: Path, prepared: Path, tmp_path: Path) -> None:
    found = []
    for device in ("cpu", DEVICE):
        line = line_of(kind, target, prepared, tmp_path / f"on-{device.partition(':')[0]}", 2, *SMALL.get(kind, []))
        trained([*line, *evaluated(prepared), "training.log_every_steps=1", "training.optimizer=muon"], device)
        found.append(losses(tmp_path / f"on-{device.partition(':')[0]}"))
    assert found[1] == pytest.approx(found[0], rel=0.1 if kind in DRAWS else 1e-3)


def test_offline_features(target: Path, prepared: Path, tmp_path: Path) -> None:
    """Extracted on the device, trained from there."""
    store = tmp_path / "features"
    where = ("--target", str(target), "--data", str(prepared), "--output", str(store), "--device", DEVICE)
    assert main(["features", *where, "--boundaries", "1,2,3", "--no-probe", "--yes"]) == 0
    line = [*words(target, prepared, tmp_path / "run", 3), "mode=offline", f"features={store}"]
    assert 0 < trained(line, DEVICE)["loss"] < 10


@pytest.mark.cuda_alone
def test_random_states_come_back() -> None:
    torch.manual_seed(3)
    torch.rand(2, device=DEVICE)
    kept = capture_random()
    first = torch.rand(4, device=DEVICE), torch.rand(4)
    torch.manual_seed(8)
    restore_random(kept)
    assert torch.equal(torch.rand(4, device=DEVICE), first[0]) and torch.equal(torch.rand(4), first[1])


def test_the_shipped_head_learns_on(tmp_path: Path) -> None:
    """A few steps of the shipped head on what the shipped target wrote, in bfloat16 as its recipe has it."""
    texts = tmp_path / "texts.jsonl"

    files = [prompt.text[:3000] for prompt in demo.prompts()][:6]
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in files))
    where = ("--target", "demo", "--output", str(tmp_path / "data"))
    assert main(["data", "prepare", str(texts), *where, "--max-length", "256", "--split-long"]) == 0
    line = [
        *("train", "eagle3", "--json", "--target", "demo", "--data", str(tmp_path / "data")),
        *("--output", str(tmp_path / "run"), "training.steps=4", "training.log_every_steps=1", "windows.length=256"),
        *(
            "windows.rows=2",
            f"draft.start={resolve('demo-eagle3')}",
            "training.dtype=bfloat16",
            "training.learning_rate=1e-4",
        ),
    ]
    trained(line, DEVICE)
    assert all(0 < loss < 6 for loss in losses(tmp_path / "run")), losses(tmp_path / "run")


@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_a_drafter_is_swapped_while_it_serves_and_the_text_stays(method: str) -> None:
    """The shipped drafter in its own place: what was recorded of the former one is not run for the new one."""
    llm = shipped(DRAFTING[method], rows=4)
    prompts, params = given((30, 80, 15, 60, 44, 25)), greedy(60 if CUDA else 24)
    plain = tokens_of(llm.generate(prompts, params, speculative=False))
    for round_ in range(3):
        ids = [llm.submit(prompt, params, cache_salt=str(round_)) for prompt in prompts]
        for _ in range(6):
            llm.engine.step()
        llm.load_drafter(resolve(str(DRAFTING[method]["model"])))
        for request_id in ids:
            llm.abort(request_id)
        assert tokens_of(llm.generate(prompts, params, cache_salt=str(round_))) == plain
    assert not llm.engine.drafting.replaced
