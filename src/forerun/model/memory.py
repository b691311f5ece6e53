"""Plans a target's memory: the weights, the KV cache and what a step needs beside them, in bytes."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from forerun.errors import ForerunError, OutOfMemoryError
from forerun.model.cache import promised_bytes
from forerun.model.gguf_files import read_model_header
from forerun.model.layers import device_of, is_spread
from forerun.model.load import INDEX, SINGLE, LoadOptions, read_config, weight_bytes
from forerun.model.masks import FULL, UNMASKED
from forerun.model.names import gguf_file, resolve
from forerun.model.support import context_length, text_config
from forerun.writing import read_object

_log = logging.getLogger(__name__)

SCORED_NODES = 16  # Nodes a row whose logits and float32 probabilities the plan counts
DEFAULT_TOKENS = 8192  # Most tokens of a row where nobody asked for a number and the context is longer
HEADROOM = 129  # Slots behind the context for the nodes of a tree that stands at its end
LEAST_SLOTS = 512  # If memory is short and nobody asked for a number, slots are lowered to this, not further
_GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """The bytes that a target needs on one device."""

    rows: int
    slots: int
    weights: int  # 0 where they are loaded already
    token: int  # KV cache per token of a row, all layers, the drafter's included
    probs: int  # Logits and probabilities of one step
    states: int = 0  # Recurrent states of all rows, with their copies for prefixes
    reserve: int = 0  # For the drafter

    @property
    def cache(self) -> int:
        """KV cache of all rows and slots, including the slot that padding is written to."""
        return self.token * self.rows * (self.slots + 1)

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.probs + self.states + self.reserve

    def check(self, available: int, where: str, halves: MemoryPlan | None = None) -> None:
        """Raise OutOfMemoryError, with what to lower and what would fit, unless the plan fits into `available` bytes.
        `halves` is the same plan in bfloat16, where this one is in float32.
        """
        if self.total <= available:
            return
        advice = list[str]()
        if halves is not None and halves.total <= available:
            advice.append(f"In bfloat16 (dtype='bfloat16') {halves.total / _GIB:.2f} GiB are needed, which fit.")
        if (slots := self.fitting_slots(available)) > 0:
            rows = max(1, slots * self.rows // self.slots)
            lower = f"Lower slots (max_model_len, kv_cache_tokens) to {slots}"
            advice.append(lower + (f", or rows (max_num_seqs) to {rows}." if rows < self.rows else "."))
        elif (rows := self.fitting_rows(available)) > 0:
            advice.append(f"Lower rows (max_num_seqs) to {rows}.")
        elif not advice:
            advice.append('Use a smaller dtype, a quantised checkpoint, or device_map="auto" to offload layers.')
        if self.weights > available - self.reserve:
            room = self._weights_room(available)
            advice.append(f"A model whose weights take {room / _GIB:.2f} GiB would fit with one row of {LEAST_SLOTS}.")
        states = f"recurrent states {self.states / _GIB:.2f}, " if self.states else ""
        raise OutOfMemoryError(
            f"{self.total / _GIB:.2f} GiB are needed on {where}, {available / _GIB:.2f} GiB are free: "
            f"weights {self.weights / _GIB:.2f}, KV cache {self.cache / _GIB:.2f} ({self.rows} rows x {self.slots} "
            f"slots), {states}logits and probabilities {self.probs / _GIB:.2f}, drafter {self.reserve / _GIB:.2f}. "
            f"{' '.join(advice)}"
        )

    def _weights_room(self, available: int) -> int:
        """Return the bytes that weights may take beside one row of few slots."""
        least = self.token * LEAST_SLOTS + (self.probs + self.states) // self.rows + self.reserve
        return max(0, available - least)

    def fitting_slots(self, available: int) -> int:
        """Return the most slots of a row that would fit with as many rows; 0 if none."""
        room = available - self.weights - self.probs - self.states - self.reserve
        return max(0, room // max(1, self.token * self.rows) - 1)

    def fitting_rows(self, available: int) -> int:
        """Return the most rows that would fit with as many slots; 0 if none."""
        fixed = self.weights + self.reserve
        return max(0, (available - fixed) * self.rows // max(1, self.total - fixed))


class Sizes(NamedTuple):
    """The sizes of a cache, and what a drafter needs beside it."""

    rows: int
    slots: int | None  # Slots of a row; None: nobody asked for a number
    reserve: int = 0  # Bytes to leave free
    reserve_per_slot: int = 0  # The same, for each slot of a row


def plan_slots_beside(model: Any, sizes: Sizes) -> int:
    """Return the slots of a row as `plan_slots` does, for a model that is loaded."""
    device = None if is_spread(model) else device_of(model.get_input_embeddings())
    return plan_slots(sizes, text_config(model), device, model.dtype.itemsize)


def plan_slots(
    sizes: Sizes, config: Any, device: torch.device | None, itemsize: int, *, weights: int = 0, states: int = 0
) -> int:
    """Return the slots of a row: fewer than the default where memory is short. Raises OutOfMemoryError if the slots
    asked for do not fit.

    Args:
        sizes: of the cache.
        config: the model's text configuration.
        device: where the model goes. None: on several devices; transformers decides what fits where, and nothing is
            checked before.
        itemsize: bytes of a number in the model's dtype.
        weights: bytes of the weights; 0 where they are loaded already.
        states: bytes of the recurrent states of all rows.
    """
    slots = default_slots(context_length(config)) if sizes.slots is None else sizes.slots
    if device is None:
        return slots
    plan = MemoryPlan(
        rows=sizes.rows,
        slots=slots,
        weights=weights,
        token=cache_bytes_per_token(config, itemsize) + sizes.reserve_per_slot,
        probs=sizes.rows * SCORED_NODES * config.vocab_size * (itemsize + 4),
        states=states,
        reserve=sizes.reserve,
    )
    available = available_bytes(device)
    fitting = plan.fitting_slots(available)
    if sizes.slots is None and LEAST_SLOTS <= fitting < slots:
        _log.warning("%d slots a row instead of %d: the memory of %s ends there", fitting, slots, device)
        return fitting
    in_float32 = itemsize == torch.float32.itemsize
    halves = replace(plan, weights=weights // 2, token=plan.token // 2, probs=plan.probs * 3 // 4, states=states // 2)
    plan.check(available, str(device), halves if in_float32 else None)
    return slots


def default_slots(context: int) -> int:
    """Return the slots of a row where nobody asked for a number."""
    return min(context, DEFAULT_TOKENS) + HEADROOM


def cache_bytes_per_token(config: Any, itemsize: int) -> int:
    """Return the KV bytes per token over all layers, from a text configuration. Latent attention
    (DeepSeek) caches its latents.
    """
    by_layer = getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers
    caching = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    types = getattr(config, "layer_types", None) or [FULL] * caching
    keeping = [layer for layer, name in zip(by_layer[:caching], types, strict=False) if name not in UNMASKED]
    return sum(map(_count_cached, keeping)) * itemsize


def _count_cached(config: Any) -> int:
    """Return how many numbers one layer caches per token."""
    if getattr(config, "kv_lora_rank", None):
        return int(config.kv_lora_rank + config.qk_rope_head_dim)
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    if heads is None:  # It has no attention
        return 0
    return 2 * int(heads) * int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def available_bytes(device: torch.device) -> int:
    """Return the free bytes on a device; on the CPU also within the container's limit, and without
    what caches may still take.
    """
    if device.type in ("cuda", "xpu"):
        return int(getattr(torch, device.type).mem_get_info(device)[0])
    import psutil

    return max(0, min(int(psutil.virtual_memory().available), _container_room()) - promised_bytes())


def _container_room(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes left in this control group (version 2); practically infinite where there is
    no limit.
    """
    try:
        limit = (root / "memory.max").read_text(encoding="ascii").strip()
        used = int((root / "memory.current").read_text(encoding="ascii"))
        cached = dict(line.split() for line in (root / "memory.stat").read_text(encoding="ascii").splitlines())
        return 2**62 if limit == "max" else int(limit) - used + int(cached.get("inactive_file", 0))
    except (OSError, ValueError):
        return 2**62


_TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Keys under which a model for images and texts holds the configuration of its language model. That leaves out whatever
is the default of its class.
"""


def bytes_of_drafts(models: Iterable[str]) -> tuple[int, int]:
    """Return the bytes of draft models' or heads' weights, and of their KV caches for each token of a row, read from
    their directories or GGUF files. A model without either counts 0.
    """
    weights, cached = 0, 0
    for model in models:
        file = gguf_file(model)
        if file is not None:
            header = read_model_header(file)
            weights += header.weights_bytes
            cached += header.cache_bytes_per_token
        elif (folder := Path(resolve(model))).is_dir():
            weights += _weights_of_draft(folder)
            cached += _cached_by_draft(folder)
    return weights, cached


def _weights_of_draft(folder: Path) -> int:
    if any((folder / name).is_file() for name in (INDEX, SINGLE)):
        return weight_bytes(folder, None)
    # A head's weights may have a name of their own. Where there are none, its loader says so.
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _cached_by_draft(folder: Path) -> int:
    """Return the bytes of a token in the cache of a model or head of decoder layers."""
    try:
        stated = read_object(folder / "config.json", "expected a model's configuration")
        itemsize = 4 if "float32" in (stated.get("dtype"), stated.get("torch_dtype")) else 2
        if any(name in stated for name in _TEXT_CONFIGS):
            return cache_bytes_per_token(read_config(folder, LoadOptions()).get_text_config(decoder=True), itemsize)
        return cache_bytes_per_token(SimpleNamespace(**stated), itemsize)
    except (AttributeError, TypeError, ForerunError):
        return 0  # A head without layers. If the directory or a value is broken, its loader says so
