"""Weights in the blocks of a GGUF file: the values of the package ``gguf``, and products with these."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf import quants
from torch import Tensor, nn

from forerun import devices
from forerun.model.kernels import blocks, products
from forerun.model.kernels.blocks import StoredRows
from forerun.model.kernels.packing import PackedLinear, list_in_blocks, pack, unpack
from forerun.model.kernels.products import ProductKind

pytestmark = pytest.mark.skipif(products.library() is None, reason="no compiler, or no AVX2")
HALVES = {  # Where the numbers in float16 stand in a block
    Type.Q4_0: [0],
    Type.Q4_1: [0, 2],
    Type.Q5_0: [0],
    Type.Q5_1: [0, 2],
    Type.Q8_0: [0],
    Type.Q2_K: [80, 82],
    Type.Q3_K: [108],
    Type.Q4_K: [0, 2],
    Type.Q5_K: [0, 2],
    Type.Q6_K: [208],
}
BUILDS = {"narrow": products.BASE, "wide": products.AVX512}
GROUP = 16  # Inputs that share a scale of the states
COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 64, 65)


@pytest.fixture(params=["own", *BUILDS])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The products as compiled for this processor, for any with AVX2, and for one with AVX-512 alone."""
    if request.param == "wide" and not torch.cpu._is_avx512_supported():
        pytest.skip("not on this processor")
    found = products.library() if request.param == "own" else products.open_library(BUILDS[request.param])
    monkeypatch.setattr(products, "library", lambda: found)
    return found


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def stored(kind: Type, outputs: int, depth: int) -> tuple[StoredRows, Tensor]:
    """Random blocks, scales of all sizes and signs among them, in another order of rows; and their values."""
    chance = np.random.default_rng(outputs + depth)
    inputs, size = gguf.GGML_QUANT_SIZES[kind]
    raw = chance.integers(0, 256, (outputs * depth // inputs, size), dtype=np.uint8)
    for at in HALVES[kind]:
        scale = chance.standard_normal(len(raw)) * chance.choice([1, 1e-2, 1e-4, 1e-7, 0], len(raw))
        raw[:, at : at + 2] = scale.astype(np.float16).view(np.uint8).reshape(-1, 2)
    raw, order = raw.reshape(outputs, -1), chance.permutation(outputs)
    return StoredRows(int(kind), raw, order), torch.from_numpy(quants.dequantize(raw, kind)[order])


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16)


@pytest.mark.parametrize("shape", [(16, 256), (70, 768)], ids=str)
@pytest.mark.parametrize("kind", HALVES, ids=lambda kind: kind.name)
def test_blocks_expand_to_the_bits_of_gguf(library: Any, kind: Type, shape: tuple[int, int]) -> None:
    """Signs of zeros, too."""
    rows, matrix = stored(kind, *shape)
    panels = blocks.expand(blocks.pack([rows], shape[1]), *shape)
    assert torch.equal(bits(products.unpack(panels, *shape)), bits(matrix.bfloat16()))


def nearest(values: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """Values (.., GROUP) in float32 as multiples of `largest` / 127, float64, and what is left of them."""
    inverse = torch.full_like(largest, 127).div(largest)  # ``127 / largest`` is rounded twice
    found = (values * inverse).round().double() * (largest / 127).double()
    return found, (values.double() - found).float()


def rounded(states: Tensor) -> Tensor:
    """States (M, depth) as `blocks.h` rounds them, float64."""
    groups = states.float().unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1, keepdim=True)
    added = torch.from_numpy(np.add.accumulate(largest.numpy(), axis=1)[:, -1:])
    found, left = nearest(groups, largest)
    more, _ = nearest(left, largest / 127 / 2)
    return torch.where(largest > added / groups.shape[1] * 3, found + more, found).flatten(-2)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("kind", HALVES, ids=lambda kind: kind.name)
def test_products_are_those_of_states_in_8_bits(library: Any, kind: Type, biased: bool) -> None:
    """For an odd number of outputs. Nothing but sums and the result is rounded else; a row has the same bits among any
    others, on any number of threads, and on any processor."""
    outputs, depth = 70, 768
    rows, matrix = stored(kind, outputs, depth)
    packed = blocks.pack([rows], depth)
    bias = torch.randn(outputs).bfloat16() if biased else None
    states = (torch.randn(max(COUNTS), depth) * torch.logspace(-1, 1, depth)[torch.randperm(depth)]).bfloat16()
    states[:, [5, 300]] *= 100
    exactly = (rounded(states) - states.double()).abs() < 1e-4 * states.double().abs()
    assert exactly.double().mean() > 0.05  # Those of outstanding groups
    added = 0 if bias is None else bias.double()
    exact = rounded(states) @ matrix.double().T + added
    # Sums of float32, of integers and of least values apart, each of which is larger than the value that they make up.
    scale = matrix.view(outputs, -1, 16).abs().amax(-1).repeat_interleave(16, -1)
    room = 2**-8 * exact.abs() + 2**-17 * (states.double().abs() @ scale.double().T)
    whole = products.call(library, ProductKind.WIDENED, states, packed, bias, outputs, in_blocks=True)
    assert (whole.double() - exact).abs().sub(room).max() <= 0
    for number in (1, 3):
        torch.set_num_threads(number)
        for count in COUNTS:
            found = products.call(library, ProductKind.WIDENED, states[:count], packed, bias, outputs, in_blocks=True)
            assert torch.equal(bits(found), bits(whole[:count])), (number, count)
    simplest = products.open_library(products.BASE)
    there = products.call(simplest, ProductKind.WIDENED, states, packed, bias, outputs, in_blocks=True)
    assert torch.equal(bits(there), bits(whole))


@pytest.mark.parametrize("kind", HALVES, ids=lambda kind: kind.name)
def test_a_prompt_is_multiplied_in_bf16_by_amx_alone(library: Any, kind: Type) -> None:
    """By the bits of panels, for any number of rows, threads and panels; elsewhere as a step is."""
    tiles = bool(library.forerun_product_has(ProductKind.TILES))
    way = ProductKind.TILES if tiles else ProductKind.WIDENED
    states = torch.randn(max(COUNTS), 768).bfloat16()
    for outputs in (16, 70):
        rows, _ = stored(kind, outputs, 768)
        packed = blocks.pack([rows], 768)
        whole = (
            products.multiply(states, blocks.expand(packed, outputs, 768), None, outputs, way)
            if tiles
            else products.call(library, way, states, packed, None, outputs, in_blocks=True)
        )
        for number in (1, 3):
            torch.set_num_threads(number)
            for count in COUNTS:
                found = products.call(library, way, states[:count], packed, None, outputs, in_blocks=True, reads=True)
                assert torch.equal(bits(found), bits(whole[:count])), (outputs, number, count)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so(library: Any, wrong: float) -> None:
    """In its row alone."""
    rows, _ = stored(Type.Q4_1, 32, 256)
    states = torch.randn(5, 256).bfloat16()
    states[3, 77] = wrong
    packed = blocks.pack([rows], 256)
    found = products.call(library, ProductKind.WIDENED, states, packed, None, 32, in_blocks=True)
    assert found.isfinite().any(-1).tolist() == found.isfinite().all(-1).tolist() == [True, True, True, False, True]


def test_states_of_zero_and_the_smallest_ones(library: Any) -> None:
    rows, _ = stored(Type.Q8_0, 32, 256)
    states = torch.zeros(2, 256, dtype=torch.bfloat16)
    states[1] = 1e-40
    found = products.call(library, ProductKind.WIDENED, states, blocks.pack([rows], 256), None, 32, in_blocks=True)
    assert not found.any()


@pytest.mark.parametrize("kinds", [(Type.Q4_K, Type.Q6_K, None), (None, Type.Q4_0), (Type.Q8_0, None, Type.Q4_1)])
def test_matrices_of_several_types_below_each_other(library: Any, kinds: tuple[Type | None, ...]) -> None:
    """As in a layer of values in more bits, one of no type of blocks (None) among them: each has its own bits."""
    depth, parts, matrices = 512, [], []
    for kind, outputs in zip(kinds, (64, 32, 41), strict=False):
        rows, matrix = stored(Type.Q4_0 if kind is None else kind, outputs, depth)
        parts.append(matrix.bfloat16() if kind is None else rows)
        matrices.append(matrix.bfloat16())
    below, states = torch.cat(matrices), torch.randn(19, depth).bfloat16()
    packed = blocks.pack(parts, depth)

    def multiply(weights: Tensor, outputs: int) -> Tensor:
        return products.call(library, ProductKind.WIDENED, states, weights, None, outputs, in_blocks=True)

    alone = [multiply(blocks.pack([part], depth), len(matrix)) for part, matrix in zip(parts, matrices, strict=True)]
    assert torch.equal(bits(multiply(packed, len(below))), bits(torch.cat(alone, dim=1)))
    assert torch.equal(products.unpack(blocks.expand(packed, *below.shape), *below.shape), below)


def test_what_blocks_take() -> None:
    for kind in HALVES:
        inputs, _ = gguf.GGML_QUANT_SIZES[kind]
        rows, _ = stored(kind, 64, 2 * inputs)
        size = blocks.stored_bytes(kind, 64, 2 * inputs)
        assert 0 <= blocks.pack([rows], 2 * inputs).nbytes - size <= 256  # What is there for each panel
        assert size < 64 * 2 * inputs * 2 * 0.6
    for kind in (Type.F32, Type.F16, Type.IQ4_NL, Type.MXFP4):
        assert not blocks.stored_bytes(kind, 64, 512)
    assert not blocks.stored_bytes(Type.Q4_K, 64, 128)


@pytest.mark.parametrize(("slower", "fast"), [(0, True), (1, False)])
def test_what_pays_is_measured_once(slower: int, fast: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The memory that they save is worth no products that take clearly longer."""
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    monkeypatch.setattr(products, "kind_of", lambda _: ProductKind.WIDENED)
    monkeypatch.setattr(blocks, "_TRIAL", (32, 64))
    clock = [0.0]
    monkeypatch.setattr(devices.time, "perf_counter", lambda: clock[0])

    def takes(seconds: float) -> Callable[..., None]:
        def multiply(*_: Any) -> None:
            clock[0] += seconds

        return multiply

    monkeypatch.setattr(blocks, "multiply", takes(1.0 + slower))
    monkeypatch.setattr(products, "multiply", takes(1.0))
    blocks.fast.cache_clear()
    assert blocks.fast() is fast
    blocks.fast.cache_clear()
    monkeypatch.setattr(blocks, "_takes_of_bf16", lambda: pytest.fail("measured again"))
    assert blocks.fast() is fast
    blocks.fast.cache_clear()


class _Model(nn.Module):
    def __init__(self, *weights: Tensor) -> None:
        super().__init__()
        for name, weight in zip(("q_proj", "k_proj", "v_proj", "other"), weights, strict=False):
            layer = nn.Linear(weight.shape[1], weight.shape[0], bias=name == "other", dtype=torch.bfloat16)
            layer.weight = nn.Parameter(weight, requires_grad=False)
            setattr(self, name, layer)


def model_of_blocks() -> tuple[_Model, dict[str, StoredRows], list[Tensor]]:
    names = ("q_proj", "k_proj", "v_proj", "other")
    found = [stored(Type.Q4_1, outputs, 256) for outputs in (64, 32, 32, 50)]
    weights = [matrix.bfloat16() for _, matrix in found]
    model = _Model(*(weight.clone() for weight in weights))
    return model, {f"{name}.weight": rows for name, (rows, _) in zip(names, found, strict=True)}, weights


def test_a_model_is_packed_in_blocks() -> None:
    model, rows, weights = model_of_blocks()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert pack(model, rows).fused == 1
    assert list_in_blocks(model) == ["q_proj", "k_proj", "v_proj", "other"]
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    states = torch.randn(3, 256, requires_grad=True)
    layer: Any = model.other
    assert isinstance(layer, PackedLinear)
    layer(states.bfloat16()).sum().backward()
    torch.testing.assert_close(states.grad, weights[-1].sum(0).expand(3, -1).float(), rtol=0.02, atol=0.02)
    assert unpack(model) == 4
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_layers_without_blocks_are_left_alone_and_a_group_is_packed_as_one() -> None:
    model, rows, weights = model_of_blocks()
    pack(model, {"k_proj.weight": rows["k_proj.weight"]})
    assert list_in_blocks(model) == ["q_proj", "k_proj", "v_proj"] and type(model.other) is nn.Linear
    assert torch.equal(model.q_proj.weight, weights[0]) and torch.equal(model.k_proj.weight, weights[1])


@pytest.mark.parametrize("outputs", [(64, 40, 32), (64, 32, 40)], ids=str)
def test_only_the_last_matrix_may_end_within_a_panel(outputs: tuple[int, ...]) -> None:
    found = [stored(Type.Q4_0, each, 256) for each in outputs]
    model = _Model(*(matrix.bfloat16() for _, matrix in found))
    names = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
    pack(model, dict(zip(names, (rows for rows, _ in found), strict=True)))
    assert len(list_in_blocks(model)) == (3 if outputs[1] % products.LANES == 0 else 0)
