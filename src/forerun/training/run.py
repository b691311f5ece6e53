"""Loads what a recipe names (target, data, features, trained module, objective), trains, evaluates and
exports the result.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from forerun.drafters.kinds import kind_named, objective_for
from forerun.errors import ArgumentError, DataError, OutOfMemoryError
from forerun.heads.files import TargetFacts
from forerun.heads.start import SEEN_TOKENS
from forerun.intervals import t_factor
from forerun.losses.objective import Batches, FeatureBatch, FrozenTarget, Objective, TokenBatch
from forerun.model import TransformersTarget
from forerun.model.layers import base_of, layers_of
from forerun.model.load import LoadOptions, read_config, stored_bytes
from forerun.model.memory import available_bytes
from forerun.model.names import load_tokenizer, resolve
from forerun.model.prepare import open_named, refuse_unservable
from forerun.model.support import text_config
from forerun.training.data.on_policy import AnswerWriter
from forerun.training.data.store import PackedWindows, PreparedData, about_answers
from forerun.training.features.online import OnlineFeatures
from forerun.training.features.store import FeatureStore, describe, find_loaded
from forerun.training.loop import checkpoint
from forerun.training.loop.distributed import Parallel, wrap_parallel
from forerun.training.loop.trackers import INTERVAL, tracker
from forerun.training.loop.trainer import Training
from forerun.training.loop.update import backward
from forerun.training.recipe import (
    MAY_CHANGE,
    EvaluationRecipe,
    EvaluationSettings,
    TrainRecipe,
    TrainSettings,
    flatten,
    to_plain,
)
from forerun.training.trained import Trained, hash_checkpoints, rate_name, trained_class
from forerun.types import Boundary, SamplingParams, SpeculationStats
from forerun.writing import alone

log = logging.getLogger(__name__)


class TrainingRun:
    """A recipe whose target, data and trained module are loaded and checked. With several processes each makes one, and
    all call the same methods.
    """

    def __init__(self, recipe: TrainRecipe[Any], parallel: Parallel) -> None:
        """Load everything without training. Raises what loading does, and ArgumentError for a recipe that contradicts
        itself.
        """
        kind = kind_named(recipe.kind)
        make_objective = objective_for(kind)
        self.recipe, self.parallel = recipe, parallel
        self.trained = trained_class(kind)(recipe)
        options = LoadOptions(dtype=recipe.target_dtype, device=str(parallel.device), repack=False)
        self.trained.check_shape(read_config(resolve(recipe.target), options))
        check_memory(recipe, parallel)
        self.model, tokenizer = open_frozen_target(recipe.target, recipe.target_dtype, recipe.target_parallel, parallel)
        self.data = open_data(recipe.data, recipe.target, self.model, tokenizer)
        held_out = recipe.evaluation.prompts
        self.held_out = None if held_out is None else open_data(held_out, recipe.target, self.model, tokenizer)
        self.prompts = [] if self.held_out is None else select_prompts(self.held_out, recipe.evaluation)
        self.trained.start(self.model, tokenizer, self.data)
        if parallel.world == 1 or recipe.target_parallel == "none":
            parallel.on_first(lambda: self.trained.check_target(self.model))
        self.module = self.trained.module.to(self.model.device)
        checkpointing = recipe.objective.gradient_checkpointing or recipe.training.gradient_checkpointing
        settings = dataclasses.replace(recipe.objective, gradient_checkpointing=checkpointing)
        self.objective: Objective = make_objective(self.module, FrozenTarget.of(self.model), settings)
        self.batches = RunBatches(
            PackedWindows(self.data, seed=recipe.training.seed, **dataclasses.asdict(recipe.windows)),
            make_source(recipe, self.data, self.model, tokenizer, self.trained.boundaries),
            make_writer(recipe, parallel, self.data, self.model, self.trained),
            device=self.model.device,
            world=parallel.world,
            # A pass of a tensor-parallel target needs all processes, with the same tokens.
            together=recipe.target_parallel == "tp",
        )

    def train(self, *, allow_changes: bool = False) -> dict[str, Any]:
        """Train, export the best weights, and return the outcome as a dict. Raises ArgumentError if another process
        trains into the same output.
        """
        output, parallel = Path(self.recipe.output), self.parallel
        with ExitStack() as stack:
            stack.enter_context(closing(self.batches))
            if not parallel.on_first(lambda: stack.enter_context(alone(output))):
                raise ArgumentError(
                    f"another run is training into {output}: wait for it, end it, or choose another output"
                )
            return self._train(allow_changes=allow_changes)

    def _train(self, *, allow_changes: bool) -> dict[str, Any]:
        recipe, parallel, output = self.recipe, self.parallel, Path(self.recipe.output)
        if parallel.first:
            for sentence in (
                *about_answers(self.data),
                *about_held_out(self.prompts, self.data, recipe.evaluation.prompt_tokens),
            ):
                log.warning("%s: %s", recipe.data, sentence)
        if parallel.on_first(lambda: checkpoint.latest(output) is None):
            parallel.on_first(lambda: self.trained.check_output(output))
            self.fit()
        training = Training(
            self.objective,
            self.batches,
            recipe.training,
            output,
            parallel=parallel,
            trackers=[tracker(name, output, to_plain(recipe)) for name in recipe.trackers] if parallel.first else [],
            evaluate=self.evaluate if self.prompts else None,
            recipe=self.fixed(),
            allow_changes=allow_changes,
        )
        result = training.run()
        weights = output / "best" if result.best is not None else result.checkpoint
        outcome = {name: value for name, value in dataclasses.asdict(result).items() if name != "checkpoint"}
        return outcome | {
            "interrupted": result.interrupted,
            **parallel.on_first(lambda: {name: str(output / name) for name in self.export(weights)}),
        }

    def fit(self) -> None:
        """Fit new weights to the target's states on the run's first batches. Batches whose text the target has yet to
        write are not used.
        """
        if self.batches.writer is not None:
            return
        windows, parallel = self.recipe.windows, self.parallel
        # Beyond an epoch the same tokens come again.
        shown = min(SEEN_TOKENS // (windows.rows * windows.length), self.batches.steps_per_epoch - 1)
        count = 1 + max(1, shown)
        seen = [self.batches.batch(step, parallel.rank, parallel.world) for step in range(count)]
        self.trained.fit(self.objective, seen, halves=self.recipe.training.halves(self.model.device))

    def evaluate(self, _step: int) -> dict[str, float]:
        """Return the acceptance with the present weights on `prompts`, as the function `evaluate`
        of this module measures it.
        """
        settings = self.recipe.evaluation.settings
        target = self.trained.target(self.model)
        return evaluate(self.trained.shapes(self.model, settings), target, self.prompts, settings)

    def measure(self) -> dict[str, Any]:
        """Return the number of parameters, the bytes they need, and the measured seconds of a step, without
        training.
        """
        settings = self.recipe.training
        weights = sum(weight.numel() for weight in self.module.parameters() if weight.requires_grad)
        steps = settings.total_steps(self.batches.steps_per_epoch)
        if self.batches.writer is not None:
            self.batches.writer.folder = None
        model = wrap_parallel(self.objective, self.parallel)
        began = time.perf_counter()
        # The last step is measured: if a run has stages, it is the slowest.
        last = (steps - 1) * settings.accumulation
        with closing(self.batches):
            backward(model, self.batches, last, (steps - 1) / steps, settings, self.parallel)
            seconds = time.perf_counter() - began
        self.module.zero_grad()
        return {
            "trainable_parameters": weights,
            "weights_gradients_and_optimizer_bytes": bytes_of_training(weights, settings),
            "target_bytes": int(self.model.get_memory_footprint()),
            "seconds_per_step": seconds,
        }

    def fixed(self) -> dict[str, Any]:
        """Return what a resumed run must not change, besides the settings of the loop, by key. Directories are
        represented by hashes of their content.
        """
        values = flatten(self.recipe).items()
        fixed = {key: value for key, value in values if key not in MAY_CHANGE and not key.startswith("training.")}
        contents = {
            **hash_checkpoints({"target": self.recipe.target}),
            "data": self.data.hash,
            **self.trained.contents(),
        }
        if self.held_out is not None:
            contents["evaluation.prompts"] = self.held_out.hash
        fixed |= {key: f"sha256 {digest[:16]}" for key, digest in contents.items()}
        if isinstance(self.batches.source, FeatureStore):
            stored = self.batches.source.manifest
            fixed["features"] = f"{stored.dtype} by {stored.source}"
        # Twice as many processes with half the rows each have the same batches.
        fixed["windows.rows x processes"] = fixed.pop("windows.rows") * self.parallel.world
        return fixed

    def export(self, weights: Path) -> tuple[str, ...]:
        """Write the weights of a checkpoint as drafters, in a format that most engines load, and return the names of
        their folders in ``output``.
        """
        module = self.trained.blank()
        checkpoint.load_weights(weights, module)
        module.to(self.model.dtype)
        output, facts = Path(self.recipe.output), TargetFacts.of(self.model.config, self.recipe.target)
        self.trained.write(module, output / self.trained.folder, facts)
        return (self.trained.folder, *self.trained.beside)


def bytes_of_training(weights: int, settings: TrainSettings) -> int:
    """Return the bytes of `weights` float32 weights, their gradients and their optimizer states."""
    return 4 * weights * (2 + settings.moments)


class RunBatches(Batches):
    """The batches of a run: packed windows, and the target's hidden states for them, computed or read from disk.

    Args:
        windows: the prepared documents, packed.
        source: computes or reads the hidden states of a batch.
        writer: replaces text in the windows by text that a model writes; None: the data stay as they are.
        device: of the batches.
        world: number of processes.
        together: every process computes the states of all processes' shares, one share after the other.
    """

    def __init__(
        self,
        windows: PackedWindows,
        source: OnlineFeatures | FeatureStore,
        writer: AnswerWriter | None,
        *,
        device: torch.device,
        world: int,
        together: bool = False,
    ) -> None:
        self.windows, self.source, self.writer = windows, source, writer
        self.steps_per_epoch = windows.steps_per_epoch(world)
        self._device, self._together = device, together
        self._reader: ThreadPoolExecutor | None = None
        self._ahead = dict[tuple[int, int, int], Future[FeatureBatch]]()
        """The next batch, by arguments of `batch`: the reader loads its stored states while the current one trains."""

    def batch(self, step: int, rank: int, world: int) -> FeatureBatch:
        """Return the share of process `rank` of `world` in batch number `step`."""
        if isinstance(self.source, FeatureStore):
            return self._read(self.source, step, rank, world)
        for member in range(world) if self._together else (rank,):
            windows = partial(self._windows, member, world)
            first_row = member * self.windows.rows
            tokens = windows(step) if self.writer is None else self.writer.batch(windows, step, first_row)
            features = self.source.features(tokens)
            if member == rank:
                mine = features
        return dataclasses.replace(mine, number=step)

    def close(self) -> None:
        """End the thread that reads ahead; the next call of `batch` starts one again."""
        if self._reader is not None:
            self._reader.shutdown(cancel_futures=True)
        self._reader = None
        self._ahead.clear()

    def _read(self, store: FeatureStore, step: int, rank: int, world: int) -> FeatureBatch:
        """Return a batch with stored states, and start reading the next one."""
        if self._reader is None:
            self._reader = ThreadPoolExecutor(max_workers=1)
        wanted, following = (step, rank, world), (step + 1, rank, world)
        read = self._ahead.pop(wanted, None) or self._reader.submit(store.features, self.windows, *wanted)
        self._ahead = {following: self._reader.submit(store.features, self.windows, *following)}
        return dataclasses.replace(read.result().to(self._device), number=step)

    def _windows(self, rank: int, world: int, number: int) -> TokenBatch:
        return self.windows.batch(number, rank, world).to(self._device)


def open_data(folder: str, target: str, model: Any, tokenizer: Any) -> PreparedData:
    """Open prepared data, and check that all token ids are in the target's vocabulary."""
    data = PreparedData(folder, tokenizer=tokenizer)
    data.check_ids(text_config(model).vocab_size, f"the target ({target})")
    return data


def make_source(
    recipe: TrainRecipe[Any], data: PreparedData, model: Any, tokenizer: Any, boundaries: Sequence[Boundary]
) -> OnlineFeatures | FeatureStore:
    """Return the source of the target's hidden states: the recipe's feature store, else the target itself."""
    if recipe.features is None:
        return OnlineFeatures(model, boundaries)
    directory, size = find_loaded(recipe.target), text_config(model).hidden_size
    manifest = describe(directory, recipe.target, tokenizer, data, boundaries, hidden_size=size)
    return FeatureStore(recipe.features, manifest)


def make_writer(
    recipe: TrainRecipe[Any], parallel: Parallel, data: PreparedData, model: Any, trained: Trained
) -> AnswerWriter | None:
    """Return the writer of the text that is trained on, or None if the data stay as they are.

    When the target writes, a copy of the trained module drafts for it, as the chain does in evaluation. A target that
    is trained itself writes without a drafter.
    """
    settings, drafting = recipe.objective, None
    if settings.writer == "data":
        data.check_written("objective.writer=data")
    if settings.writer == "data" or not (settings.written or data.unwritten):
        return None
    writes, vocabulary = model, None
    if kind_named(recipe.kind).trains in ("head", "draft_model"):
        if parallel.mode == "fsdp":
            raise ArgumentError(
                f"objective.writer={settings.writer} needs the whole of what is trained on each process: --parallel ddp"
            )
        drafting = trained.shapes(model, recipe.evaluation.settings)["chain"]
        if settings.writer == "draft":
            writes, drafting = drafting["model"], None
            sizes = [text_config(one).vocab_size for one in (model, writes)]
            vocabulary = sizes[0] if sizes[0] < sizes[1] else None
    copied = writes if settings.writer == "draft" else (drafting or {}).get("model")

    def refresh() -> None:
        if copied is not None:
            copied.load_state_dict(trained.module.state_dict())

    def needed() -> int:
        steps = [step for step, _ in checkpoint.checkpoints(Path(recipe.output))]
        return min(steps, default=0) * recipe.training.accumulation

    return AnswerWriter(
        writes,
        settings,
        seed=recipe.training.seed,
        length=recipe.windows.length,
        rows=recipe.windows.rows * parallel.world,
        drafting=drafting,
        vocabulary=vocabulary,
        refresh=refresh,
        folder=Path(recipe.output) / "written",
        needed=needed,
    )


def select_prompts(data: PreparedData, wanted: EvaluationRecipe) -> list[list[int]]:
    """Return the prompts of the first documents of `data` that have one of at most `wanted.prompt_tokens` tokens.
    Raises DataError if none does.

    A prompt is the text before the first counted token. If a document counts from its first token on, it is the first
    `wanted.prompt_tokens` tokens.
    """
    prompts, shortest = list[list[int]](), 0
    for index in range(len(data)):
        # A conversation is not truncated: the target is never served one that is cut in the middle.
        prompt = _prompt_of(data, index, wanted.prompt_tokens)
        length = len(prompt)
        if length <= wanted.prompt_tokens:
            prompts.append(prompt.tolist())
        shortest = min(shortest or length, length)
        if len(prompts) == wanted.count:
            break
    if not prompts:
        raise DataError(
            f"evaluation.prompts={data.folder}: the prompts of all {len(data):,} documents are longer than "
            f"evaluation.prompt_tokens={wanted.prompt_tokens}; the shortest has {shortest:,} tokens: raise it, or give "
            "data with shorter prompts"
        )
    if len(prompts) < min(wanted.count, len(data)):
        log.warning(
            "evaluation.prompts: %d of %d documents give a prompt of at most evaluation.prompt_tokens=%d tokens, fewer "
            "than evaluation.count=%d",
            *(len(prompts), len(data), wanted.prompt_tokens, wanted.count),
        )
    return prompts


def _prompt_of(data: PreparedData, index: int, most: int) -> NDArray[np.int32]:
    """Return the prompt of a document: its text before the first counted token. If it counts from its first token on,
    these are the first `most` tokens.
    """
    tokens, mask = data.document(index)
    return tokens[: int(mask.argmax()) or most]


def about_held_out(prompts: Sequence[Sequence[int]], data: PreparedData, most: int) -> Iterator[str]:
    """Yield a sentence where prompts of an evaluation, chosen with at most `most` tokens, begin documents that are
    trained on.
    """
    wanted = {np.array(prompt, np.int32).tobytes() for prompt in prompts}
    documents = range(len(data)) if wanted else ()
    trained_on = {start for index in documents if (start := _prompt_of(data, index, most).tobytes()) in wanted}
    if trained_on:
        yield (
            f"{len(trained_on)} of {len(wanted)} prompts of evaluation.prompts begin documents of {data.folder}, which "
            "are trained on: their acceptance says nothing about other prompts. Prepare prompts that are held out."
        )


def evaluate(
    shapes: Mapping[str, Mapping[str, Any]], model: Any, prompts: Sequence[Sequence[int]], settings: EvaluationSettings
) -> dict[str, float]:
    """Measure the acceptance in speculative decoding of held-out `prompts` (token ids) with the target `model`.

    The drafters are the configurations of `Trained.shapes`. ``chain_t0``, ``tree_t0``, ``chain_t1`` and ``tree_t1`` are
    mean acceptance lengths, bonus token included. ``acceptance_0`` ... are the chain's acceptance rates by depth at
    temperature 0, and ``acceptance_tree_t1_0`` ... those of the others. ``chain_t0_interval`` is half of the 95 %
    interval of ``chain_t0``, from the differences between prompts; with a single prompt there is none.
    """
    from forerun import LLM

    longest = max(map(len, prompts)) + settings.max_tokens
    llm = LLM(model, tokenizer=False, max_num_seqs=settings.rows, max_model_len=longest, self_check=False)
    plain: dict[str, Any] = {
        "top_p": 1.0,
        "top_k": 0,
        "repetition_penalty": 1.0,
        "detokenize": False,
        "max_tokens": settings.max_tokens,
        "seed": settings.seed,
    }
    figures: dict[str, float] = {}
    for temperature in (0, 1):
        params = SamplingParams(temperature=temperature, **plain)
        for name, config in shapes.items():
            each = _stats(llm, prompts, params, {**config, "adaptive": False})
            stats = SpeculationStats.sum(each)
            figures[f"{name}_t{temperature}"] = stats.mean_acceptance_length
            if len(each) > 1:
                figures[f"{name}_t{temperature}{INTERVAL}"] = half_interval(each)
            figures |= {rate_name(name, temperature, d): rate for d, rate in enumerate(stats.acceptance_per_depth)}
    return figures


def _stats(
    llm: Any, prompts: Sequence[Sequence[int]], params: SamplingParams, config: Mapping[str, Any]
) -> list[SpeculationStats]:
    """Return the speculation statistics of each prompt's completion."""
    with torch.random.fork_rng(devices=[]):
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, speculative=config)
    return [output.outputs[0].speculation for output in outputs]


def half_interval(each: Sequence[SpeculationStats]) -> float:
    """Return half of the 95 % interval of the mean acceptance length of at least two completions.

    It is the interval of a ratio of sums, with prompts as the samples: steps of one completion are not independent.
    """
    total = SpeculationStats.sum(each)
    length = total.mean_acceptance_length - 1
    off = [one.num_accepted_draft_tokens - length * one.num_spec_steps for one in each]
    variance = sum(value**2 for value in off) * len(each) / (len(each) - 1)
    return t_factor(len(each) - 1) * math.sqrt(variance) / max(1, total.num_spec_steps)


def check_memory(recipe: TrainRecipe[Any], parallel: Parallel) -> None:
    """Raise OutOfMemoryError, before anything is loaded, if the models of a recipe do not fit on this process's device.
    Activations and a new head are not counted.
    """
    trained: dict[str, str | None] = {"target": recipe.target} if kind_named(recipe.kind).trains == "target" else {}
    if kind_named(recipe.kind).trains == "draft_model":
        trained = {"draft.start": recipe.draft.start}
    # Weights, gradients and optimizer states; FSDP shards them.
    each = 1 if parallel.mode == "fsdp" else 4 if recipe.training.optimizer == "adamw" else 3
    needed = {
        f"{key} ({name}), trained in float32": each * _bytes_of(name, "float32", parallel.device)
        for key, name in trained.items()
        if name is not None
    }
    if recipe.target_parallel == "none" or parallel.world == 1:
        needed[f"target ({recipe.target})"] = _bytes_of(recipe.target, recipe.target_dtype, parallel.device)
    if (reference := getattr(recipe.objective, "reference", None)) is not None:
        needed[f"objective.reference ({reference})"] = _bytes_of(reference, recipe.target_dtype, parallel.device)
    total, available = sum(needed.values()), available_bytes(parallel.device)
    if total > available:
        shown = ", ".join(f"{size / 2**30:.2f} for {what}" for what, size in needed.items())
        raise OutOfMemoryError(
            f"{total / 2**30:.2f} GiB are needed on {parallel.device}, {available / 2**30:.2f} GiB are free: {shown}. "
            "Take smaller models, target_dtype=bfloat16, or several devices: target_parallel=fsdp, --parallel fsdp"
        )


def _bytes_of(name: str, dtype: str, device: torch.device) -> int:
    """Return the bytes of a checkpoint's weights when loaded in `dtype` on `device`."""
    path = resolve(name)
    options = LoadOptions(dtype=dtype, device=str(device), repack=False)
    return stored_bytes(path, options, read_config(path, options))


def open_frozen_target(name: str, dtype: str, sharding: str, parallel: Parallel) -> tuple[Any, Any]:
    """Load the frozen causal LM and its tokenizer; every process must call it.

    `sharding`: ``fsdp`` shards the decoder layers and gathers each one while it runs; ``tp`` computes a part of each
    layer on every process, by transformers' ``tp_plan``, and raises ArgumentError if there is none. Embedding and
    output head stay whole, because the trained head reads both. A target that could not be served is refused here, too,
    unless it is sharded.
    """
    path = resolve(name)
    if parallel.world == 1 or sharding == "none":
        model = open_named(path, LoadOptions(dtype=dtype, device=str(parallel.device), repack=False))
    else:
        load = _load_tensor_parallel if sharding == "tp" else _load_sharded
        model = load(path, dtype, parallel)
    tokenizer = load_tokenizer(path, None)
    if parallel.world == 1 or sharding == "none":
        parallel.on_first(lambda: refuse_unservable(TransformersTarget, model, tokenizer))
    return model.requires_grad_(False), tokenizer


def _load_sharded(name: str | Path, dtype: str, parallel: Parallel) -> Any:
    """Load and shard on the CPU, one process of a machine after the other, so that host and device hold at most one
    whole copy.
    """
    mesh = init_device_mesh(parallel.device.type, (parallel.world,))
    mine = int(os.environ.get("LOCAL_RANK", parallel.rank))
    model = None
    for turn in range(int(os.environ.get("LOCAL_WORLD_SIZE", parallel.world))):
        if turn == mine:
            model = open_named(name, LoadOptions(dtype=dtype, device="cpu", repack=False))
            for layer in layers_of(base_of(model), text_config(model).num_hidden_layers)[1]:
                fully_shard(layer, mesh=mesh)
            model.to(parallel.device)
        parallel.wait()
    assert model is not None, "torchrun numbers the processes of a machine from 0"
    return model


def _load_tensor_parallel(name: str | Path, dtype: str, parallel: Parallel) -> Any:
    options = LoadOptions(dtype=dtype, tp_plan="auto", repack=False)
    text = read_config(name, options).get_text_config(decoder=True)
    groups = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if groups % parallel.world:
        raise ArgumentError(
            f"target_parallel=tp gives each of {parallel.world} processes as many key-value heads, but the target has "
            f"{groups}: use target_parallel=fsdp, or a number of processes that divides {groups}"
        )
    model = open_named(name, options)
    # Gather embedding and output head, and let them run without the plan.
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    tied = output.weight is embedding.weight
    for module in (embedding, output):
        for weight_name, weight in list(module.named_parameters(recurse=False)):
            if isinstance(weight, DTensor):
                setattr(module, weight_name, nn.Parameter(weight.full_tensor(), requires_grad=False))
        # transformers sets the plan's forward, which communicates between processes, on the instance.
        module.__dict__.pop("forward", None)
    if tied:
        output.weight = embedding.weight
    return model
