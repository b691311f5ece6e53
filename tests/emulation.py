"""The kernels in C and the packed linear layers of bf16, on a processor that has neither: slow, and near enough.

Where the processor has them they run as they are, so that a test which asks for them is skipped nowhere.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from forerun.devices import multiplies
from forerun.model.kernels import compiling, native, packing, products
from forerun.model.kernels.packing import PackedWeight

HAS_BFLOAT16 = multiplies(torch.device("cpu"), torch.bfloat16)
needs_bfloat16 = pytest.mark.skipif(not HAS_BFLOAT16, reason="this processor only emulates bfloat16")
HEADERS = Path(__file__).parent / "emulated"
FLAGS = ("-O2", "-std=gnu11", "-fopenmp", "-shared", "-fPIC", "-march=native", "-Wno-psabi", f"-I{HEADERS}")


def forget_kernels() -> None:
    """Let the next that asks for a kernel load it anew."""
    for known in (native.attention_kernel, native.fused_kernels):
        known.cache_clear()


@contextmanager
def kernels_in_c() -> Iterator[None]:
    """While open, `attend.c` and `fused_ops.c` run, compiled against `emulated/immintrin.h` where that is needed."""
    if native.fused_kernels(torch.bfloat16) is None:  # maybe asked for first while a test had taken the compiler away
        forget_kernels()
    if native.attention_kernel() is not None:
        yield
        return
    products.library()  # as the processor is; it is kept
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "FLAGS", FLAGS)
        patch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
        forget_kernels()
        if native.attention_kernel() is None:
            pytest.skip("no C compiler")
        yield
    forget_kernels()


@contextmanager
def packed_linears(dtype: torch.dtype = torch.bfloat16) -> Iterator[None]:
    """While open, linear layers of that dtype are packed and grouped; each row is summed in float64 by itself, so that
    its bits depend on nothing else, as in oneDNN's layout."""
    if packing.packs(dtype):
        yield
        return

    def lay_out(self: PackedWeight, layers: list[nn.Linear]) -> Tensor:
        return torch.cat([layer.weight.detach() for layer in layers])

    def product(self: PackedWeight, rows: Tensor) -> Tensor:
        bias = 0 if self.bias is None else self.bias.double()
        return (rows.double() @ self.packed.double().T + bias).to(self.dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "packs", lambda given: given == dtype)
        patch.setattr(PackedWeight, "_lay_out", lay_out)
        patch.setattr(PackedWeight, "_product", product)
        yield
