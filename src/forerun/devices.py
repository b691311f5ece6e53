"""This module moves tensors between host and device without a wait, and knows what some devices
lack.
"""

from __future__ import annotations

import ctypes
import platform
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from forerun.writing import cache_root, keep, read_kept

WITHOUT_FLOAT64 = {"mps"}  # Types of devices


def widest(device: torch.device) -> torch.dtype:
    """Return the float type for sums and draws: float64, or float32 where a device has no float64."""
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def processor_name() -> str:
    """Return the product name of this machine's CPU, or its architecture where no name is known."""
    return _read_cpuinfo().get("model name") or platform.processor() or platform.machine()


def processor_flags() -> set[str]:
    """Return the instruction sets that Linux says this machine's CPU has; none elsewhere."""
    info = _read_cpuinfo()
    return set(info.get("flags", info.get("Features", "")).split())  # x86's name, or Arm's


def _read_cpuinfo() -> dict[str, str]:
    """Return what Linux says of the first processor; empty elsewhere."""
    path = Path("/proc/cpuinfo")
    first = path.read_text(encoding="utf-8", errors="replace").split("\n\n")[0] if path.is_file() else ""
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def device_name(device: torch.device) -> str:
    """Return the product's name of a device, if it is known."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return processor_name() if device.type == "cpu" else str(device)


def measure_once(name: str, measure: Callable[[], Any]) -> Any:
    """Return what `measure` returns, a JSON value, measured once per machine and kept in the cache folder.

    The key is `name`, the processor, the number of threads and torch's version. The next start reads the
    kept value, so that it decides as this one did.
    """
    path = cache_root() / "machine.json"
    key = f"{name}; {processor_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    content = read_kept(path)
    measured = content if isinstance(content, dict) else {}
    if key not in measured:
        measured[key] = measure()
        keep(path, measured, name)
    return measured[key]


def one_dnn() -> bool:
    """Return whether torch has oneDNN and it is switched on."""
    return bool(torch._C._has_mkldnn and torch.backends.mkldnn.enabled)


def multiplies(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a device has fast matrix products of that dtype, at the sizes that training uses.

    A CPU may only emulate bfloat16 and float16, and then takes three to ten times as long as in float32;
    this is measured once and kept.
    """
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return True
    return one_dnn() and _takes_of_float32(dtype) < EMULATED


EMULATED = 1.5  # Times that a dtype takes of float32's from which on it is emulated: 0.3 to 0.6 and 3.6 to 14 were seen


@cache
def _takes_of_float32(dtype: torch.dtype) -> float:
    """Return the time of a training product in that dtype as a multiple of its time in float32,
    measured once and kept.
    """
    return float(measure_once(f"products of training in {dtype} on one thread", lambda: _measure_takes(dtype)))


def _measure_takes(dtype: torch.dtype) -> float:
    """Measure that multiple, which takes some hundredths of a second."""
    ones = [(torch.ones(256, 768, dtype=kind), torch.ones(768, 768, dtype=kind)) for kind in (dtype, torch.float32)]
    own, float32 = time_in_turns([partial(torch.matmul, *pair) for pair in ones], 3, threads=1)
    return min(own) / min(float32)


@torch.inference_mode()
def time_in_turns(
    runs: Sequence[Callable[[], object]], repeats: int, *, threads: int | None = None
) -> list[list[float]]:
    """Return the seconds that each of these took, so many times. They take turns, so that other work on the machine
    affects all of them.

    Args:
        threads: None: torch's. On one thread the shortest times are right beside any other work; several wait for each
            other as long as that takes one of their cores.
    """
    times, before = [list[float]() for _ in runs], torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        for _ in range(repeats):
            for taken, run in zip(times, runs, strict=True):
                began = time.perf_counter()
                run()
                taken.append(time.perf_counter() - began)
    finally:
        torch.set_num_threads(before)
    return times


def trim_heap() -> None:
    """Give memory that was freed here back to the system; glibc would keep it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def send(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Send tensors of the host to a device in one copy from pinned memory, without waiting for it."""
    return list(tensors) if device.type == "cpu" else unpack(send_packed(tensors, device), tensors)


def send_packed(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Send tensors to a device as the bytes of all of them in one tensor, which `unpack` takes
    apart.
    """
    packed = _pack(tensors)
    if device.type == "cuda":
        packed = packed.pin_memory()
    return packed.to(device, non_blocking=True)


def fetch(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Fetch tensors of one device to the host in one transfer."""
    return list(tensors) if tensors[0].device.type == "cpu" else unpack(_pack(tensors).cpu(), tensors)


def send_ints(values: Sequence[int], device: torch.device) -> Tensor:
    """Send integers to a device as an int64 tensor, (N,), without waiting for it."""
    return send([torch.tensor(values, dtype=torch.int64)], device)[0]


@cache
@torch.inference_mode(mode=False)
def constant(values: tuple[int, ...], device: torch.device) -> Tensor:
    """Return an int64 tensor (N,) on a device that was sent there once, so that a level that reads it never waits.

    Never write to it. None is ever dropped, because a recorded CUDA graph reads it where it lies.
    """
    return torch.tensor(values, dtype=torch.int64, device=device)


class Together:
    """A context of the whole process that the first thread enters and the last one leaves."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._inside = 0
        self._open: AbstractContextManager[Any] = nullcontext()

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._open = self._make()
                self._open.__enter__()
            self._inside += 1

    def __exit__(self, *_error: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._open.__exit__(None, None, None)


# Which kernels torch may take is one setting for all threads: each putting back what it found would mix them up.
_ANY_SHAPE = Together(
    lambda: sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
)


def attention_kernels(device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which attention runs in kernels that take any shape at once. cuDNN plans
    each new shape for 0.4 s.
    """
    return _ANY_SHAPE if device.type == "cuda" else nullcontext()


def rows_of(values: Tensor, rows: Sequence[int]) -> Tensor:
    """Return the entries `rows` of the first dimension, in that order; `values` itself where these
    are all.
    """
    if list(rows) == list(range(len(values))):
        return values
    return values.index_select(0, send_ints(rows, values.device))


def _pack(tensors: Sequence[Tensor]) -> Tensor:
    """Return the bytes of all tensors in one, widest types first, so that each tensor is aligned."""
    return torch.cat([tensors[index].contiguous().view(-1).view(torch.uint8) for index in _order(tensors)])


def unpack(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors that `packed` holds, with the dtypes and shapes of `like` and in its
    order.
    """
    tensors = list(like)
    start = 0
    for index in _order(like):
        tensor = like[index]
        tensors[index] = packed[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        start += tensor.nbytes
    return tensors


def _order(tensors: Sequence[Tensor]) -> list[int]:
    return sorted(range(len(tensors)), key=lambda index: -tensors[index].element_size())
