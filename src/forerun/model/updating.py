"""Puts the weights of another checkpoint in the place of those that a target runs with, as a trainer makes them.

They are written where the former ones stand, packed as these are: every module, recording and drafter that refers to
them goes on with the new ones. Everything that can be wrong with a checkpoint is found before anything is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forerun.errors import CheckpointError, EngineError, VocabularyMismatchError, list_some, refuse
from forerun.model.kernels.packing import PackedLinear, PackedWeight, list_in_blocks
from forerun.model.layers import is_quantised, is_spread
from forerun.model.load import LoadOptions, open_model, read_config
from forerun.model.names import tokenizer_beside
from forerun.model.prepare import run_first_forward
from forerun.writing import TokenizerIdentity

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FREE = ("architectures", "bos_token_id", "dtype", "eos_token_id", "pad_token_id", "transformers_version", "use_cache")
"""Keys of a configuration that a trainer changes and no pass depends on."""


def open_weights(model: Any, folder: Path, tokenizer: PreTrainedTokenizerBase | None) -> Any:
    """Return a plain model with the weights of the checkpoint in `folder`, which fit `model`.

    Raises:
        ArgumentError: there is no such directory, or `model` holds its weights in a form that cannot be written to.
        CheckpointError: the checkpoint is incomplete, of another shape, or has a weight that is not finite.
        VocabularyMismatchError: its tokenizer is not the one that prompts are read with.
    """
    refuse(
        (not folder.is_dir(), f"there is no directory {folder}; name one that the trainer has saved a checkpoint in"),
        (list_in_blocks(model), "the weights stand in a GGUF file's blocks; serve the checkpoint that is trained"),
        (is_quantised(model), "the weights are quantised; serve the checkpoint that is trained"),
        (is_spread(model), "the weights are spread over devices or processes; serve them on one device"),
        (getattr(model, "peft_config", None), "an adapter is attached; merge it, and serve what is saved then"),
    )
    options = LoadOptions(dtype=model.dtype, device=model.device)
    config = read_config(folder, options)
    _compare_configs(model.config, config, folder)
    if tokenizer is not None:
        _compare_tokenizers(tokenizer, folder)
    fresh = open_model(folder, options, config, quiet=True)
    run_first_forward(fresh)
    bad = [name for name, weight in fresh.named_parameters() if not torch.isfinite(weight).all()]
    if bad:
        raise CheckpointError(
            f"the weights in {folder} are not all finite: {list_some(bad)}; the training has diverged"
        )
    return fresh


@torch.inference_mode()
def write_weights(model: Any, fresh: Any) -> None:
    """Write the weights of `fresh`, of `open_weights`, over those of `model`, and read them back. EngineError: one is
    another than it should be, and `model` must not be used any more."""
    plain = list(_plain_pairs(model, fresh))
    packed = list(_packed_pairs(model, fresh))
    for _, old, new in plain:
        old.copy_(new)
    for _, weight, layers in packed:
        weight.rewrite(layers)
    wrong = [name for name, old, new in plain if not torch.equal(old, new)]
    wrong += [name for name, weight, layers in packed if not weight.holds(layers)]
    if wrong:
        raise EngineError(f"weights were not taken over as they are: {list_some(wrong)}; start the server anew")


def _plain_pairs(model: Any, fresh: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the parameters and buffers of a model by name, each with what is to be written over it."""
    for name, weight in model.named_parameters():
        yield name, weight.data, fresh.get_parameter(name).data
    buffers = dict(fresh.named_buffers())
    for name, buffer in model.named_buffers():
        if name in buffers:
            yield name, buffer, buffers[name]


def _packed_pairs(model: Any, fresh: Any) -> Iterator[tuple[str, PackedWeight, list[Any]]]:
    """Yield the packed weights of a model by the names of their layers, each with the plain layers to be packed."""
    names = dict[PackedWeight, list[tuple[int, str]]]()
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            names.setdefault(module.packed_weight, []).append((module.index, name))
    for weight, parts in names.items():
        layers = [name for _, name in sorted(parts)]
        yield ", ".join(layers), weight, [fresh.get_submodule(name) for name in layers]


def _compare_configs(served: Any, found: Any, folder: Path) -> None:
    """Raise CheckpointError unless two configurations are those of one model."""
    here, there = (_settings(config) for config in (served, found))
    others = [key for key in here if here[key] != there.get(key)]
    if others:
        differences = [f"{key} {there.get(key)!r:.60}, served is {here[key]!r:.60}" for key in others]
        raise CheckpointError(f"{folder} holds another model than the one that is served: {list_some(differences)}")


def _settings(config: Any) -> dict[str, Any]:
    text: dict[str, Any] = config.get_text_config(decoder=True).to_dict()
    return {key: value for key, value in text.items() if key not in _FREE and not key.startswith("_")}


def _compare_tokenizers(served: PreTrainedTokenizerBase, folder: Path) -> None:
    """Raise VocabularyMismatchError if a tokenizer lies in the folder and reads text as other tokens."""
    beside = tokenizer_beside(str(folder))
    if beside is None:
        return
    here, there = TokenizerIdentity.of(served), TokenizerIdentity.of(beside, str(folder))
    if here.vocabulary != there.vocabulary:
        raise VocabularyMismatchError(
            f"the tokenizer in {folder} ({there.vocab_size} tokens) is not that of the server ({here.name}, "
            f"{here.vocab_size} tokens): the trainer's token ids would mean other text; save the server's beside the "
            "weights, or start the server with the trainer's"
        )
