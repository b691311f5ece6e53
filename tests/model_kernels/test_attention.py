import pytest
import torch
from torch import nn

from emulation import needs_bfloat16
from forerun.errors import UnsupportedModelError
from forerun.model.inputs import Buckets
from forerun.model.kernels import attention
from forerun.model.kernels.attention import fold_attention
from model_kernels.conftest import FAMILIES, build, by_definition


def problem(heads: int, kv_heads: int, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(heads * 100 + count)
    query = torch.randn(2, heads, count, 16, generator=generator, dtype=torch.float64)
    # stored (rows, slots, heads, dim) as in the cache, hence strided
    key, value = torch.randn(2, 2, 40, kv_heads, 16, generator=generator, dtype=torch.float64)
    mask = torch.zeros(2, 1, count, 40, dtype=torch.float64)
    mask[..., 33:] = torch.finfo(dtype).min
    mask[1, ..., 20:] = torch.finfo(dtype).min
    return tuple(t.to(dtype) for t in (query, key.transpose(1, 2), value.transpose(1, 2), mask))


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_equals_attention_by_definition(kv_heads: int, count: int) -> None:
    """Whichever mask came in the pass before."""
    query, key, value, mask = problem(6, kv_heads, count, torch.float32)
    for seen in (mask, mask.flip(0).contiguous(), mask):
        found, weights = fold_attention(nn.Identity(), query, key, value, seen, scaling=0.25)
        assert weights is None
        torch.testing.assert_close(found.double(), by_definition(query, key, value, seen, 0.25), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("attention_path")
@pytest.mark.parametrize("kv_heads", [1, 3, 6])
def test_a_tokens_bits_do_not_depend_on_the_count(kv_heads: int) -> None:
    for trial in range(20):
        torch.manual_seed(trial)
        query = torch.randn(1, 6, 16, 64).bfloat16()
        key, value = torch.randn(2, 1, 320, kv_heads, 64).bfloat16().transpose(2, 3)
        mask = torch.zeros(1, 1, 16, 320, dtype=torch.bfloat16)
        mask[..., 300:] = torch.finfo(torch.bfloat16).min
        whole, _ = fold_attention(nn.Identity(), query, key, value, mask, scaling=0.125)
        for count in (1, 2, 3, 6, 8):
            part, _ = fold_attention(nn.Identity(), query[:, :, :count], key, value, mask[:, :, :count], scaling=0.125)
            assert torch.equal(part, whole[:, :count]), (trial, count)


@pytest.mark.usefixtures("attention_path")
@needs_bfloat16
@pytest.mark.parametrize("seen", [60, 180, 250, 300, 700])
def test_a_tokens_bits_do_not_depend_on_the_width_of_the_cache(seen: int) -> None:
    buckets = Buckets()
    widths = sorted({buckets.pad_width(used, 1024) for used in range(seen, 1024, 16)})
    torch.manual_seed(seen)
    query = torch.randn(1, 8, 4, 64).bfloat16()
    key, value = torch.randn(2, 1, 1024, 4, 64).bfloat16().transpose(2, 3)
    results = []
    for width in widths:
        mask = torch.zeros(1, 1, 4, width, dtype=torch.bfloat16)
        mask[..., seen:] = torch.finfo(torch.bfloat16).min
        states, _ = fold_attention(nn.Identity(), query, key[:, :, :width], value[:, :, :width], mask, scaling=0.125)
        results.append(states)
    assert all(torch.equal(result, results[0]) for result in results), widths


@pytest.mark.parametrize("extra", ["softcap", "s_aux"])
def test_what_it_cannot_honour_is_refused(extra: str) -> None:
    query, key, value, mask = problem(6, 2, 3, torch.float32)
    with pytest.raises(UnsupportedModelError, match="repack=False"):
        fold_attention(nn.Identity(), query, key, value, mask, **{extra: 30.0})


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_computes_the_same(family: str) -> None:
    plain, changed = build(family, torch.float32), build(family, torch.float32)
    assert attention.suits(changed) == (family != "gemma2")
    if family == "gemma2":
        return
    attention.install(changed)
    ids = torch.randint(0, 128, (2, 12), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(changed(input_ids=ids).logits, plain(input_ids=ids).logits, rtol=1e-4, atol=1e-4)


def test_generate_still_works() -> None:
    plain, changed = build("llama", torch.float32), build("llama", torch.float32)
    attention.install(changed)
    ids = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(2))
    padding = torch.ones_like(ids)
    padding[0, :4] = 0
    options = {"attention_mask": padding, "max_new_tokens": 8, "do_sample": False}
    assert torch.equal(changed.generate(ids, **options), plain.generate(ids, **options))
