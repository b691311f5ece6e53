"""Products in C: right, and a row's bits depend on nothing but the row, in every build and every way to multiply."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from forerun.errors import ArgumentError
from forerun.model.kernels import products
from forerun.model.kernels.packing import PackedLinear, PackedWeight, PanelWeight
from forerun.model.kernels.products import ProductKind

pytestmark = pytest.mark.skipif(products.library() is None, reason="no compiler, or no AVX2")
SHAPES = [(48, 16), (70, 64), (1, 33), (129, 577)]  # Outputs, depth
COUNTS = (1, 2, 3, 5, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 49, 64, 65, 97)
WAYS = [("narrow", ProductKind.FLOAT32), ("narrow", ProductKind.WIDENED), *(("own", kind) for kind in ProductKind)]


class Way(NamedTuple):
    """One build of the library, and one way to multiply."""

    library: Any
    kind: ProductKind

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.kind is ProductKind.FLOAT32 else torch.bfloat16

    def multiply(self, rows: Tensor, panels: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
        return products._multiply(self.library, self.kind, rows, panels, bias, outputs)


@pytest.fixture(params=WAYS, ids=lambda way: f"{way[0]}-{way[1].name.lower()}")
def way(request: pytest.FixtureRequest) -> Way:
    build, kind = request.param
    library: Any = products.open_library(products.BASE) if build == "narrow" else products.library()
    if not library.forerun_product_has(kind):
        pytest.skip("not on this processor")
    return Way(library, kind)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def problem(outputs: int, depth: int, dtype: torch.dtype, count: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(outputs + depth)
    return tuple(torch.randn(*size).to(dtype) for size in ((outputs, depth), (outputs,), (count, depth)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("biased", [True, False])
def test_against_float64(way: Way, shape: tuple[int, int], biased: bool) -> None:
    matrix, bias, rows = problem(*shape, way.dtype, 37)
    found = way.multiply(rows, products.pack(matrix), bias if biased else None, shape[0])
    expected = rows.double() @ matrix.double().T + (bias.double() if biased else 0)
    tolerance = {"rtol": 1e-5, "atol": 1e-4} if way.kind is ProductKind.FLOAT32 else {"rtol": 2**-8, "atol": 1e-4}
    torch.testing.assert_close(found.double(), expected, **tolerance)


@pytest.mark.parametrize("shape", [*SHAPES, (70, 3000)], ids=str)
@pytest.mark.usefixtures("threads")
def test_a_rows_bits_depend_on_that_row_alone(way: Way, shape: tuple[int, int]) -> None:
    """Not on how many rows there are, where it stands among them, or on threads; also where a cache holds few rows."""
    matrix, bias, rows = problem(*shape, way.dtype, max(COUNTS))
    panels = products.pack(matrix)
    whole = way.multiply(rows, panels, bias, shape[0])
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        for count in COUNTS:
            assert torch.equal(way.multiply(rows[:count], panels, bias, shape[0]), whole[:count]), (number, count)
            assert torch.equal(way.multiply(rows[-count:], panels, bias, shape[0]), whole[-count:]), (number, count)


def test_many_threads_share_many_panels(way: Way, threads: None) -> None:
    matrix, bias, rows = problem(300, 256, way.dtype, 3)
    panels = products.pack(matrix)
    whole = way.multiply(rows, panels, bias, 300)
    for number in (1, 2, 3, 7, 30):
        torch.set_num_threads(number)
        assert torch.equal(way.multiply(rows, panels, bias, 300), whole), number


def test_what_is_not_finite_stays_so(way: Way) -> None:
    matrix, _, rows = problem(48, 64, way.dtype, 3)
    rows[0, 5], rows[1, 7] = torch.nan, torch.inf
    found = way.multiply(rows, products.pack(matrix), None, 48)
    assert found[0].isnan().all() and not found[1].isfinite().any() and found[2].isfinite().all()


def test_test_rows_may_lie_apart_or_be_none(way: Way) -> None:
    matrix, bias, rows = problem(48, 64, way.dtype, 8)
    panels = products.pack(matrix)
    expected = way.multiply(rows, panels, bias, 48)
    assert torch.equal(way.multiply(rows.repeat_interleave(2, 0)[::2], panels, bias, 48), expected)
    assert torch.equal(way.multiply(rows.T.contiguous().T, panels, bias, 48), expected)
    matrix, bias, rows = problem(48, 64, way.dtype, 0)
    assert way.multiply(rows, products.pack(matrix), bias, 48).shape == (0, 48)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", products.DTYPES, ids=str)
def test_unpacking(shape: tuple[int, int], dtype: torch.dtype) -> None:
    matrix = problem(*shape, dtype, 1)[0]
    assert torch.equal(products.unpack(products.pack(matrix), *shape), matrix)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", products.DTYPES, ids=str)
def test_several_matrices_are_packed_as_one(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Wherever one ends, and however its rows lie."""
    matrix = problem(*shape, dtype, 1)[0]
    parts = matrix[:5], matrix[5:6].clone(), matrix[6:].T.contiguous().T, torch.cat((matrix, matrix), 1)[:, : shape[1]]
    assert torch.equal(products.pack(*parts), products.pack(torch.cat(parts)))


@pytest.mark.parametrize(
    ("rows", "bias"),
    [
        (torch.zeros(2, 65), None),
        (torch.zeros(2, 63), None),
        (torch.zeros(2, 64, dtype=torch.bfloat16), None),
        (torch.zeros(2, 64), torch.zeros(47)),
        (torch.zeros(2, 64), torch.zeros(48, dtype=torch.bfloat16)),
    ],
    ids=["too deep", "too shallow", "other dtype", "too few biases", "biases of another dtype"],
)
def test_what_does_not_fit_is_refused(rows: Tensor, bias: Tensor | None) -> None:
    with pytest.raises(ArgumentError, match="cannot be multiplied with 48 outputs of a depth of 64"):
        products.multiply(rows, products.pack(torch.zeros(48, 64)), bias, 48, ProductKind.FLOAT32)


def test_gradients_flow_to_the_states() -> None:
    layer = nn.Linear(32, 16).requires_grad_(False)
    states = torch.randn(2, 32, requires_grad=True)
    packed = PackedLinear(layer, PackedWeight.of([layer]))
    assert isinstance(packed.packed_weight, PanelWeight)
    packed(states).sum().backward()
    assert states.grad is not None
    torch.testing.assert_close(states.grad, layer.weight.sum(0).expand(2, -1))


class TestHowBf16IsMultiplied:
    @pytest.fixture(autouse=True)
    def anew(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
        products.kind_of.cache_clear()
        yield
        products.kind_of.cache_clear()

    @staticmethod
    def takes(monkeypatch: pytest.MonkeyPatch, seconds: dict[ProductKind, float]) -> list[ProductKind]:
        """What each way takes; returns which were tried."""
        tried = list[ProductKind]()

        class Library:
            @staticmethod
            def forerun_product_has(kind: ProductKind) -> bool:
                return kind in seconds

        monkeypatch.setattr(products, "library", Library)
        monkeypatch.setattr(products, "_seconds", lambda _, kinds, _counts: tried.extend(kinds) or seconds)
        return tried

    def test_the_fastest_is_taken_and_kept(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        tried = self.takes(monkeypatch, {ProductKind.DOTS: 2.0, ProductKind.WIDENED: 1.0})
        assert products.kind_of(torch.bfloat16) is ProductKind.WIDENED and tried == [
            ProductKind.DOTS,
            ProductKind.WIDENED,
        ]
        products.kind_of.cache_clear()
        again = self.takes(monkeypatch, {ProductKind.DOTS: 1.0, ProductKind.WIDENED: 2.0})
        assert products.kind_of(torch.bfloat16) is ProductKind.WIDENED and not again

    def test_near_equals_take_the_processors_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.takes(monkeypatch, {ProductKind.TILES: 1.0, ProductKind.WIDENED: 0.95})
        assert products.kind_of(torch.bfloat16) is ProductKind.TILES

    @pytest.mark.parametrize("text", ["", "[]", "{", '{"x": 1}', "null"])
    def test_a_broken_file_is_measured_anew(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
        self.takes(monkeypatch, {ProductKind.DOTS: 1.0})
        products.kind_of(torch.bfloat16)
        file = tmp_path / "machine.json"
        assert "DOTS" in json.loads(file.read_text()).values()
        file.write_text(text)
        products.kind_of.cache_clear()
        assert products.kind_of(torch.bfloat16) is ProductKind.DOTS
        assert "DOTS" in json.loads(file.read_text()).values()

    def test_the_dtype_that_auto_takes_is_kept_as_well(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for first, second in ((1.0, 9.0), (9.0, 1.0)):
            products._takes_of_float32.cache_clear()
            self.takes(monkeypatch, {ProductKind.DOTS: first, ProductKind.FLOAT32: second})
            assert products.decodes(torch.device("cpu"), torch.bfloat16)
        products._takes_of_float32.cache_clear()

    def test_what_another_processor_kept_is_not_taken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.takes(monkeypatch, {ProductKind.TILES: 1.0})
        assert products.kind_of(torch.bfloat16) is ProductKind.TILES
        products.kind_of.cache_clear()
        self.takes(monkeypatch, {ProductKind.WIDENED: 1.0})
        assert products.kind_of(torch.bfloat16) is ProductKind.WIDENED
