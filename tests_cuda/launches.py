"""What would be launched on a GPU that is not there: the kernels of a call, and what its compiler makes of them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}
OPTIONS = ("num_warps", "num_stages")


@dataclass
class Launch:
    """One kernel as it is launched."""

    kernel: Any
    grid: tuple[int, ...]
    given: Mapping[str, Any]
    options: Mapping[str, int]

    @property
    def name(self) -> str:
        """The kernel's own."""
        return str(self.kernel.__name__)

    def source(self) -> ASTSource:
        """What Triton compiles: types of arguments, constants, and which arguments are multiples of 16."""
        signature, constants, attributes = {}, {}, {}
        for place, parameter in enumerate(self.kernel.params):
            value = self.given[parameter.name]
            signature[parameter.name], special = _type_of(value, parameter)
            if signature[parameter.name] == "constexpr":
                constants[place,] = value
            elif special:
                attributes[place,] = [["tt.divisibility", 16]]
        return ASTSource(self.kernel, signature, constants, attributes)

    @cached_property
    def binary(self) -> Binary:
        """What a Hopper's compiler makes of it."""
        target = GPUTarget("cuda", 90, 32)
        made = triton.compile(self.source(), target=target, options=dict(self.options))
        with TemporaryDirectory() as folder:
            path = Path(folder, "kernel.ptx")
            path.write_text(made.asm["ptx"], encoding="utf-8")
            command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", str(path), "-o", str(path.with_suffix(".cubin"))]
            said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        return Binary(
            registers=int(re.findall(r"Used (\d+) registers", said)[-1]),
            spilled=sum(map(int, re.findall(r"(\d+) bytes spill", said))),
            shared=made.metadata.shared,
            code=made.asm["ptx"],
        )


@dataclass(frozen=True)
class Binary:
    """The resources of a compiled kernel."""

    registers: int  # Of a thread
    spilled: int  # Bytes of a thread that go to memory and come back
    shared: int  # Bytes of a program
    code: str  # In PTX


def _type_of(value: Any, parameter: Any) -> tuple[str, bool]:
    special = not parameter.do_not_specialize
    if parameter.is_constexpr or (special and isinstance(value, int) and value == 1):
        return "constexpr", False
    if isinstance(value, Tensor):
        return TYPES[value.dtype], True
    if isinstance(value, float):
        return "fp32", False
    return "i32" if abs(value) < 2**31 else "i64", special and value % 16 == 0


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Collect what is launched while open, and launch nothing."""
    found = list[Launch]()

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        names = kernel.arg_names
        given = dict(zip(names, args, strict=False)) | {key: value for key, value in kwargs.items() if key in names}
        options = {key: value for key, value in kwargs.items() if key in OPTIONS}
        found.append(Launch(kernel, tuple(grid), given, options))

    with patch.object(JITFunction, "run", run):
        yield found


def launches_of(work: Callable[[], Any]) -> list[Launch]:
    """Return what a call would launch."""
    with recorded() as found:
        work()
    return found
