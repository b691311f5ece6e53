"""A recipe file of ModelOpt (``modelopt_recipes/general/speculative_decoding/eagle3.yaml``) is read
here as one of forerun's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from forerun.errors import ArgumentError, choices, refuse_unknown
from forerun.training.convert.modes import MODES

TYPES = {f"speculative_{name}": name for name in ("eagle", "medusa", "dflash")}
"""These are the values of ``metadata.recipe_type``, and the mode whose keys such a recipe holds."""
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
    """Return a recipe of ModelOpt's with our keys; ArgumentError names a key that cannot be honoured,
    and the way.
    """
    metadata = values.get("metadata") or {}
    stated = metadata.get("recipe_type") if isinstance(metadata, Mapping) else metadata
    refuse_unknown("metadata.recipe_type: there is no recipe", str(stated), TYPES)
    name, found = TYPES[str(stated)], dict[str, Any]()
    for key, value in _flat(values, name):
        if key in REFUSED:
            allowed, instead = REFUSED[key]
            if value is not None and value not in allowed:
                raise ArgumentError(
                    f"{key} is {value!r}, of a recipe of ModelOpt's, which forerun cannot do: {instead}"
                )
        elif key in RENAMED:
            _put(found, RENAMED[key], value)
        elif key not in ANYTHING:
            known = [*RENAMED, *REFUSED, *ANYTHING]
            raise ArgumentError(
                f"unknown key {key} in a recipe of ModelOpt's.{choices(key, known)} Ours are in docs/training.md"
            )
    if "features" in found:
        found["mode"] = "offline"
    if found.get("training", {}).get("eval_every_steps", 0) < 0:
        del found["training"]["eval_every_steps"]
    mode = MODES[name](values.get(name) or {})
    if mode.trains_base or mode.lora:
        raise ArgumentError(
            f"{name}_freeze_base_model and {name}_base_lora are for forerun.convert, whose model learns in a Trainer"
        )
    objective = {**mode.settings(), **found.get("objective", {})}
    return {**found, "kind": mode.kind, "draft": mode.draft(), "objective": objective}


def _flat(values: Mapping[str, Any], mode: str) -> Iterator[tuple[str, Any]]:
    """Yield the keys of the sections that are not the mode's own."""
    for section, held in values.items():
        if section in ("metadata", mode):
            continue
        if section not in ("model", "data", "training"):
            sections = ("model", "data", "training", mode)
            raise ArgumentError(f"a recipe of ModelOpt's has no section {section!r}.{choices(section, sections)}")
        yield from ((f"{section}.{key}", value) for key, value in (held or {}).items())


def _put(found: dict[str, Any], path: str, value: Any) -> None:
    """Set a key of a recipe, unless the value is none."""
    *sections, last = path.split(".")
    for section in sections:
        found = found.setdefault(section, {})
    if value is not None:
        found[last] = float(value) if last in REALS else value
