"""This module shrinks a target into a draft model: some of its layers, and of what is left the
strongest part.

What goes of neurons, of key-value heads with their queries, and of the residual stream's dimensions is what the
smallest weights write; what writes nothing goes without a trace.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from forerun.errors import ArgumentError, UnsupportedModelError, choices
from forerun.model.layers import is_quantised

STYLES = ("llama", "mistral", "qwen2", "qwen3")
"""These ``model_type`` decoders have layers of ``self_attn`` and a gated ``mlp`` behind RMS norms.
"""
WIDTHS = ("hidden_size", "intermediate_size", "num_key_value_heads")
"""These keys of their configurations may become smaller, besides layers."""


@torch.no_grad()
def shrink(model: Any, options: Mapping[str, Any]) -> Any:
    """Return a causal LM in float32 on the CPU with a part of `model`'s weights.

    `options`: ``layers``, how many (evenly spaced, first and last included) or which, from 0; and
    keys of `WIDTHS`. ArgumentError for other options or sizes, UnsupportedModelError for other
    architectures than `STYLES`, and quantised ones.
    """
    former = model.config
    if former.model_type not in STYLES:
        raise UnsupportedModelError(
            f"{former.model_type} cannot be shrunk; {', '.join(STYLES)} can. Name a draft model instead: --draft"
        )
    if is_quantised(model):
        raise UnsupportedModelError("a quantised target cannot be shrunk; name its unquantised checkpoint as target")
    layers, config = _check_options(options, former), copy.deepcopy(former)
    state = {name: value.detach().float().cpu() for name, value in model.state_dict().items()}
    state = _of_layers(state, layers)
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [former.layer_types[layer] for layer in layers]
    head = config.head_dim = getattr(former, "head_dim", None) or former.hidden_size // former.num_attention_heads
    for layer in range(len(layers)):
        if "intermediate_size" in options:
            _keep_neurons(state, f"model.layers.{layer}.mlp.", options["intermediate_size"])
        if "num_key_value_heads" in options:
            queries = former.num_attention_heads // former.num_key_value_heads
            _keep_heads(state, f"model.layers.{layer}.self_attn.", options["num_key_value_heads"], queries, head)
            config.num_attention_heads = queries * options["num_key_value_heads"]
    if "hidden_size" in options:
        _keep_dimensions(state, options["hidden_size"])
    for name in WIDTHS:
        setattr(config, name, options.get(name, getattr(config, name)))
    with torch.random.fork_rng(devices=[]):
        made = type(model)(config).float()
    made.load_state_dict(state)
    made.generation_config = copy.deepcopy(model.generation_config)
    return made.eval()


def space_evenly(count: int, layers: int) -> list[int]:
    """Return `count` of so many layers, from 0, evenly spaced; the last one too, where there are
    two.
    """
    return [round(index * (layers - 1) / max(1, count - 1)) for index in range(count)]


def _check_options(options: Mapping[str, Any], config: Any) -> list[int]:
    """Return the layers; ArgumentError, with what is allowed, for options that do not fit."""
    known = ("layers", *WIDTHS)
    for name in options:
        if name not in known:
            hint = choices(name, known, "draft.options has")
            raise ArgumentError(f"a target cannot be shrunk by {name!r}.{hint}")
    most = {"layers": config.num_hidden_layers} | {name: getattr(config, name) for name in WIDTHS}
    chosen = options.get("layers", config.num_hidden_layers)
    listed = isinstance(chosen, Sequence) and not isinstance(chosen, str)
    for name, value in options.items():
        if listed and name == "layers":
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most[name]:
            raise ArgumentError(f"draft.options.{name} must be 1 to {most[name]}, as the target has, got {value!r}")
    if not listed:
        return space_evenly(chosen, config.num_hidden_layers)
    if not chosen or list(chosen) != sorted(set(chosen) & set(range(config.num_hidden_layers))):
        last = config.num_hidden_layers - 1
        raise ArgumentError(f"draft.options.layers must be layers of the target, 0 to {last}, rising; got {chosen}")
    return list(chosen)


State = dict[str, Tensor]


def _of_layers(state: State, layers: Sequence[int]) -> State:
    """Return the weights of some layers, numbered anew, and all that belong to none."""
    prefix, found = "model.layers.", State()
    for name, value in state.items():
        number, _, rest = name.removeprefix(prefix).partition(".")
        if not name.startswith(prefix):
            found[name] = value
        elif int(number) in layers:
            found[f"{prefix}{layers.index(int(number))}.{rest}"] = value
    return found


def _strongest(scores: Tensor, count: int) -> Tensor:
    """Return the indices (count,) of the largest scores (n,), rising; of equals the first."""
    return scores.argsort(descending=True, stable=True)[:count].sort().values


def _keep_neurons(state: State, mlp: str, count: int) -> None:
    """Keep the neurons of one MLP whose input and output weights are longest, multiplied."""
    gate, up, down = (state[f"{mlp}{name}.weight"] for name in ("gate_proj", "up_proj", "down_proj"))
    kept = _strongest(gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0), count)
    for name in ("gate_proj", "up_proj"):
        _select(state, f"{mlp}{name}", kept, 0)
    _select(state, f"{mlp}down_proj", kept, 1, bias=False)


def _keep_heads(state: State, attention: str, count: int, queries: int, size: int) -> None:
    """Keep the key-value heads of one attention, with their queries, whose values and outputs are
    longest, multiplied.
    """
    value, output = (state[f"{attention}{name}.weight"] for name in ("v_proj", "o_proj"))
    written = output.view(len(output), -1, queries * size).norm(dim=(0, 2))
    kept = _strongest(value.view(-1, size, value.shape[1]).norm(dim=(1, 2)) * written, count)
    places = (kept.unsqueeze(1) * size + torch.arange(size)).flatten()
    wide = (kept.unsqueeze(1) * queries * size + torch.arange(queries * size)).flatten()
    _select(state, f"{attention}q_proj", wide, 0)
    _select(state, f"{attention}k_proj", places, 0)
    _select(state, f"{attention}v_proj", places, 0)
    _select(state, f"{attention}o_proj", wide, 1, bias=False)


WRITERS, READERS = ("o_proj", "down_proj"), ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""These matrices write into the residual stream, and read from it."""


def _keep_dimensions(state: State, count: int) -> None:
    """Keep the dimensions of the residual stream into which embedding and layers write most.

    A norm divides by the mean square of what is left, for which its weights make up.
    """
    parts = {name: name.split(".")[-2] for name in state}
    embedding = state["model.embed_tokens.weight"]
    scores = embedding.square().mean(0)
    for name, part in parts.items():
        if part in WRITERS and name.endswith(".weight"):
            scores = scores + state[name].square().sum(1)
    kept = _strongest(scores, count)
    scale = (scores[kept].sum() / scores.sum() * len(scores) / count).sqrt()
    for name, part in parts.items():
        if part in (*READERS, "embed_tokens", "lm_head") and name.endswith(".weight"):
            state[name] = state[name][:, kept]
        elif part in WRITERS:
            state[name] = state[name][kept]
        elif part in ("norm", "input_layernorm", "post_attention_layernorm"):
            state[name] = state[name][kept] * scale


def _select(state: State, matrix: str, kept: Tensor, axis: int, *, bias: bool = True) -> None:
    """Keep rows (axis 0) or columns of a matrix; a bias goes with the rows."""
    state[f"{matrix}.weight"] = state[f"{matrix}.weight"].index_select(axis, kept)
    if bias and f"{matrix}.bias" in state:
        state[f"{matrix}.bias"] = state[f"{matrix}.bias"][kept]
