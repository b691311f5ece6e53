"""Transfers between host and device without a wait, and what some devices lack."""

from __future__ import annotations

import ctypes
import platform
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from forerun.caching import cache_root, keep, read_kept

WITHOUT_FLOAT64 = {"mps"}  # Types of devices


def widest(device: torch.device) -> torch.dtype:
    """The float type for sums and draws: float64, and float32 where a device has none."""
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def processor_name() -> str:
    """The product's name of this machine's CPU where it can be had."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8", errors="replace") if info.exists() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def kept_here(name: str, measure: Callable[[], Any]) -> Any:
    """Return what was measured under that name on this processor before, with as many threads and this torch; else
    what `measure` returns, a JSON value, which is kept in the cache folder: the next start decides as this one did."""
    path = cache_root() / "machine.json"
    key = f"{name}; {processor_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    found = read_kept(path)
    kept = found if isinstance(found, dict) else {}
    if key not in kept:
        kept[key] = measure()
        keep(path, kept, name)
    return kept[key]


def one_dnn() -> bool:
    """Whether torch has oneDNN, and it is switched on."""
    return bool(torch._C._has_mkldnn and torch.backends.mkldnn.enabled)


def multiplies(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a device has fast matrix products of that dtype, of the sizes of training. A CPU may only emulate
    bfloat16 and float16, and takes three to ten times as long then as in float32: measured once and kept."""
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return True
    return one_dnn() and _takes_of_float32(dtype) < EMULATED


EMULATED = 1.5  # Times that a dtype takes of float32's from which on it is emulated: 0.3 to 0.6 and 3.6 to 14 were seen


@cache
def _takes_of_float32(dtype: torch.dtype) -> float:
    """What a product of training takes, in parts of what it takes in float32."""
    return float(kept_here(f"products of training in {dtype}", lambda: _measured_takes(dtype)))


def _measured_takes(dtype: torch.dtype) -> float:
    """As `_takes_of_float32`, in some hundredths of a second."""
    times = {torch.float32: list[float](), dtype: list[float]()}
    with torch.inference_mode():
        for _ in range(3):
            for kind, taken in times.items():
                left, right = torch.ones(256, 768, dtype=kind), torch.ones(768, 768, dtype=kind)
                began = time.perf_counter()
                left @ right
                taken.append(time.perf_counter() - began)
    return min(times[dtype]) / min(times[torch.float32])


def trim_heap() -> None:
    """Give back to the system what was freed here, which glibc would keep."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def sent(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors of the host on a device: packed into one copy, from pinned memory, that nobody waits for."""
    return list(tensors) if device.type == "cpu" else unpacked(sent_packed(tensors, device), tensors)


def sent_packed(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """As `sent`, but as the bytes of all in one tensor, which `unpacked` takes apart."""
    packed = _packed(tensors)
    if device.type == "cuda":
        packed = packed.pin_memory()
    return packed.to(device, non_blocking=True)


def fetched(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of one device on the host, in one transfer."""
    return list(tensors) if tensors[0].device.type == "cpu" else unpacked(_packed(tensors).cpu(), tensors)


def sent_ints(values: Sequence[int], device: torch.device) -> Tensor:
    """(N,) int64 of integers, as `sent`."""
    return sent([torch.tensor(values, dtype=torch.int64)], device)[0]


@cache
@torch.inference_mode(mode=False)
def constant(values: tuple[int, ...], device: torch.device) -> Tensor:
    """(N,) int64 on a device, taken there once: a level that needs it does not wait for the host. Never write to it.
    None is ever dropped: a recording reads it where it lies."""
    return torch.tensor(values, dtype=torch.int64, device=device)


class Together:
    """A context of the whole process that several threads may have open: entered by the first, left by the last."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make, self._lock, self._inside = make, threading.Lock(), 0
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
    """While open, attention runs in kernels that take any shape at once. cuDNN plans each new shape for 0.4 s."""
    return _ANY_SHAPE if device.type == "cuda" else nullcontext()


def rows_of(values: Tensor, rows: Sequence[int]) -> Tensor:
    """The entries `rows` of the first dimension, in that order; `values` itself where these are all."""
    if list(rows) == list(range(len(values))):
        return values
    return values.index_select(0, sent_ints(rows, values.device))


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    """Their bytes, those of wide types first, so that each tensor is aligned."""
    return torch.cat([tensors[index].contiguous().view(-1).view(torch.uint8) for index in _order(tensors)])


def unpacked(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, of the dtypes and shapes of `like`, in its order."""
    found, start = list(like), 0
    for index in _order(like):
        one = like[index]
        found[index] = packed[start : start + one.nbytes].view(one.dtype).view(one.shape)
        start += one.nbytes
    return found


def _order(tensors: Sequence[Tensor]) -> list[int]:
    return sorted(range(len(tensors)), key=lambda index: -tensors[index].element_size())
