"""Scale models are a small Llama checkpoint, and its draft heads, made as costly as large ones with
the same output.

The hidden state is padded with zeros to `hidden_factor` times its width. RMSNorm then divides by a mean square that is
`hidden_factor` times smaller, so epsilon is divided by that factor and the norm weights by its square root: for 4 and
16 both are powers of two, hence exact in bf16. Extra attention heads and extra MLP neurons are filled with random
numbers and meet zero columns in the output projection; extra layers are random too, with zero output projections. Only
additions of zero are added, so logits differ from the source's by the order of float32 summation at most.

A head grows with its target: boundaries move with the layers that they stood behind, and the projections of queries and
keys that are normed per head shrink by the same square root. It gets the large target's hidden size, heads and MLP
width and keeps its own layers and draft vocabulary, so a pass costs what that of a head for such a target does.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.errors import ArgumentError, CheckpointError, refuse
from forerun.heads.base import HeadConfig
from forerun.heads.files import HeadCheckpoint, TargetFacts, expected_shapes, format_of, parse, read_files, write_head
from forerun.model.load import weight_files
from forerun.shipped import resolve
from forerun.writing import cache_root, hash_file, hash_json, replace_folder

CACHE = "scaled"  # Folder below `cache_root`
SHARD_BYTES = 2**31
COMPANIONS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
ENLARGED = (  # Kinds of heads
    *("eagle3", "eagle", "peagle", "medusa", "hydra", "mlp_speculator"),
    *("dflash", "dflash2", "dspark", "domino", "kangaroo"),
)
FORMAT = 1  # Raise it when the written weights change, so that caches are made anew
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalePlan:
    """The shape of a scale model: its hidden size, a power of four wider than the source's, its heads by factors."""

    hidden_factor: int
    head_factor: int
    layers: int
    intermediate_size: int
    parameters: int  # Parameters of the scale model, embeddings counted once if tied


class ScaledModel:
    """The Llama checkpoint `source`, a folder, enlarged to about `billions` x
    1e9 parameters.

    Embeddings are included, weights are of this `dtype`, and the model stays in the cache. `layers`
    None: a multiple of the source's that grows with the size.
    """

    def __init__(
        self, source: str | Path, *, billions: float, dtype: str = "bfloat16", layers: int | None = None
    ) -> None:
        if dtype not in _DTYPES:
            raise ArgumentError(f"dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")
        self.source = Path(source)
        config = _read_config(self.source)
        self.source_layers: int = config["num_hidden_layers"]
        self.plan = plan = plan_scale(config, billions=billions, layers=layers)
        digest = content_hash(self.source, asdict(plan), dtype)[:12]
        self.path = cache_root() / CACHE / f"{self.source.name}-{billions:g}B-{digest}"  # A transformers checkpoint
        # One line for every report that shows figures of this model.
        self.note = (
            f"{self.path.name}: {self.source.name} ({_parameters(config) / 1e6:.1f} M parameters) enlarged to "
            f"{plan.parameters / 1e6:.0f} M without changing its function; its text is that of the small model"
        )
        if not self.path.is_dir():
            _write(self, config, dtype)


def remap_boundary(boundary: int, scaled: ScaledModel) -> int:
    """Return the layer boundary of the scale model that holds the source's `boundary`, zero padding
    aside.

    The source's layers are spaced evenly, each followed by its identity layers, so a boundary keeps
    its share of the cost. ``-1`` (`LAST_HIDDEN`) stays; there the padded entries are zero as well.
    """
    if boundary == -1:
        return -1
    if not 0 <= boundary <= scaled.source_layers:
        raise ArgumentError(f"boundary must be -1 or in 0..{scaled.source_layers}, got {boundary}")
    return boundary * scaled.plan.layers // scaled.source_layers


def plan_scale(config: dict[str, Any], *, billions: float, layers: int | None = None) -> ScalePlan:
    """Return the shape whose parameter count comes nearest to `billions` x 1e9.

    Hidden size grows by 4 (by 16 where the MLP would be wider than six times that), heads by twice
    its square root; the rest goes into layers and MLP width.
    """
    depth = config["num_hidden_layers"]
    if layers is None:
        layers = depth * min(4, max(1, round(2 * (billions / 0.4) ** 0.35)))
    if layers < depth:
        raise ArgumentError(f"layers must be at least the source's {depth}, got {layers}")
    plans = [_fit(config, factor, layers, round(billions * 1e9)) for factor in (4, 16, 64)]
    possible = [plan for plan in plans if plan.intermediate_size >= config["intermediate_size"]]
    if not possible:
        smallest = _parameters(config | _shape(config, plans[0]) | {"intermediate_size": config["intermediate_size"]})
        raise ArgumentError(
            f"{billions} billion parameters are too few: with {layers} layers the smallest scale model of this source "
            f"has {smallest / 1e9:.4f} billion"
        )
    ordinary = [plan for plan in possible if plan.intermediate_size <= 6 * plan.hidden_factor * config["hidden_size"]]
    return (ordinary or possible[-1:])[0]


def _fit(config: dict[str, Any], hidden_factor: int, layers: int, goal: int) -> ScalePlan:
    heads = 2 * math.isqrt(hidden_factor)
    bare = ScalePlan(hidden_factor=hidden_factor, head_factor=heads, layers=layers, intermediate_size=0, parameters=0)
    shape = config | _shape(config, bare)
    per_neuron = layers * 3 * hidden_factor * config["hidden_size"]
    width = 64 * round((goal - _parameters(shape)) / per_neuron / 64)
    return replace(bare, intermediate_size=width, parameters=_parameters(shape | {"intermediate_size": width}))


def _shape(config: dict[str, Any], plan: ScalePlan) -> dict[str, Any]:
    """Return the entries of config.json that change."""
    return {
        "hidden_size": config["hidden_size"] * plan.hidden_factor,
        "num_attention_heads": config["num_attention_heads"] * plan.head_factor,
        "num_key_value_heads": config["num_key_value_heads"] * plan.head_factor,
        "num_hidden_layers": plan.layers,
        "intermediate_size": plan.intermediate_size,
        "rms_norm_eps": config["rms_norm_eps"] / plan.hidden_factor,
    }


def _parameters(config: dict[str, Any]) -> int:
    hidden, heads = config["hidden_size"], config["num_attention_heads"] + config["num_key_value_heads"]
    layer = 2 * hidden * heads * config["head_dim"] + 3 * hidden * config["intermediate_size"] + 2 * hidden
    tables = config["vocab_size"] * hidden * (1 if config["tie_word_embeddings"] else 2)
    return int(config["num_hidden_layers"] * layer + tables + hidden)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"no config.json in {folder}: a scale model is made from a local checkpoint folder")
    config: dict[str, Any] = json.loads(path.read_text())
    if config.get("model_type") != "llama" or config.get("attention_bias") or config.get("mlp_bias"):
        raise CheckpointError(
            f"{folder} holds a {config.get('model_type')!r} model: only a Llama without biases is enlarged exactly"
        )
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config.setdefault("tie_word_embeddings", False)
    config.setdefault("rms_norm_eps", 1e-6)
    if config.get("head_dim") is None:
        config["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    return config


def content_hash(folder: Path, *made: Any) -> str:
    """Return a hash of a checkpoint's configuration and weights, and of what (as JSON) is made from
    them.
    """
    files = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
    return hash_json([FORMAT, *made, *map(hash_file, files)])


def _write(scaled: ScaledModel, config: dict[str, Any], dtype: str) -> None:
    """Write the scale model; a reader never finds half of it."""
    try:
        with replace_folder(scaled.path) as folder:
            _write_weights(folder, scaled, config, _DTYPES[dtype])
            stored = config | _shape(config, scaled.plan) | {"dtype": dtype}
            stored.pop("torch_dtype", None)
            (folder / "config.json").write_text(json.dumps(stored, indent=2) + "\n")
            for name in (*COMPANIONS, "generation_config.json"):
                if (scaled.source / name).is_file():
                    shutil.copy(scaled.source / name, folder / name)
    except OSError:
        if not scaled.path.is_dir():  # else another process was as busy and quicker
            raise


def _write_weights(folder: Path, scaled: ScaledModel, config: dict[str, Any], dtype: torch.dtype) -> None:
    """Write shards of about 2 GiB, so that an 8 B model never lies in memory as a whole."""
    shard: dict[str, Tensor] = {}
    files: dict[str, str] = {}
    total = 0

    def flush() -> None:
        name = f"model-{len(set(files.values())) + 1:05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        files.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, tensor in _scale_tensors(scaled, config, dtype):
        shard[name] = tensor
        total += tensor.nbytes
        if sum(held.nbytes for held in shard.values()) >= SHARD_BYTES:
            flush()
    if shard:
        flush()
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _scale_tensors(scaled: ScaledModel, config: dict[str, Any], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    weights = _Weights()
    for path in weight_files(scaled.source):
        weights |= load_file(path)
    plan = scaled.plan
    hidden = config["hidden_size"] * scaled.plan.hidden_factor
    norm_factor = 1 / math.isqrt(plan.hidden_factor)
    table = (config["vocab_size"], hidden)
    yield "model.embed_tokens.weight", _corner(weights["model.embed_tokens.weight"], torch.zeros(table, dtype=dtype))
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", _corner(weights["lm_head.weight"], _noise(table, dtype, "lm_head"))
    yield "model.norm.weight", _norm(weights["model.norm.weight"], hidden, norm_factor, dtype)
    starts = {layer * plan.layers // scaled.source_layers: layer for layer in range(scaled.source_layers)}
    attention = config["head_dim"] * plan.head_factor
    q_width, kv_width = config["num_attention_heads"] * attention, config["num_key_value_heads"] * attention
    shapes = {
        "self_attn.q_proj": (q_width, hidden),
        "self_attn.k_proj": (kv_width, hidden),
        "self_attn.v_proj": (kv_width, hidden),
        "mlp.gate_proj": (plan.intermediate_size, hidden),
        "mlp.up_proj": (plan.intermediate_size, hidden),
        "self_attn.o_proj": (hidden, q_width),
        "mlp.down_proj": (hidden, plan.intermediate_size),
    }
    for layer in range(plan.layers):
        origin = f"model.layers.{starts[layer]}." if layer in starts else None
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            # An identity layer has a norm too; the nearest source layer's keeps its activations ordinary.
            norm = weights[f"{origin or 'model.layers.0.'}{name}.weight"]
            yield f"{prefix}{name}.weight", _norm(norm, hidden, norm_factor, dtype)
        for name, shape in shapes.items():
            # Matrices that write to the residual stream are padded with zeros, the others with noise.
            writes = name in ("self_attn.o_proj", "mlp.down_proj")
            padding = torch.zeros(shape, dtype=dtype) if writes else _noise(shape, dtype, prefix + name)
            yield (
                f"{prefix}{name}.weight",
                _corner(None if origin is None else weights[f"{origin}{name}.weight"], padding),
            )


def _corner(old: Tensor | None, padding: Tensor) -> Tensor:
    """Return `padding` with `old` in its upper left corner."""
    if old is not None:
        padding[: old.shape[0], : old.shape[1]] = old
    return padding


def _noise(shape: tuple[int, ...], dtype: torch.dtype, name: str) -> Tensor:
    """Return random numbers and not zeros, because a processor may multiply zeros faster."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
    return torch.empty(shape, dtype=dtype).uniform_(-0.03, 0.03, generator=torch.Generator().manual_seed(seed))


def _norm(old: Tensor, hidden: int, factor: float, dtype: torch.dtype) -> Tensor:
    new = torch.full((hidden,), factor, dtype=dtype)
    new[: old.shape[0]] = old.to(dtype) * factor
    return new


class _Weights(dict[str, Tensor]):
    def __missing__(self, name: str) -> Tensor:
        raise CheckpointError(f"the source has no tensor {name!r}: its weights are missing or of another model")


_STATES = ("fc", "o_proj", "down_proj", "embed_tokens", "linear", "res_connection", "emb", "proj", "mask_hidden")
"""These modules write a hidden state, or are one, so their padding is zero."""


def scale_head(head: HeadCheckpoint, scaled: ScaledModel) -> HeadCheckpoint:
    """Return the head of `scaled` that gives the logits of `head`, on the states of `scaled`.

    `head` was trained for the source of `scaled`; the logits differ by the order of summation at
    most. ArgumentError: its kind cannot be enlarged, or it reads layers which the source does not
    have.
    """
    wide = scale_config(head.config, scaled)
    shapes = expected_shapes(wide)
    return HeadCheckpoint(
        config=wide,
        tensors={
            name: _enlarge_tensor(name, tensor, shapes[name], head.config, wide)
            for name, tensor in head.tensors.items()
        },
        notes=head.notes,
    )


def scaled_head_folder(source: str | Path, scaled: ScaledModel) -> Path:
    """Enlarge the head in a directory, hub id or shipped name, and return a checkpoint of the same
    format.

    A folder written before is reused. CheckpointError: `source` is missing, or no head.
    """
    stored = read_files(resolve(source))
    digest = content_hash(stored.directory, asdict(scaled.plan), scaled.source_layers)
    folder = cache_root() / CACHE / f"{scaled.path.name}-head-{digest[:12]}"
    if not folder.is_dir():
        head = scale_head(parse(stored, num_layers=scaled.source_layers), scaled)
        write_head(head, folder, format_of(stored.config).name, TargetFacts.read(scaled.path))
    return folder


def scale_config(config: HeadConfig, scaled: ScaledModel) -> Any:
    """Return the shape of the enlarged head; errors as in `scale_head`."""
    refuse(
        (config.kind not in ENLARGED, f"heads of the kind {config.kind} are not enlarged, only {', '.join(ENLARGED)}"),
        (
            getattr(config, "scale_input", False),
            "an MLP speculator with scale_input is not enlarged: the epsilon of its input's norm is fixed, so that a "
            "wider state would be normed otherwise; train one without scale_input",
        ),
    )
    plan = scaled.plan
    own_values = {field.name: getattr(config, field.name) for field in fields(config)}
    growth = {
        "hidden_size": plan.hidden_factor,
        "target_hidden_size": plan.hidden_factor,
        "inner_dim": plan.hidden_factor,
        "num_attention_heads": plan.head_factor,
        "num_key_value_heads": plan.head_factor,
        "rms_norm_eps": 1 / plan.hidden_factor,
    }
    wide = {key: type(own_values[key])(own_values[key] * factor) for key, factor in growth.items() if key in own_values}
    if "boundaries" in own_values:
        wide["boundaries"] = tuple(remap_boundary(boundary, scaled) for boundary in config.boundaries)
    if "intermediate_size" in own_values:
        wide["intermediate_size"] = max(plan.intermediate_size, own_values["intermediate_size"])
    return replace(config, **wide)


def _enlarge_tensor(name: str, old: Tensor, shape: tuple[int, ...], config: Any, wide: Any) -> Tensor:
    """Cut `old` into the hidden states that it reads, and put each at the start of the wide one
    that takes its place.
    """
    if old.shape == shape:
        new = old.clone()
    else:
        new = _padding(name, shape, old.dtype)
        start = wide_start = 0
        for narrow, broad in _parts(name, old.shape[-1], shape[-1], config, wide):
            part, goal = old[..., start : start + narrow], new[..., wide_start : wide_start + narrow]
            if "kernel_projection" in name:  # its rows are the groups of channels of one kernel after another
                part, goal = (torch.unflatten(rows, 0, (2 * config.conv_kernel_size, -1)) for rows in (part, goal))
            goal[tuple(map(slice, part.shape))] = part
            start, wide_start = start + narrow, wide_start + broad
    root = math.isqrt(wide.target_hidden_size // config.target_hidden_size)
    if config.kind == "mlp_speculator" and name.startswith("proj."):
        return new * root  # The epsilon of the norm behind it is fixed, so the mean square that it reads must stay
    shrinks = old.shape != shape and _norms(name)
    normed_later = getattr(config, "qk_norm", False) and any(f".{part}_proj." in name for part in ("q", "k"))
    return new / root if shrinks or normed_later else new


def _parts(name: str, old: int, new: int, config: Any, wide: Any) -> list[tuple[int, int]]:
    """Return the widths, before and after, of what lies side by side in a tensor's last dimension."""
    if name in ("fc.weight", "input_norm.weight", "mask_hidden"):
        return [(config.target_hidden_size, wide.target_hidden_size)] * (old // config.target_hidden_size)
    state = (_size(config), _size(wide))
    if old == 2 * state[0] and name.startswith("layers.0.self_attn."):
        return [state, state]  # EAGLE-3's first layer reads an embedding, too
    if ".first." in name:
        return [state] * (old // state[0])  # Hydra's depths read a state and all embeddings since
    if old - state[0] == new - state[1]:
        # DSpark's heads read a state and rows of a table, Domino's a memory: these stay as wide as they are.
        rows = (old - state[0],) * 2
        return [rows, state] if "joint_proj" in name else [state, rows]
    return [(old, new)]


def _size(config: Any) -> int:
    """Return the width of a head's own states: the target's, unless it has layers of another width."""
    return int(getattr(config, "hidden_size", config.target_hidden_size))


def _padding(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros where the hidden state is written, ones in norms, else noise."""
    if _norms(name):
        return torch.ones(shape, dtype=dtype)
    *_, module = (part for part in name.removesuffix(".weight").split(".") if not part.isdigit())
    if len(shape) == 1 or module in _STATES:
        return torch.zeros(shape, dtype=dtype)
    return _noise(shape, dtype, name)


def _norms(name: str) -> bool:
    """Return whether a tensor is the weight of a norm; ``ln`` is the MLP speculator's, which also
    has a bias.
    """
    return "norm" in name or (name.startswith("ln.") and name.endswith(".weight"))
