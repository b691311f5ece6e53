"""The device of these tests, and what is true of all of them; `make test-cuda` runs them where there is one.

With FORERUN_TEST_DEVICE=cpu all that is not about CUDA itself runs on the CPU, which tests the tests.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))

import torch
from place import CUDA, DEVICE

from engine.conftest import checkpoint, draft_checkpoint
from simulated.steps import quickly_measured
from training.conftest import prepared, target

__all__ = ["checkpoint", "draft_checkpoint", "prepared", "quickly_measured", "target"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cuda_alone: is about CUDA itself; another device skips it")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what cannot run here."""
    for item in items:
        if CUDA and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="torch finds no CUDA device"))
        elif not CUDA and item.get_closest_marker("cuda_alone"):
            item.add_marker(pytest.mark.skip(reason=f"is about CUDA, and FORERUN_TEST_DEVICE is {DEVICE}"))


@pytest.fixture(autouse=True)
def nothing_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No cost of a pass is known before, float32 is exact, and a test leaves no memory to the next one."""
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    yield
    gc.collect()
    if CUDA and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
