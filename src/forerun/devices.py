"""What devices lack."""

from __future__ import annotations

import torch

WITHOUT_FLOAT64 = {"mps"}
"""Types of devices."""


def widest(device: torch.device) -> torch.dtype:
    """The float type for sums and draws: float64, and float32 where a device has none."""
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64
