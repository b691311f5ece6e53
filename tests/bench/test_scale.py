"""Enlarged targets and heads compute what the small ones do."""

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from bench.heads import SIZES, head
from forerun import LLM, SamplingParams
from forerun.cli import demo
from forerun.control.config import method_of
from forerun.demo import scale
from forerun.demo.scale import ScaledModel, plan_scale, remap_boundary, scale_config, scale_head, scaled_head_folder
from forerun.drafters.kinds import kind_named
from forerun.errors import ArgumentError, CheckpointError
from forerun.heads.base import Head
from forerun.heads.files import (
    HeadCheckpoint,
    TargetFacts,
    differences,
    expected_shapes,
    format_for,
    read_head,
    write_head,
)
from forerun.heads.runner import SequentialRunner
from forerun.model import TransformersTarget
from forerun.types import LAST_HIDDEN
from selection import one_in

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


PROMPT = torch.randint(3, 256, (40,), generator=torch.Generator().manual_seed(4)).tolist()
VARIANTS: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "eagle3.1": {"fc_norm": True, "norm_output": True, "qk_norm": True},
    "speculators": {"norm_before_residual": True, "norm_before_fc": True, "attention_bias": True, "fc_bias": True},
    "tables": {"own_embedding": True, "draft_vocab_size": 256, "boundaries": (0, 3, LAST_HIDDEN), "mlp_bias": True},
    "shared": {"own_lm_head": False, "draft_vocab_size": 256, "num_hidden_layers": 2},
}


@pytest.fixture(scope="module")
def scaled(source_tied: Path, tmp_path_factory: pytest.TempPathFactory) -> ScaledModel:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORERUN_CACHE", str(tmp_path_factory.mktemp("scaled")))
        return ScaledModel(source_tied, billions=0.002, layers=5, dtype="float32")


def loaded(folder: Path, dtype: torch.dtype) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()


@torch.no_grad()
def drafted_logits(folder: Path, checkpoint: HeadCheckpoint, dtype: torch.dtype) -> torch.Tensor:
    """(6, V'): after the prompt, and after five more tokens that the head reads with its own features."""
    target = TransformersTarget(loaded(folder, dtype), slots=96)
    made = checkpoint.build(dtype).eval()
    scored = target.prefill([0], [PROMPT[:-1]], boundaries=frozenset(made.config.boundaries))
    runner = SequentialRunner(made, target, 1, 96)
    runner.ingest([0], [PROMPT[1:]], scored.hidden_states)

    def chain(first: torch.Tensor) -> torch.Tensor:
        logits = [first[0, 0]]
        for token in (7, 90, 31, 200, 11):
            logits.append(runner.descend(torch.tensor([[token]]), torch.zeros(1, 1, dtype=torch.int64))[0, 0])
        return torch.stack(logits).float()

    return runner.unroll([0], 5, chain)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_function_is_the_small_heads(source_tied: Path, scaled: ScaledModel, variant: str) -> None:
    small = HeadCheckpoint.of(head(**VARIANTS[variant]))
    old = drafted_logits(source_tied, small, torch.float32)
    new = drafted_logits(scaled.path, scale_head(small, scaled), torch.float32)
    assert old.std() > 0.5  # otherwise the next lines say nothing
    torch.testing.assert_close(new, old, rtol=0, atol=2e-4)
    assert torch.equal(new.argmax(-1), old.argmax(-1))


def test_bf16_differs_by_rounding_only(source_tied: Path, scaled: ScaledModel) -> None:
    small = HeadCheckpoint.of(head())
    exact = drafted_logits(source_tied, small, torch.float32)
    old = drafted_logits(source_tied, small, torch.bfloat16)
    new = drafted_logits(scaled.path, scale_head(small, scaled), torch.bfloat16)
    rounding = (old - exact).abs().max()
    assert rounding > 0
    assert (new - old).abs().max() <= 2 * rounding


_STARTED_AT_ZERO = (
    *("markov", "linear", "confidence", "res_connection", "bias"),
    *("embed_proj", "prefix_gru", "kernel", "codebook"),
)


def other_head(kind: str, **options: Any) -> Head:
    """A random head of another kind for `lively_llama`, every weight large enough to matter."""
    torch.manual_seed(1)
    sizes = {"target_hidden_size": 48, "vocab_size": 256, "draft_vocab_size": 256}
    layers = SIZES | {"num_hidden_layers": 2}
    last, masked = {"boundaries": (LAST_HIDDEN,)}, {"mask_token_id": 3, "boundaries": (1, 2)}
    shapes: dict[str, dict[str, Any]] = {
        "medusa": {"num_heads": 4, **last},
        "hydra": {**layers, "num_heads": 4, "num_layers": 2, "num_hidden_layers": 1, **last},
        "mlp_speculator": {"n_predict": 4, "inner_dim": 32, **last},
        "peagle": {**layers, **masked},
        "kangaroo": {**layers, "num_hidden_layers": 1, "boundaries": (2,)},
        "dflash": {**layers, **masked, "own_lm_head": False, "block_size": 5},
        "dspark": {**layers, **masked, "own_lm_head": False, "block_size": 5},
        "domino": {**layers, **masked, "own_lm_head": False, "block_size": 5, "emb_dim": 12, "gru_hidden_dim": 20},
        "dflash2": {**layers, **masked, "own_lm_head": False, "block_size": 5, "selector_rank": 8, "selector_top_k": 6},
    }
    module = kind_named(kind).head
    made = module(module.Config(**sizes, **shapes[kind] | options))
    for name, weight in made.named_parameters():
        if name.endswith("norm.weight") or (name.startswith("ln.") and name.endswith("weight")):
            torch.nn.init.uniform_(weight, 0.5, 1.5)
        elif any(part in name for part in _STARTED_AT_ZERO):
            torch.nn.init.normal_(weight, std=0.2)
    return made


HEADS: dict[str, Callable[[], Head]] = {
    "eagle3": head,
    "eagle": lambda: head(generation=1, boundaries=(LAST_HIDDEN,), own_lm_head=False, draft_vocab_size=256),
    "medusa": lambda: other_head("medusa"),
    "dflash": lambda: other_head("dflash", qk_norm=True),
    "dspark": lambda: other_head("dspark", markov_rank=8, markov_head_type="rnn"),
    "domino": lambda: other_head("domino"),
    "dflash2": lambda: other_head("dflash2", conv_kernel_size=3, conv_group_size=8),
    "peagle": lambda: other_head("peagle", fc_norm=True),
    "kangaroo": lambda: other_head("kangaroo"),
    "hydra": lambda: other_head("hydra"),
    "hydra without prefix": lambda: other_head("hydra", num_hidden_layers=0),
    "mlp_speculator": lambda: other_head("mlp_speculator"),
    "mlp_speculator tied": lambda: other_head("mlp_speculator", tie_weights=True),
    "dspark gated": lambda: other_head("dspark", markov_rank=8, markov_head_type="gated"),
}


SHAPES: list[dict[str, int]] = [{"top_k": 1, "nodes": 4}, {"top_k": 4, "nodes": 12}]


@pytest.mark.parametrize(("name", "shape"), one_in(3, itertools.product(HEADS, SHAPES)), ids=str)
def test_drafts_are_the_small_heads(source_tied: Path, scaled: ScaledModel, name: str, shape: dict[str, int]) -> None:
    small = HeadCheckpoint.of(HEADS[name]())
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    found = []
    for folder, checkpoint in ((source_tied, small), (scaled.path, scale_head(small, scaled))):
        drafts = {"num_speculative_tokens": 4, "adaptive": False, **shape}
        drafts |= {"exit_below": 0.0} if name == "kangaroo" else {}
        config = {"method": name.split(maxsplit=1)[0], "model": checkpoint.build().eval(), **drafts}
        llm = LLM(str(folder), tokenizer=False, max_num_seqs=1, max_model_len=96, dtype="float32")
        output = llm.generate([{"prompt_token_ids": PROMPT}], params, speculative=config, trace=True)[0].outputs[0]
        found.append((output.token_ids, [[(n.token, n.parent) for n in step.nodes] for step in output.trace]))
    assert found[0] == found[1]
    assert any(nodes for nodes in found[0][1])


def test_it_costs_what_a_head_of_that_width_costs(scaled: ScaledModel) -> None:
    config = scale_config(head().config, scaled)
    target = loaded(scaled.path, torch.float32)
    layer = sum(weight.numel() for weight in target.model.layers[0].parameters() if weight.dim() == 2)
    attention = target.model.layers[0].self_attn
    embedding_half = sum(part.weight.numel() for part in (attention.q_proj, attention.k_proj, attention.v_proj))
    assert config.hidden_size == target.config.hidden_size
    shapes = expected_shapes(config).items()
    matrices = [shape for name, shape in shapes if len(shape) == 2 and name not in ("fc.weight", "embed_tokens.weight")]
    assert sum(map(math.prod, matrices)) == layer + embedding_half + config.draft_vocab_size * config.hidden_size


def test_padding_is_no_zeros_where_it_is_read(scaled: ScaledModel) -> None:
    tensors = scale_head(HeadCheckpoint.of(head()), scaled).tensors
    for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head"):
        (weight,) = [tensor for key, tensor in tensors.items() if f"{name}.weight" in key]
        assert weight.count_nonzero() > 0.99 * weight.numel(), name


@pytest.mark.parametrize("style", ["flat", "speculators", "modelopt"])
def test_a_head_on_disk_is_enlarged_once_and_in_its_own_format(
    source_tied: Path, scaled: ScaledModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, style: str
) -> None:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    small = HeadCheckpoint.of(head())
    folder = write_head(small, tmp_path / "head", style, TargetFacts.read(source_tied))
    first = scaled_head_folder(folder, scaled)
    assert not differences(read_head(first), scale_head(read_head(folder), scaled))
    stamp = (first / "config.json").stat().st_mtime_ns
    assert scaled_head_folder(folder, scaled) == first and (first / "config.json").stat().st_mtime_ns == stamp

    other = HeadCheckpoint(config=small.config, tensors={**small.tensors, "fc.weight": -small.tensors["fc.weight"]})
    write_head(other, tmp_path / "head", style, TargetFacts.read(source_tied))
    assert scaled_head_folder(folder, scaled) != first


def test_what_cannot_be_enlarged_is_refused(scaled: ScaledModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match=r"0\.\.3"):
        scale_head(HeadCheckpoint.of(head(boundaries=(1, 2, 4))), scaled)
    monkeypatch.setattr(scale, "ENLARGED", ("medusa",))
    with pytest.raises(ArgumentError, match="kind eagle3 are not enlarged, only medusa"):
        scale_head(HeadCheckpoint.of(head()), scaled)
    monkeypatch.undo()
    with pytest.raises(ArgumentError, match="scale_input is not enlarged"):
        scale_config(other_head("mlp_speculator", scale_input=True).config, scaled)


@pytest.mark.parametrize("kind", [kind for kind in scale.ENLARGED if not kind.startswith("eagle")])
def test_a_folder_is_known_for_the_head_that_it_holds(
    kind: str, source_tied: Path, scaled: ScaledModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of EAGLE's heads others tell: without a method it drafts as what it is, and it grows with its target."""
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    made = HeadCheckpoint.of(other_head(kind))
    folder = write_head(made, tmp_path / "head", format_for(kind), TargetFacts.read(source_tied))
    assert method_of(folder) == kind
    grown = demo._with_heads_for(scaled, {"method": kind, "model": str(folder)})
    assert grown == {"method": kind, "model": str(scaled_head_folder(folder, scaled))}
