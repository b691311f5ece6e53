"""GRPO with TRL, with and without speculation, from the same seeds: the reward curve, the time of the rollouts and the
acceptance, step by step.

    python recipes/grpo/train.py smollm2 --output build/grpo --steps 60
    python recipes/grpo/train.py MODEL --output DIR --questions gsm8k.jsonl --max-tokens 200 --json

MODEL is a directory, a hub id, a GGUF file or a shipped model; it is trained in float32. Needs TRL: ``pip install
'trl==1.16.*'``. Each arm writes ``OUTPUT/ARM/steps.jsonl``, a line a step, and checkpoints; a run that was stopped goes
on, and an arm that is finished is not run again. ``plain`` decodes by forerun without drafts, ``drafts`` with
``--speculative-config``, ``transformers`` by transformers' own loop.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import TrainerCallback

import forerun
from forerun.model.names import load_tokenizer
from forerun.training.trained import load_trainable

sys.path.insert(0, str(Path(__file__).parent))
import tasks

ARMS = ("plain", "drafts", "transformers")
STEPS = "steps.jsonl"


class Diary(TrainerCallback):
    """What an arm did, a line a step."""

    def __init__(self, path: Path, loop: Any) -> None:
        self._path, self._loop = path, loop
        self._rollout_s, self._digest, self._began = 0.0, "", time.perf_counter()

    def timed(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        """Return `generate` with its time and its tokens written down."""

        def call(*given: Any, **named: Any) -> Any:
            began = time.perf_counter()
            tokens = generate(*given, **named)
            self._rollout_s += time.perf_counter() - began
            self._digest = hashlib.sha256(json.dumps(tokens.tolist()).encode()).hexdigest()[:16]
            return tokens

        return call

    def forget_after(self, step: int) -> None:
        """Drop the lines of steps behind the checkpoint that a run goes on from."""
        kept = [line for line in read_steps(self._path.parent) if line["step"] <= step]
        self._path.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, float], **_: Any) -> None:
        """Write the step's line."""
        if "reward" not in logs:
            return
        now, speculation = time.perf_counter(), getattr(self._loop, "speculation", None)
        line = {
            "step": state.global_step,
            "reward": logs["reward"],
            "tokens": logs["completions/mean_length"],
            "grad_norm": logs["grad_norm"],
            "step_s": now - self._began,
            "rollout_s": self._rollout_s,
            "text": self._digest,
        }
        if speculation is not None:
            line["tokens_per_pass"] = speculation.tokens_per_pass
            line["drafted"] = speculation.num_draft_tokens
            line["accepted"] = speculation.num_accepted_draft_tokens
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._rollout_s, self._began = 0.0, now


def read_steps(folder: Path) -> list[dict[str, Any]]:
    """Return the lines that an arm has written; none where it has not begun."""
    path = folder / STEPS
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def run_arm(arm: str, options: argparse.Namespace) -> None:
    """Train an arm, or go on with it."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    folder = options.output / arm
    if len(read_steps(folder)) >= options.steps:
        return
    folder.mkdir(parents=True, exist_ok=True)
    loop = None
    if arm == "plain":
        loop = forerun.hf(None)
    elif arm == "drafts":
        config = dict(options.speculative_config)
        loop = forerun.hf(config.pop("method"), **config)
    diary = Diary(folder / STEPS, loop)
    rows = options.prompts * options.samples
    questions = tasks.read_questions(options.questions) if options.questions else tasks.make_sums(1024, options.seed)
    tokenizer = load_tokenizer(options.model, None)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    settings = GRPOConfig(
        output_dir=str(folder),
        max_steps=options.steps,
        per_device_train_batch_size=rows,
        num_generations=options.samples,
        max_completion_length=options.max_tokens,
        learning_rate=options.learning_rate,
        lr_scheduler_type="constant",
        seed=options.seed,
        use_cpu=not torch.accelerator.is_available(),
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        save_steps=options.save_steps,
        save_total_limit=1,
        report_to=[],
    )
    trainer = GRPOTrainer(
        load_trainable(options.model),
        reward_funcs=tasks.reward_last_number,
        args=settings,
        train_dataset=Dataset.from_list(questions),
        processing_class=tokenizer,
        callbacks=[diary],
    )
    if loop is not None:
        trainer.model.generate = partial(trainer.model.generate, custom_generate=loop)  # The one line
    trainer.model.generate = diary.timed(trainer.model.generate)
    left = max((int(path.name.rpartition("-")[2]) for path in folder.glob("checkpoint-*")), default=0)
    diary.forget_after(left)
    trainer.train(resume_from_checkpoint=bool(left))


def compare(curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return each arm's means, and how many first steps of ``plain`` and ``drafts`` have the same text."""
    found: dict[str, Any] = {"arms": {arm: summary(steps) for arm, steps in curves.items() if steps}}
    if curves.get("plain") and curves.get("drafts"):
        pairs = list(zip(curves["plain"], curves["drafts"], strict=False))
        same = [one["text"] == other["text"] and one["grad_norm"] == other["grad_norm"] for one, other in pairs]
        found["steps"] = len(pairs)
        found["same_text_and_gradient"] = same.index(False) if False in same else len(pairs)
    return found


def summary(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return an arm's figures: the reward of the first and the last ten steps, and means of times and of drafting."""
    figures = {
        "steps": len(steps),
        "reward_first_10": fmean(step["reward"] for step in steps[:10]),
        "reward_last_10": fmean(step["reward"] for step in steps[-10:]),
        # The first step checks the model, and its clock holds the start
        "rollout_s": fmean(step["rollout_s"] for step in steps[1:] or steps),
        "step_s": fmean(step["step_s"] for step in steps[1:] or steps),
    }
    if "tokens_per_pass" in steps[0]:
        figures["tokens_per_pass_first_10"] = fmean(step["tokens_per_pass"] for step in steps[:10])
        figures["tokens_per_pass_last_10"] = fmean(step["tokens_per_pass"] for step in steps[-10:])
        drafted = sum(step["drafted"] for step in steps)
        figures["acceptance"] = sum(step["accepted"] for step in steps) / drafted if drafted else 0.0
    return figures


def show(curves: Mapping[str, Sequence[Mapping[str, Any]]], found: Mapping[str, Any], every: int = 10) -> None:
    """Print the curves, means of so many steps, and what follows from them."""
    table = Table("steps", *(f"{arm}: {what}" for arm in curves for what in ("reward", "rollout s", "tokens per pass")))
    longest = max(map(len, curves.values()), default=0)
    for start in range(0, longest, every):
        cells = []
        for steps in curves.values():
            part = steps[start : start + every]
            for name in ("reward", "rollout_s", "tokens_per_pass"):
                values = [step[name] for step in part if name in step]
                cells.append(f"{fmean(values):.2f}" if values else "")
        table.add_row(f"{start + 1} to {min(start + every, longest)}", *cells)
    console = Console(width=130)
    console.print(table)
    if "steps" in found:
        console.print(
            f"same text and gradient with and without drafts: {found['same_text_and_gradient']} of the first "
            f"{found['steps']} steps"
        )


def read_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Return what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--output", type=Path, required=True, help="folder of the arms")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["plain", "drafts"])
    parser.add_argument("--speculative-config", type=json.loads, default={"method": "suffix"}, help="JSON, vLLM's keys")
    parser.add_argument("--questions", type=Path, help="GSM8K's JSON lines; without, sums that are made here")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--prompts", type=int, default=2, help="of a step")
    parser.add_argument("--samples", type=int, default=8, help="of a prompt")
    parser.add_argument("--max-tokens", type=int, default=24, help="of a completion")
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--save-steps", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the table")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Run the arms that are not finished, and print all curves."""
    options = read_arguments(words)
    for arm in options.arms:
        run_arm(arm, options)
    curves = {arm: steps for arm in ARMS if (steps := read_steps(options.output / arm))}
    found = compare(curves)
    if options.json:
        sys.stdout.write(json.dumps({**found, "curves": curves}) + "\n")
    else:
        show(curves, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
