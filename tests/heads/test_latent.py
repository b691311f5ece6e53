"""EAGLE-3 heads with DeepSeek's latent attention: the equations, a public file, training, and what is refused."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from forerun.errors import ArgumentError, CheckpointError
from forerun.heads.eagle import Eagle3Objective, Eagle3Settings, EagleConfig, EagleHead
from forerun.heads.engines import diagnose_files, export_head
from forerun.heads.files import (
    HeadCheckpoint,
    differences,
    format_named,
    format_of,
    parse,
    read_files,
    read_head,
    write_head,
)
from forerun.heads.layers import LatentConfig
from forerun.heads.peagle import PEagleConfig
from forerun.losses.objective import FrozenTarget
from heads.samples import LATENT, TARGET, YARN, sample
from training.ttt import batch_of, model, tokens

SIZES = {"kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12, "q_lora_rank": 20}


def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)


@torch.no_grad()
@pytest.mark.parametrize("rope", [None, YARN], ids=["plain", "yarn"])
@pytest.mark.parametrize("rank", [12, None], ids=["compressed queries", "plain queries"])
@pytest.mark.parametrize("interleave", [True, False])
def test_a_layer_attends_as_transformers_deepseek_does(rope: Any, rank: int | None, interleave: bool) -> None:
    """Its layer of twice the width, which reads [embedding; feature]; of what it gives, the first half is ours."""
    latent = dataclasses.replace(LATENT.latent, q_lora_rank=rank, rope_interleave=interleave)
    config = dataclasses.replace(LATENT, latent=latent, rope_scaling=rope, rms_norm_eps=1e-6)
    head = sample(config).build()
    layer = head.layers[0]
    theirs = DeepseekV3Config(
        **{**dataclasses.asdict(latent), "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4},
        **{"rms_norm_eps": 1e-6, "max_position_embeddings": 128, "attn_implementation": "eager"},
        rope_parameters={"rope_theta": config.rope_theta, **(rope or {"rope_type": "default"})},
    )
    reference = DeepseekV3Attention(theirs, 0).eval()
    weights = layer.self_attn.state_dict()
    weights["o_proj.weight"] = torch.cat([weights["o_proj.weight"], torch.zeros_like(weights["o_proj.weight"])])
    reference.load_state_dict(weights)
    generator = torch.Generator().manual_seed(1)
    embeds, states = (torch.randn(2, 7, 16, generator=generator) for _ in range(2))
    inputs = torch.cat([layer.input_layernorm(embeds), layer.hidden_norm(states)], -1)
    positions = torch.arange(7).expand(2, -1)
    mask = torch.full((7, 7), -torch.inf).triu(1).expand(2, 1, 7, 7)
    attended = reference(inputs, DeepseekV3RotaryEmbedding(theirs)(inputs, positions), mask)[0][..., :16]
    between = states + attended
    expected = between + layer.mlp(layer.post_attention_layernorm(between))
    found = layer(embeds, states, head.angles(positions, embeds), attend)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def test_the_norms_inside_have_the_heads_epsilon() -> None:
    """As in vLLM and TorchSpec; DeepSeek's own layers have 1e-6 there."""
    layer = EagleHead(dataclasses.replace(LATENT, rms_norm_eps=1e-5)).layers[0].self_attn
    assert (layer.q_a_layernorm.eps, layer.kv_a_layernorm.eps) == (1e-5, 1e-5)


def public(**changes: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A file with the keys of TorchSpec's kimi_k25_eagle3_moe.json without its experts, small; null removes a key."""
    head = sample(dataclasses.replace(LATENT, own_embedding=True))
    tensors = {name: tensor for name, tensor in head.tensors.items() if name != "d2t"}
    nested = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 4, 6], "use_last_layernorm": True}
    keys = {
        **{"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2", "hidden_size": 16},
        **{"intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4},
        **dataclasses.asdict(LATENT.latent),
        **{"hidden_act": "silu", "rms_norm_eps": 1e-5, "vocab_size": 60, "draft_vocab_size": 60, "rope_theta": 5e4},
        "rope_scaling": {"type": "yarn", **{key: value for key, value in YARN.items() if key != "rope_type"}},
        **{"n_routed_experts": 384, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1},
        **{"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.827},
        **{"scoring_func": "sigmoid", "first_k_dense_replace": 0, "topk_method": "noaux_tc", "seq_aux": True},
        **{"num_nextn_predict_layers": 0, "ep_size": 1, "moe_layer_freq": 1, "aux_loss_alpha": 0.001},
        **{"eagle_config": nested, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
        **changes,
    }
    return {name: value for name, value in keys.items() if value is not None}, tensors


def read(keys: dict[str, Any], tensors: dict[str, Tensor]) -> HeadCheckpoint:
    return format_of(keys).read(keys, tensors, num_layers=10)


def test_a_public_file_is_read_and_goes_to_engines(tmp_path: Path) -> None:
    head = read(*public())
    assert head.unknown == [] and head.config.boundaries == (2, 5, 7) and head.config.kind == "eagle3"
    assert head.config.latent == LATENT.latent and head.config.rope_scaling == YARN and head.config.head_dim == 4
    source = write_head(head, tmp_path / "source", "flat", TARGET)
    done = export_head(source, TARGET, "vllm", tmp_path / "vllm")
    stored = read_files(done.directory)
    assert stored.config["architectures"] == ["Eagle3DeepseekV2ForCausalLM"] and "head_dim" not in stored.config
    assert stored.config["model_type"] == "kimi_k2", "vLLM makes MTP layers of deepseek_v3"
    assert differences(read_head(source), parse(stored)) == [] and stored.config["n_routed_experts"] == 384
    config = dataclasses.replace(stored, config={**stored.config, "model_type": "deepseek_v3"})
    (finding,) = [one for one in diagnose_files(config, parse(config), TARGET) if one.engine == "vllm"]
    assert finding.severity == "fails" and "MTP layers" in finding.why


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_moe": True}, "use_moe True, which changes what a head computes"),
        ({"mla_use_nope": True}, "mla_use_nope True, which changes what a head computes"),
        ({"v_head_dim": None}, "has kv_lora_rank, but no v_head_dim"),
        ({"kv_lora_rank": None}, "no kv_lora_rank; a head of the architecture Eagle3DeepseekV2ForCausalLM needs it"),
        ({"architectures": ["EagleMistralLarge3ForCausalLM"]}, "kind eagle has ordinary attention"),
        ({"attention_bias": True}, "latent attention has no attention_bias"),
        ({"sliding_window": 8}, "latent attention has no sliding_window"),
        ({"num_key_value_heads": 2}, "4 heads and 2 key-value heads"),
        ({"v_head_dim": 11}, "at most as wide as keys"),
        ({"q_lora_rank": 6}, r"q_a_proj.weight \(12, 32\), expected \(6, 32\)"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4]}}, r"fc.weight \(16, 48\), expected \(16, 32\)"),
    ],
)
def test_what_makes_no_such_head_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read(*public(**changes))


def test_experts_are_refused_by_their_tensors() -> None:
    keys, tensors = public()
    with pytest.raises(CheckpointError, match=r"unknown: layers.0.mlp.experts.0.gate_proj.weight"):
        read(keys, tensors | {"layers.0.mlp.experts.0.gate_proj.weight": torch.ones(4, 16)})


def test_other_kinds_and_formats_have_no_latent_attention() -> None:
    with pytest.raises(CheckpointError, match="vLLM reads no latent attention in this format; use flat"):
        format_named("speculators").write(sample(LATENT), TARGET)
    fields = {one.name: getattr(LATENT, one.name) for one in dataclasses.fields(EagleConfig)}
    with pytest.raises(ArgumentError, match="kind peagle has ordinary attention"):
        EagleHead(PEagleConfig(**fields, mask_token_id=3))


def config_of(**options: Any) -> EagleConfig:
    return EagleConfig.for_target("eagle3", model(), options={"latent": SIZES, **options})


def test_a_recipe_says_the_sizes() -> None:
    config = config_of()
    assert config.latent == LatentConfig(**SIZES) and config.num_key_value_heads == config.num_attention_heads
    with pytest.raises(ArgumentError, match=r"latent has kv_lora_rank.*; see rank, v_head_dim"):
        config_of(latent={**{name: size for name, size in SIZES.items() if name != "v_head_dim"}, "rank": 3})
    with pytest.raises(ArgumentError, match="latent attention has no qk_norm"):
        config_of(qk_norm=True)


def test_every_weight_learns() -> None:
    made = EagleHead.initial(model(), config_of())
    batch = batch_of([tokens(9)], made.config.boundaries)
    Eagle3Objective(made, FrozenTarget.of(model()), Eagle3Settings(steps=3))(batch).loss.backward()
    assert all(weight.grad is not None for weight in made.trainable().values())
