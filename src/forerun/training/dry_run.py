"""A dry run reports the size, the time and the passes over the data of a recipe, and gives advice, before training.

For a new head the target's configuration suffices: the head's step is timed on a few random features, and no weights
of the target are loaded. Otherwise everything is loaded, and the real step is timed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from forerun.drafters.kinds import kind_named, objective_for
from forerun.heads.base import Head
from forerun.heads.layers import DecoderConfig
from forerun.losses.objective import FeatureBatch, FrozenTarget, TokenBatch
from forerun.model.load import LoadOptions, read_config, stored_bytes
from forerun.model.names import load_tokenizer, resolve
from forerun.training.data.store import PackedWindows, PreparedData, about_answers, draft_coverage
from forerun.training.loop.distributed import Parallel
from forerun.training.recipe import EvaluationRecipe, TrainRecipe, WindowSettings, to_plain
from forerun.training.run import TrainingRun, about_held_out, bytes_of_training, check_memory, select_prompts
from forerun.training.trained import trained_class
from forerun.types import LAST_HIDDEN

TIMED_TOKENS = 256  # Tokens of the random batch: enough that matrix products are as fast as in a real step
MANY_PASSES = 20  # Passes over the same text beyond which a head overfits
FEW_STEPS = 120  # Steps in which the loss of a new EAGLE-3 head of SmolLM2-135M falls from 10.8 nats to 4
FEW_PROMPTS = 50
COVERED = 0.98  # Share of new text that a draft vocabulary should cover


def plan(recipe: TrainRecipe[Any], parallel: Parallel) -> dict[str, Any]:
    """Return parameters, bytes, steps, time and ``advice`` (sentences for the user) without training. Raises as
    `TrainingRun` does, except for errors that need the target's weights.
    """
    kind = kind_named(recipe.kind)
    if kind.trains != "head" or kind.in_target is not None or recipe.draft.start is not None:
        run = TrainingRun(recipe, parallel)
        data, size, head = run.data, run.measure(), None
    else:
        trained_class(kind)(recipe)  # It raises if the recipe contradicts itself
        check_memory(recipe, parallel)
        path = resolve(recipe.target)
        options = LoadOptions(dtype=recipe.target_dtype, device=str(parallel.device), repack=False)
        data = PreparedData(recipe.data, tokenizer=load_tokenizer(path, None))
        sketch = Sketch(recipe, read_config(path, options), parallel.device)
        data.check_ids(sketch.text.vocab_size, f"the target ({recipe.target})")
        size = sketch.measure(stored_bytes(path, options, sketch.config))
        head = sketch.head
    windows, settings = recipe.windows, recipe.training
    packed = PackedWindows(data, seed=settings.seed, **asdict(windows))
    epoch = packed.steps_per_epoch(parallel.world)
    seconds = size.pop("seconds_per_step")
    steps = settings.total_steps(epoch, 1, seconds)
    passes = steps * settings.accumulation / epoch
    return {
        **size,
        "documents": len(data),
        "tokens": data.num_tokens,
        "steps": steps,
        "tokens_per_step": windows.rows * windows.length * settings.accumulation * parallel.world,
        "passes": passes,
        "seconds_per_step": seconds,
        "hours": steps * seconds / 3600,
        "advice": list(advise(recipe, data, head, steps=steps, seconds=seconds, passes=passes)),
        "recipe": to_plain(recipe),
    }


class Sketch:
    """A head of the right shape with random weights, and a target of which only the sizes are real."""

    def __init__(self, recipe: TrainRecipe[Any], config: Any, device: torch.device) -> None:
        kind = kind_named(recipe.kind)
        self.recipe, self.config, self.text, self.device = recipe, config, config.get_text_config(), device
        shape = kind.head.Config.for_target(kind.name, self, recipe.draft.vocab_size, recipe.draft.options)
        with torch.random.fork_rng(devices=[]):
            head = kind.head(shape)
        self.head: Head = head.float().to(device)

    def measure(self, target_bytes: int) -> dict[str, Any]:
        """Return parameters, bytes, and the seconds of a step, from those of a few tokens."""
        recipe, settings = self.recipe, self.recipe.training
        dtype = torch.bfloat16 if settings.halves(self.device) else torch.float32
        target = self._target(dtype)
        objective = objective_for(kind_named(recipe.kind))(self.head.train(), target, recipe.objective)
        most = min(recipe.windows.length, TIMED_TOKENS)
        fewer, seconds = max(2, most // 4), list[float]()
        for tokens in (fewer, fewer, most):  # The first one is a warm-up
            batch = self._batch(dtype, tokens)
            began = time.perf_counter()
            with torch.autocast(self.device.type, torch.bfloat16, enabled=dtype is torch.bfloat16):
                loss = objective(batch).loss
            loss.backward()
            float(loss.detach())  # waits for a device
            seconds.append(time.perf_counter() - began)
        # The fixed cost of a step (a gradient as large as the head) is not multiplied by the number of tokens.
        each = max(0.0, seconds[2] - seconds[1]) / max(1, most - fewer) or seconds[2] / most
        fixed = max(0.0, seconds[2] - each * most)
        if recipe.mode == "online":
            each += self._pass_seconds(dtype, most) / most
        windows = recipe.windows.rows * recipe.windows.length
        weights = sum(weight.numel() for weight in self.head.parameters() if weight.requires_grad)
        return {
            "trainable_parameters": weights,
            "weights_gradients_and_optimizer_bytes": bytes_of_training(weights, settings),
            "target_bytes": target_bytes,
            "seconds_per_step": settings.accumulation * (fixed + each * windows),
        }

    def _target(self, dtype: torch.dtype) -> FrozenTarget:
        table = torch.zeros(self.text.vocab_size, self.text.hidden_size, dtype=dtype, device=self.device)
        embedding = nn.Embedding(self.text.vocab_size, self.text.hidden_size, _weight=table, _freeze=True)
        return FrozenTarget(embedding=embedding, lm_head=table)

    def _batch(self, dtype: torch.dtype, length: int) -> FeatureBatch:
        shape = (1, length)
        places = torch.arange(shape[1], device=self.device).expand(shape)
        tokens = TokenBatch(
            tokens=torch.zeros_like(places),
            loss_mask=torch.ones(shape, dtype=torch.bool, device=self.device),
            documents=torch.zeros_like(places),
            positions=places,
        )
        read = {*self.head.config.boundaries, LAST_HIDDEN}
        size = self.text.hidden_size
        features = {one: torch.ones(*shape, size, dtype=dtype, device=self.device) for one in read}
        return FeatureBatch(batch=tokens, features=features)

    def _pass_seconds(self, dtype: torch.dtype, tokens: int) -> float:
        """Return the seconds of the target's pass over `tokens` tokens, estimated from matrix products of its sizes."""
        text = self.text
        inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
        left = torch.ones(tokens, text.hidden_size, dtype=dtype, device=self.device)
        right = torch.ones(text.hidden_size, inner, dtype=dtype, device=self.device)
        float((left @ right)[0, 0])
        began = time.perf_counter()
        float((left @ right)[0, 0])
        # A layer of a Llama is about four such products: three of its MLP, and attention's.
        return (time.perf_counter() - began) * 4 * text.num_hidden_layers


def advise(
    recipe: TrainRecipe[Any], data: PreparedData, head: Head | None, *, steps: int, seconds: float, passes: float
) -> Iterator[str]:
    """Yield sentences for the user about a run of so many steps, of so many `seconds` each, and passes over the data.
    `head` is None unless a new head is trained.
    """
    yield from _about_length(data.num_tokens, steps, seconds, passes, recipe.training.seconds)
    if head is not None:
        yield from _about_vocabulary(head, data)
    yield from _about_windows(recipe.windows, data)
    yield from _about_unrolling(recipe)
    yield from _about_evaluation(recipe.evaluation, data)
    yield from about_answers(data)


def _about_length(tokens: int, steps: int, seconds: float, passes: float, limit: float | None) -> Iterator[str]:
    yield (
        f"{steps:,} {'step is' if steps == 1 else 'steps are'} {passes:,.3g} passes over the data's {tokens:,} tokens, "
        f"about {say_time(steps * seconds)}."
    )
    if limit is not None and limit < seconds:
        yield f"A single step takes longer than training.seconds={limit:g}: one is made in any case."
    if passes > MANY_PASSES:
        fewer = max(1, round(steps * MANY_PASSES / passes))
        yield (
            f"A head that reads the same text so often overfits. training.epochs={MANY_PASSES} is "
            f"{fewer:,} steps and about {say_time(fewer * seconds)}; what helps is more text: let the target "
            "answer further prompts (forerun data regenerate)."
        )
    elif passes < 1:
        yield f"{1 - passes:.0%} of the data are never read."
    if steps < FEW_STEPS:
        yield (
            f"A fresh head needs some {FEW_STEPS} steps to get from guessing to what helps, and this run has "
            f"{steps:,}: give it more time, shorter windows or a smaller draft vocabulary."
        )


def _about_vocabulary(head: Head, data: PreparedData) -> Iterator[str]:
    config = head.config
    if not isinstance(config, DecoderConfig) or not config.own_lm_head:
        return
    whole, chosen = config.vocab_size, config.draft_vocab_size
    smaller = [size for size in (2**power for power in range(11, 18)) if size < whole]
    now, *others = draft_coverage(data, whole, [chosen, *smaller])
    enough = next((coverage for coverage in others if (coverage.held_out_coverage or 0.0) >= COVERED), None)
    better = f"draft.vocab_size={enough.size} covers {enough.held_out_coverage:.1%}" if enough else ""
    if config.reduced_vocabulary and now.held_out_coverage is not None:
        more = f" {better}." if enough and chosen < enough.size else ""
        yield (
            f"The draft vocabulary of {chosen:,} tokens covers {now.held_out_coverage:.1%} of documents that it "
            f"was not chosen from; the rest is never drafted.{more}"
        )
    elif enough:
        share = config.hidden_size * whole / sum(weight.numel() for weight in head.parameters())
        yield (
            f"The head's output layer names all {whole:,} tokens and has {share:.0%} of its parameters. {better} "
            "of documents that it was not chosen from, and trains and drafts faster."
        )


def _about_windows(windows: WindowSettings, data: PreparedData) -> Iterator[str]:
    lengths = data.lengths
    longer, longest = int((lengths > windows.length).sum()), int(lengths.max())
    if longer:
        yield (
            f"windows.length={windows.length} splits {longer:,} of {len(lengths):,} documents; the longest has "
            f"{longest:,} tokens."
        )
    elif windows.length >= 2 * longest:
        yield (
            f"No document has more than {longest:,} tokens: windows.length={windows.length // 2} with "
            f"windows.rows={windows.rows * 2} reads as much in a step and takes less memory."
        )


def _about_unrolling(recipe: TrainRecipe[Any]) -> Iterator[str]:
    steps = getattr(recipe.objective, "steps", None)
    drafted = recipe.evaluation.settings.num_speculative_tokens
    if steps is not None and steps > drafted:
        yield (
            f"objective.steps={steps} unrolls the head beyond the {drafted} tokens that evaluation drafts, and "
            f"each costs as much as the first: objective.steps={drafted} is {steps / drafted:.1f} times as fast."
        )


def _about_evaluation(evaluation: EvaluationRecipe, data: PreparedData) -> Iterator[str]:
    if evaluation.prompts is None:
        yield (
            "Nothing is held out, so acceptance will not be measured: prepare some prompts separately and name "
            "them in evaluation.prompts."
        )
        return
    yield from about_held_out(
        select_prompts(PreparedData(evaluation.prompts), evaluation), data, evaluation.prompt_tokens
    )
    if evaluation.count < FEW_PROMPTS:
        yield (
            f"With evaluation.count={evaluation.count} prompts only large differences mean something; the console "
            f"prints the interval of each figure. {FEW_PROMPTS} and more are better."
        )


def say_time(seconds: float) -> str:
    """Return a time in words: seconds, minutes or hours."""
    if seconds < 100:
        return f"{seconds:.2g} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 6000 else f"{seconds / 3600:.1f} hours"
