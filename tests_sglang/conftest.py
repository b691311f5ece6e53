"""SGLang's own Python on a machine without its kernels: the packages that hold them are stood in for."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any
from unittest.mock import MagicMock

from transformers.utils import is_torchvision_available

KERNELS = ("sgl_kernel", "flashinfer", "deep_gemm", "torchvision")


class _Kernels(types.ModuleType):
    __path__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        known = name.partition(".")[0] in KERNELS
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Kernels(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


assert not is_torchvision_available()  # which transformers remembers, whatever stands in for it from now on
sys.meta_path.insert(0, _Finder())
