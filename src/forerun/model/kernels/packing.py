"""Linear layers repacked for few rows: layers with one input are merged into one, and on a CPU
weights are laid out in panels.

There a packed layer gives every row the same bits whatever the other rows hold and however many there are. In float32
and bf16 our own products in C do so (`products`), which read the weights once at the memory's pace for 1 to 16 rows;
where they cannot be had, oneDNN's do, where a single row runs as two: its separate kernel for one row sums in another
order. Knows `nn.Linear` only: quantised layers, adapters, offloaded layers and other devices are left alone.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from forerun.devices import multiplies, one_dnn
from forerun.model.inputs import current
from forerun.model.kernels import blocks, products
from forerun.model.kernels.blocks import StoredRows

PACK_ROWS = 16  # Rows that the layout is chosen for: the widest pass that should stay near the price of one row
GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # Children of one module that read the same input


class PackedWeight:
    """One or several (out, in) matrices below each other, in oneDNN's layout."""

    in_blocks = False  # Whether `packed` is as in ``blocks.h``

    @classmethod
    def of(cls, layers: Sequence[nn.Linear]) -> PackedWeight:
        """Pack layers in the layout for their device and dtype."""
        weight = layers[0].weight
        if weight.device.type != "cpu":
            return JoinedWeight(layers)
        return (PanelWeight if _ours(weight) else cls)(layers)

    def __init__(self, layers: Sequence[nn.Linear], packed: Tensor | None = None) -> None:
        self.dtype, self.device = layers[0].weight.dtype, layers[0].weight.device
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        self.packed = self._lay_out(layers) if packed is None else packed  # never written to
        self.bias = torch.cat(biases) if biases else None
        self.in_features = layers[0].in_features
        self.sizes = [layer.out_features for layer in layers]

    def apply(self, states: Tensor) -> Tensor:
        """Multiply (.., in) -> (.., out of all layers); a single row runs as two."""
        rows = states.reshape(-1, self.in_features)
        result = self._product(rows)
        return result.view(*states.shape[:-1], result.shape[-1])

    def _product(self, rows: Tensor) -> Tensor:
        """Multiply (M, in) -> (M, out)."""
        single = rows.shape[0] == 1
        if single:
            rows = torch.cat((rows, rows))
        result: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.packed, self.bias, "none", [], "")
        return result[:1] if single else result

    def _lay_out(self, layers: Sequence[nn.Linear]) -> Tensor:
        return torch.ops.mkldnn._reorder_linear_weight(_below(layers), PACK_ROWS)

    def rewrite(self, layers: Sequence[nn.Linear]) -> None:
        """Pack other layers of the same shapes in the place of these; whoever refers to this weight reads them."""
        fresh = self._lay_out(layers)
        if fresh.layout is torch.strided:
            self.packed.copy_(fresh)  # In place: a recorded pass reads it where it stands
        else:
            self.packed = fresh
        if self.bias is not None:
            self.bias.copy_(torch.cat([layer.bias.detach() for layer in layers]))

    def holds(self, layers: Sequence[nn.Linear]) -> bool:
        """Return whether the weights of these layers, and their biases, are what is packed here."""
        same = torch.equal(self.matrix(), torch.cat([layer.weight for layer in layers]))
        return same and (self.bias is None or torch.equal(self.bias, torch.cat([layer.bias for layer in layers])))

    def matrix(self) -> Tensor:
        """Return (out of all layers, in), unpacked anew at each call."""
        return self.packed.to_dense()

    def __deepcopy__(self, memo: dict[int, object]) -> PackedWeight:
        return self  # never written to, and oneDNN's tensors cannot be copied

    def nbytes(self) -> int:
        """Return the bytes of packed weights and biases, without the padding of the layout."""
        columns = self.in_features + (self.bias is not None)
        return sum(self.sizes) * columns * self.dtype.itemsize


class PanelWeight(PackedWeight):
    """Packed weights in panels, for our own products in C."""

    def _product(self, rows: Tensor) -> Tensor:
        if rows.requires_grad and torch.is_grad_enabled():
            return nn.functional.linear(rows, self.matrix(), self.bias)
        return products.multiply(rows, self.packed, self.bias, sum(self.sizes))

    def _lay_out(self, layers: Sequence[nn.Linear]) -> Tensor:
        return products.pack(*(layer.weight.detach() for layer in layers))

    def matrix(self) -> Tensor:
        return products.unpack(self.packed, sum(self.sizes), self.in_features)


class BlockWeight(PanelWeight):
    """Packed weights in bf16 of which some stay in the blocks of a GGUF file. All but the last have a multiple of
    `products.LANES` outputs.
    """

    in_blocks = True

    def __init__(self, layers: Sequence[nn.Linear], stored: Sequence[StoredRows | None]) -> None:
        parts = [layer.weight.detach() if rows is None else rows for layer, rows in zip(layers, stored, strict=True)]
        super().__init__(layers, blocks.pack(parts, layers[0].in_features))
        self.types = Counter[int]()  # How many weights are in blocks of each of GGUF's types
        for layer, rows in zip(layers, stored, strict=True):
            if rows is not None:
                self.types[rows.type] += layer.out_features * layer.in_features

    def panels(self) -> Tensor:
        """Return the weights as a `PanelWeight` has them, expanded anew at each call."""
        return blocks.expand(self.packed, sum(self.sizes), self.in_features)

    def _product(self, rows: Tensor) -> Tensor:
        if rows.requires_grad and torch.is_grad_enabled():
            return super()._product(rows)
        return blocks.multiply(rows, self.packed, self.bias, sum(self.sizes), reads=current().reads)

    def matrix(self) -> Tensor:
        return products.unpack(self.panels(), sum(self.sizes), self.in_features)

    def nbytes(self) -> int:
        return self.packed.nbytes + (0 if self.bias is None else self.bias.nbytes)


class JoinedWeight(PackedWeight):
    """Packed weights on an accelerator: one plain matrix."""

    def apply(self, states: Tensor) -> Tensor:
        return nn.functional.linear(states, self.packed, self.bias)

    def _lay_out(self, layers: Sequence[nn.Linear]) -> Tensor:
        return _below(layers)

    def matrix(self) -> Tensor:
        return self.packed


def _below(layers: Sequence[nn.Linear]) -> Tensor:
    """Return the weights of layers below each other; that of a single one as it is."""
    matrices = [layer.weight.detach() for layer in layers]
    return matrices[0] if len(matrices) == 1 else torch.cat(list(matrices))


class PackedLinear(nn.Module):
    """A linear layer whose weight is packed, alone or as part `index` of a group; replaces an
    `nn.Linear`.
    """

    def __init__(self, layer: nn.Linear, weight: PackedWeight, group: FusedGroup | None = None, index: int = 0) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.packed_weight, self.group, self.index = weight, group, index

    def forward(self, states: Tensor) -> Tensor:
        return self.packed_weight.apply(states) if self.group is None else self.group.take(states, self.index)

    @property
    def weight(self) -> Tensor:
        """(out, in), unpacked anew at each access."""
        return torch.split(self.packed_weight.matrix(), self.packed_weight.sizes)[self.index]

    @property
    def bias(self) -> Tensor | None:
        """(out,) or None."""
        bias = self.packed_weight.bias
        return None if bias is None else torch.split(bias, self.packed_weight.sizes)[self.index]

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight.clone()
        if self.bias is not None:
            destination[f"{prefix}bias"] = self.bias.clone()

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class FusedGroup:
    """Linear layers that read the same input: computed together at the first call and handed out
    one by one.
    """

    def __init__(self, weight: PackedWeight) -> None:
        self.packed_weight = weight
        self._input: Tensor | None = None
        self._results: dict[int, Tensor] = {}

    def take(self, states: Tensor, index: int) -> Tensor:
        """Return the output of layer `index`. Another input than last time, or a second call,
        computes anew.
        """
        if self._input is not states or index not in self._results:
            parts = torch.split(self.packed_weight.apply(states), self.packed_weight.sizes, dim=-1)
            self._input, self._results = states, dict(enumerate(parts))
        result = self._results.pop(index)
        if not self._results:
            self._input = None
        return result


_Place = tuple[nn.Module, tuple[str, ...]]
"""A module and the names of those of its children that one packed weight holds."""
_PackedPlace = tuple[_Place, PackedWeight, FusedGroup | None]


class Packing(NamedTuple):
    """The counts that `pack` returns."""

    layers: int  # Linear layers that were repacked
    fused: int  # Groups that were merged


def packs(dtype: torch.dtype) -> bool:
    """Return whether packed products in `dtype` are fast here. Our own C products are; else
    oneDNN's are in bf16 and fp16 unless emulated, and in float32 on x86, where MKL takes two to
    three times as long for two rows as for one.
    """
    if products.ready(dtype):
        return True
    if dtype is torch.float32:
        return one_dnn() and platform.machine() in ("x86_64", "AMD64")
    return dtype in (torch.bfloat16, torch.float16) and multiplies(torch.device("cpu"), dtype)


def packable(layer: nn.Module) -> bool:
    """Return whether a module is a plain `nn.Linear` on a CPU that `packs` its dtype."""
    if type(layer) is not nn.Linear or layer.weight.device.type != "cpu":
        return False
    return not _changed(layer) and packs(layer.weight.dtype)


def joinable(layer: nn.Module) -> bool:
    """Return whether a module is a plain `nn.Linear` in half precision on a CUDA device, which is
    worth merging with others but not packing alone.
    """
    if type(layer) is not nn.Linear or layer.weight.device.type != "cuda":
        return False
    plain = type(layer.weight.data) is Tensor and layer.weight.dtype in (torch.bfloat16, torch.float16)
    return plain and not _changed(layer)


def _changed(layer: nn.Module) -> bool:
    """Return whether a layer is hooked or has a forward of its own, which a packed one in its place would lack."""
    hooked = layer._forward_hooks or layer._forward_pre_hooks or hasattr(layer, "_hf_hook")
    return bool(hooked or "forward" in layer.__dict__)


@torch.no_grad()
def pack(model: nn.Module, stored: Mapping[str, StoredRows] | None = None) -> Packing:
    """Replace every packable linear layer of `model`, and joinable ones that read the same input,
    in place. The plain weights are freed; a tied embedding stays.

    Args:
        stored: weights in the blocks of a GGUF file, by the names of `model`'s parameters: layers without any of them,
            and those that cannot be packed in blocks, are left alone.
    """
    weight_names = {id(weight): name for name, weight in model.named_parameters()}

    def rows_of(place: _Place) -> list[StoredRows | None]:
        return [(stored or {}).get(weight_names[id(layer.weight)]) for layer in _linears(*place)]

    def packed(place: _Place) -> PackedWeight:
        layers, rows = _linears(*place), rows_of(place)
        return BlockWeight(layers, rows) if any(rows) else PackedWeight.of(layers)

    places = list(_packable(model))
    if stored is not None:
        places = [place for place in places if any(rows_of(place)) and _fit_blocks(_linears(*place))]
    for (parent, names), weight, group in _pack_each(places, packed):
        for index, layer in enumerate(_linears(parent, names)):
            setattr(parent, names[index], PackedLinear(layer, weight, group, index))
    return Packing(layers=sum(len(names) for _, names in places), fused=sum(len(names) > 1 for _, names in places))


@contextmanager
def packed_for_now(model: nn.Module, head: Any = None) -> Iterator[None]:
    """Put packed copies of its linear layers in the places of those that a model has on a CPU, while open. They take as
    much memory as the layers and go again: what an optimiser changes is seen the next time.

    Args:
        head: a layer that others refer to, too: it stays in its place and multiplies by a packed copy.
    """
    places = [place for place in _packable(model) if all(map(packable, _linears(*place)))]
    replaced = list[tuple[nn.Module, str, nn.Linear]]()
    try:
        with torch.no_grad():
            for (parent, names), weight, group in _pack_each(places, lambda place: PackedWeight.of(_linears(*place))):
                for index, layer in enumerate(_linears(parent, names)):
                    replaced.append((parent, names[index], layer))
                    if layer is head:
                        layer.forward = PackedLinear(layer, weight, group, index).forward
                    else:
                        parent._modules[names[index]] = PackedLinear(layer, weight, group, index)
        yield
    finally:
        for parent, name, layer in replaced:
            parent._modules[name] = layer
            layer.__dict__.pop("forward", None)


def _pack_each(places: Sequence[_Place], packed: Callable[[_Place], PackedWeight]) -> Iterator[_PackedPlace]:
    """Yield each place with its weight as `packed` makes it, and with a group where several layers share the weight."""
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        # Our own packing runs in threads of Python: those of OpenMP go on for milliseconds behind each matrix.
        ours = all(_ours(_linears(*each)[0].weight) for each in places)
        weights = (pool.map if ours else map)(packed, places)
        for place, weight in zip(places, weights, strict=True):
            yield place, weight, FusedGroup(weight) if len(place[1]) > 1 else None


def _fit_blocks(layers: Sequence[nn.Linear]) -> bool:
    """Return whether one `BlockWeight` can hold these layers, if it can hold each."""
    whole = all(layer.out_features % products.LANES == 0 for layer in layers[:-1])
    return whole and layers[0].weight.dtype is torch.bfloat16 and _ours(layers[0].weight)


def _ours(weight: Tensor) -> bool:
    """Return whether a weight is multiplied by `products`."""
    return weight.device.type == "cpu" and products.ready(weight.dtype)


def _linears(parent: nn.Module, names: Sequence[str]) -> list[Any]:
    return [parent._modules[name] for name in names]


def _packable(model: nn.Module) -> Iterator[_Place]:
    """Yield modules with the names of those of their children that one packed weight will hold."""
    # Skip the inside of an adapter, which reads its base layer's weight.
    for parent in [module for module in model.modules() if not hasattr(module, "base_layer")]:
        children = parent._modules
        merged = set[str]()
        for names in GROUPS:
            members = [children.get(name) for name in names]
            linears = [each for each in members if isinstance(each, nn.Linear) and (packable(each) or joinable(each))]
            kinds = {
                (linear.in_features, linear.weight.dtype, linear.weight.device, linear.bias is None)
                for linear in linears
            }
            if len(linears) == len(names) and len(kinds) == 1:
                merged.update(names)
                yield parent, names
        for name, child in parent.named_children():
            if name not in merged and packable(child):
                yield parent, (name,)


@torch.no_grad()
def unpack(model: nn.Module) -> int:
    """Undo `pack`, and return how many layers are plain again: the same weights, tied ones tied
    again.
    """
    packed_layers = [
        (parent, name, child)
        for parent in list(model.modules())
        for name, child in parent.named_children()
        if isinstance(child, PackedLinear)
    ]
    for parent, name, packed in packed_layers:
        plain = nn.Linear(packed.in_features, packed.out_features, bias=packed.bias is not None, device="meta")
        plain.weight = nn.Parameter(packed.weight.clone(), requires_grad=False)
        if packed.bias is not None:
            plain.bias = nn.Parameter(packed.bias.clone(), requires_grad=False)
        setattr(parent, name, plain)
    tie: Any = getattr(model, "tie_weights", None)
    if packed_layers and tie is not None:
        tie()
    return len(packed_layers)


def list_in_blocks(model: nn.Module) -> list[str]:
    """Return the names of the layers whose weights are in blocks."""
    packed = ((name, module) for name, module in model.named_modules() if isinstance(module, PackedLinear))
    return [name for name, module in packed if module.packed_weight.in_blocks]


def name_blocks(model: nn.Module) -> str:
    """Return the type of most weights that are in blocks by its name in GGUF, for example ``"Q4_1"``; an empty string
    where none are.
    """
    types = Counter[int]()
    for module in model.modules():
        if isinstance(module, PackedLinear) and isinstance(module.packed_weight, BlockWeight):
            types.update(module.packed_weight.types)
    if not types:
        return ""
    from gguf import GGMLQuantizationType

    return GGMLQuantizationType(max(types, key=lambda kind: types[kind])).name


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and weights of a model, packed ones too, unpacked one by one."""
    yield from model.named_parameters()
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            yield f"{name}.weight", module.weight


def count_weights(model: nn.Module) -> int:
    """Return the number of a model's weights, packed ones too."""
    packed = sum(sum(weight.sizes) * weight.in_features for weight in _packed_weights(model))
    return packed + sum(weight.numel() for weight in model.parameters())


def packed_bytes(model: nn.Module) -> int:
    """Return the bytes of all packed weights, which are no parameters any longer."""
    return sum(weight.nbytes() for weight in _packed_weights(model))


def freed_bytes(model: nn.Module) -> int:
    """Return the bytes that these weights took before they were packed."""
    return sum(PackedWeight.nbytes(weight) for weight in _packed_weights(model))


def _packed_weights(model: nn.Module) -> set[PackedWeight]:
    return {module.packed_weight for module in model.modules() if isinstance(module, PackedLinear)}
