import copy

import pytest
import torch
from torch import nn

from forerun.model import TransformersTarget
from forerun.model.kernels.accelerate import accelerate
from forerun.model.kernels.packing import (
    FusedGroup,
    JoinedWeight,
    PackedLinear,
    PackedWeight,
    pack,
    packable,
    packed_for_now,
    packs,
)
from model_kernels.conftest import FAMILIES, build

DTYPES = [
    pytest.param(dtype, marks=pytest.mark.skipif(not packs(dtype), reason="slow on this processor"))
    for dtype in (torch.bfloat16, torch.float32)
]
SHAPES = [(48, 80), (1536, 3072), (384, 8192), (192, 256)]


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


def linear(inputs: int, outputs: int, dtype: torch.dtype, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(inputs + outputs)
    return nn.Linear(inputs, outputs, bias=bias, dtype=dtype).requires_grad_(False)


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Sums in float32 fall in another order than in MKL; in bf16 some are rounded to the number beside it."""
    near = {"rtol": 2**-6, "atol": 3e-2} if found.dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    return torch.allclose(found, expected, **near)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [True, False])
def test_packed_equals_plain(shape: tuple[int, int], bias: bool, dtype: torch.dtype) -> None:
    layer = linear(*shape, dtype, bias=bias)
    packed = alone(layer)
    states = torch.randn(2, 7, shape[0], dtype=dtype)
    assert same(packed(states), layer(states))
    assert torch.equal(packed.weight, layer.weight)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_rows_bits_do_not_depend_on_how_many_rows_there_are(shape: tuple[int, int], dtype: torch.dtype) -> None:
    packed = alone(linear(*shape, dtype))
    states = torch.randn(32, shape[0], dtype=dtype)
    whole = packed(states)
    for rows in range(1, 33):
        assert torch.equal(packed(states[:rows]), whole[:rows]), rows
    for row in range(32):
        assert torch.equal(packed(states[row : row + 1]), whole[row : row + 1]), row


def alone(layer: nn.Linear) -> PackedLinear:
    return PackedLinear(layer, PackedWeight.of([layer]))


def fused(layers: list[nn.Linear]) -> list[PackedLinear]:
    group = FusedGroup(PackedWeight.of(layers))
    return [PackedLinear(layer, group.packed_weight, group, index) for index, layer in enumerate(layers)]


@pytest.mark.parametrize("bias", [True, False])
def test_fused_equals_separate(bias: bool, dtype: torch.dtype) -> None:
    layers = [linear(384, size, dtype, bias=bias) for size in (384, 192, 192)]
    states = torch.randn(1, 5, 384, dtype=dtype)
    for layer, member in zip(layers, fused(layers), strict=True):
        assert same(member(states), layer(states))
        assert torch.equal(member.weight, layer.weight)
        assert member.bias is None if layer.bias is None else torch.equal(member.bias, layer.bias)


def test_fused_layers_may_be_called_in_any_order_and_with_other_inputs(dtype: torch.dtype) -> None:
    layers = [linear(64, 48, dtype), linear(64, 32, dtype)]
    members = fused(layers)
    one, two = torch.randn(2, 3, 64, dtype=dtype)
    calls = [(1, one), (0, one), (0, one), (0, two), (1, one), (1, two), (0, two), (0, one.clone())]
    for index, states in calls:
        assert same(members[index](states), layers[index](states))


def test_the_group_keeps_no_states_once_all_parts_are_taken(dtype: torch.dtype) -> None:
    members = fused([linear(64, 48, dtype), linear(64, 32, dtype)])
    states = torch.randn(3, 64, dtype=dtype)
    for member in members:
        member(states)
    assert members[0].group._input is None and not members[0].group._results


def test_what_is_left_alone(dtype: torch.dtype) -> None:
    hooked = linear(64, 48, dtype)
    hooked.register_forward_hook(lambda *_: None)

    class Quantised(nn.Linear):
        pass

    doubled = nn.Linear(64, 48, dtype=torch.float64)
    odd = [hooked, Quantised(64, 48, dtype=dtype), doubled, nn.Linear(64, 48, device="meta", dtype=dtype)]
    model = nn.ModuleList(odd)
    assert pack(model).layers == 0
    assert list(model) == odd
    assert packable(linear(64, 48, dtype))


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_computes_the_same(family: str, dtype: torch.dtype) -> None:
    plain = build(family, dtype)
    changed = copy.deepcopy(plain)
    done = pack(changed)
    ids = torch.randint(0, 128, (2, 12), generator=torch.Generator().manual_seed(1))
    assert same(changed(input_ids=ids).logits, plain(input_ids=ids).logits)
    assert done.layers >= 1
    assert done.fused == {"gpt2": 0, "phi3": 0, "qwen3_moe": 2}.get(plain.config.model_type, 4)


@torch.no_grad()
def test_copies_for_now_are_of_the_weights_as_they_are_and_go_again(dtype: torch.dtype) -> None:
    model, ids = build("llama", dtype), torch.arange(5, 13).unsqueeze(0)
    modules, plain = dict(model.named_modules()), model(ids).logits
    with packed_for_now(model, model.lm_head):
        assert dict(model.named_modules()).keys() == modules.keys() and model.lm_head is modules["lm_head"]
        assert same(model(ids).logits, plain)
    assert dict(model.named_modules()) == modules
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert torch.equal(model(ids).logits, plain)
    model.lm_head.weight.data.mul_(2)  # Which no version counter tells
    with packed_for_now(model):
        assert same(model(ids).logits, 2 * plain)


def test_a_packed_model_saves_what_the_plain_one_would(dtype: torch.dtype) -> None:
    plain = build("qwen2", dtype)
    changed = copy.deepcopy(plain)
    pack(changed)
    expected, saved = plain.state_dict(), changed.state_dict()
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in expected)


def test_float64_is_left_alone() -> None:
    model = build("llama", torch.float64)
    done = accelerate(model)
    assert done.packing.layers == 0 and not done.folded_attention
    assert "nothing" in str(done)


def test_packed_weights_are_counted_as_memory(dtype: torch.dtype) -> None:
    plain = build("qwen2", dtype)
    changed = copy.deepcopy(plain)
    pack(changed)
    tied = plain.config.tie_word_embeddings  # then the embedding stays beside the packed head
    head = dtype.itemsize * 128 * 64 if tied else 0
    difference = TransformersTarget(changed).memory_bytes() - TransformersTarget(plain).memory_bytes()
    assert difference == head


@pytest.mark.parametrize("bias", [True, False])
def test_an_accelerator_joins_the_layers_of_a_group(bias: bool) -> None:
    layers = [linear(8, outputs, torch.float32, bias=bias) for outputs in (12, 20)]
    joined, states = JoinedWeight(layers), torch.randn(3, 8)
    apart = torch.cat([layer(states) for layer in layers], dim=-1)
    torch.testing.assert_close(joined.apply(states), apart)
    assert joined.nbytes() == sum(weight.nbytes for layer in layers for weight in layer.parameters())
