"""Training checkpoints: what they hold, how they are written, and how they come back on any number of processes.

``checkpoint-<step>/`` has ``model.safetensors`` (trainable parts float32), ``optimizer.safetensors`` (one tensor per
parameter and kind, ``<parameter>|<kind>``), ``random.json`` (per process) and ``state.json``. No pickle. Everything is
stored whole, whatever the number of processes, so another number can read it.
"""

from __future__ import annotations

import base64
import json
import random
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from forerun.writing import remove_folder, written_folder

FORMAT = 1
CHECKPOINT, BEST = re.compile(r"checkpoint-(\d+)"), "best"
MODEL, OPTIMIZER, RANDOM, STATE = "model.safetensors", "optimizer.safetensors", "random.json", "state.json"
Optimizers = Iterable[torch.optim.Optimizer]


@dataclass(kw_only=True, slots=True)
class Progress:
    """How far training has come. Changes with every step."""

    step: int = 0
    """Optimizer steps done."""
    position: int = 0
    """Batches read, which is where the data go on."""
    tokens: int = 0
    """Tokens seen by all processes, padding not counted."""
    evaluated: int = 0
    """Step of the last evaluation."""
    best: float | None = None
    """Best value of the deciding metric so far; higher is better."""
    best_step: int | None = None
    """Step of that value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """What a checkpoint says about itself."""

    path: Path
    progress: Progress
    random: list[str]
    """Per process that wrote it, the text of `capture_random`."""
    recipe: Mapping[str, Any] | None
    """What decided what was trained, by key; none in checkpoints of an older forerun."""


def whole(tensor: Tensor) -> Tensor:
    """A detached, full, contiguous copy on the CPU (or the tensor itself). All processes must call it if sharded."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.cpu().contiguous()


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """name -> full tensor on the CPU, of parameters and persistent buffers; tied ones once, by their first name."""
    seen: set[int] = set()
    weights: dict[str, Tensor] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            # A copy: views of one storage, which safetensors refuses, become tensors of their own.
            weights[name] = whole(tensor).clone()
    return weights


def optimizer_tensors(module: nn.Module, optimizers: Optimizers) -> dict[str, Tensor]:
    """``<parameter>|<kind>`` -> full tensor on the CPU."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    found: dict[str, Tensor] = {}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for kind, value in sorted(state.items()):
                found[f"{names[id(parameter)]}|{kind}"] = whole(value).clone()
    return found


def save(
    output: Path,
    module: nn.Module,
    optimizers: Optimizers,
    progress: Progress,
    parallel: Parallel,
    notes: Mapping[str, Any],
) -> Path:
    """Write ``output/checkpoint-<step>``, with `notes` (the recipe) in its ``state.json``; all processes must call it.

    Raises:
        CheckpointError: the disk is full, or refuses; earlier checkpoints are intact.
    """
    weights, moments = weights_of(module), optimizer_tensors(module, optimizers)
    states = parallel.collect(capture_random())
    record = {"format": FORMAT, "world": parallel.world, "progress": asdict(progress), **notes}

    def fill(folder: Path) -> None:
        save_file(weights, folder / MODEL, metadata={"format": "pt"})
        save_file(moments, folder / OPTIMIZER)
        (folder / RANDOM).write_text(json.dumps(states), encoding="utf-8")
        (folder / STATE).write_text(json.dumps(record, indent=1), encoding="utf-8")

    return parallel.on_first(lambda: write_directory(output / f"checkpoint-{progress.step}", fill))


def save_best(output: Path, module: nn.Module, parallel: Parallel, step: int, values: Mapping[str, float]) -> Path:
    """Write the weights alone to ``output/best``, with ``best.json``; all processes must call it.

    Raises:
        CheckpointError: the disk is full, or refuses; the former best is intact.
    """
    weights = weights_of(module)

    def fill(folder: Path) -> None:
        save_file(weights, folder / MODEL, metadata={"format": "pt"})
        record = {"step": step, "values": dict(values)}
        (folder / "best.json").write_text(json.dumps(record, indent=1), encoding="utf-8")

    return parallel.on_first(lambda: write_directory(output / BEST, fill))


def read(path: Path) -> Saved:
    """What `path` says about itself; tensors stay on disk.

    Raises:
        CheckpointError: missing files, broken JSON, or a format that is not ours.
    """
    try:
        record = json.loads((path / STATE).read_text(encoding="utf-8"))
        states = json.loads((path / RANDOM).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is no complete training checkpoint: {error}. Remove the directory to resume from the one before."
        ) from error
    if record.get("format") != FORMAT:
        raise CheckpointError(f"{path} has format {record.get('format')!r}; this version of forerun reads {FORMAT}.")
    progress = Progress(**record["progress"])
    return Saved(path=path, progress=progress, random=states, recipe=record.get("recipe"))


def load_weights(path: Path, module: nn.Module) -> None:
    """Fill `module`, not yet sharded, from a checkpoint or ``best/``.

    Raises:
        CheckpointError: a missing, unknown or misshapen tensor, by name.
    """
    stored = _load(path / MODEL)
    own = module.state_dict(keep_vars=True)
    first_name: dict[int, str] = {}
    for name, tensor in own.items():
        first_name.setdefault(id(tensor), name)
    expected = {name: own[name] for name in first_name.values()}
    _refuse_differences(path / MODEL, expected, stored)
    with torch.no_grad():
        for name, tensor in expected.items():
            tensor.copy_(stored[name])


def load_optimizers(path: Path, module: nn.Module, optimizers: Optimizers, parallel: Parallel) -> None:
    """Fill the optimizers of `module`, already sharded; all processes must call it, the first one reads.

    Raises:
        CheckpointError: the checkpoint was written by another optimizer, or for other parameters.
    """
    stored = _shared(path, parallel)
    parameters = dict(module.named_parameters())
    by_parameter: dict[int, dict[str, Tensor]] = {}
    for name, value in stored.items():
        parameter_name, _, kind = name.rpartition("|")
        if parameter_name not in parameters:
            raise CheckpointError(f"{path / OPTIMIZER} holds {name}, but no such parameter is trained.")
        parameter = parameters[parameter_name]
        if value.ndim and value.shape != parameter.shape:
            shapes = f"{tuple(value.shape)}, the parameter {tuple(parameter.shape)}"
            raise CheckpointError(f"{path / OPTIMIZER}: {name} has shape {shapes}.")
        by_parameter.setdefault(id(parameter), {})[kind] = shard_like(value, parameter) if value.ndim else value
    for optimizer in optimizers:
        owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        state = {index: by_parameter.pop(id(p)) for index, p in enumerate(owned) if id(p) in by_parameter}
        _refuse_other_kinds(path, optimizer, state.values())
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    if by_parameter:
        raise CheckpointError(f"{path / OPTIMIZER} holds state of parameters that are frozen now.")


def _refuse_other_kinds(path: Path, optimizer: torch.optim.Optimizer, states: Iterable[Mapping[str, Tensor]]) -> None:
    """Refuse Muon's state for AdamW, or the reverse: torch would load it and break at the next step."""
    muon = isinstance(optimizer, torch.optim.Muon)
    if any(("momentum_buffer" in state) != muon for state in states):
        raise CheckpointError(
            f"{path} was trained with another optimizer than the settings say; set optimizer to the former one, "
            "or begin a new output directory."
        )


def _shared(path: Path, parallel: Parallel) -> dict[str, Tensor]:
    """The first process's tensors on all, so that only its disk needs the file."""
    stored: dict[str, Tensor] = {}

    def describe() -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        stored.update(_load(path / OPTIMIZER))
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in stored.items()}

    received: dict[str, Tensor] = {}
    for name, (shape, dtype) in parallel.on_first(describe).items():
        blank = torch.empty(shape, dtype=dtype, device=parallel.device)
        tensor = stored[name].to(parallel.device) if parallel.first else blank
        received[name] = parallel.broadcast(tensor).cpu()
    return received


def _load(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}. Remove its directory to resume from the checkpoint before."
        ) from error


def _refuse_differences(path: Path, expected: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> None:
    missing, unknown = sorted(expected.keys() - stored.keys()), sorted(stored.keys() - expected.keys())
    if missing or unknown:
        raise CheckpointError(f"{path}: missing tensors {missing}, unknown tensors {unknown}; it is of another module.")
    for name, tensor in expected.items():
        if tensor.shape != stored[name].shape:
            shapes = f"{tuple(stored[name].shape)}, the module wants {tuple(tensor.shape)}"
            raise CheckpointError(f"{path}: {name} has shape {shapes}.")


def checkpoints(output: Path) -> list[tuple[int, Path]]:
    """(step, directory) of the complete checkpoints in `output`, oldest first."""
    if not output.is_dir():
        return []
    found = [(CHECKPOINT.fullmatch(path.name), path) for path in output.iterdir() if path.is_dir()]
    return sorted((int(match.group(1)), path) for match, path in found if match)


def latest(output: Path) -> Path | None:
    """The newest complete checkpoint, or none."""
    found = checkpoints(output)
    return found[-1][1] if found else None


def write_directory(folder: Path, fill: Callable[[Path], None]) -> Path:
    """Let `fill` write into a fresh directory that takes the place of `folder`.

    Raises:
        CheckpointError: the disk is full, or refuses; what was there before is untouched.
    """
    try:
        with written_folder(folder) as fresh:
            fill(fresh)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(_refused(folder, error)) from error
    return folder


def rotate(output: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints; 0 keeps all."""
    for _, path in checkpoints(output)[:-keep] if keep else ():
        with suppress(OSError):
            remove_folder(path)


def _refused(folder: Path, error: Exception) -> str:
    previous = latest(folder.parent)
    kept = f"{previous} is intact" if previous else "there was no earlier checkpoint"
    try:
        free = f"{shutil.disk_usage(folder.parent).free / 2**20:.0f} MiB free"
    except OSError:
        free = "free space unknown"
    return (
        f"Writing {folder} failed: {error} ({free}). Nothing saved before was touched: {kept}. "
        "Make room or choose another output, then start the same command again: it resumes."
    )


def seed_all(seed: int, rank: int, step: int = 0) -> None:
    """Seed every generator from the three numbers; processes and steps get unrelated streams."""
    mixed = int(np.random.SeedSequence([seed, rank, step]).generate_state(1)[0])
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)


def begin_random(states: Sequence[str], seed: int, rank: int, step: int) -> None:
    """Go on from the state that this rank saved; a rank that had none (more processes than before) is seeded."""
    if rank < len(states):
        restore_random(states[rank])
    else:
        seed_all(seed, rank, step)


def capture_random() -> str:
    """All states as JSON; torch's CUDA state is that of the current device, if CUDA is in use."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    cuda_in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    states = {
        "python": [version, list(words), gauss],
        "numpy": [kind, [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        "torch": _encode(torch.get_rng_state()),
        "cuda": _encode(torch.cuda.get_rng_state()) if cuda_in_use else None,
    }
    return json.dumps(states)


def restore_random(text: str) -> None:
    """Set all states to those of `capture_random`. A CUDA state is left out where there is no CUDA device."""
    states = json.loads(text)
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_decode(states["torch"]))
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_decode(states["cuda"]))


@contextmanager
def random_preserved() -> Iterator[None]:
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
