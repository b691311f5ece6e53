"""Work on a device that is recorded once and then replayed: one launch for a whole pass, not one an
operation.

A recording has fixed shapes, fixed addresses and a fixed course, so work is known by a key that settles all three; what
differs from call to call comes in tensors. Where nothing records, work simply runs.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from forerun.devices import send, send_packed, unpack
from forerun.errors import warn_once

_log = logging.getLogger(__name__)

Made = TypeVar("Made")
Work = Callable[..., Any]  # Maps tensors on one device to tensors there; neither reads nor copies a value on the host
Record = Callable[[Work, tuple[Tensor, ...]], Work]
"""Maps (work, inputs like those that it will be given) to the same work, recorded; its result lives
until the next call.
"""

_MOST = 64  # Recordings that are kept where nobody says otherwise; the one that was used least lately goes
MET_BEFORE = 3  # How often what comes in many shapes is to be met before it is recorded
_MOST_MET = 4096  # Keys whose meetings are counted
_WARM_UPS = 2
FREE = 64  # Tokens of all rows that a pass is padded to without being asked
LEAST_WIDTH = 256  # Slots of a cache that a recorded pass reads at least, or twice, four times, ... as many


class Recordings:
    """The recordings of one device, made by `record`. If that is None, or a recording or its replay has failed, work
    runs unrecorded.
    """

    def __init__(self, record: Record | None) -> None:
        self._record = record
        self.most = _MOST
        self._known: OrderedDict[Hashable, Work] = OrderedDict()
        self._met: Counter[Hashable] = Counter()

    @classmethod
    def on(cls, device: torch.device) -> Recordings:
        """Return recordings as CUDA graphs on CUDA, else none."""
        return cls(CudaGraphs(device) if device.type == "cuda" else None)

    @property
    def active(self) -> bool:
        """True if anything is ever recorded."""
        return self._record is not None

    def __len__(self) -> int:
        return len(self._known)

    def run(self, key: Hashable | None, work: Work, *inputs: Tensor, after: int = 0) -> Any:
        """Run `work` on the inputs, recorded under `key`, which must always mean the same work on
        the same shapes. Without a key it is not recorded, and with one only once it was met `after`
        times: keys may be many, of which few come again.
        """
        if self._record is None or key is None:
            return work(*inputs)
        if key not in self._known and self._met[key] < after:
            if len(self._met) > _MOST_MET:
                self._met.clear()
            self._met[key] += 1
            return work(*inputs)
        try:
            if key not in self._known:
                self._known[key] = self._record(work, inputs)
            self._known.move_to_end(key)
            if len(self._known) > self.most:
                self._known.popitem(last=False)
            return self._known[key](*inputs)
        except Exception as error:
            self._give_up(error)
        return work(*inputs)  # Whole again, whatever was done of it: doing it twice has the effect of doing it once

    def run_sent(
        self,
        key: Hashable | None,
        work: Work,
        host: Sequence[Tensor],
        device: torch.device,
        *inputs: Tensor,
        after: int = 0,
    ) -> Any:
        """Run `work` as `run` does on tensors of the host, which go to the device in one copy, and on inputs there. A
        recording takes that copy as it is: a replay is handed one tensor then, not each.
        """
        if self._record is None or key is None:
            return work(*send(host, device), *inputs)

        def take_apart(packed: Tensor, *others: Tensor) -> Any:
            return work(*unpack(packed, host), *others)

        return self.run(key, take_apart, send_packed(host, device), *inputs, after=after)

    def _give_up(self, error: Exception) -> None:
        """Record nothing any longer and forget what was recorded. A process is told so once: each model and each head
        has recordings of its own, and a driver that refuses one refuses all.
        """
        why = "recording on the device failed, work goes on without, which is slower: %r"
        warn_once(_log, "recordings", why, error)
        self._record = None
        self._known.clear()


_ONE_AT_A_TIME = threading.Lock()
"""Held while a graph is recorded. To begin one, torch waits for the whole device, which is an
error, there and here, while another thread records.
"""


@cache
def _aside(device: torch.device) -> Any:
    """Return the stream on which everything is recorded. There is one for all, because cuBLAS keeps
    memory for every stream that it has seen, 32 MiB on a Hopper.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class CudaGraphs:
    """Records work as `torch.cuda.CUDAGraph`. All share one pool of memory: only the latest result
    is ever looked at.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work, inputs: tuple[Tensor, ...]) -> Work:
        """Record the work, after running it so that what it allocates once is there. Other threads
        may use the device.
        """
        held_inputs = tuple(tensor.clone() for tensor in inputs)
        graph = torch.cuda.CUDAGraph()
        with _ONE_AT_A_TIME, torch.cuda.device(self._device):
            here, aside = torch.cuda.current_stream(), _aside(self._device)
            aside.wait_stream(here)
            try:
                with torch.cuda.stream(aside):
                    for _ in range(_WARM_UPS):
                        work(*held_inputs)
                    with torch.cuda.graph(graph, pool=self._pool, stream=aside, capture_error_mode="thread_local"):
                        result = work(*held_inputs)
            finally:
                here.wait_stream(aside)  # Where it failed, too: the same work is run here next, on the same memory

        def replay(*new_inputs: Tensor) -> Any:
            for held, new in zip(held_inputs, new_inputs, strict=True):
                held.copy_(new)
            graph.replay()
            return result

        return replay


def bucket(size: int) -> int:
    """Return the power of two that holds `size`, so that shapes, and recordings, are few."""
    return 1 << max(size - 1, 0).bit_length()


def round_tokens(tokens: int, rows: int) -> int:
    """Return the tokens per row that a recorded pass runs for `tokens` per row: one, or a power of
    two, at least eight unless all `rows` together would exceed `FREE`. An H200 takes as long for
    eight as for one, and the fewer sizes there are the sooner all are recorded.
    """
    size = bucket(tokens)
    return size if size == 1 else max(size, min(8, FREE // bucket(rows)))


def extend_rows(values: Tensor, more: int) -> Tensor:
    """Extend (B, ..) -> (B + more, ..) by repeating the last row, to fill up a recording's rows."""
    return torch.cat([values, values[-1:].expand(more, *values.shape[1:])]) if more else values


def first_rows(results: Made, count: int) -> Made:
    """Return the first `count` rows of what was made for more rows, a dataclass of tensors (B, ..)."""
    assert is_dataclass(results) and not isinstance(results, type), "what is made is a dataclass"
    values = {part.name: getattr(results, part.name) for part in fields(results)}
    return replace(results, **{name: value[:count] for name, value in values.items() if isinstance(value, Tensor)})


def wide(used: int, slots: int) -> int:
    """Return how many of a cache's `slots` a recorded pass reads if `used` are needed."""
    return min(slots, max(LEAST_WIDTH, bucket(used)))


def recordable(config: Any) -> bool:
    """Return whether a model's passes read nothing on the host: some rotary embeddings look for the
    largest position.
    """
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    by_layer_type = [part for part in rope.values() if isinstance(part, dict)]
    kinds = {str(part.get("rope_type", part.get("type", ""))) for part in (rope, *by_layer_type)}
    return not kinds & {"dynamic", "longrope"}
