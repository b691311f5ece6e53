import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from forerun.demo.scale import ScaledModel, plan_scale, remap_boundary
from forerun.errors import ArgumentError, CheckpointError

TOKENS = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(3))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where scale models are written."""
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    return tmp_path / "scaled"


def load(folder: Path, dtype: torch.dtype) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()


@torch.no_grad()
def outputs(folder: Path, dtype: torch.dtype):
    return load(folder, dtype)(input_ids=TOKENS, output_hidden_states=True)


@pytest.mark.parametrize(("layers", "hidden_factor"), [(3, 4), (5, 16), (6, 4)])
def test_the_function_is_the_sources(source: Path, tmp_path: Path, layers: int, hidden_factor: int) -> None:
    billions = {4: 0.002, 16: 0.02}[hidden_factor]
    scaled = ScaledModel(source, billions=billions, layers=layers)
    assert scaled.plan.hidden_factor == hidden_factor
    old, new = outputs(source, torch.float64), outputs(scaled.path, torch.float64)
    assert (old.logits - new.logits).abs().max() < 1e-5  # RMSNorm computes in float32 whatever the dtype
    assert old.logits.std() > 0.5  # otherwise the line above says nothing
    low_old, low_new = outputs(source, torch.float32).logits, outputs(scaled.path, torch.float32).logits
    assert torch.equal(low_old.argmax(-1), low_new.argmax(-1))


def test_bf16_differs_by_summation_order_only(source: Path, tmp_path: Path) -> None:
    scaled = ScaledModel(source, billions=0.002)
    exact = outputs(source, torch.float64).logits
    old, new = outputs(source, torch.bfloat16).logits, outputs(scaled.path, torch.bfloat16).logits
    rounding = (old - exact).abs().max()
    assert (new - old).abs().max() <= rounding
    assert (old == new).float().mean() > 0.5


def test_boundaries_hold_the_sources_states(source: Path, tmp_path: Path) -> None:
    scaled = ScaledModel(source, billions=0.002, layers=5)
    old, new = outputs(source, torch.float32).hidden_states, outputs(scaled.path, torch.float32).hidden_states
    for boundary in range(4):
        wide = new[remap_boundary(boundary, scaled)]
        torch.testing.assert_close(wide[..., :48], old[boundary], rtol=1e-4, atol=1e-4)
        assert not wide[..., 48:].any()
    assert remap_boundary(-1, scaled) == -1
    with pytest.raises(ArgumentError, match=r"0\.\.3"):
        remap_boundary(4, scaled)


def test_size_is_near_the_goal_and_counted_right(source: Path, tmp_path: Path) -> None:
    scaled = ScaledModel(source, billions=0.003)
    assert scaled.plan.parameters == sum(p.numel() for p in load(scaled.path, torch.bfloat16).parameters())
    assert scaled.plan.parameters == pytest.approx(3e6, rel=0.05)
    assert str(round(scaled.plan.parameters / 1e6)) in scaled.note


def test_extra_weights_are_not_zero(source: Path, tmp_path: Path) -> None:
    scaled = ScaledModel(source, billions=0.002, layers=5)
    model = load(scaled.path, torch.bfloat16)
    for layer in model.model.layers:
        for linear in (layer.self_attn.q_proj, layer.self_attn.v_proj, layer.mlp.gate_proj, layer.mlp.up_proj):
            assert linear.weight.count_nonzero() > 0.99 * linear.weight.numel()


def test_written_once_into_the_cache(source: Path, cache: Path) -> None:
    first = ScaledModel(source, billions=0.002)
    stamp = (first.path / "config.json").stat().st_mtime_ns
    assert ScaledModel(source, billions=0.002).path == first.path
    assert (first.path / "config.json").stat().st_mtime_ns == stamp
    other = ScaledModel(source, billions=0.003)
    assert other.path != first.path
    assert sorted(cache.iterdir()) == sorted([first.path, other.path])


@pytest.mark.parametrize("billions", [0.0001, 0.0005])
def test_too_small_a_goal_is_refused(source: Path, tmp_path: Path, billions: float) -> None:
    with pytest.raises(ArgumentError, match=r"too few.*0\.000[1-9]"):
        ScaledModel(source, billions=billions)
    assert not list(tmp_path.iterdir())


def test_other_models_are_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        ScaledModel(tmp_path, billions=0.002)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(CheckpointError, match="gpt2"):
        ScaledModel(tmp_path, billions=0.002)


def test_plans_for_the_demo_pair() -> None:
    target = {"hidden_size": 384, "intermediate_size": 768, "num_hidden_layers": 8, "num_attention_heads": 6}
    target |= {"num_key_value_heads": 3, "head_dim": 64, "vocab_size": 8192}
    target |= {"tie_word_embeddings": True, "rms_norm_eps": 1e-6}
    draft = target | {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 3}
    for config, billions in [(target, 0.4), (target, 1.0), (target, 8.0), (draft, 0.031)]:
        plan = plan_scale(config, billions=billions)
        assert plan.parameters == pytest.approx(billions * 1e9, rel=0.02)
        assert 1 < plan.intermediate_size / (plan.hidden_factor * config["hidden_size"]) <= 6
