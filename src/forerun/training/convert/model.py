"""`convert` turns a loaded transformers model into one that trains, saves and exports its own draft head.

The interface is that of ``modelopt.torch.speculative.convert`` and ``modelopt.torch.opt`` of nvidia-modelopt 0.47. The
base model may learn beside its head: whole, from the data's tokens, or through LoRA adapters (PEFT's, ``pip install
'forerun[peft]'``), which keep its answers close to what they were and are saved as PEFT does.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import os
import re
import tempfile
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from forerun.errors import ArgumentError, CheckpointError, UnsupportedModelError, refuse
from forerun.heads.base import Head
from forerun.heads.engines import Exported, export_head
from forerun.heads.files import HeadCheckpoint, TargetFacts, format_for, read_head, write_head
from forerun.losses.chunked_loss import hard_loss, soft_loss
from forerun.losses.objective import FeatureBatch, FrozenTarget, Objective, TokenBatch, mark_counted
from forerun.model.identity import fingerprint
from forerun.model.layers import CACHE_ARGUMENTS, base_of, device_of, norm_after_layers
from forerun.training.convert.batches import padding_order, refuse_context_parallel, token_batch
from forerun.training.convert.modes import Mode, check_ids, read_mode
from forerun.training.features.online import OnlineFeatures
from forerun.types import LAST_HIDDEN
from forerun.writing import read_object, write_file

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
    """Return the cross-entropy () to the model without adapters, whose states are `before`, as a mean over the counted
    tokens.
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
    modules = values["eagle_base_lora_target_modules"] or None
    start = values["eagle_base_lora_start_layer"]
    if start is not None:
        if modules is None:
            raise ArgumentError(
                "eagle_base_lora_start_layer also needs eagle_base_lora_target_modules, such as ['q_proj', 'v_proj']"
            )
        layer_of = {name: re.search(r"layers\.(\d+)\.", name) for name, _ in model.named_modules()}
        late = [name for name, number in layer_of.items() if number and int(number[1]) >= start]
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
    adapters = {name: tensor for name, tensor in state.items() if _ADAPTER.search(name)}
    tensors = {
        _PREFIX + _ADAPTER.sub(r".\1.weight", name): tensor.detach().cpu().contiguous()
        for name, tensor in adapters.items()
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
    stored = load_file(folder / "adapter_model.safetensors")
    parameters = model.state_dict()
    for name, tensor in parameters.items():
        if _ADAPTER.search(name):
            tensor.copy_(stored[_PREFIX + _ADAPTER.sub(r".\1.weight", name)])


MARKER = "forerun_convert.json"  # In the directory of a converted model: the settings with which it was converted
EXTRA = ("loss_mask", "base_model_outputs")  # What a converted model's forward takes beside what the base's takes
MEDUSA_ARGUMENTS = {
    "freeze_base_model",
    "medusa_heads_coefficient",
    "medusa_decay_coefficient",
}  # ModelOpt's, of a call
_RESTORES = "_forerun_restores_heads"


def convert(model: Any, mode: Any) -> Any:
    """Attach a trainable draft head to a loaded transformers causal LM, which is returned, and freeze everything else,
    unless the configuration says that it learns too.

    The model keeps its name, its weights and, in eval mode, its behaviour: ``generate`` gives the same tokens. In train
    mode, or with ``labels`` or ``loss_mask``, ``model(input_ids, attention_mask, ...)`` returns a `ConvertedOutput`
    whose loss is that of ``forerun train`` for such a head, as a mean over the counted tokens; an EAGLE head's is
    training-time test (arXiv 2503.01840). ``labels`` (-100: does not count) and ``loss_mask`` say which tokens count;
    the values of labels are not looked at. transformers' ``Trainer`` takes it as it is.

    It also gains ``set_draft_vocabulary``, ``export_head`` and ``load_head``; ``save_pretrained`` writes the head
    beside the base. A head with ``draft_vocab_size`` below ``vocab_size`` must be told its tokens before its first
    forward, by ``set_draft_vocabulary(token_ids)`` or ``eagle_draft_vocab_ids`` in the configuration. Fresh weights
    follow torch's seed (``transformers.set_seed``).

    With ``eagle_offline`` (or ``dflash_offline``) the base model does not run for the loss: each batch brings its
    states, as ``base_model_outputs``: a dict with ``base_model_hidden_states`` (B, S, H), after the final norm, and
    ``aux_hidden_states`` (B, S, layers x H).

    Args:
        model: a transformers causal LM; not yet wrapped, compiled or sharded.
        mode: ``[(name, config)]`` with ModelOpt's keys, or ``{"algorithm": name, "config": config}``. Names are
            ``eagle`` (see `EAGLE3_DEFAULT_CFG`), ``medusa``, ``dflash`` and ``mtp`` (the layers that the model's own
            checkpoint brings). What is missing takes its default. A name alone is a head of the model's own sizes.

    ArgumentError if the model is converted already, or the mode or configuration is unknown, contradictory or
    unsupported; UnsupportedModelError if the model's hidden states cannot be read (unknown attention, no causal LM);
    CheckpointError for ``mtp`` if the model's checkpoint brings no layers that can be read.
    """
    refuse(
        (
            isinstance(model, ConvertedModel),
            "convert: this model is converted already; its head is one of its children",
        ),
        (
            not isinstance(model, PreTrainedModel),
            f"convert: expected a transformers causal LM, got {type(model).__name__}",
        ),
    )
    chosen = read_mode(mode)
    if "forward" in model.__dict__ and "_old_forward" not in model.__dict__:
        raise ArgumentError("convert: somebody replaced this model's forward (a compiler?); convert it before that")
    head = chosen.head(model)
    _attach(model, head, chosen)
    model._convert_ready = chosen.token_ids is not None or not head.config.reduced_vocabulary
    return model


def restore_head(model: Any, directory: Any, subfolder: str = "") -> Any:
    """Return `model` with the head that was saved in `directory`, if any; CheckpointError if it is incomplete or
    another's.
    """
    loaded = model[0] if isinstance(model, tuple) else model  # output_loading_info
    if not isinstance(directory, str | Path):
        return model
    folder = Path(directory) / subfolder
    marker = folder / MARKER
    if not marker.is_file() or isinstance(loaded, ConvertedModel) or loaded.get_output_embeddings() is None:
        return model
    mode = read_mode(read_object(marker, "convert the base model anew", CheckpointError))
    text = loaded.config.get_text_config()
    stored = read_head(folder / mode.folder, num_layers=text.num_hidden_layers)
    if (stored.config.target_hidden_size, stored.config.vocab_size) != (text.hidden_size, text.vocab_size):
        raise CheckpointError(
            f"{folder / mode.folder} is the head of a model with {stored.config.target_hidden_size} hidden units and "
            f"{stored.config.vocab_size} tokens; this one has {text.hidden_size} and {text.vocab_size}"
        )
    _attach(loaded, stored.build(), mode)
    if mode.lora:
        read_adapters(loaded, folder / LORA_FOLDER)
    loaded._convert_ready = loaded._convert_fresh = True
    return model


def enable_huggingface_checkpointing() -> None:
    """Let ``from_pretrained`` of every transformers class give a converted model back converted, from now on.

    Only directories on this machine are looked at. Calling it again changes nothing.
    """
    plain = PreTrainedModel.__dict__["from_pretrained"].__func__
    if hasattr(plain, _RESTORES):
        return

    @functools.wraps(plain)
    def from_pretrained(cls: Any, pretrained_model_name_or_path: Any, *arguments: Any, **keywords: Any) -> Any:
        loaded = plain(cls, pretrained_model_name_or_path, *arguments, **keywords)
        return restore_head(loaded, pretrained_model_name_or_path, keywords.get("subfolder") or "")

    setattr(from_pretrained, _RESTORES, True)
    PreTrainedModel.from_pretrained = classmethod(from_pretrained)


def _attach(model: Any, head: Head, mode: Mode) -> None:
    """Change the model's class and give it the head; what may fail comes first, or the model is left half converted."""
    base: Any = type(model)
    source = OnlineFeatures(model, head.config.boundaries)
    if mode.trains_base:
        check_linear(model)
    if mode.lora:
        add_adapters(model, mode.values)
    for name, weight in model.named_parameters():
        weight.requires_grad_(mode.trains_base or (mode.lora and ".lora_" in name))
    model.__class__ = converted_class(base)
    if "_old_forward" in model.__dict__:
        model._old_forward = types.MethodType(type(model).forward, model)  # accelerate calls this one
    setattr(model, mode.child, head.to(device_of(model.get_input_embeddings())).train(model.training))
    model._convert_mode, model._convert_source = mode, source
    model._convert_fresh = model._convert_reading = False
    model._convert_losses = 0


@dataclass
class ConvertedOutput(ModelOutput):  # type: ignore[misc]
    """The output of a converted model while it trains, or when it is given labels."""

    loss: Tensor | None = None  # () float32, nats: mean over the counted tokens and the (weighted) steps
    base_loss: Tensor | None = None  # () float32: the part of `loss` that is the base model's, where it learns
    logits: Tensor | None = None  # Always None: they are never formed. Ask for them without labels, in eval mode
    train_acc: list[float] | None = None  # (T,) share of counted predictions right at this step and all before


class ConvertedModel:
    """Mixed into the class of a converted model; it is not made by hand, see
    `forerun.modelopt.convert`.
    """

    accepts_loss_kwargs = False  # For the Trainer: the loss is a mean, to be averaged over accumulated batches
    _convert_mode: Mode
    _convert_source: OnlineFeatures
    _convert_ready: bool = False
    _convert_fresh: bool = False  # The head is as it was loaded: no loss has been taken since
    _convert_reading: bool = False  # The base model runs for the head's sake
    _convert_losses: int = 0  # Losses that were taken to learn from

    @property
    def _convert_head(self) -> Any:
        """Return the head, under whatever name."""
        return getattr(self, self._convert_mode.child)

    def set_draft_vocabulary(self, token_ids: Sequence[int] | Tensor) -> None:
        """Say which of the base model's tokens a head with a reduced vocabulary can propose; once, before training.
        `token_ids` (Vd,) are distinct, in any order; the most frequent of the training data, as a rule. The head's
        output rows start as the base model's. ArgumentError for other ids, or if they are known already. Of a
        ``d2t.pt`` take ``forerun.modelopt.read_draft_vocabulary(path)``."""
        ids = check_ids(token_ids, self._convert_head.config)
        if self._convert_ready:
            raise ArgumentError("the draft vocabulary is set already; another one needs a freshly converted model")
        rows = cast(Any, self).get_output_embeddings().weight
        with torch.no_grad():
            self._convert_head.set_vocabulary(ids.to(self._convert_head.d2t.device))
            self._convert_head.lm_head.weight.copy_(rows[ids.to(rows.device)])
        self._convert_ready = True

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: Mapping[str, Tensor] | None = None,
        **options: Any,
    ) -> None:
        """Write the base model as an ordinary transformers checkpoint, and the head beside it, in ``eagle_head/``
        or the like. The head keeps its dtype (float32) for further training; `export_head` writes one for an engine.
        ArgumentError for `push_to_hub`, which would leave the head behind, or if the draft vocabulary is not set."""
        if options.get("push_to_hub"):
            raise ArgumentError("save_pretrained: save first, then upload the folder: push_to_hub would omit the head")
        self._check_ready()
        whole = cast(Any, self).state_dict() if state_dict is None else state_dict
        prefix = f"{self._convert_mode.child}."
        base = {name: tensor for name, tensor in whole.items() if not name.startswith(prefix)}
        if self._convert_mode.lora:
            adapters, base = base, plain_names(base)
        cast(Any, super()).save_pretrained(save_directory, is_main_process=is_main_process, state_dict=base, **options)
        if not is_main_process:
            return
        head = {name: tensor for name, tensor in whole.items() if name.startswith(prefix)}
        head = head or self._convert_head.state_dict(prefix=prefix)
        checkpoint = HeadCheckpoint(
            config=self._convert_head.config,
            tensors={name.removeprefix(prefix): tensor.detach().cpu().clone() for name, tensor in head.items()},
        )
        directory = Path(save_directory)
        facts, kind = self._facts(str(directory.absolute())), checkpoint.config.kind
        write_head(checkpoint, directory / self._convert_mode.folder, format_for(kind), facts)
        if self._convert_mode.lora:
            write_adapters(adapters, self._convert_mode.values, directory / LORA_FOLDER)
        record = {"algorithm": self._convert_mode.algorithm, "config": self._convert_mode.given}
        write_file(directory / MARKER, json.dumps(record, indent=2) + "\n")

    def load_head(self, directory: str | os.PathLike[str]) -> None:
        """Put the weights of a saved head into this model's; `directory` is a converted model's or the head's own.
        transformers' Trainer reads only the base model back when it resumes: call this with the checkpoint before
        ``trainer.train(resume_from_checkpoint=...)``. CheckpointError for no head, or one of another shape."""
        folder = Path(directory)
        inside = folder / self._convert_mode.folder
        folder = inside if inside.is_dir() else folder
        stored = read_head(folder, num_layers=cast(Any, self).config.get_text_config().num_hidden_layers)
        try:
            if stored.config.boundaries != self._convert_head.config.boundaries:
                raise CheckpointError(
                    f"it reads {stored.config.boundaries}, not {self._convert_head.config.boundaries}"
                )
            self._convert_head.load_state_dict(dict(stored.tensors))
        except (RuntimeError, CheckpointError) as error:
            raise CheckpointError(f"the head in {folder} has another shape than this model's: {error}") from error
        self._convert_ready = self._convert_fresh = True

    def export_head(
        self,
        directory: str | os.PathLike[str],
        to: str = "vllm",
        *,
        target: str | None = None,
        force: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Exported:
        """Write the head alone, as a serving engine reads it.

        Without `dtype` it is `torch_dtype` of the architecture, or the base model's where there is
        none. `target` is the path or hub id under which the engine finds the base model; None:
        where it was loaded from. Adapters of the base model are written beside the head, in
        ``base_lora/``. For the rest, and the errors, see `heads.engines.export_head`;
        ArgumentError, too, without a draft vocabulary.
        """
        self._check_ready()
        mode = self._convert_mode
        head = mode.finished(HeadCheckpoint.of(self._convert_head), self)
        dtype = dtype or mode.export_dtype or cast(Any, self).dtype
        cast_tensors = {
            name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in head.tensors.items()
        }
        # What has learnt is no longer what was loaded.
        loaded = "" if mode.trains_base else cast(Any, self).name_or_path
        facts = self._facts(target or loaded or "TARGET")
        head = dataclasses.replace(head, tensors=cast_tensors, target=fingerprint(facts.name_or_path))
        with tempfile.TemporaryDirectory() as folder:
            stored = write_head(head, Path(folder) / mode.folder, format_for(head.config.kind), facts)
            exported = export_head(stored, facts, to, Path(directory), force=force)
        if mode.lora:
            write_adapters(cast(Any, self).state_dict(), mode.values, Path(directory) / LORA_FOLDER)
        return exported

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights as every module does, but refuse weights without the head if they would leave a trained head as
        it is.
        """
        if (
            not strict
            and not self._convert_fresh
            and not any(name.startswith(f"{self._convert_mode.child}.") for name in state_dict)
        ):
            raise ArgumentError(
                "these weights hold no head, so the model's would stay as it is now. A checkpoint of a converted model "
                f"keeps it in {self._convert_mode.folder}/: call model.load_head(checkpoint) first, or load the "
                "checkpoint with from_pretrained after forerun.modelopt.enable_huggingface_checkpointing()"
            )
        return cast(Any, super()).load_state_dict(state_dict, strict=strict, assign=assign)

    def _check_ready(self) -> None:
        if not self._convert_ready:
            config = self._convert_head.config
            raise ArgumentError(
                f"the head can propose {config.draft_vocab_size} of {config.vocab_size} tokens, but does not know "
                "which: call model.set_draft_vocabulary(token_ids) before training, for example with the most frequent "
                "tokens of the data, or give eagle_draft_vocab_ids in the configuration of convert"
            )

    def _facts(self, name: str) -> TargetFacts:
        """Return what a head's file says of its base model, found under `name`."""
        facts = TargetFacts.of(cast(Any, self).config, name)
        return facts if facts.architectures else dataclasses.replace(facts, architectures=(type(self).__name__,))

    def _convert_wants(self, given: Mapping[str, Any]) -> bool:
        """Return whether a call asks for the loss; one with a cache comes from ``generate``, also in train mode."""
        if self._convert_reading:
            return False
        if any(given.get(name) is not None for name in ("labels", *EXTRA)):
            return True
        return bool(cast(Any, self).training) and not any(given.get(name) for name in CACHE_ARGUMENTS)

    def _convert_loss(self, given: Mapping[str, Any]) -> ConvertedOutput | tuple[Any, ...]:
        self._check_ready()
        refuse_context_parallel()
        if given.get("input_ids") is None:
            raise ArgumentError("a converted model computes its loss from input_ids; inputs_embeds are not enough")
        if MEDUSA_ARGUMENTS & given.keys():
            raise ArgumentError(
                f"leave {', '.join(sorted(MEDUSA_ARGUMENTS & given.keys()))} away: the base model stands still beside "
                "Medusa heads, whose loss is that of `forerun train medusa`; `forerun train medusa2` trains both"
            )
        others = ("attention_mask", "labels", "loss_mask", "position_ids")
        batch = token_batch(given["input_ids"], **{name: given.get(name) for name in others})
        base_loss = None
        if self._convert_mode.offline or given.get("base_model_outputs") is not None:
            features = self._stored_features(batch, given)
        else:
            features, base_loss = self._online_features(batch)
        # transformers' own switch; its property changes its name between versions.
        saving = any(getattr(module, "gradient_checkpointing", False) for module in cast(Any, self).modules())
        report = self._convert_objective(checkpointing=saving and torch.is_grad_enabled())(features)
        self._convert_fresh = self._convert_fresh and not torch.is_grad_enabled()
        accuracy = None
        if self._convert_mode.report_accuracy:
            pairs = [pair for name, pair in report.metrics.items() if name.startswith("acceptance_")]
            accuracy = torch.stack([hits / count.clamp_min(1) for hits, count in pairs]).tolist()
        # Nothing counted: a loss of 0 that still reaches every parameter.
        loss = report.loss / torch.where(report.weight > 0, report.weight, 1.0)
        loss = loss if base_loss is None else loss + base_loss
        output = ConvertedOutput(loss=loss, base_loss=base_loss, train_acc=accuracy)
        return output if given.get("return_dict") in (None, True) else output.to_tuple()

    def _online_features(self, batch: TokenBatch) -> tuple[FeatureBatch, Tensor | None]:
        """Return the states that the base model computes, and its own loss if it learns."""
        mode, source, target = self._convert_mode, self._convert_source, FrozenTarget.of(self)
        learns = cast(Any, self).training and torch.is_grad_enabled()
        self._convert_losses += learns
        self._convert_reading = True
        try:
            if learns and mode.trains_base:
                features = source.learning(batch)
                return detached(features), learn_tokens(target, features)
            if learns and mode.lora and self._convert_losses > mode.values["eagle_base_lora_warmup_steps"]:
                with without_adapters(self):
                    before = source.features(batch)
                features = source.learning(batch)
                weight = mode.values["eagle_base_lora_preservation_loss_weight"]
                return features, weight * stay_close(target, features, before)
            return source.features(batch), None
        finally:
            self._convert_reading = False

    def _stored_features(self, batch: TokenBatch, given: Mapping[str, Any]) -> FeatureBatch:
        """Return the states that a batch brings in ``base_model_outputs``, by ModelOpt's names."""
        mode = self._convert_mode
        config = self._convert_head.config
        stored = given.get("base_model_outputs") or {}
        if not mode.offline:
            raise ArgumentError(f"base_model_outputs are for a head that was converted with {mode.algorithm}_offline")
        read = [boundary for boundary in config.boundaries if boundary != LAST_HIDDEN]
        widths = {"base_model_hidden_states": 1, **({"aux_hidden_states": len(read)} if read else {})}
        size = config.target_hidden_size
        for name, count in widths.items():
            states = stored.get(name)
            if states is None or states.shape != (*batch.tokens.shape, count * size):
                raise ArgumentError(
                    f"with {mode.algorithm}_offline a batch brings base_model_outputs[{name!r}], (batch, tokens, "
                    f"{count * size}), got {None if states is None else tuple(states.shape)}"
                )
        order = padding_order(given["input_ids"], given.get("attention_mask")).unsqueeze(2)
        moved = {name: torch.take_along_dim(stored[name], order.to(stored[name].device), 1) for name in widths}
        last = moved["base_model_hidden_states"]
        if stored.get("base_hidden_prenorm"):
            count = cast(Any, self).config.get_text_config().num_hidden_layers
            last = norm_after_layers(base_of(self), count)[1](last)
        states = dict(zip(read, moved["aux_hidden_states"].chunk(len(read), -1), strict=True)) if read else {}
        return FeatureBatch(batch=batch, features={**states, LAST_HIDDEN: last}).to(self._convert_head.weight.device)

    def _convert_objective(self, *, checkpointing: bool) -> Objective:
        # Made anew: whoever moves or shards the model replaces the tensors that it would hold.
        return self._convert_mode.objective(self._convert_head, FrozenTarget.of(self), checkpointing=checkpointing)


@functools.cache
def converted_class(base: type) -> type:
    """Return `base` with `ConvertedModel` above it, under the same name, because transformers writes it as the
    architecture.

    ``forward`` takes what the base's takes, and `EXTRA`.
    """
    plain = cast(Any, base).forward
    plain_signature = inspect.signature(plain)
    added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in EXTRA]
    # Sorted stably by kind, so that the new ones stand before ``**kwargs``.
    parameters = [*(item for item in plain_signature.parameters.values() if item.name not in EXTRA), *added]
    signature = plain_signature.replace(parameters=sorted(parameters, key=lambda item: item.kind))
    names = [name for name in signature.parameters if name not in ("self", *EXTRA)]

    @functools.wraps(plain)
    def forward(self: Any, *arguments: Any, **keywords: Any) -> Any:
        given = {**dict(zip(names, arguments, strict=False)), **keywords}
        if self._convert_wants(given):
            return self._convert_loss(given)
        return plain(self, **{name: value for name, value in given.items() if name not in EXTRA})

    forward.__signature__ = signature  # type: ignore[attr-defined]

    @classmethod  # type: ignore[misc]
    def from_pretrained(cls: Any, path: Any, *arguments: Any, **keywords: Any) -> Any:
        loaded = cast(Any, base).from_pretrained(path, *arguments, **keywords)
        return restore_head(loaded, path, keywords.get("subfolder") or "")

    # The module's name too: transformers reads the source of the class's module.
    body = {
        "forward": forward,
        "from_pretrained": from_pretrained,
        "__module__": base.__module__,
        "__qualname__": f"Converted{base.__name__}",
        "__doc__": base.__doc__,
    }
    return type(base.__name__, (ConvertedModel, base), body)
