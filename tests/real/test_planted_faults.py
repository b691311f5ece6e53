"""The real model in its own dtype: every fault of forerun's own parts that is planted is seen, and none without."""

from pathlib import Path

import pytest

from benchmarks.self_check import FAULTS, Fault, planted
from forerun.errors import UnsupportedModelError
from forerun.model import TransformersTarget
from forerun.model.load import LoadOptions
from forerun.model.prepare import open_named


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_planted_fault_is_seen(path: Path, dtype: str) -> None:
    model = open_named(path, LoadOptions(dtype=dtype, device="cpu"))
    TransformersTarget.load(model, rows=1, slots=64)
    own: list[Fault] = [fault for fault in FAULTS if fault.suits(model) and not fault.in_model]
    assert len(own) == 8
    for fault in own:
        with planted(fault, model), pytest.raises(UnsupportedModelError, match="failed the self-check"):
            TransformersTarget.load(model, rows=1, slots=64)
