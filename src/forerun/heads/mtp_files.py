"""The MTP layers of a target's own checkpoint (transformers drops them): read where they lie, and stitched back.

`mtp_families` has the layouts. How serving engines treat MTP layers: they read them in the target's own checkpoint, so
an export is a copy of it. From their loaders' sources; vLLM 0.32 was run with layers of ours (``tests_vllm``),
llama.cpp 0.5.0 with those that it refuses (``tests_llama``).
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import shutil
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.errors import ArgumentError, CheckpointError, list_some
from forerun.heads import decoders
from forerun.heads.engines import (
    Destination,
    Engines,
    Launch,
    Trait,
    always,
    plainly_named,
    start_lines,
    vllm_line,
)
from forerun.heads.files import (
    CONFIG,
    Config,
    Format,
    HeadCheckpoint,
    TargetFacts,
    Tensors,
    Written,
    folder_of,
    read_head,
)
from forerun.heads.keys import Keys, architectures
from forerun.heads.mtp import ATTENDS, INDEXED, ExpertsConfig, MtpConfig, config_of_layers
from forerun.heads.mtp_families import FAMILIES, TARGET_NORM, Family
from forerun.model import quantised_weights
from forerun.model.load import read_header, weight_files
from forerun.model.masks import FULL, SLIDING
from forerun.types import LAST_HIDDEN
from forerun.writing import read_object, replace_folder

COUNT, MARK = "num_nextn_predict_layers", "mtp_head_of"
"""Keys for the number of modules that a checkpoint brings, and for the target of MTP layers that
are stored by themselves.
"""
COUNTS = (COUNT, "mtp_num_hidden_layers", "mtp_num_layers", "num_mtp_layers", "num_mtp_modules")
"""Names that families give the number of their MTP layers."""
HEADS = re.compile(r"eagle|medusa|dflash|dspark", re.IGNORECASE)
SHARED = ("embed_tokens.", "shared_head.head.", "shared_head.weight", "self_attn.rotary_emb.")
PARTS, OUTPUT = ("enorm.", "hnorm.", "eh_proj.", "shared_head."), "output_head"
"""Before the names of a module's parts that are in no decoder layer, and the name of an output head of its own."""
EXPERT = re.compile(r"(layers\..+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
SCALES = re.compile(r"_scale(_inv|_2)?$|\.(qweight|qzeros|scales|g_idx|weight_packed)$")
MEANINGLESS = frozenset(
    """
    aux_loss_alpha ep_size max_window_layers moe_router_dtype num_experts num_local_experts output_router_logits
    qk_head_dim router_aux_loss_coef router_jitter_noise seq_aux sliding_window tie_word_embeddings use_sliding_window
    mtp_layer_types use_mrope kv_cache_dtype moe_router_load_balancing_type
    """.split()  # noqa: SIM905 - as a literal it would have a line for each
)
"""Keys of a target that mean nothing for its MTP layers, as they are read here."""
OURS = frozenset(
    {*COUNTS, MARK, "architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path"}
    | {"num_hidden_layers", "layer_types", "layers_block_type", "hybrid_override_pattern", "time_step_limit"}
    | {"mlp_layer_types", "moe_layers_enum", "mtp_layer_types", "mtp_mlp_layer_types", "per_layer_config"}
    | {"indexer_types", "index_topk_pattern", "index_topk_freq"}
)
"""Keys of a file with MTP layers that do not describe these layers, but the target's one by one."""


class MtpFormat(Format):
    """MTP layers in a target's own checkpoint, or by themselves under the same names."""

    name = "mtp"

    def recognises(self, config: Config) -> bool:
        names, text = architectures(config), text_keys(config)
        always = any(not FAMILIES[name].announced for name in names if name in FAMILIES)
        return (always or any(text.get(key) for key in COUNTS)) and not HEADS.search(" ".join(names))

    def is_head(self, config: Config, names: Collection[str]) -> bool:
        return MARK in config

    def keeps(self, config: Config, name: str) -> bool:
        """Return whether a tensor of a whole target belongs to its MTP layers."""
        family = _family(config)
        return _ours(family, name, _number_of_layers(config, family)) is not None

    def dequantise(self, config: Config, tensors: dict[str, Tensor]) -> tuple[Config, dict[str, Tensor]]:
        """Return the layers as plain ones in bfloat16: they are stored as the target is, or plain beside it."""
        settings = config.get("quantization_config")
        if not isinstance(settings, Mapping) or settings.get("quant_method") not in quantised_weights.READERS:
            return config, tensors
        plain = {key: value for key, value in config.items() if key != "quantization_config"}
        return plain, quantised_weights.dequantise(tensors, settings, torch.bfloat16)

    def read(self, config: Config, tensors: Tensors, *, num_layers: int | None = None) -> HeadCheckpoint:
        family, config = _family(config), text_keys(config)
        layers = _number_of_layers(config, family)
        if not tensors:
            raise CheckpointError(
                "config.json announces MTP layers, or is of a family that brings them, but the files hold no tensor of "
                "theirs; transformers leaves them out when it saves a model: name the publisher's checkpoint"
            )
        quantised = sorted(name for name, tensor in tensors.items() if SCALES.search(name) or tensor.itemsize < 2)
        if quantised:
            raise CheckpointError(
                f"the MTP layers are quantised in a way that is not read here ({list_some(quantised, 2)}): name a "
                "checkpoint in bfloat16, FP8, AWQ, GPTQ or compressed-tensors"
            )
        named = {_ours(family, name, layers): tensor for name, tensor in tensors.items()}
        canonical = _stack_experts({name: tensor for name, tensor in named.items() if name is not None})
        if family.state_first:
            canonical |= {
                name: _swap_halves(tensor) for name, tensor in canonical.items() if name.endswith(".eh_proj.weight")
            }
        if family.classes:
            return _head_like_target(config, family, layers, canonical)
        return _head(config, family, layers, canonical)

    def write(self, checkpoint: HeadCheckpoint, target: TargetFacts) -> Written:
        config = checkpoint.config
        family = _family({"architectures": target.architectures})
        keys: dict[str, Any] = {
            "architectures": list(target.architectures),
            **(decoders.write_layers(config) if config.target_keys is None else config.target_keys),
            "model_type": family.model_type,
            "torch_dtype": str(checkpoint.tensors["layers.0.eh_proj.weight"].dtype).removeprefix("torch."),
            "num_hidden_layers": target.num_layers,
            COUNT: config.num_hidden_layers,
            MARK: target.name_or_path,
        }
        if config.target_keys is None:
            keys["partial_rotary_factor"] = config.partial_rotary_factor
        for part in (config.experts, config.latent):
            keys |= {} if part is None else asdict(part)
        return {**config.extra, **keys}, to_target(checkpoint, family, target.num_layers)


def read_target(name: str | Path) -> HeadCheckpoint:
    """Read the MTP layers of a target, from its directory or hub id. Raises CheckpointError if it
    has none that can be read.
    """
    from forerun.model.names import resolve

    if not str(name):
        raise ArgumentError("mtp: the target was given as an object; name the checkpoint of its MTP layers with model=")
    folder = folder_of(resolve(name))
    config = read_object(folder / CONFIG, "expected a target's configuration", CheckpointError)
    if not MtpFormat().recognises(config):
        raise CheckpointError(
            f"{name} brings no MTP layers: its config.json has none of {', '.join(COUNTS)}. Draft with another method, "
            "or name a checkpoint that has them with model="
        )
    return read_head(folder)


def text_keys(config: Config) -> Config:
    """Return the keys that describe the text model: a multimodal target's are an object inside its own."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def to_target(
    checkpoint: HeadCheckpoint, family: Family, layers: int, stored: Container[str] = ()
) -> dict[str, Tensor]:
    """Return the tensors under the names of a target with so many layers. Experts get names of their
    own, but where the target is known to have `stored` them side by side.
    """
    named = dict[str, Tensor]()
    first = layers if family.behind else 0
    for name, tensor in checkpoint.tensors.items():
        if name == "d2t":
            continue
        inside = re.sub(r"^output_heads\.(\d+)", rf"layers.\1.{OUTPUT}", name)
        number, block, rest = re.fullmatch(r"layers\.(\d+)\.(?:block\.(\d+)\.)?(.+)", inside).groups()  # type: ignore[union-attr]
        where = f"{family.layers}{first + int(number) + int(block or 0)}."
        module, _, kind = rest.rpartition(".")
        if where + rest in stored:
            named[where + rest] = tensor
        elif kind == "gate_up_proj":
            for expert, both in enumerate(tensor):
                for part, half in zip(("gate", "up"), both.chunk(2), strict=True):
                    named[f"{where}{module}.{expert}.{part}_proj.weight"] = half
        elif kind in ("up_proj", "down_proj"):
            named |= {f"{where}{module}.{expert}.{kind}.weight": one for expert, one in enumerate(tensor)}
        else:
            swap = family.state_first and module == "eh_proj"
            theirs = where + _rename(rest, family.names)
            if module in family.outside:
                theirs = f"{family.outside[module].format(last=len(checkpoint.config.target_layers) - 1)}.{kind}"
            named[theirs] = _swap_halves(tensor) if swap else tensor
    return named


def stitch(checkpoint: HeadCheckpoint, base: str | Path, output: str | Path) -> Path:
    """Copy a target to `output`, a new directory, with these MTP layers in the place of its own, in
    their dtypes; every other tensor and file stays as it is, bit for bit. Raises ArgumentError if
    `output` exists, CheckpointError if the target has no such layers.
    """

    source, final = folder_of(base), Path(output).expanduser().absolute()
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise ArgumentError(f"{final} exists; name a new directory for the target with its new MTP layers")
    config = read_object(source / CONFIG, "expected a target's configuration", CheckpointError)
    headers = {file.name: read_header(file) for file in weight_files(source)}
    stored = {name: entry["shape"] for header in headers.values() for name, entry in header.items()}
    family = _family(config)
    new = to_target(checkpoint, family, _number_of_layers(config, family), stored)
    new.pop(f"{TARGET_NORM}.weight", None)  # It is no part of the layers
    wrong = sorted(name for name, tensor in new.items() if stored.get(name) != list(tensor.shape))
    if wrong:
        raise CheckpointError(f"{source} has not the MTP layers that these were made from: it lacks {list_some(wrong)}")
    with replace_folder(final) as folder:
        for file in (file for file in source.rglob("*") if file.is_file()):
            place = folder / file.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            mine = new.keys() & headers.get(str(file.relative_to(source)), {}).keys()
            if not mine:
                shutil.copyfile(file, place)
                continue
            with safe_open(file, "pt") as shard:
                about = shard.metadata()
            tensors = load_file(file)
            tensors |= {name: new[name].to(tensors[name].dtype).contiguous() for name in mine}
            save_file(tensors, place, about)
            place.chmod(0o644)
            again = load_file(place)
            if any(not torch.equal(again[name].view(torch.uint8), tensors[name].view(torch.uint8)) for name in tensors):
                raise CheckpointError(f"{place} does not hold what was to be written; is the disk full or broken?")
    return final


def _family(config: Config) -> Family:
    names = architectures(config)
    family = next((FAMILIES[name] for name in names if name in FAMILIES), None)
    if family is None:
        text = text_keys(config)
        counts = ", ".join(f"{key} {text[key]}" for key in COUNTS if text.get(key)) or "no number of them"
        raise CheckpointError(
            f"MTP layers of {', '.join(names) or 'an unnamed architecture'} cannot be read here; those of "
            f"{', '.join(FAMILIES)} can. config.json has {counts}. Draft with another method, or with an engine that "
            "knows the family"
        )
    return family


def _number_of_layers(config: Config, family: Family) -> int:
    """Return the number of the target's own layers; where no name depends on it, it may be unknown, which is 0."""
    return Keys(text_keys(config)).integer("num_hidden_layers", None if family.behind else 0)


def _ours(family: Family, name: str, layers: int) -> str | None:
    """Return our name of a target's tensor, or None if it is in no MTP layer, or is the target's
    embedding or output head.
    """
    theirs = {their: our for our, their in family.names.items()}
    module, _, kind = name.rpartition(".")
    for part, where in family.outside.items():
        if re.fullmatch(re.escape(where).replace(r"\{last\}", r"\d+"), module):
            return f"layers.0.{part}.{kind}"
    match = re.fullmatch(re.escape(family.layers) + r"(\d+)\.(.+)", name)
    first = layers if family.behind else 0
    if match is None or int(match[1]) < first or match[2].startswith(SHARED):
        return None
    number, rest = int(match[1]) - first, _rename(match[2], theirs)
    if rest.startswith(OUTPUT):
        return f"output_heads.{number}{rest.removeprefix(OUTPUT)}"
    if family.single:
        return f"layers.0.block.{number}.{rest}"
    return f"layers.{number}.{'block.0.' if family.classes and not rest.startswith(PARTS) else ''}{rest}"


def _rename(name: str, names: Mapping[str, str]) -> str:
    """Return the name of a tensor in a layer after the first of these renamings of parts that fits."""
    for old, new in names.items():
        if f"{name}.".startswith(f"{old}."):
            return new + name.removeprefix(old)
    return name


def _stack_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Stack the experts of each layer into single tensors."""
    stacked, experts = dict[str, Tensor](), dict[str, dict[tuple[int, str], Tensor]]()
    for name, tensor in tensors.items():
        match = EXPERT.fullmatch(name)
        if match is None:
            stacked[name] = tensor
        else:
            experts.setdefault(match[1], {})[int(match[2]), match[3]] = tensor
    for where, parts in experts.items():
        count = 1 + max(number for number, _ in parts)
        try:
            if any(part == "gate" for _, part in parts):
                both = [torch.cat([parts[number, "gate"], parts[number, "up"]]) for number in range(count)]
                stacked[f"{where}.gate_up_proj"] = torch.stack(both)
            else:
                stacked[f"{where}.up_proj"] = torch.stack([parts[number, "up"] for number in range(count)])
            stacked[f"{where}.down_proj"] = torch.stack([parts[number, "down"] for number in range(count)])
        except KeyError as error:
            number, part = error.args[0]
            raise CheckpointError(
                f"{where}.{number}.{part}_proj.weight is missing; the checkpoint is incomplete"
            ) from None
        except RuntimeError as error:
            raise CheckpointError(f"the experts of {where} differ in shape: {error}") from error
    return stacked


def _swap_halves(weight: Tensor) -> Tensor:
    """Swap the halves of the projection (H, 2 H) that read embedding and state."""
    first, second = weight.chunk(2, 1)
    return torch.cat([second, first], 1)


def _head(config: Config, family: Family, layers: int, tensors: Mapping[str, Tensor]) -> HeadCheckpoint:
    """Build the head from canonical tensors and a target's configuration."""
    kinds = [*(config.get("layer_types") or ()), *(config.get("mtp_layer_types") or ())]
    if config.get("use_sliding_window") or any(kind != FULL for kind in kinds):
        raise CheckpointError(
            "the target's layers have sliding windows; which of them its MTP layers have is not known"
        )
    rope = dict(config.get("rope_parameters") or {})
    factor = rope.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
    ours = {"partial_rotary_factor": None, "layer_types": None, "sliding_window": None}
    count = next((key for key in COUNTS if config.get(key)), COUNT)
    keys = Keys({**config, **ours, "rope_parameters": rope, "num_hidden_layers": config.get(count)})
    keys.pass_over(*COUNTS, MARK, "architectures", "use_qk_norm")  # The last is told by the tensors
    read = decoders.read_layers(keys)
    read |= {
        "boundaries": (LAST_HIDDEN,) if family.final_norm else (layers,),
        "target_hidden_size": read["hidden_size"],
        "draft_vocab_size": read["vocab_size"],
        "partial_rotary_factor": float(factor),
        "experts": _experts(keys, layers),
        "latent": decoders.read_latent(keys),
        "attention_bias": "layers.0.self_attn.q_proj.bias" in tensors,
    }
    return decoders.make_head(
        MtpConfig,
        tensors,
        **read,
        qk_norm=False,
        extra={name: value for name, value in keys.rest().items() if name not in MEANINGLESS},
    )


def _head_like_target(config: Config, family: Family, layers: int, tensors: Mapping[str, Tensor]) -> HeadCheckpoint:
    """Build a head with layers of the classes of its target, which has so many `layers`, in transformers."""
    from transformers import AutoConfig

    counts = {name: value for name, value in config.items() if name in COUNTS and value}
    whole = layers + max(counts.values(), default=0)
    # A list with an entry for each layer may go on with those of the MTP layers.
    lists = {name: value for name, value in config.items() if family.behind and isinstance(value, list)}
    of_mtp = {name: value[layers:] for name, value in lists.items() if len(value) == whole}
    target_keys = {"model_type": family.model_type} | {
        name: of_mtp.get(name, value) for name, value in config.items() if name not in OURS
    }
    mlp = "sparse" if any(".experts." in name for name in tensors) else "dense"
    try:
        known = AutoConfig.for_model(**target_keys, **counts)
        listed = config.get("mtp_layer_types") or of_mtp.get("layer_types") or getattr(known, "mtp_layer_types", None)
        if family.as_first:
            of_target = config.get("layer_types") or known.layer_types
            listed = listed or of_target[:1]
            if SLIDING in of_target and listed[0] != SLIDING:
                raise CheckpointError(f"the MTP module has {listed[0]}; beside windows only one with a window is known")
        kinds = _kinds_of_layers(getattr(known, "mtp_layers_block_type", None), listed, tensors)
        mlps = (mlp,) if hasattr(known, "mlp_layer_types") else ()
        vocabulary, known = known.vocab_size, config_of_layers(target_keys, kinds, mlps)
    except CheckpointError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"config.json describes no target that transformers knows: {error}") from error
    every = known.to_dict() | {name: getattr(known, name, None) for name in known.attribute_map}
    attends = next((kind for kind in kinds if kind in ATTENDS), FULL)
    rope = dict(every.get("rope_parameters") or {})
    rope = dict(rope.get(attends, rope))
    factor = rope.pop("partial_rotary_factor", 1.0)
    modules = 1 + max(int(name.split(".")[1]) for name in tensors)
    ours = {
        "vocab_size": vocabulary,
        "layer_types": None,
        "sliding_window": every.get("sliding_window") if attends == SLIDING else None,
        "rope_parameters": rope,
        "num_hidden_layers": next(iter(counts.values()), modules),
        "intermediate_size": every.get("intermediate_size") or every.get("moe_intermediate_size"),
        "rms_norm_eps": every.get("rms_norm_eps") or every.get("layer_norm_epsilon"),
    }
    read = decoders.read_layers(Keys({**every, **ours}))
    read |= {
        "boundaries": (LAST_HIDDEN,) if family.final_norm else (layers,),
        "target_hidden_size": read["hidden_size"],
        "draft_vocab_size": read["vocab_size"],
        "partial_rotary_factor": float(factor),
        "target_keys": target_keys | ({"mtp_layer_types": list(kinds)} if listed else {}),
        "target_layers": kinds,
        "target_mlps": mlps,
        "output_heads": any(name.startswith("output_heads.") for name in tensors),
        "shared_norm": TARGET_NORM in family.outside.values(),
        "angle_pairs": family.pairs,
    }
    return decoders.make_head(MtpConfig, tensors, **read, qk_norm=False)


def _kinds_of_layers(
    block: Sequence[str] | None, listed: Sequence[str] | None, tensors: Iterable[str]
) -> tuple[str, ...]:
    """Return the kinds of a module's layers: of a `block`, of one `listed` module, or as tensors tell."""
    if block:
        return tuple(block)
    if listed:
        if len(set(listed)) > 1:
            raise CheckpointError(f"the MTP modules differ in how they attend ({', '.join(listed)})")
        return (listed[0],)
    names = " ".join(tensors)
    return (INDEXED if ".indexer." in names else SLIDING if ".sinks" in names else FULL,)


def _experts(keys: Keys, layers: int) -> ExpertsConfig | None:
    """Return the experts of the layer with index `layers`, or None if it is dense."""
    for name, known in {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}.items():
        if keys.text(name, known) != known:
            raise CheckpointError(f"{name} is {keys.get(name)!r}; experts are routed by {known} here")
    sparse = layers >= keys.integer("first_k_dense_replace", 0)
    every = keys.integer("moe_layer_freq", 1)
    count = keys.integer("n_routed_experts", 0)
    names = [one.name for one in fields(ExpertsConfig) if one.type == "int" and one.name != "n_routed_experts"]
    sizes: dict[str, Any] = {name: keys.get(name) and keys.integer(name) for name in names}
    sizes["norm_topk_prob"] = keys.flag("norm_topk_prob", True)
    sizes["routed_scaling_factor"] = keys.number("routed_scaling_factor", 1.0)
    if not count or not sparse or layers % every:
        return None
    stated = {name: value for name, value in sizes.items() if value is not None}
    try:
        return ExpertsConfig(n_routed_experts=count, **stated)
    except TypeError as error:
        raise CheckpointError(f"config.json does not describe its experts: {error}") from error


# What serving engines make of it
TOKENS = 3  # Tokens of a step in the launch lines, for which FastMTP trains


_COMPARE = "compare its acceptance with ours"
TRAITS = (
    Trait(
        lambda at: at.config.num_hidden_layers > 1,
        "{config.num_hidden_layers} modules",
        [("check", "vllm sglang", "begins again with the first")],
        _COMPARE,
    ),
    Trait(
        lambda at: not at.config.norm_output and at.config.target_keys is None,
        "several tokens from MiMo's module",
        [("check", "vllm sglang", "hands another state on, or refuses")],
        f"draft one token, or {_COMPARE}",
    ),
    Trait(
        lambda at: at.config.norm_output and at.config.latent is None and at.config.target_keys is None,
        "several tokens from GLM's module",
        [("check", "vllm", "hands the state on before its norm")],
        f"draft one token, or {_COMPARE}",
    ),
    Trait(
        always,
        "MTP layers",
        [("check", "trtllm lmdeploy modelopt", "is not known here to read these layers")],
        _COMPARE,
    ),
    Trait(
        lambda at: not at.config.norm_output and at.config.target_keys is None,
        "MTP layers of MiMo's kind",
        [("fails", "llama.cpp", "has no converter for their target")],
        "use vLLM or SGLang",
    ),
    Trait(
        lambda at: at.config.norm_output and at.config.latent is not None,
        "MTP layers of DeepSeek's kind",
        [("fails", "llama.cpp", "has a converter that drops them")],
        "use vLLM or SGLang",
    ),
    Trait(
        lambda at: at.config.latent is None and (at.config.norm_output or at.config.target_keys is not None),
        "MTP layers",
        [("check", "llama.cpp", "reads GLM's; they were not tried here")],
        f"convert the target with its layers there, and {_COMPARE}",
    ),
)


def _stitch(launch: Launch) -> Path:
    return stitch(launch.head, launch.target.name_or_path, launch.directory)


ENGINE_FACTS = Engines(
    traits=TRAITS,
    destinations={
        "vllm": Destination(
            title="vLLM",
            engine="vllm",
            command=lambda launch: vllm_line(str(launch.directory), method="mtp", num_speculative_tokens=TOKENS),
            counting="`num_speculative_tokens` counts drafted tokens.",
            write=lambda launch: _stitch(dataclasses.replace(launch, directory=plainly_named(launch))),
        ),
        "sglang": Destination(
            title="SGLang",
            engine="sglang",
            command=lambda launch: (
                f"python -m sglang.launch_server --model-path {shlex.quote(str(launch.directory))} "
                f"--speculative-algorithm NEXTN --speculative-num-steps {TOKENS} --speculative-eagle-topk 1 "
                f"--speculative-num-draft-tokens {TOKENS + 1}"
            ),
            counting="`--speculative-num-draft-tokens` counts the last committed token, too.",
            write=_stitch,
        ),
        "llama.cpp": Destination(
            title="llama.cpp",
            engine="llama.cpp",
            command=lambda launch: start_lines(
                launch.directory, launch.directory.with_name(f"{launch.directory.name}.gguf"), "draft-mtp", TOKENS
            ),
            counting="`--spec-draft-n-max` counts drafted tokens.",
            write=_stitch,
        ),
    },
)
