"""The global random states of python, numpy and torch: seeding, and keeping them in text. Knows nothing of training."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor


def seed_all(seed: int, rank: int, step: int = 0) -> None:
    """Seed every generator from the three numbers; processes and steps get unrelated streams."""
    mixed = int(np.random.SeedSequence([seed, rank, step]).generate_state(1)[0])
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)


def begin(states: Sequence[str], seed: int, rank: int, step: int) -> None:
    """Go on from the state that this rank saved; a rank that had none (more processes than before) is seeded."""
    if rank < len(states):
        restore(states[rank])
    else:
        seed_all(seed, rank, step)


def capture() -> str:
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


def restore(text: str) -> None:
    """Set all states to those of `capture`. A CUDA state is left out where there is no CUDA device."""
    states = json.loads(text)
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_decode(states["torch"]))
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_decode(states["cuda"]))


@contextmanager
def preserved() -> Iterator[None]:
    """Whatever is drawn inside leaves no trace outside."""
    states = capture()
    try:
        yield
    finally:
        restore(states)


def _encode(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _decode(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
