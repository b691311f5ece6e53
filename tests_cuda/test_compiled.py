"""The kernels of a decoder layer are compiled for a Hopper, at the shapes of Llama-3.1-8B, without one.

Nothing is spilled, what a program needs leaves room for others beside it, and a kernel is one binary for every number
of tokens. What they compute is in `test_layer`, how fast they are no machine without a GPU can say.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from typing import Any

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles kernels, which Triton's interpreter replaces", allow_module_level=True)
triton_layer: Any = pytest.importorskip("forerun.model.kernels.triton_layer", exc_type=ImportError)
log = logging.getLogger(__name__)
launches: Any = pytest.importorskip("launches", exc_type=ImportError)

from counting import Operations  # noqa: E402
from place import stand_in  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from forerun.core.tree import TokenTree  # noqa: E402
from forerun.model import TransformersTarget  # noqa: E402
from forerun.model.kernels import accelerate, triton_ops  # noqa: E402
from forerun.model.kernels.native import Heads  # noqa: E402
from forerun.model.masks import Block  # noqa: E402
from forerun.model.recordings import Recordings  # noqa: E402
from model_kernels.conftest import COMMON  # noqa: E402

WIDTH, INNER, HEADS, VOCABULARY, SLOTS = 4096, 14336, Heads(queries=32, keys=8, depth=128), 128256, 1024
SHARED = 227 * 1024  # Bytes that a Hopper's processor has for its programs
REGISTERS = 65536
BEFORE = ("_mask", "_turn")  # What is no part of the layers


def layer(dtype: torch.dtype, tokens: int, slots: int = SLOTS) -> list[Any]:
    """The kernels of one decoder layer, and of what a pass has before and behind its layers."""

    def make(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=kind, device="meta")

    def work() -> None:
        states, norm, places = make(1, tokens, WIDTH), make(WIDTH), make(tokens, kind=torch.int64)
        block = Block(
            make(1, kind=torch.int64),
            make(1, tokens, tokens, kind=torch.bool),
            *(make(1, tokens, kind=torch.int64) for _ in range(2)),
        )
        mask = triton_layer.build_mask(block, slots, 0, dtype)
        angles = triton_layer.turn(block.query_positions, make(HEADS.depth // 2, kind=torch.float32), 1.0, dtype)
        stores = make(1, slots + 1, HEADS.keys, HEADS.depth), make(1, slots + 1, HEADS.keys, HEADS.depth)
        lines = (HEADS.queries + 2 * HEADS.keys) * HEADS.depth
        given = triton_layer.Normed(states, triton_layer.square(states), norm, 1e-5)
        query = triton_layer.project(given, make(lines, WIDTH), None, angles, HEADS, stores=stores, places=places)
        arrived = make(HEADS.keys, kind=torch.int32)
        attended = triton_layer.attend(query, stores, mask, places=places, scale=0.1, arrived=arrived)
        states, squares = triton_layer.multiply(attended, make(WIDTH, WIDTH), residual=states)
        inner = triton_layer.gate(triton_layer.Normed(states, squares, norm, 1e-5), make(2 * INNER, WIDTH))
        states, squares = triton_layer.multiply(inner, make(WIDTH, INNER), residual=states)
        triton_layer.multiply(states, make(VOCABULARY, WIDTH))

    return launches.launches_of(work)


@pytest.mark.parametrize(
    ("dtype", "overlap"), [(torch.bfloat16, False), (torch.float16, False), (torch.bfloat16, True)], ids=str
)
def test_nothing_is_spilled(dtype: torch.dtype, overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_ops, "OVERLAP", overlap)
    for launch in [*layer(dtype, 1), *layer(dtype, 1, 2**17)[-6:]]:
        made, threads = launch.binary, 32 * launch.options.get("num_warps", 4)
        told = {"grid": launch.grid, "registers": made.registers, "shared": made.shared, "spilled": made.spilled}
        log.info("%s %s: %s", dtype, launch.name, told)  # With --log-cli-level=INFO
        assert made.spilled == 0, launch.name
        assert ("griddepcontrol.wait" in made.code) is (overlap and launch.name not in BEFORE), launch.name
        beside = min(SHARED // max(made.shared, 1), REGISTERS // (made.registers * threads))
        assert beside >= (1 if launch.name == "_attend" else 2), (launch.name, told)


def test_a_kernel_is_one_binary_for_every_number_of_tokens() -> None:
    one, most = layer(torch.bfloat16, 1), layer(torch.bfloat16, triton_layer.ROWS)
    for alone, full in zip(one, most, strict=True):
        if alone.name not in BEFORE:
            assert alone.source().hash() == full.source().hash(), alone.name


class Everything(list[str]):
    """The names of all modules: none is compared."""

    def __contains__(self, _name: object) -> bool:
        return True


@pytest.mark.parametrize(("whole", "most"), [(True, 170), (False, 420)])
def test_the_kernels_of_a_pass(whole: bool, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a model of 32 layers in the pass that is recorded as one graph, whole layers or module by module. None
    runs. A matrix product of torch's counts once, though on a GPU some are two.
    """
    stand_in(monkeypatch, triton_ops, triton_layer if whole else None)
    config = AutoConfig.for_model("llama", **{**COMMON, "head_dim": 32, "num_hidden_layers": 32})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float16).eval()
    with launches.recorded() as kernels, torch.inference_mode():
        accelerate.accelerate(model, accepted=Everything())
        target = TransformersTarget(model, rows=1, slots=300)
        target.prefill([0], [[3, 4, 5]])
        counts = Operations()
        target.recordings = Recordings(lambda work, _inputs: counts.inside(work))
        kernels.clear()
        target.score([0], [TokenTree.of(6, [], [])])
    total = counts.total + len(kernels)
    log.info("%d kernels, of torch %s, ours %s", total, counts, Counter(kernel.name for kernel in kernels))
    assert most - 10 < total <= most
