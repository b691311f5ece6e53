from __future__ import annotations

import pytest
import torch
from torch import nn

from emulation import needs_bfloat16
from forerun.model.kernels.attention import fold_attention
from forerun.model.padding import Buckets

LOWEST = torch.finfo(torch.bfloat16).min


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
        mask[..., seen:] = LOWEST
        states, _ = fold_attention(nn.Identity(), query, key[:, :, :width], value[:, :, :width], mask, scaling=0.125)
        results.append(states)
    assert all(torch.equal(result, results[0]) for result in results), widths
