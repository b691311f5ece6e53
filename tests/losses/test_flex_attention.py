"""FlexAttention over packed documents gives what the blockwise attention gives, and its blocks miss nothing."""

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from forerun.errors import ArgumentError
from forerun.heads.eagle import Eagle3Objective, Eagle3Settings
from forerun.heads.layers import LatentConfig
from forerun.losses import unrolled_attention as module
from forerun.losses.objective import FrozenTarget
from forerun.losses.unrolled_attention import FlexMask, blocks_of, ttt_attention
from training.ttt import batch_of, head, model, tokens

LENGTH = 37
CASES = [(0, None), (1, None), (3, None), (0, 1), (1, 4), (3, 20), (2, 0), (3, -1), (0, 9)]
"""Steps after step 0, and the keys of step 0 that a query sees."""


def packed(length: int = LENGTH) -> Tensor:
    """Rows of several documents, with padding and without, one that fills blocks of its own."""
    third, most = length // 3, length - 5
    first = [0] * third + [1] * (most - third) + [-1] * (length - most)
    return torch.tensor([first, [0] * length, [0, 0, 1] + [2] * (length - 3), [-1] * length])


def given(steps: int, length: int = LENGTH, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """A query of four heads, then keys and values of two groups."""
    generator = torch.Generator().manual_seed(steps)
    shapes = [(4, 4, length, 8)] + [(4, 2, length, 8)] * (2 + 2 * steps)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def of(parts: list[Tensor], mask: object) -> Tensor:
    return ttt_attention(parts[0], parts[1], parts[2], list(zip(parts[3::2], parts[4::2], strict=True)), mask)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch forbids a backward pass on a CPU, though its uncompiled function has one."""
    monkeypatch.setattr(module, "BLOCK", 8)
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)


@pytest.mark.parametrize(("steps", "reach"), CASES)
def test_it_and_its_gradients_equal_the_blockwise_attention(steps: int, reach: int | None) -> None:
    parts = [part.requires_grad_() for part in given(steps)]
    ours, theirs = of(parts, FlexMask(packed(), reach)), of(parts, blocks_of(packed(), reach))
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    flow = torch.randn(ours.shape, generator=torch.Generator().manual_seed(9), dtype=ours.dtype)
    for found, expected in zip(*(torch.autograd.grad(one, parts, flow) for one in (ours, theirs)), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("steps", "reach"), CASES)
def test_no_block_is_missing_and_none_is_whole_that_is_not(steps: int, reach: int | None) -> None:
    """Against a mask that is written out; uncompiled, PyTorch looks at the function alone."""
    mask, block = FlexMask(packed(), reach), module.BLOCK
    made, size = mask.of(steps), mask.documents.shape[1]
    row, query, key = torch.arange(4)[:, None, None], torch.arange(size)[:, None], torch.arange((steps + 1) * size)
    sees = made.mask_mod(row, torch.tensor(0), query, key)
    groups = sees.view(4, size // block, block, -1, block)
    some, every = groups.any(4).any(2), groups.all(4).all(2)
    listed = [torch.zeros_like(some), torch.zeros_like(some)]
    for found, counts, indices in (
        (listed[0], made.kv_num_blocks, made.kv_indices),
        (listed[1], made.full_kv_num_blocks, made.full_kv_indices),
    ):
        for place in torch.cartesian_prod(torch.arange(4), torch.arange(size // block)).tolist():
            chosen = indices[place[0], 0, place[1]][: counts[place[0], 0, place[1]]].long()
            found[place[0], place[1], chosen] = True
    partial, whole = listed
    assert not (partial & whole).any() and not (some & ~(partial | whole)).any() and not (whole & ~every).any()
    assert whole.any() or reach is not None, "long documents have whole blocks"
    assert int((partial | whole).sum()) < 0.7 * some.numel(), "and most blocks are left out"


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "reach"), [(0, None), (2, None), (2, 150)])
def test_compiled_it_reads_the_blocks(steps: int, reach: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU PyTorch compiles the forward pass alone, which leaves out what is not listed."""
    monkeypatch.setattr(module, "BLOCK", 128)
    parts, documents = given(steps, 400, torch.float32), packed(400)
    monkeypatch.setattr(module, "kernel", lambda _: torch.compile(flex.flex_attention))
    torch.testing.assert_close(
        of(parts, FlexMask(documents, reach)), of(parts, blocks_of(documents, reach)), atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sliding_window": 4, "num_hidden_layers": 2, "full_layers": (1,)},
        {
            "num_key_value_heads": 2,
            "latent": LatentConfig(kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=12),
        },
    ],
    ids=["plain", "windows", "latent"],
)
def test_the_objective_is_the_same(options: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.heads.eagle.check_device", lambda _: None)
    made = head(**options)
    batch = batch_of([tokens(9), tokens(14, seed=4)], made.config.boundaries, padding=3)
    losses, gradients = [], []
    for switched in (False, True):
        settings = Eagle3Settings(steps=3, flex_attention=switched, gradient_checkpointing=switched)
        report = Eagle3Objective(made, FrozenTarget.of(model()), settings)(batch)
        losses.append(report.loss)
        gradients.append(torch.autograd.grad(report.loss, list(made.parameters()), allow_unused=True))
    torch.testing.assert_close(losses[0], losses[1], atol=1e-4, rtol=1e-5)
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)


def test_without_cuda_it_is_refused() -> None:
    made = head()
    settings = Eagle3Settings(steps=2, flex_attention=True)
    with pytest.raises(ArgumentError, match=r"objective\.flex_attention needs a CUDA device, not cpu"):
        Eagle3Objective(made, FrozenTarget.of(model()), settings)(batch_of([tokens(9)], made.config.boundaries))
