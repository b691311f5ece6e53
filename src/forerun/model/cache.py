"""A KV cache of rows and slots: every row has its own length, and an accepted path is gathered into
place.

On a CPU a slot takes memory when it is first written. transformers calls `SlotCache.update` and, in some families,
`get_seq_length`. Sliding layers keep all slots.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from forerun.devices import send
from forerun.errors import OutOfMemoryError
from forerun.model.inputs import Flat, current


@dataclass(frozen=True, slots=True)
class _Window:
    """The slots that the coming pass writes its tokens to and that its layers may read, on one
    device.
    """

    flat: Tensor  # (M,) int64 index into (rows * slots): where each token is written
    rows: Tensor  # (B,) int64 rows to read
    span: tuple[int, int] | None  # Their first and their number where they follow each other; None: scattered
    select: bool  # Whether `read` selects scattered ones; else all rows are read
    width: int
    before: int  # Slots before the tokens of the pass, in the longest row

    def read(self, store: Tensor) -> Tensor:
        """Return (B, heads, width, dim) of `store` (rows, slots, heads, dim); a copy where
        scattered rows are selected.
        """
        seen = store.narrow(1, 0, self.width)
        if self.span is not None:
            seen = seen.narrow(0, *self.span)
        elif self.select:
            seen = seen.index_select(0, self.rows)
        return seen.transpose(1, 2)


class _Indexed:
    """Describes a layer of an index that turns keys by their positions (Qwen4)."""

    @property
    def indexer_position_ids(self) -> Tensor:
        """(3, B, W) the positions of the keys, behind which the model puts those of its tokens."""
        keys: Tensor = current().positions.keys
        return keys.expand(3, -1, -1)

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Tensor) -> None:
        """Keep nothing: a pass knows its positions."""


class _NoLayers(Sequence[Any]):
    """transformers' own layers of a cache, of which there are none here; what runs a layer twice counts them."""

    def __len__(self) -> int:
        return 0

    def __getitem__(self, layer: Any) -> Any:
        return _Indexed()

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class SlotCache:
    """Keys and values of `rows` sequences with `slots` tokens each, allocated as layers are first seen."""

    is_compileable = True
    is_sliding: Sequence[bool] = ()

    def __init__(self, rows: int, slots: int) -> None:
        self.rows = rows
        self.slots = slots
        self.dump = slots  # The slot behind the last: padding is written there and nothing reads it
        self._touched = [0] * rows  # Slots of each row that passes may have written to since they were last zero
        self._used = [0] * rows  # Slots of each row that were ever written to
        self._stores: dict[int, tuple[Tensor, Tensor]] = {}
        self._indices: dict[int, Tensor] = {}  # Keys of indexed layers (rows, slots + 1, 1, dim)
        self._groups: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}
        self._windows: dict[torch.device, _Window] = {}
        none = torch.zeros(0, dtype=torch.int64)
        self._window = _Window(none, none, (0, 0), True, 0, 0)
        self.layers = _NoLayers()
        _CACHES.add(self)

    def begin(
        self,
        rows: Sequence[int],
        slot_ids: Tensor,
        width: int,
        *,
        index: Tensor | None = None,
        real: Flat | None = None,
        select: bool = True,
        anywhere: bool = False,
    ) -> None:
        """Announce a pass over `rows`: token (b, n) goes to ``slot_ids[b, n]`` (B, N), `width` slots are read.

        Args:
            index: (B,) the rows, where the caller has them on the device of `slot_ids`.
            real: these tokens run behind each other: `update` is handed them alone.
            select: scattered rows are copied for the layers; else these are given all rows, see `unselected`.
            anywhere: take rows for scattered ones even where they follow each other, as a recording for any rows must.
        """
        if index is None:
            index = torch.tensor(rows, dtype=torch.int64, device=slot_ids.device)
        places = self._places(index, slot_ids)
        flat = (places if real is None else real.flatten(places)).flatten()
        before = width - slot_ids.shape[1]
        first, count = rows[0], len(rows)
        scattered = anywhere or list(rows) != list(range(first, first + count))
        self._window = _Window(flat, index, None if scattered else (first, count), select, width, before)
        self._windows = {flat.device: self._window}

    def go_on(self, slot_ids: Tensor) -> None:
        """Announce another pass over the same rows and width: token (b, n) goes to ``slot_ids[b,
        n]`` (B, N).
        """
        self._window = replace(self._window, flat=self._places(self._window.rows, slot_ids).flatten())
        self._windows = {slot_ids.device: self._window}

    @property
    def unselected(self) -> Tensor | None:
        """(B,) the rows of the pass among all rows, if layers are given all rows; None if they are
        given the pass's rows alone.
        """
        return self._window.rows if self._window.span is None and not self._window.select else None

    @property
    def copies_rows(self) -> bool:
        """True if layers are given copies of the pass's rows, which do not follow each other."""
        return self._window.span is None and self._window.select

    def get_seq_length(self, _layer_idx: int = 0) -> int:
        """Return the tokens before those of the pass, as transformers asks for them: one number,
        that of the longest row. Masks and positions are passed explicitly, so nothing is placed by
        this number.
        """
        return self._window.before

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return `get_seq_length`."""
        return self.get_seq_length(layer_idx)

    def get_mask_sizes(self, _queries: int, _layer_idx: int = 0) -> tuple[int, int]:
        """Return the number of keys that a layer is given, and the place of the first."""
        return self._window.width, 0

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values (`write`) and return what the layer may read: (B, heads, width,
        dim).
        """
        self.write(keys, values, layer_idx)
        return self.seen(layer_idx)

    def get_conv_state(self, _layer_idx: int, _state_idx: int = 0, **_kwargs: object) -> None:
        """Return None: a layer is not to read its state itself, see `model.states`."""

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return None, as `get_conv_state` does, and note which state the layer is about to run."""
        current().states.enter(layer_idx, state_idx)

    def update_conv_state(self, values: Tensor, layer_idx: int, state_idx: int = 0, **_kwargs: object) -> Tensor:
        """Note which state the layer is about to run, and return its `values`."""
        current().states.enter(layer_idx, state_idx)
        return values

    def update_recurrent_state(self, state: Tensor, _layer_idx: int = 0, **_kwargs: object) -> Tensor:
        """Return the `state`: what the layer's recurrence said was kept when it ran."""
        return state

    def update_indexer(self, keys: Tensor, layer_idx: int) -> Tensor:
        """Write the keys (B, N, dim) by which an indexed layer chooses what it attends to, and return those of the
        tokens that it may choose from (B, width, dim).
        """
        if layer_idx not in self._indices:
            self._indices[layer_idx] = self._allocate((1, keys.shape[2]), keys)
        store, window = self._indices[layer_idx], self._on(keys.device)
        store.flatten(0, 1).index_copy_(0, window.flat, keys.flatten(0, 1).unsqueeze(1).to(store.dtype))
        return window.read(store).squeeze(1)

    def write(self, keys: Tensor, values: Tensor, layer_idx: int) -> None:
        """Write the keys and values of the pass, (B, heads, N, dim) or (1, heads, M, dim)."""
        flat = self._on(keys.device).flat
        stores = self._of(layer_idx, keys.shape[1::2], values.shape[1::2], keys)
        for store, new in zip(stores, (keys, values), strict=True):
            store.flatten(0, 1).index_copy_(0, flat, new.transpose(1, 2).flatten(0, 1).to(store.dtype))

    def stores_for(
        self, layers: tuple[int, ...], shape: tuple[int, int], *, like: Tensor
    ) -> list[tuple[Tensor, Tensor]]:
        """Return the stores of keys and values (rows, slots + 1, heads, dim) of layers that write them themselves,
        the same list every time. They are allocated at the first call for the `shape` (heads, dim) with the dtype and
        device of `like`.
        """
        if layers not in self._groups:
            self._groups[layers] = [self._of(layer, shape, shape, like) for layer in layers]
        return self._groups[layers]

    def places(self, device: torch.device) -> Tensor:
        """Return where each token of the pass goes, (M,) int64 on `device`."""
        return self._on(device).flat

    def seen(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values that a layer may read in this pass: (B, heads, width, dim)."""
        keys, values = self._stores[layer_idx]
        window = self._on(keys.device)
        return window.read(keys), window.read(values)

    def move(self, rows: Sequence[int], sources: Sequence[Sequence[int]], starts: Sequence[int]) -> None:
        """Copy, in each row and every layer, the slots ``sources[i]`` to ``starts[i]``, ``starts[i]
        + 1``, ...
        """
        stride = self.slots + 1
        source = [row * stride + slot for row, slots in zip(rows, sources, strict=True) for slot in slots]
        target = [
            row * stride + start + offset
            for row, slots, start in zip(rows, sources, starts, strict=True)
            for offset in range(len(slots))
        ]
        if source == target:
            return
        index = torch.tensor([source, target], dtype=torch.int64)
        placed: dict[torch.device, Tensor] = {}
        for store in self._tensors():
            if store.device not in placed:
                placed[store.device] = send([index], store.device)[0]
            here, flat = placed[store.device], store.flatten(0, 1)
            flat.index_copy_(0, here[1], flat.index_select(0, here[0]))

    def touch(self, rows: Sequence[int], ends: Sequence[int]) -> None:
        """Record that a pass may write to the slots of these rows before `ends`."""
        for row, end in zip(rows, ends, strict=True):
            self._touched[row] = max(self._touched[row], end)
            self._used[row] = max(self._used[row], end)

    @torch.inference_mode()
    def clear(self, row: int, start: int) -> int:
        """Zero a row's slots from `start` on, and return how many of them a pass may have written
        to. A mask is added to scores, so NaN or infinity of a token that a query may not see would
        reach it all the same.
        """
        count = max(0, self._touched[row] - start)
        if count:
            for store in self._tensors():
                store[row, start : start + count] = 0
            self._touched[row] = start
        return count

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` slots of row `source` to row `target`."""
        self.touch([target], [length])
        for store in self._tensors():
            store[target, :length] = store[source, :length]

    def read(self, layer: int, row: int, length: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values (length, heads, dim) of one row, for tests and inspection."""
        keys, values = self._stores[layer]
        return keys[row, :length], values[row, :length]

    def nbytes(self) -> int:
        """Return the bytes of all rows and slots, written or not."""
        return sum(store.nbytes for store in self._tensors())

    def untouched_bytes(self) -> int:
        """Return the bytes of the slots on the CPU that were never written: allocated, but not yet
        backed by memory.
        """
        allocated = sum(store.nbytes for store in self._tensors() if store.device.type == "cpu")
        return allocated - allocated * sum(self._used) // (self.rows * (self.slots + 1))

    def _places(self, rows: Tensor, slot_ids: Tensor) -> Tensor:
        return rows.unsqueeze(1) * (self.slots + 1) + slot_ids

    def _tensors(self) -> list[Tensor]:
        return [*(store for pair in self._stores.values() for store in pair), *self._indices.values()]

    def _on(self, device: torch.device) -> _Window:
        if device not in self._windows:
            here = self._window
            self._windows[device] = replace(here, flat=here.flat.to(device), rows=here.rows.to(device))
        return self._windows[device]

    def reserve(self, other: SlotCache) -> None:
        """Allocate what another cache of the same model had to allocate, so that OutOfMemoryError
        is raised now and not later.
        """
        for layer, pair in other._stores.items():
            self._of(layer, pair[0].shape[2:], pair[1].shape[2:], pair[0])
        for layer, store in other._indices.items():
            self._indices[layer] = self._allocate(store.shape[2:], store)

    def _of(self, layer: int, keys: Sequence[int], values: Sequence[int], like: Tensor) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values. They are allocated at the first call, with (heads, dim)
        of each and the dtype and device of `like`.
        """
        if layer not in self._stores:
            self._stores[layer] = (self._allocate(keys, like), self._allocate(values, like))
        return self._stores[layer]

    def _allocate(self, size: Sequence[int], like: Tensor) -> Tensor:
        """Return zeros (heads, dim) for every slot. Uninitialised memory would not do: a masked NaN
        is still a NaN.
        """
        shape = (self.rows, self.slots + 1, *size)
        try:
            return _zeros(shape, like)
        except (RuntimeError, MemoryError, OSError) as error:
            if isinstance(error, RuntimeError) and "memory" not in str(error).lower():
                raise
            needed = like.element_size() * prod(shape)
            raise OutOfMemoryError(
                f"no room on {like.device} for the KV cache: half a layer needs {needed / 2**20:.0f} MiB more "
                f"({self.rows} rows x {self.slots} slots), {self.nbytes() / 2**20:.0f} are there. Lower rows or slots."
            ) from error


_CACHES: WeakSet[SlotCache] = WeakSet()


def promised_bytes() -> int:
    """Return the bytes that the caches of this process may still take on the CPU, and that are
    therefore not free for others.
    """
    return sum(cache.untouched_bytes() for cache in list(_CACHES))


def _zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return zeros of the dtype and device of `like`. On a CPU these are the system's zero pages,
    which take memory only when written, where ``torch.zeros`` writes them all; pages are small, so
    that a row of a few tokens takes little. Raises OSError if the system refuses.
    """
    size = prod(shape)
    if like.device.type != "cpu" or not size or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(shape, dtype=like.dtype, device=like.device)
    pages = mmap.mmap(-1, size * like.element_size(), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):  # A kernel without huge pages
            pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=like.dtype).view(shape)
