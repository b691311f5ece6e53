"""The modes of `convert`, one class each: which head a configuration means, and what it
is trained to do.

Keys of ``medusa`` and ``dflash`` are those of nvidia-modelopt 0.47 (``modelopt.torch.speculative.config``). It has no
mode for the MTP layers that a checkpoint brings, so the keys of ``mtp`` are ours, named like its others. A recipe file
of ModelOpt's (`translate`) is read here, too.
"""

from __future__ import annotations

import dataclasses
import json
import math
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from forerun.drafters.kinds import import_named, kind_named, objective_for
from forerun.errors import ArgumentError, choices, refuse, refuse_unknown
from forerun.heads.base import Head, HeadConfig
from forerun.heads.decoders import from_outputs
from forerun.heads.dflash import DFlashConfig
from forerun.heads.eagle import EagleConfig
from forerun.heads.files import HeadCheckpoint
from forerun.heads.keys import MEANINGLESS
from forerun.heads.medusa import MedusaConfig
from forerun.heads.peagle import PEagleConfig
from forerun.losses.objective import FrozenTarget, Objective
from forerun.training.convert.settings import (
    ARCHITECTURE,
    ARCHITECTURES,
    DTYPES,
    FEATURE_NORMS,
    KEYS,
    LATENT_SIZES,
    SAME_NAME,
    VOCABULARY_IDS,
    Key,
    check_config,
    rope_of,
)


class Mode:
    """A configuration, checked key by key, and the head that it means."""

    algorithm: ClassVar[str]
    child: ClassVar[str]  # The head's name among the model's children, ModelOpt's
    KEYS: ClassVar[Mapping[str, Key]]
    export_dtype: torch.dtype | None = None  # Dtype of an exported head; None: the base model's
    token_ids: Sequence[int] | None = None  # Token ids (Vd,) of a reduced draft vocabulary, where they were given

    def __init__(self, config: Any) -> None:
        """Check the keys; ArgumentError for an unknown key (naming the nearest), a value of the
        wrong type, or an unsupported one. What is missing takes its default. None stands for the
        bare name of the mode.
        """
        self.bare = config is None
        config = {} if config is None else config
        self.values = check_config(config, self.KEYS, "")
        # As the user wrote it, in JSON's types: saved beside the head.
        self.given: dict[str, Any] = json.loads(json.dumps(config, default=_make_plain))
        if self.offline and (self.lora or self.trains_base):
            raise ArgumentError(
                f"convert: {self.algorithm}_offline has states that were stored, from which the base model cannot "
                f"learn: leave {self.algorithm}_freeze_base_model and {self.algorithm}_base_lora at their defaults"
            )

    @property
    def folder(self) -> str:
        """Return the folder of the head beside a saved base model."""
        return f"{self.algorithm}_head"

    @property
    def report_accuracy(self) -> bool:
        """Return whether the output has `train_acc`; reading it waits for the device."""
        return bool(self.values.get(f"{self.algorithm}_report_acc", True))

    @property
    def offline(self) -> bool:
        """Return whether each batch brings the states of the base model, which does not run."""
        return bool(self.values.get(f"{self.algorithm}_offline"))

    @property
    def trains_base(self) -> bool:
        """Return whether the base model learns from the data's tokens beside its head."""
        return not self.values.get(f"{self.algorithm}_freeze_base_model", True)

    @property
    def lora(self) -> bool:
        """Return whether adapters in the base model learn with the head."""
        return bool(self.values.get(f"{self.algorithm}_base_lora"))

    def shape(self, model: Any) -> HeadConfig:
        """Return the head's shape for a transformers causal LM; ArgumentError if it does not fit
        the model.
        """
        raise NotImplementedError

    def head(self, model: Any) -> Head:
        """Return a head to begin with; one of a reduced vocabulary that is not known yet has the
        first tokens.
        """
        config = self.shape(model)
        ids = None if self.token_ids is None else check_ids(self.token_ids, config)
        if ids is None and config.reduced_vocabulary:
            ids = torch.arange(config.draft_vocab_size)
        return kind_named(config.kind).head.initial(model, config, ids, seed=torch.initial_seed())

    def settings(self) -> dict[str, Any]:
        """Return the settings of the objective."""
        raise NotImplementedError

    @property
    def kind(self) -> str:
        """Return the kind of the head, as ``forerun train KIND`` names it."""
        return self.algorithm

    def options(self) -> dict[str, Any]:
        """Return the options of the head's shape, see `HeadConfig.for_target`."""
        return {}

    def draft(self) -> dict[str, Any]:
        """Return ``draft`` of a recipe for `forerun train`: what the configuration names."""
        return {"options": self.options()}

    def objective(self, head: Head, target: FrozenTarget, *, checkpointing: bool) -> Objective:
        """Return the objective that the head is trained with."""
        made = objective_for(kind_named(head.config.kind))
        settings = made.Settings(gradient_checkpointing=checkpointing, **self.settings())
        return made(head, target, settings)

    def finished(self, head: HeadCheckpoint, model: Any) -> HeadCheckpoint:
        """Return the head as it is exported."""
        return head


class EagleMode(Mode):
    """An EAGLE-3 or EAGLE-1 head."""

    algorithm = "eagle"
    child = "eagle_module"
    KEYS: ClassVar[Mapping[str, Key]] = KEYS

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.given[VOCABULARY_IDS] = None  # which are saved with the head
        decoder = self.values["eagle_decoder_type"]
        architecture = self.values[ARCHITECTURE] or {}
        refuse_unknown("convert: there is no eagle_decoder_type", decoder, ARCHITECTURES, "There are")
        keys = ARCHITECTURES[decoder]
        if decoder == "kimik2":
            unread = {*MEANINGLESS, "model_type", "tie_word_embeddings"} - keys.keys()
            architecture = {name: value for name, value in architecture.items() if name not in unread}
        self.architecture = check_config(architecture, keys, f"{ARCHITECTURE}.")
        _check_generation(self.values, self.architecture)
        if self.lora and self.values["eagle_base_lora_logits_detach_prob"] != 1.0:
            raise ArgumentError(
                "convert: eagle_base_lora_logits_detach_prob must be 1.0: the head's loss reaches the adapters through "
                "the states that the head reads; the distribution that it learns from stays as it is"
            )
        self.export_dtype = _dtype(self.architecture["torch_dtype"])
        if (ids := self.values[VOCABULARY_IDS]) is not None:
            self.token_ids = [int(token) for token in ids]

    @property
    def kind(self) -> str:
        if self.architecture["parallel_draft_step"] > 1:
            return "peagle"
        return "eagle3" if self.architecture["use_aux_hidden_state"] else "eagle"

    def options(self) -> dict[str, Any]:
        shape = self.architecture
        keys = ARCHITECTURES[self.values["eagle_decoder_type"]]
        options = {name: shape[name] for name in SAME_NAME} | rope_of(shape, keys["rope_theta"].default)
        if latent := {name: shape[name] for name in LATENT_SIZES if name in shape}:
            options["latent"] = latent
        if shape["max_position_embeddings"] is not None:
            options["max_position_embeddings"] = shape["max_position_embeddings"]
        if layers := shape["eagle_aux_hidden_state_layer_ids"]:
            options["boundaries"] = from_outputs(layers)
        if self.kind == "peagle":
            del options["norm_output"]
        return options

    def draft(self) -> dict[str, Any]:
        named, options = set(self.values[ARCHITECTURE] or {}), self.options()
        named |= {"boundaries"} | ({"rope_theta", "rope_scaling"} if {"rope_theta", "rope_scaling"} & named else set())
        if "latent" not in options:
            options = {name: value for name, value in options.items() if name in named}
        return {"options": options, "vocab_size": self.architecture["draft_vocab_size"]}

    def shape(self, model: Any) -> HeadConfig:
        shape, text = self.architecture, model.config.get_text_config()
        if self.bare:
            return EagleConfig.for_target("eagle3", model, None, {"own_lm_head": False})
        _check_sizes(shape, text, ARCHITECTURE)
        _check_layers(shape["eagle_aux_hidden_state_layer_ids"], text.num_hidden_layers)
        draft_vocab_size = shape["draft_vocab_size"] or text.vocab_size
        own_lm_head = bool(shape["has_lm_head"]) or draft_vocab_size != text.vocab_size
        config_class = PEagleConfig if self.kind == "peagle" else EagleConfig
        return config_class.for_target(
            self.kind, model, draft_vocab_size, self.options() | {"own_lm_head": own_lm_head}
        )

    def settings(self) -> dict[str, Any]:
        if self.kind == "peagle":
            return {"depths": self.architecture["parallel_draft_step"]}
        common = {"steps": self.values["eagle_ttt_steps"], "decay": float(self.values["eagle_loss_decay_factor"])}
        if self.kind == "eagle3":
            return common
        # ModelOpt pulls features only on request, and reads them as they are.
        pulls = self.values["eagle_hidden_state_distillation"]
        weights = {} if pulls else {"regression_weight": 0.0, "token_weight": 1.0}
        return common | weights | {"noise": 0.0}

    def finished(self, head: HeadCheckpoint, model: Any) -> HeadCheckpoint:
        config, tensors = head.config, dict(head.tensors)
        if config.generation == 3 and not config.own_lm_head:
            config = dataclasses.replace(config, own_lm_head=True)
            tensors["lm_head.weight"] = model.get_output_embeddings().weight.detach().cpu()
        config = _with_rope_scaling(config, self.values["eagle_export_rope_scaling"])
        return HeadCheckpoint(config=config, tensors=tensors)


def _check_generation(config: Mapping[str, Any], shape: Mapping[str, Any]) -> None:
    """Raise ArgumentError if the architecture is neither EAGLE-3's nor EAGLE-1's."""
    third = shape["use_aux_hidden_state"]
    kind = "an EAGLE-3 head (use_aux_hidden_state)" if third else "an EAGLE-1 head (no use_aux_hidden_state)"
    for name in ("use_input_layernorm_in_first_layer", "use_last_layernorm"):
        if shape[name] != third:
            raise ArgumentError(f"convert: {kind} has {ARCHITECTURE}.{name} {third}, got {shape[name]}")
    refuse(
        (
            shape["parallel_draft_step"] > 1 and not (third and not shape["norm_output"]),
            f"convert: {ARCHITECTURE}.parallel_draft_step above 1 is a P-EAGLE head, with EAGLE-3's layers: it has "
            "use_aux_hidden_state, and no norm_output",
        ),
        (
            not third and shape["eagle_aux_hidden_state_layer_ids"],
            f"convert: {kind} reads the last hidden state; leave eagle_aux_hidden_state_layer_ids empty",
        ),
        (
            not third and any(shape[name] for name in FEATURE_NORMS),
            f"convert: {kind} has no norms around its features; leave norm_* and fc_norm away",
        ),
        (
            third and config["eagle_hidden_state_distillation"],
            f"convert: eagle_hidden_state_distillation must be False for {kind}: it learns tokens, and its features "
            "are its own",
        ),
    )


def _check_sizes(architecture: Mapping[str, Any], text: Any, where: str) -> None:
    """Raise ArgumentError for a size in `architecture` that is not the base model's."""
    for name in ("hidden_size", "vocab_size"):
        given, own = architecture.get(name), getattr(text, name)
        if given not in (None, own):
            raise ArgumentError(f"{where}.{name} must be the base model's {own}, got {given}")


def _check_layers(layers: Sequence[int], count: int) -> None:
    """Raise ArgumentError for a layer, by ModelOpt's number from 0, that the base model has not."""
    wrong = [layer for layer in layers if not 0 <= layer < count]
    if wrong:
        raise ArgumentError(
            f"{ARCHITECTURE}.eagle_aux_hidden_state_layer_ids counts the base model's {count} layers from 0, "
            f"got {wrong[0]}"
        )


class MedusaMode(Mode):
    """Medusa-1's heads, which learn the tokens of the data."""

    algorithm = "medusa"
    child = "medusa_heads"
    KEYS: ClassVar[Mapping[str, Key]] = {"medusa_num_heads": Key(2), "medusa_num_layers": Key(1)}

    def options(self) -> dict[str, Any]:
        return {name.removeprefix("medusa_"): value for name, value in self.values.items()}

    def shape(self, model: Any) -> HeadConfig:
        return MedusaConfig.for_target("medusa", model, None, self.options())

    def settings(self) -> dict[str, Any]:
        return {}


_DOMINO = "this is of a Domino head; train one with `forerun train domino`"
_DSPARK = "this is of a DSpark head; train one with `forerun train dspark`"
_LLAMA = "the head is made of Llama-like layers"


class DFlashMode(Mode):
    """A DFlash head; what its architecture does not say follows from the base
    model.
    """

    algorithm = "dflash"
    child = "dflash_module"
    ARCHITECTURE = "dflash_architecture_config"
    KEYS: ClassVar[Mapping[str, Key]] = {
        "dflash_offline": Key(False),
        "dflash_block_size": Key(8),
        "dflash_freeze_base_model": Key(True),
        "dflash_self_logit_distillation": Key(
            True, "the head always learns the base model's own distribution, not the labels"
        ),
        "dflash_loss_decay_factor": Key(0.0),
        "dflash_loss_objective": Key("dpace"),
        "dflash_dpace_alpha": Key(0.5),
        "dflash_num_anchors": Key(512),
        "dflash_report_acc": Key(True),
        "dflash_mask_token_id": Key(None),
        ARCHITECTURE: Key({}),
        "dflash_use_torch_compile": Key(True),  # Speed alone: the loss does without a compiler
        "dflash_swa_window_size": Key(None),
        "dflash_draft_attention": Key("bidirectional"),
        "dflash_attention_sink": Key(False, "the head's attention has no sinks"),
        "dflash_init_checkpoint": Key(None, "call model.load_head(directory) after convert"),
        "dflash_export_rope_scaling": Key({}),
        "dflash_lambda_base_start": Key(1.0, _DOMINO),
        "dflash_lambda_base_decay_ratio": Key(1.0, _DOMINO),
        "dflash_ce_loss_alpha": Key(0.1, _DSPARK),
        "dflash_l1_loss_alpha": Key(0.9, _DSPARK),
        "dflash_confidence_head_alpha": Key(0.0, _DSPARK),
    }
    ARCHITECTURE_KEYS: ClassVar[Mapping[str, Key]] = {
        "hidden_act": Key("silu"),
        "torch_dtype": Key("bfloat16"),
        "position_embedding_type": Key("rope", "the head rotates its queries and keys"),
        "rope_scaling": Key({}),
        "rope_theta": Key(10_000.0),
        **dict.fromkeys(
            (
                *("num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
                *("hidden_size", "vocab_size", "max_position_embeddings"),
            ),
            Key(None),
        ),
        "rms_norm_eps": Key(1e-6),
        "initializer_range": Key(0.02),
        "attention_bias": Key(False),
        "mlp_bias": Key(False),
        "attention_dropout": Key(0.0, "the head has no dropout"),
        "use_input_layernorm_in_first_layer": Key(True, _LLAMA),
        "use_last_layernorm": Key(True, _LLAMA),
        "has_lm_head": Key(False, "the head reads the base model's output head"),
    }
    PROJECTORS: ClassVar[Mapping[str, str]] = {
        "dspark": "train a DSpark head with `forerun train dspark`",
        "domino": "train a Domino head with `forerun train domino`",
    }
    CHOICES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "dflash_loss_objective": ("dpace", "decay"),
        "dflash_draft_attention": ("bidirectional", "causal"),
    }

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        shape = dict(self.values[self.ARCHITECTURE] or {})
        projector = shape.pop("projector_type", None)
        if projector not in (None, "dflash"):
            why = self.PROJECTORS.get(str(projector), "leave it away for a DFlash head")
            raise ArgumentError(f"convert: {self.ARCHITECTURE}.projector_type is {projector!r}: {why}")
        check_config(shape, self.ARCHITECTURE_KEYS, f"{self.ARCHITECTURE}.")
        for name, known in self.CHOICES.items():
            if self.values[name] not in known:
                raise ArgumentError(f"convert: {name} must be {' or '.join(known)}, got {self.values[name]!r}")
        self.architecture = shape
        self.export_dtype = _dtype(shape.get("torch_dtype", "bfloat16"))

    def options(self) -> dict[str, Any]:
        names = (*SAME_NAME, "max_position_embeddings")
        options = {name: value for name, value in self.architecture.items() if name in names and value is not None}
        if self.architecture.keys() & {"rope_theta", "rope_scaling"}:
            options |= rope_of(self.architecture)
        options |= {
            "block_size": self.values["dflash_block_size"],
            "sliding_window": self.values["dflash_swa_window_size"],
            "is_causal": self.values["dflash_draft_attention"] == "causal",
        }
        if self.values["dflash_mask_token_id"] is not None:
            options["mask_token_id"] = self.values["dflash_mask_token_id"]
        return options

    def shape(self, model: Any) -> HeadConfig:
        _check_sizes(self.architecture, model.config.get_text_config(), self.ARCHITECTURE)
        return DFlashConfig.for_target("dflash", model, None, self.options())

    def settings(self) -> dict[str, Any]:
        anchors = {"anchors": self.values["dflash_num_anchors"]}
        if self.values["dflash_loss_objective"] == "dpace":
            return anchors | {"smoothing": float(self.values["dflash_dpace_alpha"])}
        return anchors | {"gamma": float(self.values["dflash_loss_decay_factor"]) or math.inf}

    def finished(self, head: HeadCheckpoint, model: Any) -> HeadCheckpoint:
        scaling = self.values["dflash_export_rope_scaling"]
        return HeadCheckpoint(config=_with_rope_scaling(head.config, scaling), tensors=head.tensors)


class MtpMode(Mode):
    """The MTP layers that the base model's own checkpoint brings (FastMTP's training)."""

    algorithm = "mtp"
    child = "mtp_module"
    KEYS: ClassVar[Mapping[str, Key]] = {
        "mtp_steps": Key(3),
        "mtp_loss_decay_factor": Key(0.6),
        "mtp_report_acc": Key(True),
    }

    def head(self, model: Any) -> Head:
        """Return the layers of the checkpoint from which the model was loaded; transformers leaves
        them out.
        """
        if not model.name_or_path:
            raise ArgumentError("convert: MTP layers are read from the model's checkpoint; load it by from_pretrained")
        return import_named(kind_named("mtp").in_target or "")(model.name_or_path).build(torch.float32)

    def settings(self) -> dict[str, Any]:
        return {"steps": self.values["mtp_steps"], "decay": float(self.values["mtp_loss_decay_factor"])}


MODES: dict[str, type[Mode]] = {mode.algorithm: mode for mode in (EagleMode, MedusaMode, DFlashMode, MtpMode)}


def read_mode(mode: Any) -> Mode:
    """Read what `convert` is given: a name, ``[(name, config)]`` or ``{"algorithm": name, "config":
    config}``.
    """
    match [mode] if isinstance(mode, Mapping | str) else mode:
        case [{**pair}] if "algorithm" in pair and pair.keys() <= {"algorithm", "config"}:
            name, config = pair["algorithm"], pair.get("config", {})
        case [{**pair}] if len(pair) == 1:
            ((name, config),) = pair.items()
        case [str(name)]:
            config = None
        case [[name, config]]:
            pass
        case _:
            raise ArgumentError(
                f'convert: mode must be a name, "eagle", or a pair in a list, [("eagle", config)]; got '
                f"{reprlib.repr(mode)}"
            )
    if name not in MODES:
        raise ArgumentError(
            f"convert: there is no mode {name!r}.{choices(str(name), MODES)} Heads of "
            "other kinds are trained with `forerun train KIND`"
        )
    return MODES[name](config)


def check_ids(token_ids: Sequence[int] | Tensor, config: HeadConfig) -> Tensor:
    """Return the ids (Vd,) of a draft vocabulary, ascending; errors as in
    `ConvertedModel.set_draft_vocabulary`.
    """
    ids = torch.as_tensor(token_ids, dtype=torch.int64).flatten().cpu().sort().values
    if not config.reduced_vocabulary:
        raise ArgumentError("token ids are for a head with draft_vocab_size below vocab_size; this one has all tokens")
    distinct = len(set(ids.tolist()))
    if len(ids) != config.draft_vocab_size or distinct != len(ids):
        raise ArgumentError(
            f"the draft vocabulary has {config.draft_vocab_size} tokens (draft_vocab_size), got {len(ids)} ids of "
            f"which {distinct} are distinct"
        )
    if int(ids[0]) < 0 or int(ids[-1]) >= config.vocab_size:
        raise ArgumentError(f"token ids are 0..{config.vocab_size - 1}, got {int(ids[0])}..{int(ids[-1])}")
    return ids


def _make_plain(value: Any) -> Any:
    """Return what stands in JSON for a value that is none of JSON's."""
    return dict(value) if isinstance(value, Mapping) else str(value)


def _dtype(given: Any) -> torch.dtype:
    name = str(given).removeprefix("torch.")
    if name not in DTYPES:
        raise ArgumentError(f"convert: torch_dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    return getattr(torch, name)


def _with_rope_scaling(config: Any, scaling: Mapping[str, Any] | None) -> Any:
    """Return a configuration with a rope scaling in the place of none; an empty one changes nothing."""
    if not scaling or config.rope_scaling is not None:
        return config
    return dataclasses.replace(config, rope_scaling=dict(scaling))


# --- recipe files ---

TYPES = {f"speculative_{name}": name for name in ("eagle", "medusa", "dflash")}
"""The values of ``metadata.recipe_type``, and the mode whose keys such a recipe holds."""
RENAMED = {
    "model.model_name_or_path": "target",
    "data.data_path": "data",
    "data.offline_data_path": "features",
    "training.output_dir": "output",
    "training.num_train_epochs": "training.epochs",
    "training.max_steps": "training.steps",
    "training.per_device_train_batch_size": "windows.rows",
    "training.gradient_accumulation_steps": "training.accumulation",
    "training.learning_rate": "training.learning_rate",
    "training.lr_scheduler_type": "training.schedule",
    "training.warmup_steps": "training.warmup_steps",
    "training.warmup_ratio": "training.warmup_share",
    "training.weight_decay": "training.weight_decay",
    "training.max_grad_norm": "training.gradient_clip",
    "training.seed": "training.seed",
    "training.training_seq_len": "windows.length",
    "training.logging_steps": "training.log_every_steps",
    "training.save_steps": "training.save_every_steps",
    "training.ar_validate_steps": "training.eval_every_steps",
    "training.gradient_checkpointing": "objective.gradient_checkpointing",
}
"""These keys of ModelOpt's mean the same as one of ours."""
REALS = ("epochs", "learning_rate", "warmup_share", "weight_decay", "gradient_clip")
ANYTHING = """
    data.mode data.lazy_preprocess model.use_fake_base_for_offline training.disable_tqdm training.do_eval
    training.save_strategy training.dataloader_drop_last training.tf32 training.bf16 training.remove_unused_columns
    training.estimate_ar training.report_to training.answer_only_loss
    """.split()  # noqa: SIM905 - as a literal it would have a line for each
"""These change nothing of what is trained here, whatever they hold; `forerun data prepare` marked what counts."""
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "model.trust_remote_code": ((False,), "no code of a model's is run"),
    "data.draft_vocab_cache": ((), "draft.vocab_size=N takes the most frequent tokens of the data"),
    "data.chat_template": ((), "the template is the tokenizer's; `forerun data prepare` applies it"),
    "data.sample_size": ((-1,), "`forerun data prepare` takes the file that it is given: shorten that"),
    "data.streaming_server_url": ((), "`forerun features --source vllm` stores the states"),
    "data.streaming_model_name": ((), "`forerun features --source vllm` stores the states"),
    "data.vlm_img_dir": ((), "heads are trained on text"),
    "data.vlm_processor": ((), "heads are trained on text"),
    "training.cp_size": (
        (1,),
        "context parallelism would leave each process a part of each window. For long windows: "
        "objective.gradient_checkpointing=true, fewer objective.steps, a sliding_window in draft.options, "
        "target_parallel=tp and --parallel fsdp",
    ),
    "training.dp_shard_size": ((1,), "`torchrun -m forerun.cli train KIND ... --parallel fsdp` shards"),
}
"""These keys may hold only these values, or none; else the message says what to take instead."""


def translate(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe file of ModelOpt's (``modelopt_recipes/general/speculative_decoding/eagle3.yaml``) with our keys;
    ArgumentError names a key that cannot be honoured, and the way.
    """
    metadata = values.get("metadata") or {}
    stated = metadata.get("recipe_type") if isinstance(metadata, Mapping) else metadata
    refuse_unknown("metadata.recipe_type: there is no recipe", str(stated), TYPES)
    name, recipe = TYPES[str(stated)], dict[str, Any]()
    for key, value in _flat(values, name):
        if key in REFUSED:
            allowed, instead = REFUSED[key]
            if value is not None and value not in allowed:
                raise ArgumentError(
                    f"{key} is {value!r}, of a recipe of ModelOpt's, which forerun cannot do: {instead}"
                )
        elif key in RENAMED:
            _put(recipe, RENAMED[key], value)
        elif key not in ANYTHING:
            keys = [*RENAMED, *REFUSED, *ANYTHING]
            raise ArgumentError(
                f"unknown key {key} in a recipe of ModelOpt's.{choices(key, keys)} Ours are in docs/recipes.md"
            )
    if "features" in recipe:
        recipe["mode"] = "offline"
    if recipe.get("training", {}).get("eval_every_steps", 0) < 0:
        del recipe["training"]["eval_every_steps"]
    mode = MODES[name](values.get(name) or {})
    if mode.trains_base or mode.lora:
        raise ArgumentError(
            f"{name}_freeze_base_model and {name}_base_lora are for forerun.modelopt.convert, whose model learns in a "
            "Trainer"
        )
    objective = {**mode.settings(), **recipe.get("objective", {})}
    return {**recipe, "kind": mode.kind, "draft": mode.draft(), "objective": objective}


def _flat(values: Mapping[str, Any], mode: str) -> Iterator[tuple[str, Any]]:
    """Yield the keys of the sections that are not the mode's own."""
    for section, held in values.items():
        if section in ("metadata", mode):
            continue
        if section not in ("model", "data", "training"):
            sections = ("model", "data", "training", mode)
            raise ArgumentError(f"a recipe of ModelOpt's has no section {section!r}.{choices(section, sections)}")
        yield from ((f"{section}.{key}", value) for key, value in (held or {}).items())


def _put(recipe: dict[str, Any], path: str, value: Any) -> None:
    """Set a key of a recipe, unless the value is none."""
    *sections, last = path.split(".")
    for section in sections:
        recipe = recipe.setdefault(section, {})
    if value is not None:
        recipe[last] = float(value) if last in REALS else value
