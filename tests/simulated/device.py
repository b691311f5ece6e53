"""A simulated accelerator: tensors on ``sim:0`` hold real values, and every wait of the host for the device is counted.

Needs no GPU and no compiler. torch's Python backend for PrivateUse1 makes the device's name known, a tensor subclass
wraps CPU tensors, and a dispatch mode sees every operation: it refuses what an accelerator refuses (tensors of two
devices, dtypes that it lacks), counts what waits, and computes on the CPU tensors inside. Knows nothing of forerun.

Use it in one thread, and load models on the CPU before they are `moved`: transformers loads with threads of its own,
where the mode is not open. For inference only; there are no gradients. torch calls the backend's interface
experimental: this file works with torch 2.13.
"""

import copy
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "sim"

_READS = {"_local_scalar_dense", "allclose", "equal"}
"""Operations that return a value of the device to the host."""
_SIZED = {"nonzero", "masked_select", "unique_consecutive", "bincount", "repeat_interleave"}
_SIZED |= {"_unique", "_unique2", "unique_dim"}
"""Operations whose result has a size that depends on values: the host waits for it."""
_INDEXING = {"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"}
"""Take indices from the CPU, too, and copy them to the device, blocking."""
_NO_SCALARS = {
    *("addmm", "baddbmm", "bmm", "cat", "embedding", "gather", "index_add_", "index_copy", "index_copy_"),
    *("index_select", "linear", "matmul", "mm", "scaled_dot_product_attention", "scatter", "scatter_", "scatter_add_"),
    *("searchsorted", "stack", "topk"),
}
"""Refuse even a CPU tensor without dimensions, which other operations take as a number."""
_WHOLE = {"layer_norm", "linear", "matmul", "rms_norm", "scaled_dot_product_attention"}
"""Composite operations that run whole, so that they compute the same bits as on the CPU; others are taken apart."""
_DEVICE_MEMORY = 1 << 62
_SELF = str(Path(__file__))


class Kind(StrEnum):
    """What the host waits for, and what it does not."""

    READ = "read"
    """Values or a size come from the device: the host waits until all work before is done."""
    BLOCKING_WRITE = "blocking write"
    """Values go to the device in a copy that the host waits for."""
    STAGED = "staged copy"
    """Values go to the device with ``non_blocking=True``: nobody waits."""


@dataclass(frozen=True, slots=True)
class Event:
    """One transfer between host and device."""

    kind: Kind
    operation: str
    site: str
    """``file.py:line`` that asked for it."""


@dataclass(slots=True)
class Counts:
    """What happened while `SimulatedDevice.counting` was open."""

    events: list[Event] = field(default_factory=list)
    launches: int = 0
    """Operations that the host gave the device one by one, copies included; a replay of a recording is none."""
    replays: int = 0
    """Recordings that ran."""

    def of(self, kind: Kind) -> int:
        """How many were of this kind."""
        return sum(event.kind is kind for event in self.events)


class DeviceError(RuntimeError):
    """What an accelerator would have refused."""


class DeviceTensor(Tensor):
    """A tensor on the device; `held` is the CPU tensor with its values."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> "DeviceTensor":
        with torch.inference_mode(held.is_inference()):
            made = Tensor._make_wrapper_subclass(
                cls,
                held.shape,
                **{"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype},
                **{"layout": held.layout, "device": torch.device(NAME, 0)},
            )
        made.held = held.detach()
        return made

    def __repr__(self) -> str:
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: Any) -> "DeviceTensor":
        return type(self)(self.held.clone())

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if force:
            return self.cpu().numpy()
        raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy it first.")

    def data_ptr(self) -> int:
        """Equal for tensors that share memory; no address of the host's."""
        return self.held.data_ptr() | _DEVICE_MEMORY

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise DeviceError(f"{func} is given a tensor of the simulated device where the device is not open")


class SimulatedDevice(TorchDispatchMode):
    """The device ``sim`` while the context is open.

    Args:
        lacks: dtypes that it does not have, e.g. float64 as on MPS.
        source: part of the paths of the code under test; an `Event.site` is the innermost line there, if there is one.
    """

    def __init__(self, *, lacks: Collection[torch.dtype] = (), source: str = "/src/forerun/") -> None:
        super().__init__()
        self._backend = _backend()
        self.lacks, self._source = frozenset(lacks), source
        self.counts = Counts()
        """All transfers outside of `counting`."""
        self.refused: list[str] = []
        """What was refused, whether or not somebody caught the error."""
        self._recording: list[_Call] | None = None
        self._lifting: list[bool] = []

    def __enter__(self) -> "SimulatedDevice":
        # torch.tensor(values, device="sim") makes a CPU tensor and copies it, as it does for an accelerator.
        self._lifting.append(torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)
        self._backend.opened += 1
        super().__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        self._backend.opened -= 1
        torch._C._set_only_lift_cpu_tensors(self._lifting.pop())

    @contextmanager
    def counting(self) -> Iterator[Counts]:
        """Count what happens from now on by itself."""
        before, self.counts = self.counts, Counts()
        try:
            yield self.counts
        finally:
            self.counts = before

    def record(self, work: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Callable[..., Any]:
        """Stands in for a CUDA graph: what `work` launches for inputs of these shapes, as a function of such inputs.

        A replay repeats the operations on the same memory and runs none of `work`'s Python. Work that waits, or copies
        anything from the host, is refused.
        """
        own = tuple(tensor.clone() for tensor in inputs)
        with self.counting():
            work(*own)  # so that what is allocated once is there
        self._recording = calls = list[_Call]()
        try:
            result = work(*own)
        finally:
            self._recording = None

        def replay(*given: Tensor) -> Any:
            for mine, new in zip(own, given, strict=True):
                mine.copy_(new)
            for call in calls:
                call.repeat()
            self.counts.replays += 1
            return result

        return replay

    # --- operations -------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        leaves = [*_leaves(args), *_leaves(kwargs.values())]
        devices = [leaf.type for leaf in leaves if isinstance(leaf, torch.device)]
        concerned = NAME in devices or any(isinstance(leaf, DeviceTensor) for leaf in leaves)
        if not concerned:
            return self._on_host(func, name, args, kwargs)
        if _composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        if name == "copy_":
            return self._copy_into(*args, **kwargs)
        if name == "_to_copy":
            return self._copied(*args, **kwargs)
        self._refuse_mixed(name, leaves)
        self._note_waits(name, args)
        given = [_each(_inside, arg) for arg in args]
        named = {key: _each(_inside, value) for key, value in kwargs.items()}
        if not devices or NAME in devices:
            return self._launched(name, func, given, named, leaves)
        return func(*given, **named)  # e.g. torch.zeros_like(tensor, device="cpu")

    def _on_host(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """An operation on the CPU alone; memory that is asked to be pinned is ordinary memory here."""
        if name in ("pin_memory", "_pin_memory"):
            return args[0].clone()
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)

    def _launched(self, name: str, func: Any, given: Any, named: Any, leaves: list[Any]) -> Any:
        """Run an operation on the CPU tensors inside; its results are on the device."""
        if named.get("pin_memory"):
            named = {**named, "pin_memory": False}
        result = self._done(func, given, named)
        owners = {id(leaf.held): leaf for leaf in leaves if isinstance(leaf, DeviceTensor)}
        if any(owner.shape != owner.held.shape for owner in owners.values()):
            raise NotImplementedError(f"{name} at {self._site()}: the simulated device changes no shape in place")

        def outside(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return owners[id(value)] if id(value) in owners else self._made(name, value)

        return _each(outside, result)

    def _copy_into(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        """``target.copy_(source)`` where one of them, or both, are on the device."""
        self._note_copy("copy_", source, isinstance(target, DeviceTensor), non_blocking)
        self._done(torch.ops.aten.copy_.default, (_inside(target), _inside(source)), {})
        return target

    def _copied(self, source: Tensor, **options: Any) -> Tensor:
        """``source.to(...)``."""
        device, non_blocking = options.pop("device", None), options.pop("non_blocking", False)
        options.pop("pin_memory", None)
        there = isinstance(source, DeviceTensor) if device is None else torch.device(device).type == NAME
        self._note_copy("_to_copy", source, there, non_blocking)
        result = self._done(torch.ops.aten._to_copy.default, (_inside(source),), options)
        return self._made("_to_copy", result) if there else result

    def _done(self, func: Any, given: Any, named: Any) -> Any:
        """Run an operation, which is recorded or counts."""
        result = func(*given, **named)
        if self._recording is not None:
            self._recording.append(_Call(func, given, named, result))
        elif not func.is_view:
            self.counts.launches += 1
        return result

    def _made(self, name: str, value: Tensor) -> DeviceTensor:
        if value.dtype in self.lacks:
            raise self._refusal(f"{name} at {self._site()}: the device has no {value.dtype}", TypeError)
        return DeviceTensor(value)

    # --- what is refused and counted --------------------------------------------------------------------------------

    def _refuse_mixed(self, name: str, leaves: list[Any]) -> None:
        """Raise DeviceError where tensors of the device meet tensors of the CPU that are no plain numbers."""
        there = any(isinstance(leaf, DeviceTensor) for leaf in leaves)
        here = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, DeviceTensor)]
        if there and any(name in _NO_SCALARS or (leaf.dim() and name not in _INDEXING) for leaf in here):
            message = f"{name} at {self._site()}: expected all tensors to be on the same device, found {NAME}:0 and cpu"
            raise self._refusal(message)

    def _note_waits(self, name: str, args: Any) -> None:
        if name in _READS or name in _SIZED:
            self._note(Kind.READ, name)
        if name in _INDEXING:
            indices = [index for index in args[1] if index is not None]
            # One number for all that a mask selects needs no size.
            fills = name != "index" and len(args) > 2 and args[2].dim() == 0
            if any(index.dtype in (torch.bool, torch.uint8) for index in indices) and not fills:
                self._note(Kind.READ, name)
            for index in indices:
                if not isinstance(index, DeviceTensor):
                    self._note(Kind.BLOCKING_WRITE, name)

    def _note_copy(self, name: str, source: Tensor, there: bool, non_blocking: bool) -> None:
        if isinstance(source, DeviceTensor) and not there:
            self._note(Kind.READ, name)
        elif there and not isinstance(source, DeviceTensor):
            self._note(Kind.STAGED if non_blocking else Kind.BLOCKING_WRITE, name)

    def _note(self, kind: Kind, name: str) -> None:
        event = Event(kind, name, self._site())
        self.counts.events.append(event)
        if self._recording is not None:
            raise self._refusal(f"{name} at {event.site}: a {kind} while work is recorded")

    def _refusal(self, message: str, error: type[Exception] = DeviceError) -> Exception:
        self.refused.append(message)
        return error(message)

    def _site(self) -> str:
        """The innermost line of the code under test, else of whoever called torch."""
        frame, caller = sys._getframe(1), ""
        while frame is not None:
            path = frame.f_code.co_filename
            if self._source in path:
                return f"{path.rsplit(self._source, 1)[1]}:{frame.f_lineno}"
            if not caller and path != _SELF and "/torch/" not in path:
                caller = f"{Path(path).name}:{frame.f_lineno}"
            frame = frame.f_back
        return caller


@dataclass(frozen=True, slots=True)
class _Call:
    """One recorded operation on the CPU tensors inside."""

    func: Any
    args: Any
    kwargs: Any
    result: Any

    def repeat(self) -> None:
        """Run it again; what comes out takes the place of what came out first."""
        again = self.func(*self.args, **self.kwargs)
        for old, new in zip(_leaves([self.result]), _leaves([again]), strict=True):
            if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                old.copy_(new)


def moved(model: nn.Module) -> nn.Module:
    """A copy of a module whose weights are on the device, in evaluation mode; weights that were one stay one.

    ``module.to`` would make two of a tied weight, because tensors of a subclass cannot be swapped in place.
    """
    made = copy.deepcopy(model).eval()
    known: dict[Tensor, Tensor] = {}
    for module in made.modules():
        for tensors, wrap in ((module._parameters, _parameter), (module._buffers, torch.Tensor.detach)):
            for name, tensor in tensors.items():
                if tensor is not None and tensor not in known:
                    known[tensor] = wrap(tensor.detach().to(NAME))
                tensors[name] = None if tensor is None else known[tensor]
    return made


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


@cache
def _composite(func: Any) -> bool:
    """Whether torch makes the operation of others, which then are what the device sees."""
    if func._schema.name.removeprefix("aten::") in _WHOLE:
        return False
    return bool(func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    """What an operation takes or returns, lists taken apart; it knows no deeper structure."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from value
        else:
            yield value


def _each(change: Callable[[Any], Any], value: Any) -> Any:
    """The value, or each of a list of values, changed."""
    if isinstance(value, list | tuple):
        return type(value)([change(one) for one in value])
    return change(value)


def _inside(leaf: Any) -> Any:
    if isinstance(leaf, torch.device):
        return torch.device("cpu")
    return leaf.held if isinstance(leaf, DeviceTensor) else leaf


class _Backend:
    """``torch.sim``. A device is there only while a `SimulatedDevice` is open: other tests see none."""

    opened = 0
    """Contexts that are open."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return self.opened > 0

    def device_count(self) -> int:
        return int(self.is_available())

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """There is no generator."""


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    """What torch's C++ side asks."""

    def is_available(self) -> bool:
        return bool(getattr(torch, NAME).is_available())

    def has_primary_context(self, device: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True


def _backend() -> Any:
    """``torch.sim``; makes the device's name known, which a process can do once and not undo."""
    if not hasattr(torch, NAME):
        _setup_privateuseone_for_python_backend(NAME, _Backend(), _Hooks())
    return getattr(torch, NAME)
