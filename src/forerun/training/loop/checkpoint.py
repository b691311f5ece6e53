"""Writes and reads training checkpoints.

``checkpoint-<step>/`` has ``model.safetensors`` (trainable parts float32),
``optimizer.safetensors`` (one tensor per parameter and kind, ``<parameter>|<kind>``),
``random.json`` (per process) and ``state.json``. Everything is stored whole, so that any number of
processes can read it.
"""

from __future__ import annotations

import base64
import json
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from forerun.errors import CheckpointError
from forerun.training.loop.distributed import Parallel, shard_like
from forerun.writing import format_bytes, free_bytes, remove_folder, replace_folder, write_file

FORMAT = 1
MODEL, OPTIMIZER, RANDOM, STATE = "model.safetensors", "optimizer.safetensors", "random.json", "state.json"
Optimizers = Iterable[torch.optim.Optimizer]


@dataclass(kw_only=True, slots=True)
class Progress:
    """How far training has come. Changes with every step."""

    step: int = 0
    position: int = 0  # Batches read, which is where the data go on
    tokens: int = 0
    seconds: float = 0.0  # Time of the steps, on the first process's clock, without evaluation and saving
    evaluated: int = 0
    best: float | None = None  # Best value of the deciding metric; higher is better
    best_step: int | None = None
    stale: int = 0  # Evaluations in a row that brought no better value
    evaluation_seconds: float = 0.0  # Time of all evaluations, on the first process's clock
    rate_factor: float = 1.0  # What the range test found best, times both peak rates


class Saved:
    """The record of a checkpoint; its tensors are left alone."""

    def __init__(self, path: Path) -> None:
        """Read the record; CheckpointError if it is incomplete or in another format."""
        try:
            record, states = (json.loads((path / name).read_text(encoding="utf-8")) for name in (STATE, RANDOM))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path} is no complete training checkpoint: {error}. Remove it to resume from the one before."
            ) from error
        if record.get("format") != FORMAT:
            raise CheckpointError(f"{path} has format {record.get('format')!r}; this forerun reads {FORMAT}.")
        self.path, self.progress = path, Progress(**record["progress"])
        self.random: list[str] = states  # Per process that wrote it, the text of `capture_random`
        self.recipe: Mapping[str, Any] = record["recipe"]  # Settings that decided what was trained, by key


def save(
    output: Path,
    module: nn.Module,
    optimizers: Optimizers,
    progress: Progress,
    parallel: Parallel,
    recipe: Mapping[str, Any],
) -> Path:
    """Write ``output/checkpoint-<step>``; all processes must call it. CheckpointError if the disk refuses."""
    weights = weights_of(module, parallel)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    held = [(names[id(parameter)], state) for optimizer in optimizers for parameter, state in optimizer.state.items()]
    kept = {f"{name}|{kind}": value for name, state in held for kind, value in sorted(state.items())}
    moments = gather_whole(kept, parallel)
    states = parallel.collect(capture_random())
    record = {"format": FORMAT, "world": parallel.world, "progress": asdict(progress), "recipe": recipe}
    folder = output / f"checkpoint-{progress.step}"
    tensors = {MODEL: weights, OPTIMIZER: moments}
    return parallel.on_first(lambda: _write(folder, tensors, {RANDOM: states, STATE: record}))


def save_progress(folder: Path, progress: Progress) -> None:
    """Write what an evaluation since then has found into the checkpoint in `folder`;
    CheckpointError if the disk refuses.
    """
    path = folder / STATE
    try:
        record = json.loads(path.read_text(encoding="utf-8")) | {"progress": asdict(progress)}
        write_file(path, json.dumps(record, indent=1))
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written: {error}. Make room, then start the same command again: it evaluates again."
        ) from error


def save_best(output: Path, module: nn.Module, parallel: Parallel, step: int, values: Mapping[str, float]) -> Path:
    """Write the weights alone to ``output/best``, with ``best.json``; all processes must call it."""
    weights = weights_of(module, parallel)
    record = {"step": step, "values": dict(values)}
    return parallel.on_first(lambda: _write(output / "best", {MODEL: weights}, {"best.json": record}))


def _write(folder: Path, tensors: Mapping[str, dict[str, Tensor]], records: Mapping[str, Any]) -> Path:
    with new_directory(folder) as fresh:
        for name, held in tensors.items():
            save_file(held, fresh / name, metadata={"format": "pt"})
        for name, record in records.items():
            (fresh / name).write_text(json.dumps(record, indent=1), encoding="utf-8")
    return folder


def gather_whole(tensors: Mapping[str, Tensor], parallel: Parallel) -> dict[str, Tensor]:
    """Return full copies on the CPU of the first process, none on the others, by name. All
    processes must call it.
    """
    whole = {}
    for name, tensor in tensors.items():
        full = tensor.detach()
        if isinstance(full, DTensor):
            full = full.full_tensor()
        if parallel.first:
            # Views of one storage, which safetensors refuses, become tensors of their own.
            whole[name] = full.to("cpu", copy=True, memory_format=torch.contiguous_format)
    return whole


def weights_of(module: nn.Module, parallel: Parallel) -> dict[str, Tensor]:
    """Return `gather_whole` of parameters and persistent buffers; tied ones once, by first name."""
    state = module.state_dict(keep_vars=True)
    first_names = {id(tensor): name for name, tensor in reversed(state.items())}
    return gather_whole({name: state[name] for name in first_names.values()}, parallel)


def load_weights(path: Path, module: nn.Module) -> None:
    """Fill `module`, not yet sharded, from a checkpoint or ``best/``; CheckpointError, by name, if tensors differ."""
    stored, first_names = _load(path / MODEL), dict[int, str]()
    for name, tensor in module.state_dict(keep_vars=True).items():
        first = first_names.setdefault(id(tensor), name)
        if first in stored:
            stored[name] = stored[first]
    try:
        module.load_state_dict(stored)
    except RuntimeError as error:
        raise CheckpointError(f"{path / MODEL} is of another module: {error}") from error


def load_optimizers(path: Path, module: nn.Module, optimizers: Optimizers, parallel: Parallel) -> None:
    """Fill the optimizers of `module`, already sharded; all processes must call it, the first one
    reads.

    CheckpointError for a checkpoint of another optimizer or other parameters.
    """
    parameters = dict(module.named_parameters())
    by_parameter: dict[int, dict[str, Tensor]] = {}
    for name, value in _share(path, parallel).items():
        parameter_name, _, kind = name.rpartition("|")
        parameter = parameters.get(parameter_name)
        if parameter is None:
            raise CheckpointError(f"{path / OPTIMIZER} holds {name}, but no such parameter is trained.")
        if value.ndim and value.shape != parameter.shape:
            raise CheckpointError(
                f"{path / OPTIMIZER}: {name} has shape {tuple(value.shape)}, the parameter {tuple(parameter.shape)}."
            )
        by_parameter.setdefault(id(parameter), {})[kind] = shard_like(value, parameter) if value.ndim else value
    for optimizer in optimizers:
        owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        state = {index: by_parameter.pop(id(p)) for index, p in enumerate(owned) if id(p) in by_parameter}
        # Muon's state for AdamW, or the reverse: torch would load it and break at the next step.
        muon = isinstance(optimizer, torch.optim.Muon)
        if any(("momentum_buffer" in kinds) != muon for kinds in state.values()):
            raise CheckpointError(
                f"{path} was trained with another optimizer than the settings say; set optimizer to the former one, "
                "or begin a new output directory."
            )
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    if by_parameter:
        raise CheckpointError(f"{path / OPTIMIZER} holds state of parameters that are frozen now.")


def _share(path: Path, parallel: Parallel) -> dict[str, Tensor]:
    """Send the first process's tensors to all, so that only its disk needs the file."""
    stored: dict[str, Tensor] = {}

    def describe() -> dict[str, Tensor]:
        stored.update(_load(path / OPTIMIZER))
        return {name: tensor.to("meta") for name, tensor in stored.items()}

    blanks = parallel.on_first(describe)
    for name, blank in blanks.items():
        tensor = stored[name].to(parallel.device) if parallel.first else torch.empty_like(blank, device=parallel.device)
        stored[name] = parallel.broadcast(tensor).cpu()
    return stored


def _load(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}. Remove its directory to resume from the checkpoint before."
        ) from error


def checkpoints(output: Path) -> list[tuple[int, Path]]:
    """Return (step, directory) of the complete checkpoints in `output`, oldest first."""
    found = [(re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in output.glob("*/")]
    return sorted((int(match[1]), path) for match, path in found if match)


def latest(output: Path) -> Path | None:
    return next((path for _, path in reversed(checkpoints(output))), None)


@contextmanager
def new_directory(folder: Path) -> Iterator[Path]:
    """Yield a fresh directory that takes the place of `folder` when the block ends; CheckpointError
    if the disk refuses.
    """
    try:
        with replace_folder(folder) as fresh:
            yield fresh
    except (OSError, SafetensorError) as error:
        previous = latest(folder.parent)
        former = "No checkpoint had been written yet. Make room or choose another output, and start again"
        if previous:
            former = f"{previous} is intact. Make room, then start the same command again: it goes on from there"
        raise CheckpointError(f"Writing {folder} failed: {error}. {former}.") from error


def check_room(output: Path, module: nn.Module, moments: int, *, best: bool) -> None:
    """Raise CheckpointError where there is no room for one checkpoint of `module`, with so many `moments` of each
    trained weight, and for the `best` weights beside it.
    """
    whole = sum(tensor.numel() * tensor.element_size() for tensor in module.state_dict().values())
    trained = sum(4 * weight.numel() for weight in module.parameters() if weight.requires_grad)
    needed, free = whole * (1 + best) + trained * moments, free_bytes(output)
    if needed > free:
        also = ", and the best weights beside it," if best else ""
        raise CheckpointError(
            f"{output} has {format_bytes(free)} free, and a checkpoint{also} needs {format_bytes(needed)}: make room, "
            "or choose another output"
        )


def rotate(output: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints; 0 keeps all."""
    for _, path in checkpoints(output)[:-keep] if keep else ():
        with suppress(OSError):
            remove_folder(path)


def begin_random(states: Sequence[str], seed: int, rank: int, step: int) -> None:
    """Go on from the state that this rank saved; a rank that had none is seeded, unlike any other at any step."""
    if rank < len(states):
        restore_random(states[rank])
        return
    mixed = int(np.random.SeedSequence([seed, rank, step]).generate_state(1)[0])
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)


def capture_random() -> str:
    """Return all random states as JSON; torch's CUDA state is that of the current device, if CUDA
    is in use.
    """
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    cuda_in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    states = {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": _encode(torch.get_rng_state()),
        "cuda": _encode(torch.cuda.get_rng_state()) if cuda_in_use else None,
    }
    return json.dumps(states)


def restore_random(text: str) -> None:
    """Set all states to those of `capture_random`. A CUDA state is left out where there is no CUDA device."""
    states = json.loads(text)
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(tuple(states["numpy"]))
    torch.set_rng_state(_decode(states["torch"]))
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_decode(states["cuda"]))


@contextmanager
def preserve_random() -> Iterator[None]:
    """Restore all random states at the end."""
    states = capture_random()
    try:
        yield
    finally:
        restore_random(states)


def _encode(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _decode(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
