"""Our kernels in Triton compute what torch's and transformers' operations compute, alone and in whole models.

Without a GPU Triton's interpreter runs them, in float16 alone (`make test-triton`): its bfloat16 does not round.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from place import CUDA, DEVICE, stand_in
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from forerun.core.tree import TokenTree
from forerun.model import TransformersTarget, updating
from forerun.model.inputs import Nodes, TreePaths
from forerun.model.kernels import accelerate
from forerun.model.kernels.module_forwards import AttentionForward, GatedForward, NormForward
from forerun.model.kernels.native import Heads
from model_kernels.conftest import COMMON

INTERPRETED = not CUDA and os.environ.get("TRITON_INTERPRET") == "1"
if not CUDA and not INTERPRETED:
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1", allow_module_level=True)
triton_ops: Any = pytest.importorskip("forerun.model.kernels.triton_ops", exc_type=ImportError)

DTYPES = [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]
pytestmark = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> object:
    """The interpreter stands in for the device; whole layers are in `test_layer`."""
    torch.manual_seed(0)
    stand_in(monkeypatch, triton_ops if INTERPRETED else None, None)
    with torch.no_grad():
        yield


def near(found: Tensor, expected: Tensor, share: float = 2**-7) -> None:
    assert found.shape == expected.shape and found.dtype == expected.dtype
    limit = share * float(expected.float().abs().max())
    assert float((found.float() - expected.float()).abs().max()) <= limit


@pytest.mark.parametrize("size", [48, 384, 6144])
@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_norm(dtype: torch.dtype, size: int, scale: float) -> None:
    norm = LlamaRMSNorm(size, eps=1e-5).to(DEVICE, dtype)
    norm.weight.copy_(torch.randn(size))
    states = (scale * torch.randn(2, 3, size)).to(DEVICE, dtype)
    near(triton_ops.rms_norm(states, norm.weight, 1e-5), norm(states))


@pytest.mark.parametrize("size", [96, 1100])
def test_gated(dtype: torch.dtype, size: int) -> None:
    both = (4 * torch.randn(2, 3, 2 * size)).to(DEVICE, dtype)
    gate, up = both.chunk(2, dim=-1)
    near(triton_ops.silu_and_mul(both), functional.silu(gate) * up, 2**-9)


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("queries", "keys", "depth"), [(4, 2, 32), (3, 1, 64), (2, 2, 128)])
def test_place(dtype: torch.dtype, queries: int, keys: int, depth: int, norms: bool) -> None:
    batch, count, rows, slots = 2, 7, 3, 11
    states = torch.randn(batch, count, (queries + 2 * keys) * depth).to(DEVICE, dtype)
    turns = (50 * torch.rand(batch, count, depth // 2)).repeat(1, 1, 2)
    angles = turns.cos().to(states), turns.sin().to(states)
    own = [LlamaRMSNorm(depth, eps=epsilon).to(DEVICE, dtype) for epsilon in (1e-6, 1e-2)]
    for norm in own:
        norm.weight.copy_(torch.rand(depth))
    query_norm, key_norm = (NormForward(n) if norms else None for n in own)
    stores = torch.full((2, rows, slots, keys, depth), 7.0).to(states)
    places = torch.randperm(rows * slots)[: batch * count].to(DEVICE)
    heads = Heads(queries=queries, keys=keys, depth=depth, query_norm=query_norm, key_norm=key_norm)
    found = triton_ops.rope_and_write(states, angles, heads, (stores[0], stores[1]), places)
    query, key, value = states.view(batch, count, -1, depth).split([queries, keys, keys], dim=2)
    if norms:
        query, key = own[0](query), own[1](key)
    query, key = (
        part.transpose(1, 2) for part in apply_rotary_pos_emb(query.transpose(1, 2), key.transpose(1, 2), *angles)
    )
    near(found, query)
    flat = stores.view(2, rows * slots, keys, depth)
    near(flat[0, places], key.flatten(0, 1))
    assert torch.equal(flat[1, places], value.flatten(0, 1))
    untouched = torch.ones(rows * slots, dtype=torch.bool, device=DEVICE).index_fill_(0, places, False)
    assert bool((flat[:, untouched] == 7).all())


@pytest.mark.parametrize(
    "sizes",
    [
        (1, 6, 3, 1, 200, 64, 64),
        (2, 8, 2, 7, 300, 64, 32),
        (1, 4, 4, 40, 640, 32, 32),
        (3, 6, 3, 1, 64, 64, 64),
        (1, 8, 1, 20, 1000, 128, 128),
        (2, 2, 2, 5, 3, 16, 16),
    ],
)
def test_attention(dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    """Of so many sequences, heads, heads of keys, tokens, slots, and widths of keys and values."""
    batch, heads, key_heads, count, width, depth, value_depth = sizes
    query = torch.randn(batch, count, heads, depth).to(DEVICE, dtype).transpose(1, 2)
    held = [torch.randn(batch, width + 3, key_heads, size).to(DEVICE, dtype) for size in (depth, value_depth)]
    key, value = (store[:, :width].transpose(1, 2) for store in held)
    seen = torch.rand(batch, 1, count, width) < 0.3
    seen[..., width // 2 :] = False  # whole blocks that nobody sees
    seen[..., 0] = True
    mask = torch.where(seen, 0.0, torch.finfo(dtype).min).to(DEVICE, dtype)
    assert triton_ops.takes_attention(query, key, value, mask)
    keys, values = (part.float().repeat_interleave(heads // key_heads, 1) for part in (key, value))
    expected = functional.scaled_dot_product_attention(query.float(), keys, values, attn_mask=mask.float())
    near(triton_ops.attend(query, key, value, mask, depth**-0.5), expected.transpose(1, 2).to(dtype))
    if width // 2 % 64 == 0:  # the slots that a program takes: what nobody sees is not read
        for store in held:
            store[:, width // 2 :] = torch.nan
        assert not triton_ops.attend(query, key, value, mask, depth**-0.5).isnan().any()


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_models(dtype: torch.dtype, family: str) -> None:
    """Whole passes over prompts and trees, and weights exchanged afterwards."""
    more = {"sliding_window": 8} if family == "mistral" else {}
    config = AutoConfig.for_model(family, **{**COMMON, "head_dim": 32, **more})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for weight in model.parameters():
        weight.copy_(torch.randn_like(weight) * (0.1 if weight.dim() > 1 else 0.3) + (weight.dim() == 1))
    model, faster = model.to(DEVICE), copy.deepcopy(model).to(DEVICE)
    assert accelerate.accelerate(faster).forwards > 0
    kinds = {type(module.__dict__["forward"]) for module in faster.modules() if "forward" in module.__dict__}
    assert kinds == {NormForward, GatedForward, AttentionForward}
    _alike(model, faster)
    model.load_state_dict({name: torch.randn_like(value) * 0.1 for name, value in model.state_dict().items()})
    updating.write_weights(faster, model)
    _alike(model, faster)


def _alike(model: Any, faster: Any) -> None:
    ids = torch.randint(3, 128, (2, 20), generator=torch.Generator().manual_seed(1)).tolist()
    trees = [TokenTree.of(5, [6, 7, 8, 9], [0, 0, 1, 3]), TokenTree.of(7, [], [])]
    answers = []
    for one in (model, faster):
        target = TransformersTarget(one, rows=2, slots=40)
        prompt = target.prefill([0, 1], [ids[0][:13], ids[1]]).logits
        answers.append((prompt, target.score([0, 1], trees).logits))
    for before, after in zip(*answers, strict=True):
        real = before.new_ones(before.shape[:2], dtype=torch.bool)
        if before.shape[1] > 1:
            real[1, 1:] = False
        near(after[real], before[real], 0.05)


def test_where_triton_fails_torch_computes(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No compiler for what calls the kernels, say: it is said once."""

    def failing(*_given: Any, **_named: Any) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(triton_ops, "silu_and_mul", failing)
    triton_ops.tried.cache_clear()
    try:
        config = AutoConfig.for_model("llama", **{**COMMON, "head_dim": 32})
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().to(DEVICE)
        faster = copy.deepcopy(model)
        assert accelerate.accelerate(faster).forwards == 0
        _alike(model, faster)
    finally:
        triton_ops.tried.cache_clear()
    assert caplog.text.count("Failed to find C compiler") == 1


@pytest.mark.parametrize(("heads", "key_heads"), [(6, 3), (4, 4), (8, 2)])
@pytest.mark.parametrize("length", [5, 60, 250])
def test_along_its_path_a_node_has_the_bits_of_plain_decoding(
    dtype: torch.dtype, heads: int, key_heads: int, length: int
) -> None:
    """Whatever else is in the tree, however wide the cache is, and whether it stands in a chain."""
    tree = TokenTree.of(1, [*range(12)], [0, 0, 1, 1, 3, 2, 5, 5, 8, 8, 9, 9])
    nodes = Nodes.of_trees([tree])
    assert nodes.paths is not None
    width, count = length + 40, 13
    query = torch.randn(1, count, heads, 32).to(DEVICE, dtype).transpose(1, 2)
    key, value = torch.randn(2, 1, width, key_heads, 32).to(DEVICE, dtype).transpose(2, 3)
    mask = torch.full((1, 1, count, width), torch.finfo(dtype).min).to(DEVICE, dtype)
    mask[..., :length] = 0
    mask[0, 0, :, length : length + count][nodes.sees[0].to(DEVICE)] = 0
    lengths = torch.tensor([length], device=DEVICE)
    found = triton_ops.attend(query, key, value, mask, 0.2, paths=TreePaths(lengths, nodes.paths.to(DEVICE)))
    near(found, triton_ops.attend(query, key, value, mask, 0.2))
    for node in range(count):
        own = [one for one in nodes.paths[0, node].tolist() if one >= 0]
        slots = [*range(length), *(length + one for one in own)]
        seen = torch.zeros(1, 1, 1, len(slots)).to(DEVICE, dtype)
        committed = torch.tensor([len(slots) - 1], device=DEVICE)
        root = TreePaths(committed, torch.zeros(1, 1, 1, dtype=torch.int32, device=DEVICE))
        asked = query[:, :, node : node + 1]
        plain = triton_ops.attend(asked, key[:, :, slots], value[:, :, slots], seen, 0.2, paths=root)
        assert torch.equal(plain[0, 0], found[0, node]), node
