"""How many of torch's operations in a piece of work would be kernels on a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Kernels by name, of the work that is run inside: what neither makes empty tensors nor looks at given ones."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """All of them."""
        return self.found.total()

    def inside(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """The same work, whose kernels count."""

        def counted(*inputs: Any) -> Any:
            with self:
                return work(*inputs)

        return counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        given = {one.untyped_storage().data_ptr() for one in args if isinstance(one, Tensor)}
        first = found[0] if isinstance(found, (tuple, list)) else found
        looks = isinstance(first, Tensor) and first.untyped_storage().data_ptr() in given
        if "empty" not in name and (func._schema.is_mutable or not looks):
            self.found[name] += 1
        return found

    def __repr__(self) -> str:
        return str(dict(self.found.most_common()))
