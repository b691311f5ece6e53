"""`convert` and the hooks into transformers' ``from_pretrained``. Knows no training loop.

Source of the interface: ``modelopt.torch.speculative.convert`` and ``modelopt.torch.opt`` of nvidia-modelopt 0.47.
"""

from __future__ import annotations

import functools
import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from forerun.checkpoints import read_head
from forerun.drafters.heads.eagle import EagleConfig, EagleHead
from forerun.errors import ArgumentError, CheckpointError
from forerun.target.layers import device_of
from forerun.training.convert import files
from forerun.training.convert.model import HEAD, EagleModel, checked_ids, converted_class
from forerun.training.convert.settings import ConvertSettings, head_shape, read_mode
from forerun.training.features.online import OnlineFeatures

_PLAIN = "_forerun_plain"


def convert(model: Any, mode: Any) -> Any:
    """Attach a trainable EAGLE head to a loaded transformers causal LM, in place, and freeze everything else.

    The model keeps its name, its weights and, in eval mode, its behaviour: ``generate`` gives the same tokens. In train
    mode, or with ``labels`` or ``loss_mask``, ``model(input_ids, attention_mask, ...)`` returns an `EagleOutput` whose
    loss is that of training-time test (arXiv 2503.01840): the head unrolled on its own features, soft cross-entropy
    to the model's own law, mean over the counted tokens. ``labels`` (-100: does not count) and ``loss_mask`` say which
    tokens count; the values of labels are not looked at. transformers' ``Trainer`` takes it as it is.

    It also gains ``set_draft_vocabulary``, ``export_head`` and ``load_head``; ``save_pretrained`` writes the head
    beside the base. A head with ``draft_vocab_size`` below ``vocab_size`` must be told its tokens before its first
    forward, by ``set_draft_vocabulary(token_ids)`` or ``eagle_draft_vocab_ids`` in the configuration. Fresh weights
    follow torch's seed (``transformers.set_seed``).

    Args:
        model: a transformers causal LM; not yet wrapped, compiled or sharded.
        mode: ``[("eagle", config)]`` with ModelOpt's keys, see `EAGLE3_DEFAULT_CFG`; or
            ``{"algorithm": "eagle", "config": config}``.

    Returns:
        the same object.

    Raises:
        ArgumentError: the model is converted already, or the configuration is unknown, contradictory or unsupported.
        UnsupportedModelError: a model whose hidden states cannot be read (recurrent state, no causal LM).
    """
    if isinstance(model, EagleModel):
        raise ArgumentError("convert: this model is converted already; its head is model.eagle_module")
    if not isinstance(model, PreTrainedModel):
        raise ArgumentError(f"convert: expected a transformers causal LM, got {type(model).__name__}")
    settings = read_mode(mode)
    _check_forward(model)
    config = head_shape(model, settings)
    source = OnlineFeatures(model, config.boundaries)
    ids = None if settings.draft_vocab_ids is None else checked_ids(settings.draft_vocab_ids, config)
    _attach(model, _fresh(model, config, ids), settings, source)
    model._eagle_ready = ids is not None or not config.reduced_vocabulary
    return model


def restore(model: Any, directory: Any, subfolder: str = "") -> Any:
    """Attach the head that was saved in `directory`, if any, to its base model; returns the same object.

    Raises:
        CheckpointError: the head is incomplete, or not this model's.
    """
    loaded = model[0] if isinstance(model, tuple) else model  # output_loading_info
    if not isinstance(directory, str | Path):
        return model
    folder = Path(directory) / subfolder
    mode = files.read_settings(folder)
    if mode is None or isinstance(loaded, EagleModel) or loaded.get_output_embeddings() is None:
        return model
    settings = read_mode(mode)
    text = loaded.config.get_text_config()
    found = read_head(folder / files.FOLDER, num_layers=text.num_hidden_layers)
    if (found.config.target_hidden_size, found.config.vocab_size) != (text.hidden_size, text.vocab_size):
        raise CheckpointError(
            f"{folder / files.FOLDER} is the head of a model with {found.config.target_hidden_size} hidden units and "
            f"{found.config.vocab_size} tokens; this one has {text.hidden_size} and {text.vocab_size}"
        )
    _attach(loaded, found.build(), settings, OnlineFeatures(loaded, found.config.boundaries))
    loaded._eagle_ready = loaded._eagle_fresh = True
    return model


def enable_huggingface_checkpointing() -> None:
    """From now on ``from_pretrained`` of every transformers class gives a converted model back converted.

    Only directories on this machine are looked at. Calling it again changes nothing.
    """
    current = PreTrainedModel.__dict__["from_pretrained"]
    if hasattr(current, _PLAIN):
        return
    plain = current.__func__

    @functools.wraps(plain)
    def from_pretrained(cls: Any, pretrained_model_name_or_path: Any, *arguments: Any, **keywords: Any) -> Any:
        loaded = plain(cls, pretrained_model_name_or_path, *arguments, **keywords)
        return restore(loaded, pretrained_model_name_or_path, keywords.get("subfolder") or "")

    wrapped = classmethod(from_pretrained)
    setattr(wrapped, _PLAIN, current)
    PreTrainedModel.from_pretrained = wrapped


def disable_huggingface_checkpointing() -> None:
    """Undo `enable_huggingface_checkpointing`; without it, nothing happens."""
    PreTrainedModel.from_pretrained = getattr(
        PreTrainedModel.__dict__["from_pretrained"], _PLAIN, PreTrainedModel.__dict__["from_pretrained"]
    )


def _attach(model: Any, head: EagleHead, settings: ConvertSettings, source: OnlineFeatures) -> None:
    """From here on nothing may fail: the model is half converted."""
    base: Any = type(model)
    model.requires_grad_(False)
    model.__class__ = converted_class(base, restore)
    if "_old_forward" in model.__dict__:
        model._old_forward = types.MethodType(type(model).forward, model)  # accelerate calls this one
    setattr(model, HEAD, head.to(device_of(model.get_input_embeddings())).train(model.training))
    model._eagle_settings, model._eagle_source = settings, source
    model._eagle_fresh = model._eagle_reading = False


def _check_forward(model: Any) -> None:
    if "forward" in model.__dict__ and "_old_forward" not in model.__dict__:
        raise ArgumentError("convert: somebody replaced this model's forward (a compiler?); convert it before that")


def _fresh(model: Any, config: EagleConfig, ids: Tensor | None) -> EagleHead:
    """An untrained head in float32; until its tokens are known it stands for the first ones."""
    seed = torch.initial_seed()
    if ids is None and config.reduced_vocabulary:
        ids = torch.arange(config.draft_vocab_size)
    return EagleHead.initial(model, config, ids, seed=seed)
