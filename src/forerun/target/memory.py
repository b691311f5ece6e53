"""What a target will need and whether it is there, before a weight is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from forerun.errors import OutOfMemoryError

SCORED_NODES = 16
"""Nodes a row whose logits and float32 laws the plan counts."""
_GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Bytes that a target needs on one device."""

    rows: int
    slots: int
    weights: int
    """0 where they are loaded already."""
    token: int
    """KV cache per token, all layers."""
    laws: int
    """Logits and laws of one step."""
    reserve: int = 0
    """For the drafter."""

    @property
    def cache(self) -> int:
        """KV cache of all rows and slots, the dump slot included."""
        return self.token * self.rows * (self.slots + 1)

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.laws + self.reserve

    def check(self, available: int, where: str) -> None:
        """Raise OutOfMemoryError, with what to lower, unless the plan fits into `available` bytes."""
        if self.total <= available:
            return
        raise OutOfMemoryError(
            f"{self.total / _GIB:.2f} GiB are needed on {where}, {available / _GIB:.2f} GiB are free: "
            f"weights {self.weights / _GIB:.2f}, KV cache {self.cache / _GIB:.2f} ({self.rows} rows x {self.slots} "
            f"slots), logits and laws {self.laws / _GIB:.2f}, drafter {self.reserve / _GIB:.2f}. "
            f"{self._advice(available)}"
        )

    def fitting_slots(self, available: int) -> int:
        """Most slots of a row that would fit, with as many rows; 0 if none."""
        room = available - self.weights - self.laws - self.reserve
        return max(0, room // max(1, self.token * self.rows) - 1)

    def _advice(self, available: int) -> str:
        slots = self.fitting_slots(available)
        if slots > 0:
            rows = max(1, slots * self.rows // self.slots)
            return f"Lower slots to {slots}" + (f", or rows to {rows}." if rows < self.rows else ".")
        return 'Use a smaller dtype, a quantised checkpoint, or device_map="auto" to offload layers.'


def cache_bytes_per_token(config: Any, itemsize: int) -> int:
    """KV bytes per token over all layers, from a text configuration. Latent attention (DeepSeek) caches its latents."""
    by_layer = getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers
    own = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    return sum(_cached_width(layer) for layer in by_layer[:own]) * itemsize


def _cached_width(config: Any) -> int:
    """Numbers that one layer caches per token."""
    if getattr(config, "kv_lora_rank", None):
        return int(config.kv_lora_rank + config.qk_rope_head_dim)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return 2 * int(heads) * int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def law_bytes(config: Any, rows: int, itemsize: int) -> int:
    """Bytes of one step's logits and float32 laws."""
    return rows * SCORED_NODES * int(config.vocab_size) * (itemsize + 4)


def available_bytes(device: torch.device) -> int:
    """Free bytes on a device; on the CPU also within the container's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    import psutil

    return min(int(psutil.virtual_memory().available), _container_room())


def _container_room(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes left in this control group (version 2); practically infinite where there is no limit."""
    try:
        limit = (root / "memory.max").read_text(encoding="ascii").strip()
        used = int((root / "memory.current").read_text(encoding="ascii"))
        cached = dict(line.split() for line in (root / "memory.stat").read_text(encoding="ascii").splitlines())
        return 2**62 if limit == "max" else int(limit) - used + int(cached.get("inactive_file", 0))
    except (OSError, ValueError):
        return 2**62
