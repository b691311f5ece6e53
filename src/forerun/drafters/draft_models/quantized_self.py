"""Drafts with the target's own weights, rounded to 8 or 4 bits.

This is the idea of QuantSpec (arXiv 2502.10424) and QSpec (2410.11305), with plain rounding of the weights only. The
linear layers of the decoder get 8 bits with one scale for each output channel, or 4 bits with scale and offset for each
group of inputs. Embeddings, norms, output head, and experts that are one tensor are shared with the target, whose
weights are not changed. The rounded copy has its own KV cache and drafts as `draft_model` does.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from forerun.decode.drafter import DrafterSetup
from forerun.drafters.draft_models.draft_model import DraftModelConfig, DraftModelDrafter
from forerun.drafters.trees import TreeOptions
from forerun.errors import ArgumentError, UnsupportedModelError, refuse
from forerun.model.kernels.packing import PackedLinear
from forerun.model.layers import base_name, base_of, layers_of, replace_module, shallow
from forerun.model.transformers_target import require_layers

BITS = (8, 4)
GROUPS = (64, 32)  # Inputs that share a scale at 4 bits; the first that divides a layer's inputs
_INT4_OUTPUTS = 16  # torch's 4-bit kernel computes outputs in blocks of this size; other layers get 8 bits
KERNEL_ROWS = 24  # Up to this many rows torch's int8 kernel is faster than unpacking the weight (AMD, AVX-512)
_LARGEST = 127


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedSelfConfig(TreeOptions):
    """Options of `quantized_self`."""

    bits: int = 8  # Bits of a weight: 8, or 4 on a CPU

    def __post_init__(self) -> None:
        self.check_tree("quantized_self")
        if self.bits not in BITS:
            raise ArgumentError(f"quantized_self: bits is 8 or 4, got {self.bits}")


class QuantizedSelfDrafter(DraftModelDrafter):
    """Drafts with a rounded copy of the target."""

    name = "quantized_self"
    Config: ClassVar[type[Any]] = QuantizedSelfConfig
    reads_layers = True

    def __init__(self, config: QuantizedSelfConfig, setup: DrafterSetup) -> None:
        tree = {field.name: getattr(config, field.name) for field in fields(TreeOptions)}
        self._source = require_layers(setup.target, self.name).model
        super().__init__(DraftModelConfig(model=make_rounded_twin(self._source, config.bits), **tree), setup)

    @torch.inference_mode()
    def reread(self) -> None:
        for name, module in require_layers(self.model, self.name).model.named_modules():
            if isinstance(module, _Rounded):
                weight = _weight(self._source.get_submodule(name))
                assert weight is not None, "it was rounded before"
                rounded, scales = module.round(weight)
                module.rounded.copy_(rounded)
                module.scales.copy_(scales)

    def memory_bytes(self) -> int:
        """Return the bytes of rounded weights, scales and the draft's cache, without what is shared with the target."""
        twin = require_layers(self.model, self.name)
        layers = (layer for layer in twin.model.modules() if isinstance(layer, _Rounded))
        return sum(layer.nbytes() for layer in layers) + twin.cache.nbytes()


def make_rounded_twin(model: Any, bits: int = 8) -> Any:
    """Return a copy of the causal LM with rounded linear layers in its decoder; everything else is shared and not
    modified. Raises UnsupportedModelError if it has no plain linear layers, is not on one device, or torch has no 4-bit
    kernel.
    """
    refuse(
        (
            bits == 4 and model.device.type != "cpu",
            f"quantized_self has 4 bits on a CPU only, not on {model.device}; take bits=8",
        ),
        (
            any(hasattr(module, "_hf_hook") for module in model.modules()) or getattr(model, "_tp_size", None),
            "quantized_self needs a model on one device; load it so, or draft with skip_layers",
        ),
        error=UnsupportedModelError,
    )
    base = base_of(model)
    name, layers = layers_of(base, model.config.get_text_config(decoder=True).num_hidden_layers)
    rounded = [_round_linears(layer, bits) for layer in layers]
    if all(new is old for new, old in zip(rounded, layers, strict=True)):
        raise UnsupportedModelError(
            f"quantized_self finds no plain linear layer in the decoder of {type(model).__name__}: it is quantised "
            "already, or of another kind. Draft with skip_layers"
        )
    return replace_module(model, f"{base_name(model)}.{name}", nn.ModuleList(rounded))


def _round_linears(module: nn.Module, bits: int) -> nn.Module:
    """Copy a module, with rounded layers instead of linear ones; submodules without linear layers are shared."""
    weight = _weight(module)
    if weight is not None:
        kind = Int4Linear if bits == 4 and Int4Linear.suits(weight) else Int8Linear
        return kind(weight, getattr(module, "bias", None))
    children = {name: _round_linears(child, bits) for name, child in module._modules.items() if child is not None}
    if all(child is module._modules[name] for name, child in children.items()):
        return module
    twin = shallow(module)
    twin._modules.update(children)
    return twin


def _weight(module: nn.Module) -> Tensor | None:
    """Return the weight (out, in) of a linear layer of a known kind, or None for any other module."""
    from transformers.pytorch_utils import Conv1D

    if type(module) in (nn.Linear, PackedLinear):
        weight: Tensor = module.weight  # type: ignore[assignment]
        return weight if weight.is_floating_point() else None
    if type(module) is Conv1D:
        return module.weight.T  # type: ignore[return-value]
    return None


class _Rounded(nn.Module):
    """A linear layer made from a `weight` (out, in), of which only the rounded values are kept, and the shared `bias`
    (out,).
    """

    rounded: Tensor
    scales: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.shared_bias = bias
        rounded, scales = self.round(weight)
        self.register_buffer("rounded", rounded, persistent=False)
        self.register_buffer("scales", scales, persistent=False)

    def round(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rounded weight (out, in) and its scales."""
        raise NotImplementedError

    def product(self, rows: Tensor) -> Tensor:
        """Multiply (M, in) -> (M, out), without the bias."""
        raise NotImplementedError

    def forward(self, states: Tensor) -> Tensor:
        result = self.product(states.reshape(-1, self.in_features))
        if self.shared_bias is not None:
            result = result + self.shared_bias
        return result.view(*states.shape[:-1], self.out_features)

    def nbytes(self) -> int:
        """Return the bytes of weight and scales; the bias belongs to the target."""
        return self.rounded.nbytes + self.scales.nbytes


class Int8Linear(_Rounded):
    """A linear layer whose weight is int8 with one scale for each output."""

    def round(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        self._kernel = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
        largest = weight.detach().float().abs().amax(1, keepdim=True)
        scales = (largest / _LARGEST).clamp_min(torch.finfo(torch.float32).tiny).to(weight.dtype)
        # Divide by the stored scale, so that its rounding adds no further error.
        whole = (weight.detach().float() / scales.float()).round().clamp(-_LARGEST, _LARGEST)
        return whole.to(torch.int8), scales.squeeze(1)

    def product(self, rows: Tensor) -> Tensor:
        if self._kernel and rows.shape[0] <= KERNEL_ROWS:
            return torch._weight_int8pack_mm(rows.contiguous(), self.rounded, self.scales)
        return functional.linear(rows, self.rounded.to(rows.dtype)) * self.scales


class Int4Linear(_Rounded):
    """A linear layer whose weight is 4 bits wide, two to a byte in the layout of torch's CPU kernel; see `suits`."""

    def round(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        self.group = next(size for size in GROUPS if self.in_features % size == 0)
        groups = weight.detach().float().view(self.out_features, -1, self.group)
        low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
        scales = ((high - low) / 15).clamp_min(torch.finfo(torch.float32).tiny)
        whole = ((groups - low) / scales).round().clamp(0, 15).to(torch.int32).flatten(1)
        # The kernel computes (whole - 8) * scale + offset.
        pairs = torch.cat([scales, low + 8 * scales], dim=2).transpose(0, 1).to(weight.dtype).contiguous()
        return torch.ops.aten._convert_weight_to_int4pack_for_cpu(whole, 1), pairs

    @staticmethod
    def suits(weight: Tensor) -> bool:
        """Return whether the kernel takes a layer of this shape."""
        return weight.shape[0] % _INT4_OUTPUTS == 0 and any(weight.shape[1] % size == 0 for size in GROUPS)

    def product(self, rows: Tensor) -> Tensor:
        multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
        return multiply(rows.contiguous(), self.rounded, self.group, self.scales)
