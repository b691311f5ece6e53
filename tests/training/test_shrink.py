"""A shrunk target: with all it has it is the target, and what writes nothing goes without a trace."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM as Auto
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from forerun.errors import ArgumentError, UnsupportedModelError
from forerun.training.trained import shrink, space_evenly

SIZES: dict[str, Any] = {
    **{"vocab_size": 40, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2, "max_position_embeddings": 64},
}
STYLES = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
IDS = torch.arange(12).unsqueeze(0)


def made(style: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    model = Auto.from_config(STYLES[style](**SIZES, **changes)).eval()
    for name, weight in model.named_parameters():
        if name.endswith("bias") or weight.ndim == 1:
            torch.nn.init.uniform_(weight.data, 0.5, 1.5)
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("style", STYLES)
def test_all_layers_and_widths_are_the_target(style: str, tied: bool) -> None:
    target = made(style, tie_word_embeddings=tied)
    options = {"layers": 4, "hidden_size": 24, "intermediate_size": 32, "num_key_value_heads": 2}
    assert torch.equal(logits(shrink(target, options)), logits(target))


@pytest.mark.parametrize("style", STYLES)
def test_chosen_layers_are_those_of_the_target(style: str) -> None:
    target = made(style)
    small = shrink(target, {"layers": [0, 2]})
    del target.model.layers[3], target.model.layers[1]
    target.config.num_hidden_layers = small.config.num_hidden_layers
    for index, layer in enumerate(target.model.layers):
        layer.self_attn.layer_idx = index
    torch.testing.assert_close(logits(small), logits(target))


def test_layers_are_evenly_spaced() -> None:
    assert [space_evenly(count, 8) for count in (1, 2, 3, 8)] == [[0], [0, 7], [0, 4, 7], list(range(8))]


@pytest.mark.parametrize("width", ["intermediate_size", "num_key_value_heads", "hidden_size"])
@pytest.mark.parametrize("style", STYLES)
def test_what_writes_nothing_goes_without_a_trace(style: str, width: str, tmp_path: Any) -> None:
    """Others of each layer are silenced; of the stream's dimensions the same everywhere."""
    target, kept = made(style), {"intermediate_size": 20, "num_key_value_heads": 1, "hidden_size": 16}[width]
    silent = torch.tensor([23, 1, 2, 8, 13, 5, 11, 7])
    with torch.no_grad():
        for index, layer in enumerate(target.model.layers):
            if width == "intermediate_size":
                layer.mlp.down_proj.weight[:, torch.arange(12) * 2 + index % 2] = 0
            elif width == "num_key_value_heads":
                first = index % 2 * 16
                layer.self_attn.o_proj.weight[:, first : first + 16] = 0
            else:
                layer.mlp.down_proj.weight[silent] = layer.self_attn.o_proj.weight[silent] = 0
        if width == "hidden_size":
            target.model.embed_tokens.weight[:, silent] = 0
    small = shrink(target, {width: kept})
    torch.testing.assert_close(logits(small), logits(target), atol=2e-4, rtol=1e-4)
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in target.parameters())
    small.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(Auto.from_pretrained(tmp_path)), logits(small))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer": 2}, r"shrunk by 'layer'\. Did you mean 'layers'\? draft\.options has layers, "),
        ({"layers": 5}, r"layers must be 1 to 4, as the target has, got 5"),
        ({"layers": [0, 4]}, r"layers of the target, 0 to 3, rising; got \[0, 4\]"),
        ({"layers": [2, 1]}, "rising"),
        ({"layers": []}, "rising"),
        ({"layers": "2"}, "got '2'"),
        ({"hidden_size": 25}, "hidden_size must be 1 to 24"),
        ({"intermediate_size": 0}, "intermediate_size must be 1 to 32"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        shrink(made("llama"), options)


def test_other_architectures_are_refused_by_name() -> None:
    other = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=8, n_layer=1, n_head=2))
    with pytest.raises(UnsupportedModelError, match=r"gpt2 cannot be shrunk; llama, mistral, qwen2, qwen3 can"):
        shrink(other, {"layers": 1})
