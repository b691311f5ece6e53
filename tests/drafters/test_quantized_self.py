"""The rounded twin: what it computes, what it shares, what it leaves alone. That it is lossless: tests/contract."""

import copy

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from contract.harness import PROMPT, as_prompts, model, tokens_of
from drafters.asking import setup_for
from forerun import LLM, SamplingParams
from forerun.drafters.draft_models.quantized_self import (
    KERNEL_ROWS,
    Int4Linear,
    Int8Linear,
    QuantizedSelfConfig,
    QuantizedSelfDrafter,
    make_rounded_twin,
)
from forerun.errors import UnsupportedModelError
from forerun.model import TransformersTarget

TOKENS = torch.tensor([PROMPT])


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """What 8 bits and one scale a row leave of a weight, written out."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round() * scale


@torch.inference_mode()
def test_the_twin_computes_with_rounded_decoder_weights_and_nothing_else_rounded() -> None:
    expected = copy.deepcopy(model())
    for layer in expected.model.layers:
        for linear in (module for module in layer.modules() if isinstance(module, nn.Linear)):
            linear.weight.data = rounded(linear.weight.data)
    found = make_rounded_twin(model())(TOKENS).logits
    torch.testing.assert_close(found, expected(TOKENS).logits, atol=1e-5, rtol=1e-4)
    assert not torch.equal(found, model()(TOKENS).logits)


@torch.inference_mode()
def test_the_target_is_not_touched() -> None:
    weights = copy.deepcopy(model())
    before, names = weights(TOKENS).logits, [type(module) for module in weights.modules()]
    config = {"method": "quantized_self", "num_speculative_tokens": 3}
    engine = LLM(weights, tokenizer=False, speculative_config=config, max_model_len=64)
    params = SamplingParams(temperature=0.0, max_tokens=12)
    answers = tokens_of(engine.generate(as_prompts([PROMPT]), params))
    assert answers == tokens_of(engine.generate(as_prompts([PROMPT]), params, speculative=False))
    assert torch.equal(weights(TOKENS).logits, before)
    assert [type(module) for module in weights.modules()] == names


def test_what_is_not_a_decoder_linear_is_shared() -> None:
    twin = make_rounded_twin(model())
    assert twin.lm_head is model().lm_head
    assert twin.model.embed_tokens is model().model.embed_tokens
    assert twin.model.layers[1].input_layernorm is model().model.layers[1].input_layernorm
    kinds = {type(module) for module in twin.model.layers.modules()}
    assert nn.Linear not in kinds and Int8Linear in kinds


def test_memory_is_that_of_the_int8_weights_and_the_cache() -> None:
    setup = setup_for(model(), slots=32)
    made = QuantizedSelfDrafter(QuantizedSelfConfig(num_speculative_tokens=3), setup)
    linears = [module for module in setup.target.model.model.layers.modules() if isinstance(module, nn.Linear)]
    weights = sum(linear.weight.numel() + 4 * linear.out_features for linear in linears)
    assert made.memory_bytes() == weights + made.model.cache.nbytes()


@torch.inference_mode()
@pytest.mark.parametrize("rows", [1, KERNEL_ROWS, KERNEL_ROWS + 1])
def test_kernel_and_unpacked_weight_agree(rows: int) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 48).to(torch.bfloat16)
    states = torch.randn(2, rows, 64)[:1].to(torch.bfloat16)
    made = Int8Linear(linear.weight, linear.bias)
    wanted = states.float() @ rounded(linear.weight.float()).T + linear.bias.float()
    error = (made(states).float() - wanted).abs().max() / wanted.abs().max()
    assert float(error) < 0.02


def test_rows_of_zeros_and_layers_that_do_not_fit_a_kernel_are_rounded_all_the_same() -> None:
    made = Int8Linear(torch.zeros(3, 4), None)
    assert made(torch.ones(2, 4)).tolist() == [[0.0] * 3] * 2
    kinds = [type(module) for module in make_rounded_twin(model(), 4).model.layers[0].mlp.children()]
    assert kinds[:3] == [Int4Linear, Int4Linear, Int8Linear], "48 inputs are no whole groups"


@torch.inference_mode()
@pytest.mark.parametrize(("dtype", "inputs", "group"), [(torch.float32, 96, 32), (torch.bfloat16, 128, 64)])
def test_four_bits_are_a_grid_of_sixteen_values_in_each_group(dtype: torch.dtype, inputs: int, group: int) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(inputs, 48).to(dtype)
    made, states = Int4Linear(linear.weight, linear.bias), torch.randn(3, inputs).to(dtype)
    groups = linear.weight.float().view(48, -1, group)
    low, scale = groups.amin(2, keepdim=True), (groups.amax(2, keepdim=True) - groups.amin(2, keepdim=True)) / 15
    weight = (((groups - low) / scale).round() * scale + low).view(48, inputs)
    wanted = states.float() @ weight.T + linear.bias.float()
    error = (made(states).float() - wanted).abs().max() / wanted.abs().max()
    assert float(error) < (1e-4 if dtype == torch.float32 else 0.02)
    assert made.nbytes() == 48 * inputs // 2 + 2 * linear.weight.itemsize * 48 * inputs // group


@torch.inference_mode()
def test_four_bits_are_lossless_too() -> None:
    config = {"method": "quantized_self", "bits": 4, "num_speculative_tokens": 3, "adaptive": False}
    engine = LLM(copy.deepcopy(model()), tokenizer=False, speculative_config=config, max_model_len=64, check=True)
    params = SamplingParams(temperature=0.0, max_tokens=24)
    found = engine.generate(as_prompts([PROMPT]), params)
    assert tokens_of(found) == tokens_of(engine.generate(as_prompts([PROMPT]), params, speculative=False))
    assert found[0].outputs[0].speculation.num_accepted_draft_tokens > 0


@torch.inference_mode()
def test_transposed_linears_and_packed_ones_are_known() -> None:
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=32, n_embd=32, n_layer=2, n_head=2)).eval()
    found, wanted = make_rounded_twin(gpt2)(TOKENS).logits, gpt2(TOKENS).logits
    assert 0 < float((found - wanted).abs().max()) < 0.05
    plain = copy.deepcopy(model()).to(torch.bfloat16)
    packed = TransformersTarget.load(copy.deepcopy(plain), slots=32, repack=True)
    left, right = (make_rounded_twin(each).model.layers[0].self_attn.q_proj for each in (plain, packed.model))
    assert isinstance(right, Int8Linear) and torch.equal(left.rounded, right.rounded)


def test_a_model_without_plain_linears_is_refused() -> None:
    bare = copy.deepcopy(model())
    with pytest.raises(UnsupportedModelError, match="no plain linear"):
        make_rounded_twin(make_rounded_twin(bare))
    bare.lm_head._hf_hook = object()
    with pytest.raises(UnsupportedModelError, match="one device"):
        make_rounded_twin(bare)


def test_any_tree_is_drafted() -> None:
    made = QuantizedSelfDrafter(QuantizedSelfConfig(tree=[0, 0, 1]), setup_for(model(), slots=32))
    assert made._tree.shape.parents == (-1, 0, 0, 1)
