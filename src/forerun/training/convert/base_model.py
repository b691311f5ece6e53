"""The base model learns beside its head here: whole, from the data's tokens, or through LoRA adapters
that keep its answers close to what they were.

Adapters are PEFT's (``pip install 'forerun[peft]'``), and are saved as PEFT saves them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.errors import ArgumentError, UnsupportedModelError
from forerun.losses.chunked_loss import hard_loss, soft_loss
from forerun.losses.objective import FeatureBatch, FrozenTarget, mark_counted
from forerun.types import LAST_HIDDEN

LORA_FOLDER = "base_lora"  # In the directory of a saved model or exported head: the adapters, as PEFT reads them
_ADAPTER = re.compile(r"\.(lora_\w+)\.default\.weight$")
_PREFIX = "base_model.model."  # PEFT's, before every name of a saved adapter


def check_linear(model: Any) -> None:
    """Raise UnsupportedModelError for a model whose own loss would not be that of its logits."""
    if FrozenTarget.of(model).softcap is not None:
        raise UnsupportedModelError(
            f"{model.config.model_type} caps its logits (final_logit_softcapping), which its own loss here does not: "
            "leave eagle_freeze_base_model at True"
        )


def learn_tokens(target: FrozenTarget, found: FeatureBatch) -> Tensor:
    """Return the base model's mean loss () over the counted tokens, with gradients into all its weights."""
    counts = mark_counted(found.batch, -1)
    hidden, weight = target.linear(found.features[LAST_HIDDEN])
    following = found.batch.tokens.roll(-1, 1).flatten()
    return hard_loss(hidden, weight, counts.flatten().float(), following).loss / counts.sum().clamp_min(1)


def stay_close(target: FrozenTarget, found: FeatureBatch, before: FeatureBatch) -> Tensor:
    """Return the cross-entropy () to the model without adapters, whose states are `before`, as a mean
    over the counted tokens.
    """
    counts = mark_counted(found.batch, -1)
    hidden, weight = target.linear(found.features[LAST_HIDDEN])
    teacher = target.teacher(before.features[LAST_HIDDEN], None)
    return soft_loss(hidden, weight, counts.flatten().float(), teacher).loss / counts.sum().clamp_min(1)


def detached(found: FeatureBatch) -> FeatureBatch:
    """Return the same states, from which no gradient reaches the base model."""
    states = {boundary: values.detach() for boundary, values in found.features.items()}
    return FeatureBatch(batch=found.batch, features=states)


def add_adapters(model: Any, values: Mapping[str, Any]) -> None:
    """Put LoRA adapters, which learn, into a model, by ``eagle_base_lora*`` of a configuration."""
    try:
        from peft import LoraConfig
        from peft.mapping import inject_adapter_in_model
    except ImportError:
        raise ArgumentError("eagle_base_lora needs peft: pip install 'forerun[peft]'") from None
    modules, start = values["eagle_base_lora_target_modules"] or None, values["eagle_base_lora_start_layer"]
    if start is not None:
        if modules is None:
            raise ArgumentError(
                "eagle_base_lora_start_layer also needs eagle_base_lora_target_modules, such as ['q_proj', 'v_proj']"
            )
        layer_of = {name: re.search(r"layers\.(\d+)\.", name) for name, _ in model.named_modules()}
        late = [name for name, found in layer_of.items() if found and int(found[1]) >= start]
        modules = [name for name in late if name.endswith(tuple(modules))]
    rank, alpha = values["eagle_base_lora_rank"], float(values["eagle_base_lora_alpha"])
    try:
        inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=alpha, target_modules=modules, bias="none"), model)
    except ValueError as error:
        raise ArgumentError(f"eagle_base_lora_target_modules: {error}") from error


@contextmanager
def without_adapters(model: Any) -> Iterator[None]:
    """Switch the adapters of a model off, and on again."""
    layers = [module for module in model.modules() if hasattr(module, "lora_A")]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def plain_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the base model's weights under the names that they have without adapters."""
    return {name.replace(".base_layer.", "."): tensor for name, tensor in state.items() if not _ADAPTER.search(name)}


def write_adapters(state: Mapping[str, Tensor], values: Mapping[str, Any], folder: Path) -> None:
    """Write the adapters among the weights `state` of a model into a folder, as PEFT does."""
    found = {name: tensor for name, tensor in state.items() if _ADAPTER.search(name)}
    tensors = {
        _PREFIX + _ADAPTER.sub(r".\1.weight", name): tensor.detach().cpu().contiguous()
        for name, tensor in found.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "r": values["eagle_base_lora_rank"],
        "lora_alpha": values["eagle_base_lora_alpha"],
        "target_modules": sorted({name.removeprefix(_PREFIX).rsplit(".", 2)[0] for name in tensors}),
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


@torch.no_grad()
def read_adapters(model: Any, folder: Path) -> None:
    """Put adapters that were saved into the model's own."""
    stored, own = load_file(folder / "adapter_model.safetensors"), model.state_dict()
    for name, tensor in own.items():
        if _ADAPTER.search(name):
            tensor.copy_(stored[_PREFIX + _ADAPTER.sub(r".\1.weight", name)])
