import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from emulation import forget_kernels
from forerun.errors import ArgumentError
from forerun.model.inputs import Flat
from forerun.model.kernels import compiling, native
from forerun.model.kernels.attention import fold_attention
from model_kernels.conftest import by_definition

LOWEST = torch.finfo(torch.bfloat16).min
pytestmark = pytest.mark.usefixtures("in_c")


def problem(
    batch: int, heads: int, key_heads: int, count: int, width: int, depths: tuple[int, int] = (64, 64)
) -> list[Tensor]:
    """A random mask in which every row sees slot 0; keys and values strided as in the cache, with room behind."""
    torch.manual_seed(heads + count + width)
    query = torch.randn(batch, count, heads, depths[0]).bfloat16().transpose(1, 2)
    key = torch.randn(batch, width + 9, key_heads, depths[0]).bfloat16()[:, :width].transpose(1, 2)
    value = torch.randn(batch, width + 9, key_heads, depths[1]).bfloat16()[:, :width].transpose(1, 2)
    unseen = torch.rand(batch, 1, count, width) < 0.4
    unseen[..., 0] = False
    return [query, key, value, torch.where(unseen, LOWEST, 0.0).bfloat16()]


@pytest.mark.parametrize("depths", [(32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256)])
def test_equals_attention_by_definition(depths: tuple[int, int]) -> None:
    """Scores so large that their exponentials overflow as well."""
    shapes = (1, 4, 4, 1, 1), (2, 4, 2, 1, 31), (1, 6, 2, 3, 128), (3, 6, 1, 5, 129), (1, 8, 2, 33, 300)
    for shape in (*shapes, (2, 3, 3, 130, 515)):
        query, key, value, mask = problem(*shape, depths)
        assert native.takes_attention(query, key, value, mask)
        for tensors, scale in (((query, key, value, mask), 0.125), ((100 * query, 10 * key, value, mask), 1.0)):
            found = native.attend(*tensors, scale)
            torch.testing.assert_close(found.double(), by_definition(*tensors, scale), rtol=1e-2, atol=1e-2)


def test_a_rows_bits_depend_on_what_it_sees_alone() -> None:
    """Not on the rows beside it, nor on the other sequences, the width, the threads, or what stands in unseen slots."""
    query, key, value, mask = problem(3, 6, 2, 21, 700)
    whole = native.attend(query, key, value, mask, 0.125)
    for count in (1, 2, 3, 4, 7, 20):
        assert torch.equal(native.attend(query[:, :, :count], key, value, mask[:, :, :count], 0.125), whole[:, :count])
    for row in range(3):
        one = slice(row, row + 1)
        assert torch.equal(native.attend(query[one], key[one], value[one], mask[one], 0.125), whole[one])
    mask[..., 333:] = LOWEST
    short = native.attend(query, key, value, mask, 0.125)
    for width in (333, 334, 352, 400, 512):
        assert torch.equal(
            native.attend(query, key[:, :, :width], value[:, :, :width], mask[..., :width], 0.125), short
        )
    key[:, :, 333:], value[:, :, 333:] = 3e38, -3e38
    assert torch.equal(native.attend(query, key, value, mask, 0.125), short)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    assert torch.equal(native.attend(query, key, value, mask, 0.125), short)
    torch.set_num_threads(before)


def test_test_masks_are_shared_and_rows_are_found_in_the_cache() -> None:
    query, key, value, mask = problem(3, 4, 2, 5, 70)
    shared = native.attend(query, key, value, mask[:1], 0.125)
    assert torch.equal(shared, native.attend(query, key, value, mask[:1].repeat(3, 1, 1, 1), 0.125))
    query, key, value, mask = problem(5, 4, 2, 3, 70)
    rows = torch.tensor([4, 0, 3])
    chosen = query[:3], key[rows], value[rows], mask[:3]
    assert torch.equal(native.attend(query[:3], key, value, mask[:3], 0.125, rows), native.attend(*chosen, 0.125))


def test_queries_without_padding_stand_behind_each_other() -> None:
    """Any of a sequence's places may have one, or none of them."""
    query, key, value, mask = problem(4, 6, 2, 21, 700)
    whole = native.attend(query, key, value, mask, 0.125)
    real = torch.rand(4, 21) < torch.tensor([[0.3], [0.0], [1.0], [0.8]])
    flat = Flat.of(real)
    assert flat is not None
    some = flat.flatten(query.transpose(1, 2)).transpose(1, 2)
    assert torch.equal(native.Attention(some, key, value, mask, 0.125, flat=flat).run(), flat.flatten(whole))
    for kept, starts in (
        (flat.kept + 1, flat.starts),
        (flat.kept - 21, flat.starts),
        (flat.kept.flip(0), flat.starts),
        (flat.kept, flat.starts.roll(1)),
        (flat.kept, flat.starts + 1),
        (flat.kept[1:], flat.starts),
    ):
        with pytest.raises(ArgumentError, match="places"):
            native.Attention(some, key, value, mask, 0.125, flat=Flat(kept, starts, 4, 21)).run()


@pytest.mark.parametrize("which", ["query", "key", "value"])
@pytest.mark.parametrize("width", [40, 300])
def test_numbers_that_fail_are_not_hidden(which: str, width: int) -> None:
    """One entry of a token that some see: whoever gets NaN by definition, and nobody else who does not see it."""
    for value in (torch.nan, torch.inf, -torch.inf):
        tensors = problem(1, 4, 2, 6, width)
        tensors[3][..., width - 7] = torch.tensor([0.0, LOWEST, 0.0, LOWEST, 0.0, LOWEST]).bfloat16()
        at = ["query", "key", "value"].index(which)
        tensors[at][0, 1, 2 if which == "query" else width - 7, 5] = value
        expected, found = by_definition(*tensors, 0.125), native.attend(*tensors, 0.125)
        seeing, healthy = ~expected[:, ::2].isfinite(), expected.isfinite()
        assert seeing.any() or value == -torch.inf
        assert not found[:, ::2][seeing].isfinite().any()
        torch.testing.assert_close(found.double()[healthy], expected[healthy], rtol=1e-2, atol=1e-2)


def test_what_it_does_not_take() -> None:
    query, key, value, mask = problem(1, 4, 2, 3, 40)
    for others in (
        (query.float(), key, value, mask),
        (query, key, value, mask == 0),
        (query[..., :16], key[..., :16], value, mask),
        (query, key, value, mask.transpose(2, 3).contiguous().transpose(2, 3)),
        (query.clone().requires_grad_(), key, value, mask),
    ):
        assert not native.takes_attention(*others)
    with torch.inference_mode():
        assert native.takes_attention(query.clone().requires_grad_(), key, value, mask)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder, and a kernel that has not been asked for yet."""
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    forget_kernels()
    yield tmp_path
    forget_kernels()


def test_it_is_compiled_once(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.attention_kernel() is not None
    (library,) = (elsewhere / "kernels").iterdir()
    forget_kernels()
    monkeypatch.setattr(compiling, "replace_file", lambda *_: pytest.fail("compiled again"))
    assert native.attention_kernel() is not None
    assert library.suffix == ".so"


@pytest.mark.parametrize("compiler", ["/nowhere/cc", "false"])
def test_without_a_compiler_torch_attends(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, compiler: str
) -> None:
    monkeypatch.setenv("CC", compiler)
    query, key, value, mask = problem(1, 4, 2, 3, 40)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            found, _ = fold_attention(nn.Identity(), query, key, value, mask, scaling=0.125)
    assert sum("could not be compiled" in record.message for record in caplog.records) == 1
    assert not list(elsewhere.rglob("*.so"))
    torch.testing.assert_close(found.double(), by_definition(query, key, value, mask, 0.125), rtol=1e-2, atol=1e-2)


def test_rows_and_shapes_that_do_not_fit_are_refused() -> None:
    query, key, value, mask = problem(3, 4, 2, 5, 70)
    for rows in ([0, 1, 3], [0, -1, 2], [2**62, 0, 1], [0, 1], [0, 1, 2, 3]):
        with pytest.raises(ArgumentError, match="below R"):
            native.attend(query, key, value, mask, 0.125, torch.tensor(rows))
    with pytest.raises(ArgumentError, match="int32"):
        native.attend(query, key, value, mask, 0.125, torch.tensor([0, 1, 2], dtype=torch.int32))
    with pytest.raises(RuntimeError, match="expand"):
        native.attend(query, key, value, mask[:, :, :4], 0.125)
    for tensors in (
        (query, key[:2], value[:2], mask),  # three sequences, two rows
        (query, key[:, :1], value, mask),
        (query, key, value[:2], mask),
        (query, torch.zeros(3, 2, 70, 96).bfloat16(), value, mask),
        (query, key, torch.zeros(3, 2, 71, 64).bfloat16(), mask),
        (query[:, :3], key, value, mask),  # heads that are no groups
        (query[..., :48], key[..., :48], value, mask),
        (torch.zeros(3, 4, 5, 288).bfloat16(), torch.zeros(3, 2, 70, 288).bfloat16(), value, mask),
    ):
        with pytest.raises(ArgumentError, match="cannot be computed"):
            native.attend(*tensors, 0.125)
