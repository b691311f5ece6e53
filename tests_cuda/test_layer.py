"""A decoder layer in five kernels computes what transformers' modules compute, and a token's bits do not depend on the
others of its pass.

Without a GPU Triton's interpreter runs them, in float16 alone (`make test-triton`).
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from place import CUDA, DEVICE, stand_in
from test_kernels import DTYPES, here, near, triton_ops
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from forerun.core.tree import TokenTree
from forerun.model import TransformersTarget, masks
from forerun.model.inputs import Nodes
from forerun.model.kernels import accelerate, triton_layer, triton_slots
from forerun.model.kernels.forwards import ModelForward, StreamedLayerForward
from forerun.model.kernels.module_forwards import HeadForward, RotaryForward
from forerun.model.kernels.native import Heads
from forerun.model.kernels.triton_layer import ROWS, Normed
from model_kernels.conftest import COMMON

__all__ = ["here"]
pytestmark = pytest.mark.parametrize("dtype", DTYPES, ids=str)
WIDTH, DEPTH = 64, 32


@pytest.fixture(autouse=True)
def layers_here(here: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter stands in for the device here, too, and whole layers are not timed."""
    stand_in(monkeypatch, None if CUDA else triton_ops, triton_layer)


def make(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Normally distributed."""
    return (scale * torch.randn(*shape)).to(DEVICE, dtype)


def norm_of(dtype: torch.dtype, size: int = WIDTH) -> LlamaRMSNorm:
    norm = LlamaRMSNorm(size, eps=1e-5).to(DEVICE, dtype)
    norm.weight.copy_(1 + 0.3 * torch.randn(size))
    return norm


def behind(states: Tensor, norm: LlamaRMSNorm) -> Normed:
    return Normed(states, triton_layer.square(states), norm.weight, norm.variance_epsilon)


def each_alone(states: Tensor) -> list[Tensor]:
    """Each token in a pass of its own."""
    return [states[:, token : token + 1].contiguous() for token in range(states.shape[1])]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_product(dtype: torch.dtype, bias: bool, normed: bool) -> None:
    states, weight = make(1, ROWS, WIDTH, dtype=dtype), make(96, WIDTH, dtype=dtype, scale=0.2)
    added, residual, norm = make(96, dtype=dtype), make(1, ROWS, 96, dtype=dtype), norm_of(dtype)

    def product(given: Tensor, rest: Tensor | None) -> tuple[Tensor, Tensor]:
        what = behind(given, norm) if normed else given
        return triton_layer.multiply(what, weight, added if bias else None, residual=rest)

    plain = functional.linear(norm(states) if normed else states, weight, added if bias else None)
    near(product(states, None)[0], plain)
    found, squares = product(states, residual)
    near(found, residual + plain)
    near(squares.sum(1), found[0].float().square().sum(1))
    for token, alone in enumerate(each_alone(states)):
        own, parts = product(alone, residual[:, token : token + 1].contiguous())
        assert torch.equal(own[0, 0], found[0, token]) and torch.equal(parts[0], squares[token]), token


@pytest.mark.parametrize("bias", [False, True])
def test_gate(dtype: torch.dtype, bias: bool) -> None:
    states, weight, norm = make(2, ROWS // 2, WIDTH, dtype=dtype), make(192, WIDTH, dtype=dtype), norm_of(dtype)
    added = make(192, dtype=dtype) if bias else None
    found = triton_layer.gate(behind(states, norm), weight, added)
    gate, up = functional.linear(norm(states), weight, added).chunk(2, dim=-1)
    near(found, functional.silu(gate) * up)
    flat = found.view(1, ROWS, 96)
    for token, alone in enumerate(each_alone(states.view(1, ROWS, WIDTH))):
        assert torch.equal(triton_layer.gate(behind(alone, norm), weight, added)[0, 0], flat[0, token]), token


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("depth", [16, 32, 64])
def test_projection_rotation_and_cache(dtype: torch.dtype, bias: bool, depth: int) -> None:
    heads, slots, rows = Heads(queries=4, keys=2, depth=depth), 21, 2
    states, norm = make(1, ROWS, WIDTH, dtype=dtype), norm_of(dtype)
    weight = make(8 * depth, WIDTH, dtype=dtype, scale=0.2)
    added = make(8 * depth, dtype=dtype) if bias else None
    turns = (50 * torch.rand(1, ROWS, depth // 2)).repeat(1, 1, 2)
    angles = turns.cos().to(states), turns.sin().to(states)
    places = torch.randperm(rows * slots)[:ROWS].to(DEVICE)

    def run(given: Tensor, turned: tuple[Tensor, Tensor], where: Tensor) -> tuple[Tensor, Tensor]:
        stores = torch.full((2, rows, slots, 2, depth), 7.0).to(states)
        query = triton_layer.project(
            behind(given, norm), weight, added, turned, heads, stores=(stores[0], stores[1]), places=where
        )
        return query, stores.view(2, rows * slots, 2, depth)

    found, stored = run(states, angles, places)
    both = functional.linear(norm(states), weight, added).view(1, ROWS, 8, depth).transpose(1, 2)
    query, key = apply_rotary_pos_emb(both[:, :4], both[:, 4:6], *angles)
    near(found, query.transpose(1, 2))
    near(stored[0, places], key.transpose(1, 2)[0])
    near(stored[1, places], both[:, 6:].transpose(1, 2)[0])
    untouched = torch.ones(rows * slots, dtype=torch.bool, device=DEVICE).index_fill_(0, places, False)
    assert bool((stored[:, untouched] == 7).all())
    for token, alone in enumerate(each_alone(states)):
        turned = tuple(part[:, token : token + 1].contiguous() for part in angles)
        own, kept = run(alone, turned, places[token : token + 1])
        assert torch.equal(own[0, 0], found[0, token]), token
        assert torch.equal(kept[:, places[token]], stored[:, places[token]]), token


def cached(length: int, slots: int, heads: Heads, dtype: torch.dtype) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
    """Keys and values of two rows, queries of as many tokens as a pass has, and the places of a chain in row 1."""
    stores = make(2, 2, slots + 1, heads.keys, heads.depth, dtype=dtype)
    query = make(1, ROWS, heads.queries, heads.depth, dtype=dtype)
    places = slots + 1 + length + torch.arange(ROWS, device=DEVICE)
    return (stores[0], stores[1]), query, places


def causal(length: int, count: int, width: int, dtype: torch.dtype) -> Tensor:
    ends = length + torch.arange(count).view(-1, 1)
    seen = torch.arange(width).view(1, -1) <= ends
    return torch.where(seen, 0.0, torch.finfo(dtype).min).to(DEVICE, dtype).view(1, 1, count, width)


@pytest.mark.parametrize(
    ("length", "queries", "keys", "apart"),
    [(0, 4, 4, False), (5, 6, 2, True), (120, 6, 2, False), (250, 3, 1, True)],
)
def test_attention(
    dtype: torch.dtype, length: int, queries: int, keys: int, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token has the bits of a pass of its own, whatever the width, and whoever joins what the programs found."""
    heads, slots = Heads(queries=queries, keys=keys, depth=DEPTH), 500
    stores, query, places = cached(length, slots, heads, dtype)
    arrived = torch.zeros(keys, dtype=torch.int32, device=DEVICE)

    def attend(tokens: slice, width: int) -> Tensor:
        asked, where = query[:, tokens].contiguous(), places[tokens]
        seen = causal(length, ROWS, width, dtype)[:, :, tokens].contiguous()
        return triton_layer.attend(asked, stores, seen, places=where, scale=DEPTH**-0.5, arrived=arrived)

    found = attend(slice(0, ROWS), 300)
    assert not arrived.any()
    whole = [store[1:, :300].transpose(1, 2) for store in stores]
    mask = causal(length, ROWS, 300, dtype)
    near(found.view(query.shape), triton_ops.attend(query.transpose(1, 2), *whole, mask, DEPTH**-0.5))
    if apart:
        monkeypatch.setattr(triton_slots, "JOINED_APART", 0)
    for token in (0, 3, ROWS - 1):
        assert torch.equal(attend(slice(token, token + 1), 448)[0, 0], found[0, token]), token


@pytest.mark.parametrize("length", [0, 121, 255])
def test_a_node_of_a_tree_has_the_bits_of_plain_decoding(dtype: torch.dtype, length: int) -> None:
    """It has those of its path as a chain of its own, across the ends of shares, too."""
    tree = TokenTree.of(1, [*range(12)], [0, 0, 1, 1, 3, 2, 5, 5, 8, 8, 9, 9])
    nodes, count = Nodes.of_trees([tree]), 13
    heads, slots = Heads(queries=3, keys=1, depth=DEPTH), 400
    stores, query, places = cached(length, slots, heads, dtype)
    query, places = query[:, :count].contiguous(), places[:count]
    mask = torch.full((1, 1, count, slots), torch.finfo(dtype).min).to(DEVICE, dtype)
    mask[..., :length] = 0
    mask[0, 0, :, length : length + count][nodes.sees[0].to(DEVICE)] = 0
    arrived = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    found = triton_layer.attend(query, stores, mask, places=places, scale=0.2, arrived=arrived)
    assert not arrived.any()
    whole = [store[1:, :slots].transpose(1, 2) for store in stores]
    near(found.view(query.shape), triton_ops.attend(query.transpose(1, 2), *whole, mask, 0.2))
    assert nodes.paths is not None
    for node in range(count):
        path = [one for one in nodes.paths[0, node].tolist() if one >= 0]
        alone = stores[0].clone(), stores[1].clone()
        for store, kept in zip(alone, stores, strict=True):
            store[1, length : length + len(path)] = kept[1, [length + one for one in path]]
        end = length + len(path) - 1
        seen = causal(end, 1, 300, dtype)
        where = slots + 1 + torch.tensor([end], device=DEVICE)
        asked = query[:, node : node + 1].contiguous()
        plain = triton_layer.attend(asked, alone, seen, places=where, scale=0.2, arrived=arrived)
        assert torch.equal(plain[0, 0], found[0, node]), node


def test_attention_of_a_tree_and_of_rows_without_tokens(dtype: torch.dtype) -> None:
    """Two rows: one with a tree, of the other only padding."""
    heads, slots, length, count = Heads(queries=4, keys=2, depth=DEPTH), 200, 130, 5
    stores, query, _ = cached(length, slots, heads, dtype)
    query = query[:, :10].reshape(2, count, 4, DEPTH)
    nodes = Nodes.of_trees([TokenTree.of(5, [6, 7, 8, 9], [0, 0, 1, 3])])
    own = length + torch.arange(count, device=DEVICE)
    places = torch.cat([own, torch.full_like(own, 2 * slots + 1)])
    mask = torch.full((2, 1, count, slots), torch.finfo(dtype).min).to(DEVICE, dtype)
    mask[0, 0, :, :length] = 0
    mask[0, 0, :, length : length + count][nodes.sees[0].to(DEVICE)] = 0
    mask[1, ..., 0] = 0
    arrived = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    found = triton_layer.attend(query, stores, mask, places=places, scale=0.2, arrived=arrived)
    whole = [store[:, :slots].transpose(1, 2) for store in stores]
    near(found.view(query.shape), triton_ops.attend(query.transpose(1, 2), *whole, mask, 0.2))


def test_long_contexts_are_read_in_larger_shares(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_slots, "LARGE_FROM", 128)
    monkeypatch.setattr(triton_slots, "LARGE_SHARE", 64)
    test_attention(dtype, 250, 3, 1, False, monkeypatch)


@pytest.mark.parametrize("window", [None, 7])
def test_mask(dtype: torch.dtype, window: int | None) -> None:
    trees = [TokenTree.of(5, [6, 7, 8, 9], [0, 0, 1, 3]), TokenTree.of(7, [], [])]
    nodes = Nodes.of_trees(trees)
    parts = nodes.structure([9, 4], missing=3, unseen=0, dump=40, longest=64)
    block = masks.Block(*(part.to(DEVICE) for part in parts[:4]))
    style = masks.MaskStyle(types=(masks.SLIDING if window else masks.FULL,), window=window)
    found = masks.build(block, style, 40, dtype)
    assert torch.equal(found, masks.build(block, style, 40, torch.float32).clamp(min=torch.finfo(dtype).min).to(dtype))


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 8},
    "qwen2": {},
    "qwen3": {},
}


def pair(family: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """A random model, and the same with faster forwards."""
    config = AutoConfig.for_model(family, **{**COMMON, "head_dim": DEPTH, **FAMILIES[family]})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for weight in model.parameters():
        weight.copy_(torch.randn_like(weight) * (0.1 if weight.dim() > 1 else 0.3) + (weight.dim() == 1))
    model = model.to(DEVICE)
    faster = copy.deepcopy(model)
    accelerate.accelerate(faster)
    return model, faster


@pytest.mark.parametrize("family", FAMILIES)
def test_models(dtype: torch.dtype, family: str) -> None:
    """Prompts, single tokens and trees through whole models, with the same tokens as without."""
    model, faster = pair(family, dtype)
    kinds = {type(module.__dict__["forward"]) for module in faster.modules() if "forward" in module.__dict__}
    assert {StreamedLayerForward, ModelForward, HeadForward, RotaryForward} <= kinds
    prompt, tree = torch.randint(3, 128, (12,)).tolist(), TokenTree.of(5, [6, 7, 8, 9], [0, 0, 1, 3])
    texts, scores = list[list[int]](), list[Tensor]()
    for one in (model, faster):
        target, text = TransformersTarget(one, rows=2, slots=60), list[int]()
        target.prefill([1], [prompt[:-1]])
        last = prompt[-1]
        scores.append(target.score([1], [TokenTree.of(last, tree.tokens[1:], tree.parents[1:])]).logits)
        for _ in range(4):
            last = int(target.score([1], [TokenTree.of(last, [], [])]).logits.argmax())
            target.commit([1], [()])
            text.append(last)
        texts.append(text)
    near(scores[1], scores[0], 0.05)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_chain_has_the_bits_of_plain_decoding(dtype: torch.dtype, family: str) -> None:
    """Logits of whole models: the first tokens of a pass of sixteen beside passes of each alone."""
    _, faster = pair(family, dtype)
    tokens = torch.randint(3, 128, (30,)).tolist()
    chain = TokenTree.of(tokens[13], tokens[14:29], range(15))
    target = TransformersTarget(faster, rows=1, slots=60)
    target.prefill([0], [tokens[:13]])
    scored = target.score([0], [chain]).logits[0]
    assert len(scored) == ROWS
    for place in range(5):
        alone = target.score([0], [TokenTree.of(tokens[13 + place], [], [])]).logits[0, 0]
        assert torch.equal(alone, scored[place]), place
        target.commit([0], [()])


def test_the_choice_is_kept_with_the_verdict(dtype: torch.dtype, tmp_path: Path) -> None:
    """A model passes its self-check with whole layers, and a second start compares and times nothing."""
    config = AutoConfig.for_model("llama", **{**COMMON, "head_dim": DEPTH, "num_hidden_layers": 1})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for weight in model.parameters():
        weight.copy_(torch.randn_like(weight) * (0.1 if weight.dim() > 1 else 0.3) + (weight.dim() == 1))
    model.save_pretrained(tmp_path)
    first, second = (TransformersTarget.load(tmp_path, slots=64, dtype=dtype, device=DEVICE) for _ in range(2))
    names = accelerate.list_replaced(first.model)
    assert {"model", "model.layers.0", "model.rotary_emb", "lm_head"} <= set(names)
    assert accelerate.list_replaced(second.model) == names
    assert any(type(part.__dict__.get("forward")) is StreamedLayerForward for part in second.model.modules())
