from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from emulation import needs_bfloat16
from forerun.model import Target
from forerun.model.kernels.accelerate import accelerate
from forerun.model.kernels.packing import FusedGroup, PackedLinear, pack, packable
from model_kernels.conftest import build

pytestmark = needs_bfloat16
SHAPES = [(48, 80), (1536, 3072), (384, 8192), (192, 256)]


def linear(inputs: int, outputs: int, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(inputs + outputs)
    return nn.Linear(inputs, outputs, bias=bias, dtype=torch.bfloat16).requires_grad_(False)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [True, False])
def test_packed_equals_plain_to_the_bit(shape: tuple[int, int], bias: bool) -> None:
    layer = linear(*shape, bias=bias)
    packed = PackedLinear(layer)
    states = torch.randn(2, 7, shape[0], dtype=torch.bfloat16)
    assert torch.equal(packed(states), layer(states))
    assert torch.equal(packed.weight, layer.weight)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_rows_bits_do_not_depend_on_how_many_rows_there_are(shape: tuple[int, int]) -> None:
    packed = PackedLinear(linear(*shape))
    states = torch.randn(32, shape[0], dtype=torch.bfloat16)
    whole = packed(states)
    for rows in range(1, 33):
        assert torch.equal(packed(states[:rows]), whole[:rows]), rows
    for row in range(32):
        assert torch.equal(packed(states[row : row + 1]), whole[row : row + 1]), row


def fused(layers: list[nn.Linear]) -> list[PackedLinear]:
    group = FusedGroup(layers)
    return [PackedLinear(layer, group, index) for index, layer in enumerate(layers)]


@pytest.mark.parametrize("bias", [True, False])
def test_fused_equals_separate_to_the_bit(bias: bool) -> None:
    layers = [linear(384, size, bias=bias) for size in (384, 192, 192)]
    states = torch.randn(1, 5, 384, dtype=torch.bfloat16)
    for layer, member in zip(layers, fused(layers), strict=True):
        assert torch.equal(member(states), layer(states))
        assert torch.equal(member.weight, layer.weight)
        assert member.bias is None if layer.bias is None else torch.equal(member.bias, layer.bias)


def test_fused_layers_may_be_called_in_any_order_and_with_other_inputs() -> None:
    layers = [linear(64, 48), linear(64, 32)]
    members = fused(layers)
    one, two = torch.randn(2, 3, 64, dtype=torch.bfloat16)
    calls = [(1, one), (0, one), (0, one), (0, two), (1, one), (1, two), (0, two), (0, one.clone())]
    for index, states in calls:
        assert torch.equal(members[index](states), layers[index](states))


def test_the_group_keeps_no_states_once_all_parts_are_taken() -> None:
    members = fused([linear(64, 48), linear(64, 32)])
    states = torch.randn(3, 64, dtype=torch.bfloat16)
    for member in members:
        member(states)
    assert members[0].group._input is None and not members[0].group._results


def test_what_is_left_alone() -> None:
    hooked = linear(64, 48)
    hooked.register_forward_hook(lambda *_: None)

    class Quantised(nn.Linear):
        pass

    odd = [hooked, Quantised(64, 48, dtype=torch.bfloat16), nn.Linear(64, 48), nn.Linear(64, 48, device="meta")]
    model = nn.ModuleList(odd)
    assert pack(model).layers == 0
    assert list(model) == odd
    assert packable(linear(64, 48))


@torch.no_grad()
def test_every_family_computes_the_same(pair: tuple[Any, Any]) -> None:
    plain, changed = pair
    done = pack(changed)
    ids = torch.randint(0, 128, (2, 12), generator=torch.Generator().manual_seed(1))
    assert torch.equal(changed(input_ids=ids).logits, plain(input_ids=ids).logits)
    assert done.layers >= 1
    assert done.fused == {"gpt2": 0, "phi3": 0, "qwen3_moe": 2}.get(plain.config.model_type, 4)


def test_a_packed_model_saves_what_the_plain_one_would() -> None:
    plain = build("qwen2")
    changed = copy.deepcopy(plain)
    pack(changed)
    expected, saved = plain.state_dict(), changed.state_dict()
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in expected)


def test_float32_is_left_alone() -> None:
    model = build("llama", torch.float32)
    done = accelerate(model)
    assert done.packing.layers == 0 and not done.folded_attention
    assert "nothing" in str(done)


def test_packed_weights_are_counted_as_memory() -> None:
    plain = build("qwen2")
    changed = copy.deepcopy(plain)
    pack(changed)
    head = 2 * 128 * 64 if plain.config.tie_word_embeddings else 0  # a tied embedding stays beside the packed head
    difference = Target(changed).memory_bytes() - Target(plain).memory_bytes()
    assert difference == head
