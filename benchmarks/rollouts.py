"""Rollouts inside transformers' `generate`: prompts x samples at temperature 1, the same prompts again in every epoch.

    python benchmarks/rollouts.py smollm2 --questions spec_bench.jsonl
    python benchmarks/rollouts.py smollm2 --questions spec_bench.jsonl --grpo 4

All arms sample from one model in one process and take turns, in another order each epoch: `transformers` is its own
loop, `plain` ``forerun.hf(None)``, every other one ``forerun.hf(ARM)``, or a JSON object with vLLM's keys. What the
drafters learned in one epoch they know in the next. Seconds per token are compared, since the answers of two loops
differ in length. The second table says, by the number of rows that still run, what was drafted and what that took.
`--grpo STEPS` times whole steps of TRL's GRPOTrainer in place of rollouts alone, arms in turns on one trainer (needs
``pip install 'trl==1.16.*'``).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

import forerun
from forerun.model import TransformersTarget
from forerun.model.names import resolve

LEFT = (4, 8, 16, 32)
"""Rows that still run, most of each line of the second table; the last line has all above."""


@dataclass(kw_only=True, slots=True)
class Passes:
    """Passes with so many rows left."""

    passes: int = 0
    rows: int = 0
    drafted: int = 0
    seconds: float = 0.0


@dataclass(kw_only=True, slots=True)
class Rollout:
    """One batch of samples."""

    arm: str
    epoch: int
    seconds: float
    tokens: int
    tokens_per_pass: float | None = None
    left: dict[str, Passes] = field(default_factory=dict)


def loop_of(arm: str) -> Any:
    """Return the loop of an arm; None: transformers' own."""
    if arm == "transformers":
        return None
    if arm == "plain":
        return forerun.hf(None)
    config = json.loads(arm) if arm.startswith("{") else {"method": arm}
    return forerun.hf(config.pop("method"), **config)


def line_of(rows: int) -> str:
    """Return the line of the second table that a pass over so many rows belongs to."""
    for most in LEFT:
        if rows <= most:
            return f"up to {most}"
    return f"above {LEFT[-1]}"


@contextmanager
def watching(left: dict[str, Passes], clock: Callable[[], float]) -> Iterator[None]:
    """Count passes by the rows that are left while open. A pass's time runs to the start of the next one."""
    score, last = TransformersTarget.score, list[Any]()

    def end(now: float) -> None:
        if last:
            line, began = last
            line.seconds += now - began
            last.clear()

    def counted(self: Any, rows: Sequence[int], trees: Sequence[Any], **others: Any) -> Any:
        now = clock()
        end(now)
        line = left.setdefault(line_of(len(rows)), Passes())
        line.passes += 1
        line.rows += len(rows)
        line.drafted += sum(tree.size for tree in trees)
        last.extend((line, now))
        return score(self, rows, trees, **others)

    TransformersTarget.score = counted  # type: ignore[method-assign]
    try:
        yield
    finally:
        TransformersTarget.score = score  # type: ignore[method-assign]
        end(clock())


def read_prompts(options: argparse.Namespace, tokenizer: Any) -> list[str]:
    """Return the first questions of the category, as the model's chat has them."""
    lines = [json.loads(line) for line in options.questions.read_text(encoding="utf-8").splitlines()]
    asked = [line["turns"][0] for line in lines if line.get("category", options.category) == options.category]
    return [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        for text in asked[: options.prompts]
    ]


class Rollouts:
    """The model, the prompts and the arms."""

    def __init__(self, options: argparse.Namespace) -> None:
        folder = resolve(options.model)
        self.options = options
        self.clock = time.process_time if options.cpu_time else time.perf_counter
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=options.dtype).eval()
        self.prompts = read_prompts(options, self.tokenizer)
        self.loops = {arm: loop_of(arm) for arm in options.arms}

    def sample(self, arm: str, epoch: int, tokens: int) -> Rollout:
        """Sample one batch."""
        inputs = self.tokenizer(self.prompts, return_tensors="pt", padding=True, add_special_tokens=False)
        sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        torch.manual_seed(epoch)
        left, began = dict[str, Passes](), self.clock()
        with watching(left, self.clock):
            found = self.model.generate(
                **inputs,
                **sampling,
                num_return_sequences=self.options.samples,
                max_new_tokens=tokens,
                custom_generate=self.loops[arm],
                pad_token_id=self.tokenizer.pad_token_id,
            )
        seconds = self.clock() - began
        new = found[:, inputs["input_ids"].shape[1] :]
        ends = new == self.tokenizer.eos_token_id
        written = int((ends.cumsum(1) - ends.int() == 0).sum())
        counts = getattr(self.loops[arm], "speculation", None)
        rate = None if counts is None else counts.tokens_per_pass
        return Rollout(arm=arm, epoch=epoch, seconds=seconds, tokens=written, tokens_per_pass=rate, left=left)

    def measure(self) -> list[Rollout]:
        """Warm up, and sample every epoch with every arm in turn."""
        found, arms = list[Rollout](), list(self.loops)
        for arm in arms:
            self.sample(arm, 0, 4)
        for epoch in range(1, self.options.epochs + 1):
            for arm in arms:
                one = self.sample(arm, epoch, self.options.tokens)
                say(f"epoch {epoch}, {arm}: {one.tokens} tokens in {one.seconds:.1f} s")
                found.append(one)
            arms = [*arms[1:], arms[0]]
        return found

    def measure_steps(self) -> dict[str, list[float]]:
        """Return the seconds of whole steps of GRPO by arm; the first step of each arm warms up and is left out."""
        from datasets import Dataset
        from transformers import TrainerCallback
        from trl import GRPOConfig, GRPOTrainer

        timer, options, arms, seconds = self.clock, self.options, list(self.loops), defaultdict[str, list[float]](list)

        class Clock(TrainerCallback):
            began, steps = 0.0, 0

            def on_step_end(self, *_: Any, **__: Any) -> None:
                now = timer()
                seconds[arms[self.steps % len(arms)]].append(now - self.began)
                say(f"step {self.steps + 1}, {arms[self.steps % len(arms)]}: {now - self.began:.1f} s")
                self.began, self.steps = now, self.steps + 1

        clock = Clock()
        settings = GRPOConfig(
            output_dir=str(options.work),
            max_steps=len(arms) * (options.grpo + 1),
            per_device_train_batch_size=options.samples,
            gradient_accumulation_steps=options.prompts,
            num_generations=options.samples,
            max_completion_length=options.tokens,
            learning_rate=1e-6,
            use_cpu=not torch.accelerator.is_available(),
            bf16=False,
            gradient_checkpointing=True,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            self.model,
            reward_funcs=lambda completions, **_: [float(len(text) % 7) for text in completions],
            args=settings,
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in self.prompts]),
            processing_class=self.tokenizer,
            callbacks=[clock],
        )
        generate = trainer.model.generate

        def sample(**keywords: Any) -> Any:
            return generate(**keywords, custom_generate=self.loops[arms[clock.steps % len(arms)]])

        trainer.model.generate = sample
        clock.began = timer()
        trainer.train()
        return {arm: found[1:] for arm, found in seconds.items()}


def compare(found: Sequence[Rollout]) -> dict[str, Any]:
    """Return by arm and epoch: seconds per token over those of `transformers` and of `plain`, and tokens per pass."""
    costs = {(one.arm, one.epoch): one.seconds / one.tokens for one in found}
    table = defaultdict[str, dict[int, dict[str, float | None]]](dict)
    for one in found:
        own = table[one.arm][one.epoch] = {"seconds": one.seconds, "tokens_per_s": one.tokens / one.seconds}
        own["tokens_per_pass"] = one.tokens_per_pass
        for base in ("transformers", "plain"):
            if (base, one.epoch) in costs:
                own[f"over_{base}"] = costs[one.arm, one.epoch] / costs[base, one.epoch]
    return dict(table)


def show(table: Mapping[str, Any], found: Sequence[Rollout]) -> None:
    """Print both tables."""
    speeds = Table("arm", "epoch", "tokens/s", "time / transformers'", "time / plain", "tokens per pass")
    for arm, epochs in table.items():
        for epoch, own in epochs.items():
            names = ("tokens_per_s", "over_transformers", "over_plain", "tokens_per_pass")
            speeds.add_row(arm, str(epoch), *("" if own.get(name) is None else f"{own[name]:.3g}" for name in names))
    drafts = Table("arm", "rows left", "passes", "drafted per row", "ms per pass")
    for arm in table:
        lines = defaultdict[str, Passes](Passes)
        for line, more in (pair for one in found if one.arm == arm for pair in one.left.items()):
            total = lines[line]
            total.passes += more.passes
            total.rows += more.rows
            total.drafted += more.drafted
            total.seconds += more.seconds
        for line, total in lines.items():
            figures = f"{total.drafted / total.rows:.2f}", f"{1000 * total.seconds / total.passes:.0f}"
            drafts.add_row(arm, line, str(total.passes), *figures)
    for one in (speeds, drafts):
        Console(width=110).print(one)


def say(text: str) -> None:
    """Tell how far it is."""
    sys.stderr.write(text + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory, hub id or shipped model")
    parser.add_argument("--questions", type=Path, required=True, help="JSON lines with `turns`, as Spec-Bench's")
    parser.add_argument("--category", default="math_reasoning")
    parser.add_argument("--arms", nargs="+", default=["transformers", "plain", "suffix", "auto"])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--tokens", type=int, default=256, help="most of each answer")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--grpo", type=int, default=0, metavar="STEPS", help="whole steps of GRPO, of each arm")
    parser.add_argument("--work", type=Path, default=Path("build/rollouts"), help="folder that TRL wants")
    parser.add_argument("--cpu-time", action="store_true", help="time the processor; on a busy machine, one thread")
    parser.add_argument("--json", type=Path, help="where the figures go")
    options = parser.parse_args()
    rollouts = Rollouts(options)
    if options.grpo:
        steps = rollouts.measure_steps()
        found: dict[str, Any] = {"step_s": {arm: median(seconds) for arm, seconds in steps.items()}, "all": steps}
        Console().print(found["step_s"])
    else:
        batches = rollouts.measure()
        found = {"arms": compare(batches), "rollouts": [asdict(one) for one in batches]}
        show(found["arms"], batches)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
